"""One Step 3 call: attention over the pages that the indexer picked, by PageWeaver or by SGLang's own function."""

from __future__ import annotations

import contextlib
import contextvars
import functools
import importlib
import inspect
import logging
import math
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from types import ModuleType
from typing import Any

import torch

from pageweaver_sglang.api import sparse_prefill
from pageweaver_sglang.auto.history import Decision, History
from pageweaver_sglang.capture.recorder import Recorder
from pageweaver_sglang.checks import UnsupportedError
from pageweaver_sglang.config import Config

from . import compat, tiles
from .arguments import sparse_prefill_arguments
from .fallback import XQA, XqaFallback
from .forwards import Forward
from .operations import Switch
from .timing import Step3Timer

logger = logging.getLogger(__name__)

_COMPARED_TOKENS = 1024
"""Tokens that a comparison takes to float64 at a time: 67 MB for 64 heads of 128."""

MAX_REASONS = 32
"""Reasons for fallbacks that are counted and logged apart; those beyond are one reason, :data:`OTHER_REASONS`."""

OTHER_REASONS = "other reasons"

Native = Callable[..., torch.Tensor]

Observe = Callable[[str, str | None, float], None]
"""Takes a figure for a histogram: its name, the value of its label, the figure."""

_KNOWN_ARGUMENTS = compat.STEP3_PARAMETERS | compat.STEP3_OPTIONAL_PARAMETERS


@dataclass
class Stats:
    """What happened to the Step 3 calls of one backend."""

    calls: int = 0
    calls_by_arm: Counter[str] = field(default_factory=Counter)
    """``pageweaver``, ``union8``, ``flashinfer-xqa`` or ``native``: what was done; mode ``auto`` does one of the first
    two."""
    tokens_by_arm: Counter[str] = field(default_factory=Counter)
    calls_by_layer: Counter[int] = field(default_factory=Counter)
    """Calls that PageWeaver's own kernels served, by layer id."""
    fallbacks_by_reason: Counter[str] = field(default_factory=Counter)
    decisions: Counter[str] = field(default_factory=Counter)
    """Of mode ``auto``, by :attr:`.Decision.reason`."""
    measured_visits: Counter[str] = field(default_factory=Counter)
    """Page visits of the calls that mode ``auto`` measured, see :attr:`.History.visits`."""
    captured_calls: int = 0
    """Calls by PageWeaver that a CUDA graph has captured: replays run them again without any of this being asked."""
    last_verification: Verification | None = None

    def summary(self) -> str:
        """One line: calls served by layer, fallbacks to SGLang by reason, and FlashInfer's calls if there are any."""
        by_layer = dict(sorted(self.calls_by_layer.items()))
        xqa = f" {XQA} calls: {self.calls_by_arm[XQA]}" if XQA in self.calls_by_arm else ""
        decisions = f" decisions: {dict(self.decisions)}" if self.decisions else ""
        return f"pageweaver calls: {by_layer} fallbacks: {dict(self.fallbacks_by_reason)}{xqa}{decisions}"


@dataclass(frozen=True)
class Verification:
    """How far PageWeaver's output is from SGLang's, over the rows where SGLang's is finite."""

    nrms: float
    """Root mean square of the difference, divided by that of SGLang's output."""
    max_error: float
    cosine: float
    skipped_rows: int
    """Tokens for which SGLang's own output is not finite (nothing visible), left out of the figures."""

    def __str__(self) -> str:
        skipped = f" skipped rows {self.skipped_rows}" if self.skipped_rows else ""
        return f"nrms {self.nrms:.3%} max error {self.max_error:.3e} cosine {self.cosine:.6f}{skipped}"


