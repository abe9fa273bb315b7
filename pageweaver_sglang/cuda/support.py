"""What the CUDA kernels cover, and which engine serves on which GPU.

Questions about shapes, dtypes, strides and compute capabilities that read nothing from the device.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

if TYPE_CHECKING:
    from ..config import Config

HEAD_DIM = 128
PAGE_SIZE = 128
MAX_GQA_RATIO = 16
"""Query heads per KV head, at most."""
PACKED_HEADS = 8
"""Query heads per KV head up to which ``stream`` puts 8 queries into a tile, instead of 4."""
PROCESSORS = 132
"""Multiprocessors of an H200 and of most H100s, for calls that are not on a GPU."""
MAX_TOPK = 16
COMPUTE_CAPABILITY = (9, 0)
"""Hopper's, which the engines ``stream`` and ``union8`` are built for."""
STREAM = "stream"
"""The default engine: Hopper's fast one."""
PORTABLE = "portable"
"""The engine in Triton, for any GPU from :data:`OLDEST` on."""
OLDEST = (8, 0)
SGLANG_IS_FASTER = ((10, 0), (10, 3))
"""SM100 and SM103: SGLang's own kernels serve unless ``portable`` is asked for. Unions lose to them there."""
# Of the scores and of the keys: with smaller ones (zero, negative) the masks of hidden keys would lose their force.
MIN_SCALE = 1e-6
# Bytes: what a bulk copy or a 128-bit load needs of addresses and strides.
_ALIGNMENT = 16


class CallKind(NamedTuple):
    """What of a call decides which engine covers it. None for what is not known yet: that speaks against no engine."""

    cache_dtype: torch.dtype | None = None
    """Of K and V."""
    head_dim: int | None = None
    page_size: int | None = None
    """Tokens per logical page."""

    def __str__(self) -> str:
        words = {
            "KV cache": None if self.cache_dtype is None else str(self.cache_dtype).removeprefix("torch."),
            "head_dim": self.head_dim,
            "page size": self.page_size,
        }
        return ", ".join(f"{name} {value}" for name, value in words.items() if value is not None)


@dataclass(frozen=True)
class _Limits:
    """What an engine covers."""

    cache_dtypes: tuple[torch.dtype, ...]
    head_dims: tuple[int, ...]
    page_sizes: tuple[int, ...]

    def cover(self, kind: CallKind) -> bool:
        """Whether nothing that is known of a call lies outside."""
        allowed = (self.cache_dtypes, self.head_dims, self.page_sizes)
        return all(value is None or value in values for value, values in zip(kind, allowed, strict=True))


_E4M3, _BF16 = torch.float8_e4m3fn, torch.bfloat16
_LIMITS = {
    STREAM: _Limits((_E4M3, _BF16), (HEAD_DIM,), (PAGE_SIZE,)),
    "union8": _Limits((_E4M3,), (HEAD_DIM,), (PAGE_SIZE,)),
    PORTABLE: _Limits((_E4M3, _BF16), (64, HEAD_DIM), (64, PAGE_SIZE)),
}
ANY_KIND = CallKind()
"""A call of which nothing is known."""


def gpu_problem(asked: str, capability: tuple[int, int]) -> str | None:
    """Say why PageWeaver serves nothing on a GPU of this compute capability, or None where it does.

    Args:
        asked: the setting ``engine``.
        capability: of the GPU.

    Returns:
        The end of a sentence that begins with the GPU, such as ``has compute capability 7.5, and ...``.
    """
    said = "has compute capability {}.{}".format(*capability)
    if capability < OLDEST:
        return f"{said}, and the kernels need {'.'.join(map(str, OLDEST))} or newer (bfloat16)"
    if capability in SGLANG_IS_FASTER and asked != PORTABLE:
        overridden = f"engine: {PORTABLE} overrides this, in a server together with SGLANG_DISABLE_MSA=1"
        return f"{said}, where SGLang's own kernels are faster than unions of pages ({overridden})"
    return None


