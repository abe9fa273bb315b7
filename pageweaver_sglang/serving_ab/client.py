"""SGLang's benchmark client, load after load, and what its result file says."""

from __future__ import annotations

import contextlib
import heapq
import json
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

PACKAGE_ROOT = Path(__file__).resolve().parents[2]


class ClientError(RuntimeError):
    """The client failed, or its result can't be read; the message ends with the end of its output."""


def _end(process: subprocess.Popen[bytes]) -> None:
    """Kill a process with its helpers: it leads a session of its own."""
    if process.poll() is None:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()


class ProcessPerLoad:
    """Runs the client as a command of its own for every load.

    Args:
        program: the command without the load's arguments.
        why: why a process per load, for the report.
    """

    def __init__(self, program: Sequence[str], why: str) -> None:
        self.program = list(program)
        self.how = f"a process per load: {why}"

    def run(self, arguments: Sequence[str], log: Path, output: Path, timeout: float) -> dict[str, Any]:
        """Run one load and return the last line of its result file.

        Args:
            arguments: of the load; they name ``output``.
            log: file that gets the client's output.
            output: the result file, removed beforehand: the client appends.
            timeout: seconds it gets.

        Raises:
            ClientError: it ended with another exit code than 0, took too long or left no result.
        """
        _prepare(log, output)
        with log.open("wb") as out:
            process = subprocess.Popen(
                [*self.program, *arguments],
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        try:
            code = process.wait(timeout)
        except subprocess.TimeoutExpired:
            raise _late(timeout, log) from None
        finally:  # also on Ctrl-C
            _end(process)
        return _result(code, log, output)

    def close(self) -> None:
        """Nothing is left to end."""


class Worker:
    """Runs one load after the other in one process, which has imported the client once (see :mod:`.worker`).

    The process starts with the object, so that it imports while servers start. One that takes too long or dies is
    ended, and the next load starts another.

    Args:
        module: the client's module.
        log: file that gets what is said outside of loads.
        start_timeout: seconds that the import gets.
    """

    how = "one process for all loads, which has imported it once and calls what its command line calls"

    def __init__(self, module: str, log: Path, *, start_timeout: float) -> None:
        self.module, self.log, self.start_timeout = module, log, start_timeout
        self._process: subprocess.Popen[bytes] | None = None
        self._ready = False
        self._start()

    def _start(self) -> None:
        # This package behind the user's own folders, which may hold another SGLang's dependencies.
        path = [part for part in (os.environ.get("PYTHONPATH"), str(PACKAGE_ROOT)) if part]
        self.log.parent.mkdir(parents=True, exist_ok=True)
        with self.log.open("ab") as out:
            self._process = subprocess.Popen(
                [sys.executable, "-u", "-m", "pageweaver_sglang.serving_ab.worker", self.module],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=out,
                env={**os.environ, "PYTHONPATH": os.pathsep.join(path)},
                start_new_session=True,
            )
        self._ready = False

    def unusable(self) -> str | None:
        """Wait until the client is imported; returns why it can't be used this way, or None."""
        if self._ready:
            return None
        try:
            said = self._reply(self.start_timeout, self.log)
        except ClientError as error:
            return str(error)
        self._ready = bool(said.get("ready"))
        return None if self._ready else str(said.get("unusable"))

    def run(self, arguments: Sequence[str], log: Path, output: Path, timeout: float) -> dict[str, Any]:
        """Run one load; as :meth:`ProcessPerLoad.run`, except that the time limit leaves out the import."""
        _prepare(log, output)
        if self._process is None:
            self._start()
        if why := self.unusable():
            self.close()
            raise ClientError(why)
        process = self._process
        assert process is not None
        assert process.stdin is not None
        job = {"arguments": list(arguments), "log": str(log.absolute())}
        done = False
        try:
            process.stdin.write(json.dumps(job).encode() + b"\n")
            process.stdin.flush()
            code = int(self._reply(timeout, log)["code"])
            done = True
        except OSError as error:
            raise ClientError(f"the client's process is gone: {error}\n{_tail(self.log)}") from None
        finally:  # also on Ctrl-C
            if not done:
                self.close()
        return _result(code, log, output)

    def _reply(self, timeout: float, log: Path) -> dict[str, Any]:
        """The next message. Raises ClientError when none comes in time, or the process has died."""
        process = self._process
        assert process is not None
        assert process.stdout is not None
        line, deadline = b"", time.monotonic() + timeout
        while not line.endswith(b"\n"):
            waiting, _, _ = select.select([process.stdout], [], [], max(0.0, deadline - time.monotonic()))
            if not waiting:
                raise _late(timeout, log)
            part = os.read(process.stdout.fileno(), 65536)
            if not part:
                raise ClientError(f"the client's process ended with exit code {process.wait()}\n{_tail(log)}")
            line += part
        return dict(json.loads(line))

    def close(self) -> None:
        """End the process."""
        if (process := self._process) is None:
            return
        self._process = None
        _end(process)
        for pipe in (process.stdin, process.stdout):
            assert pipe is not None
            with contextlib.suppress(OSError):  # what was not written yet doesn't matter
                pipe.close()


def _prepare(log: Path, output: Path) -> None:
    log.parent.mkdir(parents=True, exist_ok=True)
    log.write_bytes(b"")
    output.unlink(missing_ok=True)


def _late(seconds: float, log: Path) -> ClientError:
    return ClientError(f"the client was not done after {seconds:.0f} s\n{_tail(log)}")


def _result(code: int, log: Path, output: Path) -> dict[str, Any]:
    """The result of a load whose client has ended. Raises ClientError."""
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
