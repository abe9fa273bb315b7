"""How arms are timed against each other: one protocol for the demo and for every benchmark.

* An *arm* is one way to compute Step 3. ``prepare`` builds what a server would have beforehand (kernels, workspace,
  tuned configurations); ``call`` is one whole call on one of the prepared input sets, everything that depends on the
  indices included.
* Arms rotate inside one run: every round takes all of them, each round in another order (shuffled, the same in every
  run). So clocks that drift hit all alike, and no arm always follows the same one: under a heavy arm the GPU lowers its
  clock, which the next one still feels (up to 4 % on an H200).
* A round times ``calls`` consecutive calls of one arm with one pair of CUDA events. The calls walk through the input
  sets. With one set the caches are warm; with enough sets (:func:`sets_for_cold_cache`) no set is left in L2 when its
  turn comes.
* ``eager`` calls the arm from Python, ``graph`` replays CUDA Graphs of the same calls, one per input set.
* Every round's figure is kept; the median is reported together with the smallest and the largest. Nothing is dropped.
"""

from __future__ import annotations

import contextlib
import random
import statistics
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    import torch

    from .inputs import Step3Inputs

Mode = Literal["eager", "graph"]


class ArmUnavailable(RuntimeError):
    """This machine can't run the arm; the message says why, in a sentence that ends up in the report."""


class DeviceLost(RuntimeError):
    """The GPU refuses everything since ``arm`` failed: this process can't measure any more."""

    def __init__(self, arm: str, reason: str) -> None:
        super().__init__(f"{arm}: {reason}")
        self.arm, self.reason = arm, reason


class Arm(ABC):
    """One way to compute Step 3 (or one stage of it).

    ``max_nrms`` is the NRMS against float64 on normally distributed inputs above which ``pageweaver bench`` refuses to
    time the arm; the default is for FP8 arithmetic. ``cache_element_bytes`` is the size of an element of K and V as the
    arm reads them.
    """

    name: str
    description: str
    max_nrms: float = 0.05
    cache_element_bytes: int = 1

    @abstractmethod
    def prepare(self, sets: Sequence[Step3Inputs]) -> None:
        """Get ready for calls on ``sets`` (not timed). Raises :class:`ArmUnavailable`."""

    @abstractmethod
    def call(self, index: int) -> torch.Tensor:
        """One whole call on input set ``index`` on the current stream, without a device synchronisation."""

    def notes(self) -> dict[str, Any]:
        """Remarks for the report, once prepared: what was chosen, what was done outside the call and its time."""
        return {}

    @abstractmethod
    def release(self) -> None:
        """Drop what :meth:`prepare` made."""


@dataclass(frozen=True)
class Protocol:
    """Sizes of a measurement. ``rounds`` should be odd, so that the median is a round that was measured."""

    rounds: int = 11
    calls: int = 20
    warmup: int = 3

    def __post_init__(self) -> None:
        for name, least in (("rounds", 1), ("calls", 1), ("warmup", 0)):
            if (value := getattr(self, name)) < least:
                raise ValueError(f"Protocol: {name} must be >= {least}, got {value}")


@dataclass(frozen=True)
class Timing:
    """Milliseconds per call of one arm: one figure per round, in the order measured."""

    rounds_ms: tuple[float, ...]

    @property
    def median(self) -> float:
        """Median over the rounds."""
        return statistics.median(self.rounds_ms)

    @property
    def low(self) -> float:
        """Fastest round."""
        return min(self.rounds_ms)

    @property
    def high(self) -> float:
        """Slowest round."""
        return max(self.rounds_ms)

    def as_dict(self) -> dict[str, Any]:
        """For JSON: the three figures and every round."""
        return {"median_ms": self.median, "min_ms": self.low, "max_ms": self.high, "rounds_ms": list(self.rounds_ms)}


class CudaClock:
    """Times work on the current CUDA stream with a pair of events."""

    def __init__(self) -> None:
        import torch

        self._torch = torch

    def time(self, work: Callable[[], None]) -> float:
        """Run ``work`` and return its time on the device in milliseconds."""
        start, end = (self._torch.cuda.Event(enable_timing=True) for _ in range(2))
        self._torch.cuda.synchronize()
        start.record()
        work()
        end.record()
        end.synchronize()
        return start.elapsed_time(end)

    def synchronize(self) -> None:
        """Wait for the device."""
        self._torch.cuda.synchronize()


class HostClock:
    """Times work that is finished when it returns (CPU tensors)."""

    def time(self, work: Callable[[], None]) -> float:
        """Run ``work`` and return its wall-clock time in milliseconds."""
        start = time.perf_counter()
        work()
        return (time.perf_counter() - start) * 1e3

    def synchronize(self) -> None:
        """Nothing to wait for."""


