"""What the public functions ask of the CUDA wrappers, with CPU tensors that pass for CUDA ones.

The stand-in wrappers do their work with the reference engine, so that what reaches them is seen in the result. The
kernels themselves have tests of their own, on a GPU.
"""

from __future__ import annotations

import inspect
from types import SimpleNamespace

import pytest
import torch

import pageweaver_sglang as pw
from pageweaver_sglang import api
from pageweaver_sglang.auto.history import Decision
from pageweaver_sglang.auto.readback import Readback
from pageweaver_sglang.cuda import support
from tests.generators import make_case

CASE = make_case("padded", seed=0)
POOL_PAGES = CASE.k_cache.shape[0] // 128
PICKS = (CASE.topk_idx, CASE.cu_seqlens, CASE.prefix_lens)
LENGTHS = (CASE.cu_seqlens, CASE.seq_lens, CASE.prefix_lens)
ARRAYS = ("pages", "masks", "counts", "queries", "limits")


@pytest.fixture
def calls(monkeypatch):
    """Calls of the wrappers, in order: (name, positional arguments, keyword arguments)."""
    made = []

    def regroup(topk_idx, cu_seqlens, prefix_lens, perm, **options):
        made.append(("regroup", (topk_idx, cu_seqlens, prefix_lens, perm), options))
        perm.copy_(pw.reference.regroup(topk_idx, cu_seqlens, prefix_lens, **options))

    def prepare_unions(topk_idx, perm, cu_seqlens, seq_lens, prefix_lens, plan, **options):
        made.append(("prepare_unions", (topk_idx, perm, cu_seqlens, seq_lens, prefix_lens, plan), options))
        own = pw.reference.prepare_unions(
            topk_idx,
            perm,
            cu_seqlens,
            seq_lens,
            prefix_lens,
            window=options["window"],
            group_size=plan.group_size,
            page_size=plan.page_size,
        )
        for name in ARRAYS:
            getattr(plan, name).copy_(getattr(own, name))
        if options.get("marks") is not None:
            options["marks"].fill_(128)

    def value_tiles(v_cache, tiles, plan):
        made.append(("value_tiles", (v_cache, tiles, plan), {"marked": bool(tiles.marks.any())}))
        tiles.marks.zero_()

    def union_attention(q, k_cache, v_cache, plan, out, **options):
        made.append(("union_attention", (q, k_cache, v_cache, plan, out), options))
        out.fill_(1.0)

    monkeypatch.setattr(
        "pageweaver_sglang.cuda.ops",
        SimpleNamespace(
            regroup=regroup, prepare_unions=prepare_unions, value_tiles=value_tiles, union_attention=union_attention
        ),
        raising=False,
    )
    monkeypatch.setattr(api, "_on_cuda", lambda tensor: True)
    monkeypatch.setattr(support, "unsupported_reason", lambda *args, **options: None)
    return made


def test_regroup(calls):
    options = {"window": 64, "group_size": 5, "page_size": 64, "capacity": 30, "guard": "window"}
    options["visits"] = torch.zeros(2, dtype=torch.int64)
    perm = pw.regroup(*PICKS, **options)
    assert torch.equal(perm, pw.reference.regroup(*PICKS, **options))
    ((name, _, seen),) = calls
    assert (name, seen) == ("regroup", options)


def test_regroup_of_what_its_kernel_does_not_take(calls):
    with pytest.raises(ValueError, match=r"^regroup: window must be 64 or 128 on CUDA, got 100"):
        pw.regroup(*PICKS, window=100)
    wide = torch.zeros(1, CASE.topk_idx.shape[1], 17, dtype=torch.int32)
    with pytest.raises(ValueError, match=r"^regroup: topk_idx must be of k <= 16 on CUDA, got k=17"):
        pw.regroup(wide, *PICKS[1:])
    with pytest.raises(TypeError, match=r"^regroup: window"):
        pw.regroup(*PICKS, window=None)
    assert not calls


def test_prepare_unions(calls):
    perm = pw.reference.regroup(*PICKS, window=64, group_size=4)
    options = {"window": 64, "group_size": 4, "page_size": 64}
    plan = pw.prepare_unions(CASE.topk_idx, perm, *LENGTHS, **options)
    expected = pw.reference.prepare_unions(CASE.topk_idx, perm, *LENGTHS, **options)
    assert all(torch.equal(getattr(plan, name), getattr(expected, name)) for name in ARRAYS)
    assert plan.slots is None
    ((_, _, seen),) = calls
    assert seen == {"window": 64}  # and no marks


