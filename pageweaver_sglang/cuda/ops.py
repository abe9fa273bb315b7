"""Thin wrappers around the kernel library: tensors in, tensors filled, nothing checked twice.

Callers (:mod:`pageweaver_sglang.api`) have validated shapes and dtypes. Everything is launched on the current stream;
nothing here synchronises or allocates, so that a CUDA Graph can capture it.
"""

from __future__ import annotations

from torch import Tensor

from ..plan import UnionPlan
from ..value_tiles import ValueTiles
from .loader import architecture_on, load
from .support import PORTABLE

Scale = float | Tensor | None


def regroup(
    topk_idx: Tensor,
    cu_seqlens: Tensor,
    prefix_lens: Tensor,
    perm: Tensor,
    *,
    window: int,
    group_size: int,
    page_size: int,
    capacity: int | None,
    guard: str,
    visits: Tensor | None = None,
) -> None:
    """Write Algorithm 1's order of queries to ``perm``, int32 [kv_heads, tokens]; see ``pageweaver_sglang.regroup``."""
    load(architecture_on(topk_idx.device)).pw_regroup(
        topk_idx, cu_seqlens, prefix_lens, perm, window, group_size, page_size, capacity or 0, guard == "window", visits
    )


def prepare_unions(
    topk_idx: Tensor,
    perm: Tensor | None,
    cu_seqlens: Tensor,
    seq_lens: Tensor,
    prefix_lens: Tensor,
    plan: UnionPlan,
    *,
    window: int,
    req_to_token: Tensor | None = None,
    slot_ids: Tensor | None = None,
    num_pool_pages: int = 0,
    marks: Tensor | None = None,
    behind_regroup: bool = False,
) -> None:
    """Fill the arrays of ``plan``; with ``req_to_token`` also ``slots`` (physical pages below ``num_pool_pages``).

    ``marks``, int32 ``[kv_heads, num_pool_pages]``, needs ``slots``: the entry of every page that the plan lists is
    raised to the number of the page's tokens that belong to the request, see :class:`..value_tiles.ValueTiles`.

    ``behind_regroup`` promises that :func:`regroup` was what the current stream got last: the kernel then takes its
    place on the GPU while that one runs.
    """
    load(architecture_on(topk_idx.device)).pw_union_prep(
        topk_idx,
        perm,
        cu_seqlens,
        seq_lens,
        prefix_lens,
        req_to_token,
        slot_ids,
        num_pool_pages,
        window,
        plan.page_size,
        plan.pages,
        plan.masks,
        plan.counts,
        plan.queries,
        plan.limits,
        plan.slots if req_to_token is not None else None,
        plan.queue,
        marks,
        behind_regroup,
    )


def value_tiles(v_cache: Tensor, tiles: ValueTiles, plan: UnionPlan) -> None:
    """Transpose every marked page of ``v_cache`` to its tile, and clear the marks; put the plan's groups in order.

    The order, largest group first, is written behind the counters of ``plan.queue``.

    ``v_cache`` is float8_e4m3fn ``[pool_pages * 128, kv_heads, 128]``. Bytes that are NaN become zero behind a page's
    marked number of tokens.
    """
    load().pw_value_tiles(v_cache, tiles.marks, tiles.tiles, plan.counts, plan.queue)


def default_engine(group_size: int) -> str:
    """Return the engine that :func:`union_attention` takes when none is asked for."""
    return "union8" if group_size == 4 else "stream"


def union_attention(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    plan: UnionPlan,
    out: Tensor,
    *,
    sm_scale: float,
    k_scale: Scale = None,
    v_scale: Scale = None,
    engine: str | None = None,
    precision: str = "fp8",
    tiles: Tensor | None = None,
) -> None:
    """Attend over ``plan`` (with ``slots``); write every row of ``out`` [tokens, q_heads, 128] that the plan names.

    Scales are factors of the caches: None (1.0), a float, or a float32 CUDA tensor of one element, read on the device.
    ``engine`` is ``"stream"`` or ``"union8"``; None takes the second for groups of 4 and else the first, which
    has groups of 8, or of 16 for up to 8 query heads per KV head.
    Both give the same bits in ``precision`` ``"fp8"``; ``"high"`` is ``stream``'s alone. Of E4M3 caches ``stream``
    reads V from ``tiles``, uint8 ``[kv_heads, pool_pages, 16384]``, as :func:`value_tiles` left them for this plan's
    pages. It alone of the two takes BF16 caches, without tiles, and then computes in BF16 whatever the
    precision. ``union8`` reads ``v_cache``. ``"portable"`` takes the arguments of
    :func:`.portable.union_attention` and computes in 16 bits whatever the precision.
    """
    if engine == PORTABLE:
        from . import portable

        portable.union_attention(q, k_cache, v_cache, plan, out, sm_scale=sm_scale, k_scale=k_scale, v_scale=v_scale)
        return
    k_value, k_device = _split_scale(k_scale)
    v_value, v_device = _split_scale(v_scale)
    load().pw_attention(
        engine or default_engine(plan.group_size),
        precision,
        q,
        k_cache,
        v_cache,
        plan.slots,
        plan.pages,
        plan.masks,
        plan.counts,
        plan.queries,
        plan.limits,
        plan.queue,
        tiles,
        out,
        sm_scale,
        k_value,
        v_value,
        k_device,
        v_device,
    )


def _split_scale(scale: Scale) -> tuple[float, Tensor | None]:
    if scale is None:
        return 1.0, None
    if isinstance(scale, Tensor):
        return 1.0, scale
    return float(scale), None
