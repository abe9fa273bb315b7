#!/usr/bin/env python3
"""What mode auto goes by (pageweaver_sglang/auto/model.py), from measurements of `pageweaver bench`.

    fit_auto.py benchmarks/results/h200/arms-{ctx*,packed}.json
    fit_auto.py benchmarks/results/h200/eight-heads/arms-*-8heads.json

The reports' calls must have groups of one size, of 8 or of 16.

Per workload: visits (of groups of 8, as regrouping counts them) that windows of 64 save, what the same order saves when
it is found beforehand (union8 less pageweaver-w64-fixed, whole calls, graph_ms) in ns per visit, what finding it adds
in the call, the model's gain and the measured one. Below: visit-weighted mean, mean cost per window, and the same for
the paper's kernel, whose cost of finding the order is taken from windows of 128.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from pageweaver_sglang.auto import model
from scripts.results_table import read_report, table

PAPER = ("union8-paper", "pageweaver-w128-paper")
NEEDED = ("union8", *(f"pageweaver-w{window}{order}" for window in (64, 128) for order in ("", "-fixed")))


def rows_of(reports: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Visits saved by windows of 64, time saved beforehand and online, cost by window, in us; per workload."""
    rows = []
    for report in reports:
        arms = report["arms"]
        if missing := [name for name in NEEDED if not arms.get(name, {}).get("graph_ms")]:
            raise ValueError(f"{report['workload']['name']}: no timing with graphs of the arms {', '.join(missing)}")
        us = {name: 1000 * arm["graph_ms"]["median"] for name, arm in arms.items() if arm.get("graph_ms")}
        visits = {name: arms[name]["counts"]["visits"] for name in us}
        counts = report["logical"]["counts"]
        rows.append(
            {
                "name": Path(report["workload"]["name"]).stem,
                "rows": report["workload"]["tokens"] * report["workload"]["kv_heads"],
                "union": 8 if counts["original-8"]["visits"] == visits["union8"] else 16,
                "saved": counts["original-8"]["visits"] - counts["w64-8"]["visits"],
                "worth": us["union8"] - us["pageweaver-w64-fixed"],
                "gain": us["union8"] - us["pageweaver-w64"],
                "cost": {w: us[f"pageweaver-w{w}"] - us[f"pageweaver-w{w}-fixed"] for w in (64, 128)},
                "paper": (visits[PAPER[0]] - visits[PAPER[1]], us[PAPER[0]] - us[PAPER[1]]) if PAPER[0] in us else None,
            }
        )
    return rows


def fit(rows: list[dict[str, Any]]) -> dict[Any, Any]:
    """By engine: ns per visit saved; by window: us that regrouping adds on average; ``rows``: the mean of them."""
    found: dict[Any, Any] = {window: statistics.mean(row["cost"][window] for row in rows) for window in (64, 128)}
    found["rows"] = round(statistics.mean(row["rows"] for row in rows))
    found["stream"] = 1000 * sum(row["worth"] for row in rows) / sum(row["saved"] for row in rows)
    if paper := [row["paper"] for row in rows if row["paper"] is not None]:
        worth = sum(gain + found[128] for _, gain in paper)
        found["union8"] = 1000 * worth / sum(saved for saved, _ in paper)
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("reports", type=Path, nargs="+", metavar="JSON")
    try:
        rows = rows_of([read_report(path) for path in parser.parse_args().reports])
    except ValueError as error:
        sys.exit(f"fit_auto.py: {error}")
    sizes = {row["union"] for row in rows}
    if len(sizes) > 1:
        sys.exit("fit_auto.py: JSON: the reports must have groups of one size, got some of 8 and some of 16")
    (union,) = sizes
    header = ["workload", "rows", "visits saved", "ns a visit", "W64 costs, us", "W128, us", "gain, us", "model's"]
    lines = []
    for row in rows:
        saved_per_row = row["saved"] / row["rows"]
        expected = model.gain_us(row["rows"], saved_per_row, window=64, engine="stream", union=union)
        lines.append(
            [
                row["name"],
                f"{row['rows']:,}",
                f"{row['saved']:,}",
                f"{1000 * row['worth'] / row['saved']:.2f}",
                *(f"{row['cost'][window]:.1f}" for window in (64, 128)),
                f"{row['gain']:.1f}",
                f"{expected:.1f}",
            ]
        )
    print(table(header, lines))
    found = fit(rows)
    known = 1000 * model.worth_us(1, "stream", union)
    print(f"\nstream, groups of {union}: {found['stream']:.2f} ns a visit (model: {known:.2f})")
    if "union8" in found:
        print(f"union8: {found['union8']:.2f} ns a visit (model: {model.NS_PER_VISIT['union8']})")
    for window in (64, 128):
        cost = model.cost_us(found["rows"], window)
        print(f"W{window}: {found[window]:.1f} us at {found['rows']:,} rows (model: {cost:.1f})")
    return 0


if __name__ == "__main__":
    sys.exit(main())
