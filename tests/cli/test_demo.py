"""`pageweaver demo` without a GPU, on the smallest recorded workload."""

import json

import numpy as np
import pytest
import torch

import pageweaver_sglang as pw
from pageweaver_sglang.bench import accuracy, compare, counts, inputs, verify, workloads
from pageweaver_sglang.cli import demo, main

DATA = workloads._FOLDERS[1]


def run(capsys, *arguments):
    code = main(["demo", "--device", "cpu", "--groups", "2", *arguments])
    captured = capsys.readouterr()
    return code, " ".join((captured.out + captured.err).split())


def test_small_workload(capsys, tmp_path):
    report_path = tmp_path / "folder" / "report.json"
    code, shown = run(capsys, "--workload", "ctx8k", "--json", str(report_path), "--commit", "abc")
    assert code == 0
    assert "all 7 recorded counts of ctx8k are reproduced exactly" in shown
    assert "22,567" in shown
    assert "GPU part not run: left out by --device cpu." in shown
    report = json.loads(report_path.read_text())
    assert report["failures"] == []
    assert report["environment"]["commit"] == "abc"
    assert {row["order"] for row in report["counts"]["orders"]} == set(counts.ORDERS)
    assert all(row["exact"] for row in report["verification"])


def test_says_why_there_is_no_gpu_part(capsys, monkeypatch):
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    code = main(["demo", "--workload", "ctx8k", "--groups", "1"])
    assert code == 0
    assert "PyTorch sees no CUDA device" in capsys.readouterr().out
    code = main(["demo", "--workload", "ctx8k", "--groups", "1", "--device", "cuda"])
    assert code == 1
    assert "--device cuda was asked for" in " ".join(capsys.readouterr().out.split())


def test_file_without_recorded_counts(capsys, tmp_path):
    path = tmp_path / "mine.npz"
    pw.load_workload(workloads.find_workload("packed")).save(path)
    code, shown = run(capsys, "--workload", str(path))
    assert code == 0
    assert "No recorded counts" in shown


def save_workload(path, *, chunk, seq_len, tokens=20):
    lengths = {"cu_seqlens": [0, chunk], "prefix_lens": [300], "seq_lens": [seq_len]}
    tensors = {name: torch.tensor(values, dtype=torch.int32) for name, values in lengths.items()}
    topk_idx = torch.tensor([0, 1, 2, -1], dtype=torch.int32).expand(1, tokens, 4).contiguous()
    pw.Workload(topk_idx=topk_idx, page_size=128, **tensors).save(path)


@pytest.mark.parametrize(("chunk", "seq_len"), [(20, 320), (13, 313), (20, 310), (20, 100)])
def test_padding_rows_and_short_sequences(capsys, tmp_path, chunk, seq_len):
    path = tmp_path / "mine.npz"
    save_workload(path, chunk=chunk, seq_len=seq_len)
    code, shown = run(capsys, "--workload", str(path))
    assert code == 0
    assert shown.count("attention over unions equals attention over their own pages") == 3


def test_a_file_without_queries(capsys, tmp_path):
    for tokens in (0, 20):
        save_workload(tmp_path / "none.npz", chunk=0, seq_len=300, tokens=tokens)
        code, shown = run(capsys, "--workload", str(tmp_path / "none.npz"))
        assert code == 2
        assert "holds no query that picks pages" in shown


def test_a_report_that_cannot_be_written(capsys, tmp_path):
    code, shown = run(capsys, "--workload", "ctx8k", "--json", str(tmp_path))
    assert code == 2
    assert "Is a directory" in shown


def test_wrong_counts_fail(capsys, monkeypatch):
    monkeypatch.setattr(demo, "expected_counts", lambda name: {"visits-w64-8": 1})
    code, shown = run(capsys, "--workload", "ctx8k")
    assert code == 1
    assert "FAILED: count visits-w64-8: 21009, recorded 1" in shown


