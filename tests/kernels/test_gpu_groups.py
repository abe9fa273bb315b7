"""Groups of 16 queries, two tiles of 8 queries by 8 heads, which ``stream`` takes where a KV head has 8 heads or fewer.

Every bit must be that of groups of 8, in which a query has 16 rows of a tile; values are compared with the reference.
"""

from __future__ import annotations

import dataclasses
from typing import NamedTuple

import pytest
import torch
from gpu_support import HAS_CUDA, attend, fused, garbage_outside, reference, rows_around, same_bits

import pageweaver_sglang as pw
from pageweaver_sglang.bench.accuracy import nrms
from pageweaver_sglang.cuda import support
from tests.generators import CASE_NAMES, Case, make_case

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not HAS_CUDA, reason="needs a CUDA device")]

PACKED = ((1, 0), (7, 120), (127, 0), (129, 1000), (64, 3000), (33, 5))


class Kind(NamedTuple):
    """A cache, the arithmetic, and the largest error."""

    cache_dtype: torch.dtype
    precision: str
    nrms: float


KINDS = {
    "fp8": Kind(torch.float8_e4m3fn, "fp8", 0.04),
    "high": Kind(torch.float8_e4m3fn, "high", 0.005),
    "bf16": Kind(torch.bfloat16, "fp8", 0.003),
}
every_kind = pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS)


def make(kind: Kind, name: str, **recipe) -> Case:
    """A case with NaN in every cell of the pool that no token of a request owns."""
    return garbage_outside(make_case(name, device="cuda", cache_dtype=kind.cache_dtype, **recipe))


def stream(case: Case, kind: Kind, group_size: int, window: int | None = 64, **keywords) -> torch.Tensor:
    return attend(case, window=window, group_size=group_size, engine="stream", precision=kind.precision, **keywords)


def served(case: Case, config: pw.Config, group_size: int) -> torch.Tensor:
    """The public function's output with a workspace of that group size."""
    workspace = pw.Workspace(**case.workspace_sizes(), window=config.window, group_size=group_size)
    out = torch.full(case.q.shape, float("nan"), dtype=case.q.dtype, device="cuda")
    scales = {"k_scale": case.k_scale, "v_scale": case.v_scale}
    return pw.sparse_prefill(*case.args(), **scales, config=config, workspace=workspace, out=out)


@every_kind
@pytest.mark.parametrize("kv_heads", [1, 2, 4])
@pytest.mark.parametrize("ratio", [1, 2, 3, 5, 7, 8])
def test_every_ratio(ratio, kv_heads, kind):
    """Beside NaN in Q's rows, and what lies beside the output is left alone."""
    case = make(kind, "packed", seed=ratio, requests=PACKED, ratio=ratio, kv_heads=kv_heads)
    eights = stream(case, kind, 8)
    assert nrms(eights, reference(case)) <= kind.nrms
    beside = dataclasses.replace(case, q=fused(case.q, filled=True))
    for window in (None, 64, 128):
        out = fused(case.q, filled=False)
        stream(beside, kind, 16, window, out=out)
        assert same_bits(out, eights), window
        assert bool(rows_around(out).isnan().all())


@every_kind
@pytest.mark.parametrize("ratio", [3, 8])
@pytest.mark.parametrize("name", CASE_NAMES)
def test_every_case_in_every_order(name, ratio, kind):
    """Through the public function; a query that sees nothing gives zeros."""
    case = make(kind, name, seed=3, ratio=ratio)
    expected = reference(case)
    eights = served(case, pw.Config(mode="union8", precision=kind.precision), 8)
    assert nrms(eights, expected) <= kind.nrms
    assert bool((eights[expected.abs().sum(dim=(1, 2)) == 0] == 0).all())
    for order in (
        {"mode": "union8"},
        {"mode": "union8", "window": 128},
        {"mode": "pageweaver", "window": 64},
        {"mode": "pageweaver", "window": 128, "guard": "none"},
    ):
        assert same_bits(served(case, pw.Config(**order, precision=kind.precision), 16), eights), order
    sixteens = pw.regroup(case.topk_idx, case.cu_seqlens, case.prefix_lens, window=64, group_size=16)
    assert same_bits(stream(case, kind, 16, perm=sixteens), eights)


@every_kind
@pytest.mark.parametrize("k", range(1, 17))
def test_every_number_of_picks(k, kind):
    case = make(kind, "packed", seed=k, requests=PACKED, k=k, ratio=8, kv_heads=2)
    eights = stream(case, kind, 8)
    assert nrms(eights, reference(case)) <= kind.nrms
    for window in (None, 64, 128):
        assert same_bits(stream(case, kind, 16, window), eights), window


@every_kind
def test_every_number_of_queries_in_the_last_group(kind):
    """A second tile of 0 to 8 queries, behind none to two whole groups."""
    for tokens in range(1, 35):
        case = make(kind, "prefix", seed=tokens, requests=((tokens, 1500),), ratio=5)
        eights = stream(case, kind, 8)
        assert nrms(eights, reference(case)) <= kind.nrms, tokens
        assert same_bits(stream(case, kind, 16), eights), tokens


@every_kind
def test_a_tile_without_picks(kind):
    """In turn: both halves of a group pick, the first alone, the second alone, and none."""
    case = make(kind, "prefix", seed=21, requests=((256, 3000),), ratio=8)
    picks = case.topk_idx.clone()
    tile = torch.arange(256, device="cuda") // 8
    picks[:, (tile % 8 == 3) | (tile % 8 == 4) | (tile % 8 >= 6)] = -1
    case = dataclasses.replace(case, topk_idx=picks)
    eights = stream(case, kind, 8, None)
    assert nrms(eights, reference(case)) <= kind.nrms
    assert bool((eights[(picks < 0).all(dim=2)[0]] == 0).all())
    for window in (None, 64, 128):
        assert same_bits(stream(case, kind, 16, window), eights), window


