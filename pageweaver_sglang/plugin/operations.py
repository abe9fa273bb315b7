"""What an operator sees of this process and can do to it: the switch, its state file, metrics.

One thread per process looks at the control folder a few times a second, so that a call of Step 3 pays for reading one
attribute (:attr:`Switch.reason`) and for counting, and nothing else.
"""

from __future__ import annotations

import atexit
import collections
import logging
import os
import threading
from collections import Counter
from pathlib import Path
from typing import Any, Protocol

import torch

from pageweaver_sglang.config import Config
from pageweaver_sglang.watched_json import write_json

from . import NAME, control
from .metrics import COUNTERS, Metrics, make_metrics
from .options import BackendError

logger = logging.getLogger(__name__)

POLL_SECONDS = 0.25
SWITCHED_OFF = "switched off"
DISABLED = "disabled after an error"
_WAITING_OBSERVATIONS = 10_000


class Switch:
    """Whether PageWeaver may serve in this process. All its backends share one; threads may use it at any time."""

    def __init__(self) -> None:
        self._off = False
        self._error: str | None = None
        self._lock = threading.Lock()
        self.reason: str | None = None
        """Why SGLang's own Step 3 serves every call, or None. Read by every call."""
        self.timing = True
        """Whether calls are timed, where there is a timer. Read by every call."""

    @property
    def error(self) -> str | None:
        """The error that disabled PageWeaver, if one did."""
        return self._error

    def turn(self, on: bool) -> None:
        """Follow the operator. Turning on also tries again after an error."""
        with self._lock:
            self._off = not on
            if on:
                self._error = None
            self._settle()

    def trip(self, error: Exception) -> None:
        """Disable PageWeaver because of ``error``, with one line in the log; later errors change nothing."""
        with self._lock:
            if self._error is not None:
                return
            self._error = f"{type(error).__name__}: {error}"
            self._settle()
        logger.error(
            "pageweaver: DISABLED in process %d by %s. SGLang's own Step 3 serves this call and all later ones; "
            "`pageweaver switch on` tries again.",
            os.getpid(),
            self._error,
            exc_info=error,
        )

    def _settle(self) -> None:
        self.reason = SWITCHED_OFF if self._off else DISABLED if self._error is not None else None


class Counted(Protocol):
    """What the thread reads of :class:`.step3.Stats`: these, and what :data:`.metrics.COUNTERS` names."""

    calls_by_arm: Counter[str]
    tokens_by_arm: Counter[str]
    fallbacks_by_reason: Counter[str]
    decisions: Counter[str]
    measured_visits: Counter[str]
    captured_calls: int


