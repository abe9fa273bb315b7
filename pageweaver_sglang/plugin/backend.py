"""The attention backend: SGLang's own for MiniMax-M3, with Step 3 of prefill served by PageWeaver."""

from __future__ import annotations

import functools
import importlib
import logging
from typing import Any

import torch
from sglang.srt.configs import model_config as sglang_model_config
from sglang.srt.layers.attention.minimax_sparse_backend import MiniMaxHybridAttnBackend, MiniMaxSparseAttnBackend

import pageweaver_sglang
from pageweaver_sglang.config import Config, load_config
from pageweaver_sglang.cuda import support

from . import NAME, capture, compat, fallback, kernels, operations, tiles, timing
from .forwards import Forwards
from .options import PAGE_SIZE, BackendError, check_model
from .step3 import Step3, route, serving

logger = logging.getLogger(__name__)


class PageWeaverSparseAttnBackend(MiniMaxSparseAttnBackend):
    """SGLang's sparse backend whose Step 3 of extend goes to ``step3``; indexer, top-k, KV store, decode are SGLang's.

    Args:
        runner: SGLang's model runner.
        config: the settings.

    Raises:
        BackendError: the folder of a setting (``capture_dir``, ``control_dir``) cannot be used.
    """

    def __init__(self, runner: Any, config: Config):
        super().__init__(runner)
        pool_page_size = self.kv_pool.page_size
        recorder = capture.make_recorder(config, runner, pool_page_size)
        self.operations = operations.of_this_process(config, runner)
        observe = self.operations.observe
        seconds = functools.partial(observe, "step3_seconds", None)
        self.step3 = Step3(
            config,
            pool_page_size=pool_page_size,
            recorder=recorder,
            timer=timing.make_timer(self.req_to_token.device, seconds),
            switch=self.operations.switch,
            observe=observe,
        )
        self.forwards = Forwards()
        self.operations.add(self.step3.stats)

    def forward_extend(self, q, k, v, layer, forward_batch, save_kv_cache=True, **kwargs):
        """SGLang's ``forward_extend`` with its Step 3 routed; target verify comes this way too, and stays SGLang's."""
        if forward_batch.forward_mode.is_target_verify():
            return super().forward_extend(q, k, v, layer, forward_batch, save_kv_cache, **kwargs)
        calls = self.step3.stats.calls
        with serving(self.step3, layer.layer_id, self.forwards.of(forward_batch)):
            index_out, out = super().forward_extend(q, k, v, layer, forward_batch, save_kv_cache, **kwargs)
        if self.step3.stats.calls == calls and not self.use_msa:
            self.step3.tell_missed()
        self.step3.check_padding(layer.layer_id, out, forward_batch.extend_seq_lens_cpu)
        return index_out, out


