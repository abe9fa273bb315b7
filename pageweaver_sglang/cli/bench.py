"""``pageweaver bench``: every arm over the same inputs in one run, checked before it is timed, with a report."""

from __future__ import annotations

import argparse
import time
import traceback
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.markup import escape

import pageweaver_sglang as pw
from pageweaver_sglang.bench import environment, supervision
from pageweaver_sglang.bench.inputs import QUERY_HEADS_PER_KV_HEAD
from pageweaver_sglang.bench.protocol import ArmUnavailable, DeviceLost, Protocol
from pageweaver_sglang.bench.recorded import heads_of
from pageweaver_sglang.bench.report import files, page, plots
from pageweaver_sglang.bench.screening import load_for_bench
from pageweaver_sglang.bench.statistics import COLUMNS, compare_runs
from pageweaver_sglang.bench.workloads import WorkloadNotFound, find_workload, workload_names
from pageweaver_sglang.cuda.support import MAX_GQA_RATIO

from . import bench_tables as tables
from .demo import describe_workload, sentence
from .options import add_commit_option, add_protocol_options, positive
from .output import make_console, say_error

HELP = """measure every arm on one or more workloads and write a report
Needs an H100 or H200; --reference counts pages on any machine instead. Every arm is compared with a float64
reference before it is timed; one that is off is refused, one that can't run says why. PageWeaver's own arms must run.
Measures in a process of its own: an arm that crashes or hangs it is left out, and the others are measured again.
Writes arms-WORKLOAD.json as soon as a workload is measured (arms-WORKLOAD-8heads.json with 8 query heads per KV head),
then PNG plots and report.html, to the output folder.
Exit code 0: all is well. 1: a check failed. 2: nothing could be measured (bad workload, no such GPU, bad file)."""

