"""The folder through which a running server is switched off and on, and in which its processes say how they stand.

Needs neither SGLang nor torch: ``pageweaver switch`` uses it too. The folder holds

* ``switch.json``, written by an operator: whether PageWeaver may serve, and (for ``pageweaver ab``) whether Step 3 is
  timed. It outlives servers.
* ``state-PID.json``, one per process of a server: what it does and which ``switch.json`` it has followed. A process
  touches its file twice a second; one that was not touched for :data:`STALE_SECONDS` is of a process that is gone.
"""

from __future__ import annotations

import json
import os
import stat
import tempfile
import time
from pathlib import Path
from typing import Any

from pageweaver_sglang import watched_json
from pageweaver_sglang.watched_json import Stamp, write_json

SWITCH_NAME = "switch.json"
STATE_PREFIX = "state-"
STALE_SECONDS = 5.0
_FORGOTTEN_SECONDS = 3600.0


class ControlError(ValueError):
    """The control folder or its switch cannot be used; the message says why."""


def default_folder() -> Path:
    """A folder of this user on this machine, where none is set."""
    return Path(tempfile.gettempdir()) / f"pageweaver-{os.getuid()}"


def chosen_folder(setting: str | os.PathLike[str] | None) -> Path:
    """The folder that the setting ``control_dir`` means. Raises ControlError where there is no such user as ``~x``."""
    try:
        return default_folder() if setting is None else Path(setting).expanduser().absolute()
    except RuntimeError as error:
        raise ControlError(f"control_dir: {setting}: {error}") from None


def prepare_folder(setting: str | os.PathLike[str] | None) -> Path:
    """Make the folder, check that it can be used, and sweep out what servers left there long ago.

    Raises:
        ControlError: it cannot be written, or (in the temporary folder, where everyone may create it) is not this
            user's alone.
    """
    folder = chosen_folder(setting)
    try:
        folder.mkdir(parents=setting is not None, mode=0o700, exist_ok=True)
        if setting is None:
            found = folder.lstat()
            if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid() or found.st_mode & 0o022:
                raise ControlError(f"{folder}: is not a folder that only this user can write")
        probe = folder / f".probe-{os.getpid()}"
        probe.touch()
        probe.unlink()
        for path in folder.glob(f"{STATE_PREFIX}*.json"):
            if _age(path) > _FORGOTTEN_SECONDS:
                path.unlink(missing_ok=True)
    except (OSError, ValueError) as error:
        if isinstance(error, ControlError):
            raise
        raise ControlError(f"{folder}: cannot be written: {error}") from None
    return folder


def write_switch(folder: Path, on: bool, timing: bool | None = None) -> Stamp | None:
    """Switch on or off, in one step; returns the new file's stamp.

    Args:
        folder: the control folder.
        on: whether PageWeaver may serve.
        timing: whether Step 3 is timed; None leaves that to the setting ``timing``.

    Raises:
        OSError: the file cannot be written.
    """
    write_json(folder / SWITCH_NAME, {"on": on} if timing is None else {"on": on, "timing": timing})
    return stamp(folder)


def read_switch(folder: Path) -> bool | None:
    """Whether PageWeaver may serve; None where no one has switched yet.

    Raises:
        ControlError: the file cannot be read or is malformed.
    """
    return read(folder)[0]


def read(folder: Path) -> tuple[bool | None, bool | None]:
    """Whether PageWeaver may serve, and whether Step 3 is to be timed; None for what the switch doesn't say.

    Raises:
        ControlError: the file cannot be read or is malformed.
    """
    path = folder / SWITCH_NAME
    try:
        content = watched_json.read_json(path, ControlError)
    except FileNotFoundError:
        return None, None
    if (
        not isinstance(content, dict)
        or not {"on"} <= set(content) <= {"on", "timing"}
        or not all(isinstance(value, bool) for value in content.values())
    ):
        raise ControlError(f'{path}: must hold {{"on": true}} or {{"on": false}}')
    return content["on"], content.get("timing")


def stamp(folder: Path) -> Stamp | None:
    """What changes whenever the switch does; None where there is none."""
    return watched_json.stamp(folder / SWITCH_NAME)


def state_path(folder: Path) -> Path:
    """Where this process keeps its state."""
    return folder / f"{STATE_PREFIX}{os.getpid()}.json"


def read_states(folder: Path) -> list[dict[str, Any]]:
    """The states of the processes that run now, by rank; unreadable ones are left out."""
    states = []
    for path in folder.glob(f"{STATE_PREFIX}*.json"):
        try:
            if _age(path) > STALE_SECONDS:
                continue
            state = json.loads(path.read_text(encoding="utf-8"))
        except (OSError, ValueError):
            continue
        if isinstance(state, dict):
            states.append(state)
    return sorted(states, key=lambda state: (str(state.get("rank")).zfill(6), str(state.get("pid"))))


def followed(state: dict[str, Any], wanted: Stamp | None) -> bool:
    """Whether the process of ``state`` has acted on the switch with this stamp."""
    seen = state.get("followed")
    return (tuple(seen) if isinstance(seen, list) else None) == wanted


def _age(path: Path) -> float:
    return time.time() - path.stat().st_mtime
