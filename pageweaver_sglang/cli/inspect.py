"""``pageweaver inspect``: what the page choices in workload files promise, in numbers, pictures and words."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.measure import Measurement
from rich.progress import Progress
from rich.table import Table

import pageweaver_sglang as pw
from pageweaver_sglang.bench.workloads import WorkloadNotFound, find_workload
from pageweaver_sglang.inspection import (
    GOOD_SAVING,
    LITTLE_SHARED,
    SMALL_SAVING,
    Inspection,
    combine,
    inspect_workload,
    verdict,
)

from .output import LOG_WIDTH, make_console, say_error

_EXPLAINED = 8  # files of which each gets a sentence; of more only the layers do

# Columns beside the file's name, from the widest table to the narrowest (see _cells).
_VISITS_COUNTED = ("visits", "W64 of visits", "W128 of visits")
_ROUNDS_COUNTED = ("rounds", "W64 of rounds", "W128 of rounds")
_VISITS_SAVED = ("visits", "W64 of visits saved", "W128 of visits saved")
_ROUNDS_SAVED = ("rounds", "W64 of rounds saved", "W128 of rounds saved")
_CALL = ("layer", "prefix + chunk", "overlap", "reuse")
_FULL = (*_CALL, *_VISITS_COUNTED, *_ROUNDS_COUNTED, "verdict")
_PERCENT = (*_CALL, *_VISITS_SAVED, *_ROUNDS_SAVED, "verdict")
_VISITS = (*_CALL, *_VISITS_SAVED, "verdict")
_NARROW = ("layer", "reuse", *_VISITS_SAVED, "verdict")

HELP = f"""say what regrouping would save on recorded or made workloads, and whether it is worth it
For every file: page visits, rounds and reuse in the original order and regrouped in windows of 64 and of 128 (groups
of 8, no guard), how much consecutive queries overlap, and a verdict. It goes by page visits with the guard on, as a
server has it: below {SMALL_SAVING:.0%} saved regrouping isn't worth it, from {GOOD_SAVING:.0%} it is, between them \
measure; below a reuse of {LITTLE_SHARED} there
is nothing to share. No GPU needed.
Exit code 0: everything was read. 1: some files can't be read. 2: none can, or a wrong option."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of ``pageweaver inspect``."""
    parser.add_argument(
        "paths", nargs="+", metavar="FILE|FOLDER|NAME", help=".npz files, folders of them, recorded workloads"
    )
    parser.add_argument("--json", metavar="REPORT", help="also write everything to REPORT; - prints only that")
    parser.add_argument(
        "--plots",
        type=Path,
        metavar="FOLDER",
        help="write a PNG per file: picked pages by query, and reuse by window (needs matplotlib)",
    )
    parser.add_argument("--head", type=int, default=0, metavar="N", help="KV head to plot (default: %(default)s)")


def run(arguments: argparse.Namespace) -> int:
    """Inspect the files, print, and return the exit code."""
    errors = Console(stderr=True)
    failures: list[str] = []

    def fail(text: str) -> None:
        failures.append(text)
        say_error("inspect", text, errors)

    if arguments.plots is not None:
        from pageweaver_sglang.inspection_plots import why_not

        if reason := why_not():
            fail(reason)
            return 2
    files = _files(arguments.paths, fail)
    found: dict[Path, Inspection] = {}
    plots: dict[Path, Path] = {}
    with Progress(console=errors, transient=True, disable=not sys.stderr.isatty()) as progress:
        for path in progress.track(files, description="Counting"):
            try:
                workload = pw.load_workload(path)
                found[path] = inspect_workload(workload)
                if arguments.plots is not None:
                    plots[path] = _plot(workload, path, files, arguments)
            except (OSError, ValueError) as error:
                fail(str(error))
    if not found:
        return 2
    report = _report(found, plots, failures)
    if arguments.json == "-":
        print(json.dumps(report, indent=1))
        return 1 if failures else 0
    console = make_console()
    _show(found, plots, console)
    if arguments.json:
        try:
            Path(arguments.json).parent.mkdir(parents=True, exist_ok=True)
            Path(arguments.json).write_text(json.dumps(report, indent=1) + "\n")
        except OSError as error:
            fail(f"{arguments.json}: cannot be written: {error.strerror}")
        else:
            console.print(f"Everything counted: {arguments.json}", markup=False, highlight=False)
    return 1 if failures else 0


def _files(paths: list[str], fail: Any) -> list[Path]:
    """The files that are meant, each once, in the given order; a folder's by name."""
    files: dict[Path, None] = {}
    for text in paths:
        path = Path(text)
        if path.is_dir():
            inside = sorted(file for file in path.glob("*.npz") if not file.name.startswith("."))
            if not inside:
                fail(f"{path}: has no .npz files")
            files.update(dict.fromkeys(inside))
            continue
        try:
            files[find_workload(text)] = None
        except WorkloadNotFound as error:
            fail(str(error))
    return list(files)


