"""The normative text in plain Python sets and loops: slow, and sharing no code with the engines that it judges."""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np


class Group(NamedTuple):
    """One group of a plan."""

    queries: list[int]
    limits: list[int]
    members: dict[int, set[int]]
    """Slots that picked a page, by page."""


def support_set(picked: list[int], seq_len: int, page_size: int) -> frozenset[int]:
    """The valid, distinct logical pages that a query picked."""
    return frozenset(page for page in picked if 0 <= page < math.ceil(seq_len / page_size))


def greedy(supports: dict[int, frozenset[int]], group_size: int) -> list[int]:
    """Algorithm 1 on the queries of one window, by id."""
    unassigned = set(supports)
    order = []
    while unassigned:
        seed = min(unassigned)
        group, union = [seed], set(supports[seed])
        unassigned.remove(seed)
        while len(group) < group_size and unassigned:
            best = min(unassigned, key=lambda query: (len(supports[query] - union), query))
            unassigned.remove(best)
            group.append(best)
            union |= supports[best]
        order += group
    return order


def visits(order: list[int], supports: dict[int, frozenset[int]], group_size: int) -> int:
    """Page visits of one window in a given order."""
    groups = [order[first : first + group_size] for first in range(0, len(order), group_size)]
    return sum(len(frozenset().union(*(supports[query] for query in group))) for group in groups)


def windows(cu_seqlens: list[int], window: int) -> list[tuple[int, list[int]]]:
    """(request, ids) of every window."""
    found = []
    for request in range(len(cu_seqlens) - 1):
        ids = list(range(cu_seqlens[request], cu_seqlens[request + 1]))
        found += [(request, ids[first : first + window]) for first in range(0, len(ids), window)]
    return found


def regroup(
    topk_idx: list,
    cu_seqlens: list[int],
    prefix_lens: list[int],
    *,
    window: int = 128,
    group_size: int = 8,
    page_size: int = 128,
    capacity: int | None = None,
    guard: str = "none",
) -> list[list[int]]:
    """What ``regroup`` must return, from nested lists ``[kv_heads][tokens][k]``."""
    perms = []
    for rows in topk_idx:
        perm = list(range(len(rows)))
        for request, ids in windows(cu_seqlens, window):
            seq_len = prefix_lens[request] + cu_seqlens[request + 1] - cu_seqlens[request]
            if capacity is not None and math.ceil(seq_len / page_size) > capacity:
                continue
            supports = {query: support_set(rows[query], seq_len, page_size) for query in ids}
            order = greedy(supports, group_size)
            if guard == "window" and visits(order, supports, group_size) >= visits(ids, supports, group_size):
                order = ids
            perm[ids[0] : ids[0] + len(ids)] = order
        perms.append(perm)
    return perms


def unions(
    topk_idx: list,
    perm: list[list[int]] | None,
    cu_seqlens: list[int],
    seq_lens: list[int],
    prefix_lens: list[int],
    *,
    window: int = 128,
    group_size: int = 8,
    page_size: int = 128,
) -> list[list[Group]]:
    """The groups that ``prepare_unions`` must list, per KV head, the padding rows' groups last."""
    heads = []
    for head, rows in enumerate(topk_idx):
        groups = []
        for request, ids in windows([*cu_seqlens, len(rows)], window):
            is_padding = request == len(seq_lens)
            for first in range(0, len(ids), group_size):
                queries = ids[first : first + group_size]
                if perm is not None and not is_padding:
                    queries = [perm[head][query] for query in queries]
                limits, members = [], {}
                for slot, query in enumerate(queries):
                    if is_padding:
                        limits.append(-1)
                        continue
                    position = prefix_lens[request] + query - cu_seqlens[request]
                    limits.append(min(position, seq_lens[request] - 1))
                    for page in support_set(rows[query], seq_lens[request], page_size):
                        members.setdefault(page, set()).add(slot)
                groups.append(Group(queries, limits, members))
        heads.append(groups)
    return heads


def attention(
    q: np.ndarray,
    k_cache: np.ndarray,
    v_cache: np.ndarray,
    topk_idx: list,
    req_to_token: list,
    slot_ids: list[int],
    cu_seqlens: list[int],
    seq_lens: list[int],
    prefix_lens: list[int],
    *,
    sm_scale: float,
    k_scale: float = 1.0,
    v_scale: float = 1.0,
    page_size: int = 128,
) -> np.ndarray:
    """What ``sparse_prefill`` must return, float64, one query and head at a time, one token at a time into a list."""
    out = np.zeros(q.shape, dtype=np.float64)
    kv_heads = k_cache.shape[1]
    ratio = q.shape[1] // kv_heads
    for request in range(len(seq_lens)):
        for query in range(cu_seqlens[request], cu_seqlens[request + 1]):
            position = prefix_lens[request] + query - cu_seqlens[request]
            for kv_head in range(kv_heads):
                pages = {page for page in topk_idx[kv_head][query] if page >= 0}
                tokens = [
                    token
                    for page in pages
                    for token in range(page * page_size, min((page + 1) * page_size, seq_lens[request], position + 1))
                ]
                if not tokens:
                    continue
                cells = [req_to_token[slot_ids[request]][token] for token in tokens]
                keys = k_cache[cells, kv_head] * k_scale
                values = v_cache[cells, kv_head] * v_scale
                for head in range(kv_head * ratio, (kv_head + 1) * ratio):
                    logits = keys @ q[query, head] * sm_scale
                    weights = np.exp(logits - logits.max())
                    out[query, head] = weights @ values / weights.sum()
    return out
