"""``pageweaver doctor``: looks at this machine the way a server would, and says what a server would do."""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from pageweaver_sglang import __version__
from pageweaver_sglang.bench import environment
from pageweaver_sglang.bench.protocol import first_line
from pageweaver_sglang.config import ENV_PREFIX, Config, ConfigError, load_config

from .output import make_console

HELP = """say what a server started with --attention-backend pageweaver would do here, and why not
Exit code 0: it would run PageWeaver. 1: it would refuse to start, or run SGLang's own kernels instead."""

ENTRY_POINT_GROUP = "sglang.srt.plugins"
_SERVER = "A server started with --attention-backend pageweaver"


@dataclass
class Finding:
    """One thing that was looked at: what was found, and what is wrong with it (None: nothing)."""

    name: str
    found: str
    problem: str | None = None


@dataclass
class Diagnosis:
    """Everything found, in the order in which it is shown.

    ``settings`` holds (name, value, where the value comes from).
    """

    findings: list[Finding] = field(default_factory=list)
    settings: list[tuple[str, Any, str]] = field(default_factory=list)

    def add(self, name: str, found: str, problem: str | None = None) -> None:
        """Note a finding."""
        self.findings.append(Finding(name, found, problem))

    @property
    def problems(self) -> list[str]:
        """What keeps PageWeaver from running, in sentences."""
        return [finding.problem for finding in self.findings if finding.problem]

    @property
    def verdict(self) -> str:
        """What a server would do, in a sentence."""
        if not self.problems:
            return f"{_SERVER} would run PageWeaver's Step 3 on MiniMax-M3's sparse layers."
        return f"{_SERVER} would not run PageWeaver."

    def as_dict(self) -> dict[str, Any]:
        """The report of ``--json``."""
        return {
            "would_run_pageweaver": not self.problems,
            "verdict": self.verdict,
            "problems": self.problems,
            "findings": [{"name": f.name, "found": f.found, "problem": f.problem} for f in self.findings],
            "settings": {name: {"value": value, "source": source} for name, value, source in self.settings},
            "gpus": environment.gpus(),
            "versions": environment.package_versions(),
        }


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of ``pageweaver doctor``."""
    parser.add_argument("--json", action="store_true", help="print the report as JSON")


def run(arguments: argparse.Namespace) -> int:
    """Look, print, and return the exit code."""
    diagnosis = diagnose()
    if arguments.json:
        print(json.dumps(diagnosis.as_dict(), indent=2))
    else:
        show(diagnosis, make_console())
    return 1 if diagnosis.problems else 0


def diagnose() -> Diagnosis:
    """Look at everything; never raises because something is missing."""
    diagnosis = Diagnosis()
    diagnosis.add("PageWeaver", f"{__version__} in {Path(__file__).resolve().parents[1]}")
    config = _look_at_settings(diagnosis)
    if config is not None:
        _look_at_switch(diagnosis, config)
    capability = _look_at_gpu(diagnosis, config)
    _look_at_kernels(diagnosis, capability, needed=config is None or config.mode != "native")
    _look_at_sglang(diagnosis, config)
    return diagnosis


def _look_at_settings(diagnosis: Diagnosis) -> Config | None:
    try:
        config = load_config()
        diagnosis.settings = settings_with_sources(config)
    except ConfigError as error:
        diagnosis.add("settings", "invalid", f"The server would refuse to start: {error}.")
        return None
    profile = os.environ.get("PAGEWEAVER_CONFIG")
    native = "The setting mode=native asks for SGLang's own Step 3." if config.mode == "native" else None
    chosen = f"valid; profile {profile or 'none'}, mode {config.mode}, precision {config.precision}"
    diagnosis.add("settings", chosen, native)
    if config.mode == "auto":
        diagnosis.add("order", auto_rule(config))
    if config.mode != "native" and config.fallback_engine != "native":
        _look_at_fallback(diagnosis, config.fallback_engine)
    return config


def _look_at_fallback(diagnosis: Diagnosis, engine: str) -> None:
    from pageweaver_sglang.flashinfer import xqa

    try:
        xqa.load()
    except xqa.FlashInferError as error:
        refuse = f"The server would refuse to start: fallback_engine {engine}: {error}."
        diagnosis.add("fallback engine", f"{engine}, unusable: {error}", refuse)
        return
    version = environment.version("flashinfer-python") or "of an unknown version"
    diagnosis.add("fallback engine", f"{engine}, flashinfer-python {version}; compiled while a server starts")


def auto_rule(config: Config) -> str:
    """How mode ``auto`` decides with these settings, in a sentence."""
    from pageweaver_sglang.auto import model
    from pageweaver_sglang.auto.history import PROBE_SHARE

    fixed, slope = model.REGROUP_US[config.window], model.REGROUP_US_PER_1000_ROWS[config.window]
    worth = f"{model.worth_us(1000, config.engine):.2f} us"
    if config.engine == "stream":
        worth += f" ({model.worth_us(1000, config.engine, 16):.2f} us where that engine has groups of 16)"
    return (
        f"decided per call: windows of {config.window} are regrouped where a layer's earlier calls, at such a context, "
        f"let expect more than it costs: 1,000 page visits saved count as {worth}, regrouping as {fixed:.0f} us and "
        f"{slope:.2f} us for 1,000 (query, KV head) pairs; elsewhere at most {PROBE_SHARE:.1%} of the time goes into "
        "looking again"
    )


def _look_at_switch(diagnosis: Diagnosis, config: Config) -> None:
    from pageweaver_sglang.plugin import control

    try:
        folder = control.chosen_folder(config.control_dir)
        on = control.read_switch(folder)
    except control.ControlError as error:
        diagnosis.add("switch", "unusable", f"The server would refuse to start: {first_line(error)}.")
        return
    off = f"{folder / control.SWITCH_NAME} says off; `pageweaver switch on` changes that."
    diagnosis.add("switch", f"{'off' if on is False else 'on'} in {folder}", off if on is False else None)


def settings_with_sources(config: Config) -> list[tuple[str, Any, str]]:
    """(name, value, source) of every setting in effect; the source is ``default``, the profile, or the variable."""
    profile = os.environ.get("PAGEWEAVER_CONFIG")
    from_profile = load_config(profile, env={}).model_fields_set if profile else set()
    rows = []
    for name in Config.model_fields:
        variable = ENV_PREFIX + name.upper()
        source = f"profile {profile}" if name in from_profile else "default"
        if os.environ.get(variable):
            source = variable
        rows.append((name, getattr(config, name), source))
    return rows


def _look_at_gpu(diagnosis: Diagnosis, config: Config | None) -> tuple[int, int] | None:
    """Returns the compute capability of the first GPU that PageWeaver would serve on, or None."""
    from torch import bfloat16

    from pageweaver_sglang.cuda.support import CallKind, engine_on, gpu_problem

    asked = (config or Config()).engine
    shown = environment.gpus()
    if not shown:
        diagnosis.add(
            "GPU",
            "none (nvidia-smi shows none)",
            "There is no NVIDIA GPU here; PageWeaver's kernels need one, best a Hopper GPU (H100, H200).",
        )
    capabilities = [_capability(gpu["compute_cap"]) for gpu in shown]
    engines = [engine_on(asked, capability) for capability in capabilities]
    for number, (gpu, capability, engine) in enumerate(zip(shown, capabilities, engines, strict=True)):
        found = f"{gpu['name']}, compute capability {gpu['compute_cap']}, driver {gpu['driver_version']}, "
        wrong = None
        if engine is None:
            found += "SGLang's own Step 3"
            if not any(engines):
                problem = gpu_problem(asked, capability)
                wrong = f"GPU {number} {problem}: every call on it would go to SGLang's own Step 3."
        else:
            found += f"engine {engine}"
            if engine != asked:
                found += f" (in Triton: {asked} is built for Hopper only)"
            if engine_on(asked, capability, CallKind(cache_dtype=bfloat16)) is None:
                found += "; for a BF16 KV cache SGLang's own Step 3"
        diagnosis.add(f"GPU {number}", found, wrong)
    if config is not None and config.mode != "native":
        _look_at_memory(diagnosis, engines if shown else [asked])
    _look_at_torch(diagnosis, bool(shown))
    return next((found for found, engine in zip(capabilities, engines, strict=True) if engine), None)


def _capability(shown: str) -> tuple[int, int]:
    major, minor = shown.split(".")
    return int(major), int(minor)


def _look_at_memory(diagnosis: Diagnosis, engines: Sequence[str | None]) -> None:
    from pageweaver_sglang.value_tiles import ValueTiles

    if "stream" in engines:
        kib = ValueTiles.nbytes(1, 1) / 1024
        diagnosis.add(
            "GPU memory",
            f"{kib:.0f} KiB per KV page and KV head of a rank for value tiles, as much as one layer's V cache "
            "(FP8; none with a BF16 KV cache); a server's STATUS line says how much that is",
        )


def _look_at_torch(diagnosis: Diagnosis, has_gpu: bool) -> None:
    try:
        import torch
    except Exception as error:  # a broken CUDA installation can raise anything here
        diagnosis.add("PyTorch", "cannot be imported", f"PyTorch can't be imported ({first_line(error)}).")
        return
    cuda = torch.version.cuda
    built = f"{torch.__version__}, " + (f"built for CUDA {cuda}" if cuda else "built without CUDA")
    unusable = None
    if has_gpu and not torch.cuda.is_available():
        unusable = "PyTorch can't use the GPU: " + (
            "this build of it has no CUDA."
            if cuda is None
            else f"torch.cuda.is_available() is false (build for CUDA {cuda})."
        )
    diagnosis.add("PyTorch", built, unusable)
    diagnosis.add("Triton", environment.version("triton") or "not installed")


def _look_at_kernels(diagnosis: Diagnosis, capability: tuple[int, int] | None, *, needed: bool) -> None:
    from pageweaver_sglang.cuda import loader

    architecture = loader.ARCHITECTURE if capability is None else loader.architecture_of(capability)
    nvcc, problem = loader.nvcc_path(), None
    try:
        version = f", release {loader._nvcc_version(nvcc)}" if nvcc else ""
        diagnosis.add("nvcc", f"{nvcc}{version}" if nvcc else "not found (PAGEWEAVER_NVCC, CUDA_HOME, PATH)")
        usable = nvcc is not None
    except loader.KernelBuildError as error:
        diagnosis.add("nvcc", f"{nvcc}, unusable: {first_line(error)}")
        usable = False
    try:
        built = loader.is_built(architecture)
    except (importlib.metadata.PackageNotFoundError, FileNotFoundError) as error:
        diagnosis.add("kernels", "incomplete installation", f"The kernels can't be built ({first_line(error)}).")
        return
    if not built and not usable and needed:
        oldest = ".".join(map(str, loader.MIN_NVCC))
        problem = (
            "The server would refuse to start: PageWeaver's kernels are not built and there is no usable nvcc to build "
            f"them. Install the CUDA toolkit {oldest} or newer, or point PAGEWEAVER_NVCC at its nvcc."
        )
    command = "python -m pageweaver_sglang.build"
    if architecture != loader.ARCHITECTURE:
        command += f" --architecture {architecture}"
    found = "built" if built else f"not built yet; compiled at first use, or now by `{command}`"
    diagnosis.add("kernels", found, problem)


def entry_point_visible() -> bool:
    """Whether SGLang would find the plugin: the installed metadata names it."""
    return any(point.name == "pageweaver" for point in importlib.metadata.entry_points(group=ENTRY_POINT_GROUP))


def _look_at_sglang(diagnosis: Diagnosis, config: Config | None) -> None:
    if entry_point_visible():
        allowed = os.environ.get("SGLANG_PLUGINS")
        excluded = bool(allowed) and "pageweaver" not in [name.strip() for name in allowed.split(",")]
        diagnosis.add(
            "plugin",
            f"entry point in {ENTRY_POINT_GROUP}",
            f"SGLANG_PLUGINS={allowed} keeps SGLang from loading the plugin 'pageweaver'." if excluded else None,
        )
    else:
        diagnosis.add(
            "plugin",
            "no entry point",
            "SGLang would not find PageWeaver: the package is importable but not installed. Install it with pip.",
        )

    version = environment.version("sglang")
    if version is None:
        diagnosis.add("SGLang", "not installed", "SGLang is not installed in this Python environment.")
        return
    try:
        from pageweaver_sglang.plugin import compat, options

        problems = compat.verify_seams()
        version = compat.sglang_version()
        tested = compat.tested_version(version)
        left_out = [graph for graph in ("breakable", "full") if compat.captures_sparse_attention(graph)]
    except Exception as error:  # SGLang raises anything at import when it doesn't like the machine
        diagnosis.add("SGLang", version, f"SGLang {version} can't be imported here ({first_line(error)}).")
        return
    note = "" if tested else f" (not among the tested versions {' to '.join(compat.SUPPORTED)})"
    refuse = f"The server would refuse to start: {compat.refusal(problems)}" if problems else None
    diagnosis.add("SGLang", version + note, refuse)
    diagnosis.add("seams", "changed" if problems else "all in place")
    diagnosis.add("prefill graphs", f"served, except {' and '.join(left_out)}: prefill then runs without a CUDA graph")
    if config is not None and config.dense_backend is not None:
        try:
            options.dense_backends("pageweaver", None, None, config.dense_backend)
        except (options.BackendError, ImportError, AttributeError) as error:
            refuse = f"The server would refuse to start: {error}"
            diagnosis.add("dense backend", config.dense_backend, refuse)


def show(diagnosis: Diagnosis, console: Console) -> None:
    """Print the report for people."""
    table = Table(show_header=False, box=None, padding=(0, 2, 0, 0))
    for finding in diagnosis.findings:
        absent = finding.found.startswith("not ") or ", unusable: " in finding.found
        mark = "[red]✗[/]" if finding.problem else "-" if absent else "[green]✓[/]"
        table.add_row(mark, finding.name, escape(finding.found))
    console.print(table)
    if diagnosis.settings:
        settings = Table("setting", "value", "from", title="Settings in effect", title_justify="left")
        for name, value, source in diagnosis.settings:
            shown = value if isinstance(value, str) else json.dumps(value)  # as a profile has it: null, false
            settings.add_row(name, escape(shown), source)
        console.print(settings)
    console.print(diagnosis.verdict, style="red" if diagnosis.problems else "green")
    for problem in diagnosis.problems:
        console.print(f"  - {escape(problem)}", highlight=False)
