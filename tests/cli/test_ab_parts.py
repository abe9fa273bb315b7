"""Parts of `pageweaver ab` that need no process: order, statistics, what is read from the client and from a log."""

import importlib.machinery
import importlib.util
import json
import os
import sys
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import ClassVar

import pytest

from pageweaver_sglang.cli import main
from pageweaver_sglang.serving_ab import launch, statistics
from pageweaver_sglang.serving_ab.client import ClientError, ProcessPerLoad, Worker, read_result, serving_seconds
from pageweaver_sglang.serving_ab.serverlog import Step3Time, read_log, step3_between
from pageweaver_sglang.serving_ab.settings import AbError, Cell, Settings

RESULT = {
    "duration": 1.25,
    "completed": 3,
    "total_input_tokens": 300,
    "input_throughput": 240.0,
    "input_lens": [100] * 3,
    "ttfts": [0.5, 0.25, 0.125],
    "errors": ["", "", ""],
    "cached_tokens": [0, 0, 0],
}


def test_order():
    assert Settings("m", arms=("native", "union8", "pageweaver"), blocks=4).order() == [
        ["native", "union8", "pageweaver"],
        ["union8", "pageweaver", "native"],
        ["pageweaver", "native", "union8"],
        ["native", "union8", "pageweaver"],
    ]
    settings = Settings("m", arms=("union8", "pageweaver"))
    assert settings.base == "union8"
    seeds = {settings.client_seed(block, cell) for block in range(3) for cell in settings.cells}
    assert len(seeds) == 18
    assert max(Settings("m", seed=4000).client_seed(999, cell) for cell in settings.cells) < 2**32


def test_a_port_that_is_none():
    with pytest.raises(AbError, match="to 65535, got 65536"):
        Settings("m", port=65536)


def test_serving_seconds():
    assert serving_seconds([1, 2, 3], 1) == 6
    # Two at a time: 0-4 | 0-1, 1-3, 3-6
    assert serving_seconds([4, 1, 2, 3], 2) == 6
    assert serving_seconds([1, 2], 8) == 2


def test_a_result():
    figures = read_result(RESULT, 3, 2)
    assert figures["ttft_s"] == [0.5, 0.25, 0.125]
    assert (figures["serving_s"], figures["duration_s"], figures["failure"]) == (0.5, 1.25, None)
    assert read_result({**RESULT, "cached_tokens": None}, 3, 1)["cached_tokens"] is None


def test_a_request_that_failed():
    changed = {"completed": 2, "errors": ["", "Traceback\nTimeoutError: late\n", ""], "ttfts": [0.5, 0.0, 0.125]}
    figures = read_result({**RESULT, **changed}, 3, 1)
    assert figures["failure"] == "1 of 3 requests failed: TimeoutError: late"
    assert figures["ttft_s"] == [0.5, None, 0.125]
    assert figures["serving_s"] is None


def test_too_few_requests():
    assert read_result(RESULT, 4, 1)["failure"] == "the client sent 3 requests instead of 4"


@pytest.mark.parametrize("changed", [{"ttfts": [1.0]}, {"input_throughput": None}, {"completed": "all"}])
def test_a_result_that_cannot_be_read(changed):
    with pytest.raises(ClientError, match="the client's result can't be read"):
        read_result({**RESULT, **changed}, 3, 1)
    with pytest.raises(ClientError, match="KeyError: 'errors'"):
        read_result({"ttfts": []}, 3, 1)


def test_a_client_without_a_result(tmp_path):
    output = tmp_path / "result.jsonl"
    for script, message in (
        ("true", "left no result in result.jsonl"),
        (f"echo nonsense >{output}", "left no result in result.jsonl .JSONDecodeError"),
        (f"echo [] >{output}", "is no mapping"),
        ("echo what happened; sleep 600", "was not done after 5 s\nwhat happened"),
    ):
        with pytest.raises(ClientError, match=message):
            ProcessPerLoad(["sh", "-c"], "tested").run(
                [script], tmp_path / "log", output, 5 if "sleep" in script else 600
            )


CLIENT = """
import os, pathlib, sys, time
print("imported", os.getpid())
def cli_main():
    print("pid", os.getpid(), *sys.argv[1:], flush=True)
    print("read", repr(sys.stdin.read()), file=sys.stderr, flush=True)
    words = sys.argv[1:]
    if words[0] == "result":
        pathlib.Path(words[1]).write_text('{"number": 1}')
    elif words[0] == "sleep":
        time.sleep(600)
    elif words[0] == "die":
        os._exit(9)
    elif words[0] == "raise":
        raise ValueError("no tokenizer")
    else:
        sys.exit(int(words[0]) if words[0].isdigit() else words[0])
"""


