#!/usr/bin/env python3
"""Serve the tiny MiniMax-M3 with a real SGLang server in each of PageWeaver's modes, and check what happened.

    serve_check.py                                          # one GPU; modes auto, pageweaver, union8, native
    serve_check.py --modes pageweaver --stock               # one mode, and SGLang without PageWeaver (fa3)
    serve_check.py --layouts tp2,tp2dp2,tp2pad:pageweaver --jobs 7     # two GPUs, all servers at the same time
    serve_check.py --layouts tp2rep                         # two GPUs that share a KV head, as in M3's `--tp 8`
    serve_check.py --q-heads 8 --kv-heads 1                 # on one GPU the heads that such a rank has
    serve_check.py -- --mem-fraction-static 0.4             # more arguments for the server

A layout says how the server spreads the model: `tpN` is tensor parallelism over N GPUs, `tpNdpM` DP attention on top of
it (M data-parallel attention ranks of N/M GPUs each), and `pad` behind it makes SGLang pad batches to a multiple of the
attention ranks (`--moe-dense-tp-size N`), as DP attention with several GPUs per rank does by itself. `rep` behind it
(before `pad`) takes a model of its own, with half as many KV heads as an attention rank has GPUs and 16 query heads for
each: two GPUs have the same KV head and 8 query heads each, as every rank of MiniMax-M3 with `--tp 8`. Modes behind a
colon (`tp2:pageweaver+native`) are that layout's, instead of --modes. Models of other heads than MiniMax-M3's 64 and 4
lie beside --model, with `-q8kv1` and the like behind the name.

For each layout and mode it starts `python -m sglang.launch_server --attention-backend pageweaver` (the page size is
left to the plugin) with PAGEWEAVER_MODE=<mode> and PAGEWEAVER_VERIFY_EVERY=1, so that every rank computes every Step 3
call with SGLang's own function too and logs the difference (the latencies include that: they are no measure of speed).
Prompts go one after the other, with DP attention to each rank in turn while the others have nothing to do; then a batch
of mixed lengths at the same time, queued up behind a long prompt so that the scheduler packs them together.

Checked, on every rank: the STATUS line; PageWeaver served Step 3 on every sparse layer, with no call left to SGLang's
function; the rank's heads in every compared call, and an NRMS of at most --max-nrms; padded rows zero. And: every
request answered; with DP attention that the rank a prompt was sent to served it alone; no error in the log; the servers
gone afterwards; first tokens that agree with the native mode, or are near-ties there (all but --tipped: the model picks
experts and pages by rank, so that rounding tips a close choice now and then); with --fresh-cache that all
processes together compiled the kernels once. Exit code 0 when all of it holds.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import json
import re
import shlex
import shutil
import statistics
import sys
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
sys.path.insert(0, str(Path(__file__).resolve().parent))

import make_tiny_m3

from pageweaver_sglang.bench import environment
from pageweaver_sglang.bench.server import ServerError, ServerProcess, generate, one_stop, random_prompt
from pageweaver_sglang.serving_ab.launch import choose_port, plugin_variables, wait_until_it_answers
from pageweaver_sglang.serving_ab.serverlog import FALLBACK, STATUS
from pageweaver_sglang.serving_ab.settings import AbError

ROOT = Path(__file__).resolve().parents[1]
MODES = ("auto", "pageweaver", "union8", "native")
STOCK = "stock"
REFERENCE_MODES = (STOCK, "native")
"""Modes whose first tokens the others are compared with, the first one that ran."""

SERVER_ARGUMENTS = (
    *("--trust-remote-code", "--kv-cache-dtype", "fp8_e4m3", "--disable-radix-cache", "--context-length", "131072"),
    *("--max-total-tokens", "300032", "--max-running-requests", "16", "--mem-fraction-static", "0.5"),
    *("--chunked-prefill-size", "16384", "--max-prefill-tokens", "16384", "--sampling-backend", "pytorch"),
    *("--cuda-graph-backend-decode", "disabled", "--cuda-graph-backend-prefill", "disabled", "--skip-server-warmup"),
)

PORT_STEP = 20
"""Between servers: with DP attention SGLang also takes the ports from 233 behind its own on."""

# What SGLang's logger puts in front of a line: the time, and the ranks of the process where there are several.
PREFIX = re.compile(r"\[\d{4}-\d\d-\d\d \d\d:\d\d:\d\d(?P<ranks>(?: [A-Z_]+\d+)*)\]")
# What the plugin logs (pageweaver_sglang/plugin: backend.status_line, step3.Step3; cuda/loader.py).
VERIFY = re.compile(
    r"pageweaver verify: layer (?P<layer>\d+) call \d+ tokens (?P<tokens>\d+) requests (?P<requests>\d+) "
    r"q_heads (?P<q_heads>\d+) kv_heads (?P<kv_heads>\d+) nrms (?P<nrms>[\d.]+|nan|inf)%? "
    r"max error (?P<max_error>[^ ]+) cosine (?P<cosine>-?[\d.]+|nan)(?: skipped rows (?P<skipped>\d+))?"
)
PADDING = re.compile(r"pageweaver padding: layer (?P<layer>\d+) rows (?P<rows>\d+) not zero (?P<not_zero>\d+)")
SUMMARY = re.compile(r"pageweaver calls: \{(?P<calls>[^}]*)\} fallbacks: \{(?P<fallbacks>.*?)\}( |$)")
COMPILING = "pageweaver: compiling the CUDA kernels for"
ERROR = re.compile(
    r"Traceback \(most recent call last\)|CUDA error|NCCL error|illegal memory access|out of memory|Scheduler hit an"
)
EXCERPT = re.compile(r"pageweaver[: ]|fired up and ready|Prefill batch|attention_backend=|" + ERROR.pattern)


def in_words(q_heads: int, kv_heads: int) -> str:
    return f"{q_heads} query head{'s' * (q_heads != 1)} and {kv_heads} KV head{'s' * (kv_heads != 1)}"


@dataclass(frozen=True)
class Layout:
    """How a server spreads the model over GPUs: ``tp`` ranks, ``dp`` of them data-parallel in attention.

    ``rep``: the model is one of which two GPUs share each KV head.
    """

    name: str
    tp: int
    dp: int = 1
    pad: bool = False
    rep: bool = False

    @classmethod
    def parse(cls, name: str) -> Layout:
        """Read a name such as ``tp4dp2``. Raises ValueError for another form, or where M does not divide N."""
        found = re.fullmatch(r"tp([1-9]\d*)(?:dp([1-9]\d*))?(rep)?(pad)?", name)
        tp, dp = (int(found[1]), int(found[2] or 1)) if found else (1, 2)
        rep = bool(found and found[3])
        if tp % (2 * dp if rep else dp):
            raise ValueError(
                f"{name!r} is not of the form tpN, tpNdpM (M divides N) or either with rep (N/M even), pad or reppad "
                "behind it"
            )
        return cls(name, tp, dp, bool(found[4]), rep)

    def heads(self, q_heads: int, kv_heads: int) -> tuple[int, int]:
        """Query and KV heads of the model: those given, unless the layout has its own."""
        size = self.tp // self.dp
        return (8 * size, size // 2) if self.rep else (q_heads, kv_heads)

    def problem(self, q_heads: int, kv_heads: int) -> str | None:
        """Why SGLang can't deal these heads out to the GPUs of an attention rank; None when it can."""
        size = self.tp // self.dp
        if q_heads % size or (kv_heads % size and size % kv_heads):
            return f"{in_words(q_heads, kv_heads)} can't be dealt out to {size} GPUs"
        return None

    def heads_of_a_rank(self, q_heads: int, kv_heads: int) -> tuple[int, int]:
        """What tensor parallelism leaves one rank of the model's heads; ranks share KV heads that are too few."""
        size = self.tp // self.dp
        return q_heads // size, max(1, kv_heads // size)

    @property
    def pads(self) -> bool:
        """Whether SGLang pads batches to a multiple of the GPUs of an attention rank, if that is more than one."""
        return self.tp > self.dp and (self.dp > 1 or self.pad)

    def ranks(self, dp_rank: int | None = None) -> list[str]:
        """The processes as SGLang's log names them, of one data-parallel rank or of all."""
        size = self.tp // self.dp
        ranks = range(self.tp) if dp_rank is None else range(dp_rank * size, (dp_rank + 1) * size)
        return [f"DP{rank // size} TP{rank}" if self.dp > 1 else f"TP{rank}" for rank in ranks]

    def arguments(self) -> list[str]:
        """The server's arguments. Sums go through NCCL: nothing to compile, no access between GPUs to be tried out."""
        arguments = ["--tp", str(self.tp), "--disable-custom-all-reduce"] if self.tp > 1 else []
        arguments += ["--dp", str(self.dp), "--enable-dp-attention"] if self.dp > 1 else []
        return arguments + (["--moe-dense-tp-size", str(self.tp)] if self.pad else [])


