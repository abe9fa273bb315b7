"""``python -m pageweaver_sglang.serving_ab.worker MODULE``: one process that runs MODULE's client once per load.

Importing SGLang's client takes longer than many a load. So it is imported once, and each load calls the function that
its command line calls (``cli_main``) with the same arguments in ``sys.argv``: it parses them, seeds its generators,
loads the tokenizer and makes new prompts as in a process of its own. One line of JSON per message:

* from here, once: ``{"ready": true}``, or ``{"unusable": "why"}`` and the process ends;
* to here, per load: ``{"arguments": [...], "log": PATH}``; the client's output goes to that file;
* from here, per load: ``{"code": N}``, the exit code of the command line.

The end of the input ends it.
"""

from __future__ import annotations

import gc
import importlib
import json
import os
import sys
import traceback
from collections.abc import Callable
from typing import Any

ENTRY = "cli_main"
"""What ``python -m sglang.benchmark.serving`` calls, in every supported version."""


def load(module: str) -> tuple[Callable[[], Any] | None, str]:
    """The client's entry point and its file's name; where there is none, None and why."""
    try:
        found = importlib.import_module(module)
    except BaseException as error:  # SystemExit too: a process per load will show what it says
        traceback.print_exc()
        return None, f"{module} can't be imported: {type(error).__name__}: {error}"
    entry = getattr(found, ENTRY, None)
    if not callable(entry):
        return None, f"{module} has no {ENTRY}()"
    return entry, str(found.__file__)


def run(entry: Callable[[], Any], arguments: list[str]) -> int:
    """Call the entry point as the command line would; returns the exit code."""
    sys.argv = arguments
    try:
        entry()
    except SystemExit as stop:
        if isinstance(stop.code, str):
            print(stop.code, file=sys.stderr)
        return stop.code if isinstance(stop.code, int) else int(stop.code is not None)
    except BaseException:
        traceback.print_exc()
        return 1
    return 0


def main() -> None:
    """Serve loads until the input ends."""
    # The client gets an empty input and the log as its output; messages have descriptors of their own.
    jobs, replies = os.fdopen(os.dup(0)), os.fdopen(os.dup(1), "w")
    own_log = os.dup(2)

    def direct(output: int) -> None:
        for stream in (sys.stdout, sys.stderr):
            stream.flush()
        os.dup2(output, 1)
        os.dup2(output, 2)

    def reply(message: dict[str, Any]) -> None:
        replies.write(json.dumps(message) + "\n")
        replies.flush()

    with open(os.devnull, "rb") as nothing:
        os.dup2(nothing.fileno(), 0)
    direct(own_log)
    entry, what = load(sys.argv[1])
    reply({"unusable": what} if entry is None else {"ready": True})
    if entry is None:
        return
    # What the imports made stays. Without this every collection goes through all of it, which takes up to a second.
    gc.collect()
    gc.freeze()
    for line in jobs:
        job = json.loads(line)
        gc.collect()  # what the load before left behind is not to be collected while this one is timed
        with open(job["log"], "wb") as log:
            direct(log.fileno())
            try:
                code = run(entry, [what, *job["arguments"]])
            finally:
                direct(own_log)
        reply({"code": code})


if __name__ == "__main__":
    main()
