"""Figures of a report: medians with their spread, ratios paired by round, and what regrouping saves."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from .protocol import Mode
from .report.files import heads_in

COLUMNS: dict[str, tuple[str, Mode]] = {
    "cold_ms": ("cold", "eager"),
    "graph_ms": ("cold", "graph"),
    "warm_ms": ("warm", "eager"),
    "warm_graph_ms": ("warm", "graph"),
}
"""Timings of an arm by their key in a report: state of the caches, and how the arm was called."""


def summary(rounds: Sequence[float]) -> dict[str, Any]:
    """``median``, ``min``, ``max`` and ``rounds``, all of them in the order measured."""
    return {"median": statistics.median(rounds), "min": min(rounds), "max": max(rounds), "rounds": list(rounds)}


def span(timing: Mapping[str, Any] | None) -> str:
    """A :func:`summary` as text, "median (min-max)"; a dash for none."""
    return "-" if timing is None else f"{timing['median']:.3f} ({timing['min']:.3f}-{timing['max']:.3f})"


def paired_ratio(over: Sequence[float], under: Sequence[float]) -> dict[str, float]:
    """Median, smallest and largest of the ratios of two arms' rounds, each taken in the same round.

    Raises:
        ValueError: the arms have different numbers of rounds, or none.
    """
    if len(over) != len(under) or not over:
        raise ValueError(f"paired_ratio: both arms must have the same rounds, got {len(over)} and {len(under)}")
    ratios = [a / b for a, b in zip(over, under, strict=True)]
    return {"median": statistics.median(ratios), "min": min(ratios), "max": max(ratios)}


def ratios_to(arms: Mapping[str, Mapping[str, Any]], base: str, column: str) -> dict[str, dict[str, float]]:
    """How many times as fast as ``base`` each timed arm is (base / arm, paired by round)."""
    reference = arms.get(base, {}).get(column)
    if reference is None:
        return {}
    return {
        name: paired_ratio(reference["rounds"], arm[column]["rounds"])
        for name, arm in arms.items()
        if arm.get(column) is not None
    }


SAVING_WINDOWS = ("w64", "w128")


def saving_arms(window: str) -> tuple[str, str, str]:
    """The arms of T0 (original order), T_fixed and T_online of a window (``w64`` or ``w128``)."""
    return ("union8", f"pageweaver-{window}-fixed", f"pageweaver-{window}")


def saving_figures(t0: float, fixed: float, online: float) -> dict[str, float]:
    """The three times (ms) and what follows from them: execution saving, online cost, net saving."""
    return {
        "t0_ms": t0,
        "t_fixed_ms": fixed,
        "t_online_ms": online,
        "execution_saving_ms": t0 - fixed,
        "online_cost_ms": online - fixed,
        "net_saving_ms": t0 - online,
    }


def savings(arms: Mapping[str, Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Per window and column: T0 (``union8``), T_fixed, T_online; execution saving, online cost, net saving (ms)."""
    rows = []
    for column in COLUMNS:
        for window in SAVING_WINDOWS:
            names = saving_arms(window)
            found = [timing["median"] for name in names if (timing := arms.get(name, {}).get(column)) is not None]
            if len(found) < len(names):
                continue
            rows.append({"column": column, "order": window, **saving_figures(*found)})
    return rows


def base_arm(*reports: Mapping[str, Any]) -> str | None:
    """The arm that ratios refer to: ``native`` where every report has timed it, else ``union8``, else None."""
    for name in ("native", "union8"):
        if all(report["arms"].get(name, {}).get("graph_ms") for report in reports):
            return name
    return None


def compare_runs(first: Mapping[str, Any], second: Mapping[str, Any]) -> dict[str, Any]:
    """How far two runs' ratios differ, arm by arm.

    Ratios are taken inside each run (base / arm, medians), so that a faster or slower day cancels out.

    Args:
        first: a report of ``pageweaver bench``.
        second: another one on the same workload.

    Returns:
        ``base``; ``rows`` with ``arm``, ``column``, ``first``, ``second`` and ``difference`` (0.01: the second run's
        ratio is 1 % higher); ``largest``, the largest absolute difference; ``only_in_one``, arms that one run lacks.

    Raises:
        ValueError: different workloads or numbers of heads, or no arm in both that ratios can refer to.
    """
    names = [report["workload"]["name"] for report in (first, second)]
    if names[0] != names[1]:
        raise ValueError(f"the reports are of different workloads, {names[0]} and {names[1]}")
    heads = [heads_in(report) for report in (first, second)]
    if heads[0] != heads[1]:
        raise ValueError(f"the reports are of different heads, {heads[0]} and {heads[1]} query heads per KV head")
    base = base_arm(first, second)
    if base is None:
        raise ValueError("neither native nor union8 was timed in both reports")
    rows, seen = (
        [],
        [{name for name, arm in report["arms"].items() if arm.get("graph_ms")} for report in (first, second)],
    )
    for name in first["arms"]:
        for column in COLUMNS:
            arms = [
                (report["arms"][base].get(column), report["arms"].get(name, {}).get(column))
                for report in (first, second)
            ]
            if name == base or any(timing is None for pair in arms for timing in pair):
                continue
            ratio = [reference["median"] / timing["median"] for reference, timing in arms]
            rows.append(
                {
                    "arm": name,
                    "column": column,
                    "first": ratio[0],
                    "second": ratio[1],
                    "difference": ratio[1] / ratio[0] - 1,
                }
            )
    largest = max((abs(row["difference"]) for row in rows), default=0.0)
    return {"base": base, "rows": rows, "largest": largest, "only_in_one": sorted(seen[0] ^ seen[1])}
