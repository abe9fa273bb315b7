"""What the CUDA kernels cover: a question about shapes, dtypes and strides that reads nothing from the device."""

from __future__ import annotations

from typing import Any

import torch

HEAD_DIM = 128
PAGE_SIZE = 128
GQA_RATIO = 16
MAX_TOPK = 16
COMPUTE_CAPABILITY = (9, 0)
# Of the scores and of the keys: with smaller ones (zero, negative) the masks of hidden keys would lose their force.
MIN_SCALE = 1e-6
# Bytes: what a bulk copy or a 128-bit load needs of addresses and strides.
_ALIGNMENT = 16


def unsupported_reason(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    topk_idx: torch.Tensor,
    *,
    page_size: int,
    pool_page_size: int | None = None,
    sink: Any = None,
    loc_mapping: Any = None,
    q_scale: Any = None,
    sm_scale: float | None = None,
    k_scale: float | torch.Tensor | None = None,
) -> str | None:
    """Say why the kernels do not cover a call of ``sparse_prefill``, or None when they do.

    Args:
        q: queries, ``[tokens, q_heads, head_dim]``.
        k_cache: keys, ``[slots, kv_heads, head_dim]``.
        v_cache: values, shape of ``k_cache``.
        topk_idx: picked pages, ``[kv_heads, tokens, k]``.
        page_size: tokens per logical page.
        pool_page_size: tokens that the KV pool keeps together, where the caller knows it.
        sink: attention sinks of the call, if any.
        loc_mapping: remapped cache locations of the call, if any.
        q_scale: scale of the queries, if any.
        sm_scale: scale of the scores, None for the default.
        k_scale: scale of the keys, None for 1. One in device memory is not read, and taken for a positive number.

    Returns:
        A reason that begins with the argument's name, such as ``q must be bfloat16, got float16``.
    """
    for name, value in (("sink", sink), ("loc_mapping", loc_mapping), ("q_scale", q_scale)):
        if value is not None:
            return f"{name} must be None"
    if q.dtype != torch.bfloat16:
        return f"q must be bfloat16, got {dtype_name(q)}"
    for name, cache in (("k_cache", k_cache), ("v_cache", v_cache)):
        if cache.dtype != torch.float8_e4m3fn:
            return f"{name} must be float8_e4m3fn, got {dtype_name(cache)}"
    for name, tensor in (("q", q), ("k_cache", k_cache), ("v_cache", v_cache), ("topk_idx", topk_idx)):
        if tensor.dim() != 3:
            return f"{name} must have 3 dimensions, got {tensor.dim()}"
    for name, tensor in (("q", q), ("k_cache", k_cache), ("v_cache", v_cache)):
        if tensor.shape[2] != HEAD_DIM:
            return f"{name} must have head_dim {HEAD_DIM}, got {tensor.shape[2]}"
    if k_cache.shape != v_cache.shape:
        return f"v_cache must have the shape of k_cache {list(k_cache.shape)}, got {list(v_cache.shape)}"
    q_heads, kv_heads = q.shape[1], k_cache.shape[1]
    if q_heads != GQA_RATIO * kv_heads:
        return f"q must have {GQA_RATIO} query heads per KV head, got {q_heads} for {kv_heads}"
    if page_size != PAGE_SIZE:
        return f"page_size must be {PAGE_SIZE}, got {page_size}"
    if pool_page_size is not None and (pool_page_size < 1 or pool_page_size % PAGE_SIZE):
        return f"pool_page_size must be a multiple of {PAGE_SIZE}, got {pool_page_size}"
    slots = k_cache.shape[0]
    if slots % PAGE_SIZE:
        return f"k_cache must have a multiple of {PAGE_SIZE} slots, got {slots}"
    if slots == 0:
        return "k_cache must have at least one page"
    if reason := scale_reason(sm_scale, k_scale, HEAD_DIM):
        return reason
    k = topk_idx.shape[2]
    if not 1 <= k <= MAX_TOPK:
        return f"topk_idx must have 1 to {MAX_TOPK} pages per query, got {k}"
    if topk_idx.dtype != torch.int32:
        return f"topk_idx must be int32, got {dtype_name(topk_idx)}"
    if topk_idx.stride(2) != 1:
        return f"topk_idx must be contiguous along k, got stride {topk_idx.stride(2)}"
    for name, tensor in (("q", q), ("k_cache", k_cache), ("v_cache", v_cache)):
        if reason := _misaligned(tensor):
            return f"{name} {reason}"
    if not q.is_cuda:
        return f"q must be on a CUDA device, got {q.device}"
    capability = torch.cuda.get_device_capability(q.device)
    if capability != COMPUTE_CAPABILITY:
        wanted, got = (".".join(map(str, pair)) for pair in (COMPUTE_CAPABILITY, capability))
        return f"q must be on a GPU of compute capability {wanted}, got {got}"
    return None


def scale_reason(sm_scale: float | None, k_scale: float | torch.Tensor | None, head_dim: int) -> str | None:
    """Say which scale of the scores or keys a kernel can't take, or None; one in device memory is not read."""
    # Keys that a query must not see get a large negative score before the scales are applied.
    scale = head_dim**-0.5 if sm_scale is None else float(sm_scale)
    if not scale >= MIN_SCALE:
        return f"sm_scale must be at least {MIN_SCALE}, got {scale}"
    on_device = isinstance(k_scale, torch.Tensor) and k_scale.is_cuda
    if k_scale is not None and not on_device and not float(k_scale) >= MIN_SCALE:
        return f"k_scale must be at least {MIN_SCALE}, got {float(k_scale)}"
    return None


def dtype_name(tensor: torch.Tensor) -> str:
    """The dtype's name as messages have it, such as ``float16``."""
    return str(tensor.dtype).removeprefix("torch.")


def _misaligned(tensor: torch.Tensor) -> str | None:
    if tensor.stride(2) != 1:
        return f"must be contiguous along head_dim, got stride {tensor.stride(2)}"
    unit = _ALIGNMENT // tensor.element_size()
    if tensor.stride(0) % unit or tensor.stride(1) % unit:
        return f"must have strides that are multiples of {unit} elements, got {tuple(tensor.stride())}"
    if tensor.data_ptr() % _ALIGNMENT:
        return f"must begin at a multiple of {_ALIGNMENT} bytes"
    return None
