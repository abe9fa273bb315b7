"""SGLang on a machine without a GPU: everything real (arguments, KV pool, backends), only the model runner is faked.

Importing this module prepares CPU builds of torch for SGLang, so import it before SGLang.
"""

from __future__ import annotations

import contextlib
import json
import sys
import types
from pathlib import Path
from types import SimpleNamespace

import torch

if torch.version.cuda is None:
    # torchvision's CPU wheel registers operators that a CPU build of torch does not have; SGLang only imports it.
    sys.modules.setdefault("torchvision._meta_registrations", types.ModuleType("torchvision._meta_registrations"))

PAGE, TOPK, HEAD_DIM = 128, 16, 128
MIB_OF_AN_H200 = 140 * 1024


def write_model(folder: Path, architecture: str = "MiniMaxM3SparseForCausalLM") -> Path:
    """Write the ``config.json`` of a tiny model, a MiniMax-M3 or a plain Llama, and return its folder."""
    config = {
        "architectures": [architecture],
        "dtype": "bfloat16",
        "hidden_size": 1024,
        "intermediate_size": 256,
        "num_hidden_layers": 6,
        "num_attention_heads": 64,
        "num_key_value_heads": 4,
        "head_dim": HEAD_DIM,
        "max_position_embeddings": 131072,
        "rms_norm_eps": 1e-6,
        "vocab_size": 1024,
        "bos_token_id": 256,
        "eos_token_id": 257,
    }
    if architecture.startswith("MiniMaxM3"):
        config |= {
            "model_type": "minimax_m2",
            "dense_intermediate_size": 1024,
            "rotary_dim": 64,
            "rope_theta": 5000000.0,
            "num_local_experts": 8,
            "num_experts_per_tok": 2,
            "n_shared_experts": 1,
            "moe_layer_freq": [0, 0, 1, 1, 1, 1],
            "sparse_attention_config": sparse_attention_config(6, 4),
        }
    else:
        config["model_type"] = "llama"
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def sparse_attention_config(layers: int, index_heads: int, dense_layers: int = 1) -> dict:
    sparse = [0] * dense_layers + [1] * (layers - dense_layers)
    return {
        "sparse_attention_freq": sparse,
        "sparse_disable_index_value": sparse,
        "sparse_num_index_heads": index_heads,
        "sparse_index_dim": HEAD_DIM,
        "sparse_block_size": PAGE,
        "sparse_topk_blocks": TOPK,
        "sparse_init_block": 0,
        "sparse_local_block": 1,
        "sparse_score_type": "max",
    }


@contextlib.contextmanager
def hopper():
    """Let SGLang resolve its arguments as on an H200."""
    import sglang.srt.model_executor.cuda_graph_config as cuda_graph_config
    import sglang.srt.runtime_context as runtime_context
    import sglang.srt.server_args as server_args
    import sglang.srt.utils.common as common

    torch.cuda.get_device_capability = lambda *device: (9, 0)
    common.get_device_memory_capacity = lambda *device, **kwargs: MIB_OF_AN_H200
    cuda_graph_config.default_prefill_backend = lambda: cuda_graph_config.Backend.BREAKABLE
    if hasattr(runtime_context, "override_platform"):
        facts = {"is_cuda": True, "is_sm90": True, "is_hopper_with_cuda_12_3": True}
        facts |= {"is_sm100": False, "is_blackwell": False, "is_hip": False}
        with runtime_context.override_platform(**facts):
            yield
        return
    import sglang.srt.arg_groups.overrides as overrides

    server_args.get_device_memory_capacity = common.get_device_memory_capacity
    for module in (overrides, server_args):
        module.is_sm90_supported = lambda *device: True
        module.is_sm100_supported = lambda *device: False
    server_args.is_hopper_with_cuda_12_3 = lambda *device: True
    yield


def resolve(*argv: str):
    """SGLang's server arguments, resolved."""
    from sglang.srt.server_args import prepare_server_args

    server_args = prepare_server_args(list(argv))
    if hasattr(server_args, "resolve_once"):  # since 0.5.19; before, construction resolves
        server_args.resolve_once()
    return server_args


def publish(server_args) -> None:
    """Make ``server_args`` what this process serves with."""
    import sglang.srt.runtime_context as runtime_context

    runtime_context.publish(server_args, role="scheduler")


