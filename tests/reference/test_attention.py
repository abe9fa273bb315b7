"""``sparse_prefill`` of the reference engine against a loop over queries, heads and tokens, and a recorded call."""

from __future__ import annotations

import dataclasses
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

import pageweaver_sglang as pw
from tests import naive
from tests.generators import CASE_NAMES, make_case

DATA = Path(__file__).parents[1] / "data"

# Rounding of the result to bf16 aside, both sides are float64 sums in another order.
EXACT = 1e-12


def nrms(got, expected):
    got, expected = torch.as_tensor(got).double(), torch.as_tensor(expected).double()
    return float((got - expected).norm() / expected.norm().clamp(min=1e-300))


def looped(case, **options):
    """The independent loop's result for a case, float64."""
    tables = [tensor.tolist() for tensor in case.args()[3:]]
    floats = [tensor.double().numpy() for tensor in case.args()[:3]]
    options = {"sm_scale": case.q.shape[2] ** -0.5, "page_size": case.page_size} | options
    for name in ("k_scale", "v_scale"):
        if getattr(case, name) is not None:
            options.setdefault(name, getattr(case, name))
    return torch.from_numpy(naive.attention(*floats, *tables, **options))


def in_double(case):
    """The same case with queries in float64, so that the result isn't rounded."""
    return dataclasses.replace(case, q=case.q.double())


@pytest.mark.parametrize("name", CASE_NAMES)
def test_every_case_against_the_loop(name):
    case = in_double(make_case(name, seed=1))
    out = pw.sparse_prefill(*case.args(), **case.keywords())
    expected = looped(case)
    assert out.dtype == torch.float64
    assert nrms(out, expected) < EXACT
    nothing = (expected == 0).all(dim=2)
    assert (out[nothing] == 0).all()
    assert bool(nothing.any()) == (name in {"all_invalid", "future", "holes", "padded"})


@pytest.mark.parametrize(
    "changes",
    [
        {"head_dim": 64},
        {"head_dim": 24, "ratio": 1, "kv_heads": 3},
        {"ratio": 5, "kv_heads": 2},
        {"page_size": 16},
        {"page_size": 1, "k": 40},
        {"k": 1},
        {"k": 23},
        {"scattered": True},
        {"cache_dtype": torch.bfloat16},
        {"cache_dtype": torch.float16},
        {"cache_dtype": torch.float32},
    ],
    ids=str,
)
def test_shapes_and_types_that_the_kernels_do_not_cover(changes):
    case = in_double(make_case("packed", seed=2, requests=((40, 300), (9, 0), (0, 5), (25, 77)), **changes))
    assert nrms(pw.sparse_prefill(*case.args(), **case.keywords()), looped(case)) < EXACT


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_result_has_the_type_of_q_and_is_rounded_once(dtype):
    case = make_case("tail", seed=3, q_dtype=dtype)
    out = pw.sparse_prefill(*case.args())
    exact = pw.sparse_prefill(*in_double(case).args())
    assert out.dtype == dtype
    assert out.is_contiguous()
    heads_first = case.q.transpose(0, 1).contiguous().transpose(0, 1)
    assert pw.sparse_prefill(heads_first, *case.args()[1:]).is_contiguous()
    assert torch.equal(out, exact.to(dtype))


@pytest.mark.parametrize("as_tensor", [False, True])
def test_scales(as_tensor):
    case = in_double(make_case("prefix", seed=4, requests=((40, 3000),)))
    scales = {"k_scale": 0.37, "v_scale": 2.5}
    expected = looped(case, sm_scale=0.2, **scales)
    if as_tensor:
        scales = {name: torch.tensor(value) for name, value in scales.items()}
        scales["v_scale"] = scales["v_scale"].view(1)
    out = pw.sparse_prefill(*case.args(), sm_scale=0.2, **scales)
    # A float32 tensor holds 0.37 with a rounding error.
    assert nrms(out, expected) < (1e-7 if as_tensor else EXACT)
    assert nrms(pw.sparse_prefill(*case.args(), sm_scale=0.2), expected) > 0.1


def test_small_batches_change_nothing(monkeypatch):
    case = in_double(make_case("packed", seed=5))
    whole = pw.sparse_prefill(*case.args())
    monkeypatch.setattr(sys.modules["pageweaver_sglang.reference.attention"], "_BATCH_SCORES", 16 * 16 * 128 * 3)
    assert nrms(pw.sparse_prefill(*case.args()), whole) < EXACT


def test_large_scores_do_not_overflow():
    case = in_double(make_case("tail", seed=6))
    case = dataclasses.replace(case, q=case.q * 1e4)
    out = pw.sparse_prefill(*case.args())
    assert out.isfinite().all()
    assert nrms(out, looped(case)) < 1e-9


def test_cells_that_no_query_sees_may_hold_anything():
    """NaN behind the sequence's end and in pages that nobody owns."""
    case = make_case("tail", seed=7, tail=37)
    clean = pw.sparse_prefill(*case.args())
    owned = torch.zeros(case.k_cache.shape[0], dtype=torch.bool)
    owned[case.req_to_token[int(case.slot_ids[0]), : int(case.seq_lens[0])].long()] = True
    caches = []
    for cache in (case.k_cache, case.v_cache):
        bits = cache.view(torch.uint8).clone()
        bits[~owned] = 0x7F
        caches.append(bits.view(cache.dtype))
    dirty = dataclasses.replace(case, k_cache=caches[0], v_cache=caches[1])
    assert torch.equal(pw.sparse_prefill(*dirty.args()), clean)


