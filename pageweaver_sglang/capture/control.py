"""The control file of a capture folder, and the state files that recording processes leave beside it."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pageweaver_sglang import watched_json
from pageweaver_sglang.config import Config, ConfigError
from pageweaver_sglang.watched_json import write_json

CONTROL_NAME = "control.json"
STATE_PREFIX = "state-"
SETTINGS = tuple(name for name in Config.model_fields if name.startswith("capture_") and name != "capture_dir")
"""Settings that a control file may hold."""


class CaptureError(ValueError):
    """The capture folder or its control file cannot be used; the message says why."""


@dataclass(frozen=True)
class Control:
    """What a control file asks for."""

    enabled: bool
    settings: dict[str, Any]
    """``capture_*`` settings, which replace those that the server was started with."""

    def apply(self, config: Config) -> Config | None:
        """The settings to record with, or None for not at all. Raises ConfigError for a wrong setting."""
        if not self.enabled:
            return None
        # Not model_copy: that would not validate.
        return Config(**(config.model_dump() | self.settings))


def write_control(folder: Path, control: Control) -> Path:
    """Write the control file in one step; raises OSError, and ConfigError for a wrong setting."""
    control.apply(Config())
    path = folder / CONTROL_NAME
    write_json(path, {"enabled": control.enabled, "settings": control.settings})
    return path


def read_control(folder: Path) -> Control | None:
    """Read the control file; None where there is none.

    Raises:
        CaptureError: it cannot be read or is malformed.
    """
    path = folder / CONTROL_NAME
    try:
        content = watched_json.read_json(path, CaptureError)
    except FileNotFoundError:
        return None
    if not isinstance(content, dict) or set(content) != {"enabled", "settings"}:
        raise CaptureError(f"{path}: must hold enabled and settings")
    enabled, settings = content["enabled"], content["settings"]
    if not isinstance(enabled, bool) or not isinstance(settings, dict):
        raise CaptureError(f"{path}: enabled must be true or false, and settings a mapping")
    if unknown := sorted(set(settings) - set(SETTINGS)):
        raise CaptureError(f"{path}: unknown settings {', '.join(unknown)}; allowed: {', '.join(SETTINGS)}")
    control = Control(enabled, settings)
    try:
        control.apply(Config())
    except ConfigError as error:
        raise CaptureError(f"{path}: {str(error).removeprefix('Config: ')}") from None
    return control


def stamp(folder: Path) -> watched_json.Stamp | None:
    """What changes whenever the control file does; None where there is none."""
    return watched_json.stamp(folder / CONTROL_NAME)


def read_states(folder: Path) -> list[dict[str, Any]]:
    """The states of the processes that record, or recorded, into ``folder``; unreadable ones are left out."""
    states = []
    for path in sorted(folder.glob(f"{STATE_PREFIX}*.json")):
        try:
            state = json.loads(path.read_text(encoding="utf-8"))
        except (OSError, ValueError):
            continue
        if isinstance(state, dict):
            states.append(state)
    return states
