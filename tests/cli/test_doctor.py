"""`pageweaver doctor` on machines that lack one thing or another."""

import importlib.metadata
import json
import sys

import pytest
from rich.console import Console

from pageweaver_sglang import Config
from pageweaver_sglang.bench import environment
from pageweaver_sglang.cli import doctor, main
from pageweaver_sglang.cuda import loader
from tests.fake_xqa import modules

H200 = {"name": "NVIDIA H200", "compute_cap": "9.0", "driver_version": "580.1"}
A100 = {"name": "NVIDIA A100", "compute_cap": "8.0", "driver_version": "580.1"}
B200 = {"name": "NVIDIA B200", "compute_cap": "10.0", "driver_version": "580.1"}
T4 = {"name": "Tesla T4", "compute_cap": "7.5", "driver_version": "580.1"}


@pytest.fixture
def machine(monkeypatch, tmp_path):
    """A machine where everything is in place but for what a test takes away; SGLang itself is never imported."""
    for variable in [name for name in doctor.os.environ if name.startswith("PAGEWEAVER_")]:
        monkeypatch.delenv(variable)
    monkeypatch.delenv("SGLANG_PLUGINS", raising=False)
    monkeypatch.setenv("PAGEWEAVER_CONTROL_DIR", str(tmp_path))  # not the user's own
    compat = pytest.importorskip("pageweaver_sglang.plugin.compat")
    monkeypatch.setattr(environment, "gpus", lambda: [H200])
    monkeypatch.setattr(doctor.environment, "version", lambda package: "0.5.23")
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr(loader, "is_built", lambda architecture: True)
    monkeypatch.setattr(doctor, "entry_point_visible", lambda: True)
    monkeypatch.setattr(compat, "verify_seams", lambda: [])
    monkeypatch.setattr(compat, "sglang_version", lambda: "0.5.23")
    monkeypatch.setattr(compat, "captures_sparse_attention", lambda graph: graph == "full")
    return compat


def problems():
    return doctor.diagnose().problems


def test_all_is_well(machine, capsys):
    assert problems() == []
    assert main(["doctor"]) == 0
    assert "would run PageWeaver's Step 3" in " ".join(capsys.readouterr().out.split())


@pytest.mark.parametrize(
    ("settings", "shown"), [({}, True), ({"ENGINE": "union8"}, False), ({"MODE": "native"}, False)]
)
def test_memory_of_the_stream_engine(machine, monkeypatch, settings, shown):
    for name, value in settings.items():
        monkeypatch.setenv(f"PAGEWEAVER_{name}", value)
    found = [finding.found for finding in doctor.diagnose().findings if finding.name == "GPU memory"]
    assert bool(found) == shown
    assert all(text.startswith("16 KiB per KV page and KV head of a rank for value tiles") for text in found)


