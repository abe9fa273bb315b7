"""`pageweaver ab` with a fake server and a fake client: order, pairing, failures, and that nothing outlives it."""

import json
import os
import re
import shlex
import signal
import socket
import sys
import time
from pathlib import Path

import pytest

from pageweaver_sglang.cli import main
from pageweaver_sglang.plugin import control
from pageweaver_sglang.serving_ab import idle, launch, switching
from tests.cli.interruptible import alive, running
from tests.waiting import wait_for

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
ARMS = ["native", "union8", "auto"]


def fake(name):
    return shlex.join([sys.executable, str(HERE / name)])


def pids(tmp_path) -> list[int]:
    path = tmp_path / "pids"
    return [int(pid) for pid in path.read_text().split()] if path.exists() else []


@pytest.fixture
def arguments(tmp_path, monkeypatch):
    """A quick comparison with fakes."""
    monkeypatch.setenv("FAKE_PIDS", str(tmp_path / "pids"))
    monkeypatch.setenv("FAKE_REQUESTS", str(tmp_path / "requests"))
    monkeypatch.setattr(switching, "SECONDS", 600.0)
    monkeypatch.setattr(control, "STALE_SECONDS", 600.0)
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text('{"text_config": {"vocab_size": 2000}}')
    sizes = ["--prompts", "100,200", "--concurrency", "1,2", "--requests", "4", "--patience", "0.1"]
    places = ["--model", str(tmp_path / "model"), "--out", str(tmp_path / "out"), "--json", str(tmp_path / "ab.json")]
    programs = ["--server-cmd", fake("fake_ab_server.py"), "--client-cmd", fake("fake_bench_client.py")]
    return ["ab", *sizes, *places, *programs]


def run(arguments, tmp_path, *more):
    code = main([*arguments, *more])
    assert not [pid for pid in pids(tmp_path) if alive(pid)], "a process was left"
    return code, json.loads((tmp_path / "ab.json").read_text())


def test_a_whole_comparison(arguments, tmp_path, capsys):
    code, report = run(arguments, tmp_path, "--blocks", "2", "--", "--trust-remote-code")
    assert (code, report["failures"]) == (0, [])
    assert report["order"] == [["native", "union8", "auto"], ["union8", "auto", "native"]]
    served = [(r["arm"], r["block"], r["timed"]) for r in report["runs"]]
    last = [entry for arm in report["order"][1] for entry in ((arm, 1, False), (arm, 0, True))]
    assert served == [(arm, 0, False) for arm in ARMS] + last
    assert len(pids(tmp_path)) == 6 * 2  # timed in the servers of the last block
    assert [(row["prompt"], row["concurrency"]) for row in report["loads"]] == [(100, 1), (100, 2), (200, 1), (200, 2)]
    row = report["loads"][3]["arms"]
    assert row["native"]["times_ttft"]["median"] == 1
    assert row["auto"]["times_ttft"]["blocks"] == {"0": 2.0, "1": 2.0}
    assert row["auto"]["ttft_ms"]["median"] == pytest.approx(100)
    assert row["auto"]["ttft_ms"]["requests"] == 8
    assert row["auto"]["times_throughput"]["median"] == pytest.approx(2, rel=0.01)
    assert row["union8"]["input_throughput"]["blocks"]["1"] == pytest.approx(4 * 200 / 0.321)
    shares = {(r["prompt"], r["concurrency"], r["arm"]): r for r in report["step3"]}
    assert shares[200, 1, "native"]["share"] == pytest.approx(0.25)
    assert shares[200, 1, "native"]["at_most"] == pytest.approx(4 / 3)
    assert shares[200, 1, "native"]["step3_ms"] == pytest.approx(50)
    assert shares[100, 1, "auto"]["share"] == pytest.approx(0.25)
    # Every request's figure, launch lines and what Triton chose are there.
    first = report["runs"][0]
    assert first["cells"][1]["ttft_s"] == [0.1] * 4
    assert first["cells"][1]["input_lens"] == [100] * 4
    assert "--skip-server-warmup --trust-remote-code" in first["command"]
    assert "--attention-backend pageweaver --kv-cache-dtype fp8_e4m3 --disable-radix-cache" in first["command"]
    assert "--random-input-len 100" in first["cells"][0]["command"]
    assert first["environment"]["PAGEWEAVER_MODE"] == "native"
    assert first["tuned"][0]["config"] == "num_warps: 4, num_stages: 3"
    assert {r["environment"]["PAGEWEAVER_TIMING"] for r in report["runs"]} == {"false"}
    # Other prompts, and fewer: as many as run at a time, but two.
    timed = [[len(cell["ttft_s"]) for cell in run["cells"]] for run in report["runs"] if run["timed"]]
    assert timed == [[2, 2, 2, 2]] * 3
    seeds = [
        re.search(r"--seed (\d+)", c["command"])[1] for r in report["runs"] if r["arm"] == "native" for c in r["cells"]
    ]
    assert len(set(seeds)) == 12
    assert report["client"]["how"] == "a process per load: --client-cmd names another program"
    assert "restarts" in report["switching"]
    out = capsys.readouterr().out
    assert "Arms were switched by restarts" in out
    assert "p99 of 8 requests is close to their largest" in out
    assert "25.0%" in out


