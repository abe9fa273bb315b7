"""Orders of the queries, found on the CPU: those PageWeaver finds while it runs, and costlier ones to compare with.

An order permutes each request's token ids per KV head, int32 ``[kv_heads, tokens]``; None is the original one.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise

import torch

import pageweaver_sglang as pw
from pageweaver_sglang.reference.layout import page_counts, support_sets

Order = torch.Tensor | None
_PRIME = 2_147_483_647
_HASHES = 4


@dataclass(frozen=True)
class FoundOrder:
    """An order and what finding it took on this machine's CPU, in seconds."""

    perm: Order
    seconds: float


def identity(workload: pw.Workload) -> torch.Tensor:
    """The original order, written out as ids: what looking ids up costs."""
    kv_heads, tokens, _ = workload.topk_idx.shape
    return torch.arange(tokens, dtype=torch.int32).repeat(kv_heads, 1)


def random(workload: pw.Workload, seed: int = 0) -> torch.Tensor:
    """Random ids inside each request: what the original order's locality is worth."""
    generator = torch.Generator().manual_seed(seed)
    order = identity(workload)
    bounds = workload.cu_seqlens.tolist()
    for head in range(len(order)):
        for start, end in pairwise(bounds):
            order[head, start:end] = torch.randperm(end - start, generator=generator).to(torch.int32) + start
    return order


def greedy(workload: pw.Workload, window: int, guard: str = "none") -> torch.Tensor:
    """Algorithm 1 in windows of any length, by the reference engine."""
    w = workload
    return pw.regroup(w.topk_idx, w.cu_seqlens, w.prefix_lens, window=window, page_size=w.page_size, guard=guard)


def global_hash(workload: pw.Workload, seed: int = 0) -> torch.Tensor:
    """All queries of a request sorted by min-hashes of their pages: similar queries meet from anywhere in the chunk."""
    w = workload
    kv_heads, tokens, _ = w.topk_idx.shape
    bounds = w.cu_seqlens.tolist()
    supports = support_sets(w.topk_idx, page_counts(bounds, tokens, w.seq_lens, w.page_size))
    generator = torch.Generator().manual_seed(seed)
    factors = torch.randint(1, _PRIME, (_HASHES, 2), generator=generator)
    order = identity(w)
    for head in range(kv_heads):
        for start, end in pairwise(bounds):
            picked = supports[head, start:end]
            ids = torch.arange(end - start)
            # Stable sorts from the last hash to the first: queries in order of all hashes, then of their ids.
            for factor, shift in factors.flip(0).tolist():
                hashed = ((picked * factor + shift) % _PRIME).masked_fill(picked < 0, _PRIME).amin(1)
                ids = ids[hashed[ids].sort(stable=True).indices]
            order[head, start:end] = (ids + start).to(torch.int32)
    return order


def reorder_rows(topk_idx: torch.Tensor, perm: torch.Tensor) -> torch.Tensor:
    """Rows of ``topk_idx`` in the order ``perm``, per KV head."""
    return topk_idx.gather(1, perm.long()[..., None].expand_as(topk_idx))


def hash_then_greedy(workload: pw.Workload, window: int, seed: int = 0) -> torch.Tensor:
    """:func:`global_hash`, then Algorithm 1 in windows of the hashed order."""
    w = workload
    hashed = global_hash(w, seed)
    rows = reorder_rows(w.topk_idx, hashed)
    inside = pw.regroup(rows, w.cu_seqlens, w.prefix_lens, window=window, page_size=w.page_size)
    return hashed.gather(1, inside.long())


ORDERS: dict[str, Callable[[pw.Workload], Order]] = {
    "original": lambda workload: None,
    # With the guard, as PageWeaver's own calls have it by default.
    "w64": lambda workload: greedy(workload, 64, "window"),
    "w128": lambda workload: greedy(workload, 128, "window"),
    "w128-unguarded": lambda workload: greedy(workload, 128),
    "identity": identity,
    "random": random,
    "w512": lambda workload: greedy(workload, 512),
    "w2048": lambda workload: greedy(workload, 2048),
    "hash-w512": lambda workload: hash_then_greedy(workload, 512),
}
"""Every order by name; the first ones are what PageWeaver has when it runs (unguarded: as the paper has it)."""

OFFLINE = ("identity", "random", "w512", "w2048", "hash-w512")
"""Orders that are found beforehand."""


def find_orders(workload: pw.Workload, names: tuple[str, ...] | None = None) -> dict[str, FoundOrder]:
    """Find the named orders (all by default) and take the time."""
    found = {}
    for name in names or tuple(ORDERS):
        start = time.perf_counter()
        perm = ORDERS[name](workload)
        found[name] = FoundOrder(perm, time.perf_counter() - start)
    return found
