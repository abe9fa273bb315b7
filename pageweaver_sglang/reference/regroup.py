"""Greedy regrouping (Algorithm 1), vectorised over windows and KV heads."""

from __future__ import annotations

import torch

from .. import checks
from .layout import Window, page_counts, split_windows, support_sets

# Page ids handled at once (int64): bounds the memory of a batch of windows to some tens of MB.
_BATCH_IDS = 1 << 20


def regroup(
    topk_idx: torch.Tensor,
    cu_seqlens: torch.Tensor,
    prefix_lens: torch.Tensor,
    *,
    window: int = 128,
    group_size: int = 8,
    page_size: int = 128,
    capacity: int | None = None,
    guard: str = "none",
    visits: torch.Tensor | None = None,
) -> torch.Tensor:
    """Permute the queries of every window so that queries of one group picked similar pages.

    Arguments, result and errors are those of :func:`pageweaver_sglang.regroup`; any window and any k are accepted.
    """
    checks.check_regroup(
        topk_idx,
        cu_seqlens,
        prefix_lens,
        window=window,
        group_size=group_size,
        page_size=page_size,
        capacity=capacity,
        guard=guard,
        visits=visits,
    )
    kv_heads, tokens, k = topk_idx.shape
    bounds = cu_seqlens.tolist()
    seq_lens = prefix_lens.to(torch.int64) + cu_seqlens.diff()
    supports = support_sets(topk_idx, page_counts(bounds, tokens, seq_lens, page_size))
    perm = torch.arange(tokens, dtype=torch.int32, device=topk_idx.device).repeat(kv_heads, 1)

    windows = split_windows(bounds, window)
    if capacity is not None:
        fits = ((seq_lens + page_size - 1) // page_size <= capacity).tolist()
        windows = [one for one in windows if fits[one.request]]
    batch = max(1, _BATCH_IDS // (window * k))
    for head in range(kv_heads):
        for first in range(0, len(windows), batch):
            _regroup_batch(supports[head], windows[first : first + batch], group_size, guard, perm[head], visits)
    return perm


def _regroup_batch(
    supports: torch.Tensor,
    windows: list[Window],
    group_size: int,
    guard: str,
    perm: torch.Tensor,
    visits: torch.Tensor | None,
) -> None:
    """Write the new order of some windows into ``perm`` ``[tokens]``; ``supports`` is ``[tokens, k]``."""
    device = supports.device
    width = max(one.length for one in windows)
    lengths = torch.tensor([one.length for one in windows], device=device)
    starts = torch.tensor([one.start for one in windows], device=device)
    place = torch.arange(width, device=device)
    exists = place < lengths[:, None]
    ids = starts[:, None] + place
    # Rows behind a short window repeat token 0: they are never chosen.
    picked = supports[ids.masked_fill(~exists, 0)]
    order = _greedy(*_rename(picked), lengths, group_size)
    if guard == "window" or visits is not None:
        original = _visits(picked, exists, group_size)
        regrouped = _visits(picked.gather(1, order[..., None].expand_as(picked)), exists, group_size)
        if guard == "window":
            order = torch.where((regrouped < original)[:, None], order, place)
            regrouped = torch.minimum(regrouped, original)
        if visits is not None:
            visits += torch.stack([original.sum(), regrouped.sum()])
    new_ids = starts[:, None] + order
    perm[ids[exists]] = new_ids[exists].to(torch.int32)


def _rename(picked: torch.Tensor) -> tuple[torch.Tensor, int]:
    """Rename the pages of every window to 0, 1, 2, ... in ascending order.

    ``picked`` is ``[windows, width, k]`` with -1 for nothing. Returns the names, and the name of "nothing", which is
    larger than that of any page.
    """
    flat = picked.flatten(1)
    ids, where = flat.sort(dim=1)
    is_new = torch.zeros_like(ids)
    is_new[:, 1:] = ids[:, 1:] != ids[:, :-1]
    names = torch.empty_like(ids).scatter_(1, where, is_new.cumsum(1))
    nothing = int(names.max()) + 1
    return names.masked_fill(flat < 0, nothing).view_as(picked), nothing


def _greedy(names: torch.Tensor, nothing: int, lengths: torch.Tensor, group_size: int) -> torch.Tensor:
    """Run Algorithm 1 in all windows in step: one query joins every window's current group per step.

    Args:
        names: int64 ``[windows, width, k]``, renamed distinct pages.
        nothing: the name that stands for no page.
        lengths: ``[windows]``, queries of each window.
        group_size: queries per group.

    Returns:
        int64 ``[windows, width]``: places in the window, in their new order; a window's first ``length`` entries count.
    """
    windows, width, k = names.shape
    # [windows, k * width], so that the sum over a query's pages runs over rows.
    flat = names.transpose(1, 2).reshape(windows, k * width)
    place = torch.arange(width, device=names.device)
    never = width * (k + 1)
    # 1 for a page that is not in the union yet.
    missing = torch.empty(windows, nothing + 1, dtype=torch.uint8, device=names.device)
    taken = place >= lengths[:, None]
    every = torch.arange(windows, device=names.device)
    order = torch.zeros(windows, width, dtype=torch.int64, device=names.device)
    for step in range(width):
        if step % group_size == 0:
            missing.fill_(1)
            missing[:, nothing] = 0
            key = place.expand(windows, width)
        else:
            cost = missing.gather(1, flat).view(windows, k, width).sum(1)
            key = cost * width + place
        chosen = key.masked_fill(taken, never).argmin(1)
        order[:, step] = chosen
        taken[every, chosen] = True
        missing.scatter_(1, names[every, chosen], 0)
    return order


def _visits(picked: torch.Tensor, exists: torch.Tensor, group_size: int) -> torch.Tensor:
    """Return the page visits of every window, ``[windows]``, for groups of consecutive rows of ``picked``."""
    windows, width, k = picked.shape
    short = -width % group_size
    picked = picked.masked_fill(~exists[..., None], -1)
    picked = torch.nn.functional.pad(picked, (0, 0, 0, short), value=-1)
    pages = picked.view(windows, -1, group_size * k).sort(dim=2).values
    is_new = pages >= 0
    is_new[..., 1:] &= pages[..., 1:] != pages[..., :-1]
    return is_new.sum(dim=(1, 2))
