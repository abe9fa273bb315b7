"""What one random call looks like, drawn from its seed on the host: the same numbers on every device."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from pageweaver_sglang.cuda import support

from .variants import E4M3, VARIANTS, Shape

MAX_TOKENS = 400
"""Query tokens of a call, without its padding rows."""
MAX_PADDING = 75
MAX_PAGES = 100
"""Pages of the KV pool."""
LARGEST = 6_000
"""Query tokens x KV heads x pages of one call, at most: what its comparison costs goes with it."""

INT32_MIN, INT32_MAX = -(1 << 31), (1 << 31) - 1
_HUGE = np.array([INT32_MIN, INT32_MIN + 1, -129, -2, 1 << 20, 1 << 24, INT32_MAX - 1, INT32_MAX])

STYLES = ("random", "sharp", "rounded", "flat", "levels")
"""What Q and K are like.

``random`` and ``sharp``: normally distributed, but that rounding Q changes nothing; a wrong page shows. ``rounded``:
normally distributed, so that engines round Q. ``flat`` (Q is zero) and ``levels`` (weights are powers of two): every
softmax weight is a number that FP8 holds exactly, so that a single wrong token shows.
"""
EXACT_STYLES = ("flat", "levels")
LEVELS = 7
"""In style ``levels`` every page has one of so many logits, a factor of two in weight apart."""


@dataclass(frozen=True)
class Call:
    """One call, by value; everything that :mod:`.build` and :mod:`.trial` need."""

    seed: int
    variant: str
    """A key of :data:`.variants.VARIANTS`."""
    shape: Shape
    kv_heads: int
    lengths: np.ndarray
    """int64 ``[requests]``, chunk of each."""
    prefixes: np.ndarray
    """int64 ``[requests]``."""
    sequences: np.ndarray
    """int64 ``[requests]``, ``seq_lens``: less than prefix and chunk where the call is ``cut``."""
    padding: int
    topk_idx: np.ndarray
    """int64 ``[kv_heads, tokens, k]``, values fit int32."""
    pool_pages: int
    pages: list[np.ndarray]
    """Per request: the physical page of each of its logical pages."""
    rows: np.ndarray
    """int64 ``[requests]``, the request's row of ``req_to_token``."""
    table_rows: int
    columns: int
    """Positions of ``req_to_token``."""
    behind: int
    """What ``req_to_token`` holds behind the end of a sequence."""
    garbage: str
    """What all cells of the caches hold that belong to no token: a NaN, 448 (E4M3's largest number) or 0."""
    levels: np.ndarray
    """int64 ``[pool_pages]``, of style ``levels``."""
    style: str
    offsets: tuple[int, int, int]
    """Where Q, K and V are taken from the pools: token, page, page."""
    sm_scale: float | None
    k_scale: float | None
    v_scale: float | None
    k_scale_tensor: bool
    v_scale_tensor: bool
    slot_ids_int32: bool
    q_layout: str
    cache_layout: str
    config: dict[str, object]
    output: str
    """Where the result goes: ``new``, ``out`` or ``workspace``."""
    group_size: int
    """Queries per union of the workspace, one of those that the engine takes; without one the engine's rule decides."""
    tiles: str
    """Where the value tiles lie: ``own`` (the call's or the workspace's), ``given``, or ``none`` are used."""
    twin: bool
    """Whether the variant's twin, where it has one, must give the same bits."""
    orders: bool
    """Whether ``regroup`` and ``prepare_unions`` are compared bit for bit."""
    cross_check: bool
    """Whether the dense attention is compared with the reference engine."""
    invalid: int | None
    """A number that chooses a call that must be refused, made beforehand; None for none."""
    features: tuple[str, ...]
    """``dimension=value`` of everything that varies, to be counted."""

    @property
    def tokens(self) -> int:
        """Rows of Q, padding included."""
        return self.topk_idx.shape[1]

    @property
    def page_size(self) -> int:
        """Tokens of a page."""
        return self.shape.page_size

    @property
    def k(self) -> int:
        """Picks of a query."""
        return self.topk_idx.shape[2]

    @property
    def logit_size(self) -> float:
        """Standard deviation of a logit when elements of Q and K have the deviation 1."""
        head_dim = self.shape.head_dim
        return (head_dim**-0.5 if self.sm_scale is None else self.sm_scale) * (self.k_scale or 1.0) * head_dim**0.5

    @property
    def exact(self) -> bool:
        """Whether FP8 holds every softmax weight exactly."""
        return self.style in EXACT_STYLES


