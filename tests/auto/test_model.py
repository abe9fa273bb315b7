"""The cost model against the committed measurements: from page counts alone it must name the faster arm."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

import pageweaver_sglang as pw
from pageweaver_sglang.auto import model
from pageweaver_sglang.auto.history import History
from pageweaver_sglang.capture.snapshot import HostLengths
from scripts import fit_auto

ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "benchmarks" / "results" / "h200"
WORKLOADS = ["ctx8k", "ctx16k", "ctx32k_chunk2", "ctx64k_a", "ctx64k_flat", "ctx64k_mixed", "ctx128k", "packed"]
ORIGINAL_IS_FASTER = {16: {"ctx8k", "ctx64k_flat"}, 8: {"ctx8k", "ctx64k_flat", "ctx16k", "packed"}}
"""By query heads per KV head."""
TOLERANCE = 1.01


def report_of(name, heads=16):
    """A committed run: of 16 query heads per KV head (groups of 8) or of 8 (groups of 16)."""
    file = RESULTS / (f"arms-{name}.json" if heads == 16 else f"eight-heads/arms-{name}-8heads.json")
    return json.loads(file.read_text())


def times_of(name, heads=16):
    """Medians of whole online calls (``graph_ms``) by arm."""
    arms = report_of(name, heads)["arms"]
    return {arm: figures["graph_ms"]["median"] for arm, figures in arms.items() if figures.get("graph_ms")}


def settled(name, heads=16, regrouped="w64", **settings):
    """The decision that repeated calls on a workload end with: shapes from its file, visits from two orders."""
    counts = report_of(name, heads)["logical"]["counts"]
    w = pw.load_workload(ROOT / "tests" / "data" / f"{name}.npz")
    visits = torch.tensor([counts[f"{order}-8"]["visits"] for order in ("original", regrouped)])
    lengths = HostLengths(tuple(w.prefix_lens.tolist()), tuple(w.cu_seqlens.diff().tolist()))
    history = History(pw.Config(**settings), heads_per_kv_head=heads)
    for _ in range(5):
        decision = history.decide(0, w.topk_idx, lengths)
        if decision.measurement is not None:
            decision.measurement.visits += visits
            decision.measurement.send()
    assert decision.reason in ("regroup", "original")
    return decision


@pytest.mark.parametrize("heads", [16, 8])
@pytest.mark.parametrize("window", [64, 128])
@pytest.mark.parametrize("name", WORKLOADS)
def test_the_decision_is_the_faster_arm(name, window, heads):
    times = times_of(name, heads)
    regrouped = settled(name, heads, f"w{window}", window=window).regroup
    chosen = times[f"pageweaver-w{window}" if regrouped else "union8"]
    assert chosen <= TOLERANCE * min(times["union8"], times[f"pageweaver-w{window}"])


@pytest.mark.parametrize("heads", [16, 8])
@pytest.mark.parametrize("name", WORKLOADS)
def test_the_default_is_within_one_percent_of_every_window(name, heads):
    """What the issue asks for: of the original order and W128 (and W64)."""
    times = times_of(name, heads)
    regrouped = settled(name, heads).regroup
    assert regrouped == (name not in ORIGINAL_IS_FASTER[heads])
    chosen = times["pageweaver-w64" if regrouped else "union8"]
    assert chosen <= TOLERANCE * min(times["union8"], times["pageweaver-w64"], times["pageweaver-w128"])


@pytest.mark.parametrize("heads", [16, 8])
@pytest.mark.parametrize("name", WORKLOADS)
def test_the_expected_gain_is_near_the_measured_one(name, heads):
    times = times_of(name, heads)
    gain_us = 1000 * (times["union8"] - times["pageweaver-w64"])
    assert settled(name, heads).gain_us == pytest.approx(gain_us, abs=8)  # 1 % of a call, and a little


@pytest.mark.parametrize("name", WORKLOADS)
def test_on_the_papers_kernel_the_decision_is_the_faster_arm_too(name):
    times = times_of(name)
    regrouped = settled(name, regrouped="w128-unguarded", engine="union8", window=128, guard="none").regroup
    chosen = times["pageweaver-w128-paper" if regrouped else "union8-paper"]
    assert chosen <= TOLERANCE * min(times["union8-paper"], times["pageweaver-w128-paper"])


def test_the_figures_are_those_that_the_measurements_give():
    found = fit_auto.fit(fit_auto.rows_of([report_of(name) for name in WORKLOADS]))
    for engine, figure in model.NS_PER_VISIT.items():
        assert figure == pytest.approx(found[engine], rel=0.02)
    for window in (64, 128):
        assert model.cost_us(found["rows"], window) == pytest.approx(found[window], abs=0.5)
    rows = fit_auto.rows_of([report_of(name, 8) for name in WORKLOADS])
    assert {row["union"] for row in rows} == {16}
    assert pytest.approx(fit_auto.fit(rows)["stream"], rel=0.02) == model.NS_PER_VISIT_OF_16
    assert min(1e6 * times_of(r["name"], 8)["union8"] / r["rows"] for r in rows) >= model.NS_PER_ROW_OF_16


def test_a_report_without_the_arms_that_the_fit_needs():
    with pytest.raises(ValueError, match=r"ctx64k_a.*no timing with graphs of the arms .*pageweaver-w64-fixed"):
        fit_auto.rows_of([json.loads((RESULTS / "eight-heads" / "arms-ctx64k_a-4heads.json").read_text())])


def test_worth_and_cost():
    assert model.worth_us(1000, "stream") == pytest.approx(4.75)
    assert model.worth_us(1000, "an engine without figures") == model.worth_us(1000, "stream")
    assert model.cost_us(10_000, 64) == pytest.approx(13.9)
    assert model.gain_us(10_000, 1.0, window=64, engine="stream") == pytest.approx(47.5 - 13.9)
    assert model.time_us(1000, "stream", 16) == pytest.approx(16)
    assert model.time_us(1000, "portable", 16) == model.time_us(1000, "stream") == pytest.approx(25)


def test_most_saved_per_row_is_reached():
    """Two kinds of queries that alternate: every group of the original order visits both kinds' pages."""
    kinds = torch.arange(16 * 8, dtype=torch.int32).view(8, 16)
    topk = kinds.repeat(8, 1)[None]  # query i picks what i % 8 says
    arguments = (topk, torch.tensor([0, 64], dtype=torch.int32), torch.tensor([128 * 128], dtype=torch.int32))
    visits = torch.zeros(2, dtype=torch.int64)
    pw.regroup(*arguments, window=64, visits=visits)
    original, regrouped = visits.tolist()
    assert (original - regrouped) / 64 == model.most_saved_per_row(16)
