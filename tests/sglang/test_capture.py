"""Calls recorded from SGLang's own backend: the file holds the call, and the reference engine replays it."""

from __future__ import annotations

import re

import pytest


@pytest.fixture(scope="module")
def outcome(run_program, tmp_path_factory):
    return run_program(
        "capture",
        PAGEWEAVER_DENSE_BACKEND="torch_native",
        PAGEWEAVER_CAPTURE_DIR=str(tmp_path_factory.mktemp("calls")),
        PAGEWEAVER_CAPTURE_LAYERS="1",
        PAGEWEAVER_CAPTURE_ACTIVATIONS="true",
    )


CASES = {
    "pageweaver": ([[6], [700], [706]], "torch.bfloat16"),
    "native": ([[6], [700], [706]], "torch.bfloat16"),
    "packed": ([[3, 10, 2], [700, 0, 2400], [703, 10, 2402]], "torch.float8_e4m3fn"),
    "packed native": ([[3, 3], [300, 0], [303, 3]], "torch.float8_e4m3fn"),
    "padded rows": ([[3], [130], [133]], "torch.bfloat16"),
}


@pytest.mark.parametrize("case", CASES)
def test_the_file_holds_the_call(outcome, case):
    result = outcome.result[case]
    requests, cache = CASES[case]
    assert result["requests"] == requests
    assert result["cache"] == cache
    assert result["layer"] == 1
    assert result["same picks"]
    assert result["same output"]
    (name,) = result["files"]  # layer 2 was not asked for
    assert re.fullmatch(r"layer001-call000001-rank0-pid\d+(-\d+)?\.npz", name)


@pytest.mark.parametrize("case", CASES)
def test_the_file_replays(outcome, case):
    """The reference engine served ``pageweaver`` here, so that its output is met exactly; SGLang's is BF16 inside."""
    result = outcome.result[case]
    native = case.endswith("native")
    assert set(result["by arm"]) == {"native" if native else "pageweaver"}
    assert result["nrms"] < 0.005
    assert native or result["max error"] == 0


def test_only_picked_pages_are_stored(outcome):
    # 6 + 1 + 19 pages in all; the last request has two queries that pick at most 16 of its 19 each.
    assert 6 + 1 < outcome.result["packed"]["stored pages"] <= 6 + 1 + 19


def test_nothing_is_recorded_without_a_folder(outcome):
    assert outcome.result["off"]


def test_an_unusable_folder_stops_the_server(outcome):
    error = outcome.result["bad folder"]
    assert error.startswith("BackendError: --attention-backend pageweaver: capture_dir: ")
    assert "cannot be written" in error


def test_the_status_line_says_where(outcome):
    assert re.search(r"pageweaver STATUS: .* capture \S+calls", outcome.output)
