"""Tests against whichever real SGLang is importable; programs run in fresh processes, because hooks are per process."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import json
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent.parent


def pytest_collection_modifyitems(items):
    for item in items:
        if HERE in item.path.parents:
            item.add_marker(pytest.mark.sglang)


@dataclass
class Outcome:
    """What a program of ``programs/`` reported: its JSON result, and everything it printed and logged."""

    result: dict
    output: str


@pytest.fixture(scope="session")
def plugin_path(tmp_path_factory) -> list[str]:
    """Folders for PYTHONPATH that make the plugin discoverable where the package is not installed."""
    try:
        importlib.metadata.distribution("pageweaver-sglang")
    except importlib.metadata.PackageNotFoundError:
        folder = tmp_path_factory.mktemp("metadata")
        metadata = folder / "pageweaver_sglang-0.0.0.dist-info"
        metadata.mkdir()
        (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: pageweaver-sglang\nVersion: 0.0.0\n")
        pyproject = (ROOT / "pyproject.toml").read_text()
        header = '[project.entry-points."sglang.srt.plugins"]\n'
        entry = pyproject.split(header)[1].splitlines()[0].replace('"', "")
        (metadata / "entry_points.txt").write_text(f"[sglang.srt.plugins]\n{entry}\n")
        return [str(ROOT), str(folder)]
    return []


@pytest.fixture(scope="session")
def run_program(plugin_path, tmp_path_factory):
    """Run ``programs/NAME.py`` with arguments and extra environment; fails the test where the program fails."""
    if importlib.util.find_spec("sglang") is None:
        pytest.skip("SGLang is not installed")

    def run(name: str, *arguments: str, **environment: str) -> Outcome:
        report = tmp_path_factory.mktemp(name) / "report.json"
        env = {key: value for key, value in os.environ.items() if not key.startswith("PAGEWEAVER_")}
        env["PYTHONPATH"] = os.pathsep.join([str(HERE), *plugin_path, *env.get("PYTHONPATH", "").split(os.pathsep)])
        # Not the user's own control folder, where servers may be switched off; and a mode that does one thing only.
        fixed = {"PAGEWEAVER_CONTROL_DIR": str(report.parent), "PAGEWEAVER_MODE": "pageweaver"}
        env |= {"REPORT": str(report), **fixed, **environment}
        done = subprocess.run(
            [sys.executable, "-W", "ignore", str(HERE / "programs" / f"{name}.py"), *arguments],
            env=env,
            text=True,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            timeout=1800,  # of one that hangs
            check=False,
        )
        assert done.returncode == 0, done.stdout[-6000:]
        return Outcome(json.loads(report.read_text()), done.stdout)

    return run
