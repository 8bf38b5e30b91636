"""`pb_utils.MetricFamily`: the model's own metrics, which the server's `/metrics` shows.

Rules and texts are Triton's (src/metric_family.cc and src/metric.cc of its python_backend): a family lives as long as
an object of its name, and its series end with it.
"""

import bisect
import enum
import math
import os
import re
import threading
import time
from collections.abc import Mapping, Sequence
from itertools import pairwise

from qinfer.backends.python_host.errors import TritonModelException, text
from qinfer.backends.python_host.metric_table import MetricTable, Slot
from qinfer.observe.model_metrics import ModelSeries

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
    """Keeps a forked process's metrics local."""
    global _lock, _table
    _lock, _table = threading.RLock(), None


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