def test_warm_up_and_equal_prompts(arguments, tmp_path):
    run(arguments, tmp_path, "--blocks", "2", "--no-share", "--arms", "native,pageweaver")
    rows = [json.loads(line) for line in (tmp_path / "requests").read_text().splitlines()]
    servings = []
    for mode, length, token, measured in rows:
        if not servings or (not measured and servings[-1][1]):
            servings.append((mode, [], []))
        servings[-1][1 if measured else 2].append((length, token))
    assert [mode for mode, *_ in servings] == ["native", "pageweaver", "pageweaver", "native"]
    for _, measured, warm_up in servings:
        assert len(measured) == 16
        # The longest alone and first, then both lengths at both concurrencies.
        assert [length for length, _ in warm_up] == [200] + [200] * 6 + [100] * 6
        assert all(1000 <= token <= 1500 for _, token in warm_up)
    # The same prompts for the arms of a block, others in the next block.
    assert sorted(servings[0][1]) == sorted(servings[1][1])
    assert sorted(servings[2][1]) == sorted(servings[3][1])
    assert not set(servings[0][1]) & set(servings[2][1])


@pytest.mark.parametrize(
    ("how", "reason"),
    [
        ("DIE", "could not be served: the server ended with exit code 1 after "),
        ("HANG", "could not be served: the server was not ready after "),
        ("REFUSE", "could not be served: warm-up: HTTP 400: "),
        ("WRONG_MODE", "could not be served: the server's log says mode native, so its figures would not be those of"),
    ],
)
def test_an_arm_that_cannot_be_served(arguments, tmp_path, monkeypatch, how, reason):
    monkeypatch.setenv(f"FAKE_{how}", "union8")
    sizes = ["--prompts", "100", "--concurrency", "1", "--arms", "native,union8"]
    sizes += ["--start-timeout", "10"] if how == "HANG" else []
    code, report = run(arguments, tmp_path, "--blocks", "2", *sizes)
    assert code == 1
    assert len(report["failures"]) == 1  # not tried again
    assert report["failures"][0].startswith(f"union8, block 1: {reason}")
    if how == "DIE":
        log = tmp_path / "out" / "logs" / "union8-block1.log"
        assert report["failures"][0].endswith(f" s: RuntimeError: no kernel image is available (log: {log})")
    assert [(run["arm"], run["block"], run["timed"]) for run in report["runs"] if run["arm"] == "native"] == [
        ("native", 0, False),
        ("native", 1, False),
        ("native", 0, True),
    ]
    assert [set(row["arms"]) for row in report["loads"]] == [{"native"}]
    assert {row["arm"] for row in report["step3"]} == {"native"}


