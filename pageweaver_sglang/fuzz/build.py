"""A drawn call as tensors: slices of pools that were made once, and one small upload."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from .draw import MAX_PADDING, MAX_PAGES, MAX_TOKENS, Call
from .variants import BF16, E4M3

HEAD_DIM = 128
"""Elements of a head in the pools; calls of smaller heads take the first ones."""
RATIO = 16
"""Query heads per KV head in the pools, at most what calls have."""
MOST_KV_HEADS = 4
BITS = {E4M3: torch.uint8, BF16: torch.int16}
"""Integers of the same size, which every operation takes."""
_GARBAGE = {
    E4M3: {"NaN": 0x7F, "-NaN": 0xFF, "448": 0x7E, "0": 0},
    BF16: {"NaN": 0x7FC0, "-NaN": 0xFFC0 - (1 << 16), "448": 0x43E0, "0": 0},
}
OFFSETS = 128
"""Slices begin at one of so many places."""
FUSED_ROW = MOST_KV_HEADS * RATIO * HEAD_DIM + 1664
"""Elements between two tokens' queries in the fused projection of a server."""
LEVEL_DIMS = 64
"""Dimensions that carry the level in style ``levels``."""
LARGEST_PAGE = 128


class Pools:
    """Normally distributed Q, K and V, drawn on the CPU with a fixed seed, so that a call is the same on every device.

    ``q``: BF16 ``[rows, FUSED_ROW]``, NaN behind the queries; rounding it to E4M3 changes nothing where a head is
    scaled by what the engines try (largest element 256, 288 or 448), since it was rounded so. ``q_normal``: it was
    not. ``q_signs``: +-1, all alike within a head's first dimensions. ``q_zeros``: zeros. ``k`` and ``v``, by dtype:
    ``[slots, MOST_KV_HEADS, 128]``.
    """

    def __init__(self, device: torch.device | str) -> None:
        random = torch.Generator().manual_seed(20240229)
        self.device = torch.device(device)
        rows = MAX_TOKENS + MAX_PADDING + OFFSETS
        heads = MOST_KV_HEADS * RATIO
        normal = torch.randn(rows, heads, HEAD_DIM, generator=random)
        signs = torch.randint(0, 2, (rows, heads, HEAD_DIM), generator=random).float() * 2 - 1
        signs[:, :, :LEVEL_DIMS] = signs[:, :, :1]
        largest = torch.tensor([256.0, 288.0, 448.0])[torch.randint(0, 3, (rows, heads, 1), generator=random)]
        rounded = (normal * (largest / normal.abs().amax(dim=2, keepdim=True))).to(torch.float8_e4m3fn).float()
        rounded *= 2.0 ** torch.randint(-8, -6, (rows, heads, 1), generator=random)
        self.q, self.q_normal, self.q_signs = (self._fused(x) for x in (rounded, normal, signs))
        self.q_zeros = self._fused(torch.zeros_like(normal))
        slots = (MAX_PAGES + OFFSETS) * LARGEST_PAGE
        keys, values = (torch.randn(slots, MOST_KV_HEADS, HEAD_DIM, generator=random) for _ in range(2))
        self.k, self.v = ({dtype: x.to(dtype).to(device) for dtype in BITS} for x in (keys, values))
        self.level_dims = (torch.arange(HEAD_DIM) < LEVEL_DIMS).float().to(device)
        self.in_page = torch.arange(LARGEST_PAGE, dtype=torch.int32, device=device)

    def _fused(self, values: torch.Tensor) -> torch.Tensor:
        wide = torch.full((len(values), FUSED_ROW), float("nan"), dtype=torch.bfloat16)
        wide[:, : values[0].numel()] = values.flatten(1).to(torch.bfloat16)
        return wide.to(self.device)


@dataclass(frozen=True)
class Tensors:
    """A call's arguments, and what its comparison needs."""

    arguments: dict[str, torch.Tensor]
    """The nine tensors of ``sparse_prefill``, by name."""
    scales: dict[str, float | torch.Tensor | None]
    """``sm_scale``, ``k_scale`` and ``v_scale``."""
    k_clean: torch.Tensor
    """``[slots, kv_heads, head_dim]``: ``k_cache`` without the garbage in cells that belong to no token."""
    v_clean: torch.Tensor
    page_base: torch.Tensor
    """int32 ``[tokens]``: number of the first logical page of the token's request among all requests' pages."""
    page_count: torch.Tensor
    """int32 ``[tokens]``: pages of the token's request; 0 for padding."""
    limit: torch.Tensor
    """int32 ``[tokens]``: last position that the token sees; -1 for padding."""
    physical: torch.Tensor
    """int32 ``[pages]``: of every logical page of all requests, one after the other (at least one)."""
    page_position: torch.Tensor
    """int32 ``[pages]``: position of its first token in its request."""


