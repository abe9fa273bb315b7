"""Between the pieces of SGLang's prefill CUDA graphs: captured for one batch, replayed for others, rows padded."""

from __future__ import annotations

import pytest


@pytest.fixture(scope="module")
def result(run_program):
    return run_program("prefill_graphs", PAGEWEAVER_DENSE_BACKEND="torch_native", PAGEWEAVER_ON_ERROR="raise").result


def test_every_graph_but_those_left_out_runs_sparse_attention_between_its_pieces(result):
    """``tc_piecewise`` through its operator, in one trace; ``breakable`` by a break for each sparse layer."""
    assert result["graph"] in ("tc_piecewise", "breakable")
    assert result.get("breaks", 2) == 2


@pytest.mark.parametrize("batch", ["whole", "part", "one token", "the other request"])
def test_replays_give_the_rows_of_an_eager_prefill_and_zeros_behind(result, batch):
    assert result["replays"][batch] == {"same": [True, True], "padding": [True, True], "rows": [16, 16]}


def test_an_idle_rank_gets_zeros(result):
    if result["graph"] != "breakable":
        pytest.skip("a rank without requests gets a made-up one")
    assert result["replays"]["idle rank"] == {"same": [True, True], "padding": [True, True], "rows": [16, 16]}


def test_pageweaver_serves_every_replay(result):
    assert result["served"] == {"1": 5, "2": 5}  # the capture's batch, and four others
    assert result["fallbacks"] == {}


def test_nothing_of_pageweaver_is_captured(result):
    assert result["captured"] == 0
