"""The engine ``stream`` on BF16 caches: V straight from the cache, pages in two blocks of 64 tokens, BF16 products.

Its outputs are compared with the float64 reference, with each other in every order of queries (to the bit), and with
the portable engine.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
import torch
from gpu_support import HAS_CUDA, attend, garbage_outside, halves_in_groups_of_16, reference, same_bits

import pageweaver_sglang as pw
from pageweaver_sglang.bench.accuracy import exact_rows, nrms, sample_rows
from pageweaver_sglang.bench.inputs import make_inputs
from pageweaver_sglang.value_tiles import ValueTiles
from tests.generators import CASE_NAMES, Case, make_case, unmap_pages

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not HAS_CUDA, reason="needs a CUDA device")]

DATA = Path(__file__).parents[1] / "data"
BF16 = torch.bfloat16
# P and the output rounded to 8 bits: half a unit is 0.2 % at most, 0.11 % RMS.
NRMS = 0.003


def bf16_case(name: str, **recipe) -> Case:
    """A case with a BF16 cache, and NaN in every cell of the pool that no token of a request owns."""
    return garbage_outside(make_case(name, device="cuda", cache_dtype=BF16, **recipe))


def stream(case: Case, window: int | None = 64, **keywords) -> torch.Tensor:
    return attend(case, window=window, engine="stream", **keywords)


@pytest.mark.parametrize("seed", [0, 1])
@pytest.mark.parametrize("name", CASE_NAMES)
def test_every_case_in_every_order(name, seed):
    case = bf16_case(name, seed=seed)
    original = stream(case, None)
    expected = reference(case)
    assert nrms(original, expected) <= NRMS
    assert bool((original[expected.abs().sum(dim=(1, 2)) == 0] == 0).all())
    for window, guard in ((64, "none"), (128, "none"), (128, "window")):
        assert same_bits(stream(case, window, guard=guard), original)
        assert same_bits(halves_in_groups_of_16(case, window=window, guard=guard), original)


@pytest.mark.parametrize("tail", range(1, 129))
def test_tails(tail):
    """The last page ends anywhere: what lies behind is NaN, and half of it may not be loaded at all."""
    case = bf16_case("tail", seed=tail, tail=tail % 128)
    assert nrms(stream(case), reference(case)) <= NRMS


@pytest.mark.parametrize("first", [1, 30, 63, 64, 65, 100, 127, 128])
def test_groups_whose_queries_end_in_different_blocks(first):
    """Eight queries of a group, some of which see the second half of a page and some not, or the next page."""
    for prefix in (first, 128 + first, 2000 + first):
        case = bf16_case("prefix", seed=first, requests=((9, prefix), (8, prefix + 60), (200, prefix)))
        original = stream(case, None)
        assert nrms(original, reference(case)) <= NRMS
        assert same_bits(stream(case, 128), original)


def test_half_a_page_that_nobody_sees_amid_others():
    """A page that only queries in its first half picked, before a page of another query of their group."""
    tokens, prefix, page = 200, 20 * 128 + 30, 20
    case = bf16_case("prefix", seed=12, requests=((tokens, prefix),))
    early, late = list(range(7)), 100  # positions of page 20 below 64, and one of page 21
    assert (prefix + early[-1]) % 128 < 64
    assert (prefix + late) // 128 == page + 1
    picks = case.topk_idx.clone()
    picks[:, early, :] = torch.tensor([3, 7, page, *[-1] * 13], dtype=torch.int32, device="cuda")
    picks[:, late, :] = torch.tensor([3, 8, page + 1, *[-1] * 13], dtype=torch.int32, device="cuda")
    case = dataclasses.replace(case, topk_idx=picks)
    rest = [token for token in range(tokens) if token not in (*early, late)]
    # The window's first group is the seven and the one; the second window keeps its order.
    order = [*early, late, *[token for token in rest if token < 128], *range(128, tokens)]
    perm = torch.tensor([order], dtype=torch.int32, device="cuda")
    out = stream(case, 128, perm=perm)
    assert nrms(out, reference(case)) <= NRMS
    assert same_bits(out, stream(case, None))


@pytest.mark.parametrize("kv_heads", [1, 2, 3, 4])
@pytest.mark.parametrize("ratio", range(1, 17))
def test_every_ratio(ratio, kv_heads):
    requests = ((1, 0), (7, 120), (127, 0), (129, 1000), (64, 3000), (33, 5))
    case = bf16_case("packed", seed=ratio, requests=requests, ratio=ratio, kv_heads=kv_heads)
    assert nrms(stream(case), reference(case)) <= NRMS


def test_pages_without_a_place_add_nothing():
    mapped = make_case("packed", seed=4, device="cuda", requests=((140, 3500), (37, 900)), cache_dtype=BF16)
    case, sound = unmap_pages(mapped)
    for window in (None, 64, 128):
        assert same_bits(stream(case, window), stream(sound, window))


def test_the_setting_precision_and_value_tiles_make_no_difference():
    case = bf16_case("holes", seed=13)
    scales = {"k_scale": case.k_scale, "v_scale": case.v_scale}
    out = pw.sparse_prefill(*case.args(), **scales, config=pw.Config(mode="pageweaver"))
    high = pw.sparse_prefill(*case.args(), **scales, config=pw.Config(mode="pageweaver", precision="high"))
    tiles = ValueTiles.empty(1, case.k_cache.shape[0] // 128, device="cuda")
    beside = pw.sparse_prefill(*case.args(), **scales, config=pw.Config(mode="pageweaver"), value_tiles=tiles)
    assert same_bits(high, out)
    assert same_bits(beside, out)
    assert not bool(tiles.marks.any())


def test_half_of_the_heads_give_the_bits_they_give_among_all():
    case = bf16_case("holes", seed=5, kv_heads=2)
    whole = stream(case).unflatten(1, (2, 16))
    for first in (0, 8):
        some = case.q.unflatten(1, (2, 16))[:, :, first : first + 8].flatten(1, 2).contiguous()
        assert same_bits(stream(dataclasses.replace(case, q=some)), whole[:, :, first : first + 8].flatten(1, 2))


@pytest.mark.parametrize("factor", [1e-3, 4.0, 16.0])
@pytest.mark.parametrize("name", ["packed", "prefix", "heads4"])
def test_sharp_and_flat_logits(name, factor):
    case = bf16_case(name, seed=6)
    case = dataclasses.replace(case, q=(case.q.float() * factor).to(BF16))
    assert nrms(stream(case), reference(case)) <= NRMS


@pytest.mark.parametrize("kind", ["float", "tensor"])
def test_scales(kind):
    case = bf16_case("prefix", seed=8)
    scales = {"k_scale": 0.37, "v_scale": 2.5}
    expected = reference(dataclasses.replace(case, **scales))
    if kind == "tensor":
        scales = {name: torch.tensor([value], device="cuda") for name, value in scales.items()}
    assert nrms(stream(dataclasses.replace(case, **scales)), expected) <= NRMS
    assert nrms(stream(case), expected) > NRMS, "scales must matter"


@pytest.mark.parametrize("mean", [0.3, 3.0, -30.0])
def test_values_with_a_mean(mean):
    case = bf16_case("prefix", seed=3)
    case = dataclasses.replace(case, v_cache=case.v_cache + mean)
    assert nrms(stream(case), reference(case)) <= NRMS


def test_extreme_values_stay_finite():
    case = make_case("packed", seed=7, device="cuda", cache_dtype=BF16)
    case = dataclasses.replace(case, k_cache=torch.full_like(case.k_cache, 1e4))
    for value in (3e38, -3e38, 1e-38, 0.0):
        out = stream(dataclasses.replace(case, q=torch.full_like(case.q, value)))
        assert bool(out.isfinite().all()), value


def test_one_value_at_a_time():
    """The output of a query that sees one token is that token's value, in all its dims, to the bit."""
    case = make_case("single", seed=1, device="cuda", k=1, cache_dtype=BF16)
    v_cache = torch.full_like(case.v_cache, float("nan"))
    value = torch.randn(128, device="cuda").to(BF16)
    v_cache[case.req_to_token[case.slot_ids[0], 0].long()] = value
    assert torch.equal(stream(dataclasses.replace(case, v_cache=v_cache)), value.expand(1, 16, 128))


