"""All blocks of all arms, one driven at a time.

Arms are switched in one of three ways. By restarts: a server keeps the mode it was started with. Between native and one
other arm, inside one server by PageWeaver's own switch, so that everything around Step 3 is the same process. Or side
by side: a server per arm, all started once, of which all but one idle. A block serves every arm once; blocks begin with
different arms in turn (A B C, B C A, ...), so that a machine that gets slower hits all arms alike. A server is started,
waited for by the line in its log that says it is ready, warmed up, driven by SGLang's client once per load, and ended
with all its processes. Loads in which Step 3 is timed come last, in the same servers.
"""

from __future__ import annotations

import contextlib
import shlex
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from datetime import datetime, timezone
from pathlib import Path
from statistics import median
from typing import Any

from pageweaver_sglang.bench import environment
from pageweaver_sglang.bench.server import ServerError, ServerProcess

from . import idle, launch, statistics, warmup
from .client import ClientError, ProcessPerLoad, Worker, read_result
from .serverlog import LogFacts, read_log, step3_between
from .settings import SERVED_BY, AbError, Cell, Settings
from .switching import calls_served, switch_to

FORMAT = "pageweaver-ab-1"
SWITCHING = "restarts: every arm of every block is a server of its own"
SWITCHED = "PageWeaver's own switch inside one server: off for native, on for the other arm"
SIDE_BY_SIDE = (
    "choosing one of the servers that run side by side, one per arm, all started once on the same GPUs; the others "
    "idle meanwhile, as they say themselves before and after every load. They share the memory: each one's KV pool is "
    "smaller than a server alone could have, and the same for all arms"
)
_PUBLISHED = 0.2
"""Seconds in which a server that has answered its last request has also published what it computed for it."""
SWITCHED_OFF = "switched off"
"""How the reason begins for which a server hands calls back when it was asked to."""


class Progress:
    """What happens, for people; this one tells nobody."""

    def begin(self, steps: int) -> None:
        """The comparison starts; it has so many steps."""

    def now(self, text: str) -> None:
        """This is being done."""

    def advance(self) -> None:
        """A step is done."""

    def reach(self, steps: int) -> None:
        """So many steps are done or left out, counted from the beginning."""

    def note(self, text: str) -> None:
        """Something worth a line."""


@contextlib.contextmanager
def signals_held(*, deliver: bool) -> Iterator[None]:
    """Keep SIGINT and SIGTERM away, so that an impatient Ctrl-C doesn't leave a server behind.

    ``deliver``: let the first one that came act at the end.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    arrived: list[int] = []
    former = {
        number: signal.signal(number, lambda received, _: arrived.append(received))
        for number in (signal.SIGINT, signal.SIGTERM)
    }
    try:
        yield
    finally:
        for number, handler in former.items():
            signal.signal(number, handler)
        if arrived and deliver:
            signal.raise_signal(arrived[0])


@contextlib.contextmanager
def _running(*servers: ServerProcess) -> Iterator[None]:
    """Run servers at the same time; they end together, too."""
    ending = False
    try:
        with signals_held(deliver=True):
            for server in servers:
                server.__enter__()
        yield
    except (KeyboardInterrupt, SystemExit):
        ending = True  # a second signal would ask for the same
        raise
    finally:
        with signals_held(deliver=not ending), ThreadPoolExecutor(len(servers)) as pool:
            for stopped in [pool.submit(server.stop) for server in servers]:
                stopped.result()


@dataclass
class _Served:
    """A server that is to be started, or runs."""

    arm: str
    """The mode it is started in."""
    name: str
    """What its log and the client's files are called by."""
    port: int
    server: ServerProcess
    control: Path
    facts: dict[str, Any]
    """For the report: of every run that it serves."""

    def read_log(self) -> dict[str, Any]:
        """What the log says, for the report."""
        log = self.server.log
        found = read_log(log.read_text(errors="replace")) if log.exists() else LogFacts()
        return {"status": found.status, "fallbacks": found.fallbacks, "tuned": found.tuned}