@pytest.fixture
def worker(tmp_path, monkeypatch):
    """A worker with a client that does as its arguments say."""
    (tmp_path / "a_client.py").write_text(CLIENT)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    made = Worker("a_client", tmp_path / "worker.log", start_timeout=600)
    yield made
    made.close()


def test_a_worker_runs_loads_in_one_process(worker, tmp_path):
    log, output = tmp_path / "log", tmp_path / "result"
    pids = set()
    for _ in range(2):
        assert worker.run(["result", str(output)], log, output, 600) == {"number": 1}
        said = log.read_text().splitlines()
        pids.add(said[0].split()[1])
        assert said == [f"pid {said[0].split()[1]} result {output}", "read ''"]  # of this load alone, with no input
    for words, message in (
        (["3"], "ended with exit code 3"),
        (["no such dataset"], "exit code 1: no such dataset"),
        (["raise"], "exit code 1: ValueError: no tokenizer"),
        (["0"], "left no result"),
    ):
        with pytest.raises(ClientError, match=message):
            worker.run(words, log, output, 600)
        pids.add(log.read_text().split()[1])
    assert len(pids) == 1
    assert "imported" in (tmp_path / "worker.log").read_text()


@pytest.mark.parametrize(
    ("word", "seconds", "message"),
    [("sleep", 5, "was not done after 5 s\npid"), ("die", 600, "ended with exit code 9\npid")],
)
def test_a_worker_that_is_lost_is_replaced(worker, tmp_path, word, seconds, message):
    log, output = tmp_path / "log", tmp_path / "result"
    assert worker.unusable() is None
    first = worker._process
    with pytest.raises(ClientError, match=message):
        worker.run([word], log, output, seconds)
    assert first.poll() is not None
    assert worker.run(["result", str(output)], log, output, 600) == {"number": 1}
    second = worker._process
    second.kill()
    second.wait()
    with pytest.raises(ClientError, match="the client's process"):
        worker.run(["result", str(output)], log, output, 600)
    assert worker.run(["result", str(output)], log, output, 600) == {"number": 1}


@pytest.mark.parametrize(
    ("text", "why"), [("x = 1", "has no cli_main"), ("raise SystemExit(3)", "can't be imported: SystemExit: 3")]
)
def test_a_client_that_a_worker_cannot_use(tmp_path, monkeypatch, text, why):
    (tmp_path / "other_client.py").write_text(text)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    worker = Worker("other_client", tmp_path / "worker.log", start_timeout=600)
    assert why in worker.unusable()
    worker.close()


def serving(arm, block, throughput, ttft, *, timed=False, failure=None, step3=None):
    entry = {"prompt": 100, "concurrency": 1, "failure": failure, "step3": step3}
    if failure is None:
        tokens = 100 * len(ttft)
        entry |= {"input_throughput": throughput, "ttft_s": ttft, "serving_s": sum(ttft), "duration_s": 2 * sum(ttft)}
        entry |= {"input_tokens": tokens}
    return {"arm": arm, "block": block, "timed": timed, "failure": None, "fallbacks": [], "cells": [entry]}


def test_ratios_are_paired_by_block_and_outliers_stay():
    settings = Settings("m", arms=("native", "union8"), prompts=(100,), concurrency=(1,), requests=3)
    runs = [
        serving("native", 0, 100, [1.0, 1.0, 9.0]),
        serving("union8", 0, 200, [0.5, 0.5, 0.5]),
        serving("union8", 1, 900, [0.1, 0.1, 0.1]),
        serving("native", 1, 0, [], failure="late"),
        serving("native", 2, 50, [2.0, 2.0, 2.0]),
        serving("union8", 2, 150, [0.5, 0.5, 0.5]),
    ]
    (row,) = statistics.compare(settings, runs)
    union8, native = row["arms"]["union8"], row["arms"]["native"]
    assert union8["times_throughput"] == {"median": 2.5, "min": 2.0, "max": 3.0, "blocks": {0: 2.0, 2: 3.0}}
    assert union8["times_ttft"]["blocks"] == {0: 2.0, 2: 4.0}
    assert union8["input_throughput"]["blocks"] == {0: 200, 1: 900, 2: 150}
    assert (native["ttft_ms"]["requests"], native["ttft_ms"]["max"], native["ttft_ms"]["median"]) == (6, 9000, 2000)
    assert native["ttft_ms"]["mean"] == pytest.approx(17000 / 6)
    assert native["ttft_ms"]["p99"] == pytest.approx(8650)
    assert statistics.failures(runs) == ["native, block 2, 100 x 1: late"]
    assert statistics.idle_share(runs) == 0.5


