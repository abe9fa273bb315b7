"""Keeps a crash of one arm from taking the other arms' figures: everything is measured in a process of its own.

A kernel that reads out of bounds or never ends leaves its process without a usable GPU. Then a new process takes over:
workloads that are done stay done, the one under way starts again, and the arm is left out with the reason noted.
"""

from __future__ import annotations

import multiprocessing
import signal
import sys
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any, Protocol

from .protocol import DeviceLost, first_line


class Report(Protocol):
    """How the work tells what it is doing."""

    def begins(self, arm: str | None) -> None:
        """``arm`` is about to do something; None: no arm is."""

    def done(self, workload: str) -> None:
        """A workload is measured and written."""


Work = Callable[[Sequence[str], dict[str, str], Report], None]
"""Measures the named workloads, leaving out some arms (reasons by name). Must be importable by name, with arguments
that can be pickled. ValueError and OSError mean that nothing can be measured, the message says why."""


class Refused(Exception):
    """The work said that nothing can be measured, and why."""


class Crashed(Exception):
    """The measuring process ended in a way that leaving out an arm can't mend."""


@dataclass
class _Outcome:
    """How one process went: the arm that was at work last, and what ended the process (None: it came to its end)."""

    arm: str | None = None
    lost: str | None = None


def supervise(
    work: Work,
    workloads: Sequence[str],
    *,
    patience: float,
    on_done: Callable[[str], None],
    on_loss: Callable[[str], None],
) -> None:
    """Do the work in a process of its own, and in another one without the arm that ended the first, and so on.

    Args:
        work: what to do.
        workloads: names, in order.
        patience: seconds that an arm may take for one step before it counts as hung.
        on_done: gets the name of every workload that is done.
        on_loss: gets a sentence when a process was lost and another one takes over.

    Raises:
        Refused: nothing can be measured.
        Crashed: no arm is to blame.
    """
    remaining, without = list(workloads), {}
    while remaining:
        outcome = _run(work, remaining, without, patience, lambda name: (remaining.remove(name), on_done(name)))
        if outcome.lost is None:
            return
        if outcome.arm is None or outcome.arm in without:
            raise Crashed(f"the measuring process was lost: {outcome.lost}")
        without[outcome.arm] = f"left out: {outcome.lost}"
        if remaining:
            on_loss(f"{outcome.arm}: {outcome.lost}. Going on without it, from {remaining[0]}.")


def _run(
    work: Work, workloads: Sequence[str], without: dict[str, str], patience: float, on_done: Callable[[str], Any]
) -> _Outcome:
    """One process, from its start to its end."""
    context = multiprocessing.get_context("spawn")  # a fork could not use CUDA
    here, there = context.Pipe(duplex=False)
    process = context.Process(target=_child, args=(there, work, list(workloads), dict(without)))
    process.start()
    there.close()
    outcome = _Outcome()
    try:
        while True:
            if not here.poll(patience if outcome.arm is not None else None):
                outcome.lost = f"it hung: nothing happened for {patience:.0f} s"
                return outcome
            kind, value = here.recv()
            if kind == "begins":
                outcome.arm = value
            elif kind == "done":
                on_done(value)
            elif kind == "lost":
                outcome.arm, outcome.lost = value
                return outcome
            elif kind == "refused":
                raise Refused(value)
            elif kind == "failed":
                raise Crashed(value)
            elif kind == "end":
                return outcome
    except EOFError:  # it ended without a word
        process.join()
        outcome.lost = _how_it_ended(process.exitcode)
        return outcome
    finally:
        _end(process)
        here.close()


def _how_it_ended(code: int | None) -> str:
    if code is not None and code < 0:
        return f"it ended the process by {signal.Signals(-code).name}"
    return f"it ended the process with exit code {code}"


def _end(process: Any) -> None:
    """Wait for a process that has said its last word; end one that hasn't, or that can't let go of the GPU."""
    process.join(10.0)
    if process.is_alive():
        process.kill()
        process.join(60.0)


class _Sender:
    def __init__(self, connection: Connection) -> None:
        self._connection = connection

    def begins(self, arm: str | None) -> None:
        self._connection.send(("begins", arm))

    def done(self, workload: str) -> None:
        self._connection.send(("begins", None))
        self._connection.send(("done", workload))


def _child(connection: Connection, work: Work, workloads: list[str], without: dict[str, str]) -> None:
    """What the process does."""
    try:
        work(workloads, without, _Sender(connection))
        last: tuple[str, Any] = ("end", None)
    except DeviceLost as error:
        last = ("lost", (error.arm, error.reason))
    except (ValueError, OSError) as error:
        last = ("refused", str(error))
    except KeyboardInterrupt:
        return
    except Exception as error:
        traceback.print_exc()
        last = ("failed", f"the measuring process failed ({first_line(error)}); its traceback is above")
    sys.stdout.flush()
    connection.send(last)
