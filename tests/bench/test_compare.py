"""The comparison of the arms with the reference engine in the kernels' place, so that it runs without a GPU."""

import ast
import importlib.util
import json
from pathlib import Path

import pytest
import torch

import pageweaver_sglang as pw
from pageweaver_sglang.bench import arms, compare
from pageweaver_sglang.bench.inputs import make_inputs
from pageweaver_sglang.cli import demo, main

SMALL = {"cu_seqlens": [0, 90, 111], "prefix_lens": [300, 0], "seq_lens": [390, 21]}


@pytest.fixture
def workload_file(tmp_path):
    generator = torch.Generator().manual_seed(5)
    own_pages = torch.cat([(torch.arange(90) + 300) // 128, torch.arange(21) // 128])
    picked = torch.rand(1, 111, 4, generator=generator).argsort(dim=2).to(torch.int32)
    picked[picked > own_pages[:, None]] = -1
    tensors = {name: torch.tensor(values, dtype=torch.int32) for name, values in SMALL.items()}
    path = tmp_path / "small.npz"
    pw.Workload(topk_idx=picked, page_size=128, **tensors).save(path)
    return path


@pytest.fixture
def no_gpu(reference_kernels, monkeypatch):
    """As ``reference_kernels``, with a copy of Q in the place of attention over a plan: these tests look elsewhere."""
    from pageweaver_sglang.cuda import ops

    monkeypatch.setattr(ops, "union_attention", lambda q, k_cache, v_cache, plan, out, **scales: out.copy_(q))


def test_whole_comparison(no_gpu, workload_file, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(compare, "MAX_NRMS", 10.0)  # the attention above is no attention
    report_path = tmp_path / "report.json"
    sizes = ["--rounds", "1", "--calls", "1", "--rows", "10", "--groups", "1"]
    code = main(["demo", "--workload", str(workload_file), *sizes, "--json", str(report_path)])
    shown = " ".join(capsys.readouterr().out.split())
    report = json.loads(report_path.read_text())
    assert report["failures"] == []
    assert code == 0

    assert list(report["unavailable"]) == ["native"]
    assert "native not run: SGLang's Step 3" in shown
    assert report["regroup_kernel_equal"] == {"w64": True, "w128": True}
    # The public arms run the reference engine here: right up to the output's BF16.
    ours = [f"pageweaver-{kind}" for kind in ("w64", "w128", "high", "w128-paper")]
    for name in ("union8", "union8-paper", "auto", *ours):
        assert report["accuracy"]["nrms"][name]["random"] < 3e-3
        assert report["accuracy"]["nrms"][name]["q_x4"] < 3e-3
    regrouped = [f"pageweaver-w{window}{suffix}" for window in (64, 128) for suffix in ("", "-fixed")]
    timed = ["union4", "union8", "union8-paper", *regrouped, "auto", "pageweaver-high", "pageweaver-w128-paper"]
    runs = report["timings"]["runs"]
    assert [(run["cache"], run["mode"]) for run in runs] == [
        ("cold", "graph"),
        ("cold", "eager"),
        ("warm", "graph"),
        ("warm", "eager"),
    ]
    for run in runs:
        assert list(run["timings"]) == timed
        assert all(len(timing["rounds_ms"]) == 1 for timing in run["timings"].values())
        assert run["failed"] == {}
    assert runs[0]["sets"] > 1
    assert runs[2]["sets"] == 1
    assert len(report["savings"]) == 8
    assert {name for run in report["stages"]["runs"] for name in run["timings"]} == {
        arm.name for arm in arms.stage_arms()
    }
    assert set(report["arms"]) >= {"native", *timed}


def test_a_bad_output_fails(no_gpu, workload_file, capsys):
    sizes = ["--rounds", "1", "--calls", "1", "--rows", "10", "--groups", "1"]
    assert main(["demo", "--workload", str(workload_file), *sizes]) == 1
    assert "FAILED: union4: NRMS" in " ".join(capsys.readouterr().out.split())


def test_kernels_that_cannot_be_built(no_gpu, workload_file, capsys, monkeypatch):
    def fail():
        raise arms.ArmUnavailable("PageWeaver's kernels can't be built or loaded (no nvcc)")

    monkeypatch.setattr(arms, "build_kernels", fail)
    assert main(["demo", "--workload", str(workload_file), "--groups", "2"]) == 0
    assert "GPU part not run: PageWeaver's kernels can't be built" in " ".join(capsys.readouterr().out.split())


TIMED = [("regroup",), ("unions",), ("tiles",), ("attention",), ("unions", "tiles", "attention")]


@pytest.mark.parametrize("timed", TIMED)
def test_staged_arm_calls_what_it_times(no_gpu, workload_file, monkeypatch, timed):
    from pageweaver_sglang.cuda import ops

    called = []
    names = {
        "regroup": "regroup",
        "unions": "prepare_unions",
        "tiles": "value_tiles",
        "attention": "union_attention",
    }
    for stage, name in names.items():
        inner = getattr(ops, name)
        monkeypatch.setattr(ops, name, lambda *a, s=stage, f=inner, **k: (called.append(s), f(*a, **k))[1])
    workload = pw.load_workload(workload_file)
    arm = arms.StagedArm("x", "", timed, window=64)
    arm.prepare([make_inputs(workload, "cpu", seed=seed) for seed in range(2)])
    called.clear()
    arm.call(1)
    assert tuple(called) == timed
    arm.release()


def test_value_tiles_alone_do_the_same_work_every_time(no_gpu, workload_file, monkeypatch):
    """The kernel clears the marks that it goes by."""
    from pageweaver_sglang.cuda import ops

    marked, inner = [], ops.value_tiles

    def count(v_cache, tiles, plan):
        marked.append(int((tiles.marks > 0).sum()))
        inner(v_cache, tiles, plan)

    monkeypatch.setattr(ops, "value_tiles", count)
    arm = arms.StagedArm("x", "", ("tiles",))
    arm.prepare([make_inputs(pw.load_workload(workload_file), "cpu")])
    for _ in range(3):
        arm.call(0)
    assert marked == [marked[0]] * 4
    assert marked[0] > 0


def test_groups_of_four_have_no_tiles(no_gpu, workload_file, monkeypatch):
    from pageweaver_sglang.cuda import ops

    monkeypatch.setattr(ops, "value_tiles", lambda *arguments: pytest.fail("called"))
    arm = arms.StagedArm("x", "", ("unions", "tiles", "attention"), group_size=4)
    arm.prepare([make_inputs(pw.load_workload(workload_file), "cpu")])
    arm.call(0)


@pytest.mark.sglang
def test_native_arm_calls_sglang_by_its_parameters(workload_file):
    """Without importing SGLang, which doesn't like every machine: against the text of the installed version."""
    spec = importlib.util.find_spec("sglang")
    if spec is None:
        pytest.skip("SGLang is not installed")
    module = Path(spec.origin).parent / "kernels/ops/attention/minimax_sparse/prefill/topk_sparse.py"
    functions = {
        node.name: node for node in ast.walk(ast.parse(module.read_text())) if isinstance(node, ast.FunctionDef)
    }
    assert "_gqa_share_sparse_fwd_kernel" in functions
    parameters = functions["flash_prefill_with_gqa_share_sparse"].args
    names = [parameter.arg for parameter in parameters.args]
    required = names[: len(names) - len(parameters.defaults)]

    arm = arms.NativeArm()
    arm._sets, arm._function = [make_inputs(pw.load_workload(workload_file), "cpu")], lambda **given: given
    given = arm.call(0)
    assert set(required) <= set(given) <= set(names)
    assert (given["block_size_q"], given["block_size_k"], given["max_seqlen_q"]) == (1, 128, 90)


def test_default_workload_is_packaged():
    assert demo.DEFAULT_WORKLOAD in demo.workload_names()
