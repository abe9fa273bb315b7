"""The comparison that needs no GPU: pages loaded by every order and by page-pair, for whole calls."""

from __future__ import annotations

import time
from typing import Any

import pageweaver_sglang as pw

from .counts import count_orders, differences
from .inputs import HEAD_DIM, QUERY_HEADS_PER_KV_HEAD
from .orders import FoundOrder, find_orders
from .peers.page_pair.pairing import PairPlan, pair_pages
from .work import PAGE_BYTES_PER_TOKEN, count_all, order_count, work_of
from .workloads import expected_counts

_BF16_BYTES = 2


def pair_plan(workload: pw.Workload) -> tuple[PairPlan, float]:
    """Page-pair's plan and the seconds it took."""
    w = workload
    start = time.perf_counter()
    plan = pair_pages(w.topk_idx, w.cu_seqlens, w.seq_lens, w.prefix_lens, page_size=w.page_size)
    return plan, time.perf_counter() - start


def logical_report(
    workload: pw.Workload,
    name: str,
    orders: dict[str, FoundOrder] | None = None,
    heads_per_kv_head: int = QUERY_HEADS_PER_KV_HEAD,
) -> dict[str, Any]:
    """Counts of one workload.

    Returns:
        ``work`` (picks, visible keys, useful FLOPs); ``counts`` by key (see :func:`..work.count_all`), with
        ``bytes_delivered`` and, for orders, ``search_s``; ``page_pair``; ``recorded`` and ``differences`` from them
        (None where the workload has none recorded).
    """
    orders = orders or find_orders(workload)
    plan, seconds = pair_plan(workload)
    work = work_of(workload, heads_per_kv_head)
    counts = {}
    of_order = {order_count(name, size): order for name, order in orders.items() for size in (8, 16)}
    for key, count in count_all(workload, orders, plan, heads_per_kv_head).items():
        delivered = count.visits * work.page_size * PAGE_BYTES_PER_TOKEN
        counts[key] = {**count.as_dict(), "bytes_delivered": delivered}
        order = of_order.get(key)
        if order is not None:
            counts[key]["search_s"] = order.seconds
    expected = expected_counts(name)
    sizes = (heads_per_kv_head, HEAD_DIM, _BF16_BYTES)
    return {
        "work": {"picks": work.picks, "visible_keys": work.visible_keys, "useful_flops": work.flops},
        "counts": counts,
        "page_pair": {
            "search_s": seconds,
            **plan.describe(),
            "padded_workspace_bytes": plan.padded_workspace_bytes(*sizes),
            "used_workspace_bytes": plan.used_workspace_bytes(*sizes),
        },
        "recorded": expected,
        "differences": None if expected is None else differences(count_orders(workload), expected),
    }
