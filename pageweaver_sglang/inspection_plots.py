"""Pictures of a workload: which pages its queries picked, and how often a visited page is used, window by window."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from .inspection import plan_of, window_counts
from .reference.layout import page_counts, split_windows, support_sets

if TYPE_CHECKING:
    from matplotlib.axes import Axes

    from .workload import Workload

WINDOW = 128
_MAX_COLUMNS, _MAX_ROWS = 1600, 800


def why_not() -> str | None:
    """Why nothing can be plotted here, or None."""
    if importlib.util.find_spec("matplotlib") is None:
        return "plots need matplotlib, which is not installed: pip install 'pageweaver-sglang[plots]'"
    return None


def plot_workload(workload: Workload, target: Path, *, title: str, head: int = 0) -> None:
    """Write a PNG with both pictures of one KV head.

    Raises:
        ValueError: there is no such head.
        OSError: the file cannot be written.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    kv_heads = workload.topk_idx.shape[0]
    if not 0 <= head < kv_heads:
        raise ValueError(f"--head must be in 0..{kv_heads - 1}, got {head}")
    figure = Figure(figsize=(11, 8), layout="constrained")
    FigureCanvasAgg(figure)
    top, bottom = figure.subplots(2, 1, height_ratios=(3, 1), sharex=True)
    figure.suptitle(title if kv_heads == 1 else f"{title}, KV head {head}")
    _selection_map(workload, head, top)
    _reuse(workload, head, bottom)
    figure.savefig(target, dpi=110)


def selection_shares(workload: Workload, head: int) -> torch.Tensor:
    """Share of the queries of a bin that picked a page of a bin: float64 ``[pages, queries]``, both binned to a few
    hundred; 1 where every query picked every page.
    """
    w = workload
    tokens = w.topk_idx.shape[1]
    supports = support_sets(
        w.topk_idx[head : head + 1], page_counts(w.cu_seqlens.tolist(), tokens, w.seq_lens, w.page_size)
    )[0]
    pages = max(1, -(-int(w.seq_lens.max()) // w.page_size))
    step_x, step_y = -(-tokens // _MAX_COLUMNS), -(-pages // _MAX_ROWS)
    columns, rows = -(-tokens // step_x), -(-pages // step_y)
    query, column = (supports >= 0).nonzero(as_tuple=True)
    page = supports[query, column]
    cells = torch.bincount((page // step_y) * columns + query // step_x, minlength=rows * columns)
    return cells.view(rows, columns).double() / (step_x * step_y)


def _selection_map(workload: Workload, head: int, axes: Axes) -> None:
    tokens = workload.topk_idx.shape[1]
    pages = max(1, -(-int(workload.seq_lens.max()) // workload.page_size))
    shares = selection_shares(workload, head)
    image = axes.imshow(
        shares.sqrt().numpy(),  # so that a page that few queries of a bin picked is still seen
        origin="lower",
        aspect="auto",
        interpolation="nearest",
        extent=(0, tokens, 0, pages),
        cmap="magma_r",
        vmin=0,
    )
    axes.figure.colorbar(image, ax=axes, label="share of queries that picked it (square root)")
    axes.set_ylabel("logical page")
    for bound in workload.cu_seqlens.tolist()[1:-1]:
        axes.axvline(bound, color="tab:blue", linewidth=0.8)


def _reuse(workload: Workload, head: int, axes: Axes) -> None:
    starts = [one.start for one in split_windows(workload.cu_seqlens.tolist(), WINDOW)]
    for window, label in ((None, "original order"), (WINDOW, f"regrouped, window {WINDOW}")):
        visits, members = window_counts(workload, plan_of(workload, window), WINDOW)
        reuse = members[head].double() / visits[head].clamp(min=1)
        axes.step(starts, reuse.numpy(), where="post", linewidth=1, label=label)
    axes.set_ylim(bottom=0)
    axes.set_xlabel("query (packed token id)")
    axes.set_ylabel("reuse per window, of 8")
    axes.legend(loc="lower center", ncols=2)
