"""The comparison on a GPU: every arm's accuracy and time on one workload, and PageWeaver's kernels alone."""

from __future__ import annotations

from collections.abc import Callable
from itertools import product
from typing import Any

import torch

import pageweaver_sglang as pw

from .accuracy import exact_rows, nrms, sample_rows
from .arms import NativeArm, Stages, prepare_arms
from .counts import ORDERS
from .inputs import make_inputs
from .protocol import Arm, Protocol, first_line, measure, sets_for_cold_cache
from .statistics import SAVING_WINDOWS, saving_arms, saving_figures

DEVICE = "cuda"
CACHES = ("cold", "warm")
MODES = ("graph", "eager")
Q_SCALES = {"random": 1.0, "q_x4": 4.0}
MAX_NRMS = 0.04
"""Largest accepted NRMS of an FP8 arm against float64 on normally distributed inputs."""


def unusable_gpu() -> str | None:
    """Why the kernels can't run on this machine's first GPU, in a sentence; None when they can."""
    from pageweaver_sglang.cuda.support import COMPUTE_CAPABILITY

    if not torch.cuda.is_available():
        return "PyTorch sees no CUDA device."
    found, wanted = torch.cuda.get_device_capability(), COMPUTE_CAPABILITY
    if found != wanted:
        text = {pair: ".".join(map(str, pair)) for pair in (found, wanted)}
        name = torch.cuda.get_device_name()
        return f"{name} has compute capability {text[found]}; the kernels are built for {text[wanted]} (H100, H200)."
    return None


def check_regroup_kernel(workload: pw.Workload, seed: int) -> dict[str, bool]:
    """Whether the regroup kernel gives the reference engine's order, bit by bit, per window."""
    inputs = make_inputs(workload, DEVICE, seed=seed)
    equal = {}
    for order, window in ORDERS.items():
        if window is not None:
            perm = Stages([inputs], window=window, group_size=8, guard="none").regroup(0)
            w = workload
            exact = pw.regroup(w.topk_idx, w.cu_seqlens, w.prefix_lens, window=window, page_size=w.page_size)
            equal[order] = bool((perm.cpu() == exact).all())
    return equal


def accuracy(
    workload: pw.Workload, arms: list[Arm], *, rows: int, seed: int
) -> tuple[dict[str, dict[str, float]], dict[str, str]]:
    """NRMS against float64 on sampled queries: per arm and per kind of Q, and the reason for arms that can't run.

    A softmax that a few keys dominate (``q_x4``) is the harder case for FP8 weights.
    """
    results: dict[str, dict[str, float]] = {}
    unavailable: dict[str, str] = {}
    for kind, q_scale in Q_SCALES.items():
        inputs = make_inputs(workload, DEVICE, seed=seed, q_scale=q_scale)
        picked = sample_rows(len(inputs.q), rows, seed)
        exact = exact_rows(inputs.to("cpu"), picked)
        ready, missing = prepare_arms(arms, [inputs])
        unavailable |= missing
        for arm in ready:
            try:
                output = arm.call(0)[picked.to(DEVICE)].cpu()
                results.setdefault(arm.name, {})[kind] = nrms(output, exact)
            except (RuntimeError, ValueError) as error:
                unavailable[arm.name] = first_line(error)
            finally:
                arm.release()
    return results, unavailable


def timings(
    workload: pw.Workload,
    arms: list[Arm],
    protocol: Protocol,
    *,
    seed: int,
    on_round: Callable[[str], None] | None = None,
) -> dict[str, Any]:
    """Time ``arms`` with cold and warm caches, as CUDA Graphs and eager.

    Returns:
        ``sets``, ``kv_bytes``, ``l2_bytes``; ``notes`` (an arm's own remarks); ``unavailable`` (reasons by arm); and
        ``runs``: per cache state and mode every arm's :class:`Timing` as ``timings`` and the reasons of those that
        failed as ``failed``.
    """
    first = make_inputs(workload, DEVICE, seed=seed)
    l2_bytes = torch.cuda.get_device_properties(0).L2_cache_size
    count = sets_for_cold_cache(first.kv_bytes, l2_bytes)
    sets = [first, *(make_inputs(workload, DEVICE, seed=seed + i) for i in range(1, count))]
    ready, missing = prepare_arms(arms, sets)
    runs = []
    for cache, mode in product(CACHES, MODES):
        used = len(sets) if cache == "cold" else 1
        found, failed = measure(ready, used, protocol, mode=mode, on_round=on_round)
        runs.append({"cache": cache, "mode": mode, "sets": used, "timings": found, "failed": failed})
    notes = {arm.name: {"tuned": arm.tuned} for arm in ready if isinstance(arm, NativeArm)}
    for arm in ready:
        arm.release()
    sizes = {"sets": count, "kv_bytes": first.kv_bytes, "l2_bytes": l2_bytes}
    return {**sizes, "notes": notes, "unavailable": missing, "runs": runs}


def savings(runs: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """T0 (original order), T_fixed, T_online of both windows; execution saving, online cost and net saving (ms)."""
    rows = []
    for run in runs:
        median = {name: timing.median for name, timing in run["timings"].items()}
        for order in SAVING_WINDOWS:
            names = saving_arms(order)
            if not all(name in median for name in names):
                continue
            figures = saving_figures(*(median[name] for name in names))
            rows.append({"cache": run["cache"], "mode": run["mode"], "order": order, **figures})
    return rows
