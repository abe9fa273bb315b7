"""``precision: high``: errors of half a per cent at most against float64, where ``fp8`` has several per cent.

Q is compared as it is: its two terms hold a BF16 value whole. A weight keeps eight bits, and the output is BF16.
"""

from __future__ import annotations

import dataclasses
import math
from pathlib import Path

import pytest
import torch
from gpu_support import HAS_CUDA, attend, halves_in_groups_of_16, same_bits
from test_gpu_engines import BOUND, first_queries, one_request, some_pages, staircase

import pageweaver_sglang as pw
from pageweaver_sglang.bench.accuracy import exact_rows, nrms, sample_rows
from pageweaver_sglang.bench.inputs import make_inputs
from tests.generators import CASE_NAMES, make_case

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not HAS_CUDA, reason="needs a CUDA device")]

DATA = Path(__file__).parents[1] / "data"
DEVICE = "cuda"
PAGE = 128
HIGH_NRMS = 0.005
# Half a unit of a weight's eight bits (the first four are cut off, not rounded) and of the output's, when nothing
# averages them out.
ONE_ROUNDING = 2**-8 + 2**-9

MODES = {
    "original": pw.Config(mode="union8", precision="high"),
    "w64": pw.Config(mode="pageweaver", precision="high"),
    "w128": pw.Config(mode="pageweaver", window=128, guard="none", precision="high"),
}


def exact(case) -> torch.Tensor:
    """The exact output, float64."""
    q, *rest = case.args()
    return pw.reference.sparse_prefill(q.double(), *rest, k_scale=case.k_scale, v_scale=case.v_scale)


def agreed_output(case) -> torch.Tensor:
    """The output in the original order and regrouped, halves of the heads in groups of 16, too: one to the bit, and
    finite.
    """
    out = attend(case, window=None, precision="high")
    for window in (64, 128):
        assert same_bits(attend(case, window=window, precision="high"), out), window
    assert same_bits(halves_in_groups_of_16(case, window=64, precision="high"), out)
    assert bool(torch.isfinite(out).all())
    return out


def with_values(case, mean: float):
    """The case with V normally distributed around ``mean``."""
    random = torch.Generator().manual_seed(7)
    v = (mean + torch.randn(case.v_cache.shape, generator=random)).to(torch.float8_e4m3fn)
    return dataclasses.replace(case, v_cache=v.to(DEVICE))


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("seed", [0, 1])
@pytest.mark.parametrize("name", CASE_NAMES)
def test_every_case_against_the_reference(name, seed, mode):
    case = make_case(name, seed=seed, device=DEVICE)
    out = torch.full(case.q.shape, float("nan"), dtype=case.q.dtype, device=DEVICE)
    pw.sparse_prefill(*case.args(), k_scale=case.k_scale, v_scale=case.v_scale, config=MODES[mode], out=out)
    expected = exact(case)
    assert nrms(out, expected) <= HIGH_NRMS
    assert bool((out[expected.abs().sum(dim=(1, 2)) == 0] == 0).all())


@pytest.mark.parametrize("name", CASE_NAMES)
def test_every_order_gives_the_same_bits(name):
    agreed_output(make_case(name, seed=2, device=DEVICE))


@pytest.mark.parametrize("q_scale", [1.0, 4.0])
@pytest.mark.parametrize("name", ["ctx8k", "ctx64k_a", "packed"])
def test_workloads(name, q_scale):
    case = make_inputs(pw.load_workload(DATA / f"{name}.npz"), DEVICE, seed=1, q_scale=q_scale)
    out = agreed_output(case)
    rows = sample_rows(case.q.shape[0], 256).to(DEVICE)
    assert nrms(out[rows], exact_rows(case, rows)) <= HIGH_NRMS
    for _ in range(10):
        assert same_bits(attend(case, window=64, precision="high"), out)


