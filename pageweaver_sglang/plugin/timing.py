"""How long Step 3 takes on the GPU, in every mode: the setting ``timing``, or while ``pageweaver ab`` asks for it."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable
from typing import Any, Protocol

import torch

logger = logging.getLogger(__name__)


class Clock(Protocol):
    """Marks moments in a stream of work."""

    def mark(self) -> Any:
        """A mark at the end of the work given so far."""

    def seconds(self, start: Any, end: Any) -> float:
        """Seconds between two marks; waits until the work before ``end`` is done."""


class EventClock:
    """Marks are CUDA events on the current stream."""

    def mark(self) -> torch.cuda.Event:
        """Record an event."""
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def seconds(self, start: torch.cuda.Event, end: torch.cuda.Event) -> float:
        """Time between the events. Synchronises with ``end``."""
        end.synchronize()
        return start.elapsed_time(end) / 1e3


class HostClock:
    """For CPU tensors: work is done when a call returns."""

    def mark(self) -> float:
        """Seconds of a monotonic clock."""
        return time.perf_counter()

    def seconds(self, start: float, end: float) -> float:
        """The difference."""
        return end - start


class Step3Timer:
    """Sums the time that Step 3's calls take and logs the sums once per forward pass, with the last sparse layer.

    The host waits for the GPU there, once per forward pass and not per call, so that a reader of the log knows
    everything when a request has been answered. That costs some overlap: throughput is to be measured without it.
    Calls during the capture of a CUDA graph are not timed.

    Args:
        clock: how to take the time.
        observe: takes the seconds of every forward pass; None drops them.
    """

    def __init__(self, clock: Clock, observe: Callable[[float], None] | None = None):
        self._clock = clock
        self._observe = observe
        self._open: list[tuple[Any, Any]] = []
        self._last_layer = -1
        self.calls = 0
        self.tokens = 0
        self.seconds = 0.0

    def time(self, layer_id: int, tokens: int, work: Callable[[], torch.Tensor]) -> torch.Tensor:
        """Run one call and note its time.

        Args:
            layer_id: the model layer.
            tokens: query tokens of the call.
            work: the call.

        Returns:
            What ``work`` returns; exceptions pass through, untimed.
        """
        if isinstance(self._clock, EventClock) and torch.cuda.is_current_stream_capturing():
            return work()
        start = self._clock.mark()
        out = work()
        self._open.append((start, self._clock.mark()))
        self.calls += 1
        self.tokens += tokens
        # Layers of a forward pass come in ascending order; which is the last one shows in the first pass.
        if layer_id >= self._last_layer:
            self._last_layer = layer_id
            self._close()
        return out

    def _close(self) -> None:
        seconds = sum(self._clock.seconds(start, end) for start, end in self._open)
        self._open.clear()
        self.seconds += seconds
        if self._observe is not None:
            self._observe(seconds)
        logger.info(
            "pageweaver timing: process %d calls %d tokens %d step3 %.6f s",
            os.getpid(),
            self.calls,
            self.tokens,
            self.seconds,
        )


def make_timer(device: torch.device, observe: Callable[[float], None] | None = None) -> Step3Timer:
    """A timer for calls on ``device``."""
    return Step3Timer(EventClock() if device.type == "cuda" else HostClock(), observe)
