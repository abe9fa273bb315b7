"""The union plan: which pages each group of queries walks, and which of its queries picked each page."""

from __future__ import annotations

from dataclasses import dataclass

import torch

GROUP_SIZE = 8
"""Queries per group of the paper, and of the order on Hopper. What unions an engine takes, and which of them it gets
for a call, :func:`.cuda.support.grouping` knows."""


def group_bound(tokens: int, requests: int, window: int, group_size: int) -> int:
    """Return the number of groups that a plan has room for: enough for any lengths, known without a device read.

    The bound counts the padding rows behind the last request as one more request. Every request ends in at most one
    short group when ``window`` is a multiple of ``group_size``; otherwise every window does.
    """
    if window % group_size == 0:
        return (tokens + (group_size - 1) * (requests + 1)) // group_size
    return (tokens // window + requests + 1) * -(-window // group_size)


@dataclass(frozen=True, eq=False)
class UnionPlan:
    """Unions of the support sets of every group, with one membership bit per query; the same on CPU and CUDA.

    Groups are numbered by request, then by window, then by place in the window. The padding rows
    ``[cu_seqlens[-1], tokens)`` follow as one more request whose queries pick nothing, so that their output rows get
    written (with zeros). Groups behind those are spare: no pages, no queries.

    Attributes:
        pages: int32 ``[kv_heads, groups, max_union]``, logical page ids, ascending, then -1;
            ``max_union = group_size * k``.
        masks: uint8 (int32 when ``group_size > 8``), shape of ``pages``; bit ``r`` says that slot ``r`` picked the
            page; 0 behind the union.
        counts: int32 ``[kv_heads, groups]``, pages in the union.
        queries: int32 ``[kv_heads, groups, group_size]``, packed token id in each slot, -1 for an empty slot.
        limits: int32, shape of ``queries``: the last token position that the slot sees,
            ``min(position, seq_len - 1)``; -1 for an empty slot or a padding row.
        slots: int32, shape of ``pages``: physical page in the KV cache, -1 for one that must not be read; ``None``
            in a plan that was not built for attention.
        group_size: queries per group.
        page_size: tokens per page.
        queue: int32 ``[2 + kv_heads * groups]``, what the attention kernel's CTAs draw groups from: two counters,
            cleared by the union preparation, and the order of the groups, written with the value tiles (stream
            engine). ``None`` where ``slots`` is.
    """

    pages: torch.Tensor
    masks: torch.Tensor
    counts: torch.Tensor
    queries: torch.Tensor
    limits: torch.Tensor
    slots: torch.Tensor | None
    group_size: int
    page_size: int
    queue: torch.Tensor | None = None

    @classmethod
    def empty(
        cls,
        kv_heads: int,
        tokens: int,
        requests: int,
        k: int,
        *,
        window: int,
        group_size: int,
        page_size: int,
        device: torch.device | str,
        with_slots: bool = False,
    ) -> UnionPlan:
        """Allocate a plan of the right shape; its contents are undefined."""
        groups = group_bound(tokens, requests, window, group_size)

        def ints(*shape: int) -> torch.Tensor:
            return torch.empty(shape, dtype=torch.int32, device=device)

        union = (kv_heads, groups, group_size * k)
        return cls(
            pages=ints(*union),
            masks=torch.empty(union, dtype=mask_dtype(group_size), device=device),
            counts=ints(kv_heads, groups),
            queries=ints(kv_heads, groups, group_size),
            limits=ints(kv_heads, groups, group_size),
            slots=ints(*union) if with_slots else None,
            group_size=group_size,
            page_size=page_size,
            queue=ints(2 + kv_heads * groups) if with_slots else None,
        )

    def visits(self) -> int:
        """Return the number of page visits, the sum of the unions' sizes. Synchronises with the device."""
        return int(self.counts.sum())

    def rounds(self, tile: int = 4) -> int:
        """Return the number of (page, ``tile`` neighbouring slots) pairs with at least one member. Synchronises.

        For groups of 8 and tiles of 4 this is the paper's C4; for groups of ``tile`` it equals :meth:`visits`.
        """
        firsts = range(0, self.group_size, tile)
        return sum(int(((self.masks >> first) & ((1 << tile) - 1)).count_nonzero()) for first in firsts)

    def reuse(self) -> float:
        """Return how many queries use a visited page on average (0.0 without visits). Synchronises."""
        visits = self.visits()
        if visits == 0:
            return 0.0
        members = sum(int(((self.masks >> slot) & 1).sum()) for slot in range(self.group_size))
        return members / visits


def mask_dtype(group_size: int) -> torch.dtype:
    """Return the dtype of the masks of groups of ``group_size`` queries."""
    return torch.uint8 if group_size <= 8 else torch.int32
