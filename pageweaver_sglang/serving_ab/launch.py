"""Command lines and environments of the servers and of SGLang's benchmark client."""

from __future__ import annotations

import contextlib
import importlib.metadata
import importlib.util
import json
import math
import os
import random
import socket
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from .client import PACKAGE_ROOT
from .settings import AbError, Cell, Settings
from .switching import control_folder

HOST = "127.0.0.1"

CLIENT_MODULES = ("sglang.benchmark.serving", "sglang.bench_serving")
"""SGLang's client for online serving: its place from 0.5.17 on, and the older one, which these still forward."""

# Set here, so they cannot be passed on to the servers.
_OWN_ARGUMENTS = ("--model-path", "--model", "--host", "--port")
_BACKEND_ARGUMENTS = ("--attention-backend", "--prefill-attention-backend")
_MEMORY = "--mem-fraction-static"
_MOST_MEMORY = 0.9
"""Of a GPU, for all servers together that run side by side; the rest is for their CUDA contexts and activations."""
_ONE_SERVER_EACH = ("--nccl-port", "--dist-init-addr", "--nccl-init-addr")

# The client counts the first token when its text arrives, and a special token has none by default: the request would
# look as if it had no first token at all.
_ONE_TOKEN = {"temperature": 0.0, "max_new_tokens": 1, "ignore_eos": True, "skip_special_tokens": False}


def plugin_variables(folder: Path) -> dict[str, str]:
    """Variables with which a server finds the plugin: none where it is installed.

    From a mere checkout (a machine without a network, say) ``folder`` gets the metadata that an installation would
    leave, since SGLang finds plugins by their entry point.
    """
    from pageweaver_sglang import __version__

    points = importlib.metadata.entry_points(group="sglang.srt.plugins")
    if any(point.name == "pageweaver" for point in points):
        return {}
    metadata = folder / f"pageweaver_sglang-{__version__}.dist-info"
    metadata.mkdir(parents=True, exist_ok=True)
    (metadata / "METADATA").write_text(f"Metadata-Version: 2.1\nName: pageweaver_sglang\nVersion: {__version__}\n")
    (metadata / "entry_points.txt").write_text("[sglang.srt.plugins]\npageweaver = pageweaver_sglang.plugin:register\n")
    path = [str(PACKAGE_ROOT), str(folder.resolve()), os.environ.get("PYTHONPATH", "")]
    return {"PYTHONPATH": os.pathsep.join(entry for entry in path if entry)}


def server_variables(settings: Settings, arm: str) -> dict[str, str]:
    """What a server's environment gets: the arm, switched on, and everything off that would cost time.

    Raises AbError when the folder for the switch can't be made.
    """
    variables = {
        "PYTHONUNBUFFERED": "1",
        # Triton then logs which configuration it chose for which kernel.
        "TRITON_PRINT_AUTOTUNING": "1",
        "PAGEWEAVER_MODE": arm,
        "PAGEWEAVER_VERIFY_EVERY": "0",
        "PAGEWEAVER_CAPTURE_DIR": "null",
        "PAGEWEAVER_TIMING": "false",
        # Not the user's own, whose switch may be off.
        "PAGEWEAVER_CONTROL_DIR": str(control_folder(settings.folder, arm)),
        **plugin_variables(settings.folder / "metadata"),
    }
    if settings.side_by_side:
        # Servers that start together see each other's memory come and go; SGLang would take that for a fault.
        variables["SGLANG_ENABLE_TP_MEMORY_INBALANCE_CHECK"] = "0"
    return variables


def _value(arguments: Sequence[str], name: str) -> str | None:
    """The value of an argument, None when it is not given."""
    for number, argument in enumerate(arguments):
        if argument == name:
            return arguments[number + 1] if number + 1 < len(arguments) else ""
        if argument.startswith(name + "="):
            return argument.partition("=")[2]
    return None


def check_server_arguments(arguments: Sequence[str]) -> None:
    """Raise AbError for arguments that this command sets itself, or that would keep PageWeaver from acting."""
    for name in _OWN_ARGUMENTS:
        if _value(arguments, name) is not None:
            raise AbError(f"server arguments: {name} is set by this command; use its own options")
    backends = [value for name in _BACKEND_ARGUMENTS if (value := _value(arguments, name)) is not None]
    if backends and "pageweaver" not in backends:
        raise AbError(
            f"server arguments: with attention backend {', '.join(backends)} PageWeaver would never act. To choose the "
            f"backend of the dense layers add --prefill-attention-backend pageweaver."
        )


def check_side_by_side(settings: Settings) -> None:
    """Raise AbError for server arguments with which the arms' servers can't run at the same time."""
    given, arms = settings.server_arguments, len(settings.arms)
    for name in _ONE_SERVER_EACH:
        if _value(given, name) is not None:
            raise AbError(f"server arguments: {name}: servers side by side need one each, which this command chooses")
    if "--enable-dp-attention" in given:
        raise AbError(
            "server arguments: --enable-dp-attention: the ranks of an idle server keep exchanging their state, and "
            "with --sleep-on-idle wait for each other's sleep; leave out --side-by-side"
        )
    if _value(given, "--max-total-tokens") is None:
        raise AbError(
            "side by side: the server arguments must hold --max-total-tokens: a server takes what it finds free for "
            "its KV pool, so that servers which start together would get pools of different sizes"
        )
    text = _value(given, _MEMORY)
    if text is None:
        return
    try:
        fraction = float(text)
    except ValueError:
        raise AbError(f"server arguments: {_MEMORY}: a number, got {text!r}") from None
    if fraction * arms > _MOST_MEMORY:
        raise AbError(
            f"server arguments: {_MEMORY} {text} is for one server; {arms} side by side would take "
            f"{fraction * arms:.2f} of the memory, more than {_MOST_MEMORY}: at most {_share(arms)}"
        )


