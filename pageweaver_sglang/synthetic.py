"""Made selections: page choices that imitate what an indexer picks, with the properties that matter set by knobs.

Every query picks up to ``k`` distinct pages that it can see:

1. the ``local`` most recent pages, its own among them;
2. each of ``hot`` pages of its request, fixed for the whole prompt, with probability ``hot_share``;
3. the selection of its *type*, a list of pages that changes slowly: from one query of a type to the next, each page
   is exchanged with probability ``drift``; and each is replaced, for this one query only, with probability ``noise``.

Exchanged and replaced pages are drawn evenly from all that are visible. Types interleave: a type serves ``streak``
queries in a row, then comes the next (``cyclic``) or any (``random``). With ``paired`` the selection holds fixed pairs
of pages instead, each pair picked as a whole: queries that are far apart then share pairs of pages while neighbours
share little, which favours pairing pages over grouping queries.
"""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from typing import Literal, get_args, get_type_hints

import numpy as np
import torch

from .workload import Workload

_BATCH_ROWS = 8192  # queries handled at once: bounds the temporaries to some tens of MB
_INT32_MAX = 2**31 - 1


@dataclass(frozen=True)
class Recipe:
    """What to make. Lengths are in tokens.

    Raises:
        ValueError: a value is out of range; the message names it and what is allowed.
        TypeError: a value is of the wrong type.
    """

    requests: tuple[tuple[int, int], ...] = ((16384, 49152),)
    """(chunk length, prefix length) of each packed request."""
    kv_heads: int = 1
    k: int = 16
    """Pages per query."""
    page_size: int = 128
    drift: float = 0.03
    """Probability that a page of a type's selection is exchanged from one query of the type to the next."""
    noise: float = 0.22
    """Probability that a page of the selection is replaced for one query."""
    types: int = 1
    """Query types that interleave."""
    streak: int = 1
    """Queries of one type in a row."""
    interleave: Literal["cyclic", "random"] = "cyclic"
    hot: int = 10
    """Pages of a request that all its queries tend to pick."""
    hot_share: float = 0.25
    """Probability that a query picks a hot page."""
    local: int = 1
    """Most recent pages that every query picks."""
    paired: bool = False
    """The selection holds fixed pairs of pages."""
    seed: int = 0

    def __post_init__(self) -> None:
        hints = get_type_hints(type(self))
        for field in fields(self):
            _check_type(field.name, getattr(self, field.name), hints[field.name])
        for name, lowest, highest in (
            ("kv_heads", 1, 1024),
            ("k", 1, 1024),
            ("page_size", 1, 1 << 20),
            ("types", 1, 1 << 20),
            ("streak", 1, _INT32_MAX),
            ("hot", 0, 1024),
            ("local", 0, self.k),
            ("seed", 0, 2**63 - 1),
        ):
            if not lowest <= getattr(self, name) <= highest:
                raise ValueError(f"Recipe: {name} must be in {lowest}..{highest}, got {getattr(self, name)}")
        for name in ("drift", "noise", "hot_share"):
            if not 0 <= getattr(self, name) <= 1:
                raise ValueError(f"Recipe: {name} must be in 0..1, got {getattr(self, name)}")
        if not self.requests:
            raise ValueError("Recipe: requests must name at least one request")
        for length, prefix in self.requests:
            if length < 1 or prefix < 0:
                raise ValueError(f"Recipe: requests must have chunks >= 1 and prefixes >= 0, got {length}:{prefix}")
            if length + prefix > _INT32_MAX:
                raise ValueError(f"Recipe: requests must stay below 2**31 tokens, got {length}:{prefix}")
        if sum(length for length, _ in self.requests) > 1 << 24:
            raise ValueError(f"Recipe: requests must have at most {1 << 24} queries together")


