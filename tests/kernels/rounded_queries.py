"""Q as the attention kernels read it: E4M3, each row with the one of three scales that leaves it the least error."""

from __future__ import annotations

import numpy as np
import torch

LARGEST = (256.0, 288.0, 448.0)
"""What a row's largest magnitude may become: ``QueryScales`` of kernels/attention.cuh."""
LANES = 8  # of a row; lane l has elements 8 l to 8 l + 7 and 64 + 8 l to 64 + 8 l + 7


def rounded_q(case) -> torch.Tensor:
    """The case's Q as the kernels read it, float64 ``[tokens, heads, 128]``. What is left is the rounding of P."""
    return rounded_rows(case.q)


def rounded_rows(q: torch.Tensor) -> torch.Tensor:
    """Round rows ``[..., 128]`` of finite BF16 numbers as ``quantise_query`` does; float64, on q's device.

    The choice is made with the kernel's own arithmetic, sums in half precision included, so that near-ties fall alike.
    """
    x = q.float().cpu()
    amax = x.abs().amax(dim=-1, keepdim=True).clamp_min(1e-12)
    inverse = torch.tensor(LARGEST[0]) / amax
    scaled = (x * inverse).half().numpy()
    errors = []
    for largest in LARGEST:
        ratio = np.float16(largest / LARGEST[0])
        y = scaled * ratio
        difference = (_to_e4m3(torch.from_numpy(y)).numpy() - y).reshape(*y.shape[:-1], 2, LANES, 4, 2)
        pairs = np.moveaxis(difference, -3, -4).reshape(*y.shape[:-1], LANES, 8, 2)  # a lane's pairs in its order
        total = np.zeros_like(pairs[..., 0, :])
        for i in range(8):  # one rounding to half precision each: a fused multiply-add
            total = (pairs[..., i, :].astype(np.float64) ** 2 + total.astype(np.float64)).astype(np.float16)
        lanes = (total[..., 0].astype(np.float32) + total[..., 1].astype(np.float32)) * (
            np.float32(1) / np.float32(ratio) ** 2
        )
        for distance in (1, 2, 4):
            lanes = lanes + lanes[..., np.arange(LANES) ^ distance]
        errors.append(torch.from_numpy(lanes[..., :1]))
    choice = torch.cat(errors, dim=-1).argmin(dim=-1, keepdim=True)  # the first of equals
    factor = (torch.tensor(LARGEST) / LARGEST[0])[choice]
    unit = amax * (1 / torch.tensor(LARGEST))[choice]
    return (_to_e4m3(x * (inverse * factor)).double() * unit.double()).to(q.device)


def _to_e4m3(x: torch.Tensor) -> torch.Tensor:
    return x.clamp(-448, 448).to(torch.float8_e4m3fn).to(x.dtype)
