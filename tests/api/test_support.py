"""What the kernels cover, asked on CPU tensors: the device itself is the last thing to be named."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

import pageweaver_sglang as pw
from pageweaver_sglang.cuda import support
from pageweaver_sglang.cuda.support import CallKind, engine_on, gpu_problem, unsupported_reason

KV_HEADS, TOKENS = 4, 6


def call(**changes):
    arguments = {
        "q": torch.zeros(TOKENS, 64, 128, dtype=torch.bfloat16),
        "k_cache": torch.zeros(256, KV_HEADS, 128).to(torch.float8_e4m3fn),
        "v_cache": torch.zeros(256, KV_HEADS, 128).to(torch.float8_e4m3fn),
        "topk_idx": torch.zeros(KV_HEADS, TOKENS, 16, dtype=torch.int32),
        "page_size": 128,
    } | changes
    positional = [arguments.pop(name) for name in ("q", "k_cache", "v_cache", "topk_idx")]
    return unsupported_reason(*positional, **arguments)


def cache(*shape, dtype=torch.float8_e4m3fn):
    return torch.zeros(*shape).to(dtype)


def q(*shape, dtype=torch.bfloat16):
    return torch.zeros(*shape, dtype=dtype)


ON_A_GPU = "q must be on a CUDA device, got cpu"


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"pool_page_size": 128},
        {"sm_scale": 0.05, "k_scale": torch.tensor(0.5)},
        {"pool_page_size": 256},
        {"topk_idx": torch.zeros(KV_HEADS, TOKENS, 1, dtype=torch.int32)},
        # A view of the fused projection of a server, and of a fused cache.
        {"q": q(TOKENS, 9856)[:, :8192].view(TOKENS, 64, 128)},
        {"k_cache": cache(256, 2 * KV_HEADS, 128)[:, ::2]},
        {"q": q(0, 64, 128), "topk_idx": torch.zeros(KV_HEADS, 0, 16, dtype=torch.int32)},
        # Tensor parallelism of 8 and more splits the query heads that share a KV head.
        {"q": q(TOKENS, 32, 128)},
        {"q": q(TOKENS, 12, 128)},
        {"q": q(TOKENS, 4, 128)},
    ],
)
def test_covered_calls(changes):
    assert call(**changes) == ON_A_GPU


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"sink": torch.zeros(64)}, "sink must be None"),
        ({"loc_mapping": torch.zeros(4)}, "loc_mapping must be None"),
        ({"q_scale": 1.0}, "q_scale must be None"),
        ({"q": q(TOKENS, 64, 128, dtype=torch.float16)}, "q must be bfloat16, got float16"),
        ({"q": q(TOKENS, 128)}, "q must have 3 dimensions, got 2"),
        ({"q": q(TOKENS, 64, 64)}, "k_cache must have q's head_dim 64, got 128"),
        ({"q": q(TOKENS, 68, 128)}, "q must have 1 to 16 query heads per KV head, got 68 for 4"),
        ({"q": q(TOKENS, 64, 256)[..., ::2]}, "q must be contiguous along head_dim, got stride 2"),
        ({"q": q(TOKENS, 64 * 132).view(TOKENS, 64, 132)[..., :128]}, "q must have strides that are multiples of 8"),
        ({"q": q(TOKENS, 8196)[:, :8192].view(TOKENS, 64, 128)}, "q must have strides that are multiples of 8"),
        ({"q": q(TOKENS * 8192 + 4)[4:].view(TOKENS, 64, 128)}, "q must begin at a multiple of 16 bytes"),
        (
            {"k_cache": cache(256, KV_HEADS, 128, dtype=torch.float16)},
            "k_cache must be float8_e4m3fn or bfloat16, got float16",
        ),
        (
            {"k_cache": cache(256, KV_HEADS, 128, dtype=torch.bfloat16)},
            "v_cache must be bfloat16 like k_cache, got float8_e4m3fn",
        ),
        (
            {"v_cache": cache(256, KV_HEADS, 128, dtype=torch.float8_e5m2)},
            "v_cache must be float8_e4m3fn or bfloat16, got float8_e5m2",
        ),
        (
            {"v_cache": cache(128, KV_HEADS, 128)},
            r"v_cache must have the shape of k_cache [256, 4, 128], got [128, 4, 128]",
        ),
        ({"k_cache": cache(256, KV_HEADS, 136)[..., :128]}, "k_cache must have strides that are multiples of 16"),
        (
            {"v_cache": cache(256 * 512 + 8)[8:].view(256, KV_HEADS, 128)},
            "v_cache must begin at a multiple of 16 bytes",
        ),
        (
            {"k_cache": cache(200, KV_HEADS, 128), "v_cache": cache(200, KV_HEADS, 128)},
            "k_cache must have a multiple of 128 slots, got 200",
        ),
        (
            {"k_cache": cache(0, KV_HEADS, 128), "v_cache": cache(0, KV_HEADS, 128)},
            "k_cache must have at least one page",
        ),
        ({"sm_scale": 0.0}, "sm_scale must be at least 1e-06, got 0.0"),
        ({"sm_scale": -0.1}, "sm_scale must be at least 1e-06, got -0.1"),
        ({"k_scale": 0.0}, "k_scale must be at least 1e-06, got 0.0"),
        ({"k_scale": torch.tensor([-2.0])}, "k_scale must be at least 1e-06, got -2.0"),
        ({"page_size": 32}, "page_size must be 64 or 128, got 32"),
        ({"pool_page_size": 64}, "pool_page_size must be a multiple of 128, got 64"),
        ({"pool_page_size": 1}, "pool_page_size must be a multiple of 128, got 1"),
        (
            {"topk_idx": torch.zeros(KV_HEADS, TOKENS, 17, dtype=torch.int32)},
            "topk_idx must have 1 to 16 pages per query, got 17",
        ),
        ({"topk_idx": torch.zeros(KV_HEADS, TOKENS, 16, dtype=torch.int64)}, "topk_idx must be int32, got int64"),
        (
            {"topk_idx": torch.zeros(KV_HEADS, 16, TOKENS, dtype=torch.int32).transpose(1, 2)},
            "topk_idx must be contiguous along k",
        ),
    ],
)
def test_calls_that_are_not_covered(changes, reason):
    assert call(**changes).startswith(reason)


@pytest.fixture
def on_gpu(monkeypatch):
    """Makes the call's tensors pass for those of a GPU."""

    def pretend(capability):
        monkeypatch.setattr(support, "capability_of", lambda device: capability)
        monkeypatch.setattr(torch.Tensor, "is_cuda", property(lambda tensor: True))

    return pretend


