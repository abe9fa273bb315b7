"""What a Step 3 call has to do, whoever does it: visible keys, useful arithmetic, and the pages that an arm loads."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

import torch

import pageweaver_sglang as pw
from pageweaver_sglang.cuda.support import PACKED_HEADS, PORTABLE, union_group_sizes
from pageweaver_sglang.reference.layout import page_counts, per_token, positions, support_sets

from .inputs import HEAD_DIM, QUERY_HEADS_PER_KV_HEAD
from .orders import FoundOrder
from .peers.page_pair.pairing import PairPlan

PAGE_BYTES_PER_TOKEN = 2 * HEAD_DIM
"""Bytes of K and V of one token and KV head (FP8)."""


@dataclass(frozen=True)
class Work:
    """Of one call: (query, KV head, page) triples that count, and the keys in them that queries see.

    ``flops`` are the useful ones: two products with every visible key for each query head, nothing masked.
    """

    picks: int
    visible_keys: int
    page_size: int
    heads_per_kv_head: int = QUERY_HEADS_PER_KV_HEAD

    @property
    def flops(self) -> int:
        """Useful floating-point operations."""
        return 4 * HEAD_DIM * self.heads_per_kv_head * self.visible_keys


@dataclass(frozen=True)
class PageCount:
    """Pages that an arm loads: ``visits``; ``rounds``, (page, tile of queries) pairs with a member; ``reuse``, how many
    queries use a loaded page on average. A tile is 4 queries, and 8 where a group of 16 is two. ``rounds`` is None
    where queries don't come in tiles.
    """

    visits: int
    rounds: int | None
    reuse: float

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        return asdict(self)


def work_of(workload: pw.Workload, heads_per_kv_head: int = QUERY_HEADS_PER_KV_HEAD) -> Work:
    """Count a workload's picks and visible keys; pages wholly behind a query count as neither."""
    w = workload
    tokens = w.topk_idx.shape[1]
    bounds = w.cu_seqlens.tolist()
    limit = torch.minimum(positions(bounds, tokens, w.prefix_lens), per_token(bounds, tokens, w.seq_lens, 0) - 1)
    supports = support_sets(w.topk_idx, page_counts(bounds, tokens, w.seq_lens, w.page_size))
    keys = (limit[:, None] + 1 - supports * w.page_size).clamp(min=0, max=w.page_size).masked_fill(supports < 0, 0)
    return Work(int((keys > 0).sum()), int(keys.sum()), w.page_size, heads_per_kv_head)


def union_count(workload: pw.Workload, perm: torch.Tensor | None, group_size: int, tile: int = 4) -> PageCount:
    """Pages loaded by groups of ``group_size`` in an order, by the reference engine's union plan; tiles of ``tile``."""
    w = workload
    plan = pw.prepare_unions(
        w.topk_idx, perm, w.cu_seqlens, w.seq_lens, w.prefix_lens, group_size=group_size, page_size=w.page_size
    )
    return PageCount(plan.visits(), plan.rounds(tile), plan.reuse())


def per_query_count(work: Work) -> PageCount:
    """Pages loaded when every query loads its own."""
    return PageCount(work.picks, None, 1.0 if work.picks else 0.0)


def pair_count(work: Work, plan: PairPlan) -> PageCount:
    """Pages loaded by page-pair's tiles."""
    visits = plan.visits()
    return PageCount(visits, None, work.picks / visits if visits else 0.0)


def order_count(order: str, group_size: int) -> str:
    """Key of the pages that groups of 4, 8 or 16 load: ``ORDER-4``, ``ORDER-8``, and ``ORDER-8-16`` for two neighbours
    of an order of groups of 8 in one; the original order is one of groups of any size, ``original-16``.
    """
    return f"{order}-8-16" if group_size == 16 and order != "original" else f"{order}-{group_size}"


def portable_count(heads_per_kv_head: int) -> str:
    """Key of the pages that the engine ``portable`` loads in an order of groups of its own size, ``w64-SIZE``."""
    return f"w64-{_portable_size(heads_per_kv_head)}"


def _portable_size(heads_per_kv_head: int) -> int:
    return union_group_sizes(PORTABLE, heads_per_kv_head)[-1]


def count_all(
    workload: pw.Workload,
    orders: dict[str, FoundOrder],
    plan: PairPlan,
    heads_per_kv_head: int = QUERY_HEADS_PER_KV_HEAD,
) -> dict[str, PageCount]:
    """Counts by key: ``per-query``, ``original-4``, :func:`portable_count`, ``page-pair``, and of all orders
    :func:`order_count` for groups of 8 and, with so few heads that ``stream`` takes them, of 16.
    """
    work, w = work_of(workload), workload
    size = _portable_size(heads_per_kv_head)
    options = {"window": 64, "group_size": size, "page_size": w.page_size, "guard": "window"}
    order = pw.regroup(w.topk_idx, w.cu_seqlens, w.prefix_lens, **options)
    counts = {
        "per-query": per_query_count(work),
        order_count("original", 4): union_count(workload, None, 4),
        portable_count(heads_per_kv_head): union_count(workload, order, size),
    }
    counts |= {order_count(name, 8): union_count(workload, order.perm, 8) for name, order in orders.items()}
    if heads_per_kv_head <= PACKED_HEADS:
        counts |= {order_count(name, 16): union_count(workload, order.perm, 16, 8) for name, order in orders.items()}
    return {**counts, "page-pair": pair_count(work, plan)}


def rates(
    work: Work,
    visits: int,
    milliseconds: float,
    ceilings: Mapping[str, Any] | None = None,
    *,
    element_bytes: int = 1,
) -> dict[str, float | None]:
    """Bytes of K and V delivered to the cores, their rate, the rate of useful arithmetic, and shares of the ceilings.

    ``ceilings`` are those of :func:`..ceilings.measure_ceilings`; a share is None where its ceiling is.
    ``element_bytes`` is the size of an element of K and V.
    """
    delivered = visits * work.page_size * PAGE_BYTES_PER_TOKEN * element_bytes
    seconds = milliseconds / 1e3
    bandwidth, arithmetic = delivered / seconds / 1e12, work.flops / seconds / 1e12
    found: dict[str, float | None] = {
        "bytes_delivered": delivered,
        "effective_tb_s": bandwidth,
        "effective_tflops": arithmetic,
    }
    for name, value in (("copy_tb_s", bandwidth), ("l2_copy_tb_s", bandwidth), ("fp8_matmul_tflops", arithmetic)):
        ceiling = (ceilings or {}).get(name)
        found[f"of_{name}"] = value / ceiling if ceiling else None
    return found
