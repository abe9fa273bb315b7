"""One run of SGLang's benchmark client, and what its result file says."""

from __future__ import annotations

import heapq
import json
import os
import signal
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any


class ClientError(RuntimeError):
    """The client failed, or its result can't be read; the message ends with the end of its output."""


def run_client(
    command: Sequence[str], log: Path, output: Path, *, timeout: float, environment: Mapping[str, str] | None = None
) -> dict[str, Any]:
    """Run the client and return the last line of its result file.

    Args:
        command: its command line, which names ``output``.
        log: file that gets its stdout and stderr.
        output: the result file, removed beforehand: the client appends.
        timeout: seconds it gets.
        environment: added to this process's own environment.

    Raises:
        ClientError: it ended with another exit code than 0, took too long or left no result.
    """
    log.parent.mkdir(parents=True, exist_ok=True)
    output.unlink(missing_ok=True)
    with log.open("wb") as out:
        process = subprocess.Popen(
            list(command),
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=subprocess.STDOUT,
            env={**os.environ, **(environment or {})},
            start_new_session=True,
        )
    try:
        code = process.wait(timeout)
    except subprocess.TimeoutExpired:
        raise ClientError(f"the client was not done after {timeout:.0f} s\n{_tail(log)}") from None
    finally:  # also on Ctrl-C; a session of its own, so that its helpers go too
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
    if code != 0:
        said = _tail(log)
        last = next((line.strip() for line in reversed(said.splitlines()) if line.strip()), "no word of why")
        raise ClientError(f"the client ended with exit code {code}: {last[:300]}\n{said}")
    try:
        result = json.loads(output.read_text().splitlines()[-1])
    except (OSError, IndexError, ValueError) as error:
        raise ClientError(
            f"the client left no result in {output.name} ({type(error).__name__})\n{_tail(log)}"
        ) from None
    if not isinstance(result, dict):
        raise ClientError(f"the client's result in {output.name} is no mapping\n{_tail(log)}")
    return result


def _tail(log: Path, lines: int = 20) -> str:
    return "\n".join(log.read_text(errors="replace").splitlines()[-lines:])


def serving_seconds(ttfts: Sequence[float], concurrency: int) -> float:
    """How long requests were under way, from their times to the only token.

    The client keeps ``concurrency`` requests going and starts the next one, in order, when one has ended; so the times
    alone say when the last one ended. Its own ``duration`` also holds a question to the server after that.
    """
    ends = [0.0] * min(concurrency, len(ttfts))
    for seconds in ttfts:
        heapq.heapreplace(ends, ends[0] + seconds)
    return max(ends)


def read_result(result: Mapping[str, Any], requests: int, concurrency: int) -> dict[str, Any]:
    """The figures of one load.

    Args:
        result: a line of the client's result file, written with ``--output-details``.
        requests: how many requests were asked for.
        concurrency: how many ran at a time.

    Returns:
        ``input_throughput`` (tokens per second, the client's figure), ``duration_s`` (the client's),
        ``serving_s`` (see :func:`serving_seconds`; None when a time is missing), ``input_tokens``, ``input_lens``,
        ``ttft_s`` per request in the order sent (None: failed, or the client saw no text of the token),
        ``cached_tokens`` (sum; None when the client doesn't say) and ``failure``: why the figures are not comparable,
        or None.

    Raises:
        ClientError: something is missing, or of another type.
    """
    try:
        errors = [str(error or "") for error in result["errors"]]
        pairs = zip(result["ttfts"], errors, strict=True)
        ttfts = [float(seconds) if seconds and not error else None for seconds, error in pairs]
        figures = {
            "input_throughput": float(result["input_throughput"]),
            "duration_s": float(result["duration"]),
            "input_tokens": int(result["total_input_tokens"]),
            "input_lens": [int(length) for length in result["input_lens"]],
        }
        completed = int(result["completed"])
        cached = result.get("cached_tokens")
        cached = None if cached is None else sum(int(count or 0) for count in cached)
    except (KeyError, TypeError, ValueError) as error:
        raise ClientError(f"the client's result can't be read: {type(error).__name__}: {error}") from None
    problems = []
    if len(ttfts) != requests:
        problems.append(f"the client sent {len(ttfts)} requests instead of {requests}")
    elif completed != requests:
        first = next((error.strip().splitlines()[-1] for error in errors if error.strip()), "no reason given")
        problems.append(f"{requests - completed} of {requests} requests failed: {first}")
    if cached:
        problems.append(f"{cached} prompt tokens came from a cache, so they were not computed")
    known = [seconds for seconds in ttfts if seconds is not None]
    serving = serving_seconds(known, concurrency) if known and len(known) == requests else None
    return {
        **figures,
        "ttft_s": ttfts,
        "serving_s": serving,
        "cached_tokens": cached,
        "failure": "; ".join(problems) or None,
    }
