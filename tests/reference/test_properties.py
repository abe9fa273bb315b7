"""Worked examples, and what must hold for every input, whatever the order found."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import pageweaver_sglang as pw
from pageweaver_sglang.plan import UnionPlan, group_bound
from pageweaver_sglang.reference.layout import positions, support_sets

from .strategies import picks


def one_request(rows, *, k=None):
    """Inputs of one request whose prefix is long enough for every page of ``rows`` (page size 1)."""
    k = k or max(map(len, rows))
    padded = [list(row) + [-1] * (k - len(row)) for row in rows]
    topk_idx = torch.tensor([padded], dtype=torch.int32)
    cu_seqlens = torch.tensor([0, len(rows)], dtype=torch.int32)
    prefix_lens = torch.tensor([1 + max((page for row in rows for page in row), default=0)], dtype=torch.int32)
    return topk_idx, cu_seqlens, prefix_lens


def plan_of(args, perm, **options) -> UnionPlan:
    topk_idx, cu_seqlens, prefix_lens = args
    return pw.prepare_unions(topk_idx, perm, cu_seqlens, prefix_lens + cu_seqlens.diff(), prefix_lens, **options)


def test_worked_example_of_the_design():
    args = one_request([{1, 2}, {8, 9}, {2, 3}, {3, 4}, {8, 10}, {9, 10}])
    options = {"group_size": 3, "page_size": 1}
    perm = pw.regroup(*args, **options)
    assert perm.tolist() == [[0, 2, 3, 1, 4, 5]]
    assert perm.dtype == torch.int32
    assert plan_of(args, None, **options).visits() == 10
    plan = plan_of(args, perm, **options)
    assert plan.visits() == 7
    assert plan.pages[0, 0].tolist() == [1, 2, 3, 4, -1, -1]
    assert plan.masks[0, 0].tolist() == [0b001, 0b011, 0b110, 0b100, 0, 0]
    assert plan.reuse() == pytest.approx(12 / 7)


def test_greedy_can_lose_and_the_guard_prevents_it():
    args = one_request([[1, 2, 3, 4], [1, 2, 6, 7], [1, 2, 3, 5], [3, 5, 8, 9]])
    options = {"group_size": 2, "page_size": 1}
    assert plan_of(args, None, **options).visits() == 12
    greedy = pw.regroup(*args, **options)
    assert greedy.tolist() == [[0, 2, 1, 3]]
    assert plan_of(args, greedy, **options).visits() == 13
    assert pw.regroup(*args, guard="window", **options).tolist() == [[0, 1, 2, 3]]


def test_the_guard_keeps_the_original_order_on_a_tie_and_takes_a_gain():
    tie = one_request([[1, 2], [3, 4], [1, 5], [3, 6]])
    assert pw.regroup(*tie, group_size=2, page_size=1, guard="none").tolist() == [[0, 2, 1, 3]]
    gain = one_request([[1], [2], [1], [2]])
    assert pw.regroup(*gain, group_size=2, page_size=1, guard="window").tolist() == [[0, 2, 1, 3]]
    # Three queries in two groups: [0, 2][1] has as many visits as [0, 1][2].
    equal = one_request([[1, 2], [2, 3], [1, 2, 3]])
    assert pw.regroup(*equal, group_size=2, page_size=1).tolist() == [[0, 1, 2]]
    equal = one_request([[1, 2], [4, 5], [1, 3], [1, 4]])
    options = {"group_size": 2, "page_size": 1}
    assert pw.regroup(*equal, **options).tolist() == [[0, 2, 1, 3]]
    assert (
        plan_of(equal, None, **options).visits()
        == plan_of(equal, pw.regroup(*equal, **options), **options).visits() + 1
    )


def test_a_tie_goes_to_the_smaller_id():
    args = one_request([[1, 2], [5], [6], [1], [2]])
    assert pw.regroup(*args, group_size=2, page_size=1).tolist() == [[0, 3, 1, 2, 4]]


def test_the_cost_counts_new_pages_not_the_overlap():
    """A small set with nothing in common is cheaper than a large one that shares much."""
    args = one_request([[1, 2, 3], [1, 2, 7, 8], [9]])
    assert pw.regroup(*args, group_size=2, page_size=1).tolist() == [[0, 2, 1]]


def test_a_query_that_picks_nothing_is_the_cheapest():
    args = one_request([[1], [2], []])
    assert pw.regroup(*args, group_size=2, page_size=1).tolist() == [[0, 2, 1]]


def test_capacity_is_the_number_of_pages_of_the_request():
    rows = [[1], [2], [1], [2]] * 2
    topk_idx = torch.tensor([rows], dtype=torch.int32)
    cu_seqlens = torch.tensor([0, 4, 8], dtype=torch.int32)
    # Sequences of 12 and 13 tokens: 3 and 4 pages of 4.
    prefix_lens = torch.tensor([8, 9], dtype=torch.int32)
    args, options = (topk_idx, cu_seqlens, prefix_lens), {"group_size": 2, "page_size": 4}
    assert pw.regroup(*args, capacity=3, **options).tolist() == [[0, 2, 1, 3, 4, 5, 6, 7]]
    assert pw.regroup(*args, capacity=4, **options).tolist() == [[0, 2, 1, 3, 4, 6, 5, 7]]
    assert pw.regroup(*args, capacity=2, **options).tolist() == [list(range(8))]
    assert pw.regroup(*args, **options).tolist() == [[0, 2, 1, 3, 4, 6, 5, 7]]


def test_rounds_count_quads_of_slots():
    args = one_request([[1]] * 3 + [[2]] + [[1]] + [[3]] * 3)
    plan = plan_of(args, None, page_size=1)
    # Page 1 in both quads, page 2 in the first, page 3 in the second.
    assert (plan.visits(), plan.rounds()) == (3, 4)
    assert plan_of(args, None, page_size=1, group_size=4).rounds() == 4
    assert (
        plan_of(args, None, page_size=1, group_size=2).rounds()
        == plan_of(args, None, page_size=1, group_size=2).visits()
    )


def test_without_visits_reuse_is_zero():
    plan = plan_of(one_request([[], []], k=2), None, page_size=1)
    assert (plan.visits(), plan.rounds(), plan.reuse()) == (0, 0, 0.0)


def test_group_of_32_uses_every_bit():
    args = one_request([[7]] * 32)
    plan = plan_of(args, None, page_size=1, group_size=32, window=32)
    assert plan.masks.dtype == torch.int32
    assert plan.masks[0, 0, 0] == -1
    assert (plan.visits(), plan.rounds(), plan.reuse()) == (1, 8, 32.0)


def test_no_tokens_and_no_requests():
    topk_idx = torch.empty(2, 0, 16, dtype=torch.int32)
    for requests in (0, 2):
        cu_seqlens = torch.zeros(requests + 1, dtype=torch.int32)
        lengths = torch.zeros(requests, dtype=torch.int32)
        perm = pw.regroup(topk_idx, cu_seqlens, lengths)
        assert perm.shape == (2, 0)
        plan = pw.prepare_unions(topk_idx, perm, cu_seqlens, lengths, lengths)
        assert plan.visits() == 0
        assert plan.counts.shape == (2, group_bound(0, requests, 128, 8))


def test_an_order_that_crosses_windows_but_not_requests_is_taken():
    """``prepare_unions`` serves any order of a request's queries, such as one found offline."""
    args = one_request([[i % 5] for i in range(20)])
    perm = torch.randperm(20, generator=torch.Generator().manual_seed(0)).to(torch.int32)[None]
    plan = plan_of(args, perm, page_size=1, window=8, group_size=4)
    queries = plan.queries[plan.queries >= 0]
    assert queries.tolist() == perm[0].tolist()