def test_a_token_in_the_future_does_not_matter():
    case = make_case("first_chunk", seed=8)
    before = pw.sparse_prefill(*case.args())
    row = case.req_to_token[int(case.slot_ids[0])]
    k_cache = case.k_cache.float()
    k_cache[row[200].long()] = 3.0
    after = pw.sparse_prefill(*dataclasses.replace(case, k_cache=k_cache.to(case.k_cache.dtype)).args())
    changed = (before != after).flatten(1).any(dim=1)
    assert not changed[:200].any()
    assert changed[200]


def test_other_arguments_of_the_call_do_not_change_the_result():
    case = make_case("heads4", seed=9)
    expected = pw.sparse_prefill(*case.args())
    workspace = pw.Workspace(400, 4, kv_heads=4, topk=16, q_heads=64, device="cpu")
    assert torch.equal(pw.sparse_prefill(*case.args(), workspace=workspace), expected)
    assert torch.equal(pw.sparse_prefill(*case.args(), config=pw.Config(mode="union8")), expected)


def test_out_and_workspace_receive_the_result():
    case = make_case("padded", seed=10)
    expected = pw.sparse_prefill(*case.args())
    out = torch.full(case.q.shape, float("nan"), dtype=case.q.dtype)
    assert pw.sparse_prefill(*case.args(), out=out) is out
    assert torch.equal(out, expected)
    workspace = pw.Workspace(400, 4, kv_heads=1, topk=16, q_heads=16, device="cpu")
    in_workspace = pw.sparse_prefill(*case.args(), workspace=workspace)
    assert in_workspace.data_ptr() == workspace.out(len(case.q)).data_ptr()
    assert torch.equal(in_workspace, expected)
    out.fill_(float("nan"))
    assert pw.sparse_prefill(*case.args(), workspace=workspace, out=out) is out
    assert torch.equal(out, expected)
    # The reference engine never hands out the workspace's memory: it is there to be compared with.
    own = pw.reference.sparse_prefill(*case.args(), workspace=workspace)
    assert own.data_ptr() != in_workspace.data_ptr()
    assert torch.equal(own, expected)


def test_no_tokens():
    case = make_case("tail", seed=11, requests=((0, 0), (0, 300)), tail=None)
    out = pw.sparse_prefill(*case.args())
    assert out.shape == (0, 16, 128)
    none = make_case("tail", seed=11, requests=(), tail=None)
    assert pw.sparse_prefill(*none.args()).shape == (0, 16, 128)
    padded = make_case("tail", seed=11, requests=(), tail=None, padding=5)
    assert torch.equal(pw.sparse_prefill(*padded.args()), torch.zeros(5, 16, 128, dtype=torch.bfloat16))


@pytest.mark.parametrize("bad", [-1, 1 << 20, None])
def test_a_cache_slot_that_does_not_exist_is_refused(bad):
    case = make_case("tail", seed=12)
    table = case.req_to_token.clone()
    # None: the first slot past the pool's end.
    table[int(case.slot_ids[0]), int(case.seq_lens[0]) - 1] = case.k_cache.shape[0] if bad is None else bad
    with pytest.raises(ValueError, match=r"sparse_prefill: req_to_token must be in 0\.\.\d+ .* got .* on page \d+"):
        pw.sparse_prefill(*dataclasses.replace(case, req_to_token=table).args())


def test_recorded_server_call():
    """One real call of SGLang's Triton kernel (bf16 arithmetic): as near as bf16 allows."""
    workload = pw.load_workload(DATA / "m3_tiny_layer.npz")
    arguments = workload.attention_arguments()
    out = pw.sparse_prefill(**arguments | {"q": arguments["q"].double()})
    assert nrms(workload.out, out) <= 0.0025
    assert nrms(workload.out, pw.sparse_prefill(**arguments)) <= 0.0025
    # The bound is tight enough to notice one wrong page in sixteen, one position too many, or another scale.
    dropped = arguments["topk_idx"].clone()
    dropped[:, :, 0] = -1
    for change in (
        {"topk_idx": dropped},
        {"seq_lens": arguments["seq_lens"], "prefix_lens": arguments["prefix_lens"] - 1},
        {"sm_scale": 0.99 * 128**-0.5},
    ):
        assert nrms(pw.sparse_prefill(**arguments | change), workload.out) > 0.0025


def test_memory_stays_bounded():
    """Two thousand queries of 16 heads: the scores alone would be 0.5 GB at once."""
    import resource

    case = make_case("prefix", seed=13, requests=((2000, 8000),))
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    out = pw.sparse_prefill(*case.args())
    grown = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1024
    assert grown < 400
    rows = np.random.default_rng(0).integers(0, 2000, 3).tolist()
    for row in rows:
        one = dataclasses.replace(
            case,
            q=case.q[row : row + 1],
            topk_idx=case.topk_idx[:, row : row + 1].contiguous(),
            cu_seqlens=torch.tensor([0, 1], dtype=torch.int32),
            prefix_lens=case.prefix_lens + row,
        )
        assert nrms(out[row], looped(one)) < 0.01
