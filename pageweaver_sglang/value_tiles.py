"""Where the stream engine keeps the pages of V that a call attends to, transposed."""

from __future__ import annotations

import torch

TILE_BYTES = 128 * 128
"""Bytes of one page of V of one KV head: 128 tokens x 128 dims, E4M3."""


class ValueTiles:
    """One transposed tile for every page of a KV pool, and the marks that say which pages a call needs.

    Memory: as much as one layer's V cache, 16 KiB per page and KV head, and 4 bytes for the mark. Nothing in it
    outlives a call, so that all layers can share one. It serves one call at a time, in stream order.

    A call goes ``begin`` (the marks are all zero from here), union preparation (marks the pages it lists),
    :func:`.cuda.ops.value_tiles` (transposes the marked pages and clears their marks), ``end``, attention. A call that
    fails in between leaves marks behind; the next ``begin`` clears them. That matters: a mark too high would keep what
    lies behind a sequence's end, NaN included.

    Attributes:
        marks: int32 ``[kv_heads, pool_pages]``, contiguous: tokens of the page that belong to a request (1 to 128), 0
            for a page that nobody picked. All zero between calls.
        tiles: uint8 ``[kv_heads, pool_pages, 16384]``, contiguous: V of a page as ``kernels/value_tiles.cuh`` lays it
            out. Only the tiles of pages that the current call picked mean anything.
    """

    def __init__(self, marks: torch.Tensor, tiles: torch.Tensor, *, dirty: bool = False) -> None:
        """Keep both tensors. ``dirty``: the marks may hold anything, and the next call clears them first."""
        self.marks, self.tiles = marks, tiles
        self._in_use = dirty
        self._only_recorded = False

    @classmethod
    def empty(cls, kv_heads: int, pool_pages: int, *, device: torch.device | str) -> ValueTiles:
        """Allocate both: the marks zero, the tiles undefined.

        Raises:
            ValueError: a size is no integer of at least 0.
            torch.OutOfMemoryError: there is no room.
        """
        for name, size in (("kv_heads", kv_heads), ("pool_pages", pool_pages)):
            if isinstance(size, bool) or not isinstance(size, int) or size < 0:
                raise ValueError(f"ValueTiles.empty: {name} must be an integer >= 0, got {size!r}")
        return cls(
            marks=torch.zeros(kv_heads, pool_pages, dtype=torch.int32, device=device),
            tiles=torch.empty(kv_heads, pool_pages, TILE_BYTES, dtype=torch.uint8, device=device),
        )

    def begin(self) -> torch.Tensor:
        """Return the marks for the union preparation; clears them first when the call before did not get to its end."""
        if self._in_use:
            self.marks.zero_()
            # A graph that is being captured clears them when it is replayed, and not now.
            self._only_recorded = self.marks.is_cuda and torch.cuda.is_current_stream_capturing()
        self._in_use = True
        return self.marks

    def end(self) -> None:
        """Note that the marks have been cleared again, by a launch that is in the stream."""
        self._in_use, self._only_recorded = self._only_recorded, False

    @staticmethod
    def nbytes(kv_heads: int, pool_pages: int) -> int:
        """Return the device memory, in bytes, for a pool of ``pool_pages`` pages."""
        return kv_heads * pool_pages * (TILE_BYTES + 4)
