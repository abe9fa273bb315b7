#!/usr/bin/env python3
"""Serve the tiny MiniMax-M3 for a while under mixed traffic, and decide whether it stayed up, right and flat in memory.

    soak.py --seconds 60                                # one GPU, mode auto
    soak.py --seconds 600 --verify-every 5 -- --tp 2    # longer, more calls compared, more arguments for the server
    soak.py --compare-native                            # a server in mode native beside it, with the same traffic

The server gets PAGEWEAVER_VERIFY_EVERY: every n-th Step 3 call is computed by SGLang's own function too, and the
difference logged. After a warm-up (which also compiles and tunes that function) these go on at the same time until
the time is up: prompts of one token, of some ten, and with a common beginning (radix cache); bursts of --concurrency
prompts of 1K to 8K; prompts of 64K; requests whose client hangs up before the answer or in the middle of a stream; and
requests that must be answered with an error: a prompt longer than the context, a body that is no JSON, token ids that
are none. (Ids past the vocabulary are not sent: SGLang hands them to the embedding unchecked.) Where the time was too
short for a verdict (a kind not yet sent, too few samples of memory), they go on, within --budget.

Checked: every good request answered and every bad one refused; the server up to the end, and its first token for one
prompt the same as at the beginning, or a near-tie; no call left to SGLang's Step 3, except for an --expected-fallback;
every compared call within --max-nrms, on every sparse layer; no CUDA error, no traceback through PageWeaver; memory
flat. For that every process of the server is sampled apart: its growth is the median slope (Theil-Sen) in the second
half of the samples, times its duration. Each scheduler, where PageWeaver lives, may grow by --max-growth, all other
processes together (HTTP and tokenizer, detokenizer: SGLang's alone, whose heap large bodies make grow) by
--max-other-growth, and GPU memory by --max-gpu-growth. That is the server's own where nvidia-smi names its schedulers
in every sample, otherwise (in most containers) all of the GPUs in CUDA_VISIBLE_DEVICES, or of all GPUs where that is
not set: then nothing else may run on them. The check's name says which.

With --compare-native a server with PAGEWEAVER_MODE=native starts at the same time on the same GPUs (port + 20) and gets
the same kinds of requests meanwhile; the bounds then count above what that server's processes grow by. Exit code 0 when
all of it holds.
"""

from __future__ import annotations

import argparse
import contextlib
import http.client
import json
import os
import random
import re
import shlex
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
sys.path.insert(0, str(Path(__file__).resolve().parent))

import serve_check
from make_tiny_m3 import KV_HEADS, Q_HEADS
from serve_check import (
    COMPILING,
    PORT_STEP,
    SERVER_ARGUMENTS,
    Check,
    LogFacts,
    compare_first_tokens,
    excerpts,
    parse_log,
    sparse_layers,
)

from pageweaver_sglang.bench import environment
from pageweaver_sglang.bench.server import ServerError, ServerProcess, generate, random_prompt
from pageweaver_sglang.serving_ab.launch import HOST, choose_port, plugin_variables, wait_until_it_answers
from pageweaver_sglang.serving_ab.settings import AbError

SHORT = 64
"""Tokens below which a compared call has rows that few keys decide, whose rounding nothing averages out."""
SHORT_NRMS = 0.0625
"""Limit for those: one rounding of a softmax weight to E4M3, at most."""
FATAL = re.compile(
    r"CUDA error|NCCL error|illegal memory access|device-side assert|out of memory|Scheduler hit an|"
    r"could not be compared"
)
KINDS = 12
"""Of requests, as :class:`Traffic` makes them."""
FEWEST_SAMPLES = 5
"""Of memory, in the second half: fewer say nothing."""
SCHEDULER = "scheduler"
"""How the names of the processes begin in which PageWeaver lives, as SGLang calls them."""
MB_PER_MIB = (1 << 20) / 1e6
SERVER_ON_GPUS, GPUS = "server on GPUs", "GPUs"
"""Names of the trends of GPU memory: the server's own, and all that is in use, whoever uses it."""
FRACTION_OF_TWO = "0.25"
"""`--mem-fraction-static` of two servers that share GPUs."""
_ONE_TOKEN = {"max_new_tokens": 1, "temperature": 0, "ignore_eos": True}


@dataclass
class Kind:
    """What became of the requests of one kind."""

    sent: int = 0
    answered: int = 0
    refused: int = 0
    """Answered with an HTTP error, by a server that goes on."""
    hung_up: int = 0
    """Given up by the client, as meant."""
    failed: list[str] = field(default_factory=list)
    """What went otherwise than meant."""
    prompt_tokens: int = 0
    latencies: list[float] = field(default_factory=list)

    def describe(self) -> dict[str, Any]:
        """For the report."""
        times = sorted(self.latencies)
        return {
            **{name: getattr(self, name) for name in ("sent", "answered", "refused", "hung_up", "prompt_tokens")},
            "failed": len(self.failed),
            "failures": self.failed[:5],
            "latency_s": {"median": round(statistics.median(times), 4), "max": round(times[-1], 4)} if times else None,
        }


