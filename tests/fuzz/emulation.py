"""The FP8 kernels' arithmetic in plain torch, and mistakes to plant: what the fuzzer's check is tested with."""

from __future__ import annotations

import dataclasses

import torch

from pageweaver_sglang.fuzz.build import RATIO, Tensors
from pageweaver_sglang.fuzz.draw import Call

FP8_ENGINES = ("stream", "union8")
"""Variants whose arithmetic this is; pages of 128 tokens and 16 query heads per KV head."""


def emulate(call: Call, tensors: Tensors, seed: int = 0) -> torch.Tensor:
    """Token by token: Q rounded to E4M3 with the best of three scales; softmax weights 64 to 448 times as large as a
    row's largest, rounded to E4M3; a BF16 output.

    Where a row's reference stands depends on the order of its pages, so that it is drawn here: at the largest logit, or
    at most a factor of 7 below it (a power of two where the weights are).
    """
    random = torch.Generator().manual_seed(seed)
    q = tensors.arguments["q"].float()
    largest = q.abs().amax(dim=2, keepdim=True).clamp_min(1e-12)
    scales = torch.tensor([256.0, 288.0, 448.0]) / largest
    rounded = ((q[..., None] * scales[:, :, None]).to(torch.float8_e4m3fn).float() / scales[:, :, None]).double()
    best = (rounded - q[..., None]).square().sum(dim=2, keepdim=True).argmin(dim=3, keepdim=True)
    q = rounded.gather(3, best.expand(*q.shape, 1)).squeeze(3)
    q_heads = q.shape[1]
    out = torch.zeros_like(tensors.arguments["q"], dtype=torch.float32, memory_format=torch.contiguous_format)
    scale = (128**-0.5 if call.sm_scale is None else call.sm_scale) * (call.k_scale or 1.0)
    for token in range(call.tokens):
        for head in range(call.kv_heads):
            cells = visible_cells(call, tensors, token, head)
            if not cells:
                continue
            k, v = (cache[cells, head].double() for cache in (tensors.k_clean, tensors.v_clean))
            heads = slice(head * RATIO, (head + 1) * RATIO)
            scores = q[token, heads] @ k.T * scale
            weights = (scores - scores.amax(dim=1, keepdim=True)).exp()
            below = torch.rand(RATIO, 1, generator=random, dtype=torch.float64) * 2.8
            scaled = weights * 64 * 2 ** (below.floor().clamp(max=1) if call.exact else below)
            rounded = scaled.float().to(torch.float8_e4m3fn).double()
            out[token, heads] = (rounded @ v / scaled.sum(dim=1, keepdim=True)).float()
    assert q_heads == call.kv_heads * RATIO
    return (out * (1.0 if call.v_scale is None else call.v_scale)).to(torch.bfloat16)


def visible_cells(call: Call, tensors: Tensors, token: int, head: int) -> list[int]:
    """Cache slots that a token sees, one after the other, by the definition."""
    base, count = int(tensors.page_base[token]), int(tensors.page_count[token])
    cells = []
    for page in sorted({p for p in tensors.arguments["topk_idx"][head, token].tolist() if 0 <= p < count}):
        first = int(tensors.physical[base + page]) * call.page_size
        tokens = min(call.page_size, int(tensors.limit[token]) + 1 - page * call.page_size)
        cells += range(first, first + tokens)
    return cells


def picked(tensors: Tensors, token: int, head: int, page_size: int = 128) -> list[int]:
    """Pages that a token picked and sees something of."""
    ids = tensors.arguments["topk_idx"][head, token].tolist()
    count = min(int(tensors.page_count[token]), int(tensors.limit[token]) // page_size + 1)
    return sorted({page for page in ids if 0 <= page < count})


def with_ids(tensors: Tensors, token: int, head: int, ids: list[int]) -> Tensors:
    """The call in which one query of one head picked other pages."""
    topk_idx = tensors.arguments["topk_idx"].clone()
    topk_idx[head, token] = -1
    topk_idx[head, token, : len(ids)] = torch.tensor(ids, dtype=torch.int32)
    return dataclasses.replace(tensors, arguments={**tensors.arguments, "topk_idx": topk_idx})


def with_limit(tensors: Tensors, token: int, change: int) -> Tensors:
    """The call in which one query sees a token more, or one less."""
    limit = tensors.limit.clone()
    limit[token] += change
    return dataclasses.replace(tensors, limit=limit)
