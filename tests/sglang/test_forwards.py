"""Forward passes: one set of buffers for all layers of a batch, none that two batches share. Needs no SGLang."""

from __future__ import annotations

import gc
import threading
from types import SimpleNamespace

import pytest
import torch
from fake_runner import Batch
from test_step3 import PREFIX, TOKENS, Native, make, make_call

from pageweaver_sglang import api
from pageweaver_sglang.capture.snapshot import HostLengths
from pageweaver_sglang.config import Config
from pageweaver_sglang.cuda import support
from pageweaver_sglang.plugin.forwards import Forwards

BUFFERS = ("_perm", "_pages", "_slots", "_masks", "_counts", "_queries", "_limits", "_queue")


def make_batch(prefix: int = PREFIX, tokens: int = TOKENS) -> Batch:
    return Batch(extend_prefix_lens_cpu=[prefix], extend_seq_lens_cpu=[tokens])


@pytest.fixture
def used(monkeypatch):
    """Workspaces that calls were served with, in order."""
    seen = []
    real = api.sparse_prefill

    def sparse_prefill(*arguments, workspace, **options):
        seen.append(workspace)
        return real(*arguments, workspace=workspace, **options)

    monkeypatch.setattr("pageweaver_sglang.plugin.step3.sparse_prefill", sparse_prefill)
    return seen


def overlap(a, b) -> bool:
    places = [{getattr(workspace, name).data_ptr() for name in BUFFERS} for workspace in (a, b)]
    return bool(places[0] & places[1])


def test_two_batches_layer_by_layer(used):
    served, forwards = make(on_error="raise"), Forwards()
    batches = [make_batch(), make_batch(PREFIX + 1)]
    expected = Native()(**make_call())
    for layer in (3, 4, 5):
        for batch in batches:
            assert torch.equal(served(Native(), layer, make_call(), forwards.of(batch)), expected)
    first, second = used[0], used[1]
    assert used == [first, second] * 3
    assert not overlap(first, second)
    assert len(forwards) == 2
    assert [forwards.of(batch).lengths for batch in batches] == [
        HostLengths((PREFIX,), (TOKENS,)),
        HostLengths((PREFIX + 1,), (TOKENS,)),
    ]


def test_a_layer_gets_the_very_views_of_the_one_before():
    workspace = Forwards().of(make_batch()).workspace(make_call(), Config())
    assert workspace.plan(TOKENS, 1) is workspace.plan(TOKENS, 1)
    assert workspace.perm(TOKENS) is workspace.perm(TOKENS)


def test_a_call_of_no_pass_takes_its_own_memory(used):
    make()(Native(), 1, make_call())
    assert used == [None]


@pytest.mark.parametrize(
    "changes",
    [
        {"topk_idx": torch.zeros(2, TOKENS, 5, dtype=torch.int32)},
        {"topk_idx": torch.zeros(1, TOKENS, 3, dtype=torch.int32)},
        {"topk_idx": torch.zeros(2, TOKENS - 1, 3, dtype=torch.int32)},
        {"cu_seqlens": torch.tensor([0, 2, TOKENS], dtype=torch.int32)},
    ],
)
def test_layers_of_other_sizes_have_other_buffers(changes):
    forward = Forwards().of(make_batch())
    one, other = (forward.workspace(call, Config()) for call in (make_call(), make_call(**changes)))
    assert not overlap(one, other)
    assert forward.workspace(make_call(), Config()) is one
    kv_heads, tokens, k = make_call(**changes)["topk_idx"].shape
    assert (other.kv_heads, other.max_tokens, other.topk) == (kv_heads, tokens, k)


