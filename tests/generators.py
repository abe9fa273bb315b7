"""One generator of named inputs for ``sparse_prefill``, shared by the CPU and the GPU tests.

Everything is drawn on the CPU and then moved, so that a name and a seed mean the same numbers on every device. All
cells of the KV pool that belong to no token hold +-448 (the largest E4M3 value): reading one of them shows.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any

import torch

HEAD_DIM = 128
INT32_MIN, INT32_MAX = -(1 << 31), (1 << 31) - 1


@dataclass(frozen=True)
class Case:
    """Arguments of ``sparse_prefill``, by their names."""

    q: torch.Tensor
    k_cache: torch.Tensor
    v_cache: torch.Tensor
    topk_idx: torch.Tensor
    req_to_token: torch.Tensor
    slot_ids: torch.Tensor
    cu_seqlens: torch.Tensor
    seq_lens: torch.Tensor
    prefix_lens: torch.Tensor
    k_scale: float | None = None
    v_scale: float | None = None
    page_size: int = 128

    def args(self) -> tuple[torch.Tensor, ...]:
        """The nine positional arguments."""
        values = [getattr(self, field.name) for field in dataclasses.fields(self)]
        return tuple(values[:9])

    def keywords(self) -> dict[str, Any]:
        """The keyword arguments."""
        return {"k_scale": self.k_scale, "v_scale": self.v_scale, "page_size": self.page_size}

    def workspace_sizes(self) -> dict[str, Any]:
        """Of a ``Workspace`` that the call just fits; window, group size and what else it is for are the caller's."""
        kv_heads, tokens, k = self.topk_idx.shape
        sizes = {"max_tokens": tokens, "max_requests": len(self.seq_lens), "kv_heads": kv_heads, "topk": k}
        return {**sizes, "device": self.q.device}

    def to(self, device: torch.device | str) -> Case:
        tensors = {name: value.to(device) for name, value in vars(self).items() if isinstance(value, torch.Tensor)}
        return dataclasses.replace(self, **tensors)


@dataclass(frozen=True)
class Recipe:
    """What :func:`make_case` builds; its fields are the overrides that it accepts."""

    requests: tuple[tuple[int, int], ...] = ((150, 3500),)
    """(chunk length, prefix length) of each request."""
    kv_heads: int = 1
    ratio: int = 16
    head_dim: int = HEAD_DIM
    k: int = 16
    page_size: int = 128
    padding: int = 0
    """Rows behind the last request; their ids look valid."""
    cut: int = 0
    """Tokens by which every sequence is shorter than prefix + chunk (queries stand behind its end)."""
    tail: int | None = None
    """Lengthen the first prefix until its sequence length is this modulo the page size."""
    edit: str | None = None
    """How the ids differ from ascending, valid and distinct ones: a key of ``_EDITS``."""
    k_scale: float | None = None
    v_scale: float | None = None
    q_dtype: torch.dtype = torch.bfloat16
    cache_dtype: torch.dtype = torch.float8_e4m3fn
    strided: bool = False
    """Make q a view of a wider buffer, as it is in a server; the rest of the buffer is NaN."""
    scattered: bool = False
    """Give every token a cache slot of its own, so that no page is contiguous (the kernels do not cover that)."""
    slot_dtype: torch.dtype = torch.int64


_CASES = {
    "single": Recipe(requests=((1, 0),)),
    "tail": Recipe(requests=((90, 2700),), tail=1),
    "prefix": Recipe(requests=((140, 20_000),)),
    "first_chunk": Recipe(requests=((300, 0),)),
    "packed": Recipe(requests=((1, 0), (7, 120), (127, 0), (129, 1000), (64, 3000), (33, 5))),
    "holes": Recipe(edit="holes"),
    "all_invalid": Recipe(edit="all_invalid"),
    "duplicates": Recipe(edit="duplicates"),
    "unsorted": Recipe(edit="unsorted"),
    "out_of_range": Recipe(edit="out_of_range"),
    "future": Recipe(requests=((260, 2100), (140, 0)), edit="future"),
    "heads4": Recipe(requests=((70, 2900), (30, 2100)), kv_heads=4),
    "few_picks": Recipe(requests=((77, 1500),), k=3),
    "empty_request": Recipe(requests=((0, 0), (40, 600), (0, 300), (30, 0), (0, 0))),
    "padded": Recipe(requests=((50, 2800), (21, 0)), padding=75),
    "cut_short": Recipe(requests=((150, 2500), (60, 0)), cut=40),
    "past_512_pages": Recipe(requests=((140, 70_000),)),
    "scaled": Recipe(k_scale=0.37, v_scale=2.5),
    "strided": Recipe(requests=((33, 2900),), kv_heads=4, strided=True),
    "int32_slots": Recipe(requests=((70, 400), (10, 30)), slot_dtype=torch.int32),
}
CASE_NAMES = tuple(_CASES)


