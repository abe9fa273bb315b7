"""All blocks of all arms, one server at a time.

Arms are switched by restarts: a server keeps the mode it was started with; or, between native and one other arm, inside
one server by PageWeaver's own switch, so that everything around Step 3 is the same process. A block serves every arm
once; blocks begin with different arms in turn (A B C, B C A, ...), so that a machine that gets slower hits all arms
alike. Every serving starts a server, waits for the line in its log that says it is ready, warms it up, runs SGLang's
client once per load (and arm, and block, where one server serves them all), and ends the server with all its processes.
"""

from __future__ import annotations

import contextlib
import shlex
import signal
import threading
from collections.abc import Callable, Iterator
from dataclasses import asdict
from datetime import datetime, timezone
from pathlib import Path
from statistics import median
from typing import Any

from pageweaver_sglang.bench import environment
from pageweaver_sglang.bench.server import ServerError, ServerProcess

from . import launch, statistics, warmup
from .client import ClientError, read_result, run_client
from .serverlog import LogFacts, read_log, step3_between
from .settings import AbError, Cell, Settings
from .switching import calls_served, switch_to

FORMAT = "pageweaver-ab-1"
SWITCHING = "restarts: every arm of every block is a server of its own"
SWITCHED = "PageWeaver's own switch inside one server: off for native, on for the other arm"
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
def _running(server: ServerProcess) -> Iterator[ServerProcess]:
    server.__enter__()
    ending = False
    try:
        yield server
    except (KeyboardInterrupt, SystemExit):
        ending = True  # a second signal would ask for the same
        raise
    finally:
        with signals_held(deliver=not ending):
            server.stop()


