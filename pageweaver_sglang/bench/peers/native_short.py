"""SGLang's own Step 3 as a server has it that tuned on a short first prompt."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch

from ..arms import NativeArm, native_step3
from ..inputs import Step3Inputs
from ..protocol import ArmUnavailable, first_line

SHORT = 128
"""Query tokens of the call that it tunes on."""


def shorten(inputs: Step3Inputs, tokens: int) -> Step3Inputs:
    """The first ``tokens`` query tokens of the first request as a call of their own."""
    tokens = min(tokens, int(inputs.cu_seqlens[1]))
    bounds = torch.tensor([0, tokens], dtype=torch.int32, device=inputs.cu_seqlens.device)
    return replace(
        inputs,
        q=inputs.q[:tokens],
        topk_idx=inputs.topk_idx[:, :tokens].contiguous(),
        slot_ids=inputs.slot_ids[:1],
        cu_seqlens=bounds,
        seq_lens=inputs.prefix_lens[:1] + tokens,
        prefix_lens=inputs.prefix_lens[:1],
        max_seqlen_q=tokens,
    )


class NativeShortArm(NativeArm):
    """The same function with the choice that Triton makes on the first :data:`SHORT` queries.

    Triton's key for that choice holds no length, so that a server keeps what its first prompt led to. Both arms share
    one kernel object: this one puts its own choices in place for its calls.
    """

    name = "native-short-tuned"
    description = f"SGLang's own Step 3 with the choice that Triton makes on {SHORT} queries (a short warm-up prompt)"

    def __init__(self) -> None:
        super().__init__()
        self._own: dict[Any, Any] | None = None

    def prepare(self, sets: Sequence[Step3Inputs]) -> None:
        """Tune on a short call, keep that choice apart, and leave the shared ones as they were."""
        _, self._kernel = native_step3()
        if self._kernel is None:
            raise ArmUnavailable("SGLang's Step 3 kernel is not tuned by Triton in this version")
        before, self._own = dict(self._kernel.cache), None
        try:
            super().prepare([shorten(sets[0], SHORT)])
        finally:
            self._kernel.cache.clear()
            self._kernel.cache.update(before)
        self._own = dict(self._choices)
        self._sets = sets
        try:
            self.call(0)
            torch.cuda.synchronize()
        except Exception as error:  # Triton's own errors share no base class
            raise ArmUnavailable(f"SGLang's Step 3 fails on this input ({first_line(error)})") from error

    def call(self, index: int) -> torch.Tensor:
        """One call with this arm's choice in place, once it has made one."""
        if self._own is None:
            return super().call(index)
        kernel = self._kernel
        others, kernel.cache = kernel.cache, self._own
        try:
            return super().call(index)
        finally:
            kernel.cache = others

    def release(self) -> None:
        """Forget the inputs."""
        self.__dict__.pop("_sets", None)