def test_what_an_order_says_of_padding_rows_is_not_looked_at():
    topk_idx, _, prefix_lens = one_request([[i % 3] for i in range(20)])
    args = (topk_idx, torch.tensor([0, 11], dtype=torch.int32), prefix_lens)
    perm = torch.arange(20, dtype=torch.int32)[None]
    expected = plan_of(args, perm, page_size=1)
    garbage = perm.clone()
    garbage[:, 11:] = 1 << 30
    got = plan_of(args, garbage, page_size=1)
    for name in ("pages", "masks", "counts", "queries", "limits"):
        assert torch.equal(getattr(got, name), getattr(expected, name)), name


def test_layout():
    picked = torch.tensor([[[5, -7, 3, 5, 4, -1], [9, 0, 0, 0, 2, 1]]], dtype=torch.int32)
    supports = support_sets(picked, torch.tensor([5, 2])).sort(dim=2).values
    assert supports.tolist() == [[[-1, -1, -1, -1, 3, 4], [-1, -1, -1, -1, 0, 1]]]
    assert positions([0, 2, 2, 5], 7, torch.tensor([10, 4, 0])).tolist() == [10, 11, 0, 1, 2, -1, -1]


@given(case=picks(), guard=st.sampled_from(["none", "window"]))
@settings(max_examples=60, deadline=None)
def test_order_is_a_bijection_inside_windows(case, guard):
    perm = pw.regroup(*case.regroup_args(), **case.options, guard=guard)
    bounds, tokens = case.cu_seqlens.tolist(), case.topk_idx.shape[1]
    for row in perm.tolist():
        for start, end in pairwise(bounds):
            for first in range(start, end, case.options["window"]):
                last = min(first + case.options["window"], end)
                assert sorted(row[first:last]) == list(range(first, last))
        assert row[bounds[-1] :] == list(range(bounds[-1], tokens))


