"""What ``pageweaver bench`` prints: tables of a report and the progress bar."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from pageweaver_sglang.bench.statistics import COLUMNS, base_arm, ratios_to, span

Report = Mapping[str, Any]


def progress_bar(console: Console) -> Progress:
    """A bar with a description, steps done and the time."""
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    return Progress(*columns, console=console, transient=True)


def _table(title: str, caption: str | None, *columns: str) -> Table:
    table = Table(title=title, caption=caption, title_justify="left", caption_justify="left")
    for number, column in enumerate(columns):
        table.add_column(column, justify="right" if number else "left")
    return table


def tables_of(report: Report) -> Iterator[Table]:
    """Every table of one report."""
    if "arms" in report:
        yield from (arms_table(report), savings_table(report), stages_table(report))
        idle = unavailable_table(report)
        if idle.row_count:
            yield idle
    yield counts_table(report)


def arms_table(report: Report) -> Table:
    """Whole calls: time, speed against the base arm, accuracy, rates."""
    base, protocol = base_arm(report), report["settings"]["protocol"]
    ratios = ratios_to(report["arms"], base, "graph_ms") if base else {}
    speed = f"times {base}" if base else "ratio"
    table = _table(
        f"Step 3, ms per call: median (min-max) of {protocol['rounds']} rounds x {protocol['calls']} calls",
        f"cold: {report['sets']} input sets in turn · {speed}: by rounds of cold, graph · error: NRMS to float64",
        "arm",
        "cold, graph",
        "cold, eager",
        "warm, graph",
        speed,
        "error",
        "sharp",
        "TB/s",
        "TFLOP/s",
    )
    for name, arm in report["arms"].items():
        if arm["rates"] is None:
            continue
        ratio, sharp = ratios.get(name), arm["fidelity"].get("sharp", {}).get("nrms")
        table.add_row(
            name,
            *(span(arm.get(column)) for column in ("graph_ms", "cold_ms", "warm_graph_ms")),
            f"{ratio['median']:.2f}" if ratio else "-",
            *("-" if value is None else f"{value:.2%}" for value in (arm["nrms"], sharp)),
            f"{arm['rates']['effective_tb_s']:.2f}",
            f"{arm['rates']['effective_tflops']:.0f}",
        )
    return table


def unavailable_table(report: Report) -> Table:
    """Arms that could not run, or only in part, and why."""
    table = Table(title="Not run, or only in part", title_justify="left")
    table.add_column("arm")
    table.add_column("why")
    for name, arm in report["arms"].items():
        if reason := arm["unavailable"] or arm["failed_columns"]:
            table.add_row(name, escape(reason))
    return table


def savings_table(report: Report) -> Table:
    """T0, T_fixed, T_online and what follows."""
    keys = ("t0_ms", "t_fixed_ms", "t_online_ms", "execution_saving_ms", "online_cost_ms", "net_saving_ms")
    titles = ("T0", "T fixed", "T online", "execution saving", "online cost", "net saving")
    table = _table("What regrouping saves, ms", None, "order", "caches, mode", *titles)
    for row in report["savings"]:
        table.add_row(row["order"], ", ".join(COLUMNS[row["column"]]), *(f"{row[key]:.3f}" for key in keys))
    return table


def stages_table(report: Report) -> Table:
    """PageWeaver's kernels alone, in microseconds."""
    table = _table(
        "PageWeaver's kernels alone, µs per call", None, "kernel", *(", ".join(way) for way in COLUMNS.values())
    )
    for name, columns in report["stages"].items():
        table.add_row(name, *(f"{columns[key]['median'] * 1e3:.1f}" if key in columns else "-" for key in COLUMNS))
    return table


def counts_table(report: Report) -> Table:
    """Pages loaded per call."""
    written = report["logical"]["page_pair"]["used_workspace_bytes"] / 1e6
    table = _table(
        "Pages loaded per call (reference engine)",
        "rounds: (page, 4 queries) pairs that need arithmetic; original-16, ...-8-16: (page, 8 queries) pairs\n"
        "...-8-16: groups of 16 in an order of groups of 8 · reuse: queries that use a loaded page\n"
        f"page-pair also writes {written:,.0f} MB of partial outputs and reads them again",
        "order and group size",
        "visits",
        "against original-8",
        "rounds",
        "reuse",
        "GB delivered",
        "search, CPU",
    )
    counts = report["logical"]["counts"]
    original = counts["original-8"]["visits"]
    for name, count in counts.items():
        table.add_row(
            name,
            f"{count['visits']:,}",
            f"{count['visits'] / original - 1:+.1%}" if original else "-",
            "-" if count["rounds"] is None else f"{count['rounds']:,}",
            f"{count['reuse']:.2f}",
            f"{count['bytes_delivered'] / 1e9:.2f}",
            f"{count['search_s']:.2f} s" if "search_s" in count else "",
        )
    return table


def comparison_table(found: Mapping[str, Any]) -> Table:
    """Ratios of two runs side by side."""
    table = _table(
        f"Times as fast as {found['base']} (medians)",
        None,
        "arm",
        "caches, mode",
        "first run",
        "second run",
        "difference",
    )
    for row in found["rows"]:
        way = ", ".join(COLUMNS[row["column"]])
        table.add_row(row["arm"], way, f"{row['first']:.3f}", f"{row['second']:.3f}", f"{row['difference']:+.2%}")
    return table
