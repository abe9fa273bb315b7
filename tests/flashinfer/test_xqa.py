"""Step 3 by XQA through a stand-in with its documented semantics, against the reference; and which calls it covers."""

from __future__ import annotations

import dataclasses
import sys

import pytest
import torch

from pageweaver_sglang import reference
from pageweaver_sglang.flashinfer import xqa
from tests.fake_xqa import modules, xqa_batch_decode_with_kv_cache
from tests.generators import CASE_NAMES, make_case

BF16 = {"cache_dtype": torch.bfloat16}


def serve(case, **options):
    keywords = case.keywords() | options
    return xqa.sparse_prefill(xqa_batch_decode_with_kv_cache, *case.args(), **keywords)


def check(case, **options):
    """Equal to the reference up to the output's rounding, zeros included."""
    names = ("q", "k_cache", "v_cache", "topk_idx")
    wanted = {"page_size": case.page_size} | options
    assert xqa.xqa_unsupported_reason(*(getattr(case, name) for name in names), **wanted) is None
    out = serve(case, **options)
    assert (out.shape, out.dtype) == (case.q.shape, case.q.dtype)
    options.pop("pool_page_size", None)
    expected = reference.sparse_prefill(case.q.double(), *case.args()[1:], **case.keywords(), **options)
    assert bool(out.isfinite().all())
    torch.testing.assert_close(out.double(), expected, rtol=1e-2, atol=1e-3)
    assert bool((out[expected.abs().sum((1, 2)) == 0] == 0).all())


@pytest.mark.parametrize("name", CASE_NAMES)
def test_every_case_against_the_reference(name):
    check(make_case(name, seed=5))


@pytest.mark.parametrize(
    ("name", "changes"),
    [
        ("tail", BF16),
        ("scaled", BF16 | {"requests": ((40, 900),)}),
        ("holes", BF16 | {"q_dtype": torch.float16, "cache_dtype": torch.float16, "requests": ((60, 900),)}),
        ("packed", {"ratio": 8}),
        ("heads4", BF16 | {"ratio": 1}),
        ("heads4", {"ratio": 5, "k": 32}),
        ("unsorted", {"k": 32, "requests": ((40, 5000),)}),
        ("duplicates", {"head_dim": 64, "requests": ((30, 1000),)}),
        ("future", {"head_dim": 256, "requests": ((30, 1000), (9, 0))}),
        ("tail", {"page_size": 64}),
        ("packed", {"page_size": 16, "requests": ((3, 40), (20, 0), (0, 9), (17, 100))}),
    ],
)
def test_what_our_kernels_do_not_cover(name, changes):
    check(make_case(name, seed=6, **changes))


@pytest.mark.parametrize("tail", range(1, 129, 9))
def test_every_kind_of_last_page(tail):
    check(make_case("tail", requests=((9, 300),), tail=tail, **BF16))


@pytest.mark.parametrize("pool_page_size", [16, 32, 64, 256])
def test_pools_with_other_pages(pool_page_size):
    """The generator's pages of 128 adjacent slots are pages of such pools too."""
    check(make_case("packed", seed=7, **BF16), pool_page_size=pool_page_size)


def test_pages_that_are_scattered_in_parts():
    case = make_case("tail", requests=((20, 700),), page_size=32)
    check(dataclasses.replace(case, page_size=128), pool_page_size=32)


@pytest.mark.parametrize("scales", [{"sm_scale": 0.05}, {}])
def test_scales(scales):
    case = make_case("scaled", requests=((20, 700),))
    check(case, **scales)
    check(dataclasses.replace(case, k_scale=torch.tensor([0.3]), v_scale=torch.tensor([-2.0])), **scales)


def test_large_batches_are_split(monkeypatch):
    monkeypatch.setattr(xqa, "MAX_BATCH", 16)
    check(make_case("heads4", requests=((50, 300),)))


def test_no_tokens_and_no_requests():
    case = make_case("padded", requests=(), padding=5)
    assert not serve(case).any()
    case = make_case("empty_request", requests=((0, 40),))
    assert serve(case).shape == (0, 16, 128)


def test_cache_slots_beside_the_heads():
    """K and V in one buffer: strides that are not those of the shapes."""
    case = make_case("heads4", requests=((20, 300),))
    both = torch.stack([case.k_cache.view(torch.uint8), case.v_cache.view(torch.uint8)], 1).view(case.k_cache.dtype)
    check(dataclasses.replace(case, k_cache=both[:, 0], v_cache=both[:, 1]))


# Reasons -------------------------------------------------------------------------------------------------------------


def call(**changes):
    arguments = {
        "q": torch.zeros(6, 32, 128, dtype=torch.bfloat16),
        "k_cache": torch.zeros(256, 4, 128, dtype=torch.bfloat16),
        "v_cache": torch.zeros(256, 4, 128, dtype=torch.bfloat16),
        "topk_idx": torch.zeros(4, 6, 32, dtype=torch.int32),
        "page_size": 128,
    } | changes
    positional = [arguments.pop(name) for name in ("q", "k_cache", "v_cache", "topk_idx")]
    return xqa.xqa_unsupported_reason(*positional, **arguments)


def zeros(*shape, dtype=torch.bfloat16):
    return torch.zeros(*shape).to(dtype)


def caches(*shape, dtype=torch.bfloat16):
    return {"k_cache": zeros(*shape, dtype=dtype), "v_cache": zeros(*shape, dtype=dtype)}


