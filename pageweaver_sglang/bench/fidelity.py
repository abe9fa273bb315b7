"""Each arm's output against one float64 reference, before it may be timed."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

import pageweaver_sglang as pw

from .accuracy import exact_rows, nrms, sample_rows
from .arms import release
from .inputs import Step3Inputs
from .protocol import Arm, ArmUnavailable, first_line, raise_if_lost
from .recorded import inputs_of

Q_SCALES = {"random": 1.0, "sharp": 4.0}
"""Factor of Q by kind of logits: with the second, a few keys dominate the softmax."""

SHARP_ALLOWANCE = 3.0
"""On sharp logits an arm may be off this many times more: weights near 1 show their rounding."""


def compare_rows(output: torch.Tensor, exact: torch.Tensor) -> dict[str, float]:
    """How far ``output`` is from ``exact`` (both ``[rows, heads, dim]``).

    Returns:
        ``nrms``; ``max_error``, the largest absolute error; ``cosine`` of all values taken as one vector; and
        ``worst_row_nrms``, the NRMS of the worst row, which shows a single wrong query among many right ones.
    """
    output, exact = output.to(exact.device).double(), exact.double()
    error = (output - exact).flatten(1).norm(dim=1)
    size = exact.flatten(1).norm(dim=1)
    both = output.norm() * exact.norm()
    finite = bool(output.isfinite().all())
    small = torch.finfo(torch.float64).tiny
    # A row whose exact value is zero counts by its error over the mean row's size.
    scale = torch.where(size > 0, size, size.mean().clamp(min=small))
    return {
        "nrms": nrms(output, exact),
        "max_error": float((output - exact).abs().max()) if finite else float("inf"),
        "cosine": float((output * exact).sum() / both) if finite and both > 0 else 0.0,
        "worst_row_nrms": float((error / scale).max()) if finite else float("inf"),
    }


def exact_outputs(inputs: Step3Inputs, rows: torch.Tensor | None) -> torch.Tensor:
    """Float64 outputs of some rows, computed on the CPU, or of all rows (None), computed where the inputs lie."""
    if rows is not None:
        return exact_rows(inputs.to("cpu"), rows)
    return pw.reference.sparse_prefill(**{**inputs.kwargs(), "q": inputs.q.double()})


def refusal(found: dict[str, dict[str, float]], limit: float) -> str | None:
    """Why an arm with these figures is not timed, in a sentence; None when it may be.

    Args:
        found: :func:`compare_rows` by kind of logits.
        limit: largest NRMS on random logits.
    """
    for kind, figures in found.items():
        most = limit * (SHARP_ALLOWANCE if kind == "sharp" else 1.0)
        if not figures["nrms"] <= most:
            return f"refused: NRMS {figures['nrms']:.2%} against float64 on {kind} logits is above {most:.1%}"
        if not figures["worst_row_nrms"] <= 5 * most:
            return f"refused: one query is off by {figures['worst_row_nrms']:.0%} on {kind} logits"
    return None


def check_arms(
    workload: pw.Workload,
    arms: Sequence[Arm],
    *,
    rows: int | None,
    seed: int,
    device: str = "cuda",
    heads_per_kv_head: int | None = None,
    on_arm: Callable[[str], None] | None = None,
    on_begin: Callable[[str], None] | None = None,
) -> tuple[dict[str, dict[str, dict[str, float]]], dict[str, str]]:
    """Run every arm once per kind of logits.

    Args:
        workload: the picks.
        arms: what to check.
        rows: how many sampled queries; None for all.
        seed: of the inputs and the sample.
        device: where the arms run.
        heads_per_kv_head: query heads per KV head, as in :func:`..recorded.heads_of`.
        on_arm: called with an arm's name when it is done with one kind.
        on_begin: called with an arm's name before it begins with one kind.

    Returns:
        figures by arm and kind, and the reasons by name of arms that can't run or are refused.

    Raises:
        DeviceLost: an arm left the GPU unusable.
    """
    used = int(workload.cu_seqlens[-1])
    picked = None if rows is None or rows >= used else sample_rows(used, rows, seed)
    found: dict[str, dict[str, dict[str, float]]] = {}
    reasons: dict[str, str] = {}
    for kind, q_scale in Q_SCALES.items():
        inputs = inputs_of(workload, device, seed=seed, q_scale=q_scale, heads_per_kv_head=heads_per_kv_head)
        exact = exact_outputs(inputs, picked)
        where = slice(0, used) if picked is None else picked.to(device)
        for arm in arms:
            if arm.name in reasons:
                continue
            if on_begin is not None:
                on_begin(arm.name)
            try:
                arm.prepare([inputs])
                figures = compare_rows(arm.call(0)[where], exact[:used] if picked is None else exact)
                found.setdefault(arm.name, {})[kind] = figures
            except ArmUnavailable as error:
                raise_if_lost(arm.name, error)
                reasons[arm.name] = str(error)
            except Exception as error:  # an arm is anybody's code: whatever it raises, the others go on
                raise_if_lost(arm.name, error)
                reasons[arm.name] = f"fails ({first_line(error)})"
            finally:
                release(arm)
            if on_arm is not None:
                on_arm(arm.name)
    for arm in arms:
        reason = refusal(found.get(arm.name, {}), arm.max_nrms)
        if reason is not None:
            reasons.setdefault(arm.name, reason)
    return found, reasons
