"""The workspace hands out contiguous views of its buffers, of the shapes that a plan has."""

from __future__ import annotations

from itertools import pairwise
from types import SimpleNamespace

import pytest
import torch

import pageweaver_sglang as pw
from pageweaver_sglang.plan import UnionPlan

ARRAYS = ("pages", "masks", "counts", "queries", "limits", "slots", "queue")


@pytest.mark.parametrize("group_size", [4, 8, 16])
@pytest.mark.parametrize("window", [64, 100, 128])
def test_views(window, group_size):
    workspace = pw.Workspace(
        1000, 7, kv_heads=3, topk=16, q_heads=48, window=window, group_size=group_size, device="cpu"
    )
    largest = workspace.plan(1000, 7)
    for tokens, requests in ((1000, 7), (999, 1), (1, 7), (1, 1), (0, 0), (128, 3)):
        plan = workspace.plan(tokens, requests)
        own = UnionPlan.empty(
            3,
            tokens,
            requests,
            16,
            window=window,
            group_size=group_size,
            page_size=128,
            device="cpu",
            with_slots=True,
        )
        assert (plan.group_size, plan.page_size) == (group_size, 128)
        for name in ARRAYS:
            view, expected = getattr(plan, name), getattr(own, name)
            assert view.shape == expected.shape
            assert view.dtype == expected.dtype
            assert view.is_contiguous()
            storage = getattr(largest, name).untyped_storage()
            assert view.untyped_storage().data_ptr() == storage.data_ptr()
            assert view.storage_offset() == 0
        perm, out = workspace.perm(tokens), workspace.out(tokens)
        assert (perm.shape, perm.dtype, perm.is_contiguous()) == ((3, tokens), torch.int32, True)
        assert (out.shape, out.dtype, out.is_contiguous()) == ((tokens, 48, 128), torch.bfloat16, True)


def test_arrays_do_not_overlap():
    workspace = pw.Workspace(100, 2, kv_heads=2, topk=4, q_heads=32, device="cpu")
    plan = workspace.plan(100, 2)
    tensors = [*(getattr(plan, name) for name in ARRAYS), workspace.perm(100), workspace.out(100)]
    spans = sorted((t.data_ptr(), t.data_ptr() + t.numel() * t.element_size()) for t in tensors)
    assert all(end <= start for (_, end), (start, _) in pairwise(spans))
    assert workspace.nbytes() == nbytes(tensors)


def nbytes(tensors):
    return sum(t.numel() * t.element_size() for t in tensors)


def test_value_tiles_are_allocated_when_first_asked_for():
    workspace = pw.Workspace(100, 2, kv_heads=3, topk=4, device="cpu")
    before = workspace.nbytes()
    tiles = workspace.value_tiles(7)
    assert (tiles.marks.shape, tiles.marks.dtype) == ((3, 7), torch.int32)
    assert (tiles.tiles.shape, tiles.tiles.dtype) == ((3, 7, 128 * 128), torch.uint8)
    assert not tiles.marks.any()
    assert workspace.value_tiles(7) is tiles
    assert workspace.nbytes() - before == nbytes([tiles.marks, tiles.tiles]) == pw.ValueTiles.nbytes(3, 7)
    larger = workspace.value_tiles(9)
    assert larger.marks.shape == (3, 9)
    assert workspace.nbytes() - before == pw.ValueTiles.nbytes(3, 9)


def test_value_tiles_are_allocated_at_once_with_the_size_of_the_pool():
    workspace = pw.Workspace(100, 2, kv_heads=2, topk=4, pool_pages=10, device="cpu")
    held = workspace.nbytes()
    assert held == pw.Workspace(100, 2, kv_heads=2, topk=4, device="cpu").nbytes() + pw.ValueTiles.nbytes(2, 10)
    whole = workspace.value_tiles(10)
    for pool_pages in (10, 4, 1, 7, 10):
        tiles = workspace.value_tiles(pool_pages)
        for part, of, entry in ((tiles.marks, whole.marks, ()), (tiles.tiles, whole.tiles, (16384,))):
            assert part.shape == (2, pool_pages, *entry)
            assert part.is_contiguous()
            assert part.data_ptr() == of.data_ptr()
    with pytest.raises(ValueError, match="a KV pool of 11 pages is too large for a workspace of pool_pages=10"):
        workspace.value_tiles(11)
    assert workspace.nbytes() == held


