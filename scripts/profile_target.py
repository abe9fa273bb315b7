#!/usr/bin/env python3
"""A few attention calls on a workload, for NVIDIA's Nsight Compute.

    ncu --clock-control none -k regex:stream_attention --launch-skip 2 -c 1 --set full --import-source on -o stream \
        python scripts/profile_target.py tests/data/ctx64k_a.npz
    ncu --import stream.ncu-rep --page source --csv    # stalls per instruction
    ncu --import stream.ncu-rep --page raw | grep -E "stall|shared|pipe"

The plan and V's tiles are prepared beforehand, so that the attention kernel is launched --calls times and nothing else
of its name.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from pageweaver_sglang.bench.arms import Stages
from scripts.gpu_workload import inputs_on_gpu


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("workload", help="a .npz file")
    parser.add_argument("--engine", choices=("stream", "union8"), default="stream")
    parser.add_argument("--precision", choices=("fp8", "high"), default="fp8", help="high: engine stream only")
    parser.add_argument("--window", type=int, choices=(64, 128), default=128)
    parser.add_argument("--original", action="store_true", help="queries in their original order")
    parser.add_argument("--calls", type=int, default=3)
    options = parser.parse_args()

    inputs = inputs_on_gpu(parser, options.workload)
    kernel = {"engine": options.engine, "precision": options.precision}
    stages = Stages([inputs], window=options.window, guard="none", **kernel)
    plan = stages.prepare_unions(0, None if options.original else stages.regroup(0))
    stages.value_tiles(0)
    for _ in range(options.calls):
        stages.attend(0, plan)
    torch.cuda.synchronize()
    rounds = plan.rounds(plan.group_size // 2)  # a group is two tiles
    print(f"{options.workload}: {plan.visits()} visits, {rounds} rounds, {options.calls} calls of {options.engine}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
