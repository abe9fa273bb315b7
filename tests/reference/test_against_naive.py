"""The reference engine equals plain Python sets, exactly: Algorithm 1, unions, masks, limits."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import pageweaver_sglang as pw
from tests import naive
from tests.generators import CASE_NAMES, make_case

from .strategies import picks

DATA = Path(__file__).parents[1] / "data"


def naive_perm(args, **options):
    topk_idx = args[0]
    expected = naive.regroup(*(tensor.tolist() for tensor in args), **options)
    return torch.tensor(expected, dtype=torch.int32).view(topk_idx.shape[:2])


def assert_plan_equals(plan, groups, *, k, group_size):
    """Every entry of every array, the unused ones included."""
    kv_heads, count = len(groups), len(groups[0])
    assert plan.pages.shape == plan.masks.shape == (kv_heads, plan.counts.shape[1], group_size * k)
    assert plan.queries.shape == plan.limits.shape == (kv_heads, plan.counts.shape[1], group_size)
    assert plan.masks.dtype == (torch.uint8 if group_size <= 8 else torch.int32)
    assert count <= plan.counts.shape[1]
    for head in range(kv_heads):
        for index in range(plan.counts.shape[1]):
            group = groups[head][index] if index < count else naive.Group([], [], {})
            pages = sorted(group.members)
            masks = [sum(1 << slot for slot in group.members[page]) for page in pages]
            empty = [-1] * (group_size - len(group.queries))
            rest = plan.pages.shape[2] - len(pages)
            assert plan.counts[head, index] == len(pages)
            assert plan.pages[head, index].tolist() == pages + [-1] * rest
            # An int32 mask of 32 slots has its sign for bit 31.
            assert [mask % (1 << 32) for mask in plan.masks[head, index].tolist()] == masks + [0] * rest
            assert plan.queries[head, index].tolist() == group.queries + empty
            assert plan.limits[head, index].tolist() == group.limits + empty


def assert_unions_equal(args, perm, **options):
    topk_idx, cu_seqlens, seq_lens, prefix_lens = args
    plan = pw.prepare_unions(topk_idx, perm, cu_seqlens, seq_lens, prefix_lens, **options)
    groups = naive.unions(
        topk_idx.tolist(),
        None if perm is None else perm.tolist(),
        cu_seqlens.tolist(),
        seq_lens.tolist(),
        prefix_lens.tolist(),
        **options,
    )
    assert_plan_equals(plan, groups, k=topk_idx.shape[2], group_size=options.get("group_size", 8))
    members = [len(slots) for head in groups for group in head for slots in group.members.values()]
    assert plan.visits() == len(members)
    assert plan.reuse() == pytest.approx(sum(members) / len(members) if members else 0.0)
    for tile in (4, 8):
        tiles = [
            len({slot // tile for slot in slots})
            for head in groups
            for group in head
            for slots in group.members.values()
        ]
        assert plan.rounds(tile) == sum(tiles)
    assert plan.rounds() == plan.rounds(4)


@given(case=picks(), guard=st.sampled_from(["none", "window"]), capacity=st.none() | st.integers(1, 40))
@settings(max_examples=150, deadline=None)
def test_regroup_of_drawn_inputs(case, guard, capacity):
    options = {**case.options, "guard": guard, "capacity": capacity}
    perm = pw.regroup(*case.regroup_args(), **options)
    assert torch.equal(perm, naive_perm(case.regroup_args(), **options))


@given(case=picks(), regrouped=st.booleans())
@settings(max_examples=100, deadline=None)
def test_unions_of_drawn_inputs(case, regrouped):
    perm = pw.regroup(*case.regroup_args(), **case.options) if regrouped else None
    args = (case.topk_idx, case.cu_seqlens, case.seq_lens, case.prefix_lens)
    assert_unions_equal(args, perm, **case.options)


@pytest.mark.parametrize("guard", ["none", "window"])
@pytest.mark.parametrize("window", [64, 128])
@pytest.mark.parametrize("name", CASE_NAMES)
def test_named_cases(name, window, guard):
    case = make_case(name, seed=3)
    args = (case.topk_idx, case.cu_seqlens, case.prefix_lens)
    perm = pw.regroup(*args, window=window, guard=guard)
    assert torch.equal(perm, naive_perm(args, window=window, guard=guard))
    lengths = (case.cu_seqlens, case.seq_lens, case.prefix_lens)
    assert_unions_equal((case.topk_idx, *lengths), perm, window=window)


@pytest.mark.parametrize("group_size", [4, 8, 32])
@pytest.mark.parametrize(
    ("name", "first", "count"),
    [("ctx64k_a", 5000, 400), ("ctx64k_mixed", 0, 300), ("ctx128k", 16000, 384), ("ctx8k", 4000, 300)],
)
def test_slices_of_workloads(name, first, count, group_size):
    """A cut that becomes a request of its own, with what precedes it as its prefix."""
    w = pw.load_workload(DATA / f"{name}.npz")
    topk_idx = w.topk_idx[:, first : first + count].contiguous()
    prefix_lens = w.prefix_lens + first
    cu_seqlens = torch.tensor([0, count], dtype=torch.int32)
    args = (topk_idx, cu_seqlens, prefix_lens)
    perm = pw.regroup(*args, group_size=group_size)
    assert torch.equal(perm, naive_perm(args, group_size=group_size))
    assert not torch.equal(perm[0], torch.arange(count, dtype=torch.int32))
    assert_unions_equal((topk_idx, cu_seqlens, prefix_lens + count, prefix_lens), perm, group_size=group_size)


def test_packed_workload():
    w = pw.load_workload(DATA / "packed.npz")
    keep = int(w.cu_seqlens[4]) + 200
    topk_idx = w.topk_idx[:, :keep].contiguous()
    lengths = [min(int(end), keep) for end in w.cu_seqlens]
    args = (topk_idx, torch.tensor(lengths, dtype=torch.int32), w.prefix_lens)
    assert torch.equal(pw.regroup(*args), naive_perm(args))


def test_wide_windows_and_windows_of_several_batches():
    """W2048 in more than one batch, with more distinct pages in a window than the paper's bitmap holds."""
    random = torch.Generator().manual_seed(1)
    tokens, prefix = 4500, 700 * 128
    topk_idx = torch.randint(0, 700, (1, tokens, 2), generator=random, dtype=torch.int32)
    args = (topk_idx, torch.tensor([0, tokens], dtype=torch.int32), torch.tensor([prefix], dtype=torch.int32))
    assert torch.equal(pw.regroup(*args, window=2048), naive_perm(args, window=2048))


def test_many_windows_in_several_batches(monkeypatch):
    """Cutting the work into batches changes nothing."""
    case = make_case("packed", seed=5, kv_heads=2)
    args = (case.topk_idx, case.cu_seqlens, case.prefix_lens)
    lengths = (case.cu_seqlens, case.seq_lens, case.prefix_lens)
    whole = pw.regroup(*args, window=64, guard="window")
    whole_plan = pw.prepare_unions(case.topk_idx, whole, *lengths, window=64)
    monkeypatch.setattr(sys.modules["pageweaver_sglang.reference.regroup"], "_BATCH_IDS", 1)
    monkeypatch.setattr(sys.modules["pageweaver_sglang.reference.unions"], "_BATCH_IDS", 1)
    perm = pw.regroup(*args, window=64, guard="window")
    plan = pw.prepare_unions(case.topk_idx, perm, *lengths, window=64)
    assert torch.equal(perm, whole)
    for name in ("pages", "masks", "counts", "queries", "limits"):
        assert torch.equal(getattr(plan, name), getattr(whole_plan, name)), name
