"""``pageweaver capture``: record Step 3 calls of a server, switch that on and off, and see how it stands."""

from __future__ import annotations

import argparse
import shlex
from pathlib import Path
from typing import Any

import yaml
from rich.console import Console
from rich.table import Table

from pageweaver_sglang.capture.control import (
    CONTROL_NAME,
    CaptureError,
    Control,
    read_control,
    read_states,
    write_control,
)
from pageweaver_sglang.config import ENV_PREFIX, Config, ConfigError

from .output import make_console, say_error

HELP = """record the inputs of Step 3 calls of a running server, in any mode, native included
Without an action: prints how to start a server that records into the folder. A server that was started with
PAGEWEAVER_CAPTURE_DIR follows --on and --off within two seconds; --off before its start makes it wait for --on.
Recording never holds up or fails a request: what can't be recorded in time is dropped and counted (--status).
Each call becomes one .npz file, named by layer, call, rank and process; `pageweaver inspect FOLDER` reads them.
--activations stores parts of prompts in numbers from which text could be guessed, and much more data.
Exit code 0: done. 2: a wrong option, or the folder can't be used."""

_OPTIONS: dict[str, tuple[str, str]] = {
    "layers": ("N,N", "layers to record (default: all)"),
    "chunks": ("N,N", "prefill chunks to record: prefix divided by SGLang's chunk size (default: all)"),
    "every": ("N", "every n-th call of a layer (default: 1)"),
    "max_mb": ("N", "end when a process has written N MB (default: 1024)"),
    "max_calls": ("N", "end when a process has written N calls (default: 1000)"),
    "max_seconds": ("N", "end N seconds after the first call (default: 600)"),
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of ``pageweaver capture``."""
    parser.add_argument("--dir", required=True, type=Path, metavar="FOLDER", help="where the calls are recorded")
    action = parser.add_mutually_exclusive_group()
    action.add_argument("--on", action="store_true", help="start recording in a running server, bounds counted anew")
    action.add_argument("--off", action="store_true", help="stop recording in a running server")
    action.add_argument("--status", action="store_true", help="what the recording processes have done")
    for name, (metavar, text) in _OPTIONS.items():
        parser.add_argument("--" + name.replace("_", "-"), metavar=metavar, help=text)
    parser.add_argument(
        "--activations", action="store_true", help="also record Q, the output and the K/V pages that were picked"
    )


def run(arguments: argparse.Namespace) -> int:
    """Do what was asked for and return the exit code."""
    console = make_console()
    try:
        settings = settings_of(arguments)
        folder = arguments.dir.expanduser().absolute()
        if arguments.status:
            _show_status(folder, console)
        elif arguments.on or arguments.off:
            folder.mkdir(parents=True, exist_ok=True)
            write_control(folder, Control(enabled=arguments.on, settings=settings))
            _say_switched(folder, arguments.on, console)
        else:
            _say_how_to_start(folder, settings, console)
    except (CaptureError, ConfigError, OSError, RuntimeError) as error:
        say_error("capture", error)
        return 2
    return 0


def settings_of(arguments: argparse.Namespace) -> dict[str, Any]:
    """The ``capture_*`` settings that were given, as a control file holds them.

    Raises:
        ConfigError: a wrong value, or options that mean nothing with this action.
    """
    given: dict[str, Any] = {}
    for name in _OPTIONS:
        text = getattr(arguments, name)
        if text is None:
            continue
        try:
            value = yaml.safe_load(text)
            Config(**{f"capture_{name}": value})
        except (ConfigError, yaml.YAMLError, ValueError):
            allowed = Config.model_fields[f"capture_{name}"].description
            raise ConfigError(f"--{name.replace('_', '-')}: got {text!r}; allowed: {allowed}") from None
        given[f"capture_{name}"] = value
    if arguments.activations:
        given["capture_activations"] = True
    if given and (arguments.off or arguments.status):
        raise ConfigError(f"{'--off' if arguments.off else '--status'}: takes no other option than --dir")
    return given


def environment(folder: Path, settings: dict[str, Any]) -> dict[str, str]:
    """Variables that make a server record."""
    values = {"capture_dir": str(folder)} | settings
    texts = {name: str(value).lower() if isinstance(value, bool) else str(value) for name, value in values.items()}
    return {ENV_PREFIX + name.upper(): text for name, text in texts.items()}


def _say_how_to_start(folder: Path, settings: dict[str, Any], console: Console) -> None:
    line = " ".join(f"{name}={shlex.quote(value)}" for name, value in environment(folder, settings).items())
    console.print("Start a server that records from its first call, in whatever mode you serve:\n", highlight=False)
    command = "python -m sglang.launch_server --model-path MODEL --attention-backend pageweaver"
    # Not wrapped, so that it can be copied.
    console.print(f"{line} {command}\n", markup=False, highlight=False, soft_wrap=True)
    console.print(
        f"Put {ENV_PREFIX}MODE=native before it to look at SGLang's own Step 3.", markup=False, highlight=False
    )
    control = read_control(folder)
    if control is not None:
        state = "on" if control.enabled else "off"
        console.print(
            f"{folder / CONTROL_NAME} says {state} and goes before these settings.", style="yellow", markup=False
        )


def _say_switched(folder: Path, on: bool, console: Console) -> None:
    console.print(f"Recording into {folder}: {'on' if on else 'off'}.", markup=False, highlight=False)
    if not read_states(folder):
        console.print(
            f"No server has used this folder yet; start one with {ENV_PREFIX}CAPTURE_DIR={shlex.quote(str(folder))}.",
            markup=False,
            highlight=False,
        )


def _show_status(folder: Path, console: Console) -> None:
    if not folder.is_dir():
        raise CaptureError(f"{folder}: no such folder")
    states = read_states(folder)
    if not states:
        console.print(f"No process has recorded into {folder}.", markup=False, highlight=False)
        return
    table = Table(title=f"Recording into {folder}", title_justify="left")
    for column in ("rank", "process", "state", "calls", "MB", "dropped", "without activations"):
        table.add_column(column)
    for state in states:
        table.add_row(
            str(state.get("rank")),
            str(state.get("pid")),
            "recording" if state.get("recording") else f"ended: {state.get('ended')}",
            str(state.get("calls", 0)),
            str(state.get("mb", 0)),
            _reasons(state.get("dropped")),
            _reasons(state.get("indices_only")),
        )
    console.print(table)


def _reasons(counts: Any) -> str:
    return ", ".join(f"{count} {reason}" for reason, count in counts.items()) if isinstance(counts, dict) else ""
