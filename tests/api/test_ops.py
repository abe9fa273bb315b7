"""What the wrappers hand to the kernel library, argument by argument; the library is a stand-in that only listens."""

from __future__ import annotations

import re
from types import SimpleNamespace

import pytest
import torch

from pageweaver_sglang._paths import kernels_dir
from pageweaver_sglang.cuda import ops
from pageweaver_sglang.cuda.loader import architecture_of
from pageweaver_sglang.plan import UnionPlan
from pageweaver_sglang.value_tiles import ValueTiles

PLAN = UnionPlan.empty(1, 20, 1, 4, window=128, group_size=8, page_size=64, device="cpu", with_slots=True)


@pytest.fixture
def heard(monkeypatch):
    """Calls: (function, arguments), tensors among them by identity."""
    calls = []

    class Library:
        def __init__(self, architecture="sm_90a"):
            assert architecture == "sm_90a"

        def __getattr__(self, name):
            return lambda *arguments: calls.append((name, arguments))

    monkeypatch.setattr(ops, "load", Library)
    return calls


def tensors(count):
    return [torch.zeros(1) for _ in range(count)]


def same(got, expected):
    return len(got) == len(expected) and all(
        a is b if isinstance(b, torch.Tensor) else type(a) is type(b) and a == b
        for a, b in zip(got, expected, strict=True)
    )


@pytest.mark.parametrize(("capacity", "limit"), [(None, 0), (300, 300)])
@pytest.mark.parametrize(("guard", "guarded"), [("none", False), ("window", True)])
def test_regroup(heard, capacity, limit, guard, guarded):
    *arguments, visits = tensors(5)
    options = {"window": 64, "group_size": 5, "page_size": 32, "capacity": capacity, "guard": guard}
    ops.regroup(*arguments, **options)
    ops.regroup(*arguments, **options, visits=visits)
    assert [name for name, _ in heard] == ["pw_regroup"] * 2
    for (_, got), counted in zip(heard, (None, visits), strict=True):
        assert same(got, [*arguments, 64, 5, 32, limit, guarded, counted])


@pytest.mark.parametrize(("with_pool", "with_marks"), [(False, False), (True, False), (True, True)])
def test_prepare_unions(heard, with_pool, with_marks):
    topk_idx, perm, cu_seqlens, seq_lens, prefix_lens, req_to_token, slot_ids = tensors(7)
    pool = {"req_to_token": req_to_token, "slot_ids": slot_ids, "num_pool_pages": 9} if with_pool else {}
    marks = {"marks": torch.zeros(1, 9, dtype=torch.int32)} if with_marks else {}
    behind = {"behind_regroup": True} if with_marks else {}
    ops.prepare_unions(topk_idx, perm, cu_seqlens, seq_lens, prefix_lens, PLAN, window=64, **pool, **marks, **behind)
    ((name, got),) = heard
    assert name == "pw_union_prep"
    expected = [topk_idx, perm, cu_seqlens, seq_lens, prefix_lens, *(pool.values() or (None, None, 0)), 64, 64]
    arrays = [PLAN.pages, PLAN.masks, PLAN.counts, PLAN.queries, PLAN.limits, PLAN.slots if with_pool else None]
    assert same(got, [*expected, *arrays, PLAN.queue, marks.get("marks"), with_marks])


def test_value_tiles(heard):
    v_cache, tiles = torch.zeros(256, 1, 128), ValueTiles.empty(1, 2, device="cpu")
    ops.value_tiles(v_cache, tiles, PLAN)
    ((name, got),) = heard
    assert name == "pw_value_tiles"
    assert same(got, [v_cache, tiles.marks, tiles.tiles, PLAN.counts, PLAN.queue])


@pytest.mark.parametrize(
    ("scale", "number", "tensor"), [(None, 1.0, None), (3, 3.0, None), (0.5, 0.5, None), (PLAN.masks, 1.0, PLAN.masks)]
)
def test_union_attention(heard, scale, number, tensor):
    q, k_cache, v_cache, tiles, out = tensors(5)
    ops.union_attention(q, k_cache, v_cache, PLAN, out, sm_scale=0.1, k_scale=scale, v_scale=0.25, tiles=tiles)
    ops.union_attention(q, k_cache, v_cache, PLAN, out, sm_scale=0.1, k_scale=0.25, v_scale=scale, engine="union8")
    ops.union_attention(q, k_cache, v_cache, PLAN, out, sm_scale=0.1, v_scale=scale, precision="high", tiles=tiles)
    arrays = [PLAN.slots, PLAN.pages, PLAN.masks, PLAN.counts, PLAN.queries, PLAN.limits, PLAN.queue]
    before = [q, k_cache, v_cache, *arrays]
    assert [name for name, _ in heard] == ["pw_attention"] * 3
    assert same(heard[0][1], ["stream", "fp8", *before, tiles, out, 0.1, number, 0.25, tensor, None])
    assert same(heard[1][1], ["union8", "fp8", *before, None, out, 0.1, 0.25, number, None, tensor])
    assert same(heard[2][1], ["stream", "high", *before, tiles, out, 0.1, 1.0, number, None, tensor])


def test_the_exports_take_as_many_arguments_as_they_are_given():
    """The library's signatures, by its source: a missing argument would only show on a GPU."""
    source = (kernels_dir() / "bindings.cu").read_text()
    given = {"regroup": 10, "union_prep": 19, "value_tiles": 5, "attention": 19}
    for name, count in given.items():
        assert f"TVM_FFI_DLL_EXPORT_TYPED_FUNC(pw_{name}, {name})" in source
        (parameters,) = re.findall(rf"^void {name}\(([^)]*)\) {{$", source, re.MULTILINE)
        assert parameters.count(",") + 1 == count, name


def test_the_portable_engine_is_not_the_librarys(heard, monkeypatch):
    portable = pytest.importorskip("pageweaver_sglang.cuda.portable")
    monkeypatch.setattr(portable, "union_attention", lambda *arguments, **options: heard.append((arguments, options)))
    q, k_cache, v_cache, out = tensors(4)
    ops.union_attention(
        q, k_cache, v_cache, PLAN, out, sm_scale=0.1, k_scale=PLAN.masks, v_scale=0.25, engine="portable"
    )
    ((arguments, options),) = heard
    assert same(arguments[:3], [q, k_cache, v_cache])
    assert arguments[3] is PLAN
    assert arguments[4] is out
    assert options == {"sm_scale": 0.1, "k_scale": PLAN.masks, "v_scale": 0.25}


@pytest.mark.parametrize(("capability", "architecture"), [((9, 0), "sm_90a"), ((8, 6), "sm_86"), ((12, 0), "sm_120")])
def test_the_plan_comes_from_the_devices_own_library(heard, monkeypatch, capability, architecture):
    asked = []
    monkeypatch.setattr(ops, "architecture_on", lambda device: architecture_of(capability))
    monkeypatch.setattr(ops, "load", lambda name: asked.append(name) or SimpleNamespace(pw_regroup=lambda *a: None))
    ops.regroup(*tensors(4), window=64, group_size=5, page_size=32, capacity=None, guard="none")
    assert asked == [architecture]
