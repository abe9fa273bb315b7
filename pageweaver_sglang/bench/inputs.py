"""Random tensors around a workload's recorded page choices: everything that one Step 3 call takes."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from typing import TYPE_CHECKING, Any

import torch

from pageweaver_sglang.cuda import support

if TYPE_CHECKING:
    from pageweaver_sglang import Config, Workload

HEAD_DIM = 128
QUERY_HEADS_PER_KV_HEAD = 16
"""MiniMax-M3's. A rank that shares its KV head with others has fewer."""


@dataclass(frozen=True)
class CallSize:
    """What of calls decides how many queries share a union.

    Attributes:
        heads_per_kv_head: query heads per KV head.
        rows: (query, KV head) pairs.
        processors: multiprocessors of the GPU.
    """

    heads_per_kv_head: int = QUERY_HEADS_PER_KV_HEAD
    rows: int = 0
    processors: int = support.PROCESSORS

    def queries_per_union(self, config: Config) -> int:
        """Those of a call by the engine of ``config``."""
        return support.grouping(config.engine, self.heads_per_kv_head, self.rows, self.processors).union


FEW_ROWS = CallSize()
"""Calls of few queries and MiniMax-M3's heads on an H100 or H200."""


@dataclass(frozen=True)
class Step3Inputs:
    """One call's tensors, all on one device; names and layouts are those of :func:`pageweaver_sglang.sparse_prefill`.

    ``max_seqlen_q`` (longest chunk of a request, tokens) is what SGLang's own Step 3 wants from the host.
    """

    q: torch.Tensor
    k_cache: torch.Tensor
    v_cache: torch.Tensor
    topk_idx: torch.Tensor
    req_to_token: torch.Tensor
    slot_ids: torch.Tensor
    cu_seqlens: torch.Tensor
    seq_lens: torch.Tensor
    prefix_lens: torch.Tensor
    page_size: int
    max_seqlen_q: int

    def kwargs(self) -> dict[str, Any]:
        """The arguments of ``sparse_prefill``."""
        return {field.name: getattr(self, field.name) for field in fields(self) if field.name != "max_seqlen_q"}

    def to(self, device: torch.device | str) -> Step3Inputs:
        """The same inputs on another device."""
        moved = {name: value.to(device) for name, value in vars(self).items() if isinstance(value, torch.Tensor)}
        return replace(self, **moved)

    @property
    def heads_per_kv_head(self) -> int:
        """Query heads per KV head."""
        return self.q.shape[1] // self.k_cache.shape[1]

    @property
    def kv_bytes(self) -> int:
        """Bytes of the K and V cache together."""
        return sum(t.numel() * t.element_size() for t in (self.k_cache, self.v_cache))


def make_inputs(
    workload: Workload,
    device: torch.device | str,
    *,
    seed: int = 0,
    q_scale: float = 1.0,
    heads_per_kv_head: int = QUERY_HEADS_PER_KV_HEAD,
) -> Step3Inputs:
    """Fill a workload with normally distributed BF16 Q and FP8 E4M3 K/V; the cache's pages lie in random order.

    Args:
        workload: the page choices; its ``topk_idx`` is int32 ``[kv_heads, tokens, k]``.
        device: where the tensors go.
        seed: of everything random. Equal seeds give equal tensors on the same kind of device.
        q_scale: standard deviation of Q. 1 gives nearly even softmax weights, 4 gives a few dominating ones.
        heads_per_kv_head: query heads per KV head, at least 1.
    """
    generator = torch.Generator(device=device).manual_seed(seed)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator, device=device, dtype=torch.float32)

    page = workload.page_size
    kv_heads, tokens, _ = workload.topk_idx.shape
    seq_lens = [int(n) for n in workload.seq_lens]
    pages = [-(-n // page) for n in seq_lens]
    pool = sum(pages)
    physical = torch.randperm(pool, generator=generator, device=device, dtype=torch.int64)
    offsets = torch.arange(page, device=device)
    req_to_token = torch.zeros(len(pages), max(pages) * page, dtype=torch.int32, device=device)
    first = 0
    for row, count in enumerate(pages):
        slots = physical[first : first + count, None] * page + offsets
        req_to_token[row, : count * page] = slots.flatten().to(torch.int32)
        first += count

    cu_seqlens = workload.cu_seqlens.to(device)
    return Step3Inputs(
        q=(normal(tokens, kv_heads * heads_per_kv_head, HEAD_DIM) * q_scale).to(torch.bfloat16),
        k_cache=normal(pool * page, kv_heads, HEAD_DIM).to(torch.float8_e4m3fn),
        v_cache=normal(pool * page, kv_heads, HEAD_DIM).to(torch.float8_e4m3fn),
        topk_idx=workload.topk_idx.to(device),
        req_to_token=req_to_token,
        slot_ids=torch.arange(len(pages), dtype=torch.int64, device=device),
        cu_seqlens=cu_seqlens,
        seq_lens=workload.seq_lens.to(device),
        prefix_lens=workload.prefix_lens.to(device),
        page_size=page,
        max_seqlen_q=int((workload.cu_seqlens[1:] - workload.cu_seqlens[:-1]).max()),
    )