@pytest.mark.parametrize(
    "changes",
    [
        {},
        caches(256, 4, 128, dtype=torch.float8_e4m3fn),
        {"q": zeros(6, 4, 128)},
        {"q": zeros(6, 64, 128)},
        {"q": zeros(6, 20, 128)},
        {"q": zeros(6, 32, 128, dtype=torch.float16)} | caches(256, 4, 128, dtype=torch.float16),
        {"q": zeros(6, 32, 64)} | caches(256, 4, 64),
        {"q": zeros(6, 32, 256)} | caches(256, 4, 256),
        {"page_size": 64},
        {"pool_page_size": 16},
        {"pool_page_size": 48},
        {"sm_scale": 0.1, "k_scale": torch.tensor(0.5)},
        {"topk_idx": torch.zeros(4, 6, 1, dtype=torch.int32)},
    ],
)
def test_covered_calls(changes):
    assert call(**changes) is None


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"sink": torch.zeros(32)}, "sink must be None"),
        ({"loc_mapping": torch.zeros(4)}, "loc_mapping must be None"),
        ({"q_scale": 1.0}, "q_scale must be None"),
        ({"q": zeros(32, 128)}, "q must have 3 dimensions, got 2"),
        ({"q": zeros(6, 32, 128, dtype=torch.float32)}, "q must be bfloat16 or float16, got float32"),
        (
            caches(256, 4, 128, dtype=torch.float16),
            "k_cache must be float8_e4m3fn or, like q, bfloat16, got float16",
        ),
        (
            {"v_cache": zeros(256, 4, 128, dtype=torch.float8_e4m3fn)},
            "v_cache must have the dtype of k_cache bfloat16, got float8_e4m3fn",
        ),
        (
            {"v_cache": zeros(384, 4, 128)},
            "v_cache must have the shape of k_cache [256, 4, 128], got [384, 4, 128]",
        ),
        ({"q": zeros(6, 32, 96)} | caches(256, 4, 96), "q must have head_dim 64, 128, 256, got 96"),
        ({"q": zeros(6, 32, 64)}, "k_cache must have the head_dim of q 64, got 128"),
        ({"q": zeros(6, 128, 128)}, "q must have 1 to 16 query heads per KV head, got 128 for 4"),
        ({"q": zeros(6, 30, 128)}, "q must have 1 to 16 query heads per KV head, got 30 for 4"),
        ({"page_size": 8}, "page_size and pool_page_size must be multiples of 16, got 8 and 8"),
        ({"pool_page_size": 1}, "page_size and pool_page_size must be multiples of 16, got 128 and 1"),
        ({"pool_page_size": 0}, "page_size and pool_page_size must be multiples of 16, got 128 and 0"),
        (caches(200, 4, 128), "k_cache must have whole pages, got 200 slots"),
        (caches(0, 4, 128), "k_cache must have whole pages, got 0 slots"),
        ({"sm_scale": 0.0}, "sm_scale must be at least 1e-06, got 0.0"),
        ({"k_scale": -1.0}, "k_scale must be at least 1e-06, got -1.0"),
        ({"topk_idx": torch.zeros(4, 6, 32)}, "topk_idx must be int32, got float32"),
        ({"topk_idx": torch.zeros(4, 6, 0, dtype=torch.int32)}, "topk_idx must have at least 1 page per query, got 0"),
        (
            {"k_cache": zeros(256, 128, 4).mT},
            "k_cache must be contiguous along head_dim, got stride 4",
        ),
        (
            {name: zeros(256, 4, 192)[..., :128] for name in ("k_cache", "v_cache")},
            "k_cache must have strides that are multiples of head_dim 128, got (768, 192, 1)",
        ),
        (
            {name: zeros(1 << 18)[1 : 1 + 256 * 512].view(256, 4, 128) for name in ("k_cache", "v_cache")},
            "k_cache must begin at a multiple of 16 bytes",
        ),
        (
            {"v_cache": zeros(256, 8, 128)[:, :4]},
            "v_cache must have the strides of k_cache (512, 128, 1), got (1024, 128, 1)",
        ),
    ],
)
def test_reasons(changes, reason):
    assert call(**changes) == reason


@pytest.mark.parametrize(
    ("page_size", "pool_page_size", "expected"),
    [(128, 128, 128), (128, 256, 128), (128, 64, 64), (64, 128, 64), (128, 48, 16), (96, 96, 32), (128, 1, None)],
)
def test_the_largest_page_that_fits(page_size, pool_page_size, expected):
    assert xqa.kernel_page_size(page_size, pool_page_size) == expected


def test_only_hopper(monkeypatch):
    assert xqa.device_reason(torch.device("cpu")) == "needs a CUDA device, got cpu"
    for capability, reason in (((9, 0), None), ((10, 0), "needs compute capability 9.0, got 10.0")):
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device, found=capability: found)
        assert xqa.device_reason(torch.device("cuda", 0)) == reason


# Loading -------------------------------------------------------------------------------------------------------------

INSTALL = "install flashinfer-python 0.6.15 to 0.7.4"


def test_load(monkeypatch):
    for name, module in modules().items():
        monkeypatch.setitem(sys.modules, name, module)
    assert xqa.load() is xqa_batch_decode_with_kv_cache


def test_not_installed(monkeypatch):
    monkeypatch.setitem(sys.modules, "flashinfer", None)
    with pytest.raises(xqa.FlashInferError, match=f"^FlashInfer can't be imported .*; {INSTALL}"):
        xqa.load()


def test_another_flashinfer(monkeypatch):
    installed = modules()
    for name, module in installed.items():
        monkeypatch.setitem(sys.modules, name, module)
    decode = installed["flashinfer.decode"]
    decode.xqa_batch_decode_with_kv_cache = lambda query, kv_cache, out: None
    with pytest.raises(xqa.FlashInferError, match=f"lacks the parameters workspace_buffer, .*; {INSTALL}"):
        xqa.load()
    del decode.xqa_batch_decode_with_kv_cache
    with pytest.raises(xqa.FlashInferError, match=f"is missing; {INSTALL}"):
        xqa.load()
