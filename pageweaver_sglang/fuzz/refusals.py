"""Calls that must be refused with the documented error, made from a good one by spoiling one argument."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

import pageweaver_sglang as pw

from .build import Tensors
from .variants import E4M3, VARIANTS

Arguments = dict[str, Any]


@dataclass(frozen=True)
class Refusal:
    """``spoil`` returns the arguments to replace; the call must raise ``error`` and name ``argument`` first."""

    argument: str
    error: type[Exception]
    spoil: Callable[[Arguments], Arguments]
    hopper_only: bool = False
    """Only Hopper's kernels refuse it, of a call that they would take; the reference engine takes it."""


def _named(name: str, change: Callable[[Any], Any]) -> Callable[[Arguments], Arguments]:
    return lambda arguments: {name: change(arguments[name])}


def _value(name: str, value: Any) -> Callable[[Arguments], Arguments]:
    return lambda _: {name: value}


def _caches(dtype: torch.dtype) -> Callable[[Arguments], Arguments]:
    return lambda arguments: {name: torch.zeros_like(arguments[name], dtype=dtype) for name in ("k_cache", "v_cache")}


def _by_union8(spoil: Callable[[Arguments], Arguments]) -> Callable[[Arguments], Arguments]:
    """For what the paper's kernel alone refuses: with ``stream``, ``portable`` takes what ``stream`` doesn't."""
    return lambda arguments: {**spoil(arguments), "config": pw.Config(engine="union8")}


def _too_many_picks(arguments: Arguments) -> Arguments:
    topk_idx = arguments["topk_idx"]
    return {"topk_idx": topk_idx.new_zeros(*topk_idx.shape[:2], 17)}


def _too_many_heads(arguments: Arguments) -> Arguments:
    q = arguments["q"]
    return {"q": q[:, :1].expand(-1, 17 * q.shape[1], -1)}


def _pages_of_64(arguments: Arguments) -> Arguments:
    """With FP8 caches, of which the paper's kernel complains about nothing else."""
    return {**_caches(E4M3)(arguments), "page_size": 64}


def _cut_caches(arguments: Arguments) -> Arguments:
    return {name: arguments[name][:-1] for name in ("k_cache", "v_cache")}


def _small_workspace(arguments: Arguments) -> Arguments:
    kv_heads, tokens, k = arguments["topk_idx"].shape
    window = arguments["config"].window
    device = arguments["q"].device
    few = pw.Workspace(max(1, tokens - 1), 1, kv_heads=kv_heads, topk=k % 16 + 1, window=window, device=device)
    return {"workspace": few}


REFUSALS = {
    "q int32": Refusal("q", TypeError, _named("q", torch.Tensor.int)),
    "q of two dimensions": Refusal("q", ValueError, _named("q", lambda q: q[:, 0])),
    "q of no multiple of the KV heads": Refusal("q", ValueError, _named("q", lambda q: q[:, :0])),
    "topk_idx int64": Refusal("topk_idx", TypeError, _named("topk_idx", torch.Tensor.long)),
    "topk_idx without k": Refusal("topk_idx", ValueError, _named("topk_idx", lambda ids: ids[:, :, :0])),
    "topk_idx a list": Refusal("topk_idx", TypeError, _value("topk_idx", [[[0]]])),
    "caches of different dtypes": Refusal("v_cache", TypeError, _named("v_cache", torch.Tensor.float)),
    "caches of different sizes": Refusal("v_cache", ValueError, _named("v_cache", lambda v: v[:-128])),
    "cu_seqlens int64": Refusal("cu_seqlens", TypeError, _named("cu_seqlens", torch.Tensor.long)),
    "cu_seqlens of another length": Refusal("seq_lens", ValueError, _named("cu_seqlens", lambda x: x[:-1])),
    "prefix_lens missing": Refusal("prefix_lens", TypeError, _value("prefix_lens", None)),
    "slot_ids float": Refusal("slot_ids", TypeError, _named("slot_ids", torch.Tensor.float)),
    "req_to_token int64": Refusal("req_to_token", TypeError, _named("req_to_token", torch.Tensor.long)),
    "sm_scale text": Refusal("sm_scale", TypeError, _value("sm_scale", "1")),
    "k_scale NaN": Refusal("k_scale", ValueError, _value("k_scale", float("nan"))),
    "page_size 0": Refusal("page_size", ValueError, _value("page_size", 0)),
    "mode native": Refusal("config", ValueError, _value("config", pw.Config(mode="native"))),
    "workspace of another call": Refusal("workspace", ValueError, _small_workspace),
    "out of another dtype": Refusal("out", TypeError, lambda a: {"out": torch.zeros_like(a["q"], dtype=torch.float)}),
    "q float16": Refusal("q", pw.UnsupportedError, _named("q", torch.Tensor.half), hopper_only=True),
    "caches float16": Refusal("k_cache", pw.UnsupportedError, _caches(torch.float16), hopper_only=True),
    "caches bfloat16, union8": Refusal(
        "k_cache", pw.UnsupportedError, _by_union8(_caches(torch.bfloat16)), hopper_only=True
    ),
    "pages of 32": Refusal("page_size", pw.UnsupportedError, _value("page_size", 32), hopper_only=True),
    "pages of 64, union8": Refusal("page_size", pw.UnsupportedError, _by_union8(_pages_of_64), hopper_only=True),
    "17 picks": Refusal("topk_idx", pw.UnsupportedError, _too_many_picks, hopper_only=True),
    "17 times the heads": Refusal("q", pw.UnsupportedError, _too_many_heads, hopper_only=True),
    "a pool of no whole pages": Refusal("k_cache", pw.UnsupportedError, _cut_caches, hopper_only=True),
    "sm_scale 0": Refusal("sm_scale", pw.UnsupportedError, _value("sm_scale", 0.0), hopper_only=True),
    "table on the host": Refusal(
        "req_to_token", ValueError, _named("req_to_token", torch.Tensor.cpu), hopper_only=True
    ),
}


def possible(tensors: Tensors, variant: str) -> list[str]:
    """Names of the refusals that a call of a variant can be spoiled for."""
    hopper = tensors.arguments["q"].is_cuda and VARIANTS[variant].hopper
    return [name for name, one in REFUSALS.items() if hopper or not one.hopper_only]


def refused(tensors: Tensors, name: str) -> str | None:
    """Make a call that must be refused; returns what was wrong about the refusal, None when nothing was."""
    one = REFUSALS[name]
    arguments = {**tensors.arguments, "config": pw.Config()}
    try:
        pw.sparse_prefill(**arguments | one.spoil(arguments))
    except Exception as error:
        if type(error) is one.error and re.match(rf"sparse_prefill: {one.argument}\b", str(error)):
            return None
        return f"{name}: refused with {type(error).__name__}: {error}"
    return f"{name}: not refused"
