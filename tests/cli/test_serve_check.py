"""scripts/serve_check.py: what it reads from a log, what it demands, and that no server outlives it."""

import importlib.metadata
import json
import os
import shlex
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from . import load_script

ROOT = Path(__file__).resolve().parents[2]
SCRIPT = ROOT / "scripts" / "serve_check.py"
make_tiny_m3 = load_script("make_tiny_m3")
serve_check = load_script("serve_check")

FAKE = Path(__file__).with_name("fake_server.py")


def free_port() -> int:
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return one.getsockname()[1]


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


@pytest.fixture
def arguments(tmp_path, monkeypatch):
    """Arguments for a quick run against the fake server; the folder gets the model, the logs, the report, the pids."""
    model = tmp_path / "model"
    make_tiny_m3.write_model(model, with_weights=False)
    monkeypatch.setenv("FAKE_PIDS", str(tmp_path / "pids"))
    sizes = ["--prompts", "100,200", "--batch", "300,40", "--hold", "500", "--repeat", "1", "--budget", "100"]
    places = ["--model", str(model), "--logs", str(tmp_path / "logs"), "--json", str(tmp_path / "report.json")]
    fake = shlex.join([sys.executable, str(FAKE)])
    return [*sizes, *places, "--port", str(free_port()), "--server-cmd", fake, "--least", "1", "--patience", "0.5"]


def run(arguments, tmp_path, *more):
    code = serve_check.main([*arguments, *more])
    pids = [int(pid) for pid in (tmp_path / "pids").read_text().split()]
    assert not [pid for pid in pids if alive(pid)], "a server's process was left"
    return code, json.loads((tmp_path / "report.json").read_text())


def failures(report):
    return [(m, c["name"]) for m, result in report["modes"].items() for c in result["checks"] if not c["ok"]]


def test_all_modes_pass(arguments, tmp_path, monkeypatch):
    code, report = run(arguments, tmp_path, "--stock")
    assert failures(report) == []
    assert (code, report["passed"]) == (0, True)
    assert list(report["modes"]) == ["pageweaver", "union8", "native", "stock"]
    woven = report["modes"]["pageweaver"]
    assert len(woven["requests"]) == 5  # two prompts, the one that holds the scheduler, two in the batch
    assert woven["verified_calls"] == 20
    assert woven["nrms"]["max"] == pytest.approx(0.02671)
    assert woven["calls_by_layer"] == {"2": 5, "3": 5, "4": 5, "5": 5}
    assert "PAGEWEAVER_MODE" not in report["modes"]["stock"]["environment"]
    assert "--attention-backend fa3" in report["modes"]["stock"]["command"]
    assert "--page-size" not in woven["command"]
    assert report["first_tokens"]["native"]["reference"] == "stock"
    assert any("STATUS" in line for line in woven["log"])


@pytest.mark.parametrize(
    ("variable", "value", "check"),
    [
        ("FAKE_NRMS", "4.100%", "NRMS of every compared call at most 4.0%"),
        ("FAKE_NRMS", "nan%", "NRMS of every compared call at most 4.0%"),
        ("FAKE_FALLBACK", "1", "no call left to SGLang's Step 3"),
        ("FAKE_FLIP", "pageweaver:5", "first tokens agree with the reference"),
    ],
)
def test_a_bad_server_fails(arguments, tmp_path, monkeypatch, variable, value, check):
    monkeypatch.setenv(variable, value)
    code, report = run(arguments, tmp_path, "--modes", "pageweaver,native")
    assert failures(report) == [("pageweaver", check)]
    assert code == 1


def test_near_tie_is_agreement(arguments, tmp_path, monkeypatch):
    monkeypatch.setenv("FAKE_FLIP", "pageweaver:1")
    code, report = run(arguments, tmp_path, "--modes", "pageweaver,native")
    assert code == 0
    assert report["first_tokens"]["pageweaver"]["equal"] == 0
    assert report["first_tokens"]["pageweaver"]["rows"][0]["gap"] == pytest.approx(0.2)


def test_server_that_dies(arguments, tmp_path, monkeypatch):
    monkeypatch.setenv("FAKE_DIE", "1")
    code, report = run(arguments, tmp_path, "--modes", "pageweaver")
    assert code == 1
    failed = report["modes"]["pageweaver"]["failed"]
    assert "exit code 1" in failed
    assert "no kernel image" in failed


def test_server_that_never_gets_ready(arguments, tmp_path, monkeypatch):
    monkeypatch.setenv("FAKE_HANG", "1")
    code, report = run(arguments, tmp_path, "--modes", "pageweaver", "--start-timeout", "2")
    assert code == 1
    assert "not ready after 2 s" in report["modes"]["pageweaver"]["failed"]


def test_no_budget_left(arguments, tmp_path):
    (tmp_path / "pids").write_text("")
    code, report = run(arguments, tmp_path, "--least", "1000")
    assert code == 1
    assert all(not result["requests"] for result in report["modes"].values())


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_ended_by_a_signal(arguments, tmp_path, number):
    environment = {**os.environ, "FAKE_HANG": "1"}
    script = [sys.executable, str(ROOT / "scripts" / "serve_check.py")]
    with subprocess.Popen(
        [*script, *arguments], env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    ) as one:
        pids = tmp_path / "pids"
        for _ in range(300):
            if pids.exists() and len(pids.read_text().split()) == 2:
                break
            time.sleep(0.1)
        one.send_signal(number)
        assert one.wait(60) != 0
    assert not [pid for pid in map(int, pids.read_text().split()) if alive(pid)]


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
    with pytest.raises(SystemExit):
        serve_check.parse_options(["--modes", "fast"])


def test_parses_what_the_plugin_logs(caplog):
    """The format is the plugin's own: made here by its code, not repeated by hand."""
    step3 = pytest.importorskip("pageweaver_sglang.plugin.step3")
    verification = step3.Verification(nrms=0.0367, max_error=0.0123, cosine=0.99933, skipped_rows=3)
    stats = step3.Stats()
    stats.calls_by_layer.update([2, 3, 2])
    stats.fallbacks_by_reason["attention sink"] += 1
    facts = serve_check.parse_log(
        f"INFO pageweaver verify: layer 2 call 7 tokens 16384 requests 3 kv_heads 4 {verification}\n"
        f"INFO {stats.summary()}\n"
        "WARNING pageweaver: SGLang's own Step 3 serves calls with: attention sink\n"
    )
    assert facts.verified[0]["nrms"] == pytest.approx(0.0367)
    assert facts.verified[0]["skipped_rows"] == 3
    assert facts.calls_by_layer == {2: 2, 3: 1}
    assert facts.fallbacks == ["'attention sink': 1", "attention sink"]
    assert facts.most_requests_in_a_call == 3


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
