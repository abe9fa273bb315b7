"""PageWeaver: MiniMax-M3's block-sparse prefill (Step 3) for SGLang on Hopper GPUs.

Data flows one way: top-k page ids -> :func:`regroup` -> :func:`prepare_unions` -> :func:`sparse_prefill`.
CPU tensors run the reference engine through the same calls. Importing this package loads neither CUDA code
nor SGLang; names are resolved on first use.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

_EXPORTS = {
    "Config": "config",
    "ConfigError": "config",
    "History": "auto.history",
    "UnionPlan": "plan",
    "UnsupportedError": "checks",
    "ValueTiles": "value_tiles",
    "Workload": "workload",
    "Workspace": "workspace",
    "load_config": "config",
    "load_workload": "workload",
    "prepare_unions": "api",
    "regroup": "api",
    "sparse_prefill": "api",
}

__all__ = [*sorted(_EXPORTS), "__version__", "reference"]

if TYPE_CHECKING:
    from . import reference as reference
    from .api import prepare_unions as prepare_unions
    from .api import regroup as regroup
    from .api import sparse_prefill as sparse_prefill
    from .auto.history import History as History
    from .checks import UnsupportedError as UnsupportedError
    from .config import Config as Config
    from .config import ConfigError as ConfigError
    from .config import load_config as load_config
    from .plan import UnionPlan as UnionPlan
    from .value_tiles import ValueTiles as ValueTiles
    from .workload import Workload as Workload
    from .workload import load_workload as load_workload
    from .workspace import Workspace as Workspace


def __getattr__(name: str) -> Any:
    if name == "reference":
        return importlib.import_module(".reference", __name__)
    if name in _EXPORTS:
        return getattr(importlib.import_module(f".{_EXPORTS[name]}", __name__), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)