def make_pool(pages: int, layers: int = 2, kv_heads: int = 1, dtype: torch.dtype = torch.bfloat16):
    """A real KV pool on the CPU: layer 0 dense, the others sparse."""
    from sglang.srt.mem_cache.memory_pool import MiniMaxSparseKVPool

    sparse = list(range(1, layers))
    return MiniMaxSparseKVPool(
        size=pages * PAGE,
        page_size=PAGE,
        dtype=dtype,
        head_num=kv_heads,
        head_dim=HEAD_DIM,
        idx_head_dim=HEAD_DIM,
        dense_layer_ids=[0],
        sparse_layer_ids=sparse,
        device="cpu",
        disable_value_sparse_layer_ids=sparse,
        start_layer=0,
        end_layer=layers,
    )


def make_runner(
    server_args,
    pool,
    *,
    layers: int = 2,
    q_heads: int = 16,
    kv_heads: int = 1,
    architecture: str = "MiniMaxM3SparseForCausalLM",
    context: int = 8192,
    requests: int = 16,
):
    hf_config = SimpleNamespace(architectures=[architecture])
    if architecture.startswith("MiniMaxM3"):
        hf_config.sparse_attention_config = sparse_attention_config(layers, kv_heads)
    hf_config.get_text_config = lambda: hf_config
    model_config = SimpleNamespace(
        context_len=context,
        hf_config=hf_config,
        hf_text_config=hf_config,
        num_attention_heads=q_heads,
        dtype=torch.bfloat16,
        quantization=None,
        get_total_num_kv_heads=lambda: kv_heads,
    )
    return SimpleNamespace(
        device="cpu",
        server_args=server_args,
        model_config=model_config,
        token_to_kv_pool=pool,
        req_to_token_pool=SimpleNamespace(req_to_token=torch.zeros(requests, context, dtype=torch.int32)),
        hisparse_coordinator=None,
        use_mla_backend=False,
        is_draft_worker=False,
        draft_attention_backend=None,
        init_new_workspace=False,
    )


def build_backend(runner):
    """The attention backend that SGLang's own set-up makes for the published arguments."""
    from sglang.srt.model_executor.model_runner_components.attention_backend_setup import get_attention_backend

    return get_attention_backend(model_runner=runner)


def make_layer(layer_id: int = 1, q_heads: int = 16, kv_heads: int = 1):
    scales = ("k_scale", "v_scale", "k_scale_float", "v_scale_float", "q_scale_float")
    scales += ("idx_q_scale_float", "idx_k_scale_float", "idx_v_scale_float")
    return SimpleNamespace(
        layer_id=layer_id,
        tp_q_head_num=q_heads,
        tp_k_head_num=kv_heads,
        tp_v_head_num=kv_heads,
        v_head_dim=HEAD_DIM,
        qk_head_dim=HEAD_DIM,
        head_dim=HEAD_DIM,
        scaling=HEAD_DIM**-0.5,
        is_cross_attention=False,
        attn_type=None,
        logit_cap=0.0,
        sliding_window_size=None,
        **dict.fromkeys(scales),
    )


class Batch(SimpleNamespace):
    """A ForwardBatch: unlike a plain namespace it can be referenced weakly."""


def make_extend_batch(runner, prefixes: list[int], extends: list[int], seed: int = 0):
    """A prefill batch; every request gets whole pages of the pool, in shuffled order, page 0 stays unused."""
    from sglang.srt.model_executor.forward_batch_info import ForwardMode

    generator = torch.Generator().manual_seed(seed)
    totals = [prefix + extend for prefix, extend in zip(prefixes, extends, strict=True)]
    pages_of = [-(-total // PAGE) for total in totals]
    free = torch.randperm(sum(pages_of), generator=generator) + 1
    locations, first = [], 0
    for request, (prefix, total, pages) in enumerate(zip(prefixes, totals, pages_of, strict=True)):
        mine = free[first : first + pages]
        first += pages
        slots = (mine[:, None] * PAGE + torch.arange(PAGE)).flatten()[:total].to(torch.int32)
        runner.req_to_token_pool.req_to_token[request, :total] = slots
        locations.append(slots[prefix:].to(torch.int64))
    return Batch(
        forward_mode=ForwardMode.EXTEND,
        out_cache_loc=torch.cat(locations),
        extend_seq_lens=torch.tensor(extends, dtype=torch.int32),
        extend_seq_lens_cpu=list(extends),
        extend_prefix_lens=torch.tensor(prefixes, dtype=torch.int32),
        extend_prefix_lens_cpu=list(prefixes),
        seq_lens=torch.tensor(totals, dtype=torch.int64),
        seq_lens_cpu=torch.tensor(totals, dtype=torch.int64),
        req_pool_indices=torch.arange(len(extends)),
        minimax_m3_precached_sparse_layers=None,
    )
