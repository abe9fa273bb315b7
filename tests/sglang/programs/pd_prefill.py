"""The prefill role of PD disaggregation: what a decode server fetches must be what SGLang alone would have written."""

from __future__ import annotations

import itertools
import json
import os

from serving_process import start  # isort: skip
import sglang.srt.layers.attention.minimax_sparse_ops.minimax_sparse as minimax_sparse
import torch

server_args = start("--disaggregation-mode", "prefill")

from sparse_case import Case, random_picks  # noqa: E402

from pageweaver_sglang.config import load_config  # noqa: E402
from pageweaver_sglang.plugin import compat, step3  # noqa: E402

CUTS = (0, 60, 128, 140)
config = load_config()
minimax_sparse.flash_prefill_with_topk_index = random_picks({}, lambda topk_idx: topk_idx)


def prefill(mode: str):
    """A request's chunks through both sparse layers: (outputs, everything in the KV pool, statistics)."""
    case = Case(server_args, [100], [CUTS[-1]], dtype=torch.float8_e4m3fn, layers=3)
    chosen = config.model_copy(update={"mode": mode})
    outputs = []
    for first, last in itertools.pairwise(CUTS):
        part = case.part(0, first, last)
        outputs += [case.prefill_part(chosen, part, layer_id=layer) for layer in (1, 2)]
    pools = (case.pool.main_pool.k_buffer, case.pool.main_pool.v_buffer, case.pool.index_k_pool.k_buffer)
    stored = [buffer.view(torch.uint8).clone() for pool in pools for buffer in pool]
    return torch.cat(outputs), stored, case.stats()


out, stored, stats = prefill("pageweaver")
expected, as_sglang, _ = prefill("native")
report = {
    "role": compat.get_fields(server_args, "disaggregation_mode")[0],
    "served": stats["calls_by_arm"],
    "nrms": step3.compare(out, expected).nrms,
    "same pool": [torch.equal(a, b) for a, b in zip(stored, as_sglang, strict=True)],
}
with open(os.environ["REPORT"], "w") as file:
    json.dump(report, file)
