"""Prometheus' text format, as Triton prints it, and OpenMetrics, which has exemplars; and the models' own metrics.

Triton's counters have no `_total`, its integers no `.0`, and `le` and `quantile` come last. A counter whose name
OpenMetrics can't have is `unknown` there.

Models make metrics by `pb_utils.MetricFamily`; their series are merged over processes: series with equal names and
labels are one, counts add up, and the last set value holds.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from itertools import accumulate
from typing import NamedTuple

import msgspec

from qinfer.observe import catalogue
from qinfer.observe.catalogue import Info, MetricScope
from qinfer.observe.stats import QUEUE_BUCKETS_S, Durations, Exemplar

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
OPENMETRICS = "application/openmetrics-text"
OPENMETRICS_TYPE = f"{OPENMETRICS}; version=1.0.0; charset=utf-8"

_TRITONS = "nv_"


class SampleLine(NamedTuple):
    """One line of metrics; only OpenMetrics shows the exemplar."""

    suffix: str
    labels: tuple[tuple[str, str], ...]
    value: int | float
    exemplar: Exemplar | None = None


class Family:
    """One metric with its lines."""

    def __init__(self, info: Info) -> None:
        self.info = info
        self.samples: list[SampleLine] = []

    def add(self, value: float, **labels: str) -> None:
        """Adds a line with all labels."""
        self.samples.append(SampleLine("", self._ordered(labels), value))

    def add_histogram(self, buckets: Iterable[tuple[float, int]], total: float, **labels: str) -> None:
        """Adds a histogram from cumulative counts by ascending bounds."""
        ordered, pairs = self._ordered(labels), list(buckets)
        self.samples += [SampleLine("_count", ordered, pairs[-1][1]), SampleLine("_sum", ordered, total)]
        self.samples += [SampleLine("_bucket", (*ordered, ("le", self._bound(bound))), count) for bound, count in pairs]

    def add_durations(self, series: Durations, **labels: str) -> None:
        """Adds a histogram with its exemplars."""
        first = len(self.samples) + 2
        bounds = (*QUEUE_BUCKETS_S, math.inf)
        self.add_histogram(zip(bounds, accumulate(series.counts), strict=True), series.total_s, **labels)
        for number, exemplar in series.exemplars.items():
            self.samples[first + number] = self.samples[first + number]._replace(exemplar=exemplar)

    def number(self, value: float) -> str:
        """Returns a value in Prometheus' text format."""
        return _of_triton(value) if self.info.name.startswith(_TRITONS) else _own(value)

    def add_summary(self, quantiles: Mapping[float, float], count: int, total: float, **labels: str) -> None:
        """Adds the lines of a summary."""
        ordered = self._ordered(labels)
        self.samples += [SampleLine("_count", ordered, count), SampleLine("_sum", ordered, total)]
        self.samples += [SampleLine("", (*ordered, ("quantile", f"{q:g}")), value) for q, value in quantiles.items()]

    def _ordered(self, labels: Mapping[str, str]) -> tuple[tuple[str, str], ...]:
        assert len(labels) == len(self.info.labels), (self.info.name, labels)
        return tuple((name, labels[name]) for name in self.info.labels)

    def _bound(self, bound: float) -> str:
        if math.isinf(bound):
            return "+Inf"
        return f"{bound:g}" if self.info.name.startswith(_TRITONS) else str(float(bound))


def family(info: Info, samples: Iterable[tuple[float, Mapping[str, str]]]) -> Family:
    """Returns a metric with a line for each value."""
    made = Family(info)
    for value, labels in samples:
        made.add(value, **labels)
    return made


def by_model(info: Info, values: Mapping[tuple[str, int], float]) -> Family:
    """Returns a metric with a line for each version."""
    return family(info, ((value, labels_of(key)) for key, value in values.items()))


def labels_of(key: tuple[str, int]) -> dict[str, str]:
    """Returns a version's labels; 0 = unknown."""
    return {"model": key[0], "version": str(key[1]) if key[1] else ""}


def render(shown: Iterable[Family], *, as_openmetrics: bool = False) -> bytes:
    """Returns the text of metrics; only OpenMetrics has exemplars."""
    families, lines = list(shown), list[str]()
    names = {family.info.name for family in families}
    for family in families:
        name, kind, text = family.info.name, family.info.kind, family.info.text
        if as_openmetrics and kind == "counter":  # it ends in _total, and no other metric has the rest of the name
            rest = name.removesuffix("_total")
            name, kind = (name, "unknown") if rest in names else (rest, kind)
        text = _escaped(text) if as_openmetrics else text.replace("\\", "\\\\").replace("\n", "\\n")
        lines += [f"# HELP {name} {text}", f"# TYPE {name} {kind}"]
        for suffix, labels, value, exemplar in family.samples:
            line = f"{family.info.name}{suffix}{_labels(labels)} "
            lines.append(line + (_own(value) + _exemplar(exemplar) if as_openmetrics else family.number(value)))
    end = ["# EOF"] if as_openmetrics else []
    return "".join(f"{line}\n" for line in lines + end).encode()


