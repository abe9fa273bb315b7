"""``pageweaver switch``: make running servers serve with SGLang's own Step 3, or with PageWeaver again."""

from __future__ import annotations

import argparse
import time
from pathlib import Path
from typing import Any

from rich.markup import escape
from rich.table import Table

from pageweaver_sglang.config import ConfigError, load_config
from pageweaver_sglang.plugin import control

from .output import make_console, say_error

HELP = """switch PageWeaver off and on in running servers, without a restart
off: every process hands all calls to SGLang's own Step 3, within a second. on: PageWeaver serves again, also in a
process that an error has disabled. status: what every process does, and why.
Acts on all servers of this user on this machine whose setting control_dir is the same (by default it is); the switch
stays as it is for servers that start later. A prefill that a full CUDA graph has captured stays as it was captured.
Exit code 0: done, and every process has confirmed. 1: none runs, or one has not confirmed. 2: the folder can't be
used."""

WAIT_SECONDS = 3.0


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of ``pageweaver switch``."""
    parser.add_argument("action", choices=("off", "on", "status"))
    parser.add_argument(
        "--dir", type=Path, metavar="FOLDER", help="the servers' control_dir (default: as settings and variables say)"
    )


def run(arguments: argparse.Namespace) -> int:
    """Do what was asked for and return the exit code."""
    console = make_console()
    try:
        folder = arguments.dir if arguments.dir is not None else load_config().control_dir
        if arguments.action == "status":
            folder = control.chosen_folder(folder)
            wanted = control.stamp(folder)
        else:
            folder = control.prepare_folder(folder)
            wanted = control.write_switch(folder, arguments.action == "on")
        states = _wait(folder, wanted)
        on = control.read_switch(folder) is not False
    except (control.ControlError, ConfigError, OSError) as error:
        say_error("switch", error)
        return 2
    console.print(f"{folder}: {'on' if on else 'off'}", markup=False, highlight=False)
    if not states:
        console.print("No server uses this folder now; one that starts will follow it.", highlight=False)
        return 1
    console.print(_table(states, wanted))
    return 0 if all(control.followed(state, wanted) for state in states) else 1


def _wait(folder: Path, wanted: control.Stamp | None) -> list[dict[str, Any]]:
    """The states of the running processes, once all have followed the switch or the time is up."""
    end = time.monotonic() + WAIT_SECONDS
    while True:
        states = control.read_states(folder)
        if all(control.followed(state, wanted) for state in states) or time.monotonic() > end:
            return states
        time.sleep(0.05)


def _table(states: list[dict[str, Any]], wanted: control.Stamp | None) -> Table:
    table = Table()
    for column in ("rank", "process", "Step 3 is served by", "calls so far", "handed back because of"):
        table.add_column(column)
    for state in states:
        serving = str(state.get("serving"))
        if why := state.get("why"):
            serving += f" ({why})"
        if not control.followed(state, wanted):
            serving += " (has not confirmed)"
        if captured := state.get("captured_calls"):
            serving += f"; CUDA graphs hold {captured} calls of PageWeaver's"
        cells = (state.get("rank"), state.get("pid"), serving, _counts(state.get("calls")))
        table.add_row(*(escape(str(cell)) for cell in (*cells, _counts(state.get("fallbacks")))))
    return table


def _counts(counts: Any) -> str:
    return ", ".join(f"{count} {name}" for name, count in counts.items()) if isinstance(counts, dict) else ""
