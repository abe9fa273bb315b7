"""Many calls in several processes that share a device; what they found, for people and as JSON."""

from __future__ import annotations

import collections
import multiprocessing
import queue
import signal
import time
import traceback
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from typing import Any

from .draw import LARGEST

BLOCK = 64
"""Calls that a process makes before it tells of them; consecutive seeds."""
_MOST_FAILURES = 50
"""A campaign ends when so many calls have failed: each is made again to be explained."""


@dataclass(frozen=True)
class Settings:
    """What to run.

    Attributes:
        seed: of the first call; the others follow.
        calls: how many.
        jobs: processes.
        device: ``cuda`` or ``cpu``.
        largest: see :func:`.draw.draw_call`.
        variants: likewise; None for all that run on the device.
        batch: calls between two looks at what the device has found; 1 shows which call breaks the device.
        seconds: stop after so long even with calls left; None: never.
        patience: seconds without word from any process after which the campaign gives up.
    """

    seed: int = 0
    calls: int = 100_000
    jobs: int = 8
    device: str = "cuda"
    largest: int = LARGEST
    variants: tuple[str, ...] | None = None
    batch: int = 32
    seconds: float | None = None
    patience: float = 600.0


@dataclass
class Failure:
    """A call that went wrong, or (``last_seed``) a run of calls one of which did."""

    seed: int
    problems: list[str]
    last_seed: int | None = None


@dataclass
class Tally:
    """What a number of calls gave; tallies add up."""

    calls: int = 0
    features: collections.Counter[str] = field(default_factory=collections.Counter)
    failures: list[Failure] = field(default_factory=list)
    largest: dict[str, float] = field(default_factory=dict)
    """Largest error of a row in units of its bound, by engine and by what Q and K are like."""

    def add(self, other: Tally) -> None:
        """Count another tally's calls too."""
        self.calls += other.calls
        self.features += other.features
        self.failures += other.failures
        for kind, ratio in other.largest.items():
            self.largest[kind] = max(ratio, self.largest.get(kind, 0.0))


class DeviceLost(Exception):
    """The process can't use its device any more; ``failure`` says since when."""

    def __init__(self, failure: Failure) -> None:
        super().__init__(failure)
        self.failure = failure


def run_block(trials: Any, first: int, count: int, batch: int, thorough: bool) -> Tally:
    """Make the calls of ``count`` seeds from ``first`` on; the first of them ``thorough``.

    Raises :class:`DeviceLost` when the device failed.
    """
    import torch

    tally = Tally()
    pending: list[tuple[int, Any, Any]] = []

    def judge() -> None:
        """Look at what the device has found in the calls since the last look."""
        figures = [
            torch.stack([v.wrong.double(), v.ratio, (v.wrong > 0 if v.different is None else v.different).double()])
            for _, _, v in pending
        ]
        for (seed, call, verdict), (wrong, ratio, different) in zip(
            pending, torch.stack(figures).tolist() if figures else [], strict=True
        ):
            tally.calls += 1
            tally.features.update((*call.features, *verdict.features))
            kind = f"{call.variant}, {call.style}"
            tally.largest[kind] = max(tally.largest.get(kind, 0.0), ratio)
            if wrong or different or verdict.problems:
                seen = [f"{int(wrong)} rows beyond their bound"] if wrong else []
                seen += (
                    ["the engines' outputs differ in some bits"] if different and verdict.different is not None else []
                )
                alone = trials.explain(seed)
                words = [f"alone: {word}" for word in alone] or ["alone, in fresh buffers: nothing wrong"]
                tally.failures.append(Failure(seed, [*seen, *verdict.problems, *words]))
        pending.clear()

    for seed in range(first, first + count):
        try:
            pending.append((seed, *trials.run(seed, thorough=thorough and seed == first)))
            if len(pending) == batch or seed == first + count - 1:
                judge()
        except Exception as error:
            words = "".join(traceback.format_exception_only(error)).strip()
            since = pending[0][0] if pending else seed
            if trials.device.type == "cuda" and not _usable():
                raise DeviceLost(Failure(since, [f"the device failed: {words}"], last_seed=seed)) from error
            tally.calls += 1
            tally.failures.append(Failure(seed, [f"raised {words}", *traceback.format_exc().splitlines()[-6:]]))
            judge()
    return tally


def _usable() -> bool:
    """Whether CUDA still works in this process."""
    import torch

    try:
        torch.cuda.synchronize()
    except Exception:
        return False
    return True


