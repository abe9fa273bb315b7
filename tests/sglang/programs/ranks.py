"""What tensor parallelism and DP attention make of the batches and heads that one rank's backend gets."""

from __future__ import annotations

import json
import os

from serving_process import start  # isort: skip
import torch

server_args = start()

from sglang.srt.model_executor.forward_batch_info import ForwardMode  # noqa: E402
from sparse_case import Case  # noqa: E402

from pageweaver_sglang.config import Config  # noqa: E402
from pageweaver_sglang.cuda.support import unsupported_reason  # noqa: E402
from pageweaver_sglang.plugin import step3  # noqa: E402

VERIFY = Config(mode="pageweaver", verify_every=1, dense_backend="torch_native")
report: dict = {}


def against_sglang(name: str, case: Case, **options) -> None:
    """Both with verification on: what it says must be what an outside comparison says."""
    ours, picked = case.prefill(VERIFY, **options)
    theirs, _ = case.prefill(Config(mode="native"), **options)
    verification = step3.compare(ours, theirs)
    logged = case.backend.sparse.step3.stats.last_verification
    report[name] = {
        "nrms": verification.nrms,
        "logged": None if logged is None else logged.nrms,
        "rows": ours.shape[0],
        "padding_is_zero": not ours[sum(case.batch.extend_seq_lens_cpu) :].any().item(),
        "arms": case.stats()["calls_by_arm"],
        "picked": None if picked is None else list(picked.shape),
    }


# Heads of a rank: TP1, TP2, TP4; with TP8 the four KV heads are there twice, and a rank has 8 query heads; then 4.
for tp, heads in {1: (4, 16), 2: (2, 16), 4: (1, 16), 8: (1, 8), 16: (1, 4)}.items():
    against_sglang(f"tp{tp}", Case(server_args, [260, 0], [2, 3], kv_heads=heads[0], group=heads[1]), real_indexer=True)
# More index heads than KV heads: SGLang unites their picks, here up to 32 pages.
against_sglang("index heads", Case(server_args, [3000], [3], index_heads=2), real_indexer=True)

# Rows that SGLang adds so that ranks can exchange equal parts, and requests that get no token in this batch.
against_sglang("padded", Case(server_args, [130, 5], [3, 4], padding=1))
against_sglang("without new tokens", Case(server_args, [130, 200, 0], [3, 0, 2]))
against_sglang("last without new tokens", Case(server_args, [130, 1], [3, 0], padding=2))

# A decoding rank beside a prefilling one can run its batch as a prefill of one token each (padded to the others' rows).
against_sglang("decode as prefill", Case(server_args, [129, 300, 127], [1, 1, 1], padding=5))

# A rank with nothing to do: SGLang answers before the backend's prefill, with no rows or with padding alone.
case = Case(server_args, [0], [4])
for name, rows in (("idle", 0), ("idle, padded", 6)):
    case.batch.forward_mode = ForwardMode.IDLE
    case.q, case.idx_q, case.k, case.v, case.idx_k = (x[:0] for x in (case.q, case.idx_q, case.k, case.v, case.idx_k))
    case.q, case.idx_q = case.q.new_ones(rows, 16, 128), case.idx_q.new_ones(rows, 1, 128)
    case.rows = rows
    out, _ = case.prefill(VERIFY)
    report[name] = {"shape": list(out.shape), "zero": not out.any().item(), "arms": case.stats()["calls_by_arm"]}

# What the kernels say to a rank's heads, before they look at the GPU.
report["reasons"] = {}
for name, (q_heads, kv_heads, picks) in {
    "tp4": (16, 1, 16),
    "tp8": (8, 1, 16),
    "tp16": (4, 1, 16),
    "index heads": (16, 1, 32),
}.items():
    cache = torch.zeros(256, kv_heads, 128, dtype=torch.float8_e4m3fn)
    queries = torch.zeros(2, q_heads, 128, dtype=torch.bfloat16)
    reason = unsupported_reason(
        queries, cache, cache, torch.zeros(kv_heads, 2, picks, dtype=torch.int32), page_size=128
    )
    report["reasons"][name] = reason

with open(os.environ["REPORT"], "w") as file:
    json.dump(report, file)
