"""Compile the portable engine's kernel beside SGLang, which replaces functions of Triton; reports what came of it."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import triton

unchanged = triton.next_power_of_2

import fake_runner  # noqa: E402, F401  SGLang, importable without its GPU packages
import sglang.srt.utils.common  # noqa: E402, F401
import torch  # noqa: E402

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "kernels"))

from portable_compile import compiled  # noqa: E402

kernels = [compiled((9, 0), torch.float8_e4m3fn), compiled((8, 0), torch.bfloat16, picks=3)]
report = {
    "replaced": triton.next_power_of_2 is not unchanged,
    "bytes": [len(kernel.asm["cubin"]) for kernel in kernels],
}
Path(os.environ["REPORT"]).write_text(json.dumps(report))
