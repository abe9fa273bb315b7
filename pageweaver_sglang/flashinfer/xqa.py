"""Step 3 by FlashInfer's XQA decode kernel on Hopper GPUs: every query a decode request of its own.

Written for flashinfer-python 0.6.15 to 0.7.4, whose signatures agree in what is used here. With an FP8 cache XQA
computes in FP8 (queries and softmax weights rounded to E4M3), with a BF16 or FP16 cache in that type.

XQA multiplies the weights of hidden tokens of a list's last page, which are zero, with V as it is in memory, so every
slot of a page in use must hold finite numbers. SGLang's pool starts as zeros.
"""

from __future__ import annotations

import contextlib
import ctypes
import importlib
import inspect
from collections.abc import Callable
from typing import Any

import torch

from pageweaver_sglang.cuda.support import COMPUTE_CAPABILITY, dtype_name, scale_reason

from .page_lists import PageLists

VERSIONS = ("0.6.15", "0.7.4")
"""First and last version of flashinfer-python whose function was compared with what is used here."""

PAGE_SIZES = (128, 64, 32, 16)
"""Tokens per page that XQA compiles for, the largest first."""
HEAD_DIMS = (64, 128, 256)
MAX_GQA_RATIO = 16

MAX_BATCH = 65535
"""Queries per launch: XQA takes the batch in gridDim.z."""
# FlashInfer takes the first 8 MiB for semaphores; behind them lie the parts of lists that several CTAs share, which are
# few: a small batch alone gets split, to at most as many parts as the GPU has SMs. 16 heads of 256 16-bit elements
# and their sums are 8.3 KB a part.
_SEMAPHORE_BYTES = 8 << 20
WORKSPACE_BYTES = _SEMAPHORE_BYTES + (8 << 20)
_SEMAPHORES_IN_USE = 4 * MAX_BATCH

Function = Callable[..., torch.Tensor]
"""``flashinfer.decode.xqa_batch_decode_with_kv_cache``."""

_PARAMETERS = (
    "query",
    "kv_cache",
    "workspace_buffer",
    "block_tables",
    "seq_lens",
    "max_seq_len",
    "bmm1_scale",
    "bmm2_scale",
    "out",
    "kv_layout",
    "enable_pdl",
)


class FlashInferError(RuntimeError):
    """FlashInfer can't be imported, or is not as expected; the message says what to install."""


def import_module(name: str) -> Any:
    """Import one of FlashInfer's modules. Raises :class:`FlashInferError`."""
    # FlashInfer's libraries expect the driver's symbols to be loaded already.
    with contextlib.suppress(OSError):
        ctypes.CDLL("libcuda.so.1", mode=ctypes.RTLD_GLOBAL)
    try:
        return importlib.import_module(name)
    except Exception as error:  # an import that meets an unfit machine raises anything
        said = (str(error).splitlines() or [type(error).__name__])[0]
        raise FlashInferError(
            f"FlashInfer can't be imported ({said}); install flashinfer-python {VERSIONS[0]} to {VERSIONS[1]}"
        ) from error


def load() -> Function:
    """FlashInfer's function, which compiles its kernel at a first call. Raises :class:`FlashInferError`."""
    module = import_module("flashinfer.decode")
    function = getattr(module, "xqa_batch_decode_with_kv_cache", None)
    found = () if function is None else inspect.signature(function).parameters
    if missing := [name for name in _PARAMETERS if name not in found]:
        what = "is missing" if function is None else f"lacks the parameters {', '.join(missing)}"
        raise FlashInferError(
            f"flashinfer.decode.xqa_batch_decode_with_kv_cache {what}; install flashinfer-python {VERSIONS[0]} to "
            f"{VERSIONS[1]}"
        )
    return function


def kernel_page_size(page_size: int, pool_page_size: int) -> int | None:
    """The largest page that XQA knows and of which logical pages and the pool's pages consist; None for none."""
    for size in PAGE_SIZES:
        if page_size % size == 0 and pool_page_size % size == 0:
            return size
    return None


