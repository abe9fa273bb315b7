"""Prefill through PageWeaver's backend and through SGLang's own Step 3 (Triton, interpreted), on the same inputs."""

from __future__ import annotations

import json
import logging
import os

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

import sglang.srt.layers.attention.minimax_sparse_ops.minimax_sparse as minimax_sparse  # noqa: E402

from pageweaver_sglang.config import Config  # noqa: E402
from pageweaver_sglang.plugin import step3  # noqa: E402

VERIFY = Config(verify_every=1, dense_backend="torch_native")
report: dict = {}


def random_picks(picked: dict[str, torch.Tensor], edit):
    """A stand-in for the indexer that picks pages at random, the query's own among them, ascending, -1 behind."""

    def indexer(**call):
        kv_heads, topk = call["q"].shape[1], call["topk"]
        generator = torch.Generator().manual_seed(7)
        topk_idx = torch.full((kv_heads, call["q"].shape[0], topk), -1, dtype=torch.int32)
        cu, prefix = call["cu_seqlens"].tolist(), call["prefix_lens"].tolist()
        for head in range(kv_heads):
            for request, first in enumerate(cu[:-1]):
                for query in range(first, cu[request + 1]):
                    own = (prefix[request] + query - first) // fake_runner.PAGE
                    others = torch.randperm(own, generator=generator)[: topk - 1]
                    pages = torch.cat([others.sort().values, torch.tensor([own])])
                    topk_idx[head, query, : len(pages)] = pages
        picked["topk_idx"] = edit(topk_idx)
        return None, picked["topk_idx"]

    return indexer


class Case:
    """A backend built by SGLang's own set-up, and one prefill batch."""

    def __init__(self, prefixes, extends, *, kv_heads=1, dtype=torch.bfloat16, layers=2, padding=0):
        pages = sum(-(-(p + e) // fake_runner.PAGE) for p, e in zip(prefixes, extends, strict=True)) + 2
        heads = {"q_heads": 16 * kv_heads, "kv_heads": kv_heads}
        self.pool = fake_runner.make_pool(pages, layers, kv_heads, dtype)
        self.runner = fake_runner.make_runner(server_args, self.pool, layers=layers, **heads)
        self.backend = fake_runner.build_backend(self.runner)
        self.batch = fake_runner.make_extend_batch(self.runner, prefixes, extends)
        self.backend.sparse.init_forward_metadata_out_graph(self.batch)
        self.heads = heads
        self.generator = torch.Generator().manual_seed(1)
        for buffer in (*self.pool.main_pool.k_buffer, *self.pool.main_pool.v_buffer, *self.pool.index_k_pool.k_buffer):
            values = self.random(*buffer.shape).to(dtype)
            buffer.copy_(values.view(buffer.dtype))  # SGLang keeps FP8 as bytes
        tokens = sum(extends)
        self.rows = tokens + padding
        self.q = self.random(self.rows, heads["q_heads"], fake_runner.HEAD_DIM)
        self.k, self.v = (self.random(tokens, kv_heads, fake_runner.HEAD_DIM) for _ in range(2))
        self.idx_q = self.random(self.rows, kv_heads, fake_runner.HEAD_DIM)
        self.idx_k = self.random(tokens, 1, fake_runner.HEAD_DIM)

    def random(self, *shape):
        return torch.randn(*shape, generator=self.generator).to(torch.bfloat16)

    def prefill(self, config, *, layer_id=1, edit=lambda topk_idx: topk_idx, real_indexer=False):
        """(output [rows, q_heads, head_dim], picked pages) of one layer."""
        self.backend.sparse.step3.config = config
        original, picked = minimax_sparse.flash_prefill_with_topk_index, {}
        if not real_indexer:
            minimax_sparse.flash_prefill_with_topk_index = random_picks(picked, edit)
        try:
            _, out = self.backend.forward(
                self.q,
                self.k,
                self.v,
                fake_runner.make_layer(layer_id, **self.heads),
                self.batch,
                idx_q=self.idx_q,
                idx_k=self.idx_k,
                idx_v=None,
            )
        finally:
            minimax_sparse.flash_prefill_with_topk_index = original
        return out.view(self.rows, self.heads["q_heads"], fake_runner.HEAD_DIM), picked.get("topk_idx")

    def stats(self):
        stats = self.backend.sparse.step3.stats
        return {
            "calls_by_arm": dict(stats.calls_by_arm),
            "calls_by_layer": dict(stats.calls_by_layer),
            "fallbacks": dict(stats.fallbacks_by_reason),
        }


def difference(a, b) -> dict:
    verification = step3.compare(a, b)
    return {"nrms": verification.nrms, "max_error": verification.max_error, "skipped": verification.skipped_rows}


def against_sglang(name: str, case: Case, **options) -> None:
    ours, _ = case.prefill(VERIFY.model_copy(update={"verify_every": 0}), **options)
    assert case.stats()["calls_by_arm"] == {"pageweaver": 1}, case.stats()
    theirs, _ = case.prefill(Config(mode="native"), **options)
    assert case.stats()["calls_by_arm"] == {"pageweaver": 1, "native": 1}, case.stats()
    report[name] = difference(ours, theirs) | {"shape": list(ours.shape), "dtype": str(ours.dtype)}


against_sglang("one request", Case([0], [9]))
against_sglang("prefix", Case([700], [6]))
against_sglang("packed", Case([700, 0, 2400], [3, 10, 2]))
against_sglang("two kv heads", Case([300], [3], kv_heads=2))
against_sglang("fp8 cache", Case([300, 0], [3, 3], dtype=torch.float8_e4m3fn))
against_sglang("padded rows", Case([130], [3], padding=2))
against_sglang("SGLang's indexer", Case([260, 0], [2, 3]), real_indexer=True)

case = Case([0], [4], padding=2)
out, _ = case.prefill(VERIFY)
report["padded rows are zero"] = bool((out[4:] == 0).all())

# The order of the ids, repeats and holes must not matter; SGLang's kernel takes right-padded rows only, so these are
# compared with PageWeaver's own answer to the ordinary rows.
case = Case([1500], [5])
plain = Config(dense_backend="torch_native")
expected, _ = case.prefill(plain)
report["unsorted"] = difference(case.prefill(plain, edit=lambda topk_idx: topk_idx.flip(-1))[0], expected)
report["holes"] = difference(
    case.prefill(plain, edit=lambda topk_idx: topk_idx.roll(3, dims=-1).index_fill(-1, torch.tensor([0]), -1))[0],
    case.prefill(plain, edit=lambda topk_idx: topk_idx.index_fill(-1, torch.tensor([13]), -1))[0],
)
nothing, _ = case.prefill(plain, edit=lambda topk_idx: torch.full_like(topk_idx, -1))
report["nothing picked"] = bool((nothing == 0).all())

# Every sparse layer is served, counted by its id, and verified; target verify stays SGLang's.
case = Case([150], [2], layers=3)
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

with open(os.environ["REPORT"], "w") as file:
    json.dump(report, file)
