"""What regrouping saved in earlier calls, per layer and context length, and the decision for the next call.

The decision depends on shapes and on the calls before, in their order, and on nothing else: the same calls in the same
order get the same decisions. The one exception is a GPU so far behind the host that a figure which is due has not
arrived; nothing waits for it, and the call decides on what is known. Outputs don't depend on decisions at all.
"""

from __future__ import annotations

from collections import Counter, OrderedDict, deque
from dataclasses import dataclass, field

import torch

from .. import checks
from ..capture.snapshot import HostLengths
from ..config import Config
from ..cuda import support
from ..plan import GROUP_SIZE
from . import model
from .readback import Measurement, Readback

MAX_KEYS = 1024
"""(Layer, context) pairs that are remembered; the one not used for longest is forgotten."""

REMEMBERED = 4
"""Measurements of a key that count."""

VISIBLE_AFTER = 2
"""A measurement counts from this many calls of its key on: by then it has arrived in practice."""

MEASURE_EVERY = 8
"""While a key regroups, every so many calls are measured. A measurement is one small copy, some 2 us."""

PROBE_SHARE = 0.003
"""While a key keeps the original order, the share of its time that may go into regrouping, to see if that still loses.

For calls of 16,384 queries it is every 12th that regroups (every 19th in groups of 16), for smaller ones it is less
often.
"""


@dataclass(frozen=True)
class Decision:
    """What to do with one call.

    Attributes:
        regroup: regroup the queries, or keep their original order.
        reason: ``regroup`` and ``original`` by what earlier calls saved; ``first`` where none has been measured yet and
            ``probe`` where it is time to measure again (both regroup); ``small`` where regrouping cannot pay whatever
            the queries picked.
        gain_us: what regrouping was expected to gain; None for ``first`` and ``small``.
        measurement: takes the call's page visits; None for a call that is not measured.
    """

    regroup: bool
    reason: str
    gain_us: float | None = None
    measurement: Measurement | None = None

    def __str__(self) -> str:
        expected = "" if self.gain_us is None else f", expected gain {self.gain_us:.1f} us"
        measured = ", measured" if self.measurement is not None else ""
        return f"{'regrouped' if self.regroup else 'original order'} ({self.reason}{expected}{measured})"


@dataclass
class _Key:
    """What is known of one layer at one context length."""

    calls: int = 0
    measured: deque[tuple[int, int]] = field(default_factory=lambda: deque(maxlen=REMEMBERED))
    """(Rows, visits saved) of the last measured calls."""
    pending: Measurement | None = None
    pending_rows: int = 0
    pending_call: int = 0
    kept_us: float = 0.0
    """Time of the calls in original order since the last measurement began, at the least."""

    def saved_per_row(self) -> float | None:
        rows = sum(rows for rows, _ in self.measured)
        return sum(saved for _, saved in self.measured) / rows if rows else None


def can_pay(rows: int, topk: int, *, window: int, engine: str, union: int = GROUP_SIZE) -> bool:
    """Whether regrouping ``rows`` (query, KV head) pairs could gain anything where ``engine`` serves them in groups of
    ``union``, whatever they picked.
    """
    return model.gain_us(rows, model.most_saved_per_row(topk), window=window, engine=engine, union=union) > 0


