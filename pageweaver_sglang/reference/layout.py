"""Where queries stand (requests, windows, positions) and which pages each of them picked."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

import torch


@dataclass(frozen=True)
class Window:
    """Consecutive queries of one request: packed token ids ``start .. start + length - 1``."""

    request: int
    start: int
    length: int


def split_windows(bounds: list[int], window: int) -> list[Window]:
    """Cut every request, ids ``bounds[r] .. bounds[r + 1] - 1``, into windows; the last one can be short."""
    return [
        Window(request, first, min(window, end - first))
        for request, (start, end) in enumerate(pairwise(bounds))
        for first in range(start, end, window)
    ]


def per_token(bounds: list[int], tokens: int, values: torch.Tensor, padding: int) -> torch.Tensor:
    """Spread a value per request to its tokens: int64 ``[tokens]``, ``padding`` in rows behind the last request."""
    lengths = torch.tensor(bounds, device=values.device).diff()
    spread = torch.full((tokens,), padding, dtype=torch.int64, device=values.device)
    spread[: bounds[-1]] = values.to(torch.int64).repeat_interleave(lengths)
    return spread


def positions(bounds: list[int], tokens: int, prefix_lens: torch.Tensor) -> torch.Tensor:
    """Return every query's position in its request, int64 ``[tokens]``; -1 in rows behind the last request."""
    ids = torch.arange(tokens, device=prefix_lens.device)
    starts = torch.tensor(bounds[:-1], dtype=torch.int64, device=prefix_lens.device)
    offsets = per_token(bounds, tokens, prefix_lens - starts, 0)
    return torch.where(ids < bounds[-1], ids + offsets, -1)


def page_counts(bounds: list[int], tokens: int, seq_lens: torch.Tensor, page_size: int) -> torch.Tensor:
    """Return how many pages every query's request has, int64 ``[tokens]``; 0 in rows behind the last request."""
    return per_token(bounds, tokens, (seq_lens.to(torch.int64) + page_size - 1) // page_size, 0)


def support_sets(topk_idx: torch.Tensor, pages: torch.Tensor) -> torch.Tensor:
    """Return the valid, distinct pages that every query picked.

    Args:
        topk_idx: int32 ``[kv_heads, tokens, k]``, logical page ids in any order.
        pages: ``[tokens]``, pages of the query's request.

    Returns:
        int64 ``[kv_heads, tokens, k]``; ascending within a row, with -1 in the place of invalid and repeated ids.
    """
    picked = topk_idx.to(torch.int64)
    invalid = (picked < 0) | (picked >= pages[:, None])
    picked = picked.masked_fill(invalid, -1).sort(dim=2).values
    repeated = picked[..., 1:] == picked[..., :-1]
    picked[..., 1:] = picked[..., 1:].masked_fill(repeated, -1)
    return picked