@given(case=picks())
@settings(max_examples=60, deadline=None)
def test_masks_are_membership(case):
    """Reading the plan back gives every query's support set, and each page of a union has a member."""
    perm = pw.regroup(*case.regroup_args(), **case.options)
    plan = pw.prepare_unions(*case.unions_args(perm), **case.options)
    page_size, bounds = case.options["page_size"], case.cu_seqlens.tolist()
    kv_heads, tokens, _ = case.topk_idx.shape
    for head in range(kv_heads):
        seen = {}
        for group in range(plan.counts.shape[1]):
            count = int(plan.counts[head, group])
            pages = plan.pages[head, group].tolist()
            assert pages[:count] == sorted(set(pages[:count]))
            assert set(pages[count:]) <= {-1}
            masks = plan.masks[head, group].tolist()
            assert all(masks[:count])
            assert not any(masks[count:])
            for slot, query in enumerate(plan.queries[head, group].tolist()):
                picked = {pages[i] for i in range(count) if masks[i] >> slot & 1}
                if query < 0:
                    assert not picked
                else:
                    assert query not in seen
                    seen[query] = picked
        assert sorted(seen) == list(range(tokens))
        for query, picked in seen.items():
            request = next((r for r in range(len(bounds) - 1) if bounds[r] <= query < bounds[r + 1]), None)
            pages = 0 if request is None else -(-int(case.seq_lens[request]) // page_size)
            assert picked == {page for page in case.topk_idx[head, query].tolist() if 0 <= page < pages}


@given(case=picks())
@settings(max_examples=60, deadline=None)
def test_groups_stay_inside_a_window(case):
    plan = pw.prepare_unions(*case.unions_args(pw.regroup(*case.regroup_args(), **case.options)), **case.options)
    bounds, tokens = case.cu_seqlens.tolist(), case.topk_idx.shape[1]
    window_of = {}
    for request, (start, end) in enumerate(zip([*bounds], [*bounds[1:], tokens], strict=True)):
        for query in range(start, end):
            window_of[query] = (request, (query - start) // case.options["window"])
    for queries in plan.queries.flatten(0, 1).tolist():
        assert len({window_of[query] for query in queries if query >= 0}) <= 1


@given(case=picks())
@settings(max_examples=60, deadline=None)
def test_the_guard_never_raises_visits(case):
    original = pw.prepare_unions(*case.unions_args(None), **case.options)
    guarded = pw.regroup(*case.regroup_args(), **case.options, guard="window")
    free = pw.regroup(*case.regroup_args(), **case.options)
    # seq_lens of the regroup are prefix + chunk: judge it by those.
    seq_lens = case.prefix_lens + case.cu_seqlens.diff()
    visits = [
        pw.prepare_unions(case.topk_idx, perm, case.cu_seqlens, seq_lens, case.prefix_lens, **case.options).visits()
        for perm in (None, guarded, free)
    ]
    assert visits[1] <= min(visits[0], visits[2])
    assert original.counts.shape == (
        case.topk_idx.shape[0],
        group_bound(case.topk_idx.shape[1], len(case.prefix_lens), case.options["window"], case.options["group_size"]),
    )


@given(case=picks())
@settings(max_examples=60, deadline=None)
def test_repeats_invalid_ids_and_order_in_a_row_do_not_matter(case):
    """Only the support sets count: rewrite every row as its sorted set, with -1 behind."""
    page_size = case.options["page_size"]
    seq_lens = case.prefix_lens + case.cu_seqlens.diff()
    clean = torch.full_like(case.topk_idx, -1)
    for request, seq_len in enumerate(seq_lens.tolist()):
        pages = -(-seq_len // page_size)
        for query in range(int(case.cu_seqlens[request]), int(case.cu_seqlens[request + 1])):
            for head in range(clean.shape[0]):
                ids = sorted({page for page in case.topk_idx[head, query].tolist() if 0 <= page < pages})
                clean[head, query, : len(ids)] = torch.tensor(ids, dtype=torch.int32)
    perm = pw.regroup(*case.regroup_args(), **case.options)
    assert torch.equal(perm, pw.regroup(clean, case.cu_seqlens, case.prefix_lens, **case.options))
    dirty = pw.prepare_unions(case.topk_idx, perm, case.cu_seqlens, seq_lens, case.prefix_lens, **case.options)
    tidy = pw.prepare_unions(clean, perm, case.cu_seqlens, seq_lens, case.prefix_lens, **case.options)
    assert torch.equal(dirty.pages, tidy.pages)
    assert torch.equal(dirty.masks, tidy.masks)


@given(
    lengths=st.lists(st.integers(0, 300), max_size=6),
    padding=st.integers(0, 300),
    window=st.integers(1, 140),
    group_size=st.integers(1, 32),
)
@settings(max_examples=200, deadline=None)
def test_group_bound_has_room_for_any_lengths(lengths, padding, window, group_size):
    tokens, used = sum(lengths) + padding, 0
    for length in [*lengths, padding]:
        used += sum(-(-min(window, length - first) // group_size) for first in range(0, length, window))
    assert used <= group_bound(tokens, len(lengths), window, group_size)


def test_group_bound_values():
    assert group_bound(15272, 1, 128, 8) == (15272 + 14) // 8
    assert group_bound(100, 3, 64, 32) == (100 + 31 * 4) // 32
    assert group_bound(100, 3, 10, 8) == (10 + 3 + 1) * 2
    assert group_bound(0, 0, 128, 8) == 0


def test_lengths_near_the_largest_int32():
    """Page counts of sequences of almost 2**31 tokens do not wrap around."""
    longest = 2**31 - 1
    lengths = [torch.tensor(values, dtype=torch.int32) for values in ([0, 3], [longest], [longest - 3])]
    topk_idx = torch.tensor([[[0, 2**24 - 1, 2**24], [5, 6, -1], [0, 2**24 - 1, 7]]], dtype=torch.int32)
    plan = pw.prepare_unions(topk_idx, None, *lengths)
    assert plan.pages[0, 0, :5].tolist() == [0, 5, 6, 7, 2**24 - 1]
    assert plan.limits[0, 0, :3].tolist() == [longest - 3, longest - 2, longest - 1]
    assert pw.regroup(topk_idx, lengths[0], lengths[2]).tolist() == [[0, 2, 1]]
