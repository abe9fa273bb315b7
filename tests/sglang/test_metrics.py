"""Switch, errors and metrics in SGLang's own backend and endpoint, and metrics that several processes add up."""

from __future__ import annotations

import importlib.util
import os
import re
import subprocess
import sys
import types
from collections import Counter

import pytest

from pageweaver_sglang.plugin import compat, metrics
from pageweaver_sglang.plugin.step3 import Stats

needs_client = pytest.mark.skipif(
    importlib.util.find_spec("prometheus_client") is None, reason="prometheus_client is not installed"
)


@pytest.fixture(scope="module")
def outcome(run_program, tmp_path_factory):
    return run_program(
        "operations",
        PAGEWEAVER_DENSE_BACKEND="torch_native",
        PAGEWEAVER_CONTROL_DIR=str(tmp_path_factory.mktemp("control")),
        PAGEWEAVER_TIMING="true",
        METRICS="1",
    )


@pytest.fixture
def scraped(outcome):
    """Metric with its own labels -> figure."""
    figures = {}
    for line in outcome.result["metrics"]:
        name, labels, figure = re.fullmatch(r"(\S+?)\{(.*)\} (\S+)", line).groups()
        own = ",".join(part for part in labels.split(",") if not re.match(r"(model_name|[tpd]p_rank|pid)=", part))
        figures[f"{name}{{{own}}}"] = float(figure)
    return figures


@needs_client
def test_off_is_native_and_on_is_pageweaver_again(outcome):
    result = outcome.result
    assert result["off is native"]
    assert result["on is pageweaver"]


@needs_client
def test_an_error_costs_no_request(outcome):
    assert outcome.result["the call with the error is native"]
    assert outcome.result["later calls are native"]
    assert outcome.result["disabled"] == "disabled after an error"
    assert outcome.output.count("pageweaver: DISABLED in process") == 1
    assert "by ValueError: a bug. SGLang's own Step 3 serves this call and all later ones" in outcome.output


@needs_client
def test_backends_of_a_process_share_the_switch(outcome):
    assert outcome.result["one per process"]


@needs_client
def test_sglangs_endpoint_has_the_figures(outcome, scraped):
    # Six forward passes of two layers: native, woven, off, on, with the error, and after it.
    assert outcome.result["by arm"] == {"native": 8, "pageweaver": 4}
    expected = {
        'pageweaver:step3_calls_total{arm="native"}': 8,
        'pageweaver:step3_calls_total{arm="pageweaver"}': 4,
        'pageweaver:step3_tokens_total{arm="native"}': 48,
        'pageweaver:step3_tokens_total{arm="pageweaver"}': 24,
        'pageweaver:step3_fallbacks_total{reason="switched off"}': 2,
        'pageweaver:step3_fallbacks_total{reason="error: ValueError"}': 1,
        'pageweaver:step3_fallbacks_total{reason="disabled after an error"}': 3,
        'pageweaver:prefill_tokens_count{arm="pageweaver"}': 2,
        'pageweaver:prefill_tokens_sum{arm="pageweaver"}': 12,
        'pageweaver:prefill_tokens_bucket{arm="pageweaver",le="16.0"}': 2,
        'pageweaver:prefill_tokens_bucket{arm="pageweaver",le="1.0"}': 0,
        "pageweaver:serving{}": 0,
    }
    assert {name: scraped.get(name) for name in expected} == expected
    assert scraped["pageweaver:step3_seconds_count{}"] >= 6
    assert scraped["pageweaver:step3_seconds_sum{}"] > 0


@needs_client
def test_labels_name_the_model_and_the_rank(outcome):
    labels = ('model_name="m3"', "tp_rank=", "pp_rank=", "dp_rank=")
    assert all(label in line for line in outcome.result["metrics"] for label in labels)


def test_nothing_where_metrics_are_off(run_program, tmp_path):
    outcome = run_program("operations", PAGEWEAVER_DENSE_BACKEND="torch_native", PAGEWEAVER_CONTROL_DIR=str(tmp_path))
    assert not outcome.result["metrics are made"]
    assert outcome.result["metrics"] == []
    assert "metrics off" in outcome.output
    assert outcome.result["off is native"]


