"""Prefill that the kernels don't cover through FlashInfer's XQA (a stand-in), against SGLang's own Step 3."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

from serving_process import start  # isort: skip
import torch

sys.path.append(str(Path(__file__).resolve().parents[3]))  # behind everything that is installed
from tests import fake_xqa

server_args = start()

from sparse_case import Case  # noqa: E402

from pageweaver_sglang.config import Config, load_config  # noqa: E402
from pageweaver_sglang.flashinfer import xqa  # noqa: E402
from pageweaver_sglang.plugin import step3  # noqa: E402

fake_xqa.install()  # not before SGLang's own imports, which look for more of FlashInfer
config = load_config()
xqa.device_reason = lambda device: None
covers = step3.Step3._uncovered
step3.Step3._uncovered = lambda self, call: "something that the kernels do not cover"
report: dict = {}


def against_sglang(name: str, case: Case, **options) -> None:
    ours, _ = case.prefill(config, **options)
    # SGLang's kernel takes ascending rows padded at their end only.
    theirs, _ = case.prefill(Config(mode="native"), real_indexer=options.get("real_indexer", False))
    stats = case.stats()
    report[name] = {
        "nrms": step3.compare(ours, theirs).nrms,
        "arms": stats["calls_by_arm"],
        "fallbacks": stats["fallbacks"],
        "padding is zero": not ours[sum(case.batch.extend_seq_lens_cpu) :].any().item(),
    }


against_sglang("bf16", Case(server_args, [700], [3]))
against_sglang("tp8", Case(server_args, [260, 0], [2, 3], group=8, dtype=torch.float8_e4m3fn), real_indexer=True)
against_sglang("packed", Case(server_args, [300, 0, 140], [3, 5, 2]))
against_sglang("two kv heads", Case(server_args, [300], [3], kv_heads=2, group=4))
# More index heads than KV heads: SGLang unites their picks, here up to 32 pages.
against_sglang("wide top-k", Case(server_args, [3000], [2], index_heads=2), real_indexer=True)
against_sglang("unsorted", Case(server_args, [900], [3]), edit=lambda topk_idx: topk_idx.flip(-1).roll(2, dims=-1))
against_sglang("padded", Case(server_args, [130, 5], [3, 4], padding=2))

case = Case(server_args, [150], [2])
nothing, _ = case.prefill(config, edit=lambda topk_idx: torch.full_like(topk_idx, -1))
report["nothing picked"] = not nothing.any().item()

step3.Step3._uncovered = covers
case = Case(server_args, [150], [2])
case.prefill(config)
report["covered"] = case.stats()["calls_by_arm"]

sys.modules["flashinfer.decode"] = sys.modules["flashinfer"] = None
try:
    Case(server_args, [0], [2])
except Exception as error:
    report["not installed"] = str(error)

with open(os.environ["REPORT"], "w") as file:
    json.dump(report, file)
