"""scripts/serve_check.py: what it reads from a log, what it demands, and that no server outlives it."""

import importlib.metadata
import json
import os
import shlex
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from pageweaver_sglang.serving_ab import launch
from tests.cli.interruptible import alive, running
from tests.waiting import wait_for

from . import load_script

ROOT = Path(__file__).resolve().parents[2]
SCRIPT = ROOT / "scripts" / "serve_check.py"
make_tiny_m3 = load_script("make_tiny_m3")
serve_check = load_script("serve_check")

FAKE = Path(__file__).with_name("fake_server.py")


def free_port() -> int:
    (port,) = launch.spare_ports(1)
    return port


def server_pids(tmp_path) -> list[int]:
    """Of the fake servers that got as far as saying theirs."""
    path = tmp_path / "pids"
    return [int(pid) for pid in path.read_text().split()] if path.exists() else []


@pytest.fixture
def arguments(tmp_path, monkeypatch):
    """Arguments for a quick run against the fake server; the folder gets the model, the logs, the report, the pids."""
    model = tmp_path / "model"
    make_tiny_m3.write_model(model, with_weights=False)
    monkeypatch.setenv("FAKE_PIDS", str(tmp_path / "pids"))
    sizes = ["--prompts", "100,200", "--batch", "300,40", "--hold", "500", "--repeat", "1", "--budget", "400"]
    places = ["--model", str(model), "--logs", str(tmp_path / "logs"), "--json", str(tmp_path / "report.json")]
    fake = shlex.join([sys.executable, str(FAKE)])
    return [*sizes, *places, "--port", str(free_port()), "--server-cmd", fake, "--least", "1", "--patience", "0.5"]


def run(arguments, tmp_path, *more, started=True):
    """The exit code and the report; ``started``: servers have got so far that what is left of them would be seen."""
    code = serve_check.main([*arguments, *more])
    assert server_pids(tmp_path) or not started
    assert not [pid for pid in server_pids(tmp_path) if alive(pid)], "a server's process was left"
    return code, json.loads((tmp_path / "report.json").read_text())


def failures(report):
    found = [(name, c["name"]) for name, r in report["launches"].items() for c in r["checks"] if not c["ok"]]
    return found + [("all", check["name"]) for check in report["checks"] if not check["ok"]]


def test_all_modes_pass(arguments, tmp_path, monkeypatch):
    code, report = run(arguments, tmp_path, "--stock")
    assert failures(report) == []
    assert (code, report["passed"]) == (0, True)
    assert list(report["launches"]) == ["tp1-auto", "tp1-pageweaver", "tp1-union8", "tp1-native", "tp1-stock"]
    woven = report["launches"]["tp1-pageweaver"]
    assert len(woven["requests"]) == 5  # two prompts, the one that holds the scheduler, two in the batch
    assert list(woven["ranks"]) == ["TP0"]
    rank = woven["ranks"]["TP0"]
    assert rank["verified_calls"] == 20
    assert (rank["q_heads"], rank["kv_heads"]) == ([64], [4])
    assert rank["nrms"]["max"] == pytest.approx(0.02671)
    assert rank["calls_by_layer"] == {"2": 5, "3": 5, "4": 5, "5": 5}
    stock = report["launches"]["tp1-stock"]
    assert "PAGEWEAVER_MODE" not in stock["environment"]
    assert "--attention-backend fa3" in stock["command"]
    assert "--page-size" not in woven["command"]
    assert "--tp" not in woven["command"]
    assert report["first_tokens"]["tp1-native"]["reference"] == "tp1-stock"
    assert any("STATUS" in line for line in woven["log"])


