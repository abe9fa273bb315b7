"""Reports as JSON files: names, writing, reading back."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

FORMATS = ("pageweaver-bench 1", "pageweaver-logical 1")


def file_name(report: Mapping[str, Any]) -> str:
    """``arms-WORKLOAD.json`` for a measured report, ``logical-WORKLOAD.json`` for counts alone."""
    return file_name_of(report["workload"]["name"], measured="arms" in report)


def file_name_of(workload: str, *, measured: bool) -> str:
    """The same for a workload's name or path."""
    return f"{'arms' if measured else 'logical'}-{Path(workload).stem}.json"


def write_report(report: Mapping[str, Any], folder: Path) -> Path:
    """Write one report; returns its path. Raises OSError."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / file_name(report)
    # Another name first: what is there under its own is whole, whatever happens meanwhile.
    partial = path.with_name(path.name + ".part")
    partial.write_text(json.dumps(report, indent=1) + "\n")
    partial.replace(path)
    return path


def read_report(path: Path) -> dict[str, Any]:
    """Read one report back.

    Raises:
        OSError: the file can't be read.
        ValueError: it is no report of ``pageweaver bench``.
    """
    try:
        report = json.loads(path.read_text())
    except (UnicodeDecodeError, json.JSONDecodeError) as error:
        raise ValueError(f"{path}: no JSON ({error})") from None
    if not isinstance(report, dict) or report.get("format") not in FORMATS:
        raise ValueError(f"{path}: no report of pageweaver bench (format must be one of {', '.join(FORMATS)})")
    return report


def read_reports(paths: Sequence[Path]) -> list[dict[str, Any]]:
    """Read several; errors as in :func:`read_report`."""
    return [read_report(path) for path in paths]
