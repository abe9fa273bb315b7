"""FlashInfer's own XQA on a Hopper GPU, against the float64 reference. FlashInfer compiles five kernels for this."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from pageweaver_sglang import reference
from pageweaver_sglang.bench.accuracy import nrms
from pageweaver_sglang.config import Config
from pageweaver_sglang.flashinfer import xqa
from pageweaver_sglang.plugin import fallback, step3
from tests.generators import CASE_NAMES, make_case

UNFIT = xqa.device_reason(torch.device("cuda" if torch.cuda.is_available() else "cpu"))
pytestmark = [pytest.mark.gpu, pytest.mark.skipif(UNFIT is not None, reason=f"XQA {UNFIT}")]

BF16 = {"cache_dtype": torch.bfloat16}
# With an FP8 cache XQA rounds queries and weights to E4M3 (2.1 to 3.7 % were measured), with BF16 weights to BF16.
MAX_NRMS = {torch.float8_e4m3fn: 0.05, torch.bfloat16: 0.005}


@pytest.fixture(scope="module")
def function():
    pytest.importorskip("flashinfer", reason="flashinfer-python is not installed")
    return xqa.load()


def check(function, case, **options):
    out = xqa.sparse_prefill(function, *case.args(), **case.keywords(), **options)
    expected = reference.sparse_prefill(*case.args(), **case.keywords())
    assert (out.shape, out.dtype) == (case.q.shape, case.q.dtype)
    assert bool(out.isfinite().all())
    assert nrms(out, expected) <= MAX_NRMS[case.k_cache.dtype]
    assert bool((out[expected.abs().sum((1, 2)) == 0] == 0).all())


@pytest.mark.parametrize("cache_dtype", [torch.bfloat16, torch.float8_e4m3fn], ids=["bf16", "fp8"])
@pytest.mark.parametrize("name", CASE_NAMES)
def test_every_case_against_the_reference(function, name, cache_dtype):
    check(function, make_case(name, seed=1, device="cuda", cache_dtype=cache_dtype))


@pytest.mark.parametrize("cache_dtype", [torch.bfloat16, torch.float8_e4m3fn], ids=["bf16", "fp8"])
@pytest.mark.parametrize("name", ["unsorted", "holes", "duplicates", "heads4"])
def test_32_pages_per_query(function, name, cache_dtype):
    case = make_case(name, seed=2, device="cuda", cache_dtype=cache_dtype, k=32, requests=((70, 9000), (30, 4100)))
    check(function, case)


@pytest.mark.parametrize("name", ["packed", "heads4", "holes", "padded", "scaled"])
def test_8_query_heads_per_kv_head(function, name):
    check(function, make_case(name, seed=3, device="cuda", ratio=8))


@pytest.mark.parametrize("name", ["tail", "packed", "holes"])
def test_pool_pages_of_64(function, name):
    check(function, make_case(name, seed=4, device="cuda", **BF16), pool_page_size=64)


@pytest.mark.parametrize("tail", [1, 2, 63, 64, 65, 127, 128])
@pytest.mark.parametrize("cache_dtype", [torch.bfloat16, torch.float8_e4m3fn], ids=["bf16", "fp8"])
def test_every_kind_of_last_page(function, tail, cache_dtype):
    check(function, make_case("tail", device="cuda", requests=((33, 2000),), tail=tail, cache_dtype=cache_dtype))


@pytest.mark.parametrize("tokens", [1, 2, 7, 40, 130])
@pytest.mark.parametrize("cache_dtype", [torch.bfloat16, torch.float8_e4m3fn], ids=["bf16", "fp8"])
def test_few_queries_whose_lists_are_split(function, tokens, cache_dtype):
    """Small batches go to several CTAs per list, which meet through the workspace's semaphores."""
    check(function, make_case("tail", device="cuda", requests=((tokens, 9000),), k=40, cache_dtype=cache_dtype))


def test_more_queries_than_a_launch_takes(function):
    check(function, make_case("tail", device="cuda", requests=((xqa.MAX_BATCH + 300, 0),), k=2, **BF16))


@pytest.mark.parametrize("cache_dtype", [torch.bfloat16, torch.float8_e4m3fn], ids=["bf16", "fp8"])
def test_scales_in_device_memory(function, cache_dtype):
    case = make_case("scaled", device="cuda", cache_dtype=cache_dtype)
    scales = {name: torch.tensor([getattr(case, name)], device="cuda") for name in ("k_scale", "v_scale")}
    check(function, dataclasses.replace(case, **scales))


def test_no_synchronisation(function):
    case = make_case("heads4", device="cuda", **BF16)
    xqa.sparse_prefill(function, *case.args(), **case.keywords())
    torch.cuda.set_sync_debug_mode("error")
    try:
        xqa.sparse_prefill(function, *case.args(), **case.keywords())
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_graph_replays_with_other_contents(function):
    """Other lengths, page tables, picks and values in the buffers that a graph has captured."""
    first, second = (
        make_case("packed", seed=seed, device="cuda", requests=requests, k=20, **BF16)
        for seed, requests in ((1, ((60, 3000), (40, 900))), (2, ((25, 3040), (75, 890))))
    )
    assert [t.shape for t in first.args()] == [t.shape for t in second.args()]
    xqa.sparse_prefill(function, *first.args())
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = xqa.sparse_prefill(function, *first.args())
    for case in (second, make_case("packed", seed=1, device="cuda", requests=((60, 3000), (40, 900)), k=20, **BF16)):
        expected = xqa.sparse_prefill(function, *case.args())
        for buffer, contents in zip(first.args(), case.args(), strict=True):
            buffer.copy_(contents)
        out.fill_(float("nan"))
        graph.replay()
        torch.cuda.synchronize()
        assert torch.equal(out, expected)


@pytest.mark.parametrize("ratio", [16, 8])
def test_the_plugins_fallback(function, ratio, caplog):
    """Compiled at a server's start, then asked by Step 3 for what the engine doesn't cover: union8 no BF16 caches."""
    case = make_case("holes", seed=5, device="cuda", ratio=ratio, **BF16)
    call = {name: getattr(case, name) for name in ("q", "k_cache", "v_cache", "topk_idx", "req_to_token", "slot_ids")}
    call |= {name: getattr(case, name) for name in ("cu_seqlens", "seq_lens", "prefix_lens")}
    call |= {"sink": None, "block_size_q": 1, "block_size_k": 128}
    config = Config(engine="union8", fallback_engine="flashinfer-xqa")
    options = {"q_heads": ratio, "q_dtype": torch.bfloat16, "pool_page_size": 128, "page_size": 128}
    serves, words = fallback.prepare(config, case.k_cache, case.v_cache, **options)
    assert words == "flashinfer-xqa", caplog.text
    served = step3.Step3(config, pool_page_size=128, fallback=serves)
    out = served(lambda **call: pytest.fail("SGLang's own Step 3 was asked"), 1, call)
    assert nrms(out, reference.sparse_prefill(*case.args())) <= MAX_NRMS[torch.bfloat16]
    assert served.stats.calls_by_arm == {"flashinfer-xqa": 1}
