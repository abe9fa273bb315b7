"""Hypothesis strategies: small inputs of ``regroup`` and ``prepare_unions`` with everything odd that they must take."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from hypothesis import strategies as st


@dataclass(frozen=True)
class Picks:
    """Inputs of ``regroup`` and ``prepare_unions``."""

    topk_idx: torch.Tensor
    cu_seqlens: torch.Tensor
    seq_lens: torch.Tensor
    prefix_lens: torch.Tensor
    options: dict[str, Any]
    """``window``, ``group_size`` and ``page_size``."""

    def regroup_args(self) -> tuple[torch.Tensor, ...]:
        return self.topk_idx, self.cu_seqlens, self.prefix_lens

    def unions_args(self, perm: torch.Tensor | None) -> tuple[Any, ...]:
        return self.topk_idx, perm, self.cu_seqlens, self.seq_lens, self.prefix_lens


@st.composite
def picks(draw: st.DrawFn) -> Picks:
    page_size = draw(st.sampled_from([1, 4, 16]))
    window = draw(st.integers(1, 24) | st.sampled_from([64, 128]))
    group_size = draw(st.integers(1, 9) | st.sampled_from([16, 32]))
    kv_heads = draw(st.integers(1, 2))
    k = draw(st.integers(1, 6))
    requests = draw(st.lists(st.tuples(st.integers(0, 45), st.integers(0, 200)), max_size=4))
    padding = draw(st.integers(0, 12))
    # Few different ids make for ties and shared pages; many reach past the last page.
    largest = draw(st.sampled_from([2, 6, 30, 300]))
    valid = st.integers(0, largest)
    odd = st.sampled_from([-1, -1, -1, -(1 << 31), (1 << 31) - 1, 1 << 20])
    ids = draw(st.sampled_from([valid, valid | odd]))
    lengths = [length for length, _ in requests]
    tokens = sum(lengths) + padding
    # One drawn row per few tokens, the rest by a seeded generator: large inputs stay cheap to draw.
    pool = draw(st.lists(st.lists(ids, min_size=k, max_size=k), min_size=1, max_size=12))
    random = torch.Generator().manual_seed(draw(st.integers(0, 1 << 16)))
    rows = torch.tensor(pool, dtype=torch.int32)
    chosen = torch.randint(0, len(pool), (kv_heads, tokens), generator=random)
    topk_idx = rows[chosen]
    noise = torch.rand(topk_idx.shape, generator=random) < draw(st.sampled_from([0.0, 0.3]))
    random_ids = torch.randint(0, largest + 1, topk_idx.shape, generator=random, dtype=torch.int32)
    # Sequences usually end with the chunk; they may also end before it.
    cut = draw(st.sampled_from([0, 0, 0, 7]))
    return Picks(
        topk_idx=torch.where(noise, random_ids, topk_idx),
        cu_seqlens=torch.tensor([0, *lengths]).cumsum(0).to(torch.int32),
        seq_lens=torch.tensor([max(0, length + prefix - cut) for length, prefix in requests], dtype=torch.int32),
        prefix_lens=torch.tensor([prefix for _, prefix in requests], dtype=torch.int32),
        options={"window": window, "group_size": group_size, "page_size": page_size},
    )
