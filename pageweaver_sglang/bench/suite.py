"""One workload on the GPU: every arm checked, then timed against the others, then PageWeaver's kernels alone."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import torch

import pageweaver_sglang as pw
from pageweaver_sglang.cuda import support

from . import compare
from .arms import prepare_arms, release, stage_arms
from .catalogue import Entry, catalogue
from .fidelity import Q_SCALES, check_arms
from .inputs import QUERY_HEADS_PER_KV_HEAD, CallSize, Step3Inputs
from .logical import logical_report
from .orders import find_orders
from .protocol import Arm, Protocol, Timing, measure, sets_for_cold_cache
from .recorded import inputs_of, why_random
from .statistics import COLUMNS, paired_ratio, savings, summary
from .work import order_count, rates, work_of

FORMAT = "pageweaver-bench 1"

BEST_FIRST = ("graph_ms", "cold_ms", "warm_graph_ms", "warm_ms")
"""Which timing an arm's rates are taken from: the first that it has."""


@dataclass(frozen=True)
class Settings:
    """What to measure.

    ``rows``: queries compared with float64, None for all. ``arms``: names, None for all. ``columns``: timings, of
    :data:`..statistics.COLUMNS`. ``without``: arms to leave out, with the reason for the report.
    ``heads_per_kv_head``: query heads per KV head, what :func:`..recorded.heads_of` says of the workload.
    """

    protocol: Protocol = field(default_factory=Protocol)
    rows: int | None = 256
    seed: int = 0
    arms: tuple[str, ...] | None = None
    columns: tuple[str, ...] = tuple(COLUMNS)
    without: Mapping[str, str] = field(default_factory=dict)
    heads_per_kv_head: int = QUERY_HEADS_PER_KV_HEAD


@dataclass(frozen=True)
class Progress:
    """Where progress goes: ``stage(text, steps)`` begins a stage, ``step(name)`` ends one of its steps.

    ``begin(name)``: an arm begins something, in which it could crash or hang; None: none does.
    """

    stage: Callable[[str, int], None] = lambda text, steps: None
    step: Callable[[str], None] = lambda name: None
    begin: Callable[[str | None], None] = lambda name: None


def make_sets(
    workload: pw.Workload, seed: int, l2_bytes: int, device: str, heads_per_kv_head: int
) -> list[Step3Inputs]:
    """Enough input sets of equal picks and different tensors that cold calls find nothing in L2."""

    def one(number: int) -> Step3Inputs:
        return inputs_of(workload, device, seed=seed + number, heads_per_kv_head=heads_per_kv_head)

    first = one(0)
    return [first, *(one(number) for number in range(1, sets_for_cold_cache(first.kv_bytes, l2_bytes)))]


APART_COLUMNS = ("cold_ms", "graph_ms")
"""Timings of arms that are shown apart: they are slow, and nothing is made of the others."""


def time_arms(
    sets: Sequence[Step3Inputs],
    arms: Sequence[Arm],
    settings: Settings,
    progress: Progress,
    text: str,
    apart: Collection[str] = (),
) -> tuple[dict[str, dict[str, Timing]], dict[str, dict[str, Any]], dict[str, str]]:
    """Time arms in the columns that ``settings`` asks for; those named in ``apart`` in :data:`APART_COLUMNS` only.

    Returns:
        timings by arm and column, notes by arm, and reasons by arm: why it could not be prepared, or in which columns
        it failed.

    Raises:
        DeviceLost: an arm left the GPU unusable.
    """
    protocol = settings.protocol
    progress.stage(f"{text}: preparing", len(arms))
    ready, reasons = prepare_arms(arms, sets, progress.begin)
    chosen = {
        column: [arm for arm in ready if column in APART_COLUMNS or arm.name not in apart]
        for column in COLUMNS
        if column in settings.columns
    }
    progress.stage(text, sum(map(len, chosen.values())) * protocol.rounds)
    found: dict[str, dict[str, Timing]] = {arm.name: {} for arm in ready}
    for column, timed_arms in chosen.items():
        cache, mode = COLUMNS[column]
        used = len(sets) if cache == "cold" else 1
        timed, failed = measure(timed_arms, used, protocol, mode=mode, on_round=progress.step, on_begin=progress.begin)
        for name, timing in timed.items():
            found[name][column] = timing
        for name, why in failed.items():
            reasons[name] = f"{reasons[name]}; {column}: {why}" if name in reasons else f"{column}: {why}"
    progress.begin(None)
    notes = {arm.name: arm.notes() for arm in ready}
    for arm in ready:
        release(arm)
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
    device, heads = compare.DEVICE, settings.heads_per_kv_head
    progress.stage("Finding orders and counting pages on the CPU", 1)
    orders = find_orders(workload)
    logical = logical_report(workload, name, orders, heads)
    processors = support.processors_of(torch.device(device))
    size = CallSize(heads, workload.topk_idx[..., 0].numel(), processors)
    entries = [e for e in catalogue(orders, size) if settings.arms is None or e.arm.name in settings.arms]
    progress.step("orders")

    without = {e.arm.name: settings.without[e.arm.name] for e in entries if e.arm.name in settings.without}
    tried = [e.arm for e in entries if e.arm.name not in without]
    progress.stage("Checking every arm against float64", len(Q_SCALES) * len(tried))
    figures, reasons = check_arms(
        workload,
        tried,
        rows=settings.rows,
        seed=settings.seed,
        device=device,
        heads_per_kv_head=heads,
        on_arm=progress.step,
        on_begin=progress.begin,
    )
    progress.begin(None)
    reasons |= without
    l2_bytes = torch.cuda.get_device_properties(0).L2_cache_size
    sets = make_sets(workload, settings.seed, l2_bytes, device, heads)
    able = [e.arm for e in entries if e.arm.name not in reasons]
    apart = {e.arm.name for e in entries if e.kind == "apart"}
    timed, notes, failed = time_arms(sets, able, settings, progress, "Timing arms", apart)
    stages = [arm for arm in stage_arms() if arm.name not in settings.without]
    parts, _, part_reasons = time_arms(sets, stages, settings, progress, "Timing PageWeaver's kernels alone")
    part_reasons |= {arm.name: settings.without[arm.name] for arm in stage_arms() if arm.name in settings.without}

    arms, work = {}, work_of(workload, heads)
    for entry in entries:
        arm = entry.arm.name
        columns = {column: summary(timing.rounds_ms) for column, timing in timed.get(arm, {}).items()}
        # `auto` says afterwards which of the orders it took.
        took = notes.get(arm, {})
        count = logical["counts"][order_count(took["order"], took["group_size"]) if "order" in took else entry.count]
        best = next((columns[column] for column in BEST_FIRST if column in columns), None)
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
            "rates": None
            if best is None
            else rates(work, count["visits"], best["median"], ceilings, element_bytes=entry.arm.cache_element_bytes),
            "notes": notes.get(arm, {}),
        }
    _add_plan_time(arms)
    return {
        "format": FORMAT,
        "settings": {**asdict(settings), "columns": {key: COLUMNS[key] for key in COLUMNS if key in settings.columns}},
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
        ours = name.startswith(("union", "pageweaver", "auto", "offline", "portable"))
        problem = arms[name]["unavailable"] or arms[name]["failed_columns"]
        if ours and problem:
            wrong.append(f"{name}: {problem}")
    return wrong + [f"{name}: {why}" for name, why in stage_reasons.items()]
