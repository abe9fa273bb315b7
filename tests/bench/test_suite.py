"""``pageweaver bench`` on a machine that pretends to have the GPU: PageWeaver's arms, the report, the exit codes."""

import json
from dataclasses import replace

import pytest
import torch

import pageweaver_sglang as pw
from pageweaver_sglang.bench import arms, catalogue, ceilings, fidelity, supervision
from pageweaver_sglang.bench.arms import Bf16CacheArm, PublicArm
from pageweaver_sglang.bench.orders import OFFLINE, find_orders
from pageweaver_sglang.bench.protocol import Arm, ArmUnavailable
from pageweaver_sglang.bench.recorded import inputs_of, why_random
from pageweaver_sglang.bench.work import work_of
from pageweaver_sglang.cli import main
from pageweaver_sglang.cuda import support

from .conftest import in_this_process

OTHERS = ["native", "pr37236", "flashinfer-xqa", "flashinfer-fa2", "page-pair", "native-short-tuned", "native-bf16"]


@pytest.fixture
def no_ceilings(monkeypatch):
    monkeypatch.setattr(ceilings, "measure_ceilings", lambda: {"copy_tb_s": 4.0, "fp8_matmul_tflops": 1000.0})


def test_whole_run(reference_kernels, no_ceilings, small_workload, tmp_path, capsys):
    path = tmp_path / "small.npz"
    small_workload.save(path)
    out = tmp_path / "out"
    code = main(["bench", str(path), "--rounds", "2", "--calls", "1", "--rows", "20", "--out", str(out)])
    shown = " ".join(capsys.readouterr().out.split())
    report = json.loads((out / "arms-small.json").read_text())
    assert report["failures"] == []
    assert code == 0

    assert list(report["arms"]) == catalogue.arm_names()
    for name, arm in report["arms"].items():
        if name in OTHERS:
            # What isn't installed here, or needs a GPU, says so and is not replaced.
            assert arm["unavailable"]
            assert "graph_ms" not in arm
            assert arm["unavailable"].split()[0] in shown
            continue
        assert arm["unavailable"] is None
        assert arm["nrms"] < 3e-3  # BF16 output
        assert set(arm["fidelity"]) == {"random", "sharp"}
        columns = ("cold_ms", "graph_ms") + (() if arm["kind"] == "apart" else ("warm_ms", "warm_graph_ms"))
        for column in columns:
            assert len(arm[column]["rounds"]) == 2
            assert arm[column]["min"] <= arm[column]["median"] <= arm[column]["max"]
        element_bytes = 2 if name.endswith("-bf16") else 1
        assert arm["rates"]["bytes_delivered"] == arm["counts"]["visits"] * 2 * 128 * 128 * element_bytes
    assert report["arms"]["offline-w512"]["notes"]["search_s"] > 0
    auto = report["arms"]["auto"]
    # A workload of a few dozen queries: nothing to gain, so the counts are those of the original order.
    assert auto["notes"]["order"] == "original"
    assert set(auto["notes"]["decisions"]) == {"small"}
    assert auto["counts"] == report["arms"]["union8"]["counts"]
    assert len(report["savings"]) == 8
    assert set(report["stages"]) >= {"regroup-w64", "value-tiles", "attention-w128"}
    assert report["sets"] == len(report["seeds"]) > 1
    assert report["environment"]["versions"]["torch"] == torch.__version__
    assert report["ceilings"]["copy_tb_s"] == 4.0
    assert (out / "report.html").stat().st_size < 2_000_000


def test_a_wrong_arm_of_ours_is_refused_and_fails_the_run(
    reference_kernels, no_ceilings, small_workload, tmp_path, monkeypatch
):
    right = PublicArm.call
    monkeypatch.setattr(PublicArm, "call", lambda self, index: right(self, index) * 1.2)
    path = tmp_path / "small.npz"
    small_workload.save(path)
    arguments = ["bench", str(path), "--arms", "union4,union8", "--rounds", "1", "--calls", "1", "--out", str(tmp_path)]
    assert main(arguments) == 1
    report = json.loads((tmp_path / "arms-small.json").read_text())
    assert "refused: NRMS 20" in report["arms"]["union8"]["unavailable"]
    assert "graph_ms" not in report["arms"]["union8"]
    assert report["arms"]["union4"]["graph_ms"]["median"] > 0
    assert any(failure.startswith("union8: refused") for failure in report["failures"])


class _OneWrongQuery(Arm):
    name, description = "one-wrong", ""

    def prepare(self, sets):
        self.sets = sets

    def call(self, index):
        out = pw.reference.sparse_prefill(**self.sets[index].kwargs())
        out[7] = -out[7]
        return out

    def release(self):
        del self.sets


