"""Which calls are recorded, the writer thread, and the bounds of a recording.

What a recorded call costs the server: copies of its tensors on the device (indices: about 4 MB for a 16K chunk with
four KV heads) and one event. Everything else is done by a daemon thread: it waits for the event, copies to the CPU
through a pinned buffer on a stream of its own, and writes the file. Calls are dropped, and counted by reason, when
:data:`PENDING_CALLS` wait already or when their copies would take more than a quarter of the free device memory.
"""

from __future__ import annotations

import atexit
import ctypes
import itertools
import logging
import os
import queue
import threading
import time
from collections import Counter
from pathlib import Path
from typing import Any

import torch

from pageweaver_sglang.config import Config, ConfigError

from .control import STATE_PREFIX, CaptureError, read_control, stamp, write_json
from .snapshot import Call, HostLengths, Snapshot, without_activations

logger = logging.getLogger(__name__)

PENDING_CALLS = 4
"""Snapshots that may wait for the writer thread."""

POLL_SECONDS = 1.0
"""How often the writer thread looks at the control file and writes its state."""

_BOUNCE_BYTES = 16 << 20
_CLOSE_SECONDS = 10.0
_numbers = itertools.count()


class Session:
    """One recording: from being switched on until it is switched off or reaches a bound.

    Args:
        config: the ``capture_*`` settings.
        chunk_size: tokens of SGLang's prefill chunks; None where it does not chunk.
    """

    def __init__(self, config: Config, chunk_size: int | None):
        self.config = config
        self.chunk_size = chunk_size
        self.taken = 0
        self.calls = 0
        self.bytes = 0
        self.dropped: Counter[str] = Counter()
        self.indices_only: Counter[str] = Counter()
        self.ended: str | None = None
        self.full = False
        """A bound on calls or bytes is reached: what waits is not written."""
        self._matching: Counter[int] = Counter()
        self._deadline: float | None = None

    def wants(self, layer: int, lengths: HostLengths | None) -> bool:
        """Whether this call is to be recorded; counts it."""
        config = self.config
        if config.capture_layers is not None and layer not in config.capture_layers:
            return False
        if config.capture_chunks is not None:
            if lengths is None:
                self.dropped["lengths unknown on the host"] += 1
                return False
            size = self.chunk_size or 1 << 62
            if not any(prefix // size in config.capture_chunks for prefix in lengths.prefixes):
                return False
        number = self._matching[layer]
        self._matching[layer] += 1
        if number % config.capture_every:
            return False
        return self.taken < config.capture_max_calls and not self.is_late()

    def begin(self) -> None:
        """Start the clock with the first call."""
        if self._deadline is None:
            self._deadline = time.monotonic() + self.config.capture_max_seconds

    def is_late(self) -> bool:
        """Whether the time is up."""
        return self._deadline is not None and time.monotonic() >= self._deadline

    def state(self) -> dict[str, Any]:
        """For the state file."""
        settings = {name: value for name, value in self.config.model_dump().items() if name.startswith("capture_")}
        return {
            "recording": self.ended is None,
            "ended": self.ended,
            "calls": self.calls,
            "mb": round(self.bytes / 1e6, 3),
            "dropped": dict(self.dropped),
            "indices_only": dict(self.indices_only),
            "settings": settings,
        }


class Recorder:
    """Records Step 3 calls of one process into a folder.

    Args:
        config: settings; ``capture_dir`` must be set.
        device: where the calls' tensors are.
        pool_page_size: tokens per page of SGLang's KV pool.
        chunk_size: tokens of SGLang's prefill chunks; None where it does not chunk.
        rank: of this process among the server's, for the files' names.

    Raises:
        CaptureError: the folder cannot be written, or its control file is wrong.
    """

    def __init__(
        self,
        config: Config,
        *,
        device: torch.device | str = "cpu",
        pool_page_size: int,
        chunk_size: int | None = None,
        rank: int = 0,
    ):
        if config.capture_dir is None:
            raise CaptureError("capture_dir: must be set to record")
        try:
            self.folder = Path(config.capture_dir).expanduser().absolute()
            self.folder.mkdir(parents=True, exist_ok=True)
            probe = self.folder / f".probe-{os.getpid()}"
            probe.touch()
            probe.unlink()
        except (OSError, RuntimeError, ValueError) as error:
            raise CaptureError(f"capture_dir: {config.capture_dir}: cannot be written: {error}") from None
        self._config = config
        self._device = torch.device(device)
        if self._device.type == "cuda" and self._device.index is None:
            self._device = torch.device("cuda", torch.cuda.current_device())
        self._pool_page_size = pool_page_size
        self._chunk_size = chunk_size
        self._rank = rank
        # A process can have several backends (two-batch overlap), and each has a recorder.
        number = next(_numbers)
        self._name = f"rank{rank}-pid{os.getpid()}" + (f"-{number}" if number else "")
        self._seen: Counter[int] = Counter()
        self._queue: queue.Queue[tuple[Session, str, Snapshot, Any] | None] = queue.Queue(PENDING_CALLS)
        self._logged: set[str] = set()
        self._stream: Any = None
        self._bounce: torch.Tensor | None = None
        self._stopping = False
        self._stamp = stamp(self.folder)
        control = read_control(self.folder)
        first = config if control is None else control.apply(config)
        self._session: Session | None = None
        self._last: Session | None = None
        self._written_state: dict[str, Any] | None = None
        if first is not None:
            self._start(first)
        self._thread = threading.Thread(target=self._run, name="pageweaver-capture", daemon=True)
        self._thread.start()
        atexit.register(self.close)

    # The hot path --------------------------------------------------------------------------------------------------

    def offer(self, layer: int, call: Call, out: torch.Tensor, lengths: HostLengths | None) -> None:
        """Record a call, if it is one to record. Never raises, never waits.

        Args:
            layer: model layer.
            call: arguments of Step 3, by name.
            out: what it returned, ``[tokens, q_heads, head_dim]``.
            lengths: of the batch; None where the host does not know them.
        """
        session = self._session
        if session is None:
            return
        try:
            self._seen[layer] += 1
            if call["q"].shape[0] and session.wants(layer, lengths):
                self._take(session, layer, call, out, lengths)
        except Exception as error:
            session.dropped[f"error: {type(error).__name__}"] += 1
            self._log_once(f"a call could not be recorded: {type(error).__name__}: {error}", exc_info=True)

    def _take(self, session: Session, layer: int, call: Call, out: torch.Tensor, lengths: HostLengths | None) -> None:
        if reason := self._obstacle(call):
            session.dropped[reason] += 1
            return
        kept = None
        if session.config.capture_activations:
            reason = without_activations(call, out, lengths, self._pool_page_size)
            if reason is None:
                kept = lengths
            else:
                session.indices_only[reason] += 1
        if not self._has_memory(Snapshot.bytes_needed(call, kept)):
            session.dropped["too little device memory"] += 1
            return
        session.begin()
        snapshot = Snapshot.take(layer, call, out, kept)
        event = None
        if self._device.type == "cuda":
            event = torch.cuda.Event(blocking=True)
            event.record()
        name = f"layer{layer:03d}-call{self._seen[layer]:06d}-{self._name}.npz"
        try:
            self._queue.put_nowait((session, name, snapshot, event))
        except queue.Full:  # two threads took the last place
            session.dropped["queue full"] += 1
            return
        session.taken += 1

    def _obstacle(self, call: Call) -> str | None:
        """Why a call is not recorded at all, or None."""
        if self._queue.full():
            return "queue full"
        if call["block_size_q"] != 1:
            return "block_size_q"
        if self._device.type == "cuda" and torch.cuda.is_current_stream_capturing():
            return "CUDA graph capture"
        return None

    def _has_memory(self, needed: int) -> bool:
        if self._device.type != "cuda":
            return True
        free, _ = torch.cuda.mem_get_info(self._device)
        held = torch.cuda.memory_reserved(self._device) - torch.cuda.memory_allocated(self._device)
        return needed <= (free + held) // 4

    # The writer thread ---------------------------------------------------------------------------------------------

    def close(self) -> None:
        """Write what waits, then end the thread. Waits some seconds at most."""
        self._stopping = True
        self._session = None
        self._thread.join(_CLOSE_SECONDS)
        atexit.unregister(self.close)

    def _run(self) -> None:
        try:
            if self._device.type == "cuda":
                torch.cuda.set_device(self._device)
                _allow_work_during_graph_capture()
                self._stream = torch.cuda.Stream(self._device)
            self._write_state()
            polled = time.monotonic()
            while not (self._stopping and self._queue.empty()):
                try:
                    job = self._queue.get(timeout=0.05 if self._stopping else POLL_SECONDS / 4)
                except queue.Empty:
                    job = None
                if job is not None:
                    self._write(*job)
                    del job  # its device memory
                if time.monotonic() - polled >= POLL_SECONDS:
                    self._poll()
                    polled = time.monotonic()
            if self._last is not None and self._last.ended is None:
                self._end(self._last, "the server stopped")
            self._write_state()
        except Exception:
            logger.exception("pageweaver capture: the writer stopped")
            if self._last is not None and self._last.ended is None:
                self._end(self._last, "the writer stopped")
            self._write_state()

    def _poll(self) -> None:
        """Follow the control file, end a session whose time is up, and write the state."""
        found = stamp(self.folder)
        if found != self._stamp:
            self._stamp = found
            try:
                control = read_control(self.folder)
                config = self._config if control is None else control.apply(self._config)
            except (CaptureError, ConfigError) as error:
                logger.warning("pageweaver capture: %s; going on as before", error)
            else:
                if self._session is not None:
                    self._end(self._session, "switched off" if config is None else "started anew")
                if config is not None:
                    self._start(config)
        if self._session is not None and self._session.is_late():
            self._end(self._session, f"{self._session.config.capture_max_seconds} seconds")
        self._write_state()

    def _start(self, config: Config) -> None:
        self._session = self._last = Session(config, self._chunk_size)
        what = "with activations" if config.capture_activations else "indices only"
        logger.info("pageweaver capture: recording into %s, %s", self.folder, what)

    def _end(self, session: Session, why: str) -> None:
        session.ended = session.ended or why
        if self._session is session:
            self._session = None
        logger.info(
            "pageweaver capture: ended (%s): %d calls, %.1f MB, dropped %s",
            why,
            session.calls,
            session.bytes / 1e6,
            dict(session.dropped),
        )

    def _write(self, session: Session, name: str, snapshot: Snapshot, event: Any) -> None:
        """Write one file, unless a bound was reached meanwhile or would be exceeded by this file."""
        if session.full:
            return
        part = self.folder / f".{name}"
        try:
            if event is not None:
                event.synchronize()
            workload = snapshot.workload(self._to_cpu)
            workload.save(part, compress=workload.q is None)
            size = part.stat().st_size
            if session.bytes + size > session.config.capture_max_mb * 10**6:
                part.unlink()
                session.full = True
                self._end(session, f"{session.config.capture_max_mb} MB")
                return
            part.replace(self.folder / name)
        except Exception as error:
            session.dropped[f"error: {type(error).__name__}"] += 1
            self._log_once(f"a call could not be written: {type(error).__name__}: {error}", exc_info=True)
            _remove(part)
            if isinstance(error, OSError):  # the disk is full, or the folder gone: it will not get better by itself
                session.full = True
                self._end(session, f"{type(error).__name__}: {error.strerror}")
            return
        session.calls += 1
        session.bytes += size
        if session.calls >= session.config.capture_max_calls:
            session.full = True
            self._end(session, f"{session.config.capture_max_calls} calls")

    def _to_cpu(self, tensor: torch.Tensor) -> torch.Tensor:
        """Copy one contiguous tensor to pageable memory, through the pinned buffer."""
        if tensor.device.type == "cpu":
            return tensor
        if self._bounce is None:
            self._bounce = torch.empty(_BOUNCE_BYTES, dtype=torch.uint8, pin_memory=True)
        result = torch.empty(tensor.shape, dtype=tensor.dtype)
        source, target = tensor.reshape(-1).view(torch.uint8), result.view(-1).view(torch.uint8)
        with torch.cuda.stream(self._stream):
            for first in range(0, len(source), _BOUNCE_BYTES):
                piece = source[first : first + _BOUNCE_BYTES]
                buffer = self._bounce[: len(piece)]
                buffer.copy_(piece, non_blocking=True)
                self._stream.synchronize()
                target[first : first + len(piece)].copy_(buffer)
        return result

    def _write_state(self) -> None:
        """Write the state file when the state has changed."""
        state: dict[str, Any] = {"rank": self._rank, "pid": os.getpid()}
        state |= {"recording": False, "ended": "never switched on"} if self._last is None else self._last.state()
        if state == self._written_state:
            return
        try:
            write_json(self.folder / f"{STATE_PREFIX}{self._name}.json", state)
        except OSError as error:
            self._log_once(f"the state could not be written: {error}")
            return
        self._written_state = state

    def _log_once(self, message: str, **kwargs: Any) -> None:
        if message not in self._logged and len(self._logged) < 100:
            self._logged.add(message)
            logger.warning("pageweaver capture: %s", message, **kwargs)


def _remove(path: Path) -> None:
    try:
        path.unlink()
    except OSError:
        return


def _allow_work_during_graph_capture() -> None:
    """Let this thread allocate and synchronise while another one captures a CUDA graph.

    By default such calls from any thread invalidate a capture (``CU_STREAM_CAPTURE_MODE_GLOBAL``), and SGLang captures
    its graphs after the backend was created. PyTorch has no call for it, so the driver is asked. Raises OSError or
    RuntimeError when that fails: then this thread must do nothing.
    """
    driver = ctypes.CDLL("libcuda.so.1")
    mode = ctypes.c_int(2)  # CU_STREAM_CAPTURE_MODE_RELAXED
    status = driver.cuThreadExchangeStreamCaptureMode(ctypes.byref(mode))
    if status != 0:
        raise RuntimeError(f"cuThreadExchangeStreamCaptureMode returned {status}")