def _exemplar(of: Exemplar | None) -> str:
    return "" if of is None else f' # {{trace_id="{of.trace_id}"}} {of.value!r} {of.at_s:.3f}'


def _labels(labels: Sequence[tuple[str, str]]) -> str:
    inside = ",".join(f'{name}="{_escaped(text)}"' for name, text in labels)
    return f"{{{inside}}}" if inside else ""


def _of_triton(value: float) -> str:
    if isinstance(value, int):
        return str(value)
    return "Nan" if math.isnan(value) else format(value, ".9g")


def _own(value: float) -> str:
    return repr(float(value))


def _escaped(text: str) -> str:
    return text.replace("\\", "\\\\").replace("\n", "\\n").replace('"', '\\"')


COUNTER, GAUGE, HISTOGRAM = "counter", "gauge", "histogram"


class ModelSeries(msgspec.Struct, frozen=True, array_like=True):
    """One series.

    Attributes:
        values: A counter's value; a gauge's, and its time (seconds since the epoch, 0 = never set); a histogram's
            counts, and their sum.
    """

    name: str
    kind: str
    text: str
    labels: tuple[tuple[str, str], ...]
    bounds: tuple[float, ...]
    values: tuple[float, ...]


class ModelFamily(Family):
    """A custom metric, printed as by Triton's C++ client library."""

    def number(self, value: float) -> str:
        """Returns a value as shown."""
        if not math.isfinite(value):
            return "Nan" if math.isnan(value) else f"{'+' if value > 0 else '-'}Inf"
        return str(int(value)) if float(value).is_integer() else str(value)

    def show(self, one: ModelSeries) -> None:
        """Adds the lines of a series."""
        if one.kind != HISTOGRAM:
            self.samples.append(SampleLine("", one.labels, one.values[0]))
            return
        *counts, total = one.values
        self.samples += [SampleLine("_count", one.labels, sum(counts)), SampleLine("_sum", one.labels, total)]
        below = 0.0
        for bound, count in zip((*one.bounds, math.inf), counts, strict=True):
            below += count
            self.samples.append(SampleLine("_bucket", (*one.labels, ("le", self.number(bound))), below))


def merged(series: Iterable[ModelSeries]) -> list[ModelSeries]:
    """Merges equal series; of two kinds with one name, the first is kept."""
    kinds: dict[str, tuple[str, str]] = {}
    found: dict[tuple[str, tuple[tuple[str, str], ...]], ModelSeries] = {}
    for one in series:
        kind, text = kinds.setdefault(one.name, (one.kind, one.text))
        key = one.name, one.labels
        other = found.get(key)
        if one.kind != kind or (other is not None and other.bounds != one.bounds):
            continue
        values = one.values if other is None else _together(kind, other.values, one.values)
        found[key] = msgspec.structs.replace(one, text=text, values=values)
    return list(found.values())


def record_of(series: Iterable[ModelSeries]) -> bytes:
    """Returns the record of a worker's series."""
    return msgspec.msgpack.encode(merged(series))


def series_of(records: Iterable[bytes | None]) -> list[ModelSeries]:
    """Returns series, except of newer workers' unreadable records."""
    found: list[ModelSeries] = []
    for record in records:
        with suppress(msgspec.DecodeError, UnicodeDecodeError):
            found += msgspec.msgpack.decode(record or b"\x90", type=list[ModelSeries])
    return found


def model_families(series: Iterable[ModelSeries]) -> list[Family]:
    """Returns the merged metrics, without names of qinfer's own."""
    own = {info.name for info in catalogue.ALL}
    found: dict[str, ModelFamily] = {}
    for one in merged(series):
        if one.name in own:
            continue
        shown = found.get(one.name)
        if shown is None:
            info = Info(one.name, one.kind, (), one.text, MetricScope.CLUSTER)
            shown = found[one.name] = ModelFamily(info)
        shown.show(one)
    return list(found.values())


def _together(kind: str, one: Sequence[float], other: Sequence[float]) -> tuple[float, ...]:
    if kind != GAUGE or not (one[1] and other[1]):
        added = tuple(a + b for a, b in zip(one, other, strict=True))
        return added if kind != GAUGE else (added[0], max(one[1], other[1]))
    return tuple(one if one[1] >= other[1] else other)
