"""scripts/scaling.py: which workloads it measures, and its table of the reports."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from scripts import scaling


def report(name: str, tokens: int, context: int, own: float) -> dict:
    arms = {"native": 10 * own, "pageweaver-w64": own}
    times = {arm: {"graph_ms": {"median": t, "min": 0.9 * t, "max": 1.2 * t}} for arm, t in arms.items()}
    return {
        "environment": {},
        "workload": {"name": name, "tokens": tokens, "seq_lens": [context]},
        "arms": {**times, "pr37236": {"graph_ms": None}},
        "logical": {"counts": {"w64-8": {"visits": 6 * tokens}}},
    }


def test_workloads_span_what_they_should():
    loads = scaling.workloads()
    queries = [loads[name][0] for name in loads if name.startswith("queries")]
    contexts = [sum(loads[name]) for name in loads if name.startswith("context")]
    assert (queries[0], queries[-1]) == (1024, 65536)
    assert (contexts[0], contexts[-1]) == (8192, 1 << 20)
    assert all(count > 0 and prefix >= 0 for count, prefix in loads.values())


@pytest.mark.parametrize("folder", ["", "scaling/", "/data/queries-9k/"])
def test_table_in_order_with_cost_per_query(tmp_path, folder):
    """Reports name the workload's file as `pageweaver bench` got it: with its folder."""
    reports = [
        report(f"{folder}context-8k.npz", 4096, 8192, 0.1),
        report(f"{folder}queries-16k.npz", 16384, 81920, 0.6),
    ]
    reports.insert(0, report(f"{folder}queries-2k.npz", 2048, 67584, 0.08))
    files = []
    for content in reports:
        files.append(tmp_path / f"arms-{Path(content['workload']['name']).stem}.json")
        files[-1].write_text(json.dumps(content))
    script = Path(scaling.__file__)
    done = subprocess.run(
        [sys.executable, str(script), "--table", *map(str, files)], capture_output=True, text=True, check=True
    )
    header, _, *rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in done.stdout.splitlines()]
    assert header[:4] == ["queries", "context", "`native`, ms", "`pageweaver-w64`, ms"]
    assert [row[0] for row in rows] == ["2,048", "16,384", "4,096"]
    assert rows[0][3] == "0.080 (0.072-0.096)"
    assert [row[4] for row in rows] == ["6.00"] * 3
    assert rows[1][5] == f"{0.6e6 / 16384:.1f}"


def test_reports_of_different_arms_are_refused():
    other = report("queries-4k", 4096, 69632, 0.2)
    del other["arms"]["native"]
    with pytest.raises(SystemExit, match="different arms"):
        scaling.markdown([report("queries-2k", 2048, 67584, 0.1), other])
