"""Who gets V's tiles in a server, when they are allocated, and what happens without memory. Needs no SGLang, no GPU."""

from __future__ import annotations

import logging
import threading

import pytest
import torch
from test_step3 import Native, make_call

from pageweaver_sglang.checks import UnsupportedError
from pageweaver_sglang.config import Config
from pageweaver_sglang.plugin import step3, tiles
from pageweaver_sglang.value_tiles import ValueTiles

V_CACHE = torch.zeros(384, 2, 128, dtype=torch.float8_e4m3fn)
MIB = 2 * 3 * (16384 + 4) / 2**20


class Stream:
    def __init__(self):
        self.waited = []

    def wait_stream(self, other):
        self.waited.append(other)


@pytest.fixture
def hopper(monkeypatch):
    """CPU tensors that pass for those of a Hopper GPU; ``stream`` and ``capturing`` can be set."""

    class Gpu:
        stream, capturing = Stream(), False

    monkeypatch.setattr(tiles, "_needed", lambda config, v_cache: config.engine == "stream")
    monkeypatch.setattr(tiles, "_of_pools", {})
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: Gpu.stream)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: Gpu.capturing)
    return Gpu


@pytest.fixture
def no_memory(monkeypatch):
    asked = []

    def empty(*sizes, device):
        asked.append(sizes)
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(ValueTiles, "empty", empty)
    return asked


def test_reserved_once_for_all_backends_of_a_pool(hopper):
    config, state = tiles.reserve(Config(), V_CACHE)
    assert config.engine == "stream"
    assert state == f"{MIB:,.0f} MiB"
    with tiles.taken(Config(), V_CACHE) as (served_with, first):
        assert served_with.engine == "stream"
        assert first.tiles.shape == (2, 3, 16384)
    assert tiles.reserve(Config(), V_CACHE)[1] == state
    with tiles.taken(Config(), V_CACHE) as (_, second):
        assert second is first
    with tiles.taken(Config(), V_CACHE[:256]) as (_, other):  # a pool that nobody has reserved for
        assert other.tiles.shape == (2, 2, 16384)


@pytest.mark.parametrize("settings", [{"engine": "union8"}, {"mode": "native"}])
def test_settings_that_need_none(settings, monkeypatch):
    monkeypatch.setattr(tiles, "_of_pools", {})
    config = Config(**settings)
    assert tiles.reserve(config, V_CACHE) == (config, "none")
    with tiles.taken(config, V_CACHE) as taken:
        assert taken == (config, None)
    assert tiles._of_pools == {}


@pytest.mark.parametrize(
    ("dtype", "capability", "needed"),
    [
        (torch.float8_e4m3fn, (9, 0), True),
        (torch.bfloat16, (9, 0), False),
        (torch.float8_e4m3fn, (10, 0), False),
        (torch.float8_e4m3fn, (8, 9), False),
    ],
)
def test_calls_that_the_kernels_cannot_serve_need_none(monkeypatch, dtype, capability, needed):
    class Cache:
        is_cuda, device, shape = True, "cuda:0", V_CACHE.shape

    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    Cache.dtype = dtype
    assert tiles._needed(Config(), Cache()) == needed
    assert not tiles._needed(Config(engine="union8"), Cache())
    Cache.shape = (384, 2, 64)
    assert not tiles._needed(Config(), Cache())
    assert not tiles._needed(Config(), V_CACHE)  # not on a GPU


def test_without_memory_the_other_engine_serves_and_one_line_says_so(hopper, no_memory, caplog):
    config, state = tiles.reserve(Config(window=64), V_CACHE)
    assert config == Config(window=64, engine="union8")
    assert state == f"none ({MIB:,.0f} MiB not to be had)"
    for _ in range(3):  # as the other backends of two-batch overlap do
        assert tiles.reserve(Config(), V_CACHE)[0].engine == "union8"
        with tiles.taken(Config(), V_CACHE) as (served_with, found):
            assert served_with.engine == "union8"
            assert found is None
    assert no_memory == [(2, 3)]
    (line,) = [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]
    assert "engine union8 serves instead of stream" in line
    assert "2 KV heads, 3 pages" in line


def test_without_memory_high_precision_is_sglangs_to_serve(hopper, no_memory, caplog):
    """No other engine has that precision, and SGLang's BF16 arithmetic is as exact."""
    high = Config(precision="high")
    state = f"none ({MIB:,.0f} MiB not to be had, so that SGLang serves Step 3)"
    for _ in range(3):
        assert tiles.reserve(high, V_CACHE) == (high, state)
        refused = pytest.raises(UnsupportedError, match="no value tiles, which precision high needs")
        with refused, tiles.taken(high, V_CACHE):
            pass
    assert no_memory == [(2, 3)]
    (line,) = [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]
    assert "SGLang's own Step 3 serves instead of precision high" in line


def test_a_capture_allocates_nothing(hopper):
    hopper.capturing = True
    with tiles.taken(Config(), V_CACHE) as (served_with, found):
        assert (served_with.engine, found) == ("union8", None)
    hopper.capturing = False
    tiles.reserve(Config(), V_CACHE)
    hopper.capturing = True
    with tiles.taken(Config(), V_CACHE) as (served_with, found):
        assert served_with.engine == "stream"
        assert found is not None


def test_a_turn_on_another_stream_waits_for_the_one_before(hopper):
    tiles.reserve(Config(), V_CACHE)
    first, second, capture = hopper.stream, Stream(), Stream()

    def take_turn(stream, capturing=False):
        hopper.stream, hopper.capturing = stream, capturing
        with tiles.taken(Config(), V_CACHE):
            pass

    take_turn(first)
    assert first.waited == []
    take_turn(second)
    take_turn(second)
    assert second.waited == [first]
    take_turn(capture, capturing=True)  # it may not wait for work outside of the graph
    assert capture.waited == []
    take_turn(second)
    assert second.waited == [first]


def test_turns_do_not_overlap(hopper):
    tiles.reserve(Config(), V_CACHE)
    inside, seen = [], []

    def take_turns():
        for _ in range(200):
            with tiles.taken(Config(), V_CACHE):
                inside.append(1)
                seen.append(len(inside))
                inside.pop()

    threads = [threading.Thread(target=take_turns) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert set(seen) == {1}


@pytest.mark.parametrize("memory", [True, False])
def test_step3_serves_with_them(hopper, request, monkeypatch, memory):
    if not memory:
        request.getfixturevalue("no_memory")
    seen = []
    sparse_prefill = step3.sparse_prefill

    def listen(*arguments, **options):
        seen.append((options["config"].engine, options["value_tiles"]))
        return sparse_prefill(*arguments, **options)

    monkeypatch.setattr(step3, "sparse_prefill", listen)
    served, call = step3.Step3(Config(mode="pageweaver"), pool_page_size=128), make_call()
    assert torch.equal(served(Native(), 3, call), Native()(**call))
    assert torch.equal(served(Native(), 4, call), Native()(**call))
    (engine, used), (_, again) = seen
    assert served.stats.calls_by_arm == {"pageweaver": 2}
    assert engine == ("stream" if memory else "union8")
    assert used is again
    assert (used is None) == (not memory)