class Traffic:
    """Sends requests from several threads and keeps count of them by kind."""

    def __init__(self, port: int, options: argparse.Namespace) -> None:
        self.port = port
        self.options = options
        self.kinds: dict[str, Kind] = {}
        self.stop = threading.Event()
        self._lock = threading.Lock()

    def good(self, kind: str, prompt: Sequence[int]) -> None:
        """One token for a prompt."""
        start = time.perf_counter()
        try:
            generate(f"http://{HOST}:{self.port}", prompt, 1, timeout=self.options.request_timeout)
            self._note(kind, len(prompt), answered=True, latency=time.perf_counter() - start)
        except (OSError, ValueError, http.client.HTTPException) as error:
            self._note(kind, len(prompt), failed=f"{type(error).__name__}: {error}"[:300])

    def bad(self, kind: str, body: bytes) -> None:
        """A request that must be answered with an error of the client's."""
        connection = http.client.HTTPConnection(HOST, self.port, timeout=self.options.request_timeout)
        try:
            connection.request("POST", "/generate", body, {"Content-Type": "application/json"})
            answer = connection.getresponse()
            text = answer.read()[:200].decode(errors="replace")
            if 400 <= answer.status < 500:
                self._note(kind, 0, refused=True)
            else:
                self._note(kind, 0, failed=f"HTTP {answer.status}: {text}")
        except (OSError, http.client.HTTPException) as error:
            self._note(kind, 0, failed=f"{type(error).__name__}: {error}"[:300])
        finally:
            connection.close()

    def hang_up(self, kind: str, prompt: Sequence[int], *, after: float | None) -> None:
        """Send a prompt, and close the connection ``after`` seconds, or (None) when a stream's first part is here."""
        parameters = _ONE_TOKEN if after is not None else {**_ONE_TOKEN, "max_new_tokens": 200}
        body = {"input_ids": list(prompt), "sampling_params": parameters, "stream": after is None}
        connection = http.client.HTTPConnection(HOST, self.port, timeout=self.options.request_timeout)
        try:
            connection.request("POST", "/generate", json.dumps(body).encode(), {"Content-Type": "application/json"})
            if after is not None:
                time.sleep(after)
            elif not (line := connection.getresponse().readline()).startswith(b"data:"):
                raise http.client.HTTPException(f"the stream begins with {line[:100]!r}")
            self._note(kind, len(prompt), hung_up=True)
        except (OSError, http.client.HTTPException) as error:
            self._note(kind, len(prompt), failed=f"{type(error).__name__}: {error}"[:300])
        finally:
            connection.close()

    def _note(self, kind: str, tokens: int, *, latency: float | None = None, failed: str = "", **became: bool) -> None:
        with self._lock:
            one = self.kinds.setdefault(kind, Kind())
            one.sent += 1
            one.prompt_tokens += tokens
            for name in became:
                setattr(one, name, getattr(one, name) + 1)
            if latency is not None:
                one.latencies.append(latency)
            # What breaks off because the time is up, or the server is gone, says nothing more than that.
            if failed and not self.stop.is_set():
                one.failed.append(failed)

    # What goes on at the same time; each runs in a thread of its own until `stop`.

    def small(self, rng: random.Random) -> None:
        """One token, some ten, and a common beginning with different ends."""
        common = random_prompt(min(5000, self.options.burst[1]), 1)
        self.good("1 token", random_prompt(1, rng.randrange(1 << 30)))
        self.good("2-127 tokens", random_prompt(rng.randint(2, 127), rng.randrange(1 << 30)))
        end = random_prompt(rng.randint(1, 300), rng.randrange(1 << 30))
        self.good("common beginning", common[: rng.randint(1, len(common))] + end)

    def burst(self, rng: random.Random) -> None:
        """Many prompts at the same time, then a pause."""
        low, high = self.options.burst
        prompts = [
            random_prompt(rng.randint(low, high), rng.randrange(1 << 30)) for _ in range(self.options.concurrency)
        ]
        threads = [threading.Thread(target=self.good, args=("burst", prompt), daemon=True) for prompt in prompts]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        self.stop.wait(rng.uniform(0, 0.5))

    def long(self, rng: random.Random) -> None:
        """One long prompt, then a pause."""
        self.good("long", random_prompt(self.options.long, rng.randrange(1 << 30)))
        self.stop.wait(rng.uniform(0, 1))

    def aborts(self, rng: random.Random) -> None:
        """Clients that hang up: at once, while the prompt is computed, in the middle of a stream."""
        length = rng.randint(self.options.burst[1], self.options.long)
        self.hang_up(
            "hung up", random_prompt(length, rng.randrange(1 << 30)), after=rng.choice([0.0, rng.uniform(0, 0.6)])
        )
        length = rng.randint(1, self.options.burst[0])
        self.hang_up("hung up in a stream", random_prompt(length, rng.randrange(1 << 30)), after=None)
        self.stop.wait(rng.uniform(0, 0.5))

    def refusals(self, rng: random.Random) -> None:
        """One bad request of each kind."""
        ids = random_prompt(rng.randint(1, 50), rng.randrange(1 << 30))
        bodies = {
            "too long": {
                "input_ids": [300] * (self.options.context + rng.randint(0, 9)),
                "sampling_params": _ONE_TOKEN,
            },
            "token ids that are text": {"input_ids": [*ids, "two"], "sampling_params": _ONE_TOKEN},
            "token ids of no vocabulary": {
                **{"input_ids": ids, "sampling_params": _ONE_TOKEN, "return_logprob": True},
                "token_ids_logprob": [10**6],
            },
            "sampling out of range": {"input_ids": ids, "sampling_params": {**_ONE_TOKEN, "top_p": 7.0}},
        }
        for kind, body in bodies.items():
            self.bad(kind, json.dumps(body).encode())
        self.bad("no JSON", b'{"input_ids": [300, 301')
        self.stop.wait(rng.uniform(0.2, 1))

    def every_kind(self) -> bool:
        """Whether a request of each kind has come to its end."""
        with self._lock:
            return len(self.kinds) == KINDS

    def went_wrong(self) -> bool:
        """Whether a request went otherwise than meant."""
        with self._lock:
            return any(kind.failed for kind in self.kinds.values())

    def run(
        self, seconds: float, end: float, answered: float, enough: Callable[[], bool], until: Callable[[], bool]
    ) -> float:
        """Send everything, for ``seconds`` and then until ``enough`` is true.

        Args:
            seconds: that it lasts at least.
            end: of ``time.monotonic``, when it ends in any case.
            answered: of ``time.monotonic``, until when the last answers are waited for.
            enough: whether it need not go on.
            until: ends it at once.

        Returns:
            The seconds it was.
        """

        def repeat(one: Callable[[random.Random], None], seed: int) -> None:
            rng = random.Random(seed)
            while not self.stop.is_set():
                one(rng)

        kinds = (self.small, self.burst, self.long, self.aborts, self.refusals)
        threads = [
            threading.Thread(target=repeat, args=(one, self.options.seed * 100 + number), daemon=True)
            for number, one in enumerate(kinds)
        ]
        start = time.monotonic()
        for thread in threads:
            thread.start()
        while time.monotonic() < end and not until():
            if time.monotonic() - start >= seconds and enough():
                break
            time.sleep(0.05)
        lasted = time.monotonic() - start
        self.stop.set()
        for thread in threads:
            thread.join(max(0.0, answered - time.monotonic()))
        return lasted