def test_the_status_line_says_where_the_switch_is(outcome):
    assert re.search(r"pageweaver STATUS: .* switch on in /\S*control\d*, metrics on", outcome.output)


@pytest.fixture
def runner(monkeypatch):
    monkeypatch.setattr(compat, "get_fields", lambda server_args, *names: [getattr(server_args, n) for n in names])
    server_args = types.SimpleNamespace(enable_metrics=True, served_model_name="m3")
    ps = types.SimpleNamespace(tp_rank=1, pp_rank=0, dp_rank=None)
    return types.SimpleNamespace(server_args=server_args, ps=ps)


def test_without_prometheus_client_there_are_none(runner, monkeypatch, caplog):
    monkeypatch.setitem(sys.modules, "prometheus_client", None)
    assert metrics.make_metrics(runner) is None
    assert "prometheus_client cannot be imported" in caplog.text
    runner.server_args.enable_metrics = False
    caplog.clear()
    assert metrics.make_metrics(runner) is None
    assert not caplog.records


def test_ranks(runner):
    assert compat.ranks(runner) == {"tp_rank": "1", "pp_rank": "0", "dp_rank": ""}


PROGRAM = """
import sys
from collections import Counter
from pageweaver_sglang.plugin.metrics import Metrics

metrics = Metrics({"model_name": "m3", "tp_rank": sys.argv[1]})
again = Metrics({"model_name": "m3", "tp_rank": sys.argv[1]})  # a name can be registered only once
totals = {"step3_calls": Counter(pageweaver=3), "step3_tokens": Counter()}
totals["regroup_decisions"] = Counter(small=4, regroup=1)
totals["measured_visits"] = Counter(original=1000, regrouped=910)
totals["step3_fallbacks"] = {"q must be bfloat16, got float16": 2, "q must be bfloat16, got float32": 3}
metrics.publish(totals, serving=True)
totals["step3_calls"]["pageweaver"] += 2
metrics.publish(totals, serving=True)
metrics.publish(totals, serving=sys.argv[1] == "0")
metrics.observe([("verify_nrms", None, 0.031), ("prefill_tokens", "native", 700)])
"""


@needs_client
def test_every_process_counts(tmp_path):
    """As SGLang collects: each rank writes files, and the process that serves /metrics reads them all."""
    environment = os.environ | {"PROMETHEUS_MULTIPROC_DIR": str(tmp_path)}
    for rank in range(2):
        subprocess.run([sys.executable, "-c", PROGRAM, str(rank)], env=environment, check=True)
    collect = (
        "from prometheus_client import CollectorRegistry, generate_latest, multiprocess\n"
        "registry = CollectorRegistry(); multiprocess.MultiProcessCollector(registry)\n"
        "print(generate_latest(registry).decode())"
    )
    shown = subprocess.run([sys.executable, "-c", collect], env=environment, check=True, capture_output=True, text=True)
    for rank in range(2):
        assert f'pageweaver:step3_calls_total{{arm="pageweaver",model_name="m3",tp_rank="{rank}"}} 5.0' in shown.stdout
        reason = 'reason="q must be bfloat16"'  # without the figures of one call
        assert f'pageweaver:step3_fallbacks_total{{model_name="m3",{reason},tp_rank="{rank}"}} 5.0' in shown.stdout
        labels = f'model_name="m3",tp_rank="{rank}"}}'
        assert f'pageweaver:regroup_decisions_total{{decision="small",{labels} 4.0' in shown.stdout
        assert f'pageweaver:measured_visits_total{{kind="regrouped",{labels} 910.0' in shown.stdout
        assert f'pageweaver:serving{{model_name="m3",tp_rank="{rank}"}} {1.0 - rank}' in shown.stdout
    assert 'pageweaver:verify_nrms_bucket{le="0.04",model_name="m3",tp_rank="0"} 1.0' in shown.stdout
    assert 'pageweaver:verify_nrms_bucket{le="0.03",model_name="m3",tp_rank="0"} 0.0' in shown.stdout


def test_counters_are_those_of_the_calls():
    assert all(isinstance(getattr(Stats(), counter), Counter) for _, _, counter in metrics.COUNTERS.values())
