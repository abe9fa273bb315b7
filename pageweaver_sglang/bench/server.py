"""Start a real SGLang server, wait until it is ready, ask it for tokens, and end it with all its processes."""

from __future__ import annotations

import contextlib
import json
import os
import random
import re
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
import uuid
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

# SGLang logs this line when its warm-up is through. `/health` is no substitute: it runs a generation, which on a cold
# server means minutes of compiling.
READY_LINE = "The server is fired up and ready to roll"
_ERROR_LINE = re.compile(r"[\w.]*(Error|Exception)\b")  # as a traceback ends


@contextlib.contextmanager
def one_stop() -> Iterator[None]:
    """Meanwhile the first SIGINT or SIGTERM raises KeyboardInterrupt or SystemExit, and no later one counts.

    For commands that start servers: an impatient second Ctrl-C would leave a server behind. After a stop both signals
    stay ignored, since the process ends. A SIGINT that is ignored already, as in a shell's background, stays ignored.
    """
    numbers = [number for number in (signal.SIGINT, signal.SIGTERM) if signal.getsignal(number) != signal.SIG_IGN]

    def stop(number: int, _: object) -> None:
        for each in numbers:
            signal.signal(each, signal.SIG_IGN)
        if number == signal.SIGINT:
            raise KeyboardInterrupt
        sys.exit(128 + number)

    former = {number: signal.signal(number, stop) for number in numbers}
    try:
        yield
    finally:
        for number, handler in former.items():
            if signal.getsignal(number) is stop:
                signal.signal(number, handler)


class ServerError(RuntimeError):
    """The server died or did not get ready in time; the message ends with the end of its log."""


def _stat(pid: int) -> tuple[int, int, str, str] | None:
    """(parent, group, state, start time) of a process, None when it is gone. The start time tells reused ids apart."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return None
    fields = text.rpartition(")")[2].split()
    return int(fields[1]), int(fields[2]), fields[0], fields[19]


def _table() -> dict[int, tuple[int, int, str, str]]:
    pids = [int(name) for name in os.listdir("/proc") if name.isdigit()]
    return {pid: stat for pid in pids if (stat := _stat(pid)) is not None}


_MARK = "_PAGEWEAVER_SERVER_ID"
"""Environment variable that a server's processes inherit: one whose parent is gone is still known as its own."""


