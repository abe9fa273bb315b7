"""scripts/soak.py against a fake server: what it sends, what it demands, and that no server outlives it."""

import json
import os
import shlex
import socket
import sys
import threading
import time
from pathlib import Path

import pytest

from tests.cli.interruptible import alive

from . import load_script
from .test_serve_check import FAKE, free_port, server_pids

load_script("make_tiny_m3")
load_script("serve_check")
soak = load_script("soak")

ROOT = Path(__file__).resolve().parents[2]
# One line per call in the file that FAKE_SMI names. GPU 0's memory grows by FAKE_GPU_LEAK MiB with each; GPU 1 is there
# when FAKE_GPU1_LEAK is. FAKE_APPS is what each of the servers' processes has in MiB: CALLS stands for the calls.
NVIDIA_SMI = """#!/bin/sh
calls() { wc -l < "$FAKE_SMI"; }
case "$*" in
*compute-apps=pid,used_memory*)
    [ -n "$FAKE_APPS" ] || exit 0
    echo "1, 70000"
    for pid in $(cat "$FAKE_PIDS"); do echo "$pid, $(($(echo "$FAKE_APPS" | sed "s/CALLS/$(calls)/")))"; done ;;
*memory.used*)
    echo >> "$FAKE_SMI"
    gpus=0; [ -z "$FAKE_GPU1_LEAK" ] || gpus="0 1"
    while [ $# -gt 0 ]; do
        if [ "$1" = -i ]; then gpus=$(echo "$2" | tr , ' '); fi
        shift
    done
    for gpu in $gpus; do
        case $gpu in
        0) echo $((1000 + ${FAKE_GPU_LEAK:-0} * $(calls))) ;;
        1) echo $((2000 + FAKE_GPU1_LEAK * $(calls))) ;;
        *) echo "No devices were found"; exit 6 ;;
        esac
    done ;;
esac
"""
KINDS = {
    *("1 token", "2-127 tokens", "common beginning", "burst", "long", "hung up", "hung up in a stream"),
    *("too long", "token ids that are text", "token ids of no vocabulary", "sampling out of range", "no JSON"),
}


@pytest.fixture
def smi(tmp_path, monkeypatch):
    """The path of a stand-in for nvidia-smi, the first on PATH."""
    smi = tmp_path / "bin" / "nvidia-smi"
    smi.parent.mkdir()
    smi.write_text(NVIDIA_SMI)
    smi.chmod(0o755)
    monkeypatch.setenv("PATH", f"{smi.parent}:{os.environ['PATH']}")
    monkeypatch.setenv("FAKE_SMI", str(tmp_path / "smi"))
    monkeypatch.setenv("FAKE_PIDS", str(tmp_path / "pids"))
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    (tmp_path / "smi").touch()
    return smi


@pytest.fixture
def run(tmp_path, smi):
    """Run against the fake server; returns the exit code and the report."""
    model = tmp_path / "model"
    sys.modules["make_tiny_m3"].write_model(model, with_weights=False)

    def one(*more, started=True):
        sizes = ["--burst", "20-60", "--long", "200", "--context", "400", "--concurrency", "3"]
        times = ["--seconds", "2.5", "--interval", "0.1", "--patience", "0.5", "--request-timeout", "100"]
        places = ["--model", str(model), "--logs", str(tmp_path / "logs"), "--json", str(tmp_path / "report.json")]
        fake = shlex.join([sys.executable, str(FAKE)])
        code = soak.main([*sizes, *times, *places, "--port", str(free_port()), "--server-cmd", fake, *more])
        assert server_pids(tmp_path) or not started
        assert not [pid for pid in server_pids(tmp_path) if alive(pid)], "a server's process was left"
        return code, json.loads((tmp_path / "report.json").read_text())

    return one


def failures(report):
    return [check["name"] for check in report["checks"] if not check["ok"]]


