"""Step 3 timed: sums, when they are logged, and that the log is what ``pageweaver ab`` reads."""

from __future__ import annotations

import logging

import pytest
import torch

from pageweaver_sglang.plugin import timing
from pageweaver_sglang.serving_ab.serverlog import read_log


class FakeClock:
    """Every call takes one second more than the one before; reading a time counts as waiting."""

    def __init__(self):
        self.marks, self.reads = 0, 0

    def mark(self):
        self.marks += 1
        return self.marks

    def seconds(self, start, end):
        self.reads += 1
        assert end == start + 1
        return end / 2


def forward(timer, layers, tokens):
    for layer in layers:
        timer.time(layer, tokens, lambda: torch.zeros(tokens))


def test_sums_are_logged_once_per_forward_pass(caplog):
    caplog.set_level(logging.INFO)
    clock = FakeClock()
    timer = timing.Step3Timer(clock)
    forward(timer, (2, 3, 5), 10)
    assert len(caplog.records) == 3  # which layer is the last one shows in the first pass
    caplog.clear()
    forward(timer, (2, 3), 7)
    assert (clock.reads, len(caplog.records)) == (3, 0)  # the host doesn't wait in between
    forward(timer, (5,), 7)
    assert (clock.reads, len(caplog.records)) == (6, 1)
    (step3,) = read_log(caplog.text).step3.values()
    assert (step3.calls, step3.tokens, step3.seconds) == (6, 51, 1 + 2 + 3 + 4 + 5 + 6)


def test_a_failing_call_is_not_counted():
    timer = timing.Step3Timer(timing.HostClock())
    with pytest.raises(ZeroDivisionError):
        timer.time(1, 5, lambda: 1 / 0)
    forward(timer, (1,), 5)
    assert (timer.calls, timer.tokens) == (1, 5)
    assert timer.seconds > 0


def test_every_mode_through_sglangs_backend(run_program):
    outcome = run_program("timing", PAGEWEAVER_DENSE_BACKEND="torch_native", PAGEWEAVER_TIMING="true")
    assert outcome.result == {"calls": 4, "tokens": 24, "same": True}
    (step3,) = read_log(outcome.output).step3.values()
    assert (step3.calls, step3.tokens) == (4, 24)
    assert step3.seconds > 0
