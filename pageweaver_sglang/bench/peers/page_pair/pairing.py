"""Which pages form a pair, and which queries meet which pair: plain PyTorch on the CPU, made before the call."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from itertools import pairwise
from typing import Any

import torch

from pageweaver_sglang.reference.layout import page_counts, per_token, positions, support_sets

TILE = 8
"""Query positions per work item, like the groups of Union8."""


@dataclass(frozen=True)
class PairPlan:
    """Work items of the pair kernel and what the merge needs.

    Attributes:
        heads: int32 ``[items]``, KV head.
        requests: int32 ``[items]``, request.
        pages: int32 ``[items, 2]``, logical pages that all queries of the item picked; the second is -1 for one page.
        queries: int32 ``[items, TILE]``, packed token ids, -1 for an empty place.
        partials: int32 ``[items, TILE]``, which of its query's partial outputs the item writes.
        counts: int32 ``[kv_heads, tokens]``, partial outputs of each query.
        limits: int32 ``[tokens]``, last token position that a query sees, -1 in padding rows.
        max_partials: most partial outputs of a query: what the workspace has room for, for every query.
        pairs: pairs of pages.
        singles: pages that found no partner.
        common: (query, pair) meetings in which the query picked both pages.
        exclusive: meetings in which it picked one.
    """

    heads: torch.Tensor
    requests: torch.Tensor
    pages: torch.Tensor
    queries: torch.Tensor
    partials: torch.Tensor
    counts: torch.Tensor
    limits: torch.Tensor
    max_partials: int
    pairs: int
    singles: int
    common: int
    exclusive: int

    def to(self, device: torch.device | str) -> PairPlan:
        """The same plan on another device."""
        values = {field.name: getattr(self, field.name) for field in fields(self)}
        moved: dict[str, Any] = {k: v.to(device) for k, v in values.items() if isinstance(v, torch.Tensor)}
        return replace(self, **moved)

    def visits(self) -> int:
        """Pages loaded: the pages of every item."""
        return int((self.pages >= 0).sum())

    def padded_workspace_bytes(self, heads_per_kv_head: int, head_dim: int, element_size: int) -> int:
        """Bytes of a workspace with room for ``max_partials`` outputs (and FP32 log-sum-exps) of every query."""
        kv_heads, tokens = self.counts.shape
        return kv_heads * tokens * self.max_partials * heads_per_kv_head * (head_dim * element_size + 4)

    def used_workspace_bytes(self, heads_per_kv_head: int, head_dim: int, element_size: int) -> int:
        """Bytes of it that get written."""
        return int(self.counts.sum()) * heads_per_kv_head * (head_dim * element_size + 4)

    def describe(self) -> dict[str, Any]:
        """Counts for the report."""
        return {
            "pairs": self.pairs,
            "single_pages": self.singles,
            "common_meetings": self.common,
            "exclusive_meetings": self.exclusive,
            "items": len(self.pages),
            "visits": self.visits(),
            "max_partials": self.max_partials,
        }


def match_pages(common: torch.Tensor) -> list[tuple[int, int]]:
    """Pair pages greedily: the two free pages with most common queries first, smaller ids on a tie.

    Args:
        common: ``[pages, pages]``, queries that picked both, symmetric; pages without a common query never pair.

    Returns:
        pairs ``(a, b)`` with ``a < b``, in the order found.
    """
    first, second = torch.triu(common, diagonal=1).nonzero(as_tuple=True)
    order = common[first, second].sort(descending=True, stable=True).indices
    free = [True] * len(common)
    pairs = []
    for a, b in zip(first[order].tolist(), second[order].tolist(), strict=True):
        if free[a] and free[b]:
            free[a] = free[b] = False
            pairs.append((a, b))
    return pairs


def pair_pages(
    topk_idx: torch.Tensor,
    cu_seqlens: torch.Tensor,
    seq_lens: torch.Tensor,
    prefix_lens: torch.Tensor,
    *,
    page_size: int,
) -> PairPlan:
    """Build the plan of one Step 3 call; CPU tensors, shapes as in :func:`pageweaver_sglang.prepare_unions`.

    Pages wholly behind a query's position are left out. A query's parts are numbered in the order of its pairs.
    """
    kv_heads, tokens, _ = topk_idx.shape
    bounds = cu_seqlens.tolist()
    limit = torch.minimum(positions(bounds, tokens, prefix_lens), per_token(bounds, tokens, seq_lens, 0) - 1)
    supports = support_sets(topk_idx, page_counts(bounds, tokens, seq_lens, page_size))
    supports = supports.masked_fill(supports * page_size > limit[:, None], -1)
    counts = torch.zeros(kv_heads, tokens, dtype=torch.int64)
    items: list[tuple[int, int, int, int, torch.Tensor, torch.Tensor]] = []
    totals = {"pairs": 0, "singles": 0, "common": 0, "exclusive": 0}
    for head in range(kv_heads):
        for request, (start, end) in enumerate(pairwise(bounds)):
            pages = -(-int(seq_lens[request]) // page_size)
            picked = _picked(supports[head, start:end], pages)
            floats = picked.to(torch.float32)
            pairs = match_pages(floats.T @ floats)
            paired = {page for pair in pairs for page in pair}
            alone = [page for page in picked.any(0).nonzero().flatten().tolist() if page not in paired]
            totals["pairs"] += len(pairs)
            totals["singles"] += len(alone)
            for a, b in [*pairs, *((page, -1) for page in alone)]:
                with_a = picked[:, a]
                with_b = picked[:, b] if b >= 0 else torch.zeros_like(with_a)
                for first, second, mask in (
                    (a, b, with_a & with_b),
                    (a, -1, with_a & ~with_b),
                    (b, -1, with_b & ~with_a),
                ):
                    queries = mask.nonzero().flatten() + start
                    if len(queries):
                        totals["common" if second >= 0 else "exclusive"] += len(queries)
                        items.append((head, request, first, second, queries, counts[head, queries]))
                counts[head, start:end] += with_a | with_b
    return _assemble(items, counts, limit, totals)


def _picked(supports: torch.Tensor, pages: int) -> torch.Tensor:
    """Which of ``pages`` each query picked, bool ``[queries, pages]``, from ``supports`` (-1 for nothing)."""
    picked = torch.zeros(len(supports), pages + 1, dtype=torch.bool)
    picked.scatter_(1, supports.masked_fill(supports < 0, pages), True)
    return picked[:, :pages]


def _assemble(
    items: list[tuple[int, int, int, int, torch.Tensor, torch.Tensor]],
    counts: torch.Tensor,
    limit: torch.Tensor,
    totals: dict[str, int],
) -> PairPlan:
    """Cut every list of queries into items of :data:`TILE`."""
    heads, requests, pages, queries, partials = [], [], [], [], []
    for head, request, first, second, ids, number in items:
        tiles = -(-len(ids) // TILE)
        short = tiles * TILE - len(ids)
        heads += [head] * tiles
        requests += [request] * tiles
        pages += [[first, second]] * tiles
        queries.append(torch.nn.functional.pad(ids, (0, short), value=-1))
        partials.append(torch.nn.functional.pad(number, (0, short), value=0))

    def ints(values: Any, *shape: int) -> torch.Tensor:
        return torch.as_tensor(values, dtype=torch.int32).reshape(shape)

    empty = torch.zeros(0, dtype=torch.int64)
    return PairPlan(
        heads=ints(heads, -1),
        requests=ints(requests, -1),
        pages=ints(pages, -1, 2),
        queries=ints(torch.cat([empty, *queries]), -1, TILE),
        partials=ints(torch.cat([empty, *partials]), -1, TILE),
        counts=counts.to(torch.int32),
        limits=limit.to(torch.int32),
        max_partials=int(counts.max()) if counts.numel() else 0,
        **totals,
    )