def test_strided_tensors():
    """q is a view of a fused projection, K and V are halves of one cache."""
    case = bf16_case("heads4", seed=10)
    tokens, heads, _ = case.q.shape
    fused = torch.full((tokens, 9856), float("nan"), dtype=BF16, device="cuda")
    q = fused[:, : heads * 128].view(tokens, heads, 128)
    q.copy_(case.q)
    k_cache, v_cache = torch.stack((case.k_cache, case.v_cache), dim=2).unbind(2)
    strided = dataclasses.replace(case, q=q, k_cache=k_cache, v_cache=v_cache)
    assert not k_cache.is_contiguous()
    assert same_bits(stream(strided), stream(case))


def test_more_groups_than_processors_and_repeats_beside_other_work():
    case = bf16_case("heads4", seed=2, requests=((700, 9000), (90, 100)))
    first = stream(case)
    assert nrms(first, reference(case)) <= NRMS
    other = torch.cuda.Stream()
    load = torch.randn(2048, 2048, device="cuda")
    for _ in range(100):
        with torch.cuda.stream(other):
            load @ load
        assert same_bits(stream(case), first)


@pytest.mark.parametrize("factor", [1.0, 4.0])
def test_a_64k_workload(factor):
    inputs = make_inputs(pw.load_workload(DATA / "ctx64k_a.npz"), "cuda", seed=1)
    inputs = dataclasses.replace(
        inputs, q=inputs.q * factor, k_cache=inputs.k_cache.to(BF16), v_cache=inputs.v_cache.to(BF16)
    )
    outs = [stream(inputs, window) for window in (None, 64, 128)]
    assert all(same_bits(out, outs[0]) for out in outs)
    rows = sample_rows(inputs.q.shape[0], 256).cuda()
    wanted = exact_rows(dataclasses.replace(inputs, q=inputs.q.double()), rows)
    assert nrms(outs[0][rows], wanted) <= NRMS


def test_the_library_refuses_what_it_has_no_kernel_for():
    case = bf16_case("prefix", seed=1)
    with pytest.raises(ValueError, match="BF16 caches need the stream engine"):
        attend(case, engine="union8")
    with pytest.raises(ValueError, match="one dtype"):
        stream(dataclasses.replace(case, k_cache=case.k_cache.to(torch.float8_e4m3fn)))
