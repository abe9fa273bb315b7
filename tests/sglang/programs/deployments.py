"""Batches of every shape that SGLang makes, and what reports say goes wrong with them, through its own backend."""

from __future__ import annotations

import itertools
import json
import os
import threading
import weakref

from serving_process import start  # isort: skip
import fake_runner
import sglang.srt.layers.attention.minimax_sparse_backend as minimax_sparse_backend
import sglang.srt.layers.attention.minimax_sparse_ops.minimax_sparse as minimax_sparse
import torch

server_args = start()

from sglang.srt.model_executor.forward_batch_info import ForwardBatch, ForwardMode  # noqa: E402
from sparse_case import Case, random_picks  # noqa: E402

from pageweaver_sglang.config import load_config  # noqa: E402
from pageweaver_sglang.plugin import compat, step3  # noqa: E402

config = load_config()
native = config.model_copy(update={"mode": "native"})
report: dict = {}


def against_sglang(name: str, case: Case, **options) -> None:
    ours, _ = case.prefill(config, **options)
    served = case.stats()
    theirs, _ = case.prefill(native, **options)
    verification = step3.compare(ours, theirs)
    report[name] = {
        "nrms": verification.nrms,
        "finite": bool(ours.isfinite().all()),
        "skipped": verification.skipped_rows,
        "served": served["calls_by_arm"],
        "fallbacks": served["fallbacks"],
    }


# Requests of a batch -------------------------------------------------------------------------------------------------

case = Case(server_args, [300, 0, 515], [1, 4, 1])  # two requests that decode, one that prefills
case.batch.forward_mode = ForwardMode.MIXED
against_sglang("mixed chunk", case)
against_sglang("radix hits", Case(server_args, [1, 127, 128, 129, 255, 256], [1, 2, 1, 1, 1, 1]))
against_sglang("tails", Case(server_args, list(range(240, 255)), [1] * 15))
against_sglang("one token", Case(server_args, [0], [1]))
case = Case(server_args, [300, 0], [3, 3], dtype=torch.float8_e4m3fn)
scales = {"k_scale_float": 0.5, "v_scale_float": 3.0}
against_sglang("scales", case, scales=scales)
# The old tokens of the pool are the same numbers under other scales.
report["scales matter"] = step3.compare(case.prefill(config, scales=scales)[0], case.prefill(config)[0]).nrms

# What a caller may leave wrong or unset ------------------------------------------------------------------------------

case = Case(server_args, [1500], [5])
expected, _ = case.prefill(config)
report["repeatable"] = torch.equal(case.prefill(config)[0], expected)


def garbage(topk_idx: torch.Tensor) -> torch.Tensor:
    """Whatever was in memory behind the last pick: negative, past the request's last page, huge."""
    noise = torch.tensor([-(2**31), 2**31 - 1, -7, 12, 10**6], dtype=torch.int32).repeat(topk_idx.numel())
    return torch.where(topk_idx < 0, noise[: topk_idx.numel()].view(topk_idx.shape), topk_idx)


report["uninitialised picks"] = torch.equal(case.prefill(config, edit=garbage)[0], expected)
wide = case.prefill(config, edit=lambda topk_idx: torch.cat([topk_idx.flip(-1), topk_idx], dim=-1))[0]
report["wide picks"] = torch.equal(wide, expected)
case.backend.sparse._max_seqlen_q = case.backend.sparse._max_seqlen_k = 1
report["stale host lengths"] = torch.equal(case.prefill(config)[0], expected)

# Cut batches ---------------------------------------------------------------------------------------------------------
# With few pages every query picks all it can see, so that a part must have the rows of the whole, bit for bit.

case = Case(server_args, [300, 129], [40, 150], layers=3)
minimax_sparse.flash_prefill_with_topk_index = random_picks({}, lambda topk_idx: topk_idx)
whole = {layer: case.prefill(config, layer_id=layer)[0] for layer in (1, 2)}


def is_part(out: torch.Tensor, part, layer: int) -> bool:
    return torch.equal(out, whole[layer][part[1]])


cuts = (0, 1, 9, 100, 128, 150)
chunks = [case.part(1, start, stop) for start, stop in itertools.pairwise(cuts)]
report["chunks"] = [is_part(case.prefill_part(config, part), part, 1) for part in chunks]

halves = [case.part(0, 0, 40), case.part(1, 0, 150)]
report["two batches, layer by layer"] = [
    is_part(case.prefill_part(config, part, layer_id=layer), part, layer) for layer in (1, 2) for part in halves
]

