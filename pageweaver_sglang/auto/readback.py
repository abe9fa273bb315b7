"""Counters that a kernel adds to and that reach the host on their own: copied in stream order, never waited for."""

from __future__ import annotations

from collections import deque

import torch

SLOTS = 128
"""Measurements under way at a time: two forward passes of a model with some sixty sparse layers."""


class Measurement:
    """Page visits of one call, in the original order and in the one it was given.

    Attributes:
        visits: int64 ``[2]`` on the device, for the regroup kernel to add to. What it holds before means nothing.
        result: what the call added, once the host has it; None until then.
        lost: nothing will come: the call failed before :meth:`send`.
    """

    def __init__(self, readback: Readback, slot: int, visits: torch.Tensor) -> None:
        self.visits = visits
        self.result: tuple[int, int] | None = None
        self.lost = False
        self._readback, self._slot = readback, slot

    def send(self) -> None:
        """Have the counters copied to the host, behind everything that the current stream holds by now."""
        self._readback._send(self._slot)


class Readback:
    """A fixed number of counters on one device, and as many in pinned host memory.

    The counters only ever grow: what a call added is the difference from the last value that came, so that nothing has
    to clear them. For one thread; calls may be on any stream.

    Making one allocates and waits for the device once.

    Args:
        device: where the kernels count.
        slots: measurements that can be under way at a time.
    """

    def __init__(self, device: torch.device, slots: int = SLOTS) -> None:
        cuda = device.type == "cuda"
        # A server's first call is in inference mode, whose tensors could not be written to outside of it.
        with torch.inference_mode(False):
            self._on_device = torch.zeros(slots, 2, dtype=torch.int64).to(device).unbind()
            self._on_host = torch.zeros(slots, 2, dtype=torch.int64, pin_memory=cuda).unbind()
        self._events = [torch.cuda.Event() for _ in range(slots)] if cuda else None
        self._known = [[0, 0] for _ in range(slots)]
        self._free = deque(range(slots))
        self._taken: tuple[int, Measurement] | None = None
        self._under_way: deque[tuple[int, Measurement]] = deque()

    def take(self) -> Measurement | None:
        """A measurement for the next call, or None while too many are under way."""
        self.give_up()
        self.collect()
        if not self._free:
            return None
        slot = self._free.popleft()
        measurement = Measurement(self, slot, self._on_device[slot])
        self._taken = slot, measurement
        return measurement

    def give_up(self) -> None:
        """Declare a measurement that was taken and not sent lost: its call has failed, now that the next one comes."""
        if self._taken is not None:
            # What it may have counted belongs to nobody.
            slot, measurement = self._taken
            measurement.lost = True
            self._send(slot)

    def collect(self) -> None:
        """Give their results to the measurements that have arrived."""
        while self._under_way:
            slot, measurement = self._under_way[0]
            if self._events is not None and not self._events[slot].query():
                return
            self._under_way.popleft()
            now, before = self._on_host[slot].tolist(), self._known[slot]
            self._known[slot] = now
            self._free.append(slot)
            if not measurement.lost:
                measurement.result = now[0] - before[0], now[1] - before[1]

    def _send(self, slot: int) -> None:
        if self._taken is None or self._taken[0] != slot:
            return  # sent already, or given up
        self._on_host[slot].copy_(self._on_device[slot], non_blocking=True)
        if self._events is not None:
            self._events[slot].record(torch.cuda.current_stream(self._on_device[slot].device))
        self._under_way.append(self._taken)
        self._taken = None
