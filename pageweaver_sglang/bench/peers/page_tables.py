"""One page list per query, as paged-attention kernels want it: physical pages, the query's own page last.

Such kernels know no causal mask inside a list of one query: all pages but the last count as full, and the list's length
in tokens says where the last one ends. So pages behind the query are left out, and its own page comes last.
"""

from __future__ import annotations

import torch

from pageweaver_sglang.reference.layout import per_token, positions

from ..inputs import Step3Inputs
from ..protocol import ArmUnavailable

_NO_PAGE = torch.iinfo(torch.int32).max


class PageTables:
    """Builds the lists of one input set on its device; what depends on lengths alone is made once, as a server would.

    Attributes:
        tokens: queries that have a list; the padding rows behind the last request have none.
        ascending: every row is ascending and distinct, holds no page behind the query, and -1 only at its end; then
            nothing gets sorted. Found out beforehand, so that no arm pays for a generality that the input doesn't need.
        own_last: moreover every row ends with the query's own page, as SGLang's indexer writes it.
        lowest: fewest pages in a list.

    Raises:
        ArmUnavailable: a query sees nothing, so that its list would be empty.
    """

    def __init__(self, inputs: Step3Inputs) -> None:
        bounds = inputs.cu_seqlens.tolist()
        self.tokens = tokens = bounds[-1]
        self._topk, self._page_size = inputs.topk_idx[:, :tokens], inputs.page_size
        requests = torch.arange(len(inputs.slot_ids), device=inputs.slot_ids.device)
        self._request = per_token(bounds, tokens, requests, 0)[:, None]
        position = positions(bounds, tokens, inputs.prefix_lens)
        limit = torch.minimum(position, per_token(bounds, tokens, inputs.seq_lens, 0) - 1)
        self._own = (limit.clamp(min=0) // self._page_size).to(torch.int32)
        self._visible = limit >= 0
        self._tail = (limit.clamp(min=0) % self._page_size + 1).to(torch.int32)
        # Physical page of every logical page of every request: what any paged backend keeps per batch.
        self._pages = inputs.req_to_token[inputs.slot_ids.long(), :: self._page_size] // self._page_size
        self.ascending = bool(self._rows_are_ascending())
        self.own_last = self.ascending and bool((self._topk.amax(2) == self._own).all())
        self._repeats = not self.ascending and bool(self._has_repeats())
        self.lowest = min(int(self._sorted(head)[1].min()) for head in range(len(self._topk))) if tokens else 0
        if self.lowest == 0:
            raise ArmUnavailable("a query sees nothing, and this kernel takes no empty page list")

    def build(self, kv_head: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """The lists of one KV head, by device operations of static shape.

        Returns:
            physical pages int32 ``[tokens, k]`` (page of logical page 0 behind a list), pages per list int32
            ``[tokens]``, and visible tokens of a list's last page int32 ``[tokens]``.
        """
        if self.ascending:
            ids = self._topk[kv_head]
            count = (ids >= 0).sum(1, dtype=torch.int32)
            table = self._pages[self._request, ids.clamp(min=0)]
        else:
            ids, count = self._sorted(kv_head)
            table = self._pages[self._request, ids.masked_fill(ids == _NO_PAGE, 0)]
        if self.own_last:
            return table, count, self._tail
        last = ids.gather(1, (count - 1).clamp(min=0).long()[:, None]).squeeze(1)
        return table, count, torch.where(last == self._own, self._tail, self._page_size)

    def tokens_of(self, count: torch.Tensor, tail: torch.Tensor) -> torch.Tensor:
        """Visible tokens of lists of ``count`` pages whose last one ends after ``tail`` tokens, int32."""
        return torch.add(tail - self._page_size, count, alpha=self._page_size)

    def _sorted(self, kv_head: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Distinct visible pages of each query, ascending, then a large number; and how many."""
        ids = self._topk[kv_head]
        hidden = (ids < 0) | (ids > self._own[:, None]) | ~self._visible[:, None]
        ids = ids.masked_fill(hidden, _NO_PAGE).sort(dim=1).values
        if self._repeats:
            repeated = torch.zeros_like(ids, dtype=torch.bool)
            repeated[:, 1:] = ids[:, 1:] == ids[:, :-1]
            ids = ids.masked_fill(repeated, _NO_PAGE).sort(dim=1).values
        return ids, (ids != _NO_PAGE).sum(1, dtype=torch.int32)

    def _has_repeats(self) -> torch.Tensor:
        ids = self._topk.sort(dim=2).values
        return ((ids[..., 1:] == ids[..., :-1]) & (ids[..., 1:] >= 0)).any()

    def _rows_are_ascending(self) -> torch.Tensor:
        """No -1 before an id, ids strictly ascending, none behind the query's own page."""
        ids = self._topk
        step = (ids[..., 1:] < 0) | ((ids[..., :-1] >= 0) & (ids[..., 1:] > ids[..., :-1]))
        return step.all() & (ids <= self._own[:, None]).all() & self._visible.all()
