"""The two kernels in Triton: attention of a tile of queries over one or two pages, and the merge of a query's parts.

Both compute in Q's dtype with FP32 sums (K and V are widened), like SGLang's own Triton kernel. Import this module only
where Triton is at hand.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from .pairing import TILE, PairPlan

_LOG2_E = 1.4426950408889634


@triton.jit
def _attend_kernel(
    q,
    k_cache,
    v_cache,
    req_to_token,
    slot_ids,
    heads,
    requests,
    pages,
    queries,
    partials,
    limits,
    part,
    log_sum,
    scale,
    tokens,
    q_token_stride,
    q_head_stride,
    cache_slot_stride,
    cache_head_stride,
    table_stride,
    max_partials,
    TILE: tl.constexpr,
    HEADS: tl.constexpr,
    DIM: tl.constexpr,
    PAGE: tl.constexpr,
):
    """One item: its queries attend to its pages; both go through one running softmax, so that one part is written.

    Row r of the tile is query head r % HEADS of query r // HEADS. ``scale`` is that of the scores in base 2.
    """
    item = tl.program_id(0)
    head = tl.load(heads + item)
    table = req_to_token + tl.load(slot_ids + tl.load(requests + item)).to(tl.int64) * table_stride
    row = tl.arange(0, TILE * HEADS)
    dim = tl.arange(0, DIM)
    offset = tl.arange(0, PAGE)
    query = tl.load(queries + item * TILE + row // HEADS)
    live = query >= 0
    limit = tl.load(limits + query, mask=live, other=-1)
    q_row = query.to(tl.int64) * q_token_stride + (head * HEADS + row % HEADS) * q_head_stride
    q_tile = tl.load(q + q_row[:, None] + dim[None, :], mask=live[:, None], other=0.0)

    # Finite, so that an empty row gives zeros and no NaN.
    peak = tl.full([TILE * HEADS], -1e30, dtype=tl.float32)
    total = tl.zeros([TILE * HEADS], dtype=tl.float32)
    out = tl.zeros([TILE * HEADS, DIM], dtype=tl.float32)
    for which in range(2):
        page = tl.load(pages + item * 2 + which)
        if page >= 0:
            cell = tl.load(table + page * PAGE).to(tl.int64) + offset
            where = cell[:, None] * cache_slot_stride + head * cache_head_stride + dim[None, :]
            k_tile = tl.load(k_cache + where).to(q_tile.dtype)
            score = tl.dot(q_tile, tl.trans(k_tile)) * scale
            visible = (page * PAGE + offset)[None, :] <= limit[:, None]
            score = tl.where(visible, score, -1e30)
            new_peak = tl.maximum(peak, tl.max(score, axis=1))
            weight = tl.where(visible, tl.exp2(score - new_peak[:, None]), 0.0)
            shrink = tl.exp2(peak - new_peak)
            v_tile = tl.load(v_cache + where).to(q_tile.dtype)
            out = out * shrink[:, None] + tl.dot(weight.to(q_tile.dtype), v_tile)
            total = total * shrink + tl.sum(weight, axis=1)
            peak = new_peak
    seen = total > 0
    out = out / tl.where(seen, total, 1.0)[:, None]
    number = tl.load(partials + item * TILE + row // HEADS)
    place = ((head.to(tl.int64) * tokens + query) * max_partials + number) * HEADS + row % HEADS
    tl.store(part + place[:, None] * DIM + dim[None, :], out.to(part.dtype.element_ty), mask=live[:, None])
    tl.store(log_sum + place, tl.where(seen, peak + tl.log2(tl.where(seen, total, 1.0)), -1e30), mask=live)


@triton.jit
def _merge_kernel(
    part,
    log_sum,
    counts,
    out,
    tokens,
    max_partials,
    out_token_stride,
    HEADS: tl.constexpr,
    DIM: tl.constexpr,
):
    """One query and KV head: the parts weighted by their log-sum-exps (base 2). No parts: zeros."""
    token = tl.program_id(0)
    head = tl.program_id(1)
    row = tl.arange(0, HEADS)
    dim = tl.arange(0, DIM)
    first = (head.to(tl.int64) * tokens + token) * max_partials
    peak = tl.full([HEADS], -1e30, dtype=tl.float32)
    total = tl.zeros([HEADS], dtype=tl.float32)
    merged = tl.zeros([HEADS, DIM], dtype=tl.float32)
    for number in range(tl.load(counts + head * tokens + token)):
        place = (first + number) * HEADS + row
        weight_log = tl.load(log_sum + place)
        value = tl.load(part + place[:, None] * DIM + dim[None, :]).to(tl.float32)
        new_peak = tl.maximum(peak, weight_log)
        shrink = tl.exp2(peak - new_peak)
        weight = tl.exp2(weight_log - new_peak)
        merged = merged * shrink[:, None] + value * weight[:, None]
        total = total * shrink + weight
        peak = new_peak
    merged = merged / tl.where(total > 0, total, 1.0)[:, None]
    where = token.to(tl.int64) * out_token_stride + (head * HEADS + row) * DIM
    tl.store(out + where[:, None] + dim[None, :], merged.to(out.dtype.element_ty))


def page_pair_attention(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    req_to_token: torch.Tensor,
    slot_ids: torch.Tensor,
    plan: PairPlan,
    part: torch.Tensor,
    log_sum: torch.Tensor,
    out: torch.Tensor,
    *,
    page_size: int,
    warps: int = 8,
) -> None:
    """Attend over a plan and write every row of ``out``.

    Args:
        q: ``[tokens, q_heads, head_dim]``.
        k_cache: ``[slots, kv_heads, head_dim]``; a page's tokens lie one behind the other.
        v_cache: shape and strides of ``k_cache``.
        req_to_token: int32 ``[request slots, positions]``.
        slot_ids: ``[requests]``.
        plan: on q's device.
        part: workspace of q's dtype, ``kv_heads * tokens * max_partials * heads * head_dim`` elements.
        log_sum: float32 workspace, ``kv_heads * tokens * max_partials * heads`` elements.
        out: shape of q, contiguous.
        page_size: tokens per page, a power of two.
        warps: of the first kernel's programs.
    """
    kv_heads, tokens = plan.counts.shape
    heads, dim = q.shape[1] // kv_heads, q.shape[2]
    if len(plan.pages):
        _attend_kernel[(len(plan.pages),)](
            q,
            k_cache,
            v_cache,
            req_to_token,
            slot_ids,
            plan.heads,
            plan.requests,
            plan.pages,
            plan.queries,
            plan.partials,
            plan.limits,
            part,
            log_sum,
            dim**-0.5 * _LOG2_E,
            tokens,
            q.stride(0),
            q.stride(1),
            k_cache.stride(0),
            k_cache.stride(1),
            req_to_token.stride(0),
            plan.max_partials,
            TILE=TILE,
            HEADS=heads,
            DIM=dim,
            PAGE=page_size,
            num_warps=warps,
        )
    if tokens:
        _merge_kernel[(tokens, kv_heads)](
            part, log_sum, plan.counts, out, tokens, plan.max_partials, out.stride(0), HEADS=heads, DIM=dim, num_warps=4
        )