def test_wrong_attention_fails(capsys, monkeypatch):
    monkeypatch.setattr(verify, "exact_rows", lambda x, rows: torch.ones(len(rows), 16, 128, dtype=torch.float64))
    code, shown = run(capsys, "--workload", "ctx8k")
    assert code == 1
    assert "FAILED: attention in the order original" in shown


def test_unknown_workload(capsys):
    code, shown = run(capsys, "--workload", "ctx9k")
    assert code == 2
    assert "no workload 'ctx9k'" in shown
    assert "ctx64k_a" in shown


@pytest.mark.parametrize("content", ["text", "wrong dtype"])
def test_bad_file(capsys, tmp_path, content):
    path = tmp_path / "bad.npz"
    if content == "text":
        path.write_text("not an archive")
    else:
        np.savez(path, topk_idx=np.zeros((1, 2, 3)), cu_seqlens=np.array([0, 2], np.int32))
    code, shown = run(capsys, "--workload", str(path))
    assert code == 2
    assert "bad.npz" in shown
    assert "Traceback" not in shown


@pytest.mark.parametrize("arguments", [["--rounds", "0"], ["--rounds", "x"], ["--device", "tpu"], ["--seed", "-1"]])
def test_bad_arguments(capsys, arguments):
    with pytest.raises(SystemExit) as stopped:
        main(["demo", *arguments])
    assert stopped.value.code == 2


def test_packaged_workload_is_the_tested_one():
    """The wheel carries a copy of the demo's workload and of the counts."""
    for name in (f"{demo.DEFAULT_WORKLOAD}.npz", "stats.json"):
        assert (workloads._FOLDERS[0] / name).read_bytes() == (DATA / name).read_bytes()


def test_union_walk_sees_a_wrong_plan():
    """The check is worth something: a plan with one page less gives another result."""
    workload = pw.load_workload(workloads.find_workload("packed"))
    tensors = inputs.make_inputs(workload, "cpu")
    plan = counts.plan_of(workload, "w64", 8)
    group = int(plan.counts[0].argmax())
    rows, walked = accuracy.union_walk(tensors, plan, [group])
    exact = accuracy.exact_rows(tensors, rows)
    assert accuracy.nrms(walked, exact) <= verify.EXACT_NRMS
    plan.counts[0, group] -= 1
    _, walked = accuracy.union_walk(tensors, plan, [group])
    assert accuracy.nrms(walked, exact) > 1e-3


def test_exact_rows_are_the_rows_of_the_whole_call():
    workload = pw.load_workload(workloads.find_workload("packed"))
    tensors = inputs.make_inputs(workload, "cpu", seed=3)
    arguments = tensors.kwargs() | {"q": tensors.q.double()}
    whole = pw.reference.sparse_prefill(**arguments)
    rows = accuracy.sample_rows(len(tensors.q), 40, seed=1)
    assert {0, len(tensors.q) - 1} <= set(rows.tolist())
    assert accuracy.nrms(accuracy.exact_rows(tensors, rows), whole[rows]) <= 1e-12


def test_nrms():
    exact = torch.tensor([3.0, 4.0])
    assert accuracy.nrms(torch.tensor([3.0, 4.5]), exact) == pytest.approx(0.1)
    assert accuracy.nrms(torch.tensor([float("nan"), 4.0]), exact) == float("inf")


def test_savings():
    class Median:
        def __init__(self, value):
            self.median = value

    names = {"union8": 1.4, "pageweaver-w64-fixed": 1.25, "pageweaver-w64": 1.3, "native": 5.0}
    run = {"cache": "cold", "mode": "graph", "timings": {name: Median(value) for name, value in names.items()}}
    (row,) = compare.savings([run])
    assert row["order"] == "w64"
    assert row["execution_saving_ms"] == pytest.approx(0.15)
    assert row["online_cost_ms"] == pytest.approx(0.05)
    assert row["net_saving_ms"] == pytest.approx(0.1)
