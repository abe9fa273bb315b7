#!/usr/bin/env python3
"""Serve the tiny MiniMax-M3 with a real SGLang server in each of PageWeaver's modes, and check what happened.

    serve_check.py                                          # modes pageweaver, union8, native
    serve_check.py --modes pageweaver --stock               # one mode, and SGLang without PageWeaver (fa3)
    serve_check.py -- --mem-fraction-static 0.4             # more arguments for the server

For each mode it starts `python -m sglang.launch_server --attention-backend pageweaver` (the page size is left to the
plugin) with PAGEWEAVER_MODE=<mode> and PAGEWEAVER_VERIFY_EVERY=1, so that the server computes every Step 3 call with
SGLang's own function too and logs the difference (the latencies include that, so they are no measure of speed). Prompts
of 1K, 16K and 64K tokens go one after the other, then a batch of mixed lengths at the same time, queued up behind a
long prompt so that the scheduler packs them together.

Checked: the STATUS line; every request answered; PageWeaver served Step 3 on every sparse layer, with no call left to
SGLang's function; NRMS of every compared call at most --max-nrms; no error in the log; the servers gone afterwards; and
first tokens that agree with the native mode, or are near-ties there. Exit code 0 when all of it holds.
"""

from __future__ import annotations

import argparse
import json
import re
import shlex
import signal
import statistics
import sys
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from pageweaver_sglang.bench import environment
from pageweaver_sglang.bench.server import ServerError, ServerProcess, generate, random_prompt
from pageweaver_sglang.serving_ab.launch import plugin_variables
from pageweaver_sglang.serving_ab.serverlog import FALLBACK, STATUS

ROOT = Path(__file__).resolve().parents[1]
MODES = ("pageweaver", "union8", "native")
STOCK = "stock"
REFERENCE_MODES = (STOCK, "native")
"""Modes whose first tokens the others are compared with, the first one that ran."""

SERVER_ARGUMENTS = (
    *("--trust-remote-code", "--kv-cache-dtype", "fp8_e4m3", "--disable-radix-cache", "--context-length", "131072"),
    *("--max-total-tokens", "300032", "--max-running-requests", "16", "--mem-fraction-static", "0.5"),
    *("--chunked-prefill-size", "16384", "--max-prefill-tokens", "16384", "--sampling-backend", "pytorch"),
    *("--cuda-graph-backend-decode", "disabled", "--cuda-graph-backend-prefill", "disabled"),
)

# What the plugin logs (pageweaver_sglang/plugin: backend.status_line, step3.Step3).
VERIFY = re.compile(
    r"pageweaver verify: layer (?P<layer>\d+) call \d+ tokens (?P<tokens>\d+) requests (?P<requests>\d+) "
    r"kv_heads (?P<kv_heads>\d+) nrms (?P<nrms>[\d.]+|nan|inf)%? max error (?P<max_error>[^ ]+) "
    r"cosine (?P<cosine>[^ ]+)(?: skipped rows (?P<skipped>\d+))?"
)
SUMMARY = re.compile(r"pageweaver calls: \{(?P<calls>[^}]*)\} fallbacks: \{(?P<fallbacks>.*)\}")
ERROR = re.compile(
    r"Traceback \(most recent call last\)|CUDA error|illegal memory access|out of memory|Scheduler hit an"
)
EXCERPT = re.compile(r"pageweaver[: ]|fired up and ready|Prefill batch|attention_backend=|" + ERROR.pattern)


@dataclass
class LogFacts:
    """What a server's log says about PageWeaver."""

    status: str | None = None
    mode: str | None = None
    verified: list[dict[str, float]] = field(default_factory=list)
    calls_by_layer: dict[int, int] = field(default_factory=dict)
    fallbacks: list[str] = field(default_factory=list)
    errors: list[str] = field(default_factory=list)
    most_requests_in_a_call: int = 0

    def nrms(self) -> dict[str, float] | None:
        """NRMS of the compared calls, as fractions; None when none was compared."""
        values = [call["nrms"] for call in self.verified]
        if not values:
            return None
        return {"max": max(values), "median": statistics.median(values), "mean": statistics.fmean(values)}


def parse_log(text: str) -> LogFacts:
    """Read what the plugin logged. The counters are cumulative: the last summary counts."""
    facts = LogFacts()
    for line in text.splitlines():
        if found := STATUS.search(line):
            facts.status, facts.mode = found["text"], found["mode"]
        elif found := VERIFY.search(line):
            nrms = float(found["nrms"]) / 100
            facts.verified.append(
                {
                    "layer": int(found["layer"]),
                    "tokens": int(found["tokens"]),
                    "requests": int(found["requests"]),
                    "nrms": nrms if nrms == nrms else float("inf"),
                    "max_error": float(found["max_error"]),
                    "cosine": float(found["cosine"]),
                    "skipped_rows": int(found["skipped"] or 0),
                }
            )
            facts.most_requests_in_a_call = max(facts.most_requests_in_a_call, int(found["requests"]))
        elif found := SUMMARY.search(line):
            pairs = (pair.split(":") for pair in found["calls"].split(",") if pair.strip())
            facts.calls_by_layer = {int(layer): int(count) for layer, count in pairs}
            if found["fallbacks"].strip():
                facts.fallbacks.append(found["fallbacks"].strip())
        elif found := FALLBACK.search(line):
            facts.fallbacks.append(found["reason"])
        if ERROR.search(line):
            facts.errors.append(line.strip()[:300])
    facts.fallbacks = list(dict.fromkeys(facts.fallbacks))
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


