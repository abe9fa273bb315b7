"""Statistics, the report built from synthetic results, and the commands that need no GPU."""

import copy
import importlib.util
import json
import re
import sys
from pathlib import Path

import pytest

from pageweaver_sglang.bench.report import files, page, plots
from pageweaver_sglang.bench.statistics import compare_runs, paired_ratio, ratios_to, savings, summary
from pageweaver_sglang.cli import main

ROOT = Path(__file__).resolve().parents[2]
ROUNDS = {"native": [5.2, 5.6, 5.4], "union8": [1.3, 1.4, 1.2], "page-pair": [3.0, 3.1, 3.3]}
WINDOWS = {"pageweaver-w128-fixed": [1.0, 1.1, 0.9], "pageweaver-w128": [1.05, 1.15, 0.95]}
RATES = {
    "bytes_delivered": 1,
    "effective_tb_s": 3.2,
    "effective_tflops": 250.0,
    "of_copy_tb_s": 0.8,
    "of_l2_copy_tb_s": None,
    "of_fp8_matmul_tflops": 0.21,
}
COLUMNS = ("cold_ms", "graph_ms", "warm_ms", "warm_graph_ms")


def synthetic_arm(rounds, kind="main"):
    timing = {} if rounds is None else {column: summary(rounds) for column in COLUMNS}
    return {
        "description": "a <made-up> arm",
        "kind": kind,
        "unavailable": None if rounds else "no <such> kernel",
        "failed_columns": None,
        "max_nrms": 0.05,
        "nrms": 0.03 if rounds else None,
        "fidelity": {"random": {"nrms": 0.03}, "sharp": {"nrms": 0.06}} if rounds else {},
        "counts": {"visits": 1000, "rounds": 1500, "reuse": 2.5},
        "rates": {**RATES} if rounds else None,
        "notes": {"search_s": 1.25} if kind == "offline" else {},
        **timing,
    }


def synthetic_report(name="ctx_made_up", scale=1.0):
    rounds = {arm: [scale * value for value in values] for arm, values in {**ROUNDS, **WINDOWS}.items()}
    arms = {arm: synthetic_arm(values, "control" if arm == "page-pair" else "main") for arm, values in rounds.items()}
    arms["offline-w512"] = synthetic_arm([1.0, 1.0, 1.0], "offline")
    arms["pr37236"] = synthetic_arm(None)
    count = {"visits": 1000, "rounds": None, "reuse": 2.0, "bytes_delivered": 32_768_000}
    return {
        "format": files.FORMATS[0],
        "environment": {
            "gpus": [{"name": "Some GPU", "driver_version": "1.2"}],
            "versions": {"torch": "2.11.0", "sglang": None},
            "commit": "abc",
            "date": "2026-01-01",
            "command": "pageweaver bench",
        },
        "seed": 0,
        "workload": {"name": name, "tokens": 100, "kv_heads": 1, "topk": 16, "seq_lens": [6400]},
        "ceilings": {"copy_tb_s": 4.1, "l2_copy_tb_s": None, "fp8_matmul_tflops": 1200.0},
        "settings": {"protocol": {"rounds": 3, "calls": 20, "warmup": 3}},
        "sets": 8,
        "seeds": list(range(8)),
        "random_tensors_because": "the file holds picks only",
        "logical": {
            "work": {"picks": 1600, "visible_keys": 100_000, "useful_flops": 819_200_000},
            "counts": {
                key: {**count, "search_s": 0.5}
                for key in ("per-query", "original-4", "original-8", "w128-8", "w512-8", "page-pair")
            },
            "page_pair": {
                "pairs": 5,
                "single_pages": 1,
                "common_meetings": 30,
                "exclusive_meetings": 40,
                "padded_workspace_bytes": 2e6,
                "used_workspace_bytes": 1e6,
            },
            "differences": None,
        },
        "arms": arms,
        "stages": {"regroup-w128": {"graph_ms": summary([0.03])}},
        "savings": savings(arms),
        "untuned_native": {"column": "graph_ms", "times_as_slow": {"median": 1.9, "min": 1.8, "max": 2.0}},
        "failures": [],
    }