def draw_call(seed: int, variants: tuple[str, ...] = tuple(VARIANTS), largest: int = LARGEST) -> Call:
    """Draw the call of ``seed``; other ``variants`` or another ``largest`` make another call of it."""
    rng = np.random.default_rng(seed)
    variant = _pick(rng, variants)
    tried = VARIANTS[variant]
    shape = _pick(rng, tried.shapes)
    kv_heads = _pick(rng, (1, 2, 3, 4), (0.4, 0.25, 0.1, 0.25))
    k = shape.k or (16 if rng.random() < 0.5 else int(rng.integers(1, 17)))
    page_size = shape.page_size

    requests = _pick(rng, (1, 2, 3, 4, 5), (0.35, 0.25, 0.15, 0.15, 0.1))
    lengths, chunk_kinds = _chunks(rng, requests)
    tokens = int(lengths.sum())
    # A chunk's own pages may exceed what the tokens leave of the cost; prefixes may not.
    least = -(-lengths // page_size)
    budget = int(min(MAX_PAGES - 3, max(least.sum() + requests, largest // max(1, tokens * kv_heads))))
    prefixes, prefix_kinds = _prefixes(rng, lengths, budget, page_size)
    whole = lengths + prefixes
    cut = rng.random() < 0.1
    sequences = np.maximum(0, whole - rng.integers(1, 61, requests)) if cut else whole
    padding = int(rng.integers(1, MAX_PADDING + 1)) if rng.random() < 0.15 else 0

    ids_kind = _pick(
        rng,
        ("typical", "random", "past", "holes", "huge", "duplicates", "same", "none"),
        (0.34, 0.14, 0.12, 0.14, 0.1, 0.08, 0.06, 0.02),
    )
    pages = -(-sequences // page_size)
    topk_idx = _ids(rng, ids_kind, kv_heads, k, lengths, prefixes, pages, padding, page_size)

    used = int(pages.sum())
    pool_pages = max(4, used + int(rng.integers(1, 4)))
    physical = rng.permutation(pool_pages)[:used]
    table_rows = requests + int(rng.integers(0, 3))
    columns = int(sequences.max()) + _pick(rng, (0, 1, int(rng.integers(1, 200)))) or 1

    style = _pick(rng, STYLES, (0.5, 0.1, 0.1, 0.12, 0.18))
    k_scale = None if rng.random() < 0.5 else _float32(2 ** rng.uniform(-4, 4))
    v_scale = None if rng.random() < 0.5 else _float32(_pick(rng, (1, -1), (0.9, 0.1)) * 2 ** rng.uniform(-6, 6))
    sm_scale = _sm_scale(rng, style, k_scale, shape.head_dim)
    scale_kind = {None: "none", True: "tensor", False: "float"}
    k_tensor = bool(rng.random() < 0.5)
    v_tensor = k_tensor if tried.compiled_apart else bool(rng.random() < 0.5)
    if tried.compiled_apart and k_tensor:  # none and a float are the same code, a tensor is not
        k_scale, v_scale = k_scale or 1.0, v_scale or 1.0

    mode = _pick(rng, ("auto", "pageweaver", "union8"), (0.3, 0.5, 0.2))
    config: dict[str, object] = {
        "mode": mode,
        **tried.config,
        "window": _pick(rng, (64, 128)),
        "guard": _pick(rng, ("window", "none")),
        "overflow": _pick(rng, ("rename", "original"), (0.7, 0.3)),
        "capacity": _pick(rng, (512, int(rng.integers(1, 33)))),
    }
    group_sizes = support.union_group_sizes(tried.config["engine"], shape.ratio)
    call = Call(
        seed=seed,
        variant=variant,
        shape=shape,
        kv_heads=kv_heads,
        lengths=lengths,
        prefixes=prefixes,
        sequences=sequences,
        padding=padding,
        topk_idx=topk_idx,
        pool_pages=pool_pages,
        pages=np.split(physical, np.cumsum(pages)[:-1]),
        rows=rng.permutation(table_rows)[:requests],
        table_rows=table_rows,
        columns=columns,
        behind=_pick(rng, (0, -1, INT32_MAX, INT32_MIN, pool_pages * page_size, int(rng.integers(0, 500)))),
        garbage=_pick(rng, ("NaN", "-NaN", "448", "0"), (0.5, 0.2, 0.2, 0.1)),
        levels=rng.integers(0, LEVELS, pool_pages),
        style=style,
        offsets=tuple(int(value) for value in rng.integers(0, 128, 3)),
        sm_scale=sm_scale,
        k_scale=k_scale,
        v_scale=v_scale,
        k_scale_tensor=k_tensor and k_scale is not None,
        v_scale_tensor=v_tensor and v_scale is not None,
        slot_ids_int32=bool(rng.random() < 0.3),
        q_layout=_pick(rng, ("fused", "contiguous"), (0.6, 0.4)),
        cache_layout=_pick(rng, ("contiguous", "wider", "heads apart"), (0.6, 0.2, 0.2)),
        config=config,
        output=_pick(rng, ("new", "out", "workspace"), (0.4, 0.2, 0.4)),
        tiles=_pick(rng, ("own", "given"), (0.8, 0.2)) if tried.value_tiles else "none",
        twin=bool(rng.random() < 1 / 8),
        orders=bool(rng.random() < 1 / 16),
        cross_check=bool(rng.random() < 1 / 1000),
        invalid=int(rng.integers(0, 1 << 30)) if rng.random() < 0.02 else None,
        # Drawn last, so that seeds of before there was a choice still mean the same call.
        group_size=_pick(rng, group_sizes),
        features=(),
    )
    features = {
        "engine": [variant],
        **{name: [str(config[name])] for name in ("mode", "window", "guard", "overflow")},
        "capacity": ["512" if config["capacity"] == 512 else "1-32"],
        "KV heads": [str(kv_heads)],
        "heads per KV head": [str(shape.ratio)],
        "head dim": [str(shape.head_dim)],
        "KV cache": ["FP8" if shape.cache_dtype == E4M3 else "BF16"],
        "k": [str(k)],
        "page size": [str(page_size)],
        "requests": [str(requests)],
        "tokens": [_bucket(call.tokens)],
        "pages": [_bucket(used)],
        "chunks": chunk_kinds,
        "prefixes": prefix_kinds,
        "ids": [ids_kind],
        "sequence": ["cut before the last query" if cut else "ends with the chunk"],
        "padding": ["yes" if padding else "no"],
        "contents": [style],
        "foreign cells": [call.garbage],
        "q": [call.q_layout],
        "caches": [call.cache_layout],
        "sm_scale": ["none" if sm_scale is None else "float"],
        "k_scale": [scale_kind[None if k_scale is None else k_tensor]],
        "v_scale": [scale_kind[None if v_scale is None else v_tensor] + (" < 0" if (v_scale or 0) < 0 else "")],
        "slot_ids": ["int32" if call.slot_ids_int32 else "int64"],
        "output": [call.output],
        "groups": [str(call.group_size) if call.output == "workspace" else "by rule"],
        "value tiles": [call.tiles],
    }
    object.__setattr__(call, "features", tuple(f"{name}={one}" for name, values in features.items() for one in values))
    return call


def _pick(rng: np.random.Generator, values, weights=None):
    """One of ``values``, with probabilities ``weights`` (None: all alike); much cheaper than ``rng.choice``."""
    number = rng.random()
    if weights is None:
        return values[int(number * len(values))]
    for value, weight in zip(values, weights, strict=True):
        number -= weight
        if number < 0:
            return value
    return values[-1]


def _float32(value: float) -> float:
    """The nearest number that a float32 tensor can hold, so that a scale is the same in a tensor and out of one."""
    return float(np.float32(value))


def _bucket(count: int) -> str:
    for low, high in ((0, 0), (1, 1), (2, 7), (8, 31), (32, 127), (128, 255)):
        if count <= high:
            return str(low) if low == high else f"{low}-{high}"
    return "256-"


def _chunks(rng: np.random.Generator, requests: int) -> tuple[np.ndarray, list[str]]:
    lengths, kinds = [], []
    left = MAX_TOKENS
    for _ in range(requests):
        kind = _pick(rng, ("0", "1", "2-20", "21-150", "151-400"), (0.04, 0.16, 0.45, 0.28, 0.07))
        low, _, high = kind.partition("-")
        length = min(left, int(rng.integers(int(low), int(high or low) + 1)))
        left -= length
        lengths.append(length)
        kinds.append(kind)
    return np.array(lengths), kinds


def _prefixes(
    rng: np.random.Generator, lengths: np.ndarray, budget: int, page_size: int
) -> tuple[np.ndarray, list[str]]:
    """A prefix for every request, such that all pages together (nearly) stay within ``budget``."""
    prefixes, kinds = [], []
    left = budget - int((-(-lengths // page_size) + 1).sum())
    for _ in lengths:
        kind = _pick(rng, ("0", "whole pages", "any"), (0.25, 0.25, 0.5))
        # Few pages are as likely as many.
        most = 0 if kind == "0" else int(max(0, left) ** rng.random())
        if kind == "whole pages":
            prefix = most * page_size
        else:
            prefix = int(rng.integers(0, most * page_size + 1)) if kind == "any" else 0
        left -= -(-prefix // page_size)
        prefixes.append(prefix)
        kinds.append(kind)
    return np.array(prefixes), kinds


def _blocks(rng: np.random.Generator, length: int) -> Iterator[int]:
    """Lengths of runs of queries with similar picks."""
    while length > 0:
        run = min(length, int(rng.integers(1, 40)))
        yield run
        length -= run


def _ids(
    rng: np.random.Generator,
    kind: str,
    kv_heads: int,
    k: int,
    lengths: np.ndarray,
    prefixes: np.ndarray,
    pages: np.ndarray,
    padding: int,
    page_size: int,
) -> np.ndarray:
    """int64 ``[kv_heads, tokens, k]``; the ids of padding rows look valid."""
    tokens = int(lengths.sum())
    shape = (kv_heads, tokens, k)
    request = np.repeat(np.arange(len(lengths)), lengths)
    count = np.maximum(pages, 1)[request][None, :, None]
    starts = np.cumsum(lengths) - lengths
    own = (np.arange(tokens) - starts[request] + prefixes[request]) // page_size
    if kind == "none":
        ids = np.where(rng.random(shape) < 0.5, -1, count + rng.integers(0, 3, shape))
    elif kind == "random":
        ids = (rng.random(shape) * count).astype(np.int64)
    elif kind == "past":
        ids = (rng.random(shape) * (count + 4)).astype(np.int64) - 2
    elif kind == "same":
        ids = np.broadcast_to(np.minimum((rng.random((kv_heads, 1, k)) * count).astype(np.int64), count - 1), shape)
    else:
        runs = np.array(list(_blocks(rng, tokens)), dtype=np.int64)
        common = rng.random((kv_heads, len(runs), k)).repeat(runs, axis=1)
        mixed = np.where(rng.random(shape) < 0.3, rng.random(shape), common)
        ids = (mixed * count).astype(np.int64)
        if k > 1:
            ids[:, :, 0] = np.minimum(own, count[0, :, 0] - 1)
        if kind != "duplicates":
            ids.sort(axis=2)
            ids[:, :, 1:][ids[:, :, 1:] == ids[:, :, :-1]] = INT32_MAX
            ids.sort(axis=2)
            ids[ids == INT32_MAX] = -1
        if kind == "holes":
            ids[rng.random(shape) < 0.4] = -1
            ids[rng.random(shape[:2]) < 0.1] = -1
        elif kind == "huge":
            ids = np.where(rng.random(shape) < 0.3, _HUGE[rng.integers(0, len(_HUGE), shape)], ids)
    return np.concatenate([ids, rng.integers(0, 3, (kv_heads, padding, k))], axis=1)


def _sm_scale(rng: np.random.Generator, style: str, k_scale: float | None, head_dim: int) -> float | None:
    """The scale that gives logits of the style's size; None stands for ``head_dim ** -0.5``, logits of about 1."""
    if style == "levels":
        return _float32(np.log(2) / 64 / (k_scale or 1.0))
    if style == "flat":
        return None if rng.random() < 0.5 else _float32(rng.uniform(0.01, 1.0))
    if style == "random" and k_scale is None and rng.random() < 0.5:
        return None
    size = 2 ** rng.uniform(*{"random": (-2, 0.5), "rounded": (-2, -0.5), "sharp": (1, 3)}[style])
    return _float32(size * head_dim**-0.5 / (k_scale or 1.0))
