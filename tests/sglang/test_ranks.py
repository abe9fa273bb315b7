"""One rank of a server on several GPUs: heads, padded and idle batches, against SGLang's own Step 3 on the CPU."""

from __future__ import annotations

import re

import pytest


@pytest.fixture(scope="module")
def outcome(run_program):
    return run_program("ranks", PAGEWEAVER_DENSE_BACKEND="torch_native")


@pytest.mark.parametrize(
    ("case", "index_heads"), [("tp1", 4), ("tp2", 2), ("tp4", 1), ("tp8", 1), ("tp16", 1), ("index heads", 2)]
)
def test_heads_of_a_rank(outcome, case, index_heads):
    result = outcome.result[case]
    assert result["picked"] == [index_heads, result["rows"], 16]
    assert result["arms"] == {"pageweaver": 1, "native": 1}
    assert result["nrms"] < 0.005
    assert result["logged"] == result["nrms"]


@pytest.mark.parametrize(
    ("case", "rows"),
    [("padded", 8), ("without new tokens", 5), ("last without new tokens", 5), ("decode as prefill", 8)],
)
def test_batches_of_dp_attention(outcome, case, rows):
    result = outcome.result[case]
    assert result["arms"] == {"pageweaver": 1, "native": 1}
    assert result["rows"] == rows
    assert result["padding_is_zero"]
    assert result["nrms"] < 0.005
    assert 0 < result["logged"] < 0.005


def test_padding_is_checked_where_a_call_is_verified(outcome):
    found = re.findall(r"pageweaver padding: layer 1 rows (\d+) not zero (\d+)", outcome.output)
    assert found == [("1", "0"), ("2", "0"), ("5", "0")]


def test_an_idle_rank_never_gets_to_step3(outcome):
    assert outcome.result["idle"] == {"shape": [0, 16, 128], "zero": True, "arms": {}}
    assert outcome.result["idle, padded"] == {"shape": [6, 16, 128], "zero": True, "arms": {}}


def test_which_heads_the_kernels_take(outcome):
    reasons = outcome.result["reasons"]
    for layout in ("tp4", "tp8", "tp16"):
        assert reasons[layout].startswith("q must be on a CUDA device")  # the last question: the shapes are covered
    assert reasons["index heads"] == "topk_idx must have 1 to 16 pages per query, got 32"
