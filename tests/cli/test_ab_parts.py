"""Parts of `pageweaver ab` that need no process: order, statistics, what is read from the client and from a log."""

import importlib.machinery
import importlib.util
import json
from pathlib import Path

import pytest

from pageweaver_sglang.cli import main
from pageweaver_sglang.serving_ab import launch, statistics
from pageweaver_sglang.serving_ab.client import ClientError, read_result, run_client, serving_seconds
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
        ("echo what happened; sleep 60", "was not done after 0 s\nwhat happened"),
    ):
        with pytest.raises(ClientError, match=message):
            run_client(["sh", "-c", script], tmp_path / "log", output, timeout=0.4)


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
    command = launch.client_command(settings, Cell(100, 1), port=1, seed=1, output=settings.folder / "x.jsonl")
    options = [word for word in command if word.startswith("--")]
    assert "--tag" in options
    for option in options:
        assert f'"{option}"' in text, option
    body = json.loads(command[command.index("--extra-request-body") + 1])
    assert body["sampling_params"]["max_new_tokens"] == 1


def test_a_wrong_option_makes_no_folder(tmp_path, capsys):
    assert main(["ab", "--model", str(tmp_path / "none"), "--out", str(tmp_path / "out")]) == 2
    assert not (tmp_path / "out").exists()
    assert capsys.readouterr().err.startswith("pageweaver ab: --model")


def test_server_arguments_without_dashes_are_explained(capsys):
    with pytest.raises(SystemExit, match="2"):
        main(["ab", "--model", "m", "--tp-size", "8"])
    error = capsys.readouterr().err
    assert "pageweaver ab: unrecognized arguments: --tp-size; arguments for the servers come after --" in error
