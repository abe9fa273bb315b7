"""Seeds and the calls they mean."""

import collections

import numpy as np
import pytest
import torch

from pageweaver_sglang.fuzz import draw
from pageweaver_sglang.fuzz.build import Pools, build


@pytest.fixture(scope="module")
def calls():
    return [draw.draw_call(seed) for seed in range(3000)]


def test_a_seed_is_a_call():
    one, other = draw.draw_call(7), draw.draw_call(7)
    for name, value in vars(one).items():
        again = getattr(other, name)
        if isinstance(value, np.ndarray):
            assert np.array_equal(value, again), name
        elif name == "pages":
            assert all(np.array_equal(a, b) for a, b in zip(value, again, strict=True))
        else:
            assert value == again, name
    assert not np.array_equal(one.lengths, draw.draw_call(8).lengths)


def test_sizes_stay_within_what_is_promised(calls):
    assert max(call.pool_pages for call in calls) <= draw.MAX_PAGES
    assert min(call.pool_pages for call in calls) == 4
    assert max(int(call.lengths.sum()) for call in calls) == draw.MAX_TOKENS
    assert max(int(call.pages[-1].max(initial=0)) for call in calls) < draw.MAX_PAGES
    for call in calls:
        assert call.columns >= call.sequences.max()
        used = np.concatenate(call.pages)
        assert len(set(used.tolist())) == len(used), "no page belongs to two requests"
        assert [len(pages) for pages in call.pages] == (-(-call.sequences // call.page_size)).tolist()
        # The chunks' own pages, one more where a prefix ends inside a page.
        least = int((-(-call.lengths // call.page_size) + 1).sum())
        assert int(call.lengths.sum()) * call.kv_heads * max(0, len(used) - least) <= draw.LARGEST


def test_everything_occurs(calls):
    counts = collections.defaultdict(collections.Counter)
    for call in calls:
        for feature in call.features:
            dimension, _, value = feature.partition("=")
            counts[dimension][value] += 1
    expected = {
        "engine": 5, "heads per KV head": 6, "head dim": 2, "KV cache": 2,
        "mode": 3, "window": 2, "guard": 2, "overflow": 2, "capacity": 2, "KV heads": 4, "k": 16,
        "page size": 2, "requests": 5, "tokens": 7, "pages": 5, "chunks": 5, "prefixes": 3, "ids": 8, "sequence": 2,
        "padding": 2, "contents": 5, "foreign cells": 4, "q": 2, "caches": 3, "sm_scale": 2, "k_scale": 3,
        "v_scale": 5, "slot_ids": 2, "output": 3, "groups": 4, "value tiles": 3,
    }  # fmt: skip
    assert {dimension: len(values) for dimension, values in counts.items()} == expected
    assert sum(call.twin for call in calls) > 200
    assert sum(call.orders for call in calls) > 100
    assert sum(call.invalid is not None for call in calls) > 30
    assert any(call.cross_check for call in calls)
    ids = np.concatenate([call.topk_idx.ravel() for call in calls])
    assert ids.min() == draw.INT32_MIN
    assert ids.max() == draw.INT32_MAX


def test_workspaces_have_every_size_that_the_engine_takes(calls):
    drawn = collections.defaultdict(set)
    for call in calls:
        drawn[call.variant, call.shape.ratio <= 8].add(call.group_size)
    few = {(variant, True): {8, 16} for variant in ("stream", "high", "bf16")}
    many = {(variant, False): {8} for variant in ("stream", "high", "bf16", "union8")}
    portable = {("portable", True): {8, 16}, ("portable", False): {4}}  # one for each number of heads
    assert drawn == {**few, **many, **portable, ("union8", True): {8}}


def test_cells_of_nobody_hold_garbage_and_others_do_not():
    pools = Pools("cpu")
    seen = collections.Counter()
    for seed in range(60):
        call = draw.draw_call(seed, largest=600)
        tensors = build(call, pools)
        arguments = tensors.arguments
        mine = torch.zeros(call.pool_pages * call.page_size, dtype=torch.bool)
        for row, length in zip(call.rows.tolist(), call.sequences.tolist(), strict=True):
            cells = arguments["req_to_token"][row, :length].long()
            assert not bool(mine[cells].any())
            mine[cells] = True
        for name in ("k_cache", "v_cache"):
            cache = arguments[name].float()
            garbage = {"NaN": float("nan"), "-NaN": float("nan"), "448": 448.0, "0": 0.0}[call.garbage]
            torch.testing.assert_close(cache[~mine], torch.full_like(cache[~mine], garbage), equal_nan=True)
            assert not bool(cache[mine].isnan().any())
        assert bool(arguments["q"].isfinite().all())
        seen[call.cache_layout, call.shape.cache_dtype] += 1
    assert len(seen) == 6