@dataclass(frozen=True)
class Sample:
    """Memory at a time: seconds since the traffic began, MB of the server's processes and on the GPUs (None: unknown).

    Processes are named as by :func:`process_name`; those of the same name count together.
    """

    seconds: float
    processes: int
    rss_mb: dict[str, float]
    gpu_mb: float | None
    """By :func:`gpu_mb`."""
    server_gpu_mb: float | None
    """By :func:`server_gpu_mb`."""

    def of_schedulers(self, which: bool) -> float:
        """MB of the schedulers together, or of all others."""
        return sum(mb for name, mb in self.rss_mb.items() if name.startswith(SCHEDULER) == which)


def process_name(pid: int, main: int) -> str:
    """``scheduler``, ``scheduler_TP0``, ``detokenizer``: as SGLang calls it; ``http`` for the one that was started,
    which takes requests and tokenises them; ``others``."""
    try:
        title = Path(f"/proc/{pid}/cmdline").read_text(errors="replace")
    except OSError:
        title = ""
    named = re.match(r"sglang::([^\s\0]+)", title)
    if named:
        return named[1]
    return "http" if pid == main else "others"


def resident_mb(pid: int) -> float:
    """Resident memory of a process; 0 when it has ended."""
    try:
        text = Path(f"/proc/{pid}/status").read_text()
    except OSError:
        return 0.0
    found = re.search(r"^VmRSS:\s+(\d+) kB", text, re.MULTILINE)
    return int(found[1]) * 1024 / 1e6 if found else 0.0


