#!/usr/bin/env python3
"""Every CUDA kernel once or twice on small inputs, for NVIDIA's compute-sanitizer.

    export PYTORCH_NO_CUDA_MEMORY_CACHING=1   # for memcheck
    compute-sanitizer --tool memcheck --error-exitcode 9 python scripts/sanitizer_target.py
    compute-sanitizer --tool racecheck --error-exitcode 9 python scripts/sanitizer_target.py

Without PyTorch's caching allocator every tensor is an allocation of its own, so that memcheck sees an access just
behind it. Outputs are compared between the engines, and those of precision high between two orders; exit code 1 when
they differ.
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import pageweaver_sglang as pw
from tests.generators import make_case

# (case, what differs from it): a tail, holes, several requests, padding; 4 KV heads with more groups than SMs, so that
# every CTA draws several; a context of 4689 pages of which few are picked; fewer query heads than rows for them.
CASES = (
    ("tail", {"requests": ((20, 700),), "tail": 37, "kv_heads": 4}),
    ("holes", {"requests": ((40, 900),)}),
    ("packed", {"requests": ((9, 0), (1, 300), (30, 500))}),
    ("padded", {"requests": ((10, 400), (5, 0)), "padding": 11}),
    ("few_picks", {"requests": ((1100, 300),), "k": 1, "kv_heads": 4}),
    ("past_512_pages", {"requests": ((30, 600_000),)}),
    ("strided", {"requests": ((70, 900),), "ratio": 8}),
    ("strided", {"requests": ((33, 500),), "ratio": 3, "kv_heads": 2}),
)


def main() -> int:
    if not torch.cuda.is_available():
        sys.exit("sanitizer_target.py: needs a CUDA device, and PyTorch sees none")
    bad = 0
    for name, overrides in CASES:
        case = make_case(name, seed=1, device="cuda", **overrides)
        outputs = {}
        for label, config in {
            "stream": pw.Config(mode="pageweaver", window=64),
            "union8": pw.Config(mode="pageweaver", engine="union8", guard="none"),
            "original": pw.Config(mode="union8"),
            "high": pw.Config(mode="pageweaver", precision="high"),
            "high, original": pw.Config(mode="union8", precision="high"),
        }.items():
            outputs[label] = pw.sparse_prefill(*case.args(), config=config)
        torch.cuda.synchronize()
        wanted = {label: outputs["high" if label.startswith("high") else "stream"] for label in outputs}
        same = all(bool((out == wanted[label]).all()) for label, out in outputs.items())
        bad += not same
        print(f"{name}: {tuple(case.q.shape)} {'ok' if same else 'ENGINES DIFFER'}", flush=True)
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
