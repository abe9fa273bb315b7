"""``--heads-per-kv-head``: other numbers of query heads per KV head than MiniMax-M3's 16, in every part of a run."""

import json
from dataclasses import replace
from itertools import pairwise

import pytest
import torch

import pageweaver_sglang as pw
from pageweaver_sglang.bench import arms, offline_arms
from pageweaver_sglang.bench.catalogue import catalogue
from pageweaver_sglang.bench.inputs import CallSize, make_inputs
from pageweaver_sglang.bench.logical import pair_plan
from pageweaver_sglang.bench.orders import ORDERS, find_orders
from pageweaver_sglang.bench.peers.page_pair.arm import HEADS, PagePairArm
from pageweaver_sglang.bench.protocol import ArmUnavailable
from pageweaver_sglang.bench.recorded import heads_of, inputs_of, why_random
from pageweaver_sglang.bench.report import files
from pageweaver_sglang.bench.work import count_all, order_count, portable_count, union_count, work_of
from pageweaver_sglang.cli import main
from pageweaver_sglang.cuda import support
from tests.generators import make_case

OURS = (
    "union4,union8,pageweaver-w64,pageweaver-high,portable,pageweaver-w64-bf16,portable-bf16,auto,"
    "offline-w512-reordered"
)


@pytest.fixture
def quick(reference_kernels, small_workload, tmp_path, monkeypatch):
    """Runs the benchmark on the small workload with more options, and returns the exit code."""
    from pageweaver_sglang.bench import ceilings

    monkeypatch.setattr(ceilings, "measure_ceilings", dict)
    path = tmp_path / "small.npz"
    small_workload.save(path)
    sizes = ["--rounds", "1", "--calls", "1", "--rows", "20", "--columns", "cold_ms", "--out", str(tmp_path)]
    return lambda *more: main(["bench", str(path), *sizes, *more])


@pytest.mark.parametrize("heads", [8, 3, 1])
def test_every_arm_gets_the_heads(quick, tmp_path, capsys, heads):
    assert quick("--heads-per-kv-head", str(heads), "--arms", OURS) == 0
    assert f"1 KV head, {heads} query heads per KV head" in " ".join(capsys.readouterr().out.split())
    report = json.loads((tmp_path / f"arms-small-{heads}heads.json").read_text())
    assert report["workload"]["q_heads"] == report["settings"]["heads_per_kv_head"] == heads
    assert sorted(report["arms"]) == sorted(OURS.split(","))
    work = report["logical"]["work"]
    assert work["useful_flops"] == 4 * 128 * heads * work["visible_keys"]
    for name, arm in report["arms"].items():
        assert arm["unavailable"] is None
        assert arm["nrms"] < 3e-3, name
        seconds = arm["cold_ms"]["median"] / 1e3
        assert arm["rates"]["effective_tflops"] == pytest.approx(work["useful_flops"] / seconds / 1e12)
    text = (tmp_path / "report.html").read_text()
    assert f"<h2>small-{heads}heads</h2>" in text
    assert f"{heads} query heads per KV head" in text


def test_results_of_other_heads_are_kept(quick, tmp_path):
    assert quick("--arms", "union8") == 0
    assert quick("--arms", "union8", "--heads-per-kv-head", "16") == 0
    assert quick("--arms", "union8", "--heads-per-kv-head", "8") == 0
    paths = sorted(tmp_path.glob("arms-*.json"))
    assert [path.name for path in paths] == ["arms-small-8heads.json", "arms-small.json"]
    assert [files.heads_in(report) for report in files.read_reports(paths)] == [8, 16]
    assert main(["bench", "--report-only", *map(str, paths), "--out", str(tmp_path / "both")]) == 0
    text = (tmp_path / "both" / "report.html").read_text()
    assert "<h2>small-8heads</h2>" in text
    assert "<h2>small</h2>" in text


def test_page_counts_do_not_depend_on_heads_but_portables_groups_do(small_workload, tmp_path, capsys):
    path = tmp_path / "small.npz"
    small_workload.save(path)
    found = {}
    for heads in (16, 4):
        options = ["--heads-per-kv-head", str(heads), "--out", str(tmp_path)]
        assert main(["bench", "--reference", str(path), *options]) == 0
        name = "small" if heads == 16 else "small-4heads"
        found[heads] = json.loads((tmp_path / f"logical-{name}.json").read_text())["logical"]
    counts = {heads: {key: count["visits"] for key, count in found[heads]["counts"].items()} for heads in found}
    assert counts[16].pop("w64-4") > counts[4].pop("w64-16")
    of_16 = {key: counts[4].pop(key) for key in list(counts[4]) if key.endswith("-16")}
    assert set(of_16) == {"original-16", *(f"{order}-8-16" for order in ORDERS if order != "original")}
    assert counts[16] == counts[4]
    assert all(
        visits < counts[4][key.removesuffix("-16") if "-8-" in key else "original-8"] for key, visits in of_16.items()
    )
    assert "search_s" in found[4]["counts"]["w512-8-16"]
    assert "search_s" not in found[4]["counts"]["w64-16"]
    assert found[16]["page_pair"]["used_workspace_bytes"] == 4 * found[4]["page_pair"]["used_workspace_bytes"]