class Step3:
    """Serves the Step 3 calls of one backend.

    Buffers: the layers of a forward pass share those of the order and the plan (:mod:`.forwards`), which live as long
    as the pass. The output comes from PyTorch's caching allocator: it is SGLang's from then on. Nothing outlives the
    pass, for a kept buffer could never grow again once a CUDA graph holds it; V's tiles alone are kept, because memory
    of the size of the KV pool must be there before requests come (:mod:`.tiles`).

    Args:
        config: the settings; ``mode``, ``verify_every`` and what ``sparse_prefill`` reads.
        pool_page_size: tokens per page of SGLang's KV pool.
        recorder: what records calls, in every mode; None records nothing.
        timer: what times calls, in every mode, while the switch asks for it; None times nothing.
        switch: whether PageWeaver may serve, shared by the backends of a process; None makes one of its own.
        observe: where figures for histograms go; None drops them.
        fallback: who is asked for calls that the kernels don't cover, before SGLang; None asks nobody.
    """

    def __init__(
        self,
        config: Config,
        *,
        pool_page_size: int,
        recorder: Recorder | None = None,
        timer: Step3Timer | None = None,
        switch: Switch | None = None,
        observe: Observe | None = None,
        fallback: XqaFallback | None = None,
    ):
        self.config = config
        self.pool_page_size = pool_page_size
        self.recorder = recorder
        self.timer = timer
        self.switch = Switch() if switch is None else switch
        self.observe = observe
        self.fallback = fallback
        self.stats = Stats()
        self._history: History | None = None
        self._first_layer = 1 << 30
        self._logged: set[str] = set()

    def __call__(
        self, native: Native, layer_id: int, call: dict[str, Any], forward: Forward | None = None
    ) -> torch.Tensor:
        """Serve one call.

        Args:
            native: SGLang's ``flash_prefill_with_gqa_share_sparse``.
            layer_id: the model layer, for the counters.
            call: its arguments by name.
            forward: the forward pass; None for a call that belongs to none.

        Returns:
            ``[tokens, q_heads, head_dim]``, as SGLang's function would return it.
        """
        if self.timer is None or not self.switch.timing:
            out = self._serve(native, layer_id, call, forward)
        else:
            out = self.timer.time(layer_id, call["q"].shape[0], lambda: self._serve(native, layer_id, call, forward))
        if self.recorder is not None:
            self.recorder.offer(layer_id, call, out, None if forward is None else forward.lengths)
        return out

    def _serve(self, native: Native, layer_id: int, call: dict[str, Any], forward: Forward | None) -> torch.Tensor:
        stats = self.stats
        stats.calls += 1
        if self.config.mode == "native":
            return self._hand_back(native, layer_id, call)
        # Reasons of the switch are logged by the switch.
        reason = self.switch.reason
        if reason is None:
            try:
                reason, out, arm = self._attend(layer_id, call, forward)
            except UnsupportedError as error:
                reason = str(error)
            except Exception as error:
                if self.config.on_error == "raise":
                    raise
                self.switch.trip(error)
                # The message can differ from call to call, so only the type is counted.
                self._count_fallback(f"error: {type(error).__name__}")
                return self._hand_back(native, layer_id, call)
            if reason is not None:
                reason = self._bounded(reason)
                self._log_once(f"SGLang's own Step 3 serves calls with: {reason}")
        if reason is not None:
            self._count_fallback(reason)
            return self._hand_back(native, layer_id, call)
        if arm != XQA:
            if not stats.calls_by_layer:
                tokens = call["q"].shape[0]
                logger.info("pageweaver: serving Step 3 (first call: layer %d, %d tokens)", layer_id, tokens)
            stats.calls_by_layer[layer_id] += 1
        self._count(arm, layer_id, call)
        logger.debug("pageweaver: layer %d call %d tokens %d", layer_id, stats.calls, out.shape[0])
        if _capturing(out):
            stats.captured_calls += 1
        elif self._to_verify():
            self._verify(out, native, layer_id, call)
        return out

    def check_padding(self, layer_id: int, out: torch.Tensor, lengths: Sequence[int] | None) -> None:
        """Where the last call was one to verify, log how many padding rows the layers behind will get, all zero or not.

        Batches are padded for collective operations (DP attention). SGLang cuts such rows off before Step 3 and puts
        zeros there afterwards, so that this looks at what its whole attention returns. Synchronises the device.

        Args:
            layer_id: the model layer.
            out: what SGLang's ``forward_extend`` returns, ``[rows, q_heads * head_dim]``.
            lengths: new tokens of each request, the real rows; None where the host does not know them.
        """
        if self.config.mode == "native" or not self._to_verify() or lengths is None or _capturing(out):
            return
        tokens = sum(lengths)
        if rows := out.shape[0] - tokens:
            not_zero = int(out[tokens:].ne(0).any(dim=1).sum())
            logger.info("pageweaver padding: layer %d rows %d not zero %d", layer_id, rows, not_zero)

    def tell_missed(self) -> None:
        """Say, once, that a prefill's Step 3 went elsewhere: something has taken the place of the router since."""
        if "missed" in self._logged:
            return
        self._logged.add("missed")
        found = getattr(importlib.import_module(compat.STEP3_MODULE), compat.STEP3_NAME, None)
        logger.error(
            "pageweaver: a prefill did not come to PageWeaver: %s.%s is now %s of %s. Another plugin or package has "
            "replaced it after the server's start, and serves instead.",
            compat.STEP3_MODULE,
            compat.STEP3_NAME,
            getattr(found, "__qualname__", found),
            getattr(found, "__module__", "an unknown module"),
        )

    def _to_verify(self) -> bool:
        return self.config.verify_every > 0 and self.stats.calls % self.config.verify_every == 0

    def _hand_back(self, native: Native, layer_id: int, call: dict[str, Any]) -> torch.Tensor:
        self._count("native", layer_id, call)
        return native(**call)

    def _count(self, arm: str, layer_id: int, call: dict[str, Any]) -> None:
        tokens = call["q"].shape[0]
        self.stats.calls_by_arm[arm] += 1
        self.stats.tokens_by_arm[arm] += tokens
        # Once per forward pass: the layers come in ascending order.
        if layer_id <= self._first_layer:
            self._first_layer = layer_id
            if self.observe is not None:
                self.observe("prefill_tokens", arm, tokens)

    def _count_fallback(self, reason: str) -> None:
        self.stats.fallbacks_by_reason[self._bounded(reason)] += 1

    def _bounded(self, reason: str) -> str:
        known = self.stats.fallbacks_by_reason
        return reason if reason in known or len(known) < MAX_REASONS else OTHER_REASONS

    def _attend(
        self, layer_id: int, call: dict[str, Any], forward: Forward | None
    ) -> tuple[str | None, torch.Tensor | None, str]:
        """Serve a call: (None, output, who served), or (why neither the kernels nor the fallback do, None, "")."""
        reason = self._foreign(call)
        if reason is not None:
            return reason, None, ""
        reason = self._uncovered(call)
        if reason is None:
            decision, arm = self._decide(layer_id, call, forward), self.config.mode
            if arm == "auto":
                arm = "pageweaver" if decision is not None and decision.regroup else "union8"
            return None, self._weave(call, forward, decision), arm
        if self.fallback is None:
            return reason, None, ""
        also = self.fallback.unsupported_reason(call)
        if also is not None:
            self._log_once(f"{XQA} does not cover calls with: {reason} ({also})")
            return reason, None, ""
        out = self.fallback(call)
        self._log_once(f"{XQA} serves calls with: {reason}")
        return None, out, XQA

    def _foreign(self, call: dict[str, Any]) -> str | None:
        """Why nobody but SGLang serves this call, or None. Reads shapes, dtypes and None-ness only."""
        if call["q"].shape[0] == 0:
            return None
        if unknown := sorted(
            name for name, value in call.items() if value is not None and name not in _KNOWN_ARGUMENTS
        ):
            return f"unknown argument {', '.join(unknown)}"
        if call["block_size_q"] != 1:
            return f"block_size_q {call['block_size_q']} (only 1: every query picks its own pages)"
        if call["sink"] is not None:
            return "attention sink"
        if call.get("loc_mapping") is not None:
            return "HiSparse slot remapping (loc_mapping)"
        if call.get("q_scale") not in (None, 1.0):
            return "q_scale (FP8 queries)"
        if call["q"].dtype == torch.float8_e4m3fn:  # SGLang quantises them with trtllm_mha on SM100
            return "q must be bfloat16, got float8_e4m3fn"
        return None

    def _uncovered(self, call: dict[str, Any]) -> str | None:
        """Why the kernels do not cover this call, or None. Reads shapes, dtypes and strides only."""
        if call["q"].shape[0] == 0 or call["q"].device.type != "cuda":
            return None  # no tokens need no kernel, and the reference engine takes any shape and dtype
        from pageweaver_sglang.cuda.support import unsupported_reason

        return unsupported_reason(
            call["q"],
            call["k_cache"],
            call["v_cache"],
            call["topk_idx"],
            page_size=call["block_size_k"],
            engine=self.config.engine,
            pool_page_size=self.pool_page_size,
            sm_scale=call.get("sm_scale"),
            k_scale=call.get("k_scale"),
        )

    def _decide(self, layer_id: int, call: dict[str, Any], forward: Forward | None) -> Decision | None:
        """What mode ``auto`` does with this call; None in other modes, and for a call without tokens."""
        topk_idx, requests = call["topk_idx"], call["cu_seqlens"].shape[0] - 1
        if self.config.mode != "auto" or topk_idx.shape[1] == 0:
            return None
        if self._history is None:
            # Not before: what serves in the end (`engine`) is known once the server has started.
            heads = call["q"].shape[1] // max(call["k_cache"].shape[1], 1)
            self._history = History(self.config, page_size=call["block_size_k"], heads_per_kv_head=max(heads, 1))
            self.stats.measured_visits = self._history.visits
        lengths = None if forward is None else forward.lengths
        if lengths is not None and len(lengths.chunks) != requests:
            lengths = None
        decision = self._history.decide(layer_id, topk_idx, lengths)
        self.stats.decisions[decision.reason] += 1
        logger.debug("pageweaver: auto: layer %d tokens %d: %s", layer_id, topk_idx.shape[1], decision)
        return decision

    def _weave(self, call: dict[str, Any], forward: Forward | None, decision: Decision | None) -> torch.Tensor:
        q = call["q"]
        if q.shape[0] == 0:  # an idle data-parallel rank; SGLang's own launch would be empty as well
            dtype = torch.bfloat16 if q.dtype == torch.float8_e4m3fn else q.dtype  # as SGLang's function has it
            return q.new_empty(0, q.shape[1], call["v_cache"].shape[-1], dtype=dtype)
        with tiles.taken(self.config, call["v_cache"]) as (config, value_tiles):
            return sparse_prefill(
                **sparse_prefill_arguments(call),
                config=config,
                workspace=None if forward is None else forward.workspace(call, config),
                value_tiles=value_tiles,
                decision=decision,
            )

    def _verify(self, out: torch.Tensor, native: Native, layer_id: int, call: dict[str, Any]) -> None:
        """Run SGLang's function on the same inputs and log the difference. Synchronises the device."""
        try:
            # SGLang's function leaves rows behind the last request as they were in memory.
            tokens = int(call["cu_seqlens"][-1])
            verification = compare(out[:tokens], native(**call)[:tokens])
        except Exception:  # a comparison that fails (out of memory, say) must not cost a request
            logger.exception("pageweaver verify: layer %d call %d could not be compared", layer_id, self.stats.calls)
            return
        self.stats.last_verification = verification
        logger.info(
            "pageweaver verify: layer %d call %d tokens %d requests %d q_heads %d kv_heads %d %s",
            layer_id,
            self.stats.calls,
            call["q"].shape[0],
            call["cu_seqlens"].shape[0] - 1,
            call["q"].shape[1],
            call["k_cache"].shape[1],
            verification,
        )
        logger.info("%s", self.stats.summary())
        if self.observe is not None:
            self.observe("verify_nrms", None, verification.nrms)

    def _log_once(self, message: str) -> None:
        if message not in self._logged and len(self._logged) < 2 * MAX_REASONS:
            self._logged.add(message)
            logger.warning("pageweaver: %s", message)