@pytest.mark.parametrize(
    ("variable", "value", "failure"),
    [
        ("FAKE_CLIENT_FAIL", "100:2", "100 x 2: the client ended with exit code 1: ValueError: no tokenizer"),
        ("FAKE_CACHED", "union8", "100 x 1: 512 prompt tokens came from a cache, so they were not computed"),
        ("FAKE_FALLBACK", "union8", "union8, block 1: SGLang's own Step 3 served calls with: attention sink"),
        ("FAKE_CRASH", "union8", "union8, block 1: the server is gone after 100 x 1"),
    ],
)
def test_a_load_that_fails(arguments, tmp_path, monkeypatch, variable, value, failure):
    monkeypatch.setenv(variable, value)
    code, report = run(
        arguments, tmp_path, "--blocks", "1", "--no-share", "--arms", "native,union8", "--prompts", "100"
    )
    assert code == 1
    assert any(failure in text for text in report["failures"]), report["failures"]
    assert set(report["loads"][0]["arms"]) >= {"native"}
    if variable == "FAKE_CRASH":
        assert sum("is gone" in text for text in report["failures"]) == 1
    if variable != "FAKE_FALLBACK":
        assert "union8" not in report["loads"][1]["arms"]


@pytest.fixture
def quick_switching(monkeypatch):
    monkeypatch.setattr(switching, "_SETTLE", 0.4)


def test_one_server_in_mode_auto(arguments, tmp_path, quick_switching):
    """Its calls count as those of the arms that it chooses from."""
    more = ["--one-server", "--arms", "native,auto", "--blocks", "1", "--no-share", "--prompts", "100"]
    code, report = run(arguments, tmp_path, *more)
    assert (code, report["failures"]) == (0, [])
    assert [entry["calls"] for entry in report["runs"]] == [{"native": 32}, {"pageweaver": 32}]


def test_one_server_for_both_arms(arguments, tmp_path, quick_switching, capsys):
    code, report = run(arguments, tmp_path, "--one-server", "--arms", "native,pageweaver", "--blocks", "2")
    assert (code, report["failures"]) == (0, [])
    assert len(pids(tmp_path)) == 2  # a server and its helper
    served = [(r["arm"], r["block"], r["timed"]) for r in report["runs"]]
    assert served == [
        *(("native", 0, False), ("pageweaver", 0, False), ("pageweaver", 1, False), ("native", 1, False)),
        *(("native", 0, True), ("pageweaver", 0, True)),
    ]
    for entry in report["runs"]:
        assert entry["environment"]["PAGEWEAVER_MODE"] == "pageweaver"
        assert entry["calls"] == {entry["arm"]: 4 * (2 if entry["timed"] else 4) * 4}  # loads, requests, layers
        assert entry["status"].startswith("mode pageweaver")
    arms = report["loads"][3]["arms"]
    assert arms["pageweaver"]["times_ttft"]["blocks"] == {"0": 2.0, "1": 2.0}
    shares = {(row["prompt"], row["concurrency"], row["arm"]): row["share"] for row in report["step3"]}
    assert [shares[200, 1, arm] for arm in ("native", "pageweaver")] == pytest.approx([0.25, 0.25])
    assert "PageWeaver's own switch inside one server" in capsys.readouterr().out
    # Both arms are warmed up, native with the longest prompt first of all.
    rows = [json.loads(line) for line in (tmp_path / "requests").read_text().splitlines()]
    assert rows[0][:2] == ["native", 200]
    assert {row[0] for row in rows if not row[3]} == {"native", "pageweaver"}


@pytest.mark.parametrize(
    ("how", "failure"),
    [
        ("STUCK", "could not be served: the server did not switch to native"),
        ("SECRETLY_NATIVE", "Step 3 calls were served by {'native': 64}, and not by pageweaver alone"),
        ("DIE", "could not be served: the server ended with exit code 1"),
        ("CRASH", "the server is gone after 100 x 1"),
    ],
)
def test_one_server_that_does_not_do_as_told(arguments, tmp_path, monkeypatch, quick_switching, how, failure):
    monkeypatch.setenv(f"FAKE_{how}", "pageweaver")
    if how == "STUCK":
        monkeypatch.setattr(switching, "SECONDS", 3.0)
    more = ["--one-server", "--arms", "native,pageweaver", "--blocks", "1", "--no-share"]
    code, report = run(arguments, tmp_path, *more)
    assert code in (1, 2)
    assert any(failure in text for text in report["failures"])


