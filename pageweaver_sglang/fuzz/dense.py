"""What a call must give: masked attention over all tokens, in float64, and how far off each row may be.

Shares nothing with the kernels nor with the reference engine: no pages are walked, no unions formed, and support sets
are a mask over pages that ids switch on.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from .build import HEAD_DIM, RATIO, Tensors
from .draw import Call


@dataclass(frozen=True)
class Arithmetic:
    """How an engine rounds, as far as a bound on its error must know.

    Attributes:
        q_e4m3: each head's query is rounded to E4M3, scaled so that its largest element becomes 448.
        weights: relative error of a softmax weight, at most.
        exact_weights: the same where every weight is a number that the engine holds exactly.
        output: relative error of a row that rounding its elements and sums makes, at most.
    """

    q_e4m3: bool
    weights: float
    exact_weights: float
    output: float


# E4M3 has 3 bits behind the point: a weight is off by 1/17 of itself at most. Rows of V are not quite orthogonal, so
# that errors of two weights can add up to a little more than the root of their squares: a third is added. Tensor cores
# sum FP8 products with some 14 bits, 64 times a row: 0.4 % at most.
FP8 = Arithmetic(q_e4m3=True, weights=0.08, exact_weights=0.006, output=0.006)
# The reference engine: float64, rounded to BF16 at the end (half a unit of 8 bits).
FLOAT64 = Arithmetic(q_e4m3=False, weights=1e-9, exact_weights=1e-9, output=0.004)


@dataclass(frozen=True)
class Expected:
    """What a call must give."""

    out: torch.Tensor
    """float64 ``[tokens, q_heads, 128]``."""
    bound: torch.Tensor
    """float64 ``[tokens, q_heads]``: how large the norm of a row's error may be."""


def expected(call: Call, tensors: Tensors, arithmetic: Arithmetic) -> Expected:
    """Attention of every query over the keys that it may see. Nothing here waits for the device.

    A row's bound is ``weights * sqrt(sum of (p_j |v_j|)^2) + output * |out|``: errors of different weights are
    independent, and add up like their squares. A row that sees nothing has the bound 0.
    """
    kv_heads, tokens = call.kv_heads, call.tokens
    seen = visible(tensors, call.page_size)  # [kv_heads, tokens, keys]
    q = rounded_q(tensors.arguments["q"]) if arithmetic.q_e4m3 else tensors.arguments["q"].double()
    q = q.view(tokens, kv_heads, RATIO, HEAD_DIM).permute(1, 0, 2, 3).reshape(kv_heads, tokens * RATIO, HEAD_DIM)
    k, v = (_keys(cache, tensors.physical, call.page_size) for cache in (tensors.k_clean, tensors.v_clean))

    scale = (HEAD_DIM**-0.5 if call.sm_scale is None else call.sm_scale) * _factor(call.k_scale)
    scores = (q @ k.transpose(1, 2)).mul_(scale).view(kv_heads, tokens, RATIO, k.shape[1])
    scores.masked_fill_(~seen[:, :, None], -torch.inf)
    # A row that sees nothing has only -inf: a finite maximum turns its weights to zeros.
    scores -= scores.amax(dim=3, keepdim=True).clamp(min=-1e300)
    weights = scores.exp_().flatten(1, 2)
    total = weights.sum(dim=2, keepdim=True)
    total.masked_fill_(total == 0, 1.0)
    out = weights @ v / total
    spread = (weights.square_() @ v.square().sum(dim=2, keepdim=True)).sqrt_() / total
    error = call_weights(call, arithmetic) * spread + arithmetic.output * out.norm(dim=2, keepdim=True)

    def by_token(x: torch.Tensor) -> torch.Tensor:
        x = x.view(kv_heads, tokens, RATIO, x.shape[2]).transpose(0, 1).flatten(1, 2)
        return x * _factor(call.v_scale)

    return Expected(out=by_token(out), bound=by_token(error).abs().squeeze(2))


def call_weights(call: Call, arithmetic: Arithmetic) -> float:
    """The relative error of a softmax weight in this call."""
    return arithmetic.exact_weights if call.exact else arithmetic.weights


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


def rounded_q(q: torch.Tensor) -> torch.Tensor:
    """Q as the FP8 kernels read it, float64: E4M3, scaled by head so that the largest element becomes 448."""
    q = q.float()
    largest = q.abs().amax(dim=2, keepdim=True).clamp_min(1e-12)
    return (q * (448.0 / largest)).to(torch.float8_e4m3fn).double() * (largest / 448.0).double()


def _keys(cache: torch.Tensor, physical: torch.Tensor, page_size: int) -> torch.Tensor:
    """The cells of all logical pages in order, float64 ``[kv_heads, keys, 128]``."""
    pages = cache.view(torch.uint8).unflatten(0, (-1, page_size)).index_select(0, physical)
    return pages.permute(2, 0, 1, 3).flatten(1, 2).contiguous().view(torch.float8_e4m3fn).double()


def _factor(scale: float | None) -> float:
    return 1.0 if scale is None else scale
