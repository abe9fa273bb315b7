"""``regroup`` and ``prepare_unions`` of a call against the reference engine, bit for bit."""

from __future__ import annotations

import torch

import pageweaver_sglang as pw

from .build import Tensors
from .draw import Call

_LENGTHS = ("cu_seqlens", "seq_lens", "prefix_lens")
_ARRAYS = ("pages", "masks", "counts", "queries", "limits")


def compare(call: Call, tensors: Tensors) -> list[str]:
    """Say what differs; empty when nothing does. Waits for the device."""
    problems = []
    on_device = {name: tensors.arguments[name] for name in ("topk_idx", *_LENGTHS)}
    on_host = {name: value.cpu() for name, value in on_device.items()}
    window = int(str(call.config["window"]))
    group_size = (4, 8, 16)[call.seed % 3] if call.seed % 2 else 8
    union_size = 16 if group_size == 8 and call.seed % 4 == 0 else group_size
    capacity = int(str(call.config["capacity"])) if call.config["overflow"] == "original" else None
    sizes = {"window": window, "page_size": call.page_size}

    def regroup(engine, picks: dict[str, torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
        arguments = (picks["topk_idx"], picks["cu_seqlens"], picks["prefix_lens"])
        visits = torch.full((2,), call.seed, dtype=torch.int64, device=picks["topk_idx"].device)
        options = {"capacity": capacity, "guard": call.config["guard"], "visits": visits}
        return engine.regroup(*arguments, **sizes, group_size=group_size, **options), visits

    (perm, visits), (wanted, wanted_visits) = regroup(pw, on_device), regroup(pw.reference, on_host)
    if not torch.equal(perm.cpu(), wanted):
        problems.append(f"regroup: the order differs (window {window}, groups of {group_size})")
    if not torch.equal(visits.cpu(), wanted_visits):
        problems.append(f"regroup: visits {visits.tolist()} instead of {wanted_visits.tolist()} (window {window})")
    # The right order for both, so that a wrong one is not reported twice.
    for order in (None, wanted):
        lengths = [[picks[name] for name in _LENGTHS] for picks in (on_device, on_host)]
        moved = None if order is None else order.to(perm.device)
        plan = pw.prepare_unions(on_device["topk_idx"], moved, *lengths[0], **sizes, group_size=union_size)
        reference = pw.reference.prepare_unions(on_host["topk_idx"], order, *lengths[1], **sizes, group_size=union_size)
        for name in _ARRAYS:
            if not torch.equal(getattr(plan, name).cpu(), getattr(reference, name)):
                which = "original order" if order is None else "regrouped"
                problems.append(f"prepare_unions: {name} differ ({which}, window {window}, groups of {union_size})")
    return problems