@pytest.mark.parametrize(
    ("variable", "value", "check"),
    [
        ("FAKE_NRMS", "4.100%", "NRMS of every compared call at most 4.0%"),
        ("FAKE_NRMS", "nan%", "NRMS of every compared call at most 4.0%"),
        ("FAKE_HEADS", "8", "every compared call had a rank's 64 query heads and 4 KV heads"),
        ("FAKE_FALLBACK", "1", "no call left to SGLang's Step 3"),
        ("FAKE_FLIP", "pageweaver:5", "first tokens agree with the reference"),
    ],
)
def test_a_bad_server_fails(arguments, tmp_path, monkeypatch, variable, value, check):
    monkeypatch.setenv(variable, value)
    code, report = run(arguments, tmp_path, "--modes", "pageweaver,native")
    assert failures(report) == [("tp1-pageweaver", check)]
    assert code == 1


def test_near_tie_is_agreement(arguments, tmp_path, monkeypatch):
    monkeypatch.setenv("FAKE_FLIP", "pageweaver:1")
    code, report = run(arguments, tmp_path, "--modes", "pageweaver,native")
    assert code == 0
    assert report["first_tokens"]["tp1-pageweaver"]["equal"] == 0
    assert report["first_tokens"]["tp1-pageweaver"]["rows"][0]["gap"] == pytest.approx(0.2)


def test_one_tipped_token_fails_unless_one_may_be(arguments, tmp_path, monkeypatch):
    monkeypatch.setenv("FAKE_FLIP", "pageweaver:5:2")
    code, report = run(arguments, tmp_path, "--modes", "pageweaver,native", "--tipped", "1")
    assert code == 0
    tokens = report["launches"]["tp1-pageweaver"]["checks"][-1]
    assert (tokens["name"], tokens["ok"]) == ("first tokens agree with the reference", True)
    assert "4 of 5 equal, 0 near-ties; differ: ['" in tokens["detail"]
    code, report = run(arguments, tmp_path, "--modes", "pageweaver,native")
    assert failures(report) == [("tp1-pageweaver", "first tokens agree with the reference")]


def test_server_that_dies(arguments, tmp_path, monkeypatch):
    monkeypatch.setenv("FAKE_DIE", "1")
    code, report = run(arguments, tmp_path, "--modes", "pageweaver")
    assert code == 1
    failed = report["launches"]["tp1-pageweaver"]["failed"]
    assert "exit code 1" in failed
    assert "no kernel image" in failed


def test_server_that_never_gets_ready(arguments, tmp_path, monkeypatch):
    monkeypatch.setenv("FAKE_HANG", "1")
    code, report = run(arguments, tmp_path, "--modes", "pageweaver", "--start-timeout", "2", started=False)
    assert code == 1
    assert "the server was not ready after " in report["launches"]["tp1-pageweaver"]["failed"]


def test_no_budget_left(arguments, tmp_path):
    code, report = run(arguments, tmp_path, "--least", "1000", started=False)
    assert code == 1
    assert all(not result["requests"] for result in report["launches"].values())


def test_several_layouts_at_the_same_time(arguments, tmp_path):
    layouts = ["--layouts", "tp2,tp4dp2,tp2pad", "--jobs", "6", "--fresh-cache", "--prompts", "101,200"]
    code, report = run(arguments, tmp_path, *layouts, "--modes", "pageweaver,native")
    assert failures(report) == []
    assert code == 0
    launches = report["launches"]
    assert list(launches) == [
        f"{lay}-{mode}" for lay in ("tp2", "tp4dp2", "tp2pad") for mode in ("pageweaver", "native")
    ]
    assert "--tp 2 --disable-custom-all-reduce" in launches["tp2-native"]["command"]
    assert "--dp 2 --enable-dp-attention" in launches["tp4dp2-pageweaver"]["command"]
    assert "--moe-dense-tp-size 2" in launches["tp2pad-native"]["command"]
    assert len({result["command"].partition("--port ")[2].split()[0] for result in launches.values()}) == 6
    spread = launches["tp4dp2-pageweaver"]
    assert list(spread["ranks"]) == ["DP0 TP0", "DP0 TP1", "DP1 TP2", "DP1 TP3"]
    # Each of two prompts to each rank, each rank's own long prompt, one of the batch each.
    assert len(spread["requests"]) == 8
    assert [r["ranks"] for r in spread["requests"][:2]] == [["DP0 TP0", "DP0 TP1"], ["DP1 TP2", "DP1 TP3"]]
    assert spread["ranks"]["DP1 TP3"]["padded_rows"] == 4
    assert report["checks"][0]["detail"].startswith("1 compilations")


