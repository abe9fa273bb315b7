"""Where the recorded workloads lie, and the counts that a right implementation finds in them."""

from __future__ import annotations

import json
from pathlib import Path

_PACKAGE = Path(__file__).resolve().parents[1]
# The package carries the demo's workload; a checkout has the others beside its tests.
_FOLDERS = (_PACKAGE / "data", _PACKAGE.parent / "tests" / "data")


class WorkloadNotFound(ValueError):
    """No file and no recorded workload of that name; the message lists the names."""


def workload_names() -> list[str]:
    """Names of the recorded workloads of this installation."""
    return sorted({path.stem for folder in _FOLDERS for path in folder.glob("*.npz")} & set(_statistics()))


def find_workload(name_or_path: str) -> Path:
    """The file of a recorded workload, or the path itself. Raises :class:`WorkloadNotFound`."""
    for path in (Path(name_or_path), *(folder / f"{name_or_path}.npz" for folder in _FOLDERS)):
        if path.is_file():
            return path
    raise WorkloadNotFound(
        f"no workload {name_or_path!r}: no such file, and the recorded workloads here are {', '.join(workload_names())}"
    )


def _statistics() -> dict[str, dict]:
    return json.loads((_PACKAGE / "data" / "stats.json").read_text())


def expected_counts(name: str) -> dict[str, int] | None:
    """Exact counts of a recorded workload, None for any other.

    Keys: ``visits-ORDER-8`` and ``rounds-ORDER-8`` (quads of groups of 8) with ORDER one of ``original``, ``w64`` and
    ``w128``, and ``visits-original-4``.
    """
    found = _statistics().get(name)
    if found is None:
        return None
    return {
        "visits-original-8": found["orig8"],
        "rounds-original-8": found["orig4"],
        "visits-original-4": found["orig4"],
        "visits-w64-8": found["w64_8"],
        "rounds-w64-8": found["w64_C4"],
        "visits-w128-8": found["w128_8"],
        "rounds-w128-8": found["w128_C4"],
    }
