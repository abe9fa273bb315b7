#!/usr/bin/env python3
"""Print a report of `pageweaver bench` or `pageweaver demo --json` as Markdown tables.

results_table.py FILE
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any


def table(header: list[str], rows: list[list[str]]) -> str:
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def timing_table(runs: list[dict[str, Any]], first: str, scale: float, digits: int, more: dict[str, list[str]]) -> str:
    """Arms by runs: median (smallest-largest); ``more`` has further columns by title, one cell per arm."""
    names = list(dict.fromkeys(name for run in runs for name in run["timings"]))

    def cell(timing: dict[str, Any] | None) -> str:
        if timing is None:
            return "-"
        median, low, high = (f"{timing[key] * scale:.{digits}f}" for key in ("median_ms", "min_ms", "max_ms"))
        return f"{median} ({low}-{high})"

    header = [first, *(f"{run['cache']}, {run['mode']}" for run in runs), *more]
    rows = [[f"`{name}`", *(cell(run["timings"].get(name)) for run in runs)] for name in names]
    for column in more.values():
        for row, text in zip(rows, column, strict=True):
            row.append(text)
    return table(header, rows)


def bench_markdown(report: dict[str, Any]) -> str:
    """Arms, orders and what could not run, of a report of `pageweaver bench`."""
    counts = report["logical"]["counts"]
    rows = [
        [key, f"{c['visits']:,}", "-" if c["rounds"] is None else f"{c['rounds']:,}", f"{c['reuse']:.2f}"]
        for key, c in counts.items()
    ]
    parts = [heading(report), table(["order and group size", "visits", "rounds", "reuse"], rows)]
    if "arms" not in report:
        return "\n\n".join(parts)

    def cell(timing: dict[str, Any] | None) -> str:
        return "-" if timing is None else f"{timing['median']:.3f} ({timing['min']:.3f}-{timing['max']:.3f})"

    def percent(value: float | None) -> str:
        return "-" if value is None else f"{value:.2%}"

    rows = [
        [
            f"`{name}`",
            *(cell(arm.get(column)) for column in ("graph_ms", "cold_ms", "warm_graph_ms")),
            *(percent(arm["fidelity"].get(kind, {}).get("nrms")) for kind in ("random", "sharp")),
            f"{arm['rates']['effective_tb_s']:.2f}",
            f"{arm['rates']['effective_tflops']:.0f}",
        ]
        for name, arm in report["arms"].items()
        if arm["rates"] is not None
    ]
    protocol = report["settings"]["protocol"]
    header = ["arm", "cold, graph", "cold, eager", "warm, graph", "error", "error, Q x 4", "TB/s", "TFLOP/s"]
    parts += [
        f"Milliseconds per call, median (smallest-largest) of {protocol['rounds']} rounds x {protocol['calls']} calls:",
        table(header, rows),
    ]
    missing = {name: arm["unavailable"] for name, arm in report["arms"].items() if arm["unavailable"]}
    return "\n\n".join([*parts, *(f"`{name}` not run: {reason}" for name, reason in missing.items())])


def heading(report: dict[str, Any]) -> str:
    """What was measured, on what."""
    environment, workload = report["environment"], report["workload"]
    gpu = next(iter(environment["gpus"]), None)
    versions = ", ".join(f"{name} {version}" for name, version in environment["versions"].items() if version)
    heads = f", {workload['q_heads'] // workload['kv_heads']} heads per KV head" if "q_heads" in workload else ""
    where = f"{gpu['name']}, driver {gpu['driver_version']}" if gpu else "no GPU"
    return (
        f"`{workload['name']}`: {workload['tokens']:,} queries{heads}, context {max(workload['seq_lens']):,}. {where}. "
        f"{versions}. Commit {environment['commit']}, {environment['date']}, `{environment['command']}`."
    )


def markdown(report: dict[str, Any]) -> str:
    """The whole report; counts only when there was no GPU part."""
    if str(report.get("format", "")).startswith("pageweaver-"):
        return bench_markdown(report)
    parts = [
        heading(report),
        table(
            ["order", "group", "visits", "rounds", "reuse"],
            [
                [c["order"], str(c["group_size"]), f"{c['visits']:,}", f"{c['rounds']:,}", f"{c['reuse']:.2f}"]
                for c in report["counts"]["orders"]
            ],
        ),
    ]
    if "timings" not in report:
        return "\n\n".join([*parts, f"GPU part not run: {report['gpu_part']}"])
    runs, errors = report["timings"]["runs"], report["accuracy"]["nrms"]
    names = list(dict.fromkeys(name for run in runs for name in run["timings"]))
    more = {
        "error": [f"{errors[name]['random']:.2%}" for name in names],
        "error, Q x 4": [f"{errors[name]['q_x4']:.2%}" for name in names],
    }
    protocol = report["protocol"]
    parts += [
        f"Milliseconds per call, median (smallest-largest) of {protocol['rounds']} rounds x {protocol['calls']} calls:",
        timing_table(runs, "arm", 1.0, 3, more),
        "Kernels alone, microseconds:",
        timing_table(report["stages"]["runs"], "kernel", 1e3, 1, {}),
    ]
    parts += [f"`{name}` not run: {reason}" for name, reason in report["unavailable"].items()]
    return "\n\n".join(parts)


def read_report(file: str | Path) -> dict[str, Any]:
    """A report of `pageweaver bench` or `pageweaver demo --json`.

    Raises:
        ValueError: there is none; the message names the file.
    """
    try:
        report = json.loads(Path(file).read_text())
    except OSError as error:
        raise ValueError(f"{file}: {error.strerror}") from error
    except ValueError as error:
        raise ValueError(f"{file}: not a JSON file: {error}") from error
    if not isinstance(report, dict) or not {"environment", "workload"} <= report.keys():
        raise ValueError(f"{file}: no report of `pageweaver bench` or `pageweaver demo --json`")
    return report


def main() -> None:
    if len(sys.argv) != 2 or sys.argv[1] in ("-h", "--help"):
        sys.exit(__doc__)
    try:
        report = read_report(sys.argv[1])
    except ValueError as error:
        sys.exit(f"results_table.py: {error}")
    print(markdown(report))


if __name__ == "__main__":
    main()
