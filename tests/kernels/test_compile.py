"""The kernel library: what nvcc makes of it, and the loader that builds and caches it."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from pageweaver_sglang import build
from pageweaver_sglang.cuda import loader, report

NVCC = loader.nvcc_path()
needs_nvcc = pytest.mark.skipif(NVCC is None, reason="no nvcc on this machine (PATH, CUDA_HOME, PAGEWEAVER_NVCC)")

# Registers per thread and bytes of static shared memory that keep the intended number of CTAs on an SM.
MOST_REGISTERS = {
    "regroup_kernel<64>": 128,
    "regroup_kernel<128>": 128,
    "union_prep_kernel<8>": 40,
    "union_prep_kernel<16>": 64,
    "value_tile_kernel": 128,
}
# With two consumers, Q and P in one term (precision fp8), in two (high) or in BF16, which has no number of terms, and
# 4 or 8 queries in a tile.
STREAM = {f"stream_attention_kernel<2, {terms}{queries}>" for terms in ("1, ", "2, ", "") for queries in (4, 8)}
# With one and with two CTAs a cluster.
ATTENTION = {"union_attention_kernel<1>", "union_attention_kernel<2>"} | STREAM
MOST_SMEM = {
    "regroup_kernel<64>": 25 * 1024,
    "regroup_kernel<128>": 36 * 1024,
    "union_prep_kernel<8>": 36 * 1024,
    "union_prep_kernel<16>": 28 * 1024,
    "value_tile_kernel": 33 * 1024,
}


# ------------------------------------------------------------------------------------------------ The real compiler
@pytest.fixture(scope="module")
def build_log(tmp_path_factory):
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PAGEWEAVER_CACHE_DIR", str(tmp_path_factory.mktemp("cache")))
        library = loader.build()
        assert library.is_file()
        return library.with_name(loader.LOG).read_text()


@needs_nvcc
def test_no_spills_and_no_stack(build_log):
    kernels = report.resource_report(build_log)
    assert len(kernels) == build_log.count("Compiling entry function")
    assert {kernel.name for kernel in kernels} == set(MOST_REGISTERS) | ATTENTION
    assert [k for k in kernels if k.spill_stores or k.spill_loads or k.stack] == []


@needs_nvcc
def test_registers_and_shared_memory(build_log):
    kernels = {kernel.name: kernel for kernel in report.resource_report(build_log)}
    for name, most in MOST_REGISTERS.items():
        assert kernels[name].registers <= most, kernels[name]
        assert kernels[name].smem <= MOST_SMEM[name], kernels[name]


@needs_nvcc
@pytest.mark.parametrize("architecture", ["sm_80", "sm_120"])
def test_plan_kernels_of_other_gpus(architecture, tmp_path, monkeypatch):
    monkeypatch.setenv("PAGEWEAVER_CACHE_DIR", str(tmp_path))
    log = loader.build(architecture=architecture, verbose=False).with_name(loader.LOG).read_text()
    kernels = {kernel.name for kernel in report.resource_report(log)}
    assert kernels == {"regroup_kernel<64>", "regroup_kernel<128>", "union_prep_kernel<8>", "union_prep_kernel<16>"}
    assert "warning" not in log.lower()


@needs_nvcc
def test_stream_kernels_start_with_the_registers_that_they_deal_out(build_log):
    """With fewer a thread, the last warpgroup would wait for ever for registers that nobody gives back."""
    registers = {k.name: k.registers for k in report.resource_report(build_log) if k.name in STREAM}
    (dealt,) = re.findall(r"kLaunchRegisters = (\d+);", (loader.kernels_dir() / "stream.cuh").read_text())
    assert registers == dict.fromkeys(STREAM, int(dealt))


@needs_nvcc
def test_no_serialised_wgmma_and_no_warnings(build_log):
    assert report.serialised_wgmma(build_log) == []
    assert "warning" not in build_log.lower()


# ------------------------------------------------------------------------------------------------------- The report
LOG = """\
ptxas info    : 0 bytes gmem
ptxas info    : (C7510) Potential Performance Loss: wgmma.mma_async instructions are serialized due to insufficient register resources for the wgmma pipeline in function 'f'
ptxas info    : Compiling entry function '_ZN2pw14regroup_kernelILi128ELb1EEEvPKillibNS_7LengthsEiiibPi' for 'sm_90a'
ptxas info    : Function properties for _ZN2pw14regroup_kernelILi128ELb1EEEvPKillibNS_7LengthsEiiibPi
    16 bytes stack frame, 24 bytes spill stores, 32 bytes spill loads
