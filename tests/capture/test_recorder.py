"""The recorder: what it records, its bounds, its control file, and that nothing that goes wrong reaches the caller."""

from __future__ import annotations

import logging
import threading

import pytest
import torch

import pageweaver_sglang as pw
from pageweaver_sglang.capture import recorder as recording
from pageweaver_sglang.capture.control import CaptureError, Control, write_control
from pageweaver_sglang.capture.snapshot import HostLengths, Snapshot
from tests.waiting import wait_for

from .calls import files, make_call, reference_output, state


@pytest.fixture(autouse=True)
def _poll_often(monkeypatch):
    monkeypatch.setattr(recording, "POLL_SECONDS", 0.02)
    monkeypatch.setattr(recording, "_CLOSE_SECONDS", 600.0)


@pytest.fixture
def make(tmp_path):
    """A recorder with some settings; closed at the end."""
    made = []

    def build(chunk_size=None, pool_page_size=128, **settings):
        config = pw.Config(capture_dir=str(tmp_path), **{f"capture_{name}": value for name, value in settings.items()})
        made.append(recording.Recorder(config, pool_page_size=pool_page_size, chunk_size=chunk_size, rank=3))
        return made[-1]

    yield build
    for one in made:
        one.close()


@pytest.fixture
def held(monkeypatch):
    """Keep the writer thread from writing until the returned event is set."""
    go, begun = threading.Event(), threading.Event()
    original = Snapshot.workload

    def waiting(self, to_cpu):
        begun.set()
        assert go.wait(600)
        return original(self, to_cpu)

    monkeypatch.setattr(Snapshot, "workload", waiting)
    go.begun = begun
    yield go
    go.set()


def test_indices_by_default(make, tmp_path):
    recorder = make()
    call, out, lengths = make_call(((6, 200), (3, 0)))
    recorder.offer(5, call, out, lengths)
    recorder.close()
    (name,) = files(tmp_path)
    assert name.startswith("layer005-call000001-rank3-pid")
    workload = pw.load_workload(tmp_path / name)
    assert torch.equal(workload.topk_idx, call["topk_idx"])
    assert workload.seq_lens.tolist() == [206, 3]
    assert workload.layer == 5
    assert workload.q is None
    assert workload.k_pages is None
    assert state(tmp_path)["ended"] == "the server stopped"