class Operations:
    """The switch of this process, and the thread that keeps it, the state file and the metrics up to date.

    Args:
        config: the settings; ``control_dir`` and ``mode``.
        rank: of this process among the server's.
        metrics: where figures go, or None.

    Raises:
        ControlError: ``control_dir`` is set and cannot be used, or its switch is malformed.
    """

    def __init__(self, config: Config, *, rank: int = 0, metrics: Metrics | None = None):
        self.switch = Switch()
        self.metrics = metrics
        self._mode = config.mode
        self._timing = config.timing
        self._rank = rank
        self._stats: list[Counted] = []
        self._observations: collections.deque[tuple[str, str | None, float]] = collections.deque(
            maxlen=_WAITING_OBSERVATIONS
        )
        self._logged: set[str] = set()
        self._written: dict[str, Any] | None = None
        self._stamp: control.Stamp | None = None
        self._stop = threading.Event()
        self.folder: Path | None = None
        """The control folder; None where there is none to be had, so that the switch cannot be used."""
        try:
            self.folder = control.prepare_folder(config.control_dir)
            self._stamp = control.stamp(self.folder)
            on, timing = control.read(self.folder)
        except control.ControlError as error:
            if config.control_dir is not None or self.folder is not None:
                raise
            logger.warning("pageweaver: no switch at run time: %s", error)
            on = timing = None
        self._set_timing(timing)
        if on is False:
            self._turn(False)
        self._thread = threading.Thread(target=self._run, name="pageweaver-operations", daemon=True)
        self._thread.start()
        atexit.register(self.close)

    def add(self, stats: Counted) -> None:
        """Count these calls too."""
        self._stats.append(stats)

    def observe(self, histogram: str, label: str | None, figure: float) -> None:
        """Note a figure for a histogram of :mod:`.metrics`; cheap, and forgotten where metrics are off."""
        if self.metrics is not None:
            self._observations.append((histogram, label, figure))

    def close(self) -> None:
        """End the thread and take the state file away."""
        self._stop.set()
        self._thread.join(2.0)
        atexit.unregister(self.close)
        if self.folder is not None:
            control.state_path(self.folder).unlink(missing_ok=True)

    # The thread ----------------------------------------------------------------------------------------------------

    def _run(self) -> None:
        while True:
            for work in (self._follow, self._publish, self._write_state):
                try:
                    work()
                except Exception as error:  # nothing here may cost a request, or end the thread
                    self._warn_once(f"{type(error).__name__}: {error}")
            if self._stop.wait(POLL_SECONDS):
                return

    def _follow(self) -> None:
        """Act on a new switch file. A malformed one is not acted on; a removed one means on."""
        if self.folder is None:
            return
        found = control.stamp(self.folder)
        if found == self._stamp:
            return
        on, timing = control.read(self.folder)
        self._stamp = found
        self._set_timing(timing)
        self._turn(on is not False)

    def _set_timing(self, asked: bool | None) -> None:
        self.switch.timing = self._timing if asked is None else asked

    def _turn(self, on: bool) -> None:
        before = self.switch.reason
        self.switch.turn(on)
        if self.switch.reason == before:
            return
        if on:
            logger.warning("pageweaver: switched on by %s: PageWeaver serves again", self.folder)
            return
        captured = sum(stats.captured_calls for stats in self._stats)
        rest = f"; {captured} calls that CUDA graphs have captured stay PageWeaver's" if captured else ""
        logger.warning("pageweaver: switched off by %s: SGLang's own Step 3 serves from now on%s", self.folder, rest)

    def _publish(self) -> None:
        if self.metrics is None:
            return
        totals = {name: self._sum(counter) for name, (_, _, counter) in COUNTERS.items()}
        self.metrics.publish(totals, serving=self.switch.reason is None and self._mode != "native")
        waiting = [self._observations.popleft() for _ in range(len(self._observations))]
        self.metrics.observe(waiting)

    def _sum(self, name: str) -> Counter[str]:
        total: Counter[str] = Counter()
        for stats in self._stats:
            # dict() copies a counter in one step, whatever the serving thread adds meanwhile.
            total.update(dict(getattr(stats, name)))
        return total

    def _write_state(self) -> None:
        if self.folder is None:
            return
        path = control.state_path(self.folder)
        reason = self.switch.reason
        state = {
            "pid": os.getpid(),
            "rank": self._rank,
            "mode": self._mode,
            "serving": "native" if reason is not None else self._mode,
            "why": self.switch.error if reason == DISABLED else reason,
            "followed": self._stamp,
            "timing": self.switch.timing,
            "calls": dict(self._sum("calls_by_arm")),
            "fallbacks": dict(self._sum("fallbacks_by_reason")),
            "captured_calls": sum(stats.captured_calls for stats in self._stats),
        }
        if state == self._written and path.exists():
            os.utime(path)
            return
        write_json(path, state)
        self._written = state

    def _warn_once(self, message: str) -> None:
        if message not in self._logged and len(self._logged) < 100:
            self._logged.add(message)
            logger.warning("pageweaver: operations: %s", message)


_operations: Operations | None = None


def of_this_process(config: Config, runner: Any) -> Operations:
    """The operations of this process, which all its backends share (two-batch overlap has several).

    Raises:
        BackendError: the setting ``control_dir`` cannot be used.
    """
    global _operations
    if _operations is None:
        distributed = torch.distributed.is_available() and torch.distributed.is_initialized()
        try:
            _operations = Operations(
                config, rank=torch.distributed.get_rank() if distributed else 0, metrics=make_metrics(runner)
            )
        except control.ControlError as error:
            raise BackendError(f"--attention-backend {NAME}: control_dir: {error}") from error
    return _operations
