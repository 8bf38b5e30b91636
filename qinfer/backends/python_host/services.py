"""`pb_utils.Logger` and `pb_utils.MetricFamily`: what a model says besides its responses."""

import bisect
import enum
import json
import os
import threading
from collections.abc import Mapping, Sequence
from contextlib import suppress

from qinfer.backends.python_host.errors import TritonModelException, text

MARK = "\x1eqinfer:"
"""Begins a line of the host's stderr that is a log record as JSON; other lines are what the model printed."""

LINE_BYTES = 16 * 1024
"""The worker reads longer lines in pieces."""

_MOST_REQUESTS = 20

_writing = threading.Lock()


def forked() -> None:
    """Lets a forked process write, where a thread that is gone may have been writing."""
    global _writing  # noqa: PLW0603  a lock can't be released for another thread
    _writing = threading.Lock()


def emit(level: str, message: str, trace: str = "", requests: Sequence[str] = ()) -> None:
    """Hands a log record to the worker, with a traceback if there is one; of a long one its beginning and its end.

    Args:
        level: Its level.
        message: Its text.
        trace: The traceback.
        requests: Ids of the requests that it is about.
    """
    ids, kept = " ".join(requests[:_MOST_REQUESTS]), max(len(message), len(trace))
    line = _line(level, message, trace, ids)
    while len(line) > LINE_BYTES and kept:
        kept //= 2
        line = _line(level, _shortened(message, kept), _shortened(trace, kept), ids)
    with _writing, suppress(OSError):  # the model's code may have closed its output
        os.write(2, line)


def _shortened(words: str, kept: int) -> str:
    return words if len(words) <= kept else f"{words[: kept // 2]} … {words[-(kept // 2) :]}"


def _line(level: str, message: str, trace: str, ids: str) -> bytes:
    return f"{MARK}{json.dumps([level, text(message, 'a message'), text(trace, 'a traceback'), ids])}\n".encode()


class Level(enum.IntEnum):
    """Triton's levels of severity."""

    INFO = 0
    WARNING = 1
    ERROR = 2
    VERBOSE = 3


class Logger:
    """Writes to the worker's log."""

    LogLevel = Level
    INFO, WARNING, ERROR, VERBOSE = Level

    @staticmethod
    def log(message: str, level: Level = Level.INFO) -> None:
        """Writes a line of that level."""
        name = Level(level).name
        emit("DEBUG" if name == "VERBOSE" else name, str(message))

    @staticmethod
    def log_info(message: str) -> None:
        """Writes an INFO line."""
        emit("INFO", str(message))

    @staticmethod
    def log_warn(message: str) -> None:
        """Writes a WARNING line."""
        emit("WARNING", str(message))

    @staticmethod
    def log_error(message: str) -> None:
        """Writes an ERROR line."""
        emit("ERROR", str(message))

    @staticmethod
    def log_verbose(message: str) -> None:
        """Writes a DEBUG line."""
        emit("DEBUG", str(message))


class MetricKind(enum.IntEnum):
    """Kinds of a custom metric."""

    COUNTER = 0
    GAUGE = 1
    HISTOGRAM = 2


class Metric:
    """One series of a custom metric; `MetricFamily.Metric` makes it.

    Args:
        kind: What it is.
        buckets: Upper bounds of a histogram's buckets.
    """

    def __init__(self, kind: MetricKind, buckets: Sequence[float] = ()) -> None:
        self._kind = kind
        self._buckets = [float(bucket) for bucket in buckets]
        self._counts = [0] * (len(self._buckets) + 1)
        self._value = 0.0
        self._lock = threading.Lock()

    def increment(self, value: float) -> None:
        """Adds to a counter or gauge.

        Raises:
            TritonModelException: It is a histogram, or a counter would go down.
        """
        self._require(MetricKind.COUNTER, MetricKind.GAUGE)
        if value < 0 and self._kind is MetricKind.COUNTER:
            raise TritonModelException(f"a counter can't be incremented by {value}; it must be 0 or more")
        with self._lock:
            self._value += value

    def set(self, value: float) -> None:
        """Sets a gauge.

        Raises:
            TritonModelException: It is no gauge.
        """
        self._require(MetricKind.GAUGE)
        with self._lock:
            self._value = float(value)

    def observe(self, value: float) -> None:
        """Adds an observation to a histogram.

        Raises:
            TritonModelException: It is no histogram.
        """
        self._require(MetricKind.HISTOGRAM)
        with self._lock:
            self._counts[bisect.bisect_left(self._buckets, value)] += 1
            self._value += value

    def value(self) -> float:
        """Returns the value of a counter or gauge.

        Raises:
            TritonModelException: It is a histogram.
        """
        self._require(MetricKind.COUNTER, MetricKind.GAUGE)
        return self._value

    def _require(self, *kinds: MetricKind) -> None:
        if self._kind not in kinds:
            raise TritonModelException(f"a {self._kind.name.lower()} has no such operation")


class MetricFamily:
    """A custom metric. It works within the model's process, and is not part of the server's `/metrics`.

    Args:
        name: Its name.
        description: What it is.
        kind: `MetricFamily.COUNTER`, `GAUGE` or `HISTOGRAM`.
    """

    COUNTER, GAUGE, HISTOGRAM = MetricKind

    def __init__(self, name: str, description: str, kind: MetricKind) -> None:
        del description
        self._kind = MetricKind(kind)
        emit("WARNING", f"metric '{name}' stays in the model's process: custom metrics are not exported")

    def Metric(self, labels: Mapping[str, str] | None = None, buckets: Sequence[float] | None = None) -> Metric:
        """Makes a series.

        Raises:
            TritonModelException: A histogram has no buckets, or another metric has some.
        """
        del labels
        if (self._kind is MetricKind.HISTOGRAM) != bool(buckets):
            raise TritonModelException("a histogram needs 'buckets', and other metrics have none")
        return Metric(self._kind, buckets or ())
