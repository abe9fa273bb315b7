"""Step 3 calls as SGLang makes them, for the recorder."""

from __future__ import annotations

import json
from pathlib import Path

import torch

from pageweaver_sglang import reference
from pageweaver_sglang.capture.snapshot import HostLengths

PAGE, HEAD_DIM = 128, 128


def make_call(requests=((6, 200),), *, kv_heads=2, k=3, seed=0, cache=torch.float8_e4m3fn, device="cpu", **changes):
    """(call, output, lengths); requests are (chunk, prefix). Pages lie in random order in the pool, q is a view."""
    random = torch.Generator().manual_seed(seed)
    chunks, prefixes = [chunk for chunk, _ in requests], [prefix for _, prefix in requests]
    totals = [chunk + prefix for chunk, prefix in requests]
    pages = [-(-total // PAGE) for total in totals]
    physical = torch.randperm(sum(pages) + 3, generator=random)
    req_to_token = torch.zeros(len(requests) + 2, max(pages) * PAGE, dtype=torch.int32)
    slot_ids = torch.arange(len(requests)).flip(0) + 1
    topk_idx = torch.full((kv_heads, sum(chunks), k), -1, dtype=torch.int32)
    first, token = 0, 0
    for request, (chunk, prefix) in enumerate(requests):
        cells = physical[first : first + pages[request], None] * PAGE + torch.arange(PAGE)
        req_to_token[slot_ids[request], : pages[request] * PAGE] = cells.flatten().to(torch.int32)
        first += pages[request]
        for query in range(chunk):
            own = (prefix + query) // PAGE
            for head in range(kv_heads):
                others = torch.randperm(own, generator=random)[: k - 1].sort().values
                topk_idx[head, token, : len(others) + 1] = torch.tensor([*others.tolist(), own])
            token += 1

    def normal(*shape):
        return torch.randn(*shape, generator=random)

    cells = (sum(pages) + 3) * PAGE
    call = {
        "q": normal(sum(chunks), 40 * kv_heads, HEAD_DIM).to(torch.bfloat16)[:, : 16 * kv_heads],
        "k_cache": normal(cells, kv_heads, HEAD_DIM).to(cache),
        "v_cache": normal(cells, kv_heads, HEAD_DIM).to(cache),
        "sink": None,
        "req_to_token": req_to_token,
        "slot_ids": slot_ids,
        "topk_idx": topk_idx,
        "block_size_q": 1,
        "block_size_k": PAGE,
        "cu_seqlens": torch.tensor([0, *chunks]).cumsum(0).to(torch.int32),
        "seq_lens": torch.tensor(totals),  # int64, as SGLang has it in the batch
        "prefix_lens": torch.tensor(prefixes, dtype=torch.int32),
        "max_seqlen_q": max(chunks),
        "sm_scale": None,
        "q_scale": None,
        "k_scale": None,
        "v_scale": None,
        "loc_mapping": None,
    } | changes
    call = {name: value.to(device) if isinstance(value, torch.Tensor) else value for name, value in call.items()}
    return call, reference_output(call), HostLengths(tuple(prefixes), tuple(chunks))


def reference_output(call):
    names = ("q", "k_cache", "v_cache", "topk_idx", "req_to_token", "slot_ids")
    lengths = [call[name].to(torch.int32) for name in ("cu_seqlens", "seq_lens", "prefix_lens")]
    scales = {name: call[name] for name in ("sm_scale", "k_scale", "v_scale")}
    return reference.sparse_prefill(*(call[name] for name in names), *lengths, **scales)


def files(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.glob("*.npz") if not path.name.startswith("."))


def state(folder: Path) -> dict:
    (path,) = folder.glob("state-*.json")
    return json.loads(path.read_text())