@dataclass
class Check:
    """One thing that had to hold."""

    name: str
    ok: bool
    detail: str = ""


def mode_checks(
    mode: str, facts: LogFacts, requests: list[dict[str, Any]], layers: list[int], max_nrms: float
) -> list[Check]:
    """What had to hold in one mode."""
    failed = [f"{r['name']}: {r['error']}" for r in requests if "error" in r]
    checks = [
        Check(
            "every request answered", bool(requests) and not failed, "; ".join(failed) or f"{len(requests)} requests"
        ),
        Check("no error in the log", not facts.errors, "; ".join(facts.errors[:3])),
    ]
    if mode == STOCK:
        return checks
    checks.append(Check("STATUS line names the mode", facts.mode == mode, facts.status or "no STATUS line"))
    if mode == "native":
        return checks
    missing = [layer for layer in layers if not facts.calls_by_layer.get(layer)]
    served = ", ".join(f"layer {layer}: {count}" for layer, count in sorted(facts.calls_by_layer.items()))
    nrms = facts.nrms()
    return [
        *checks,
        Check("PageWeaver served every sparse layer", not missing, served or "no call served"),
        Check("no call left to SGLang's Step 3", not facts.fallbacks, "; ".join(facts.fallbacks)),
        Check(
            f"NRMS of every compared call at most {max_nrms:.1%}",
            nrms is not None and nrms["max"] <= max_nrms,
            "no call compared" if nrms is None else f"{len(facts.verified)} calls, largest {nrms['max']:.3%}",
        ),
        Check(
            "a call with several requests was compared",
            facts.most_requests_in_a_call > 1,
            f"largest: {facts.most_requests_in_a_call} requests",
        ),
    ]


def compare_first_tokens(
    reference: list[dict[str, Any]], other: list[dict[str, Any]], tie: float
) -> tuple[Check, dict[str, Any]]:
    """Compare first tokens request by request.

    Greedy tokens flip where the reference's two best are nearly equal, so a different token counts as agreement when
    the reference gives it a log probability within ``tie`` of its own best.
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
    return Check("first tokens agree with the reference", bool(rows) and not bad, detail), {
        "equal": equal,
        "rows": rows,
    }


def send_all(
    base: str, options: argparse.Namespace, deadline: float, say: Callable[[str], None]
) -> list[dict[str, Any]]:
    """Send the prompts one by one, then the batch; one result per request, with ``error`` where there is no answer."""
    results: list[dict[str, Any]] = []

    def one(name: str, length: int, seed: int, new_tokens: int) -> None:
        result: dict[str, Any] = {"name": name, "prompt_tokens": length}
        left = deadline - time.monotonic()
        try:
            if left <= 0:
                raise TimeoutError("no time left")
            result |= generate(base, random_prompt(length, seed), new_tokens, timeout=left)
        except (OSError, ValueError) as error:
            result["error"] = f"{type(error).__name__}: {error}"[:300]
        results.append(result)
        say(f"{name}: {result.get('error') or format(result['latency_s'], '.2f') + ' s'}")

    for number, length in enumerate(options.prompts):
        for turn in range(options.repeat):
            one(f"{length} #{turn + 1}", length, options.seed * 1000 + number, options.new)

    batch = [("hold", options.hold)] if options.hold and options.batch else []
    batch += [(f"batch {number}", length) for number, length in enumerate(options.batch, start=1)]
    threads = [
        threading.Thread(
            target=one, args=(f"{name} ({length})", length, options.seed * 1000 + 500 + number, 1), daemon=True
        )
        for number, (name, length) in enumerate(batch)
    ]
    for number, thread in enumerate(threads):
        thread.start()
        # The first prompt must be running before the others queue up behind it, in their order.
        time.sleep(0.25 if number == 0 else 0.05)
    for thread in threads:
        thread.join()
    return results


def server_command(options: argparse.Namespace, mode: str) -> list[str]:
    """The server's command line; ``--server-cmd`` replaces the program, its arguments stay."""
    program = shlex.split(options.server_cmd) if options.server_cmd else [sys.executable, "-m", "sglang.launch_server"]
    backend = options.stock_backend if mode == STOCK else "pageweaver"
    address = ["--host", "127.0.0.1", "--port", str(options.port)]
    model = ["--model-path", str(options.model)]
    return [*program, *model, *address, *SERVER_ARGUMENTS, "--attention-backend", backend, *options.server_arguments]


