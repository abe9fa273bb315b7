"""The portable engine without a GPU: its kernel in Triton's interpreter, and compiled for the GPUs that it is for."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from pageweaver_sglang.cuda import support
from pageweaver_sglang.plan import UnionPlan

pytest.importorskip("triton")

ROOT = Path(__file__).resolve().parents[2]


def test_against_the_reference_in_the_interpreter():
    environment = {**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [sys.executable, ROOT / "tests/kernels/programs/portable.py"],
        env=environment,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("right") == 15
    assert "WRONG" not in done.stdout


@pytest.mark.parametrize("ratio", range(1, 17))
def test_groups_fill_a_tile(ratio):
    """Rows are a power of two from 16 to 64, no more than half of them padding; a window holds whole groups."""
    size = support.union_group_size("portable", ratio)
    padded = next(power for power in (1, 2, 4, 8, 16) if power >= ratio)
    assert size in (4, 8, 16)
    assert 16 <= size * padded <= 64
    assert size == 16 or size * padded == 64
    assert support.union_group_size("stream", ratio) == 8


class Recorder:
    """In the place of the kernel: what the launcher would run."""

    def __getitem__(self, grid):
        self.grid = grid
        return self

    def __call__(self, *arguments, **options):
        self.arguments, self.options = arguments, options


KINDS = {
    torch.bfloat16: "*bf16",
    torch.float8_e4m3fn: "*fp8e4nv",
    torch.uint8: "*u8",
    torch.int32: "*i32",
    torch.float32: "*fp32",
}
# KiB of shared memory that a program may have.
MOST_SHARED = {(8, 0): 163, (8, 9): 99, (9, 0): 227, (10, 0): 227, (12, 0): 99}


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.bfloat16], ids=["fp8", "bf16"])
@pytest.mark.parametrize("capability", MOST_SHARED, ids=str)
def test_compiles_for(capability, dtype, monkeypatch):
    """Triton brings its own assembler, so that this needs no GPU and no CUDA."""
    from triton import compile as compile_kernel
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    from pageweaver_sglang.cuda import portable

    kernel, recorder = portable._union_attention_kernel, Recorder()
    monkeypatch.setattr(portable, "_union_attention_kernel", recorder)
    q, cache = torch.zeros(20, 32, 128, dtype=torch.bfloat16), torch.zeros(256, 2, 128).to(dtype)
    size = support.union_group_size("portable", 16)
    plan = UnionPlan.empty(2, 20, 1, 16, window=64, group_size=size, page_size=128, device="cpu", with_slots=True)
    scale = torch.ones(1)
    portable.union_attention(q, cache, cache, plan, q, sm_scale=0.1, k_scale=scale, v_scale=2.0, capability=capability)
    assert recorder.grid == (plan.counts.shape[1], 2)

    names, signature, aligned = kernel.arg_names, {}, {}
    for index, (name, value) in enumerate(zip(names, recorder.arguments, strict=False)):
        if isinstance(value, torch.Tensor):
            signature[name], aligned[(index,)] = KINDS[value.dtype], [["tt.divisibility", 16]]
        elif isinstance(value, int):
            signature[name] = "i32"
            if value % 16 == 0:
                aligned[(index,)] = [["tt.divisibility", 16]]
        else:
            signature[name] = "fp32"
    constants = {name: recorder.options[name] for name in names[len(recorder.arguments) :]}
    source = ASTSource(
        kernel,
        signature={name: signature.get(name, "constexpr") for name in names},
        constexprs={(names.index(name),): value for name, value in constants.items()},
        attrs=aligned,
    )
    options = {name: value for name, value in recorder.options.items() if name not in constants}
    major, minor = capability
    compiled = compile_kernel(source, target=GPUTarget("cuda", 10 * major + minor, 32), options=options)
    assert compiled.asm["cubin"]
    assert compiled.metadata.shared <= MOST_SHARED[capability] * 1024