forwards = case.backend.sparse.forwards
passes = [forwards.of(batch) for batch, _ in halves]
report["a pass for each batch"] = passes[0] is not passes[1] and [forwards.of(batch) for batch, _ in halves] == passes
report["weak references to SGLang's batches"] = weakref.ref(ForwardBatch.__new__(ForwardBatch))() is None

# Layers that share one layer's picks, of two batches in turn: SGLang computes them anew where they are another batch's.
sparse = case.backend.sparse
if hasattr(sparse, "index_cache_enabled"):
    sparse.index_cache_enabled = True
    sparse._topk_group_of_layer, sparse._topk_is_source = {1: 0, 2: 0}, {1: True, 2: False}
    pick, asked = minimax_sparse.flash_prefill_with_topk_index, []
    minimax_sparse.flash_prefill_with_topk_index = lambda **call: asked.append(len(call["q"])) or pick(**call)
    orders = {"one after the other": [(1, 0), (2, 0), (1, 1), (2, 1)], "in turn": [(1, 0), (1, 1), (2, 0), (2, 1)]}
    for name, order in orders.items():
        rows = [is_part(case.prefill_part(config, halves[n], layer_id=layer), halves[n], layer) for layer, n in order]
        report[f"shared picks, {name}"] = {"same": rows, "picked": len(asked)}
        asked.clear()
    sparse.index_cache_enabled = False
    minimax_sparse.flash_prefill_with_topk_index = pick

# Two-batch overlap has a backend for each half; here they run at the same time as well.
backends = [fake_runner.build_backend(case.runner) for _ in halves]
outputs: dict = {}


def half(number: int) -> None:
    backends[number].sparse.init_forward_metadata_out_graph(halves[number][0])
    for layer in (1, 2) * 3:
        outputs[number, layer] = case.prefill_part(config, halves[number], layer_id=layer, backend=backends[number])


threads = [threading.Thread(target=half, args=(number,)) for number in range(2)]
for thread in threads:
    thread.start()
for thread in threads:
    thread.join()
report["two batches at once"] = [is_part(out, halves[number], layer) for (number, layer), out in outputs.items()]
report["two backends, own counts"] = [dict(backend.sparse.step3.stats.calls_by_layer) for backend in backends]
report["two backends, one switch"] = backends[0].sparse.step3.switch is backends[1].sparse.step3.switch

# What is handed to SGLang --------------------------------------------------------------------------------------------

case = Case(server_args, [300], [6])
if "loc_mapping" in compat._parameters(f"{compat.STEP3_MODULE}:{compat.STEP3_NAME}"):
    case.backend.sparse._loc_mapping = torch.arange(case.pool.main_pool.k_buffer[0].shape[0])
    against_sglang("hisparse", case)
    case.backend.sparse._loc_mapping = None
quantising = Case(server_args, [300], [2], dtype=torch.float8_e4m3fn)
quantising.backend.sparse.fp8_attn_gemm = True  # SGLang quantises the queries before Step 3
against_sglang("fp8 queries", quantising)

seen = []
case.batch.forward_mode = ForwardMode.TARGET_VERIFY
case.batch.extend_seq_lens = case.batch.extend_seq_lens_cpu = case.batch.extend_prefix_lens = None
sglangs = minimax_sparse_backend.MiniMaxSparseAttnBackend.forward_extend
minimax_sparse_backend.MiniMaxSparseAttnBackend.forward_extend = lambda *args, **kwargs: (
    seen.append((args, kwargs)) or 7
)
before = case.backend.sparse.step3.stats.calls
case.backend.sparse.step3.recorder = object()  # must not be asked either
report["target verify"] = case.backend.sparse.forward_extend("q", "k", "v", "layer", case.batch, False, idx_q="i")
report["target verify is untouched"] = seen == [
    ((case.backend.sparse, "q", "k", "v", "layer", case.batch, False), {"idx_q": "i"})
]
report["target verify is not counted"] = case.backend.sparse.step3.stats.calls == before
minimax_sparse_backend.MiniMaxSparseAttnBackend.forward_extend = sglangs

# Somebody else takes Step 3's name while the server runs.
case = Case(server_args, [300], [6])
router = minimax_sparse.flash_prefill_with_gqa_share_sparse
minimax_sparse.flash_prefill_with_gqa_share_sparse = router.__wrapped__
for _ in range(2):
    case.prefill(config)
minimax_sparse.flash_prefill_with_gqa_share_sparse = router
report["missed"] = case.stats()["calls_by_arm"]

with open(os.environ["REPORT"], "w") as file:
    json.dump(report, file)
