"""What is the same for all layers of a forward pass, made once: the lengths on the host, the plan's buffers."""

from __future__ import annotations

import weakref
from typing import Any

import torch

from pageweaver_sglang.config import Config
from pageweaver_sglang.cuda.support import call_group_size
from pageweaver_sglang.workspace import Workspace

from .capture import host_lengths


class Forward:
    """One forward pass.

    Attributes:
        lengths: of its batch, as the host knows them; None where it does not.
    """

    def __init__(self, batch: Any):
        self._sources = _host_lists(batch)
        self.lengths = host_lengths(batch)
        self._workspaces: dict[tuple[int, ...], Workspace] = {}

    def describes(self, batch: Any) -> bool:
        """Whether the batch still has the lists of lengths that it had: SGLang may give it others."""
        return all(a is b for a, b in zip(self._sources, _host_lists(batch), strict=True))

    def workspace(self, call: dict[str, Any], config: Config) -> Workspace | None:
        """Buffers for the order and the plan of a Step 3 call; None while a CUDA graph is captured.

        Layers run one after the other in a stream, and a layer's plan means nothing once its attention has run, so
        that all of them use the same buffers. A call on another stream gets others: the allocator gives memory back to
        the stream that it was allocated on. What a graph captures lives as long as the graph, so that such calls take
        their memory from the graph's own pool.
        """
        topk_idx = call["topk_idx"]
        stream = 0
        if topk_idx.is_cuda:
            if torch.cuda.is_current_stream_capturing():
                return None
            stream = torch.cuda.current_stream(topk_idx.device).cuda_stream
        kv_heads, tokens, k = topk_idx.shape
        requests = call["cu_seqlens"].shape[0] - 1
        group_size = call_group_size(config, call["q"], call["k_cache"], call["block_size_k"])
        key = (stream, kv_heads, tokens, k, requests, config.window, group_size)
        workspace = self._workspaces.get(key)
        if workspace is None:
            workspace = self._workspaces[key] = Workspace(
                tokens,
                max(requests, 1),
                kv_heads=kv_heads,
                topk=k,
                window=config.window,
                group_size=group_size,
                device=topk_idx.device,
            )
        return workspace


class Forwards:
    """The forward passes under way, by SGLang's ``ForwardBatch``: two-batch overlap has two at a time.

    A pass is forgotten, and its buffers are free again, when its batch is gone.
    """

    def __init__(self) -> None:
        self._known: dict[int, tuple[weakref.ref[Any], Forward]] = {}

    def __len__(self) -> int:
        return len(self._known)

    def of(self, batch: Any) -> Forward:
        """The pass of ``batch``, the same for every layer."""
        key = id(batch)
        known = self._known.get(key)
        if known is not None and known[0]() is batch and known[1].describes(batch):
            return known[1]
        forward = Forward(batch)
        try:
            reference = weakref.ref(batch, lambda gone: self._forget(key, gone))
        except TypeError:  # nobody would tell when it is gone, so that every layer makes its own
            return forward
        self._known[key] = (reference, forward)
        return forward

    def _forget(self, key: int, reference: weakref.ref[Any]) -> None:
        known = self._known.get(key)
        if known is not None and known[0] is reference:
            del self._known[key]


def _host_lists(batch: Any) -> tuple[Any, Any]:
    return getattr(batch, "extend_prefix_lens_cpu", None), getattr(batch, "extend_seq_lens_cpu", None)
