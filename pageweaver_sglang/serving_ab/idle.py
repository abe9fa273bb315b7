"""What a server says it is doing: SGLang's ``/v1/loads``, which its scheduler keeps up to date."""

from __future__ import annotations

import http.client
import json
import time
import urllib.request
from dataclasses import dataclass

from .launch import HOST

SECONDS = 10.0
"""A server that still has requests after so long is not idle."""
_ANSWER_SECONDS = 60
"""The first answer takes a while: SGLang looks up the GPU's name for it, and may have to initialise CUDA."""


@dataclass(frozen=True)
class Activity:
    """Over a server's data-parallel ranks."""

    requests: int
    """Running and waiting."""
    prefilled: int
    """Prompt tokens computed since the start."""
    pool: int
    """Tokens of its KV pool."""


def activity(port: int) -> Activity | None:
    """Ask a server; None when its scheduler hasn't said anything yet.

    Raises:
        OSError: it doesn't answer, or its answer lacks what is needed.
    """
    try:
        with urllib.request.urlopen(f"http://{HOST}:{port}/v1/loads?include=core", timeout=_ANSWER_SECONDS) as response:
            loads = json.loads(response.read())["loads"]
        if not loads:
            return None
        return Activity(
            requests=sum(load["num_running_reqs"] + load["num_waiting_reqs"] for load in loads),
            prefilled=sum(load["total_prefill_uncached_tokens"] for load in loads),
            pool=sum(load["max_total_num_tokens"] for load in loads),
        )
    except (OSError, ValueError, KeyError, TypeError, http.client.HTTPException) as error:
        raise OSError(f"/v1/loads at port {port}: {type(error).__name__}: {error}") from error


def when_idle(port: int) -> Activity:
    """Wait until a server has no request.

    Raises:
        OSError: it can't be asked, or isn't idle after :data:`SECONDS`.
    """
    deadline = time.monotonic() + SECONDS
    while (found := activity(port)) is None or found.requests:
        if time.monotonic() > deadline:
            still = "says nothing of its load" if found is None else f"still has {found.requests} requests"
            raise OSError(f"the server at port {port} {still} after {SECONDS:.0f} s")
        time.sleep(0.05)
    return found