def test_prepare_unions_of_what_its_kernel_does_not_take(calls):
    with pytest.raises(ValueError, match=r"^prepare_unions: group_size must be an integer in 1\.\.16 on CUDA, got 17"):
        pw.prepare_unions(CASE.topk_idx, None, *LENGTHS, group_size=17)
    wide = torch.zeros(1, CASE.topk_idx.shape[1], 17, dtype=torch.int32)
    with pytest.raises(ValueError, match=r"^prepare_unions: topk_idx must be of k <= 16 on CUDA, got k=17"):
        pw.prepare_unions(wide, None, *LENGTHS)
    with pytest.raises(ValueError, match=r"^prepare_unions: perm"):
        pw.prepare_unions(CASE.topk_idx, torch.zeros(1, 3, dtype=torch.int32), *LENGTHS)
    assert not calls


@pytest.mark.parametrize("with_workspace", [False, True])
@pytest.mark.parametrize(
    ("config", "regroup_options"),
    [
        (None, None),  # auto: so few queries that regrouping cannot pay
        (pw.Config(mode="pageweaver"), {"window": 64, "guard": "window", "capacity": None}),
        (
            pw.Config(mode="pageweaver", window=128, guard="none", capacity=9),
            {"window": 128, "guard": "none", "capacity": None},
        ),
        (
            pw.Config(mode="pageweaver", overflow="original", capacity=300),
            {"window": 64, "guard": "window", "capacity": 300},
        ),
        (pw.Config(mode="union8", window=128, engine="union8"), None),
        (pw.Config(mode="union8", precision="high"), None),
    ],
)
def test_sparse_prefill(calls, config, regroup_options, with_workspace):
    workspace = None
    window = 64 if config is None else config.window
    if with_workspace:
        workspace = pw.Workspace(200, 5, kv_heads=1, topk=16, q_heads=16, window=window, device="cpu")
    scale = torch.tensor([0.5])
    out = pw.sparse_prefill(*CASE.args(), config=config, workspace=workspace, k_scale=scale, v_scale=2.0)
    assert out.shape == CASE.q.shape
    assert (out == 1).all()
    engine, precision = ("stream", "fp8") if config is None else (config.engine, config.precision)
    stages = ["regroup", "prepare_unions", "value_tiles", "union_attention"]
    if regroup_options is None:
        stages.remove("regroup")
    if engine == "union8":
        stages.remove("value_tiles")
    assert [name for name, _, _ in calls] == stages
    perm = None
    if regroup_options is not None:
        _, (*_, perm), options = calls[0]
        assert options == {**regroup_options, "group_size": 8, "page_size": 128, "visits": None}
    _, (topk_idx, unions_perm, *lengths, plan), options = calls[stages.index("prepare_unions")]
    assert topk_idx is CASE.topk_idx
    assert unions_perm is perm
    assert all(got is expected for got, expected in zip(lengths, LENGTHS, strict=True))
    marks = options.pop("marks")
    assert options.pop("behind_regroup") is (regroup_options is not None)
    assert options == {
        "req_to_token": CASE.req_to_token,
        "slot_ids": CASE.slot_ids,
        "num_pool_pages": POOL_PAGES,
        "window": window,
    }
    assert plan.slots.shape == plan.pages.shape
    _, (q, k_cache, v_cache, attended, target), options = calls[-1]
    assert (q is CASE.q, k_cache is CASE.k_cache, v_cache is CASE.v_cache) == (True, True, True)
    assert attended is plan
    assert target is out
    # A scale in host memory becomes a number; sm_scale has its default.
    attended_tiles = options.pop("tiles")
    kernel = {"engine": engine, "precision": precision}
    assert options == {"sm_scale": 128**-0.5, "k_scale": 0.5, "v_scale": 2.0, **kernel}
    assert type(options["k_scale"]) is float
    if engine == "union8":
        assert marks is None
        assert attended_tiles is None
    else:
        _, (values, tiles, ordered), seen = calls[-2]
        assert values is CASE.v_cache
        assert ordered is plan
        assert seen == {"marked": True}
        assert marks is tiles.marks
        assert attended_tiles is tiles.tiles
        assert (marks.shape, tiles.tiles.shape) == ((1, POOL_PAGES), (1, POOL_PAGES, 16384))
    if with_workspace:
        assert (workspace._tiles is None) == (engine == "union8")
        assert marks is None or marks is workspace.value_tiles(POOL_PAGES).marks
        tokens, requests = len(CASE.q), 2
        assert plan.pages.data_ptr() == workspace.plan(tokens, requests).pages.data_ptr()
        assert out.data_ptr() == workspace.out(tokens).data_ptr()
        assert perm is None or perm.data_ptr() == workspace.perm(tokens).data_ptr()


