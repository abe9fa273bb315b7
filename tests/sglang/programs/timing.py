"""Prefill two layers in two modes through SGLang's own backend, with Step 3 timed; reports the outputs' equality."""

from __future__ import annotations

import json
import logging
import os
from pathlib import Path

os.environ["TRITON_INTERPRET"] = "1"

import fake_runner
import torch
import triton_cpu
from sglang.srt.plugins import load_plugins

load_plugins()
triton_cpu.prepare()
server_args = fake_runner.resolve("--model-path", "dummy", "--device", "cpu", "--attention-backend", "pageweaver")
logging.basicConfig(level=logging.INFO, format="%(message)s", force=True)
fake_runner.publish(server_args)

from sparse_case import Case  # noqa: E402

from pageweaver_sglang.config import load_config  # noqa: E402

config = load_config()
case = Case(server_args, [300], [6], layers=3)
timed = {}
for mode in ("pageweaver", "native"):
    for layer in (1, 2):
        timed[mode, layer], _ = case.prefill(config.model_copy(update={"mode": mode}), layer_id=layer)
timer, case.backend.sparse.step3.timer = case.backend.sparse.step3.timer, None
plain, _ = case.prefill(config, layer_id=1)
report = {"calls": timer.calls, "tokens": timer.tokens, "same": torch.equal(plain, timed["pageweaver", 1])}
Path(os.environ["REPORT"]).write_text(json.dumps(report))