def test_one_wrong_query_of_many_is_found(small_workload):
    found, reasons = fidelity.check_arms(small_workload, [_OneWrongQuery()], rows=None, seed=0, device="cpu")
    assert found["one-wrong"]["random"]["worst_row_nrms"] == pytest.approx(2.0, rel=0.01)
    assert "refused" in reasons["one-wrong"]


def test_figures_of_compared_rows():
    exact = torch.eye(3, dtype=torch.float64)[:, None]
    figures = fidelity.compare_rows(exact.clone(), exact)
    assert figures == {"nrms": 0.0, "max_error": 0.0, "cosine": pytest.approx(1.0), "worst_row_nrms": 0.0}
    bad = exact.clone()
    bad[1, 0, 1] = float("nan")
    assert fidelity.compare_rows(bad, exact)["nrms"] == float("inf")
    assert fidelity.refusal({"random": fidelity.compare_rows(bad, exact)}, 0.05)


def test_work_counts_visible_keys(small_workload):
    w = small_workload
    keys = picks = 0
    for request, prefix in enumerate(w.prefix_lens.tolist()):
        start, end = w.cu_seqlens[request : request + 2].tolist()
        for token in range(start, end):
            position = prefix + token - start
            for page in {p for p in w.topk_idx[0, token].tolist() if p >= 0}:
                seen = max(0, min(128, position + 1 - page * 128))
                keys, picks = keys + seen, picks + (seen > 0)
    work = work_of(w)
    assert (work.visible_keys, work.picks) == (keys, picks)
    assert work.flops == 4 * 128 * 16 * keys


def test_offline_orders_permute_each_request(small_workload):
    bounds = small_workload.cu_seqlens.tolist()
    orders = find_orders(small_workload)
    assert set(OFFLINE) < set(orders)
    for name, order in orders.items():
        if name != "original":
            for start, end in ((bounds[0], bounds[1]), (bounds[1], bounds[2])):
                assert sorted(order.perm[0, start:end].tolist()) == list(range(start, end)), name


def test_recorded_tensors_are_used(small_workload):
    generator = torch.Generator().manual_seed(1)
    pages = [torch.randn(3, 128, 1, 128, generator=generator).to(torch.float8_e4m3fn) for _ in range(2)]
    workload = pw.Workload(
        topk_idx=torch.tensor([[[0, 2], [1, 2]]], dtype=torch.int32),
        cu_seqlens=torch.tensor([0, 2], dtype=torch.int32),
        prefix_lens=torch.tensor([300], dtype=torch.int32),
        seq_lens=torch.tensor([302], dtype=torch.int32),
        page_size=128,
        q=torch.randn(2, 16, 128, generator=generator).to(torch.bfloat16),
        k_pages=pages[0],
        v_pages=pages[1],
        page_ids=torch.tensor([0, 1, 2], dtype=torch.int32),
    )
    direct = pw.reference.sparse_prefill(**workload.attention_arguments())
    moved = inputs_of(workload, "cpu", seed=3)
    assert not torch.equal(moved.k_cache.view(torch.uint8), pages[0].flatten(0, 1).view(torch.uint8))
    assert torch.equal(pw.reference.sparse_prefill(**moved.kwargs()), direct)
    sharp = inputs_of(workload, "cpu", q_scale=4.0)
    assert torch.equal(sharp.q.float(), workload.q.float() * 4)
    assert why_random(workload) is None

    changes = {
        "not FP8": {"k_pages": pages[0].bfloat16(), "v_pages": pages[1].bfloat16()},
        "k_scale is 0.5": {"k_scale": 0.5},
    }
    for reason, change in changes.items():
        other = replace(workload, **change)
        assert reason in why_random(other)
        assert inputs_of(other, "cpu").k_cache.dtype == torch.float8_e4m3fn
    fewer = {"page_ids": workload.page_ids[:2], "k_pages": pages[0][:2], "v_pages": pages[1][:2]}
    assert "lacks 1 picked pages, page 2 of request 0" in why_random(replace(workload, **fewer))
    assert why_random(small_workload) == "the file holds picks only"


def test_arm_choice_and_its_errors(capsys):
    with pytest.raises(SystemExit):
        main(["bench", "--arms", "union9"])
    assert "no arm 'union9'; the arms are native," in " ".join(capsys.readouterr().err.split())


