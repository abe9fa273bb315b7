"""Decisions from made-up figures, without any regrouping."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch

import pageweaver_sglang as pw
from pageweaver_sglang.auto import history as auto
from pageweaver_sglang.auto import model, readback
from pageweaver_sglang.auto.history import History
from pageweaver_sglang.capture.snapshot import HostLengths
from tests.generators import make_case

ROWS = 16384
GAINS, LOSES = 0.7, 0.1
"""Visits saved per row: as on ctx64k_a, and as on ctx64k_flat."""


def picks(tokens=ROWS, kv_heads=1, topk=16):
    return torch.empty(kv_heads, tokens, topk, dtype=torch.int32)


def lengths(tokens=ROWS, prefix=49152):
    return HostLengths((prefix,), (tokens,))


def call(history, saved_per_row, layer=0, tokens=ROWS, prefix=49152, topk_idx=None, known=True):
    """One call that saves so much; the decision."""
    topk_idx = picks(tokens) if topk_idx is None else topk_idx
    decision = history.decide(layer, topk_idx, lengths(tokens, prefix) if known else None)
    if decision.measurement is not None:
        assert decision.regroup
        rows = topk_idx.shape[0] * topk_idx.shape[1]
        decision.measurement.visits += torch.tensor([6 * rows, round((6 - saved_per_row) * rows)])
        decision.measurement.send()
    return decision


def words(decisions):
    return [decision.reason + ("*" if decision.measurement is not None else "") for decision in decisions]


def test_a_key_that_gains():
    history = History(pw.Config())
    decisions = [call(history, GAINS) for _ in range(20)]
    assert words(decisions[:4]) == ["first*", "first", "regroup", "regroup"]
    assert all(decision.regroup for decision in decisions)
    measured = [number for number, decision in enumerate(decisions) if decision.measurement is not None]
    assert measured == [0, auto.MEASURE_EVERY, 2 * auto.MEASURE_EVERY]
    assert decisions[-1].gain_us == pytest.approx(model.gain_us(ROWS, GAINS, window=64, engine="stream"), rel=1e-3)
    assert history.visits == {"original": 3 * 6 * ROWS, "regrouped": 3 * round((6 - GAINS) * ROWS)}


def test_a_key_that_loses_is_probed():
    history = History(pw.Config())
    decisions = [call(history, LOSES) for _ in range(60)]
    assert words(decisions[:4]) == ["first*", "first", "original", "original"]
    probes = [number for number, decision in enumerate(decisions) if decision.reason == "probe"]
    assert all(decisions[number].regroup and decisions[number].measurement is not None for number in probes)
    apart = probes[1] - probes[0]
    assert {b - a for a, b in pairwise(probes)} == {apart}
    # What a probe costs, of what the calls between two of them take.
    assert 10 <= apart <= 32
    assert model.cost_us(ROWS, 64) <= auto.PROBE_SHARE * apart * ROWS * model.NS_PER_ROW / 1000


def test_small_calls_are_probed_for_the_same_share_of_their_time():
    history = History(pw.Config())
    tokens = 512
    decisions = [call(history, LOSES, tokens=tokens) for _ in range(1000)]
    probes = [number for number, decision in enumerate(decisions) if decision.reason == "probe"]
    apart = probes[1] - probes[0]
    assert model.cost_us(tokens, 64) <= auto.PROBE_SHARE * apart * tokens * model.NS_PER_ROW / 1000
    assert apart < 500


def test_a_probe_changes_the_decision_and_a_measurement_changes_it_back():
    history = History(pw.Config())
    for _ in range(10):
        last = call(history, LOSES)
    assert not last.regroup
    changed = next(number for number in range(200) if call(history, 2.0).reason == "regroup")
    assert changed < 40
    back = next(number for number in range(200) if call(history, -1.0).reason == "original")
    assert back < 40


@pytest.mark.parametrize("known", [True, False])
def test_calls_that_cannot_gain_keep_their_order_without_history(known):
    history = History(pw.Config())
    decision = call(history, 14, tokens=150, known=known)
    assert (decision.regroup, decision.reason) == (False, "small")
    assert not history._keys
    assert call(history, 14, tokens=400, known=known).reason == "first"


def test_queries_that_nothing_can_be_done_for_do_not_count():
    config = pw.Config(overflow="original", capacity=100)
    history, topk_idx = History(config), picks(2000)
    for prefixes, chunks in (
        ((0,), (2000,)),  # 16 pages at most: every query picks all that it sees
        ((100 * 128,), (2000,)),  # past the capacity
        ((5000,) * 250, (8,) * 250),  # one group a request
    ):
        assert history.decide(0, topk_idx, HostLengths(prefixes, chunks)).reason == "small"
    assert history.decide(0, topk_idx, HostLengths((1000,), (2000,))).reason == "first"
    assert History(pw.Config()).decide(0, topk_idx, HostLengths((100 * 128,), (2000,))).reason == "first"
    # Without lengths all may gain.
    assert history.decide(0, topk_idx).reason == "first"


def test_small_calls_decide_by_what_large_ones_saved():
    history = History(pw.Config())
    for _ in range(3):
        call(history, GAINS)
    assert call(history, GAINS).reason == "regroup"
    small = call(history, GAINS, tokens=1000, prefix=64500)
    assert (small.reason, small.regroup) == ("original", False)
    assert small.gain_us == pytest.approx(model.gain_us(1000, GAINS, window=64, engine="stream"), rel=1e-3)


def test_layers_and_contexts_have_histories_of_their_own():
    history = History(pw.Config())
    for _ in range(3):
        call(history, LOSES, layer=3)
    assert not call(history, LOSES, layer=3).regroup
    assert call(history, LOSES, layer=4).reason == "first"
    assert call(history, LOSES, layer=3, prefix=16384).reason == "first"
    assert call(history, LOSES, layer=3, prefix=49152 + 4096).reason == "original"
    assert call(history, LOSES, layer=3, known=False).reason == "first"


def test_rows_are_queries_times_kv_heads():
    history = History(pw.Config())
    for _ in range(3):
        decision = call(history, GAINS, topk_idx=picks(kv_heads=4))
    assert decision.gain_us == pytest.approx(model.gain_us(4 * ROWS, GAINS, window=64, engine="stream"), rel=1e-3)


@pytest.mark.parametrize("tokens", [1000, ROWS])
def test_few_heads_count_as_the_groups_that_their_calls_get(tokens):
    """With 8 heads: groups of 16, of which a visit saved is worth less, unless the call is small (132 SMs)."""
    history, union = History(pw.Config(), heads_per_kv_head=8), 16 if tokens == ROWS else 8
    for _ in range(3):
        decision = call(history, GAINS, tokens=tokens)
    gain = model.gain_us(tokens, GAINS, window=64, engine="stream", union=union)
    assert decision.gain_us == pytest.approx(gain, rel=1e-3)
    assert model.worth_us(1000, "stream", 16) == pytest.approx(2.45)
    assert model.worth_us(1000, "union8", 16) == model.worth_us(1000, "union8")  # stream's alone


@pytest.mark.parametrize(("capability", "page_size"), [((8, 0), 128), ((12, 0), 128), ((9, 0), 64)])
def test_the_engine_that_serves_counts_and_not_the_one_asked_for(monkeypatch, capability, page_size):
    """Other GPUs and pages are portable's whatever the setting says, and its visits are worth more than stream's."""
    monkeypatch.setattr(auto.support, "capability_of", lambda device: capability)
    gains = {}
    for engine in ("stream", "portable"):
        history = History(pw.Config(engine=engine), page_size=page_size, heads_per_kv_head=8)
        for _ in range(3):
            gains[engine] = call(history, GAINS).gain_us
    assert gains["stream"] == gains["portable"]
    on_hopper = History(pw.Config(), heads_per_kv_head=8)
    monkeypatch.undo()
    for _ in range(3):
        gains["hopper"] = call(on_hopper, GAINS).gain_us
    assert gains["hopper"] < gains["portable"]


def test_few_heads_are_probed_less_often():
    """Their calls take less time, of which regrouping may take the same share."""
    apart = {}
    for heads, union in ((16, 8), (8, 16)):
        history = History(pw.Config(), heads_per_kv_head=heads)
        decisions = [call(history, LOSES) for _ in range(60)]
        probes = [number for number, decision in enumerate(decisions) if decision.reason == "probe"]
        apart[heads] = probes[1] - probes[0]
        assert model.cost_us(ROWS, 64) <= auto.PROBE_SHARE * apart[heads] * model.time_us(ROWS, "stream", union)
    assert apart[8] > apart[16]


def test_the_same_calls_get_the_same_decisions():
    def run(seed):
        generator, history, made = torch.Generator().manual_seed(seed), History(pw.Config()), []
        for _ in range(400):
            layer, size, saved = (int(torch.randint(high, (), generator=generator)) for high in (3, 4, 3))
            made.append(str(call(history, (0.05, 0.4, 1.0)[saved], layer=layer, tokens=(100, 900, 4096, ROWS)[size])))
        return made

    assert run(1) == run(1)
    assert run(1) != run(2)


def test_memory_is_bounded():
    history = History(pw.Config(), max_keys=8)
    for layer in range(20):
        for _ in range(3):
            call(history, LOSES, layer=layer)
    assert len(history._keys) == 8
    assert call(history, LOSES, layer=19).reason == "original"
    call(history, LOSES, layer=12)
    assert call(history, LOSES, layer=0).reason == "first"  # forgotten; now 13 is
    assert call(history, LOSES, layer=12).reason == "original"
    assert call(history, LOSES, layer=13).reason == "first"
    for key in history._keys.values():
        assert len(key.measured) <= auto.REMEMBERED
    for _ in range(100):
        call(history, GAINS)
    assert len(next(reversed(history._keys.values())).measured) == auto.REMEMBERED


def test_only_the_last_measurements_count():
    history = History(pw.Config())
    for _ in range(100):
        call(history, 3.0)
    for _ in range(auto.MEASURE_EVERY * (auto.REMEMBERED + 1)):
        last = call(history, GAINS)
    assert last.gain_us == pytest.approx(model.gain_us(ROWS, GAINS, window=64, engine="stream"), rel=1e-3)


class Late(readback.Readback):
    """A device that is behind: nothing arrives until told."""

    arrived = False

    def collect(self):
        if self.arrived:
            super().collect()


def test_nothing_waits_for_a_measurement_that_is_late():
    history = History(pw.Config())
    history._readback = late = Late(torch.device("cpu"), slots=2)
    assert words(call(history, LOSES) for _ in range(30)) == ["first*"] + ["first"] * 29
    late.arrived = True
    assert call(history, LOSES).reason == "original"


def test_no_more_measurements_under_way_than_there_are_counters():
    history = History(pw.Config())
    history._readback = late = Late(torch.device("cpu"), slots=2)
    assert words(call(history, LOSES, layer=layer) for layer in range(3)) == ["first*", "first*", "first"]
    late.arrived = True
    assert words(call(history, LOSES, layer=layer) for layer in range(3)) == ["first", "first", "first*"]


def test_a_call_that_fails_is_measured_again():
    history = History(pw.Config())
    failed = history.decide(0, picks(), lengths())
    failed.measurement.visits += torch.tensor([1000, 3])  # and then an exception
    call(history, GAINS, layer=1)
    assert failed.measurement.lost
    assert words(call(history, GAINS) for _ in range(4)) == ["first", "first*", "first", "regroup"]
    assert history.visits == {"original": 6 * ROWS, "regrouped": round((6 - GAINS) * ROWS)}
    failed.measurement.send()  # too late: changes nothing
    assert words(call(history, LOSES, layer=1) for _ in range(3)) == ["first", "regroup", "regroup"]


def test_the_only_layer_is_measured_again_after_a_failed_call():
    """No call of another layer comes to notice the failure."""
    history = History(pw.Config())
    assert history.decide(0, picks(), lengths()).measurement is not None  # and then an exception
    assert words(call(history, LOSES) for _ in range(4)) == ["first", "first*", "first", "original"]


def test_visits_that_are_counted_only_grow():
    """They are a metric's counters, which refuse to shrink; without the guard regrouping can lose."""
    history, seen = History(pw.Config(guard="none")), []
    for _ in range(8):
        call(history, -1.0)
        seen.append(dict(history.visits))
    assert seen[-1] == {"original": 6 * ROWS, "regrouped": 7 * ROWS}
    assert all(after[kind] >= count for before, after in pairwise(seen) for kind, count in before.items())


