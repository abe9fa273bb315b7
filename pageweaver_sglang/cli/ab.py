"""``pageweaver ab``: serve a model in several arms, drive them with SGLang's own client, and compare."""

from __future__ import annotations

import argparse
import json
import os
import shlex
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeElapsedColumn
from rich.progress import Progress as Bar
from rich.table import Table

from pageweaver_sglang.bench.server import one_stop
from pageweaver_sglang.config import ConfigError, load_config
from pageweaver_sglang.serving_ab.session import Progress, run_session
from pageweaver_sglang.serving_ab.settings import ARMS, AbError, Cell, Settings

from .options import add_commit_option
from .output import make_console, say_error

HELP = """compare the arms in served models, with SGLang's own benchmark client
Every block starts one server per arm, warms it up and sends prompts of random token ids that ask for one token; blocks
begin with different arms in turn. --side-by-side starts the servers of all arms once, at the same time, instead;
--one-server switches inside one. After all blocks Step 3 is timed in the same servers, outside the comparison, to tell
how much there is to gain. After -- come more arguments for the servers.
Exit code 0: everything was measured. 1: an arm or a load failed, calls were handed back to SGLang's Step 3, or prompts
came from a cache. 2: nothing could be measured. 130, 143: interrupted; FILE holds what was measured until then."""