BESIDE = ["--side-by-side", "--", "--max-total-tokens", "300"]


def test_side_by_side(arguments, tmp_path, quick_switching, capsys):
    code, report = run(arguments, tmp_path, "--blocks", "2", "--prompts", "200", *BESIDE)
    assert (code, report["failures"]) == (0, [])
    assert len(pids(tmp_path)) == 3 * 2  # three servers with their helpers
    served = [(r["arm"], r["block"], r["timed"]) for r in report["runs"]]
    assert served == [(arm, block, False) for block, arms in enumerate(report["order"]) for arm in arms] + [
        (arm, 0, True) for arm in ARMS
    ]
    arms = report["loads"][1]["arms"]
    assert arms["auto"]["times_ttft"]["blocks"] == {"0": 2.0, "1": 2.0}
    shares = {(row["prompt"], row["concurrency"], row["arm"]): row["share"] for row in report["step3"]}
    assert [shares[200, 1, arm] for arm in ARMS] == pytest.approx([0.25, 0.25, 0.25])
    ports = set()
    for entry in report["runs"]:
        assert entry["environment"]["PAGEWEAVER_MODE"] == entry["arm"]
        assert entry["environment"]["PAGEWEAVER_CONTROL_DIR"].endswith(entry["arm"])
        assert entry["kv_pool_tokens"] == 300
        assert entry["status"].startswith(f"mode {entry['arm']}")
        words = entry["command"].split()
        assert words[words.index("--mem-fraction-static") + 1] == "0.30"
        assert "--sleep-on-idle" in words
        ports |= {words[words.index(name) + 1] for name in ("--port", "--nccl-port")}
    assert len(ports) == 3 * 2
    # Every server was warmed up before any was measured, and each got its own arm's loads only.
    rows = [json.loads(line) for line in (tmp_path / "requests").read_text().splitlines()]
    first = next(number for number, row in enumerate(rows) if row[3])
    assert {row[0] for row in rows[:first]} == set(ARMS)
    assert all(row[3] for row in rows[first:])
    assert [rows[first + 8 * number][0] for number in range(6)] == [arm for arms in report["order"] for arm in arms]
    out = " ".join(capsys.readouterr().out.split())
    assert "one of the servers that run side by side" in out
    assert "KV pool of every server: 300 tokens" in out


@pytest.mark.parametrize(
    ("how", "failure"),
    [
        ("DIE", "union8, block 1: could not be served: the server ended with exit code 1"),
        ("REFUSE", "union8, block 1: could not be served: warm-up: HTTP 400"),
        ("WRONG_MODE", "union8, block 1: could not be served: the server's log says mode native"),
        ("SMALL_POOL", "the servers' KV pools differ (native 300, union8 200, auto 300 tokens)"),
        ("BUSY", "still has 1 requests after"),
        ("SILENT", "says nothing of its load after"),
        ("DIE_IDLE", "native, block 1: the server of union8: /v1/loads at port"),
        ("MEDDLE", "native, block 1, 100 x 1: the servers of union8 computed prompts meanwhile"),
        ("CRASH", "union8, block 1: the server is gone after 100 x 1"),
    ],
)
def test_side_by_side_goes_wrong(arguments, tmp_path, monkeypatch, quick_switching, capsys, how, failure):
    monkeypatch.setenv(f"FAKE_{how}", "union8")
    monkeypatch.setenv("FAKE_TOGETHER", "3")  # else the end of one that is early can keep the others from starting
    monkeypatch.setattr(idle, "SECONDS", 0.5)
    more = ["--blocks", "1", "--no-share", "--prompts", "100", "--concurrency", "1"]
    code, report = run(arguments, tmp_path, *more, *BESIDE)
    assert code == (1 if how in ("MEDDLE", "DIE_IDLE", "CRASH") else 2)
    assert any(failure in text for text in report["failures"]), report["failures"]
    assert len(pids(tmp_path)) == 3 * 2
    if how == "DIE":  # its log's end is told
        assert "RuntimeError: no kernel image is available" in capsys.readouterr().out
    if how == "DIE_IDLE":
        assert "an illegal memory access" in report["runs"][-1]["failure"]


