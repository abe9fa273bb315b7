"""SGLang's Triton kernels on the CPU: run with TRITON_INTERPRET=1, set before the kernels are decorated."""

from __future__ import annotations

import importlib

KERNELS = "sglang.kernels.ops.attention.minimax_sparse."


def prepare(*modules: str) -> None:
    """Make the kernels in ``modules`` of SGLang's sparse attention run rightly in Triton's interpreter."""
    for module in modules or ("prefill.topk_sparse", "prefill.flash_with_topk_idx"):
        keep_one_config(importlib.import_module(KERNELS + module))
    repair_bfloat16()


def keep_one_config(module, min_block_k: int = 128) -> None:
    """Leave every autotuned kernel one configuration, so that nothing gets benchmarked (there is no device to)."""
    from triton.runtime.autotuner import Autotuner

    for kernel in list(vars(module).values()):
        while kernel is not None and hasattr(kernel, "fn"):
            if isinstance(kernel, Autotuner):
                wide = [c for c in kernel.configs if c.kwargs.get("BLOCK_SIZE_K", min_block_k) >= min_block_k]
                kernel.configs = (wide or kernel.configs)[:1]
            kernel = getattr(kernel, "fn", None)


def repair_bfloat16() -> None:
    """Triton's interpreter keeps bf16 as its bits: ``tl.dot`` multiplies those, and fp32 -> bf16 truncates."""
    import numpy as np
    import triton.language as tl
    from triton.runtime import interpreter

    builder = interpreter.InterpreterBuilder
    if getattr(builder, "_bfloat16_repaired", False):
        return
    create_dot, cast = builder.create_dot, builder.cast_impl

    def widened(handle):
        if handle.dtype.scalar != tl.bfloat16:
            return handle
        bits = np.ascontiguousarray(handle.data).astype(np.uint32) << 16
        return interpreter.TensorHandle(bits.view(np.float32), tl.float32)

    def repaired_dot(self, a, b, accumulator, *rest):
        return create_dot(self, widened(a), widened(b), accumulator, *rest)

    def repaired_cast(self, source, target):
        if source.dtype.scalar != tl.float32 or target.scalar != tl.bfloat16:
            return cast(self, source, target)
        bits = np.ascontiguousarray(source.data).view(np.uint32).astype(np.uint64)
        rounded = ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)
        rounded = np.where(np.isnan(source.data), np.uint16(0x7FC0), rounded)
        return interpreter.TensorHandle(rounded.reshape(source.data.shape), tl.bfloat16)

    builder.create_dot, builder.cast_impl, builder._bfloat16_repaired = repaired_dot, repaired_cast, True
