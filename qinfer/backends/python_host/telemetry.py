"""Logs and metrics of a model: `pb_utils.Logger` and `pb_utils.MetricFamily`, and how the worker reads them.

Log records are lines on stderr. The process writes the values of its metrics into memory, and the worker reads
them at any time, so the next read returns a value that was set, even while the model executes, or hangs:

    ┌──────────┬──────┬────────────────┬──────────────────┬────────────────────────────┬─────────────────┐
    │ capacity │ live │ length of head │ number of values │ head: a series, as msgpack │ values: float64 │  …
    └──────────┴──────┴────────────────┴──────────────────┴────────────────────────────┴─────────────────┘

Rules and texts are Triton's (src/metric_family.cc and src/metric.cc of its python_backend): a family lives as long as
an object of its name, and its series end with it.
"""

import bisect
import enum
import json
import math
import os
import re
import struct
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from itertools import pairwise
from typing import NamedTuple

import msgspec

from qinfer.backends.python_host.errors import TritonModelException, text
from qinfer.observe.exposition import ModelSeries

MARK = "\x1eqinfer:"
"""Begins a log record (JSON) on stderr."""

LINE_BYTES = 16 * 1024
"""The worker reads longer lines in pieces."""

_MOST_REQUESTS = 20
_MESSAGE = "the message of a log"

_writing = threading.Lock()


def emit(level: str, message: str, trace: str = "", requests: Sequence[str] = ()) -> None:
    """Sends a log record, shortened in the middle."""
    ids, kept = " ".join(requests[:_MOST_REQUESTS]), max(len(message), len(trace))
    line = _line(level, message, trace, ids)
    while len(line) > LINE_BYTES and kept:
        kept //= 2
        line = _line(level, _shortened(message, kept), _shortened(trace, kept), ids)
    with _writing, suppress(OSError):  # the model may have closed its output
        os.write(2, line)


def _shortened(words: str, kept: int) -> str:
    return words if len(words) <= kept else f"{words[: kept // 2]} … {words[-(kept // 2) :]}"


def _line(level: str, message: str, trace: str, ids: str) -> bytes:
    return f"{MARK}{json.dumps([level, text(message, 'a message'), text(trace, 'a traceback'), ids])}\n".encode()


class TritonLogLevel(enum.IntEnum):
    """Triton's levels of severity."""

    INFO = 0
    WARNING = 1
    ERROR = 2
    VERBOSE = 3


class Logger:
    """Writes to the worker's log."""

    LogLevel = TritonLogLevel
    INFO, WARNING, ERROR, VERBOSE = TritonLogLevel

    @staticmethod
    def log(message: str, level: TritonLogLevel = TritonLogLevel.INFO) -> None:
        """Writes a line of that level."""
        if not isinstance(level, TritonLogLevel):
            raise TypeError(f"the level of a message is one of Logger.INFO, WARNING, ERROR and VERBOSE, got {level}")
        emit("DEBUG" if level is TritonLogLevel.VERBOSE else level.name, text(message, _MESSAGE))

    @staticmethod
    def log_info(message: str) -> None:
        """Writes an INFO line."""
        emit("INFO", text(message, _MESSAGE))

    @staticmethod
    def log_warn(message: str) -> None:
        """Writes a WARNING line."""
        emit("WARNING", text(message, _MESSAGE))

    @staticmethod
    def log_error(message: str) -> None:
        """Writes an ERROR line."""
        emit("ERROR", text(message, _MESSAGE))

    @staticmethod
    def log_verbose(message: str) -> None:
        """Writes a DEBUG line."""
        emit("DEBUG", text(message, _MESSAGE))


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


_DELETED = (
    "Invalid metric operation as the corresponding 'MetricFamily' has been deleted. The 'MetricFamily' object should "
    "be deleted AFTER its corresponding 'Metric' objects have been deleted."
)
_NAME, _LABEL = re.compile("[a-zA-Z_:][a-zA-Z0-9_:]*"), re.compile("(?!__)[a-zA-Z_][a-zA-Z0-9_]*")
_Labels = tuple[tuple[str, str], ...]

# Families may end anywhere, also under this lock.
_lock = threading.RLock()
_families: "dict[str, _Family]" = {}
_table: MetricTable | None = None


def connect_metrics(table: MetricTable) -> None:
    """Sets the table that the worker reads, once."""
    global _table  # noqa: PLW0603  a model makes metrics out of nothing
    _table = table
    os.register_at_fork(after_in_child=_forked)


def _forked() -> None:
    """Keeps a forked process's metrics local, and replaces locks that a thread may have held."""
    global _lock, _table, _writing  # a lock can't be released for another thread
    _lock, _table, _writing = threading.RLock(), None, threading.Lock()


class MetricKind(enum.IntEnum):
    """Kinds of a custom metric."""

    COUNTER = 0
    GAUGE = 1
    HISTOGRAM = 2


class _Series:
    """Equal labels' value, shared by `Metric` objects."""

    def __init__(self, family: "_Family", labels: _Labels, bounds: Sequence[float]) -> None:
        self.bounds = tuple(bounds)
        self.values = [0.0] * (len(bounds) + 2 if family.kind is MetricKind.HISTOGRAM else 1 + family.kind)
        self.references = 0
        series = ModelSeries(
            family.name, family.kind.name.lower(), family.text, labels, self.bounds, tuple(self.values)
        )
        self._slot: Slot | None = None if _table is None else _table.add(series)

    def write(self) -> None:
        if _table is not None and self._slot is not None:
            _table.write(self._slot, self.values)

    def remove(self) -> None:
        if _table is not None and self._slot is not None:
            _table.remove(self._slot)


