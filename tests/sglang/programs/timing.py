"""Prefill two layers in two modes through SGLang's own backend, with Step 3 timed; reports the outputs' equality."""

from __future__ import annotations

import json
import os
from pathlib import Path

from serving_process import start  # isort: skip
import torch

server_args = start()

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