def _plot(workload: pw.Workload, path: Path, files: list[Path], arguments: argparse.Namespace) -> Path:
    from pageweaver_sglang.inspection_plots import plot_workload

    # Two files of one name get their folder's name as well.
    unique = [other.stem for other in files].count(path.stem) == 1
    name = path.stem if unique else f"{path.absolute().parent.name}-{path.stem}"
    target = arguments.plots / f"{name}.png"
    target.parent.mkdir(parents=True, exist_ok=True)
    plot_workload(workload, target, title=path.name, head=arguments.head)
    return target


def _report(found: dict[Path, Inspection], plots: dict[Path, Path], failures: list[str]) -> dict[str, Any]:
    files = []
    for path, one in found.items():
        files.append({"file": str(path)} | one.as_dict() | ({"plot": str(plots[path])} if path in plots else {}))
    return {
        "version": pw.__version__,
        "thresholds": {"little_shared": LITTLE_SHARED, "small_saving": SMALL_SAVING, "good_saving": GOOD_SAVING},
        "files": files,
        "layers": {str(layer): one.as_dict() for layer, one in _layers(found).items()},
        "together": combine(list(found.values())).as_dict(),
        "failures": failures,
    }


def _layers(found: dict[Path, Inspection]) -> dict[int, Inspection]:
    """Every layer's calls together, by layer; files that name none are left out."""
    layers = sorted({one.layer for one in found.values() if one.layer is not None})
    return {layer: combine([one for one in found.values() if one.layer == layer]) for layer in layers}


def _show(found: dict[Path, Inspection], plots: dict[Path, Path], console: Console) -> None:
    explained = {path.stem: one for path, one in found.items()} if len(found) <= _EXPLAINED else {}
    summary: dict[str, Inspection] = {}
    if len(found) > 1:
        layers = _layers(found)
        summary = {f"layer {layer} together": one for layer, one in layers.items()} if len(layers) < len(found) else {}
        summary["together"] = combine(list(found.values()))
        explained |= summary
    console.print(_table(found, summary, console))
    for name, one in explained.items():
        style = "bold" if name == "together" else None
        console.print(f"{name}: {verdict(one)[1]}", style=style, markup=False, highlight=False)
    for target in plots.values():
        console.print(f"Plot: {target}", markup=False, highlight=False)


def _table(found: dict[Path, Inspection], summary: dict[str, Inspection], console: Console) -> Table:
    """A row per file and per sum of files; in a narrow terminal fewer columns, so that no figure is cut."""
    full = _table_of(found, summary, _FULL)
    if console.width >= LOG_WIDTH:
        return full
    unbounded = console.options.update(max_width=1000)
    for columns in (_PERCENT, _VISITS):
        table = _table_of(found, summary, columns)
        if Measurement.get(console, unbounded, table).maximum <= console.width:
            return table
    return _table_of(found, summary, _NARROW)


def _table_of(found: dict[Path, Inspection], summary: dict[str, Inspection], columns: tuple[str, ...]) -> Table:
    where = "in brackets" if columns is _FULL else "W64, W128:"
    overlap = "overlap: mean Jaccard index of consecutive queries · "
    counted = "Page visits and rounds" if "rounds" in columns else "Page visits"
    table = Table(
        title=f"{counted}, groups of 8; {where} what regrouping saves",
        caption=overlap * ("overlap" in columns) + "reuse: queries that use a visited page, of 8",
        title_justify="left",
        caption_justify="left",
    )
    table.add_column("file", overflow="fold")
    for column in columns:
        left = column in ("prefix + chunk", "verdict")
        table.add_column(column.partition(" of ")[0], justify="left" if left else "right")
    for path, one in found.items():
        cells = _cells(one)
        table.add_row(escape(path.stem), *(cells[column] for column in columns))
    if summary:
        table.add_section()
        for name, one in summary.items():
            cells = _cells(one)
            table.add_row(name, *(cells[column] for column in columns))
    return table


def _cells(one: Inspection) -> dict[str, str]:
    """What can stand in a row, by column."""
    original = one.orders["original"]
    if len(one.requests) == 1:
        chunk, prefix = one.requests[0]
        where = f"{prefix:,} + {chunk:,}"
    else:
        where = f"{len(one.requests)} requests, {one.tokens:,} queries"
    cells = {
        "layer": "" if one.layer is None else str(one.layer),
        "prefix + chunk": where,
        "overlap": f"{one.overlap:.2f}",
        "reuse": f"{original.reuse:.2f}",
        "verdict": verdict(one)[0],
    }
    for kind in ("visits", "rounds"):
        cells[kind] = f"{getattr(original, kind):,}"
        for name in ("w64", "w128"):
            saved = f"{one.saving(name, kind):.1%}"
            cells[f"{name.upper()} of {kind}"] = f"{getattr(one.orders[name], kind):,} ({saved})"
            cells[f"{name.upper()} of {kind} saved"] = saved
    return cells
