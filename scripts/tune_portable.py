#!/usr/bin/env python3
"""Times the portable engine's tiles on this GPU, for the table in pageweaver_sglang/cuda/portable.py.

    python scripts/tune_portable.py tests/data/ctx64k_a.npz            # FP8 cache
    python scripts/tune_portable.py tests/data/ctx64k_a.npz --bf16     # BF16 cache

A line per tile, fastest first: milliseconds of a whole call (regrouping and unions included; CUDA Graph, median,
smallest and largest of the rounds, tiles rotated) and the NRMS on some rows. A tile that Triton can't compile, or that
needs more than an SM has, says so at the end. The line with a star is the table's own.
"""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from pageweaver_sglang.bench.accuracy import exact_rows, nrms, sample_rows
from pageweaver_sglang.bench.arms import PortableArm, prepare_arms
from pageweaver_sglang.bench.protocol import Protocol, first_line, measure
from scripts.gpu_workload import inputs_on_gpu

try:
    from pageweaver_sglang.cuda import portable
    from pageweaver_sglang.cuda.portable import Tile
except ImportError as error:
    sys.exit(f"tune_portable.py: {error}; PyTorch's builds for CUDA bring Triton with them")


class TileArm(PortableArm):
    """The public call with a tile of its own instead of the table's."""

    def __init__(self, tile: Tile):
        super().__init__()
        self.name = f"step {tile.step:3} warps {tile.warps} stages {tile.stages} registers {tile.registers or 'free'}"
        self._tile = tile

    def call(self, index: int) -> torch.Tensor:
        """One call; its launch is asked for the tile."""
        table, portable.tile_of = portable.tile_of, lambda capability, *, fp8: self._tile
        try:
            return super().call(index)
        finally:
            portable.tile_of = table


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("workload", help="a .npz file")
    parser.add_argument("--bf16", action="store_true", help="K and V in BF16 instead of FP8")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--calls", type=int, default=10)
    options = parser.parse_args()

    inputs = inputs_on_gpu(parser, options.workload)
    if options.bf16:
        inputs = dataclasses.replace(inputs, k_cache=inputs.k_cache.bfloat16(), v_cache=inputs.v_cache.bfloat16())
    own = portable.tile_of(torch.cuda.get_device_capability(), fp8=not options.bf16)
    tiles = [
        Tile(step, warps, stages, registers)
        for step, warps, stages, registers in itertools.product((64, 128), (4, 8), (1, 2, 3, 4), (None, 168, 128))
    ]
    arms = [TileArm(tile) for tile in dict.fromkeys([own, *tiles])]
    rows = sample_rows(len(inputs.q), 64).cuda()
    exact = exact_rows(inputs, rows)
    ready, unavailable = prepare_arms(arms, [inputs])
    errors, able = {}, []
    for arm in ready:
        try:
            errors[arm.name] = nrms(arm.call(0)[rows], exact)
            able.append(arm)
        except Exception as error:  # Triton's own errors share no base class
            unavailable[arm.name] = first_line(error)
    timings, failed = measure(able, 1, Protocol(options.rounds, options.calls), mode="graph")
    for name, timing in sorted(timings.items(), key=lambda item: item[1].median):
        star = "*" if name == arms[0].name else " "
        print(f"{star} {name}: {timing.median:.3f} ms ({timing.low:.3f}-{timing.high:.3f}), NRMS {errors[name]:.3%}")
    for name, why in (unavailable | failed).items():
        print(f"- {name}: {why}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
