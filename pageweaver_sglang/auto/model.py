"""What regrouping costs and what a saved page visit is worth: a line and a factor.

Fitted to the eight recorded workloads in ``benchmarks/results/h200/`` (whole online calls, cold caches, CUDA graph;
6,824 to 16,384 queries, one KV head). What a call saves there by an order found beforehand, ``union8`` -
``pageweaver-w64-fixed``, is 4.4 to 5.2 ns per page visit saved on seven of eight workloads, 4.75 over all; what finding
the order adds, ``pageweaver-w64`` - ``pageweaver-w64-fixed``, is 8 to 17 us, 14.3 over all, and hardly grows with the
queries, since one wave of thread blocks does it.
With these the better arm is chosen on every workload (``tests/auto/test_model.py``). ``scripts/fit_auto.py`` does this
again with other measurements.

Windows are not chosen: 128 saves at most 1,444 visits (7 us) more than 64 in those files and costs 7 us more; it was
faster in one of them, by 0.2 %.

A *row* is a (query, KV head) pair: the unit of regrouping and of visits.
"""

from __future__ import annotations

from ..plan import GROUP_SIZE

NS_PER_VISIT = {"stream": 4.75, "union8": 8.5}
"""Time that one page visit less saves, by engine."""

NS_PER_VISIT_OF_16 = 2.45
"""The same for ``stream`` in groups of 16, where a KV head has 8 query heads and fewer: per visit of groups of 8, which
are what regrouping counts, and what a tile of 8 queries is busy with. From ``eight-heads/`` beside those results;
regrouping costs 1 us more there."""

REGROUP_US = {64: 12.7, 128: 19.5}
"""By window: time that any regrouping adds to a call."""

REGROUP_US_PER_1000_ROWS = {64: 0.12, 128: 0.15}
"""By window: and what every thousand rows add to that."""

NS_PER_ROW = 25.0
"""Time of a call in its original order, per row, rounded down: 27.6 (``ctx8k``) to 43.6 ns (``ctx128k``)."""

NS_PER_ROW_OF_16 = 16.0
"""The same in groups of 16: 16.1 (``ctx8k``) to 32.0 ns (``ctx128k``)."""


def cost_us(rows: int, window: int) -> float:
    """What regrouping ``rows`` in windows of ``window`` adds to a call."""
    return REGROUP_US[window] + REGROUP_US_PER_1000_ROWS[window] * rows / 1000


def worth_us(visits: float, engine: str, union: int = GROUP_SIZE) -> float:
    """What ``visits`` page visits less save, where a plan has groups of ``union`` queries.

    An engine without a figure of its own, ``portable``, counts as the fastest one, and ``stream`` has that of FP8
    caches whatever the cache: their calls take longer per visit, so that less is expected of regrouping than it gains.
    """
    if engine == "stream" and union > GROUP_SIZE:
        return visits * NS_PER_VISIT_OF_16 / 1000
    return visits * NS_PER_VISIT.get(engine, NS_PER_VISIT["stream"]) / 1000


def gain_us(rows: int, saved_per_row: float, *, window: int, engine: str, union: int = GROUP_SIZE) -> float:
    """What regrouping gains if it saves ``saved_per_row`` page visits a row; below zero it loses."""
    return worth_us(rows * saved_per_row, engine, union) - cost_us(rows, window)


def time_us(rows: int, engine: str, union: int = GROUP_SIZE) -> float:
    """Time of a call of ``rows`` in its original order, at the least."""
    return rows * (NS_PER_ROW_OF_16 if engine == "stream" and union > GROUP_SIZE else NS_PER_ROW) / 1000


def most_saved_per_row(topk: int) -> float:
    """Page visits per row that regrouping can save at the very most.

    A group of queries that share nothing visits ``GROUP_SIZE * topk`` pages, and one whose queries share all ``topk``.
    """
    return topk * (1 - 1 / GROUP_SIZE)
