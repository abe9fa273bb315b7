"""Block-sparse causal attention over picked pages, in float64 and without unions."""

from __future__ import annotations

from itertools import pairwise

import torch

from .. import checks
from ..auto.history import Decision
from ..config import Config
from ..value_tiles import ValueTiles
from ..workspace import Workspace
from .layout import page_counts, positions, support_sets

# Scores held at once (float64): bounds the memory of a batch of queries to about 100 MB and its temporaries.
_BATCH_SCORES = 12_000_000


def sparse_prefill(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    topk_idx: torch.Tensor,
    req_to_token: torch.Tensor,
    slot_ids: torch.Tensor,
    cu_seqlens: torch.Tensor,
    seq_lens: torch.Tensor,
    prefix_lens: torch.Tensor,
    *,
    sm_scale: float | None = None,
    k_scale: float | torch.Tensor | None = None,
    v_scale: float | torch.Tensor | None = None,
    page_size: int = 128,
    config: Config | None = None,
    workspace: Workspace | None = None,
    value_tiles: ValueTiles | None = None,
    decision: Decision | None = None,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """Attend every query to the visible tokens of the pages it picked, in float64.

    Arguments, result and errors are those of :func:`pageweaver_sglang.sparse_prefill`, for any head size, GQA ratio,
    page size and k. ``config``, ``workspace``, ``value_tiles`` and ``decision`` are checked and otherwise unused: the
    result never lies in the workspace, so that it can be compared with one that does.

    Raises:
        ValueError: besides bad arguments, a picked page has a token whose cache slot does not exist.
    """
    checks.check_sparse_prefill(
        q,
        k_cache,
        v_cache,
        topk_idx,
        req_to_token,
        slot_ids,
        cu_seqlens,
        seq_lens,
        prefix_lens,
        sm_scale=sm_scale,
        k_scale=k_scale,
        v_scale=v_scale,
        page_size=page_size,
        config=config,
        workspace=workspace,
        value_tiles=value_tiles,
        decision=decision,
        out=out,
    )
    tokens, q_heads, head_dim = q.shape
    kv_heads, k = topk_idx.shape[0], topk_idx.shape[2]
    ratio = q_heads // kv_heads
    scale = (head_dim**-0.5 if sm_scale is None else sm_scale) * _scale(k_scale)
    bounds = cu_seqlens.tolist()
    position = positions(bounds, tokens, prefix_lens)
    supports = support_sets(topk_idx, page_counts(bounds, tokens, seq_lens, page_size))
    if out is None:
        out = torch.empty_like(q, memory_format=torch.contiguous_format)
    out.zero_()

    batch = max(1, _BATCH_SCORES // (ratio * k * page_size))
    lengths, rows = seq_lens.tolist(), slot_ids.tolist()
    for request, (start, end) in enumerate(pairwise(bounds)):
        cells = req_to_token[rows[request], : lengths[request]]
        for first in range(start, end, batch):
            ids = slice(first, min(first + batch, end))
            for head in range(kv_heads):
                heads = slice(head * ratio, (head + 1) * ratio)
                out[ids, heads] = (
                    _attend(
                        q[ids, heads].double() * scale,
                        k_cache[:, head],
                        v_cache[:, head],
                        supports[head, ids],
                        position[ids],
                        cells,
                        page_size,
                    )
                    * _scale(v_scale)
                ).to(q.dtype)
    return out


def _scale(scale: float | torch.Tensor | None) -> float:
    return 1.0 if scale is None else float(scale)


def _attend(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    supports: torch.Tensor,
    position: torch.Tensor,
    cells: torch.Tensor,
    page_size: int,
) -> torch.Tensor:
    """Attend some queries of one request and KV head.

    Args:
        q: float64 ``[queries, heads, head_dim]``, scaled.
        k_cache: ``[slots, head_dim]``.
        v_cache: ``[slots, head_dim]``.
        supports: int64 ``[queries, k]``, distinct pages, -1 for nothing.
        position: int64 ``[queries]``.
        cells: int32 ``[seq_len]``, cache slot of each of the request's tokens.
        page_size: tokens per page.

    Returns:
        float64, shape of ``q``.
    """
    queries, heads, _ = q.shape
    k = supports.shape[1]
    scores = q.new_full((queries, k, heads, page_size), -torch.inf)
    visits = []
    for page in supports[supports >= 0].unique().tolist():
        where = _cells_of_page(cells, page, page_size, k_cache.shape[0])
        query, column = (supports == page).nonzero(as_tuple=True)
        token = torch.arange(page * page_size, page * page_size + len(where), device=q.device)
        hidden = token > position[query, None, None]
        score = (q[query] @ k_cache[where].double().T).masked_fill(hidden, -torch.inf)
        scores[query, column, :, : len(where)] = score
        visits.append((query, column, where))

    # A query that sees nothing has only -inf: a finite maximum turns its weights to exact zeros.
    scores -= scores.amax(dim=(1, 3), keepdim=True).clamp(min=torch.finfo(torch.float64).min)
    weights = scores.exp_()
    total = weights.sum(dim=(1, 3))
    out = torch.zeros_like(q)
    for query, column, where in visits:
        # A query has a page in one column only, so that no index repeats.
        out[query] += weights[query, column, :, : len(where)] @ v_cache[where].double()
    return out / torch.where(total > 0, total, 1.0)[..., None]


def _cells_of_page(cells: torch.Tensor, page: int, page_size: int, slots: int) -> torch.Tensor:
    """Return the cache slots of a page's tokens below ``seq_len``, int64. Raises ValueError for one out of range."""
    where = cells[page * page_size : (page + 1) * page_size].to(torch.int64)
    low, high = int(where.min()), int(where.max())
    if low < 0 or high >= slots:
        raise ValueError(
            f"sparse_prefill: req_to_token must be in 0..{slots - 1} (slots of k_cache) for the tokens of picked pages,"
            f" got {low}..{high} on page {page}"
        )
    return where