def build(runner: Any, dense_backend: Any) -> MiniMaxHybridAttnBackend:
    """Create the backend around ``dense_backend`` (dense layers), compile the kernels and log the STATUS line.

    Raises:
        SeamError: this SGLang lacks something that PageWeaver needs.
        BackendError: the model or its KV pool is not one that PageWeaver serves, or the kernels cannot be built.
        ConfigError: a wrong ``PAGEWEAVER_*`` setting.
    """
    if problems := compat.verify_seams():
        raise compat.SeamError(compat.refusal(problems))
    check_model(runner.model_config.hf_config)
    native_stack = getattr(sglang_model_config, "uses_minimax_m3_nvfp4_native_stack", None)
    if native_stack is not None and native_stack(runner.model_config.quantization):
        raise BackendError(
            f"--attention-backend {NAME}: SGLang serves this NVFP4 checkpoint with a backend of its own on Blackwell, "
            "which has no Step 3 to replace. Choose another attention backend."
        )
    config = load_config()
    sparse = PageWeaverSparseAttnBackend(runner, config)
    _check_sizes(sparse.block_size_k, sparse.kv_pool.page_size)
    device = torch.device(getattr(runner, "device", None) or sparse.req_to_token.device)
    kernels_state = kernels.prepare(config, device)
    sparse.step3.config = config = kernels.settings_on(config, device)
    tiles_state = fallback_state = "none"
    kind = support.ANY_KIND
    layers = range(sparse.kv_pool.start_layer, sparse.kv_pool.end_layer)
    if own := [layer for layer in sparse.sparse_layer_ids if layer in layers]:  # not in every pipeline stage
        k_cache, v_cache = sparse.kv_pool.get_kv_buffer(own[0])  # as Step 3 gets them
        kind = support.CallKind(k_cache.dtype, k_cache.shape[2], sparse.block_size_k)
        config, tiles_state = tiles.reserve(kernels.settings_on(config, device, kind), v_cache)
        sparse.step3.config = config
        sparse.step3.fallback, fallback_state = fallback.prepare(
            config,
            k_cache,
            v_cache,
            q_heads=compat.query_heads(runner),
            q_dtype=runner.model_config.dtype,
            pool_page_size=sparse.kv_pool.page_size,
            page_size=sparse.block_size_k,
        )
    route(importlib.import_module(compat.STEP3_MODULE))
    if sparse.use_msa:
        logger.warning("pageweaver: SGLang serves Step 3 with MSA on this GPU, so PageWeaver will not act")
    page_size = sparse.kv_pool.page_size
    states = {"kernels": kernels_state, "value tiles": tiles_state, "fallback": fallback_state}
    logger.info("%s", status_line(config, kind, dense_backend, page_size, states, sparse.operations))
    return MiniMaxHybridAttnBackend(dense_backend, sparse, sparse.sparse_layer_ids)


def _check_sizes(block_size: int, page_size: int) -> None:
    """Raise BackendError unless the model's sparse blocks and the pool's pages are what the kernels know."""
    if block_size != PAGE_SIZE:
        raise BackendError(
            f"--attention-backend {NAME} serves sparse blocks of {PAGE_SIZE} tokens, and this model's "
            f"(sparse_block_size in its config.json) have {block_size}. Choose another attention backend."
        )
    if page_size != PAGE_SIZE:
        raise BackendError(
            f"--attention-backend {NAME} needs KV pages of {PAGE_SIZE} tokens, got {page_size}. Set --page-size "
            f"{PAGE_SIZE}."
        )


def status_line(
    config: Config,
    kind: support.CallKind,
    dense_backend: Any,
    page_size: int,
    states: dict[str, str],
    of_process: operations.Operations,
) -> str:
    """One line that says what this process serves with.

    Args:
        config: the settings, with the engine that serves.
        kind: of the calls on this process's KV pool.
        dense_backend: SGLang's, for the dense layers.
        page_size: of the KV pool, in tokens.
        states: words for what was got ready, by its name.
        of_process: the switch and the metrics.
    """
    version = compat.sglang_version()
    first, last = compat.SUPPORTED
    untested = "" if compat.tested_version(version) else f" (untested; tested are {first} to {last})"
    precision = "16 bits" if support.computes_in_16_bits(config.engine, kind.cache_dtype) else config.precision
    return (
        f"pageweaver STATUS: mode {config.mode}, engine {config.engine}, precision {precision}, "
        f"window {config.window}, guard {config.guard}, "
        f"{', '.join(f'{what} {state}' for what, state in states.items())}, "
        f"dense layers {type(dense_backend).__name__}, "
        f"page size {page_size}, verify every {config.verify_every}, capture {config.capture_dir or 'off'}, "
        f"switch {of_process.switch.reason or 'on'} in {of_process.folder or 'no folder'}, "
        f"metrics {'off' if of_process.metrics is None else 'on'}, "
        f"pageweaver {pageweaver_sglang.__version__}, sglang {version}{untested}, torch {torch.__version__}"
    )
