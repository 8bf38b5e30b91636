"""A model's metrics in memory that its process writes and the worker reads at any time.

    ┌──────────┬──────┬────────────────┬──────────────────┬────────────────────────────┬─────────────────┐
    │ capacity │ live │ length of head │ number of values │ head: a series, as msgpack │ values: float64 │  …
    └──────────┴──────┴────────────────┴──────────────────┴────────────────────────────┴─────────────────┘

So the next read returns a value that was set, even while the model executes, or hangs.
"""

import os
import struct
import threading
from collections.abc import Sequence
from typing import NamedTuple

import msgspec

from qinfer.backends.python_host.errors import TritonModelException
from qinfer.observe.model_metrics import ModelSeries

MOST_BYTES = 4 * 1024 * 1024
"""The most bytes of a process's series."""

_PREFIX = struct.Struct("<IIII")
_ALIGNMENT = 64
_WORD = 8


class Slot(NamedTuple):
    """The positions of a series and its values in the table."""

    place: int
    values_at: int


class MetricTable:
    """The table for the model's process, written under the metrics' lock."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor
        self._end = 0
        self._free: dict[int, list[int]] = {}

    def add(self, series: ModelSeries) -> Slot:
        """Adds a series, up to `MOST_BYTES`."""
        head = msgspec.msgpack.encode(msgspec.structs.replace(series, values=()))
        needed = _PREFIX.size + _aligned(len(head), _WORD) + _WORD * len(series.values)
        capacity = _aligned(needed, _ALIGNMENT)
        free = self._free.get(capacity)
        place = free.pop() if free else self._end
        if place == self._end:
            if self._end + capacity > MOST_BYTES:
                raise TritonModelException(f"the metrics of a model's process may take {MOST_BYTES} bytes")
            self._end += capacity
        filled = head + bytes(_aligned(len(head), _WORD) - len(head)) + _packed(series.values)
        dead = _PREFIX.pack(capacity, 0, len(head), len(series.values))
        os.pwrite(self._descriptor, (dead + filled).ljust(capacity, b"\0"), place)
        os.pwrite(self._descriptor, _PREFIX.pack(capacity, 1, len(head), len(series.values)), place)
        return Slot(place, place + _PREFIX.size + _aligned(len(head), _WORD))

    def write(self, slot: Slot, values: Sequence[float]) -> None:
        """Writes the values of a series."""
        os.pwrite(self._descriptor, _packed(values), slot.values_at)

    def remove(self, slot: Slot) -> None:
        """Removes a series."""
        capacity, _, head, values = _PREFIX.unpack(os.pread(self._descriptor, _PREFIX.size, slot.place))
        os.pwrite(self._descriptor, _PREFIX.pack(capacity, 0, head, values), slot.place)
        self._free.setdefault(capacity, []).append(slot.place)


class MetricMemory:
    """The table for the worker; the process inherits `descriptor`."""

    def __init__(self) -> None:
        self.descriptor = os.memfd_create("qinfer-metrics", os.MFD_CLOEXEC)
        self._lock = threading.Lock()
        self._is_closed = False
        self._last = b""
        self._series: list[ModelSeries] = []

    def read(self) -> list[ModelSeries]:
        """Returns the series of a living process."""
        with self._lock:
            if self._is_closed:
                return []
            data = os.pread(self.descriptor, MOST_BYTES, 0)
            if data != self._last:
                self._last, self._series = data, _series_of(data)
            return self._series

    def close(self) -> None:
        """Frees the memory; repeated calls are harmless."""
        with self._lock:
            if not self._is_closed:
                self._is_closed = True
                os.close(self.descriptor)


def _series_of(data: bytes) -> list[ModelSeries]:
    found, place = [], 0
    while place < len(data):
        capacity, live, head, count = _PREFIX.unpack_from(data, place)
        begin = place + _PREFIX.size
        if not capacity or begin + _aligned(head, _WORD) + _WORD * count > len(data):
            break
        if live:
            try:
                series = msgspec.msgpack.decode(data[begin : begin + head], type=ModelSeries)
            except (msgspec.MsgspecError, UnicodeDecodeError):
                break
            values = struct.unpack_from(f"<{count}d", data, begin + _aligned(head, _WORD))
            found.append(msgspec.structs.replace(series, values=values))
        place += capacity
    return found


def _packed(values: Sequence[float]) -> bytes:
    return struct.pack(f"<{len(values)}d", *values)


def _aligned(size: int, alignment: int) -> int:
    return -(-size // alignment) * alignment