def engine_on(asked: str, capability: tuple[int, int], kind: CallKind = ANY_KIND) -> str | None:
    """The engine that serves, or None: SGLang's own function does.

    Args:
        asked: the setting ``engine``. ``portable`` is taken on every GPU; the others are Hopper's, and mean "the best
            there is" elsewhere. On Hopper ``stream`` means the best there is for the call: ``portable`` where it alone
            covers it (other head sizes and pages). ``union8`` means itself, since whoever asks for it wants to see the
            paper's kernel.
        capability: of the GPU.
        kind: of the call, as far as it is known.
    """
    if gpu_problem(asked, capability) is not None:
        return None
    return next((engine for engine in _candidates(asked, capability) if _LIMITS[engine].cover(kind)), None)


def _candidates(asked: str, capability: tuple[int, int]) -> tuple[str, ...]:
    """The engines that the setting means on a GPU, the better one first and the one that covers more last."""
    if asked == PORTABLE or capability != COMPUTE_CAPABILITY:
        return (PORTABLE,)
    return (STREAM, PORTABLE) if asked == STREAM else (asked,)


def reads_value_tiles(engine: str | None, cache_dtype: torch.dtype) -> bool:
    """Whether an engine reads V from value tiles: ``stream``, of an E4M3 cache. V of a BF16 cache is read as it is."""
    return engine == STREAM and cache_dtype == _E4M3


def computes_in_16_bits(engine: str, cache_dtype: torch.dtype | None) -> bool:
    """Whether the setting ``precision`` makes no difference: ``portable``, and every engine on a BF16 cache."""
    return engine == PORTABLE or cache_dtype == _BF16


def call_kind(q: torch.Tensor, k_cache: torch.Tensor, page_size: int) -> CallKind:
    """The kind of a call of ``sparse_prefill``."""
    return CallKind(k_cache.dtype, q.shape[-1], page_size)


def capability_of(device: torch.device) -> tuple[int, int]:
    """Compute capability of a CUDA device; Hopper's for other devices, so that shapes are looked at as it would."""
    return torch.cuda.get_device_capability(device) if device.type == "cuda" else COMPUTE_CAPABILITY


class Grouping(NamedTuple):
    """Queries per group of a call."""

    order: int
    """Of the order that ``regroup`` finds: the smallest of ``unions``, with which a plan of larger groups needs fewer
    rounds than in an order of groups of its own size."""
    unions: tuple[int, ...]
    """Of the union plan: the sizes that the engine takes."""
    union: int
    """Of the union plan, where no workspace has another of these sizes."""


