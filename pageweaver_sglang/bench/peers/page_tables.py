"""The page lists of one input set. What its rows are like is found out beforehand, so that no arm pays for more."""

from __future__ import annotations

import torch

from pageweaver_sglang.flashinfer.page_lists import Order, PageLists

from ..inputs import Step3Inputs
from ..protocol import ArmUnavailable


class PageTables:
    """Builds the lists of one input set on its device; what depends on lengths alone is made once, as a server would.

    Attributes:
        tokens: queries that have a list; the padding rows behind the last request have none.
        ascending: every row is ascending and distinct, holds no page behind the query, and -1 only at its end; then
            nothing gets sorted.
        own_last: moreover every row ends with the query's own page, as SGLang's indexer writes it.
        lowest: fewest pages in a list.

    Raises:
        ArmUnavailable: a query sees nothing, so that its list would be empty.
    """

    def __init__(self, inputs: Step3Inputs) -> None:
        self.tokens = tokens = int(inputs.cu_seqlens[-1])
        self._topk = inputs.topk_idx[:, :tokens]
        lengths = (inputs.cu_seqlens, inputs.seq_lens, inputs.prefix_lens)
        self._lists = PageLists(
            inputs.req_to_token, inputs.slot_ids, *lengths, tokens=tokens, page_size=inputs.page_size
        )
        self.ascending = bool(self._rows_are_ascending())
        self.own_last = self.ascending and bool((self._topk.amax(2) == self._lists.own).all())
        self._order: Order = "own_last" if self.own_last else "ascending" if self.ascending else "any"
        self.lowest = min(int(self._lists.sorted(head)[1].min()) for head in self._topk) if tokens else 0
        if self.lowest == 0:
            raise ArmUnavailable("a query sees nothing, and this kernel takes no empty page list")

    def build(self, kv_head: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """The lists of one KV head, as :meth:`PageLists.build` has them."""
        return self._lists.build(self._topk[kv_head], self._order)

    def tokens_of(self, count: torch.Tensor, tail: torch.Tensor) -> torch.Tensor:
        """Visible tokens of lists of ``count`` pages whose last one ends after ``tail`` tokens, int32."""
        return self._lists.lengths(count, tail)

    def _rows_are_ascending(self) -> torch.Tensor:
        """No -1 before an id, ids strictly ascending, none behind the query's own page."""
        ids = self._topk
        step = (ids[..., 1:] < 0) | ((ids[..., :-1] >= 0) & (ids[..., 1:] > ids[..., :-1]))
        return step.all() & (ids <= self._lists.own[:, None]).all() & self._lists.visible.all()
