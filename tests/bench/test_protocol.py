"""The timing protocol with fake arms and a fake clock: what gets called, in which order, and what is kept."""

import collections

import pytest

from pageweaver_sglang.bench.protocol import (
    Arm,
    DeviceLost,
    HostClock,
    Protocol,
    Timing,
    measure,
    round_order,
    sets_for_cold_cache,
)


class Recorder(Arm):
    description = "notes its calls"

    def __init__(self, name, calls, error=None):
        self.name, self.calls, self.error = name, calls, error

    def prepare(self, sets):
        pass

    def call(self, index):
        if self.error:
            raise RuntimeError(self.error)
        self.calls.append((self.name, index))

    def release(self):
        pass


class Counter:
    """A clock by which every piece of work takes 1 ms longer than the one before."""

    def __init__(self):
        self.now = 0

    def time(self, work):
        work()
        self.now += 1
        return self.now

    def synchronize(self):
        pass


def test_arms_rotate_and_inputs_too():
    calls = []
    arms = [Recorder(name, calls) for name in "ABC"]
    timings, failed = measure(arms, 2, Protocol(rounds=3, calls=3, warmup=0), clock=Counter())
    assert failed == {}
    order = [name for name, _ in calls[::3]]
    assert order == [name for number in range(3) for name in round_order("ABC", number)]
    assert [index for name, index in calls if name == "A"] == [0, 1, 0, 1, 0, 1, 0, 1, 0]
    turns = [place + 1 for place, name in enumerate(order) if name == "A"]
    assert timings["A"].rounds_ms == pytest.approx([turn / 3 for turn in turns])


def test_no_arm_has_a_place_or_a_neighbour_of_its_own():
    names = [f"arm{i}" for i in range(20)]
    orders = [round_order(names, number) for number in range(11)]
    assert orders == [round_order(names, number) for number in range(11)], "the same in every run"
    for order in orders:
        assert sorted(order) == sorted(names)
    for name in names:
        before = collections.Counter(order[order.index(name) - 1] for order in orders)
        assert max(before.values()) <= 4
        assert len({order.index(name) for order in orders}) >= 6


def test_every_round_is_kept():
    timing = Timing((3.0, 1.0, 2.0, 50.0, 2.5))
    assert (timing.median, timing.low, timing.high) == (2.5, 1.0, 50.0)
    assert timing.as_dict()["rounds_ms"] == [3.0, 1.0, 2.0, 50.0, 2.5]


def test_an_arm_that_fails_drops_out():
    calls, seen = [], []
    arms = [Recorder("good", calls), Recorder("bad", calls, "no such kernel\nmore text")]
    timings, failed = measure(arms, 1, Protocol(3, 2, 1), clock=HostClock(), on_round=seen.append)
    assert list(timings) == ["good"]
    assert failed == {"bad": "RuntimeError: no such kernel"}
    assert seen == ["good"] * 3
    assert len(calls) == 1 + 3 * 2


def test_no_arms():
    assert measure([], 1, Protocol(), clock=HostClock()) == ({}, {})


@pytest.mark.parametrize("sizes", [{"rounds": 0}, {"calls": 0}, {"warmup": -1}])
def test_protocol_refuses(sizes):
    with pytest.raises(ValueError, match=next(iter(sizes))):
        Protocol(**sizes)


def test_other_sets_exceed_twice_the_l2():
    for kv_bytes in (1, 16_492_544, 200_000_000):
        sets = sets_for_cold_cache(kv_bytes, 60_000_000)
        assert (sets - 1) * kv_bytes > 2 * 60_000_000


def test_an_arm_that_fails_in_a_late_round_loses_its_figures_only():
    calls = []
    bad = Recorder("bad", [])
    bad.call = lambda index: calls.append(index) if len(calls) < 5 else 1 / 0
    timings, failed = measure([Recorder("good", []), bad], 1, Protocol(3, 2, 1), clock=HostClock())
    assert failed == {"bad": "ZeroDivisionError: division by zero"}
    assert list(timings) == ["good"]
    assert len(timings["good"].rounds_ms) == 3


def test_whoever_begins_is_named_before():
    begun = []
    arms = [Recorder("A", begun), Recorder("B", begun)]
    measure(arms, 1, Protocol(1, 1, 0), clock=HostClock(), on_begin=begun.append)
    first, second = round_order("AB", 0)
    assert begun == ["A", "B", first, (first, 0), second, (second, 0)]


def test_after_a_lost_device_nothing_is_measured(monkeypatch):
    import torch

    def lost():
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    arms = [Recorder("bad", [], "CUDA error: an illegal memory access was encountered"), Recorder("good", [])]
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "synchronize", lost)
    with pytest.raises(DeviceLost, match="bad: RuntimeError: CUDA error") as caught:
        measure(arms, 1, Protocol(1, 1, 0), clock=HostClock())
    assert caught.value.arm == "bad"
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    assert list(measure(arms, 1, Protocol(1, 1, 0), clock=HostClock())[0]) == ["good"]