def test_json_schema(machine, capsys):
    assert main(["doctor", "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["would_run_pageweaver"] is True
    assert set(report) == {"would_run_pageweaver", "verdict", "problems", "findings", "settings", "gpus", "versions"}
    assert set(report["settings"]) == set(Config.model_fields)
    assert all(set(finding) == {"name", "found", "problem"} for finding in report["findings"])
    assert report["settings"]["mode"] == {"value": "auto", "source": "default"}
    (rule,) = [finding["found"] for finding in report["findings"] if finding["name"] == "order"]
    assert "windows of 64 are regrouped" in rule
    worth = "4.75 us (2.45 us where that engine has groups of 16)"
    assert f"1,000 page visits saved count as {worth}, regrouping as 13 us and 0.12 us for 1,000" in rule


def test_switched_off(machine, tmp_path):
    (tmp_path / "switch.json").write_text('{"on": false}')
    (problem,) = problems()
    assert problem == f"{tmp_path}/switch.json says off; `pageweaver switch on` changes that."
    (tmp_path / "switch.json").write_text("off")
    (problem,) = problems()
    assert "would refuse to start" in problem
    assert "switch.json: cannot be read" in problem


def test_no_gpu(machine, monkeypatch):
    monkeypatch.setattr(environment, "gpus", lambda: [])
    (problem,) = problems()
    assert "no NVIDIA GPU" in problem


def found(name):
    return next(finding.found for finding in doctor.diagnose().findings if finding.name == name)


def test_other_gpu(machine, monkeypatch):
    monkeypatch.setattr(environment, "gpus", lambda: [A100])
    assert problems() == []
    assert found("GPU 0").endswith("engine portable (in Triton: stream is built for Hopper only)")
    assert not any(finding.name == "GPU memory" for finding in doctor.diagnose().findings)
    monkeypatch.setattr(loader, "is_built", lambda architecture: architecture == "sm_90a")
    assert "python -m pageweaver_sglang.build --architecture sm_80" in found("kernels")
    assert found("GPU 0").count("compute capability 8.0") == 1


def test_engine_of_a_hopper(machine, monkeypatch):
    assert found("GPU 0").endswith(", engine stream")
    monkeypatch.setenv("PAGEWEAVER_ENGINE", "union8")
    assert found("GPU 0").endswith(", engine union8; for a BF16 KV cache SGLang's own Step 3")
    monkeypatch.setenv("PAGEWEAVER_ENGINE", "portable")
    assert found("GPU 0").endswith(", engine portable")


@pytest.mark.parametrize("gpu", [B200, T4], ids=["B200", "T4"])
def test_gpus_that_sglang_serves(machine, monkeypatch, gpu):
    monkeypatch.setattr(environment, "gpus", lambda: [gpu])
    (problem,) = problems()
    assert problem.startswith(f"GPU 0 has compute capability {gpu['compute_cap']}, ")
    assert problem.endswith(": every call on it would go to SGLang's own Step 3.")
    monkeypatch.setenv("PAGEWEAVER_ENGINE", "portable")
    assert len(problems()) == (gpu is T4)
    assert ("faster than unions" in problem) == (gpu is B200)
    assert ("need 8.0 or newer" in problem) == (gpu is T4)


def test_one_usable_gpu_is_enough(machine, monkeypatch):
    monkeypatch.setattr(environment, "gpus", lambda: [T4, H200])
    assert problems() == []
    assert found("GPU 0").endswith("SGLang's own Step 3")


def test_pytorch_without_cuda(machine, monkeypatch):
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    (problem,) = problems()
    assert problem.startswith("PyTorch can't use the GPU")


@pytest.mark.parametrize("nvcc", ["missing", "too old"])
def test_no_usable_nvcc(machine, monkeypatch, tmp_path, nvcc):
    monkeypatch.setattr(loader, "is_built", lambda architecture: False)
    if nvcc == "missing":
        monkeypatch.setenv("PAGEWEAVER_NVCC", str(tmp_path / "nowhere"))
    else:
        program = tmp_path / "nvcc"
        program.write_text("#!/bin/sh\necho 'Cuda compilation tools, release 11.8, V11.8.89'\n")
        program.chmod(0o755)
        monkeypatch.setenv("PAGEWEAVER_NVCC", str(program))
    (problem,) = problems()
    assert "nvcc" in problem
    assert "refuse to start" in problem


def test_built_kernels_need_no_nvcc(machine, monkeypatch, tmp_path):
    monkeypatch.setenv("PAGEWEAVER_NVCC", str(tmp_path / "nowhere"))
    assert problems() == []


def test_not_installed_package(machine, monkeypatch):
    monkeypatch.setattr(doctor, "entry_point_visible", lambda: False)
    (problem,) = problems()
    assert "not installed" in problem


@pytest.mark.parametrize(("value", "excluded"), [("", False), ("pageweaver,other", False), ("other", True)])
def test_plugin_whitelist(machine, monkeypatch, value, excluded):
    monkeypatch.setenv("SGLANG_PLUGINS", value)
    assert any("SGLANG_PLUGINS" in problem for problem in problems()) == excluded


def test_no_sglang(machine, monkeypatch):
    monkeypatch.setattr(doctor.environment, "version", lambda package: None)
    (problem,) = problems()
    assert problem == "SGLang is not installed in this Python environment."


def test_changed_sglang(machine, monkeypatch):
    monkeypatch.setattr(machine, "verify_seams", lambda: ["sglang.x:y is missing"])
    (problem,) = problems()
    assert "refuse to start" in problem
    assert "sglang.x:y is missing" in problem


def test_sglang_that_cannot_be_imported(machine, monkeypatch):
    def fail():
        raise RuntimeError("operator torchvision::nms does not exist")

    monkeypatch.setattr(machine, "verify_seams", fail)
    (problem,) = problems()
    assert "can't be imported" in problem
    assert "torchvision::nms" in problem


@pytest.mark.parametrize(("captured", "words"), [({"full"}, "full"), ({"full", "breakable"}, "breakable and full")])
def test_prefill_graphs(machine, monkeypatch, captured, words):
    monkeypatch.setattr(machine, "captures_sparse_attention", lambda graph: graph in captured)
    (found,) = [finding.found for finding in doctor.diagnose().findings if finding.name == "prefill graphs"]
    assert found == f"served, except {words}: prefill then runs without a CUDA graph"


def test_untested_sglang_is_no_problem(machine, monkeypatch):
    monkeypatch.setattr(machine, "sglang_version", lambda: "0.6.0")
    diagnosis = doctor.diagnose()
    assert diagnosis.problems == []
    assert any("not among the tested versions" in finding.found for finding in diagnosis.findings)


def test_native_mode_is_said(machine, monkeypatch):
    monkeypatch.setenv("PAGEWEAVER_MODE", "native")
    (problem,) = problems()
    assert "mode=native" in problem


def test_wrong_setting(machine, monkeypatch, capsys):
    monkeypatch.setenv("PAGEWEAVER_WINDOW", "100")
    assert main(["doctor"]) == 1
    shown = " ".join(capsys.readouterr().out.split())
    assert "PAGEWEAVER_WINDOW" in shown
    assert "64 or 128" in shown


@pytest.mark.parametrize(("backend", "known"), [("fa3", True), ("fa33", False), ("pageweaver", False)])
def test_dense_backend(machine, monkeypatch, backend, known):
    monkeypatch.setattr(machine, "resolve", lambda target: ["fa3", "triton", "pageweaver"])
    monkeypatch.setenv("PAGEWEAVER_DENSE_BACKEND", backend)
    found = problems()
    assert (found == []) == known
    assert known or backend in found[0]


@pytest.mark.parametrize("installed", [True, False])
def test_fallback_engine(machine, monkeypatch, installed):
    assert all(finding.name != "fallback engine" for finding in doctor.diagnose().findings)
    for name, module in modules().items():
        monkeypatch.setitem(sys.modules, name, module if installed else None)
    monkeypatch.setattr(doctor.environment, "version", lambda package: "0.6.15")
    monkeypatch.setenv("PAGEWEAVER_FALLBACK_ENGINE", "flashinfer-xqa")
    diagnosis = doctor.diagnose()
    (finding,) = [finding for finding in diagnosis.findings if finding.name == "fallback engine"]
    if installed:
        assert finding.found == "flashinfer-xqa, flashinfer-python 0.6.15; compiled while a server starts"
        assert diagnosis.problems == []
        return
    (problem,) = diagnosis.problems
    assert problem.startswith("The server would refuse to start: fallback_engine flashinfer-xqa: FlashInfer can't be")
    assert problem.endswith("install flashinfer-python 0.6.15 to 0.7.4.")


def test_where_settings_come_from(machine, monkeypatch):
    monkeypatch.setenv("PAGEWEAVER_CONFIG", "paper")
    monkeypatch.setenv("PAGEWEAVER_WINDOW", "64")
    sources = {name: (value, source) for name, value, source in doctor.diagnose().settings}
    assert sources["window"] == (64, "PAGEWEAVER_WINDOW")
    assert sources["overflow"] == ("original", "profile paper")
    assert sources["verify_every"] == (0, "default")


def test_bare_machine(monkeypatch, capsys):
    """Nothing faked: no GPU, no entry point, no SGLang, no nvcc, no tvm-ffi, as far as Python can tell."""
    find = importlib.metadata.version

    def nothing(package):
        if package in ("sglang", "apache-tvm-ffi"):
            raise importlib.metadata.PackageNotFoundError(package)
        return find(package)

    monkeypatch.setattr(importlib.metadata, "version", nothing)
    monkeypatch.setattr(importlib.metadata, "entry_points", lambda **_: ())
    monkeypatch.setenv("PATH", "")
    assert main(["doctor"]) == 1
    shown = " ".join(capsys.readouterr().out.split())
    assert "would not run PageWeaver" in shown
    assert "There is no NVIDIA GPU here" in shown
    assert "SGLang is not installed" in shown


def test_what_is_absent_gets_no_tick(capsys):
    diagnosis = doctor.Diagnosis()
    diagnosis.add("Triton", "not installed")
    diagnosis.add("nvcc", "/bin/nvcc, release 13.0")
    doctor.show(diagnosis, Console(width=80))
    shown = capsys.readouterr().out.splitlines()
    assert [line[0] for line in shown[:2]] == ["-", "✓"]


def test_importing_the_command_imports_no_sglang():
    import subprocess

    code = "import sys, pageweaver_sglang.cli as c; c.parser(); sys.exit('sglang' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