@pytest.mark.parametrize(("capability", "asked"), [((9, 0), "portable"), ((8, 0), "stream"), ((12, 0), "union8")])
@pytest.mark.parametrize("ratio", [4, 16])
def test_sparse_prefill_by_the_portable_engine(calls, monkeypatch, capability, asked, ratio):
    """Groups of its own size, no value tiles, pages of 64 tokens."""
    monkeypatch.setattr(support, "capability_of", lambda device: capability)
    case = make_case("padded", ratio=ratio, page_size=64)
    (size,) = support.union_group_sizes("portable", ratio)
    config = pw.Config(mode="pageweaver", engine=asked)
    workspace = pw.Workspace(200, 5, kv_heads=1, topk=16, q_heads=ratio, group_size=size, device="cpu")
    for space in (None, workspace):
        calls.clear()
        pw.sparse_prefill(*case.args(), config=config, workspace=space, page_size=64)
        assert [name for name, _, _ in calls] == ["regroup", "prepare_unions", "union_attention"]
        assert (calls[0][2]["group_size"], calls[0][2]["page_size"]) == (size, 64)
        plan = calls[1][1][-1]
        assert (plan.group_size, plan.page_size) == (size, 64)
        assert calls[1][2]["num_pool_pages"] == case.k_cache.shape[0] // 64
        assert calls[1][2]["marks"] is None
        assert (calls[2][2]["engine"], calls[2][2]["tiles"]) == ("portable", None)
    wrong = pw.Workspace(200, 5, kv_heads=1, topk=16, q_heads=ratio, device="cpu")
    with pytest.raises(ValueError, match=f"workspace must be one with group_size={size}, got group_size=8"):
        pw.sparse_prefill(*case.args(), config=config, workspace=wrong, page_size=64)


@pytest.mark.parametrize(("capability", "regroups"), [((9, 0), False), ((8, 0), True)])
def test_whether_a_call_can_gain_is_asked_of_the_engine_that_serves(calls, monkeypatch, capability, regroups):
    """292 rows in groups of 16: too few for ``stream`` to gain, but not for ``portable``, whose visits cost more."""
    monkeypatch.setattr(support, "capability_of", lambda device: capability)
    monkeypatch.setattr(support, "processors_of", lambda device: 8)
    case = make_case("padded", ratio=4, kv_heads=2)
    assert case.topk_idx.shape[:2] == (2, 146)
    pw.sparse_prefill(*case.args())
    assert (calls[0][0] == "regroup") == regroups


@pytest.mark.parametrize("given", [None, 8, 16])
@pytest.mark.parametrize(("ratio", "processors"), [(8, 4), (8, 50), (1, 4)])
def test_stream_with_few_heads_takes_groups_of_8_and_of_16(calls, monkeypatch, ratio, processors, given):
    """A workspace's size counts; else that of the call's size. The order is one of groups of 8 all the same."""
    monkeypatch.setattr(support, "processors_of", lambda device: processors)
    case = make_case("padded", ratio=ratio)
    size = given or (16 if len(case.q) > 8 * processors else 8)
    workspace = given and pw.Workspace(
        200, 5, kv_heads=1, topk=16, q_heads=ratio, group_size=given, window=128, device="cpu"
    )
    pw.sparse_prefill(*case.args(), config=pw.Config(mode="pageweaver", window=128), workspace=workspace)
    assert [name for name, _, _ in calls] == ["regroup", "prepare_unions", "value_tiles", "union_attention"]
    assert calls[0][2]["group_size"] == 8
    plans = [arguments[-1] for name, arguments, _ in calls if name in ("prepare_unions", "value_tiles")]
    assert [(plan.group_size, plan.masks.dtype) for plan in plans] == [
        (size, torch.int32 if size == 16 else torch.uint8)
    ] * 2
    assert calls[3][1][3] is plans[0]
    wrong = pw.Workspace(200, 5, kv_heads=1, topk=16, group_size=4, window=128, device="cpu")
    with pytest.raises(ValueError, match="workspace must be one with group_size=8 or 16, got group_size=4"):
        pw.sparse_prefill(*case.args(), config=pw.Config(window=128), workspace=wrong)


