"""One page list per query, as paged-attention kernels want it: physical pages, the query's own page last.

Such kernels know no causal mask inside a list of one query: all pages but the last count as full, and the list's length
in tokens says where the last one ends. So pages behind the query are left out, and its own page comes last.
"""

from __future__ import annotations

from typing import Literal

import torch

Order = Literal["any", "ascending", "own_last"]
"""What is known of the rows of ``topk_idx``, each stronger than the one before.

``any`` is nothing. ``ascending``: every row is ascending and distinct, holds no page behind the query, and -1 only at
its end, and every query sees something. ``own_last``: moreover every row ends with the query's own page.
"""

_NO_PAGE = torch.iinfo(torch.int32).max


class PageLists:
    """Builds the lists of one batch on its device, without a synchronisation and by operations of static shape.

    What depends on the lengths alone is made here, once for all KV heads (and layers) of a batch.

    Args:
        req_to_token: int32 ``[request slots, positions]``, cache slot of every token.
        slot_ids: integer ``[requests]``, rows of ``req_to_token``.
        cu_seqlens: int32 ``[requests + 1]``.
        seq_lens: int32 ``[requests]``.
        prefix_lens: int32 ``[requests]``.
        tokens: queries, those behind the last request included: their lists are empty.
        page_size: tokens per logical page.
        kernel_page_size: tokens per page of the lists, a divisor of ``page_size`` (default: that itself).
    """

    def __init__(
        self,
        req_to_token: torch.Tensor,
        slot_ids: torch.Tensor,
        cu_seqlens: torch.Tensor,
        seq_lens: torch.Tensor,
        prefix_lens: torch.Tensor,
        *,
        tokens: int,
        page_size: int,
        kernel_page_size: int | None = None,
    ) -> None:
        self.page_size = page_size
        self._step = page_size if kernel_page_size is None else kernel_page_size
        ids = torch.arange(tokens, dtype=torch.int32, device=cu_seqlens.device)
        # The request that ends first behind a query is the query's: requests without a token are passed over.
        request = torch.searchsorted(cu_seqlens[1:], ids, right=True, out_int32=True)
        real = request < len(slot_ids)
        request = request.clamp(max=len(slot_ids) - 1).long()
        limit = torch.minimum(prefix_lens[request] + ids - cu_seqlens[request], seq_lens[request] - 1)
        limit = torch.where(real, limit, -1)
        self._request = request[:, None]
        self._visible = (limit >= 0)[:, None]
        limit = limit.clamp(min=0)
        self.own = (limit // page_size).to(torch.int32)
        """int32 ``[tokens]``, the logical page that each query stands on (0 where it sees nothing)."""
        self.visible = self._visible.squeeze(1)
        """bool ``[tokens]``, whether a query has a position at all."""
        self._tail = (limit % page_size + 1).to(torch.int32)
        # Physical page of every logical one of every request: what any paged backend keeps per batch.
        self._pages = req_to_token[slot_ids.long(), :: self._step] // self._step

    def build(self, topk_idx: torch.Tensor, order: Order = "any") -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """The lists of some KV heads.

        Args:
            topk_idx: int32 ``[..., tokens, k]``, picked logical pages.
            order: what is known of the rows.

        Returns:
            physical pages of ``kernel_page_size`` tokens, int32 ``[..., tokens, k * page_size / kernel_page_size]``
            (any page that exists behind a list); logical pages per list, int32 ``[..., tokens]``; and visible tokens of
            a list's last logical page, int32 ``[..., tokens]``.
        """
        if order == "any":
            ids, count = self.sorted(topk_idx)
            ids = ids.masked_fill(ids == _NO_PAGE, 0)
        else:
            count = (topk_idx >= 0).sum(-1, dtype=torch.int32)
            ids = topk_idx.clamp(min=0)
        table = self._pages[self._request, self._kernel_pages(ids)]
        if order == "any":
            # A query that sees nothing may belong to no request: nothing of a request's row is to be relied on.
            table = table.masked_fill((count == 0)[..., None], 0)
        if order == "own_last":
            return table, count, self._tail
        last = ids.gather(-1, (count - 1).clamp(min=0).long()[..., None]).squeeze(-1)
        return table, count, torch.where(last == self.own, self._tail, self.page_size)

    def lengths(self, count: torch.Tensor, tail: torch.Tensor) -> torch.Tensor:
        """Visible tokens of lists of ``count`` logical pages whose last one ends after ``tail`` tokens, int32."""
        return torch.add(tail - self.page_size, count, alpha=self.page_size)

    def sorted(self, topk_idx: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Distinct visible pages of each query, ascending, then the largest int32; and how many of them, int32."""
        hidden = (topk_idx < 0) | (topk_idx > self.own[:, None]) | ~self._visible
        ids = topk_idx.masked_fill(hidden, _NO_PAGE).sort(dim=-1).values
        repeated = ids[..., 1:] == ids[..., :-1]
        ids[..., 1:].masked_fill_(repeated, _NO_PAGE)
        ids = ids.sort(dim=-1).values
        return ids, (ids != _NO_PAGE).sum(-1, dtype=torch.int32)

    def _kernel_pages(self, ids: torch.Tensor) -> torch.Tensor:
        """Numbers of the kernel's pages inside a request, for logical ones."""
        parts = self.page_size // self._step
        if parts == 1:
            return ids
        part = torch.arange(parts, dtype=torch.int32, device=ids.device)
        # Rows of req_to_token can end inside a logical page; what stands behind is behind the list's length too.
        return (ids[..., None] * parts + part).flatten(-2).clamp(max=self._pages.shape[1] - 1)
