"""Where the CUDA sources and the YAML profiles lie: inside an installed wheel, or beside the package in a checkout."""

from __future__ import annotations

from pathlib import Path

_PACKAGE = Path(__file__).resolve().parent


def _find(name: str) -> Path:
    for folder in (_PACKAGE / name, _PACKAGE.parent / name):
        if folder.is_dir():
            return folder
    raise FileNotFoundError(f"pageweaver_sglang: its folder '{name}' is missing from this installation ({_PACKAGE})")


def kernels_dir() -> Path:
    """Folder of the CUDA C++ sources. Raises FileNotFoundError when the installation is incomplete."""
    return _find("kernels")


def configs_dir() -> Path:
    """Folder of the YAML profiles. Raises FileNotFoundError when the installation is incomplete."""
    return _find("configs")