def first_line(error: Exception) -> str:
    """An exception in one line, for a report."""
    return f"{type(error).__name__}: {error}".strip().splitlines()[0]


def raise_if_lost(arm: str, error: Exception) -> None:
    """Raise :class:`DeviceLost` when the GPU answers nothing but errors since ``arm`` failed with ``error``.

    An access out of bounds, say, is no error of one call: everything after it fails too, and would be blamed for it.
    """
    import torch

    if not torch.cuda.is_initialized():
        return
    try:
        torch.cuda.synchronize()
    except Exception:  # CUDA errors come as several classes
        raise DeviceLost(arm, first_line(error)) from error


def sets_for_cold_cache(kv_bytes: int, l2_bytes: int) -> int:
    """How many input sets to rotate so that a set's K and V are gone from L2 when its turn comes again.

    The K/V of the *other* sets alone exceed twice the L2, whatever Q and the output add.
    """
    return 2 * l2_bytes // max(kv_bytes, 1) + 2


def capture(arm: Arm, sets: int) -> list[Callable[[], None]]:
    """CUDA Graphs of ``arm``'s call on each set, as replay functions. Raises what the arm or the capture raises.

    The graphs share a pool of memory: they are replayed one after the other, so that what an arm allocates in its call
    lies in the same place for every set, as it does when the arm is called.
    """
    import torch

    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for index in range(sets):
            arm.call(index)
    torch.cuda.current_stream().wait_stream(stream)
    torch.cuda.synchronize()

    pool, replays = torch.cuda.graph_pool_handle(), []
    # `with torch.cuda.graph(...)` would return all cached memory to the driver before every single capture, and leave
    # its stream in place when a capture fails.
    with torch.cuda.stream(stream):
        for index in range(sets):
            graph = torch.cuda.CUDAGraph()
            graph.capture_begin(pool=pool)
            try:
                arm.call(index)
            except Exception:
                with contextlib.suppress(RuntimeError):  # that the capture is invalid, now
                    graph.capture_end()
                raise
            graph.capture_end()
            replays.append(graph.replay)
    return replays


def round_order(names: Sequence[str], number: int) -> list[str]:
    """``names`` in the order of round ``number``."""
    return random.Random(number).sample(list(names), len(names))


def measure(
    arms: Sequence[Arm],
    sets: int,
    protocol: Protocol,
    *,
    mode: Mode = "eager",
    clock: CudaClock | HostClock | None = None,
    on_round: Callable[[str], None] | None = None,
    on_begin: Callable[[str], None] | None = None,
) -> tuple[dict[str, Timing], dict[str, str]]:
    """Time prepared ``arms`` against each other.

    Args:
        arms: prepared arms, with different names.
        sets: how many of the prepared input sets to rotate through.
        protocol: how many rounds and calls.
        mode: ``eager`` or ``graph``.
        clock: how to take the time; CUDA events by default.
        on_round: called with the arm's name after each of its rounds (for a progress bar).
        on_begin: called with the arm's name before it does anything (to know whom to blame for a crash).

    Returns:
        timings by arm name, and the reason by name for arms that failed: one that fails, even in its last round, drops
        out without figures, and the others go on.

    Raises:
        DeviceLost: an arm left the GPU unusable.
    """
    clock = clock or CudaClock()
    begin = on_begin or (lambda name: None)
    failed: dict[str, str] = {}
    calls: dict[str, Callable[[int], object]] = {}

    def drop(name: str, error: Exception) -> None:
        raise_if_lost(name, error)
        calls.pop(name, None)
        failed[name] = first_line(error)

    for arm in arms:
        begin(arm.name)
        try:
            if mode == "graph":
                replays = capture(arm, sets)
                calls[arm.name] = lambda index, replays=replays: replays[index]()
            else:
                calls[arm.name] = arm.call
            for index in range(protocol.warmup):
                calls[arm.name](index % sets)
            clock.synchronize()
        except Exception as error:  # an arm is anybody's code: whatever it raises, the others go on
            drop(arm.name, error)

    names = list(calls)
    rounds: dict[str, list[float]] = {name: [] for name in names}
    for number in range(protocol.rounds):
        for name in round_order(names, number):
            if name not in calls:
                continue

            def work(call: Callable[[int], object] = calls[name], first: int = number * protocol.calls) -> None:
                for step in range(first, first + protocol.calls):
                    call(step % sets)

            begin(name)
            try:
                rounds[name].append(clock.time(work) / protocol.calls)
            except Exception as error:  # as above
                drop(name, error)
            if on_round is not None:
                on_round(name)
    return {name: Timing(tuple(rounds[name])) for name in calls}, failed