def xqa_unsupported_reason(
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
    """Say why XQA does not cover a call of :func:`sparse_prefill`, or None when it does on a Hopper GPU.

    Arguments and result are those of :func:`pageweaver_sglang.cuda.support.unsupported_reason`; a question about
    shapes, dtypes and strides that reads nothing from the device and does not ask which one it is
    (:func:`device_reason` does).
    """
    for name, value in (("sink", sink), ("loc_mapping", loc_mapping), ("q_scale", q_scale)):
        if value is not None:
            return f"{name} must be None"
    for name, tensor in (("q", q), ("k_cache", k_cache), ("v_cache", v_cache), ("topk_idx", topk_idx)):
        if tensor.dim() != 3:
            return f"{name} must have 3 dimensions, got {tensor.dim()}"
    if q.dtype not in (torch.bfloat16, torch.float16):
        return f"q must be bfloat16 or float16, got {dtype_name(q)}"
    if k_cache.dtype not in (q.dtype, torch.float8_e4m3fn):
        return f"k_cache must be float8_e4m3fn or, like q, {dtype_name(q)}, got {dtype_name(k_cache)}"
    if v_cache.dtype != k_cache.dtype:
        return f"v_cache must have the dtype of k_cache {dtype_name(k_cache)}, got {dtype_name(v_cache)}"
    if k_cache.shape != v_cache.shape:
        return f"v_cache must have the shape of k_cache {list(k_cache.shape)}, got {list(v_cache.shape)}"
    head_dim = q.shape[2]
    if head_dim not in HEAD_DIMS:
        return f"q must have head_dim {', '.join(map(str, HEAD_DIMS))}, got {head_dim}"
    if k_cache.shape[2] != head_dim:
        return f"k_cache must have the head_dim of q {head_dim}, got {k_cache.shape[2]}"
    q_heads, kv_heads = q.shape[1], k_cache.shape[1]
    if kv_heads == 0 or q_heads % kv_heads or not 1 <= q_heads // kv_heads <= MAX_GQA_RATIO:
        return f"q must have 1 to {MAX_GQA_RATIO} query heads per KV head, got {q_heads} for {kv_heads}"
    pool_page_size = page_size if pool_page_size is None else pool_page_size
    if page_size < 1 or pool_page_size < 1 or kernel_page_size(page_size, pool_page_size) is None:
        return (
            f"page_size and pool_page_size must be multiples of {PAGE_SIZES[-1]}, got {page_size} and {pool_page_size}"
        )
    slots = k_cache.shape[0]
    if slots == 0 or slots % kernel_page_size(page_size, pool_page_size):
        return f"k_cache must have whole pages, got {slots} slots"
    if reason := scale_reason(sm_scale, k_scale, head_dim):
        return reason
    if topk_idx.dtype != torch.int32:
        return f"topk_idx must be int32, got {dtype_name(topk_idx)}"
    if topk_idx.shape[2] == 0:
        return "topk_idx must have at least 1 page per query, got 0"
    for name, cache in (("k_cache", k_cache), ("v_cache", v_cache)):
        if reason := _strides_reason(cache):
            return f"{name} {reason}"
    if v_cache.stride() != k_cache.stride():  # XQA uses those of K for both
        return f"v_cache must have the strides of k_cache {k_cache.stride()}, got {v_cache.stride()}"
    return None


def device_reason(device: torch.device) -> str | None:
    """Why XQA does not serve on a device, or None: the plugin asks for it on Hopper GPUs alone."""
    if device.type != "cuda":
        return f"needs a CUDA device, got {device}"
    capability = torch.cuda.get_device_capability(device)
    if capability != COMPUTE_CAPABILITY:
        wanted, got = (".".join(map(str, pair)) for pair in (COMPUTE_CAPABILITY, capability))
        return f"needs compute capability {wanted}, got {got}"
    return None


def sparse_prefill(
    function: Function,
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    topk_idx: torch.Tensor,
    req_to_token: torch.Tensor,
    slot_ids: torch.Tensor,
    cu_seqlens: torch.Tensor,
    seq_lens: torch.Tensor,
    prefix_lens: torch.Tensor,
    *,
    sm_scale: float | None = None,
    k_scale: float | torch.Tensor | None = None,
    v_scale: float | torch.Tensor | None = None,
    page_size: int = 128,
    pool_page_size: int | None = None,
) -> torch.Tensor:
    """Attend every query to the visible tokens of the pages it picked, by XQA.

    Arguments and result are those of :func:`pageweaver_sglang.sparse_prefill`, for calls that
    :func:`xqa_unsupported_reason` covers. Ids in any order, repeated and invalid ones, partial last pages, queries that
    see nothing and rows behind the last request mean what they mean there. Does not synchronise the device, and can be
    captured by a CUDA graph once a call of these dtypes, head sizes and pages has compiled the kernel.

    Args:
        function: what :func:`load` returns.
        pool_page_size: tokens that the KV pool keeps together, None for ``page_size``; the slots of a logical page have
            to be adjacent only within such parts.

    Returns:
        ``[tokens, q_heads, head_dim]``, q's dtype.
    """
    tokens, q_heads, head_dim = q.shape
    kv_heads = k_cache.shape[1]
    ratio = q_heads // kv_heads
    if tokens == 0 or len(slot_ids) == 0:
        return q.new_zeros(q.shape)
    step = kernel_page_size(page_size, page_size if pool_page_size is None else pool_page_size)
    lists = PageLists(
        req_to_token,
        slot_ids,
        cu_seqlens,
        seq_lens,
        prefix_lens,
        tokens=tokens,
        page_size=page_size,
        kernel_page_size=step,
    )
    table, count, tail = lists.build(topk_idx)
    # An empty list becomes one token, and its row is overwritten below: XQA takes no list without tokens.
    lengths = lists.lengths(count, tail).clamp(min=1)
    nothing = (count == 0)[..., None, None]
    scale = (head_dim**-0.5 if sm_scale is None else float(sm_scale)) * _number(k_scale)
    values = _number(v_scale)
    space = workspace(q.device)
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    part = out if kv_heads == 1 else torch.empty(tokens, ratio, head_dim, dtype=q.dtype, device=q.device)
    for head in range(kv_heads):
        heads = slice(head * ratio, (head + 1) * ratio)
        pages = tuple(cache.unflatten(0, (-1, step))[:, :, head : head + 1] for cache in (k_cache, v_cache))
        attend(function, q[:, heads], pages, table[head], lengths[head], part, scale=scale, workspace=space)
        if v_scale is not None:
            part.mul_(values)
        part.masked_fill_(nothing[head], 0)
        if part is not out:
            out[:, heads] = part
    return out


def attend(
    function: Function,
    q: torch.Tensor,
    pages: tuple[torch.Tensor, ...],
    table: torch.Tensor,
    lengths: torch.Tensor,
    out: torch.Tensor,
    *,
    scale: float | torch.Tensor,
    workspace: torch.Tensor,
) -> None:
    """Attention of one KV head's queries over their page lists.

    Args:
        function: what :func:`load` returns.
        q: ``[queries, heads, head_dim]``, in any layout.
        pages: K and V, each ``[pages, page size, 1, head_dim]``.
        table: int32 ``[queries, pages per list]``, contiguous.
        lengths: int32 ``[queries]``, tokens of each list, at least 1.
        out: shape and dtype of ``q``, contiguous; filled.
        scale: of the scores; a tensor is float32, of one element and on the device.
        workspace: what :func:`workspace` returns; calls on one stream may share it.
    """
    q = q.contiguous()
    for first in range(0, len(q), MAX_BATCH):
        part = slice(first, first + MAX_BATCH)
        function(
            query=q[part],
            kv_cache=pages,
            workspace_buffer=workspace,
            block_tables=table[part],
            seq_lens=lengths[part],
            max_seq_len=table.shape[1] * pages[0].shape[1],
            bmm1_scale=scale,
            # XQA ignores a scale of 16-bit values, so that theirs is applied to the output, whatever the cache's dtype.
            bmm2_scale=1.0,
            out=out[part],
            kv_layout="NHD",
            # An early start would read the lists' lengths before it waits for the kernels that write them.
            enable_pdl=False,
        )


def workspace(device: torch.device) -> torch.Tensor:
    """Scratch memory for calls on one stream, uint8 ``[WORKSPACE_BYTES]``, the semaphores zero as XQA leaves them."""
    space = torch.empty(WORKSPACE_BYTES, dtype=torch.uint8, device=device)
    space[:_SEMAPHORES_IN_USE].zero_()
    return space


def _number(scale: float | torch.Tensor | None) -> float | torch.Tensor:
    """A scale as a float, or as it is in device memory, where reading it would wait for the device."""
    if scale is None:
        return 1.0
    return scale if isinstance(scale, torch.Tensor) and scale.is_cuda else float(scale)


def _strides_reason(cache: torch.Tensor) -> str | None:
    if cache.stride(2) != 1:
        return f"must be contiguous along head_dim, got stride {cache.stride(2)}"
    head_dim = cache.shape[2]
    if cache.stride(0) % head_dim or cache.stride(1) % head_dim:  # XQA counts in heads
        return f"must have strides that are multiples of head_dim {head_dim}, got {tuple(cache.stride())}"
    if cache.data_ptr() % 16:
        return "must begin at a multiple of 16 bytes"
    return None