@pytest.fixture
def worker_client(monkeypatch, arguments):
    """The fake client as a module that the worker imports; returns arguments without --client-cmd."""
    monkeypatch.setattr(launch, "find_client", lambda: "fake_bench_client")
    monkeypatch.setenv("PYTHONPATH", str(HERE))
    return arguments[: arguments.index("--client-cmd")]


def test_one_process_runs_all_loads(worker_client, tmp_path, capsys):
    code, report = run(worker_client, tmp_path, "--blocks", "2", "--no-share", "--arms", "native,pageweaver")
    assert (code, report["failures"]) == (0, [])
    assert report["loads"][3]["arms"]["pageweaver"]["times_ttft"]["blocks"] == {"0": 2.0, "1": 2.0}
    said = [path.read_text().split(maxsplit=2) for path in (tmp_path / "out" / "client").glob("*x?.log")]
    assert len(said) == 4 * 4
    assert {words[1] for words in said} == {said[0][1]}  # the same process
    assert not alive(int(said[0][1].rstrip(":")))
    # The arguments are those of the command line that the report shows.
    commands = {c["command"].split("-m fake_bench_client ")[1] for r in report["runs"] for c in r["cells"]}
    assert {shlex.join(shlex.split(command)) for command in commands} == commands
    assert len({text for *_, text in said}) == 16
    assert "one process for all loads" in capsys.readouterr().out


def test_a_client_that_cannot_be_kept(worker_client, tmp_path, monkeypatch):
    """A process per load, and the report says why; here the module is only run, as older versions of SGLang are."""
    folder = tmp_path / "modules"
    folder.mkdir()
    (folder / "old_client.py").write_text(
        "import fake_bench_client as c\nif __name__ == '__main__':\n    c.cli_main()\n"
    )
    monkeypatch.setattr(launch, "find_client", lambda: "old_client")
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(folder), str(HERE)]))
    more = ["--blocks", "1", "--no-share", "--arms", "native", "--prompts", "100", "--concurrency", "1"]
    code, report = run(worker_client, tmp_path, *more)
    assert (code, report["client"]["how"]) == (0, "a process per load: old_client has no cli_main()")


def test_answers_without_text(arguments, tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("FAKE_NO_TEXT", "native")
    code, report = run(arguments, tmp_path, "--blocks", "1", "--no-share", "--arms", "native", "--prompts", "100")
    assert code == 0
    ttft = report["loads"][0]["arms"]["native"]["ttft_ms"]
    assert (ttft["requests"], ttft["missing"], ttft["min"]) == (3, 1, 100)
    assert "2 answers came without text" in capsys.readouterr().out


def test_an_arm_whose_loads_all_fail_is_not_served_again(arguments, tmp_path, monkeypatch):
    monkeypatch.setenv("FAKE_CLIENT_FAIL", "100:1")
    more = ["--arms", "native", "--blocks", "3", "--prompts", "100", "--concurrency", "1"]
    code, report = run(arguments, tmp_path, *more)
    assert code == 2
    assert len(report["runs"]) == 1


def test_nothing_could_be_served(arguments, tmp_path, monkeypatch):
    monkeypatch.setenv("FAKE_DIE", "native")
    code, report = run(arguments, tmp_path, "--arms", "native", "--blocks", "2")
    assert code == 2
    assert len(report["runs"]) == 1


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (["--arms", "native,fast"], "no arm fast; the arms are native, union8, pageweaver"),
        (["--arms", "native,native"], "arms: one or more, each once"),
        (["--requests", "1"], "requests: at least the highest concurrency, 2, got 1"),
        (["--blocks", "0"], "blocks: at least 1, got 0"),
        (["--", "--port", "1"], "--port is set by this command"),
        (["--", "--attention-backend=fa3"], "with attention backend fa3 PageWeaver would never act"),
        (["--model", "/no/such/model"], "there is no such folder"),
        (["--server-cmd", "'"], "No closing quotation"),
        (["--side-by-side"], "must hold --max-total-tokens"),
        ([*BESIDE, "--mem-fraction-static", "0.4"], "3 side by side would take 1.20 of the memory"),
        ([*BESIDE, "--mem-fraction-static=x"], "--mem-fraction-static: a number, got 'x'"),
        ([*BESIDE, "--nccl-port", "5"], "servers side by side need one each"),
        ([*BESIDE, "--enable-dp-attention"], "leave out --side-by-side"),
        (["--port", "65534", *BESIDE], "the 3 ports from 65534 on"),
    ],
)
def test_what_makes_no_comparison(arguments, tmp_path, capsys, more, message):
    assert main([*arguments, *more]) == 2
    assert message in " ".join(capsys.readouterr().err.split())
    assert pids(tmp_path) == []


