"""How far an output is from the exact one, on sampled queries, and an independent walk of a union plan."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from .inputs import Step3Inputs

if TYPE_CHECKING:
    from pageweaver_sglang import UnionPlan


def nrms(output: torch.Tensor, exact: torch.Tensor) -> float:
    """Norm of the error over the norm of the exact values (0.01 is 1 %); infinite when an output isn't finite."""
    exact = exact.double()
    output = output.to(exact.device).double()
    if not bool(output.isfinite().all()):
        return float("inf")
    return float((output - exact).norm() / exact.norm().clamp(min=torch.finfo(torch.float64).tiny))


def sample_rows(tokens: int, count: int, seed: int = 0) -> torch.Tensor:
    """``count`` different token ids (int64, ascending), the first and the last token always among them."""
    generator = torch.Generator().manual_seed(seed)
    picked = torch.randperm(tokens, generator=generator)[: max(count - 2, 0)]
    return torch.cat([picked, torch.tensor([0, tokens - 1])]).unique()


def requests_of(rows: torch.Tensor, cu_seqlens: torch.Tensor) -> torch.Tensor:
    """Index of the request that owns each packed token id (int64)."""
    return torch.searchsorted(cu_seqlens.long(), rows.long(), right=True) - 1


def exact_rows(inputs: Step3Inputs, rows: torch.Tensor) -> torch.Tensor:
    """The reference engine's output (float64 inside) for some tokens only: ``[len(rows), q_heads, 128]``.

    Each row becomes a request of its own, one token long, at its own position; what it sees stays the same.
    """
    from pageweaver_sglang import reference

    rows = rows.to(inputs.q.device)
    request = requests_of(rows, inputs.cu_seqlens)
    position = inputs.prefix_lens[request] + (rows - inputs.cu_seqlens[request]).to(torch.int32)
    return reference.sparse_prefill(
        inputs.q[rows].double(),
        inputs.k_cache,
        inputs.v_cache,
        inputs.topk_idx[:, rows].contiguous(),
        inputs.req_to_token,
        inputs.slot_ids[request],
        torch.arange(len(rows) + 1, dtype=torch.int32, device=rows.device),
        torch.minimum(position + 1, inputs.seq_lens[request]),
        position,
        page_size=inputs.page_size,
    )


def union_walk(
    inputs: Step3Inputs, plan: UnionPlan, groups: list[int], kv_head: int = 0
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention of some groups by walking their unions as a kernel does, in plain float64.

    Reads what to attend to from the plan alone (pages, masks, queries, limits), never from ``topk_idx``, and keeps one
    running softmax per query. Together with :func:`exact_rows` it shows that grouping changes nothing.

    Returns:
        token ids int64 ``[n]`` and outputs float64 ``[n, query heads, 128]`` of KV head ``kv_head``.
    """
    page_size, heads = plan.page_size, inputs.heads_per_kv_head
    offsets = torch.arange(page_size, device=inputs.q.device)
    rows, outputs = [], []
    for group in groups:
        slot = (plan.queries[kv_head, group] >= 0).nonzero().flatten()
        ids = plan.queries[kv_head, group, slot].long()
        request = requests_of(ids[:1], inputs.cu_seqlens)
        tokens_of = inputs.req_to_token[inputs.slot_ids[request].long()].squeeze(0)
        limit = plan.limits[kv_head, group, slot].long()
        q = inputs.q[ids, kv_head * heads : (kv_head + 1) * heads].double() * inputs.q.shape[-1] ** -0.5

        peak = torch.full((len(ids), heads, 1), -torch.inf, dtype=torch.float64, device=q.device)
        total = torch.zeros_like(peak)
        out = torch.zeros_like(q)
        for entry in range(int(plan.counts[kv_head, group])):
            member = (plan.masks[kv_head, group, entry].long() >> slot) & 1 == 1
            position = int(plan.pages[kv_head, group, entry]) * page_size + offsets
            visible = (position <= limit[:, None]) & member[:, None]
            cell = tokens_of[position.clamp(max=len(tokens_of) - 1)].long()
            score = q @ inputs.k_cache[cell, kv_head].double().T
            score = score.masked_fill(~visible[:, None], -torch.inf)
            new_peak = torch.maximum(peak, score.amax(-1, keepdim=True))
            # A query that has seen nothing yet keeps -inf; subtracting it from itself would give NaN.
            finite = new_peak.masked_fill(new_peak == -torch.inf, 0.0)
            weight = torch.exp(score - finite)
            shrink = torch.exp(peak - finite)
            out = out * shrink + weight @ inputs.v_cache[cell, kv_head].double()
            total = total * shrink + weight.sum(-1, keepdim=True)
            peak = new_peak
        rows.append(ids)
        outputs.append(torch.where(total > 0, out / total.clamp(min=torch.finfo(torch.float64).tiny), 0.0))
    return torch.cat(rows), torch.cat(outputs)
