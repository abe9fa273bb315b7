"""Made selections: valid, repeatable, near the recorded workloads, and moved by their knobs as documented."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from pageweaver_sglang.inspection import plan_of
from pageweaver_sglang.reference.layout import page_counts, positions, support_sets
from pageweaver_sglang.synthetic import PRESETS, Recipe, make_workload, preset

STATS = json.loads((Path(__file__).parents[1] / "data" / "stats.json").read_text())
SMALL = Recipe(requests=((1536, 40_000),), seed=3)


def reuse(window=None, **changes) -> float:
    return plan_of(make_workload(replace(SMALL, **changes)), window).reuse()


def saving(**changes) -> float:
    workload = make_workload(replace(SMALL, **changes))
    return 1 - plan_of(workload, 128).visits() / plan_of(workload, None).visits()


@pytest.mark.parametrize(
    "recipe",
    [
        SMALL,
        replace(SMALL, kv_heads=3, requests=((1, 0), (130, 17), (50, 9000), (300, 0))),
        replace(SMALL, paired=True, types=40, local=0, hot=0, requests=((200, 100), (400, 8000))),
        replace(SMALL, page_size=16, k=5, hot=0, noise=1.0),
        replace(SMALL, k=1, hot=3, hot_share=1.0, drift=1.0),
        replace(SMALL, local=0, interleave="random", types=7, streak=5),
    ],
)
def test_choices_are_valid(recipe):
    w = make_workload(recipe)
    assert w.topk_idx.shape == (recipe.kv_heads, sum(n for n, _ in recipe.requests), recipe.k)
    assert [tuple(r) for r in zip(w.cu_seqlens.diff().tolist(), w.prefix_lens.tolist(), strict=True)] == list(
        recipe.requests
    )
    bounds, tokens = w.cu_seqlens.tolist(), w.topk_idx.shape[1]
    own = positions(bounds, tokens, w.prefix_lens) // w.page_size
    visible = own + 1
    supports = support_sets(w.topk_idx, page_counts(bounds, tokens, w.seq_lens, w.page_size))
    assert ((supports >= 0).sum(2) == visible.clamp(max=recipe.k)).all(), "as many distinct pages as can be seen"
    assert (w.topk_idx <= own[:, None]).all()
    shown = w.topk_idx.long().masked_fill(w.topk_idx < 0, 1 << 40)
    assert (shown.diff(dim=2) >= 0).all(), "ascending, -1 behind"
    if recipe.local:
        assert ((w.topk_idx == own[:, None]).sum(2) == 1).all()


def test_equal_recipes_give_equal_choices():
    first, again = make_workload(SMALL), make_workload(SMALL)
    assert torch.equal(first.topk_idx, again.topk_idx)
    assert not torch.equal(first.topk_idx, make_workload(replace(SMALL, seed=4)).topk_idx)
    heads = make_workload(replace(SMALL, kv_heads=2)).topk_idx
    assert torch.equal(heads[0], first.topk_idx[0])
    assert not torch.equal(heads[0], heads[1])


def test_the_choices_stay_the_same_over_versions():
    """A seed in a report must mean the same choices tomorrow."""
    w = make_workload(Recipe(requests=((3, 5000),), k=4, seed=7))
    assert w.topk_idx.tolist() == [[[15, 23, 25, 39], [2, 31, 33, 39], [2, 9, 33, 39]]]


@pytest.mark.parametrize("knob", ["drift", "noise"])
def test_drift_and_noise_lower_reuse(knob):
    values = [reuse(**{knob: value}) for value in (0.0, 0.05, 0.2, 0.8)]
    assert values == sorted(values, reverse=True)
    assert values[0] > 1.5 * values[-1]


def test_interleaved_types_lower_reuse_and_regrouping_wins_it_back():
    one, four = reuse(types=1, noise=0.05), reuse(types=4, noise=0.05)
    assert four < 0.7 * one
    assert reuse(128, types=4, noise=0.05) > 1.4 * four
    assert saving(types=4, noise=0.05) > saving(types=1, noise=0.05) + 0.2


def test_long_streaks_leave_little_to_regroup():
    assert saving(types=2, streak=64, noise=0.05) < 0.05 < saving(types=2, streak=1, noise=0.05)


def test_hot_pages_raise_reuse_when_most_queries_pick_them():
    assert reuse(hot=12, hot_share=0.95) > reuse(hot=0) > reuse(hot=12, hot_share=0.2)


def test_shorter_contexts_share_more():
    assert reuse(requests=((1536, 4000),)) > reuse(requests=((1536, 100_000),))


def shared_pairs(topk_idx: torch.Tensor) -> float:
    """Share of the picks whose page has the same queries as some other page: what pairing pages lives from."""
    pages = topk_idx.flatten().unique()
    pickers = torch.stack([(topk_idx == page).any(1) for page in pages.tolist()])
    alike = (pickers[:, None] == pickers[None]).all(2)
    return float(((alike.sum(1) > 1) * pickers.sum(1)).sum() / pickers.sum())


@pytest.mark.parametrize("name", ["page-pair-32k", "page-pair-64k"])
def test_page_pair_sets_favour_pairs_of_pages(name):
    length, prefix = PRESETS[name][1].requests[0]
    assert length + prefix == (32768 if "32k" in name else 65536)
    workload = make_workload(preset(name, requests=((1024, prefix),)))
    assert plan_of(workload, None).reuse() < 1.6, "neighbours share little"
    assert shared_pairs(workload.topk_idx[0]) > 0.9, "pages are picked in pairs"
    plain = make_workload(preset(name, requests=((1024, prefix),), paired=False))
    assert shared_pairs(plain.topk_idx[0]) < 0.1


@pytest.mark.parametrize(
    ("name", "recorded"),
    [("ctx64k", "ctx64k_a"), ("flat", "ctx64k_flat"), ("mixed", "ctx64k_mixed"), ("first-chunk", "ctx16k")],
)
def test_presets_come_near_the_recorded_workloads(name, recorded):
    recipe, expected = PRESETS[name][1], STATS[recorded]
    assert [list(request) for request in recipe.requests] == expected["requests"]
    workload = make_workload(recipe)
    original, regrouped = plan_of(workload, None), plan_of(workload, 128)
    assert original.visits() == pytest.approx(expected["orig8"], rel=0.07)
    assert regrouped.visits() == pytest.approx(expected["w128_8"], rel=0.07)
    assert original.rounds() == pytest.approx(expected["orig4"], rel=0.1)
    assert regrouped.rounds() == pytest.approx(expected["w128_C4"], rel=0.1)


def test_presets():
    assert preset("mixed", seed=5).seed == 5
    assert preset("packed").requests == tuple(map(tuple, STATS["packed"]["requests"]))
    with pytest.raises(ValueError, match="no preset 'big'; there are ctx64k, flat"):
        preset("big")


@pytest.mark.parametrize(
    ("changes", "kind", "message"),
    [
        ({"drift": 1.1}, ValueError, r"drift must be in 0\.\.1, got 1\.1"),
        ({"noise": -0.1}, ValueError, r"noise must be in 0\.\.1"),
        ({"noise": float("nan")}, ValueError, r"noise must be in 0\.\.1, got nan"),
        ({"hot_share": "a"}, TypeError, "hot_share must be a number, got 'a'"),
        ({"k": 0}, ValueError, r"k must be in 1\.\.1024, got 0"),
        ({"k": 2.0}, TypeError, "k must be an integer, got 2.0"),
        ({"seed": True}, TypeError, "seed must be an integer, got True"),
        ({"local": 17}, ValueError, r"local must be in 0\.\.16, got 17"),
        ({"types": 0}, ValueError, r"types must be in 1\.\."),
        ({"streak": 0}, ValueError, r"streak must be in 1\.\."),
        ({"interleave": "zigzag"}, ValueError, "interleave must be cyclic or random, got 'zigzag'"),
        ({"paired": 1}, TypeError, "paired must be True or False, got 1"),
        ({"requests": ()}, ValueError, "requests must name at least one request"),
        ({"requests": ((0, 5),)}, ValueError, "chunks >= 1 and prefixes >= 0, got 0:5"),
        ({"requests": ((5, -1),)}, ValueError, "chunks >= 1 and prefixes >= 0, got 5:-1"),
        ({"requests": ((5, 2**31),)}, ValueError, r"below 2\*\*31 tokens"),
        ({"requests": ((1 << 24, 0), (1, 0))}, ValueError, "at most 16777216 queries"),
        ({"requests": [(5, 1)]}, TypeError, "requests must be a tuple of"),
    ],
)
def test_wrong_values(changes, kind, message):
    with pytest.raises(kind, match=message):
        Recipe(**changes)