def test_step3_share_takes_its_time_from_one_serving_and_the_total_from_others():
    settings = Settings("m", arms=("native",), prompts=(100,), concurrency=(1,), requests=2)
    timed = serving("native", 0, 1, [8.0, 8.0], timed=True, step3={"calls": 4, "tokens": 800, "seconds": 0.5})
    (row,) = statistics.step3_shares(settings, [serving("native", 0, 100, [1.0, 1.0]), timed])
    assert row == {
        "prompt": 100,
        "concurrency": 1,
        "arm": "native",
        "step3_ms": 250.0,
        "share": 0.25,
        "at_most": pytest.approx(4 / 3),
    }
    (row,) = statistics.step3_shares(settings, [timed])
    assert (row["share"], row["at_most"]) == (None, None)


def test_a_log():
    text = """
[2026-11-30 10:00:00 TP0] pageweaver timing: process 11 calls 4 tokens 400 step3 0.100000 s
[2026-11-30 10:00:00 TP1] pageweaver timing: process 12 calls 4 tokens 400 step3 0.300000 s
Triton autotuning for function _kernel,
with key as (1, 128, 'torch.bfloat16'),
finished after 1.20s,
best config selected: num_warps: 4, num_ctas: 1, num_stages: 3, maxnreg: None;
"""
    before = read_log(text)
    assert before.tuned == [
        {
            "kernel": "_kernel",
            "key": "(1, 128, 'torch.bfloat16')",
            "seconds": "1.20",
            "config": "num_warps: 4, num_ctas: 1, num_stages: 3, maxnreg: None",
        }
    ]
    later = "pageweaver timing: process 11 calls 8 tokens 900 step3 0.350000 s\n"
    later += "pageweaver timing: process 12 calls 8 tokens 900 step3 0.400000 s\n"
    spent = step3_between(before, read_log(text + later))
    assert (spent.calls, spent.tokens, spent.seconds) == (4, 500, pytest.approx(0.25))  # the slower rank
    assert step3_between(before, read_log(text)) is None
    assert step3_between(read_log(""), read_log("")) is None
    assert Step3Time() == Step3Time(0, 0, 0.0)


def test_server_command():
    given = ("--kv-cache-dtype=fp8_e5m2", "--attention-backend", "fa3", "--prefill-attention-backend", "pageweaver")
    command = launch.server_command(Settings("m", server_arguments=(*given, "--disable-radix-cache")), 1234)
    assert command[command.index("--port") + 1] == "1234"
    assert command.count("--disable-radix-cache") == 1
    assert command.count("--attention-backend") == 1
    assert "--kv-cache-dtype" not in command
    launch.check_server_arguments(given)


@pytest.mark.parametrize(("file", "found"), [("benchmark/serving.py", 0), ("bench_serving.py", 1), ("other.py", None)])
def test_which_client(tmp_path, monkeypatch, file, found):
    (tmp_path / file).parent.mkdir(exist_ok=True)
    (tmp_path / file).write_text("")
    spec = importlib.machinery.ModuleSpec("sglang", None, is_package=True)
    spec.submodule_search_locations.append(str(tmp_path))
    monkeypatch.setattr(launch.importlib.util, "find_spec", lambda name: spec)
    if found is None:
        with pytest.raises(AbError, match="has no benchmark client"):
            launch.find_client()
    else:
        assert launch.find_client() == launch.CLIENT_MODULES[found]