def test_a_good_server_passes(run):
    code, report = run()
    assert failures(report) == []
    assert (code, report["passed"]) == (0, True)
    assert set(report["traffic"]) == KINDS
    assert report["seconds"] >= 2.5
    traffic = report["traffic"]
    assert traffic["burst"]["answered"] >= 3
    assert traffic["too long"]["refused"] == traffic["too long"]["sent"] > 0
    assert traffic["hung up in a stream"]["hung_up"] > 0
    assert report["ranks"]["TP0"]["verified_calls"] > 20
    assert len(report["memory"]["samples"]) >= 10
    assert report["memory"]["samples"][0]["processes"] == 2
    assert set(report["memory"]["samples"][0]["rss_mb"]) == {"http", "scheduler"}
    assert set(report["memory"]["second_half"]) == {"http", "scheduler", "all but schedulers", "GPUs"}
    assert report["native"] is None
    assert report["memory"]["samples"][0]["gpu_mb"] == pytest.approx(1000 * 1.048576)
    assert "--disable-radix-cache" not in report["command"]
    assert "--context-length 400" in report["command"]
    assert report["server_environment"]["PAGEWEAVER_VERIFY_EVERY"] == "13"


@pytest.mark.parametrize(
    ("variable", "value", "check"),
    [
        ("FAKE_LEAK", "10000000", "resident memory, all but schedulers, flat"),
        ("FAKE_SCHEDULER_LEAK", "10000000", "resident memory, scheduler, flat"),
        ("FAKE_GPU_LEAK", "50", "GPU memory, all processes, flat"),
        ("FAKE_APPS", "500 + 50 * CALLS", "GPU memory, the server's, flat"),
        ("FAKE_NRMS", "6.400%", "NRMS of every compared call at most 4.0% (6.25% below 64 tokens)"),
        ("FAKE_FALLBACK", "1", "no call left to SGLang's Step 3 unexpectedly"),
        ("FAKE_TAKES_ALL", "1", "every request answered, refused or given up as meant"),
    ],
)
def test_a_bad_server_fails(run, monkeypatch, variable, value, check):
    monkeypatch.setenv(variable, value)
    code, report = run("--max-growth", "40", "--max-other-growth", "40")
    assert code == 1
    assert check in failures(report)
    # A server that takes what it should refuse has those kinds unmet, too; nothing else fails.
    assert len(failures(report)) == (2 if variable == "FAKE_TAKES_ALL" else 1)


@pytest.mark.parametrize("leaks_in", ["native auto", "auto", "native"])
def test_growth_that_native_has_too_is_none_of_pageweavers(run, monkeypatch, leaks_in):
    monkeypatch.setenv("FAKE_SCHEDULER_LEAK", "8000000")
    monkeypatch.setenv("FAKE_LEAKS_IN", leaks_in)
    # Both samplers' samples make it grow: by 16 MB from one of a server's samples to the next, of which the second half
    # has nine more at least. The servers' second halves don't begin and end at the same moment. The interval keeps the
    # two leaks within half a gigabyte each.
    code, report = run("--compare-native", "--max-growth", "70", "--max-other-growth", "40", "--interval", "0.25")
    assert failures(report) == (["resident memory, scheduler, flat"] if leaks_in == "auto" else [])
    assert code == (1 if leaks_in == "auto" else 0)
    native = report["native"]
    assert native["server_environment"]["PAGEWEAVER_MODE"] == "native"
    assert set(native["traffic"]) == KINDS
    growths = [one["memory"]["second_half"]["scheduler"]["growth_mb"] > 100 for one in (report, native)]
    assert growths == ["auto" in leaks_in, "native" in leaks_in]
    for one in (report, native):
        assert "--mem-fraction-static 0.25" in one["command"]


@pytest.mark.parametrize(
    ("grows", "of_a_process", "trend"),
    [("FAKE_GPU1_LEAK", "", soak.GPUS), ("FAKE_GPU_LEAK", "500", soak.SERVER_ON_GPUS)],
    ids=["on another GPU", "of another process"],
)
def test_gpu_memory_that_is_not_the_servers(run, monkeypatch, grows, of_a_process, trend):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    monkeypatch.setenv(grows, "50")
    monkeypatch.setenv("FAKE_APPS", of_a_process)
    code, report = run()
    assert (code, failures(report)) == (0, [])
    assert {soak.GPUS, soak.SERVER_ON_GPUS} & set(report["memory"]["second_half"]) == {trend}
    # One GPU, or two processes of the server.
    assert report["memory"]["second_half"][trend]["first_mb"] == pytest.approx(1000 * 1.048576, abs=0.1)