@pytest.mark.parametrize("cache", [torch.float8_e4m3fn, torch.bfloat16])
@pytest.mark.parametrize(
    "scales",
    [
        {},
        {"sm_scale": 0.05, "k_scale": 2.0, "v_scale": 0.5},
        {"k_scale": torch.tensor([1.5]), "v_scale": torch.tensor(0.25)},
    ],
    ids=["none", "numbers", "tensors"],
)
def test_activations_replay(make, tmp_path, cache, scales):
    recorder = make(activations=True)
    call, out, lengths = make_call(((6, 900), (5, 0), (2, 3000)), cache=cache, **scales)
    recorder.offer(1, call, out, lengths)
    recorder.close()
    (name,) = files(tmp_path)
    workload = pw.load_workload(tmp_path / name)
    assert torch.equal(workload.q, call["q"])
    assert torch.equal(workload.out, out)
    replayed = pw.reference.sparse_prefill(**workload.attention_arguments())
    assert torch.equal(replayed, out)
    picked = {
        (request, page)
        for request, (first, end) in enumerate([(0, 6), (6, 11), (11, 13)])
        for page in call["topk_idx"][:, first:end].flatten().tolist()
        if page >= 0
    }
    stored = list(zip(workload.page_requests.tolist(), workload.page_ids.tolist(), strict=True))
    assert stored == sorted(picked)
    slots = [int(call["req_to_token"][call["slot_ids"][request], page * 128]) // 128 for request, page in stored]
    assert workload.page_slots.tolist() == slots


def test_what_happens_afterwards_does_not_reach_the_file(make, tmp_path, held):
    recorder = make(activations=True)
    call, out, lengths = make_call()
    expected = out.clone(), call["topk_idx"].clone()
    recorder.offer(1, call, out, lengths)
    assert held.begun.wait(600)
    for tensor in (out, *(value for value in call.values() if isinstance(value, torch.Tensor))):
        tensor.zero_()
    held.set()
    recorder.close()
    (name,) = files(tmp_path)
    workload = pw.load_workload(tmp_path / name)
    assert torch.equal(workload.out, expected[0])
    assert torch.equal(workload.topk_idx, expected[1])
    assert torch.equal(pw.reference.sparse_prefill(**workload.attention_arguments()), expected[0])


def offer(recorder, layer, prefix=0):
    recorder.offer(layer, *make_call(((2, prefix),)))


def layers_and_calls(folder):
    return [(int(name[5:8]), int(name[13:19])) for name in files(folder)]


def test_layers_and_every(make, tmp_path):
    recorder = make(layers=(1, 4), every=3)
    for _ in range(7):
        for layer in (1, 2, 4):
            offer(recorder, layer)
        wait_for(recorder._queue.empty)
    recorder.close()
    assert layers_and_calls(tmp_path) == [(layer, call) for layer in (1, 4) for call in (1, 4, 7)]


def test_chunks(make, tmp_path):
    recorder = make(chunks=(0, 2), chunk_size=1000)
    for prefix in (0, 999, 1000, 2000, 3000):
        offer(recorder, 1, prefix)
        wait_for(recorder._queue.empty)
    recorder.offer(1, *make_call(((2, 5000), (2, 2500))))
    recorder.offer(1, *make_call()[:2], None)
    recorder.close()
    assert [call for _, call in layers_and_calls(tmp_path)] == [1, 2, 4, 6]
    assert state(tmp_path)["dropped"] == {"lengths unknown on the host": 1}


def test_without_chunking_everything_is_chunk_0(make, tmp_path):
    recorder = make(chunks=(0,))
    offer(recorder, 1, 100_000)
    recorder.close()
    assert len(files(tmp_path)) == 1


def test_bound_on_calls(make, tmp_path):
    recorder = make(max_calls=2)
    for _ in range(5):
        offer(recorder, 1)
    wait_for(lambda: recorder._session is None)
    offer(recorder, 1)
    recorder.close()
    assert layers_and_calls(tmp_path) == [(1, 1), (1, 2)]
    assert state(tmp_path)["ended"] == "2 calls"


def test_bound_on_bytes_is_never_exceeded(make, tmp_path):
    recorder = make(max_mb=1, activations=True)
    for _ in range(20):
        recorder.offer(1, *make_call(((6, 1500),)))
        wait_for(lambda: recorder._queue.empty() or recorder._session is None)
    recorder.close()
    written = sum((tmp_path / name).stat().st_size for name in files(tmp_path))
    assert 0 < written <= 10**6
    assert state(tmp_path)["ended"] == "1 MB"
    assert not [path for path in tmp_path.iterdir() if path.name.startswith(".")]


def test_bound_on_time(make, tmp_path, monkeypatch):
    clock = [1000.0]
    recorder = make(max_seconds=60)
    monkeypatch.setattr(recording.Session, "begin", lambda self: setattr(self, "_deadline", clock[0] + 60))
    monkeypatch.setattr(
        recording.Session, "is_late", lambda self: self._deadline is not None and clock[0] >= self._deadline
    )
    offer(recorder, 1)
    clock[0] += 61
    offer(recorder, 1)
    wait_for(lambda: recorder._session is None)
    recorder.close()
    assert len(files(tmp_path)) == 1
    assert state(tmp_path)["ended"] == "60 seconds"


def test_the_clock_starts_with_the_first_call():
    session = recording.Session(pw.Config(capture_max_seconds=3600), None)
    assert not session.is_late()
    session.begin()
    deadline = session._deadline
    session.begin()
    assert session._deadline == deadline
    assert not session.is_late()


def test_a_full_queue_drops_and_counts(make, tmp_path, held):
    recorder = make()
    for _ in range(recording.PENDING_CALLS + 4):
        offer(recorder, 1)
        assert held.begun.wait(600)  # the writer has taken the first one
    held.set()
    recorder.close()
    assert len(files(tmp_path)) == recording.PENDING_CALLS + 1
    assert state(tmp_path)["dropped"] == {"queue full": 3}


def test_empty_calls_are_passed_over(make, tmp_path):
    recorder = make()
    call, out, lengths = make_call()
    recorder.offer(1, call | {"q": call["q"][:0]}, out[:0], lengths)
    recorder.close()
    assert files(tmp_path) == []
    assert state(tmp_path)["dropped"] == {}


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"sink": torch.zeros(32)}, "sink"),
        ({"loc_mapping": torch.zeros(4, dtype=torch.int64)}, "loc_mapping"),
        ({"q_scale": 0.5}, "q_scale"),
    ],
)
def test_what_would_not_replay_is_recorded_without_activations(make, tmp_path, changes, reason):
    recorder = make(activations=True)
    call, out, lengths = make_call()
    recorder.offer(1, call | changes, out, lengths)
    recorder.close()
    (name,) = files(tmp_path)
    assert pw.load_workload(tmp_path / name).q is None
    assert state(tmp_path)["indices_only"] == {reason: 1}


