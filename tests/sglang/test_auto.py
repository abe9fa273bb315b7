"""Mode auto in SGLang's own backend: what SGLang knows of a batch on the host reaches the decisions."""

from __future__ import annotations

import pytest


@pytest.fixture(scope="module")
def outcome(run_program):
    return run_program("auto", PAGEWEAVER_DENSE_BACKEND="torch_native", PAGEWEAVER_MODE="auto")


def test_decisions_by_layer_and_by_the_batchs_lengths(outcome):
    assert outcome.result["keys"] == [[2, (20).bit_length()], [1, (20).bit_length()]]
    assert outcome.result["decisions"] == {"first": 3, "original": 1}
    assert outcome.result["small"] == {"small": 1}


def test_calls_count_by_what_was_done(outcome):
    assert outcome.result["stats"]["calls_by_arm"] == {"pageweaver": 3, "union8": 1}
    assert outcome.result["stats"]["fallbacks"] == {}
    assert 0 < outcome.result["visits"]["regrouped"] < outcome.result["visits"]["original"]


def test_outputs_do_not_depend_on_decisions(outcome):
    # The second one is of another layer, with K and V of its own.
    assert outcome.result["same"] == [False, True, True]
    assert outcome.result["same in mode"] == {"union8": True, "pageweaver": True}


def test_the_status_line_says_auto(outcome):
    assert "pageweaver STATUS: mode auto, engine stream, " in outcome.output
