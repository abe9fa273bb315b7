"""The portable engine's kernel through Triton's real compiler, for GPUs that are not there.

Triton brings its own assembler, so that this needs neither a GPU nor CUDA. What is compiled is what the launcher asks
for: its arguments and options are recorded in the kernel's place.
"""

from __future__ import annotations

import re
import subprocess
from pathlib import Path
from unittest import mock

import torch
from triton import compile as compile_kernel
from triton import knobs
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource, CompiledKernel

from pageweaver_sglang.cuda import portable, support
from pageweaver_sglang.plan import UnionPlan

KINDS = {
    torch.bfloat16: "*bf16",
    torch.float8_e4m3fn: "*fp8e4nv",
    torch.uint8: "*u8",
    torch.int32: "*i32",
    torch.float32: "*fp32",
}


class Recorder:
    """In the place of the kernel: what the launcher would run."""

    def __getitem__(self, grid):
        self.grid = grid
        return self

    def __call__(self, *arguments, **options):
        self.arguments, self.options = arguments, options


def compiled(
    capability: tuple[int, int],
    dtype: torch.dtype,
    *,
    page_size: int = 128,
    head_dim: int = 128,
    ratio: int = 16,
    picks: int = 16,
    scales: bool = True,
) -> CompiledKernel:
    """The kernel for a GPU of this compute capability: two KV heads of ``ratio`` heads each, ``picks`` pages a query.

    ``scales``: K's lies in a tensor and V's is a number; else there are none.
    """
    kernel, recorder = portable._union_attention_kernel, Recorder()
    q = torch.zeros(20, 2 * ratio, head_dim, dtype=torch.bfloat16)
    cache = torch.zeros(2 * page_size, 2, head_dim).to(dtype)
    (group_size,) = support.union_group_sizes("portable", ratio)
    sizes = {"window": 64, "group_size": group_size, "page_size": page_size}
    plan = UnionPlan.empty(2, 20, 1, picks, **sizes, device="cpu", with_slots=True)
    factors = {"k_scale": torch.ones(1), "v_scale": 2.0} if scales else {}
    with mock.patch.object(portable, "_union_attention_kernel", recorder):
        portable.union_attention(q, cache, cache, plan, q, sm_scale=0.1, **factors, capability=capability)
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
    return compile_kernel(source, target=GPUTarget("cuda", 10 * major + minor, 32), options=options)


def resources(kernel: CompiledKernel, folder: Path) -> tuple[int, int]:
    """Registers a thread, and bytes of its stack, where registers are spilled; ``folder`` is for a file."""
    cubin = folder / "kernel.cubin"
    cubin.write_bytes(kernel.asm["cubin"])
    command = [knobs.nvidia.cuobjdump.path, "--dump-resource-usage", cubin]
    printed = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    registers, stack = re.search(r"REG:(\d+) STACK:(\d+)", printed).groups()
    return int(registers), int(stack)
