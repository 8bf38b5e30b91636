"""Metrics that a backend of Triton's makes by the C API, as metrics of the model.

The server's own (`nv_…`) are left out, because qinfer counts requests itself.
"""

import re
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from typing import NamedTuple

from qinfer.backends.python_host.errors import TritonModelException
from qinfer.backends.python_host.telemetry import Metric, MetricFamily, MetricKind

EVERY_S = 1.0
"""The least time between two looks at the backend's metrics, which are text."""

_OWN = "nv_"
_KINDS = {"counter": MetricKind.COUNTER, "gauge": MetricKind.GAUGE}
_SAMPLE = re.compile(r"([a-zA-Z_:][a-zA-Z0-9_:]*)(?:\{(.*)\})? (\S+)")
_LABEL = re.compile(r'([a-zA-Z_][a-zA-Z0-9_]*)="((?:[^"\\]|\\.)*)"')
_ESCAPED = re.compile(r"\\(.)")


class MetricSample(NamedTuple):
    """A value of a counter or gauge."""

    name: str
    help: str
    kind: MetricKind
    labels: Mapping[str, str]
    value: float


def samples(text: str) -> Iterator[MetricSample]:
    """Yields the counters and gauges of Prometheus' text format; histograms and summaries are left out."""
    helps: dict[str, str] = {}
    kinds: dict[str, MetricKind] = {}
    for line in text.splitlines():
        if line.startswith("# "):
            _, word, name, rest = [*line.split(" ", 3), "", "", ""][:4]
            if word == "HELP":
                helps[name] = rest
            elif word == "TYPE" and rest in _KINDS:
                kinds[name] = _KINDS[rest]
        elif (found := _SAMPLE.fullmatch(line)) is not None and found[1] in kinds and not found[1].startswith(_OWN):
            name, labels, value = found.groups()
            told = {key: _ESCAPED.sub(_unescaped, of) for key, of in _LABEL.findall(labels or "")}
            yield MetricSample(name, helps.get(name, ""), kinds[name], told, float(value))


def _unescaped(found: re.Match[str]) -> str:
    return "\n" if found[1] == "n" else found[1]


class BackendMetrics:
    """Copies the backend's metrics, read by `read`, to the model's."""

    def __init__(self, read: Callable[[], str]) -> None:
        self._read = read
        self._next_s = 0.0
        self._families: dict[str, MetricFamily] = {}
        self._metrics: dict[tuple[str, ...], Metric] = {}

    def update(self) -> None:
        """Copies the present values, at most once in `EVERY_S` seconds."""
        if time.monotonic() < self._next_s:
            return
        self._next_s = time.monotonic() + EVERY_S
        for sample in samples(self._read()):
            # A name that is taken, or a label that is not allowed, must not fail the batch.
            with suppress(TritonModelException):
                self._copy(sample)

    def _copy(self, sample: MetricSample) -> None:
        metric = self._metric(sample)
        if sample.kind is MetricKind.GAUGE:
            metric.set(sample.value)
        elif sample.value > (before := metric.value()):
            metric.increment(sample.value - before)

    def _metric(self, sample: MetricSample) -> Metric:
        key = (sample.name, *(f"{name}={value}" for name, value in sorted(sample.labels.items())))
        metric = self._metrics.get(key)
        if metric is None:
            family = self._families.get(sample.name)
            if family is None:
                family = self._families[sample.name] = MetricFamily(sample.name, sample.help, sample.kind)
            metric = self._metrics[key] = family.Metric(sample.labels)
        return metric