@pytest.mark.parametrize(("ratio", "engine"), [(9, "stream"), (16, "stream"), (8, "union8")])
def test_others_take_groups_of_8_alone(calls, monkeypatch, ratio, engine):
    monkeypatch.setattr(support, "processors_of", lambda device: 1)
    case, config = make_case("padded", ratio=ratio), pw.Config(engine=engine)
    wrong = pw.Workspace(200, 5, kv_heads=1, topk=16, group_size=16, device="cpu")
    with pytest.raises(ValueError, match="workspace must be one with group_size=8, got group_size=16"):
        pw.sparse_prefill(*case.args(), config=config, workspace=wrong)
    pw.sparse_prefill(*case.args(), config=config)
    assert calls[-1][1][3].group_size == 8


@pytest.mark.parametrize("capturing", [False, True])
@pytest.mark.parametrize("regroup", [False, True])
def test_sparse_prefill_does_what_was_decided_and_counts(calls, monkeypatch, regroup, capturing):
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: capturing)
    measurement = Readback(torch.device("cpu")).take() if regroup else None
    pw.sparse_prefill(*CASE.args(), decision=Decision(regroup, "probe", measurement=measurement))
    assert [name for name, _, _ in calls if name == "regroup"] == ["regroup"] * regroup
    if regroup:
        visits = torch.zeros(2, dtype=torch.int64)
        pw.reference.regroup(*PICKS, window=64, guard="window", visits=visits)
        assert visits[0] > 0
        # Replays would count again and again.
        assert calls[0][2]["visits"] is (None if capturing else measurement.visits)
        assert measurement.visits.tolist() == ([0, 0] if capturing else visits.tolist())
        measurement._readback.collect()
        assert measurement.result == (None if capturing else tuple(visits.tolist()))


def test_a_decision_in_a_fixed_mode_is_refused(calls):
    decision = Decision(True, "first")
    with pytest.raises(ValueError, match=r"^sparse_prefill: decision must be None unless the mode is 'auto', got a"):
        pw.sparse_prefill(*CASE.args(), decision=decision, config=pw.Config(mode="union8"))
    assert not calls


def test_sparse_prefill_into_out(calls):
    out = torch.zeros_like(CASE.q)
    workspace = pw.Workspace(200, 5, kv_heads=1, topk=16, q_heads=16, device="cpu")
    assert pw.sparse_prefill(*CASE.args(), out=out, workspace=workspace, sm_scale=3) is out
    assert calls[-1][1][-1] is out
    options = calls[-1][2]
    assert options.pop("tiles") is workspace.value_tiles(POOL_PAGES).tiles
    assert options == {"sm_scale": 3.0, "k_scale": None, "v_scale": None, "engine": "stream", "precision": "fp8"}


def test_value_tiles_of_the_caller_come_before_the_workspaces(calls):
    workspace = pw.Workspace(200, 5, kv_heads=1, topk=16, q_heads=16, device="cpu")
    own = pw.ValueTiles.empty(1, POOL_PAGES, device="cpu")
    pw.sparse_prefill(*CASE.args(), workspace=workspace, value_tiles=own)
    assert calls[-1][2]["tiles"] is own.tiles
    assert workspace._tiles is None
    pw.sparse_prefill(*CASE.args(), config=pw.Config(engine="union8"), value_tiles=own)
    assert calls[-1][2]["tiles"] is None


def test_marks_that_a_failed_call_left_are_cleared_before_the_next(calls, monkeypatch):
    """One too high would keep what lies behind a sequence's end."""
    from pageweaver_sglang.cuda import ops

    workspace = pw.Workspace(200, 5, kv_heads=1, topk=16, q_heads=16, pool_pages=POOL_PAGES, device="cpu")
    seen, prepare_unions, value_tiles = [], ops.prepare_unions, ops.value_tiles

    def fail(v_cache, tiles, plan):
        raise RuntimeError("no launch")

    def look(*arguments, marks, **options):
        seen.append(int(marks.sum()))
        prepare_unions(*arguments, marks=marks, **options)

    monkeypatch.setattr(ops, "value_tiles", fail)
    with pytest.raises(RuntimeError, match="no launch"):
        pw.sparse_prefill(*CASE.args(), workspace=workspace)
    assert workspace.value_tiles(POOL_PAGES).marks.any()
    monkeypatch.setattr(ops, "value_tiles", value_tiles)
    monkeypatch.setattr(ops, "prepare_unions", look)
    pw.sparse_prefill(*CASE.args(), workspace=workspace)
    assert seen == [0]


