"""SGLang's native SM90 kernel for Step 3 (pull request 37236), where the installed SGLang has it."""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from ..inputs import Step3Inputs
from ..protocol import Arm, ArmUnavailable, first_line

KERNEL = "kernels/ops/attention/minimax_sparse/prefill/sgl_native_q8kv8.py"
ADAPTER = "srt/layers/attention/minimax_sparse_ops/sgl_native_q8kv8.py"


def missing_file() -> str | None:
    """Why the installed SGLang hasn't got the kernel, in a sentence; None when it has. Imports nothing of it."""
    spec = importlib.util.find_spec("sglang")
    if spec is None or not spec.submodule_search_locations:
        return "SGLang is not installed"
    folder = Path(next(iter(spec.submodule_search_locations)))
    for name in (KERNEL, ADAPTER):
        if not (folder / name).is_file():
            return f"the installed SGLang has no sglang/{name} (pull request 37236)"
    return None


class Pr37236Arm(Arm):
    """The adapter's call, with Q rounded to E4M3 in the call, as SGLang's integration does."""

    name = "pr37236"
    description = "SGLang's native SM90 kernel (pull request 37236), Q rounded to FP8 in the call"
    # It rounds probabilities to E4M3 without scaling them up: 6 to 9 % is published for it.
    max_nrms = 0.12

    def prepare(self, sets: Sequence[Step3Inputs]) -> None:
        """Detect the kernel and build it by a first call."""
        reason = missing_file()
        if reason is not None:
            raise ArmUnavailable(reason)
        self._sets = sets
        try:
            module = importlib.import_module("sglang." + ADAPTER.removesuffix(".py").replace("/", "."))
            self._function: Any = module.sgl_native_q8kv8_sparse_prefill_main
            self.call(0)
            torch.cuda.synchronize()
        except Exception as error:  # its import, build and checks raise anything
            raise ArmUnavailable(f"SGLang's native kernel fails ({first_line(error)})") from error

    def call(self, index: int) -> torch.Tensor:
        """Round Q, attend."""
        s = self._sets[index]
        return self._function(
            q=s.q.to(torch.float8_e4m3fn),
            k_cache=s.k_cache,
            v_cache=s.v_cache,
            topk_idx=s.topk_idx,
            req_to_token=s.req_to_token,
            slot_ids=s.slot_ids,
            cu_seqlens=s.cu_seqlens,
            seq_lens=s.seq_lens,
            prefix_lens=s.prefix_lens,
            block_size_k=s.page_size,
        )

    def release(self) -> None:
        """Forget the inputs."""
        self.__dict__.pop("_sets", None)