def test_without_a_gpu_it_points_to_the_reference(capsys, monkeypatch, tmp_path):
    from pageweaver_sglang.bench import compare

    monkeypatch.setattr(compare, "unusable_gpu", lambda: "PyTorch sees no CUDA device.")
    monkeypatch.setattr(supervision, "supervise", in_this_process)
    assert main(["bench", "ctx8k", "--out", str(tmp_path)]) == 2
    assert "--reference" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"topk_idx": [[0, 7]]}, "topk_idx must be page ids"),
        ({"topk_idx": [[-2, 0]]}, "topk_idx must be page ids"),
        ({"topk_idx": [[-1, -1]]}, "topk_idx must pick something"),
        ({"seq_lens": 500}, "seq_lens must be prefix_lens + chunk length"),
        ({"page_size": 64}, "page_size must be 128"),
    ],
)
def test_bad_workloads_are_refused(tmp_path, capsys, change, message):
    def ints(values):
        return torch.tensor(values, dtype=torch.int32)

    good = pw.Workload(
        topk_idx=ints([[[0, 2], [1, 2]]]),
        cu_seqlens=ints([0, 2]),
        prefix_lens=ints([300]),
        seq_lens=ints([302]),
        page_size=128,
    )
    if "topk_idx" in change:
        change = {
            "topk_idx": ints(
                [[[0, 2], change["topk_idx"][0]]] if message != "topk_idx must pick something" else [[[-1, -1]] * 2]
            )
        }
    if "seq_lens" in change:
        change = {"seq_lens": ints([change["seq_lens"]])}
    path = tmp_path / "bad.npz"
    replace(good, **change).save(path)
    assert main(["bench", "--reference", str(path), "--out", str(tmp_path)]) == 2
    assert message in " ".join(capsys.readouterr().err.split())


def test_pickles_and_wrong_shapes_are_refused(tmp_path, capsys):
    import numpy as np

    arrays = {name: np.zeros(2, np.int32) for name in ("cu_seqlens", "prefix_lens", "seq_lens")}
    np.savez(tmp_path / "pickled.npz", topk_idx=np.array([{}], dtype=object), page_size=np.int32(128), **arrays)
    np.savez(tmp_path / "shapes.npz", topk_idx=np.zeros((2, 3), np.int32), page_size=np.int32(128), **arrays)
    for name, message in (
        ("pickled", "cannot be read as an .npz of plain arrays"),
        ("shapes", "topk_idx must be int32"),
    ):
        assert main(["bench", "--reference", str(tmp_path / f"{name}.npz"), "--out", str(tmp_path)]) == 2
        assert message in " ".join(capsys.readouterr().err.split())


def test_without_nvcc_it_says_what_is_missing(monkeypatch, tmp_path):
    """What the measuring process does first; its ValueErrors are the command's messages."""
    from pageweaver_sglang.bench import compare
    from pageweaver_sglang.cli.bench import prepare_gpu
    from pageweaver_sglang.cuda import loader

    monkeypatch.setattr(compare, "unusable_gpu", lambda: None)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *device: (9, 0))
    monkeypatch.setattr(loader, "_modules", {})
    monkeypatch.setattr(loader, "nvcc_path", lambda: None)
    monkeypatch.delenv("PAGEWEAVER_NVCC", raising=False)
    monkeypatch.setenv("PAGEWEAVER_CACHE_DIR", str(tmp_path))
    with pytest.raises(ValueError, match=r"can't be built or loaded \(.*no nvcc was found\. Install the CUDA toolkit"):
        prepare_gpu()


@pytest.mark.parametrize("engine", ["stream", "union8"])
def test_no_arm_runs_another_engine_under_its_name(small_workload, monkeypatch, engine):
    """Where an arm's engine doesn't serve, for the GPU or for the cache, a call would silently mean another one."""
    sets = [inputs_of(small_workload, "cpu")]
    arm = PublicArm("union8", "", pw.Config(mode="union8", engine=engine))
    arm.prepare(sets)
    bf16 = Bf16CacheArm(arm)
    if engine == "stream":
        bf16.prepare(sets)
    else:
        with pytest.raises(ArmUnavailable, match="engine union8 does not serve here: SGLang would"):
            bf16.prepare(sets)
    monkeypatch.setattr(support, "capability_of", lambda device: (12, 0))
    for other in (arm, bf16):
        with pytest.raises(ArmUnavailable, match=f"engine {engine} does not serve here: portable would"):
            other.prepare(sets)


def test_tiles_are_allocated_for_fp8_caches_only(small_workload, monkeypatch):
    monkeypatch.setattr(arms, "_workspace", lambda sets, window, group_size, pool_pages: pool_pages)
    sets = [inputs_of(small_workload, "cpu")]
    arm = arms.regrouping_arm(64)
    arm.prepare(sets)
    assert arm._space == len(sets[0].v_cache) // 128
    Bf16CacheArm(arm).prepare(sets)
    assert arm._space is None


def test_arms_of_16_bits_are_held_to_the_same_error():
    limits = {entry.arm.name: entry.arm.max_nrms for entry in catalogue.catalogue(dict.fromkeys(OFFLINE))}
    assert limits["pageweaver-w64-bf16"] == limits["portable-bf16"] == limits["portable"] < limits["pageweaver-w64"]