class ServerProcess:
    """A server in a process group of its own, used as a context manager.

    Args:
        command: what to run; its output goes to ``log``.
        log: file that gets stdout and stderr.
        environment: added to this process's own environment.
        patience: seconds between SIGTERM and SIGKILL when the server is ended.
    """

    def __init__(
        self,
        command: Sequence[str],
        log: Path,
        *,
        environment: Mapping[str, str] | None = None,
        patience: float = 8.0,
    ) -> None:
        self.command = list(command)
        self.log = log
        self.patience = patience
        own = uuid.uuid4().hex
        self._mark = f"{_MARK}={own}".encode()
        self._environment = {**os.environ, **(environment or {}), _MARK: own}
        self._process: subprocess.Popen[bytes] | None = None
        self._seen: dict[int, str] = {}
        self._strangers: set[tuple[int, str]] = set()
        self._started = 0.0

    def __enter__(self) -> ServerProcess:
        self.log.parent.mkdir(parents=True, exist_ok=True)
        self._started = time.monotonic()
        with self.log.open("wb") as out:
            self._process = subprocess.Popen(
                self.command,
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=subprocess.STDOUT,
                env=self._environment,
                start_new_session=True,
            )
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    def text(self) -> str:
        """The log so far."""
        return self.log.read_text(errors="replace")

    def is_ready(self, timeout: float) -> bool:
        """Whether the ready line is in the log.

        Raises:
            ServerError: the server has ended, or started more than ``timeout`` seconds ago.
        """
        assert self._process is not None
        self._members()  # notes descendants while their parents live
        exit_code = self._process.poll()  # before the log is read, so that a last line is not missed
        if READY_LINE in self.text():
            return True
        waited = time.monotonic() - self._started
        if exit_code is not None:
            ended = f"the server ended with exit code {exit_code} after {waited:.0f} s"
            raise ServerError(f"{ended}: {self._last_words()} (log: {self.log})\n{self.tail()}")
        if waited > timeout:
            raise ServerError(f"the server was not ready after {waited:.0f} s\n{self.tail()}")
        return False

    def wait_ready(self, timeout: float) -> float:
        """Wait for the ready line; returns the seconds since the start. Raises :class:`ServerError`."""
        while not self.is_ready(timeout):
            time.sleep(0.1)
        return time.monotonic() - self._started

    def _last_words(self) -> str:
        """The log's last line that names an error, else its last line: processes that end after it may say more."""
        lines = [line.strip() for line in self.text().splitlines() if line.strip()]
        errors = [line for line in lines if _ERROR_LINE.match(line)]
        return (errors or lines or ["no word of why"])[-1][:300]

    def tail(self, lines: int = 40) -> str:
        """The end of the log."""
        return "\n".join(self.text().splitlines()[-lines:])

    @property
    def pid(self) -> int:
        """Id of the process that was started."""
        assert self._process is not None
        return self._process.pid

    def pids(self) -> list[int]:
        """Ids of the server's living processes, helpers included."""
        return self._members()

    def exit_code(self) -> int | None:
        """Exit code of the process that was started, None while it runs."""
        assert self._process is not None
        return self._process.poll()

    def _is_marked(self, pid: int, start: str) -> bool:
        """Whether a process has inherited the server's environment; some that name themselves overwrite theirs."""
        if (pid, start) in self._strangers:
            return False
        try:
            found = Path(f"/proc/{pid}/environ").read_bytes()
        except OSError:  # gone, or somebody else's
            found = b"?"
        marked = self._mark in found.split(b"\0")
        if found and not marked:  # one that is just being started has none for a moment
            self._strangers.add((pid, start))
        return marked

    def _members(self) -> list[int]:
        """Living processes of the server: its group, those with its environment, and all descendants ever seen (some
        start their own session)."""
        assert self._process is not None
        table = _table()
        family = {self._process.pid} | {pid for pid, stat in table.items() if self._is_marked(pid, stat[3])}
        grew = True
        while grew:
            grew = False
            for pid, (parent, group, _, _) in table.items():
                if pid not in family and (parent in family or group == self._process.pid):
                    family.add(pid)
                    grew = True
        self._seen.update({pid: table[pid][3] for pid in family if pid in table})
        return [
            pid for pid, start in self._seen.items() if pid in table and table[pid][3] == start and table[pid][2] != "Z"
        ]

    def _signal_until_gone(self, number: signal.Signals, seconds: float) -> list[int]:
        for pid in self._members():
            try:
                os.kill(pid, number)
            except ProcessLookupError:
                continue
        deadline = time.monotonic() + seconds
        while (alive := self._members()) and time.monotonic() < deadline:
            assert self._process is not None
            self._process.poll()
            time.sleep(0.1)
        return alive

    def stop(self) -> None:
        """End the server and all its processes: SIGTERM first, SIGKILL for what is left after ``patience`` seconds.

        Raises :class:`ServerError` when a process survives even that.
        """
        if self._process is None:
            return
        alive = self._signal_until_gone(signal.SIGTERM, self.patience)
        if alive:
            alive = self._signal_until_gone(signal.SIGKILL, 30.0)
        if alive:
            raise ServerError(f"processes {alive} of the server could not be ended")
        self._process.wait()
        self._process = None


def random_prompt(length: int, seed: int, first_token: int = 259, last_token: int = 1023) -> list[int]:
    """Random token ids; the defaults leave out the tiny model's bytes and special tokens."""
    generator = random.Random(seed)
    return [generator.randint(first_token, last_token) for _ in range(length)]


def generate(
    base: str, prompt: Sequence[int], new_tokens: int, *, timeout: float, top: int = 5, dp_rank: int | None = None
) -> dict[str, Any]:
    """Ask for a greedy completion, of data-parallel rank ``dp_rank`` where that is given.

    Returns ``latency_s``, ``output`` (token ids) and ``first_token_top``: the likeliest first tokens as
    ``[token id, log probability]``, best first (empty when the server does not say).
    Raises OSError when the server does not answer, ValueError when it answers without the tokens asked for.
    """
    body = json.dumps(
        {
            "input_ids": list(prompt),
            "sampling_params": {"max_new_tokens": new_tokens, "temperature": 0, "ignore_eos": True},
            "return_logprob": True,
            "top_logprobs_num": top,
            **({} if dp_rank is None else {"routed_dp_rank": dp_rank}),
        }
    ).encode()
    request = urllib.request.Request(f"{base}/generate", body, {"Content-Type": "application/json"})
    start = time.perf_counter()
    try:
        with urllib.request.urlopen(request, timeout=timeout) as response:
            answer = json.loads(response.read())
    except urllib.error.HTTPError as error:
        raise OSError(f"HTTP {error.code}: {error.read()[:300].decode(errors='replace')}") from error
    latency = time.perf_counter() - start
    if len(answer.get("output_ids") or []) != new_tokens:
        raise ValueError(f"asked for {new_tokens} tokens, got {str(answer)[:300]}")
    # SGLang gives (log probability, token id, text) triples per generated token.
    top_logprobs = (answer.get("meta_info", {}).get("output_top_logprobs") or [[]])[0] or []
    return {
        "latency_s": round(latency, 4),
        "output": answer["output_ids"],
        "first_token_top": [[int(token), float(logprob)] for logprob, token, *_ in top_logprobs],
    }
