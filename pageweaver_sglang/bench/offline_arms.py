"""Arms with an order found beforehand: what a better, costlier search could gain, and what moving rows costs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch

from .arms import Stages
from .inputs import Step3Inputs
from .orders import FoundOrder
from .protocol import Arm


class OfflineArm(Arm):
    """Unions, V's tiles and attention in a given order; the search is not in the call.

    Args:
        name: the arm's name.
        description: one sentence.
        order: the order; all input sets have the same picks, so that one order serves all.
    """

    def __init__(self, name: str, description: str, order: FoundOrder) -> None:
        self.name, self.description, self._order = name, description, order

    def prepare(self, sets: Sequence[Step3Inputs]) -> None:
        """Put the ids on the device."""
        self._stages = Stages(sets, window=128)
        self._perm = self._order.perm.to(sets[0].q.device)

    def call(self, index: int) -> torch.Tensor:
        """Unions, V's tiles, attention."""
        plan = self._stages.prepare_unions(index, self._perm)
        self._stages.value_tiles(index)
        return self._stages.attend(index, plan)

    def notes(self) -> dict[str, Any]:
        """What the search took on the CPU."""
        return {"search_s": self._order.seconds}

    def release(self) -> None:
        """Free the workspace."""
        for name in ("_stages", "_perm"):
            self.__dict__.pop(name, None)


class ReorderedArm(OfflineArm):
    """The same order, but with Q and the picks moved into it before, and the output moved back after.

    The kernels then walk neighbouring rows and look nothing up; the moves are part of the call.
    """

    def prepare(self, sets: Sequence[Step3Inputs]) -> None:
        """Allocate the moved rows; find out the moved queries' limits, which depend on lengths alone."""
        super().prepare(sets)
        self._sources = sets
        self._limits = self._stages.prepare_unions(0, self._perm).limits.clone()
        self._inverse = self._perm.argsort(dim=1).to(torch.int32)
        self._q = torch.empty_like(sets[0].q, memory_format=torch.contiguous_format)
        self._topk = torch.empty_like(sets[0].topk_idx, memory_format=torch.contiguous_format)
        self._out = torch.empty_like(self._q)
        moved = [replace(s, q=self._q, topk_idx=self._topk) for s in sets]
        self._stages = Stages(moved, window=128)

    def call(self, index: int) -> torch.Tensor:
        """Move rows, unions, V's tiles, attention, move the output back."""
        source = self._sources[index]
        _move(source.q, self._perm, self._q)
        for head, perm in enumerate(self._perm):
            torch.index_select(source.topk_idx[head], 0, perm, out=self._topk[head])
        plan = self._stages.prepare_unions(index, None)
        self._stages.value_tiles(index)
        # The rows' positions in the request moved with them.
        plan.limits.copy_(self._limits)
        _move(self._stages.attend(index, plan), self._inverse, self._out)
        return self._out

    def release(self) -> None:
        """Free the buffers."""
        super().release()
        for name in ("_sources", "_limits", "_inverse", "_q", "_topk", "_out"):
            self.__dict__.pop(name, None)


def _move(rows: torch.Tensor, perm: torch.Tensor, out: torch.Tensor) -> None:
    """``out[i] = rows[perm[h, i]]`` for the query heads of every KV head ``h``."""
    if len(perm) == 1:
        torch.index_select(rows, 0, perm[0], out=out)
        return
    ratio = rows.shape[1] // len(perm)
    for head, ids in enumerate(perm):
        heads = slice(head * ratio, (head + 1) * ratio)
        out[:, heads] = rows[:, heads].index_select(0, ids)
