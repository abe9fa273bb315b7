"""Batches of every shape that SGLang makes, against SGLang's own Step 3 on the CPU or against the uncut batch.

Which report in the projects around it a test answers is listed in docs/upstream.md.
"""

from __future__ import annotations

import pytest


@pytest.fixture(scope="module")
def outcome(run_program):
    return run_program("deployments", PAGEWEAVER_DENSE_BACKEND="torch_native", PAGEWEAVER_ON_ERROR="raise")


@pytest.fixture
def result(outcome):
    return outcome.result


@pytest.mark.parametrize("case", ["mixed chunk", "radix hits", "tails", "one token", "scales"])
def test_agrees_with_sglangs_step3(result, case):
    assert result[case]["served"] == {"pageweaver": 1}
    assert result[case]["finite"]
    assert result[case]["skipped"] == 0
    assert result[case]["nrms"] < 0.005


def test_scales_are_not_ignored(result):
    assert result["scales matter"] > 0.1


def test_repeats_are_identical(result):
    assert result["repeatable"]


@pytest.mark.parametrize("case", ["uninitialised picks", "wide picks", "stale host lengths"])
def test_does_not_matter(result, case):
    assert result[case]


def test_chunks_of_any_size_give_the_rows_of_the_whole_prefill(result):
    assert result["chunks"] == [True] * 5


def test_two_batches_of_one_backend_do_not_mix(result):
    assert result["two batches, layer by layer"] == [True] * 4
    assert result["a pass for each batch"]


def test_sglangs_batches_tell_when_they_are_gone(result):
    """What the layers of a pass share is given back then."""
    assert result["weak references to SGLang's batches"]


@pytest.mark.parametrize(("order", "picked"), [("one after the other", 2), ("in turn", 4)])
def test_layers_that_share_their_picks(result, order, picked):
    case = f"shared picks, {order}"
    if case not in result:
        pytest.skip("this SGLang does not share picks between layers")
    assert result[case] == {"same": [True] * 4, "picked": picked}


def test_two_batch_overlap(result):
    assert result["two batches at once"] == [True] * 4
    assert result["two backends, own counts"] == [{"1": 3, "2": 3}] * 2
    assert result["two backends, one switch"]


@pytest.mark.parametrize(
    ("case", "reason"),
    [("hisparse", "HiSparse slot remapping (loc_mapping)"), ("fp8 queries", "q must be bfloat16, got float8_e4m3fn")],
)
def test_falls_back(result, case, reason):
    if case not in result:
        pytest.skip("this SGLang has no HiSparse for MiniMax-M3")
    assert result[case]["served"]["native"] == 1
    assert result[case]["fallbacks"][reason] == 1
    assert result[case]["nrms"] == 0


def test_target_verify_without_lengths_is_handed_over_as_it_is(result):
    assert result["target verify"] == 7
    assert result["target verify is untouched"]
    assert result["target verify is not counted"]


def test_a_step3_that_was_taken_away_is_told_once(outcome):
    assert outcome.result["missed"] == {}
    told = "a prefill did not come to PageWeaver: sglang.srt.layers.attention.minimax_sparse_ops.minimax_sparse."
    assert outcome.output.count(told) == 1
