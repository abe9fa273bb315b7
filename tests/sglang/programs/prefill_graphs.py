"""Sparse attention between the pieces of SGLang's prefill CUDA graphs, through SGLang's own attention layer.

A graph's buffers have the size of a captured bucket, so the layer gets more rows than the batch has tokens, and what is
captured once meets other batches at replay. The pieces themselves need a GPU; what runs between them does not.
"""

from __future__ import annotations

import contextlib
import copy
import json
import os
from types import SimpleNamespace

from serving_process import start  # isort: skip
import sglang.srt.utils.common as common
import torch

# SGLang registers what runs between the pieces of `tc_piecewise` for CUDA only.
on_cuda = common.direct_register_custom_op


def on_cpu_too(op_name, op_func, *arguments, **options):
    on_cuda(op_name, op_func, *arguments, **options)
    common.sglang_lib.impl(op_name, op_func, "CPU")


common.direct_register_custom_op = on_cpu_too
server_args = start()

import sglang.srt.layers.attention.minimax_sparse_ops.minimax_sparse as minimax_sparse  # noqa: E402
import sglang.srt.layers.radix_attention as radix_attention  # noqa: E402
import sglang.srt.model_executor.runner_backend_utils.breakable_cuda_graph.breakable_cuda_graph as breakable  # noqa: E402
from sglang.srt.model_executor.forward_context import ForwardContext, forward_context  # noqa: E402
from sglang.srt.model_executor.runner_backend_utils.breakable_cuda_graph.context import (  # noqa: E402
    enable_breakable_cuda_graph,
)
from sparse_case import Case, random_picks  # noqa: E402

from pageweaver_sglang.config import load_config  # noqa: E402
from pageweaver_sglang.plugin import compat  # noqa: E402

STATIC = 16
LAYERS = (1, 2)
config = load_config()
report: dict = {}

case = Case(server_args, [300, 0, 129], [6, 5, 0], layers=3)
# With few pages every query picks all it can see, so that a part must have the rows of the whole, bit for bit.
minimax_sparse.flash_prefill_with_topk_index = random_picks({}, lambda topk_idx: topk_idx)
whole = {layer: case.prefill(config, layer_id=layer)[0] for layer in LAYERS}
backend = case.backend
stats = backend.sparse.step3.stats
before = dict(stats.calls_by_layer)

layers = [None] + [radix_attention.RadixAttention(16, 128, 128**-0.5, 1, layer_id) for layer_id in LAYERS]
names = ("q", "k", "v", "idx_q", "idx_k")
buffers = {name: getattr(case, name).new_zeros(STATIC, *getattr(case, name).shape[1:]) for name in names}


def padded(batch, tokens: int):
    """The batch as the runner hands it to the layers: cache places for every row of the buffers, padding in page 0."""
    batch = copy.copy(batch)
    batch.out_cache_loc = torch.cat([batch.out_cache_loc, batch.out_cache_loc.new_zeros(STATIC - tokens)])
    batch.num_token_non_padded_cpu = batch.global_num_token_non_padded_cpu = tokens
    batch.positions = batch._attn_output = None
    batch.mha_return_lse = False
    return batch


def load(rows: slice) -> None:
    """Put a batch's rows in the graph's buffers; the rest holds NaN, which would show wherever it got."""
    for name, buffer in buffers.items():
        values = getattr(case, name)[rows]
        buffer.fill_(float("nan"))
        buffer[: len(values)] = values


def dummy():
    """The batch of a capture: one request with a token in every row."""
    batch = case.part(0, 0, 1)[0]
    batch.extend_seq_lens, batch.extend_seq_lens_cpu = torch.tensor([STATIC], dtype=torch.int32), [STATIC]
    batch.extend_prefix_lens, batch.extend_prefix_lens_cpu = torch.zeros(1, dtype=torch.int32), [0]
    batch.seq_lens = batch.seq_lens_cpu = torch.tensor([STATIC])
    batch.out_cache_loc = batch.out_cache_loc.new_zeros(STATIC)
    return padded(batch, STATIC)


