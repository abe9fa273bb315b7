"""The recorder on a GPU: order of the streams, memory, CUDA graphs captured meanwhile."""

from __future__ import annotations

import threading

import pytest
import torch

import pageweaver_sglang as pw
from pageweaver_sglang.capture import recorder as recording
from pageweaver_sglang.capture.snapshot import Snapshot
from tests.waiting import wait_for

from .calls import files, make_call, state

pytestmark = pytest.mark.gpu


@pytest.fixture
def make(tmp_path):
    if not torch.cuda.is_available():
        pytest.skip("needs a CUDA device")
    made = []

    def build(**settings):
        config = pw.Config(capture_dir=str(tmp_path), capture_activations=True, **settings)
        made.append(recording.Recorder(config, device="cuda", pool_page_size=128))
        return made[-1]

    yield build
    for one in made:
        one.close()


def test_the_copy_is_of_the_moment_of_the_call(make, tmp_path):
    recorder = make()
    call, out, lengths = make_call(((200, 5000), (30, 0)), kv_heads=4, k=16, device="cuda")
    expected = out.cpu()
    torch.cuda._sleep(100_000_000)  # the stream is busy, so that nothing below has run when offer returns
    recorder.offer(1, call, out, lengths)
    for tensor in (out, *(value for value in call.values() if isinstance(value, torch.Tensor))):
        tensor.zero_()
    recorder.close()
    (name,) = files(tmp_path)
    workload = pw.load_workload(tmp_path / name)
    assert torch.equal(workload.out, expected)
    assert torch.equal(pw.reference.sparse_prefill(**workload.attention_arguments()), expected)


def test_device_memory_is_given_back(make, tmp_path):
    recorder = make()
    call = make_call(((200, 5000),), device="cuda")
    before = torch.cuda.memory_allocated()
    for _ in range(3):
        recorder.offer(1, *call)
    assert torch.cuda.memory_allocated() > before
    recorder.close()
    assert len(files(tmp_path)) == 3
    assert torch.cuda.memory_allocated() == before


def test_too_little_memory_drops(make, tmp_path, monkeypatch):
    recorder = make()
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (0, 1))
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda device: torch.cuda.memory_allocated(device))
    recorder.offer(1, *make_call(device="cuda"))
    recorder.close()
    assert state(tmp_path)["dropped"] == {"too little device memory": 1}


def test_a_graph_can_be_captured_meanwhile(make, tmp_path, monkeypatch):
    """The writer allocates pinned memory and synchronises while another thread captures; the capture must survive."""
    capturing = threading.Event()
    original = Snapshot.workload

    def waiting(self, to_cpu):
        assert capturing.wait(30)
        return original(self, to_cpu)

    monkeypatch.setattr(Snapshot, "workload", waiting)
    recorder = make()
    call, out, lengths = make_call(((200, 5000),), device="cuda")
    buffer = torch.zeros(1000, device="cuda")
    recorder.offer(1, call, out, lengths)
    graph = torch.cuda.CUDAGraph()
    side = torch.cuda.Stream()
    with torch.cuda.graph(graph, stream=side):
        recorder.offer(1, call, out, lengths)  # inside a capture: not recorded
        for _ in range(50):
            buffer += 1
        capturing.set()
        wait_for(lambda: len(files(tmp_path)) == 1)
    graph.replay()
    torch.cuda.synchronize()
    assert buffer[0] == 50
    recorder.close()
    assert state(tmp_path)["dropped"] == {"CUDA graph capture": 1}
