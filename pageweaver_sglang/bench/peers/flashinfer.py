"""FlashInfer's paged attention over one page list per query, by its XQA decode kernel and by its FA2 prefill kernel.

Written for the versions named in :mod:`pageweaver_sglang.flashinfer.xqa`, whose signatures agree in what is used here.
"""

from __future__ import annotations

import statistics
import time
from abc import abstractmethod
from collections.abc import Sequence
from typing import Any

import torch

from pageweaver_sglang.flashinfer import xqa

from ..inputs import HEAD_DIM, Step3Inputs
from ..protocol import Arm, ArmUnavailable, first_line
from .page_tables import PageTables

_MIB = 1 << 20


class _FlashInferArm(Arm):
    """What both kernels share: one call per KV head, since a request has one page list for all its KV heads."""

    def prepare(self, sets: Sequence[Step3Inputs]) -> None:
        """Find FlashInfer, make buffers, and build or load its kernel by a first call."""
        try:
            self._load()
        except xqa.FlashInferError as error:
            raise ArmUnavailable(str(error)) from error
        first = sets[0]
        self._sets = sets
        self._tables = [PageTables(s) for s in sets]
        self._kv_heads, self._ratio = first.topk_idx.shape[0], first.heads_per_kv_head
        # Zeros: nobody writes padding rows.
        self._out = torch.zeros_like(first.q, memory_format=torch.contiguous_format)
        # Of one KV head: the kernels want contiguous outputs, which a slice of several heads isn't.
        self._part = torch.empty(len(first.q), self._ratio, HEAD_DIM, dtype=first.q.dtype, device=first.q.device)
        try:
            self._ready()
            self.call(0)
            torch.cuda.synchronize()
        except Exception as error:  # its builds and checks raise anything
            raise ArmUnavailable(f"FlashInfer fails on this input ({first_line(error)})") from error

    def call(self, index: int) -> torch.Tensor:
        """Page lists, then attention, KV head by KV head."""
        s, tables = self._sets[index], self._tables[index]
        used = slice(0, tables.tokens)
        for head in range(self._kv_heads):
            heads = slice(head * self._ratio, (head + 1) * self._ratio)
            pages = tuple(
                cache.unflatten(0, (-1, s.page_size))[:, :, head : head + 1] for cache in (s.k_cache, s.v_cache)
            )
            alone = self._kv_heads == 1
            out = (self._out if alone else self._part)[used]
            self._attend(tables, head, s.q[used, heads], pages, out)
            if not alone:
                self._out[used, heads] = out
        return self._out

    def notes(self) -> dict[str, Any]:
        """Whether the page lists needed sorting."""
        return {"rows_sorted_in_call": not self._tables[0].ascending}

    def release(self) -> None:
        """Free the buffers."""
        for name in ("_sets", "_tables", "_out", "_part"):
            self.__dict__.pop(name, None)

    @abstractmethod
    def _load(self) -> None:
        """Import FlashInfer's function. Raises :class:`~pageweaver_sglang.flashinfer.xqa.FlashInferError`."""

    @abstractmethod
    def _ready(self) -> None:
        """Make what the function needs beside the inputs."""

    @abstractmethod
    def _attend(
        self, tables: PageTables, head: int, q: torch.Tensor, pages: tuple[torch.Tensor, ...], out: torch.Tensor
    ) -> None:
        """Attention of one KV head's queries ``q`` over its ``pages``, into ``out``."""


class XqaArm(_FlashInferArm):
    """``xqa_batch_decode_with_kv_cache``: every query a decode request of its own. FP8 arithmetic, no host plan."""

    name = "flashinfer-xqa"
    description = "FlashInfer's XQA decode kernel, one request per query; page lists built in the call"
    # How it scales what it rounds to FP8 is its own affair; a wrong page list is off by far more.
    max_nrms = 0.12

    def _load(self) -> None:
        self._function = xqa.load()

    def _ready(self) -> None:
        self._workspace = xqa.workspace(self._out.device)

    def _attend(
        self, tables: PageTables, head: int, q: torch.Tensor, pages: tuple[torch.Tensor, ...], out: torch.Tensor
    ) -> None:
        table, count, tail = tables.build(head)
        lengths = tables.tokens_of(count, tail)
        space = self._workspace
        xqa.attend(self._function, q, pages, table, lengths, out, scale=HEAD_DIM**-0.5, workspace=space)

    def release(self) -> None:
        """Free the buffers."""
        super().release()
        self.__dict__.pop("_workspace", None)


class Fa2Arm(_FlashInferArm):
    """``BatchPrefillWithPagedKVCacheWrapper`` with its FA2 kernel: every query a request of one token. BF16 arithmetic.

    Its plan is made on the host from the *numbers* of pages. Those hold for all layers of a chunk as long as every
    query has as many pages in each; so it is made once, timed apart, and the call overwrites the page indices.
    """

    name = "flashinfer-fa2"
    description = "FlashInfer's FA2 paged prefill, one request per query; page lists built in the call, host plan apart"
    max_nrms = 0.02

    def _load(self) -> None:
        self._wrapper_class = xqa.import_module("flashinfer.prefill").BatchPrefillWithPagedKVCacheWrapper

    def _ready(self) -> None:
        self._float_space = torch.empty(128 * _MIB, dtype=torch.uint8, device=self._out.device)
        self._plans = [self._plan(head) for head in range(self._kv_heads)]
        self.call(0)  # builds the kernel
        seconds = []
        for _ in range(3):
            torch.cuda.synchronize()
            start = time.perf_counter()
            self._plans = [self._plan(head) for head in range(self._kv_heads)]
            torch.cuda.synchronize()
            seconds.append(time.perf_counter() - start)
        self._plan_ms = statistics.median(seconds) * 1e3

    def _plan(self, head: int) -> tuple[Any, torch.Tensor, torch.Tensor]:
        """A planned wrapper, the indices buffer that it reads, and where in the table each index stands."""
        table, count, tail = self._tables[0].build(head)
        tokens, k = table.shape
        filled = torch.arange(k, device=table.device) < count[:, None]
        places = filled.flatten().nonzero().flatten()
        indices = table.flatten()[places]
        start = torch.zeros(tokens + 1, dtype=torch.int32, device=table.device)
        start[1:] = count.cumsum(0)
        wrapper = self._wrapper_class(self._float_space, "NHD", backend="fa2")
        wrapper.plan(
            torch.arange(tokens + 1, dtype=torch.int32, device=table.device),
            start,
            indices,
            tail,
            self._ratio,
            1,
            HEAD_DIM,
            self._sets[0].page_size,
            causal=False,
            sm_scale=HEAD_DIM**-0.5,
            q_data_type=self._out.dtype,
            kv_data_type=self._sets[0].k_cache.dtype,
            disable_split_kv=True,
        )
        return wrapper, wrapper._paged_kv_indices_buf, places

    def _attend(
        self, tables: PageTables, head: int, q: torch.Tensor, pages: tuple[torch.Tensor, ...], out: torch.Tensor
    ) -> None:
        wrapper, indices, places = self._plans[head]
        table, _, _ = tables.build(head)
        torch.index_select(table.flatten(), 0, places, out=indices)
        wrapper.run(q, pages, out=out)

    def notes(self) -> dict[str, Any]:
        """The host plan's time, which the call does not contain."""
        return {**super().notes(), "plan_ms": self._plan_ms}

    def release(self) -> None:
        """Free the buffers and the plans."""
        super().release()
        for name in ("_float_space", "_plans"):
            self.__dict__.pop(name, None)
