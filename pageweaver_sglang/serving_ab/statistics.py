"""Figures of a report: spread over blocks, ratios paired by block, and what Step 3 takes.

Every block and every request counts: nothing is dropped as an outlier. Only loads that failed are left out, and
ratios are taken between arms of the same block, so that a block which lacks one of them gives none.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from .settings import Cell, Settings

Run = Mapping[str, Any]


def spread(values: Sequence[float]) -> dict[str, Any]:
    """``median``, ``min`` and ``max``."""
    return {"median": statistics.median(values), "min": min(values), "max": max(values)}


def _measured(runs: Iterable[Run], arm: str, cell: Cell, *, timed: bool = False) -> dict[int, Mapping[str, Any]]:
    """An arm's results of one load by block, without those that failed."""
    return {
        run["block"]: entry
        for run in runs
        if run["arm"] == arm and run["timed"] is timed
        for entry in run["cells"]
        if (entry["prompt"], entry["concurrency"]) == (cell.prompt, cell.concurrency) and entry["failure"] is None
    }


def _known(entry: Mapping[str, Any]) -> list[float]:
    return [seconds for seconds in entry["ttft_s"] if seconds is not None]


def _ttft(blocks: Mapping[int, Mapping[str, Any]]) -> dict[str, Any] | None:
    """Milliseconds over the requests of all blocks; ``missing`` counts answers whose time the client doesn't have."""
    every = [seconds * 1e3 for entry in blocks.values() for seconds in _known(entry)]
    if not every:
        return None
    return {
        **spread(every),
        "mean": statistics.fmean(every),
        "p99": float(np.percentile(every, 99)),
        "requests": len(every),
        "missing": sum(len(entry["ttft_s"]) for entry in blocks.values()) - len(every),
        "block_medians": {block: statistics.median(_known(e)) * 1e3 for block, e in blocks.items() if _known(e)},
    }


def _paired(over: Mapping[int, float], under: Mapping[int, float]) -> dict[str, Any] | None:
    """Ratios of the blocks that both have, with their spread; None when there is no such block."""
    ratios = {block: over[block] / under[block] for block in over if block in under}
    return {**spread(list(ratios.values())), "blocks": ratios} if ratios else None


def compare(settings: Settings, runs: Sequence[Run]) -> list[dict[str, Any]]:
    """Every load with every arm that has figures for it.

    Returns:
        per load ``prompt``, ``concurrency`` and ``arms``; per arm ``input_throughput`` (tokens per second: spread over
        blocks, and ``blocks``), ``ttft_ms``, and how many times as fast as the base arm it is, paired by block:
        ``times_throughput`` (arm / base) and ``times_ttft`` (base / arm, medians of a block). None: can't be told.
    """
    rows = []
    for cell in settings.cells:
        found = {arm: blocks for arm in settings.arms if (blocks := _measured(runs, arm, cell))}
        arms: dict[str, Any] = {}
        for arm, blocks in found.items():
            throughput = {block: entry["input_throughput"] for block, entry in blocks.items()}
            arms[arm] = {
                "input_throughput": {**spread(list(throughput.values())), "blocks": throughput},
                "ttft_ms": _ttft(blocks),
            }
        base = arms.get(settings.base)
        for figures in arms.values():
            mine, theirs = figures["ttft_ms"], base and base["ttft_ms"]
            figures["times_throughput"] = base and _paired(
                figures["input_throughput"]["blocks"], base["input_throughput"]["blocks"]
            )
            figures["times_ttft"] = _paired(theirs["block_medians"], mine["block_medians"]) if mine and theirs else None
        rows.append({"prompt": cell.prompt, "concurrency": cell.concurrency, "arms": arms})
    return rows


def step3_shares(settings: Settings, runs: Sequence[Run]) -> list[dict[str, Any]]:
    """What part of the time in which the server had requests Step 3 takes.

    The time of Step 3 is from the loads in which it was timed, the serving time from the blocks in which it wasn't;
    both per prompt token. So the cost of timing is in neither.

    Returns:
        per load and arm ``prompt``, ``concurrency``, ``arm``; ``step3_ms`` per request; ``share`` (0.25: a quarter);
        ``at_most``: how many times as fast serving would be if Step 3 took no time at all. ``share`` and ``at_most``
        are None where no untimed block has figures.
    """
    rows = []
    for cell in settings.cells:
        for arm in settings.arms:
            for entry in _measured(runs, arm, cell, timed=True).values():
                if entry.get("step3") is None:
                    continue
                seconds = entry["step3"]["seconds"]
                serving = [
                    other["serving_s"] / other["input_tokens"]
                    for other in _measured(runs, arm, cell).values()
                    if other["serving_s"] is not None
                ]
                share = seconds / entry["input_tokens"] / statistics.median(serving) if serving else None
                rows.append(
                    {
                        "prompt": cell.prompt,
                        "concurrency": cell.concurrency,
                        "arm": arm,
                        "step3_ms": seconds * 1e3 / len(entry["ttft_s"]),
                        "share": share,
                        "at_most": 1 / (1 - share) if share is not None and share < 1 else None,
                    }
                )
    return rows


def idle_share(runs: Sequence[Run]) -> float | None:
    """Largest part of the client's ``duration`` in which no request was under way; None when that can't be told.

    The client asks the server for its state before it stops its clock. That time is in the throughput of all arms alike
    and pulls ratios towards 1, the more the shorter the requests are.
    """
    shares = [
        1 - entry["serving_s"] / entry["duration_s"]
        for run in runs
        for entry in run["cells"]
        if not run["timed"] and entry["failure"] is None and entry["serving_s"] is not None
    ]
    return max(shares, default=None)


def failures(runs: Sequence[Run]) -> list[str]:
    """What went wrong, a sentence each."""
    found = []
    for run in runs:
        where = f"{run['arm']}, " + ("timed" if run["timed"] else f"block {run['block'] + 1}")
        if run["failure"]:
            found.append(f"{where}: {run['failure'].splitlines()[0]}")
        if run["fallbacks"]:
            found.append(f"{where}: SGLang's own Step 3 served calls with: {', '.join(run['fallbacks'])}")
        for entry in run["cells"]:
            if entry["failure"]:
                cell = Cell(entry["prompt"], entry["concurrency"])
                found.append(f"{where}, {cell}: {entry['failure'].splitlines()[0]}")
    return found
