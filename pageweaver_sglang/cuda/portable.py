"""Union attention in Triton, for the GPUs and the calls that the Hopper engines are not built for: ``portable``.

It computes what ``kernels/attention.cuh`` says, in 16-bit arithmetic: one program per group and KV head, whose rows
are the group's queries times their heads. The program walks the group's union, some tokens at a time, and every row
keeps an online softmax in FP32 over the pages that its own query picked.

* **Groups of 64 rows** (:func:`.support.union_group_sizes`): one tile of the tensor cores, whatever the number of
  heads. Larger groups would read fewer pages and multiply more on behalf of queries that did not pick them.
* **FP8 caches are multiplied in FP16.** Every E4M3 number is an FP16 number, one instruction converts two of them, and
  weights keep 11 bits instead of BF16's 8. Q's rows are scaled by powers of two beforehand, so that they fit FP16's
  range; what FP16 drops of a row lies 2**-38 below its largest element.
* **BF16 caches are multiplied in BF16**, Q's rows scaled likewise, which costs nothing and keeps huge scores finite.
* **No NaN of our own.** A running maximum starts at a finite number, scores are taken relative to it before any scale
  is applied, V is not read behind the last token that the group sees, and nothing of a page without a place in the
  cache (slot -1).
* **Two loops.** Pages ascend. Those that lie wholly before the first of the group's limits need no look at single
  tokens: a row whose query did not pick the page subtracts infinity and weighs everything 0.

Import this module only where Triton is at hand. ``TRITON_INTERPRET=1`` runs the kernel on a CPU, for tests.
"""

from __future__ import annotations

import contextlib
from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from ..plan import UnionPlan

Scale = float | torch.Tensor | None

_LOG2_E = 1.4426950408889634


@dataclass(frozen=True)
class Tile:
    """How a program works: tokens per step, warps, steps in flight, most registers a thread (None: as it comes)."""

    step: int = 64
    warps: int = 4
    stages: int = 2
    registers: int | None = None


# By compute capability (major) and whether the cache is FP8. A step of 64 tokens takes 32 registers a thread for scores
# beside 64 for sums; 128 tokens spill, or leave an SM one program. Four warps are one tile of 64 rows.
_TILES = {
    # 228 KiB of shared memory and wgmma: 64 KiB a program for FP8, 112 KiB for BF16. Some 215 registers a thread, so
    # that two programs share an SM; held at 168 for a third, they would spill in the loops.
    (9, True): Tile(stages=3),
    (9, False): Tile(stages=3),
    # Triton 3.7 fails on these loops when it pipelines them for tcgen05. At 120 to 151 registers and 48 KiB, three or
    # four programs of an SM hide each other's loads instead.
    (10, True): Tile(stages=1),
    (10, False): Tile(stages=1),
    (11, True): Tile(stages=1),
    (11, False): Tile(stages=1),
}
# Others (8.x, 12.x) have 100 KiB of shared memory at least: 40 KiB a program for FP8, 56 KiB for BF16.
_OTHER_TILE = Tile()

NATIVE_FP8 = (8, 9)
"""First compute capability that converts E4M3 itself; Triton has no such type before, so bits are moved instead."""


def tile_of(capability: tuple[int, int], *, fp8: bool) -> Tile:
    """How programs work on a GPU of this compute capability."""
    return _TILES.get((capability[0], fp8), _OTHER_TILE)


def _power_of_2(number: int) -> int:
    """The least power of two that is not below ``number`` (1 or more).

    Not ``triton.next_power_of_2``, which SGLang replaces by a function that no kernel can call.
    """
    return 1 << (number - 1).bit_length()


@triton.jit
def _halves(values, NATIVE: tl.constexpr):
    """E4M3 numbers (``NATIVE``: as such, else their bytes) as FP16, exactly; NaN stays NaN."""
    if NATIVE:
        halves = values.to(tl.float16)
    else:
        bits = values.to(tl.int16)
        magnitude = bits & 0x7F
        # The exponent's bias is 7 instead of 15: as they are, the bits mean 2**-8 of the number, subnormals included.
        halves = (((bits & 0x80) << 8) | (magnitude << 7)).to(tl.float16, bitcast=True) * 256.0
        halves = tl.where(magnitude == 0x7F, float("nan"), halves).to(tl.float16)
    return halves


