"""JSON files that one process writes and others watch: the control files of capture and of the switch, and states."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

Stamp = tuple[int, int]


def write_json(path: Path, content: dict[str, Any]) -> None:
    """Write a file in one step, so that a reader never sees half of it. Raises OSError."""
    part = path.with_name(f".{path.name}.{os.getpid()}")
    part.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
    part.replace(path)


def read_json(path: Path, error_type: type[Exception]) -> Any:
    """Return a file's content.

    Raises:
        FileNotFoundError: there is no such file.
        error_type: it cannot be read.
    """
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise
    except (OSError, ValueError, RecursionError) as error:
        raise error_type(f"{path}: cannot be read: {error}") from None


def stamp(path: Path) -> Stamp | None:
    """What changes whenever the file does (time and file number); None where there is none."""
    try:
        found = path.stat()
    except OSError:
        return None
    return found.st_mtime_ns, found.st_ino
