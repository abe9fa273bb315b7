"""Stands in for `python -m sglang.launch_server` in the tests of serve_check.py and soak.py: log lines and answers.

FAKE_* variables make it misbehave. It starts a helper process in a session of its own that ignores SIGTERM, as a stuck
scheduler would; FAKE_PIDS names a file that gets both process ids. With --tp and --dp it logs for every rank.
"""

import argparse
import contextlib
import json
import os
import signal
import subprocess
import sys
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import ClassVar

# It keeps FAKE_SCHEDULER_LEAK bytes for every sample of memory that soak.py takes, however seldom (FAKE_SMI has a line
# for each), in the modes that FAKE_LEAKS_IN names (else in all).
HELPER = """
import os, signal, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
print('up', flush=True)
modes = os.environ.get('FAKE_LEAKS_IN')
leak = int(os.environ.get('FAKE_SCHEDULER_LEAK', 0)) if not modes or os.environ['PAGEWEAVER_MODE'] in modes else 0
kept, end = [], time.monotonic() + 600
while time.monotonic() < end:
    if leak:
        samples = open(os.environ['FAKE_SMI'], 'rb').read().count(b'\\n')
        kept += [b'x' * leak for _ in range(samples - len(kept))]
    time.sleep(0.02)
"""
LAYERS = (2, 3, 4, 5)


def log(text: str, rank: str = "") -> None:
    # In one piece: print() would write the end of the line apart, and other threads' lines in between.
    sys.stdout.write(f"[2026-11-30 10:00:00{rank}] INFO pageweaver_sglang.plugin: {text}\n")
    sys.stdout.flush()


def ranks(dp_rank: int | None = None) -> list[str]:
    """What SGLang puts behind the time, for the ranks that serve a request of ``dp_rank`` (None: all)."""
    if options.tp == 1:
        return [""]
    size = options.tp // options.dp
    every = [(f" DP{n // size}" if options.dp > 1 else "") + f" TP{n}" for n in range(options.tp)]
    return every if dp_rank is None else every[dp_rank * size : (dp_rank + 1) * size]


def heads_of_a_rank() -> tuple[int, int]:
    """Query and KV heads, as SGLang's M3 deals them out; FAKE_HEADS is taken off the query heads."""
    config = json.loads((Path(options.model_path) / "config.json").read_text())
    size = options.tp // options.dp
    q_heads, kv_heads = config["num_attention_heads"] // size, max(1, config["num_key_value_heads"] // size)
    return q_heads - int(os.environ.get("FAKE_HEADS", 0)), kv_heads


def wrong_with(text: bytes) -> str | None:
    """Why SGLang would refuse a body, or None."""
    try:
        body = json.loads(text)
    except ValueError:
        return "no JSON"
    if not all(isinstance(token, int) for token in body["input_ids"]):
        return "input_ids must be integers"
    if options.context_length and len(body["input_ids"]) >= options.context_length:
        return "longer than the context"
    if max(body.get("token_ids_logprob", [0])) > 1000 or body["sampling_params"].get("top_p", 1) > 1:
        return "out of range"
    return None


counting = threading.Lock()


