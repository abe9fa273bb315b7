"""What is compared, and in which order."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeVar

ARMS = ("native", "union8", "pageweaver", "auto")
"""Modes of the backend, so that everything around Step 3 stays equal."""

DEFAULT_ARMS = ("native", "union8", "auto")

SERVED_BY = {"auto": {"union8", "pageweaver"}}
"""Who serves the calls of a mode, where it isn't the mode itself."""

T = TypeVar("T")


class AbError(Exception):
    """Nothing can be measured; the message says why."""


@dataclass(frozen=True)
class Cell:
    """One load: prompts of one length, a number of them at a time."""

    prompt: int
    concurrency: int

    def __str__(self) -> str:
        length = f"{self.prompt // 1024}K" if self.prompt % 1024 == 0 else str(self.prompt)
        return f"{length} x {self.concurrency}"


def rotated(items: Sequence[T], turn: int) -> list[T]:
    """``items`` beginning with number ``turn``: A B C, then B C A, then C A B, then A B C again."""
    first = turn % len(items)
    return [*items[first:], *items[:first]]


@dataclass(frozen=True)
class Settings:
    """One comparison.

    Args:
        model: a folder or a name that SGLang understands.
        arms: modes to serve; ratios refer to :attr:`base`.
        prompts: prompt lengths in tokens.
        concurrency: requests at a time.
        blocks: how often every arm is served.
        requests: requests per load and block, at least the highest concurrency.
        seed: of the prompts; all arms of a block get the same ones.
        share: also run every load of every arm once more, afterwards, with Step 3's calls timed.
        one_server: switch between ``native`` and one other arm inside one server instead of starting one per arm.
        side_by_side: start the servers of all arms once, at the same time on the same GPUs, and drive one at a time.
        folder: where logs and the client's result files go.
        server_arguments: more arguments for the servers.
        client_arguments: more arguments for the client; they win over the ones chosen here.
        server_program: what to run instead of SGLang's server; its arguments stay.
        client_program: what to run instead of SGLang's client; its arguments stay.
        port: of the servers; 0 takes a free one for each.
        start_timeout: seconds that a server gets to be ready.
        client_timeout: seconds that one run of the client gets, and one request of the warm-up.
        patience: seconds that a server gets to end before it is killed.

    Raises:
        AbError: values that make no comparison.
    """

    model: str
    arms: tuple[str, ...] = DEFAULT_ARMS
    prompts: tuple[int, ...] = (8192, 32768, 65536)
    concurrency: tuple[int, ...] = (1, 4)
    blocks: int = 3
    requests: int = 8
    seed: int = 1
    share: bool = True
    one_server: bool = False
    side_by_side: bool = False
    folder: Path = Path("ab-results")
    server_arguments: tuple[str, ...] = ()
    client_arguments: tuple[str, ...] = ()
    server_program: tuple[str, ...] = ()
    client_program: tuple[str, ...] = ()
    port: int = 0
    start_timeout: float = 1800.0
    client_timeout: float = 3600.0
    patience: float = 15.0
    cells: tuple[Cell, ...] = field(init=False)
    """Every prompt length at every concurrency, in the order in which they are measured."""

    def __post_init__(self) -> None:
        if unknown := [arm for arm in self.arms if arm not in ARMS]:
            raise AbError(f"no arm {', '.join(unknown)}; the arms are {', '.join(ARMS)}")
        for name in ("arms", "prompts", "concurrency"):
            values = getattr(self, name)
            if not values or len(set(values)) != len(values):
                raise AbError(f"{name}: one or more, each once, got {', '.join(map(str, values)) or 'none'}")
        if self.one_server and (len(self.arms) != 2 or "native" not in self.arms):
            raise AbError(f"one server switches between native and one other arm, got {', '.join(self.arms)}")
        if self.one_server and self.side_by_side:
            raise AbError("one server or servers side by side, not both")
        for name in ("blocks", "requests"):
            if (value := getattr(self, name)) < 1:
                raise AbError(f"{name}: at least 1, got {value}")
        if min(*self.prompts, *self.concurrency) < 1:
            raise AbError("prompts and concurrency: at least 1")
        if not 0 <= self.port <= 65535:
            raise AbError(f"port: from 0 (a free one) to 65535, got {self.port}")
        if self.port and self.side_by_side and self.port + len(self.arms) > 65536:
            raise AbError(f"port: side by side the {len(self.arms)} ports from {self.port} on, up to 65535")
        if not 0 <= self.seed <= 4000:
            raise AbError(f"seed: from 0 to 4000, got {self.seed}")
        if self.requests < max(self.concurrency):
            raise AbError(
                f"requests: at least the highest concurrency, {max(self.concurrency)}, got {self.requests}; "
                "with fewer the server never gets that many at a time"
            )
        cells = tuple(Cell(prompt, count) for prompt in self.prompts for count in self.concurrency)
        object.__setattr__(self, "cells", cells)

    @property
    def base(self) -> str:
        """The arm that ratios refer to: ``native``, or the first one where that is left out."""
        return "native" if "native" in self.arms else self.arms[0]

    @property
    def server_arm(self) -> str:
        """The mode of the one server that switches to ``native`` and back."""
        return next(arm for arm in self.arms if arm != "native")

    def order(self) -> list[list[str]]:
        """The arms of every block, in the order in which they are served."""
        return [rotated(self.arms, block) for block in range(self.blocks)]

    def timed_requests(self, cell: Cell) -> int:
        """Requests of a load in which Step 3 is timed: fewer do, since their times differ little."""
        return min(self.requests, max(2, cell.concurrency))

    def client_seed(self, block: int, cell: Cell) -> int:
        """Seed of one load: the same for every arm of a block, another one in every block and for every load."""
        return self.seed * 1_000_000 + block * 1_000 + self.cells.index(cell)
