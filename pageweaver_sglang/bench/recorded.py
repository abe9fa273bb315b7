"""Inputs of a workload: its own tensors where it has recorded ones that every arm takes, random ones elsewhere."""

from __future__ import annotations

import torch

import pageweaver_sglang as pw
from pageweaver_sglang.cuda.support import MAX_GQA_RATIO

from .inputs import HEAD_DIM, QUERY_HEADS_PER_KV_HEAD, Step3Inputs, make_inputs


def heads_of(workload: pw.Workload, asked: int | None = None) -> int:
    """Query heads per KV head that a workload is measured with.

    Args:
        workload: recorded queries have a number of their own.
        asked: for random queries; None for MiniMax-M3's 16.

    Raises:
        ValueError: the workload's queries have another number than asked for.
    """
    if workload.q is None:
        return asked or QUERY_HEADS_PER_KV_HEAD
    own = workload.q.shape[1] // workload.topk_idx.shape[0]
    if asked not in (None, own):
        raise ValueError(
            f"--heads-per-kv-head: got {asked}, and the file's recorded queries have {own} per KV head; allowed: to "
            "leave the option out, or a workload that holds picks only"
        )
    return min(own, MAX_GQA_RATIO)


def why_random(workload: pw.Workload) -> str | None:
    """Why a workload is measured with random tensors around its picks, in a sentence; None when its own are used.

    Arms differ in what else they take, so that the comparison keeps to what all do: FP8 pages and unit scales.
    """
    w = workload
    if w.q is None:
        return "the file holds picks only"
    if w.k_pages is None or w.v_pages is None or w.page_ids is None:
        return "the file holds no K/V pages"
    if w.k_pages.dtype != torch.float8_e4m3fn or w.v_pages.dtype != torch.float8_e4m3fn:
        return "the recorded K/V pages are not FP8 E4M3"
    wanted = {"sm_scale": HEAD_DIM**-0.5, "k_scale": 1.0, "v_scale": 1.0}
    for name, default in wanted.items():
        if getattr(w, name) not in (None, default):
            return f"the recorded {name} is {getattr(w, name)}, and the arms are compared at {default:.4g}"
    heads = heads_of(w) * w.topk_idx.shape[0]
    if w.q.shape[1:] != (heads, HEAD_DIM):
        return (
            f"the recorded q is {list(w.q.shape)}, and the kernels take 1 to {MAX_GQA_RATIO} heads of "
            f"{HEAD_DIM} per KV head"
        )
    lacking = missing_pages(w)
    if lacking:
        request, page = lacking[0]
        return f"the file lacks {len(lacking)} picked pages, page {page} of request {request} among them"
    if not bool(w.q[: int(w.cu_seqlens[-1])].isfinite().all()):
        return "the recorded q is not finite"
    return None


def missing_pages(workload: pw.Workload) -> list[tuple[int, int]]:
    """(request, logical page) of pages that queries picked and a workload with recorded pages lacks."""
    w = workload
    held = set(zip(w.requests_of_pages().tolist(), w.page_ids.tolist(), strict=True))
    bounds = w.cu_seqlens.tolist()
    picked = {
        (request, page)
        for request in range(len(bounds) - 1)
        for page in w.topk_idx[:, bounds[request] : bounds[request + 1]].unique().tolist()
        if page >= 0
    }
    return sorted(picked - held)


def inputs_of(
    workload: pw.Workload,
    device: torch.device | str,
    *,
    seed: int = 0,
    q_scale: float = 1.0,
    heads_per_kv_head: int | None = None,
) -> Step3Inputs:
    """One input set.

    Args:
        workload: picks, and with a capture of activations also Q and the touched pages.
        device: where the tensors go.
        seed: of random tensors; for recorded ones, of the places of the pages in the pool (0: as they were written).
        q_scale: factor of Q.
        heads_per_kv_head: query heads per KV head, as in :func:`heads_of`.

    Raises:
        ValueError: as in :func:`heads_of`.
    """
    heads = heads_of(workload, heads_per_kv_head)
    if why_random(workload) is not None:
        return make_inputs(workload, device, seed=seed, q_scale=q_scale, heads_per_kv_head=heads)
    arguments = workload.attention_arguments(device)
    for name in ("sm_scale", "k_scale", "v_scale"):
        arguments.pop(name, None)
    page, pages = workload.page_size, len(workload.page_ids)
    place = torch.arange(pages)
    if seed:
        place = torch.randperm(pages, generator=torch.Generator().manual_seed(seed))
    place = place.to(device)
    table = arguments["req_to_token"]
    arguments["req_to_token"] = (place[table.long() // page] * page + table % page).to(torch.int32)
    for name in ("k_cache", "v_cache"):
        cache = arguments[name].view(torch.uint8).unflatten(0, (pages, page))
        moved = torch.empty_like(cache)
        moved[place] = cache
        arguments[name] = moved.flatten(0, 1).view(torch.float8_e4m3fn)
    arguments["q"] = (arguments["q"].float() * q_scale).to(arguments["q"].dtype)
    return Step3Inputs(**arguments, max_seqlen_q=int(workload.cu_seqlens.diff().max()))
