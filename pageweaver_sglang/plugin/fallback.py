"""FlashInfer's XQA for the Step 3 calls that PageWeaver's kernels don't cover (setting ``fallback_engine``).

Off by default. It computes the same attention as SGLang's own Step 3 where it covers the call: more than 16 pages per
query, and with ``engine: union8``, the paper's FP8 kernel, a BF16 KV cache. With an FP8 cache it is several times
faster than SGLang's, with a BF16 cache as fast (README, what falls back).

FlashInfer compiles a kernel for every combination of dtypes, head sizes and page size, which takes a minute or more:
the one of this server's KV pool is compiled while it starts, and calls of any other combination stay SGLang's.
"""

from __future__ import annotations

import logging
from typing import Any, NamedTuple

import torch

from pageweaver_sglang.config import Config
from pageweaver_sglang.flashinfer import xqa

from . import NAME
from .arguments import sparse_prefill_arguments
from .options import BackendError

logger = logging.getLogger(__name__)

XQA = "flashinfer-xqa"
"""The setting's value, and the arm under which these calls are counted."""


class Shape(NamedTuple):
    """What FlashInfer compiles a kernel for."""

    q_dtype: torch.dtype
    cache_dtype: torch.dtype
    head_dim: int
    gqa_ratio: int


class XqaFallback:
    """Serves Step 3 calls through FlashInfer.

    Args:
        function: FlashInfer's.
        pool_page_size: tokens that SGLang's KV pool keeps together.
        compiled: what its kernel is ready for.
    """

    def __init__(self, function: xqa.Function, *, pool_page_size: int, compiled: Shape):
        self._function = function
        self._pool_page_size = pool_page_size
        self._compiled = compiled

    def unsupported_reason(self, call: dict[str, Any]) -> str | None:
        """Why XQA does not serve a call of SGLang's Step 3, or None. Reads shapes, dtypes and strides only."""
        q, k_cache = call["q"], call["k_cache"]
        reason = xqa.xqa_unsupported_reason(
            q,
            k_cache,
            call["v_cache"],
            call["topk_idx"],
            page_size=call["block_size_k"],
            pool_page_size=self._pool_page_size,
            sink=call["sink"],
            loc_mapping=call.get("loc_mapping"),
            sm_scale=call.get("sm_scale"),
            k_scale=call.get("k_scale"),
        )
        if reason is not None:
            return reason
        asked = Shape(q.dtype, k_cache.dtype, q.shape[2], q.shape[1] // k_cache.shape[1])
        if asked != self._compiled:
            return "not the dtypes and heads of the KV pool, for which its kernel was compiled"
        return None

    def __call__(self, call: dict[str, Any]) -> torch.Tensor:
        """Serve a call that :meth:`unsupported_reason` covers: ``[tokens, q_heads, head_dim]``, q's dtype."""
        return xqa.sparse_prefill(
            self._function,
            **sparse_prefill_arguments(call),
            pool_page_size=self._pool_page_size,
        )


def prepare(
    config: Config,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    *,
    q_heads: int,
    q_dtype: torch.dtype,
    pool_page_size: int,
    page_size: int,
) -> tuple[XqaFallback | None, str]:
    """Compile and try what the setting ``fallback_engine`` asks for, while the server starts.

    Args:
        config: the settings.
        k_cache: keys of any layer as Step 3 gets them, ``[slots, kv_heads, head_dim]``.
        v_cache: its values.
        q_heads: query heads of this rank.
        q_dtype: of the queries.
        pool_page_size: tokens per page of SGLang's KV pool.
        page_size: tokens per logical page.

    Returns:
        What serves (None: SGLang's own Step 3), and words for the STATUS line.

    Raises:
        BackendError: FlashInfer is asked for and can't be imported.
    """
    if config.mode == "native" or config.fallback_engine == "native":
        return None, "native"
    if config.precision == "high" and k_cache.dtype == torch.float8_e4m3fn:  # XQA rounds Q and the weights to FP8 then
        return None, f"native ({XQA} has no precision high for an FP8 cache)"
    try:
        function = xqa.load()
    except xqa.FlashInferError as error:
        raise BackendError(
            f"--attention-backend {NAME}: fallback_engine {XQA}: {error}, or set PAGEWEAVER_FALLBACK_ENGINE=native."
        ) from error
    try:
        fallback = _tried(function, k_cache, v_cache, q_heads, q_dtype, pool_page_size, page_size)
    except Exception as error:  # FlashInfer's builds and checks raise anything
        said = (str(error).splitlines() or [""])[0]
        reason = f"{type(error).__name__}: {said}"
    else:
        if isinstance(fallback, XqaFallback):
            return fallback, XQA
        reason = fallback
    logger.warning(
        "pageweaver: fallback_engine %s can't serve here, so that SGLang's own Step 3 serves what the kernels don't "
        "cover: %s",
        XQA,
        reason,
    )
    return None, f"native ({XQA} can't serve here)"


def _tried(
    function: xqa.Function,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    q_heads: int,
    q_dtype: torch.dtype,
    pool_page_size: int,
    page_size: int,
) -> XqaFallback | str:
    """The fallback after a first call of one query, which compiles its kernel; or why XQA can't serve here."""
    device = k_cache.device
    if reason := xqa.device_reason(device):
        return reason
    _, kv_heads, head_dim = k_cache.shape
    shape = Shape(q_dtype, k_cache.dtype, head_dim, q_heads // kv_heads)
    fallback = XqaFallback(function, pool_page_size=pool_page_size, compiled=shape)
    one = torch.ones(1, dtype=torch.int32, device=device)
    call = {
        "q": torch.zeros(1, q_heads, head_dim, dtype=q_dtype, device=device),
        "k_cache": k_cache,
        "v_cache": v_cache,
        "topk_idx": torch.zeros(kv_heads, 1, 1, dtype=torch.int32, device=device),
        "req_to_token": torch.zeros(1, 1, dtype=torch.int32, device=device),
        "slot_ids": torch.zeros(1, dtype=torch.int64, device=device),
        "cu_seqlens": torch.arange(2, dtype=torch.int32, device=device),
        "seq_lens": one,
        "prefix_lens": one - 1,
        "block_size_k": page_size,
        "sink": None,
    }
    if reason := fallback.unsupported_reason(call):
        return reason
    out = fallback(call).float().view(kv_heads, -1, head_dim)
    seen = v_cache[0].float()[:, None].expand_as(out)  # a query that sees one token gets its value
    if not torch.allclose(out, seen, rtol=0.05, atol=1e-3, equal_nan=True):
        return "its kernel gave a wrong answer to a first call"
    return fallback