@pytest.mark.parametrize(
    ("visible", "mib"), [(None, 3000), ("0", 1000), ("1", 2000), ("1, 0", 3000), ("", None), ("7", None)]
)
def test_gpus_that_the_server_may_use(smi, monkeypatch, visible, mib):
    monkeypatch.setenv("FAKE_GPU1_LEAK", "0")
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    assert soak.gpu_mb() == (None if mib is None else pytest.approx(mib * 1.048576))


def test_gpu_memory_by_process(smi, tmp_path, monkeypatch):
    """None unless nvidia-smi says it of every scheduler."""
    assert soak.server_gpu_mb([41, 42], [41]) is None, "it shows no processes"
    (tmp_path / "pids").write_text("41\n42\n")
    monkeypatch.setenv("FAKE_APPS", "500")
    assert soak.server_gpu_mb([41, 42, 43], [41]) == pytest.approx(1000 * 1.048576, abs=0.1)
    assert soak.server_gpu_mb([41], [41]) == pytest.approx(500 * 1.048576, abs=0.1)
    assert soak.server_gpu_mb([41, 42], []) is None
    assert soak.server_gpu_mb([41, 43], [41, 43]) is None
    smi.write_text("#!/bin/sh\necho '41, [N/A]'\n")
    assert soak.server_gpu_mb([41], [41]) is None
    assert soak.gpu_mb() is None
    smi.unlink()
    monkeypatch.setenv("PATH", str(smi.parent))
    assert soak.gpu_mb() is None


@pytest.mark.parametrize(("attributed", "flat"), [("both", True), ("the last not", False), ("neither", False)])
def test_gpu_memory_beyond_natives(attributed, flat):
    """Both servers grow by 120 MB in the second half; what all processes use together is no measure of either."""
    known = {"both": 61, "the last not": 60, "neither": 0}[attributed]
    samples = [
        soak.Sample(t, 1, {"scheduler": 1.0}, 9000.0 + 8 * t, 900.0 + 4 * t if t < known else None) for t in range(61)
    ]
    trends = soak.trends(samples)
    assert (soak.SERVER_ON_GPUS in trends, soak.GPUS in trends) == (known == 61, known < 61)
    (check,) = (
        one
        for one in soak.memory_checks(trends, trends, soak.parse_options(["--compare-native"]))
        if one.name.startswith("GPU memory")
    )
    assert check.ok == flat
    assert ("beyond native's 120.0" in check.detail) == flat


def test_the_server_to_compare_with_dies(run, monkeypatch):
    monkeypatch.setenv("FAKE_DIE_AFTER", "30")
    code, report = run("--compare-native", "--seconds", "100")
    assert code == 1
    assert "native: server started, stayed up and ended cleanly" in failures(report)
    assert report["native"]["seconds"] < 90, "it stops when its server is gone"


def test_a_server_that_dies(run, monkeypatch):
    monkeypatch.setenv("FAKE_DIE_AFTER", "30")
    code, report = run("--seconds", "100")
    assert code == 1
    assert report["seconds"] < 90, "it stops when the server is gone"
    assert "exit code 3" in report["checks"][0]["detail"]
    assert {"server started, stayed up and ended cleanly", "no CUDA error, no traceback through PageWeaver"} <= set(
        failures(report)
    )


def test_a_port_that_somebody_else_has(tmp_path, run):
    with socket.create_server(("127.0.0.1", 0)) as other:
        code, report = run("--port", str(other.getsockname()[1]), started=False)
    assert code == 1
    (check,) = (one for one in report["checks"] if one["name"] == "server started, stayed up and ended cleanly")
    assert "is taken" in check["detail"]
    assert all(one["sent"] == 0 for one in report["traffic"].values())


def test_a_server_that_never_gets_ready(run, monkeypatch):
    monkeypatch.setenv("FAKE_HANG", "1")
    code, report = run("--start-timeout", "1", started=False)
    assert code == 1
    assert "the server was not ready after " in report["checks"][0]["detail"]


def test_a_fallback_that_is_expected(run, monkeypatch):
    monkeypatch.setenv("FAKE_FALLBACK", "1")
    code, report = run("--expected-fallback", "attention sink")
    assert (code, failures(report)) == (0, [])