def make_case(name: str, seed: int = 0, device: torch.device | str = "cpu", **overrides: Any) -> Case:
    """Build a named case; ``overrides`` replace fields of its :class:`Recipe`."""
    recipe = dataclasses.replace(_CASES[name], **overrides)
    random = torch.Generator().manual_seed(seed * 1009 + CASE_NAMES.index(name))
    requests = list(recipe.requests)
    if name == "packed" and "requests" not in overrides:
        # Other lengths for every seed, in another order.
        requests = [requests[i] for i in torch.randperm(len(requests), generator=random).tolist()]
        requests[0] = (int(torch.randint(1, 200, (1,), generator=random)), requests[0][1])
    if recipe.tail is not None:
        length, prefix = requests[0]
        requests[0] = (length, prefix + (recipe.tail - prefix - length) % recipe.page_size)
    lengths = [length for length, _ in requests]
    prefixes = [prefix for _, prefix in requests]
    sequences = [max(0, length + prefix - recipe.cut) for length, prefix in requests]
    tokens = sum(lengths) + recipe.padding

    topk_idx = _picks(recipe, requests, random)
    pool, req_to_token, slot_ids = _tables(recipe, sequences, random)
    owned = torch.zeros(pool, dtype=torch.bool)
    for row, length in zip(slot_ids.tolist(), sequences, strict=True):
        owned[req_to_token[row, :length].long()] = True
    caches = [_cache(recipe, pool, owned, random) for _ in range(2)]
    q = torch.randn(tokens, recipe.kv_heads * recipe.ratio, recipe.head_dim, generator=random).to(recipe.q_dtype)

    case = Case(
        q=q,
        k_cache=caches[0],
        v_cache=caches[1],
        topk_idx=topk_idx,
        req_to_token=req_to_token,
        slot_ids=slot_ids,
        cu_seqlens=torch.tensor([0, *lengths]).cumsum(0).to(torch.int32),
        seq_lens=torch.tensor(sequences, dtype=torch.int32),
        prefix_lens=torch.tensor(prefixes, dtype=torch.int32),
        k_scale=recipe.k_scale,
        v_scale=recipe.v_scale,
        page_size=recipe.page_size,
    ).to(device)
    if recipe.strided:
        wide = torch.full((tokens, q[0].numel() + 1664), float("nan"), dtype=q.dtype, device=device)
        view = wide[:, : q[0].numel()].view(q.shape)
        view.copy_(case.q)
        case = dataclasses.replace(case, q=view)
    return case


def unmap_pages(case: Case) -> tuple[Case, Case]:
    """Take the entries of some pages that a request picked out of its table, and put NaN into the pool's first page.

    The pages are the second of every request and its last one, which queries see a part of only. The pool's first page
    belongs to nobody; it is what a kernel would read that took -1 for 0.

    Returns:
        The case with -1 for all tokens of those pages, and one over the sound table whose queries don't pick them.
    """
    table, picks = case.req_to_token.clone(), case.topk_idx.clone()
    bounds = case.cu_seqlens.tolist()
    for request, length in enumerate(case.seq_lens.tolist()):
        last = (length - 1) // case.page_size
        own = picks[:, bounds[request] : bounds[request + 1]]
        for page in {1, last}:
            row = table[int(case.slot_ids[request]), :length]
            row[page * case.page_size : (page + 1) * case.page_size] = -1
            assert bool((own == page).any()), "nobody picked the page"
            own[own == page] = -1
    caches = {name: getattr(case, name).float() for name in ("k_cache", "v_cache")}
    for cache in caches.values():
        cache[: case.page_size] = float("nan")
    case = dataclasses.replace(case, **{name: cache.to(case.k_cache.dtype) for name, cache in caches.items()})
    return dataclasses.replace(case, req_to_token=table), dataclasses.replace(case, topk_idx=picks)