@pytest.mark.parametrize("engine", ["stream", "union8", "portable"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float8_e4m3fn])
@pytest.mark.parametrize("ratio", [4, 16])
def test_every_engines_calls_fit(engine, dtype, ratio):
    """Engines differ in how many queries share a union."""
    served, forwards, batch = make(engine=engine, on_error="raise"), Forwards(), make_batch()
    call = make_call()
    call |= {"q": call["q"][:, : 2 * ratio], **{name: call[name].to(dtype) for name in ("k_cache", "v_cache")}}
    for layer in (1, 2):
        out = served(lambda **call: pytest.fail("fell back"), layer, call, forwards.of(batch))
        assert torch.equal(out, Native()(**call))


@pytest.mark.parametrize(("processors", "size"), [(1, 16), (2, 8)])
def test_few_heads_have_groups_of_16_where_those_of_8_outnumber_the_processors(monkeypatch, processors, size):
    """6 tokens of 2 KV heads: 12 rows."""
    monkeypatch.setattr(support, "processors_of", lambda device: processors)
    call = make_call()
    call["q"] = call["q"][:, :16]  # 8 heads for each of two KV heads
    assert Forwards().of(make_batch()).workspace(call, Config()).group_size == size


def test_windows_have_buffers_of_their_own():
    forward = Forwards().of(make_batch())
    assert [forward.workspace(make_call(), Config(window=window)).window for window in (64, 128, 64)] == [64, 128, 64]


def test_a_pass_ends_with_its_batch():
    forwards, batch = Forwards(), make_batch()
    forwards.of(batch).workspace(make_call(), Config())
    other = make_batch()
    forwards.of(other)
    assert len(forwards) == 2
    del batch
    assert len(forwards) == 1
    other.itself = other  # gone at the next collection only
    del other
    gc.collect()
    assert len(forwards) == 0


def test_a_batch_in_the_place_of_one_that_is_gone_is_another():
    forwards = Forwards()
    for tokens in range(1, 200):
        batch = make_batch(tokens=tokens)
        assert forwards.of(batch).lengths.chunks == (tokens,)
        del batch
    assert len(forwards) == 0


def test_a_batch_that_gets_other_lengths_is_another_pass():
    forwards, batch = Forwards(), make_batch()
    before = forwards.of(batch)
    workspace = before.workspace(make_call(), Config())
    batch.extend_seq_lens_cpu = [TOKENS + 1]
    after = forwards.of(batch)
    assert after is not before
    assert after.lengths.chunks == (TOKENS + 1,)
    assert not overlap(after.workspace(make_call(), Config()), workspace)
    assert len(forwards) == 1


def test_a_batch_without_lengths_and_without_weak_references():
    forwards, batch = Forwards(), SimpleNamespace()
    assert forwards.of(batch).lengths is None
    assert forwards.of(batch) is not forwards.of(batch)
    assert len(forwards) == 0


class OnCuda:
    """Stands for a top-k of a CUDA call, to be asked for its device and shape only."""

    is_cuda, shape, device = True, (2, TOKENS, 3), "cpu"


def test_nothing_is_kept_while_a_graph_is_captured_and_streams_do_not_share(monkeypatch):
    """A buffer of before the capture must not get into the graph: it would be given back while the graph lives."""
    state = {"capturing": False, "stream": 5}
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: state["capturing"])
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: SimpleNamespace(cuda_stream=state["stream"]))
    forward, call = Forwards().of(make_batch()), make_call(topk_idx=OnCuda())
    before = forward.workspace(call, Config())
    state["capturing"] = True
    assert forward.workspace(call, Config()) is None
    state["capturing"] = False
    assert forward.workspace(call, Config()) is before
    state["stream"] = 6
    other = forward.workspace(call, Config())
    assert not overlap(other, before)
    state["stream"] = 5
    assert forward.workspace(call, Config()) is before


def test_threads_with_batches_that_come_and_go():
    forwards, wrong = Forwards(), []

    def work(number):
        for step in range(300):
            batch = make_batch(tokens=1000 * number + step)
            forward = forwards.of(batch)
            if forward.lengths.chunks != (1000 * number + step,) or forwards.of(batch) is not forward:
                wrong.append((number, step))

    threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong
    assert len(forwards) == 0
