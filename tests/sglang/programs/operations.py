"""Prefill through SGLang's own backend with metrics on: switched off and on, and with an error inside PageWeaver.

Reports who served what, and what SGLang's own /metrics endpoint then says.
"""

from __future__ import annotations

import asyncio
import json
import os
from pathlib import Path

from serving_process import start  # isort: skip
import torch
from sglang.srt.utils import add_prometheus_middleware, set_prometheus_multiproc_dir

set_prometheus_multiproc_dir()  # SGLang does this in the process that starts the others
server_args = start("--served-model-name", "m3", *(["--enable-metrics"] if os.environ.get("METRICS") else []))

from sparse_case import Case  # noqa: E402

from pageweaver_sglang.config import load_config  # noqa: E402
from pageweaver_sglang.plugin import control, step3  # noqa: E402
from tests.waiting import wait_for  # noqa: E402

folder = Path(os.environ["PAGEWEAVER_CONTROL_DIR"])
config = load_config()
case = Case(server_args, [300], [6], layers=3)
ours = case.backend.sparse.operations
report: dict = {"one per process": Case(server_args, [0], [2]).backend.sparse.operations is ours}


def switch(on: bool) -> None:
    control.write_switch(folder, on)
    wait_for(lambda: (ours.switch.reason is None) == on)


def published() -> None:
    """Wait until the thread has been through twice: then what was counted until now is in the metrics."""
    for _ in range(2):
        before = control.state_path(folder).stat().st_mtime_ns
        wait_for(lambda before=before: control.state_path(folder).stat().st_mtime_ns != before)


def forward(settings=config):
    first, _ = (case.prefill(settings, layer_id=layer)[0] for layer in (1, 2))
    return first


native = forward(config.model_copy(update={"mode": "native"}))
woven = forward()
switch(False)
report["off is native"] = torch.equal(forward(), native)
switch(True)
report["on is pageweaver"] = torch.equal(forward(), woven)

sparse_prefill = step3.sparse_prefill


def broken(*args, **kwargs):
    raise ValueError("a bug")


step3.sparse_prefill = broken
report["the call with the error is native"] = torch.equal(forward(), native)
step3.sparse_prefill = sparse_prefill
report["later calls are native"] = torch.equal(forward(), native)
report["disabled"] = ours.switch.reason
report["by arm"] = dict(case.backend.sparse.step3.stats.calls_by_arm)


def scrape() -> str:
    """What SGLang's own route answers."""
    from starlette.applications import Starlette

    app, sent = Starlette(), []
    add_prometheus_middleware(app)

    async def receive():
        return {"type": "http.request", "body": b"", "more_body": False}

    async def send(message):
        sent.append(message)

    scope = {"type": "http", "method": "GET", "path": "/metrics", "raw_path": b"/metrics", "query_string": b""}
    scope |= {"headers": [], "http_version": "1.1", "scheme": "http", "server": ("localhost", 80), "root_path": ""}
    asyncio.run(app(scope | {"client": ("localhost", 1)}, receive, send))
    return b"".join(message.get("body", b"") for message in sent).decode()


published()
report["metrics are made"] = ours.metrics is not None
report["metrics"] = [line for line in scrape().splitlines() if line.startswith("pageweaver:")]
Path(os.environ["REPORT"]).write_text(json.dumps(report))