def test_summary_and_paired_ratio():
    assert summary([3.0, 1.0, 2.0]) == {"median": 2.0, "min": 1.0, "max": 3.0, "rounds": [3.0, 1.0, 2.0]}
    # The clock halved in round 2: both arms slowed down, and the paired ratio doesn't show it.
    assert paired_ratio([4.0, 8.0, 4.0], [2.0, 4.0, 2.0]) == {"median": 2.0, "min": 2.0, "max": 2.0}
    with pytest.raises(ValueError, match="same rounds, got 2 and 1"):
        paired_ratio([1.0, 2.0], [1.0])


def test_ratios_and_savings():
    arms = synthetic_report()["arms"]
    ratios = ratios_to(arms, "native", "graph_ms")
    assert "pr37236" not in ratios
    assert ratios["union8"]["median"] == pytest.approx(4.0)
    row = next(row for row in savings(arms) if row["column"] == "graph_ms")
    assert row["order"] == "w128"
    assert row["execution_saving_ms"] == pytest.approx(0.3)
    assert row["online_cost_ms"] == pytest.approx(0.05)
    assert row["net_saving_ms"] == pytest.approx(0.25)


def test_comparison_of_two_runs():
    first, second = synthetic_report(), synthetic_report(scale=1.5)
    # A slower day as a whole changes no ratio.
    second["arms"]["offline-w512"] = copy.deepcopy(first["arms"]["offline-w512"])
    found = compare_runs(first, second)
    assert found["base"] == "native"
    by_arm = {(row["arm"], row["column"]): row["difference"] for row in found["rows"]}
    assert by_arm["union8", "graph_ms"] == pytest.approx(0.0)
    assert by_arm["offline-w512", "graph_ms"] == pytest.approx(0.5)
    assert found["largest"] == pytest.approx(0.5)
    del second["arms"]["page-pair"]
    assert compare_runs(first, second)["only_in_one"] == ["page-pair"]
    with pytest.raises(ValueError, match="different workloads, ctx_made_up and other"):
        compare_runs(first, synthetic_report("other"))
    second["workload"]["q_heads"] = 8
    with pytest.raises(ValueError, match="different heads, 16 and 8 query heads per KV head"):
        compare_runs(first, second)


def test_compare_command(tmp_path, capsys):
    paths = []
    for number, scale in enumerate((1.0, 1.01)):
        report = synthetic_report()
        report["arms"]["union8"] = synthetic_arm([scale * value for value in ROUNDS["union8"]])
        paths.append(files.write_report(report, tmp_path / str(number)))
    assert main(["bench", "--compare", *map(str, paths)]) == 0
    shown = " ".join(capsys.readouterr().out.split())
    assert "ctx_made_up: ratios to native differ by at most 0.99% between the two runs" in shown
    (tmp_path / "other.json").write_text("{}")
    assert main(["bench", "--compare", str(paths[0]), str(tmp_path / "other.json")]) == 2
    assert "no report of pageweaver bench" in " ".join(capsys.readouterr().err.split())


def check_page(text, names):
    assert len(text) < 2_000_000
    for name in names:
        assert f"<h2>{name}</h2>" in text
    # Nothing is loaded from anywhere: every source is inline, and there is neither script nor link.
    assert all(source.startswith("data:image/png;base64,") for source in re.findall(r'src="([^"]*)"', text))
    assert not re.search(r"<script|<link|href=|url\(|https?://", text)


