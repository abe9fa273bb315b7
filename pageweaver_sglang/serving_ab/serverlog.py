"""What a server's log says about Step 3."""

from __future__ import annotations

import re
from dataclasses import dataclass, field

# What the plugin logs (pageweaver_sglang/plugin: backend.status_line, step3.Step3, operations, timing.Step3Timer).
STATUS = re.compile(r"pageweaver STATUS: (?P<text>mode (?P<mode>\w+), .*)")
FALLBACK = re.compile(
    r"pageweaver: (?:SGLang's own Step 3 serves calls with: |(?=switched off by|DISABLED in process))(?P<reason>.*)"
)
_TIMING = re.compile(
    r"pageweaver timing: process (?P<process>\d+) calls (?P<calls>\d+) tokens (?P<tokens>\d+) "
    r"step3 (?P<seconds>[\d.]+) s"
)
# What Triton prints with TRITON_PRINT_AUTOTUNING; other processes' lines can come in between.
_TUNED = re.compile(
    r"Triton autotuning for function (?P<kernel>\w+),\s*\nwith key as (?P<key>.*),\s*\n"
    r"finished after (?P<seconds>[\d.]+)s,\s*\nbest config selected: (?P<config>.*);"
)


@dataclass(frozen=True)
class Step3Time:
    """Step 3 in one process since its start: calls, tokens summed over the calls, seconds on the GPU."""

    calls: int = 0
    tokens: int = 0
    seconds: float = 0.0


@dataclass
class LogFacts:
    """What a log says so far."""

    status: str | None = None
    mode: str | None = None
    fallbacks: list[str] = field(default_factory=list)
    """Reasons for which calls were handed back to SGLang's Step 3."""
    tuned: list[dict[str, str]] = field(default_factory=list)
    """Triton's choices: ``kernel``, ``key``, ``config``, ``seconds``."""
    step3: dict[str, Step3Time] = field(default_factory=dict)
    """By process id, where Step 3 is timed."""


def read_log(text: str) -> LogFacts:
    """Read a log; the timings are cumulative, so that the last line of a process counts."""
    facts = LogFacts()
    for line in text.splitlines():
        if found := STATUS.search(line):
            facts.status, facts.mode = found["text"], found["mode"]
        elif found := FALLBACK.search(line):
            facts.fallbacks.append(found["reason"])
        elif found := _TIMING.search(line):
            time = Step3Time(int(found["calls"]), int(found["tokens"]), float(found["seconds"]))
            facts.step3[found["process"]] = time
    facts.fallbacks = list(dict.fromkeys(facts.fallbacks))
    facts.tuned = [found.groupdict() for found in _TUNED.finditer(text)]
    return facts


def step3_between(before: LogFacts, after: LogFacts) -> Step3Time | None:
    """Step 3's time between two readings of a log, of the process that spent most; None when none was timed.

    Ranks of tensor parallelism run the same calls at the same time, so that their times don't add up.
    """
    spent = []
    for process, now in after.step3.items():
        then = before.step3.get(process, Step3Time())
        spent.append(Step3Time(now.calls - then.calls, now.tokens - then.tokens, now.seconds - then.seconds))
    most = max(spent, key=lambda time: time.seconds, default=None)
    return most if most is not None and most.calls else None
