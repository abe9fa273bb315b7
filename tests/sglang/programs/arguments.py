"""Resolve server arguments as on an H200 and report what came out.

Arguments: folders of an M3, of an M3 of the multimodal class, of a Llama.
"""

from __future__ import annotations

import argparse
import json
import os
import sys

import fake_runner
from sglang.srt.plugins import load_plugins

load_plugins()

import sglang  # noqa: E402
from sglang.srt.model_executor.cuda_graph_config import Backend  # noqa: E402
from sglang.srt.server_args import ServerArgs  # noqa: E402

from pageweaver_sglang.plugin import compat, hooks  # noqa: E402

M3, M3_VL, LLAMA = sys.argv[1:4]
PREFILL_ROLE = ["--disaggregation-mode", "prefill"]
CHUNKS = ["--chunked-prefill-size", "640", "--enable-mixed-chunk", "--disable-overlap-schedule"]
DP_ATTENTION = ["--tp-size", "8", "--dp-size", "8", "--enable-dp-attention"]
GRAPHS = [graph for graph in ("full", "breakable", "tc_piecewise", "disabled") if graph in Backend.ALL]
CASES = {
    "default": (M3, [], {}),
    "pageweaver": (M3, ["--attention-backend", "pageweaver"], {}),
    "prefill": (M3, ["--prefill-attention-backend", "pageweaver"], {}),
    "fa3 and prefill": (M3, ["--attention-backend", "fa3", "--prefill-attention-backend", "pageweaver"], {}),
    "page 128": (M3, ["--attention-backend", "pageweaver", "--page-size", "128"], {}),
    "page 64": (M3, ["--attention-backend", "pageweaver", "--page-size", "64"], {}),
    "fp8": (M3, ["--attention-backend", "pageweaver", "--kv-cache-dtype", "fp8_e4m3"], {}),
    "default fp8": (M3, ["--kv-cache-dtype", "fp8_e4m3"], {}),
    "deterministic": (M3, ["--attention-backend", "pageweaver", "--enable-deterministic-inference"], {}),
    "default deterministic": (M3, ["--enable-deterministic-inference"], {}),
    "prefill role": (M3, ["--attention-backend", "pageweaver", *PREFILL_ROLE], {}),
    "default prefill role": (M3, PREFILL_ROLE, {}),
    "chunks": (M3, ["--attention-backend", "pageweaver", *CHUNKS], {}),
    "default chunks": (M3, CHUNKS, {}),
    "tp8 dp8": (M3, ["--attention-backend", "pageweaver", *DP_ATTENTION], {}),
    "default tp8 dp8": (M3, DP_ATTENTION, {}),
    "overlap of two batches": (M3, ["--attention-backend", "pageweaver", "--enable-two-batch-overlap"], {}),
    "default overlap of two batches": (M3, ["--enable-two-batch-overlap"], {}),
    "dense triton": (M3, ["--attention-backend", "pageweaver"], {"PAGEWEAVER_DENSE_BACKEND": "triton"}),
    "dense unknown": (M3, ["--attention-backend", "pageweaver"], {"PAGEWEAVER_DENSE_BACKEND": "nonsense"}),
    "dense contradicts": (
        M3,
        ["--attention-backend", "fa3", "--prefill-attention-backend", "pageweaver"],
        {"PAGEWEAVER_DENSE_BACKEND": "triton"},
    ),
    "bad setting": (M3, ["--attention-backend", "pageweaver"], {"PAGEWEAVER_WINDOW": "96"}),
    "bad setting, other backend": (M3, ["--attention-backend", "triton"], {"PAGEWEAVER_WINDOW": "96"}),
    "other prefill": (M3, ["--attention-backend", "pageweaver", "--prefill-attention-backend", "fa3"], {}),
    "decode only": (M3, ["--decode-attention-backend", "pageweaver"], {}),
    "other decode": (M3, ["--attention-backend", "pageweaver", "--decode-attention-backend", "triton"], {}),
    "triton": (M3, ["--attention-backend", "triton"], {}),
    "llama": (LLAMA, ["--attention-backend", "pageweaver"], {}),
    **{
        f"{prefix}graph {graph}": (M3, [*backend, "--cuda-graph-backend-prefill", graph], {})
        for graph in GRAPHS
        for prefix, backend in (("default ", []), ("", ["--attention-backend", "pageweaver"]))
    },
    "default multimodal": (M3_VL, [], {}),
    "multimodal": (M3_VL, ["--attention-backend", "pageweaver"], {}),
    "llama fa3": (LLAMA, ["--attention-backend", "fa3"], {}),
}


def resolved(model: str, argv: list[str], environment: dict[str, str]) -> dict:
    os.environ.update(environment)
    try:
        with fake_runner.hopper():
            server_args = fake_runner.resolve(
                "--model-path", model, "--device", "cuda", "--skip-tokenizer-init", "--random-seed", "1", *argv
            )
        names = getattr(server_args, "__struct_fields__", None) or list(server_args.__dataclass_fields__)
        return {"fields": dict(zip(names, map(repr, compat.get_fields(server_args, *names)), strict=True))}
    except ValueError as error:
        return {"error": str(error), "type": type(error).__name__}
    finally:
        for name in environment:
            del os.environ[name]


def accepted(*argv: str) -> bool:
    parser = argparse.ArgumentParser()
    ServerArgs.add_cli_args(parser)
    try:
        parser.parse_args(["--model-path", "dummy", *argv])
    except SystemExit:
        return False
    return True


report = {
    "version": sglang.__version__,
    "problems": compat.verify_seams(),
    "missing_hooks": hooks.missing_hooks(),
    "accepted": {
        "attention": accepted("--attention-backend", "pageweaver"),
        "prefill": accepted("--prefill-attention-backend", "pageweaver"),
        "nonsense": accepted("--attention-backend", "nonsense"),
    },
    "cases": {name: resolved(*case) for name, case in CASES.items()},
}
with open(os.environ["REPORT"], "w") as file:
    json.dump(report, file)
