"""Where the commands print."""

from __future__ import annotations

import sys
from pathlib import Path

from rich.console import Console

LOG_WIDTH = 140
"""Columns of output that goes to a file or a pipe, so that no table is squeezed."""


def make_console() -> Console:
    """A console on standard output, as wide as the terminal, or :data:`LOG_WIDTH` where there is none."""
    return Console(width=None if sys.stdout.isatty() else LOG_WIDTH)


def claim(report: Path) -> None:
    """Make sure that a file can be written, before the work whose result would have nowhere to go.

    Raises OSError when it can't.
    """
    report.parent.mkdir(parents=True, exist_ok=True)
    report.open("a").close()


def say_error(command: str, what: Exception | str, console: Console | None = None) -> None:
    """Print on standard error that a command of ``pageweaver`` fails, and why; not wrapped: names of files stay whole.

    ``console``: one on standard error that shows something else, too.
    """
    text = what if isinstance(what, str) else explain(what)
    (console or Console(stderr=True)).print(
        f"pageweaver {command}: {text}", style="red", markup=False, highlight=False, soft_wrap=True
    )


def explain(error: Exception) -> str:
    """An error as a message says it: the file and what is the matter with it, where the system names both."""
    if isinstance(error, OSError) and error.filename and error.strerror:
        return f"{error.filename}: {error.strerror}"
    return str(error)