@dataclass
class RankFacts:
    """What one process of a server logged about PageWeaver."""

    status: str | None = None
    mode: str | None = None
    verified: list[dict[str, float]] = field(default_factory=list)
    calls_by_layer: dict[int, int] = field(default_factory=dict)
    fallbacks: list[str] = field(default_factory=list)
    padded_calls: int = 0
    padded_rows: int = 0
    padded_rows_not_zero: int = 0

    def nrms(self) -> dict[str, float] | None:
        """NRMS of the compared calls, as fractions; None when none was compared."""
        values = [call["nrms"] for call in self.verified]
        if not values:
            return None
        return {"max": max(values), "median": statistics.median(values), "mean": statistics.fmean(values)}

    def describe(self) -> dict[str, Any]:
        """For the report."""
        return {
            "status": self.status,
            "q_heads": sorted({int(call["q_heads"]) for call in self.verified}),
            "kv_heads": sorted({int(call["kv_heads"]) for call in self.verified}),
            "calls_by_layer": self.calls_by_layer,
            "fallbacks": self.fallbacks,
            "verified_calls": len(self.verified),
            "nrms": self.nrms(),
            "most_requests_in_a_call": max((int(call["requests"]) for call in self.verified), default=0),
            "padded_calls": self.padded_calls,
            "padded_rows": self.padded_rows,
            "padded_rows_not_zero": self.padded_rows_not_zero,
        }


