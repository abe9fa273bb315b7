#!/usr/bin/env python3
"""Write a tiny MiniMax-M3 with random weights and an offline byte-level tokenizer, for serve_check.py.

    make_tiny_m3.py OUT_DIR [--q-heads 64] [--kv-heads 4] [--no-weights]

6 layers, the first 2 with dense attention and MLP; 64 query heads, 4 KV heads, head dim 128, the 16 best pages of 128
tokens for every query. It says nothing sensible: it is there to drive a real server's scheduler, cache and sparse
attention. The weights come from a fixed seed on the CPU. With --no-weights, serve it with SGLang's
`--load-format dummy`.

Every KV head has an index head, which picks its pages, as in MiniMax-M3. With `--tp` above the KV heads, SGLang gives
several ranks the same KV head and the same index head, and each rank a share of the query heads: 16 query heads and
1 KV head are with `--tp 2` on a rank what MiniMax-M3 is with `--tp 8`, and 8 query heads and 1 KV head on one GPU.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

DENSE_LAYERS = 2
LAYERS = 6
SPARSE = [0] * DENSE_LAYERS + [1] * (LAYERS - DENSE_LAYERS)
INDEX_DIM = 128
Q_HEADS, KV_HEADS = 64, 4
SPECIAL_TOKENS = {"bos": ("<s>", 256), "eos": ("</s>", 257), "pad": ("<pad>", 258)}
CONTEXT = 131072

CONFIG: dict[str, Any] = {
    "architectures": ["MiniMaxM3SparseForCausalLM"],
    "model_type": "minimax_m2",
    "dtype": "bfloat16",
    "hidden_size": 1024,
    "intermediate_size": 256,  # of each expert, and of the shared expert
    "dense_intermediate_size": 1024,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": Q_HEADS,
    "num_key_value_heads": KV_HEADS,
    "head_dim": 128,
    "rotary_dim": 64,
    "rope_theta": 5000000.0,
    "max_position_embeddings": CONTEXT,
    "rms_norm_eps": 1e-6,
    "qk_norm_type": "per_head",
    "use_qk_norm": True,
    "use_gemma_norm": True,
    "hidden_act": "swigluoai",
    "swiglu_alpha": 1.702,
    "swiglu_limit": 7.0,
    "num_local_experts": 8,
    "num_experts_per_tok": 2,
    "n_shared_experts": 1,
    "scoring_func": "sigmoid",
    "use_routing_bias": True,
    "routed_scaling_factor": 2.0,
    "moe_layer_freq": SPARSE,
    "vocab_size": 1024,
    **{f"{name}_token_id": number for name, (_, number) in SPECIAL_TOKENS.items()},
    "tie_word_embeddings": False,
    "sparse_attention_config": {
        "sparse_attention_freq": SPARSE,
        "sparse_disable_index_value": SPARSE,
        "sparse_num_index_heads": KV_HEADS,
        "sparse_index_dim": INDEX_DIM,
        "sparse_block_size": 128,
        "sparse_topk_blocks": 16,
        "sparse_init_block": 0,
        "sparse_local_block": 1,
        "sparse_score_type": "max",
    },
}


def config(q_heads: int = Q_HEADS, kv_heads: int = KV_HEADS) -> dict[str, Any]:
    """The model's configuration with that many heads, index heads included.

    Raises:
        ValueError: the query heads can't be dealt out to the KV heads.
    """
    if kv_heads < 1:
        raise ValueError(f"--kv-heads: got {kv_heads}; allowed: an integer of at least 1")
    if q_heads < 1 or q_heads % kv_heads:
        raise ValueError(f"--q-heads: got {q_heads}; allowed: a multiple of --kv-heads, {kv_heads}, of at least 1")
    sparse = CONFIG["sparse_attention_config"] | {"sparse_num_index_heads": kv_heads}
    heads = {"num_attention_heads": q_heads, "num_key_value_heads": kv_heads}
    return CONFIG | heads | {"sparse_attention_config": sparse}


def byte_letters() -> dict[int, str]:
    """The byte-level BPE alphabet: printable bytes stand for themselves, the others for characters from U+0100 on."""
    printable = [*range(ord("!"), ord("~") + 1), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    letters = {byte: chr(byte) for byte in printable}
    for byte in range(256):
        if byte not in letters:
            letters[byte] = chr(256 + len(letters) - len(printable))
    return letters


def tokenizer() -> dict:
    """256 bytes, the special tokens, and fillers up to the vocabulary's size; no merges."""
    vocabulary = {letter: byte for byte, letter in byte_letters().items()}
    first_filler = 256 + len(SPECIAL_TOKENS)
    vocabulary |= {f"<w{i}>": i for i in range(first_filler, CONFIG["vocab_size"])}
    plain = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [{"id": number, "content": text, **plain} for text, number in SPECIAL_TOKENS.values()],
        "normalizer": None,
        "pre_tokenizer": byte_level,
        "post_processor": None,
        "decoder": byte_level | {"add_prefix_space": True},
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": None,
            "continuing_subword_prefix": None,
            "end_of_word_suffix": None,
            "fuse_unk": False,
            "byte_fallback": False,
            "ignore_merges": False,
            "vocab": vocabulary,
            "merges": [],
        },
    }