def test_report_from_synthetic_results(tmp_path, capsys):
    pytest.importorskip("matplotlib")
    names = ["ctx_made_up", "page-pair-32k"]
    paths = [str(files.write_report(synthetic_report(name), tmp_path)) for name in names]
    assert main(["bench", "--report-only", *paths, "--out", str(tmp_path / "out")]) == 0
    text = (tmp_path / "out" / "report.html").read_text()
    check_page(text, names)
    assert "Page-pair on interleaved sets" in text
    assert "Saving against cost of regrouping" in text
    assert "no &lt;such&gt; kernel" in text  # the unavailable arm and its reason, escaped
    assert "1.90 times as long" in text
    assert text.count("Arms side by side") == 2 * 2  # heading and alternative text
    assert "Some GPU, driver 1.2" in text
    assert "<td>3.20</td><td>250 (21%)</td>" in text
    pngs = {path.stem for path in (tmp_path / "out" / "plots").glob("*.png")}
    assert pngs == {"savings", "page-pair"} | {
        f"{kind}-{name}" for kind in ("arms", "offline", "visits") for name in names
    }
    assert all(path.read_bytes().startswith(b"\x89PNG") for path in (tmp_path / "out" / "plots").glob("*.png"))


def test_report_without_matplotlib(tmp_path, capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    path = files.write_report(synthetic_report(), tmp_path)
    assert main(["bench", "--report-only", str(path), "--out", str(tmp_path)]) == 0
    assert "pip install 'pageweaver-sglang[plots]'" in " ".join(capsys.readouterr().out.split())
    text = (tmp_path / "report.html").read_text()
    check_page(text, ["ctx_made_up"])
    assert "matplotlib is not installed" in text
    assert "1.300 (1.200-1.400)" in text
    assert not (tmp_path / "plots").exists()


def test_markdown_of_a_report():
    spec = importlib.util.spec_from_file_location("results_table", ROOT / "scripts" / "results_table.py")
    results_table = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(results_table)
    text = results_table.markdown(synthetic_report())
    assert "| `union8` | 1.300 (1.200-1.400) | 1.300 (1.200-1.400) |" in text
    assert "| 3.00% | 6.00% | 3.20 | 250 |" in text
    assert "`pr37236` not run: no <such> kernel" in text


def test_same_report_same_bytes():
    pytest.importorskip("matplotlib")
    reports = [synthetic_report()]
    pages = [page.build_page(reports, plots.all_figures(reports)) for _ in range(2)]
    assert pages[0] == pages[1]


def test_reference_comparison_end_to_end(tmp_path, capsys):
    code = main(["bench", "--reference", "ctx8k", "--out", str(tmp_path)])
    shown = " ".join(capsys.readouterr().out.split())
    assert code == 0
    assert "20,792" in shown
    report = json.loads((tmp_path / "logical-ctx8k.json").read_text())
    logical = report["logical"]
    assert logical["differences"] == []
    assert logical["counts"]["original-8"]["visits"] == logical["recorded"]["visits-original-8"] == 22567
    assert logical["counts"]["w128-8"]["rounds"] == 37459
    assert logical["counts"]["per-query"]["visits"] == logical["work"]["picks"] == 115712
    assert logical["counts"]["random-8"]["visits"] > logical["counts"]["original-8"]["visits"]
    assert logical["page_pair"]["common_meetings"] > 0
    check_page((tmp_path / "report.html").read_text(), ["ctx8k"])


def test_two_workloads_of_one_name(tmp_path, capsys):
    import shutil

    from pageweaver_sglang.bench.workloads import find_workload

    shutil.copy(find_workload("ctx8k"), tmp_path / "ctx8k.npz")
    assert main(["bench", "--reference", "ctx8k", str(tmp_path / "ctx8k.npz")]) == 2
    assert "two workloads are called ctx8k" in capsys.readouterr().err


def test_report_only_needs_files(tmp_path, capsys):
    assert main(["bench", "--report-only"]) == 2
    assert main(["bench", "--report-only", str(tmp_path / "none.json")]) == 2
    assert "none.json" in capsys.readouterr().err
