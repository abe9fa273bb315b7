"""The kernels are built while the server starts, or the server says why not. Needs neither SGLang nor a GPU."""

from __future__ import annotations

import pytest
import torch

from pageweaver_sglang.config import Config
from pageweaver_sglang.cuda import loader
from pageweaver_sglang.plugin import kernels
from pageweaver_sglang.plugin.options import BackendError

CUDA = torch.device("cuda", 0)


@pytest.fixture
def hopper(monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    loads = []
    monkeypatch.setattr(loader, "load", lambda: loads.append(1))
    monkeypatch.setattr(loader, "is_built", lambda: False)
    return loads


def test_built_before_the_first_request(hopper):
    assert kernels.prepare(Config(), CUDA) == "built and loaded"
    assert hopper == [1]


def test_loaded_from_the_cache(hopper, monkeypatch):
    monkeypatch.setattr(loader, "is_built", lambda: True)
    assert kernels.prepare(Config(mode="union8"), CUDA) == "loaded"


def test_not_needed_for_native(hopper):
    assert kernels.prepare(Config(mode="native"), CUDA) == "not used"
    assert hopper == []


def test_other_devices_get_none(hopper, monkeypatch):
    assert "reference engine on cpu" in kernels.prepare(Config(), torch.device("cpu"))
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (10, 0))
    assert "compute capability 10.0" in kernels.prepare(Config(), CUDA)
    assert hopper == []


def test_without_a_compiler_the_server_stops_and_says_what_to_do(hopper, monkeypatch):
    def load():
        raise loader.KernelBuildError("no nvcc was found")

    monkeypatch.setattr(loader, "load", load)
    with pytest.raises(BackendError, match=r"no nvcc was found\n.*PAGEWEAVER_MODE=native"):
        kernels.prepare(Config(), CUDA)
