"""Custom metrics of models, made by `pb_utils.MetricFamily`: records of series, merged over processes.

Series with equal names and labels are one: counts add up, and the last set value holds.
"""

import math
from collections.abc import Iterable, Sequence
from contextlib import suppress

import msgspec

from qinfer.observe import catalogue
from qinfer.observe.catalogue import Info, MetricScope
from qinfer.observe.exposition import Family, SampleLine

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


def families(series: Iterable[ModelSeries]) -> list[Family]:
    """Returns the merged metrics, without names of qinfer's own."""
    own = {info.name for info in catalogue.ALL}
    found: dict[str, ModelFamily] = {}
    for one in merged(series):
        if one.name in own:
            continue
        family = found.get(one.name)
        if family is None:
            info = Info(one.name, one.kind, (), one.text, MetricScope.CLUSTER)
            family = found[one.name] = ModelFamily(info)
        family.show(one)
    return list(found.values())


def _together(kind: str, one: Sequence[float], other: Sequence[float]) -> tuple[float, ...]:
    if kind != GAUGE or not (one[1] and other[1]):
        added = tuple(a + b for a, b in zip(one, other, strict=True))
        return added if kind != GAUGE else (added[0], max(one[1], other[1]))
    return tuple(one if one[1] >= other[1] else other)
