"""The attention engines where their softmax, their queue and their state between calls are easiest to break.

Both engines share the arithmetic of ``kernels/attention.cuh``, so outputs are compared bit for bit between them and
between orders of queries, and with the float64 reference.
"""

from __future__ import annotations

import dataclasses
import math
from itertools import product
from pathlib import Path

import pytest
import torch
from gpu_support import HAS_CUDA, attend, halves_in_groups_of_16, plan_with_slots, poisoned_tiles, same_bits
from rounded_queries import rounded_q

import pageweaver_sglang as pw
from pageweaver_sglang.bench.accuracy import nrms
from pageweaver_sglang.bench.inputs import make_inputs
from tests.generators import Case, make_case

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not HAS_CUDA, reason="needs a CUDA device")]

DATA = Path(__file__).parents[1] / "data"
DEVICE = "cuda"
PAGE = 128
# Q and P rounded to E4M3 (half a unit of 3 mantissa bits: 6.25 % at most, 2.6 % RMS): 3.3 to 3.7 % on random values.
FP8_NRMS = 0.04
# Rows that one page decides: its probabilities are rounded alike, so nothing averages out.
ONE_ROUNDING = 0.0625


def one_request(q, k, v, topk_idx, prefix: int, *, bits_per_unit: float | None = None, seed: int = 0) -> Case:
    """A call of one request with the given contents, its pages in random order in the pool, on the device.

    ``q`` ``[tokens, q_heads, 128]``, ``k`` and ``v`` ``[prefix + tokens, kv_heads, 128]`` are float32, ``topk_idx`` is
    ``[kv_heads, tokens, k]``. ``bits_per_unit``: a product Q K of 1 is a logit of so many bits (base 2).
    """
    length = len(q)
    pages = -(-(prefix + length) // PAGE)
    random = torch.Generator().manual_seed(seed)
    physical = 1 + torch.randperm(pages + 1, generator=random)[:pages]
    table = torch.zeros(2, pages * PAGE, dtype=torch.int32)
    table[1] = (physical[:, None] * PAGE + torch.arange(PAGE)).flatten()
    caches = []
    for values in (k, v):
        cache = torch.full(((pages + 2) * PAGE, *values.shape[1:]), 448.0)
        cache[table[1, : prefix + length].long()] = values
        caches.append(cache.to(torch.float8_e4m3fn))

    def ints(*values):
        return torch.tensor(values, dtype=torch.int32)

    return Case(
        q=q.to(torch.bfloat16),
        k_cache=caches[0],
        v_cache=caches[1],
        topk_idx=topk_idx.to(torch.int32).contiguous(),
        req_to_token=table,
        slot_ids=torch.tensor([1]),
        cu_seqlens=ints(0, length),
        seq_lens=ints(prefix + length),
        prefix_lens=ints(prefix),
        k_scale=None if bits_per_unit is None else bits_per_unit * math.log(2) * 128**0.5,
    ).to(DEVICE)


def reference(case, q=None) -> torch.Tensor:
    """The exact output; float64 when ``q`` is given in its place."""
    args = case.args()
    return pw.reference.sparse_prefill(args[0] if q is None else q, *args[1:], k_scale=case.k_scale)


def agreed_output(case) -> torch.Tensor:
    """The output that both engines give in the original order and regrouped, to the bit; halves of the heads in groups
    of 16 give it too.
    """
    out = attend(case, window=None, engine="stream")
    for window, engine in ((None, "union8"), (64, "stream"), (128, "union8"), (128, "stream")):
        assert same_bits(attend(case, window=window, engine=engine), out), (window, engine)
    assert same_bits(halves_in_groups_of_16(case, window=64), out)
    assert bool(torch.isfinite(out).all())
    return out


def some_pages(tokens: int, pages: int, *, least: int, seed: int, kv_heads: int = 1) -> torch.Tensor:
    """Between ``least`` and 16 of ``pages`` (at most 16) pages for every query, ascending, -1 behind them."""
    random = torch.Generator().manual_seed(seed)
    rank = torch.rand(kv_heads, tokens, pages, generator=random).argsort(dim=2).argsort(dim=2)
    count = torch.randint(least, pages + 1, (kv_heads, tokens, 1), generator=random)
    ids = torch.arange(pages).expand_as(rank).masked_fill(rank >= count, pages).sort(dim=2).values
    return torch.nn.functional.pad(ids.masked_fill(ids == pages, -1), (0, 16 - pages), value=-1)


# ---------------------------------------------------------------- References that are raised, or just not


def staircase(step: float, signs: str, textured: bool, tokens: int = 43) -> Case:
    """Logits that rise (or fall) by ``step`` bits from page to page; with texture, by one or two bits within a page.

    Q is +-1 throughout and levels are whole numbers, so that the logits of a page without texture are exact: whatever
    ``step`` is, only P is rounded.
    """
    random = torch.Generator().manual_seed(17)
    prefix = 16 * PAGE
    seq = prefix + tokens
    sign = {"rise": torch.ones(16), "fall": -torch.ones(16), "both": 1.0 - 2.0 * (torch.arange(16) % 3 == 0)}[signs]
    q = torch.randint(0, 2, (tokens, 16, 128), generator=random).float() * 2 - 1
    q[:, :, :64] = sign[:, None]
    k = torch.zeros(seq, 1, 128)
    k[:, :, :64] = (torch.arange(seq) // PAGE - 8).float()[:, None, None]
    if textured:
        k[:, :, 64:] = torch.randn(seq, 1, 64, generator=random) * 12 / step
    v = torch.randn(seq, 1, 128, generator=random)
    ids = some_pages(tokens, 16, least=9, seed=3)
    return one_request(q, k, v, ids, prefix, bits_per_unit=step / 64)


# Four flat probabilities of 2^6 are 256; log2(1.75) bits more make 448, the last sum that raises nothing.
BOUND = math.log2(1.75)


@pytest.mark.parametrize("signs", ["rise", "fall", "both"])
@pytest.mark.parametrize("step", [0.3, 0.8, BOUND - 1e-6, BOUND, BOUND + 1e-6, 0.81, 1.0, 3.0, 10.0, 100.0, 1e3, 1e5])
def test_pages_that_rise_and_fall(step, signs):
    """Flat pages: whether a page raises the reference turns on the bound alone."""
    case = staircase(step, signs, textured=False)
    assert nrms(agreed_output(case), reference(case, case.q.double())) <= ONE_ROUNDING


@pytest.mark.parametrize("signs", ["rise", "fall", "both"])
@pytest.mark.parametrize("step", [0.5, 1.0, 3.0, 10.0])
def test_uneven_pages_that_rise_and_fall(step, signs):
    case = staircase(step, signs, textured=True)
    assert nrms(agreed_output(case), reference(case, case.q.double())) <= FP8_NRMS


@pytest.mark.parametrize("key", ["constant", "zero"])
def test_flat_rows(key):
    """All logits equal: every probability is 2^6, which E4M3 holds exactly; the output is a mean of V in BF16."""
    case = make_case("tail", seed=31, device=DEVICE, tail=77)
    k = torch.full_like(case.k_cache.float(), 0.0 if key == "zero" else -3.5).to(torch.float8_e4m3fn)
    case = dataclasses.replace(case, k_cache=k)
    assert nrms(agreed_output(case), reference(case, case.q.double())) <= 0.005


@pytest.mark.parametrize("bits", [4.0, 30.0, 5000.0])
@pytest.mark.parametrize("page", [0, 8, 15])
def test_one_huge_key(page, bits):
    """One key stands ``bits`` above (for odd heads below) the small ones, on the first, a middle or the last page."""
    random = torch.Generator().manual_seed(page)
    tokens, prefix = 37, 16 * PAGE
    direction = torch.randint(0, 2, (128,), generator=random).float() * 2 - 1
    q = direction.expand(tokens, 16, 128).clone()
    q[:, 1::2] *= -1
    # Small keys differ by a bit or so whatever the huge one is; 5000 bits leave them nothing that E4M3 could hold.
    spread = 1024 / bits / 11.3
    k = torch.randn(prefix + tokens, 1, 128, generator=random) * (spread if bits < 1000 else 0.0)
    k[page * PAGE + 61] = 8 * direction
    v = torch.randn(prefix + tokens, 1, 128, generator=random)
    case = one_request(q, k, v, torch.arange(16).expand(1, tokens, 16), prefix, bits_per_unit=bits / 1024)
    out, expected = agreed_output(case), reference(case, case.q.double())
    for heads in (slice(0, None, 2), slice(1, None, 2)):
        # Where the key decides a row, its one probability's rounding is the row's error.
        assert nrms(out[:, heads], expected[:, heads]) <= (ONE_ROUNDING if heads.start == 0 else FP8_NRMS)


@pytest.mark.parametrize("name", ["heads4", "packed", "future"])
@pytest.mark.parametrize("factor", [4.0, 16.0])
def test_sharp_logits(factor, name):
    case = make_case(name, seed=32, device=DEVICE)
    case = dataclasses.replace(case, q=(case.q.float() * factor).to(torch.bfloat16))
    assert nrms(agreed_output(case), reference(case, rounded_q(case))) <= FP8_NRMS


def test_queries_of_zero():
    """Whole queries, single heads and negative zeros among ordinary rows."""
    case = make_case("heads4", seed=33, device=DEVICE)
    q = case.q.clone()
    q[::3] = 0.0
    q[:, ::5] = -0.0
    case = dataclasses.replace(case, q=q)
    assert nrms(agreed_output(case), reference(case)) <= FP8_NRMS


@pytest.mark.parametrize("k_scale", [1e-11, 1e-6])
def test_tiny_scales(k_scale):
    """Nearly flat rows, queries of zero among them: keys behind a query's position stay masked."""
    case = make_case("tail", seed=34, device=DEVICE, tail=19)
    q = case.q.clone()
    q[::4] = 0.0
    case = dataclasses.replace(case, q=q, k_scale=k_scale)
    assert nrms(agreed_output(case), reference(case, case.q.double())) <= FP8_NRMS


@pytest.mark.parametrize("k_scale", [1e3, 1e10, 1e25, 1e37])
def test_huge_scales_stay_finite(k_scale):
    """Which key wins depends on the last bits of a product there, and no output has to be near the reference."""
    case = make_case("tail", seed=35, device=DEVICE, tail=19)
    q = case.q.clone()
    q[::4] = 0.0
    agreed_output(dataclasses.replace(case, q=q, k_scale=k_scale))


# ---------------------------------------------------------------- Who of a quad picked a page


@pytest.mark.parametrize("prefix", [14 * PAGE + 3, 15 * PAGE + 5, 15 * PAGE + 127, 16 * PAGE])
@pytest.mark.parametrize("factor", [1.0, 8.0])
def test_every_membership_of_both_quads(prefix, factor):
    """In 16 groups, each of the 16 patterns of one quad meets each of the other's; pages end within the chunk."""
    random = torch.Generator().manual_seed(prefix)
    tokens = 133
    query = torch.arange(tokens)
    page = torch.arange(16)
    pattern = torch.where((query % 8 < 4)[:, None], page, (page + query[:, None] // 8) % 16)
    picked = (pattern >> (query % 4)[:, None]) & 1 == 1
    pages = -(-(prefix + tokens) // PAGE)
    ids = page.expand(tokens, 16).masked_fill(~picked | (page >= pages), -1)[None]
    q = torch.randn(tokens, 16, 128, generator=random) * factor
    k, v = (torch.randn(prefix + tokens, 1, 128, generator=random) for _ in range(2))
    case = one_request(q, k, v, ids, prefix)
    out = agreed_output(case)
    assert nrms(out, reference(case, rounded_q(case))) <= FP8_NRMS
    assert same_bits(attend(case, window=None, group_size=4), out)
    for _ in range(3):
        order = torch.randperm(128, generator=random)
        perm = torch.cat([order, torch.arange(128, tokens)]).to(torch.int32)[None].to(DEVICE)
        for engine in ("stream", "union8"):
            assert same_bits(attend(case, perm=perm, engine=engine), out)


# ---------------------------------------------------------------- Repeats beside other work


class Call:
    """One ``sparse_prefill`` with a workspace of its own; ``run`` starts it on the current stream."""

    def __init__(self, case, **config):
        kv_heads, tokens, k = case.topk_idx.shape
        self.case, self.config = case, pw.Config(**{"mode": "pageweaver"} | config)
        self.workspace = pw.Workspace(
            tokens,
            case.prefix_lens.shape[0],
            kv_heads=kv_heads,
            topk=k,
            q_heads=case.q.shape[1],
            window=self.config.window,
            pool_pages=case.k_cache.shape[0] // PAGE,
            device=DEVICE,
        )
        self.different = torch.zeros((), dtype=torch.bool, device=DEVICE)
        self.expected = attend(case, window=None, engine="union8")
        self.workspace.out(tokens).fill_(float("nan"))

    def run(self):
        """Call, note on the device whether a bit differs, and poison the output for the next call."""
        args = self.case.args() if isinstance(self.case, Case) else tuple(self.case.kwargs().values())[:9]
        out = pw.sparse_prefill(*args, config=self.config, workspace=self.workspace)
        self.different |= (out.view(torch.int16) != self.expected.view(torch.int16)).any()
        out.fill_(float("nan"))


def run_beside_other_work(call: Call, repeats: int) -> None:
    beside = Call(make_case("heads4", seed=41, device=DEVICE))
    noise = torch.randn(2048, 2048, device=DEVICE, dtype=torch.bfloat16)
    here, other = torch.cuda.Stream(), torch.cuda.Stream()
    torch.cuda.synchronize()
    for _ in range(repeats):
        with torch.cuda.stream(other):
            noise = noise @ noise * 0.02
            beside.run()
        with torch.cuda.stream(here):
            call.run()
    torch.cuda.synchronize()
    assert not bool(call.different)
    assert not bool(beside.different)


def test_500_repeats_beside_other_work():
    run_beside_other_work(Call(make_case("heads4", seed=42, device=DEVICE, requests=((331, 2900), (270, 40)))), 500)


def test_a_larger_call_beside_other_work():
    run_beside_other_work(Call(make_inputs(pw.load_workload(DATA / "ctx8k.npz"), DEVICE, seed=2)), 20)


# ---------------------------------------------------------------- The queue


def first_queries(case: Case, tokens: int) -> Case:
    """The first ``tokens`` queries of a case of one request."""
    return dataclasses.replace(
        case,
        q=case.q[:tokens],
        topk_idx=case.topk_idx[:, :tokens].contiguous(),
        cu_seqlens=case.cu_seqlens.clamp(max=tokens),
        seq_lens=case.prefix_lens + tokens,
    )


@pytest.mark.parametrize("kv_heads", [1, 2, 4])
def test_1_to_130_groups_of_one_page(kv_heads):
    """Fewer groups than SMs, as many and more, each as short as a group can be."""
    random = torch.Generator().manual_seed(kv_heads)
    tokens, prefix = 130 * 8, 5 * PAGE
    q = torch.randn(tokens, 16 * kv_heads, 128, generator=random)
    k, v = (torch.randn(prefix + tokens, kv_heads, 128, generator=random) for _ in range(2))
    ids = torch.full((kv_heads, tokens, 16), -1)
    ids[:, :, 0] = torch.randint(0, 5, (kv_heads, 130), generator=random).repeat_interleave(8, dim=1)
    case = one_request(q, k, v, ids, prefix)
    expected = attend(case, window=None, engine="union8")
    assert nrms(expected, reference(case, rounded_q(case))) <= FP8_NRMS
    for groups in range(1, 131):
        assert same_bits(attend(first_queries(case, 8 * groups), window=None), expected[: 8 * groups]), groups
    for groups in (1, 2, 65, 130):
        assert same_bits(attend(first_queries(case, 8 * groups), engine="union8"), expected[: 8 * groups])


@pytest.mark.parametrize("kv_heads", [1, 4])
@pytest.mark.parametrize("tokens", [1, 4, 5, 8, 9, 77])
def test_few_groups_of_many_pages(tokens, kv_heads):
    case = make_case("prefix", seed=51, device=DEVICE, requests=((tokens, 9000),), kv_heads=kv_heads)
    assert nrms(agreed_output(case), reference(case, rounded_q(case))) <= FP8_NRMS


@pytest.mark.parametrize("kv_heads", [1, 2, 4])
@pytest.mark.parametrize("blind", ["first", "last", "every other", "all but one", "all"])
def test_groups_that_see_nothing(blind, kv_heads):
    """Groups without a page lie between groups with many; some list pages, but only ones behind their queries."""
    case = make_case("prefix", seed=52, device=DEVICE, requests=((1200, 4000), (136, 0)), kv_heads=kv_heads)
    groups = case.q.shape[0] // 8
    group = torch.arange(groups, device=DEVICE)
    sees_nothing = {
        "first": group < groups // 2,
        "last": group >= groups // 2,
        "every other": group % 2 == 0,
        "all but one": group != groups // 3,
        "all": group >= 0,
    }[blind].repeat_interleave(8)
    ids = case.topk_idx.masked_fill(sees_nothing[:, None], -1)
    future = sees_nothing & (torch.arange(len(sees_nothing), device=DEVICE) // 8 % 4 < 2)
    future &= torch.arange(len(sees_nothing), device=DEVICE) < 1000  # the first request's last page is behind these
    ids[:, future, 5] = (4000 + 1200 - 1) // PAGE
    case = dataclasses.replace(case, topk_idx=ids)
    out = agreed_output(case)
    assert bool((out[sees_nothing] == 0).all())
    assert bool((out[~sees_nothing] != 0).any(dim=2).all())


@pytest.mark.parametrize("kv_heads", [1, 4])
def test_one_plan_attended_again_and_again(kv_heads):
    """The last CTA leaves the counters at zero; the order of the groups is only read."""
    from pageweaver_sglang.cuda import ops

    case = make_case("prefix", seed=53, device=DEVICE, requests=((700, 3000), (30, 200)), kv_heads=kv_heads)
    expected = attend(case, window=None, engine="union8")
    tiles = poisoned_tiles(case.v_cache)
    plan = plan_with_slots(case, pw.regroup(case.topk_idx, case.cu_seqlens, case.prefix_lens), marks=tiles.marks)
    assert plan.queue[:2].tolist() == [0, 0]
    ops.value_tiles(case.v_cache, tiles, plan)
    order = plan.queue.clone()
    outputs = [torch.full_like(case.q, float("nan")) for _ in range(20)]
    for out in outputs:
        ops.union_attention(
            case.q, case.k_cache, case.v_cache, plan, out, sm_scale=128**-0.5, engine="stream", tiles=tiles.tiles
        )
    assert all(same_bits(out, expected) for out in outputs)
    assert torch.equal(plan.queue, order)


# ---------------------------------------------------------------- Graphs


class Buffers:
    """Fixed device buffers that hold one of several cases at a time, for calls captured in a graph."""

    ORDER = ("q", "k_cache", "v_cache", "topk_idx", "req_to_token", "slot_ids", "cu_seqlens", "seq_lens", "prefix_lens")

    def __init__(self, cases):
        self.tensors = {}
        for name in self.ORDER:
            tensors = [getattr(case, name) for case in cases]
            shape = [max(sizes) for sizes in zip(*(t.shape for t in tensors), strict=True)]
            self.tensors[name] = torch.zeros(shape, dtype=tensors[0].dtype, device=DEVICE)

    @property
    def args(self):
        return tuple(self.tensors.values())

    def workspace(self, config):
        kv_heads, tokens, k = self.tensors["topk_idx"].shape
        return pw.Workspace(
            tokens,
            self.tensors["prefix_lens"].shape[0],
            kv_heads=kv_heads,
            topk=k,
            q_heads=self.tensors["q"].shape[1],
            window=config.window,
            pool_pages=self.pool_pages,
            device=DEVICE,
        )

    @property
    def pool_pages(self):
        return self.tensors["k_cache"].shape[0] // PAGE

    def fill(self, case):
        """Copy a case in. Requests that it does not have are empty; rows behind its last are padding with valid ids."""
        for name, tensor in self.tensors.items():
            source = getattr(case, name)
            if tensor.dtype == torch.float8_e4m3fn:
                tensor, source = tensor.view(torch.uint8), source.view(torch.uint8)
            tensor.fill_({"topk_idx": 7, "cu_seqlens": int(case.cu_seqlens[-1])}.get(name, 0))
            tensor[tuple(slice(0, size) for size in source.shape)] = source


CONFIGS = {
    "original": {"mode": "union8", "window": 128},
    "paper": {"mode": "pageweaver", "engine": "union8", "window": 128},
    "w64": {"mode": "pageweaver", "window": 64},
    "w128": {"mode": "pageweaver", "guard": "none", "window": 128},
}
HEADS4 = {"kv_heads": 4}


def graph_cases():
    return [
        make_case("packed", seed=12, device=DEVICE, **HEADS4),
        make_case("packed", seed=13, device=DEVICE, **HEADS4),
        make_case("holes", seed=14, device=DEVICE, **HEADS4),
        make_case("all_invalid", seed=15, device=DEVICE, **HEADS4),
        make_case("tail", seed=16, device=DEVICE, tail=3, **HEADS4),
    ]


def captured_call(buffers, config, workspace):
    """Run once, then capture; returns the graph and the output that a replay writes."""
    pw.sparse_prefill(*buffers.args, config=config, workspace=workspace)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = pw.sparse_prefill(*buffers.args, config=config, workspace=workspace)
    return graph, out


@pytest.mark.parametrize("name", CONFIGS)
def test_graph_replay_with_other_contents(name):
    """Capture once; replay with other lengths, page tables, top-k and values in the same buffers."""
    config, cases = pw.Config(**CONFIGS[name]), graph_cases()
    buffers = Buffers(cases)
    workspace = buffers.workspace(config)
    buffers.fill(cases[0])
    graph, out = captured_call(buffers, config, workspace)
    for case in [*cases, cases[0]]:
        buffers.fill(case)
        tiles = workspace.value_tiles(buffers.pool_pages)
        tiles.tiles.fill_(0x7F)  # no tile of the last replay may be of use
        n = case.q.shape[0]
        for _ in range(2):
            out.fill_(float("nan"))
            graph.replay()
            assert same_bits(out[:n], attend(case, window=None, engine="union8"))
            assert bool((out[n:] == 0).all()), "padding rows are zero"
            assert not bool(tiles.marks.any()), "the next replay begins without marks"
        eager = pw.sparse_prefill(*buffers.args, config=config, workspace=workspace)
        assert same_bits(eager[:n], attend(case, window=None, engine="union8"))


def test_one_graph_of_several_engines():
    """The engines follow one another with one workspace, as layers do, each with its output copied away."""
    cases = graph_cases()
    buffers = Buffers(cases)
    configs = [pw.Config(**CONFIGS[name]) for name in ("w128", "paper", "original", "w128")]
    workspace = buffers.workspace(configs[0])
    outputs = [torch.empty_like(buffers.tensors["q"]) for _ in configs]
    buffers.fill(cases[0])

    def layers():
        for config, out in zip(configs, outputs, strict=True):
            pw.sparse_prefill(*buffers.args, config=config, workspace=workspace, out=out)

    layers()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        layers()
    for case in reversed(cases):
        buffers.fill(case)
        for out in outputs:
            out.fill_(float("nan"))
        graph.replay()
        expected = attend(case, window=None, engine="union8")
        assert all(same_bits(out[: len(expected)], expected) for out in outputs)


@pytest.mark.parametrize("how", ["eager", "graphs"])
def test_two_workspaces_on_two_streams(how):
    """Two calls at a time, each with its own workspace and contents that change from round to round."""
    cases = graph_cases()
    expected = [attend(case, window=None, engine="union8") for case in cases]
    config = pw.Config(mode="pageweaver")
    lanes = []
    for _ in range(2):
        buffers = Buffers(cases)
        workspace = buffers.workspace(config)
        buffers.fill(cases[0])
        lanes.append((torch.cuda.Stream(), buffers, workspace, *captured_call(buffers, config, workspace)))
    torch.cuda.synchronize()
    for round_, _ in product(range(len(cases)), range(3)):
        chosen = [round_, (2 * round_ + 1) % len(cases)]
        results = []
        for number, (_, buffers, _, _, out) in zip(chosen, lanes, strict=True):
            buffers.fill(cases[number])
            out.fill_(float("nan"))
        torch.cuda.synchronize()
        for _ in range(4):
            for stream, buffers, workspace, graph, out in lanes:
                with torch.cuda.stream(stream):
                    if how == "graphs":
                        graph.replay()
                    else:
                        pw.sparse_prefill(*buffers.args, config=config, workspace=workspace)
                    results.append(out.clone())
        torch.cuda.synchronize()
        for i, result in enumerate(results):
            wanted = expected[chosen[i % 2]]
            assert same_bits(result[: len(wanted)], wanted)
