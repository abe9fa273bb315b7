"""Options that several commands have."""

from __future__ import annotations

import argparse

from ..bench.protocol import Protocol


def positive(text: str) -> int:
    """An integer of at least 1, for argparse."""
    value = int(text)
    if value < 1:
        raise ValueError(text)
    return value


positive.__name__ = "positive integer"  # what argparse calls it in its message


def add_protocol_options(parser: argparse.ArgumentParser, where: str = "") -> None:
    """How much is measured and compared; ``where`` goes before each explanation."""
    for name, default, meaning in (
        ("rounds", Protocol.rounds, "rounds per arm"),
        ("calls", Protocol.calls, "calls per round"),
        ("rows", 256, "queries compared with float64"),
    ):
        text = f"{where}{meaning} (default: %(default)s)"
        parser.add_argument(f"--{name}", type=positive, default=default, help=text)


def add_commit_option(parser: argparse.ArgumentParser) -> None:
    """The commit that a report names."""
    parser.add_argument("--commit", help="commit to note in the report, for a copy of the sources without its history")