IDLE_WORTH_A_WORD = 0.02


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of ``pageweaver ab``."""
    default = Settings("")
    listed = {name: ",".join(map(str, getattr(default, name))) for name in ("arms", "prompts", "concurrency")}
    parser.add_argument("--model", required=True, metavar="PATH", help="model to serve, as SGLang takes it")
    parser.add_argument(
        "--arms",
        type=lambda text: tuple(text.split(",")),
        default=default.arms,
        metavar="A,B",
        help=f"of {', '.join(ARMS)} (default: {listed['arms']}); ratios are to native, or to the first",
    )
    for name, text in (("prompts", "prompt lengths in tokens"), ("concurrency", "requests at a time")):
        parser.add_argument(
            f"--{name}",
            type=_integers,
            default=getattr(default, name),
            metavar="N,N",
            help=f"{text} (default: {listed[name]})",
        )
    for name, text in (
        ("blocks", "times that every arm is served"),
        ("requests", "requests per load and block"),
        ("seed", "of the prompts; the arms of a block get the same"),
    ):
        parser.add_argument(
            f"--{name}", type=int, default=getattr(default, name), metavar="N", help=f"{text} (default: %(default)s)"
        )
    ways = parser.add_mutually_exclusive_group()
    ways.add_argument(
        "--one-server",
        action="store_true",
        help="switch between native and one other arm inside one server, instead of a server per arm and block",
    )
    ways.add_argument(
        "--side-by-side",
        action="store_true",
        help="start one server per arm, all at the same time on the same GPUs, and drive one while the others idle; "
        "the server arguments must then hold --max-total-tokens, and --mem-fraction-static counts for one server (all "
        "together at most 0.9, which is divided where it is not given)",
    )
    parser.add_argument("--no-share", action="store_true", help="leave out the loads in which Step 3 is timed")
    parser.add_argument(
        "--out", type=Path, default=default.folder, metavar="DIR", help="folder for logs (default: %(default)s)"
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="the report (default: ab.json in that folder)")
    parser.add_argument(
        "--port", type=int, default=default.port, help="of the servers, side by side of the first (default: a free one)"
    )
    for name, text in (
        ("start-timeout", "for a server to be ready"),
        ("client-timeout", "for one load"),
        ("patience", "for a server to end before it is killed"),
    ):
        parser.add_argument(
            f"--{name}",
            type=float,
            default=getattr(default, name.replace("-", "_")),
            metavar="S",
            help=f"seconds {text} (default: %(default)g)",
        )
    parser.add_argument("--server-cmd", metavar="CMD", help="instead of `python -m sglang.launch_server`")
    parser.add_argument("--client-cmd", metavar="CMD", help="instead of SGLang's benchmark client")
    parser.add_argument("--client-args", metavar="ARGS", help="more arguments for the client, in one string")
    add_commit_option(parser)
    parser.add_argument("server_arguments", nargs="*", metavar="-- SERVER ARGS", help="more arguments for the servers")


def _integers(text: str) -> tuple[int, ...]:
    return tuple(int(part) for part in text.split(","))


_integers.__name__ = "list of integers"  # what argparse calls it in its message


def settings_of(arguments: argparse.Namespace) -> Settings:
    """The comparison that the options ask for. Raises AbError."""
    try:
        load_config()
    except ConfigError as error:  # every server would say so, one after the other
        raise AbError(f"the servers would refuse to start: {error}") from error
    if arguments.model.startswith(("/", "./", "../", "~")) and not Path(arguments.model).expanduser().is_dir():
        raise AbError(f"--model {arguments.model}: there is no such folder")
    try:
        programs = [tuple(shlex.split(text or "")) for text in (arguments.server_cmd, arguments.client_cmd)]
        client_arguments = tuple(shlex.split(arguments.client_args or ""))
    except ValueError as error:
        raise AbError(f"--server-cmd, --client-cmd or --client-args: {error}") from error
    return Settings(
        model=arguments.model,
        arms=arguments.arms,
        prompts=arguments.prompts,
        concurrency=arguments.concurrency,
        blocks=arguments.blocks,
        requests=arguments.requests,
        seed=arguments.seed,
        share=not arguments.no_share,
        one_server=arguments.one_server,
        side_by_side=arguments.side_by_side,
        folder=arguments.out,
        server_arguments=tuple(arguments.server_arguments),
        client_arguments=client_arguments,
        server_program=programs[0],
        client_program=programs[1],
        port=arguments.port,
        start_timeout=arguments.start_timeout,
        client_timeout=arguments.client_timeout,
        patience=arguments.patience,
    )


class _Shown(Progress):
    """A bar, and a line per load above it."""

    def __init__(self, console: Console):
        columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
        self.console = console
        self.bar = Bar(*columns, console=console, transient=True)
        self.task = self.bar.add_task("starting", total=None)

    def begin(self, steps: int) -> None:
        self.bar.update(self.task, total=steps)

    def now(self, text: str) -> None:
        self.bar.update(self.task, description=text)

    def advance(self) -> None:
        self.bar.advance(self.task)

    def reach(self, steps: int) -> None:
        self.bar.update(self.task, completed=steps)

    def note(self, text: str) -> None:
        self.console.print(text, markup=False, highlight=False)


def run(arguments: argparse.Namespace) -> int:
    """Run the comparison; returns the exit code."""
    console = make_console()
    target: Path = arguments.json or arguments.out / "ab.json"
    latest: dict[str, Any] = {}

    def save(report: dict[str, Any]) -> None:
        # Another name first: whoever reads the file meanwhile, or a crash, finds a whole report.
        latest.update(report)
        partial = target.with_name(target.name + ".part")
        partial.write_text(json.dumps(report, indent=1) + "\n")
        os.replace(partial, target)

    shown = _Shown(console)
    try:
        settings = settings_of(arguments)
        for folder in (arguments.out, target.parent):
            folder.mkdir(parents=True, exist_ok=True)
        with one_stop(), shown.bar:
            run_session(settings, save, shown, arguments.commit)
    except (AbError, OSError) as error:
        say_error("ab", error)
        return 2
    except (KeyboardInterrupt, SystemExit) as stop:
        if latest:
            print_report(latest, console)
            console.print(f"Interrupted. What was measured: {target}", style="bold red", markup=False, highlight=False)
        return 130 if isinstance(stop, KeyboardInterrupt) else int(stop.code or 0)
    print_report(latest, console)
    console.print(f"Everything: {target}", markup=False, highlight=False)
    if not any(row["arms"] for row in latest["loads"]):
        return 2
    return 1 if latest["failures"] else 0


def print_report(report: Mapping[str, Any], console: Console) -> None:
    """Tables and remarks."""
    console.print(loads_table(report))
    if report["step3"]:
        console.print(step3_table(report))
    for text in remarks(report):
        console.print(text, markup=False, highlight=False)
    for text in report["failures"]:
        console.print(f"FAILED: {text}", style="bold red", markup=False, highlight=False)


def _span(figures: Mapping[str, float] | None, digits: int) -> str:
    if figures is None:
        return "-"
    return f"{figures['median']:,.{digits}f} ({figures['min']:,.{digits}f}-{figures['max']:,.{digits}f})"


def loads_table(report: Mapping[str, Any]) -> Table:
    """Every load with every arm."""
    settings = report["settings"]
    base, blocks = settings["base"], settings["blocks"]
    table = Table(
        title=f"Serving {settings['model']}: median (min-max) of {blocks} blocks x {settings['requests']} requests",
        caption=f"times {base}: paired by block, above 1 is faster · TTFT: over the requests of all blocks, in ms",
        title_justify="left",
        caption_justify="left",
    )
    table.add_column("load")
    table.add_column("arm")
    for column in ("input tokens/s", f"times {base}", "TTFT median", "mean", "p99", f"times {base}"):
        table.add_column(column, justify="right")
    for row in report["loads"]:
        for number, arm in enumerate(settings["arms"]):
            load = str(Cell(row["prompt"], row["concurrency"])) if number == 0 else ""
            last = number == len(settings["arms"]) - 1
            if (figures := row["arms"].get(arm)) is None:
                table.add_row(load, arm, *["-"] * 6, end_section=last)
                continue
            ttft = figures["ttft_ms"]
            table.add_row(
                load,
                arm,
                _span(figures["input_throughput"], 0),
                "1" if arm == base else _span(figures["times_throughput"], 3),
                *(f"{ttft[key]:,.1f}" if ttft else "-" for key in ("median", "mean", "p99")),
                "1" if arm == base else _span(figures["times_ttft"], 3),
                end_section=last,
            )
    return table


def step3_table(report: Mapping[str, Any]) -> Table:
    """What Step 3 takes."""
    table = Table(
        title="Step 3 of attention, from more loads per arm, after the blocks, in which it was timed",
        caption="share: of the time in which the server had requests · at most: if Step 3 took no time at all",
        title_justify="left",
        caption_justify="left",
    )
    for number, column in enumerate(("load", "arm", "ms per request", "share", "at most")):
        table.add_column(column, justify="right" if number > 1 else "left")
    former = None
    for row in report["step3"]:
        load = str(Cell(row["prompt"], row["concurrency"]))
        table.add_row(
            load if load != former else "",
            row["arm"],
            f"{row['step3_ms']:,.2f}",
            "-" if row["share"] is None else f"{row['share']:.1%}",
            "-" if row["at_most"] is None else f"{row['at_most']:.2f} times",
        )
        former = load
    return table


def remarks(report: Mapping[str, Any]) -> list[str]:
    """What a reader has to know beside the figures."""
    found = [
        f"Arms were switched by {report['switching']}. Warm-up: {report['warm_up']}.",
        f"SGLang's client: {report['client']['how']}.",
    ]
    if pools := {run["kv_pool_tokens"] for run in report["runs"] if "kv_pool_tokens" in run}:
        found.append(f"KV pool of every server: {', '.join(f'{tokens:,}' for tokens in sorted(pools))} tokens.")
    requests = [a["ttft_ms"]["requests"] for row in report["loads"] for a in row["arms"].values() if a["ttft_ms"]]
    if requests and min(requests) < 100:
        found.append(f"p99 of {min(requests)} requests is close to their largest.")
    missing = sum(a["ttft_ms"]["missing"] for row in report["loads"] for a in row["arms"].values() if a["ttft_ms"])
    if missing:
        found.append(f"{missing} answers came without text, so the client has no time to first token for them.")
    idle = report["idle_share"]
    if idle is not None and idle > IDLE_WORTH_A_WORD:
        found.append(
            f"Up to {idle:.0%} of the client's time no request was under way, which pulls ratios of throughput towards "
            "1: rely on TTFT, or send more requests."
        )
    return found
