"""What a workload's page choices promise: sharing, what regrouping would save, and a verdict in words."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from . import api
from .plan import GROUP_SIZE
from .reference.layout import page_counts, per_token, split_windows, support_sets

if TYPE_CHECKING:
    from collections.abc import Sequence

    from .plan import UnionPlan
    from .workload import Workload

ORDERS: dict[str, int | None] = {"original": None, "w64": 64, "w128": 128}
"""Orders by name, and the window of each; the original order has none."""

# What the verdict goes by. Page visits are a proxy for time, not time itself.
LITTLE_SHARED = 1.3
"""Reuse below which groups of eight share almost nothing in any order."""
SMALL_SAVING = 0.02
"""Share of page visits saved below which regrouping hardly changes anything."""
GOOD_SAVING = 0.08
"""Share of page visits saved from which regrouping should be felt."""
WINDOW_MARGIN = 0.01
"""W64 is recommended when it saves at most this much less than W128: finding its groups takes about half the time."""


@dataclass(frozen=True)
class Order:
    """Counts of one order, groups of 8. A plain regroup, without the guard, as the recorded counts have it."""

    visits: int
    rounds: int
    reuse: float
    guarded_visits: int
    """Visits with ``guard: window``: windows that regrouping makes worse keep their order."""


@dataclass(frozen=True)
class Inspection:
    """What was found in one workload, or in several together.

    Attributes:
        layer: model layer; None where the file doesn't say, or several do.
        requests: (chunk length, prefix length) of each request.
        tokens: queries, padding rows not counted.
        kv_heads: KV heads.
        edges: (query, page) pairs, valid and distinct, over all KV heads.
        overlap: mean Jaccard index of the choices of consecutive queries of a request; 0.0 without such pairs.
        pairs: pairs of consecutive queries that ``overlap`` is the mean of.
        orders: counts by the names of ``ORDERS``.
    """

    layer: int | None
    requests: tuple[tuple[int, int], ...]
    tokens: int
    kv_heads: int
    edges: int
    overlap: float
    pairs: int
    orders: dict[str, Order]

    def saving(self, order: str, kind: str = "visits") -> float:
        """Share of the original order's ``visits``, ``rounds`` or ``guarded_visits`` that another order saves."""
        before = getattr(self.orders["original"], kind)
        return 1 - getattr(self.orders[order], kind) / before if before else 0.0

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        word, sentence = verdict(self)
        return {
            "layer": self.layer,
            "requests": [list(request) for request in self.requests],
            "tokens": self.tokens,
            "kv_heads": self.kv_heads,
            "edges": self.edges,
            "neighbour_overlap": self.overlap,
            "orders": {
                name: vars(order)
                | {
                    "visits_saved": self.saving(name),
                    "rounds_saved": self.saving(name, "rounds"),
                    "guarded_visits_saved": self.saving(name, "guarded_visits"),
                }
                for name, order in self.orders.items()
            },
            "verdict": word,
            "explanation": sentence,
        }


def inspect_workload(workload: Workload) -> Inspection:
    """Count page visits, rounds, reuse and overlap of a workload on the CPU; some seconds per head of a 16K chunk."""
    w = workload
    bounds = w.cu_seqlens.tolist()
    tokens = w.topk_idx.shape[1]
    supports = support_sets(w.topk_idx, page_counts(bounds, tokens, w.seq_lens, w.page_size))
    overlap, pairs = neighbour_overlap(supports, w.cu_seqlens)
    chunks = w.cu_seqlens.diff().tolist()
    return Inspection(
        layer=w.layer,
        requests=tuple(zip(chunks, w.prefix_lens.tolist(), strict=True)),
        tokens=bounds[-1],
        kv_heads=w.topk_idx.shape[0],
        edges=int((supports >= 0).sum()),
        overlap=overlap,
        pairs=pairs,
        orders=_orders(workload),
    )


def plan_of(workload: Workload, window: int | None) -> UnionPlan:
    """The union plan of groups of 8, regrouped inside windows (without a guard), or None for the original order."""
    w = workload
    perm = None
    if window is not None:
        perm = api.regroup(
            w.topk_idx, w.cu_seqlens, w.prefix_lens, window=window, group_size=GROUP_SIZE, page_size=w.page_size
        )
    return api.prepare_unions(
        w.topk_idx,
        perm,
        w.cu_seqlens,
        w.seq_lens,
        w.prefix_lens,
        window=window or 128,
        group_size=GROUP_SIZE,
        page_size=w.page_size,
    )


def _orders(workload: Workload) -> dict[str, Order]:
    before = plan_of(workload, None)
    orders = {}
    for name, window in ORDERS.items():
        if window is None:
            visits = before.visits()
            orders[name] = Order(visits, before.rounds(), before.reuse(), visits)
            continue
        plan = plan_of(workload, window)
        kept, _ = window_counts(workload, before, window)
        regrouped, _ = window_counts(workload, plan, window)
        guarded = int(torch.minimum(kept, regrouped).sum())
        orders[name] = Order(plan.visits(), plan.rounds(), plan.reuse(), guarded)
    return orders


