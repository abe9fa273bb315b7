"""``pageweaver`` among SGLang's server arguments, resolved by SGLang itself as on an H200."""

from __future__ import annotations

import importlib.metadata
import re

import fake_runner
import pytest


@pytest.fixture(scope="module")
def outcome(run_program, tmp_path_factory):
    models = tmp_path_factory.mktemp("models")
    m3 = fake_runner.write_model(models / "m3")
    multimodal = fake_runner.write_model(models / "m3-vl", "MiniMaxM3SparseForConditionalGeneration")
    llama = fake_runner.write_model(models / "llama", "LlamaForCausalLM")
    return run_program("arguments", str(m3), str(multimodal), str(llama))


@pytest.fixture
def report(outcome):
    return outcome.result


def _differences(report, name, other) -> dict[str, tuple[str, str]]:
    a, b = (report["cases"][case]["fields"] for case in (name, other))
    return {field: (a[field], b[field]) for field in a if a[field] != b[field]}


def test_plugin_is_discovered_and_complete(report):
    assert report["problems"] == []
    assert report["missing_hooks"] == []


def test_the_installed_sglang_is_a_tested_one(report):
    from pageweaver_sglang.plugin import compat

    assert compat.tested_version(report["version"])
    assert not compat.tested_version("0.5.16")
    assert not compat.tested_version("0.6.0")
    assert not compat.tested_version("not installed")


def test_choices(report):
    assert report["accepted"] == {"attention": True, "prefill": True, "nonsense": False}


@pytest.mark.parametrize("case", ["pageweaver", "prefill", "fa3 and prefill", "page 128"])
def test_resolves_as_sglangs_default_but_for_the_prefill_backend(report, case):
    assert _differences(report, "default", case) == {"prefill_attention_backend": ("None", "'pageweaver'")}
    fields = report["cases"][case]["fields"]
    assert (fields["attention_backend"], fields["page_size"]) == ("'fa3'", "128")


@pytest.mark.parametrize(
    "case", ["fp8", "deterministic", "prefill role", "chunks", "tp8 dp8", "overlap of two batches", "multimodal"]
)
def test_other_options_resolve_as_with_the_default_backend(report, case):
    differences = _differences(report, f"default {case}", case)
    assert differences == {"prefill_attention_backend": ("None", "'pageweaver'")}


def _prefill_graph(report, case) -> str:
    return re.search(r"prefill=PhaseConfig\(backend='(\w+)'", report["cases"][case]["fields"]["cuda_graph_config"])[1]


def test_prefill_graphs_by_default(report):
    """What SGLang itself chooses for MiniMax-M3 runs sparse attention between the graph's pieces."""
    expected = "tc_piecewise" if "graph tc_piecewise" in report["cases"] else "breakable"
    assert {_prefill_graph(report, case) for case in ("default", "pageweaver", "multimodal")} == {expected}


@pytest.mark.parametrize("graph", ["full", "breakable", "tc_piecewise", "disabled"])
def test_prefill_graphs_that_sglang_would_replay_wrongly_are_left_out(outcome, graph):
    """``full`` captures sparse attention in every version; ``breakable`` did as long as there was ``tc_piecewise``."""
    report, case = outcome.result, f"graph {graph}"
    old = "graph tc_piecewise" in report["cases"]
    if graph == "tc_piecewise" and not old:
        assert case not in report["cases"]
        return
    wrong = graph == "full" or (graph == "breakable" and old)
    expected = {"prefill_attention_backend"} | ({"cuda_graph_config"} if wrong else set())
    assert _prefill_graph(report, f"default {case}") == graph
    assert _prefill_graph(report, case) == ("disabled" if wrong else graph)
    assert set(_differences(report, f"default {case}", case)) == expected
    told = f"captures sparse attention inside its prefill graph '{graph}'"
    assert outcome.output.count(told) == wrong


def test_dense_backend_setting(report):
    fields = report["cases"]["dense triton"]["fields"]
    assert (fields["attention_backend"], fields["page_size"]) == ("'triton'", "128")
    assert fields["prefill_attention_backend"] == "'pageweaver'"


def test_decode_backend_of_the_user_stays(report):
    fields = report["cases"]["other decode"]["fields"]
    assert fields["decode_attention_backend"] == "'triton'"
    assert fields["attention_backend"] == "'fa3'"


def test_other_backends_are_untouched(report):
    fields = report["cases"]["triton"]["fields"]
    assert (fields["attention_backend"], fields["prefill_attention_backend"]) == ("'triton'", "None")
    assert fields["page_size"] == "1"
    assert "fields" in report["cases"]["llama fa3"]
    assert _differences(report, "triton", "bad setting, other backend") == {}


@pytest.mark.parametrize(
    ("case", "words"),
    [
        ("page 64", ["--page-size 64", "--page-size 128"]),
        ("dense unknown", ["PAGEWEAVER_DENSE_BACKEND", "nonsense"]),
        ("dense contradicts", ["fa3", "triton", "dense_backend"]),
        ("bad setting", ["PAGEWEAVER_WINDOW", "96", "64 or 128"]),
        ("other prefill", ["--prefill-attention-backend fa3", "never act"]),
        ("decode only", ["--decode-attention-backend pageweaver", "--attention-backend pageweaver"]),
        ("llama", ["LlamaForCausalLM", "MiniMax-M3"]),
    ],
)
def test_refused_with_a_message_that_says_why(report, case, words):
    error = report["cases"][case]["error"]
    assert [word for word in words if word not in error] == [], error


def test_entry_point_is_declared():
    try:
        distribution = importlib.metadata.distribution("pageweaver-sglang")
    except importlib.metadata.PackageNotFoundError:
        pytest.skip("the package is not installed; the programs find it by a metadata folder of their own")
    (entry,) = distribution.entry_points.select(group="sglang.srt.plugins")
    assert entry.load().__module__ == "pageweaver_sglang.plugin"