@pytest.mark.parametrize("tail", range(1, 128))
def test_tails(tail):
    case = make_case("tail", seed=tail, device=DEVICE, tail=tail)
    assert nrms(attend(case, precision="high"), exact(case)) <= HIGH_NRMS


@pytest.mark.parametrize("name", ["heads4", "packed", "future"])
@pytest.mark.parametrize("factor", [1e-3, 4.0, 16.0])
def test_sharp_and_flat_logits(factor, name):
    case = make_case(name, seed=32, device=DEVICE)
    case = dataclasses.replace(case, q=(case.q.float() * factor).to(torch.bfloat16))
    assert nrms(agreed_output(case), exact(case)) <= HIGH_NRMS


@pytest.mark.parametrize("factor", [0.0, 0.1, 1.0, 4.0])
@pytest.mark.parametrize("mean", [0.3, 1.0, 3.0, -3.0])
def test_values_with_a_mean(mean, factor):
    """A row's sum grows from page to page: in one accumulator the tensor cores would cut off what comes late."""
    case = with_values(make_case("tail", seed=36, device=DEVICE, tail=19), mean)
    case = dataclasses.replace(case, q=(case.q.float() * factor).to(torch.bfloat16))
    assert nrms(agreed_output(case), exact(case)) <= HIGH_NRMS


def test_what_only_the_second_term_of_q_says():
    """The first terms of a row are equal, and every key's halves cancel them: logits of the second terms are left."""
    random = torch.Generator().manual_seed(3)
    tokens, prefix = 29, 15 * PAGE
    q = torch.ones(tokens, 16, 128)
    q[:, :, :64] += 2.0**-7
    level = torch.randint(-8, 9, (prefix + tokens, 1, 1), generator=random).float()
    k = torch.cat([level.expand(-1, -1, 64), -level.expand(-1, -1, 64)], dim=2)
    v = torch.randn(prefix + tokens, 1, 128, generator=random)
    case = one_request(q, k, v, some_pages(tokens, 15, least=4, seed=4), prefix, bits_per_unit=1.0)
    expected = exact(case)
    assert nrms(agreed_output(case), expected) <= HIGH_NRMS
    assert nrms(attend(case), expected) > 0.5, "the keys must matter"


@pytest.mark.parametrize("signs", ["rise", "fall", "both"])
@pytest.mark.parametrize("step", [0.3, BOUND - 1e-6, BOUND, BOUND + 1e-6, 1.0, 3.0, 100.0, 1e5])
def test_flat_pages_that_rise_and_fall(step, signs):
    """Whether a page raises the reference turns on the bound alone."""
    case = staircase(step, signs, textured=False)
    assert nrms(agreed_output(case), exact(case)) <= ONE_ROUNDING


@pytest.mark.parametrize("signs", ["rise", "fall", "both"])
@pytest.mark.parametrize("step", [0.5, 1.0, 3.0, 10.0])
def test_uneven_pages_that_rise_and_fall(step, signs):
    """Pages' levels reach eight steps, and the tensor cores cut a logit 13 bits behind the leading one of the largest
    part of it: the texture loses what it adds to a high level. Two units of that are let pass.
    """
    case = staircase(step, signs, textured=True)
    assert nrms(agreed_output(case), exact(case)) <= ONE_ROUNDING + 2 * 8 * step * math.log(2) * 2**-13


@pytest.mark.parametrize("kind", ["float", "tensor"])
def test_scales(kind):
    case = make_case("prefix", seed=8, device=DEVICE)
    scales = {"k_scale": 0.37, "v_scale": 2.5}
    expected = exact(dataclasses.replace(case, **scales))
    if kind == "tensor":
        scales = {name: torch.tensor([value], dtype=torch.float32, device=DEVICE) for name, value in scales.items()}
    assert nrms(pw.sparse_prefill(*case.args(), config=MODES["w64"], **scales), expected) <= HIGH_NRMS


