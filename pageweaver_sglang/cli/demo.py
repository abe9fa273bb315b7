"""``pageweaver demo``: what regrouping does to one workload, that it changes no result, and what it takes on a GPU."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

import pageweaver_sglang as pw
from pageweaver_sglang.bench import environment
from pageweaver_sglang.bench.counts import OrderCount, count_orders, differences
from pageweaver_sglang.bench.inputs import QUERY_HEADS_PER_KV_HEAD
from pageweaver_sglang.bench.protocol import ArmUnavailable, Protocol, Timing
from pageweaver_sglang.bench.workloads import WorkloadNotFound, expected_counts, find_workload, workload_names

from .options import add_commit_option, add_protocol_options, positive
from .output import claim, make_console, say_error

HELP = """show what PageWeaver does on one recorded workload; on a Hopper GPU, measure it
Without a GPU: counts page visits in the original and the regrouped orders, checks them, and checks that attention
over the unions equals attention over each query's own pages. With an H100 or H200: also times every arm against
SGLang's own kernel.
Exit code 0: every check passed. 1: a check failed. 2: the workload can't be read, or FILE not written."""

DEFAULT_WORKLOAD = "ctx64k_a"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of ``pageweaver demo``."""
    known = ", ".join(workload_names())
    parser.add_argument("--workload", default=DEFAULT_WORKLOAD, help=f"{known}, or an .npz file (default: %(default)s)")
    parser.add_argument("--seed", type=_seed, default=0, help="of random Q, K, V and of samples (default: %(default)s)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write everything measured to FILE")
    parser.add_argument(
        "--groups", type=positive, default=32, help="groups of 8 queries to verify per order (default: %(default)s)"
    )
    parser.add_argument(
        "--device",
        choices=("auto", "cpu", "cuda"),
        default="auto",
        help="cpu leaves the GPU part out, cuda insists on it (default: auto)",
    )
    add_protocol_options(parser, "GPU: ")
    add_commit_option(parser)


def _seed(text: str) -> int:
    value = int(text)
    if not 0 <= value < 2**63:
        raise ValueError(text)
    return value


_seed.__name__ = "integer in 0..2**63-1"  # what argparse calls it in its message


def run(arguments: argparse.Namespace) -> int:
    """Run the demo, print it, and return the exit code."""
    console = make_console()
    try:
        path = find_workload(arguments.workload)
        workload = pw.load_workload(path)
        if 0 in workload.topk_idx.shape or int(workload.cu_seqlens[-1]) == 0:
            raise ValueError(f"{path}: holds no query that picks pages")
        if arguments.json:
            claim(arguments.json)
    except (WorkloadNotFound, ValueError, OSError) as error:
        say_error("demo", error)
        return 2

    name = path.stem if path.stem in workload_names() else str(path)
    report: dict[str, Any] = {
        "environment": environment.describe(arguments.commit),
        "seed": arguments.seed,
        "workload": describe_workload(name, workload),
    }
    console.print(f"[bold]Workload {escape(name)}[/]: {sentence(report['workload'])}")
    failures = count_part(workload, name, report, console)
    failures += verify_part(workload, arguments, report, console)
    failures += gpu_part(workload, arguments, report, console)

    report["failures"] = failures
    for failure in failures:
        console.print(f"FAILED: {failure}", style="bold red", markup=False)
    if arguments.json:
        arguments.json.write_text(json.dumps(report, indent=1) + "\n")
        console.print(f"Everything measured: {arguments.json}", highlight=False)
    return 1 if failures else 0


def describe_workload(
    name: str, workload: pw.Workload, heads_per_kv_head: int = QUERY_HEADS_PER_KV_HEAD
) -> dict[str, Any]:
    """Sizes of a workload, for the report."""
    kv_heads, tokens, topk = workload.topk_idx.shape
    return {
        "name": name,
        "tokens": tokens,
        "kv_heads": kv_heads,
        "q_heads": kv_heads * heads_per_kv_head,
        "topk": topk,
        "page_size": workload.page_size,
        "cu_seqlens": workload.cu_seqlens.tolist(),
        "prefix_lens": workload.prefix_lens.tolist(),
        "seq_lens": workload.seq_lens.tolist(),
    }


def sentence(sizes: dict[str, Any]) -> str:
    """A workload's sizes in words."""
    requests, kv_heads = len(sizes["seq_lens"]), sizes["kv_heads"]
    return (
        f"{sizes['tokens']:,} query tokens in {requests} request{'s' * (requests != 1)} (context up to "
        f"{max(sizes['seq_lens']):,} tokens), {kv_heads} KV head{'s' * (kv_heads != 1)}, "
        f"{sizes['q_heads'] // kv_heads} query heads per KV head, up to {sizes['topk']} pages "
        f"of {sizes['page_size']} tokens per query"
    )


