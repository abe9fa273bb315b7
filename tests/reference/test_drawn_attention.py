"""``sparse_prefill`` of the reference engine on drawn packed requests, against one query and one token at a time."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import pageweaver_sglang as pw
from tests import naive

HEAD_DIM = 8


@st.composite
def calls(draw: st.DrawFn) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
    """Arguments and options: packed requests (empty ones, ones that end before their queries), odd ids, any cells."""
    page_size = draw(st.sampled_from([1, 3, 16]))
    kv_heads, ratio, k = draw(st.integers(1, 2)), draw(st.integers(1, 3)), draw(st.integers(1, 5))
    requests = draw(st.lists(st.tuples(st.integers(0, 9), st.integers(0, 40)), max_size=4))
    padding, cut = draw(st.integers(0, 3)), draw(st.sampled_from([0, 0, 4]))
    lengths = [length for length, _ in requests]
    sequences = [max(0, length + prefix - cut) for length, prefix in requests]
    tokens = sum(lengths) + padding
    largest = draw(st.sampled_from([1, 4, 60]))
    ids = st.integers(0, largest) | st.sampled_from([-1, -1, -(1 << 31), (1 << 31) - 1])
    row = st.lists(ids, min_size=k, max_size=k)
    topk_idx = [draw(st.lists(row, min_size=tokens, max_size=tokens)) for _ in range(kv_heads)]

    random = torch.Generator().manual_seed(draw(st.integers(0, 1 << 16)))
    slots, rows = sum(sequences) + 5, len(requests) + draw(st.integers(0, 2))
    cells = torch.randperm(slots, generator=random)[: sum(sequences)].split(sequences)
    slot_ids = torch.randperm(rows, generator=random)[: len(requests)]
    table = torch.full((rows, max(sequences, default=0) + 2), draw(st.sampled_from([0, -1, 1 << 30])))
    for slot, part in zip(slot_ids.tolist(), cells, strict=True):
        table[slot, : len(part)] = part
    # Cells of nobody are NaN: one that is read shows.
    caches = torch.full((2, slots, kv_heads, HEAD_DIM), float("nan"))
    owned = torch.cat([*cells, torch.zeros(0, dtype=torch.int64)])
    caches[:, owned] = torch.randn(2, len(owned), kv_heads, HEAD_DIM, generator=random)
    arguments = {
        "q": torch.randn(tokens, kv_heads * ratio, HEAD_DIM, generator=random, dtype=torch.float64),
        "k_cache": caches[0],
        "v_cache": caches[1],
        "topk_idx": torch.tensor(topk_idx, dtype=torch.int32).view(kv_heads, tokens, k),
        "req_to_token": table.to(torch.int32),
        "slot_ids": slot_ids.to(draw(st.sampled_from([torch.int32, torch.int64]))),
        "cu_seqlens": torch.tensor([0, *lengths]).cumsum(0).to(torch.int32),
        "seq_lens": torch.tensor(sequences, dtype=torch.int32),
        "prefix_lens": torch.tensor([prefix for _, prefix in requests], dtype=torch.int32),
    }
    scale = st.none() | st.sampled_from([0.25, 3.0])
    options = {name: draw(scale) for name in ("sm_scale", "k_scale", "v_scale")}
    return arguments, {**options, "page_size": page_size}


@given(call=calls(), in_tensors=st.booleans())
@settings(max_examples=80, deadline=None)
def test_drawn_calls(call, in_tensors):
    arguments, options = call
    given_options = dict(options)
    if in_tensors:
        for name in ("k_scale", "v_scale"):
            if options[name] is not None:
                given_options[name] = torch.tensor([options[name]])
    out = pw.sparse_prefill(**arguments, **given_options)
    expected = naive.attention(
        *(arguments[name].double().numpy() for name in ("q", "k_cache", "v_cache")),
        *(
            arguments[name].tolist()
            for name in ("topk_idx", "req_to_token", "slot_ids", "cu_seqlens", "seq_lens", "prefix_lens")
        ),
        sm_scale=options["sm_scale"] or HEAD_DIM**-0.5,
        k_scale=options["k_scale"] or 1.0,
        v_scale=options["v_scale"] or 1.0,
        page_size=options["page_size"],
    )
    np.testing.assert_allclose(out.numpy(), expected, rtol=1e-9, atol=1e-12)


@given(call=calls(), order=st.randoms(use_true_random=False))
@settings(max_examples=30, deadline=None)
def test_the_order_of_requests_changes_nothing(call, order):
    """The same requests packed in another order give the same rows."""
    arguments, options = call
    bounds = arguments["cu_seqlens"].tolist()
    requests = list(range(len(bounds) - 1))
    order.shuffle(requests)
    rows = [row for request in requests for row in range(bounds[request], bounds[request + 1])]
    rows += range(bounds[-1], len(arguments["q"]))
    moved = arguments | {
        "q": arguments["q"][rows],
        "topk_idx": arguments["topk_idx"][:, rows].contiguous(),
        **{name: arguments[name][requests] for name in ("slot_ids", "seq_lens", "prefix_lens")},
        "cu_seqlens": torch.tensor([0, *(bounds[r + 1] - bounds[r] for r in requests)]).cumsum(0).to(torch.int32),
    }
    here, there = (pw.sparse_prefill(**one, **options) for one in (arguments, moved))
    torch.testing.assert_close(here[rows], there, rtol=1e-12, atol=1e-14)
