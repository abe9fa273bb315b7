"""A stand-in for FlashInfer's XQA on any device, from its documentation, exact where XQA rounds to FP8."""

from __future__ import annotations

import sys
import types

import torch

SEMAPHORES = 8 << 20


def xqa_batch_decode_with_kv_cache(
    query,
    kv_cache,
    workspace_buffer,
    block_tables,
    seq_lens,
    max_seq_len,
    bmm1_scale=1.0,
    bmm2_scale=1.0,
    window_left=-1,
    out=None,
    sinks=None,
    kv_layout="NHD",
    enable_pdl=None,
    q_len_per_req=1,
    o_scale=1.0,
    mask=None,
    kv_cache_sf=None,
):
    """Signature of flashinfer-python 0.6.15 (0.7.4 adds ``q_cu_seq_lens=None``). Asserts what the kernel relies on."""
    k_cache, v_cache = kv_cache
    batch, heads, _ = query.shape
    pages, page_size, kv_heads, _ = k_cache.shape
    assert (kv_layout, window_left, sinks, q_len_per_req, o_scale, mask) == ("NHD", -1, None, 1, 1.0, None)
    assert page_size in (16, 32, 64, 128)
    assert heads % kv_heads == 0
    assert k_cache.stride() == v_cache.stride()
    assert 1 <= batch <= 65535
    assert query.is_contiguous()
    assert out.is_contiguous()
    assert (out.shape, out.dtype) == (query.shape, query.dtype)
    assert query.dtype in (torch.bfloat16, torch.float16)
    assert k_cache.dtype in (query.dtype, torch.float8_e4m3fn)
    assert block_tables.is_contiguous()
    assert (block_tables.dtype, len(block_tables)) == (torch.int32, batch)
    assert (seq_lens.dtype, tuple(seq_lens.shape)) == (torch.int32, (batch,))
    assert max_seq_len == block_tables.shape[1] * page_size
    assert workspace_buffer.dtype == torch.uint8
    assert not workspace_buffer[: 8 * batch].any()
    assert len(workspace_buffer) > SEMAPHORES
    assert enable_pdl is False, "its kernel reads the lengths before it waits for the kernels before it"
    values = float(bmm2_scale) if k_cache.dtype == torch.float8_e4m3fn else 1.0
    scale = float(bmm1_scale) / float(bmm2_scale) * values
    ratio = heads // kv_heads
    for row, length in enumerate(seq_lens.tolist()):
        assert 1 <= length <= max_seq_len
        listed = block_tables[row, : -(-length // page_size)].tolist()
        assert all(0 <= page < pages for page in listed)
        for head in range(kv_heads):
            k, v = (cache[listed, :, head].flatten(0, 1)[:length].double() for cache in (k_cache, v_cache))
            mine = slice(head * ratio, (head + 1) * ratio)
            weights = (query[row, mine].double() @ k.T * scale).softmax(1)
            out[row, mine] = (weights @ v * values).to(out.dtype)
    return out


def modules() -> dict[str, types.ModuleType]:
    """What ``sys.modules`` holds where a FlashInfer with nothing but this function is installed."""
    decode = types.ModuleType("flashinfer.decode")
    decode.xqa_batch_decode_with_kv_cache = xqa_batch_decode_with_kv_cache
    return {"flashinfer": types.ModuleType("flashinfer"), "flashinfer.decode": decode}


def install() -> None:
    """Put the stand-in where ``import flashinfer.decode`` finds it, for the rest of the process."""
    sys.modules.update(modules())