def test_other_reasons_for_indices_only(make, tmp_path):
    call, out, lengths = make_call()
    recorder = make(activations=True)
    recorder.offer(1, call, out, None)
    recorder.offer(1, call, out, HostLengths((0, 0), (1, 1)))
    recorder.offer(1, call | {"q": call["q"].half()}, out, lengths)
    recorder.offer(1, call | {"k_cache": call["k_cache"].to(torch.float8_e5m2)}, out, lengths)
    recorder.close()
    assert state(tmp_path)["indices_only"] == {
        "lengths unknown on the host": 2,
        "Q or output not BF16": 1,
        "k_cache neither FP8 E4M3 nor BF16": 1,
    }
    assert len(files(tmp_path)) == 4


def test_pools_with_small_pages_have_no_whole_pages(make, tmp_path):
    recorder = make(activations=True, pool_page_size=64)
    recorder.offer(1, *make_call())
    recorder.close()
    assert state(tmp_path)["indices_only"] == {"pages not contiguous in the pool": 1}


def test_calls_with_query_blocks_are_dropped(make, tmp_path):
    recorder = make()
    call, out, lengths = make_call(block_size_q=16)
    recorder.offer(1, call, out, lengths)
    recorder.close()
    assert state(tmp_path)["dropped"] == {"block_size_q": 1}


def test_queries_that_picked_nothing(make, tmp_path):
    recorder = make(activations=True)
    call, _, lengths = make_call()
    call["topk_idx"].fill_(-1)
    recorder.offer(1, call, reference_output(call), lengths)
    recorder.close()
    (name,) = files(tmp_path)
    assert pw.load_workload(tmp_path / name).page_ids is None


def test_wrong_lengths_of_the_host_are_noticed(make, tmp_path, caplog):
    recorder = make(activations=True)
    call, out, _ = make_call()
    recorder.offer(1, call, out, HostLengths((20,), (6,)))
    recorder.close()
    assert files(tmp_path) == []
    assert state(tmp_path)["dropped"] == {"error: ValueError": 1}
    assert "the lengths that the host knew are not those on the device" in caplog.text


def test_nothing_reaches_the_caller(make, tmp_path, caplog):
    recorder = make()
    for _ in range(3):
        recorder.offer(1, {"q": torch.zeros(1, 1)}, torch.zeros(1), None)
    recorder.offer(1, {}, torch.zeros(1), None)
    offer(recorder, 1)
    recorder.close()
    assert len(files(tmp_path)) == 1
    assert state(tmp_path)["dropped"] == {"error: KeyError": 4}
    assert len([record for record in caplog.records if record.levelno == logging.WARNING]) == 2, "logged once each"


def test_a_full_disk_ends_the_recording(make, tmp_path, monkeypatch):
    def full(self, path, compress=True):
        path.write_bytes(b"half a file")
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(pw.Workload, "save", full)
    recorder = make()
    offer(recorder, 1)
    wait_for(lambda: recorder._session is None)
    offer(recorder, 1)
    recorder.close()
    assert not list(tmp_path.glob("*.npz"))
    assert not list(tmp_path.glob(".layer*"))
    assert state(tmp_path)["ended"] == "OSError: No space left on device"