@contextlib.contextmanager
def executing(batch, tokens: int):
    """What the prefill runner sets around a capture or a replay."""
    backend.sparse.init_forward_metadata_out_graph(batch)
    with contextlib.ExitStack() as stack:
        stack.enter_context(forward_context(ForwardContext(attn_backend=backend)))
        try:
            from sglang.srt.model_executor.runner_utils.forward_batch import set_forward_batch
            from sglang.srt.model_executor.runner_utils.prefill_graph import prefill_graph_scope

            stack.enter_context(set_forward_batch(batch))
            stack.enter_context(prefill_graph_scope(full_graph=False, raw_num_tokens=tokens))
        except ImportError:  # before 0.5.23
            from sglang.srt.model_executor.runner_backend_utils.tc_piecewise_cuda_graph import (
                set_tc_piecewise_forward_context,
            )

            stack.enter_context(
                set_tc_piecewise_forward_context(batch, layers, None, [], [], num_tokens=STATIC, raw_num_tokens=tokens)
            )
        yield


def attend(layer_id: int, batch):
    index = {"idx_q": buffers["idx_q"], "idx_k": buffers["idx_k"], "idx_v": None}
    return layers[layer_id](buffers["q"], buffers["k"], buffers["v"], batch, **index)[1]


def both_layers(batch):
    return [attend(layer_id, batch) for layer_id in LAYERS]


def outcome(outputs, rows: slice, tokens: int) -> dict:
    pairs = list(zip(LAYERS, outputs, strict=True))
    return {
        "same": [torch.equal(out[:tokens].view(tokens, 16, 128), whole[layer][rows]) for layer, out in pairs],
        "padding": [not out[tokens:].any().item() for _, out in pairs],
        "rows": [len(out) for _, out in pairs],
    }


batches = {"whole": (case.batch, slice(0, 11)), "part": case.part(0, 2, 6), "one token": case.part(1, 4, 5)}
batches["the other request"] = case.part(1, 0, 5)

if compat.captures_sparse_attention("breakable"):  # so the graph is `tc_piecewise`
    # A break of the trace would be an error. Compiled once, for the batch of the capture.
    run = torch.compile(both_layers, backend="eager", fullgraph=True)
    load(slice(0, 11))
    with executing(dummy(), STATIC):
        run(dummy())
    report["graph"] = "tc_piecewise"
else:
    capture = SimpleNamespace(
        _end_current_segment=lambda: None,
        _begin_new_segment=lambda: None,
        _barrier_fn=None,
        cuda_graph=SimpleNamespace(_break_fns=[]),
    )
    load(slice(0, 11))
    with executing(dummy(), STATIC), enable_breakable_cuda_graph():
        token = breakable._current_capture_var.set(capture)
        outputs = both_layers(dummy())
        breakable._current_capture_var.reset(token)

    def run(batch):
        with enable_breakable_cuda_graph():
            for between in capture.cuda_graph._break_fns:
                between()
        return outputs

    report["graph"] = "breakable"
    report["breaks"] = len(capture.cuda_graph._break_fns)

report["replays"] = {}
for name, (batch, rows) in batches.items():
    tokens = rows.stop - rows.start
    batch = padded(batch, tokens)
    load(rows)
    with executing(batch, tokens):
        report["replays"][name] = outcome(run(batch), rows, tokens)
if report["graph"] == "breakable":  # a rank without requests replays beside the others
    batch = padded(case.part(0, 0, 1)[0], 0)
    batch.out_cache_loc = batch.out_cache_loc[:STATIC]
    load(slice(0, 0))
    with executing(batch, 0):
        report["replays"]["idle rank"] = outcome(run(batch), slice(0, 0), 0)
report["served"] = {layer: stats.calls_by_layer[layer] - before[layer] for layer in LAYERS}
report["fallbacks"] = dict(stats.fallbacks_by_reason)
report["captured"] = stats.captured_calls

with open(os.environ["REPORT"], "w") as file:
    json.dump(report, file)