@pytest.mark.parametrize(
    ("variable", "layout", "checks"),
    [
        (
            "FAKE_LAZY",
            "tp2",
            [
                "PageWeaver served every sparse layer",
                "NRMS of every compared call at most 4.0%",
                "every compared call had a rank's 32 query heads and 2 KV heads",
            ],
        ),
        ("FAKE_WANDERS", "tp2dp2", ["each DP rank served prompts while the others had nothing to do"]),
        ("FAKE_PADDING", "tp2pad", ["padded rows are zero"]),
        ("FAKE_COMPILES", "tp2,tp2dp2", ["kernels compiled once on an empty cache"]),
    ],
)
def test_a_bad_rank_fails(arguments, tmp_path, monkeypatch, variable, layout, checks):
    monkeypatch.setenv(variable, "1")
    options = ["--modes", "pageweaver", "--layouts", layout, "--jobs", "2", "--fresh-cache", "--prompts", "101"]
    code, report = run(arguments, tmp_path, *options)
    assert [name for _, name in failures(report)] == checks
    assert code == 1


def test_padding_must_have_been_seen(arguments, tmp_path):
    even = ["--prompts", "100", "--batch", "300", "--layouts", "tp2pad", "--modes", "pageweaver"]
    _, report = run(arguments, tmp_path, *even)
    assert failures(report) == [("tp2pad-pageweaver", "padded rows are zero")]


def test_ranks_that_share_a_kv_head(arguments, tmp_path):
    options = ["--layouts", "tp2rep,tp4dp2rep,tp2", "--modes", "pageweaver", "--jobs", "3", "--prompts", "101"]
    code, report = run(arguments, tmp_path, *options)
    assert failures(report) == []
    assert code == 0
    launches = report["launches"]
    models = {name.partition("-")[0]: result["command"].split()[3] for name, result in launches.items()}
    assert models == {
        "tp2rep": str(tmp_path / "model-q16kv1"),
        "tp4dp2rep": str(tmp_path / "model-q16kv1"),
        "tp2": str(tmp_path / "model"),
    }
    for layout, heads in {"tp2rep": ([8], [1]), "tp4dp2rep": ([8], [1]), "tp2": ([32], [2])}.items():
        for rank in launches[f"{layout}-pageweaver"]["ranks"].values():
            assert (rank["q_heads"], rank["kv_heads"]) == heads
    checks = [check["name"] for check in launches["tp2rep-pageweaver"]["checks"]]
    assert "every compared call had a rank's 8 query heads and 1 KV head" in checks


def test_other_heads_on_one_gpu(arguments, tmp_path, monkeypatch):
    options = ["--q-heads", "8", "--kv-heads", "1", "--modes", "pageweaver"]
    code, report = run(arguments, tmp_path, *options)
    assert (code, failures(report)) == (0, [])
    (rank,) = report["launches"]["tp1-pageweaver"]["ranks"].values()
    assert (rank["q_heads"], rank["kv_heads"]) == ([8], [1])
    assert serve_check.heads_of(tmp_path / "model-q8kv1") == (8, 1)
    # The folder holds another model than its name says: what is served is what counts.
    make_tiny_m3.write_model(tmp_path / "model-q8kv1", q_heads=16, kv_heads=1, with_weights=False)
    monkeypatch.setenv("FAKE_HEADS", "8")
    code, report = run(arguments, tmp_path, *options)
    assert failures(report) == [
        ("tp1-pageweaver", "every compared call had a rank's 16 query heads and 1 KV head"),
    ]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--kv-heads", "0"], "--kv-heads: got 0; allowed: an integer of at least 1"),
        (["--q-heads", "10"], "--q-heads: got 10; allowed: a multiple of --kv-heads, 4"),
        (["--q-heads", "8", "--kv-heads", "1", "--layouts", "tp3"], "tp3: 8 query heads and 1 KV head can't be dealt"),
        (["--layouts", "tp8rep,tp6"], "tp6: 64 query heads and 4 KV heads can't be dealt out to 6 GPUs"),
    ],
)
def test_heads_that_do_not_fit(options, message, capsys):
    with pytest.raises(SystemExit):
        serve_check.parse_options(options)
    assert message in " ".join(capsys.readouterr().err.split())


