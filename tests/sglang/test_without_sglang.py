"""The plugin where SGLang is not installed, or is none that it knows: it tells, raises nothing, and changes nothing."""

from __future__ import annotations

import sys
import types

import pytest

from pageweaver_sglang.plugin import compat, hooks


@pytest.fixture(params=["not installed", "another program of that name"])
def sglang(request, monkeypatch):
    monkeypatch.setattr(hooks, "_installed", False)
    for name in [name for name in sys.modules if name == "sglang" or name.startswith("sglang.")]:
        monkeypatch.delitem(sys.modules, name)
    other = None if request.param == "not installed" else types.ModuleType("sglang")
    if other is not None:
        other.__version__ = "0.4.9"
    monkeypatch.setitem(sys.modules, "sglang", other)
    return request.param


def test_loading_tells_and_does_not_raise(sglang, caplog):
    hooks.install()
    (line,) = [record.getMessage() for record in caplog.records]
    assert line.startswith("pageweaver: not usable here, other backends are unaffected: ModuleNotFoundError: ")
    assert "sglang" in line


def test_a_server_would_be_refused_with_the_versions(sglang):
    message = compat.refusal(compat.verify_seams())
    found = {"not installed": "not installed", "another program of that name": "0.4.9"}[sglang]
    assert f"Found SGLang {found}; supported: 0.5.17 to 0.5.23. Install a supported version" in message
    assert ("SGLang is not installed" in message) == (sglang == "not installed")
    assert not compat.tested_version(found)
