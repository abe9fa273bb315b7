"""The CUDA regroup and union-preparation kernels equal the reference engine bit for bit."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
import torch
from gpu_support import HAS_CUDA, plan_with_slots

import pageweaver_sglang as pw
from tests.generators import CASE_NAMES, make_case

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not HAS_CUDA, reason="needs a CUDA device")]

DATA = Path(__file__).parents[1] / "data"
WORKLOADS = ["ctx8k", "ctx16k", "ctx32k_chunk2", "ctx64k_a", "ctx64k_flat", "ctx64k_mixed", "ctx128k", "packed"]


def both_permutations(topk_idx, cu_seqlens, prefix_lens, **options):
    arguments = (topk_idx, cu_seqlens, prefix_lens)
    on_cpu = pw.reference.regroup(*arguments, **options)
    on_gpu = pw.regroup(*(a.cuda() for a in arguments), **options)
    return on_cpu, on_gpu.cpu()


def assert_same_plan(gpu, cpu):
    for name in ("pages", "masks", "counts", "queries", "limits"):
        assert torch.equal(getattr(gpu, name).cpu(), getattr(cpu, name)), name


@pytest.mark.parametrize("workload", WORKLOADS)
@pytest.mark.parametrize("window", [64, 128])
def test_workloads(workload, window):
    w = pw.load_workload(DATA / f"{workload}.npz")
    lengths = (w.cu_seqlens, w.seq_lens, w.prefix_lens)
    on_cpu, on_gpu = both_permutations(w.topk_idx, w.cu_seqlens, w.prefix_lens, window=window)
    assert torch.equal(on_gpu, on_cpu)
    for group_size in (8, 4):
        for perm in (on_cpu, None):
            cpu = pw.reference.prepare_unions(w.topk_idx, perm, *lengths, window=window, group_size=group_size)
            gpu = pw.prepare_unions(
                w.topk_idx.cuda(),
                None if perm is None else perm.cuda(),
                *(x.cuda() for x in lengths),
                window=window,
                group_size=group_size,
            )
            assert_same_plan(gpu, cpu)


@pytest.mark.parametrize("options", [{"guard": "window"}, {"capacity": 512}, {"capacity": 100, "guard": "window"}])
@pytest.mark.parametrize("workload", ["packed", "ctx128k", "ctx64k_flat"])
def test_guard_and_capacity(workload, options):
    w = pw.load_workload(DATA / f"{workload}.npz")
    on_cpu, on_gpu = both_permutations(w.topk_idx, w.cu_seqlens, w.prefix_lens, **options)
    assert torch.equal(on_gpu, on_cpu)


@pytest.mark.parametrize("group_size", [1, 2, 3, 5, 7, 8, 9, 12, 16, 32])
def test_group_sizes(group_size):
    w = pw.load_workload(DATA / "packed.npz")
    on_cpu, on_gpu = both_permutations(
        w.topk_idx, w.cu_seqlens, w.prefix_lens, window=64, group_size=group_size, guard="window"
    )
    assert torch.equal(on_gpu, on_cpu)
    if group_size <= 16:
        lengths = (w.cu_seqlens, w.seq_lens, w.prefix_lens)
        cpu = pw.reference.prepare_unions(w.topk_idx, on_cpu, *lengths, window=64, group_size=group_size)
        gpu = pw.prepare_unions(
            w.topk_idx.cuda(), on_gpu.cuda(), *(x.cuda() for x in lengths), window=64, group_size=group_size
        )
        assert_same_plan(gpu, cpu)


def test_pages_of_a_million_tokens_and_more_than_512_in_a_window():
    """The renaming has no context limit: ids up to 2^20, up to 2,048 distinct pages in one window."""
    g = torch.Generator().manual_seed(5)
    tokens, prefix = 300, (1 << 27) - 1024
    topk = torch.randint(0, 1 << 20, (2, tokens, 16), generator=g, dtype=torch.int32)
    topk[:, :, 8:] = topk[:, :1, 8:] + torch.randint(0, 40, (2, tokens, 8), generator=g, dtype=torch.int32)
    cu, pre = torch.tensor([0, tokens], dtype=torch.int32), torch.tensor([prefix], dtype=torch.int32)
    for window in (64, 128):
        on_cpu, on_gpu = both_permutations(topk, cu, pre, window=window)
        assert torch.equal(on_gpu, on_cpu)


@pytest.mark.parametrize("pages", [4095, 4096, 4097, 8193])
@pytest.mark.parametrize("guard", ["none", "window"])
def test_contexts_around_the_name_table(pages, guard):
    """Up to 4096 pages an id is its own entry in the name table, past that a hash table gives the entry."""
    g = torch.Generator().manual_seed(pages)
    tokens = 200
    topk = torch.randint(0, pages, (2, tokens, 16), generator=g, dtype=torch.int32)
    topk[:, :, :10] = pages - 1 - torch.randint(0, 30, (2, tokens, 10), generator=g, dtype=torch.int32)
    cu, prefix = torch.tensor([0, tokens], dtype=torch.int32), torch.tensor([pages * 128 - tokens], dtype=torch.int32)
    for window in (64, 128):
        on_cpu, on_gpu = both_permutations(topk, cu, prefix, window=window, guard=guard)
        assert torch.equal(on_gpu, on_cpu)


@pytest.mark.parametrize("name", CASE_NAMES)
@pytest.mark.parametrize("seed", [0, 1])
def test_cases(name, seed):
    cpu_case = make_case(name, seed=seed)
    case = make_case(name, seed=seed, device="cuda")
    on_cpu, on_gpu = both_permutations(cpu_case.topk_idx, cpu_case.cu_seqlens, cpu_case.prefix_lens)
    assert torch.equal(on_gpu, on_cpu)
    lengths = (cpu_case.cu_seqlens, cpu_case.seq_lens, cpu_case.prefix_lens)
    for group_size in (8, 4):
        cpu = pw.reference.prepare_unions(cpu_case.topk_idx, on_cpu, *lengths, group_size=group_size)
        marks = torch.zeros(case.k_cache.shape[1], case.k_cache.shape[0] // 128, dtype=torch.int32, device="cuda")
        gpu = plan_with_slots(case, on_gpu.cuda(), group_size=group_size, marks=marks)
        assert_same_plan(gpu, cpu)
        assert_slots_follow_the_table(gpu, cpu_case)
        assert_marks_are_the_listed_pages(marks.cpu(), gpu, cpu_case)


def assert_slots_follow_the_table(plan, case):
    """Every listed page resolves to the physical page that req_to_token names for its first token."""
    pages, slots, queries = plan.pages.cpu(), plan.slots.cpu(), plan.queries.cpu()
    request_of = torch.bucketize(torch.arange(case.q.shape[0]), case.cu_seqlens[1:].long(), right=True)
    for head, group in (plan.counts.cpu() > 0).nonzero().tolist():
        count = int(plan.counts[head, group])
        members = queries[head, group]
        request = int(request_of[members[members >= 0][0].long()])
        row = case.req_to_token[int(case.slot_ids[request])]
        listed = pages[head, group, :count].long()
        assert torch.equal(slots[head, group, :count], row[listed * 128] // 128)
    assert bool((slots[pages < 0] == -1).all())


def assert_marks_are_the_listed_pages(marks, plan, case):
    """Every page in ``slots`` and no other is marked, with its request's tokens (these cases share no page)."""
    pages, slots, queries = plan.pages.cpu(), plan.slots.cpu(), plan.queries.cpu()
    request_of = torch.bucketize(torch.arange(case.q.shape[0]), case.cu_seqlens[1:].long(), right=True)
    expected = torch.zeros_like(marks)
    for head, group in (plan.counts.cpu() > 0).nonzero().tolist():
        members = queries[head, group]
        length = case.seq_lens[request_of[members[members >= 0][0].long()]]
        listed = slots[head, group] >= 0
        tokens = (length - pages[head, group, listed] * 128).clamp(max=128)
        expected[head, slots[head, group, listed].long()] = tokens.int()
    assert torch.equal(marks, expected)


@pytest.mark.parametrize("row", [-1, 7, 2**31, -(2**62)])
def test_request_slots_outside_the_table_read_nothing(row):
    """No page resolves, so attention reads none (``test_gpu_gaps.py`` has the rows that it writes)."""
    case = make_case("prefix", seed=3, device="cuda", requests=((20, 600),))
    slot_ids = torch.full_like(case.slot_ids, row)
    plan = plan_with_slots(dataclasses.replace(case, slot_ids=slot_ids), None)
    assert bool((plan.slots == -1).all())
