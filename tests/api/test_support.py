"""What the kernels cover, asked on CPU tensors: the device itself is the last thing to be named."""

from __future__ import annotations

import pytest
import torch

from pageweaver_sglang.cuda.support import unsupported_reason

KV_HEADS, TOKENS = 4, 6


def call(**changes):
    arguments = {
        "q": torch.zeros(TOKENS, 64, 128, dtype=torch.bfloat16),
        "k_cache": torch.zeros(256, KV_HEADS, 128).to(torch.float8_e4m3fn),
        "v_cache": torch.zeros(256, KV_HEADS, 128).to(torch.float8_e4m3fn),
        "topk_idx": torch.zeros(KV_HEADS, TOKENS, 16, dtype=torch.int32),
        "page_size": 128,
    } | changes
    positional = [arguments.pop(name) for name in ("q", "k_cache", "v_cache", "topk_idx")]
    return unsupported_reason(*positional, **arguments)


def cache(*shape, dtype=torch.float8_e4m3fn):
    return torch.zeros(*shape).to(dtype)


def q(*shape, dtype=torch.bfloat16):
    return torch.zeros(*shape, dtype=dtype)


ON_A_GPU = "q must be on a CUDA device, got cpu"


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"pool_page_size": 128},
        {"sm_scale": 0.05, "k_scale": torch.tensor(0.5)},
        {"pool_page_size": 256},
        {"topk_idx": torch.zeros(KV_HEADS, TOKENS, 1, dtype=torch.int32)},
        # A view of the fused projection of a server, and of a fused cache.
        {"q": q(TOKENS, 9856)[:, :8192].view(TOKENS, 64, 128)},
        {"k_cache": cache(256, 2 * KV_HEADS, 128)[:, ::2]},
        {"q": q(0, 64, 128), "topk_idx": torch.zeros(KV_HEADS, 0, 16, dtype=torch.int32)},
    ],
)
def test_covered_calls(changes):
    assert call(**changes) == ON_A_GPU


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"sink": torch.zeros(64)}, "sink must be None"),
        ({"loc_mapping": torch.zeros(4)}, "loc_mapping must be None"),
        ({"q_scale": 1.0}, "q_scale must be None"),
        ({"q": q(TOKENS, 64, 128, dtype=torch.float16)}, "q must be bfloat16, got float16"),
        ({"q": q(TOKENS, 128)}, "q must have 3 dimensions, got 2"),
        ({"q": q(TOKENS, 64, 64)}, "q must have head_dim 128, got 64"),
        ({"q": q(TOKENS, 32, 128)}, "q must have 16 query heads per KV head, got 32 for 4"),
        ({"q": q(TOKENS, 64, 256)[..., ::2]}, "q must be contiguous along head_dim, got stride 2"),
        ({"q": q(TOKENS, 64 * 132).view(TOKENS, 64, 132)[..., :128]}, "q must have strides that are multiples of 8"),
        ({"q": q(TOKENS, 8196)[:, :8192].view(TOKENS, 64, 128)}, "q must have strides that are multiples of 8"),
        ({"q": q(TOKENS * 8192 + 4)[4:].view(TOKENS, 64, 128)}, "q must begin at a multiple of 16 bytes"),
        ({"k_cache": cache(256, KV_HEADS, 128, dtype=torch.bfloat16)}, "k_cache must be float8_e4m3fn, got bfloat16"),
        (
            {"v_cache": cache(256, KV_HEADS, 128, dtype=torch.float8_e5m2)},
            "v_cache must be float8_e4m3fn, got float8_e5m2",
        ),
        (
            {"v_cache": cache(128, KV_HEADS, 128)},
            r"v_cache must have the shape of k_cache [256, 4, 128], got [128, 4, 128]",
        ),
        ({"k_cache": cache(256, KV_HEADS, 136)[..., :128]}, "k_cache must have strides that are multiples of 16"),
        (
            {"v_cache": cache(256 * 512 + 8)[8:].view(256, KV_HEADS, 128)},
            "v_cache must begin at a multiple of 16 bytes",
        ),
        (
            {"k_cache": cache(200, KV_HEADS, 128), "v_cache": cache(200, KV_HEADS, 128)},
            "k_cache must have a multiple of 128 slots, got 200",
        ),
        (
            {"k_cache": cache(0, KV_HEADS, 128), "v_cache": cache(0, KV_HEADS, 128)},
            "k_cache must have at least one page",
        ),
        ({"sm_scale": 0.0}, "sm_scale must be at least 1e-06, got 0.0"),
        ({"sm_scale": -0.1}, "sm_scale must be at least 1e-06, got -0.1"),
        ({"k_scale": 0.0}, "k_scale must be at least 1e-06, got 0.0"),
        ({"k_scale": torch.tensor([-2.0])}, "k_scale must be at least 1e-06, got -2.0"),
        ({"page_size": 64}, "page_size must be 128, got 64"),
        ({"pool_page_size": 64}, "pool_page_size must be a multiple of 128, got 64"),
        ({"pool_page_size": 1}, "pool_page_size must be a multiple of 128, got 1"),
        (
            {"topk_idx": torch.zeros(KV_HEADS, TOKENS, 17, dtype=torch.int32)},
            "topk_idx must have 1 to 16 pages per query, got 17",
        ),
        ({"topk_idx": torch.zeros(KV_HEADS, TOKENS, 16, dtype=torch.int64)}, "topk_idx must be int32, got int64"),
        (
            {"topk_idx": torch.zeros(KV_HEADS, 16, TOKENS, dtype=torch.int32).transpose(1, 2)},
            "topk_idx must be contiguous along k",
        ),
    ],
)
def test_calls_that_are_not_covered(changes, reason):
    assert call(**changes).startswith(reason)


@pytest.mark.parametrize(
    ("capability", "expected"), [((9, 0), None), ((8, 0), "9.0, got 8.0"), ((10, 0), "9.0, got 10.0")]
)
def test_compute_capability(monkeypatch, capability, expected):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    monkeypatch.setattr(torch.Tensor, "is_cuda", property(lambda tensor: True))
    reason = call()
    if expected is None:
        assert reason is None
    else:
        assert reason == f"q must be on a GPU of compute capability {expected}"