def test_a_setting_with_which_no_server_would_start(arguments, tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("PAGEWEAVER_WINDOW", "96")
    assert main(arguments) == 2
    said = " ".join(capsys.readouterr().err.split())
    assert "the servers would refuse to start: PAGEWEAVER_WINDOW: got 96; allowed: 64 or 128" in said
    assert pids(tmp_path) == []


def test_a_port_that_is_taken(arguments, tmp_path, capsys):
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        assert main([*arguments, "--port", str(other.getsockname()[1])]) == 2
    assert "another server would answer" in " ".join(capsys.readouterr().err.split())


@pytest.mark.parametrize(
    ("number", "where", "more", "kept"),
    [
        (signal.SIGTERM, "FAKE_HANG", [], False),
        (signal.SIGINT, "FAKE_HANG_CLIENT", [], False),
        (signal.SIGTERM, "FAKE_HANG", BESIDE, True),
        (signal.SIGINT, "FAKE_HANG_CLIENT", BESIDE, True),
    ],
    ids=["start", "client", "start-side-by-side", "kept-client-side-by-side"],
)
def test_ended_by_a_signal(arguments, tmp_path, number, where, more, kept):
    """While a server starts, and while the client runs; the report holds what was measured until then."""
    package = tmp_path / "site" / "sglang" / "benchmark"
    package.mkdir(parents=True)
    for name in ("__init__.py", "benchmark/__init__.py", "benchmark/serving.py"):
        (package.parent / name).write_text("from fake_bench_client import cli_main" if "serving" in name else "")
    path = [str(package.parents[1]), str(HERE), str(ROOT)]
    environment = {**os.environ, where: "native", "PYTHONPATH": os.pathsep.join(path)}
    if kept:
        arguments = arguments[: arguments.index("--client-cmd")]
    command = [sys.executable, "-m", "pageweaver_sglang.cli", *arguments, "--patience", "0.8", *more]
    with running(command, environment) as one:
        servers = 3 if more else 1
        expected = 2 * servers + (0 if where == "FAKE_HANG" else 2)
        wait_for(lambda: len(pids(tmp_path)) >= expected)
        one.send_signal(number)
        wait_for(lambda: not all(alive(pid) for pid in pids(tmp_path)))  # it is ending them
        for _ in range(5):
            one.send_signal(signal.SIGINT)  # the impatient
            time.sleep(0.3)
        assert one.wait(600) == (130 if number == signal.SIGINT else 143)
    assert len(pids(tmp_path)) == expected
    assert not [pid for pid in pids(tmp_path) if alive(pid)]
    report = json.loads((tmp_path / "ab.json").read_text())
    assert report["interrupted"]
    assert [run["arm"] for run in report["runs"]] == (["native"] if where != "FAKE_HANG" or not more else [])
