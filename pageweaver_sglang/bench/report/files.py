"""Reports as JSON files: names, writing, reading back."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ..inputs import QUERY_HEADS_PER_KV_HEAD

FORMATS = ("pageweaver-bench 1", "pageweaver-logical 1")


def heads_in(report: Mapping[str, Any]) -> int:
    """Query heads per KV head of a report; one that doesn't say so is of a version that had 16 only."""
    sizes = report["workload"]
    return sizes["q_heads"] // sizes["kv_heads"] if "q_heads" in sizes else QUERY_HEADS_PER_KV_HEAD


def label(workload: str, heads_per_kv_head: int) -> str:
    """A workload's name without its folder, with the number of heads behind it unless that is MiniMax-M3's 16."""
    more = "" if heads_per_kv_head == QUERY_HEADS_PER_KV_HEAD else f"-{heads_per_kv_head}heads"
    return Path(workload).stem + more


def label_of(report: Mapping[str, Any]) -> str:
    """The same for a report: what its file and its figures are called."""
    return label(report["workload"]["name"], heads_in(report))


def file_name(report: Mapping[str, Any]) -> str:
    """``arms-LABEL.json`` for a measured report, ``logical-LABEL.json`` for counts alone; see :func:`label`."""
    return file_name_of(label_of(report), measured="arms" in report)


def file_name_of(label: str, *, measured: bool) -> str:
    """The same for a label."""
    return f"{'arms' if measured else 'logical'}-{label}.json"


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