class History:
    """Decides for the calls of one stream of work, on one device. For one thread.

    Args:
        config: the settings; ``window``, ``engine``, ``capacity`` and ``overflow`` count.
        page_size: tokens per page.
        heads_per_kv_head: query heads per KV head of the calls: with the size of a call it says how many queries a
            group has, and what a page visit costs depends on that. Another group size of a workspace is not known here.
        max_keys: (layer, context) pairs to remember.

    Raises:
        TypeError: an argument has the wrong type.
        ValueError: ``page_size``, ``heads_per_kv_head`` or ``max_keys`` is below 1.
    """

    def __init__(
        self, config: Config, *, page_size: int = 128, heads_per_kv_head: int = 16, max_keys: int = MAX_KEYS
    ) -> None:
        checks.check_history(config, page_size=page_size, heads_per_kv_head=heads_per_kv_head, max_keys=max_keys)
        self.visits: Counter[str] = Counter()
        """Page visits of measured calls, of ``original`` and ``regrouped`` order. Neither ever shrinks."""
        self._config = config
        self._page_size, self._heads_per_kv_head, self._max_keys = page_size, heads_per_kv_head, max_keys
        self._keys: OrderedDict[tuple[int, int | None], _Key] = OrderedDict()
        self._readback: Readback | None = None
        self._last_lengths: tuple[HostLengths, int] | None = None
        self._last_shape = 0, 0

    def decide(self, layer: int, topk_idx: torch.Tensor, lengths: HostLengths | None = None) -> Decision:
        """Decide for the next call, and count it as made.

        Must come right before the call, on its stream. While a CUDA graph is captured the decision is the one that the
        next call would get; nothing is measured and nothing noted.

        Args:
            layer: what the history is kept apart by, a model layer.
            topk_idx: int32 ``[kv_heads, tokens, k]`` of the call; its shape and device count.
            lengths: of the batch; None where the host doesn't know them, which puts all contexts into one history.

        Raises:
            TypeError: ``topk_idx`` has the wrong type or dtype.
            ValueError: ``topk_idx`` has a wrong shape.
        """
        checks.check_decide(topk_idx)
        kv_heads, tokens, topk = topk_idx.shape
        queries, pages = self._shape(lengths, topk) if lengths is not None else (tokens, 0)
        rows = kv_heads * queries
        processors = support.processors_of(topk_idx.device)
        engine = self._engine_on(topk_idx.device)
        union = support.grouping(engine, self._heads_per_kv_head, kv_heads * tokens, processors).union
        if not can_pay(rows, topk, window=self._config.window, engine=engine, union=union):
            return Decision(False, "small")
        # Contexts of a power of two and up to the next one share a history.
        name = layer, None if lengths is None else pages.bit_length()
        if topk_idx.is_cuda and torch.cuda.is_current_stream_capturing():
            return self._by_history(self._keys.get(name, _Key()), rows, engine, union)
        key = self._keys.setdefault(name, _Key())
        self._keys.move_to_end(name)
        if len(self._keys) > self._max_keys:
            self._keys.popitem(last=False)
        key.calls += 1
        if self._readback is not None:
            self._readback.give_up()
        self._absorb(key)
        decision = self._by_history(key, rows, engine, union)
        due = decision.reason == "first" or key.calls - key.pending_call >= MEASURE_EVERY
        if not decision.regroup:
            key.kept_us += model.time_us(rows, engine, union)
            due = key.kept_us * PROBE_SHARE >= model.cost_us(rows, self._config.window)
        if not due or key.pending is not None or (measurement := self._measurement(topk_idx.device)) is None:
            return decision
        key.pending, key.pending_rows, key.pending_call, key.kept_us = measurement, rows, key.calls, 0.0
        return Decision(True, decision.reason if decision.regroup else "probe", decision.gain_us, measurement)

    def _engine_on(self, device: torch.device) -> str:
        """The engine that serves there, as far as the setting, the GPU and the page size say."""
        asked, kind = self._config.engine, support.CallKind(page_size=self._page_size)
        return support.engine_on(asked, support.capability_of(device), kind) or asked

    def _by_history(self, key: _Key, rows: int, engine: str, union: int) -> Decision:
        saved = key.saved_per_row()
        if saved is None:
            return Decision(True, "first")
        gain = model.gain_us(rows, saved, window=self._config.window, engine=engine, union=union)
        return Decision(gain > 0, "regroup" if gain > 0 else "original", gain)

    def _shape(self, lengths: HostLengths, topk: int) -> tuple[int, int]:
        """(Queries that regrouping can do anything for, pages of the longest context).

        A request of one group has nobody to exchange with, one of no more pages than are picked has all its queries
        pick all they see, and one past the capacity keeps its order.
        """
        if self._last_lengths == (lengths, topk):  # the layers of a forward pass have the same
            return self._last_shape
        queries, longest, capacity = 0, 0, self._config.regroup_capacity
        for prefix, chunk in zip(lengths.prefixes, lengths.chunks, strict=True):
            pages = -(-(prefix + chunk) // self._page_size)
            longest = max(longest, pages)
            if chunk > GROUP_SIZE and pages > topk and (capacity is None or pages <= capacity):
                queries += chunk
        self._last_lengths, self._last_shape = (lengths, topk), (queries, longest)
        return self._last_shape

    def _absorb(self, key: _Key) -> None:
        """Make the pending measurement count, if it is due and there."""
        if key.pending is None or key.calls - key.pending_call < VISIBLE_AFTER:
            return
        if self._readback is not None:
            self._readback.collect()
        if key.pending.result is not None:
            original, regrouped = key.pending.result
            key.measured.append((key.pending_rows, original - regrouped))
            self.visits["original"] += original
            self.visits["regrouped"] += regrouped
            key.pending = None
        elif key.pending.lost:
            key.pending = None

    def _measurement(self, device: torch.device) -> Measurement | None:
        if self._readback is None:
            self._readback = Readback(device)
        return self._readback.take()
