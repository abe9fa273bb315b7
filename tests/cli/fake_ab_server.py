"""Stands in for `python -m sglang.launch_server` in the tests of `pageweaver ab`: same log lines, known times.

A prompt of N tokens takes N milliseconds in native, 0.8 of that in union8, half in pageweaver; a quarter of native's
time, and the same amount less what is saved, is Step 3. FAKE_* variables make one arm misbehave (FAKE_ARM). Like the
server of serve_check's tests it has a helper that ignores SIGTERM; FAKE_PIDS gets both process ids. With
FAKE_TOGETHER=N a server says nothing before N of them have started, however slow the machine.
"""

import argparse
import collections
import json
import os
import signal
import subprocess
import sys
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from pageweaver_sglang.plugin import control

HELPER = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print('up', flush=True); time.sleep(600)"
MODE = os.environ["PAGEWEAVER_MODE"]
SPEED = {"native": 1.0, "union8": 0.8, "pageweaver": 0.5, "auto": 0.5}
LAYERS = 4
CONTROL = Path(os.environ["PAGEWEAVER_CONTROL_DIR"])
calls = collections.Counter()
lock = threading.Lock()
total = {"calls": 0, "tokens": 0, "seconds": 0.0}
activity = {"asked": 0, "total_prefill_uncached_tokens": 0}


def log(text: str) -> None:
    print(f"[2026-11-30 10:00:00] INFO pageweaver_sglang.plugin: {text}", flush=True)


def serving() -> str:
    """The arm as the switch in the control folder says."""
    return MODE if control.read_switch(CONTROL) is not False else "native"


def timed() -> bool:
    return control.read(CONTROL)[1] is True


def write_state() -> None:
    """Say which switch was followed, and the calls by arm."""
    with lock:
        wanted = control.stamp(CONTROL)
        arm = MODE if misbehaves("STUCK") else serving()
        state = {"pid": os.getpid(), "serving": arm, "followed": wanted, "calls": dict(calls), "timing": timed()}
        control.write_json(control.state_path(CONTROL), state)


def keep_state() -> None:
    """What the plugin's thread does."""
    while True:
        write_state()
        time.sleep(0.1)


def misbehaves(how: str) -> bool:
    """Whether this arm is to misbehave in this way: FAKE_<HOW>=arm."""
    return os.environ.get(f"FAKE_{how}") == MODE


class Handler(BaseHTTPRequestHandler):
    def log_message(self, *_):
        pass

    def do_GET(self):
        """/v1/loads, which only a comparison side by side asks for."""
        assert self.path == "/v1/loads?include=core"
        with lock:
            activity["asked"] += 1
            activity["total_prefill_uncached_tokens"] += 7 if misbehaves("MEDDLE") else 0
        if misbehaves("DIE_IDLE") and activity["asked"] == 3:
            print("RuntimeError: an illegal memory access", flush=True)
            os._exit(3)
        load = {
            "num_running_reqs": int(misbehaves("BUSY")),
            "num_waiting_reqs": 0,
            "total_prefill_uncached_tokens": activity["total_prefill_uncached_tokens"],
            "max_total_num_tokens": 200 if misbehaves("SMALL_POOL") else 300,
        }
        self.send_response(200)
        self.end_headers()
        self.wfile.write(json.dumps({"loads": [] if misbehaves("SILENT") else [load]}).encode())

    def do_POST(self):
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        length = len(body["input_ids"])
        with open(os.environ["FAKE_REQUESTS"], "a") as out:
            out.write(json.dumps([serving(), length, body["input_ids"][0], "skip_special_tokens" in str(body)]) + "\n")
        if misbehaves("REFUSE"):
            self.send_error(400, "the prompt is too long")
            return
        if misbehaves("CRASH") and "skip_special_tokens" in str(body):
            os._exit(3)
        arm = serving()
        seconds = length / 1000 * SPEED[arm]
        with lock:
            calls["native" if misbehaves("SECRETLY_NATIVE") else {"auto": "pageweaver"}.get(arm, arm)] += LAYERS
            activity["total_prefill_uncached_tokens"] += length
        if timed():
            with lock:
                total["calls"] += LAYERS
                total["tokens"] += LAYERS * length
                total["seconds"] += length / 1000 * (0.25 - (1 - SPEED[arm]) / 4)
                log(
                    f"pageweaver timing: process {os.getpid()} calls {total['calls']} tokens {total['tokens']} "
                    f"step3 {total['seconds']:.6f} s"
                )
        if misbehaves("FALLBACK"):
            log("pageweaver: SGLang's own Step 3 serves calls with: attention sink")
        write_state()  # before the answer, so that whoever has that finds the call counted, however slow the machine
        ttft = 0.0 if misbehaves("NO_TEXT") and body["input_ids"][0] % 4 == 0 else seconds
        meta = {"fake_ttft": ttft, "cached_tokens": 128 if misbehaves("CACHED") else 0}
        self.send_response(200)
        self.end_headers()
        self.wfile.write(json.dumps({"meta_info": meta}).encode())


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--port", type=int)
    options, _ = parser.parse_known_args()
    helper = subprocess.Popen([sys.executable, "-c", HELPER], start_new_session=True, stdout=subprocess.PIPE)
    helper.stdout.readline()
    with open(os.environ["FAKE_PIDS"], "a") as out:
        out.write(f"{os.getpid()} {helper.pid}\n")
    while len(Path(os.environ["FAKE_PIDS"]).read_text().splitlines()) < int(os.environ.get("FAKE_TOGETHER", 1)):
        time.sleep(0.02)
    print("Triton autotuning for function _gqa_share_sparse_fwd_kernel,\nwith key as (1, 128),\nfinished after 1.20s,")
    print("best config selected: num_warps: 4, num_stages: 3;", flush=True)
    mode = "native" if misbehaves("WRONG_MODE") else MODE
    log(f"pageweaver STATUS: mode {mode}, engine stream, window 128, guard window, kernels loaded")
    if misbehaves("DIE"):
        time.sleep(0.3)
        sys.exit("RuntimeError: no kernel image is available")
    if misbehaves("HANG"):
        time.sleep(600)
    threading.Thread(target=keep_state, daemon=True).start()
    log("The server is fired up and ready to roll!")
    time.sleep(0.2)  # as SGLang, which logs it before it listens when its warm-up is skipped
    server = ThreadingHTTPServer(("127.0.0.1", options.port), Handler)
    signal.signal(signal.SIGTERM, lambda *_: os._exit(0))
    server.serve_forever()


if __name__ == "__main__":
    main()