def _share(arms: int) -> str:
    """The part of a GPU's memory that each of ``arms`` servers can have, rounded down to 0.01."""
    return f"{math.floor(_MOST_MEMORY / arms * 100) / 100:.2f}"


def server_command(settings: Settings, port: int, nccl_port: int | None = None) -> list[str]:
    """The command line of every arm's server.

    Added unless given: ``--attention-backend pageweaver``; an FP8 KV cache, which PageWeaver needs; no radix cache,
    since a prompt that was seen before would cost nothing; no warm-up by SGLang itself, whose short prompt Triton
    would tune the native kernel on (see :mod:`.warmup`). Side by side also an equal share of the memory,
    ``--sleep-on-idle`` (an idle server then sleeps until a request comes instead of asking again and again, and
    neither way uses the GPU) and ``nccl_port``.
    """
    program = settings.server_program or (sys.executable, "-m", "sglang.launch_server")
    given = settings.server_arguments
    command = [*program, "--model-path", settings.model, "--host", HOST, "--port", str(port)]
    if all(_value(given, name) is None for name in _BACKEND_ARGUMENTS):
        command += ["--attention-backend", "pageweaver"]
    if _value(given, "--kv-cache-dtype") is None:
        command += ["--kv-cache-dtype", "fp8_e4m3"]
    command += [flag for flag in ("--disable-radix-cache", "--skip-server-warmup") if flag not in given]
    if settings.side_by_side:
        if _value(given, _MEMORY) is None:
            command += [_MEMORY, _share(len(settings.arms))]
        command += ["--sleep-on-idle"] if "--sleep-on-idle" not in given else []
        command += ["--nccl-port", str(nccl_port)]
    return [*command, *given]


def find_client() -> str:
    """The module name of SGLang's benchmark client in this Python. Raises AbError when there is none."""
    # The files are looked for: importing SGLang takes seconds, and a missing dependency would look like a missing file.
    spec = importlib.util.find_spec("sglang")
    if spec is None or not spec.submodule_search_locations:
        raise AbError("SGLang is not installed in this Python; --server-cmd and --client-cmd run other programs")
    root = Path(next(iter(spec.submodule_search_locations)))
    for module in CLIENT_MODULES:
        if root.joinpath(*module.split(".")[1:]).with_suffix(".py").is_file():
            return module
    raise AbError(
        f"the SGLang in {root} has no benchmark client: neither {' nor '.join(CLIENT_MODULES)} is there; "
        "--client-cmd runs another one"
    )


def client_arguments(settings: Settings, cell: Cell, *, port: int, seed: int, output: Path, requests: int) -> list[str]:
    """The client's arguments for one load: random token ids, all prompts of the same length, one output token."""
    return [
        *("--backend", "sglang", "--host", HOST, "--port", str(port), "--model", settings.model),
        # `random-ids` needs no file; as token ids the length is exact; the ratio is of the shortest to the longest.
        *("--dataset-name", "random-ids", "--tokenize-prompt", "--random-range-ratio", "1.0"),
        *("--random-input-len", str(cell.prompt), "--random-output-len", "1"),
        *("--num-prompts", str(requests), "--max-concurrency", str(cell.concurrency), "--seed", str(seed)),
        # Its own warm-up would send the first prompt twice.
        *("--warmup-requests", "0", "--ready-check-timeout-sec", "10", "--disable-tqdm", "--cache-report"),
        *("--extra-request-body", json.dumps({"sampling_params": _ONE_TOKEN})),
        *("--output-details", "--output-file", str(output)),
        *settings.client_arguments,
    ]


def choose_port(wanted: int) -> int:
    """``wanted``, or a free one where that is 0. Raises AbError when somebody else listens there."""
    with socket.socket() as probe:
        # As a server would: an address that is merely waiting after its last connection is free.
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((HOST, wanted))
        except OSError as error:
            raise AbError(f"port {wanted} is taken ({error.strerror}): another server would answer") from error
        return int(probe.getsockname()[1])


SPARE_PORTS = range(20000, 32000)
"""Where spare ones are looked for; outgoing connections get higher ones."""


def spare_ports(count: int) -> list[int]:
    """Ports that are free and that no outgoing connection is given, in the minute until a server takes one."""
    found: list[int] = []
    for port in random.SystemRandom().sample(SPARE_PORTS, len(SPARE_PORTS)):
        if len(found) == count:
            break
        with contextlib.suppress(AbError):
            found.append(choose_port(port))
    return found


def wait_until_it_answers(port: int, seconds: float = 60.0) -> None:
    """Wait for a server that has logged that it is ready: without its own warm-up SGLang logs that before it listens.

    Raises:
        OSError: nothing listened in that time.
    """
    deadline = time.monotonic() + seconds
    while not answers(port):
        if time.monotonic() > deadline:
            raise OSError(f"the server said that it was ready, but nothing listened at port {port} for {seconds:.0f} s")
        time.sleep(0.1)


def answers(port: int) -> bool:
    """Whether something accepts connections on the port."""
    try:
        socket.create_connection((HOST, port), timeout=5).close()
    except OSError:
        return False
    return True