def test_no_sglang(monkeypatch):
    monkeypatch.setattr(launch.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(AbError, match="SGLang is not installed in this Python"):
        launch.find_client()


@pytest.mark.sglang
@pytest.mark.skipif(importlib.util.find_spec("sglang") is None, reason="SGLang is not installed")
def test_client_arguments_are_known_to_the_installed_sglang():
    """Every option passed is one that the client's source adds to its parser, in whichever version is importable."""
    root = Path(importlib.util.find_spec("sglang").submodule_search_locations[0])
    assert launch.find_client() == "sglang.benchmark.serving"
    text = "".join((root / "benchmark" / "serving.py").read_text().split())
    settings = Settings("m", client_arguments=("--tag", "x"))
    command = launch.client_arguments(
        settings, Cell(100, 1), port=1, seed=1, output=settings.folder / "x.jsonl", requests=3
    )
    options = [word for word in command if word.startswith("--")]
    assert "--tag" in options
    for option in options:
        assert f'"{option}"' in text, option
    body = json.loads(command[command.index("--extra-request-body") + 1])
    assert body["sampling_params"]["max_new_tokens"] == 1


CLIENT_ON_CPU = """
import sys, types
# torchvision's CPU wheel registers operators that a CPU build of torch lacks; `datasets` is for datasets from the net.
sys.modules["torchvision._meta_registrations"] = types.ModuleType("torchvision._meta_registrations")
sys.modules["datasets"] = datasets = types.ModuleType("datasets")
datasets.load_dataset = None
from sglang.benchmark.serving import cli_main
if __name__ == "__main__":
    cli_main()
"""


class Recorder(BaseHTTPRequestHandler):
    """Answers SGLang's client as a server would, one token per prompt, and keeps what came."""

    bodies: ClassVar[list[dict]] = []

    def log_message(self, *_):
        pass

    def _answer(self, text: str) -> None:
        self.send_response(200)
        self.end_headers()
        self.wfile.write(text.encode())

    def do_GET(self):
        self._answer(json.dumps({"data": [{"id": "m"}], "internal_states": [{}]}))

    def do_POST(self):
        self.bodies.append(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
        token = {"text": "a", "meta_info": {"completion_tokens": 1, "prompt_tokens": 1, "cached_tokens": 0}}
        self._answer(f"data: {json.dumps(token)}\n\ndata: [DONE]\n\n")


@pytest.mark.sglang
@pytest.mark.skipif(importlib.util.find_spec("sglang") is None, reason="SGLang is not installed")
def test_the_kept_client_sends_what_its_command_line_sends(tmp_path, monkeypatch):
    """SGLang's own client: the second load of a kept process against a process of its own."""
    vocabulary = {"[UNK]": 0} | {f"t{number}": number for number in range(1, 500)}
    model = {"type": "WordLevel", "vocab": vocabulary, "unk_token": "[UNK]"}
    (tmp_path / "tokenizer.json").write_text(json.dumps({"version": "1.0", "added_tokens": [], "model": model}))
    (tmp_path / "tokenizer_config.json").write_text('{"tokenizer_class": "PreTrainedTokenizerFast"}')
    module = "client_on_cpu"
    (tmp_path / f"{module}.py").write_text(CLIENT_ON_CPU)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")]))
    server = ThreadingHTTPServer(("127.0.0.1", 0), Recorder)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    settings, output = Settings(str(tmp_path)), tmp_path / "out.jsonl"
    kept = Worker(module, tmp_path / "worker.log", start_timeout=1800)
    alone = ProcessPerLoad((sys.executable, "-m", module), "tested")

    def load(client, seed):
        Recorder.bodies.clear()
        arguments = launch.client_arguments(
            settings, Cell(40, 1), port=server.server_port, seed=seed, output=output, requests=3
        )
        result = client.run(arguments, tmp_path / "log", output, 1800)
        assert read_result(result, 3, 1)["failure"] is None
        return list(Recorder.bodies), set(result), result["input_lens"]

    try:
        assert kept.unusable() is None
        first = load(kept, 1)
        second = load(kept, 2)
        assert second == load(alone, 2)
    finally:
        kept.close()
        server.shutdown()
        server.server_close()
    assert [len(body["input_ids"]) for body in first[0]] == [40] * 3
    assert first[0] != second[0]


def test_a_wrong_option_makes_no_folder(tmp_path, capsys):
    assert main(["ab", "--model", str(tmp_path / "none"), "--out", str(tmp_path / "out")]) == 2
    assert not (tmp_path / "out").exists()
    assert capsys.readouterr().err.startswith("pageweaver ab: --model")


def test_server_arguments_without_dashes_are_explained(capsys):
    with pytest.raises(SystemExit, match="2"):
        main(["ab", "--model", "m", "--tp-size", "8"])
    error = capsys.readouterr().err
    assert "pageweaver ab: unrecognized arguments: --tp-size; arguments for the servers come after --" in error