class Handler(BaseHTTPRequestHandler):
    calls = 0
    kept: ClassVar[list[bytes]] = []

    def log_message(self, *_):
        pass

    def do_POST(self):
        text = self.rfile.read(int(self.headers["Content-Length"]))
        if (reason := wrong_with(text)) and "FAKE_TAKES_ALL" not in os.environ:
            self.send_error(400, reason)
            return
        if reason:
            text = json.dumps({"input_ids": [300], "sampling_params": {"max_new_tokens": 1}})
        body = json.loads(text)
        prompt, new = body["input_ids"], body["sampling_params"]["max_new_tokens"]
        with counting:
            Handler.calls += 1
            number = Handler.calls
        if leak := int(os.environ.get("FAKE_LEAK", 0)):  # for every sample of memory, as the helper's
            samples = Path(os.environ["FAKE_SMI"]).read_bytes().count(b"\n")
            Handler.kept += [b"x" * leak for _ in range(samples - len(Handler.kept))]
        if number == int(os.environ.get("FAKE_DIE_AFTER", -1)):
            print("CUDA error: an illegal memory access was encountered", flush=True)
            os._exit(3)
        if body.get("stream"):
            self.stream()
            return
        if os.environ.get("PAGEWEAVER_MODE", "native") != "native":
            nrms = os.environ.get("FAKE_NRMS", "2.671%")
            q_heads, kv_heads = heads_of_a_rank()
            serving = ranks(None if "FAKE_WANDERS" in os.environ else body.get("routed_dp_rank"))
            for rank in serving if "FAKE_LAZY" not in os.environ else serving[:1]:
                for layer in LAYERS:
                    log(
                        f"pageweaver verify: layer {layer} call {Handler.calls} tokens {len(prompt)} requests 2 "
                        f"q_heads {q_heads} kv_heads {kv_heads} nrms {nrms} max error 4.883e-02 cosine 0.999643",
                        rank,
                    )
                    counts = {layer: Handler.calls for layer in LAYERS}
                    fallbacks = {"attention sink": 1} if "FAKE_FALLBACK" in os.environ else {}
                    log(f"pageweaver calls: {counts} fallbacks: {fallbacks}", rank)
                    if len(prompt) % 2 and (options.moe_dense_tp_size or options.dp > 1) and options.tp > options.dp:
                        left = os.environ.get("FAKE_PADDING", "0")
                        log(f"pageweaver padding: layer {layer} rows 1 not zero {left}", rank)
        first = sum(prompt) % 700
        top = [[-0.7, first, None], [-0.9, first + 1, None]]
        flip = os.environ.get("FAKE_FLIP", "").split(":")
        if flip[0] == os.environ.get("PAGEWEAVER_MODE") and flip[2:] in ([], [str(Handler.calls)]):
            first += int(flip[1])
        answer = {"output_ids": [first] * new, "meta_info": {"output_top_logprobs": [top] * new}}
        self.send_response(200)
        self.end_headers()
        with contextlib.suppress(OSError):  # the client has hung up
            self.wfile.write(json.dumps(answer).encode())

    def stream(self):
        """Tokens until the client hangs up."""
        self.send_response(200)
        self.end_headers()
        with contextlib.suppress(OSError):
            for _ in range(200):
                self.wfile.write(b'data: {"output_ids": [1]}\n\n')
                time.sleep(0.02)


def compile_once(cache: Path) -> None:
    try:
        cache.mkdir()
    except FileExistsError:
        if "FAKE_COMPILES" not in os.environ:
            return
    print("pageweaver: compiling the CUDA kernels for sm_90a with nvcc 13.0.88, once ...", end="", flush=True)


def main() -> None:
    helper = subprocess.Popen(
        ["sglang::scheduler", "-c", HELPER],  # as SGLang's schedulers call themselves
        executable=sys.executable,
        start_new_session=True,
        stdout=subprocess.PIPE,
    )
    helper.stdout.readline()
    with open(os.environ["FAKE_PIDS"], "a") as out:
        out.write(f"{os.getpid()} {helper.pid}\n")
    if options.attention_backend == "pageweaver":
        mode = os.environ["PAGEWEAVER_MODE"]
        if mode != "native" and "PAGEWEAVER_CACHE_DIR" in os.environ:
            compile_once(Path(os.environ["PAGEWEAVER_CACHE_DIR"]))
        for rank in ranks():
            log(f"pageweaver STATUS: mode {mode}, engine stream, guard window, kernels loaded, dense layers FA", rank)
    if "FAKE_DIE" in os.environ:
        time.sleep(0.5)
        sys.exit("RuntimeError: no kernel image is available")
    if "FAKE_HANG" in os.environ:
        time.sleep(600)
    server = ThreadingHTTPServer(("127.0.0.1", options.port), Handler)
    log("The server is fired up and ready to roll!")
    signal.signal(signal.SIGTERM, lambda *_: os._exit(0))
    server.serve_forever()


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--port", type=int)
    parser.add_argument("--attention-backend")
    parser.add_argument("--model-path")
    parser.add_argument("--tp", type=int, default=1)
    parser.add_argument("--dp", type=int, default=1)
    parser.add_argument("--moe-dense-tp-size", type=int)
    parser.add_argument("--context-length", type=int)
    options, _ = parser.parse_known_args()
    main()
