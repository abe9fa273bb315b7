"""Makes this process one of a server that PageWeaver serves on the CPU, up to where SGLang would load the model.

Import it first: Triton reads TRITON_INTERPRET when kernels are decorated.
"""

from __future__ import annotations

import logging
import os

os.environ["TRITON_INTERPRET"] = "1"

import fake_runner
import triton_cpu
from sglang.srt.plugins import load_plugins

SERVED = ("--model-path", "dummy", "--device", "cpu", "--attention-backend", "pageweaver")


def start(*arguments: str):
    """Load SGLang's plugins and return the server arguments, resolved and published as SGLang would."""
    load_plugins()
    triton_cpu.prepare()
    server_args = fake_runner.resolve(*SERVED, *arguments)
    logging.basicConfig(level=logging.INFO, format="%(message)s", force=True)
    fake_runner.publish(server_args)
    return server_args
