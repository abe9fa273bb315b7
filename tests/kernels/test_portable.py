"""The portable engine without a GPU: its kernel in Triton's interpreter, and compiled for the GPUs that it is for."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from pageweaver_sglang.cuda import support

pytest.importorskip("triton")

from portable_compile import compiled, resources
from triton.runtime.jit import JITFunction

from pageweaver_sglang.cuda import portable

ROOT = Path(__file__).resolve().parents[2]


def test_against_the_reference_in_the_interpreter():
    environment = {**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [sys.executable, ROOT / "tests/kernels/programs/portable.py"],
        env=environment,
        capture_output=True,
        text=True,
        timeout=1800,  # of one that hangs
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("right") == 16
    assert "WRONG" not in done.stdout


@pytest.mark.parametrize("ratio", range(1, 17))
def test_groups_fill_a_tile(ratio):
    """Rows are a power of two from 16 to 64, no more than half of them padding; a window holds whole groups."""
    (size,) = support.union_group_sizes("portable", ratio)
    padded = next(power for power in (1, 2, 4, 8, 16) if power >= ratio)
    assert size in (4, 8, 16)
    assert 16 <= size * padded <= 64
    assert size == 16 or size * padded == 64


@pytest.mark.parametrize(("ratio", "size"), [(17, 2), (32, 2), (33, 1), (64, 1), (65, 1), (128, 1)])
def test_groups_of_more_heads_than_the_kernel_takes(ratio, size):
    """The reference engine takes them, and a workspace needs a size."""
    assert support.union_group_sizes("portable", ratio) == (size,)


# KiB of shared memory that a program may have.
MOST_SHARED = {(8, 0): 163, (8, 9): 99, (9, 0): 227, (10, 0): 227, (12, 0): 99}
# Bytes of registers that a thread may spill. None with wgmma and tcgen05. Loops of mma.sync
# need all 255 registers there are for FP8, and the assembler's version decides about the last few.
MOST_SPILLED = {(8, 0): 64, (8, 9): 64, (9, 0): 0, (10, 0): 0, (12, 0): 64}
FP8, BF16 = torch.float8_e4m3fn, torch.bfloat16


@pytest.mark.parametrize("dtype", [FP8, BF16], ids=["fp8", "bf16"])
@pytest.mark.parametrize("capability", MOST_SHARED, ids=str)
def test_compiles_for(capability, dtype, tmp_path):
    kernel = compiled(capability, dtype)
    assert kernel.metadata.shared <= MOST_SHARED[capability] * 1024
    registers, spilled = resources(kernel, tmp_path)
    assert 64 < registers <= 255  # the sums alone are 64
    assert spilled <= MOST_SPILLED[capability]


@pytest.mark.parametrize(
    ("capability", "dtype", "shape"),
    [
        ((9, 0), FP8, {"page_size": 64, "ratio": 3, "picks": 7}),
        ((9, 0), BF16, {"head_dim": 64, "ratio": 1, "picks": 1, "scales": False}),
        ((8, 0), FP8, {"head_dim": 64, "page_size": 64, "ratio": 9, "picks": 13, "scales": False}),
        ((8, 9), FP8, {"ratio": 6, "picks": 5, "page_size": 64}),
        ((12, 0), BF16, {"ratio": 2, "picks": 3}),
    ],
    ids=str,
)
def test_compiles_for_shapes(capability, dtype, shape, tmp_path):
    _, spilled = resources(compiled(capability, dtype, **shape), tmp_path)
    assert spilled <= MOST_SPILLED[capability]


def test_kernels_use_nothing_that_a_process_may_replace():
    """Of what is global, the kernels name Triton's language and each other: SGLang replaces functions of ``triton``."""
    functions = {name: value for name, value in vars(portable).items() if isinstance(value, JITFunction)}
    assert "_union_attention_kernel" in functions
    for function in functions.values():
        assert set(function.fn.__code__.co_names) & set(vars(portable)) <= {"tl", *functions}


@pytest.mark.parametrize("number", range(1, 65))
def test_padded_sizes(number):
    """Powers of two that hold the number, and half of which does not."""
    padded = portable._power_of_2(number)
    assert bin(padded).count("1") == 1
    assert padded >= number > padded // 2
