"""What this GPU can do at best, measured in the same run: a device copy, a copy inside L2, an FP8 matrix product."""

from __future__ import annotations

import statistics
from collections.abc import Callable
from typing import Any

import torch

from .protocol import CudaClock, first_line

_ROUNDS = 11
_COPY_BYTES = 1 << 30
_L2_BYTES = 16 << 20
_MATRIX = 8192


def _median_ms(work: Callable[[], object], calls: int) -> float:
    clock = CudaClock()

    def several() -> None:
        for _ in range(calls):
            work()

    several()
    return statistics.median(clock.time(several) / calls for _ in range(_ROUNDS))


def _copy_tb_s(size: int, calls: int) -> float:
    source, target = (torch.empty(size, dtype=torch.uint8, device="cuda") for _ in range(2))
    return 2 * size / _median_ms(lambda: target.copy_(source), calls) / 1e9


def _matmul_tflops() -> float:
    a, b = (
        torch.randn(_MATRIX, _MATRIX, device="cuda", dtype=torch.bfloat16).to(torch.float8_e4m3fn) for _ in range(2)
    )
    one = torch.ones((), device="cuda")

    def multiply() -> torch.Tensor:
        return torch._scaled_mm(a, b.t(), scale_a=one, scale_b=one, out_dtype=torch.bfloat16, use_fast_accum=True)

    return 2 * _MATRIX**3 / _median_ms(multiply, 5) / 1e9


def measure_ceilings() -> dict[str, Any]:
    """``copy_tb_s`` and ``l2_copy_tb_s`` (bytes read and written), ``fp8_matmul_tflops``; medians of 11 rounds.

    One that can't be measured here is None, with the reason under its name and ``_missing``.
    """
    jobs: dict[str, Callable[[], float]] = {
        "copy_tb_s": lambda: _copy_tb_s(_COPY_BYTES, 5),
        "l2_copy_tb_s": lambda: _copy_tb_s(_L2_BYTES, 200),
        "fp8_matmul_tflops": _matmul_tflops,
    }
    found: dict[str, Any] = {}
    for name, job in jobs.items():
        try:
            found[name] = job()
        except (RuntimeError, AttributeError, TypeError) as error:
            found |= {name: None, f"{name}_missing": first_line(error)}
    return found