def test_a_workspace_of_a_smaller_pool_is_refused_before_any_launch(calls):
    workspace = pw.Workspace(200, 5, kv_heads=1, topk=16, q_heads=16, pool_pages=POOL_PAGES - 1, device="cpu")
    with pytest.raises(ValueError, match=rf"KV pool of {POOL_PAGES} pages is too large .* pool_pages={POOL_PAGES - 1}"):
        pw.sparse_prefill(*CASE.args(), workspace=workspace)
    assert not calls
    pw.sparse_prefill(*CASE.args(), workspace=workspace, config=pw.Config(engine="union8"))


def test_the_output_of_a_strided_q_is_contiguous(calls):
    case = make_case("strided")
    assert not case.q.is_contiguous()
    assert pw.sparse_prefill(*case.args()).is_contiguous()
    heads_first = case.q.transpose(0, 1).contiguous().transpose(0, 1)
    assert pw.sparse_prefill(heads_first, *case.args()[1:]).is_contiguous()


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        # Every row the same memory; the kernel would take the stride, 0, for the row's length.
        ("req_to_token", CASE.req_to_token[:1].expand(9, -1), r"of rows at least \d+ elements apart, got stride 0"),
        ("req_to_token", CASE.req_to_token[:1].reshape(-1, 1).T, r"of rows at least \d+ elements apart, got stride 1"),
        (
            "req_to_token",
            CASE.req_to_token.repeat(2, 1).T.contiguous().T,
            r"contiguous along its last dimension, got stride \d+",
        ),
        ("slot_ids", torch.zeros(4, dtype=torch.int64)[::2], "contiguous, got stride 2"),
        # Results are written 16 bytes at a time.
        ("out", torch.zeros(CASE.q.numel() + 1, dtype=torch.bfloat16)[1:].view_as(CASE.q), "a multiple of 16, got 0x"),
    ],
)
def test_memory_layouts_that_the_kernels_do_not_take(calls, name, value, message):
    arguments = dict(zip(inspect.signature(pw.sparse_prefill).parameters, CASE.args(), strict=False))
    arguments["slot_ids"] = torch.zeros_like(CASE.slot_ids)  # whose row is there in any table
    with pytest.raises(ValueError, match=rf"^sparse_prefill: {name} must be .*{message}"):
        pw.sparse_prefill(**arguments | {name: value})
    assert not calls


def test_the_stride_of_a_single_slot_id_does_not_matter(calls):
    case = make_case("tail")
    slot_ids = case.slot_ids.repeat(2)[::2]
    assert slot_ids.stride() == (2,)
    pw.sparse_prefill(*case.args()[:5], slot_ids, *case.args()[6:])
    assert calls


@pytest.mark.parametrize("scale", ["sm_scale", "k_scale"])
def test_scales_that_would_unmask_hidden_keys_are_refused(calls, monkeypatch, scale):
    monkeypatch.undo()
    monkeypatch.setattr(api, "_on_cuda", lambda tensor: True)
    with pytest.raises(pw.UnsupportedError, match=rf"^sparse_prefill: {scale} must be at least 1e-06, got 0\.0"):
        pw.sparse_prefill(*CASE.args(), **{scale: 0.0})


def test_no_tokens_launch_nothing(calls):
    case = make_case("tail", requests=((0, 0), (0, 300)), tail=None)
    assert pw.sparse_prefill(*case.args()).shape == (0, 16, 128)
    assert pw.regroup(case.topk_idx, case.cu_seqlens, case.prefix_lens).shape == (1, 0)
    assert not calls


def test_what_the_kernels_do_not_cover_is_refused_by_name(calls, monkeypatch):
    monkeypatch.undo()
    monkeypatch.setattr(api, "_on_cuda", lambda tensor: True)
    with pytest.raises(pw.UnsupportedError, match=r"^sparse_prefill: q must be bfloat16, got float16"):
        pw.sparse_prefill(CASE.q.half(), *CASE.args()[1:])
    with pytest.raises(pw.UnsupportedError, match=r"^sparse_prefill: page_size must be 64 or 128, got 32"):
        pw.sparse_prefill(*CASE.args(), page_size=32)
    assert not calls
