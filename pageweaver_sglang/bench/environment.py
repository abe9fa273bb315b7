"""What a result was measured on: GPU, driver, versions, commit, command. Never raises: what can't be read is None."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import shlex
import shutil
import subprocess
import sys
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

PACKAGES = ("pageweaver-sglang", "torch", "triton", "sglang", "apache-tvm-ffi", "flashinfer-python", "numpy")
_QUERY = ("name", "compute_cap", "driver_version", "memory.total", "clocks.max.sm", "power.limit")
_ROOT = Path(__file__).resolve().parents[2]


def _output(*command: str, cwd: Path | None = None) -> str | None:
    if shutil.which(command[0]) is None:
        return None
    try:
        done = subprocess.run(command, cwd=cwd, capture_output=True, text=True, timeout=20, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() if done.returncode == 0 else None


def version(package: str) -> str | None:
    """Installed version of a distribution without importing it; None when it isn't installed."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def package_versions() -> dict[str, str | None]:
    """Versions of what a result depends on.

    PageWeaver's own comes from the package, so that a checkout on ``PYTHONPATH`` counts too.
    """
    from pageweaver_sglang import __version__

    return {"python": platform.python_version(), **{p: version(p) for p in PACKAGES}, "pageweaver-sglang": __version__}


def gpus() -> list[dict[str, str]]:
    """One entry per GPU that ``nvidia-smi`` shows: name, compute capability, driver, memory, clocks, power limit."""
    text = _output("nvidia-smi", f"--query-gpu={','.join(_QUERY)}", "--format=csv,noheader")
    rows = [line.split(", ") for line in (text or "").splitlines() if line.strip()]
    return [dict(zip(_QUERY, row, strict=True)) for row in rows if len(row) == len(_QUERY)]


def commit() -> str | None:
    """Git commit of this checkout, with ``-dirty`` when tracked files differ from it; None outside a checkout."""
    if (_ROOT / ".git").exists() and (head := _output("git", "rev-parse", "HEAD", cwd=_ROOT)):
        return head + ("-dirty" if _output("git", "status", "--porcelain", "-uno", cwd=_ROOT) else "")
    return None


def command_line() -> str:
    """The command that is running, as one could type it again."""
    program = Path(sys.argv[0])
    if program.name == "__main__.py":
        spec = getattr(sys.modules.get("__main__"), "__spec__", None)
        name = (spec.name if spec else program.parent.name).removesuffix(".__main__")
        return shlex.join(["python", "-m", name, *sys.argv[1:]])
    prefix = ["python"] if program.suffix == ".py" else []
    return shlex.join([*prefix, os.path.relpath(program) if prefix else program.name, *sys.argv[1:]])


def describe(known_commit: str | None = None) -> dict[str, Any]:
    """Everything above plus the date and the host, ready for JSON.

    ``known_commit`` is for a copy of the sources that came without its history.
    """
    return {
        "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "command": command_line(),
        "commit": known_commit or commit(),
        "gpus": gpus(),
        "versions": package_versions(),
        "platform": platform.platform(),
        "cpus": os.cpu_count(),
        "settings": {k: v for k, v in sorted(os.environ.items()) if k.startswith("PAGEWEAVER_")},
    }