@pytest.mark.parametrize(("engine", "group_size"), [("stream", 8), ("portable", 4)])
def test_the_reference_engine_counts_in_groups_of_the_engine(engine, group_size):
    case, config = make_case("packed", requests=((40, 3000),)), pw.Config(engine=engine, guard="none")
    measurement = readback.Readback(torch.device("cpu")).take()
    pw.sparse_prefill(*case.args(), config=config, decision=auto.Decision(True, "first", measurement=measurement))
    plan = pw.prepare_unions(case.topk_idx, None, *case.args()[6:], window=64, group_size=group_size)
    assert int(measurement.visits[0]) == plan.visits()


def test_counters_never_have_to_be_cleared():
    one = readback.Readback(torch.device("cpu"), slots=1)
    for visits in ([10, 7], [20, 20], [0, 0]):
        measurement = one.take()
        measurement.visits += torch.tensor(visits)
        measurement.send()
        one.collect()
        assert measurement.result == tuple(visits)


def test_calls_inside_and_outside_of_inference_mode():
    history = History(pw.Config())
    with torch.inference_mode():
        call(history, GAINS)
        call(history, GAINS)
    assert words(call(history, GAINS) for _ in range(8))[0] == "regroup"
    with torch.inference_mode():
        assert words(call(history, GAINS) for _ in range(8))[-1] == "regroup"
    assert history.visits["original"] == 2 * 6 * ROWS