ptxas info    : Used 100 registers, used 1 barriers, 43040 bytes smem
ptxas info    : Compiling entry function '_ZN2pw22union_attention_kernelINS_11UnionTraitsILi2EEEEEv14CUtensorMap_st' for 'sm_90a'
ptxas info    : Function properties for _ZN2pw22union_attention_kernelINS_11UnionTraitsILi2EEEEEv14CUtensorMap_st
    0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads
ptxas info    : Used 168 registers, used 2 barriers
ptxas info    : Compiling entry function 'plain' for 'sm_90a'
ptxas info    : Function properties for plain
    0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads
ptxas info    : Used 8 registers, used 0 barriers
"""  # noqa: E501


def test_resource_report():
    assert report.resource_report(LOG) == [
        report.KernelResources("regroup_kernel<128, 1>", 100, 24, 32, 43040, 16),
        report.KernelResources("union_attention_kernel<2>", 168, 0, 0, 0, 0),
        report.KernelResources("plain", 8, 0, 0, 0, 0),
    ]
    assert report.resource_report("") == []


def test_serialised_wgmma():
    (line,) = report.serialised_wgmma(LOG)
    assert "C7510" in line
    assert report.serialised_wgmma("error C7521, C7509, 0xC7510F") == []


# ------------------------------------------------------------------------- The loader, with a compiler that pretends
FAKE_NVCC = """\
#!{python}
import os, sys, time
folder = os.path.dirname(os.path.abspath(__file__))
if "--version" in sys.argv:
    print("Cuda compilation tools, release {release}, V{release}.88")
    sys.exit()
with open(os.path.join(folder, "calls"), "a") as calls:
    calls.write(" ".join(sys.argv[1:]) + "\\n")
deadline = time.monotonic() + 1800
while {busy} and time.monotonic() < deadline:
    time.sleep(0.02)
if {fails}:
    print("bindings.cu(7): error: identifier is undefined", file=sys.stderr)
    sys.exit(2)
with open(sys.argv[sys.argv.index("-o") + 1], "w") as library:
    library.write("library")
