"""The prefill role of PD disaggregation, chunk by chunk, on the CPU."""

from __future__ import annotations

import pytest


@pytest.fixture(scope="module")
def result(run_program):
    return run_program("pd_prefill", PAGEWEAVER_DENSE_BACKEND="torch_native", PAGEWEAVER_ON_ERROR="raise").result


def test_served_in_that_role(result):
    assert result["role"] == "prefill"
    assert result["served"] == {"pageweaver": 6}
    assert result["nrms"] < 0.005


def test_the_pool_holds_what_sglang_alone_would_have_written(result):
    assert result["same pool"] == [True] * 8  # K, V of three layers, index keys of the sparse ones