def _check_type(name: str, value: object, hint: object) -> None:
    if name == "requests":
        good = isinstance(value, tuple) and all(
            isinstance(one, tuple) and len(one) == 2 and all(type(number) is int for number in one) for one in value
        )
        kind = "a tuple of (chunk length, prefix length)"
    elif choices := get_args(hint):
        good, kind = value in choices, " or ".join(choices)
    else:
        good = type(value) is hint or (hint is float and type(value) is int)
        kind = {int: "an integer", float: "a number", bool: "True or False"}[hint]  # type: ignore[index]
    if not good:
        error = ValueError if get_args(hint) and isinstance(value, str) else TypeError
        raise error(f"Recipe: {name} must be {kind}, got {value!r}")


PRESETS: dict[str, tuple[str, Recipe]] = {
    "ctx64k": (
        "last chunk of a 64K prompt; near the recorded ctx64k_a",
        Recipe(requests=((15272, 49152),), drift=0.03, noise=0.22, types=2, streak=3, interleave="random", hot=10),
    ),
    "flat": (
        "like it, but neighbours already agree: little to gain by regrouping",
        Recipe(requests=((15272, 49152),), drift=0.02, noise=0.21, types=2, streak=12, interleave="random", hot=10),
    ),
    "mixed": (
        "like it, with interleaved query types: much to gain by regrouping",
        Recipe(requests=((15272, 49152),), drift=0.03, noise=0.1, types=2, interleave="random", hot=10, hot_share=0.3),
    ),
    "first-chunk": (
        "16K prompt without a prefix; near the recorded ctx16k",
        Recipe(
            requests=((16384, 0),), drift=0.01, noise=0.15, types=2, streak=6, interleave="random", hot=6, hot_share=0.4
        ),
    ),
    **{
        f"ctx{name}": (
            f"last 16,384 queries of a prompt of {name.upper()} tokens; the values of ctx64k",
            Recipe(
                requests=((16384, context - 16384),), drift=0.03, noise=0.22, types=2, streak=3, interleave="random"
            ),
        )
        for name, context in (("128k", 1 << 17), ("256k", 1 << 18), ("1m", 1 << 20))
    },
    "packed": (
        "seven requests of odd lengths and prefixes in one chunk",
        Recipe(
            requests=((1, 0), (7, 120), (127, 0), (129, 1000), (4000, 12345), (2048, 65536), (512, 300)),
            drift=0.03,
            noise=0.22,
            types=2,
            streak=3,
            interleave="random",
        ),
    ),
    "page-pair-32k": (
        "pairs of pages picked by queries that are far apart, 32K context: favours pairing pages",
        Recipe(requests=((16384, 16384),), drift=0.0, noise=0.0, types=512, hot=0, local=0, paired=True),
    ),
    "page-pair-64k": (
        "the same with a 64K context",
        Recipe(requests=((16384, 49152),), drift=0.0, noise=0.0, types=512, hot=0, local=0, paired=True),
    ),
}
"""Named recipes: description and values."""


def preset(name: str, **changes: object) -> Recipe:
    """A recipe of :data:`PRESETS` with some values replaced. Raises ValueError for an unknown name."""
    if name not in PRESETS:
        raise ValueError(f"Recipe: no preset {name!r}; there are {', '.join(PRESETS)}")
    return replace(PRESETS[name][1], **changes)  # type: ignore[arg-type]


def make_workload(recipe: Recipe) -> Workload:
    """Make the page choices of a recipe; equal recipes give equal files.

    Returns:
        indices only: ``topk_idx`` int32 ``[kv_heads, tokens, k]``, rows ascending, -1 behind where a query sees fewer
        than ``k`` pages. Every request and KV head has a random stream of its own.
    """
    lengths = np.array([length for length, _ in recipe.requests], dtype=np.int64)
    prefixes = np.array([prefix for _, prefix in recipe.requests], dtype=np.int64)
    bounds = np.concatenate([[0], lengths.cumsum()])
    topk = np.empty((recipe.kv_heads, int(bounds[-1]), recipe.k), dtype=np.int32)
    for head in range(recipe.kv_heads):
        for request, (length, prefix) in enumerate(recipe.requests):
            random = np.random.default_rng([recipe.seed, request, head])
            topk[head, bounds[request] : bounds[request + 1]] = _picks(recipe, length, prefix, random)
    return Workload(
        topk_idx=torch.from_numpy(topk),
        cu_seqlens=torch.from_numpy(bounds.astype(np.int32)),
        prefix_lens=torch.from_numpy(prefixes.astype(np.int32)),
        seq_lens=torch.from_numpy((prefixes + lengths).astype(np.int32)),
        page_size=recipe.page_size,
    )