def test_heads_of_a_layout():
    assert serve_check.Layout.parse("tp8rep").heads(1, 1) == (64, 4), "MiniMax-M3 itself"
    for name, model, rank in (
        ("tp8", (64, 4), (8, 1)),
        ("tp8dp2", (64, 4), (16, 1)),
        ("tp16", (64, 4), (4, 1)),
        ("tp2reppad", (16, 1), (8, 1)),
    ):
        layout = serve_check.Layout.parse(name)
        assert layout.heads(64, 4) == model
        assert layout.heads_of_a_rank(*model) == rank
        assert layout.problem(*model) is None
    assert serve_check.Layout.parse("tp2reppad").pads


@pytest.mark.parametrize("text", ["tp0", "tp2dp0", "dp2", "tp3dp2", "tp2x", "", "tp1rep", "tp2dp2rep", "tp2padrep"])
def test_unknown_layout(text, capsys):
    with pytest.raises(SystemExit):
        serve_check.parse_options(["--layouts", text])
    assert "tpNdpM" in capsys.readouterr().err


def test_modes_of_a_layout():
    options = serve_check.parse_options(["--layouts", "tp2,tp4:native+union8", "--modes", "pageweaver", "--stock"])
    found = {layout.name: modes for layout, modes in options.layouts.items()}
    assert found == {"tp2": ["pageweaver", "stock"], "tp4": ["native", "union8", "stock"]}


def test_ranks_of_a_layout():
    layout = serve_check.Layout.parse("tp4dp2")
    assert layout.ranks() == ["DP0 TP0", "DP0 TP1", "DP1 TP2", "DP1 TP3"]
    assert layout.ranks(1) == ["DP1 TP2", "DP1 TP3"]
    assert layout.pads
    assert not serve_check.Layout.parse("tp2dp2").pads, "one GPU per attention rank: nothing to pad to"
    assert serve_check.Layout.parse("tp2pad").pads


@pytest.mark.parametrize(
    ("line", "rank"),
    [
        ("[2026-11-30 10:17:05 DP1 TP3] pageweaver STATUS: mode native, ", "DP1 TP3"),
        ("[2026-11-30 10:17:05 DP1 PP0 ATTN_CP0 TP3 EP3] pageweaver", "DP1 TP3"),
        ("[2026-11-30 10:17:05 TP1] pageweaver calls", "TP1"),
        ("[2026-11-30 10:17:05] pageweaver calls", "TP0"),
        ("pageweaver: compiling ...[2026-11-30 10:17:05 TP1] pageweaver calls", "TP1"),
    ],
)
def test_rank_of_a_line(line, rank):
    assert serve_check.rank_of(line) == rank


@pytest.mark.parametrize(("number", "jobs"), [(signal.SIGINT, 1), (signal.SIGTERM, 1), (signal.SIGTERM, 3)])
def test_ended_by_a_signal(arguments, tmp_path, number, jobs):
    environment = {**os.environ, "FAKE_HANG": "1"}
    script = [sys.executable, str(ROOT / "scripts" / "serve_check.py")]
    with running([*script, *arguments, "--jobs", str(jobs)], environment) as one:
        wait_for(lambda: len(server_pids(tmp_path)) == 2 * jobs)
        one.send_signal(number)
        assert one.wait(600) != 0
    assert len(server_pids(tmp_path)) == 2 * jobs
    assert not [pid for pid in server_pids(tmp_path) if alive(pid)]


