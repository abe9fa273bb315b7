"""What a workload's choices promise: recorded counts, small cases by hand, verdicts, pictures."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

import pageweaver_sglang as pw
from pageweaver_sglang import inspection, inspection_plots
from pageweaver_sglang.synthetic import Recipe, make_workload

DATA = Path(__file__).parents[1] / "data"
STATS = json.loads((DATA / "stats.json").read_text())


def small(rows, lengths=None, kv_heads=1, page_size=128, context=20):
    lengths = lengths or [len(rows)]
    prefix = context * page_size
    picks = torch.tensor(rows, dtype=torch.int32)[None].repeat(kv_heads, 1, 1)
    bounds = torch.tensor([0, *lengths], dtype=torch.int32).cumsum(0).to(torch.int32)
    prefixes = torch.full((len(lengths),), prefix, dtype=torch.int32)
    chunks = torch.tensor(lengths, dtype=torch.int32)
    return pw.Workload(picks, bounds, prefixes, prefixes + chunks, page_size)


@pytest.mark.parametrize("name", ["ctx8k", "packed"])
def test_recorded_counts_are_met(name):
    found, recorded = inspection.inspect_workload(pw.load_workload(DATA / f"{name}.npz")), STATS[name]
    counts = {key: (order.visits, order.rounds) for key, order in found.orders.items()}
    assert counts == {
        "original": (recorded["orig8"], recorded["orig4"]),
        "w64": (recorded["w64_8"], recorded["w64_C4"]),
        "w128": (recorded["w128_8"], recorded["w128_C4"]),
    }
    assert found.edges == recorded["edges"]
    assert [list(request) for request in found.requests] == recorded["requests"]
    assert found.orders["original"].reuse == pytest.approx(recorded["edges"] / recorded["orig8"])
    for order in found.orders.values():
        assert order.guarded_visits <= found.orders["original"].visits


def test_guarded_visits_are_those_of_the_guard():
    workload = make_workload(Recipe(requests=((700, 20_000), (90, 500)), noise=0.3, kv_heads=2, streak=20, types=2))
    found = inspection.inspect_workload(workload)
    w = workload
    for name, window in (("w64", 64), ("w128", 128)):
        perm = pw.regroup(w.topk_idx, w.cu_seqlens, w.prefix_lens, window=window, guard="window")
        plan = pw.prepare_unions(w.topk_idx, perm, w.cu_seqlens, w.seq_lens, w.prefix_lens, window=window)
        assert found.orders[name].guarded_visits == plan.visits()


def test_overlap_by_hand():
    # {1,2} and {2,3}: 1/3; {2,3} and {2,3}: 1; then a new request; {5} and nothing: 0; nothing twice: left out.
    rows = [[1, 2], [2, 3], [3, 2], [5, 5], [-1, -1], [-1, -1]]
    found = inspection.inspect_workload(small(rows, [3, 3], kv_heads=2))
    assert found.pairs == 6
    assert found.overlap == pytest.approx((1 / 3 + 1 + 0) / 3)


def test_window_counts_add_up():
    workload = pw.load_workload(DATA / "packed.npz")
    plan = inspection.plan_of(workload, 128)
    visits, members = inspection.window_counts(workload, plan, 128)
    assert visits.shape[1] == sum(-(-chunk // 128) for chunk, _ in STATS["packed"]["requests"])
    assert int(visits.sum()) == plan.visits()
    assert int(members.sum()) == STATS["packed"]["edges"]
    assert members[0, 0] == 1  # a request of one query, which picked its own page


def test_padding_rows_count_nowhere():
    plain = small([[1, 2], [2, 3]])
    padded = pw.Workload(
        torch.cat([plain.topk_idx, torch.ones(1, 5, 2, dtype=torch.int32)], dim=1),
        plain.cu_seqlens,
        plain.prefix_lens,
        plain.seq_lens,
        128,
    )
    assert inspection.inspect_workload(padded) == inspection.inspect_workload(plain)


VERDICTS = {
    # Queries of two kinds in turn: groups of one kind each halve the visits.
    "regroup": [[0, 1] if query % 2 else [2, 3] for query in range(128)],
    # All alike: nothing left to gain.
    "share, don't regroup": [[0, 1]] * 128,
    # Nobody shares.
    "little shared": [[2 * query, 2 * query + 1] for query in range(128)],
    "nothing picked": [[-1, -1]] * 128,
}


@pytest.mark.parametrize("expected", VERDICTS)
def test_verdicts(expected):
    word, sentence = inspection.verdict(inspection.inspect_workload(small(VERDICTS[expected], context=300)))
    assert word == expected
    assert expected == "nothing picked" or any(character.isdigit() for character in sentence)


def made(saved64: float, saved128: float) -> inspection.Inspection:
    def order(saved):
        return inspection.Order(0, 0, 2.0, round(1000 * (1 - saved)))

    orders = {"original": inspection.Order(1000, 1500, 2.0, 1000), "w64": order(saved64), "w128": order(saved128)}
    return inspection.Inspection(None, ((2000, 0),), 2000, 1, 2000, 0.5, 1999, orders)


@pytest.mark.parametrize(
    ("saved64", "saved128", "word", "advice"),
    [
        (0.01, 0.015, "share, don't regroup", "1.5% of the page visits (below 2%)"),
        (0.01, 0.05, "small gain", "5.0% of the page visits (2% to 8%)"),
        (0.03, 0.081, "regroup", "try 128"),
        (0.115, 0.12, "regroup", "try 64"),
        (0.12, 0.1, "regroup", "try 64"),
    ],
)
def test_thresholds(saved64, saved128, word, advice):
    found, sentence = inspection.verdict(made(saved64, saved128))
    assert found == word
    assert advice in sentence


def test_together():
    first, second = (inspection.inspect_workload(small(VERDICTS[name], context=300)) for name in list(VERDICTS)[:2])
    both = inspection.combine([first, second])
    for name in inspection.ORDERS:
        assert both.orders[name].visits == first.orders[name].visits + second.orders[name].visits
    assert both.orders["original"].reuse == pytest.approx(both.edges / both.orders["original"].visits)
    assert both.overlap == pytest.approx((first.overlap + second.overlap) / 2)
    assert inspection.combine([first]) == first
    json.dumps(both.as_dict())


def test_selection_shares():
    workload = small([[0, 1], [1, 5]], context=9)
    shares = inspection_plots.selection_shares(workload, 0)
    assert shares.shape == (10, 2)
    assert shares.nonzero().tolist() == [[0, 0], [1, 0], [1, 1], [5, 1]]
    binned = inspection_plots.selection_shares(pw.load_workload(DATA / "ctx64k_a.npz"), 0)
    assert binned.shape[0] <= 800
    assert binned.shape[1] <= 1600
    assert 0 < float(binned.max()) <= 1


@pytest.mark.skipif(inspection_plots.why_not() is not None, reason="needs matplotlib")
def test_pictures(tmp_path):
    workload = make_workload(Recipe(requests=((300, 3000), (40, 0)), kv_heads=2))
    inspection_plots.plot_workload(workload, tmp_path / "one.png", title="one", head=1)
    assert (tmp_path / "one.png").read_bytes().startswith(b"\x89PNG")
    with pytest.raises(ValueError, match=r"--head must be in 0\.\.1, got 2"):
        inspection_plots.plot_workload(workload, tmp_path / "two.png", title="two", head=2)