BF16 = cache(256, KV_HEADS, 128, dtype=torch.bfloat16)
NOT_UNION8S_CALLS = [
    {"k_cache": BF16, "v_cache": BF16},
    {"page_size": 64, "pool_page_size": 64},
    {"page_size": 64, "k_cache": cache(192, KV_HEADS, 128), "v_cache": cache(192, KV_HEADS, 128)},
    {"q": q(TOKENS, 64, 64), "k_cache": cache(256, KV_HEADS, 64), "v_cache": cache(256, KV_HEADS, 64)},
]


EVERY_ENGINES_CALLS = [{}, {"q": q(TOKENS, 4, 128)}, {"q": q(TOKENS, 20, 128)}]


@pytest.mark.parametrize(
    ("changes", "by_union8_too"),
    [*((one, True) for one in EVERY_ENGINES_CALLS), *((one, False) for one in NOT_UNION8S_CALLS)],
)
def test_what_portable_covers(on_gpu, changes, by_union8_too):
    for capability, engine in (((9, 0), "portable"), ((8, 0), "stream"), ((12, 0), "union8"), ((10, 0), "portable")):
        on_gpu(capability)
        assert call(engine=engine, **changes) is None
    on_gpu((9, 0))
    assert call(engine="stream", **changes) is None
    assert (call(engine="union8", **changes) is None) == by_union8_too


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"k_cache": BF16, "v_cache": BF16}, "k_cache must be float8_e4m3fn, got bfloat16"),
        ({"page_size": 64}, "page_size must be 128, got 64"),
        (NOT_UNION8S_CALLS[-1], "q must have head_dim 128, got 64"),
    ],
)
def test_what_the_papers_kernel_does_not_cover_is_sglangs(on_gpu, changes, reason):
    on_gpu((9, 0))
    assert call(engine="union8", **changes) == reason


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"q": q(TOKENS, 68, 128)}, "q must have 1 to 16 query heads per KV head, got 68 for 4"),
        ({"q": q(TOKENS, 63, 128)}, "q must have 1 to 16 query heads per KV head, got 63 for 4"),
        (
            {"k_cache": cache(256, 0, 128), "v_cache": cache(256, 0, 128)},
            "q must have 1 to 16 query heads per KV head, got 64 for 0",
        ),
        ({"q": q(TOKENS, 64, 64)}, "k_cache must have q's head_dim 64, got 128"),
        ({"q": q(TOKENS, 64, 96)}, "q must have head_dim 64 or 128, got 96"),
        ({"page_size": 32}, "page_size must be 64 or 128, got 32"),
        ({"page_size": 128, "pool_page_size": 64}, "pool_page_size must be a multiple of 128, got 64"),
        ({"k_cache": BF16.half(), "v_cache": BF16.half()}, "k_cache must be float8_e4m3fn or bfloat16, got float16"),
        ({"v_cache": BF16}, "v_cache must be float8_e4m3fn like k_cache, got bfloat16"),
    ],
)
def test_what_portable_does_not_cover(on_gpu, changes, reason):
    on_gpu((8, 9))
    assert call(**changes) == reason


