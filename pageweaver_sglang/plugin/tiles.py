"""V's tiles of the stream engine in a server: allocated while it starts, one set per KV pool for all layers.

Every layer's pages lie in a pool of the same size and calls follow one another, so that all layers and all backends of
a process can share one set. SGLang launches forward passes from one thread, on one stream: the two halves of two-batch
overlap alternate there stage by stage (what overlaps is the communication), and PD multiplexing waits for both of its
streams before it changes them. Nothing here relies on that: a turn is taken under a lock, and a turn on another stream
waits for the one before.
"""

from __future__ import annotations

import contextlib
import logging
import threading
from collections.abc import Iterator

import torch

from pageweaver_sglang.checks import UnsupportedError
from pageweaver_sglang.config import Config
from pageweaver_sglang.cuda.support import PAGE_SIZE, CallKind, engine_on, reads_value_tiles
from pageweaver_sglang.value_tiles import ValueTiles

logger = logging.getLogger(__name__)


class SharedTiles:
    """Value tiles whose users take turns."""

    def __init__(self, tiles: ValueTiles):
        self._tiles = tiles
        self._lock = threading.Lock()
        self._stream = torch.cuda.current_stream(tiles.marks.device)

    @contextlib.contextmanager
    def turn(self) -> Iterator[ValueTiles]:
        """While this runs, launches on the current stream may use the tiles.

        What a CUDA graph captures runs at replay, unseen here: SGLang replays on the stream of its other work.
        """
        with self._lock:
            if not torch.cuda.is_current_stream_capturing():
                stream = torch.cuda.current_stream(self._tiles.marks.device)
                if stream != self._stream:
                    stream.wait_stream(self._stream)
                    self._stream = stream
            yield self._tiles


_of_pools: dict[tuple[torch.device, int, int], SharedTiles | None] = {}
"""By device, KV heads and pages; None where memory was not to be had."""


def reserve(config: Config, v_cache: torch.Tensor) -> tuple[Config, str]:
    """Allocate the tiles of a pool, before anything is captured.

    Args:
        config: the settings.
        v_cache: V of any layer, ``[slots, kv_heads, head_dim]``.

    Returns:
        The settings to serve with (``engine: union8`` where there is no memory for tiles), words for the STATUS line.
        With ``precision: high``, which no other engine has, the settings stay and :func:`taken` refuses every call.
    """
    if not _needed(config, v_cache):
        return config, "none"
    mib = ValueTiles.nbytes(*_pool(v_cache)) / 2**20
    try:
        with taken(config, v_cache) as (served_with, tiles):
            return served_with, f"{mib:,.0f} MiB" if tiles is not None else f"none ({mib:,.0f} MiB not to be had)"
    except UnsupportedError:
        return config, f"none ({mib:,.0f} MiB not to be had, so that SGLang serves Step 3)"


@contextlib.contextmanager
def taken(config: Config, v_cache: torch.Tensor) -> Iterator[tuple[Config, ValueTiles | None]]:
    """While this runs, one call may use the tiles of its pool.

    Yields the settings to serve it with, and the tiles; None for calls that use none. A pool that :func:`reserve` has
    not seen gets its tiles at its first call outside of a capture.

    Raises:
        UnsupportedError: there are no tiles, and ``precision: high`` cannot do without.
    """
    if not _needed(config, v_cache):
        yield config, None
        return
    key = (v_cache.device, *_pool(v_cache))
    if key not in _of_pools and not torch.cuda.is_current_stream_capturing():
        _of_pools[key] = _allocate(*key, config)
    shared = _of_pools.get(key)
    if shared is None and config.precision == "high":
        raise UnsupportedError("no value tiles, which precision high needs")
    if shared is None:
        yield config.model_copy(update={"engine": "union8"}), None
        return
    with shared.turn() as tiles:
        yield config, tiles


def _needed(config: Config, v_cache: torch.Tensor) -> bool:
    """Whether calls on this cache read tiles."""
    if config.mode == "native" or not v_cache.is_cuda:
        return False
    kind = CallKind(v_cache.dtype, v_cache.shape[2], PAGE_SIZE)
    engine = engine_on(config.engine, torch.cuda.get_device_capability(v_cache.device), kind)
    return reads_value_tiles(engine, v_cache.dtype)


def _pool(v_cache: torch.Tensor) -> tuple[int, int]:
    """(KV heads, pages)."""
    return v_cache.shape[1], v_cache.shape[0] // PAGE_SIZE


def _allocate(device: torch.device, kv_heads: int, pool_pages: int, config: Config) -> SharedTiles | None:
    try:
        return SharedTiles(ValueTiles.empty(kv_heads, pool_pages, device=device))
    except torch.OutOfMemoryError:
        logger.warning(
            "pageweaver: no memory on %s for value tiles (%s MiB: %d KV heads, %d pages), so that %s serves "
            "instead of %s. A smaller --mem-fraction-static leaves room for them.",
            device,
            f"{ValueTiles.nbytes(kv_heads, pool_pages) / 2**20:,.0f}",
            kv_heads,
            pool_pages,
            *(("SGLang's own Step 3", "precision high") if config.precision == "high" else ("engine union8", "stream")),
        )
        return None
