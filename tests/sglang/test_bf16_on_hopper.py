"""A BF16 KV cache on Hopper, in SGLang: ``stream`` leaves it to ``portable``, ``union8`` leaves it to SGLang."""

from __future__ import annotations

import re

import pytest


@pytest.fixture(scope="module")
def outcome(run_program):
    return run_program("bf16_on_hopper", PAGEWEAVER_DENSE_BACKEND="torch_native")


@pytest.mark.parametrize("case", ["stream", "high"])
def test_portable_serves_and_agrees_with_sglangs_step3(outcome, case):
    result = outcome.result[case]
    assert result["engine"] == "portable"
    assert result["precision"] == ("high" if case == "high" else "fp8")
    assert result["attended"] == [["portable", 4, False]] * 2  # engine, queries per union, value tiles
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


def test_value_tiles_are_for_pools_that_stream_reads(outcome):
    tiles = {case: result["pools with value tiles"] for case, result in outcome.result.items()}
    assert tiles == {"stream": 0, "high": 0, "union8": 0, "fp8": 1}
    assert outcome.result["fp8"]["engine"] == "stream"


def test_the_log_names_the_engine_that_serves(outcome):
    lines = [line for line in outcome.output.splitlines() if line.startswith("pageweaver STATUS")]
    engines = [re.search(r"engine (\w+), .* value tiles (\w+)", line).groups() for line in lines]
    assert [engine for engine, _ in engines] == ["portable", "portable", "union8", "stream"]
    assert [tiles == "none" for _, tiles in engines] == [True, True, True, False]
    said = "pageweaver: engine portable serves instead of stream: KV cache bfloat16, head_dim 128, page size 128"
    assert outcome.output.count(said) == 2