@every_kind
@pytest.mark.parametrize("prefix", [14 * 128 + 3, 15 * 128 + 127, 16 * 128])
def test_every_membership_of_a_tile(prefix, kind):
    """In 16 groups of 16 pages, each of the 256 patterns of the first tile meets one of the second's."""
    case = make(kind, "prefix", seed=26, requests=((256, prefix),), ratio=8)
    query, page = torch.arange(256, device="cuda")[:, None], torch.arange(16, device="cuda")
    first = query // 16 * 16 + page
    pattern = torch.where(query % 16 < 8, first, (37 * first + 11) % 256)
    picked = (pattern >> query % 8) & 1 == 1
    ids = page.expand(256, 16).masked_fill(~picked, -1).to(torch.int32)[None].contiguous()
    case = dataclasses.replace(case, topk_idx=ids)
    eights = stream(case, kind, 8, None)
    assert nrms(eights, reference(case)) <= kind.nrms
    for window in (None, 64, 128):
        assert same_bits(stream(case, kind, 16, window), eights), window


@every_kind
def test_a_long_context(kind):
    """4,690 pages."""
    case = make(kind, "past_512_pages", seed=22, requests=((300, 600_000),), ratio=8)
    eights = stream(case, kind, 8)
    assert nrms(eights, reference(case)) <= kind.nrms
    for window in (None, 64, 128):
        assert same_bits(stream(case, kind, 16, window), eights), window


def spread(cache: torch.Tensor) -> torch.Tensor:
    """The cache in every second head of a wider one; NaN between."""
    slots, heads, dim = cache.shape
    wide = torch.full((slots, 2 * heads + 1, dim), float("nan"), device=cache.device).to(cache.dtype)
    wide[:, 1::2].copy_(cache)
    return wide[:, 1::2]


def heads_apart(cache: torch.Tensor) -> torch.Tensor:
    """The cache head after head, three slots behind each and 16 elements behind every token; NaN there."""
    slots, heads, dim = cache.shape
    rows = torch.full((heads, slots + 3, dim + 16), float("nan"), device=cache.device).to(cache.dtype)
    view = rows[:, :slots, :dim].transpose(0, 1)
    view.copy_(cache)
    return view


@every_kind
@pytest.mark.parametrize("ratio", [3, 8])
def test_odd_strides(ratio, kind):
    case = make(kind, "heads4", seed=23, ratio=ratio)
    eights = stream(case, kind, 8)
    for of_k, of_v in ((spread, heads_apart), (heads_apart, spread)):
        caches = {"k_cache": of_k(case.k_cache), "v_cache": of_v(case.v_cache)}
        assert not any(cache.is_contiguous() for cache in caches.values())
        other = dataclasses.replace(case, q=fused(case.q, filled=True), **caches)
        out = fused(case.q, filled=False)
        assert same_bits(stream(other, kind, 16, out=out), eights)
        assert bool(rows_around(out).isnan().all())


@every_kind
@pytest.mark.parametrize("ratio", [3, 8])
def test_repeats_are_identical_beside_other_work(ratio, kind):
    """4 KV heads with 57 groups each: CTAs draw several."""
    case = make(kind, "prefix", seed=24, ratio=ratio, kv_heads=4, requests=((900, 20_000),))
    eights = stream(case, kind, 8)
    other = torch.cuda.Stream()
    load = torch.randn(2048, 2048, device="cuda")
    for _ in range(30):
        with torch.cuda.stream(other):
            load @ load
        assert same_bits(stream(case, kind, 16), eights)


@every_kind
@pytest.mark.parametrize(("over", "group_size"), [(0, 8), (1, 16)])
def test_a_call_takes_16_where_groups_of_8_outnumber_the_multiprocessors(monkeypatch, over, group_size, kind):
    from pageweaver_sglang.cuda import ops

    tokens = 8 * support.processors_of(torch.device("cuda", torch.cuda.current_device())) + over
    case = make(kind, "prefix", seed=25, ratio=8, k=4, requests=((tokens, 2000),))
    sizes, attention = [], ops.union_attention

    def union_attention(q, k_cache, v_cache, plan, out, **options):
        sizes.append(plan.group_size)
        attention(q, k_cache, v_cache, plan, out, **options)

    monkeypatch.setattr(ops, "union_attention", union_attention)
    config = pw.Config(mode="pageweaver", precision=kind.precision)
    out = pw.sparse_prefill(*case.args(), config=config)
    assert sizes == [group_size]
    assert same_bits(out, served(case, config, 8))


@pytest.mark.parametrize(("ratio", "engine"), [(9, "stream"), (12, "stream"), (16, "stream"), (8, "union8")])
def test_who_has_groups_of_8_alone_refuses_16(ratio, engine):
    case = make_case("prefix", seed=1, device="cuda", ratio=ratio)
    with pytest.raises(ValueError, match="workspace must be one with group_size=8, got group_size=16"):
        served(case, pw.Config(engine=engine), 16)
    message = "1 to 16 heads per KV head, to 8 in groups of 16" if engine == "stream" else "group_size must be 8 or 16"
    with pytest.raises(ValueError, match=message):  # the library, as the last line of defence
        attend(case, group_size=16, engine=engine)
