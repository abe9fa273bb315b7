"""Prefill through SGLang's own backend in mode auto; reports decisions, and whether outputs are the fixed modes'."""

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
# 20 pages, so that a query can pick 16 of them, and just enough queries for regrouping to pay if it saved most visits.
case = Case(server_args, [2300], [240], layers=3)
outputs = [case.prefill(config, layer_id=layer)[0] for layer in (1, 2, 1, 1)]
step3 = case.backend.sparse.step3
report = {
    "stats": case.stats(),
    "decisions": dict(step3.stats.decisions),
    "visits": dict(step3.stats.measured_visits),
    "keys": [list(name) for name in step3._history._keys],
    "same": [torch.equal(outputs[0], out) for out in outputs[1:]],
    "same in mode": {
        mode: torch.equal(outputs[0], case.prefill(config.model_copy(update={"mode": mode}), layer_id=1)[0])
        for mode in ("union8", "pageweaver")
    },
}
small = Case(server_args, [300], [6])
small.prefill(config)
report["small"] = dict(small.backend.sparse.step3.stats.decisions)
Path(os.environ["REPORT"]).write_text(json.dumps(report))
