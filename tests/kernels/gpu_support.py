"""What the GPU tests share: the CUDA stages called one by one."""

from __future__ import annotations

import dataclasses

import torch

import pageweaver_sglang as pw
from pageweaver_sglang.plan import UnionPlan
from pageweaver_sglang.value_tiles import ValueTiles

HAS_CUDA = torch.cuda.is_available()
FUSED_ROW = 16 * 4 * 128 + 1664
"""Elements of a row of a server's fused projection, for up to 4 KV heads."""


def attend(
    case,
    *,
    window: int | None = 128,
    group_size: int = 8,
    guard: str = "none",
    out=None,
    perm=None,
    engine: str | None = None,
    precision: str = "fp8",
) -> torch.Tensor:
    """Run regroup (window None: original order), union prep, value tiles (for an engine that reads them) and attention.

    Groups of 16 are made in an order of groups of 8, as in a call of the public function. The output starts as NaN, and
    so do the tiles, which makes one show that is read and was not marked.
    """
    from pageweaver_sglang.cuda import ops, support

    if window is not None and perm is None:
        perm = pw.regroup(
            case.topk_idx, case.cu_seqlens, case.prefix_lens, window=window, group_size=min(group_size, 8), guard=guard
        )
    tiles = None
    if support.reads_value_tiles(engine or ops.default_engine(group_size), case.v_cache.dtype):
        tiles = poisoned_tiles(case.v_cache)
    marks = None if tiles is None else tiles.marks
    plan = plan_with_slots(case, perm, window=window or 128, group_size=group_size, marks=marks)
    if tiles is not None:
        ops.value_tiles(case.v_cache, tiles, plan)
    if out is None:
        out = torch.full(case.q.shape, float("nan"), dtype=case.q.dtype, device=case.q.device)
    ops.union_attention(
        case.q,
        case.k_cache,
        case.v_cache,
        plan,
        out,
        sm_scale=128**-0.5,
        k_scale=getattr(case, "k_scale", None),
        v_scale=getattr(case, "v_scale", None),
        engine=engine,
        precision=precision,
        tiles=None if tiles is None else tiles.tiles,
    )
    return out


def poisoned_tiles(v_cache: torch.Tensor, byte: int = 0x7F) -> ValueTiles:
    """Tiles for a cache's pool, no page marked, every byte ``byte`` (0x7F: NaN)."""
    tiles = ValueTiles.empty(v_cache.shape[1], v_cache.shape[0] // 128, device=v_cache.device)
    tiles.tiles.fill_(byte)
    return tiles


def plan_with_slots(
    case, perm, *, window: int = 128, group_size: int = 8, marks: torch.Tensor | None = None
) -> UnionPlan:
    """Build the plan that the attention kernel reads, over poisoned arrays (so that every entry must be written)."""
    from pageweaver_sglang.cuda import ops

    kv_heads, tokens, k = case.topk_idx.shape
    requests = case.prefix_lens.shape[0]
    plan = UnionPlan.empty(
        kv_heads,
        tokens,
        requests,
        k,
        window=window,
        group_size=group_size,
        page_size=128,
        device=case.q.device,
        with_slots=True,
    )
    for array in (plan.pages, plan.counts, plan.queries, plan.limits, plan.slots, plan.queue):
        array.fill_(0x5A5A5A5A)
    plan.masks.fill_(0x5A)
    ops.prepare_unions(
        case.topk_idx,
        perm,
        case.cu_seqlens,
        case.seq_lens,
        case.prefix_lens,
        plan,
        window=window,
        req_to_token=case.req_to_token,
        slot_ids=case.slot_ids,
        num_pool_pages=case.k_cache.shape[0] // 128,
        marks=marks,
    )
    return plan


def reference(case) -> torch.Tensor:
    """The exact output, float64."""
    return pw.reference.sparse_prefill(case.q.double(), *case.args()[1:], k_scale=case.k_scale, v_scale=case.v_scale)


def heads_of(case, first: int, count: int):
    """The call with heads ``first`` to ``first + count - 1`` of each KV head only."""
    kv_heads = case.k_cache.shape[1]
    some = case.q.unflatten(1, (kv_heads, -1))[:, :, first : first + count].flatten(1, 2).contiguous()
    return dataclasses.replace(case, q=some)


def halves_in_groups_of_16(case, **options) -> torch.Tensor:
    """The output of a call with 16 heads per KV head, made of two by ``stream`` with 8 heads each in groups of 16."""
    kv_heads = case.k_cache.shape[1]
    halves = [attend(heads_of(case, first, 8), group_size=16, engine="stream", **options) for first in (0, 8)]
    return torch.cat([half.unflatten(1, (kv_heads, 8)) for half in halves], dim=2).flatten(1, 2)


def fused(tensor: torch.Tensor, *, filled: bool) -> torch.Tensor:
    """A view of that shape, and those contents, of rows as wide as a server's fused projection; NaN around it."""
    rows = torch.full((len(tensor), FUSED_ROW), float("nan"), dtype=tensor.dtype, device=tensor.device)
    view = rows[:, 256 : 256 + tensor[0].numel()].view(tensor.shape)
    if filled:
        view.copy_(tensor)
    return view


def rows_around(view: torch.Tensor) -> torch.Tensor:
    """What lies beside a view that :func:`fused` made, in every row of its buffer."""
    rows = view._base
    return torch.cat((rows[:, :256], rows[:, 256 + view[0].numel() :]), dim=1)


def garbage_outside(case):
    """The same with NaN in every cell of the pool that no token of a request owns."""
    owned = torch.zeros(case.k_cache.shape[0], dtype=torch.bool, device=case.k_cache.device)
    for row, length in zip(case.slot_ids.tolist(), case.seq_lens.tolist(), strict=True):
        owned[case.req_to_token[row, :length].long()] = True
    changed = {}
    for name in ("k_cache", "v_cache"):
        cache = getattr(case, name).float()
        cache[~owned] = float("nan")
        changed[name] = cache.to(case.k_cache.dtype)
    return dataclasses.replace(case, **changed)


def same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    return bool((a.contiguous().view(torch.int16) == b.contiguous().view(torch.int16)).all())
