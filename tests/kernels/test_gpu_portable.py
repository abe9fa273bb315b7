"""The portable engine on a GPU, any from compute capability 8.0 on, through the public call against float64."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
import torch
from gpu_support import HAS_CUDA, garbage_outside, same_bits
from portable_limits import MOST_NRMS

import pageweaver_sglang as pw
from pageweaver_sglang.bench.accuracy import exact_rows, nrms, sample_rows
from pageweaver_sglang.bench.inputs import make_inputs
from pageweaver_sglang.cuda import support
from tests.generators import CASE_NAMES, Case, make_case, unmap_pages

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not HAS_CUDA, reason="needs a CUDA device")]

DATA = Path(__file__).parents[1] / "data"
FP8, BF16 = torch.float8_e4m3fn, torch.bfloat16
CONFIGS = {
    "original": pw.Config(mode="union8", engine="portable"),
    "w64": pw.Config(mode="pageweaver", engine="portable"),
    "w128": pw.Config(mode="pageweaver", engine="portable", window=128, guard="none"),
}


def attend(case: Case, config: str = "w64", **options) -> torch.Tensor:
    """The public call into a poisoned output."""
    out = torch.full(case.q.shape, float("nan"), dtype=case.q.dtype, device="cuda")
    options = {**case.keywords(), **options}
    assert pw.sparse_prefill(*case.args(), config=CONFIGS[config], out=out, **options) is out
    return out


def exact(case: Case, **options) -> torch.Tensor:
    return pw.reference.sparse_prefill(case.q.double(), *case.args()[1:], **{**case.keywords(), **options})


def assert_right(case: Case, out: torch.Tensor, **options) -> None:
    expected = exact(case, **options)
    empty = (expected == 0).all(dim=(1, 2))
    assert nrms(out, expected) <= MOST_NRMS[case.k_cache.dtype]
    assert bool((out[empty] == 0).all())


@pytest.fixture(params=["native", "bits"])
def conversion(request, monkeypatch):
    """How FP8 becomes FP16: by the instruction, where the GPU has it, or by moving bits as on older ones."""
    portable = pytest.importorskip("pageweaver_sglang.cuda.portable")
    if request.param == "bits":
        monkeypatch.setattr(portable, "NATIVE_FP8", (99, 0))
    elif torch.cuda.get_device_capability() < portable.NATIVE_FP8:
        pytest.skip("this GPU has no such instruction")


@pytest.mark.parametrize("kv_heads", [1, 3, 8])
@pytest.mark.parametrize("ratio", [1, 4, 8, 16])
@pytest.mark.parametrize("dtype", [FP8, BF16], ids=["fp8", "bf16"])
@pytest.mark.parametrize("page_size", [64, 128])
def test_every_layout(page_size, dtype, ratio, kv_heads):
    requests = ((1, 0), (7, 120), (127, 0), (129, 1000), (64, 3000), (33, 5))
    shape = {"page_size": page_size, "cache_dtype": dtype, "ratio": ratio, "kv_heads": kv_heads}
    case = make_case("packed", seed=kv_heads, device="cuda", requests=requests, padding=5, **shape)
    assert_right(case, attend(case))


@pytest.mark.parametrize("ratio", [2, 3, 5, 6, 7, 9, 12, 15])
def test_ratios_that_fill_no_tile(ratio):
    case = make_case("holes", seed=ratio, device="cuda", ratio=ratio, kv_heads=2)
    assert_right(case, attend(case))


@pytest.mark.parametrize("dtype", [FP8, BF16], ids=["fp8", "bf16"])
@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("k", [1, 3, 16])
def test_head_dims_and_picks(head_dim, k, dtype):
    case = make_case("few_picks", seed=k, device="cuda", k=k, head_dim=head_dim, cache_dtype=dtype)
    assert_right(case, attend(case))


@pytest.mark.parametrize("dtype", [FP8, BF16], ids=["fp8", "bf16"])
@pytest.mark.parametrize("name", CASE_NAMES)
def test_every_case(name, dtype):
    """Wherever it is grouped, a row meets its own pages in ascending order, and other rows' pages add exact zeros."""
    case = garbage_outside(make_case(name, seed=1, device="cuda", cache_dtype=dtype))
    original = attend(case, "original")
    assert_right(case, original)
    for config in ("w64", "w128"):
        assert same_bits(attend(case, config), original)