def _picks(recipe: Recipe, requests: list[tuple[int, int]], random: torch.Generator) -> torch.Tensor:
    """Ascending ids, the own page always among them, similar for queries near each other; -1 behind them."""
    rows = []
    for length, prefix in requests:
        own = (torch.arange(length) + prefix) // recipe.page_size
        pages = max(1, -(-(length + prefix) // recipe.page_size))
        # What two kinds of queries like changes slowly; each query adds some taste of its own.
        slow = torch.randn(recipe.kv_heads, length // 20 + 1, 2, pages, generator=random)
        block = torch.arange(length) // 20
        kind = torch.randint(0, 2, (length,), generator=random)
        liking = slow[:, block, kind] + 0.3 * torch.randn(recipe.kv_heads, length, pages, generator=random)
        page = torch.arange(pages)
        liking = liking.masked_fill(page > own[:, None], -torch.inf).masked_fill(page == own[:, None], torch.inf)
        best = liking.topk(min(recipe.k, pages), dim=2)
        picked = best.indices.masked_fill(best.values == -torch.inf, pages)
        picked = torch.nn.functional.pad(picked, (0, recipe.k - picked.shape[2]), value=pages).sort(dim=2).values
        picked = picked.masked_fill(picked == pages, -1)
        if recipe.edit is not None:
            picked = _EDITS[recipe.edit](picked, pages, random)
        rows.append(picked)
    rows.append(torch.randint(0, 3, (recipe.kv_heads, recipe.padding, recipe.k), generator=random))
    return torch.cat(rows, dim=1).to(torch.int32)


def _holes(picked: torch.Tensor, pages: int, random: torch.Generator) -> torch.Tensor:
    """-1 anywhere in a row; some rows pick nothing at all, a whole group's worth of neighbours among them."""
    holes = torch.rand(picked.shape, generator=random) < 0.4
    holes |= torch.rand(picked.shape[:2], generator=random)[..., None] < 0.1
    holes[:, 16:28] = True
    return picked.masked_fill(holes, -1)


def _all_invalid(picked: torch.Tensor, pages: int, random: torch.Generator) -> torch.Tensor:
    bad = torch.tensor([-1, -2, -129, INT32_MIN, pages, pages + 500, INT32_MAX])
    return bad[torch.randint(0, len(bad), picked.shape, generator=random)]


def _duplicates(picked: torch.Tensor, pages: int, random: torch.Generator) -> torch.Tensor:
    """Ids repeat next to each other and far apart; some rows hold one id only."""
    chosen = torch.randint(0, picked.shape[2], picked.shape, generator=random)
    chosen[:, ::7] = 0
    return picked.gather(2, chosen)


def _unsorted(picked: torch.Tensor, pages: int, random: torch.Generator) -> torch.Tensor:
    return picked.gather(2, torch.rand(picked.shape, generator=random).argsort(dim=2))


def _out_of_range(picked: torch.Tensor, pages: int, random: torch.Generator) -> torch.Tensor:
    """Valid ids among invalid ones, the first id that is one too large included."""
    bad = torch.tensor([-1, -7, INT32_MIN, pages, pages + 1, pages + 63, INT32_MAX])
    invalid = bad[torch.randint(0, len(bad), picked.shape, generator=random)]
    return torch.where(torch.rand(picked.shape, generator=random) < 0.3, invalid, picked)


def _future(picked: torch.Tensor, pages: int, random: torch.Generator) -> torch.Tensor:
    """Any page of the sequence, those wholly behind the query's position included; some rows see nothing."""
    anything = torch.randint(0, pages, picked.shape, generator=random)
    anything[:, ::5] = pages - 1
    return anything


_EDITS = {
    "holes": _holes,
    "all_invalid": _all_invalid,
    "duplicates": _duplicates,
    "unsorted": _unsorted,
    "out_of_range": _out_of_range,
    "future": _future,
}


def _tables(recipe: Recipe, sequences: list[int], random: torch.Generator) -> tuple[int, torch.Tensor, torch.Tensor]:
    """Return the pool's size in slots, ``req_to_token`` and ``slot_ids``: pages and rows in random order.

    Entries behind a sequence's end are 0: that is a slot of a page that nobody owns.
    """
    size = recipe.page_size
    pages = [-(-length // size) for length in sequences]
    pool = sum(pages) + 3
    physical = 1 + torch.randperm(pool - 1, generator=random)
    slots = physical[:, None] * size + torch.arange(size)
    if recipe.scattered:
        flat = slots.flatten()
        slots = flat[torch.randperm(len(flat), generator=random)].view_as(slots)
    rows = len(sequences) + 2
    table = torch.zeros(rows, max(pages, default=0) * size + 64, dtype=torch.int32)
    slot_ids = torch.randperm(rows, generator=random)[: len(sequences)]
    first = 0
    for row, length, count in zip(slot_ids.tolist(), sequences, pages, strict=True):
        table[row, :length] = slots[first : first + count].flatten()[:length].to(torch.int32)
        first += count
    return pool * size, table, slot_ids.to(recipe.slot_dtype)


def _cache(recipe: Recipe, slots: int, owned: torch.Tensor, random: torch.Generator) -> torch.Tensor:
    """Normal values in the cells of tokens, +-448 in all others."""
    shape = (recipe.kv_heads, recipe.head_dim)
    cache = torch.randint(0, 2, (slots, *shape), generator=random).float() * 896 - 448
    cache[owned] = torch.randn(int(owned.sum()), *shape, generator=random)
    return cache.to(recipe.cache_dtype)