def test_a_pool_of_another_size_finds_no_marks_of_the_last():
    """With several KV heads the same bytes are another page's mark."""
    workspace = pw.Workspace(100, 2, kv_heads=2, topk=4, pool_pages=10, device="cpu")
    for pool_pages in (10, 6, 9, 10):
        marks = workspace.value_tiles(pool_pages).begin()
        assert not marks.any()
        marks.fill_(128)  # and fails before `end`


def test_marks_are_cleared_after_a_call_without_an_end_alone():
    tiles = pw.ValueTiles.empty(1, 4, device="cpu")
    tiles.begin().fill_(5)
    assert not tiles.begin().any()
    tiles.end()
    tiles.marks.fill_(5)  # nobody does; `begin` costs no launch where the last call ended
    assert tiles.begin().all()


def test_plan_has_the_page_size_that_is_asked_for():
    workspace = pw.Workspace(100, 2, kv_heads=2, topk=4, device="cpu")
    assert workspace.plan(100, 2, page_size=64).page_size == 64


def test_too_large_a_call_names_the_sizes():
    workspace = pw.Workspace(100, 2, kv_heads=1, topk=16, q_heads=16, device="cpu")
    message = "a call of 101 tokens and {} requests is too large for a workspace of max_tokens=100, max_requests=2"
    for call in (workspace.perm, workspace.out):
        with pytest.raises(ValueError, match=message.format(0)):
            call(101)
    with pytest.raises(ValueError, match=message.format(1)):
        workspace.plan(101, 1)
    with pytest.raises(ValueError, match="a call of 100 tokens and 3 requests"):
        workspace.plan(100, 3)


def test_without_query_heads_there_is_no_output():
    workspace = pw.Workspace(100, 2, kv_heads=1, topk=16, device="cpu")
    with pytest.raises(ValueError, match="no output buffer; give q_heads"):
        workspace.out(1)


SIZES = ["max_tokens", "max_requests", "kv_heads", "topk", "q_heads", "window", "group_size", "pool_pages"]


@pytest.mark.parametrize("name", SIZES)
def test_sizes_are_checked(name):
    sizes = {"max_tokens": 10, "max_requests": 1, "kv_heads": 1, "topk": 16, "q_heads": 16} | {name: 0}
    with pytest.raises(ValueError, match=f"Workspace: {name} must be an integer >= 1, got 0"):
        pw.Workspace(**sizes, device="cpu")


@pytest.mark.parametrize(
    ("name", "value", "kind", "message"),
    [
        ("max_tokens", 1.5, TypeError, "an integer >= 1, got float 1.5"),
        ("kv_heads", True, TypeError, "an integer >= 1, got bool True"),
        ("max_requests", None, TypeError, "an integer >= 1, got NoneType None"),
        ("pool_pages", 2.0, TypeError, "an integer >= 1, got float 2.0"),
        ("dtype", "bfloat16", TypeError, "a torch.dtype, got str 'bfloat16'"),
        ("device", "gpu", ValueError, "a torch.device or its name, got 'gpu'"),
    ],
)
def test_arguments_are_checked(name, value, kind, message):
    arguments = {"max_tokens": 10, "max_requests": 1, "kv_heads": 1, "topk": 16, "device": "cpu"} | {name: value}
    with pytest.raises(kind, match=f"^Workspace: {name} must be {message}"):
        pw.Workspace(**arguments)


def test_groups_are_at_most_32():
    with pytest.raises(ValueError, match=r"group_size must be an integer in 1\.\.32, got 33"):
        pw.Workspace(10, 1, kv_heads=1, topk=16, group_size=33, device="cpu")


@pytest.mark.parametrize("capturing", [False, True])
def test_marks_that_a_graph_only_records_to_clear_stay_dirty(monkeypatch, capturing):
    """A capture runs nothing: until a replay, what a failed call left is still there."""
    cleared = []
    marks = SimpleNamespace(is_cuda=True, zero_=lambda: cleared.append(capturing))
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: capturing)
    tiles = pw.ValueTiles(marks, None)
    tiles.begin()  # this call fails before its end
    for times in (1, 2 if capturing else 1):
        tiles.begin()
        tiles.end()
        assert len(cleared) == times


@pytest.mark.parametrize(("sizes", "named"), [((-1, 4), "kv_heads"), ((1, 2.0), "pool_pages"), ((True, 4), "kv_heads")])
def test_value_tiles_of_a_size_that_is_none(sizes, named):
    with pytest.raises(ValueError, match=rf"^ValueTiles.empty: {named} must be an integer >= 0, got "):
        pw.ValueTiles.empty(*sizes, device="cpu")
