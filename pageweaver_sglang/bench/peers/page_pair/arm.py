"""The page-pair control as an arm."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import torch

from ...inputs import Step3Inputs
from ...protocol import Arm, ArmUnavailable, CudaClock, first_line
from .pairing import TILE, PairPlan, pair_pages

HEADS = tuple(heads for heads in (1, 2, 4, 8, 16) if heads * TILE >= 16)
"""Query heads per KV head: the kernels' tiles have a power of two of rows, and tensor cores want 16."""


class PagePairArm(Arm):
    """Both kernels are timed; pairing and lists are made beforehand on the CPU, which favours this arm."""

    name = "page-pair"
    description = (
        "pages paired by common queries (beforehand, on the CPU), one partial output per query and pair, merge"
    )
    max_nrms = 0.02

    def prepare(self, sets: Sequence[Step3Inputs]) -> None:
        """Pair the pages and allocate the workspace."""
        heads = sets[0].heads_per_kv_head
        if heads not in HEADS:
            allowed = ", ".join(map(str, HEADS))
            raise ArmUnavailable(f"page-pair takes {allowed} query heads per KV head, got {heads}")
        try:
            from .kernels import page_pair_attention
        except ImportError as error:
            raise ArmUnavailable(f"Triton can't be imported ({first_line(error)})") from error
        self._attention, self._sets = page_pair_attention, sets
        first = sets[0]
        lengths = ("topk_idx", "cu_seqlens", "seq_lens", "prefix_lens")
        start = time.perf_counter()
        plan = pair_pages(*(getattr(first, name).cpu() for name in lengths), page_size=first.page_size)
        self._search_s = time.perf_counter() - start
        # The plan holds logical pages only, so that one serves every set.
        self._plan: PairPlan = plan.to(first.q.device)
        self._out = torch.empty_like(first.q, memory_format=torch.contiguous_format)
        shape = (*plan.counts.shape, max(plan.max_partials, 1), heads)
        self._part = torch.empty(*shape, first.q.shape[2], dtype=first.q.dtype, device=first.q.device)
        self._log_sum = torch.empty(shape, dtype=torch.float32, device=first.q.device)
        try:
            self._warps = self._fastest()
        except Exception as error:  # Triton's own errors share no base class
            raise ArmUnavailable(f"the page-pair kernels fail here ({first_line(error)})") from error

    def call(self, index: int) -> torch.Tensor:
        """Partial outputs, then the merge."""
        s = self._sets[index]
        self._attention(
            s.q,
            s.k_cache,
            s.v_cache,
            s.req_to_token,
            s.slot_ids,
            self._plan,
            self._part,
            self._log_sum,
            self._out,
            page_size=s.page_size,
            warps=self._warps,
        )
        return self._out

    def _first(self) -> None:
        self.call(0)

    def _fastest(self) -> int:
        """Try both sizes of programs on the first set, so that the arm isn't slow by an accidental choice."""
        clock, times = CudaClock(), {}
        for warps in (4, 8):
            self._warps = warps
            self._first()  # builds the kernels
            times[warps] = min(clock.time(self._first) for _ in range(3))
        return min(times, key=times.__getitem__)

    def notes(self) -> dict[str, Any]:
        """The pairing's time and counts, and the workspace for partial outputs."""
        sizes = (self._sets[0].heads_per_kv_head, self._out.shape[2], self._out.element_size())
        return {
            "search_s": self._search_s,
            "warps": self._warps,
            **self._plan.describe(),
            "padded_workspace_bytes": self._plan.padded_workspace_bytes(*sizes),
            "used_workspace_bytes": self._plan.used_workspace_bytes(*sizes),
        }

    def release(self) -> None:
        """Free the workspace and the plan."""
        for name in ("_sets", "_plan", "_out", "_part", "_log_sum"):
            self.__dict__.pop(name, None)