def run_session(
    settings: Settings,
    save: Callable[[dict[str, Any]], None],
    progress: Progress | None = None,
    commit: str | None = None,
) -> dict[str, Any]:
    """Run the comparison.

    Args:
        settings: what is compared.
        save: called with the report after every serving and at the end, also when the comparison is interrupted.
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
        port = launch.choose_port(settings.port)
        # Also finds out whether there is a client, before minutes go into a server.
        example = launch.client_command(
            settings, settings.cells[0], port=port, seed=settings.seed, output=settings.folder / "client.jsonl"
        )
        self.settings, self._save, self._progress = settings, save, progress
        self._lost: set[str] = set()
        self.runs: list[dict[str, Any]] = []
        shown = {
            name: getattr(settings, name)
            for name in ("model", "arms", "prompts", "concurrency", "blocks", "requests", "seed", "server_arguments")
        }
        self.report: dict[str, Any] = {
            "format": FORMAT,
            "environment": environment.describe(commit),
            "settings": {**shown, "base": settings.base, "share": settings.share},
            "switching": SWITCHED if settings.one_server else SWITCHING,
            "warm_up": warmup.DESCRIPTION + (", once per arm" if settings.one_server else ""),
            "order": settings.order(),
            "client": {"command": shlex.join(example)},
            "interrupted": False,
            "runs": self.runs,
        }

    def run(self) -> dict[str, Any]:
        settings = self.settings
        servings = [
            (arm, block, position, False)
            for block, arms in enumerate(settings.order())
            for position, arm in enumerate(arms)
        ]
        if settings.share:
            # The prompts of the first block once more.
            servings += [(arm, 0, position, True) for position, arm in enumerate(settings.arms)]
        steps = 1 + len(settings.cells)
        self._progress.begin(len(servings) * steps)
        try:
            if settings.one_server:
                for timed in (False, True) if settings.share else (False,):
                    self._serve_switching(timed)
                    self._finish()
                servings = []
            for number, (arm, block, position, timed) in enumerate(servings):
                if arm not in self._lost:
                    self._serve(arm, block, position, timed)
                    self._finish()
                self._progress.reach((number + 1) * steps)
        except BaseException:
            self.report["interrupted"] = True
            self._finish()
            raise
        return self.report

    def _finish(self) -> None:
        """Bring the summary up to date and save."""
        self.report["loads"] = statistics.compare(self.settings, self.runs)
        self.report["step3"] = statistics.step3_shares(self.settings, self.runs)
        self.report["idle_share"] = statistics.idle_share(self.runs)
        self.report["failures"] = statistics.failures(self.runs)
        self._save(self.report)

    def _serve(self, arm: str, block: int, position: int, timed: bool) -> None:
        """One serving; whatever goes wrong is in its entry of ``runs``, which is there from the beginning."""
        settings, where = self.settings, f"{arm}, " + ("timed" if timed else f"block {block + 1}")
        name = f"{arm}-timed" if timed else f"{arm}-block{block + 1}"
        run = self._new_run(arm, block, position, timed)
        log = settings.folder / "logs" / f"{name}.log"
        ready = False
        try:
            port = launch.choose_port(settings.port)
            variables = launch.server_variables(settings, arm, timed=timed)
            server = ServerProcess(
                launch.server_command(settings, port), log, environment=variables, patience=settings.patience
            )
            run |= {"command": shlex.join(server.command), "environment": variables, "log": str(log)}
            self._progress.now(f"{where}: starting a server")
            with _running(server):
                run["start_s"] = round(server.wait_ready(settings.start_timeout), 1)
                self._check_mode(arm, server)
                self._progress.now(f"{where}: warming up")
                try:
                    launch.wait_until_it_answers(port)
                    run["warm_up_requests"] = warmup.warm_up(settings, port)
                except OSError as error:
                    raise ServerError(f"warm-up: {error}\n{server.tail()}") from error
                ready = True
                self._progress.advance()
                self._measure_loads(run, where, name, port, server)
        except (ServerError, OSError, AbError) as error:
            run["failure"] = str(error) if ready else f"could not be served: {error}"
            self._progress.note(f"{where}: {run['failure']}")
        finally:
            facts = read_log(log.read_text(errors="replace")) if log.exists() else LogFacts()
            run |= {"status": facts.status, "fallbacks": facts.fallbacks, "tuned": facts.tuned}
        if all(entry["failure"] for entry in run["cells"]):  # also when none was reached
            self._lost.add(arm)
            self._progress.note(f"{where}: no load could be measured, so {arm} is not served again")

    def _measure_loads(self, run: dict[str, Any], where: str, stem: str, port: int, server: ServerProcess) -> None:
        """Every load of one run, into its entry. Raises ServerError when the server is gone after one."""
        for cell in self.settings.cells:
            self._progress.now(f"{where}: {cell}")
            entry = self._measure(cell, stem, port, run["block"], server if run["timed"] else None)
            run["cells"].append(entry)
            self._progress.advance()
            self._progress.note(f"{where}, {cell}: {_one_line(entry)}")
            if entry["failure"] and not launch.answers(port):
                raise ServerError(f"the server is gone after {cell}\n{server.tail()}")

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

    def _serve_switching(self, timed: bool) -> None:
        """One server for all blocks (or for the timed ones), in which the arms are switched."""
        settings, arm = self.settings, self.settings.server_arm
        blocks = [list(settings.arms)] if timed else settings.order()
        name = "one-server-timed" if timed else "one-server"
        log = settings.folder / "logs" / f"{name}.log"
        first = len(self.runs)
        common: dict[str, Any] = {"log": str(log)}
        try:
            port = launch.choose_port(settings.port)
            variables = launch.server_variables(settings, arm, timed=timed)
            control = Path(variables["PAGEWEAVER_CONTROL_DIR"])
            server = ServerProcess(
                launch.server_command(settings, port), log, environment=variables, patience=settings.patience
            )
            common |= {"command": shlex.join(server.command), "environment": variables}
            self._progress.now("starting the server")
            with _running(server):
                common["start_s"] = round(server.wait_ready(settings.start_timeout), 1)
                self._check_mode(arm, server)
                try:
                    launch.wait_until_it_answers(port)
                    for warmed in sorted(settings.arms, key=lambda name: name != "native"):
                        self._progress.now(f"{warmed}: warming up")
                        switch_to(control, warmed)
                        common["warm_up_requests"] = warmup.warm_up(settings, port)
                except OSError as error:
                    raise ServerError(f"warm-up: {error}\n{server.tail()}") from error
                for block, arms in enumerate(blocks):
                    for position, served in enumerate(arms):
                        self._measure_switched(served, block, position, server, control, port, name, timed, common)
                        self._finish()
        except (ServerError, OSError, AbError) as error:
            if len(self.runs) == first:
                for position, lost in enumerate(settings.arms):
                    self._new_run(lost, 0, position, timed)["failure"] = f"could not be served: {error}"
            else:
                self.runs[-1]["failure"] = str(error)
            self._progress.note(str(error).splitlines()[0])
        finally:
            facts = read_log(log.read_text(errors="replace")) if log.exists() else LogFacts()
            unasked = [reason for reason in facts.fallbacks if not reason.startswith(SWITCHED_OFF)]
            for run in self.runs[first:]:
                run |= {**common, "status": facts.status, "tuned": facts.tuned}
                run["fallbacks"] = unasked if run["arm"] != "native" else []

    def _measure_switched(
        self,
        arm: str,
        block: int,
        position: int,
        server: ServerProcess,
        control: Path,
        port: int,
        name: str,
        timed: bool,
        common: dict[str, Any],
    ) -> None:
        """Every load of one arm in one block; checks afterwards that no call was served by the other arm."""
        where = f"{arm}, " + ("timed" if timed else f"block {block + 1}")
        run = self._new_run(arm, block, position, timed) | common
        self.runs[-1] = run
        switch_to(control, arm)
        before = calls_served(control)
        self._progress.advance()
        self._measure_loads(run, where, f"{name}-{arm}" + ("" if timed else f"-block{block + 1}"), port, server)
        run["calls"] = dict(calls_served(control) - before)
        if set(run["calls"]) != {arm}:
            run["failure"] = f"Step 3 calls were served by {run['calls'] or 'nobody'}, and not by {arm} alone"
            for entry in run["cells"]:
                entry["failure"] = entry["failure"] or run["failure"]

    def _check_mode(self, arm: str, server: ServerProcess) -> None:
        """Raise ServerError unless the log says that this arm is served."""
        mode = read_log(server.text()).mode
        if mode != arm:
            says = "has no pageweaver STATUS line" if mode is None else f"says mode {mode}"
            raise ServerError(f"the server's log {says}, so its figures would not be those of {arm}\n{server.tail()}")

    def _measure(self, cell: Cell, name: str, port: int, block: int, timed: ServerProcess | None) -> dict[str, Any]:
        """One load; ``timed``: the server, when the time of Step 3 is to be read from its log."""
        settings = self.settings
        stem = f"{name}-{cell.prompt}x{cell.concurrency}"
        output = settings.folder / "client" / f"{stem}.jsonl"
        seed = settings.client_seed(block, cell)
        command = launch.client_command(settings, cell, port=port, seed=seed, output=output)
        entry: dict[str, Any] = {"prompt": cell.prompt, "concurrency": cell.concurrency, "command": shlex.join(command)}
        before = read_log(timed.text()) if timed else None
        try:
            result = run_client(command, output.with_suffix(".log"), output, timeout=settings.client_timeout)
            entry |= read_result(result, settings.requests, cell.concurrency)
        except ClientError as error:
            return {**entry, "failure": str(error)}
        if timed and before is not None:
            time = step3_between(before, read_log(timed.text()))
            entry["step3"] = asdict(time) if time else None
            if time is None and entry["failure"] is None:
                entry["failure"] = "no Step 3 call was timed"
        return entry


def _one_line(entry: dict[str, Any]) -> str:
    """A load's figures in a few words, or its failure."""
    if entry["failure"]:
        return str(entry["failure"]).splitlines()[0]
    known = [seconds * 1e3 for seconds in entry["ttft_s"] if seconds is not None]
    ttft = f"TTFT median {median(known):,.1f} ms" if known else "no TTFT"
    return f"{entry['input_throughput']:,.0f} input tokens/s, {ttft}"
