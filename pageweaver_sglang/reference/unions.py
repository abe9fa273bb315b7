"""Unions of the support sets of groups, with membership masks."""

from __future__ import annotations

import torch

from .. import checks
from ..plan import UnionPlan
from .layout import page_counts, per_token, positions, split_windows, support_sets

# Page ids handled at once (int64): bounds the memory of a batch of groups to some tens of MB.
_BATCH_IDS = 1 << 20


def prepare_unions(
    topk_idx: torch.Tensor,
    perm: torch.Tensor | None,
    cu_seqlens: torch.Tensor,
    seq_lens: torch.Tensor,
    prefix_lens: torch.Tensor,
    *,
    window: int = 128,
    group_size: int = 8,
    page_size: int = 128,
) -> UnionPlan:
    """List every group's pages once, with one bit per query that picked the page.

    Arguments, result and errors are those of :func:`pageweaver_sglang.prepare_unions`; any k and groups of up to 32
    are accepted. ``slots`` is None: :func:`sparse_prefill` of this engine does not use plans.
    """
    checks.check_unions(
        topk_idx,
        perm,
        cu_seqlens,
        seq_lens,
        prefix_lens,
        window=window,
        group_size=group_size,
        page_size=page_size,
    )
    kv_heads, tokens, k = topk_idx.shape
    bounds = cu_seqlens.tolist()
    device = topk_idx.device
    plan = UnionPlan.empty(
        kv_heads,
        tokens,
        len(bounds) - 1,
        k,
        window=window,
        group_size=group_size,
        page_size=page_size,
        device=device,
    )
    plan.pages.fill_(-1)
    plan.masks.fill_(0)
    plan.counts.fill_(0)
    plan.queries.fill_(-1)
    plan.limits.fill_(-1)

    places = _places(bounds, tokens, window, group_size)
    if not places:
        return plan
    used = len(places)
    order = perm if perm is not None else torch.arange(tokens, dtype=torch.int32, device=device).repeat(kv_heads, 1)
    places_of = torch.tensor(places, device=device)
    empty = places_of < 0
    queries = order[:, places_of.clamp(min=0)].masked_fill(empty, -1)
    # The padding rows belong to nobody, whatever the caller's order says of them.
    padding = places_of >= bounds[-1]
    queries = torch.where(padding, places_of.to(torch.int32), queries)
    plan.queries[:, :used] = queries

    last = torch.minimum(positions(bounds, tokens, prefix_lens), per_token(bounds, tokens, seq_lens, 0) - 1)
    slots = queries.to(torch.int64).clamp(min=0)
    plan.limits[:, :used] = last[slots].to(torch.int32).masked_fill(empty, -1)

    supports = support_sets(topk_idx, page_counts(bounds, tokens, seq_lens, page_size))
    batch = max(1, _BATCH_IDS // (group_size * k))
    for head in range(kv_heads):
        for first in range(0, used, batch):
            end = min(first + batch, used)
            picked = supports[head][slots[head, first:end]]
            picked = picked.masked_fill(empty[first:end, :, None], -1)
            _unite(picked, plan.pages[head, first:end], plan.masks[head, first:end], plan.counts[head, first:end])
    return plan


def _places(bounds: list[int], tokens: int, window: int, group_size: int) -> list[list[int]]:
    """Return the groups: for each, ``group_size`` places in the packed order, -1 for an empty slot.

    The padding rows behind the last request are cut like one more request.
    """
    groups = []
    for one in split_windows([*bounds, tokens], window):
        end = one.start + one.length
        for first in range(one.start, end, group_size):
            members = list(range(first, min(first + group_size, end)))
            groups.append(members + [-1] * (group_size - len(members)))
    return groups


def _unite(picked: torch.Tensor, pages: torch.Tensor, masks: torch.Tensor, counts: torch.Tensor) -> None:
    """Write the unions of ``picked`` ``[groups, group_size, k]`` (distinct per slot, -1 for nothing)."""
    groups, group_size, k = picked.shape
    bits = torch.ones(group_size, dtype=torch.int64, device=picked.device) << torch.arange(
        group_size, device=picked.device
    )
    ids, where = picked.flatten(1).sort(dim=1)
    is_page = ids >= 0
    is_new = is_page.clone()
    is_new[:, 1:] &= ids[:, 1:] != ids[:, :-1]
    counts.copy_(is_new.sum(1))
    # Entry j of the union is the j-th new page; entries that are no page go to one more column that is dropped.
    entry = (is_new.cumsum(1) - 1).masked_fill(~is_page, group_size * k)
    members = torch.zeros(groups, group_size * k + 1, dtype=torch.int64, device=picked.device)
    members.scatter_add_(1, entry, bits[where // k])
    united = torch.full_like(members, -1).scatter_(1, entry, ids)
    pages.copy_(united[:, :-1])
    members = members[:, :-1]
    # Bit 31 is the sign of an int32.
    masks.copy_(torch.where(members >= 1 << 31, members - (1 << 32), members))
