"""Mode auto on a GPU: the regroup kernel's counters, how they reach the host, and calls that wait for nothing."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from gpu_support import HAS_CUDA, same_bits
from test_gpu_forwards import arguments, make_batch, native

import pageweaver_sglang as pw
from pageweaver_sglang.auto.history import MEASURE_EVERY
from pageweaver_sglang.auto.readback import Readback
from pageweaver_sglang.bench.inputs import make_inputs
from pageweaver_sglang.capture.snapshot import HostLengths
from pageweaver_sglang.plugin.forwards import Forwards
from pageweaver_sglang.plugin.step3 import Step3
from tests.generators import CASE_NAMES, make_case

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not HAS_CUDA, reason="needs a CUDA device")]

DATA = Path(__file__).parents[1] / "data"
WORKLOADS = ["ctx8k", "ctx16k", "ctx32k_chunk2", "ctx64k_a", "ctx64k_flat", "ctx64k_mixed", "ctx128k", "packed"]
KEEPS_ITS_ORDER = {"ctx8k", "ctx64k_flat"}


def load(name):
    return pw.load_workload(DATA / f"{name}.npz")


def inputs_of(name, seed=0):
    return make_inputs(load(name), "cuda", seed=seed)


def host_lengths(inputs):
    return HostLengths(tuple(inputs.prefix_lens.tolist()), tuple(inputs.cu_seqlens.diff().tolist()))


def counted(case, **options):
    """The order, and what regrouping added to counters that did not begin at zero."""
    before = torch.tensor([5, 1 << 40])
    visits = before.cuda()
    perm = pw.regroup(case.topk_idx, case.cu_seqlens, case.prefix_lens, visits=visits, **options)
    assert torch.equal(perm, pw.regroup(case.topk_idx, case.cu_seqlens, case.prefix_lens, **options))
    return perm, (visits.cpu() - before).tolist()


@pytest.mark.parametrize("guard", ["none", "window"])
@pytest.mark.parametrize("window", [64, 128])
@pytest.mark.parametrize("name", WORKLOADS)
def test_counters_are_the_plans_visits(name, window, guard):
    case = inputs_of(name)
    perm, visits = counted(case, window=window, guard=guard)
    lengths = (case.cu_seqlens, case.seq_lens, case.prefix_lens)
    assert visits == [pw.prepare_unions(case.topk_idx, order, *lengths).visits() for order in (None, perm)]


@pytest.mark.parametrize("capacity", [None, 20])
@pytest.mark.parametrize("window", [64, 128])
@pytest.mark.parametrize("name", CASE_NAMES)
def test_counters_are_the_reference_engines(name, window, capacity):
    case = make_case(name, seed=3)
    options = {"window": window, "guard": "window", "capacity": capacity}
    expected = torch.zeros(2, dtype=torch.int64)
    pw.reference.regroup(case.topk_idx, case.cu_seqlens, case.prefix_lens, visits=expected, **options)
    _, visits = counted(case.to("cuda"), **options)
    assert visits == expected.tolist()


def run(inputs, calls, history, config, lengths, workspace):
    """Calls with a decision each, the host's only work; the decisions and the last output."""
    decisions = []
    for _ in range(calls):
        decisions.append(history.decide(0, inputs.topk_idx, lengths))
        out = pw.sparse_prefill(**inputs.kwargs(), config=config, workspace=workspace, decision=decisions[-1])
    return decisions, out


def make_workspace(inputs):
    kv_heads, tokens, k = inputs.topk_idx.shape
    pool_pages = inputs.k_cache.shape[0] // 128
    sizes = {"kv_heads": kv_heads, "topk": k, "q_heads": inputs.q.shape[1], "pool_pages": pool_pages}
    return pw.Workspace(tokens, len(inputs.prefix_lens), **sizes, device="cuda")


@pytest.mark.parametrize("name", WORKLOADS)
def test_decisions_and_outputs(name):
    """The decision is the faster arm's, calls neither allocate nor wait, and the output is that of the fixed modes."""
    inputs, config = inputs_of(name), pw.Config()
    history, workspace, lengths = pw.History(config), make_workspace(inputs), host_lengths(inputs)
    first, _ = run(inputs, 1, history, config, lengths, workspace)
    torch.cuda.synchronize()
    before = torch.cuda.memory_stats()["allocation.all.allocated"]
    torch.cuda.set_sync_debug_mode("error")
    try:
        decisions, out = run(inputs, 4, history, config, lengths, workspace)
        torch.cuda.set_sync_debug_mode("default")
        torch.cuda.synchronize()
        torch.cuda.set_sync_debug_mode("error")
        later, _ = run(inputs, 2 * MEASURE_EVERY, history, config, lengths, workspace)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert torch.cuda.memory_stats()["allocation.all.allocated"] == before
    assert [decision.reason for decision in first] == ["first"]
    assert {decision.reason for decision in decisions} <= {"first", "regroup", "original"}
    settled = {decision.reason for decision in later} - {"probe"}
    assert settled == {"original" if name in KEEPS_ITS_ORDER else "regroup"}
    for mode in ("union8", "pageweaver"):
        assert same_bits(out, pw.sparse_prefill(**inputs.kwargs(), config=pw.Config(mode=mode)))