def _picks(recipe: Recipe, length: int, prefix: int, random: np.random.Generator) -> np.ndarray:
    """The choices of one request and KV head, int32 ``[length, k]``."""
    own = (prefix + np.arange(length)) // recipe.page_size
    hot_pages = random.integers(0, own[-1] + 1, recipe.hot)
    hot = np.where(random.random((length, recipe.hot)) < recipe.hot_share, hot_pages, -1)
    selected = _selection(recipe, own, prefix // recipe.page_size, random)
    picks = np.empty((length, recipe.k), dtype=np.int32)
    recent = np.arange(recipe.k)
    for first in range(0, length, _BATCH_ROWS):
        rows = slice(first, first + _BATCH_ROWS)
        latest = own[rows, None] - recent
        # What comes first is taken first. The latest pages at the end fill up where too few are distinct.
        candidates = np.concatenate([latest[:, : recipe.local], hot[rows], selected[rows], latest], axis=1)
        picks[rows] = _first_distinct(candidates, own[rows], recipe.k)
    return picks


def _selection(recipe: Recipe, own: np.ndarray, shared: int, random: np.random.Generator) -> np.ndarray:
    """Every query's selection, int64 ``[length, 2 k]``; as many again as are needed, for repeated ones.

    Args:
        recipe: the knobs.
        own: int64 ``[length]``, the page that each query stands in.
        shared: pages that all queries see as a whole.
        random: where numbers come from.
    """
    length = len(own)
    streaks = np.arange(length) // recipe.streak
    if recipe.interleave == "random":
        kinds = random.integers(0, recipe.types, streaks[-1] + 1)[streaks]
    else:
        kinds = streaks % recipe.types
    # Queries of one type in a row: a page stays until the row where it is exchanged, and a type starts with new ones.
    by_kind = np.argsort(kinds, kind="stable")
    units = recipe.k if recipe.paired else 2 * recipe.k
    exchanged = random.random((length, units)) < recipe.drift
    exchanged[np.flatnonzero(np.diff(kinds[by_kind], prepend=-1))] = True
    since = np.maximum.accumulate(np.where(exchanged, np.arange(length)[:, None], 0), axis=0)
    choices = (own + 1) // 2 if recipe.paired else own + 1  # visible pairs or pages
    choices = np.maximum(choices, 1)
    drawn = random.integers(0, choices[by_kind, None], (length, units))
    selected = np.empty_like(drawn)
    selected[by_kind] = np.take_along_axis(drawn, since, axis=0)
    replaced = random.random((length, units)) < recipe.noise
    selected = np.where(replaced, random.integers(0, choices[:, None], (length, units)), selected)
    if not recipe.paired:
        return selected
    # Pages are paired at random among those that every query sees, and with their neighbour behind.
    names = np.arange(int(own[-1]) + 2)
    even = shared // 2 * 2
    names[:even] = random.permutation(even)
    return np.stack([names[2 * selected], names[2 * selected + 1]], axis=2).reshape(length, -1)


def _first_distinct(candidates: np.ndarray, last: np.ndarray, k: int) -> np.ndarray:
    """The first ``k`` distinct pages in ``0..last`` of every row, ascending, then -1: int32 ``[rows, k]``."""
    usable = (candidates >= 0) & (candidates <= last[:, None])
    order = np.argsort(candidates, axis=1, kind="stable")
    ascending = np.take_along_axis(candidates, order, axis=1)
    repeated = np.zeros_like(usable)
    np.put_along_axis(repeated, order[:, 1:], ascending[:, 1:] == ascending[:, :-1], axis=1)
    usable &= ~repeated
    usable &= usable.cumsum(axis=1) <= k
    nothing = np.iinfo(np.int64).max
    chosen = np.sort(np.where(usable, candidates, nothing), axis=1)[:, :k]
    return np.where(chosen == nothing, -1, chosen).astype(np.int32)