@dataclass
class LogFacts:
    """What a server's log says about PageWeaver, by process."""

    ranks: dict[str, RankFacts] = field(default_factory=dict)
    errors: list[str] = field(default_factory=list)
    compilations: int = 0


def rank_of(line: str) -> str:
    """Which process wrote a line: ``DP1 TP2``, ``TP1``; ``TP0`` where SGLang names none (one GPU)."""
    found = PREFIX.search(line)
    ranks = " ".join(part for part in (found["ranks"].split() if found else ()) if part.startswith(("DP", "TP")))
    return ranks or "TP0"


def parse_log(text: str) -> LogFacts:
    """Read what the plugin logged. The counters are cumulative: a process's last summary counts."""
    # The compiler's lines have no rank, and other processes' output can stand in the same line.
    facts = LogFacts(compilations=text.count(COMPILING))
    for line in text.splitlines():
        if ERROR.search(line):
            facts.errors.append(line.strip()[:300])
        if "pageweaver" not in line:
            continue
        rank = facts.ranks.setdefault(rank_of(line), RankFacts())
        if found := STATUS.search(line):
            rank.status, rank.mode = found["text"], found["mode"]
        elif found := VERIFY.search(line):
            nrms = float(found["nrms"]) / 100
            rank.verified.append(
                {
                    "layer": int(found["layer"]),
                    "tokens": int(found["tokens"]),
                    "requests": int(found["requests"]),
                    "q_heads": int(found["q_heads"]),
                    "kv_heads": int(found["kv_heads"]),
                    "nrms": nrms if nrms == nrms else float("inf"),
                    "max_error": float(found["max_error"]),
                    "cosine": float(found["cosine"]),
                    "skipped_rows": int(found["skipped"] or 0),
                }
            )
        elif found := PADDING.search(line):
            rank.padded_calls += 1
            rank.padded_rows += int(found["rows"])
            rank.padded_rows_not_zero += int(found["not_zero"])
        elif found := SUMMARY.search(line):
            pairs = (pair.split(":") for pair in found["calls"].split(",") if pair.strip())
            rank.calls_by_layer = {int(layer): int(count) for layer, count in pairs}
            if found["fallbacks"].strip():
                rank.fallbacks.append(found["fallbacks"].strip())
        elif found := FALLBACK.search(line):
            rank.fallbacks.append(found["reason"])
    for rank in facts.ranks.values():
        rank.fallbacks = list(dict.fromkeys(rank.fallbacks))
    return facts


