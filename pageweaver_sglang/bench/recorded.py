"""Inputs of a workload: its own tensors where it has recorded them, random ones elsewhere."""

from __future__ import annotations

import torch

import pageweaver_sglang as pw

from .inputs import Step3Inputs, make_inputs


def inputs_of(workload: pw.Workload, device: torch.device | str, *, seed: int = 0, q_scale: float = 1.0) -> Step3Inputs:
    """One input set.

    Args:
        workload: picks, and with a capture of activations also Q and the touched pages.
        device: where the tensors go.
        seed: of random tensors; for recorded ones, of the places of the pages in the pool (0: as they were written).
        q_scale: factor of Q.
    """
    if workload.q is None:
        return make_inputs(workload, device, seed=seed, q_scale=q_scale)
    arguments = workload.attention_arguments(device)
    page, pages = workload.page_size, len(workload.page_ids)
    place = torch.arange(pages)
    if seed:
        place = torch.randperm(pages, generator=torch.Generator().manual_seed(seed))
    place = place.to(device)
    table = arguments["req_to_token"]
    arguments["req_to_token"] = (place[table.long() // page] * page + table % page).to(torch.int32)
    for name in ("k_cache", "v_cache"):
        moved = torch.empty_like(arguments[name])
        moved.view(torch.uint8).unflatten(0, (pages, page))[place] = (
            arguments[name].view(torch.uint8).unflatten(0, (pages, page))
        )
        arguments[name] = moved
    arguments["q"] = (arguments["q"].float() * q_scale).to(arguments["q"].dtype)
    return Step3Inputs(**arguments, max_seqlen_q=int(workload.cu_seqlens.diff().max()))


def missing_pages(workload: pw.Workload) -> list[int]:
    """Logical pages that queries picked but a workload with recorded pages doesn't hold."""
    if workload.page_ids is None:
        return []
    picked = workload.topk_idx[:, : int(workload.cu_seqlens[-1])].unique()
    return sorted(set(picked[picked >= 0].tolist()) - set(workload.page_ids.tolist()))
