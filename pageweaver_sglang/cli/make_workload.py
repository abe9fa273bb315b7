"""``pageweaver make-workload``: write made page choices to a workload file."""

from __future__ import annotations

import argparse
import json
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any

from rich.table import Table

from pageweaver_sglang.inspection import Inspection, inspect_workload
from pageweaver_sglang.synthetic import PRESETS, Recipe, make_workload, preset

from .output import explain, make_console, say_error

_PRESET_LINES = "\n".join(f"  {name:<14} {text}" for name, (text, _) in PRESETS.items())
HELP = f"""write a workload file of made page choices with given properties
Every query picks its most recent pages, some pages that are hot for all, and the selection of its query type, which
drifts from query to query. Equal options give equal choices. Presets:
{_PRESET_LINES}
Options change single values of the preset.
Exit code 0: written. 2: a wrong option, or the file can't be written."""

_OPTIONS: dict[str, tuple[Any, str]] = {
    "kv_heads": (int, "KV heads, each with choices of its own"),
    "k": (int, "pages per query"),
    "page_size": (int, "tokens per page"),
    "drift": (float, "how fast a selection drifts: share of it exchanged from one query of a type to the next, 0..1"),
    "noise": (float, "share of the selection replaced for a single query, 0..1"),
    "types": (int, "query types that interleave"),
    "streak": (int, "queries of one type in a row"),
    "interleave": (("cyclic", "random"), "which type comes next: the following one, or any"),
    "hot": (int, "pages of a request that all its queries tend to pick"),
    "hot_share": (float, "probability that a query picks a hot page, 0..1"),
    "local": (int, "most recent pages that every query picks, its own first"),
    "seed": (int, "of everything random"),
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of ``pageweaver make-workload``."""
    parser.add_argument("file", type=Path, metavar="FILE.npz", help="where to write")
    parser.add_argument(
        "--preset", choices=PRESETS, default="ctx64k", help="values to start from (default: %(default)s)"
    )
    parser.add_argument("--queries", type=int, metavar="N", help="queries of a single request, with --prefix")
    parser.add_argument("--prefix", type=int, metavar="N", help="tokens before them (alone: 0)")
    parser.add_argument(
        "--request",
        type=_request,
        action="append",
        metavar="QUERIES:PREFIX",
        help="one packed request; repeat for more, instead of --queries and --prefix",
    )
    for name, (kind, text) in _OPTIONS.items():
        option = "--" + name.replace("_", "-")
        if isinstance(kind, tuple):
            parser.add_argument(option, choices=kind, help=text)
        else:
            parser.add_argument(option, type=kind, metavar="X" if kind is float else "N", help=text)
    parser.add_argument(
        "--paired",
        action=argparse.BooleanOptionalAction,
        help="whether the selection holds fixed pairs of pages; with many types that favours pairing pages",
    )
    parser.add_argument("--json", type=Path, metavar="REPORT", help="also write the recipe and the counts to REPORT")


def _request(text: str) -> tuple[int, int]:
    queries, _, prefix = text.partition(":")
    return int(queries), int(prefix)


_request.__name__ = "QUERIES:PREFIX"  # what argparse calls it in its message


def recipe_of(arguments: argparse.Namespace) -> Recipe:
    """The recipe that the options mean. Raises ValueError for one that cannot be."""
    names = [field.name for field in fields(Recipe) if field.name != "requests"]
    changes = {name: getattr(arguments, name) for name in names if getattr(arguments, name) is not None}
    single = arguments.queries is not None or arguments.prefix is not None
    if single and arguments.request:
        raise ValueError("--request goes instead of --queries and --prefix")
    if arguments.request:
        changes["requests"] = tuple(arguments.request)
    elif single:
        if arguments.queries is None:
            raise ValueError("--prefix needs --queries")
        changes["requests"] = ((arguments.queries, arguments.prefix or 0),)
    return preset(arguments.preset, **changes)


def run(arguments: argparse.Namespace) -> int:
    """Make the workload, write it, print its counts, and return the exit code."""
    try:
        recipe = recipe_of(arguments)
        workload = make_workload(recipe)
        arguments.file.parent.mkdir(parents=True, exist_ok=True)
        workload.save(arguments.file)
        found = inspect_workload(workload)
        if arguments.json:
            arguments.json.parent.mkdir(parents=True, exist_ok=True)
            report = {"recipe": asdict(recipe), "counts": found.as_dict()}
            arguments.json.write_text(json.dumps(report, indent=1) + "\n")
    except (OSError, ValueError) as error:
        say_error("make-workload", explain(error).removeprefix("Recipe: ").removeprefix("Workload: "))
        return 2
    console = make_console()
    tokens = workload.topk_idx.shape[1]
    console.print(f"Wrote {arguments.file}: {tokens:,} queries, seed {recipe.seed}", markup=False, highlight=False)
    console.print(counts_table(found))
    return 0


def counts_table(found: Inspection) -> Table:
    """Visits, rounds and reuse of every order, groups of 8."""
    table = Table(title="Groups of 8", title_justify="left")
    table.add_column("order")
    for column in ("page visits", "rounds", "reuse", "visits saved"):
        table.add_column(column, justify="right")
    for name, order in found.orders.items():
        saved = "" if name == "original" else f"{found.saving(name):.1%}"
        table.add_row(name, f"{order.visits:,}", f"{order.rounds:,}", f"{order.reuse:.2f}", saved)
    return table