print("ptxas info    : Used 8 registers", file=sys.stderr)
"""


class FakeToolkit:
    """A folder with a script ``nvcc`` that writes down its calls."""

    def __init__(self, folder: Path):
        self.folder = folder
        self.nvcc = folder / "nvcc"

    def install(self, *, release="12.8", busy="False", fails=False):
        """``busy``: an expression in Python, true as long as the compiler pretends to be busy."""
        self.folder.mkdir(exist_ok=True)
        script = FAKE_NVCC.format(python=sys.executable, release=release, busy=busy, fails=fails)
        self.nvcc.write_text(script)
        self.nvcc.chmod(0o755)
        loader._nvcc_version.cache_clear()

    def calls(self):
        log = self.folder / "calls"
        return log.read_text().splitlines() if log.exists() else []


@pytest.fixture
def sources(tmp_path, monkeypatch):
    folder = tmp_path / "kernels"
    (folder / "ptx").mkdir(parents=True)
    (folder / "bindings.cu").write_text("// source")
    (folder / "ptx" / "a.cuh").write_text("// header")
    monkeypatch.setattr(loader, "kernels_dir", lambda: folder)
    return folder


@pytest.fixture
def toolkit(tmp_path, monkeypatch, sources):
    toolkit = FakeToolkit(tmp_path / "toolkit")
    toolkit.install()
    monkeypatch.setenv("PAGEWEAVER_NVCC", str(toolkit.nvcc))
    monkeypatch.setenv("PAGEWEAVER_CACHE_DIR", str(tmp_path / "cache"))
    return toolkit


def test_cache_hit_compiles_nothing(toolkit, capsys):
    assert not loader.is_built()
    library = loader.build()
    assert library.read_text() == "library"
    assert "Used 8 registers" in library.with_name(loader.LOG).read_text()
    assert "compiling" in capsys.readouterr().err
    assert loader.is_built()
    assert loader.build() == library
    assert len(toolkit.calls()) == 1
    assert capsys.readouterr().err == ""
    assert loader.build(force=True, verbose=False) == library
    assert len(toolkit.calls()) == 2
    assert capsys.readouterr().err == ""


def test_command(toolkit, sources):
    loader.build()
    (call,) = toolkit.calls()
    for part in (
        "-std=c++17",
        "code=sm_90a",
        "-cudart static",
        f"-I{sources}",
        "-ltvm_ffi",
        str(sources / "bindings.cu"),
    ):
        assert part in call
    assert "-lcuda " not in call + " "


def test_a_library_per_architecture(toolkit):
    assert (loader.architecture_of((9, 0)), loader.architecture_of((12, 0))) == ("sm_90a", "sm_120")
    libraries = [loader.build(), loader.build(architecture="sm_80")]
    assert len(set(libraries)) == 2
    assert loader.library_path("sm_80") == libraries[1]
    assert not loader.is_built("sm_86")
    hopper, ampere = toolkit.calls()
    assert "-DPW" not in hopper
    assert "arch=compute_80,code=sm_80 -DPW_PLAN_ONLY -DPW_BEFORE_SM90" in ampere


def test_key_follows_sources_and_compiler(toolkit, sources):
    built = [loader.build()]
    (sources / "ptx" / "a.cuh").write_text("// another header")
    assert not loader.is_built()
    built.append(loader.build())
    (sources / "ptx" / "b.cuh").write_text("")
    built.append(loader.build())
    (sources / "notes.md").write_text("no source")
    assert loader.build() == built[-1]
    toolkit.install(release="13.0")
    assert not loader.is_built()
    built.append(loader.build())
    assert len(set(built)) == len(toolkit.calls()) == 4


def test_built_library_is_found_without_nvcc(toolkit, monkeypatch):
    library = loader.build()
    monkeypatch.setenv("PAGEWEAVER_NVCC", "/nonexistent/nvcc")
    assert loader.nvcc_path() is None
    assert loader.is_built()
    assert loader.build() == library


def test_processes_that_start_together_compile_once(toolkit, sources):
    # The first one compiles until both others have said that they wait.
    toolkit.install(busy="sum('waiting' in open(f'{folder}/said-{n}').read() for n in range(3)) < 2")
    program = f"""
        from pathlib import Path
        from pageweaver_sglang.cuda import loader
        loader.kernels_dir = lambda: Path({str(sources)!r})
        print(loader.build())
    """
    environment = {**os.environ, "PYTHONPATH": str(Path(loader.__file__).parents[2])}
    said = [toolkit.folder / f"said-{number}" for number in range(3)]
    for path in said:
        path.touch()
    started = []
    for path in said:
        with path.open("w") as err:
            command = [sys.executable, "-c", textwrap.dedent(program)]
            started.append(subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=err, text=True))
    outs = [process.communicate(timeout=1800)[0] for process in started]
    assert [process.returncode for process in started] == [0, 0, 0], [path.read_text() for path in said]
    assert len(set(outs)) == 1
    assert len(toolkit.calls()) == 1
    assert sum("waiting" in path.read_text() for path in said) == 2


def test_nothing_half_built_is_left(toolkit, tmp_path):
    toolkit.install(fails=True)
    with pytest.raises(loader.KernelBuildError):
        loader.build()
    assert not loader.is_built()
    assert [path for path in (tmp_path / "cache").iterdir() if path.suffix != ".lock"] == []
    toolkit.install()
    assert loader.build().is_file()


def test_compile_error_shows_command_and_message(toolkit):
    toolkit.install(fails=True)
    with pytest.raises(loader.KernelBuildError) as raised:
        loader.build()
    assert "identifier is undefined" in str(raised.value)
    assert f"Command: {toolkit.nvcc} -std=c++17" in str(raised.value)
    assert "exit status 2" in str(raised.value)


@pytest.mark.parametrize("release", ["11.8", "12.3"])
def test_old_nvcc_is_refused(toolkit, release):
    toolkit.install(release=release)
    assert not loader.is_built()
    with pytest.raises(loader.KernelBuildError, match=rf"release {release}; the kernels need 12.4 or newer"):
        loader.build()
    assert toolkit.calls() == []


def test_missing_nvcc(toolkit, monkeypatch, tmp_path):
    monkeypatch.setenv("PAGEWEAVER_NVCC", str(tmp_path / "nowhere"))
    with pytest.raises(loader.KernelBuildError, match=r"PAGEWEAVER_NVCC=.*nowhere is not an executable file"):
        loader.build()
    monkeypatch.setattr(loader, "nvcc_path", lambda: None)
    monkeypatch.delenv("PAGEWEAVER_NVCC")
    with pytest.raises(loader.KernelBuildError, match=r"no nvcc was found.*Install the CUDA toolkit.*PAGEWEAVER_NVCC"):
        loader.build()
    assert not loader.is_built()


def test_nvcc_that_does_not_run(toolkit):
    toolkit.nvcc.write_text("#!/bin/sh\necho broken >&2\nexit 3\n")
    loader._nvcc_version.cache_clear()
    assert not loader.is_built()
    with pytest.raises(loader.KernelBuildError, match=r"--version failed \(exit status 3\): broken"):
        loader.build()


def test_cache_that_cannot_be_written(toolkit, monkeypatch, tmp_path):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("PAGEWEAVER_CACHE_DIR", str(tmp_path / "file" / "cache"))
    with pytest.raises(loader.KernelBuildError, match="PAGEWEAVER_CACHE_DIR"):
        loader.build()


def test_cache_in_a_home_that_is_not_there(toolkit, monkeypatch):
    monkeypatch.setenv("PAGEWEAVER_CACHE_DIR", "~no-such-user/kernels")
    assert not loader.is_built()
    with pytest.raises(loader.KernelBuildError, match=r"kernel cache ~no-such-user/kernels: .*PAGEWEAVER_CACHE_DIR"):
        loader.build(verbose=False)


def test_order_of_places(tmp_path, monkeypatch):
    """PAGEWEAVER_NVCC, then CUDA_HOME, then PATH."""
    places = {name: tmp_path / name / "bin" for name in ("chosen", "home", "path")}
    for folder in places.values():
        folder.mkdir(parents=True)
        (folder / "nvcc").write_text("#!/bin/sh\n")
        (folder / "nvcc").chmod(0o755)
    monkeypatch.setenv("PAGEWEAVER_NVCC", str(places["chosen"] / "nvcc"))
    monkeypatch.setenv("CUDA_HOME", str(tmp_path / "home"))
    monkeypatch.setenv("PATH", str(places["path"]))
    assert loader.nvcc_path() == places["chosen"] / "nvcc"
    monkeypatch.delenv("PAGEWEAVER_NVCC")
    assert loader.nvcc_path() == places["home"] / "nvcc"
    (places["home"] / "nvcc").chmod(0o644)
    assert loader.nvcc_path() == places["path"] / "nvcc"


def test_load_reports_a_library_that_cannot_be_loaded(toolkit, monkeypatch):
    monkeypatch.setattr(loader, "_modules", {})
    with pytest.raises(loader.KernelBuildError, match=r"cannot load .*build --force"):
        loader.load()


def test_build_command(toolkit, capsys):
    assert build.main(["--print-log"]) == 0
    out = capsys.readouterr().out
    assert "Used 8 registers" in out
    assert out.splitlines()[-1] == str(loader.library_path())
    assert build.main(["--architecture", "sm_86"]) == 0
    assert capsys.readouterr().out.strip() == str(loader.library_path("sm_86"))
    with pytest.raises(SystemExit):
        build.main(["--architecture", "hopper"])
    assert "--architecture must be of the form sm_80, got 'hopper'" in capsys.readouterr().err
    toolkit.install(fails=True)
    assert build.main([]) == 0
    assert build.main(["--force"]) == 1
    assert "identifier is undefined" in capsys.readouterr().err


def test_build_command_without_nvcc(toolkit, monkeypatch, capsys):
    monkeypatch.setattr(loader, "nvcc_path", lambda: None)
    monkeypatch.delenv("PAGEWEAVER_NVCC")
    assert build.main([]) == 1
    said = capsys.readouterr()
    assert said.out == ""
    assert said.err.startswith("pageweaver: the CUDA kernels have to be compiled once and no nvcc was found. Install")


@pytest.mark.skipif(shutil.which("g++") is None, reason="no g++")
def test_hint_without_a_host_compiler(toolkit, monkeypatch):
    toolkit.install(fails=True)
    monkeypatch.setenv("PATH", str(toolkit.folder))
    with pytest.raises(loader.KernelBuildError, match=r"g\+\+ is not on PATH"):
        loader.build()
