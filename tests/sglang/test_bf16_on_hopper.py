"""A BF16 KV cache on Hopper, in SGLang: ``stream`` and ``portable`` serve it, ``union8`` leaves it to SGLang."""

from __future__ import annotations

import re

import pytest


@pytest.fixture(scope="module")
def outcome(run_program):
    return run_program("bf16_on_hopper", PAGEWEAVER_DENSE_BACKEND="torch_native")


@pytest.mark.parametrize(("engine", "group_size"), [("stream", 8), ("portable", 4)])
@pytest.mark.parametrize("precision", ["fp8", "high"])
def test_both_serve_and_agree_with_sglangs_step3(outcome, engine, group_size, precision):
    result = outcome.result[engine if precision == "fp8" else f"{engine} high"]
    assert (result["engine"], result["precision"]) == (engine, precision)
    assert result["attended"] == [[engine, group_size, False]] * 2  # engine, queries per union, value tiles
    assert result["same"]
    assert result["calls_by_arm"] == {"pageweaver": 2}
    assert result["fallbacks"] == {}
    assert 0 < result["nrms"] < 0.005


def test_the_papers_kernel_leaves_it_to_sglang(outcome):
    result = outcome.result["union8"]
    assert result["engine"] == "union8"
    assert result["attended"] == []
    assert result["calls_by_arm"] == {"native": 2}
    assert result["fallbacks"] == {"k_cache must be float8_e4m3fn, got bfloat16": 2}
    assert result["nrms"] == 0


def test_value_tiles_are_for_pools_that_stream_reads_them_of(outcome):
    tiles = {case: result["pools with value tiles"] for case, result in outcome.result.items()}
    assert tiles.pop("fp8") == 1
    assert tiles == dict.fromkeys(["stream", "stream high", "portable", "portable high", "union8"], 0)
    assert outcome.result["fp8"]["engine"] == "stream"


def test_the_log_says_what_serves(outcome):
    lines = [line for line in outcome.output.splitlines() if line.startswith("pageweaver STATUS")]
    said = [re.search(r"engine (\w+), precision ([\w ]+), .* value tiles (none|\d+ MiB),", line) for line in lines]
    in_16_bits = [(engine, "16 bits") for engine in ("stream", "stream", "portable", "portable", "union8")]
    assert [words.groups()[:2] for words in said] == [*in_16_bits, ("stream", "fp8")]
    assert [words[3] == "none" for words in said] == [True] * 5 + [False]
    assert "serves instead of" not in outcome.output