def tokenizer_config() -> dict:
    names = {f"{name}_token": text for name, (text, _) in SPECIAL_TOKENS.items()}
    return {
        "tokenizer_class": "PreTrainedTokenizerFast",
        **names,
        "model_max_length": CONTEXT,
        "clean_up_tokenization_spaces": False,
    }


def weights(config: dict[str, Any]) -> dict[str, torch.Tensor]:
    """All weights by their checkpoint names: normal, scaled by fan-in; norms near their neutral value."""
    import torch

    generator = torch.Generator().manual_seed(1)
    hidden, expert = config["hidden_size"], config["intermediate_size"]
    dense, head_dim = config["dense_intermediate_size"], config["head_dim"]
    q_width, kv_width = (config[key] * head_dim for key in ("num_attention_heads", "num_key_value_heads"))
    index_width = config["sparse_attention_config"]["sparse_num_index_heads"] * INDEX_DIM
    experts, vocabulary = config["num_local_experts"], config["vocab_size"]
    tensors: dict[str, torch.Tensor] = {}

    def add(name: str, *shape: int, std: float | None = None, dtype: torch.dtype = torch.bfloat16) -> None:
        std = shape[-1] ** -0.5 if std is None else std
        tensors[name] = (torch.randn(*shape, generator=generator) * std).to(dtype)

    def add_mlp(prefix: str, width: int) -> None:
        for name, shape in (
            ("gate_proj", (width, hidden)),
            ("up_proj", (width, hidden)),
            ("down_proj", (hidden, width)),
        ):
            add(f"{prefix}.{name}.weight", *shape)

    add("model.embed_tokens.weight", vocabulary, hidden, std=1.0)
    add("lm_head.weight", vocabulary, hidden)
    add("model.norm.weight", hidden, std=0.01)
    for layer in range(LAYERS):
        prefix = f"model.layers.{layer}"
        attention = f"{prefix}.self_attn"
        add(f"{prefix}.input_layernorm.weight", hidden, std=0.01)
        add(f"{prefix}.post_attention_layernorm.weight", hidden, std=0.01)
        add(f"{attention}.q_proj.weight", q_width, hidden)
        add(f"{attention}.k_proj.weight", kv_width, hidden)
        add(f"{attention}.v_proj.weight", kv_width, hidden)
        add(f"{attention}.o_proj.weight", hidden, q_width)
        add(f"{attention}.q_norm.weight", head_dim, std=0.01)
        add(f"{attention}.k_norm.weight", head_dim, std=0.01)
        if not SPARSE[layer]:
            add_mlp(f"{prefix}.mlp", dense)
            continue
        add(f"{attention}.index_q_proj.weight", index_width, hidden)
        add(f"{attention}.index_k_proj.weight", INDEX_DIM, hidden)
        add(f"{attention}.index_q_norm.weight", INDEX_DIM, std=0.01)
        add(f"{attention}.index_k_norm.weight", INDEX_DIM, std=0.01)
        moe = f"{prefix}.block_sparse_moe"
        add(f"{moe}.gate.weight", experts, hidden, dtype=torch.float32)
        add(f"{moe}.e_score_correction_bias", experts, std=0.01, dtype=torch.float32)
        for number in range(experts):
            add(f"{moe}.experts.{number}.w1.weight", expert, hidden)
            add(f"{moe}.experts.{number}.w3.weight", expert, hidden)
            add(f"{moe}.experts.{number}.w2.weight", hidden, expert)
        add_mlp(f"{moe}.shared_experts", expert)
    return tensors


def write_model(folder: Path, *, q_heads: int = Q_HEADS, kv_heads: int = KV_HEADS, with_weights: bool = True) -> None:
    """Write the checkpoint into ``folder`` (made when it is missing). Raises ValueError as :func:`config` does."""
    settings = config(q_heads, kv_heads)
    folder.mkdir(parents=True, exist_ok=True)
    special = {f"{name}_token_id": number for name, (_, number) in SPECIAL_TOKENS.items()}
    for name, content in (
        ("config.json", settings),
        ("generation_config.json", special),
        ("tokenizer.json", tokenizer()),
        ("tokenizer_config.json", tokenizer_config()),
    ):
        (folder / name).write_text(json.dumps(content, indent=1))
    if with_weights:
        from safetensors.torch import save_file

        save_file(weights(settings), str(folder / "model.safetensors"), metadata={"format": "pt"})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path, help="folder to write")
    parser.add_argument("--q-heads", type=int, default=Q_HEADS, help="default: %(default)s")
    parser.add_argument("--kv-heads", type=int, default=KV_HEADS, help="default: %(default)s")
    parser.add_argument("--no-weights", action="store_true", help="configuration and tokenizer only")
    arguments = parser.parse_args()
    heads = {"q_heads": arguments.q_heads, "kv_heads": arguments.kv_heads}
    try:
        write_model(arguments.out, **heads, with_weights=not arguments.no_weights)
    except ValueError as error:
        parser.error(str(error))
    print(f"wrote {arguments.out}")


if __name__ == "__main__":
    main()
