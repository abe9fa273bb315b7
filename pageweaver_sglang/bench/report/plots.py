"""The figures of a report, as PNG. They need matplotlib, the extra ``plots``; everything else here works without it."""

from __future__ import annotations

import io
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from ..orders import OFFLINE
from .files import label_of

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

Report = Mapping[str, Any]

MISSING = "matplotlib is not installed, so there are no plots: pip install 'pageweaver-sglang[plots]'"
_DPI = 100
_WIDTH = 8.0
_BLUE, _GREY, _ORANGE, _GREEN, _RED = "#2a6fb0", "#9aa5b1", "#d9822b", "#3a9d5d", "#c0392b"
_COLOURS = {
    "native": _GREY,
    "pr37236": _GREY,
    "flashinfer": _GREY,
    "union": _GREEN,
    "pageweaver": _BLUE,
    "auto": _BLUE,
    "page-pair": _ORANGE,
}


def missing() -> str | None:
    """What to tell the user when there can be no plots; None when there can."""
    try:
        import matplotlib  # noqa: F401
    except ImportError:
        return MISSING
    return None


def _colour(arm: str) -> str:
    return next((colour for prefix, colour in _COLOURS.items() if arm.startswith(prefix)), _GREY)


def _figure(rows: float) -> tuple[Figure, Axes]:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(_WIDTH, max(2.2, rows)), dpi=_DPI, layout="constrained")
    axes = figure.subplots()
    axes.spines[["top", "right"]].set_visible(False)
    return figure, axes


def _png(figure: Figure) -> bytes:
    buffer = io.BytesIO()
    # No date or version in the file: the same report gives the same bytes. Optimised: they end up inside the page.
    figure.savefig(buffer, format="png", metadata={"Software": None}, pil_kwargs={"optimize": True})
    return buffer.getvalue()


def _bars(
    names: Sequence[str],
    values: Sequence[float],
    label: str,
    spans: Sequence[tuple[float, float]] | None = None,
    unit: str = "{:.3f}",
) -> bytes:
    """Horizontal bars, the first on top, with their values and optionally the span from smallest to largest round."""
    figure, axes = _figure(0.8 + 0.3 * len(names))
    places = range(len(names))
    axes.barh(places, values, color=[_colour(name) for name in names])
    if spans is not None:
        low = [value - span[0] for value, span in zip(values, spans, strict=True)]
        high = [span[1] - value for value, span in zip(values, spans, strict=True)]
        axes.errorbar(values, places, xerr=[low, high], fmt="none", ecolor="black", elinewidth=1, capsize=2)
    most = max([*values, *(span[1] for span in spans or [])], default=1.0)
    for place, value in enumerate(values):
        end = spans[place][1] if spans is not None else value
        axes.text(end + 0.01 * most, place, unit.format(value), va="center", fontsize=8)
    axes.set_yticks(places, names, fontsize=8)
    axes.invert_yaxis()
    axes.set_xlim(0, most * 1.12)
    axes.set_xlabel(label, fontsize=8)
    axes.tick_params(axis="x", labelsize=8)
    return _png(figure)


def _timed(report: Report, kinds: Sequence[str]) -> dict[str, Mapping[str, Any]]:
    arms = report.get("arms", {})
    return {name: arm["graph_ms"] for name, arm in arms.items() if arm["kind"] in kinds and arm.get("graph_ms")}


def _timing_bars(timings: Mapping[str, Mapping[str, Any]]) -> bytes | None:
    if not timings:
        return None
    medians = [timing["median"] for timing in timings.values()]
    spans = [(timing["min"], timing["max"]) for timing in timings.values()]
    return _bars(list(timings), medians, "ms per call: median and span of rounds (CUDA Graph, cold caches)", spans)


def arms_figure(report: Report) -> bytes | None:
    """All arms of one workload side by side."""
    return _timing_bars(_timed(report, ("main", "control", "apart")))


def offline_figure(report: Report) -> bytes | None:
    """Orders found beforehand, beside the original one and PageWeaver's own."""
    offline = _timed(report, ("offline",))
    own = {
        name: timing
        for name, timing in _timed(report, ("main",)).items()
        if name.startswith(("union8", "pageweaver", "auto"))
    }
    return _timing_bars({**own, **offline}) if offline else None


def visits_figure(report: Report) -> bytes:
    """Pages loaded per call in every order and by page-pair."""
    counts = report["logical"]["counts"]
    labels = [_count_label(key) for key in counts]
    return _bars(labels, [count["visits"] for count in counts.values()], "pages loaded per call", unit="{:,.0f}")


