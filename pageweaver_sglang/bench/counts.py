"""Page visits of a workload in the orders that are compared, and whether they are the recorded ones."""

from __future__ import annotations

import time
from dataclasses import asdict, dataclass
from typing import Any

import pageweaver_sglang as pw

ORDERS: dict[str, int | None] = {"original": None, "w64": 64, "w128": 128}
"""Orders by name, and the window of each; the original order has none."""

GROUP_SIZES = (4, 8)


@dataclass(frozen=True)
class OrderCount:
    """One order's union counts. ``seconds`` is what regrouping and union preparation took together on this machine."""

    order: str
    group_size: int
    visits: int
    rounds: int
    reuse: float
    seconds: float

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        return asdict(self)


def plan_of(workload: pw.Workload, order: str, group_size: int) -> pw.UnionPlan:
    """The reference engine's union plan of a workload in one of :data:`ORDERS`, as the paper has it (no guard)."""
    w, window = workload, ORDERS[order]
    options = {"window": window or 128, "group_size": group_size, "page_size": w.page_size}
    perm = None if window is None else pw.regroup(w.topk_idx, w.cu_seqlens, w.prefix_lens, **options)
    return pw.prepare_unions(w.topk_idx, perm, w.cu_seqlens, w.seq_lens, w.prefix_lens, **options)


def count_orders(workload: pw.Workload) -> list[OrderCount]:
    """Counts of every order with groups of 4 and of 8."""
    counts = []
    for order in ORDERS:
        for group_size in GROUP_SIZES:
            start = time.perf_counter()
            plan = plan_of(workload, order, group_size)
            seconds = time.perf_counter() - start
            counts.append(OrderCount(order, group_size, plan.visits(), plan.rounds(), plan.reuse(), seconds))
    return counts


def differences(counts: list[OrderCount], expected: dict[str, int]) -> list[str]:
    """What differs from :func:`..workloads.expected_counts`, in words; empty when every count is exact."""
    found = {f"{kind}-{c.order}-{c.group_size}": getattr(c, kind) for c in counts for kind in ("visits", "rounds")}
    return [f"{name}: {found[name]}, recorded {value}" for name, value in expected.items() if found[name] != value]
