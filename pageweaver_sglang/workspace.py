"""Device memory for intermediate results, allocated once, so that calls can be captured in a CUDA Graph."""

from __future__ import annotations

import torch

from .plan import UnionPlan, group_bound, mask_dtype
from .value_tiles import ValueTiles


class Workspace:
    """Preallocated buffers for the query order, the union plan, V's tiles and (with ``q_heads``) the output.

    The buffers are flat: a call of any size up to the maximum gets contiguous views of their beginning, without
    allocating device memory. A workspace serves one call at a time: the next call overwrites what the last returned.

    Args:
        max_tokens: most query tokens of one call (padding rows included).
        max_requests: most requests of one call.
        kv_heads: KV heads on this device.
        topk: pages that the indexer picks per query.
        q_heads: query heads on this device; ``None`` for a workspace without an output buffer.
        window: queries per window.
        group_size: queries per union, of all calls whatever their size: one that the engine takes, see
            :func:`.cuda.support.call_group_size`. Hopper's own engines always take 8.
        head_dim: elements per head of the output.
        dtype: dtype of the output (that of ``q``).
        pool_pages: most pages of an FP8 KV pool. The stream engine's tiles are then allocated at once, 16 KiB per page
            and KV head, and no later call allocates. ``None``: the first call that needs them allocates them, and a
            larger pool has them allocated anew; don't capture such a call in a CUDA Graph before it has run once, and
            keep to pools of that size.
        device: where the buffers lie.

    Raises:
        TypeError: a size is no integer, or ``dtype`` no dtype.
        ValueError: a size is below 1, ``group_size`` above 32, or there is no such kind of device.
    """

    def __init__(
        self,
        max_tokens: int,
        max_requests: int,
        *,
        kv_heads: int,
        topk: int,
        q_heads: int | None = None,
        window: int = 64,
        group_size: int = 8,
        head_dim: int = 128,
        dtype: torch.dtype = torch.bfloat16,
        pool_pages: int | None = None,
        device: torch.device | str,
    ) -> None:
        sizes = {
            "max_tokens": max_tokens,
            "max_requests": max_requests,
            "kv_heads": kv_heads,
            "topk": topk,
            "q_heads": 1 if q_heads is None else q_heads,
            "window": window,
            "group_size": group_size,
            "head_dim": head_dim,
            "pool_pages": 1 if pool_pages is None else pool_pages,
        }
        for name, size in sizes.items():
            if isinstance(size, bool) or not isinstance(size, int):
                got = f"{type(size).__name__} {size!r}"
                raise TypeError(f"Workspace: {name} must be an integer >= 1, got {got}")
            if size < 1:
                raise ValueError(f"Workspace: {name} must be an integer >= 1, got {size}")
        if group_size > 32:
            raise ValueError(f"Workspace: group_size must be an integer in 1..32, got {group_size}")
        if not isinstance(dtype, torch.dtype):
            raise TypeError(f"Workspace: dtype must be a torch.dtype, got {type(dtype).__name__} {dtype!r}")
        try:
            device = torch.device(device)
        except (RuntimeError, TypeError) as error:
            raise ValueError(f"Workspace: device must be a torch.device or its name, got {device!r}") from error
        self.max_tokens = max_tokens
        self.max_requests = max_requests
        self.kv_heads = kv_heads
        self.topk = topk
        self.q_heads = q_heads
        self.window = window
        self.group_size = group_size
        self.head_dim = head_dim
        self.dtype = dtype
        self.pool_pages = pool_pages

        groups = kv_heads * group_bound(max_tokens, max_requests, window, group_size)
        members = groups * group_size
        union = members * topk

        def ints(count: int) -> torch.Tensor:
            return torch.empty(count, dtype=torch.int32, device=device)

        self._perm = ints(kv_heads * max_tokens)
        self._pages = ints(union)
        self._slots = ints(union)
        self._masks = torch.empty(union, dtype=mask_dtype(group_size), device=device)
        self._counts = ints(groups)
        self._queries = ints(members)
        self._limits = ints(members)
        self._queue = ints(2 + groups)
        # The views handed out last: the layers of a forward pass ask for the same ones.
        self._last_perm: torch.Tensor | None = None
        self._last_plan: tuple[tuple[int, int, int], UnionPlan] | None = None
        self._out = None
        if q_heads is not None:
            self._out = torch.empty(max_tokens * q_heads * head_dim, dtype=dtype, device=device)
        # The tensors' own device: "cuda" given above reads "cuda:0" here and in every tensor to compare with.
        self.device = self._perm.device
        self._largest_tiles: ValueTiles | None = None
        self._tiles: ValueTiles | None = None
        if pool_pages is not None:
            self.value_tiles(pool_pages)

    def nbytes(self) -> int:
        """Return the device memory held, in bytes."""
        plan = (self._pages, self._slots, self._masks, self._counts, self._queries, self._limits, self._queue)
        held = [self._perm, *plan]
        if self._out is not None:
            held.append(self._out)
        if self._largest_tiles is not None:
            held += [self._largest_tiles.marks, self._largest_tiles.tiles]
        return sum(buffer.numel() * buffer.element_size() for buffer in held)

    def check_fits(self, tokens: int, requests: int = 0) -> None:
        """Raise ValueError naming the sizes when a call does not fit."""
        if tokens > self.max_tokens or requests > self.max_requests:
            raise ValueError(
                f"Workspace: a call of {tokens} tokens and {requests} requests is too large for a workspace of "
                f"max_tokens={self.max_tokens}, max_requests={self.max_requests}"
            )

    def perm(self, tokens: int) -> torch.Tensor:
        """Return the buffer of the query order, int32 ``[kv_heads, tokens]``."""
        if self._last_perm is None or self._last_perm.shape[1] != tokens:
            self.check_fits(tokens)
            self._last_perm = _view(self._perm, self.kv_heads, tokens)
        return self._last_perm

    def plan(self, tokens: int, requests: int, *, page_size: int = 128) -> UnionPlan:
        """Return a plan (``slots`` included) over the buffers; its contents are undefined."""
        sizes = (tokens, requests, page_size)
        if self._last_plan is not None and self._last_plan[0] == sizes:
            return self._last_plan[1]
        self.check_fits(tokens, requests)
        groups = group_bound(tokens, requests, self.window, self.group_size)
        union = (self.kv_heads, groups, self.group_size * self.topk)
        members = (self.kv_heads, groups, self.group_size)
        plan = UnionPlan(
            pages=_view(self._pages, *union),
            masks=_view(self._masks, *union),
            counts=_view(self._counts, self.kv_heads, groups),
            queries=_view(self._queries, *members),
            limits=_view(self._limits, *members),
            slots=_view(self._slots, *union),
            group_size=self.group_size,
            page_size=page_size,
            queue=_view(self._queue, 2 + self.kv_heads * groups),
        )
        self._last_plan = (sizes, plan)
        return plan

    def value_tiles(self, pool_pages: int) -> ValueTiles:
        """Return the tiles of a KV pool of ``pool_pages`` pages, between two calls.

        Raises:
            ValueError: the pool is larger than the workspace's ``pool_pages``.
            torch.OutOfMemoryError: they had to be allocated, see the constructor's ``pool_pages``.
        """
        if self._tiles is not None and self._tiles.marks.shape[1] == pool_pages:
            return self._tiles
        if self.pool_pages is not None and pool_pages > self.pool_pages:
            raise ValueError(
                f"Workspace: a KV pool of {pool_pages} pages is too large for a workspace of "
                f"pool_pages={self.pool_pages}"
            )
        largest = self._largest_tiles
        if largest is None or largest.marks.shape[1] < pool_pages:
            self._largest_tiles = self._tiles = largest = None  # so that the old ones' memory can be had
            largest = ValueTiles.empty(self.kv_heads, pool_pages, device=self.device)
            self._largest_tiles = self._tiles = largest
            return largest
        # Another shape over the same memory, whose marks a call with the last shape may have left set.
        self._tiles = ValueTiles(
            marks=_view(largest.marks.view(-1), self.kv_heads, pool_pages),
            tiles=_view(largest.tiles.view(-1), self.kv_heads, pool_pages, largest.tiles.shape[2]),
            dirty=True,
        )
        return self._tiles

    def out(self, tokens: int) -> torch.Tensor:
        """Return the output buffer, ``[tokens, q_heads, head_dim]``. Raises ValueError without ``q_heads``."""
        self.check_fits(tokens)
        if self._out is None or self.q_heads is None:
            raise ValueError("Workspace: it has no output buffer; give q_heads when making it")
        return _view(self._out, tokens, self.q_heads, self.head_dim)


def _view(buffer: torch.Tensor, *shape: int) -> torch.Tensor:
    count = 1
    for size in shape:
        count *= size
    return buffer[:count].view(shape)
