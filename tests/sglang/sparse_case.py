"""A backend built by SGLang's own set-up and prefill batches for it, with a stand-in for the indexer's choices."""

from __future__ import annotations

import copy

import fake_runner
import sglang.srt.layers.attention.minimax_sparse_ops.minimax_sparse as minimax_sparse
import torch


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
    """A backend built by SGLang's own set-up, and one prefill batch.

    Args:
        server_args: the published server arguments.
        prefixes: tokens of each request before the batch.
        extends: new tokens of each request.
        kv_heads: of the rank.
        group: query heads per KV head.
        index_heads: of the rank; None for as many as KV heads.
        dtype: of the KV cache.
        layers: of the model, the first one dense.
        padding: rows of the queries behind the last request.
    """

    def __init__(
        self,
        server_args,
        prefixes,
        extends,
        *,
        kv_heads=1,
        group=16,
        index_heads=None,
        dtype=torch.bfloat16,
        layers=2,
        padding=0,
    ):
        pages = sum(-(-(p + e) // fake_runner.PAGE) for p, e in zip(prefixes, extends, strict=True)) + 2
        heads = {"q_heads": group * kv_heads, "kv_heads": kv_heads}
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
        self.idx_q = self.random(self.rows, index_heads or kv_heads, fake_runner.HEAD_DIM)
        self.idx_k = self.random(tokens, 1, fake_runner.HEAD_DIM)

    def random(self, *shape):
        return torch.randn(*shape, generator=self.generator).to(torch.bfloat16)

    def part(self, request, start, stop):
        """The batch of one request's new tokens ``start`` to ``stop``, and their rows in the whole one.

        As chunked prefill and two-batch overlap cut batches: same pool, same pages, lengths of its own.
        """
        whole = self.batch
        first = sum(whole.extend_seq_lens_cpu[:request])
        rows = slice(first + start, first + stop)
        prefix, length = whole.extend_prefix_lens_cpu[request] + start, stop - start
        batch = copy.copy(whole)
        batch.out_cache_loc = whole.out_cache_loc[rows]
        batch.extend_seq_lens, batch.extend_seq_lens_cpu = torch.tensor([length], dtype=torch.int32), [length]
        batch.extend_prefix_lens, batch.extend_prefix_lens_cpu = torch.tensor([prefix], dtype=torch.int32), [prefix]
        batch.seq_lens = batch.seq_lens_cpu = torch.tensor([prefix + length])
        batch.req_pool_indices = whole.req_pool_indices[request : request + 1]
        return batch, rows

    def prefill_part(self, config, part, *, layer_id=1, backend=None):
        """The output of one layer for a part of the batch, by this case's backend or another on the same pool."""
        batch, rows = part
        backend = self.backend if backend is None else backend
        backend.sparse.step3.config = config
        tensors = (self.q[rows], self.k[rows], self.v[rows])
        index = {"idx_q": self.idx_q[rows], "idx_k": self.idx_k[rows], "idx_v": None}
        _, out = backend.forward(*tensors, fake_runner.make_layer(layer_id, **self.heads), batch, **index)
        return out.view(-1, self.heads["q_heads"], fake_runner.HEAD_DIM)

    def prefill(self, config, *, layer_id=1, edit=lambda topk_idx: topk_idx, real_indexer=False, scales=None):
        """(output [rows, q_heads, head_dim], picked pages) of one layer; ``scales`` are attributes of the layer."""
        self.backend.sparse.step3.config = config
        layer = fake_runner.make_layer(layer_id, **self.heads)
        vars(layer).update(scales or {})
        original, picked = minimax_sparse.flash_prefill_with_topk_index, {}

        def indexer(**call):
            idx_o, picked["topk_idx"] = original(**call)
            return idx_o, picked["topk_idx"]

        minimax_sparse.flash_prefill_with_topk_index = indexer if real_indexer else random_picks(picked, edit)
        try:
            _, out = self.backend.forward(
                self.q,
                self.k.clone(),  # SGLang divides them by their scales in place
                self.v.clone(),
                layer,
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