def count_part(workload: pw.Workload, name: str, report: dict[str, Any], console: Console) -> list[str]:
    """Page visits of every order; returns what is wrong."""
    with console.status("Counting page visits with the reference engine"):
        counts = count_orders(workload)
    expected = expected_counts(name)
    wrong = None if expected is None else differences(counts, expected)
    report["counts"] = {"orders": [count.as_dict() for count in counts], "expected": expected, "differences": wrong}

    console.print(counts_table(counts))
    if expected is None:
        console.print("No recorded counts to compare these with.")
    elif not wrong:
        console.print(f"[green]✓[/] all {len(expected)} recorded counts of {escape(name)} are reproduced exactly")
    return [f"count {difference}" for difference in wrong or []]


def counts_table(counts: list[OrderCount]) -> Table:
    """Orders and group sizes against visits, rounds, reuse."""
    table = Table(
        title="Page visits: pages loaded, summed over groups (reference engine)",
        caption="rounds: (page, quad of queries) pairs that need arithmetic · reuse: queries that use a loaded page",
        title_justify="left",
        caption_justify="left",
    )
    for column in ("order", "group", "visits", "saved", "rounds", "reuse", "regroup + unions"):
        table.add_column(column, justify="left" if column == "order" else "right")
    original = {count.group_size: count.visits for count in counts if count.order == "original"}
    for count in sorted(counts, key=lambda c: c.group_size):
        before = original[count.group_size]
        saved = f"{1 - count.visits / before:.1%}" if before and count.order != "original" else ""
        table.add_row(
            count.order,
            str(count.group_size),
            f"{count.visits:,}",
            saved,
            f"{count.rounds:,}",
            f"{count.reuse:.2f}",
            f"{count.seconds:.2f} s",
        )
    return table


def verify_part(
    workload: pw.Workload, arguments: argparse.Namespace, report: dict[str, Any], console: Console
) -> list[str]:
    """Attention over unions against attention over each query's own pages; returns what is wrong."""
    from pageweaver_sglang.bench.inputs import make_inputs
    from pageweaver_sglang.bench.verify import verify_orders

    with console.status("Checking attention on sampled groups"):
        inputs = make_inputs(workload, "cpu", seed=arguments.seed)
        results = verify_orders(workload, inputs, groups=arguments.groups, seed=arguments.seed)
    report["verification"] = results
    for result in results:
        mark = "[green]✓[/]" if result["exact"] else "[red]✗[/]"
        console.print(
            f"{mark} {result['order']}: {result['queries']} sampled queries, attention over unions equals attention "
            f"over their own pages (float64, NRMS {result['nrms']:.1e})"
        )
    return [f"attention in the order {r['order']} is off by NRMS {r['nrms']:.1e}" for r in results if not r["exact"]]


def gpu_part(
    workload: pw.Workload, arguments: argparse.Namespace, report: dict[str, Any], console: Console
) -> list[str]:
    """Accuracy and times of every arm; says why when this machine can't. Returns what is wrong."""
    from pageweaver_sglang.bench.compare import unusable_gpu

    reason = "left out by --device cpu." if arguments.device == "cpu" else unusable_gpu()
    if reason is None:
        from pageweaver_sglang.bench.arms import build_kernels

        try:
            report["kernel_build_s"] = build_kernels()
        except ArmUnavailable as error:
            reason = str(error) + "."
    report["gpu_part"] = reason or "run"
    if reason is not None:
        console.print(f"GPU part not run: {reason}", markup=False, highlight=False)
        return [f"--device cuda was asked for: {reason}"] if arguments.device == "cuda" else []
    return compare_part(workload, arguments, report, console)


