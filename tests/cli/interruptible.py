"""A command in a process of its own that a test sends signals to, and whether processes are there."""

from __future__ import annotations

import signal
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path


def _heed_interrupts() -> None:
    """What a shell starts in the background ignores SIGINT, and so does all that it starts."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)


def alive(pid: int) -> bool:
    """Whether a process is there, and no zombie."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


@contextmanager
def running(command: Sequence[str], environment: dict[str, str]) -> Iterator[subprocess.Popen]:
    """The process; killed, where a test fails before it has ended, so that the tests go on."""
    with subprocess.Popen(
        command, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, preexec_fn=_heed_interrupts
    ) as process:
        try:
            yield process
        finally:
            process.kill()
