"""PageWeaver's backend inside SGLang, on the CPU, against SGLang's own Triton Step 3 in Triton's interpreter."""

from __future__ import annotations

import re

import pytest


@pytest.fixture(scope="module")
def outcome(run_program):
    return run_program("end_to_end", PAGEWEAVER_DENSE_BACKEND="torch_native")


@pytest.mark.parametrize(
    ("case", "shape"),
    [
        ("one request", [9, 16, 128]),
        ("prefix", [6, 16, 128]),
        ("packed", [15, 16, 128]),
        ("two kv heads", [3, 32, 128]),
        ("fp8 cache", [6, 16, 128]),
        ("padded rows", [5, 16, 128]),
        ("SGLang's indexer", [5, 16, 128]),
    ],
)
def test_agrees_with_sglangs_step3(outcome, case, shape):
    result = outcome.result[case]
    assert result["shape"] == shape
    assert result["dtype"] == "torch.bfloat16"
    assert result["skipped"] == 0
    # bf16 probabilities and outputs on SGLang's side, float64 on ours
    assert result["nrms"] < 0.005
    assert result["max_error"] < 0.05


def test_padded_rows_are_zero(outcome):
    assert outcome.result["padded rows are zero"]


@pytest.mark.parametrize("case", ["unsorted", "holes"])
def test_order_and_holes_of_the_picked_pages_do_not_matter(outcome, case):
    assert outcome.result[case]["max_error"] == 0


def test_a_query_that_picked_nothing_gets_zeros(outcome):
    assert outcome.result["nothing picked"]


def test_every_sparse_layer_is_served_and_counted(outcome):
    assert outcome.result["layers"] == {
        "calls_by_arm": {"pageweaver": 3},
        "calls_by_layer": {"1": 2, "2": 1},
        "fallbacks": {},
    }
    assert "pageweaver calls: {1: 2, 2: 1} fallbacks: {}" in outcome.output


def test_verification_is_logged(outcome):
    assert 0 < outcome.result["verified"] < 0.005
    assert re.search(
        r"pageweaver verify: layer 2 call 2 tokens 2 requests 1 q_heads 16 kv_heads 1 nrms 0\.\d+% max error \S+ "
        r"cosine 0\.99",
        outcome.output,
    )


def test_backends(outcome):
    assert outcome.result["types"] == [
        "MiniMaxHybridAttnBackend",
        "PageWeaverSparseAttnBackend",
        "TorchNativeAttnBackend",
    ]
    assert outcome.result["dense layer"] == [2, 2048]


def test_target_verify_and_draft_models_stay_sglangs(outcome):
    assert outcome.result["target verify"]["after"] == outcome.result["target verify"]["before"]
    assert outcome.result["draft"] == "MiniMaxSparseAttnBackend"


def test_memory_for_value_tiles_is_reserved_when_the_backend_is_made(outcome):
    assert outcome.result["tiles"] == ["stream", True]
    assert outcome.result["no tiles"] == "union8"
    lines = [line for line in outcome.output.splitlines() if line.startswith("pageweaver STATUS")]
    assert re.search(r"engine stream, .* value tiles \d+ MiB, ", lines[-2])
    assert re.search(r"engine union8, .* value tiles none \(\d+ MiB not to be had\), ", lines[-1])
    assert outcome.output.count("engine union8 serves instead of stream") == 1


def test_status_line(outcome):
    lines = [line for line in outcome.output.splitlines() if line.startswith("pageweaver STATUS")]
    for words in (
        "mode pageweaver",
        "window 64",
        "guard window",
        "value tiles none",
        "TorchNativeAttnBackend",
        "page size 128",
        "sglang 0.5.",
    ):
        assert words in lines[0]
