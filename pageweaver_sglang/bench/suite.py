"""One workload on the GPU: every arm checked, then timed against the others, then PageWeaver's kernels alone."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import torch

import pageweaver_sglang as pw

from . import compare
from .arms import prepare_arms, stage_arms
from .catalogue import Entry, catalogue
from .fidelity import check_arms
from .inputs import Step3Inputs
from .logical import logical_report
from .orders import find_orders
from .protocol import Arm, Protocol, Timing, measure, sets_for_cold_cache
from .recorded import inputs_of, why_random
from .statistics import COLUMNS, paired_ratio, savings, summary
from .work import rates, work_of

FORMAT = "pageweaver-bench 1"


@dataclass(frozen=True)
class Settings:
    """What to measure. ``rows``: queries compared with float64, None for all. ``arms``: names, None for all."""

    protocol: Protocol = field(default_factory=Protocol)
    rows: int | None = 256
    seed: int = 0
    arms: tuple[str, ...] | None = None


@dataclass(frozen=True)
class Progress:
    """Where progress goes: ``stage(text, steps)`` begins a stage, ``step(name)`` ends one of its steps."""

    stage: Callable[[str, int], None] = lambda text, steps: None
    step: Callable[[str], None] = lambda name: None


def make_sets(workload: pw.Workload, seed: int, l2_bytes: int, device: str) -> list[Step3Inputs]:
    """Enough input sets of equal picks and different tensors that cold calls find nothing in L2."""
    first = inputs_of(workload, device, seed=seed)
    count = sets_for_cold_cache(first.kv_bytes, l2_bytes)
    return [first, *(inputs_of(workload, device, seed=seed + i) for i in range(1, count))]


def time_arms(
    sets: Sequence[Step3Inputs], arms: Sequence[Arm], protocol: Protocol, progress: Progress, text: str
) -> tuple[dict[str, dict[str, Timing]], dict[str, dict[str, Any]], dict[str, str]]:
    """Time arms in every column of :data:`..statistics.COLUMNS`.

    Returns:
        timings by arm and column, notes by arm, and reasons by arm: why it could not be prepared, or in which columns
        it failed.
    """
    ready, reasons = prepare_arms(arms, sets)
    progress.stage(text, len(ready) * protocol.rounds * len(COLUMNS))
    found: dict[str, dict[str, Timing]] = {arm.name: {} for arm in ready}
    for column, (cache, mode) in COLUMNS.items():
        used = len(sets) if cache == "cold" else 1
        timed, failed = measure(ready, used, protocol, mode=mode, on_round=progress.step)
        for name, timing in timed.items():
            found[name][column] = timing
        for name, why in failed.items():
            reasons[name] = f"{reasons[name]}; {column}: {why}" if name in reasons else f"{column}: {why}"
    notes = {arm.name: arm.notes() for arm in ready}
    for arm in ready:
        arm.release()
    return found, notes, reasons


def run_workload(
    workload: pw.Workload,
    name: str,
    settings: Settings,
    progress: Progress | None = None,
    ceilings: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """Measure one workload; the report lacks only where and when it was made.

    Per arm: ``description``, ``kind``, ``unavailable`` (None or the reason), ``fidelity`` by kind of logits, ``nrms``
    (of random logits), ``counts``, the timings of :data:`..statistics.COLUMNS` (``median``, ``min``, ``max``,
    ``rounds`` in ms), ``rates``, ``notes``.
    """
    progress = progress or Progress()
    device, protocol = compare.DEVICE, settings.protocol
    progress.stage("Finding orders and counting pages on the CPU", 1)
    orders = find_orders(workload)
    logical = logical_report(workload, name, orders)
    entries = [e for e in catalogue(orders) if settings.arms is None or e.arm.name in settings.arms]
    progress.step("orders")

    progress.stage("Checking every arm against float64", 2 * len(entries))
    figures, reasons = check_arms(
        workload, [e.arm for e in entries], rows=settings.rows, seed=settings.seed, device=device, on_arm=progress.step
    )
    l2_bytes = torch.cuda.get_device_properties(0).L2_cache_size
    sets = make_sets(workload, settings.seed, l2_bytes, device)
    able = [e.arm for e in entries if e.arm.name not in reasons]
    timed, notes, failed = time_arms(sets, able, protocol, progress, "Timing arms")
    parts, _, part_reasons = time_arms(sets, stage_arms(), protocol, progress, "Timing PageWeaver's kernels alone")

    arms, work = {}, work_of(workload)
    for entry in entries:
        arm = entry.arm.name
        columns = {column: summary(timing.rounds_ms) for column, timing in timed.get(arm, {}).items()}
        count = logical["counts"][entry.count]
        best = columns.get("graph_ms") or columns.get("cold_ms")
        arms[arm] = {
            "description": entry.arm.description,
            "kind": entry.kind,
            "unavailable": reasons.get(arm) or (failed.get(arm) if best is None else None),
            "failed_columns": failed.get(arm),
            "max_nrms": entry.arm.max_nrms,
            "nrms": figures.get(arm, {}).get("random", {}).get("nrms"),
            "fidelity": figures.get(arm, {}),
            "counts": count,
            **columns,
            "rates": None if best is None else rates(work, count["visits"], best["median"], ceilings),
            "notes": notes.get(arm, {}),
        }
    _add_plan_time(arms)
    return {
        "format": FORMAT,
        "settings": {**asdict(settings), "columns": COLUMNS},
        "ceilings": ceilings,
        "sets": len(sets),
        "seeds": [settings.seed + i for i in range(len(sets))],
        "kv_bytes": sets[0].kv_bytes,
        "l2_bytes": l2_bytes,
        "random_tensors_because": why_random(workload),
        "logical": logical,
        "arms": arms,
        "stages": {
            part: {column: summary(timing.rounds_ms) for column, timing in columns.items()}
            for part, columns in parts.items()
        },
        "stages_unavailable": part_reasons,
        "savings": savings(arms),
        "untuned_native": _untuned(arms),
        "failures": failures(entries, arms, part_reasons, logical),
    }


def _add_plan_time(arms: dict[str, dict[str, Any]]) -> None:
    """FlashInfer's FA2 with its host plan made for every call: the upper end beside the call's own figure."""
    for arm in arms.values():
        plan = arm["notes"].get("plan_ms")
        if plan is not None and arm.get("cold_ms"):
            arm["notes"]["cold_with_plan_ms"] = arm["cold_ms"]["median"] + plan


def _untuned(arms: dict[str, dict[str, Any]]) -> dict[str, Any] | None:
    """What SGLang's kernel loses when it tuned on a short prompt: the paired ratio of the two arms."""
    short, native = (arms.get(name, {}).get("graph_ms") for name in ("native-short-tuned", "native"))
    if short is None or native is None:
        return None
    return {"column": "graph_ms", "times_as_slow": paired_ratio(short["rounds"], native["rounds"])}


def failures(
    entries: Sequence[Entry],
    arms: dict[str, dict[str, Any]],
    stage_reasons: dict[str, str],
    logical: dict[str, Any],
) -> list[str]:
    """What makes the run fail: an arm of PageWeaver that is wrong or missing, or counts that differ from the recorded.

    Other people's kernels may be missing or refused: the report says so, and the run goes on.
    """
    wrong = [f"count {difference}" for difference in logical["differences"] or []]
    for entry in entries:
        name = entry.arm.name
        ours = name.startswith(("union", "pageweaver", "offline"))
        problem = arms[name]["unavailable"] or arms[name]["failed_columns"]
        if ours and problem:
            wrong.append(f"{name}: {problem}")
    return wrong + [f"{name}: {why}" for name, why in stage_reasons.items()]
