"""A dense backend that makes SGLang choose another page size stops the server. Needs no SGLang."""

from __future__ import annotations

import types

import pytest

from pageweaver_sglang.plugin import compat, options


@pytest.fixture
def resolved(monkeypatch):
    """Server arguments as SGLang resolved them, of a model with sparse layers."""
    monkeypatch.setattr(compat, "hf_config_of", lambda server_args: object())
    monkeypatch.setattr(compat, "get_fields", lambda server_args, *names: [getattr(server_args, n) for n in names])
    monkeypatch.setattr(compat, "set_fields", lambda server_args, **fields: vars(server_args).update(fields))
    monkeypatch.setattr(options, "check_model", lambda hf_config: None)
    # Without prefill CUDA graphs, which have tests of their own.
    graphs = types.SimpleNamespace(prefill=types.SimpleNamespace(backend="disabled"))
    fields = {"attention_backend": "flashmla", "cuda_graph_config": graphs}
    return lambda page_size: types.SimpleNamespace(**fields, page_size=page_size)


def test_the_page_size_that_the_dense_backend_forced(resolved):
    server_args = resolved(64)
    with pytest.raises(options.BackendError, match=r"dense backend 'flashmla' made SGLang choose --page-size 64.* 128"):
        options.after_resolution(server_args)
    assert not hasattr(server_args, "prefill_attention_backend")


def test_the_right_page_size(resolved):
    server_args = resolved(128)
    options.after_resolution(server_args)
    assert server_args.prefill_attention_backend == "pageweaver"
