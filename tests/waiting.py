"""Waiting for what has to happen, however slow the machine is."""

import time
from collections.abc import Callable


def wait_for(condition: Callable[[], object]) -> None:
    """Until the condition is true; the bound only ends a test that hangs."""
    end = time.monotonic() + 600
    while not condition():
        assert time.monotonic() < end, "waited in vain"
        time.sleep(0.01)