def test_traffic_goes_on_until_there_is_enough_for_a_verdict(run):
    code, report = run("--seconds", "0.1", "--long", "100", "--burst", "20-60")
    assert (code, failures(report)) == (0, [])
    assert set(report["traffic"]) == KINDS
    assert report["memory"]["second_half"]["scheduler"]["samples"] >= 2 * soak.FEWEST_SAMPLES


def test_two_servers_traffic_ends_at_the_same_time(run, monkeypatch):
    """Also where one of them has seen enough long before the other."""
    monkeypatch.setattr(soak.Sampler, "has_enough", lambda self: len(self.samples) > (3 if native(self) else 30))

    def native(sampler):
        return "native" in str(sampler._server.log)

    _, report = run("--compare-native", "--seconds", "0.1")
    assert len(report["memory"]["samples"]) > 30
    assert len(report["native"]["memory"]["samples"]) > 8, "it did not end at its fourth"


@pytest.fixture
def idle_traffic(monkeypatch):
    """Traffic whose requests all hang until the test is over."""
    over = threading.Event()
    traffic = soak.Traffic(1, soak.parse_options([]))
    for name in ("small", "burst", "long", "aborts", "refusals"):
        monkeypatch.setattr(traffic, name, lambda rng: over.wait(100))
    yield traffic
    over.set()


def test_traffic_ends_in_time_with_a_server_that_hangs(idle_traffic):
    begin = time.monotonic()
    lasted = idle_traffic.run(0.1, begin + 0.5, begin + 0.7, lambda: False, lambda: False)
    assert begin + 0.5 <= time.monotonic() < begin + 60, "five requests that hang for 100 s are not waited for"
    assert lasted > 0


def test_traffic_ends_when_there_is_enough(idle_traffic):
    asked = []
    begin = time.monotonic()
    lasted = idle_traffic.run(0.3, begin + 600, begin, lambda: len(asked) == 3 or asked.append(1), lambda: False)
    assert 0.3 <= lasted < 60
    assert len(asked) == 3


def test_traffic_does_not_go_on_once_something_went_wrong(run, monkeypatch):
    monkeypatch.setenv("FAKE_TAKES_ALL", "1")
    code, report = run("--seconds", "1", "--interval", "100")
    assert code == 1
    assert report["seconds"] < 90


@pytest.mark.parametrize(
    ("slope", "noise", "growth"), [(0.0, 0.0, 0.0), (0.5, 0.0, 15.0), (-1.0, 0.0, -30.0), (0.5, 400.0, 15.0)]
)
def test_trend(slope, noise, growth):
    """The first half does not count, and neither do single jumps."""
    points = [(t, 5000.0 + (slope * t if t >= 30 else 100 * t) + (noise if t % 10 == 3 else 0)) for t in range(61)]
    found = soak.trend(points)
    assert found.growth_mb == pytest.approx(growth, abs=0.5)
    assert found.slope_mb_per_minute == pytest.approx(slope * 60, abs=1)
    assert (found.samples, found.seconds) == (31, 30)
    assert soak.memory_check("memory", found, 10).ok == (growth < 10)


def test_too_few_samples_are_no_trend():
    assert soak.trend([]) is None
    assert soak.trend([(float(t), 1.0) for t in range(8)]) is None
    assert not soak.memory_check("memory", None, 10).ok


def test_tracebacks_through_pageweaver():
    others = 'Traceback (most recent call last):\n  File "sglang/x.py", line 1\nValueError: disconnected\n'
    own = 'Traceback (most recent call last):\n  File "/y/pageweaver_sglang/api.py", line 2\nRuntimeError: broken\nnext'
    assert soak.own_tracebacks(others) == []
    assert soak.own_tracebacks(others + own + others) == ["RuntimeError: broken"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--seconds", "0"], "--seconds: must be above 0"),
        (["--burst", "9-3"], "LOW-HIGH"),
        (["--mode", "native", "--compare-native"], "--compare-native: --mode is native already"),
        (["--long", "100"], "--long: at least the longest prompt of a burst, 8192, got 100"),
    ],
)
def test_bad_options(arguments, message, capsys):
    with pytest.raises(SystemExit):
        soak.parse_options(arguments)
    assert message in capsys.readouterr().err