@triton.jit
def _normalised(rows):
    """``rows`` times a power of two that brings each row's largest magnitude to 2**14, and what undoes it.

    ``rows`` is float32 ``[rows, dim]``; all of it is exact but for elements that leave float32's range downwards.
    """
    largest = tl.max(tl.abs(rows), axis=1)
    exponent = (largest.to(tl.int32, bitcast=True) >> 23) & 0xFF
    exponent = tl.minimum(tl.maximum(exponent, 30), 254)  # zero, subnormal and tiny rows; infinite ones
    up = ((268 - exponent) << 23).to(tl.float32, bitcast=True)  # 2**(14 - (exponent - 127))
    down = ((exponent - 14) << 23).to(tl.float32, bitcast=True)
    return rows * up[:, None], down


@triton.jit
def _walk(
    first,
    last,
    peak,
    total,
    sums,
    q_tile,
    factor,
    slot_of_row,
    limit,
    last_seen,
    slots,
    pages,
    masks,
    k_cache,
    v_cache,
    k_slot_stride,
    v_slot_stride,
    EDGE: tl.constexpr,
    UNION: tl.constexpr,
    FP8: tl.constexpr,
    NATIVE: tl.constexpr,
    DIM: tl.constexpr,
    PAGE: tl.constexpr,
    STEP: tl.constexpr,
    STAGES: tl.constexpr,
):
    """Steps ``first`` to ``last`` of the union; ``EDGE`` where some row may see a part of a page only."""
    dim = tl.arange(0, DIM)
    offset = tl.arange(0, STEP)
    steps: tl.constexpr = PAGE // STEP
    # What the next step needs of the plan is read a step ahead: then all the copies in flight can be of K and V.
    entry = tl.minimum(first // steps, UNION - 1)
    next_slot = tl.load(slots + entry)
    next_page = tl.load(pages + entry)
    next_mask = tl.load(masks + entry).to(tl.int32)
    for i in tl.range(first, last, num_stages=STAGES):
        slot = next_slot
        page = next_page
        mask = next_mask
        entry = tl.minimum((i + 1) // steps, UNION - 1)
        next_slot = tl.load(slots + entry)
        next_page = tl.load(pages + entry)
        next_mask = tl.load(masks + entry).to(tl.int32)
        part = (i % steps) * STEP
        token = page * PAGE + part
        member = ((mask >> slot_of_row) & 1) != 0
        mapped = slot >= 0
        member = member & mapped & (limit >= token)
        cell = tl.maximum(slot, 0).to(tl.int64) * PAGE + part + offset

        k_raw = tl.load(k_cache + cell[:, None] * k_slot_stride + dim[None, :], mask=mapped, other=0.0)
        readable = mapped
        if EDGE:
            readable = mapped & ((token + offset)[:, None] <= last_seen)
        v_raw = tl.load(v_cache + cell[:, None] * v_slot_stride + dim[None, :], mask=readable, other=0.0)
        k_tile = _halves(k_raw, NATIVE) if FP8 else k_raw
        score = tl.dot(q_tile, tl.trans(k_tile))
        if EDGE:
            score = tl.where((token + offset)[None, :] <= limit[:, None], score, float("-inf"))
        new_peak = tl.where(member, tl.maximum(peak, tl.max(score, axis=1)), peak)
        reference = tl.where(member, new_peak, float("inf"))
        weight = tl.exp2((score - reference[:, None]) * factor[:, None])
        shrink = tl.exp2((peak - new_peak) * factor)
        total = total * shrink + tl.sum(weight, axis=1)
        sums = sums * shrink[:, None]
        v_tile = _halves(v_raw, NATIVE) if FP8 else v_raw
        sums = tl.dot(weight.to(q_tile.dtype), v_tile, sums)
        peak = new_peak
    return peak, total, sums


@triton.jit(do_not_specialize=["groups"])
def _union_attention_kernel(
    q,
    k_cache,
    v_cache,
    slots,
    pages,
    masks,
    counts,
    queries,
    limits,
    out,
    k_scale,
    v_scale,
    scale,
    v_factor,
    groups,
    q_token_stride,
    q_head_stride,
    k_slot_stride,
    k_head_stride,
    v_slot_stride,
    v_head_stride,
    out_token_stride,
    out_head_stride,
    UNION: tl.constexpr,
    UNION_PADDED: tl.constexpr,
    HEADS: tl.constexpr,
    HEADS_PADDED: tl.constexpr,
    GROUP: tl.constexpr,
    FP8: tl.constexpr,
    NATIVE: tl.constexpr,
    K_SCALE: tl.constexpr,
    V_SCALE: tl.constexpr,
    DIM: tl.constexpr,
    PAGE: tl.constexpr,
    STEP: tl.constexpr,
    STAGES: tl.constexpr,
):
    """One group and KV head. Row r of the tile is head ``r % HEADS_PADDED`` of the query in slot ``r // HEADS_PADDED``.

    ``scale`` is that of the scores in base 2. ``K_SCALE``/``V_SCALE``: the tensor of that name holds another factor.
    """
    head = tl.program_id(1)
    group = head.to(tl.int64) * groups + tl.program_id(0)
    row = tl.arange(0, GROUP * HEADS_PADDED)
    dim = tl.arange(0, DIM)
    slot_of_row = row // HEADS_PADDED
    head_of_row = row % HEADS_PADDED
    query = tl.load(queries + group * GROUP + slot_of_row)
    limit = tl.load(limits + group * GROUP + slot_of_row)
    live = (query >= 0) & (head_of_row < HEADS)

    # How far the union is walked: to the last page that somebody sees; and how far without looking at tokens.
    slots += group * UNION
    pages += group * UNION
    masks += group * UNION
    entry = tl.arange(0, UNION_PADDED)
    listed = entry < tl.load(counts + group)
    page = tl.load(pages + entry, mask=listed, other=0)
    last_seen = tl.max(limit)
    lowest = tl.min(tl.where(limit >= 0, limit, last_seen))
    walked = tl.sum((listed & (page * PAGE <= last_seen)).to(tl.int32))
    whole = tl.sum((listed & (page * PAGE + (PAGE - 1) <= lowest)).to(tl.int32))

    heads = head * HEADS + head_of_row
    q_row = query.to(tl.int64) * q_token_stride + heads * q_head_stride
    q_tile = tl.load(q + q_row[:, None] + dim[None, :], mask=live[:, None], other=0.0)
    q_tile, factor = _normalised(q_tile.to(tl.float32))
    q_tile = q_tile.to(tl.float16 if FP8 else tl.bfloat16)
    if K_SCALE:
        scale *= tl.load(k_scale)
    if V_SCALE:
        v_factor *= tl.load(v_scale)
    # Not 0 and not infinite, so that the infinities below never make a NaN.
    factor = tl.minimum(tl.maximum(factor * scale, 1e-30), 1e30)

    peak = tl.full([GROUP * HEADS_PADDED], -1e38, dtype=tl.float32)
    total = tl.zeros([GROUP * HEADS_PADDED], dtype=tl.float32)
    sums = tl.zeros([GROUP * HEADS_PADDED, DIM], dtype=tl.float32)
    k_cache += head.to(tl.int64) * k_head_stride
    v_cache += head.to(tl.int64) * v_head_stride
    steps: tl.constexpr = PAGE // STEP
    peak, total, sums = _walk(
        0, whole * steps, peak, total, sums, q_tile, factor, slot_of_row, limit, last_seen, slots, pages, masks,
        k_cache, v_cache, k_slot_stride, v_slot_stride, False, UNION, FP8, NATIVE, DIM, PAGE, STEP, STAGES,
    )  # fmt: skip
    peak, total, sums = _walk(
        whole * steps, walked * steps, peak, total, sums, q_tile, factor, slot_of_row, limit, last_seen, slots, pages,
        masks, k_cache, v_cache, k_slot_stride, v_slot_stride, True, UNION, FP8, NATIVE, DIM, PAGE, STEP, STAGES,
    )  # fmt: skip
    seen = total > 0
    sums = sums * tl.where(seen, v_factor / tl.where(seen, total, 1.0), 0.0)[:, None]
    out_row = query.to(tl.int64) * out_token_stride + heads * out_head_stride
    tl.store(out + out_row[:, None] + dim[None, :], sums.to(out.dtype.element_ty), mask=live[:, None])


def union_attention(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    plan: UnionPlan,
    out: torch.Tensor,
    *,
    sm_scale: float,
    k_scale: Scale = None,
    v_scale: Scale = None,
    capability: tuple[int, int] | None = None,
) -> None:
    """Attend over ``plan`` (with ``slots``); write every row of ``out`` that the plan names.

    Neither allocates nor synchronises; Triton compiles at the first call of a kind (seconds).

    Args:
        q: bfloat16 ``[tokens, q_heads, head_dim]``, contiguous along ``head_dim``, a power of two of at least 16;
            ``q_heads / kv_heads`` from 1 to 16.
        k_cache: float8_e4m3fn or bfloat16 ``[slots, kv_heads, head_dim]``, contiguous along ``head_dim``; the
            ``page_size`` tokens of a page lie one behind the other.
        v_cache: shape and dtype of ``k_cache``.
        plan: of groups of :func:`.support.union_group_sizes` queries; ``page_size`` a power of two of at least 16.
        out: bfloat16, shape of ``q``, contiguous along ``head_dim``.
        sm_scale: scale of the scores.
        k_scale: what a stored key is multiplied by: None (1), a float, or a float32 tensor of one element on q's
            device, read there.
        v_scale: the same for values.
        capability: compute capability to work as on; None for that of q's device.
    """
    kv_heads, groups, members = plan.queries.shape
    heads, union = q.shape[1] // kv_heads, plan.pages.shape[2]
    if capability is None:
        capability = torch.cuda.get_device_capability(q.device)
    fp8 = k_cache.dtype == torch.float8_e4m3fn
    native = fp8 and capability >= NATIVE_FP8
    if fp8 and not native:
        k_cache, v_cache = k_cache.view(torch.uint8), v_cache.view(torch.uint8)
    scale, v_factor = sm_scale * _LOG2_E, 1.0
    k_on_device, v_on_device = isinstance(k_scale, torch.Tensor), isinstance(v_scale, torch.Tensor)
    if k_scale is not None and not k_on_device:
        scale *= k_scale
    if v_scale is not None and not v_on_device:
        v_factor *= v_scale
    tile = tile_of(capability, fp8=fp8)
    limits = {} if tile.registers is None else {"maxnreg": tile.registers}
    with torch.cuda.device(q.device) if q.is_cuda else contextlib.nullcontext():
        _union_attention_kernel[(groups, kv_heads)](
            q,
            k_cache,
            v_cache,
            plan.slots,
            plan.pages,
            plan.masks,
            plan.counts,
            plan.queries,
            plan.limits,
            out,
            k_scale if k_on_device else plan.counts,  # not read
            v_scale if v_on_device else plan.counts,
            scale,
            v_factor,
            groups,
            q.stride(0),
            q.stride(1),
            k_cache.stride(0),
            k_cache.stride(1),
            v_cache.stride(0),
            v_cache.stride(1),
            out.stride(0),
            out.stride(1),
            UNION=union,
            UNION_PADDED=_power_of_2(union),
            HEADS=heads,
            HEADS_PADDED=_power_of_2(heads),
            GROUP=members,
            FP8=fp8,
            NATIVE=native,
            K_SCALE=k_on_device,
            V_SCALE=v_on_device,
            DIM=q.shape[2],
            PAGE=plan.page_size,
            STEP=min(tile.step, plan.page_size),
            STAGES=tile.stages,
            num_warps=tile.warps,
            **limits,
        )
