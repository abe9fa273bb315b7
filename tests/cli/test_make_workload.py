"""`pageweaver make-workload`: options, what it prints and writes, errors."""

import json

import pytest
import torch

import pageweaver_sglang as pw
from pageweaver_sglang.cli import main
from pageweaver_sglang.inspection import inspect_workload
from pageweaver_sglang.synthetic import make_workload, preset


def run(capsys, *arguments):
    code = main(["make-workload", *map(str, arguments)])
    captured = capsys.readouterr()
    return code, " ".join((captured.out + captured.err).split())


def test_writes_what_the_options_say_and_prints_its_counts(capsys, tmp_path):
    path, report = tmp_path / "folder" / "made.npz", tmp_path / "reports" / "made.json"
    options = (
        "--preset mixed --queries 500 --prefix 9000 --drift 0.1 --noise 0 --types 5 --streak 2 --interleave cyclic"
    )
    options += " --hot 3 --hot-share 0.5 --local 2 --kv-heads 2 --k 8 --page-size 64 --seed 11 --no-paired"
    code, shown = run(capsys, path, *options.split(), "--json", report)
    assert code == 0
    workload = pw.load_workload(path)
    expected = preset(
        "mixed",
        requests=((500, 9000),),
        drift=0.1,
        noise=0.0,
        types=5,
        streak=2,
        interleave="cyclic",
        hot=3,
        hot_share=0.5,
        local=2,
        kv_heads=2,
        k=8,
        page_size=64,
        seed=11,
        paired=False,
    )
    assert torch.equal(workload.topk_idx, make_workload(expected).topk_idx)
    found = inspect_workload(workload)
    for order in found.orders.values():
        assert f"{order.visits:,} │ {order.rounds:,} │ {order.reuse:.2f}" in shown
    content = json.loads(report.read_text())
    assert content["recipe"]["types"] == 5
    assert content["counts"]["orders"]["w128"]["visits"] == found.orders["w128"].visits


def test_packed_requests(capsys, tmp_path):
    path = tmp_path / "made.npz"
    assert run(capsys, path, "--request", "10:300", "--request", "7:0", "--request", "5:0")[0] == 0
    workload = pw.load_workload(path)
    assert workload.cu_seqlens.tolist() == [0, 10, 17, 22]
    assert workload.prefix_lens.tolist() == [300, 0, 0]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ("--drift 1.5", "drift must be in 0..1, got 1.5"),
        ("--queries 0", "requests must have chunks >= 1"),
        ("--prefix 10", "--prefix needs --queries"),
        ("--queries 10 --request 3:4", "--request goes instead of --queries and --prefix"),
        ("--local 99", "local must be in 0..16, got 99"),
    ],
)
def test_wrong_options(capsys, tmp_path, options, message):
    code, shown = run(capsys, tmp_path / "made.npz", *options.split())
    assert code == 2
    assert f"pageweaver make-workload: {message}" in shown
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    "options", ["--request 3:x", "--request x", "--types 1.5", "--preset big", "--interleave any", "--drift x"]
)
def test_options_that_cannot_be_read(capsys, tmp_path, options):
    with pytest.raises(SystemExit) as stopped:
        main(["make-workload", str(tmp_path / "made.npz"), *options.split()])
    assert stopped.value.code == 2
    assert options.split()[0] in capsys.readouterr().err


def test_files_that_cannot_be_written(capsys, tmp_path):
    code, shown = run(capsys, tmp_path / "made.npy", "--queries", 5)
    assert code == 2
    assert "must end in .npz, got made.npy" in shown
    (tmp_path / "file").touch()
    assert run(capsys, tmp_path / "file" / "made.npz", "--queries", 5)[0] == 2