def compare(out: torch.Tensor, expected: torch.Tensor) -> Verification:
    """Compare two outputs ``[tokens, q_heads, head_dim]`` in float64, leaving out rows where ``expected`` isn't finite.

    A NaN or infinity in ``out`` alone shows in the figures. Goes through the tokens in parts, so that the float64
    copies of a long chunk with many heads don't take gigabytes.
    """
    finite = expected.isfinite().flatten(1).all(dim=1)
    sums = torch.zeros(4, dtype=torch.float64, device=out.device)  # of squared difference, a * a, b * b, a * b
    largest = torch.zeros((), dtype=torch.float64, device=out.device)
    for rows, part, wanted in zip(*(x.split(_COMPARED_TOKENS) for x in (finite, out, expected)), strict=True):
        a, b = part[rows].double().flatten(), wanted[rows].double().flatten()
        if a.numel():
            difference = a - b
            sums += torch.stack([difference.dot(difference), a.dot(a), b.dot(b), a.dot(b)])
            largest = torch.maximum(largest, difference.abs().max())
    squared, own, theirs, product = sums.tolist()
    same = squared == 0
    return Verification(
        nrms=0.0 if same else math.sqrt(squared / theirs) if theirs else math.inf,
        max_error=float(largest),
        cosine=1.0 if same else product / math.sqrt(own * theirs) if own * theirs else 0.0,
        skipped_rows=int((~finite).sum()),
    )