def build(call: Call, pools: Pools) -> Tensors:
    """Make the tensors of a call. Nothing here waits for the device."""
    page_size, kv_heads, tokens = call.page_size, call.kv_heads, call.tokens
    counts = np.array([len(pages) for pages in call.pages])
    request = np.repeat(np.arange(len(call.lengths)), call.lengths)
    starts = np.cumsum(call.lengths) - call.lengths
    position = np.arange(len(request)) - starts[request] + call.prefixes[request]
    pad = (0, call.padding)
    first_page = np.cumsum(counts) - counts
    physical = np.concatenate([*call.pages, np.zeros(0 if counts.sum() else 1, np.int64)])
    first_slot = np.zeros((call.table_rows, -(-call.columns // page_size)), np.int64)
    length_of_row = np.zeros(call.table_rows, np.int64)
    valid = np.zeros(call.pool_pages, np.int64)
    for row, pages, length in zip(call.rows, call.pages, call.sequences, strict=True):
        first_slot[row, : len(pages)] = pages * page_size
        length_of_row[row] = length
        if len(pages):
            valid[pages[:-1]] = page_size
            valid[pages[-1]] = length - (len(pages) - 1) * page_size
    parts = {
        "topk_idx": call.topk_idx,
        "cu_seqlens": np.cumsum([0, *call.lengths]),
        "seq_lens": call.sequences,
        "prefix_lens": call.prefixes,
        "slot_ids": call.rows,
        "first_slot": first_slot,
        "length_of_row": length_of_row,
        "valid": valid,
        "levels": call.levels,
        "page_base": np.pad(first_page[request], pad),
        "page_count": np.pad(counts[request], pad),
        "limit": np.pad(np.minimum(position, call.sequences[request] - 1), pad, constant_values=-1),
        "physical": physical,
        "page_position": np.concatenate([*(np.arange(count) * page_size for count in counts), physical[:0]])
        if counts.sum()
        else np.zeros(1, np.int64),
        "scales": np.array([call.k_scale or 1.0, call.v_scale or 1.0], np.float32).view(np.int32),
    }
    on_device = _upload(parts, pools.device)

    within = pools.in_page[:page_size]
    table = (on_device["first_slot"][:, :, None] + within).flatten(1)[:, : call.columns]
    place = torch.arange(call.columns, dtype=torch.int32, device=pools.device)
    table = table.masked_fill(place >= on_device["length_of_row"][:, None], call.behind)

    special = {"flat": pools.q_zeros, "levels": pools.q_signs, "rounded": pools.q_normal}
    source, (q_at, k_at, v_at) = special.get(call.style, pools.q), call.offsets
    heads, head_dim, dtype = kv_heads * call.shape.ratio, call.shape.head_dim, call.shape.cache_dtype
    q = source[q_at : q_at + tokens, : heads * HEAD_DIM].unflatten(1, (heads, HEAD_DIM))[:, :, :head_dim]
    slots = call.pool_pages * page_size
    k_clean = pools.k[dtype][k_at * page_size :][:slots, :kv_heads, :head_dim]
    v_clean = pools.v[dtype][v_at * page_size :][:slots, :kv_heads, :head_dim]
    if call.style == "levels":
        level = on_device["levels"].float()[:, None, None, None] * pools.level_dims[:head_dim]
        k_clean = level.expand(-1, page_size, kv_heads, -1).flatten(0, 1).to(dtype)
    foreign = (within >= on_device["valid"][:, None]).flatten()[:, None, None]
    caches = [_cache(clean, foreign, call) for clean in (k_clean, v_clean)]
    scales = on_device["scales"].view(torch.float32)
    return Tensors(
        arguments={
            "q": q.contiguous() if call.q_layout == "contiguous" else q,
            "k_cache": caches[0],
            "v_cache": caches[1],
            "topk_idx": on_device["topk_idx"],
            "req_to_token": table,
            "slot_ids": on_device["slot_ids"] if call.slot_ids_int32 else on_device["slot_ids"].long(),
            "cu_seqlens": on_device["cu_seqlens"],
            "seq_lens": on_device["seq_lens"],
            "prefix_lens": on_device["prefix_lens"],
        },
        scales={
            "sm_scale": call.sm_scale,
            "k_scale": scales[:1] if call.k_scale_tensor else call.k_scale,
            "v_scale": scales[1:] if call.v_scale_tensor else call.v_scale,
        },
        k_clean=k_clean,
        v_clean=v_clean,
        **{name: on_device[name] for name in ("page_base", "page_count", "limit", "physical", "page_position")},
    )


def _upload(parts: dict[str, np.ndarray], device: torch.device) -> dict[str, torch.Tensor]:
    """int32 tensors of the given shapes, which travel together."""
    packed = torch.from_numpy(np.concatenate([part.ravel() for part in parts.values()]).astype(np.int32))
    if device.type == "cuda":
        packed = packed.pin_memory().to(device, non_blocking=True)
    pieces = packed.split([part.size for part in parts.values()])
    return {name: piece.view(part.shape) for (name, part), piece in zip(parts.items(), pieces, strict=True)}


def _cache(clean: torch.Tensor, foreign: torch.Tensor, call: Call) -> torch.Tensor:
    """The cache with garbage in the cells that belong to nobody, in the call's layout (gaps hold garbage too)."""
    garbage = _GARBAGE[clean.dtype][call.garbage]
    data = clean.view(BITS[clean.dtype]).masked_fill(foreign, garbage)
    slots, heads, dim = data.shape
    if call.cache_layout == "wider":
        data = data.new_full((slots, heads + 1, dim + 64), garbage)[:, :heads, :dim].copy_(data)
    elif call.cache_layout == "heads apart":
        data = data.transpose(0, 1).contiguous().transpose(0, 1)
    else:
        data = data.contiguous()
    return data.view(clean.dtype)
