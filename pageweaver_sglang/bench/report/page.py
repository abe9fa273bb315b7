"""The HTML report: one file, figures inline, no script, nothing loaded from elsewhere."""

from __future__ import annotations

import base64
from collections.abc import Iterable, Mapping, Sequence
from html import escape
from typing import Any

from ..statistics import base_arm, ratios_to, span
from .files import heads_in, label_of
from .plots import interleaved, missing

Report = Mapping[str, Any]

_MEASURED = (
    "Medians with the smallest and the largest round in brackets; each round takes all arms in another order, no round "
    "is dropped. "
    "Cold: input sets in turn, larger than twice the L2. NRMS: norm of the error over the norm of the exact output "
    "(float64); sharp: Q x 4, so that few keys dominate. TB/s: bytes of K and V that an arm's pages amount to, per "
    "time; TFLOP/s: useful arithmetic per time."
)
_COUNTED = "Counts by the reference engine; nothing here was timed on a GPU."
_STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; max-width: 62rem; margin: 2rem auto; padding: 0 1rem; color: #1c2733; }
h1 { font-size: 1.6rem; } h2 { font-size: 1.25rem; margin-top: 2.5rem; border-bottom: 1px solid #d5dbe1; }
h3 { font-size: 1rem; margin-bottom: .3rem; }
table { border-collapse: collapse; font-size: .85rem; margin: .5rem 0 1rem; }
th, td { padding: .15rem .6rem; border-bottom: 1px solid #e3e8ed; text-align: right; white-space: nowrap; }
th:first-child, td:first-child { text-align: left; } td.text { text-align: left; white-space: normal; }
th { background: #f3f5f7; } img { max-width: 100%; } code { background: #f3f5f7; padding: 0 .2rem; }
.small { color: #52606d; font-size: .85rem; } .bad { color: #a32013; }
@media (prefers-color-scheme: dark) {
  body { background: #14191f; color: #dbe2e9; } th, code { background: #222a33; } img { background: #fff; }
  th, td { border-color: #303a45; } .small { color: #9aa7b4; } .bad { color: #ff8a7a; }
}
"""


def _table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    head = "".join(f"<th>{escape(cell)}</th>" for cell in header)
    body = "".join("<tr>" + "".join(f"<td>{escape(cell)}</td>" for cell in row) + "</tr>" for row in rows)
    return f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"


def _text_table(rows: Iterable[tuple[str, str]]) -> str:
    body = "".join(f'<tr><td>{escape(name)}</td><td class="text">{escape(text)}</td></tr>' for name, text in rows)
    return f"<table><tbody>{body}</tbody></table>"


def _image(figures: Mapping[str, bytes], name: str, caption: str) -> str:
    if name not in figures:
        return ""
    data = base64.b64encode(figures[name]).decode()
    return f'<h3>{escape(caption)}</h3><img alt="{escape(caption)}" src="data:image/png;base64,{data}">'


def _percent(value: float | None) -> str:
    return "-" if value is None else f"{value:.2%}"


def _share(value: float | None) -> str:
    return "" if value is None else f" ({value:.0%})"


def where_measured(report: Report) -> str:
    """Machine, versions, commit, date and command, in one paragraph of plain text."""
    environment = report["environment"]
    gpu = next(iter(environment["gpus"]), None)
    machine = f"{gpu['name']}, driver {gpu['driver_version']}" if gpu else "no GPU"
    versions = ", ".join(f"{name} {version}" for name, version in environment["versions"].items() if version)
    return (
        f"{machine}. {versions}. Commit {environment['commit'] or 'unknown'}, {environment['date']}. "
        f"Command: {environment['command']}"
    )


def _arms(report: Report) -> str:
    """The table of whole calls, ratios to the base arm included, and what could not run."""
    arms = report["arms"]
    base = base_arm(report)
    ratios = ratios_to(arms, base, "graph_ms") if base else {}
    rows = []
    for name, arm in arms.items():
        if arm.get("graph_ms") is None and arm.get("cold_ms") is None:
            continue
        ratio, rates, sharp = ratios.get(name), arm["rates"], arm["fidelity"].get("sharp", {})
        rows.append(
            [
                name,
                *(span(arm.get(column)) for column in ("graph_ms", "cold_ms", "warm_graph_ms")),
                f"{ratio['median']:.2f}" if ratio else "-",
                _percent(arm["nrms"]),
                _percent(sharp.get("nrms")),
                f"{arm['counts']['visits']:,}",
                f"{rates['effective_tb_s']:.2f}{_share(rates['of_l2_copy_tb_s'])}",
                f"{rates['effective_tflops']:.0f}{_share(rates['of_fp8_matmul_tflops'])}",
            ]
        )
    speed = f"times {base}" if base else "ratio"
    header = ["arm", "cold, graph (ms)", "cold, eager", "warm, graph", speed, "NRMS", "NRMS, sharp"]
    parts = [_table([*header, "pages", "TB/s (of L2 copy)", "TFLOP/s (of FP8 product)"], rows)]
    idle = [(name, arm["unavailable"] or arm["failed_columns"]) for name, arm in arms.items()]
    idle = [(name, reason) for name, reason in idle if reason]
    if idle:
        parts.append("<h3>Arms that could not run, or only in part</h3>" + _text_table(idle))
    return "".join(parts)


def _ceilings(report: Report) -> str:
    found = report.get("ceilings") or {}
    text = {
        "copy_tb_s": "TB/s device copy",
        "l2_copy_tb_s": "TB/s copy in L2",
        "fp8_matmul_tflops": "TFLOP/s FP8 product",
    }
    known = [f"{found[key]:,.2f} {label}" for key, label in text.items() if found.get(key)]
    work = report["logical"]["work"]
    lines = (
        f"Useful work of a call: {work['useful_flops'] / 1e12:.3f} TFLOP over {work['picks']:,} (query, page) picks."
    )
    return f'<p class="small">{lines} Ceilings measured in the same run: {", ".join(known) or "none"}.</p>'


def _notes(report: Report) -> str:
    rows = []
    for name, arm in report["arms"].items():
        text = ", ".join(
            f"{key} {value:,.4g}" if isinstance(value, float) else f"{key} {value}"
            for key, value in arm["notes"].items()
        )
        rows.append((name, f"{arm['description']}" + (f" [{text}]" if text else "")))
    return "<details><summary>What each arm is, and its notes</summary>" + _text_table(rows) + "</details>"


def _stages(report: Report) -> str:
    rows = [
        [
            name,
            *(
                f"{columns[key]['median'] * 1e3:.1f}" if key in columns else "-"
                for key in ("graph_ms", "warm_graph_ms")
            ),
        ]
        for name, columns in report["stages"].items()
    ]
    return "<h3>PageWeaver's kernels alone (µs)</h3>" + _table(["kernel", "cold, graph", "warm, graph"], rows)


def _savings(report: Report) -> str:
    rows = [
        [f"{row['order']}, {row['column'].removesuffix('_ms')}"]
        + [f"{row[key]:.3f}" for key in row if key.endswith("_ms")]
        for row in report["savings"]
    ]
    header = ["order", "T0", "T fixed", "T online", "execution saving", "online cost", "net saving"]
    return "<h3>What regrouping saves (ms)</h3>" + _table(header, rows)


def _counts(report: Report) -> str:
    rows = [
        [
            key,
            f"{count['visits']:,}",
            f"{count['rounds']:,}" if count["rounds"] is not None else "-",
            f"{count['reuse']:.2f}",
            f"{count['bytes_delivered'] / 1e9:.2f}",
            f"{count['search_s']:.2f}" if "search_s" in count else "-",
        ]
        for key, count in report["logical"]["counts"].items()
    ]
    header = ["order and group size", "visits", "rounds", "reuse", "GB delivered", "search on the CPU (s)"]
    return _table(header, rows)


def _page_pair(report: Report) -> str:
    pair = report["logical"]["page_pair"]
    return (
        f'<p class="small">Page-pair: {pair["pairs"]} pairs and {pair["single_pages"]} single pages; '
        f"{pair['common_meetings']:,} (query, pair) meetings with both pages, {pair['exclusive_meetings']:,} with one; "
        f"workspace for partial outputs {pair['padded_workspace_bytes'] / 1e6:,.0f} MB padded, "
        f"{pair['used_workspace_bytes'] / 1e6:,.0f} MB written.</p>"
    )


def _section(report: Report, figures: Mapping[str, bytes]) -> str:
    name, sizes = label_of(report), report["workload"]
    parts = [
        f"<h2>{escape(name)}</h2>",
        f"<p>{sizes['tokens']:,} query tokens in {len(sizes['seq_lens'])} request(s), "
        f"context up to {max(sizes['seq_lens']):,} tokens, {sizes['kv_heads']} KV head(s), "
        f"{heads_in(report)} query heads per KV head, "
        f"up to {sizes['topk']} pages per query.</p>",
        *(f'<p class="bad">Failed: {escape(failure)}</p>' for failure in report["failures"]),
    ]
    if "arms" in report:
        parts += [
            _arms(report),
            _ceilings(report),
            _image(figures, f"arms-{name}", "Arms side by side"),
            _savings(report),
            _stages(report),
            _tensors(report),
            _image(figures, f"offline-{name}", "Orders found beforehand"),
            _untuned(report),
            _notes(report),
        ]
    parts += [
        "<h3>Pages loaded per call</h3>",
        _image(figures, f"visits-{name}", "Pages loaded per call, by order")
        .replace("<h3>", "<h4>")
        .replace("</h3>", "</h4>"),
        _counts(report),
        _page_pair(report),
        f'<p class="small">{escape(where_measured(report))}</p>',
    ]
    return "".join(parts)


def _tensors(report: Report) -> str:
    reason = report["random_tensors_because"]
    text = f"Q, K and V are random, since {reason}" if reason else "Q, K and V are the recorded ones"
    return f'<p class="small">{escape(text)}; seeds {report["seeds"][0]} to {report["seeds"][-1]}.</p>'


def _untuned(report: Report) -> str:
    found = report.get("untuned_native")
    if not found:
        return ""
    slow = found["times_as_slow"]
    return (
        '<p class="small">SGLang\'s own kernel, tuned on a short prompt instead of this size, takes '
        f"{slow['median']:.2f} times as long ({slow['min']:.2f}-{slow['max']:.2f}).</p>"
    )


def build_page(
    reports: Sequence[Report], figures: Mapping[str, bytes], title: str = "PageWeaver: every arm measured"
) -> str:
    """The whole report.

    Args:
        reports: of ``pageweaver bench``, measured or logical, at least one.
        figures: PNG files by stem, from :func:`..plots.all_figures`.
        title: of the page.

    Returns:
        HTML text that refers to no other resource.
    """
    measured = any("arms" in report for report in reports)
    pair_title = "Page-pair on interleaved sets" if len(interleaved(reports)) < len(reports) else "Page-pair"
    parts = [
        f"<!DOCTYPE html><html lang='en'><head><meta charset='utf-8'><title>{escape(title)}</title>",
        f"<style>{_STYLE}</style></head><body><h1>{escape(title)}</h1>",
        f"<p>{_MEASURED if measured else _COUNTED}</p>",
        f'<p class="small">{escape(missing() or "")}</p>' if not figures else "",
        _image(figures, "savings", "Saving against cost of regrouping"),
        _image(figures, "page-pair", pair_title),
        *(_section(report, figures) for report in reports),
        "</body></html>",
    ]
    return "".join(parts) + "\n"
