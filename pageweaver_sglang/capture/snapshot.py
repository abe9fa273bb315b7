"""One Step 3 call's tensors: copied on the device in stream order, later brought to the CPU as a workload."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch

from pageweaver_sglang.workload import Workload

Call = dict[str, Any]
"""The arguments of SGLang's Step 3 function, by name."""


@dataclass(frozen=True)
class HostLengths:
    """Lengths of a batch as the host knows them, so that nothing has to be read back from the device."""

    prefixes: tuple[int, ...]
    chunks: tuple[int, ...]

    def pages(self, page_size: int) -> list[int]:
        """Pages of every request."""
        return [-(-(prefix + chunk) // page_size) for prefix, chunk in zip(self.prefixes, self.chunks, strict=True)]


def without_activations(call: Call, out: torch.Tensor, lengths: HostLengths | None, pool_page_size: int) -> str | None:
    """Why a call's activations cannot be recorded so that they replay, or None. Reads no contents."""
    q, page_size = call["q"], call["block_size_k"]
    if lengths is None or len(lengths.prefixes) != call["cu_seqlens"].shape[0] - 1:
        return "lengths unknown on the host"
    if q.dtype != torch.bfloat16 or out.dtype != torch.bfloat16 or out.shape != q.shape:
        return "Q or output not BF16"
    for name in ("k_cache", "v_cache"):
        if call[name].dtype not in (torch.float8_e4m3fn, torch.bfloat16) or call[name].shape[-1] != q.shape[-1]:
            return f"{name} neither FP8 E4M3 nor BF16"
    if call["k_cache"].dtype != call["v_cache"].dtype:
        return "k_cache and v_cache of different dtypes"
    if pool_page_size % page_size:
        return "pages not contiguous in the pool"
    for name in ("sink", "loc_mapping"):
        if call.get(name) is not None:
            return name
    return None if call.get("q_scale") in (None, 1.0) else "q_scale"


@dataclass
class Snapshot:
    """Copies of one call's tensors on its device. Nothing that the model does afterwards changes them."""

    layer: int
    page_size: int
    indices: dict[str, torch.Tensor]
    """``topk_idx``, ``cu_seqlens``, ``prefix_lens``, ``seq_lens``."""
    activations: dict[str, torch.Tensor] | None
    """``q``, ``out``, and of every page of every request, in order: ``k_pages``, ``v_pages`` and ``page_slots``."""
    scales: dict[str, float | torch.Tensor]
    """``sm_scale``, ``k_scale`` and ``v_scale``, where the call has them."""
    pages: list[int]
    """Pages of every request, when there are activations."""

    @classmethod
    def take(cls, layer: int, call: Call, out: torch.Tensor, lengths: HostLengths | None) -> Snapshot:
        """Copy a call's tensors on the current stream, without a synchronisation.

        Args:
            layer: model layer.
            call: arguments of Step 3.
            out: what it returned.
            lengths: of the batch, to record activations as well; None for indices only.
        """
        page_size = call["block_size_k"]
        indices = {"topk_idx": _copy(call["topk_idx"], torch.int32)}
        indices |= {name: _copy(call[name], torch.int32) for name in ("cu_seqlens", "prefix_lens", "seq_lens")}
        activations, scales, pages = None, {}, []
        if lengths is not None:
            pages = lengths.pages(page_size)
            # Tokens of a page lie together, so that its first one says where it is.
            first = call["req_to_token"][:, : max(pages) * page_size : page_size]
            rows = first.index_select(0, call["slot_ids"].long())
            slots = torch.cat([rows[request, :count] for request, count in enumerate(pages)]).long() // page_size
            activations = {
                "q": _copy(call["q"]),
                "out": _copy(out),
                "page_slots": slots,
                "k_pages": _gather(call["k_cache"], slots, page_size),
                "v_pages": _gather(call["v_cache"], slots, page_size),
            }
            for name in ("sm_scale", "k_scale", "v_scale"):
                value = call.get(name)
                if value is not None:
                    scales[name] = _copy(value) if isinstance(value, torch.Tensor) else float(value)
        return cls(layer, page_size, indices, activations, scales, pages)

    @staticmethod
    def bytes_needed(call: Call, lengths: HostLengths | None) -> int:
        """Device memory that :meth:`take` allocates, in bytes."""
        needed = 4 * call["topk_idx"].numel()
        if lengths is not None:
            q, cache = call["q"], call["k_cache"]
            slots = sum(lengths.pages(call["block_size_k"])) * call["block_size_k"]
            needed += 2 * q.numel() * q.element_size() + 2 * slots * cache[0].numel() * cache.element_size()
        return needed

    def workload(self, to_cpu: Callable[[torch.Tensor], torch.Tensor]) -> Workload:
        """Bring the tensors to the CPU and keep the pages that any query picked.

        Args:
            to_cpu: copies one contiguous tensor.

        Raises:
            ValueError: the tensors are no valid workload, or the host's lengths were not the device's.
        """
        tensors: dict[str, Any] = {name: to_cpu(tensor) for name, tensor in self.indices.items()}
        if self.activations is not None:
            tensors |= self._activations(tensors, to_cpu)
        return Workload(page_size=self.page_size, layer=self.layer, **tensors)

    def _activations(
        self, indices: dict[str, torch.Tensor], to_cpu: Callable[[torch.Tensor], torch.Tensor]
    ) -> dict[str, Any]:
        assert self.activations is not None
        if (-(-indices["seq_lens"] // self.page_size)).tolist() != self.pages:
            raise ValueError("the lengths that the host knew are not those on the device")
        picked = _picked_pages(indices["topk_idx"], indices["cu_seqlens"].tolist(), self.pages)
        if not bool(picked.any()):
            return {}
        counts = torch.tensor(self.pages)
        owners = torch.arange(len(counts)).repeat_interleave(counts)
        ids = torch.arange(len(owners)) - (counts.cumsum(0) - counts)[owners]
        found: dict[str, Any] = {
            "page_ids": ids[picked].to(torch.int32),
            "page_requests": owners[picked].to(torch.int32),
        }
        for name, tensor in self.activations.items():
            found[name] = to_cpu(tensor)
        for name in ("k_pages", "v_pages", "page_slots"):
            found[name] = found[name][picked]
        found["page_slots"] = found["page_slots"].to(torch.int32)
        for name, value in self.scales.items():
            found[name] = float(to_cpu(value)) if isinstance(value, torch.Tensor) else value
        return found


def _picked_pages(topk_idx: torch.Tensor, bounds: list[int], pages: list[int]) -> torch.Tensor:
    """Which of all requests' pages any query of any KV head picked: bool ``[sum of pages]``."""
    picked = []
    for (first, end), count in zip(pairwise(bounds), pages, strict=True):
        ids = topk_idx[:, first:end].flatten().long()
        used = torch.zeros(count, dtype=torch.bool)
        used[ids[(ids >= 0) & (ids < count)]] = True
        picked.append(used)
    return torch.cat(picked)


def _copy(tensor: torch.Tensor, dtype: torch.dtype | None = None) -> torch.Tensor:
    """A contiguous copy, even of what is contiguous and of that dtype already."""
    copy = torch.empty(tensor.shape, dtype=dtype or tensor.dtype, device=tensor.device)
    return copy.copy_(tensor)


def _gather(cache: torch.Tensor, slots: torch.Tensor, page_size: int) -> torch.Tensor:
    """Some pages of ``[cells, kv_heads, dim]``: ``[pages, page_size, kv_heads, dim]``."""
    whole = cache.shape[0] // page_size
    pages = cache[: whole * page_size].unflatten(0, (whole, page_size))
    # As plain integers, which every device can gather; and a wrong slot must not become a fault of the device.
    bits = pages.view(torch.uint8 if cache.element_size() == 1 else torch.int16)
    return bits.index_select(0, slots.clamp(0, whole - 1)).view(cache.dtype)
