"""Grouping changes nothing: outputs of sampled groups, walked through their unions, against the reference engine."""

from __future__ import annotations

from typing import Any

import torch

import pageweaver_sglang as pw

from .accuracy import exact_rows, nrms, union_walk
from .counts import ORDERS, plan_of
from .inputs import Step3Inputs

# Both sides are float64; they add in different orders and differ by rounding only.
EXACT_NRMS = 1e-12


def verify_orders(workload: pw.Workload, inputs: Step3Inputs, *, groups: int, seed: int = 0) -> list[dict[str, Any]]:
    """Compare union walks of ``groups`` sampled groups of 8 with the reference engine, for every order.

    Args:
        workload: the page choices.
        inputs: CPU tensors for them.
        groups: how many groups to sample per order, from KV head 0.
        seed: of the sample.

    Returns:
        per order ``order``, ``queries`` (how many were compared), ``nrms`` and ``exact`` (NRMS <= 1e-12).
    """
    results = []
    generator = torch.Generator().manual_seed(seed)
    for order in ORDERS:
        plan = plan_of(workload, order, 8)
        first = plan.queries[0, :, 0]
        filled = ((first >= 0) & (first < workload.cu_seqlens[-1])).nonzero().flatten()  # of requests, not of padding
        sample = filled[torch.randperm(len(filled), generator=generator)[:groups]].tolist()
        rows, walked = union_walk(inputs, plan, sample)
        exact = exact_rows(inputs, rows)[:, : walked.shape[1]]
        error = nrms(walked, exact)
        results.append({"order": order, "queries": len(rows), "nrms": error, "exact": error <= EXACT_NRMS})
    return results
