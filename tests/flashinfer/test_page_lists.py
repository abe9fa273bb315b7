"""Page lists per query against a naive version in plain Python."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from pageweaver_sglang.flashinfer.page_lists import PageLists
from tests.generators import CASE_NAMES, make_case
from tests.naive import support_set


def naive_lists(case, head, step):
    """(physical pages of ``step`` tokens that hold visible ones, visible tokens) of every query, padding rows too."""
    size = case.page_size
    bounds = case.cu_seqlens.tolist()
    lists = []
    for request, prefix in enumerate(case.prefix_lens.tolist()):
        length = int(case.seq_lens[request])
        table = case.req_to_token[int(case.slot_ids[request])].tolist()
        for query in range(bounds[request], bounds[request + 1]):
            limit = min(prefix + query - bounds[request], length - 1)
            picked = support_set(case.topk_idx[head, query].tolist(), length, size)
            tokens = [
                token for page in sorted(picked) for token in range(page * size, min((page + 1) * size, limit + 1))
            ]
            pages = list(dict.fromkeys(token // step for token in tokens))
            lists.append(([table[page * step] // step for page in pages], len(tokens)))
    return lists + [([], 0)] * (len(case.q) - len(lists))


def found_lists(case, step, order="any"):
    lists = PageLists(*case.args()[4:], tokens=len(case.q), page_size=case.page_size, kernel_page_size=step)
    table, count, tail = lists.build(case.topk_idx, order)
    assert table.dtype == count.dtype == tail.dtype == torch.int32
    pool = len(case.k_cache) // step
    assert bool(((table >= 0) & (table < pool)).all()), "what stands behind a list exists too"
    lengths = torch.where(count > 0, lists.lengths(count, tail.expand_as(count)), 0)
    return [
        [(row[: -(-length // step)], length) for row, length in zip(rows, of_head, strict=True)]
        for rows, of_head in zip(table.tolist(), lengths.tolist(), strict=True)
    ]


def check(case, step):
    assert found_lists(case, step) == [naive_lists(case, head, step) for head in range(len(case.topk_idx))]


@pytest.mark.parametrize("name", CASE_NAMES)
def test_lists_are_the_naive_ones(name):
    case = make_case(name, seed=3)
    check(case, case.page_size)


@pytest.mark.parametrize("step", [16, 64])
@pytest.mark.parametrize("name", ["tail", "packed", "holes", "cut_short", "padded"])
def test_pages_in_parts(name, step):
    check(make_case(name, seed=4), step)


def test_rows_that_end_inside_a_page():
    """``req_to_token`` need not be as wide as whole pages."""
    case = make_case("single", requests=((130, 0),))
    vars(case)["req_to_token"] = case.req_to_token[:, :130].contiguous()
    check(case, 32)


@pytest.mark.parametrize("order", ["ascending", "own_last"])
def test_what_is_known_of_the_rows_spares_the_sorting(order, monkeypatch):
    case = make_case("tail")
    expected = [naive_lists(case, 0, 128)]
    monkeypatch.setattr(torch.Tensor, "sort", None)
    assert found_lists(case, 128, order) == expected


EDITS = st.sampled_from([None, "holes", "all_invalid", "duplicates", "unsorted", "out_of_range", "future"])


@settings(max_examples=60, deadline=None)
@given(
    requests=st.lists(st.tuples(st.integers(0, 9), st.integers(0, 300)), min_size=1, max_size=4),
    edit=EDITS,
    seed=st.integers(0, 1000),
    k=st.integers(1, 20),
    kv_heads=st.integers(1, 2),
    page_size=st.sampled_from([16, 32]),
    cut=st.sampled_from([0, 0, 5]),
    padding=st.integers(0, 3),
)
def test_any_lists(requests, edit, seed, k, kv_heads, page_size, cut, padding):
    recipe = {"edit": edit, "k": k, "kv_heads": kv_heads, "page_size": page_size, "cut": cut, "padding": padding}
    case = make_case("packed", seed=seed, requests=tuple(requests), head_dim=16, ratio=1, **recipe)
    check(case, page_size)
    check(case, 16)