@pytest.mark.parametrize(
    ("capability", "asked", "engine"),
    [
        ((9, 0), "stream", "stream"),
        ((9, 0), "union8", "union8"),
        ((9, 0), "portable", "portable"),
        ((8, 0), "stream", "portable"),
        ((8, 9), "union8", "portable"),
        ((11, 0), "stream", "portable"),
        ((12, 1), "stream", "portable"),
        ((10, 0), "stream", None),
        ((10, 3), "union8", None),
        ((10, 3), "portable", "portable"),
        ((7, 5), "stream", None),
        ((7, 5), "portable", None),
    ],
)
def test_which_engine_a_gpu_gets(on_gpu, capability, asked, engine):
    assert engine_on(asked, capability) == engine
    problem = gpu_problem(asked, capability)
    assert (problem is None) == (engine is not None)
    on_gpu(capability)
    assert call(engine=asked) == (None if engine else f"q is on a GPU that {problem}")
    if engine is None:
        assert "compute capability {}.{}, ".format(*capability) in problem


@pytest.mark.parametrize(
    ("kind", "by_stream", "by_union8", "by_portable"),
    [
        (CallKind(), "stream", "union8", "portable"),
        (CallKind(torch.float8_e4m3fn, 128, 128), "stream", "union8", "portable"),
        (CallKind(torch.bfloat16), "stream", None, "portable"),
        (CallKind(torch.bfloat16, 128, 128), "stream", None, "portable"),
        (CallKind(torch.bfloat16, 64, 128), "portable", None, "portable"),
        (CallKind(torch.bfloat16, 128, 64), "portable", None, "portable"),
        (CallKind(torch.float8_e4m3fn, 64, 128), "portable", None, "portable"),
        (CallKind(torch.float8_e4m3fn, 128, 64), "portable", None, "portable"),
        (CallKind(torch.float16, 128, 128), None, None, None),
        (CallKind(torch.float8_e4m3fn, 128, 32), None, None, None),
        (CallKind(torch.bfloat16, 96, 128), None, None, None),
    ],
)
def test_which_engine_a_call_gets_on_hopper(kind, by_stream, by_union8, by_portable):
    engines = [engine_on(asked, (9, 0), kind) for asked in ("stream", "union8", "portable")]
    assert engines == [by_stream, by_union8, by_portable]
    covered = "portable" if by_portable else None
    assert [engine_on(asked, (8, 9), kind) for asked in ("stream", "union8")] == [covered, covered]
    assert engine_on("stream", (10, 0), kind) is None


