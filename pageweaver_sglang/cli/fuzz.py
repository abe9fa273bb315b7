"""``pageweaver fuzz``: random calls of the kernels against plain masked attention."""

from __future__ import annotations

import argparse
import json
import shlex
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from pageweaver_sglang.bench import environment
from pageweaver_sglang.fuzz import campaign
from pageweaver_sglang.fuzz.campaign import Failure, Settings, Tally
from pageweaver_sglang.fuzz.variants import VARIANTS

from .options import add_commit_option, positive
from .output import claim, make_console, say_error

HELP = """random calls of the kernels, each compared with plain attention in float64
Shapes, lengths, page ids (holes, repeats, past the end, huge), page tables, layouts, scales, settings and buffers vary;
cells of the caches that belong to no token hold NaN. Every row of every output must be within a bound that follows from
rounding; some calls are also compared bit for bit (the other engine; regroup and unions against the reference), and
some are calls that must be refused. A seed is a call: `--seed N --calls 1` makes call N again and compares everything.
Exit code 0: nothing wrong. 1: something is. 2: it can't run here, or the report can't be written."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of ``pageweaver fuzz``."""
    parser.add_argument("--calls", type=positive, default=100_000, help="default: %(default)s")
    parser.add_argument("--seed", type=int, default=0, help="of the first call; the next ones follow (default: 0)")
    parser.add_argument("--jobs", type=positive, default=8, help="processes, sharing the GPU (default: %(default)s)")
    parser.add_argument(
        "--device", choices=("cuda", "cpu"), default="cuda", help="cpu: the reference engine is tried (default: cuda)"
    )
    parser.add_argument(
        "--engines",
        type=_engines,
        metavar="NAME,NAME",
        help=f"of {', '.join(VARIANTS)}; others make other calls of the same seeds (default: all that run on the GPU)",
    )
    parser.add_argument(
        "--largest",
        type=positive,
        default=Settings.largest,
        metavar="N",
        help="tokens x KV heads x pages of a call, at most; another value makes other calls (default: %(default)s)",
    )
    parser.add_argument(
        "--batch",
        type=positive,
        default=Settings.batch,
        metavar="N",
        help="calls between two looks at the GPU's findings; 1 tells which call breaks it (default: %(default)s)",
    )
    parser.add_argument("--seconds", type=float, help="stop after so long, however many calls are left")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write a report with all figures")
    add_commit_option(parser)


def _engines(text: str) -> tuple[str, ...]:
    names = tuple(text.split(","))
    if not set(names) <= set(VARIANTS):
        raise argparse.ArgumentTypeError(f"{text!r} is no list of engines; choose from {', '.join(VARIANTS)}")
    return names


def run(arguments: argparse.Namespace) -> int:
    """Run a campaign and print what it found."""
    console = make_console()
    if arguments.seed < 0:
        say_error("fuzz", f"--seed must be an integer >= 0, got {arguments.seed}")
        return 2
    if arguments.device == "cuda" and (reason := _unusable()):
        say_error("fuzz", f"can't run: {reason}")
        return 2
    if arguments.json is not None:
        try:
            claim(arguments.json)
        except OSError as error:
            say_error("fuzz", error)
            return 2
    settings = Settings(
        seed=arguments.seed,
        calls=arguments.calls,
        jobs=arguments.jobs,
        device=arguments.device,
        largest=arguments.largest,
        variants=arguments.engines,
        batch=arguments.batch,
        seconds=arguments.seconds,
    )
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console) as progress:
        task = progress.add_task("calls", total=settings.calls)

        def show(tally: Tally) -> None:
            wrong = f" [red]{len(tally.failures)} wrong[/]" if tally.failures else ""
            progress.update(task, completed=tally.calls, description=f"calls{wrong}")

        tally, times = campaign.run(settings, show)
    document = campaign.report(settings, tally, times, environment.describe(arguments.commit))
    _print(console, document, tally.failures, settings)
    if arguments.json is not None:
        arguments.json.write_text(json.dumps(document, indent=1) + "\n")
        console.print(f"report: {arguments.json}", markup=False, highlight=False, soft_wrap=True)
    return 0 if document["passed"] else 1


def _unusable() -> str | None:
    """Why no engine can run here; builds the kernels where they can."""
    import torch

    from pageweaver_sglang.cuda import loader
    from pageweaver_sglang.cuda.support import OLDEST

    if not torch.cuda.is_available():
        return "no CUDA device; --device cpu tries the reference engine"
    if (capability := torch.cuda.get_device_capability()) < OLDEST:
        needed, has = (".".join(map(str, pair)) for pair in (OLDEST, capability))
        return f"the kernels need a GPU of compute capability {needed} or newer, this one has {has}"
    try:
        loader.build(architecture=loader.architecture_of(capability))
    except loader.KernelBuildError as error:
        return str(error)
    return None


def _print(console: Console, document: dict, failures: list[Failure], settings: Settings) -> None:
    rate = document["calls"] / document["seconds"] if document["seconds"] else 0.0
    times = f"{document['seconds']:.1f} s ({rate:.0f} a second; start {document['start_seconds']:.1f} s)"
    console.print(f"{document['calls']} calls in {times}", highlight=False)
    table = Table(title="coverage", show_header=False, title_justify="left")
    for dimension, values in document["coverage"].items():
        table.add_row(dimension, ", ".join(f"{value}: {count}" for value, count in values.items()))
    console.print(table)
    ratios = "; ".join(f"{kind} {ratio:.2f}" for kind, ratio in document["largest_error_in_bounds"].items())
    console.print(f"largest error of a row, in units of its bound: {ratios or 'none'}", highlight=False)
    for failure in failures:
        options = {"seed": failure.seed, "calls": 1, "device": settings.device, "largest": settings.largest}
        if settings.variants is not None:
            options["engines"] = ",".join(settings.variants)
        if failure.last_seed is not None:
            options |= {"calls": failure.last_seed - failure.seed + 1, "jobs": 1, "batch": 1}
        again = shlex.join(["pageweaver", "fuzz", *(f"--{name}={value}" for name, value in options.items())])
        console.print(f"\n[red]wrong:[/] {again}", highlight=False, soft_wrap=True)
        for problem in failure.problems:
            console.print(f"  {problem}", highlight=False, markup=False, soft_wrap=True)
    console.print("[green]nothing wrong[/]" if document["passed"] else f"[red]{len(failures)} calls wrong[/]")
