"""Exact visits and rounds of the recorded workloads."""

from __future__ import annotations

import json
import time
from functools import cache
from pathlib import Path

import pytest

import pageweaver_sglang as pw

DATA = Path(__file__).parents[1] / "data"
STATS = json.loads((DATA / "stats.json").read_text())


@cache
def load(name):
    return pw.load_workload(DATA / f"{name}.npz")


def unions(name, perm, **options):
    w = load(name)
    return pw.prepare_unions(w.topk_idx, perm, w.cu_seqlens, w.seq_lens, w.prefix_lens, **options)


@pytest.mark.parametrize("name", STATS)
def test_original_order(name):
    expected = STATS[name]
    eights, fours = unions(name, None), unions(name, None, group_size=4)
    assert eights.visits() == expected["orig8"]
    assert fours.visits() == fours.rounds() == eights.rounds() == expected["orig4"]
    assert eights.reuse() == pytest.approx(expected["edges"] / expected["orig8"], rel=1e-12)


@pytest.mark.parametrize("window", [64, 128])
@pytest.mark.parametrize("name", STATS)
def test_regrouped(name, window):
    w, expected = load(name), STATS[name]
    plan = unions(name, pw.regroup(w.topk_idx, w.cu_seqlens, w.prefix_lens, window=window), window=window)
    assert plan.visits() == expected[f"w{window}_8"]
    assert plan.rounds() == expected[f"w{window}_C4"]
    assert plan.reuse() == pytest.approx(expected["edges"] / plan.visits(), rel=1e-12)


@pytest.mark.parametrize("name", STATS)
def test_requests_of_the_file(name):
    w = load(name)
    assert [list(pair) for pair in zip(w.cu_seqlens.diff().tolist(), w.prefix_lens.tolist(), strict=True)] == STATS[
        name
    ]["requests"]


def test_64k_takes_no_more_than_seconds():
    """Half a second of computing: the bound tells whole-tensor operations from loops over queries, on any machine."""
    w = load("ctx64k_a")
    start = time.process_time()
    perm = pw.regroup(w.topk_idx, w.cu_seqlens, w.prefix_lens)
    unions("ctx64k_a", perm)
    assert time.process_time() - start < 20