def test_measured_visits_are_whole_calls():
    """Many calls in flight: every figure that arrives is one call's, not a part of it and not two calls'."""
    inputs, config = inputs_of("packed"), pw.Config(guard="none")
    lengths = (inputs.cu_seqlens, inputs.seq_lens, inputs.prefix_lens)
    perm = pw.regroup(inputs.topk_idx, inputs.cu_seqlens, inputs.prefix_lens, window=64)
    original, kept = (pw.prepare_unions(inputs.topk_idx, order, *lengths).visits() for order in (None, perm))
    history, workspace = pw.History(config), make_workspace(inputs)
    for layer in range(300):
        decision = history.decide(layer % 150, inputs.topk_idx, host_lengths(inputs))
        pw.sparse_prefill(**inputs.kwargs(), config=config, workspace=workspace, decision=decision)
    torch.cuda.synchronize()
    for layer in range(150):
        decision = history.decide(layer, inputs.topk_idx, host_lengths(inputs))
        assert decision.regroup
        if decision.measurement is not None:
            decision.measurement.send()
    calls = history.visits["original"] // original
    assert calls >= 100
    assert history.visits == {"original": calls * original, "regrouped": calls * kept}


def test_readback_keeps_what_each_call_added_apart():
    device = torch.device("cuda")
    readback, expected, measurements = Readback(device, slots=3), [], []
    for number in range(50):
        measurement = readback.take()
        if measurement is None:
            torch.cuda.synchronize()
            measurement = readback.take()
        measurement.visits += number
        if number % 7:
            measurement.send()
            expected.append((number, number))
            measurements.append(measurement)
    torch.cuda.synchronize()
    readback.take()
    assert [measurement.result for measurement in measurements] == expected


@pytest.mark.parametrize("name", ["ctx8k", "packed"])
def test_a_captured_call_takes_the_decision_as_it_stands(name):
    inputs, other, config = inputs_of(name), inputs_of(name, seed=9), pw.Config()
    history, workspace, lengths = pw.History(config), make_workspace(inputs), host_lengths(inputs)
    for _ in range(4):
        run(inputs, 1, history, config, lengths, workspace)
        torch.cuda.synchronize()
    calls, visits = history._keys[next(iter(history._keys))].calls, dict(history.visits)
    stream, graph = torch.cuda.Stream(), torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        decisions, out = run(inputs, 2 * MEASURE_EVERY, history, config, lengths, workspace)
    reason = "original" if name in KEEPS_ITS_ORDER else "regroup"
    assert {(decision.reason, decision.measurement) for decision in decisions} == {(reason, None)}
    assert (history._keys[next(iter(history._keys))].calls, dict(history.visits)) == (calls, visits)
    for field in ("q", "k_cache", "v_cache"):
        getattr(inputs, field).copy_(getattr(other, field))
    graph.replay()
    torch.cuda.synchronize()
    assert same_bits(out, pw.sparse_prefill(**inputs.kwargs(), config=pw.Config(mode="union8")))
    # Nor is a call measured whose decision was made before the capture began.
    decision, captured = pw.History(config).decide(0, inputs.topk_idx, lengths), torch.cuda.CUDAGraph()
    with torch.cuda.graph(captured, stream=stream):
        pw.sparse_prefill(**inputs.kwargs(), config=config, workspace=workspace, decision=decision)
    captured.replay()
    torch.cuda.synchronize()
    assert decision.measurement.visits.tolist() == [0, 0]


def test_layers_of_a_server():
    """Through the plugin's Step 3: layers with histories of their own, nothing allocated but outputs, no waiting."""
    case = make_case("heads4", seed=7, device="cuda", requests=((600, 30000), (300, 9000)))
    step3, forwards = Step3(pw.Config(on_error="raise"), pool_page_size=128), Forwards()
    call = arguments(case)
    expected = pw.sparse_prefill(*case.args(), **case.keywords(), config=pw.Config(mode="union8"))
    batch = make_batch(case)
    for _ in range(3):
        for layer in range(6):
            assert same_bits(step3(native, layer, call, forwards.of(batch)), expected)
        torch.cuda.synchronize()
    assert step3.stats.decisions["first"] == 12
    assert set(step3.stats.calls_by_arm) <= {"pageweaver", "union8"}
    assert step3.stats.measured_visits["original"] > 0
    before = torch.cuda.memory_stats()["allocation.all.allocated"]
    torch.cuda.set_sync_debug_mode("error")
    try:
        outputs = [step3(native, layer, call, forwards.of(batch)) for layer in range(6)]
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert torch.cuda.memory_stats()["allocation.all.allocated"] - before == 6
    assert all(same_bits(out, expected) for out in outputs)
