"""What the wrappers hand to the kernel library, argument by argument; the library is a stand-in that only listens."""

from __future__ import annotations

import pytest
import torch

from pageweaver_sglang.cuda import ops
from pageweaver_sglang.plan import UnionPlan

PLAN = UnionPlan.empty(1, 20, 1, 4, window=128, group_size=8, page_size=64, device="cpu", with_slots=True)


@pytest.fixture
def heard(monkeypatch):
    """Calls: (function, arguments), tensors among them by identity."""
    calls = []

    class Library:
        def __getattr__(self, name):
            return lambda *arguments: calls.append((name, arguments))

    monkeypatch.setattr(ops, "load", Library)
    return calls


def tensors(count):
    return [torch.zeros(1) for _ in range(count)]


def same(got, expected):
    return len(got) == len(expected) and all(
        a is b if isinstance(b, torch.Tensor) else type(a) is type(b) and a == b
        for a, b in zip(got, expected, strict=True)
    )


@pytest.mark.parametrize(("capacity", "limit"), [(None, 0), (300, 300)])
@pytest.mark.parametrize(("guard", "guarded"), [("none", False), ("window", True)])
def test_regroup(heard, capacity, limit, guard, guarded):
    arguments = tensors(4)
    ops.regroup(*arguments, window=64, group_size=5, page_size=32, capacity=capacity, guard=guard)
    ((name, got),) = heard
    assert name == "pw_regroup"
    assert same(got, [*arguments, 64, 5, 32, limit, guarded])


@pytest.mark.parametrize("with_pool", [False, True])
def test_prepare_unions(heard, with_pool):
    topk_idx, perm, cu_seqlens, seq_lens, prefix_lens, req_to_token, slot_ids = tensors(7)
    pool = {"req_to_token": req_to_token, "slot_ids": slot_ids, "num_pool_pages": 9} if with_pool else {}
    ops.prepare_unions(topk_idx, perm, cu_seqlens, seq_lens, prefix_lens, PLAN, window=64, **pool)
    ((name, got),) = heard
    assert name == "pw_union_prep"
    expected = [topk_idx, perm, cu_seqlens, seq_lens, prefix_lens, *(pool.values() or (None, None, 0)), 64, 64]
    arrays = [PLAN.pages, PLAN.masks, PLAN.counts, PLAN.queries, PLAN.limits, PLAN.slots if with_pool else None]
    assert same(got, [*expected, *arrays, PLAN.queue])


@pytest.mark.parametrize(
    ("scale", "number", "tensor"), [(None, 1.0, None), (3, 3.0, None), (0.5, 0.5, None), (PLAN.masks, 1.0, PLAN.masks)]
)
def test_union_attention(heard, scale, number, tensor):
    q, k_cache, v_cache, out = tensors(4)
    ops.union_attention(q, k_cache, v_cache, PLAN, out, sm_scale=0.1, k_scale=scale, v_scale=0.25)
    ops.union_attention(q, k_cache, v_cache, PLAN, out, sm_scale=0.1, k_scale=0.25, v_scale=scale, engine="union8")
    arrays = [PLAN.slots, PLAN.pages, PLAN.masks, PLAN.counts, PLAN.queries, PLAN.limits, PLAN.queue]
    before = [q, k_cache, v_cache, *arrays, out, 0.1]
    assert [name for name, _ in heard] == ["pw_attention"] * 2
    assert same(heard[0][1], ["stream", *before, number, 0.25, tensor, None])
    assert same(heard[1][1], ["union8", *before, 0.25, number, None, tensor])