def union_group_sizes(engine: str, ratio: int) -> tuple[int, ...]:
    """Queries per union that an engine takes, ascending, for ``ratio`` query heads per KV head.

    ``union8`` is built for 8, and so is ``stream`` for more than 8 heads; for up to 8 it takes 16, too. ``portable``
    fills a tile of 64 rows where that takes at most 16 queries: 4 for 9 to 16 heads, 8 for 5 to 8, 16 for fewer. More
    heads than 16 have the reference engine alone.

    Args:
        engine: the engine that serves.
        ratio: query heads per KV head.
    """
    if engine == PORTABLE:
        padded = 1 << (ratio - 1).bit_length()
        return (max(1, min(16, 64 // padded)),)
    return (8, 16) if engine == STREAM and ratio <= PACKED_HEADS else (8,)


def grouping(engine: str, ratio: int, rows: int, processors: int = PROCESSORS) -> Grouping:
    """The group sizes of a call of ``rows`` (query, KV head) pairs on a GPU of ``processors`` multiprocessors.

    Large groups load fewer pages, small ones leave fewer multiprocessors idle: the largest that the engine takes serve
    where there are more of the smallest than multiprocessors. Shapes alone decide, so that a CUDA Graph replays it.
    """
    sizes = union_group_sizes(engine, ratio)
    return Grouping(sizes[0], sizes, sizes[-1] if rows > sizes[0] * processors else sizes[0])


def processors_of(device: torch.device) -> int:
    """Multiprocessors of a CUDA device; :data:`PROCESSORS` for other devices."""
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else PROCESSORS


def call_grouping(config: Config, q: torch.Tensor, k_cache: torch.Tensor, page_size: int) -> Grouping:
    """The group sizes of a call of ``sparse_prefill`` with these arguments."""
    engine = engine_on(config.engine, capability_of(q.device), call_kind(q, k_cache, page_size)) or config.engine
    tokens, q_heads, kv_heads = q.shape[0], q.shape[1], k_cache.shape[1]
    return grouping(engine, q_heads // kv_heads, kv_heads * tokens, processors_of(q.device))


def call_group_size(config: Config, q: torch.Tensor, k_cache: torch.Tensor, page_size: int) -> int:
    """Queries per union of such a call, and what a workspace that is made for it should have."""
    return call_grouping(config, q, k_cache, page_size).union


def unsupported_reason(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    topk_idx: torch.Tensor,
    *,
    page_size: int,
    engine: str = "stream",
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
        engine: the setting ``engine``; what it means depends on the GPU, see :func:`engine_on`.
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
    capability = capability_of(q.device)
    if problem := gpu_problem(engine, capability):
        return f"q is on a GPU that {problem}"
    serves = engine_on(engine, capability, call_kind(q, k_cache, page_size))
    limits = _LIMITS[serves or _candidates(engine, capability)[-1]]
    if q.dtype != torch.bfloat16:
        return f"q must be bfloat16, got {dtype_name(q)}"
    for name, cache in (("k_cache", k_cache), ("v_cache", v_cache)):
        if cache.dtype not in limits.cache_dtypes:
            wanted = " or ".join(str(dtype).removeprefix("torch.") for dtype in limits.cache_dtypes)
            return f"{name} must be {wanted}, got {dtype_name(cache)}"
    if k_cache.dtype != v_cache.dtype:
        return f"v_cache must be {dtype_name(k_cache)} like k_cache, got {dtype_name(v_cache)}"
    for name, tensor in (("q", q), ("k_cache", k_cache), ("v_cache", v_cache), ("topk_idx", topk_idx)):
        if tensor.dim() != 3:
            return f"{name} must have 3 dimensions, got {tensor.dim()}"
    for name, tensor in (("q", q), ("k_cache", k_cache), ("v_cache", v_cache)):
        if tensor.shape[2] not in limits.head_dims:
            return f"{name} must have head_dim {_either(limits.head_dims)}, got {tensor.shape[2]}"
    if k_cache.shape != v_cache.shape:
        return f"v_cache must have the shape of k_cache {list(k_cache.shape)}, got {list(v_cache.shape)}"
    q_heads, kv_heads = q.shape[1], k_cache.shape[1]
    if kv_heads == 0 or q_heads % kv_heads or not 1 <= q_heads // kv_heads <= MAX_GQA_RATIO:
        return f"q must have 1 to {MAX_GQA_RATIO} query heads per KV head, got {q_heads} for {kv_heads}"
    if q.shape[2] != k_cache.shape[2]:
        return f"k_cache must have q's head_dim {q.shape[2]}, got {k_cache.shape[2]}"
    if page_size not in limits.page_sizes:
        return f"page_size must be {_either(limits.page_sizes)}, got {page_size}"
    if pool_page_size is not None and (pool_page_size < 1 or pool_page_size % page_size):
        return f"pool_page_size must be a multiple of {page_size}, got {pool_page_size}"
    slots = k_cache.shape[0]
    if slots % page_size:
        return f"k_cache must have a multiple of {page_size} slots, got {slots}"
    if slots == 0:
        return "k_cache must have at least one page"
    if reason := scale_reason(sm_scale, k_scale, q.shape[2]):
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
    return None


def _either(values: tuple[int, ...]) -> str:
    return " or ".join(map(str, values))


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