def nvidia_smi(*query: str) -> list[list[str]]:
    """The cells of nvidia-smi's answer, line by line; no lines without it, or when it refuses."""
    command = ("nvidia-smi", *query, "--format=csv,noheader,nounits")
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=20, check=True)
    except (OSError, subprocess.SubprocessError):
        return []
    return [[cell.strip() for cell in line.split(",")] for line in done.stdout.splitlines()]


def gpu_mb() -> float | None:
    """Memory in use on the GPUs in CUDA_VISIBLE_DEVICES (on all, where it is not set), whoever uses it.

    None where nvidia-smi doesn't say, or the variable is empty: the server has no GPU.
    """
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is not None and not visible.strip():
        return None
    chosen = [] if visible is None else ["-i", visible.replace(" ", "")]
    try:
        used = [float(mib) for (mib,) in nvidia_smi("--query-gpu=memory.used", *chosen)]
    except ValueError:  # "[N/A]", or words
        return None
    return sum(used) * MB_PER_MIB if used else None


def server_gpu_mb(pids: Sequence[int], schedulers: Sequence[int]) -> float | None:
    """GPU memory of the processes ``pids``; None where nvidia-smi doesn't say how much each of ``schedulers`` has.

    In a container it shows other process ids than the container's, or none.
    """
    try:
        used = [(int(pid), float(mib)) for pid, mib in nvidia_smi("--query-compute-apps=pid,used_memory")]
    except ValueError:  # "[N/A]"
        return None
    if not schedulers or not set(schedulers) <= {pid for pid, _ in used}:
        return None
    return round(sum(mib for pid, mib in used if pid in pids) * MB_PER_MIB, 1)


class Sampler(threading.Thread):
    """Samples memory until told to end, and notices when the server has ended."""

    def __init__(self, server: ServerProcess, interval: float) -> None:
        super().__init__(daemon=True)
        self.samples: list[Sample] = []
        self.died: int | None = None
        """The server's exit code, when it ended by itself."""
        self.counts = True
        """Whether what is sampled from now on counts."""
        self._server = server
        self._interval = interval
        self._stop_sampling = threading.Event()

    def run(self) -> None:
        start = time.monotonic()
        while not self._stop_sampling.is_set():
            self.died = self._server.exit_code()
            if self.died is not None:
                return
            names = {pid: process_name(pid, self._server.pid) for pid in self._server.pids()}
            by_name: dict[str, float] = {}
            for pid, name in names.items():
                by_name[name] = round(by_name.get(name, 0.0) + resident_mb(pid), 1)
            seconds = round(time.monotonic() - start, 2)
            schedulers = [pid for pid, name in names.items() if name.startswith(SCHEDULER)]
            sample = Sample(seconds, len(names), by_name, gpu_mb(), server_gpu_mb(list(names), schedulers))
            if self.counts:
                self.samples.append(sample)
            self._stop_sampling.wait(self._interval)

    def has_enough(self) -> bool:
        """Whether the samples so far say how memory goes, with room for one more that comes late."""
        return len(_second_half([(one.seconds, 0.0) for one in list(self.samples)])) >= 2 * FEWEST_SAMPLES

    def end(self) -> None:
        """Stop sampling."""
        self._stop_sampling.set()
        self.join()


@dataclass(frozen=True)
class Trend:
    """How memory went in the second half of the samples."""

    samples: int
    seconds: float
    slope_mb_per_minute: float
    growth_mb: float
    """Slope times duration."""
    first_mb: float
    last_mb: float


def _second_half(points: Sequence[tuple[float, float]]) -> list[tuple[float, float]]:
    """Of points (seconds, MB) by time, those from the middle of the time on."""
    middle = (points[0][0] + points[-1][0]) / 2 if points else 0.0
    return [point for point in points if point[0] >= middle]


