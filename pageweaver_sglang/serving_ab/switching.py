"""Switching arms inside running servers, by the folder that ``pageweaver switch`` uses."""

from __future__ import annotations

import time
from collections import Counter
from pathlib import Path

from pageweaver_sglang.bench.server import ServerError
from pageweaver_sglang.plugin import control

from .settings import AbError

SECONDS = 20.0
_SETTLE = 1.5
"""Seconds in which every process has written its state at least once more."""


def control_folder(folder: Path, name: str) -> Path:
    """The control folder for the next server: with no switch (PageWeaver is on) and no states of servers before.

    Servers that run at the same time have different names.

    Raises AbError when it can't be made.
    """
    try:
        found = control.prepare_folder(folder / "control" / name)
        for path in (found / control.SWITCH_NAME, *found.glob(f"{control.STATE_PREFIX}*.json")):
            path.unlink(missing_ok=True)
    except (control.ControlError, OSError) as error:
        raise AbError(f"the servers' control folder: {error}") from error
    return found


def switch_to(folder: Path, arm: str, *, on: bool, timing: bool = False) -> None:
    """Switch a running server; returns when every process of it has followed.

    Args:
        folder: its control folder.
        arm: what it has to serve then.
        on: whether PageWeaver is on.
        timing: whether Step 3 is timed.

    Raises:
        ServerError: no process follows, or one hasn't after :data:`SECONDS`.
    """
    wanted = control.write_switch(folder, on, timing)
    deadline = time.monotonic() + SECONDS
    while True:
        states = control.read_states(folder)
        serving = [
            state.get("serving")
            if control.followed(state, wanted) and state.get("timing") is timing
            else "not switched yet"
            for state in states
        ]
        if serving and set(serving) == {arm}:
            return
        if time.monotonic() > deadline:
            raise ServerError(f"the server did not switch to {arm}: its processes serve {serving or 'nothing'}")
        time.sleep(0.05)


def calls_served(folder: Path) -> Counter[str]:
    """Step 3 calls by arm since the servers started, over their processes; waits until their states are up to date."""
    time.sleep(_SETTLE)
    total: Counter[str] = Counter()
    for state in control.read_states(folder):
        calls = state.get("calls")
        total.update(calls if isinstance(calls, dict) else {})
    return total
