"""Fewer than 16 query heads per KV head, as tensor parallelism of 8 and more leaves a rank: Hopper's engines.

A query's 16 rows of a tile are then partly zeros that nobody writes.
"""

from __future__ import annotations

import dataclasses

import pytest
import torch
from gpu_support import HAS_CUDA, attend, fused, heads_of, reference, rows_around, same_bits
from rounded_queries import rounded_rows

import pageweaver_sglang as pw
from pageweaver_sglang.bench.accuracy import nrms
from tests.generators import CASE_NAMES, make_case

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not HAS_CUDA, reason="needs a CUDA device")]

NRMS = {"fp8": 0.04, "high": 0.005}
RATIOS = tuple(range(1, 16))


@pytest.mark.parametrize("precision", NRMS)
@pytest.mark.parametrize("kv_heads", [1, 2, 3, 4])
@pytest.mark.parametrize("ratio", RATIOS)
def test_every_ratio(ratio, kv_heads, precision):
    """Against the reference, beside NaN in Q's rows and with what lies beside the output left alone."""
    requests = ((1, 0), (7, 120), (127, 0), (129, 1000), (64, 3000), (33, 5))
    case = make_case("packed", seed=ratio, device="cuda", requests=requests, ratio=ratio, kv_heads=kv_heads)
    expected = reference(case)
    served = dataclasses.replace(case, q=fused(case.q, filled=True))
    for engine, window in (("stream", None), ("stream", 64)) + (("union8", 128),) * (precision == "fp8"):
        out = fused(case.q, filled=False)
        attend(served, window=window, engine=engine, precision=precision, out=out)
        assert nrms(out, expected) <= NRMS[precision]
        assert bool(rows_around(out).isnan().all())


@pytest.mark.parametrize("ratio", [1, 4, 8, 12])
@pytest.mark.parametrize("name", CASE_NAMES)
def test_every_case(name, ratio):
    """Through the public function, every case and order; a query that sees nothing gives zeros."""
    case = make_case(name, seed=3, device="cuda", ratio=ratio)
    scales = {"k_scale": case.k_scale, "v_scale": case.v_scale}
    expected = reference(case)
    original = pw.sparse_prefill(*case.args(), **scales, config=pw.Config(mode="union8"))
    assert nrms(original, expected) <= NRMS["fp8"]
    assert bool((original[expected.abs().sum(dim=(1, 2)) == 0] == 0).all())
    for config in (
        pw.Config(mode="pageweaver", window=64),
        pw.Config(mode="pageweaver", window=128, guard="none"),
        pw.Config(mode="pageweaver", engine="union8"),
    ):
        assert same_bits(pw.sparse_prefill(*case.args(), **scales, config=config), original)
    assert same_bits(attend(case, window=128, group_size=4), original)


@pytest.mark.parametrize("precision", NRMS)
@pytest.mark.parametrize("kv_heads", [1, 4])
def test_half_of_the_heads_give_the_bits_they_give_among_all(kv_heads, precision):
    """A warp holds 8 heads of a query and shares nothing with the other half: no bit may depend on that half."""
    case = make_case("holes", seed=5, device="cuda", kv_heads=kv_heads)
    whole = attend(case, window=64, engine="stream", precision=precision).unflatten(1, (kv_heads, 16))
    for first in (0, 8):
        half = attend(heads_of(case, first, 8), window=64, engine="stream", precision=precision)
        assert same_bits(half, whole[:, :, first : first + 8].flatten(1, 2))


@pytest.mark.parametrize("factor", [4.0, 16.0, 1e-3])
@pytest.mark.parametrize("ratio", [2, 8, 13])
def test_sharp_and_flat_logits(ratio, factor):
    """Rows without a head have logits of zero: they must not keep a row of the same warp from raising its reference.

    The reference has Q rounded as the kernels round it: what is left is the rounding of P.
    """
    case = make_case("prefix", seed=7, device="cuda", ratio=ratio)
    case = dataclasses.replace(case, q=(case.q.float() * factor).to(torch.bfloat16))
    expected = pw.reference.sparse_prefill(rounded_rows(case.q), *case.args()[1:])
    assert nrms(attend(case, window=64, engine="stream"), expected) <= 0.035


@pytest.mark.parametrize("ratio", [3, 8])
def test_repeats_are_identical_beside_other_work(ratio):
    case = make_case("prefix", seed=9, device="cuda", ratio=ratio, requests=((900, 20_000),))
    first = attend(case, window=64, engine="stream")
    other = torch.cuda.Stream()
    load = torch.randn(2048, 2048, device="cuda")
    for _ in range(50):
        with torch.cuda.stream(other):
            load @ load
        assert same_bits(attend(case, window=64, engine="stream"), first)


def test_the_library_refuses_more_than_it_has_room_for():
    """As the last line of defence: the public function has said no before."""
    case = make_case("prefix", seed=1, device="cuda", ratio=17)
    with pytest.raises(ValueError, match="1 to 16 heads per KV head"):
        attend(case, window=64, engine="union8")