def excerpts(text: str, limit: int = 60) -> list[str]:
    """Lines of a log that tell what happened: the first ones and the last ones when there are many."""
    lines = [line.strip()[:400] for line in text.splitlines() if EXCERPT.search(line)]
    return lines if len(lines) <= limit else [*lines[: limit // 2], "...", *lines[-limit // 2 :]]


def sparse_layers(model: Path) -> list[int]:
    """Ids of the model's sparse layers."""
    config = json.loads((model / "config.json").read_text())
    frequency = config["sparse_attention_config"]["sparse_attention_freq"]
    return [layer for layer, sparse in enumerate(frequency) if sparse]


def heads_of(model: Path) -> tuple[int, int]:
    """Query and KV heads of the model."""
    config = json.loads((model / "config.json").read_text())
    return config["num_attention_heads"], config["num_key_value_heads"]


@dataclass
class Check:
    """One thing that had to hold."""

    name: str
    ok: bool
    detail: str = ""


def by_rank(values: Iterable[tuple[str, Any]]) -> str:
    """``TP0: x; TP1: y``, or one value alone where all ranks have the same."""
    values = list(values)
    different = {str(value) for _, value in values}
    return different.pop() if len(different) == 1 else "; ".join(f"{rank}: {value}" for rank, value in values)


def launch_checks(
    layout: Layout, mode: str, facts: LogFacts, requests: list[dict[str, Any]], model: Path, max_nrms: float
) -> list[Check]:
    """What had to hold in one launch."""
    layers, heads = sparse_layers(model), layout.heads_of_a_rank(*heads_of(model))
    failed = [f"{r['name']}: {r['error']}" for r in requests if "error" in r]
    checks = [
        Check(
            "every request answered", bool(requests) and not failed, "; ".join(failed) or f"{len(requests)} requests"
        ),
        Check("no error in the log", not facts.errors, "; ".join(facts.errors[:3])),
    ]
    if mode == STOCK:
        return checks
    ranks = {name: facts.ranks.get(name, RankFacts()) for name in layout.ranks()}
    checks.append(
        Check(
            "STATUS line names the mode",
            all(rank.mode == mode for rank in ranks.values()),
            by_rank((name, rank.status or "no STATUS line") for name, rank in ranks.items()),
        )
    )
    if mode == "native":
        return checks
    missing = {
        name: gone
        for name, rank in ranks.items()
        if (gone := [layer for layer in layers if not rank.calls_by_layer.get(layer)])
    }
    served = by_rank(
        (name, ", ".join(f"layer {layer}: {count}" for layer, count in sorted(rank.calls_by_layer.items())) or "none")
        for name, rank in ranks.items()
    )
    fallbacks = [f"{name}: {reason}" for name, rank in ranks.items() for reason in rank.fallbacks]
    largest = {name: nrms["max"] for name, rank in ranks.items() if (nrms := rank.nrms()) is not None}
    compared = by_rank(
        (name, f"{len(rank.verified)} calls, largest {largest[name]:.3%}" if name in largest else "no call compared")
        for name, rank in ranks.items()
    )
    seen = {name: {(call["q_heads"], call["kv_heads"]) for call in rank.verified} for name, rank in ranks.items()}
    counted = by_rank(
        (name, ", ".join(in_words(*heads) for heads in sorted(found)) or "no call compared")
        for name, found in seen.items()
    )
    most = max((call["requests"] for rank in ranks.values() for call in rank.verified), default=0)
    checks += [
        Check("PageWeaver served every sparse layer", not missing, served),
        Check("no call left to SGLang's Step 3", not fallbacks, "; ".join(fallbacks)),
        Check(
            f"NRMS of every compared call at most {max_nrms:.1%}",
            len(largest) == len(ranks) and max(largest.values()) <= max_nrms,
            compared,
        ),
        Check(
            f"every compared call had a rank's {in_words(*heads)}",
            all(found == {heads} for found in seen.values()),
            counted,
        ),
        Check("a call with several requests was compared", most > 1, f"largest: {most} requests"),
    ]
    not_zero = {name: rank.padded_rows_not_zero for name, rank in ranks.items() if rank.padded_rows_not_zero}
    padded = by_rank((name, f"{rank.padded_rows} rows") for name, rank in ranks.items())
    if layout.pads:
        # Padding goes up to the next multiple: a layout that pads has seen some if a prompt's length was odd.
        complete = all(rank.padded_rows for rank in ranks.values())
        checks.append(Check("padded rows are zero", complete and not not_zero, f"{padded}, not zero: {not_zero or 0}"))
    elif any(rank.padded_rows for rank in ranks.values()):
        checks.append(Check("padded rows are zero", not not_zero, f"{padded}, not zero: {not_zero or 0}"))
    if layout.dp > 1:
        alone = [r for r in requests if r.get("dp_rank") is not None and "ranks" in r]
        wrong = [f"{r['name']}: {r['ranks']}" for r in alone if r["ranks"] != layout.ranks(r["dp_rank"])]
        tried = {r["dp_rank"] for r in alone}
        checks.append(
            Check(
                "each DP rank served prompts while the others had nothing to do",
                not wrong and len(tried) == layout.dp,
                "; ".join(wrong) or f"{len(alone)} prompts on {len(tried)} ranks",
            )
        )
    return checks


def compare_first_tokens(
    reference: list[dict[str, Any]], other: list[dict[str, Any]], tie: float, tipped: int = 0
) -> tuple[Check, dict[str, Any]]:
    """Compare first tokens request by request.

    Greedy tokens flip where the reference's two best are nearly equal, so a different token counts as agreement when
    the reference gives it a log probability within ``tie`` of its own best. ``tipped`` of the others are let pass:
    where rounding has tipped a choice of an expert or a page, what follows is another forward pass.
    """
    known = {r["name"]: r for r in reference if "error" not in r}
    rows: list[dict[str, Any]] = []
    for request in other:
        if "error" in request or request["name"] not in known:
            continue
        expected = known[request["name"]]
        token, best = request["output"][0], expected["output"][0]
        logprobs = {int(t): p for t, p in expected["first_token_top"]}
        own = {int(t): p for t, p in request["first_token_top"]}
        # None: the reference does not even list the token.
        gap = logprobs[best] - logprobs[token] if best in logprobs and token in logprobs else None
        gap = 0.0 if token == best else gap
        shift = abs(own[best] - logprobs[best]) if best in own and best in logprobs else None
        rows.append({"name": request["name"], "token": token, "reference": best, "gap": gap, "logprob_shift": shift})
    equal = sum(row["token"] == row["reference"] for row in rows)
    bad = [row["name"] for row in rows if row["gap"] is None or row["gap"] > tie]
    detail = f"{equal} of {len(rows)} equal, {len(rows) - equal - len(bad)} near-ties" + (
        f"; differ: {bad}" if bad else ""
    )
    return Check("first tokens agree with the reference", len(bad) <= min(tipped, len(rows) - 1), detail), {
        "equal": equal,
        "rows": rows,
    }


def send_all(
    server: ServerProcess,
    base: str,
    layout: Layout,
    options: argparse.Namespace,
    deadline: float,
    say: Callable[[str], None],
) -> list[dict[str, Any]]:
    """Send the prompts one by one, then the batch; one result per request, with ``error`` where there is no answer.

    With DP attention each prompt goes to each rank in turn, and the batch is dealt out to the ranks.
    """
    results: list[dict[str, Any]] = []
    spread = list(range(layout.dp)) if layout.dp > 1 else [None]

    def one(name: str, length: int, seed: int, new_tokens: int, dp_rank: int | None) -> dict[str, Any]:
        name += f" DP{dp_rank}" if dp_rank is not None else ""
        result: dict[str, Any] = {"name": name, "prompt_tokens": length}
        left = deadline - time.monotonic()
        try:
            if left <= 0:
                raise TimeoutError("no time left")
            timeout = min(left, options.request_timeout)
            result |= generate(base, random_prompt(length, seed), new_tokens, timeout=timeout, dp_rank=dp_rank)
        except (OSError, ValueError) as error:
            result["error"] = f"{type(error).__name__}: {error}"[:300]
        results.append(result)
        say(f"{name}: {result.get('error') or format(result['latency_s'], '.2f') + ' s'}")
        return result

    for number, length in enumerate(options.prompts):
        for turn in range(options.repeat):
            for dp_rank in spread:
                before = len(server.text())
                seed = options.seed * 1000 + number
                result = one(f"{length} #{turn + 1}", length, seed, options.new, dp_rank)
                if dp_rank is not None:
                    served = parse_log(server.text()[before:]).ranks
                    result["dp_rank"] = dp_rank
                    result["ranks"] = [name for name in layout.ranks() if name in served and served[name].verified]

    batch = [("hold", options.hold, dp_rank) for dp_rank in spread] if options.hold and options.batch else []
    held = len(batch)
    for number, length in enumerate(options.batch):
        batch.append((f"batch {number + 1}", length, spread[number % len(spread)]))
    threads = [
        threading.Thread(
            target=one, args=(f"{name} ({length})", length, options.seed * 1000 + 500 + number, 1, dp_rank), daemon=True
        )
        for number, (name, length, dp_rank) in enumerate(batch)
    ]
    for number, thread in enumerate(threads):
        thread.start()
        # The first prompts must be running before the others queue up behind them, in their order.
        time.sleep(0.25 if number + 1 == held else 0.05)
    for thread in threads:
        thread.join()
    return results


@dataclass(frozen=True)
class Launch:
    """One server to start."""

    layout: Layout
    mode: str
    port: int

    @property
    def name(self) -> str:
        return f"{self.layout.name}-{self.mode}"


def model_of(options: argparse.Namespace, layout: Layout) -> Path:
    """The folder of a layout's model."""
    q_heads, kv_heads = layout.heads(options.q_heads, options.kv_heads)
    if (q_heads, kv_heads) == (make_tiny_m3.Q_HEADS, make_tiny_m3.KV_HEADS):
        return options.model
    return options.model.with_name(f"{options.model.name}-q{q_heads}kv{kv_heads}")


def server_command(options: argparse.Namespace, launch: Launch) -> list[str]:
    """The server's command line; ``--server-cmd`` replaces the program, its arguments stay."""
    program = shlex.split(options.server_cmd) if options.server_cmd else [sys.executable, "-m", "sglang.launch_server"]
    backend = ["--attention-backend", options.stock_backend if launch.mode == STOCK else "pageweaver"]
    address = ["--host", "127.0.0.1", "--port", str(launch.port)]
    if launch.layout.tp > 1 and launch.layout.dp == 1:
        # SGLang would pick a free port and take it half a minute later, when another server may have got it.
        address += ["--nccl-port", str(launch.port + PORT_STEP // 2)]
    model = ["--model-path", str(model_of(options, launch.layout))]
    return [
        *(*program, *model, *address, *SERVER_ARGUMENTS, *launch.layout.arguments(), *backend),
        *options.server_arguments,
    ]


def environment_of(options: argparse.Namespace, launch: Launch) -> dict[str, str]:
    """What a server's environment gets."""
    variables = {"PYTHONUNBUFFERED": "1", **plugin_variables(options.logs / "metadata" / launch.name)}
    if options.jobs > 1:
        # Servers that start together see each other's memory come and go; SGLang would take that for a fault.
        variables["SGLANG_ENABLE_TP_MEMORY_INBALANCE_CHECK"] = "0"
    if launch.mode != STOCK:
        variables |= {"PAGEWEAVER_MODE": launch.mode, "PAGEWEAVER_VERIFY_EVERY": "1"}
        if options.fresh_cache:
            variables["PAGEWEAVER_CACHE_DIR"] = str((options.logs / "kernel-cache").resolve())
    return variables


class Servers:
    """The servers that are up, so that one call from another thread ends them all."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._up: dict[ServerProcess, threading.Lock] = {}
        self._ended = False

    def start(self, server: ServerProcess) -> None:
        """Start one. Raises ServerError when they were told to end."""
        with self._lock:
            if self._ended:
                raise ServerError("told to end")
            self._up[server] = threading.Lock()
            server.__enter__()

    def stop(self, server: ServerProcess) -> None:
        """End one; safe when another thread does so too. Raises ServerError when a process survives."""
        with self._up[server]:
            server.stop()

    def end(self) -> None:
        """End them all at the same time; none starts afterwards."""
        with self._lock:
            self._ended = True
            with concurrent.futures.ThreadPoolExecutor(len(self._up) or 1) as pool:
                concurrent.futures.wait([pool.submit(self.stop, server) for server in self._up])


def run_launch(
    options: argparse.Namespace, launch: Launch, servers: Servers, deadline: float, say: Callable[[str], None]
) -> dict[str, Any]:
    """Serve once. Returns the result; ``failed`` holds the reason when the server never got ready or won't end."""
    variables = environment_of(options, launch)
    command = server_command(options, launch)
    log = options.logs / f"{launch.name}.log"
    server = ServerProcess(command, log, environment=variables, patience=options.patience)
    base, text = f"http://127.0.0.1:{launch.port}", ""
    result: dict[str, Any] = {"command": shlex.join(command), "environment": variables, "requests": []}
    try:
        choose_port(launch.port)  # or another server's answers would be taken for this one's
        servers.start(server)
        try:
            result["start_s"] = round(server.wait_ready(min(options.start_timeout, deadline - time.monotonic())), 1)
            wait_until_it_answers(launch.port)
            say(f"ready after {result['start_s']} s")
            result["requests"] = send_all(server, base, launch.layout, options, deadline, say)
        finally:
            # Before it is told to end: the ranks then complain about each other.
            text = server.text()
            servers.stop(server)
    except (AbError, ServerError, OSError) as error:
        result["failed"] = str(error)
    facts = parse_log(text)
    ranks = {name: facts.ranks[name] for name in launch.layout.ranks() if name in facts.ranks}
    result |= {
        "layout": asdict(launch.layout),
        "mode": launch.mode,
        "ranks": {name: rank.describe() for name, rank in ranks.items()},
        "compilations": facts.compilations,
        "verified": [{"rank": name, **call} for name, rank in ranks.items() for call in rank.verified],
        "log": excerpts(text),
    }
    model = model_of(options, launch.layout)
    checks = launch_checks(launch.layout, launch.mode, facts, result["requests"], model, options.max_nrms)
    checks.insert(0, Check("server started and ended cleanly", "failed" not in result, result.get("failed", "")))
    result["checks"] = [asdict(check) for check in checks]
    say("checked: " + ("ok" if all(check.ok for check in checks) else "FAILED"))
    return result


def cache_check(launches: list[Launch], results: dict[str, Any]) -> Check:
    """All processes together, starting on an empty cache, have compiled once."""
    users = [launch for launch in launches if launch.mode not in (STOCK, "native")]
    compiled = {launch.name: n for launch in users if (n := results[launch.name].get("compilations"))}
    loaded = sum(
        "kernels built and loaded" in (rank["status"] or "") or "kernels loaded" in (rank["status"] or "")
        for launch in users
        for rank in results[launch.name].get("ranks", {}).values()
    )
    wanted = sum(launch.layout.tp for launch in users)
    return Check(
        "kernels compiled once on an empty cache",
        sum(compiled.values()) == 1 and loaded == wanted,
        f"{sum(compiled.values())} compilations ({', '.join(compiled) or 'in no server'}), "
        f"{loaded} of {wanted} processes loaded the kernels",
    )


def check_all(options: argparse.Namespace, say: Callable[[str], None] = print) -> dict[str, Any]:
    """Run every launch within the budget and return the report."""
    deadline = time.monotonic() + options.budget
    pairs = [(layout, mode) for layout, modes in options.layouts.items() for mode in modes]
    launches = [Launch(layout, mode, options.port + PORT_STEP * n) for n, (layout, mode) in enumerate(pairs)]
    servers = Servers()
    if options.fresh_cache:
        shutil.rmtree(options.logs / "kernel-cache", ignore_errors=True)

    def run(launch: Launch) -> dict[str, Any]:
        if deadline - time.monotonic() < options.least:
            check = Check("was run", False, f"fewer than {options.least:.0f} s of the budget were left")
            say(f"{launch.name}: not run, {check.detail}")
            return {"requests": [], "checks": [asdict(check)]}
        say(f"{launch.name}: starting (log: {options.logs / launch.name}.log)")
        return run_launch(options, launch, servers, deadline, lambda text: say(f"{launch.name}: {text}"))

    with concurrent.futures.ThreadPoolExecutor(options.jobs) as pool:
        tasks = {launch.name: pool.submit(run, launch) for launch in launches}
        try:
            results = {name: task.result() for name, task in tasks.items()}
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            servers.end()
            raise

    comparisons = {}
    for layout, modes in options.layouts.items():
        names = {mode: f"{layout.name}-{mode}" for mode in modes}
        reference = next((names[m] for m in REFERENCE_MODES if m in names and results[names[m]]["requests"]), None)
        for name in names.values():
            result = results[name]
            if reference is not None and name != reference and result["requests"]:
                answers = (results[reference]["requests"], result["requests"])
                check, details = compare_first_tokens(*answers, options.tie, options.tipped)
                result["checks"].append(asdict(check))
                comparisons[name] = {"reference": reference, **details}
    checks = [asdict(cache_check(launches, results))] if options.fresh_cache else []
    passed = all(check["ok"] for result in (*results.values(), {"checks": checks}) for check in result["checks"])
    return {
        "environment": environment.describe(options.commit),
        "passed": passed,
        "checks": checks,
        "launches": results,
        "first_tokens": comparisons,
    }


def print_report(report: dict[str, Any], say: Callable[[str], None] = print) -> None:
    """The checks, for people."""

    def print_check(check: dict[str, Any]) -> None:
        mark = "ok    " if check["ok"] else "FAILED"
        say(f"  {mark} {check['name']}" + (f": {check['detail']}" if check["detail"] else ""))

    for name, result in report["launches"].items():
        say(f"\n{name}" + (f" (ready after {result['start_s']} s)" if "start_s" in result else ""))
        for check in result["checks"]:
            print_check(check)
    if report["checks"]:
        say("\nall together")
    for check in report["checks"]:
        print_check(check)
    say("\npassed" if report["passed"] else "\nFAILED")


def lengths(text: str) -> list[int]:
    return [int(part) for part in text.split(",") if part]


def parse_options(argv: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--model", type=Path, default=Path("build/m3tiny"), help="made when it is missing (default: %(default)s)"
    )
    parser.add_argument(
        "--q-heads",
        type=int,
        default=make_tiny_m3.Q_HEADS,
        help="of the model, where its layout has no other (default: %(default)s)",
    )
    parser.add_argument("--kv-heads", type=int, default=make_tiny_m3.KV_HEADS, help="likewise (default: %(default)s)")
    parser.add_argument("--modes", type=lambda s: s.split(","), default=list(MODES), help=f"default: {','.join(MODES)}")
    parser.add_argument(
        "--layouts", default="tp1", help="tpN, tpNdpM, with rep or pad or without (default: %(default)s)"
    )
    parser.add_argument("--jobs", type=int, default=1, help="servers at the same time (default: %(default)s)")
    parser.add_argument(
        "--fresh-cache", action="store_true", help="start on an empty kernel cache, which all servers share"
    )
    parser.add_argument("--stock", action="store_true", help="also serve without PageWeaver, as the reference")
    parser.add_argument("--stock-backend", default="fa3", help="its --attention-backend (default: %(default)s)")
    parser.add_argument("--prompts", type=lengths, default=[1024, 16384, 65536], help="default: 1024,16384,65536")
    parser.add_argument("--repeat", type=int, default=2, help="times each prompt is sent (default: %(default)s)")
    parser.add_argument("--new", type=int, default=4, help="tokens to generate for each prompt (default: %(default)s)")
    parser.add_argument("--batch", type=lengths, default=[16000, 3000, 7001, 2345, 129], help="concurrent prompts")
    parser.add_argument(
        "--hold", type=int, default=65536, help="prompt ahead of the batch, 0: none (default: %(default)s)"
    )
    parser.add_argument("--max-nrms", type=float, default=0.04, help="default: %(default)s")
    parser.add_argument(
        "--tie", type=float, default=0.5, help="largest log probability gap of a near-tie (default: %(default)s)"
    )
    parser.add_argument(
        "--tipped",
        type=int,
        default=0,
        help="first tokens of a launch that may differ by more than a near-tie (default: %(default)s); "
        "1 for a model of 8 query heads with an FP8 cache",
    )
    parser.add_argument("--budget", type=float, default=540, help="seconds for everything (default: %(default)s)")
    parser.add_argument("--start-timeout", type=float, default=300, help="seconds for one start (default: %(default)s)")
    parser.add_argument(
        "--request-timeout", type=float, default=300, help="seconds for one request (default: %(default)s)"
    )
    parser.add_argument(
        "--least", type=float, default=60, help="start no server with less time left (default: %(default)s s)"
    )
    parser.add_argument("--patience", type=float, default=8, help="seconds a server gets to end (default: %(default)s)")
    parser.add_argument(
        "--port",
        type=int,
        default=30001,
        help=f"of the first server, the next ones {PORT_STEP} apart (default: %(default)s)",
    )
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument(
        "--logs", type=Path, default=Path("build/serve"), help="folder of the servers' logs (default: %(default)s)"
    )
    parser.add_argument(
        "--json", type=Path, default=Path("benchmarks/results/h200/serve-tiny-m3.json"), help="default: %(default)s"
    )
    parser.add_argument("--commit", help="commit to note in the report, for a copy of the sources without its history")
    parser.add_argument("--server-cmd", help="program to run instead of `python -m sglang.launch_server`")
    parser.add_argument("server_arguments", nargs="*", help="more arguments for the server, after --")
    options = parser.parse_args(argv)
    texts = [text.partition(":") for text in options.layouts.split(",")]
    stock = [STOCK] if options.stock else []
    try:
        options.layouts = {
            Layout.parse(name): [*(own.split("+") if colon else options.modes), *stock] for name, colon, own in texts
        }
    except ValueError as error:
        parser.error(f"--layouts: {error}")
    try:
        make_tiny_m3.config(options.q_heads, options.kv_heads)
    except ValueError as error:
        parser.error(str(error))
    for layout in options.layouts:
        if problem := layout.problem(*layout.heads(options.q_heads, options.kv_heads)):
            parser.error(f"--layouts: {layout.name}: {problem}")
    if unknown := sorted({mode for modes in options.layouts.values() for mode in modes} - {*MODES, STOCK}):
        parser.error(f"--modes, --layouts: {', '.join(unknown)}: choose from {', '.join(MODES)}")
    for name, least in (("jobs", 1), ("tipped", 0)):
        if getattr(options, name) < least:
            parser.error(f"--{name}: at least {least}")
    return options


def say(text: str) -> None:
    # In one piece: print() would write the end of the line apart, and other threads' lines in between.
    sys.stdout.write(text + "\n")
    sys.stdout.flush()


def run(
    options: argparse.Namespace,
    check: Callable[[argparse.Namespace, Callable[[str], None]], dict[str, Any]],
    print_report: Callable[[dict[str, Any], Callable[[str], None]], None],
    models: dict[Path, tuple[int, int]],
) -> int:
    """Make the tiny models that are missing, check, and write and print the report; returns the exit code.

    ``models``: query and KV heads by folder.
    """
    for folder, (q_heads, kv_heads) in models.items():
        if not (folder / "config.json").exists():
            say(f"writing a tiny model with {in_words(q_heads, kv_heads)} to {folder}")
            make_tiny_m3.write_model(folder, q_heads=q_heads, kv_heads=kv_heads)
    with one_stop():
        report = check(options, say)
    options.json.parent.mkdir(parents=True, exist_ok=True)
    options.json.write_text(json.dumps(report, indent=1) + "\n")
    print_report(report, say)
    say(f"report: {options.json}")
    return 0 if report["passed"] else 1


def main(argv: Sequence[str] | None = None) -> int:
    options = parse_options(argv)
    models = {model_of(options, layout): layout.heads(options.q_heads, options.kv_heads) for layout in options.layouts}
    return run(options, check_all, print_report, models)


if __name__ == "__main__":
    sys.exit(main())