def trend(points: Sequence[tuple[float, float]]) -> Trend | None:
    """The median of the slopes between all pairs of points (Theil-Sen), which single jumps don't move; None: too few.

    Args:
        points: (seconds, MB), by time. The second half of the time counts.
    """
    late = _second_half(points)
    late = late[:: max(1, len(late) // 300)]
    if len(late) < FEWEST_SAMPLES:
        return None
    slopes = [(b[1] - a[1]) / (b[0] - a[0]) for i, a in enumerate(late) for b in late[i + 1 :] if b[0] > a[0]]
    slope, seconds = statistics.median(slopes), late[-1][0] - late[0][0]
    return Trend(len(late), round(seconds, 1), round(slope * 60, 2), round(slope * seconds, 2), late[0][1], late[-1][1])


def trends(samples: Sequence[Sample]) -> dict[str, Trend | None]:
    """Of every process by its name, of all but the schedulers together (``all but schedulers``), and of GPU memory:
    SERVER_ON_GPUS where every sample has it, otherwise GPUS."""
    attributed = bool(samples) and all(one.server_gpu_mb is not None for one in samples)
    on_gpus = [(one.seconds, one.server_gpu_mb if attributed else one.gpu_mb) for one in samples]
    names = sorted({name for one in samples for name in one.rss_mb})
    return {
        **{name: trend([(one.seconds, one.rss_mb[name]) for one in samples if name in one.rss_mb]) for name in names},
        "all but schedulers": trend([(one.seconds, one.of_schedulers(False)) for one in samples]),
        SERVER_ON_GPUS if attributed else GPUS: trend([(at, mb) for at, mb in on_gpus if mb is not None]),
    }


def memory_check(name: str, found: Trend | None, most: float, native: Trend | None = None) -> Check:
    """Whether memory was flat, or grew by at most ``most`` MB more than mode ``native``'s, where that was measured."""
    if found is None:
        return Check(f"{name} flat", False, "not measured, or too few samples")
    of_native = max(0.0, native.growth_mb) if native is not None else 0.0
    beside = f" beyond native's {of_native:.1f}" if native is not None else ""
    detail = (
        f"{found.slope_mb_per_minute:+.1f} MB/min over the last {found.seconds:.0f} s ({found.growth_mb:+.1f} MB, "
        f"at most {most:.0f}{beside}; {found.first_mb:.0f} -> {found.last_mb:.0f} MB)"
    )
    return Check(f"{name} flat", found.growth_mb - of_native <= most, detail)


def memory_checks(
    found: dict[str, Trend | None], native: dict[str, Trend | None] | None, options: argparse.Namespace
) -> list[Check]:
    """Whether each scheduler's memory, the other processes' and that on the GPUs was flat, as far as native's was.

    All memory on the GPUs counts as it is: it holds both servers'.
    """
    native = native or {}
    schedulers = [name for name in found if name.startswith(SCHEDULER)] or [SCHEDULER]
    limits = {name: options.max_growth for name in schedulers} | {"all but schedulers": options.max_other_growth}
    return [
        *(
            memory_check(f"resident memory, {name},", found.get(name), most, native.get(name))
            for name, most in limits.items()
        ),
        memory_check("GPU memory, all processes,", found[GPUS], options.max_gpu_growth)
        if GPUS in found
        else memory_check(
            "GPU memory, the server's,", found[SERVER_ON_GPUS], options.max_gpu_growth, native.get(SERVER_ON_GPUS)
        ),
    ]


def own_tracebacks(text: str) -> list[str]:
    """Tracebacks that go through PageWeaver, by their last line."""
    found = []
    for part in text.split("Traceback (most recent call last)")[1:]:
        lines = part.splitlines()[1:]
        body = next((i for i, line in enumerate(lines) if line and not line.startswith(" ")), len(lines))
        if any("pageweaver_sglang" in line for line in lines[:body]):
            found.append(lines[body][:300] if body < len(lines) else "")
    return found


def traffic_checks(kinds: dict[str, Kind]) -> list[Check]:
    """Whether the requests went as meant."""
    failed = [f"{name}: {one.failed[0]} ({len(one.failed)})" for name, one in kinds.items() if one.failed]
    unmet = [name for name, one in kinds.items() if not one.answered + one.refused + one.hung_up]
    counts = ", ".join(f"{name} {one.sent}" for name, one in kinds.items())
    return [
        Check("every request answered, refused or given up as meant", not failed, "; ".join(failed) or counts),
        Check(
            "every kind of request was made",
            len(kinds) == KINDS and not unmet,
            ", ".join(unmet) or f"{len(kinds)} kinds",
        ),
    ]


def log_checks(facts: LogFacts, text: str, layers: list[int], mode: str, options: argparse.Namespace) -> list[Check]:
    """Whether PageWeaver served, and right, by what a server in ``mode`` logged."""
    modes = sorted({rank.mode for rank in facts.ranks.values() if rank.mode})
    status = Check("STATUS line names the mode", modes == [mode], ", ".join(modes) or "no STATUS line")
    fatal = [line.strip()[:300] for line in text.splitlines() if FATAL.search(line)]
    own = own_tracebacks(text)
    errors = Check("no CUDA error, no traceback through PageWeaver", not fatal + own, "; ".join((fatal + own)[:3]))
    fallbacks = [
        f"{name}: {reason}"
        for name, rank in facts.ranks.items()
        for reason in rank.fallbacks
        if not any(expected in reason for expected in options.expected_fallback)
    ]
    unexpected = Check("no call left to SGLang's Step 3 unexpectedly", not fallbacks, "; ".join(fallbacks[:5]))
    if mode == "native":
        return [status, errors]
    calls = [call for rank in facts.ranks.values() for call in rank.verified]
    wrong = [
        f"layer {call['layer']}, {call['tokens']} tokens: {call['nrms']:.3%}"
        for call in calls
        if not call["nrms"] <= (max(options.max_nrms, SHORT_NRMS) if call["tokens"] < SHORT else options.max_nrms)
    ]
    compared = sorted({int(call["layer"]) for call in calls})
    largest = max((call["nrms"] for call in calls), default=0.0)
    limit = f"{options.max_nrms:.1%} ({SHORT_NRMS:.2%} below {SHORT} tokens)"
    return [
        status,
        errors,
        unexpected,
        Check(
            f"NRMS of every compared call at most {limit}",
            bool(calls) and not wrong,
            "; ".join(wrong[:5]) or f"{len(calls)} calls, largest {largest:.3%}",
        ),
        Check(
            "calls compared on every sparse layer",
            [layer for layer in layers if layer not in compared] == [],
            f"layers {', '.join(map(str, compared)) or 'none'}",
        ),
    ]


def server_command(options: argparse.Namespace, port: int) -> list[str]:
    """The server's command line. The radix cache stays on: prompts with a common beginning are part of the traffic."""
    program = shlex.split(options.server_cmd) if options.server_cmd else [sys.executable, "-m", "sglang.launch_server"]
    fixed = [argument for argument in SERVER_ARGUMENTS if argument != "--disable-radix-cache"]
    fixed[fixed.index("--context-length") + 1] = str(options.context)
    if options.compare_native:
        fixed[fixed.index("--mem-fraction-static") + 1] = FRACTION_OF_TWO
    address = ["--model-path", str(options.model), "--host", HOST, "--port", str(port)]
    return [*program, *address, *fixed, "--attention-backend", "pageweaver", *options.server_arguments]


class Run:
    """One server and what became of it.

    Args:
        options: of the command line.
        mode: PAGEWEAVER_MODE.
        port: the server's.
        say: takes lines for people.
    """

    def __init__(self, options: argparse.Namespace, mode: str, port: int, say: Callable[[str], None]) -> None:
        self.options, self.mode, self.port = options, mode, port
        self.say = lambda text: say(f"{mode}: {text}")
        self.variables = {
            "PYTHONUNBUFFERED": "1",
            "PAGEWEAVER_MODE": mode,
            "PAGEWEAVER_VERIFY_EVERY": str(options.verify_every),
            **plugin_variables(options.logs / "metadata"),
        }
        self.command = server_command(options, port)
        log = options.logs / ("soak.log" if mode == options.mode else f"soak-{mode}.log")
        self.server = ServerProcess(self.command, log, environment=self.variables, patience=options.patience)
        self.traffic = Traffic(port, options)
        self.sampler = Sampler(self.server, options.interval)
        self.ended = False
        self.result: dict[str, Any] = {"command": shlex.join(self.command), "server_environment": self.variables}
        self.probes: list[list[dict[str, Any]]] = []
        self.text, self.failed = "", ""

    def drive(self, deadline: float, both_warm: threading.Barrier, enough: Callable[[], bool]) -> None:
        """Warm up the server, which has been started, and send everything; what goes wrong is noted in ``failed``.

        Args:
            deadline: of ``time.monotonic``, until which the servers must have ended.
            both_warm: where this waits for the other server, if there is one, before the traffic begins.
            enough: whether the traffic need not go on after ``--seconds``.
        """
        try:
            try:
                self._drive(deadline, both_warm, enough)
            finally:
                self.ended = True
                both_warm.abort()  # nobody comes any more
                self.text = self.server.text()
        except (ServerError, OSError, ValueError, http.client.HTTPException) as error:
            self.failed = f"{type(error).__name__}: {error}"

    def _drive(self, deadline: float, both_warm: threading.Barrier, enough: Callable[[], bool]) -> None:
        options, server, result = self.options, self.server, self.result
        base = f"http://{HOST}:{self.port}"
        self.say(f"starting (log: {server.log})")
        result["start_s"] = round(server.wait_ready(min(options.start_timeout, deadline - time.monotonic())), 1)
        wait_until_it_answers(self.port)
        self.say(f"ready after {result['start_s']} s; warming up")
        began = time.monotonic()
        for number, length in enumerate((1, options.burst[0], options.burst[1], options.long)):
            left = max(1.0, deadline - time.monotonic())
            generate(base, random_prompt(length, 1000 + number), 1, timeout=left)
        self._probe(base, deadline)
        result["warm_up_s"] = round(time.monotonic() - began, 1)
        self.say(f"warm after {result['warm_up_s']} s")
        with contextlib.suppress(threading.BrokenBarrierError):  # the other server has failed, which that one reports
            both_warm.wait(max(1.0, deadline - time.monotonic()))
        last = deadline - both_warm.parties * options.patience
        # Time for the last answers and the last probe, however slow the server is.
        end = last - min(options.request_timeout, 0.3 * (last - time.monotonic()))
        self.say(f"traffic for {min(options.seconds, end - time.monotonic()):.0f} s or more")
        sampler = self.sampler
        sampler.start()
        try:
            answered = (end + last) / 2
            lasted = self.traffic.run(options.seconds, end, answered, enough, lambda: sampler.died is not None)
            result["seconds"] = round(lasted, 1)
        finally:
            sampler.end()
        if sampler.died is None:
            self._probe(base, last)
        else:
            self.failed = f"it ended with exit code {sampler.died}\n{server.tail()}"

    def has_enough(self) -> bool:
        """Whether everything was sent and sampled that the checks need, or never will be."""
        decided = self.ended or self.traffic.went_wrong()
        return decided or (self.traffic.every_kind() and self.sampler.has_enough())

    def _probe(self, base: str, last: float) -> None:
        """Ask for the first token of one prompt, which is to be there at ``last`` of ``time.monotonic``."""
        options = self.options
        timeout = min(options.request_timeout, max(1.0, last - time.monotonic()))
        answer = generate(base, random_prompt(options.burst[0] - 1, 7), 1, timeout=timeout)
        self.probes.append([{"name": "probe", **answer}])

    def checks(self) -> list[Check]:
        """All but memory's."""
        facts, probes = parse_log(self.text), self.probes
        same = [compare_first_tokens(probes[0], probes[1], self.options.tie)[0]] if len(probes) == 2 else []
        return [
            Check("server started, stayed up and ended cleanly", not self.failed, self.failed),
            *traffic_checks(self.traffic.kinds),
            *(Check("the same first token at the end as at the beginning", check.ok, check.detail) for check in same),
            *log_checks(facts, self.text, sparse_layers(self.options.model), self.mode, self.options),
        ]

    def describe(self) -> dict[str, Any]:
        """For the report."""
        second_half = {name: asdict(found) if found else None for name, found in trends(self.sampler.samples).items()}
        return {
            **self.result,
            "traffic": {name: one.describe() for name, one in sorted(self.traffic.kinds.items())},
            "ranks": {name: rank.describe() for name, rank in parse_log(self.text).ranks.items()},
            "compilations": self.text.count(COMPILING),
            "memory": {"second_half": second_half, "samples": [asdict(one) for one in self.sampler.samples]},
            "log": excerpts(self.text),
        }


def soak(options: argparse.Namespace, say: Callable[[str], None] = print) -> dict[str, Any]:
    """Serve, send, sample, and return the report."""
    deadline = time.monotonic() + options.budget
    own = Run(options, options.mode, options.port, say)
    native = Run(options, "native", options.port + PORT_STEP, say) if options.compare_native else None
    runs = [own] if native is None else [own, native]
    both_warm, decided = threading.Barrier(len(runs)), threading.Event()

    def enough() -> bool:
        """Once for both servers, so that their traffic ends at the same time and their growths compare."""
        if all(run.has_enough() for run in runs):
            for run in runs:
                run.sampler.counts = False  # the last answers may take long, with nothing sent any more
            decided.set()
        return decided.is_set()

    # Servers are started and ended here, so that whatever ends this thread ends them.
    try:
        with contextlib.ExitStack() as started:
            for run in runs:
                choose_port(run.port)  # or another server's answers would be taken for this one's
                started.enter_context(run.server)
            shared = (deadline, both_warm, enough)
            threads = [threading.Thread(target=run.drive, args=shared, daemon=True) for run in runs[1:]]
            for thread in threads:
                thread.start()
            own.drive(*shared)
            for thread in threads:
                thread.join()
    except (AbError, ServerError, OSError) as error:
        own.failed = own.failed or f"{type(error).__name__}: {error}"
    checks = [
        *own.checks(),
        *(Check(f"native: {one.name}", one.ok, one.detail) for one in (native.checks() if native else [])),
        *memory_checks(trends(own.sampler.samples), trends(native.sampler.samples) if native else None, options),
    ]
    return {
        "environment": environment.describe(options.commit),
        "passed": all(check.ok for check in checks),
        "checks": [asdict(check) for check in checks],
        "settings": {name: str(value) for name, value in sorted(vars(options).items())},
        **own.describe(),
        "native": native.describe() if native else None,
    }


def print_report(report: dict[str, Any], say: Callable[[str], None] = print) -> None:
    """The checks, for people."""
    for check in report["checks"]:
        say(
            f"  {'ok    ' if check['ok'] else 'FAILED'} {check['name']}"
            + (f": {check['detail']}" if check["detail"] else "")
        )
    for name, one in report["traffic"].items():
        latency = one["latency_s"]
        times = f", median {latency['median']:.2f} s, longest {latency['max']:.2f} s" if latency else ""
        say(f"  {name}: {one['sent']} sent, {one['failed']} otherwise than meant{times}")
    servers = {report["settings"]["mode"]: report, "native": report["native"]}
    for mode, server in servers.items():
        for name, found in (server["memory"]["second_half"] if server else {}).items():
            if found:
                say(
                    f"  memory, {mode}, {name}: {found['first_mb']:.0f} -> {found['last_mb']:.0f} MB, "
                    f"{found['slope_mb_per_minute']:+.1f} MB/min"
                )
    say("\npassed" if report["passed"] else "\nFAILED")


def sizes(text: str) -> tuple[int, int]:
    low, _, high = text.partition("-")
    if not (low.isdecimal() and high.isdecimal() and 2 <= int(low) <= int(high)):
        raise argparse.ArgumentTypeError(f"must be LOW-HIGH, integers with 2 <= LOW <= HIGH, got {text!r}")
    return int(low), int(high)


def parse_options(argv: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    shown = "(default: %(default)s)"
    parser.add_argument(
        "--seconds",
        type=float,
        default=60,
        help=f"of traffic; more, up to --budget, until every kind was sent and memory sampled often enough {shown}",
    )
    parser.add_argument("--model", type=Path, default=Path("build/m3tiny"), help=f"made when it is missing {shown}")
    parser.add_argument("--mode", default="auto", help=f"PAGEWEAVER_MODE {shown}")
    parser.add_argument(
        "--verify-every", type=int, default=13, help=f"no multiple of the sparse layers' number {shown}"
    )
    parser.add_argument("--concurrency", type=int, default=8, help=f"prompts of a burst {shown}")
    parser.add_argument("--burst", type=sizes, default=(1024, 8192), metavar="LOW-HIGH", help="(default: 1024-8192)")
    parser.add_argument("--long", type=int, default=65536, help=f"tokens of a long prompt {shown}")
    parser.add_argument("--context", type=int, default=131072, help=f"--context-length of the server {shown}")
    parser.add_argument("--interval", type=float, default=2, help=f"seconds between two samples of memory {shown}")
    parser.add_argument("--compare-native", action="store_true", help="a second server beside it, in mode native")
    parser.add_argument("--max-growth", type=float, default=64, help=f"MB, each scheduler, second half {shown}")
    parser.add_argument("--max-other-growth", type=float, default=256, help=f"MB, all other processes {shown}")
    parser.add_argument("--max-gpu-growth", type=float, default=64, help=f"MB of GPU memory, second half {shown}")
    parser.add_argument("--max-nrms", type=float, default=0.04, help=shown)
    parser.add_argument("--tie", type=float, default=0.5, help=f"largest log probability gap of a near-tie {shown}")
    parser.add_argument("--expected-fallback", action="append", default=[], metavar="TEXT", help="part of a reason")
    parser.add_argument("--budget", type=float, default=540, help=f"seconds for everything {shown}")
    parser.add_argument("--start-timeout", type=float, default=300, help=f"seconds for the start {shown}")
    parser.add_argument("--request-timeout", type=float, default=120, help=f"seconds for one request {shown}")
    parser.add_argument("--patience", type=float, default=8, help=f"seconds the server gets to end {shown}")
    parser.add_argument("--port", type=int, default=30001, help=shown)
    parser.add_argument("--seed", type=int, default=1, help=shown)
    parser.add_argument("--logs", type=Path, default=Path("build/soak"), help=f"folder of the server's log {shown}")
    parser.add_argument("--json", type=Path, default=Path("benchmarks/results/h200/soak-tiny-m3.json"), help=shown)
    parser.add_argument("--commit", help="commit to note in the report, for a copy of the sources without its history")
    parser.add_argument("--server-cmd", help="program to run instead of `python -m sglang.launch_server`")
    parser.add_argument("server_arguments", nargs="*", help="more arguments for the server, after --")
    options = parser.parse_args(argv)
    for name in ("seconds", "verify_every", "concurrency", "long", "interval", "budget"):
        if getattr(options, name) <= 0:
            parser.error(f"--{name.replace('_', '-')}: must be above 0, got {getattr(options, name)}")
    if options.long < options.burst[1]:
        parser.error(f"--long: at least the longest prompt of a burst, {options.burst[1]}, got {options.long}")
    if options.compare_native and options.mode == "native":
        parser.error("--compare-native: --mode is native already, so that there is nothing to compare")
    return options


def main(argv: Sequence[str] | None = None) -> int:
    options = parse_options(argv)
    return serve_check.run(options, soak, print_report, {options.model: (Q_HEADS, KV_HEADS)})


if __name__ == "__main__":
    sys.exit(main())