class _Family:
    """The shared part of equal `MetricFamily` objects."""

    def __init__(self, name: str, text: str, kind: MetricKind) -> None:
        self.name, self.text, self.kind = name, text, kind
        self.references = 0
        self.series: dict[_Labels, _Series] = {}


class Metric:
    """One series of a custom metric, made by `MetricFamily.Metric`."""

    def __init__(self, kind: MetricKind, series: _Series) -> None:
        self._kind = kind
        self._series: _Series | None = series

    def increment(self, value: float) -> None:
        """Adds to a counter or gauge."""
        value = float(value)
        with _lock:
            series = self._require_series("Failed to increment metric value", MetricKind.COUNTER, MetricKind.GAUGE)
            if value < 0 and self._kind is MetricKind.COUNTER:
                raise TritonModelException(f"a counter can't be incremented by {value}; it must be 0 or more")
            series.values[0] += value
            series.write()

    def set(self, value: float) -> None:
        """Sets a gauge."""
        value = float(value)
        with _lock:
            series = self._require_series("Failed to set metric value", MetricKind.GAUGE)
            series.values[:] = value, time.time()
            series.write()

    def observe(self, value: float) -> None:
        """Adds an observation to a histogram."""
        value = float(value)
        with _lock:
            series = self._require_series("Failed to observe metric value", MetricKind.HISTOGRAM)
            series.values[bisect.bisect_left(series.bounds, value)] += 1
            series.values[-1] += value
            series.write()

    def value(self) -> float:
        """Returns the value of a counter or gauge in this process."""
        with _lock:
            return self._require_series("Failed to get metric value", MetricKind.COUNTER, MetricKind.GAUGE).values[0]

    def _require_series(self, failed: str, *kinds: MetricKind) -> _Series:
        if self._series is None:
            raise TritonModelException(f"{failed}: {_DELETED}")
        if self._kind not in kinds:
            raise TritonModelException(f"{failed}: a {self._kind.name.lower()} has no such operation")
        return self._series

    def detach_series(self) -> "_Series | None":
        """Ends the metric; returns its series, or `None` if it has ended before."""
        series, self._series = self._series, None
        return series


class MetricFamily:
    """A custom metric; equal names in a process share one family.

    `kind` is `MetricFamily.COUNTER`, `GAUGE` or `HISTOGRAM`.
    """

    COUNTER, GAUGE, HISTOGRAM = MetricKind

    def __init__(self, name: str, description: str, kind: MetricKind) -> None:
        self._metrics: dict[_Labels, Metric] = {}
        self._family: _Family | None = None
        name, description, kind = text(name, "name"), text(description, "description"), MetricKind(kind)
        if not _NAME.fullmatch(name):
            raise TritonModelException(f"Error when creating MetricFamily: '{name}' is not a valid metric name")
        with _lock:
            family = _families.get(name)
            if family is None:
                family = _families[name] = _Family(name, description, kind)
            elif family.kind is not kind:
                raise TritonModelException(
                    f"Error when creating MetricFamily: '{name}' is a {family.kind.name.lower()} already"
                )
            family.references += 1
            self._family = family

    def Metric(self, labels: Mapping[str, str] | None = None, buckets: Sequence[float] | None = None) -> Metric:
        """Returns the series of some labels; a histogram needs ascending upper bounds, to which infinity is added."""
        family = self._family
        assert family is not None
        named = _checked_labels(labels)
        bounds = _checked_buckets(family.kind, buckets)
        with _lock:
            if named not in self._metrics:
                series = family.series.get(named)
                if series is None:
                    series = family.series[named] = _Series(family, named, bounds)
                series.references += 1
                self._metrics[named] = Metric(family.kind, series)
            return self._metrics[named]

    def __del__(self) -> None:
        family = self._family
        if family is None:
            return
        with _lock:
            for labels, metric in self._metrics.items():
                series = metric.detach_series()
                assert series is not None
                series.references -= 1
                if not series.references:
                    del family.series[labels]
                    series.remove()
            family.references -= 1
            if not family.references:
                del _families[family.name]


def _checked_labels(labels: Mapping[str, str] | None) -> _Labels:
    if labels is None:
        return ()
    if not isinstance(labels, Mapping):
        raise TritonModelException("Failed to create metric. Labels must be a dictionary.")
    for name, value in labels.items():
        if not isinstance(name, str) or not isinstance(value, str):
            raise TritonModelException("Failed to create metric. Labels are strings, names and values.")
        if not _LABEL.fullmatch(name):
            raise TritonModelException(f"Failed to create metric. '{name}' is not a valid label name.")
    return tuple(sorted((name, text(value, "a label")) for name, value in labels.items()))


def _checked_buckets(kind: MetricKind, buckets: Sequence[float] | None) -> list[float]:
    if kind is not MetricKind.HISTOGRAM:
        if buckets is not None:
            raise TritonModelException(f"Failed to create metric. A {kind.name.lower()} has no buckets.")
        return []
    if not isinstance(buckets, list | tuple):
        raise TritonModelException("Failed to create metric. Buckets must be a list.")
    bounds = [float(bound) for bound in buckets]
    if any(not below < above for below, above in pairwise(bounds)):
        raise TritonModelException("Failed to create metric. Buckets must be strictly ascending.")
    return [bound for bound in bounds if bound != math.inf]
