#!/usr/bin/env python3
"""Every CUDA kernel once or twice on small inputs, for NVIDIA's compute-sanitizer.

    export PYTORCH_NO_CUDA_MEMORY_CACHING=1   # for memcheck
    compute-sanitizer --tool memcheck --error-exitcode 9 python scripts/sanitizer_target.py
    compute-sanitizer --tool racecheck --error-exitcode 9 python scripts/sanitizer_target.py

Without PyTorch's caching allocator every tensor is an allocation of its own, so that memcheck sees an access just
behind it. Outputs are compared bit for bit: between the engines, between groups of 8 and of 16 where an engine takes
both, and those of precision high and of BF16 caches between orders; exit code 1 when they differ or are not finite.
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import pageweaver_sglang as pw
from pageweaver_sglang.cuda import support
from tests.generators import Case, make_case

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
    ("few_picks", {"requests": ((1100, 300),), "k": 1, "kv_heads": 4, "ratio": 8}),
)
BF16_CASES = (
    ("tail", {"requests": ((20, 700),), "tail": 37}),
    ("holes", {"requests": ((40, 900),), "ratio": 8}),
    ("packed", {"requests": ((9, 0), (1, 300), (30, 500)), "ratio": 3, "kv_heads": 2}),
    ("few_picks", {"requests": ((1100, 300),), "k": 1, "kv_heads": 4}),
    ("few_picks", {"requests": ((1100, 300),), "k": 1, "kv_heads": 4, "ratio": 8}),
    ("future", {}),  # second halves of pages that nobody sees, with windows of 128
)
# Calls whose outputs must be equal, by label.
FP8_CALLS = {
    "fp8": (
        pw.Config(mode="pageweaver", window=64),
        pw.Config(mode="pageweaver", engine="union8", guard="none"),
        pw.Config(mode="union8"),
    ),
    "high": (pw.Config(mode="pageweaver", precision="high"), pw.Config(mode="union8", precision="high")),
}
BF16_CALLS = {
    "bf16": (
        pw.Config(mode="pageweaver", window=64),
        pw.Config(mode="pageweaver", window=128, guard="none"),
        pw.Config(mode="union8"),
    )
}


def outputs(case: Case, config: pw.Config) -> list[torch.Tensor]:
    """The call's output in every group size that its engine takes, as bits."""
    found = []
    for group_size in support.call_grouping(config, case.q, case.k_cache, case.page_size).unions:
        workspace = pw.Workspace(**case.workspace_sizes(), window=config.window, group_size=group_size)
        found.append(pw.sparse_prefill(*case.args(), config=config, workspace=workspace).view(torch.int16))
    return found


def main() -> int:
    if not torch.cuda.is_available():
        sys.exit("sanitizer_target.py: needs a CUDA device, and PyTorch sees none")
    bad = 0
    runs = [(FP8_CALLS, torch.float8_e4m3fn, case) for case in CASES]
    runs += [(BF16_CALLS, torch.bfloat16, case) for case in BF16_CASES]
    for calls, cache_dtype, (name, overrides) in runs:
        case = make_case(name, seed=1, device="cuda", cache_dtype=cache_dtype, **overrides)
        wrong = []
        for label, configs in calls.items():
            found = [out for config in configs for out in outputs(case, config)]
            same = all(torch.equal(out, found[0]) for out in found)
            if not (same and bool(found[0].view(torch.bfloat16).isfinite().all())):
                wrong.append(label)
        torch.cuda.synchronize()
        bad += bool(wrong)
        said = f"WRONG ({', '.join(wrong)})" if wrong else "ok"
        print(f"{name}, {', '.join(calls)}: {tuple(case.q.shape)} {said}", flush=True)
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
