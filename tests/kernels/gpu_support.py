"""What the GPU tests share: the CUDA stages called one by one."""

from __future__ import annotations

import torch

import pageweaver_sglang as pw
from pageweaver_sglang.plan import UnionPlan

HAS_CUDA = torch.cuda.is_available()


def attend(
    case,
    *,
    window: int | None = 128,
    group_size: int = 8,
    guard: str = "none",
    out=None,
    perm=None,
    engine: str | None = None,
) -> torch.Tensor:
    """Run regroup (window None: original order), union prep and attention; the output starts as NaN."""
    from pageweaver_sglang.cuda import ops

    if window is not None and perm is None:
        perm = pw.regroup(
            case.topk_idx, case.cu_seqlens, case.prefix_lens, window=window, group_size=group_size, guard=guard
        )
    plan = plan_with_slots(case, perm, window=window or 128, group_size=group_size)
    if out is None:
        out = torch.full(case.q.shape, float("nan"), dtype=case.q.dtype, device=case.q.device)
    ops.union_attention(
        case.q,
        case.k_cache,
        case.v_cache,
        plan,
        out,
        sm_scale=128**-0.5,
        k_scale=getattr(case, "k_scale", None),
        v_scale=getattr(case, "v_scale", None),
        engine=engine,
    )
    return out


def plan_with_slots(case, perm, *, window: int = 128, group_size: int = 8) -> UnionPlan:
    """Build the plan that the attention kernel reads, over poisoned arrays (so that every entry must be written)."""
    from pageweaver_sglang.cuda import ops

    kv_heads, tokens, k = case.topk_idx.shape
    requests = case.prefix_lens.shape[0]
    plan = UnionPlan.empty(
        kv_heads,
        tokens,
        requests,
        k,
        window=window,
        group_size=group_size,
        page_size=128,
        device=case.q.device,
        with_slots=True,
    )
    for array in (plan.pages, plan.counts, plan.queries, plan.limits, plan.slots, plan.queue):
        array.fill_(0x5A5A5A5A)
    plan.masks.fill_(0x5A)
    ops.prepare_unions(
        case.topk_idx,
        perm,
        case.cu_seqlens,
        case.seq_lens,
        case.prefix_lens,
        plan,
        window=window,
        req_to_token=case.req_to_token,
        slot_ids=case.slot_ids,
        num_pool_pages=case.k_cache.shape[0] // 128,
    )
    return plan


def same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    return bool((a.contiguous().view(torch.int16) == b.contiguous().view(torch.int16)).all())