DEFAULT_WORKLOAD = "ctx64k_a"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of ``pageweaver bench``."""
    known = ", ".join(workload_names())
    parser.add_argument(
        "inputs",
        nargs="*",
        metavar="WORKLOAD",
        help=f"{known}, or .npz files (default: {DEFAULT_WORKLOAD}); with --report-only: JSON files",
    )
    what = parser.add_mutually_exclusive_group()
    what.add_argument(
        "--reference", action="store_true", help="count pages only, with the reference engine, on any machine"
    )
    what.add_argument("--report-only", action="store_true", help="rebuild the report from JSON files of earlier runs")
    what.add_argument(
        "--compare", nargs=2, type=Path, metavar=("A.json", "B.json"), help="how far the ratios of two runs differ"
    )
    parser.add_argument(
        "--out",
        type=Path,
        default=Path("bench-results"),
        metavar="DIR",
        help="folder to write to (default: %(default)s)",
    )
    parser.add_argument("--arms", type=_names, metavar="A,B", help="only these arms (a wrong name lists them all)")
    parser.add_argument(
        "--columns",
        type=_columns,
        default=tuple(COLUMNS),
        metavar="A,B",
        help=f"timings to take (default: {','.join(COLUMNS)})",
    )
    add_protocol_options(parser)
    parser.add_argument(
        "--heads-per-kv-head",
        type=_heads,
        metavar="N",
        help=f"query heads per KV head of random Q, 1 to {MAX_GQA_RATIO} (default: "
        f"{QUERY_HEADS_PER_KV_HEAD}; recorded queries have their own)",
    )
    parser.add_argument("--full", action="store_true", help="compare all queries with float64 (minutes)")
    parser.add_argument(
        "--patience",
        type=positive,
        default=600,
        metavar="S",
        help="seconds that a step of an arm may take, compiling included, until it is left out (default: %(default)s)",
    )
    parser.add_argument("--seed", type=int, default=0, help="of random Q, K, V and of samples (default: %(default)s)")
    add_commit_option(parser)


def _names(text: str) -> tuple[str, ...]:
    from pageweaver_sglang.bench.catalogue import arm_names

    names, known = tuple(name for name in text.split(",") if name), arm_names()
    unknown = [name for name in names if name not in known]
    if unknown or not names:
        raise argparse.ArgumentTypeError(f"no arm {', '.join(unknown) or text!r}; the arms are {', '.join(known)}")
    return names


def _columns(text: str) -> tuple[str, ...]:
    names = tuple(name for name in text.split(",") if name)
    if not names or set(names) - set(COLUMNS):
        raise argparse.ArgumentTypeError(f"timings are {', '.join(COLUMNS)}, got {text!r}")
    return names


def _heads(text: str) -> int:
    if not text.isdecimal() or not 1 <= int(text) <= MAX_GQA_RATIO:
        raise argparse.ArgumentTypeError(f"must be an integer in 1..{MAX_GQA_RATIO}, got {text!r}")
    return int(text)


class _Refused(Exception):
    """Nothing can be measured; the message says why."""


def run(arguments: argparse.Namespace) -> int:
    """Run the benchmark, or rebuild or compare reports; returns the exit code."""
    console = make_console()
    try:
        if arguments.compare:
            return compare_reports(arguments.compare, console)
        if arguments.report_only:
            if not arguments.inputs:
                raise _Refused("--report-only needs JSON files of earlier runs")
            reports = files.read_reports([Path(name) for name in arguments.inputs])
            write_outputs(reports, arguments.out, console)
            return 0
        return measure_all(arguments, console)
    except (_Refused, supervision.Refused, WorkloadNotFound, ValueError, OSError) as error:
        say_error("bench", error)
        return 2


@dataclass(frozen=True)
class _Loaded:
    """A workload: its name (of a recorded one) or path, its contents, and query heads per KV head."""

    name: str
    workload: pw.Workload
    heads: int

    @property
    def label(self) -> str:
        """What its report is called."""
        return files.label(self.name, self.heads)


def load_all(arguments: argparse.Namespace) -> list[_Loaded]:
    """Read and check every workload before anything runs."""
    loaded = []
    for given in arguments.inputs or [DEFAULT_WORKLOAD]:
        path = find_workload(given)
        recorded = path.stem in (given, *workload_names())
        workload = load_for_bench(path)
        try:
            heads = heads_of(workload, arguments.heads_per_kv_head)
        except ValueError as error:
            raise _Refused(f"{path}: {error}") from None
        loaded.append(_Loaded(path.stem if recorded else str(path), workload, heads))
    labels = [one.label for one in loaded]
    twice = sorted({label for label in labels if labels.count(label) > 1})
    if twice:
        raise _Refused(f"two workloads are called {', '.join(twice)}: their reports would overwrite each other")
    return loaded


def measure_all(arguments: argparse.Namespace, console: Console) -> int:
    """Measure (or count) every workload, write as it goes, and build the report."""
    labels = {one.name: one.label for one in load_all(arguments)}
    names = list(labels)
    written: list[str] = []
    trouble = None
    if arguments.reference:
        count_workloads(arguments, console)
        written = names
    else:
        try:
            supervision.supervise(
                partial(measure_workloads, arguments, environment.command_line()),
                names,
                patience=arguments.patience,
                on_done=written.append,
                on_loss=lambda text: console.print(f"LOST: {text}", style="bold red", markup=False, highlight=False),
            )
        except supervision.Crashed as error:
            trouble = str(error)
    targets = [arguments.out / files.file_name_of(labels[name], measured=not arguments.reference) for name in written]
    reports, missing = files.read_reports(targets), [name for name in names if name not in written]
    if reports:
        write_outputs(reports, arguments.out, console)
    for text in ([trouble] if trouble else []) + ([f"not measured: {', '.join(missing)}"] if missing else []):
        console.print(f"FAILED: {text}", style="bold red", markup=False, highlight=False)
    if not reports:
        return 2
    return 1 if trouble or missing or any(report["failures"] for report in reports) else 0


def count_workloads(arguments: argparse.Namespace, console: Console) -> None:
    """The logical comparison of every workload."""
    for one in load_all(arguments):
        sizes = _announce(one, console)
        found = count_one(one, console)
        _hand_over(_whole_report(found, sizes, arguments, environment.command_line()), arguments, console)


def measure_workloads(
    arguments: argparse.Namespace,
    command: str,
    names: Sequence[str],
    without: dict[str, str],
    report: supervision.Report,
) -> None:
    """Measure the named workloads on the GPU: what the process of its own does.

    A workload whose measurement fails is left without a report, and the next one is measured.
    """
    console = make_console()
    build_seconds = prepare_gpu()
    from pageweaver_sglang.bench.ceilings import measure_ceilings

    with console.status("Measuring what this GPU can do at best"):
        ceilings = measure_ceilings()
    for one in load_all(arguments):
        if one.name not in names:
            continue
        sizes = _announce(one, console)
        try:
            found = measure_one(one, arguments, without, ceilings, console, report)
        except DeviceLost:
            raise
        except Exception:  # arms are isolated already; whatever it is, the other workloads are still worth measuring
            console.print(
                f"FAILED: {one.name}\n{traceback.format_exc()}", style="bold red", markup=False, highlight=False
            )
            continue
        whole = _whole_report({**found, "kernel_build_s": build_seconds}, sizes, arguments, command)
        _hand_over(whole, arguments, console)
        report.done(one.name)


def _announce(one: _Loaded, console: Console) -> dict[str, Any]:
    sizes = describe_workload(one.name, one.workload, one.heads)
    console.print(f"[bold]Workload {escape(one.name)}[/]: {sentence(sizes)}")
    return sizes


def _whole_report(
    found: dict[str, Any], sizes: dict[str, Any], arguments: argparse.Namespace, command: str
) -> dict[str, Any]:
    """What was found with where and when it was."""
    return {
        "format": found.pop("format"),
        "environment": {**environment.describe(arguments.commit), "command": command},
        "seed": arguments.seed,
        "workload": sizes,
        **found,
    }


def _hand_over(report: dict[str, Any], arguments: argparse.Namespace, console: Console) -> None:
    """Write a report, then show it."""
    path = files.write_report(report, arguments.out)
    for table in tables.tables_of(report):
        console.print(table)
    if decided := report.get("arms", {}).get("auto", {}).get("notes"):
        order = {"original": "the original order"}.get(decided["order"], f"regrouping, {decided['order']}")
        console.print(f"auto ended with {order}.", style="dim", highlight=False)
    if report.get("random_tensors_because"):
        console.print(
            f"Q, K and V are random: {report['random_tensors_because']}.", style="dim", markup=False, highlight=False
        )
    for failure in report["failures"]:
        console.print(f"FAILED: {failure}", style="bold red", markup=False)
    console.print(f"Everything: {path}", markup=False, highlight=False)


def prepare_gpu() -> float:
    """Build PageWeaver's kernels; returns the seconds it took. Raises ValueError where this machine can't."""
    from pageweaver_sglang.bench import arms, compare

    reason = compare.unusable_gpu()
    if reason is not None:
        raise ValueError(f"{reason} --reference compares the arms' page counts on any machine.")
    try:
        return arms.build_kernels()
    except ArmUnavailable as error:
        raise ValueError(f"{error}.") from error


def count_one(one: _Loaded, console: Console) -> dict[str, Any]:
    """The logical comparison of one workload."""
    from pageweaver_sglang.bench.logical import logical_report

    with console.status("Finding orders and counting pages"):
        logical = logical_report(one.workload, one.name, heads_per_kv_head=one.heads)
    failures = [f"count {difference}" for difference in logical["differences"] or []]
    return {"format": files.FORMATS[1], "logical": logical, "failures": failures}


def measure_one(
    one: _Loaded,
    arguments: argparse.Namespace,
    without: dict[str, str],
    ceilings: dict[str, Any] | None,
    console: Console,
    report: supervision.Report,
) -> dict[str, Any]:
    """One workload on the GPU, with a progress bar, or with a line per stage where there is no terminal."""
    from pageweaver_sglang.bench.suite import Progress, Settings, run_workload

    settings = Settings(
        protocol=Protocol(arguments.rounds, arguments.calls),
        rows=None if arguments.full else arguments.rows,
        seed=arguments.seed,
        arms=arguments.arms,
        columns=arguments.columns,
        without=without,
        heads_per_kv_head=one.heads,
    )
    start = time.monotonic()
    with tables.progress_bar(console) as bar:
        task = bar.add_task("", total=None)
        stage = [""]

        def on_stage(text: str, steps: int) -> None:
            stage[0] = text
            bar.reset(task, total=steps, description=text)
            if not console.is_terminal:
                console.print(f"{time.monotonic() - start:6.1f} s  {text}", markup=False, highlight=False)

        def on_step(name: str) -> None:
            bar.update(task, advance=1, description=f"{stage[0]}: {name}")

        return run_workload(one.workload, one.name, settings, Progress(on_stage, on_step, report.begins), ceilings)


def write_outputs(reports: Sequence[dict[str, Any]], folder: Path, console: Console) -> None:
    """PNG plots and the HTML report."""
    folder.mkdir(parents=True, exist_ok=True)
    figures = plots.all_figures(reports)
    if not figures:
        console.print(plots.missing() or "There is nothing to plot.", markup=False, highlight=False)
    for name, png in figures.items():
        target = folder / "plots" / f"{name}.png"
        target.parent.mkdir(exist_ok=True)
        target.write_bytes(png)
    target = folder / "report.html"
    target.write_text(page.build_page(reports, figures))
    console.print(f"Report: {target} ({target.stat().st_size / 1e6:.2f} MB)", markup=False, highlight=False)


def compare_reports(paths: Sequence[Path], console: Console) -> int:
    """Print how far two runs' ratios differ."""
    first, second = files.read_reports(paths)
    for path, report in zip(paths, (first, second), strict=True):
        if "arms" not in report:
            raise _Refused(f"{path} holds counts only, no timings")
    found = compare_runs(first, second)
    console.print(tables.comparison_table(found))
    for name in found["only_in_one"]:
        console.print(f"{name} was timed in one of the two runs only", markup=False, highlight=False)
    name = first["workload"]["name"]
    console.print(
        f"{name}: ratios to {found['base']} differ by at most {found['largest']:.2%} between the two runs",
        markup=False,
        highlight=False,
    )
    return 0