@pytest.mark.parametrize("k_scale", [1e-11, 1e-6])
def test_tiny_scales(k_scale):
    case = make_case("tail", seed=34, device=DEVICE, tail=19)
    q = case.q.clone()
    q[::4] = 0.0
    case = dataclasses.replace(case, q=q, k_scale=k_scale)
    assert nrms(agreed_output(case), exact(case)) <= HIGH_NRMS


@pytest.mark.parametrize("k_scale", [1e3, 1e10, 1e25, 1e37])
def test_huge_scales_stay_finite(k_scale):
    """Probabilities beyond FP16 and FP32 included, which no output has to be near the reference for."""
    case = make_case("tail", seed=35, device=DEVICE, tail=19)
    agreed_output(dataclasses.replace(case, k_scale=k_scale))


def test_extreme_values_stay_finite():
    case = make_case("packed", seed=7, device=DEVICE)
    k = torch.full_like(case.k_cache.float(), 448.0).to(torch.float8_e4m3fn)
    for q in (torch.full_like(case.q, 3e38), torch.full_like(case.q, -3e38), torch.zeros_like(case.q)):
        agreed_output(dataclasses.replace(case, q=q, k_cache=k))


@pytest.mark.parametrize("bad", [float("inf"), float("nan")])
def test_a_query_that_is_not_finite_gives_nan_and_harms_no_other(bad):
    case = make_case("heads4", seed=37, device=DEVICE)
    wanted = attend(case, precision="high")
    q = case.q.clone()
    q[5, 3, 17] = bad
    out = attend(dataclasses.replace(case, q=q), precision="high")
    assert bool(out[5, 3].isnan().all())
    # Heads of one query raise their references together, so that its other heads may differ in the last bits.
    others = torch.arange(case.q.shape[1], device=DEVICE) != 3
    assert nrms(out[5, others], exact(case)[5, others]) <= 2 * HIGH_NRMS
    out[5] = wanted[5]
    assert same_bits(out, wanted)


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
    expected = agreed_output(case)
    assert nrms(expected, exact(case)) <= HIGH_NRMS
    for groups in (1, 2, 64, 65, 129, 130):
        out = attend(first_queries(case, 8 * groups), window=None, precision="high")
        assert same_bits(out, expected[: 8 * groups]), groups


def test_garbage_behind_the_sequence_is_never_seen():
    case = make_case("tail", seed=9, device=DEVICE, tail=37)
    clean = attend(case, precision="high")
    caches = {name: getattr(case, name).view(torch.uint8).clone() for name in ("k_cache", "v_cache")}
    for request, length in enumerate(case.seq_lens.tolist()):
        last = int(case.req_to_token[case.slot_ids[request].long(), length - 1])
        for cache in caches.values():
            cache[last + 1 : (last // PAGE + 1) * PAGE] = 0x7F
    dirty = {name: cache.view(torch.float8_e4m3fn) for name, cache in caches.items()}
    assert same_bits(attend(dataclasses.replace(case, **dirty), precision="high"), clean)


def test_repeats_are_identical_beside_other_work():
    """Calls of either precision take turns, each with the other's kernel and other work on a second stream."""
    case = make_case("heads4", seed=3, device=DEVICE, requests=((331, 2900), (270, 40)))
    first = {precision: attend(case, precision=precision) for precision in ("fp8", "high")}
    noise, other = torch.randn(2048, 2048, device=DEVICE), torch.cuda.Stream()
    for _ in range(100):
        with torch.cuda.stream(other):
            noise = noise @ noise * 1e-3
        for precision, wanted in first.items():
            assert same_bits(attend(case, precision=precision), wanted)


def test_the_library_refuses_it_without_the_stream_engine():
    case = make_case("prefix", seed=1, device=DEVICE)
    for engine, group_size in (("union8", 8), (None, 4)):
        with pytest.raises(ValueError, match="precision high needs the stream engine"):
            attend(case, engine=engine, group_size=group_size, precision="high")