def _work(number: int, jobs: int, settings: Settings, taken: Any, messages: Any) -> None:
    """Take blocks of seeds until none is left, and tell of each; process ``number`` of ``jobs``."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent ends the processes
    try:
        import torch

        from .trial import Trials

        torch.set_num_threads(1)
        trials = Trials(settings.device, largest=settings.largest, variants=settings.variants)
        if settings.calls > BLOCK:
            trials.compile(number, jobs)
        messages.put(("ready", number, None))
        first_block = True
        while True:
            with taken.get_lock():
                block = taken.value
                taken.value += 1
            first, count = settings.seed + block * BLOCK, min(BLOCK, settings.calls - block * BLOCK)
            if count <= 0:
                break
            messages.put(("begins", number, (first, count)))
            messages.put(("tally", number, run_block(trials, first, count, settings.batch, first_block)))
            first_block = False
        messages.put(("done", number, None))
    except DeviceLost as lost:
        messages.put(("lost", number, lost.failure))
    except Exception:
        messages.put(("broken", number, traceback.format_exc()))


def run(settings: Settings, on_progress: Callable[[Tally], None] = lambda _: None) -> tuple[Tally, dict[str, Any]]:
    """Run a campaign; ``on_progress`` gets the sum so far after every block.

    Returns:
        the sum, and the times: ``seconds`` from the first process's being ready to the end, ``start_seconds`` before.
    """
    context = multiprocessing.get_context("spawn")
    messages, taken = context.Queue(), context.Value("q", 0)
    jobs = max(1, min(settings.jobs, -(-settings.calls // BLOCK)))
    processes = [
        context.Process(target=_work, args=(number, jobs, settings, taken, messages), daemon=True)
        for number in range(jobs)
    ]
    total = Tally()
    working: dict[int, tuple[int, int] | None] = {}
    started = time.monotonic()
    ready = None
    for number, process in enumerate(processes):
        process.start()
        working[number] = None
    heard = time.monotonic()

    def gone(number: int, words: str) -> None:
        block = working.pop(number)
        first, count = block or (settings.seed, settings.calls)
        total.failures.append(Failure(first, [words], last_seed=first + count - 1))

    try:
        while working:
            try:
                kind, number, content = messages.get(timeout=0.5)
                heard = time.monotonic()
            except queue.Empty:
                for number in [n for n in working if not processes[n].is_alive() and messages.empty()]:
                    gone(number, f"the process ended with exit code {processes[number].exitcode}")
                if time.monotonic() - heard > settings.patience:
                    for number in list(working):
                        gone(number, f"nothing heard for {settings.patience:.0f} s: a call hangs")
                continue
            if kind == "ready":
                ready = ready or time.monotonic()
            elif kind == "begins":
                working[number] = content
            elif kind == "tally":
                total.add(content)
                on_progress(total)
            elif kind == "lost":
                total.failures.append(content)
                working.pop(number)
            elif kind == "broken":
                gone(number, content)
            else:
                working.pop(number)
            late = settings.seconds is not None and time.monotonic() - started > settings.seconds
            if late or len(total.failures) >= _MOST_FAILURES:
                taken.value = settings.calls  # no block is left
    finally:
        for process in processes:
            if process.is_alive():
                process.join(5 if not working else 0)
            if process.is_alive():
                process.kill()
    ended = time.monotonic()
    ready = ready or ended
    return total, {"seconds": round(ended - ready, 2), "start_seconds": round(ready - started, 2)}


def coverage(tally: Tally) -> dict[str, dict[str, int]]:
    """How many calls had which value, by dimension."""
    table: dict[str, dict[str, int]] = collections.defaultdict(dict)
    for feature, count in sorted(tally.features.items()):
        dimension, _, value = feature.partition("=")
        table[dimension][value] = count
    return dict(table)


def report(settings: Settings, tally: Tally, times: dict[str, Any], environment: dict[str, Any]) -> dict[str, Any]:
    """Everything, ready for JSON."""
    from .variants import FLOAT64, VARIANTS

    bounds = {name: one.arithmetic for name, one in VARIANTS.items()} if settings.device == "cuda" else {"cpu": FLOAT64}
    return {
        "environment": environment,
        "settings": asdict(settings),
        "passed": tally.calls > 0 and not tally.failures,
        "calls": tally.calls,
        **times,
        "bounds": {name: asdict(arithmetic) for name, arithmetic in bounds.items()},
        "largest_error_in_bounds": {kind: round(ratio, 4) for kind, ratio in sorted(tally.largest.items())},
        "failures": [asdict(failure) for failure in tally.failures],
        "coverage": coverage(tally),
    }