def neighbour_overlap(supports: torch.Tensor, cu_seqlens: torch.Tensor) -> tuple[float, int]:
    """Mean Jaccard index of the choices of consecutive queries of one request.

    Args:
        supports: int64 ``[kv_heads, tokens, k]``, distinct pages, -1 for none.
        cu_seqlens: int32 ``[requests + 1]``.

    Returns:
        the mean, and the number of pairs. Pairs in which neither query picked anything are left out.
    """
    tokens = supports.shape[1]
    bounds = cu_seqlens.tolist()
    request = per_token(bounds, tokens, torch.arange(len(bounds) - 1), -1)
    same = (request[1:] == request[:-1]) & (request[1:] >= 0)
    total, pairs = 0.0, 0
    for head in supports:
        both = torch.cat([head[:-1], head[1:]], dim=1)[same].sort(dim=1).values
        # Pages of one query are distinct, so that a repeated one is common to both.
        common = ((both[:, 1:] == both[:, :-1]) & (both[:, 1:] >= 0)).sum(1)
        union = (both >= 0).sum(1) - common
        some = union > 0
        total += float((common[some].double() / union[some]).sum())
        pairs += int(some.sum())
    return (total / pairs if pairs else 0.0), pairs


def window_counts(workload: Workload, plan: UnionPlan, window: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Page visits and (query, page) pairs of every window of a plan.

    Args:
        workload: what the plan is of.
        plan: groups of 8 that do not cross these windows.
        window: queries per window.

    Returns:
        two int64 tensors ``[kv_heads, windows]``, windows in the order of their queries.
    """
    kv_heads, tokens, _ = workload.topk_idx.shape
    windows = split_windows(workload.cu_seqlens.tolist(), window)
    # One more for padding rows and spare groups, which visit nothing.
    owner = torch.full((tokens + 1,), len(windows), dtype=torch.int64)
    for number, one in enumerate(windows):
        owner[one.start : one.start + one.length] = number
    groups = owner[plan.queries[:, :, 0].long()]  # -1, a spare group's, is the last entry
    members = torch.zeros_like(plan.counts, dtype=torch.int64)
    for slot in range(plan.group_size):
        members += ((plan.masks.long() >> slot) & 1).sum(2)
    counts = []
    for values in (plan.counts.long(), members):
        sums = torch.zeros(kv_heads, len(windows) + 1, dtype=torch.int64)
        counts.append(sums.scatter_add_(1, groups, values)[:, :-1])
    return counts[0], counts[1]


def combine(inspections: Sequence[Inspection]) -> Inspection:
    """Several workloads as one: counts added up, overlap averaged over pairs. Needs at least one."""
    layers = {one.layer for one in inspections}
    pairs = sum(one.pairs for one in inspections)
    edges = sum(one.edges for one in inspections)

    def total(name: str) -> Order:
        orders = [one.orders[name] for one in inspections]
        visits = sum(order.visits for order in orders)
        return Order(
            visits=visits,
            rounds=sum(order.rounds for order in orders),
            reuse=edges / visits if visits else 0.0,
            guarded_visits=sum(order.guarded_visits for order in orders),
        )

    return Inspection(
        layer=layers.pop() if len(layers) == 1 else None,
        requests=tuple(request for one in inspections for request in one.requests),
        tokens=sum(one.tokens for one in inspections),
        kv_heads=max(one.kv_heads for one in inspections),
        edges=edges,
        overlap=sum(one.overlap * one.pairs for one in inspections) / pairs if pairs else 0.0,
        pairs=pairs,
        orders={name: total(name) for name in ORDERS},
    )


def verdict(found: Inspection) -> tuple[str, str]:
    """A word or two, and a sentence with the numbers and thresholds behind it.

    It goes by ``guarded_visits``, since ``guard: window`` is the default of a server.
    """
    reuse = found.orders["original"].reuse
    if found.orders["original"].visits == 0:
        return "nothing picked", "No query picked a page."
    w64, w128 = (found.saving(name, "guarded_visits") for name in ("w64", "w128"))
    best = max(w64, w128)
    best_reuse = max(found.edges / found.orders[name].guarded_visits for name in ("w64", "w128"))
    if best_reuse < LITTLE_SHARED:
        return "little shared", (
            f"Even regrouped, a visited page serves {best_reuse:.2f} of 8 queries on average (below {LITTLE_SHARED}): "
            "groups of eight have almost nothing to share, so that only a measurement can tell the modes apart."
        )
    shared = f"In the original order a visited page serves {reuse:.2f} of 8 queries on average"
    if best < SMALL_SAVING:
        return "share, don't regroup", (
            f"{shared}; regrouping saves {best:.1%} of the page visits (below {SMALL_SAVING:.0%}), which hardly pays "
            "for finding the groups: mode auto should keep the original order, as union8 does."
        )
    if w64 >= w128 - WINDOW_MARGIN:
        margin = f"{100 * WINDOW_MARGIN:.0f} point"
        window = f"window 64 saves {w64:.1%}, at most {margin} less than window 128 ({w128:.1%}): try 64"
    else:
        window = f"window 128 saves {w128:.1%}, window 64 {w64:.1%}: try 128"
    if best < GOOD_SAVING:
        return "small gain", (
            f"{shared}; regrouping saves {best:.1%} of the page visits ({SMALL_SAVING:.0%} to {GOOD_SAVING:.0%}), "
            f"which may be about what it costs: mode auto decides call by call, or measure union8 against pageweaver. "
            f"Of the windows, {window}."
        )
    return "regroup", (
        f"{shared}; regrouping saves {best:.1%} of the page visits ({GOOD_SAVING:.0%} or more): mode pageweaver should "
        f"gain, and mode auto regroup. Of the windows, {window}."
    )
