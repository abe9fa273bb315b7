"""Step 3 as the plugin calls it, layer by layer of forward passes that share their buffers."""

from __future__ import annotations

import dataclasses
from types import SimpleNamespace

import pytest
import torch
from gpu_support import HAS_CUDA, attend, same_bits

import pageweaver_sglang as pw
from pageweaver_sglang.bench.accuracy import nrms
from pageweaver_sglang.plugin import tiles
from pageweaver_sglang.plugin.forwards import Forwards
from pageweaver_sglang.plugin.step3 import Step3
from tests.generators import make_case

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not HAS_CUDA, reason="needs a CUDA device")]

ENGINES = ("stream", "union8")
LAYERS = range(4)


class Batch(SimpleNamespace):
    """A ForwardBatch of SGLang, as far as a pass looks at it."""


def make_batch(case) -> Batch:
    lengths = case.cu_seqlens.diff().tolist()
    return Batch(extend_prefix_lens_cpu=case.prefix_lens.tolist(), extend_seq_lens_cpu=lengths)


def make_step3(engine: str) -> Step3:
    return Step3(pw.Config(engine=engine, mode="pageweaver", on_error="raise"), pool_page_size=128)


def arguments(case) -> dict:
    """A call of SGLang's Step 3, by name."""
    names = ("q", "k_cache", "v_cache", "topk_idx", "req_to_token", "slot_ids", "cu_seqlens", "seq_lens", "prefix_lens")
    nothing = ("sink", "sm_scale", "cu_seqblocks_q", "max_seqblock_q", "q_scale", "k_scale", "v_scale", "loc_mapping")
    call = dict.fromkeys(nothing) | {name: getattr(case, name) for name in names}
    return call | {"block_size_q": 1, "block_size_k": 128, "max_seqlen_q": case.q.shape[0]}


def native(**call):
    raise AssertionError("SGLang's function was asked")


@pytest.fixture(scope="module")
def cases():
    """Cases over pools of the same size, so that they share the value tiles as layers do."""
    cases = [make_case("heads4", seed=120 + i, device="cuda", requests=((70, 2900), (30, 2100))) for i in range(3)]
    assert len({case.k_cache.shape for case in cases}) == 1
    return cases


@pytest.fixture(scope="module")
def expected(cases):
    return [attend(case, window=None, engine="union8") for case in cases]


@pytest.mark.parametrize("engine", ENGINES)
def test_a_layer_allocates_its_output_alone_and_waits_for_nothing(cases, expected, engine):
    step3, forwards, batch = make_step3(engine), Forwards(), make_batch(cases[0])
    call = arguments(cases[0])
    outputs = [step3(native, 0, call, forwards.of(batch))]
    torch.cuda.synchronize()
    before = torch.cuda.memory_stats()["allocation.all.allocated"]
    torch.cuda.set_sync_debug_mode("error")
    try:
        outputs += [step3(native, layer, call, forwards.of(batch)) for layer in LAYERS]
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert torch.cuda.memory_stats()["allocation.all.allocated"] - before == len(LAYERS)
    assert all(same_bits(out, expected[0]) for out in outputs)


@pytest.mark.skipif(HAS_CUDA and torch.cuda.get_device_capability() != (9, 0), reason="needs a Hopper GPU")
def test_stream_serves_a_bf16_cache_without_value_tiles(cases, monkeypatch):
    monkeypatch.setattr(tiles, "_of_pools", {})
    case, forwards, batch = cases[0], Forwards(), make_batch(cases[0])
    widened = {name: getattr(case, name).bfloat16() for name in ("k_cache", "v_cache")}
    call = arguments(case) | widened
    step3 = make_step3("stream")
    outputs = [step3(native, layer, call, forwards.of(batch)) for layer in LAYERS]
    expected = attend(dataclasses.replace(case, **widened), window=None, engine="stream")
    assert all(same_bits(out, expected) for out in outputs)
    assert tiles._of_pools == {}
    assert nrms(outputs[0], make_step3("portable")(native, 0, call)) < 0.005  # each rounds P and the output to BF16
    asked = []
    make_step3("union8")(lambda **call: asked.append(call), 0, call)
    assert len(asked) == 1


@pytest.mark.parametrize("engine", ENGINES)
def test_passes_that_take_turns_layer_by_layer(cases, expected, engine):
    step3, forwards = make_step3(engine), Forwards()
    batches = [make_batch(case) for case in cases]
    for layer in LAYERS:
        for case, batch, wanted in zip(cases, batches, expected, strict=True):
            assert same_bits(step3(native, layer, arguments(case), forwards.of(batch)), wanted)


@pytest.mark.parametrize("engine", ENGINES)
def test_passes_that_come_and_go_on_two_streams(cases, expected, engine):
    """A pass's memory goes back to its stream while that still runs; whoever gets it next comes later there."""
    step3, forwards = make_step3(engine), Forwards()
    streams = [torch.cuda.Stream() for _ in range(2)]
    torch.cuda.synchronize()
    results = []
    for turn in range(30):
        number, stream = turn % 3, streams[turn % 2]
        with torch.cuda.stream(stream):
            batch = make_batch(cases[number])
            results.append(
                (number, [step3(native, layer, arguments(cases[number]), forwards.of(batch)) for layer in LAYERS])
            )
            del batch
            torch.empty(2**22, dtype=torch.uint8, device="cuda").fill_(0xFF)
    torch.cuda.synchronize()
    assert len(forwards) == 0
    assert all(same_bits(out, expected[number]) for number, outputs in results for out in outputs)


@pytest.mark.parametrize("engine", ENGINES)
def test_a_graph_outlives_the_pass_it_was_captured_in(cases, expected, engine):
    """Eager layers first, as SGLang warms up, then the same pass captured; its memory is used by others afterwards."""
    step3, forwards, batch = make_step3(engine), Forwards(), make_batch(cases[0])
    call = {
        name: value.clone() if isinstance(value, torch.Tensor) else value for name, value in arguments(cases[0]).items()
    }
    for layer in LAYERS:
        step3(native, layer, call, forwards.of(batch))
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        outputs = [step3(native, layer, call, forwards.of(batch)) for layer in LAYERS]
    assert step3.stats.captured_calls == len(LAYERS)
    del batch
    garbage = [torch.full((2**20,), 0x5A5A5A5A, dtype=torch.int32, device="cuda") for _ in range(64)]
    for case, wanted in [*zip(cases, expected, strict=True)] * 2:
        for name, value in arguments(case).items():
            if isinstance(value, torch.Tensor):
                # Bytes: FP8 has no copy of its own everywhere.
                call[name].view(torch.uint8).copy_(value.view(torch.uint8))
        for out in outputs:
            out.fill_(float("nan"))
        graph.replay()
        # Eager calls between the replays, with a pass of their own.
        own = make_batch(case)
        assert same_bits(step3(native, 0, arguments(case), forwards.of(own)), wanted)
        assert all(same_bits(out, wanted) for out in outputs)
    assert all(bool((part == 0x5A5A5A5A).all()) for part in garbage)