def compare_part(
    workload: pw.Workload, arguments: argparse.Namespace, report: dict[str, Any], console: Console
) -> list[str]:
    """The comparison on the GPU; returns what is wrong."""
    from pageweaver_sglang.bench import compare
    from pageweaver_sglang.bench.arms import comparison_arms, stage_arms

    arms, stages = comparison_arms(), stage_arms()
    protocol = Protocol(arguments.rounds, arguments.calls)
    with console.status("Checking the regroup kernel and every arm's accuracy"):
        equal = compare.check_regroup_kernel(workload, arguments.seed)
        accuracy, unavailable = compare.accuracy(workload, arms, rows=arguments.rows, seed=arguments.seed)
    ready = [arm for arm in arms if arm.name not in unavailable]

    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console, transient=True) as progress:
        rounds = protocol.rounds * len(compare.CACHES) * len(compare.MODES)
        task = progress.add_task("Timing", total=rounds * (len(ready) + len(stages)))

        def on_round(name: str) -> None:
            progress.update(task, advance=1, description=f"Timing {name}")

        whole = compare.timings(workload, ready, protocol, seed=arguments.seed, on_round=on_round)
        parts = compare.timings(workload, stages, protocol, seed=arguments.seed, on_round=on_round)
    unavailable |= whole.pop("unavailable") | parts.pop("unavailable")
    saved = compare.savings(whole["runs"])

    console.print(arms_table(whole, accuracy, protocol))
    console.print(savings_table(saved))
    console.print(stages_table(parts))
    for order, same in equal.items():
        mark = "[green]✓[/]" if same else "[red]✗[/]"
        console.print(f"{mark} regroup kernel, {order}: the reference engine's order, bit by bit")
    for name, why in unavailable.items():
        console.print(f"{name} not run: {why}", markup=False, highlight=False)
    failed = [
        (run, name, why) for timed in (whole, parts) for run in timed["runs"] for name, why in run["failed"].items()
    ]
    for run, name, why in failed:
        console.print(f"{name} not timed ({run['cache']}, {run['mode']}): {why}", markup=False, highlight=False)

    report["regroup_kernel_equal"] = equal
    report["accuracy"] = {"rows": arguments.rows, "nrms": accuracy}
    report["arms"] = {arm.name: arm.description for arm in [*arms, *stages]}
    report["unavailable"] = unavailable
    report["protocol"] = {"rounds": protocol.rounds, "calls": protocol.calls, "warmup": protocol.warmup}
    report["timings"] = _plain(whole)
    report["stages"] = _plain(parts)
    report["savings"] = saved

    wrong = [
        f"the regroup kernel's order {order} differs from the reference engine's"
        for order, same in equal.items()
        if not same
    ]
    wrong += [
        f"{name}: NRMS {found['random']:.2%} on random inputs is above {compare.MAX_NRMS:.0%}"
        for name, found in accuracy.items()
        if found.get("random", 0.0) > compare.MAX_NRMS
    ]
    # SGLang may be missing here; PageWeaver's own arms may not.
    wrong += [f"{name} did not run: {why}" for name, why in unavailable.items() if name != "native"]
    wrong += [f"{name} could not be timed" for run, name, _ in failed if name != "native" and run["mode"] == "eager"]
    return wrong


def _plain(timed: dict[str, Any]) -> dict[str, Any]:
    runs = [
        {**run, "timings": {name: timing.as_dict() for name, timing in run["timings"].items()}} for run in timed["runs"]
    ]
    return {**timed, "runs": runs}


def _span(timing: Timing | None, scale: float = 1.0, digits: int = 3) -> str:
    if timing is None:
        return "-"
    return f"{timing.median * scale:.{digits}f} ({timing.low * scale:.{digits}f}-{timing.high * scale:.{digits}f})"


def _by_arm(timed: dict[str, Any]) -> tuple[list[str], list[str], dict[str, list[Timing | None]]]:
    """(column titles, arm names, timings of each arm by column)."""
    runs = timed["runs"]
    titles = [f"{run['cache']}, {run['mode']}" for run in runs]
    names = list(dict.fromkeys(name for run in runs for name in run["timings"]))
    return titles, names, {name: [run["timings"].get(name) for run in runs] for name in names}


def arms_table(timed: dict[str, Any], accuracy: dict[str, dict[str, float]], protocol: Protocol) -> Table:
    """Whole Step 3 calls."""
    titles, names, by_arm = _by_arm(timed)
    table = Table(
        title=f"Step 3, ms per call: median (min-max) of {protocol.rounds} rounds x {protocol.calls} calls",
        caption=f"cold: {timed['sets']} input sets in turn, K/V larger than twice the L2 · error: NRMS against float64",
        title_justify="left",
        caption_justify="left",
    )
    table.add_column("arm")
    for column in (*titles, "error", "error, Q x 4"):
        table.add_column(column, justify="right")
    for name in names:
        errors = [f"{accuracy[name][kind]:.2%}" for kind in ("random", "q_x4")]
        table.add_row(name, *(_span(timing) for timing in by_arm[name]), *errors)
    return table


def savings_table(saved: list[dict[str, Any]]) -> Table:
    """What regrouping saves and costs."""
    table = Table(title="What regrouping saves, ms", title_justify="left")
    table.add_column("order")
    for column in ("caches, mode", "T0", "T fixed", "T online", "execution saving", "online cost", "net saving"):
        table.add_column(column, justify="right")
    for row in saved:
        keys = ("t0_ms", "t_fixed_ms", "t_online_ms", "execution_saving_ms", "online_cost_ms", "net_saving_ms")
        table.add_row(row["order"], f"{row['cache']}, {row['mode']}", *(f"{row[key]:.3f}" for key in keys))
    return table


def stages_table(timed: dict[str, Any]) -> Table:
    """PageWeaver's kernels alone."""
    titles, names, by_arm = _by_arm(timed)
    table = Table(title="PageWeaver's kernels alone, µs per call: median (min-max)", title_justify="left")
    table.add_column("kernel")
    for title in titles:
        table.add_column(title, justify="right")
    for name in names:
        table.add_row(name, *(_span(timing, 1e3, 1) for timing in by_arm[name]))
    return table