def test_control_file(make, tmp_path):
    recorder = make(layers=(9,))
    offer(recorder, 1)
    write_control(tmp_path, Control(True, {"capture_layers": [1], "capture_max_calls": 2}))
    wait_for(lambda: recorder._session is not None and recorder._session.config.capture_layers == (1,))
    offer(recorder, 1)
    wait_for(lambda: len(files(tmp_path)) == 1)
    write_control(tmp_path, Control(False, {}))
    wait_for(lambda: recorder._session is None)
    offer(recorder, 1)
    write_control(tmp_path, Control(True, {"capture_layers": [1]}))
    wait_for(lambda: recorder._session is not None)
    offer(recorder, 1)
    wait_for(lambda: len(files(tmp_path)) == 2)
    wait_for(lambda: state(tmp_path)["calls"] == 1)
    assert state(tmp_path)["recording"]
    assert layers_and_calls(tmp_path) == [(1, 2), (1, 3)]  # numbers go on, so that no file is written over
    (tmp_path / "control.json").unlink()  # back to the settings of the start
    wait_for(lambda: recorder._session is not None and recorder._session.config.capture_layers == (9,))


def test_what_was_taken_before_it_was_switched_off_is_written(make, tmp_path, held):
    recorder = make()
    offer(recorder, 1)
    offer(recorder, 1)
    assert held.begun.wait(600)
    write_control(tmp_path, Control(False, {}))
    held.set()
    wait_for(lambda: recorder._session is None)
    recorder.close()
    assert len(files(tmp_path)) == 2
    assert state(tmp_path)["ended"] == "switched off"


def test_a_server_can_start_idle(make, tmp_path):
    write_control(tmp_path, Control(False, {}))
    recorder = make()
    offer(recorder, 1)
    wait_for(lambda: list(tmp_path.glob("state-*.json")) != [])
    assert state(tmp_path)["ended"] == "never switched on"
    write_control(tmp_path, Control(True, {}))
    wait_for(lambda: recorder._session is not None)
    offer(recorder, 1)
    recorder.close()
    assert len(files(tmp_path)) == 1


def test_a_broken_control_file_changes_nothing(make, tmp_path, caplog):
    recorder = make()
    session = recorder._session
    (tmp_path / "control.json").write_text("{")
    wait_for(lambda: "going on as before" in caplog.text)
    assert recorder._session is session
    (tmp_path / "control.json").write_text('{"enabled": true, "settings": {"capture_every": 0}}')
    wait_for(lambda: "capture_every: got 0; allowed: an integer >= 1" in caplog.text)
    assert recorder._session is session
    offer(recorder, 1)
    recorder.close()
    assert len(files(tmp_path)) == 1


def test_a_broken_control_file_at_the_start(tmp_path):
    (tmp_path / "control.json").write_text("[]")
    with pytest.raises(CaptureError, match="must hold enabled and settings"):
        recording.Recorder(pw.Config(capture_dir=str(tmp_path)), pool_page_size=128)


@pytest.mark.parametrize("folder", ["file/inside", "~no-such-user/x", "nul\0"])
def test_folders_that_cannot_be(tmp_path, folder):
    (tmp_path / "file").touch()
    path = folder if folder.startswith("~") else str(tmp_path / folder)
    with pytest.raises(CaptureError, match=r"^capture_dir: .*: cannot be written"):
        recording.Recorder(pw.Config(capture_dir=path), pool_page_size=128)


def test_recorders_of_one_process_do_not_meet(make, tmp_path):
    first, second = make(), make()
    for recorder in (first, second):
        offer(recorder, 1)
        recorder.close()
    assert len(files(tmp_path)) == 2
    assert len(list(tmp_path.glob("state-*.json"))) == 2


def test_a_writer_that_fails_ends_the_recording(make, tmp_path, monkeypatch, caplog):
    recorder = make()
    monkeypatch.setattr(recorder, "_poll", lambda: 1 / 0)
    wait_for(lambda: recorder._session is None)
    offer(recorder, 1)
    recorder.close()
    assert "the writer stopped" in caplog.text
    assert state(tmp_path)["ended"] == "the writer stopped"
