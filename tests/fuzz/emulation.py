"""The FP8 kernels' arithmetic in plain torch, and mistakes to plant: what the fuzzer's check is tested with."""

from __future__ import annotations

import dataclasses

import torch

from pageweaver_sglang.fuzz.build import Tensors
from pageweaver_sglang.fuzz.draw import Call

FP8_ENGINES = ("stream", "union8")
"""Variants whose arithmetic this is; pages of 128 tokens."""


def emulate(call: Call, tensors: Tensors, seed: int = 0) -> torch.Tensor:
    """Token by token: Q rounded to E4M3 with the best of three scales, softmax weights to E4M3; a BF16 output.

    Weights are 2^6 times as large as their distance from a row's reference says. The reference is the first page's
    largest logit, and is raised to a page's largest where four weights of it together could exceed 448. Which page
    comes first depends on the neighbours' pages, so that the order is drawn here.
    """
    random = torch.Generator().manual_seed(seed)
    q = tensors.arguments["q"].float()
    largest = q.abs().amax(dim=2, keepdim=True).clamp_min(1e-12)
    scales = torch.tensor([256.0, 288.0, 448.0]) / largest
    rounded = ((q[..., None] * scales[:, :, None]).to(torch.float8_e4m3fn).float() / scales[:, :, None]).double()
    best = (rounded - q[..., None]).square().sum(dim=2, keepdim=True).argmin(dim=3, keepdim=True)
    q = rounded.gather(3, best.expand(*q.shape, 1)).squeeze(3)
    ratio = call.shape.ratio
    out = torch.zeros_like(tensors.arguments["q"], dtype=torch.float32, memory_format=torch.contiguous_format)
    scale = (128**-0.5 if call.sm_scale is None else call.sm_scale) * (call.k_scale or 1.0)
    for token in range(call.tokens):
        for head in range(call.kv_heads):
            pages = visible_pages(call, tensors, token, head)
            heads = slice(head * ratio, (head + 1) * ratio)
            reference = torch.full((ratio, 1), -torch.inf, dtype=torch.float64)
            total, gathered = torch.zeros(ratio, 1, dtype=torch.float64), torch.zeros(ratio, 128, dtype=torch.float64)
            for page in torch.randperm(len(pages), generator=random).tolist():
                k, v = (cache[pages[page], head].double() for cache in (tensors.k_clean, tensors.v_clean))
                scores = q[token, heads] @ k.T * scale
                fours = torch.nn.functional.pad((scores - reference).exp(), (0, -scores.shape[1] % 4))
                raised = 64 * fours.unflatten(1, (-1, 4)).sum(dim=2).amax(dim=1, keepdim=True) > 448
                most = torch.where(raised, torch.maximum(reference, scores.amax(dim=1, keepdim=True)), reference)
                correction, reference = (reference - most).exp(), most
                scaled = 64 * (scores - reference).exp()
                gathered = gathered * correction + scaled.float().to(torch.float8_e4m3fn).double() @ v
                total = total * correction + scaled.sum(dim=1, keepdim=True)
            if pages:
                out[token, heads] = (gathered / total).float()
    assert q.shape[1] == call.kv_heads * ratio
    return (out * (1.0 if call.v_scale is None else call.v_scale)).to(torch.bfloat16)


def visible_cells(call: Call, tensors: Tensors, token: int, head: int) -> list[int]:
    """Cache slots that a token sees, one after the other, by the definition."""
    return [cell for page in visible_pages(call, tensors, token, head) for cell in page]


def visible_pages(call: Call, tensors: Tensors, token: int, head: int) -> list[range]:
    """The same, page by page."""
    base, count = int(tensors.page_base[token]), int(tensors.page_count[token])
    pages = []
    for page in sorted({p for p in tensors.arguments["topk_idx"][head, token].tolist() if 0 <= p < count}):
        first = int(tensors.physical[base + page]) * call.page_size
        tokens = min(call.page_size, int(tensors.limit[token]) + 1 - page * call.page_size)
        if tokens > 0:
            pages.append(range(first, first + tokens))
    return pages


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


def further(call: Call, tensors: Tensors) -> int | None:
    """The request of the first token, if it can begin one token further on and that token would see more; else None."""
    request = next(number for number, length in enumerate(call.lengths) if length)
    limit = int(tensors.limit[0])
    of_its_page = (limit + 1) % call.page_size and limit // call.page_size in picked(tensors, 0, 0, call.page_size)
    return request if of_its_page and limit + 1 < call.sequences[request] else None


def ahead(call: Call, tensors: Tensors, request: int) -> Tensors:
    """The call in which a request's queries stand one token further on."""
    first = int(sum(call.lengths[:request]))
    rows = slice(first, first + int(call.lengths[request]))
    prefixes, limit = tensors.arguments["prefix_lens"].clone(), tensors.limit.clone()
    prefixes[request] += 1
    limit[rows] = (limit[rows] + 1).clamp(max=int(call.sequences[request]) - 1)
    return dataclasses.replace(tensors, arguments={**tensors.arguments, "prefix_lens": prefixes}, limit=limit)
