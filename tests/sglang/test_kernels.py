"""The kernels are built while the server starts, or the server says why not. Needs neither SGLang nor a GPU."""

from __future__ import annotations

import pytest
import torch

from pageweaver_sglang.config import Config
from pageweaver_sglang.cuda import loader
from pageweaver_sglang.cuda.support import CallKind
from pageweaver_sglang.plugin import kernels
from pageweaver_sglang.plugin.options import BackendError

CUDA = torch.device("cuda", 0)


@pytest.fixture
def hopper(monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    loads = []
    monkeypatch.setattr(loader, "load", loads.append)
    monkeypatch.setattr(loader, "is_built", lambda architecture: False)
    return loads


def test_built_before_the_first_request(hopper):
    assert kernels.prepare(Config(), CUDA) == "built and loaded"
    assert hopper == ["sm_90a"]


def test_loaded_from_the_cache(hopper, monkeypatch):
    monkeypatch.setattr(loader, "is_built", lambda architecture: True)
    assert kernels.prepare(Config(mode="union8"), CUDA) == "loaded"


def test_not_needed_for_native(hopper):
    assert kernels.prepare(Config(mode="native"), CUDA) == "not used"
    assert hopper == []


def test_other_devices_get_none(hopper, monkeypatch):
    assert "reference engine on cpu" in kernels.prepare(Config(), torch.device("cpu"))
    assert hopper == []


@pytest.mark.parametrize(
    ("capability", "engine", "architecture", "serves"),
    [
        ((9, 0), "stream", "sm_90a", "stream"),
        ((9, 0), "portable", "sm_90a", "portable"),
        ((8, 0), "stream", "sm_80", "portable"),
        ((12, 0), "union8", "sm_120", "portable"),
        ((10, 0), "portable", "sm_100", "portable"),
    ],
)
def test_every_gpu_gets_its_library_and_its_engine(hopper, monkeypatch, capability, engine, architecture, serves):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    config = Config(engine=engine)
    assert kernels.prepare(config, CUDA) == "built and loaded"
    assert hopper == [architecture]
    assert kernels.settings_on(config, CUDA) == Config(engine=serves)
    assert kernels.settings_on(config, torch.device("cpu")) is config
    native = Config(mode="native", engine=engine)
    assert kernels.settings_on(native, CUDA) is native


@pytest.mark.parametrize(
    ("kind", "engine", "serves"),
    [
        (CallKind(torch.float8_e4m3fn, 128, 128), "stream", "stream"),
        (CallKind(torch.bfloat16, 128, 128), "stream", "stream"),
        (CallKind(torch.bfloat16, 64, 128), "stream", "portable"),
        (CallKind(torch.bfloat16, 128, 128), "union8", "union8"),  # and every call is SGLang's
        (CallKind(torch.bfloat16, 128, 128), "portable", "portable"),
        (CallKind(torch.bfloat16, 96, 128), "stream", "stream"),  # likewise
    ],
)
def test_a_hopper_serves_a_pool_by_what_covers_its_calls(hopper, caplog, kind, engine, serves):
    caplog.set_level("INFO")
    assert kernels.settings_on(Config(engine=engine, precision="fp8"), CUDA, kind) == Config(engine=serves)
    said = f"engine {serves} serves instead of {engine}: KV cache bfloat16, head_dim 64, page size 128"
    assert (said in caplog.text) == (serves != engine)


@pytest.mark.parametrize(("head_dim", "engine"), [(128, "stream"), (64, "portable")])
def test_high_precision_of_a_bf16_cache(hopper, head_dim, engine):
    """Both compute in 16 bits, so that they keep what was asked for."""
    kind = CallKind(torch.bfloat16, head_dim, 128)
    high = Config(engine=engine, precision="high")
    assert kernels.settings_on(Config(precision="high"), CUDA, kind) == high


@pytest.mark.parametrize(
    ("capability", "why"), [((10, 0), "faster than unions"), ((10, 3), "faster than unions"), ((7, 5), "need 8.0")]
)
def test_gpus_that_sglang_serves(hopper, monkeypatch, capability, why):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    state = kernels.prepare(Config(), CUDA)
    assert state.startswith("none (the GPU has compute capability {}.{}".format(*capability))
    assert why in state
    assert "every call goes to SGLang's Step 3" in state
    assert hopper == []
    config = Config()
    assert kernels.settings_on(config, CUDA) is config


def test_without_a_compiler_the_server_stops_and_says_what_to_do(hopper, monkeypatch):
    def load(architecture):
        raise loader.KernelBuildError("no nvcc was found")

    monkeypatch.setattr(loader, "load", load)
    with pytest.raises(BackendError, match=r"no nvcc was found\n.*PAGEWEAVER_MODE=native"):
        kernels.prepare(Config(), CUDA)