@pytest.mark.parametrize("name", ["packed", "holes", "scaled"])
def test_conversions_of_fp8(conversion, name):
    case = garbage_outside(make_case(name, seed=5, device="cuda"))
    assert_right(case, attend(case))


def test_every_e4m3_number(conversion):
    """The output of a query that sees one token is that token's value, NaN included."""
    case = make_case("single", device="cuda", k=1)
    for half in torch.arange(256, dtype=torch.uint8, device="cuda").view(2, 128).view(FP8):
        v_cache = case.v_cache.clone()
        v_cache[case.req_to_token[case.slot_ids[0], 0].long()] = half
        out = attend(dataclasses.replace(case, v_cache=v_cache)).float()
        assert torch.equal(out.nan_to_num(999), half.float().expand_as(out).nan_to_num(999))


@pytest.mark.parametrize("dtype", [FP8, BF16], ids=["fp8", "bf16"])
@pytest.mark.parametrize("page_size", [64, 128])
def test_tails(page_size, dtype):
    for tail in (1, 2, page_size // 2 - 1, page_size // 2, page_size // 2 + 1, page_size - 1, 0):
        case = make_case("tail", seed=tail, device="cuda", tail=tail, page_size=page_size, cache_dtype=dtype)
        case = garbage_outside(case)
        assert_right(case, attend(case))


@pytest.mark.parametrize("dtype", [FP8, BF16], ids=["fp8", "bf16"])
@pytest.mark.parametrize("page_size", [64, 128])
def test_unmapped_pages_add_nothing_and_the_pools_first_page_does_not_matter(page_size, dtype):
    requests = ((140, 3500), (37, 900))
    mapped = make_case("packed", seed=4, device="cuda", requests=requests, page_size=page_size, cache_dtype=dtype)
    case, sound = unmap_pages(mapped)
    for config in CONFIGS:
        out = attend(case, config)
        assert_right(sound, out)
        assert same_bits(out, attend(sound, config))


@pytest.mark.parametrize("dtype", [FP8, BF16], ids=["fp8", "bf16"])
def test_a_64k_workload(dtype):
    inputs = make_inputs(pw.load_workload(DATA / "ctx64k_a.npz"), "cuda", seed=1)
    inputs = dataclasses.replace(inputs, k_cache=inputs.k_cache.to(dtype), v_cache=inputs.v_cache.to(dtype))
    outs = [pw.sparse_prefill(**inputs.kwargs(), config=config) for config in CONFIGS.values()]
    assert all(same_bits(out, outs[0]) for out in outs)
    rows = sample_rows(inputs.q.shape[0], 256).cuda()
    wanted = exact_rows(dataclasses.replace(inputs, q=inputs.q.double()), rows)
    assert nrms(outs[0][rows], wanted) <= MOST_NRMS[dtype]


def test_a_cache_past_32_bit_offsets():
    """The request's pages lie at the end of a pool of more than 2**31 elements."""
    case = make_case("heads4", seed=6, device="cuda", kv_heads=8)
    slots, (kv_heads, dim) = case.k_cache.shape[0], case.k_cache.shape[1:]
    more = 2**31 // (kv_heads * dim) // 128 * 128 + 128
    if torch.cuda.mem_get_info()[0] < 3 * (more + slots) * kv_heads * dim:
        pytest.skip("not enough GPU memory")
    caches = {}
    for name in ("k_cache", "v_cache"):
        caches[name] = torch.zeros(more + slots, kv_heads, dim, dtype=torch.uint8, device="cuda").view(FP8)
        caches[name][more:].view(torch.uint8).copy_(getattr(case, name).view(torch.uint8))
    far = dataclasses.replace(case, req_to_token=case.req_to_token + more, **caches)
    assert same_bits(attend(far), attend(case))


@pytest.mark.parametrize("dtype", [FP8, BF16], ids=["fp8", "bf16"])
@pytest.mark.parametrize("kind", ["float", "tensor"])
def test_scales(kind, dtype):
    case = make_case("prefix", seed=8, device="cuda", cache_dtype=dtype)
    scales = {"k_scale": 0.37, "v_scale": 2.5}
    given = scales
    if kind == "tensor":
        given = {name: torch.tensor([value], device="cuda") for name, value in scales.items()}
    assert_right(case, attend(case, **given), **scales)
    half = {"sm_scale": 0.5 * 128**-0.5}
    assert_right(case, attend(case, **given, **half), **scales, **half)


@pytest.mark.parametrize("factor", [1e-3, 4.0, 16.0])
def test_sharp_and_flat_logits(factor):
    case = make_case("packed", seed=6, device="cuda")
    case = dataclasses.replace(case, q=(case.q.float() * factor).to(BF16))
    assert_right(case, attend(case))


def test_extreme_values_stay_finite():
    case = make_case("packed", seed=7, device="cuda")
    k_cache = torch.full_like(case.k_cache.float(), 448.0).to(FP8)
    for value in (3e38, -3e38, 1e-38, 0.0):
        changed = dataclasses.replace(case, q=torch.full_like(case.q, value), k_cache=k_cache)
        assert bool(attend(changed).isfinite().all())
    case = make_case("few_picks", seed=7, device="cuda")
    sharp = dataclasses.replace(case, q=case.q * 1e36)  # every row has one winner
    assert_right(sharp, attend(sharp))


def test_strided_tensors():
    """q is a view of a fused projection, K and V are halves of one cache."""
    case = make_case("heads4", seed=10, device="cuda")
    tokens, heads, _ = case.q.shape
    fused = torch.full((tokens, 9856), float("nan"), dtype=BF16, device="cuda")
    q = fused[:, : heads * 128].view(tokens, heads, 128)
    q.copy_(case.q)
    slots, kv_heads, _ = case.k_cache.shape
    both = torch.zeros(slots, kv_heads, 2, 128, dtype=torch.uint8, device="cuda")
    both[:, :, 0], both[:, :, 1] = case.k_cache.view(torch.uint8), case.v_cache.view(torch.uint8)
    k_cache, v_cache = both.view(FP8).unbind(2)
    strided = dataclasses.replace(case, q=q, k_cache=k_cache, v_cache=v_cache)
    assert same_bits(attend(strided), attend(case))


def test_repeats_are_identical_beside_other_work():
    case = make_case("heads4", seed=3, device="cuda")
    first = attend(case)
    noise, other = torch.randn(2048, 2048, device="cuda"), torch.cuda.Stream()
    for _ in range(50):
        with torch.cuda.stream(other):
            noise = noise @ noise * 1e-3
        assert same_bits(attend(case), first)


def test_a_graph_replays_with_other_contents_and_allocates_nothing():
    cases = [make_case("packed", seed=seed, device="cuda") for seed in (11, 12)]
    tokens = max(len(case.q) for case in cases)
    sizes = {"kv_heads": 1, "topk": 16, "q_heads": 16, "device": "cuda"}
    workspace = pw.Workspace(tokens, 6, group_size=4, **sizes)
    expected = [attend(case) for case in cases]
    pool = max(case.k_cache.shape[0] for case in cases)
    positions = max(case.req_to_token.shape[1] for case in cases)

    def padded(case: Case) -> Case:
        """In buffers of the largest size; the rows behind the last request are padding."""
        more = tokens - len(case.q)
        grown = {
            "q": torch.nn.functional.pad(case.q, (0, 0, 0, 0, 0, more)),
            "topk_idx": torch.nn.functional.pad(case.topk_idx, (0, 0, 0, more)),
            "req_to_token": torch.nn.functional.pad(case.req_to_token, (0, positions - case.req_to_token.shape[1])),
        }
        for name in ("k_cache", "v_cache"):
            cache = torch.zeros(pool, 1, 128, dtype=torch.uint8, device="cuda")
            cache[: case.k_cache.shape[0]] = getattr(case, name).view(torch.uint8)
            grown[name] = cache.view(FP8)
        return dataclasses.replace(case, **grown)

    grown = [padded(case) for case in cases]
    buffers = dataclasses.replace(grown[0], **{n: t.clone() for n, t in vars(grown[0]).items() if torch.is_tensor(t)})

    def call() -> torch.Tensor:
        return pw.sparse_prefill(*buffers.args(), config=CONFIGS["w64"], workspace=workspace)

    call()
    torch.cuda.synchronize()
    before = torch.cuda.memory_stats()["allocation.all.allocated"]
    torch.cuda.set_sync_debug_mode("error")
    try:
        out = call()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert torch.cuda.memory_stats()["allocation.all.allocated"] == before
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = call()
    for case, own, wanted in zip(grown, cases, expected, strict=True):
        for name, tensor in vars(buffers).items():
            if torch.is_tensor(tensor):
                source = getattr(case, name)
                if tensor.dtype == FP8:
                    tensor, source = tensor.view(torch.uint8), source.view(torch.uint8)
                tensor.copy_(source)
        out.fill_(float("nan"))
        graph.replay()
        assert same_bits(out[: len(own.q)], wanted)
        assert bool((out[len(own.q) :] == 0).all())


def test_what_is_not_covered_is_refused_by_name():
    case = make_case("prefix", seed=15, device="cuda")
    args = list(case.args())
    with pytest.raises(pw.UnsupportedError, match="q must be bfloat16, got float16"):
        pw.sparse_prefill(args[0].half(), *args[1:], config=CONFIGS["w64"])
    with pytest.raises(pw.UnsupportedError, match="page_size must be 64 or 128, got 32"):
        pw.sparse_prefill(*args, config=CONFIGS["w64"], page_size=32)


def test_the_engine_that_other_gpus_get(monkeypatch):
    """The default settings on a GPU that is none of those with kernels of their own."""
    case = make_case("heads4", seed=16, device="cuda")
    expected = attend(case)
    monkeypatch.setattr(support, "capability_of", lambda device: (8, 9))
    assert same_bits(pw.sparse_prefill(*case.args()), expected)


# What `stream` means on Hopper for calls that it does not cover itself -----------------------------------------------

ON_HOPPER = pytest.mark.skipif(HAS_CUDA and torch.cuda.get_device_capability() != (9, 0), reason="needs a Hopper GPU")
ONLY_PORTABLE = {
    "pages of 64": {"page_size": 64},
    "heads of 64": {"head_dim": 64},
    "BF16 cache, pages of 64": {"cache_dtype": BF16, "page_size": 64},
    "BF16 cache, heads of 64, 8 of them": {"cache_dtype": BF16, "head_dim": 64, "ratio": 8},
}


@ON_HOPPER
@pytest.mark.parametrize("settings", [{}, {"mode": "pageweaver"}, {"mode": "union8", "precision": "high"}], ids=str)
@pytest.mark.parametrize("shape", ONLY_PORTABLE)
def test_the_default_engine_takes_what_portable_alone_covers(shape, settings):
    case = make_case("heads4", seed=17, device="cuda", **ONLY_PORTABLE[shape])
    config = pw.Config(**settings)
    assert config.engine == "stream"
    out = pw.sparse_prefill(*case.args(), config=config, **case.keywords())
    assert_right(case, out)
    assert same_bits(out, attend(case))
    size = support.call_group_size(pw.Config(), case.q, case.k_cache, case.page_size)
    tokens, q_heads, head_dim = case.q.shape
    sizes = {"kv_heads": 4, "topk": 16, "q_heads": q_heads, "head_dim": head_dim, "group_size": size, "device": "cuda"}
    workspace = pw.Workspace(tokens, 2, **sizes)
    held = workspace.nbytes()
    again = pw.sparse_prefill(*case.args(), config=config, workspace=workspace, **case.keywords())
    assert same_bits(again, out)
    assert workspace.nbytes() == held  # no value tiles


@ON_HOPPER
@pytest.mark.parametrize("shape", [*ONLY_PORTABLE.values(), {"cache_dtype": BF16}], ids=str)
def test_the_papers_kernel_stays_what_it_is(shape):
    case = make_case("heads4", seed=17, device="cuda", **shape)
    with pytest.raises(
        pw.UnsupportedError, match=r"must be float8_e4m3fn|page_size must be 128|must have head_dim 128"
    ):
        pw.sparse_prefill(*case.args(), config=pw.Config(engine="union8"), **case.keywords())
