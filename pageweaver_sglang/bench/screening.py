"""What ``pageweaver bench`` refuses before it measures anything: files that can't mean what a Step 3 call means."""

from __future__ import annotations

import os
from pathlib import Path

import pageweaver_sglang as pw
from pageweaver_sglang.cuda.support import MAX_TOPK, PAGE_SIZE
from pageweaver_sglang.reference.layout import page_counts


def load_for_bench(path: str | os.PathLike[str]) -> pw.Workload:
    """Read a workload and check it.

    Raises:
        OSError: no such file, or one that can't be read.
        ValueError: the message names the file, the array and what it should hold.
    """
    workload = pw.load_workload(path)
    reason = bad_workload(workload)
    if reason is not None:
        raise ValueError(f"{Path(path)}: {reason}")
    return workload


def bad_workload(workload: pw.Workload) -> str | None:
    """Why a workload can't be measured, naming the array; None when it can.

    The kernels take ids that are no pages for holes; in a recorded workload they mean that something went wrong.
    """
    w = workload
    _, tokens, k = w.topk_idx.shape
    if w.page_size != PAGE_SIZE:
        return f"page_size must be {PAGE_SIZE}, got {w.page_size}"
    if not 1 <= k <= MAX_TOPK:
        return f"topk_idx must have 1 to {MAX_TOPK} pages per query, got {k}"
    used = int(w.cu_seqlens[-1])
    if used == 0:
        return "cu_seqlens must end above 0: there are no queries"
    lengths = w.prefix_lens.long() + w.cu_seqlens.diff().long()
    wrong = (w.seq_lens != lengths).nonzero().flatten()
    if len(wrong):
        request = int(wrong[0])
        return (
            f"seq_lens must be prefix_lens + chunk length, got {int(w.seq_lens[request])} instead of "
            f"{int(lengths[request])} for request {request}"
        )
    pages = page_counts(w.cu_seqlens.tolist(), tokens, w.seq_lens, w.page_size)
    bad = (w.topk_idx < -1) | (w.topk_idx >= pages.clamp(min=1)[:, None])
    bad[:, used:] = False
    if bool(bad.any()):
        head, token, column = (int(i) for i in bad.nonzero()[0])
        return (
            f"topk_idx must be page ids of the query's request (0..{int(pages[token]) - 1} for query {token}) or -1, "
            f"got {int(w.topk_idx[head, token, column])} at [{head}, {token}, {column}] ({int(bad.sum())} in all)"
        )
    if not bool((w.topk_idx[:, :used] >= 0).any()):
        return "topk_idx must pick something: every id is -1"
    return None