def run_mode(options: argparse.Namespace, mode: str, deadline: float, say: Callable[[str], None]) -> dict[str, Any]:
    """Serve one mode. Returns its result; ``failed`` holds the reason when the server never got ready or won't end."""
    variables = {"PYTHONUNBUFFERED": "1", **plugin_variables(options.logs / "metadata")}
    if mode != STOCK:
        variables |= {"PAGEWEAVER_MODE": mode, "PAGEWEAVER_VERIFY_EVERY": "1"}
    log = options.logs / f"{mode}.log"
    server = ServerProcess(server_command(options, mode), log, environment=variables, patience=options.patience)
    result: dict[str, Any] = {"command": shlex.join(server.command), "environment": variables, "requests": []}
    try:
        with server:
            result["start_s"] = round(server.wait_ready(min(options.start_timeout, deadline - time.monotonic())), 1)
            say(f"ready after {result['start_s']} s")
            result["requests"] = send_all(f"http://127.0.0.1:{options.port}", options, deadline, say)
    except ServerError as error:
        result["failed"] = str(error)
    text = server.text()
    facts = parse_log(text)
    result |= {
        "status": facts.status,
        "calls_by_layer": facts.calls_by_layer,
        "fallbacks": facts.fallbacks,
        "verified_calls": len(facts.verified),
        "nrms": facts.nrms(),
        "verified": facts.verified,
        "log": excerpts(text),
    }
    checks = mode_checks(mode, facts, result["requests"], sparse_layers(options.model), options.max_nrms)
    checks.insert(0, Check("server started and ended cleanly", "failed" not in result, result.get("failed", "")))
    result["checks"] = [asdict(check) for check in checks]
    return result


def check_all(options: argparse.Namespace, say: Callable[[str], None] = print) -> dict[str, Any]:
    """Run every mode within the budget and return the report."""
    deadline = time.monotonic() + options.budget
    modes = [*options.modes, *([STOCK] if options.stock else [])]
    results: dict[str, Any] = {}
    for mode in modes:
        if deadline - time.monotonic() < options.least:
            check = Check("mode was run", False, f"fewer than {options.least:.0f} s of the budget were left")
            results[mode] = {"requests": [], "checks": [asdict(check)]}
            say(f"{mode}: not run, {check.detail}")
            continue
        say(f"{mode}: starting (log: {options.logs / mode}.log)")
        results[mode] = run_mode(options, mode, deadline, lambda text, mode=mode: say(f"{mode}: {text}"))

    comparisons = {}
    reference = next((mode for mode in REFERENCE_MODES if results.get(mode, {}).get("requests")), None)
    for mode, result in results.items():
        if reference is not None and mode != reference and result["requests"]:
            check, details = compare_first_tokens(results[reference]["requests"], result["requests"], options.tie)
            result["checks"].append(asdict(check))
            comparisons[mode] = {"reference": reference, **details}
    passed = all(check["ok"] for result in results.values() for check in result["checks"])
    return {
        "environment": environment.describe(options.commit),
        "passed": passed,
        "modes": results,
        "first_tokens": comparisons,
    }


def print_report(report: dict[str, Any], say: Callable[[str], None] = print) -> None:
    """The checks, for people."""
    for mode, result in report["modes"].items():
        say(f"\n{mode}: {result.get('status') or 'no STATUS line'}")
        for check in result["checks"]:
            say(
                f"  {'ok    ' if check['ok'] else 'FAILED'} {check['name']}"
                + (f": {check['detail']}" if check["detail"] else "")
            )
    say("\npassed" if report["passed"] else "\nFAILED")


def lengths(text: str) -> list[int]:
    return [int(part) for part in text.split(",") if part]


def parse_options(argv: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--model", type=Path, default=Path("build/m3tiny"), help="made when it is missing (default: %(default)s)"
    )
    parser.add_argument("--modes", type=lambda s: s.split(","), default=list(MODES), help=f"default: {','.join(MODES)}")
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
    parser.add_argument("--budget", type=float, default=540, help="seconds for everything (default: %(default)s)")
    parser.add_argument("--start-timeout", type=float, default=300, help="seconds for one start (default: %(default)s)")
    parser.add_argument(
        "--least", type=float, default=60, help="start no mode with less time left (default: %(default)s s)"
    )
    parser.add_argument("--patience", type=float, default=8, help="seconds a server gets to end (default: %(default)s)")
    parser.add_argument("--port", type=int, default=30001)
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
    if unknown := sorted(set(options.modes) - set(MODES)):
        parser.error(f"--modes: {', '.join(unknown)}: choose from {', '.join(MODES)}")
    return options


def main(argv: Sequence[str] | None = None) -> int:
    options = parse_options(argv)
    if not (options.model / "config.json").exists():
        from make_tiny_m3 import write_model

        print(f"writing the tiny model to {options.model}", flush=True)
        write_model(options.model)

    def say(text: str) -> None:
        print(text, flush=True)

    # End the server too when this script is told to end.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    report = check_all(options, say)
    options.json.parent.mkdir(parents=True, exist_ok=True)
    options.json.write_text(json.dumps(report, indent=1) + "\n")
    print_report(report, say)
    print(f"report: {options.json}")
    return 0 if report["passed"] else 1


if __name__ == "__main__":
    sys.exit(main())