def test_plugin_is_found_from_a_checkout(tmp_path, monkeypatch):
    monkeypatch.setattr(importlib.metadata, "entry_points", lambda **_: ())
    variables = serve_check.plugin_variables(tmp_path / "metadata")
    code = """
import importlib.metadata
(point,) = [p for p in importlib.metadata.entry_points(group="sglang.srt.plugins") if p.name == "pageweaver"][:1]
assert callable(point.load())
"""
    subprocess.run([sys.executable, "-c", code], env={**os.environ, **variables}, cwd=tmp_path, check=True)


def test_unknown_mode():
    for options in (["--modes", "fast"], ["--layouts", "tp2:fast"]):
        with pytest.raises(SystemExit):
            serve_check.parse_options(options)


def test_parses_what_the_plugin_logs(caplog):
    """The format is the plugin's own: made here by its code, not repeated by hand."""
    step3 = pytest.importorskip("pageweaver_sglang.plugin.step3")
    verification = step3.Verification(nrms=0.0367, max_error=0.0123, cosine=0.99933, skipped_rows=3)
    stats = step3.Stats()
    stats.calls_by_layer.update([2, 3, 2])
    stats.fallbacks_by_reason["attention sink"] += 1
    stats.decisions.update(["first", "regroup", "regroup"])
    facts = serve_check.parse_log(
        f"INFO pageweaver verify: layer 2 call 7 tokens 16384 requests 3 q_heads 64 kv_heads 4 {verification}\n"
        f"INFO {stats.summary()}\n"
        "WARNING pageweaver: SGLang's own Step 3 serves calls with: attention sink\n"
    )
    rank = facts.ranks["TP0"]
    assert rank.verified[0]["nrms"] == pytest.approx(0.0367)
    assert rank.verified[0]["skipped_rows"] == 3
    assert rank.calls_by_layer == {2: 2, 3: 1}
    assert rank.fallbacks == ["'attention sink': 1", "attention sink"]
    assert rank.describe()["most_requests_in_a_call"] == 3
    served = step3.Step3(step3.Config(verify_every=1), pool_page_size=128)
    caplog.set_level("INFO")
    served.check_padding(4, step3.torch.ones(3, 8), [2])
    assert serve_check.parse_log(caplog.text).ranks["TP0"].padded_rows_not_zero == 1


def test_errors_in_a_log():
    facts = serve_check.parse_log(
        "Traceback (most recent call last):\n  ...\nRuntimeError: CUDA error: misaligned address"
    )
    assert len(facts.errors) == 2


def test_model_is_served_by_its_own_tokenizer(tmp_path):
    make_tiny_m3.write_model(tmp_path, with_weights=False)
    vocabulary = json.loads((tmp_path / "tokenizer.json").read_text())["model"]["vocab"]
    assert sorted(vocabulary.values()) == [i for i in range(1024) if i not in (256, 257, 258)]
    assert serve_check.sparse_layers(tmp_path) == [2, 3, 4, 5]


def test_shapes_of_a_model_with_other_heads():
    config = make_tiny_m3.config(q_heads=16, kv_heads=1)
    assert (config["num_attention_heads"], config["num_key_value_heads"]) == (16, 1)
    assert config["sparse_attention_config"]["sparse_num_index_heads"] == 1
    assert make_tiny_m3.config() == make_tiny_m3.CONFIG
    prefix = "model.layers.2.self_attn."
    tensors = make_tiny_m3.weights(config)
    assert {name.removeprefix(prefix): list(tensor.shape) for name, tensor in tensors.items() if prefix in name} == {
        "q_proj.weight": [16 * 128, 1024],
        "k_proj.weight": [128, 1024],
        "v_proj.weight": [128, 1024],
        "o_proj.weight": [1024, 16 * 128],
        "q_norm.weight": [128],
        "k_norm.weight": [128],
        "index_q_proj.weight": [128, 1024],
        "index_k_proj.weight": [128, 1024],
        "index_q_norm.weight": [128],
        "index_k_norm.weight": [128],
    }