@pytest.mark.parametrize(
    ("engine", "cache_dtype", "tiles", "in_16_bits"),
    [
        ("stream", torch.float8_e4m3fn, True, False),
        ("stream", torch.bfloat16, False, True),
        ("union8", torch.float8_e4m3fn, False, False),
        ("portable", torch.float8_e4m3fn, False, True),
        ("portable", torch.bfloat16, False, True),
    ],
)
def test_what_an_engine_makes_of_a_cache(engine, cache_dtype, tiles, in_16_bits):
    assert support.reads_value_tiles(engine, cache_dtype) == tiles
    assert support.computes_in_16_bits(engine, cache_dtype) == in_16_bits


def test_kinds():
    fp8 = cache(256, KV_HEADS, 128)
    assert support.call_kind(q(TOKENS, 64, 128), fp8, 128) == CallKind(torch.float8_e4m3fn, 128, 128)
    assert support.call_kind(q(TOKENS, 12, 64), BF16, 64) == CallKind(torch.bfloat16, 64, 64)
    assert str(CallKind(torch.bfloat16, page_size=64)) == "KV cache bfloat16, page size 64"


@pytest.mark.parametrize(
    ("asked", "k_cache", "page_size", "size"),
    [
        ("stream", cache(256, KV_HEADS, 128), 128, 8),
        ("stream", BF16, 128, 8),
        ("stream", BF16, 64, 4),
        ("portable", BF16, 128, 4),
        ("stream", cache(256, KV_HEADS, 128), 64, 4),
        ("union8", BF16, 128, 8),
        ("portable", cache(256, KV_HEADS, 128), 128, 4),
    ],
)
def test_queries_per_union_are_those_of_the_engine_that_serves(asked, k_cache, page_size, size):
    """What the public function makes a plan for, and what a workspace of the caller's must have."""
    queries = q(TOKENS, 64, 128)
    config = pw.Config(engine=asked)
    assert support.call_grouping(config, queries, k_cache, page_size) == (size, (size,), size)
    assert support.call_group_size(config, queries, k_cache, page_size) == size
    engine = engine_on(asked, (9, 0), support.call_kind(queries, k_cache, page_size)) or asked
    assert support.union_group_sizes(engine, 16) == (size,)


@pytest.mark.parametrize("ratio", range(1, 17))
def test_stream_takes_two_sizes_of_unions_for_up_to_8_heads(ratio):
    """The larger one where groups of 8 outnumber the multiprocessors, so that none of them gets nothing to do."""
    few = ratio <= 8
    assert support.union_group_sizes("stream", ratio) == ((8, 16) if few else (8,))
    assert support.union_group_sizes("union8", ratio) == (8,)
    for rows, union in ((1, 8), (800, 8), (801, 16), (10**6, 16)):
        found = support.grouping("stream", ratio, rows, 100)
        assert (found.order, found.union) == (8, union if few else 8)
        assert support.grouping("union8", ratio, rows, 100).union == 8


@pytest.mark.parametrize(("tokens", "kv_heads", "size"), [(1056, 1, 8), (1057, 1, 16), (264, 4, 8), (265, 4, 16)])
def test_rows_are_those_of_all_kv_heads(tokens, kv_heads, size):
    """Of 132 multiprocessors, whatever calls without a GPU are looked at for."""
    queries, keys = q(tokens, 8 * kv_heads, 128), cache(256, kv_heads, 128)
    assert support.call_group_size(pw.Config(), queries, keys, 128) == size


def test_multiprocessors_are_the_gpus(monkeypatch):
    asked = []
    properties = SimpleNamespace(multi_processor_count=78)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: asked.append(device) or properties)
    assert support.processors_of(torch.device("cuda", 3)) == 78
    assert asked == [torch.device("cuda", 3)]
    assert support.processors_of(torch.device("cpu")) == 132