@pytest.mark.parametrize(("heads", "key"), [(16, "w64-4"), (9, "w64-4"), (8, "w64-8"), (5, "w64-8"), (4, "w64-16")])
def test_count_of_portable(small_workload, heads, key):
    w = small_workload
    size = int(key.removeprefix("w64-"))
    order = pw.regroup(w.topk_idx, w.cu_seqlens, w.prefix_lens, window=64, group_size=size, guard="window")
    assert portable_count(heads) == key
    counts = count_all(w, {}, pair_plan(w)[0], heads)
    assert counts[key] == union_count(w, order, size)
    assert work_of(w, heads).flops * 16 == work_of(w).flops * heads


@pytest.mark.parametrize("heads", [8, 1])
def test_counts_of_groups_of_16_in_the_order_of_8(heads):
    """Pages and, of tiles of 8 queries, rounds, counted by hand; a tile is what a group of 8 is in the same order."""
    case = make_case("packed", seed=2, k=5, kv_heads=2)
    w = pw.Workload(case.topk_idx, case.cu_seqlens, case.seq_lens, case.prefix_lens, page_size=128)
    orders = find_orders(w, ("original", "w64"))
    counts = count_all(w, orders, pair_plan(w)[0], heads)
    bounds = w.cu_seqlens.tolist()
    for name, key in (("original", "original-16"), ("w64", "w64-8-16")):
        perm = orders[name].perm
        visits = rounds = 0
        for head, picks in enumerate(w.topk_idx.tolist()):
            order = list(range(bounds[-1])) if perm is None else perm[head].tolist()
            for (start, end), length in zip(pairwise(bounds), w.seq_lens.tolist(), strict=True):
                pages = [{p for p in picks[token] if 0 <= p < -(-length // 128)} for token in order[start:end]]
                visits += sum(len(set().union(*pages[first : first + 16])) for first in range(0, len(pages), 16))
                rounds += sum(len(set().union(*pages[first : first + 8])) for first in range(0, len(pages), 8))
        assert (counts[key].visits, counts[key].rounds) == (visits, rounds)
        assert counts[key].rounds == counts[f"{name}-8"].visits
    assert order_count("original", 16) in counts
    assert not any(key.endswith("-16") for key in count_all(w, orders, pair_plan(w)[0], 9))


COUNTED = {
    "union8": "original", "pageweaver-w64": "w64", "pageweaver-w64-fixed": "w64", "pageweaver-w128": "w128",
    "pageweaver-w128-fixed": "w128", "auto": "original", "pageweaver-high": "w64", "offline-w512": "w512",
    "offline-w512-reordered": "w512", "pageweaver-w64-bf16": "w64",
}  # fmt: skip
OF_EIGHT = {"union8-paper": "original", "pageweaver-w128-paper": "w128-unguarded"}


@pytest.mark.parametrize(("heads", "processors", "size"), [(8, 4, 16), (3, 4, 16), (8, 14, 8), (9, 4, 8)])
def test_arms_take_the_groups_that_a_call_gets(quick, small_workload, tmp_path, monkeypatch, heads, processors, size):
    """111 queries: more groups of 8 than 4 multiprocessors, not more than 14. What is run, and what the report says."""
    monkeypatch.setattr(support, "processors_of", lambda device: processors)
    sizes = dict.fromkeys(COUNTED, size) | dict.fromkeys(OF_EIGHT, 8)
    assert quick("--heads-per-kv-head", str(heads), "--arms", ",".join(sizes)) == 0
    report = json.loads((tmp_path / f"arms-small-{heads}heads.json").read_text())
    assert report["arms"].keys() == sizes.keys()
    for name, order in {**COUNTED, **OF_EIGHT}.items():
        arm = report["arms"][name]
        assert arm["counts"] == report["logical"]["counts"][order_count(order, sizes[name])]
        assert f"groups of {sizes[name]}" in arm["description"] or "groups of" not in arm["description"]
    assert report["arms"]["auto"]["notes"]["group_size"] == size

    made, workspace = [], arms._workspace
    monkeypatch.setattr(arms, "_workspace", lambda *sizes: made.append(sizes[2]) or workspace(*sizes))
    sets = [inputs_of(small_workload, "cpu", heads_per_kv_head=heads)]
    for entry in catalogue(find_orders(small_workload), CallSize(heads, 111, processors)):
        if entry.arm.name in sizes:
            made.clear()
            entry.arm.prepare(sets)
            assert set(made) == {sizes[entry.arm.name]}, entry.arm.name
    for arm in arms.stage_arms():
        made.clear()
        arm.prepare(sets)
        assert set(made) == {size}


def test_stages_regroup_in_groups_of_8_for_groups_of_16(reference_kernels, small_workload, monkeypatch):
    monkeypatch.setattr(support, "processors_of", lambda device: 4)
    w = small_workload
    stages = arms.Stages([inputs_of(w, "cpu", heads_per_kv_head=8)], window=64, guard="none")
    perm = stages.regroup(0)
    assert torch.equal(perm, pw.regroup(w.topk_idx, w.cu_seqlens, w.prefix_lens, window=64, group_size=8))
    plan = stages.prepare_unions(0, perm)
    assert plan.group_size == 16
    assert plan.visits() == union_count(w, perm, 16).visits


@pytest.mark.parametrize("text", ["0", "17", "-1", "8.0", "many", ""])
def test_bad_numbers_are_refused(capsys, text):
    with pytest.raises(SystemExit) as stopped:
        main(["bench", f"--heads-per-kv-head={text}"])
    assert stopped.value.code == 2
    shown = " ".join(capsys.readouterr().err.split())
    assert f"argument --heads-per-kv-head: must be an integer in 1..16, got {text!r}" in shown


@pytest.fixture
def recorded(small_workload):
    """The small workload with queries and pages of 8 query heads per KV head."""
    generator = torch.Generator().manual_seed(2)
    pages = [(request, page) for request, count in enumerate((4, 1)) for page in range(count)]
    requests, ids = torch.tensor(pages, dtype=torch.int32).unbind(1)
    values = [torch.randn(len(pages), 128, 1, 128, generator=generator).to(torch.float8_e4m3fn) for _ in range(2)]
    q = torch.randn(111, 8, 128, generator=generator).to(torch.bfloat16)
    tensors = {"page_ids": ids.contiguous(), "page_requests": requests.contiguous()}
    return replace(small_workload, q=q, k_pages=values[0], v_pages=values[1], **tensors)


def test_recorded_queries_keep_their_heads(recorded):
    assert why_random(recorded) is None
    assert heads_of(recorded) == heads_of(recorded, 8) == 8
    inputs = inputs_of(recorded, "cpu")
    assert torch.equal(inputs.q, recorded.q)
    assert inputs.heads_per_kv_head == 8
    with pytest.raises(ValueError, match="--heads-per-kv-head: got 4, and the file's recorded queries have 8"):
        inputs_of(recorded, "cpu", heads_per_kv_head=4)
    # More than the kernels take: random queries, of as many as they take.
    many = replace(recorded, q=recorded.q.repeat(1, 4, 1))
    assert "1 to 16 heads of 128 per KV head" in why_random(many)
    assert inputs_of(many, "cpu").heads_per_kv_head == 16


def test_other_heads_than_the_recorded_ones_are_refused(quick, recorded, tmp_path, capsys):
    recorded.save(tmp_path / "small.npz")
    assert quick("--arms", "union8", "--heads-per-kv-head", "16") == 2
    shown = " ".join(capsys.readouterr().err.split())
    assert (
        "small.npz: --heads-per-kv-head: got 16, and the file's recorded queries have 8 per KV head; allowed" in shown
    )
    assert quick("--arms", "union8") == 0
    report = json.loads((tmp_path / "arms-small-8heads.json").read_text())
    assert report["random_tensors_because"] is None
    assert report["workload"]["q_heads"] == 8


def test_random_inputs(small_workload):
    few, many = (make_inputs(small_workload, "cpu", heads_per_kv_head=heads) for heads in (5, 16))
    assert few.q.shape == (111, 5, 128)
    assert few.k_cache.shape == many.k_cache.shape


def test_rows_are_moved_head_by_head():
    case = make_case("heads4", seed=1, ratio=3)
    tokens, heads, _ = case.q.shape
    perm = torch.stack([torch.randperm(tokens, generator=torch.Generator().manual_seed(n)) for n in range(4)]).int()
    out = torch.empty_like(case.q)
    offline_arms._move(case.q, perm, out)
    for head in range(heads):
        for token in range(tokens):
            assert torch.equal(out[token, head], case.q[perm[head // 3, token], head])


@pytest.mark.parametrize("heads", [1, 3])
def test_page_pair_says_which_heads_it_takes(small_workload, heads):
    assert HEADS == (2, 4, 8, 16)
    with pytest.raises(ArmUnavailable, match=f"page-pair takes 2, 4, 8, 16 query heads per KV head, got {heads}"):
        PagePairArm().prepare([make_inputs(small_workload, "cpu", heads_per_kv_head=heads)])
