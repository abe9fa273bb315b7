"""Prefill through PageWeaver's backend and through SGLang's own Step 3 (Triton, interpreted), on the same inputs."""

from __future__ import annotations

import json
import os

from serving_process import start  # isort: skip
import fake_runner
import torch

server_args = start()

from sparse_case import Case  # noqa: E402

from pageweaver_sglang.config import Config  # noqa: E402
from pageweaver_sglang.plugin import step3  # noqa: E402

VERIFY = Config(mode="pageweaver", verify_every=1, dense_backend="torch_native")
report: dict = {}


def difference(a, b) -> dict:
    verification = step3.compare(a, b)
    return {"nrms": verification.nrms, "max_error": verification.max_error, "skipped": verification.skipped_rows}


def against_sglang(name: str, case: Case, **options) -> None:
    ours, _ = case.prefill(VERIFY.model_copy(update={"verify_every": 0}), **options)
    assert case.stats()["calls_by_arm"] == {"pageweaver": 1}, case.stats()
    theirs, _ = case.prefill(Config(mode="native"), **options)
    assert case.stats()["calls_by_arm"] == {"pageweaver": 1, "native": 1}, case.stats()
    report[name] = difference(ours, theirs) | {"shape": list(ours.shape), "dtype": str(ours.dtype)}


against_sglang("one request", Case(server_args, [0], [9]))
against_sglang("prefix", Case(server_args, [700], [6]))
against_sglang("packed", Case(server_args, [700, 0, 2400], [3, 10, 2]))
against_sglang("two kv heads", Case(server_args, [300], [3], kv_heads=2))
against_sglang("fp8 cache", Case(server_args, [300, 0], [3, 3], dtype=torch.float8_e4m3fn))
against_sglang("padded rows", Case(server_args, [130], [3], padding=2))
against_sglang("SGLang's indexer", Case(server_args, [260, 0], [2, 3]), real_indexer=True)

case = Case(server_args, [0], [4], padding=2)
out, _ = case.prefill(VERIFY)
report["padded rows are zero"] = bool((out[4:] == 0).all())

# The order of the ids, repeats and holes must not matter; SGLang's kernel takes right-padded rows only, so these are
# compared with PageWeaver's own answer to the ordinary rows.
case = Case(server_args, [1500], [5])
plain = Config(mode="pageweaver", dense_backend="torch_native")
expected, _ = case.prefill(plain)
report["unsorted"] = difference(case.prefill(plain, edit=lambda topk_idx: topk_idx.flip(-1))[0], expected)
report["holes"] = difference(
    case.prefill(plain, edit=lambda topk_idx: topk_idx.roll(3, dims=-1).index_fill(-1, torch.tensor([0]), -1))[0],
    case.prefill(plain, edit=lambda topk_idx: topk_idx.index_fill(-1, torch.tensor([13]), -1))[0],
)
nothing, _ = case.prefill(plain, edit=lambda topk_idx: torch.full_like(topk_idx, -1))
report["nothing picked"] = bool((nothing == 0).all())

# Every sparse layer is served, counted by its id, and verified; target verify stays SGLang's.
case = Case(server_args, [150], [2], layers=3)
for layer in (1, 2, 1):
    case.prefill(VERIFY, layer_id=layer)
report["layers"] = case.stats()
report["verified"] = case.backend.sparse.step3.stats.last_verification.nrms
report["types"] = [type(backend).__name__ for backend in (case.backend, case.backend.sparse, case.backend.dense)]

from sglang.srt.layers.radix_attention import RadixAttention  # noqa: E402

dense = RadixAttention(16, fake_runner.HEAD_DIM, fake_runner.HEAD_DIM**-0.5, 1, 0)
case.batch.encoder_lens = None
report["dense layer"] = list(case.backend.forward(case.q.flatten(1), case.k, case.v, dense, case.batch).shape)

from sglang.srt.model_executor.forward_batch_info import ForwardMode  # noqa: E402

before = case.stats()["calls_by_arm"]
case.batch.forward_mode = ForwardMode.TARGET_VERIFY
case.prefill(VERIFY)
report["target verify"] = {"before": before, "after": case.stats()["calls_by_arm"]}

# A second, ordinary sparse backend in the same process (as for a draft model) is not routed.
draft = fake_runner.make_runner(server_args, case.pool, layers=3)
draft.is_draft_worker = True
report["draft"] = type(fake_runner.build_backend(draft).sparse).__name__

# A GPU with memory for V's tiles, and one without: what the backend serves with from its start.
from pageweaver_sglang.plugin import tiles  # noqa: E402

tiles._needed = lambda config, v_cache: config.engine == "stream"
torch.cuda.is_current_stream_capturing = lambda: False
torch.cuda.current_stream = lambda device: None
case = Case(server_args, [150], [2], kv_heads=2)
pages = case.pool.main_pool.v_buffer[1].shape[0] // fake_runner.PAGE
report["tiles"] = [case.backend.sparse.step3.config.engine, list(tiles._of_pools) == [(torch.device("cpu"), 2, pages)]]


def no_memory(*sizes, device):
    raise torch.OutOfMemoryError("CUDA out of memory")


tiles.ValueTiles.empty = no_memory
report["no tiles"] = Case(server_args, [150], [2]).backend.sparse.step3.config.engine

with open(os.environ["REPORT"], "w") as file:
    json.dump(report, file)