def test_a_decision_in_words():
    history = History(pw.Config())
    said = [str(call(history, LOSES)) for _ in range(3)]
    gain = model.gain_us(ROWS, LOSES, window=64, engine="stream")
    assert said[0] == "regrouped (first, measured)"
    assert said[1] == "regrouped (first)"
    assert said[2].startswith(f"original order (original, expected gain {gain:.1f} us")
    assert str(call(history, LOSES, tokens=10)) == "original order (small)"


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"config": 3}, TypeError, r"History: config must be a pageweaver_sglang\.Config, got int 3"),
        ({"page_size": 0}, ValueError, "History: page_size must be an integer >= 1, got 0"),
        ({"heads_per_kv_head": 0}, ValueError, "History: heads_per_kv_head must be an integer >= 1, got 0"),
        ({"max_keys": 0}, ValueError, "History: max_keys must be an integer >= 1, got 0"),
    ],
)
def test_a_history_of_nonsense(arguments, error, message):
    with pytest.raises(error, match=f"^{message}$"):
        History(**{"config": pw.Config(), **arguments})


@pytest.mark.parametrize(
    ("topk_idx", "error"), [(picks().float(), TypeError), (picks()[0], ValueError), ("x", TypeError)]
)
def test_a_decision_about_nonsense(topk_idx, error):
    with pytest.raises(error, match=r"^History\.decide: topk_idx must be int32 \[kv_heads, tokens, k\], got "):
        History(pw.Config()).decide(0, topk_idx)
