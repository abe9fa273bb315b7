#!/usr/bin/env python3
"""Cost of Step 3 against the number of queries (1K to 64K) and the context (8K to 1M): measure on a GPU, print a table.

    scaling.py --out scaling-results                # makes the workloads, runs `pageweaver bench` on them, prints
    scaling.py --table scaling-results/*.json       # the table of earlier results

Workloads are synthetic (`pageweaver make-workload`, preset ctx64k): N queries at the end of 64K + N tokens of context,
and 8K queries at the end of a context of C tokens (4K at the end of 8K). Exit code: that of the benchmark.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from scripts.results_table import read_report, table

ROOT = Path(__file__).resolve().parents[1]
K = 1024
PREFIX = 64 * K
QUERIES = (1, 2, 4, 8, 16, 32, 64)
"""Thousands (1024) of queries behind PREFIX tokens."""
CONTEXTS = (8, 16, 32, 64, 128, 256, 512, 1024)
"""Thousands (1024) of tokens of context, with min(8K, half of it) queries at its end."""
ARMS = ("native", "union8", "pageweaver-w64", "pageweaver-w128", "auto")


def workloads() -> dict[str, tuple[int, int]]:
    """Queries and prefix of each workload, by name."""
    by_queries = {f"queries-{n}k": (n * K, PREFIX) for n in QUERIES}
    by_context = {}
    for context in CONTEXTS:
        queries = min(8, context // 2) * K
        by_context[f"context-{context}k"] = (queries, context * K - queries)
    return by_queries | by_context


def measure(out: Path, arms: Sequence[str], more: Sequence[str]) -> int:
    """Make the workloads and run the benchmark on them; returns its exit code."""
    out.mkdir(parents=True, exist_ok=True)
    command = [sys.executable, "-m", "pageweaver_sglang.cli"]

    def make(name: str, queries: int, prefix: int) -> str:
        file = str(out / f"{name}.npz")
        options = ["--preset", "ctx64k", "--queries", str(queries), "--prefix", str(prefix)]
        subprocess.run([*command, "make-workload", file, *options], check=True, cwd=ROOT, stdout=subprocess.DEVNULL)
        return file

    with ThreadPoolExecutor(os.cpu_count()) as pool:
        files = list(pool.map(lambda item: make(item[0], *item[1]), workloads().items()))
    options = ["--arms", ",".join(arms), "--columns", "graph_ms", "--out", str(out), *more]
    return subprocess.run([*command, "bench", *files, *options], check=False, cwd=ROOT).returncode


def markdown(reports: Iterable[dict[str, Any]]) -> str:
    """One line a workload: median (smallest-largest) of each arm, and of the first of PageWeaver's arms per query."""
    lines = []
    for report in reports:
        arms = {name: arm["graph_ms"] for name, arm in report["arms"].items() if arm.get("graph_ms")}
        own = next(name for name in arms if name.startswith("pageweaver"))
        workload = report["workload"]
        counts = report["logical"]["counts"]
        cells = [f"{t['median']:.3f} ({t['min']:.3f}-{t['max']:.3f})" for t in arms.values()]
        per_query = arms[own]["median"] * 1e6 / workload["tokens"]
        visits = counts["w64-8"]["visits"] / workload["tokens"]
        lines.append((workload, list(arms), cells, f"{visits:.2f}", f"{per_query:.1f}", own))
    if not lines:
        raise SystemExit("scaling.py: no reports")
    names, own = lines[0][1], lines[0][5]
    if any(line[1] != names for line in lines):
        raise SystemExit("scaling.py: the reports have different arms")
    header = ["queries", "context", *(f"`{name}`, ms" for name in names), "visits a query", f"`{own}`, ns a query"]
    order = sorted(lines, key=lambda line: _kind_and_size(line[0]["name"]))
    return table(
        header,
        [[f"{w['tokens']:,}", f"{max(w['seq_lens']):,}", *cells, visits, ns] for w, _, cells, visits, ns, _ in order],
    )


def _kind_and_size(name: str) -> tuple[bool, int]:
    """Sorts queries before contexts, each by thousands; ``name`` is the workload file's path."""
    kind, _, size = Path(name).stem.partition("-")
    return kind != "queries", int(size.removesuffix("k"))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument("--out", type=Path, help="folder for workloads and results")
    what.add_argument("--table", type=Path, nargs="+", metavar="JSON", help="print the table of these results")
    parser.add_argument("--arms", default=",".join(ARMS), help="arms of the benchmark (default: %(default)s)")
    parser.add_argument("more", nargs="*", help="options for `pageweaver bench`, behind --")
    options = parser.parse_args()
    files, code = options.table, 0
    if files is None:
        code = measure(options.out.resolve(), options.arms.split(","), options.more)
        files = sorted(options.out.glob("arms-*.json"))
    try:
        print(markdown(read_report(file) for file in files))
    except ValueError as error:
        sys.exit(f"scaling.py: {error}")
    return code


if __name__ == "__main__":
    sys.exit(main())