def _count_label(key: str) -> str:
    """The arm that loads these pages; see :func:`..work.count_all` for the keys."""
    names = {"per-query": "no sharing", "original-4": "union4", "original-8": "union8", "page-pair": "page-pair"}
    if key in names:
        return names[key]
    order = key.removesuffix("-16").removesuffix("-8")
    if key == "original-16":
        name = "union8"
    elif key.endswith(("-8", "-8-16")):
        name = f"offline-{order}" if order in OFFLINE else f"pageweaver-{order}"
    else:
        return f"pageweaver-{key}"
    return f"{name}, groups of 16" if key.endswith("-16") else name


def saving_figure(reports: Sequence[Report]) -> bytes | None:
    """What a better order saves against what finding it costs, per workload and window."""
    rows = [(report, row) for report in reports for row in report.get("savings", []) if row["column"] == "graph_ms"]
    if not rows:
        return None
    figure, axes = _figure(0.8 + 0.36 * len(rows))
    for place, (_, row) in enumerate(rows):
        saving, cost, net = (row[f"{key}_ms"] * 1e3 for key in ("execution_saving", "online_cost", "net_saving"))
        axes.barh(place - 0.2, saving, height=0.36, color=_BLUE, label="execution saving" if place == 0 else None)
        axes.barh(place + 0.2, -cost, height=0.36, color=_ORANGE, label="online cost" if place == 0 else None)
        axes.plot(
            [net], [place], marker="D", color="black", markersize=4, linestyle="", label="net" if place == 0 else None
        )
    labels = [f"{label_of(report)}, {row['order']}" for report, row in rows]
    axes.set_yticks(range(len(rows)), labels, fontsize=8)
    axes.invert_yaxis()
    axes.axvline(0, color="black", linewidth=0.8)
    axes.set_xlabel("µs per call (CUDA Graph, cold caches); right of 0: time won", fontsize=8)
    axes.tick_params(axis="x", labelsize=8)
    axes.legend(fontsize=8)
    return _png(figure)


def interleaved(reports: Sequence[Report]) -> list[Report]:
    """Reports on the sets that favour page-pair, named like ``make-workload``'s presets; all where there is none."""
    return [report for report in reports if label_of(report).startswith("page-pair")] or list(reports)


def page_pair_figure(reports: Sequence[Report]) -> bytes | None:
    """Page-pair against original order and PageWeaver: times where measured, pages loaded elsewhere."""
    chosen = interleaved(reports)
    measured = [report for report in chosen if _timed(report, ("control",))]
    if not chosen:
        return None
    names = ("page-pair", "union8", "pageweaver-w128")
    keys = {"page-pair": "page-pair", "union8": "original-8", "pageweaver-w128": "w128-8"}
    figure, axes = _figure(0.9 + 0.45 * len(measured or chosen))
    for number, name in enumerate(names):
        values = []
        for report in measured or chosen:
            timing = report.get("arms", {}).get(name, {}).get("graph_ms") or {}
            count = report["logical"]["counts"].get(keys[name], {})
            values.append((timing.get("median") if measured else count.get("visits")) or 0.0)
        places = [place + (number - 1) * 0.27 for place in range(len(values))]
        axes.barh(places, values, height=0.25, color=_colour(name), label=name)
        for place, value in zip(places, values, strict=True):
            axes.text(value, place, f" {value:.3f}" if measured else f" {value:,.0f}", va="center", fontsize=7)
    axes.set_yticks(range(len(measured or chosen)), [label_of(report) for report in measured or chosen], fontsize=8)
    axes.invert_yaxis()
    axes.margins(x=0.12)
    axes.set_xlabel("ms per call (CUDA Graph, cold caches)" if measured else "pages loaded per call", fontsize=8)
    axes.tick_params(axis="x", labelsize=8)
    axes.legend(fontsize=8)
    return _png(figure)


def all_figures(reports: Sequence[Report]) -> dict[str, bytes]:
    """Every figure that these reports have data for, by file stem. Empty without matplotlib."""
    if missing() is not None:
        return {}
    figures: dict[str, bytes | None] = {}
    if len(reports) > 1 or any("savings" in report for report in reports):
        figures["savings"] = saving_figure(reports)
    figures["page-pair"] = page_pair_figure(reports)
    for report in reports:
        name = label_of(report)
        figures[f"arms-{name}"] = arms_figure(report)
        figures[f"offline-{name}"] = offline_figure(report)
        figures[f"visits-{name}"] = visits_figure(report)
    return {name: png for name, png in figures.items() if png is not None}