def run_session(
    settings: Settings,
    save: Callable[[dict[str, Any]], None],
    progress: Progress | None = None,
    commit: str | None = None,
) -> dict[str, Any]:
    """Run the comparison.

    Args:
        settings: what is compared.
        save: called with the report after every arm of every block and at the end, also when interrupted.
        progress: gets to know what happens.
        commit: for the report, where the sources came without their history.

    Returns:
        The report; its ``failures`` are empty when all went well.

    Raises:
        AbError: nothing can be measured: no SGLang, no client, wrong server arguments, a port that is taken.
    """
    return _Session(settings, save, progress or Progress(), commit).run()


class _Session:
    def __init__(
        self, settings: Settings, save: Callable[[dict[str, Any]], None], progress: Progress, commit: str | None
    ) -> None:
        launch.check_server_arguments(settings.server_arguments)
        if settings.side_by_side:
            launch.check_side_by_side(settings)
        for number in range(len(settings.arms) if settings.side_by_side and settings.port else 1):
            launch.choose_port(settings.port + number)
        # Also finds out whether there is a client, before minutes go into a server.
        self._program = settings.client_program or (sys.executable, "-m", launch.find_client())
        example = launch.client_arguments(
            settings,
            settings.cells[0],
            port=settings.port,
            seed=settings.seed,
            output=settings.folder / "client.jsonl",
            requests=settings.requests,
        )
        self.settings, self._save, self._progress = settings, save, progress
        self._client: Worker | ProcessPerLoad
        self._lost: set[str] = set()
        self.runs: list[dict[str, Any]] = []
        shown = {
            name: getattr(settings, name)
            for name in ("model", "arms", "prompts", "concurrency", "blocks", "requests", "seed", "server_arguments")
        }
        switching = SWITCHED if settings.one_server else SIDE_BY_SIDE if settings.side_by_side else SWITCHING
        self.report: dict[str, Any] = {
            "format": FORMAT,
            "environment": environment.describe(commit),
            "settings": {**shown, "base": settings.base, "share": settings.share},
            "switching": switching,
            "warm_up": warmup.DESCRIPTION + (", once per arm" if settings.one_server else ""),
            "order": settings.order(),
            "client": {"command": shlex.join([*self._program, *example])},
            "interrupted": False,
            "runs": self.runs,
        }

    def run(self) -> dict[str, Any]:
        settings = self.settings
        timed = len(settings.arms) if settings.share else 0
        self._progress.begin((len(self._servings()) + timed) * self._steps)
        worker = None
        if not settings.client_program:
            # Imports while servers start.
            worker = Worker(
                self._program[-1], settings.folder / "client" / "worker.log", start_timeout=settings.client_timeout
            )
        self._client = worker or ProcessPerLoad(self._program, "--client-cmd names another program")
        try:
            self._tell_client()
            if settings.one_server:
                self._serve_switching()
            elif settings.side_by_side:
                self._serve_side_by_side()
            else:
                done = 0
                for arm, block, position in self._servings():
                    if arm not in self._lost:
                        self._serve(arm, block, position)
                        self._finish()
                    done += 1 + (settings.share and block == settings.blocks - 1)
                    self._progress.reach(done * self._steps)
        except BaseException:
            self.report["interrupted"] = True
            self._finish()
            raise
        finally:
            with signals_held(deliver=False):
                self._client.close()
        return self.report

    @property
    def _steps(self) -> int:
        """Steps of one arm in one block."""
        return 1 + len(self.settings.cells)

    def _servings(self) -> list[tuple[str, int, int]]:
        """Arm, block and position in the block, in the order in which they are measured."""
        return [
            (arm, block, position)
            for block, arms in enumerate(self.settings.order())
            for position, arm in enumerate(arms)
        ]

    def _tell_client(self) -> None:
        self.report["client"]["how"] = self._client.how

    def _choose_client(self) -> None:
        """Take a process per load where the client can't be used otherwise; called when a server is ready."""
        if isinstance(self._client, Worker) and (why := self._client.unusable()):
            self._client.close()
            self._client = ProcessPerLoad(self._program, why.splitlines()[0])
            self._tell_client()
            self._progress.note(f"the client runs as {self._client.how}")

    def _finish(self) -> None:
        """Bring the summary up to date and save."""
        self.report["loads"] = statistics.compare(self.settings, self.runs)
        self.report["step3"] = statistics.step3_shares(self.settings, self.runs)
        self.report["idle_share"] = statistics.idle_share(self.runs)
        self.report["failures"] = statistics.failures(self.runs)
        self._save(self.report)

    # Servers -------------------------------------------------------------------------------------------------------

    def _prepare(self, arm: str, name: str, port: int, nccl_port: int | None = None) -> _Served:
        settings = self.settings
        variables = launch.server_variables(settings, arm)
        log = settings.folder / "logs" / f"{name}.log"
        server = ServerProcess(
            launch.server_command(settings, port, nccl_port), log, environment=variables, patience=settings.patience
        )
        facts = {"command": shlex.join(server.command), "environment": variables, "log": str(log)}
        return _Served(arm, name, port, server, Path(variables["PAGEWEAVER_CONTROL_DIR"]), facts)

    def _check_mode(self, served: _Served) -> None:
        """Raise ServerError unless the log says that this server's mode is served."""
        mode = read_log(served.server.text()).mode
        if mode != served.arm:
            says = "has no pageweaver STATUS line" if mode is None else f"says mode {mode}"
            raise ServerError(
                f"the server's log {says}, so its figures would not be those of {served.arm}\n{served.server.tail()}"
            )

    def _warm_up(self, served: _Served) -> None:
        """Raises ServerError when the server doesn't answer."""
        self._choose_client()
        try:
            launch.wait_until_it_answers(served.port)
            served.facts["warm_up_requests"] = warmup.warm_up(self.settings, served.port)
        except OSError as error:
            raise ServerError(f"warm-up: {error}\n{served.server.tail()}") from error

    def _new_run(self, arm: str, block: int, position: int, timed: bool) -> dict[str, Any]:
        """The entry of one arm in one block, at the end of ``runs``."""
        run: dict[str, Any] = {
            "arm": arm,
            "block": block,
            "position": position,
            "timed": timed,
            "started": datetime.now(timezone.utc).isoformat(timespec="seconds"),
            "failure": None,
            "status": None,
            "fallbacks": [],
            "tuned": [],
            "cells": [],
        }
        self.runs.append(run)
        return run

    # Restarts ------------------------------------------------------------------------------------------------------

    def _serve(self, arm: str, block: int, position: int) -> None:
        """One server; whatever goes wrong is in its entry of ``runs``, which is there from the beginning."""
        settings, where = self.settings, f"{arm}, block {block + 1}"
        mine = [self._new_run(arm, block, position, timed=False)]
        served = None
        ready = False
        try:
            served = self._prepare(arm, f"{arm}-block{block + 1}", launch.choose_port(settings.port))
            self._progress.now(f"{where}: starting a server")
            with _running(served.server):
                served.facts["start_s"] = round(served.server.wait_ready(settings.start_timeout), 1)
                self._check_mode(served)
                self._progress.now(f"{where}: warming up")
                self._warm_up(served)
                ready = True
                self._progress.advance()
                self._measure_loads(mine[0], served, served.name)
                if settings.share and block == settings.blocks - 1:
                    mine.append(self._new_run(arm, 0, position, timed=True))
                    switch_to(served.control, arm, on=True, timing=True)
                    self._progress.advance()
                    self._measure_loads(mine[1], served, f"{arm}-timed")
        except (ServerError, OSError, AbError) as error:
            mine[-1]["failure"] = str(error) if ready else f"could not be served: {error}"
            self._progress.note(f"{where}: {mine[-1]['failure']}")
        finally:
            for run in mine if served else []:
                run |= served.facts | served.read_log()
        if all(entry["failure"] for entry in mine[0]["cells"]):  # also when none was reached
            self._lost.add(arm)
            self._progress.note(f"{where}: no load could be measured, so {arm} is not served again")

    # Side by side --------------------------------------------------------------------------------------------------

    def _serve_side_by_side(self) -> None:
        """All arms' servers, started at the same time; one is driven while the others idle.

        A server that dies or misbehaves as a server ends the comparison.
        """
        settings, arms = self.settings, self.settings.arms
        ports = launch.spare_ports(2 * len(arms))
        every: list[_Served] = []
        arm = arms[0]
        try:
            for number, arm in enumerate(arms):
                port = settings.port + number if settings.port else ports[number]
                every.append(self._prepare(arm, arm, port, ports[len(arms) + number]))
            self._progress.now(f"starting {len(arms)} servers")
            with _running(*(served.server for served in every)):
                try:
                    waiting = list(every)
                    while waiting:
                        for served in list(waiting):
                            arm = served.arm
                            if served.server.is_ready(settings.start_timeout):
                                served.facts["start_s"] = round(served.server.wait_ready(settings.start_timeout), 1)
                                self._check_mode(served)
                                waiting.remove(served)
                        time.sleep(0.1)
                    for served in every:
                        arm = served.arm
                        self._progress.now(f"{arm}: warming up")
                        self._warm_up(served)
                    self._check_pools(every)
                    phases = [(arms_of_block, block, False) for block, arms_of_block in enumerate(settings.order())]
                    phases += [(list(arms), 0, True)] if settings.share else []
                    for order, block, timed in phases:
                        for position, arm in enumerate(order):
                            served = every[arms.index(arm)]
                            self._measure_beside(served, every, block, position, timed)
                            self._finish()
                except OSError as error:
                    raise ServerError(str(error)) from error
        except (ServerError, AbError, OSError) as error:
            if not (self.runs and self.runs[-1]["arm"] == arm):
                self._new_run(arm, 0, 0, timed=False)
                error = type(error)(f"could not be served: {error}")
            self.runs[-1]["failure"] = str(error)
            self._progress.note(f"{arm}: {error}")
        finally:
            found = {served.arm: served.facts | served.read_log() for served in every}
            for run in self.runs:
                run |= found.get(run["arm"], {})
            self._finish()

    def _check_pools(self, every: list[_Served]) -> None:
        """Note the size of every server's KV pool. Raises ServerError when they differ, OSError."""
        for served in every:
            served.facts["kv_pool_tokens"] = idle.when_idle(served.port).pool
        pools = {served.arm: served.facts["kv_pool_tokens"] for served in every}
        if len(set(pools.values())) > 1:
            shown = ", ".join(f"{arm} {tokens}" for arm, tokens in pools.items())
            raise ServerError(f"the servers' KV pools differ ({shown} tokens): lower --max-total-tokens")

    def _measure_beside(self, served: _Served, every: list[_Served], block: int, position: int, timed: bool) -> None:
        """Every load of one arm in one block while the other servers idle."""
        others = [other for other in every if other is not served]
        time.sleep(_PUBLISHED)
        run = self._new_run(served.arm, block, position, timed)
        run |= served.facts
        if timed:
            switch_to(served.control, served.arm, on=True, timing=True)
        self._progress.advance()
        self._measure_loads(run, served, f"{served.arm}-" + ("timed" if timed else f"block{block + 1}"), others)
        run |= served.read_log()

    # One server ----------------------------------------------------------------------------------------------------

    def _serve_switching(self) -> None:
        """One server for all blocks, in which the arms are switched."""
        settings = self.settings
        served = None
        try:
            served = self._prepare(settings.server_arm, "one-server", launch.choose_port(settings.port))
            self._progress.now("starting the server")
            with _running(served.server):
                served.facts["start_s"] = round(served.server.wait_ready(settings.start_timeout), 1)
                self._check_mode(served)
                for warmed in sorted(settings.arms, key=lambda name: name != "native"):
                    self._progress.now(f"{warmed}: warming up")
                    switch_to(served.control, warmed, on=warmed != "native")
                    self._warm_up(served)
                phases = [(arms, block, False) for block, arms in enumerate(settings.order())]
                phases += [(list(settings.arms), 0, True)] if settings.share else []
                for arms, block, timed in phases:
                    for position, arm in enumerate(arms):
                        self._measure_switched(arm, block, position, served, timed)
                        self._finish()
        except (ServerError, OSError, AbError) as error:
            if not self.runs:
                for position, lost in enumerate(settings.arms):
                    self._new_run(lost, 0, position, timed=False)["failure"] = f"could not be served: {error}"
            else:
                self.runs[-1]["failure"] = str(error)
            self._progress.note(str(error).splitlines()[0])
        finally:
            found = served.facts | served.read_log() if served else {"fallbacks": []}
            unasked = [reason for reason in found["fallbacks"] if not reason.startswith(SWITCHED_OFF)]
            for run in self.runs:
                run |= {**found, "fallbacks": unasked if run["arm"] != "native" else []}
            self._finish()

    def _measure_switched(self, arm: str, block: int, position: int, served: _Served, timed: bool) -> None:
        """Every load of one arm in one block; checks afterwards that no call was served by the other arm."""
        run = self._new_run(arm, block, position, timed)
        run |= served.facts
        switch_to(served.control, arm, on=arm != "native", timing=timed)
        before = calls_served(served.control)
        self._progress.advance()
        self._measure_loads(run, served, f"{served.name}-{arm}-" + ("timed" if timed else f"block{block + 1}"))
        run["calls"] = dict(calls_served(served.control) - before)
        if not run["calls"] or not set(run["calls"]) <= SERVED_BY.get(arm, {arm}):
            run["failure"] = f"Step 3 calls were served by {run['calls'] or 'nobody'}, and not by {arm} alone"
            for entry in run["cells"]:
                entry["failure"] = entry["failure"] or run["failure"]

    # Loads ---------------------------------------------------------------------------------------------------------

    def _measure_loads(self, run: dict[str, Any], served: _Served, stem: str, others: Sequence[_Served] = ()) -> None:
        """Every load of one run, into its entry.

        Args:
            run: the entry.
            served: the server.
            stem: what the client's files are called by.
            others: servers that must do nothing meanwhile.

        Raises:
            ServerError: a server is gone.
        """
        where = f"{run['arm']}, " + ("timed" if run["timed"] else f"block {run['block'] + 1}")
        for cell in self.settings.cells:
            self._progress.now(f"{where}: {cell}")
            before = self._idle([served, *others])
            entry = self._measure(cell, stem, served, run["block"], run["timed"])
            run["cells"].append(entry)
            self._progress.advance()
            self._progress.note(f"{where}, {cell}: {_one_line(entry)}")
            if entry["failure"] and not launch.answers(served.port):
                raise ServerError(f"the server is gone after {cell}\n{served.server.tail()}")
            after = self._idle(others)
            busy = [other.arm for other in others if after[other.arm] != before[other.arm]]
            if busy and entry["failure"] is None:
                entry["failure"] = f"the servers of {', '.join(busy)} computed prompts meanwhile"

    def _idle(self, every: Sequence[_Served]) -> dict[str, int]:
        """Prompt tokens that each server has computed, once it is idle; asked only where several run.

        Raises ServerError when one can't be asked or doesn't get idle.
        """
        found = {}
        for served in every if self.settings.side_by_side else ():
            try:
                found[served.arm] = idle.when_idle(served.port).prefilled
            except OSError as error:
                raise ServerError(f"the server of {served.arm}: {error}\n{served.server.tail()}") from error
        return found

    def _measure(self, cell: Cell, stem: str, served: _Served, block: int, timed: bool) -> dict[str, Any]:
        """One load; ``timed``: the time of Step 3 is to be read from the server's log."""
        settings = self.settings
        stem = f"{stem}-{cell.prompt}x{cell.concurrency}"
        output = settings.folder / "client" / f"{stem}.jsonl"
        # Prompts that no block has had.
        seed = settings.client_seed(settings.blocks if timed else block, cell)
        requests = settings.timed_requests(cell) if timed else settings.requests
        arguments = launch.client_arguments(
            settings, cell, port=served.port, seed=seed, output=output, requests=requests
        )
        command = shlex.join([*self._program, *arguments])
        entry: dict[str, Any] = {"prompt": cell.prompt, "concurrency": cell.concurrency, "command": command}
        before = read_log(served.server.text()) if timed else None
        try:
            result = self._client.run(arguments, output.with_suffix(".log"), output, settings.client_timeout)
            entry |= read_result(result, requests, cell.concurrency)
        except ClientError as error:
            return {**entry, "failure": str(error)}
        if before is not None:
            spent = step3_between(before, read_log(served.server.text()))
            entry["step3"] = asdict(spent) if spent else None
            if spent is None and entry["failure"] is None:
                entry["failure"] = "no Step 3 call was timed"
        return entry


def _one_line(entry: dict[str, Any]) -> str:
    """A load's figures in a few words, or its failure."""
    if entry["failure"]:
        return str(entry["failure"]).splitlines()[0]
    known = [seconds * 1e3 for seconds in entry["ttft_s"] if seconds is not None]
    ttft = f"TTFT median {median(known):,.1f} ms" if known else "no TTFT"
    return f"{entry['input_throughput']:,.0f} input tokens/s, {ttft}"