def _capturing(tensor: torch.Tensor) -> bool:
    return tensor.device.type == "cuda" and torch.cuda.is_current_stream_capturing()


# Routing -------------------------------------------------------------------------------------------------------------
#
# SGLang's sparse backend offers no argument for the Step 3 function: `forward_extend` calls `minimax_sparse_prefill`,
# which calls `flash_prefill_with_gqa_share_sparse` by its name in the module `minimax_sparse`, in every supported
# version (`minimax_sparse_prefill` itself is imported at the top of the backend in 0.5.17 and inside the method since
# 0.5.18, so replacing that one would differ by version). The name is replaced once, when a PageWeaver backend is
# created, by a router that serves the call of the backend whose `forward_extend` is running, and everybody else's
# by the original: a second, ordinary sparse backend in the same process (a draft model's) is not affected. A context
# variable says whose it is; unlike an attribute it is right for every thread.

_serving: contextvars.ContextVar[tuple[Step3, int, Forward | None] | None] = contextvars.ContextVar(
    "pageweaver_step3", default=None
)


@contextlib.contextmanager
def serving(step3: Step3, layer_id: int, forward: Forward | None = None) -> Iterator[None]:
    """While this runs, Step 3 calls of this thread go to ``step3``, as layer ``layer_id`` of ``forward``."""
    token = _serving.set((step3, layer_id, forward))
    try:
        yield
    finally:
        _serving.reset(token)


def route(module: ModuleType) -> None:
    """Put the router in the place of Step 3's name in ``module`` (SGLang's ``minimax_sparse``); safe to repeat."""
    native: Native = getattr(module, compat.STEP3_NAME)
    if hasattr(native, "pageweaver_router"):
        return
    signature = inspect.signature(native)

    @functools.wraps(native)
    def router(*args: Any, **kwargs: Any) -> torch.Tensor:
        serves = _serving.get()
        if serves is None:
            return native(*args, **kwargs)
        step3, layer_id, forward = serves
        return step3(native, layer_id, signature.bind(*args, **kwargs).arguments if args else kwargs, forward)

    router.pageweaver_router = True  # type: ignore[attr-defined]
    setattr(module, compat.STEP3_NAME, router)
