"""What a call must give: masked attention over all tokens, in float64, and how far off each row may be.

Shares nothing with the kernels nor with the reference engine: no pages are walked, no unions formed, and support sets
are a mask over pages that ids switch on.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from .build import BITS, Tensors
from .draw import Call
from .variants import Arithmetic


@dataclass(frozen=True)
class Expected:
    """What a call must give."""

    out: torch.Tensor
    """float64 ``[tokens, q_heads, head_dim]``."""
    bound: torch.Tensor
    """float64 ``[tokens, q_heads]``: how large the norm of a row's error may be."""


def expected(call: Call, tensors: Tensors, arithmetic: Arithmetic) -> Expected:
    """Attention of every query over the keys that it may see. Nothing here waits for the device.

    A row's bound is ``weights * sqrt(sum of (p_j |v_j|)^2) + (output + pages * sums) * |out|``: errors of different
    weights are independent, and add up like their squares. A row that sees nothing has the bound 0.
    """
    kv_heads, tokens, ratio = call.kv_heads, call.tokens, call.shape.ratio
    seen = visible(tensors, call.page_size)  # [kv_heads, tokens, keys]
    q = tensors.arguments["q"].double().unflatten(1, (kv_heads, ratio)).permute(1, 0, 2, 3).flatten(1, 2)
    k, v = (_keys(cache, tensors.physical, call.page_size) for cache in (tensors.k_clean, tensors.v_clean))

    scale = (call.shape.head_dim**-0.5 if call.sm_scale is None else call.sm_scale) * _factor(call.k_scale)
    scores = (q @ k.transpose(1, 2)).mul_(scale).view(kv_heads, tokens, ratio, k.shape[1])
    scores.masked_fill_(~seen[:, :, None], -torch.inf)
    # A row that sees nothing has only -inf: a finite maximum turns its weights to zeros.
    scores -= scores.amax(dim=3, keepdim=True).clamp(min=-1e300)
    weights = scores.exp_().flatten(1, 2)
    total = weights.sum(dim=2, keepdim=True)
    total.masked_fill_(total == 0, 1.0)
    out = weights @ v / total
    spread = (weights.square_() @ v.square().sum(dim=2, keepdim=True)).sqrt_() / total
    pages = seen.unflatten(2, (-1, call.page_size)).any(dim=3).sum(dim=2).repeat_interleave(ratio, dim=1)[..., None]
    of_row = arithmetic.output + arithmetic.sums * pages
    error = call_weights(call, arithmetic) * spread + of_row * out.norm(dim=2, keepdim=True)

    def by_token(x: torch.Tensor) -> torch.Tensor:
        x = x.view(kv_heads, tokens, ratio, x.shape[2]).transpose(0, 1).flatten(1, 2)
        return x * _factor(call.v_scale)

    return Expected(out=by_token(out), bound=by_token(error).abs().squeeze(2))


def call_weights(call: Call, arithmetic: Arithmetic) -> float:
    """The relative error of a softmax weight in this call."""
    if call.exact:
        return arithmetic.exact_weights
    of_logit = arithmetic.logits + (arithmetic.q if call.style == "rounded" else 0.0)
    return arithmetic.weights + of_logit * call.logit_size


def visible(tensors: Tensors, page_size: int) -> torch.Tensor:
    """Which keys (all requests' tokens, one after the other) each query sees, bool ``[kv_heads, tokens, keys]``."""
    topk_idx, pages = tensors.arguments["topk_idx"], len(tensors.physical)
    valid = (topk_idx >= 0) & (topk_idx < tensors.page_count[:, None])
    # Ids that pick nothing switch on one more page, which is cut off.
    page = torch.where(valid, topk_idx + tensors.page_base[:, None], pages).long()
    picked = torch.zeros(*topk_idx.shape[:2], pages + 1, dtype=torch.bool, device=topk_idx.device)
    picked = picked.scatter_(2, page, True)[:, :, :pages]
    within = torch.arange(page_size, dtype=torch.int32, device=topk_idx.device)
    position = tensors.page_position[:, None] + within
    return (picked[..., None] & (position <= tensors.limit[:, None, None])).flatten(2)


def _keys(cache: torch.Tensor, physical: torch.Tensor, page_size: int) -> torch.Tensor:
    """The cells of all logical pages in order, float64 ``[kv_heads, keys, head_dim]``."""
    pages = cache.view(BITS[cache.dtype]).unflatten(0, (-1, page_size)).index_select(0, physical)
    return pages.permute(2, 0, 1, 3).flatten(1, 2).contiguous().view(cache.dtype).double()


def _factor(scale: float | None) -> float:
    return 1.0 if scale is None else scale
