"""Triton's metrics: its names, labels and texts (reference §4), from the same numbers as qinfer's own.

The numbers come from the shared store, so that every gateway shows the same; CPU and memory are those of the machine
that answers.
"""

from collections.abc import Callable, Container, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import NamedTuple

from qinfer.errors import ErrorCode
from qinfer.observe import catalogue, latencies, stats
from qinfer.observe.catalogue import Info
from qinfer.observe.exposition import Family, SampleLine, by_model, family, labels_of
from qinfer.observe.host import GpuUse, HostUse

Key = tuple[str, int]


class FailureReason(StrEnum):
    """Triton's reasons of failures."""

    REJECTED = "REJECTED"
    CANCELED = "CANCELED"
    BACKEND = "BACKEND"
    OTHER = "OTHER"


class _Reasons(NamedTuple):
    """The reason of an error code, by the counting process."""

    worker: FailureReason
    gateway: FailureReason


_REJECTED = _Reasons(FailureReason.REJECTED, FailureReason.REJECTED)
_CANCELED = _Reasons(FailureReason.CANCELED, FailureReason.CANCELED)
_BACKEND = _Reasons(FailureReason.BACKEND, FailureReason.BACKEND)
_OF_MODEL = _Reasons(FailureReason.BACKEND, FailureReason.OTHER)  # codes that a model may use for its own errors
_OTHER = _Reasons(FailureReason.OTHER, FailureReason.OTHER)

REASONS: Mapping[str, _Reasons] = {
    ErrorCode.QUEUE_FULL: _REJECTED,
    ErrorCode.QUOTA_EXCEEDED: _REJECTED,
    ErrorCode.DEADLINE_INFEASIBLE: _REJECTED,
    ErrorCode.DEADLINE_EXCEEDED: _REJECTED,
    ErrorCode.CANCELLED: _CANCELED,
    ErrorCode.INFERENCE_FAILED: _BACKEND,
    ErrorCode.OUTPUT_MISMATCH: _BACKEND,
    ErrorCode.UNKNOWN: _BACKEND,
    ErrorCode.INVALID_REQUEST: _OF_MODEL,
    ErrorCode.MODEL_NOT_FOUND: _OF_MODEL,
    ErrorCode.MODEL_NOT_READY: _OF_MODEL,
    ErrorCode.UNSUPPORTED_FEATURE: _OF_MODEL,
    ErrorCode.ALREADY_EXISTS: _OF_MODEL,
}
"""Error code → reason; all other codes have the reason OTHER."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MetricsChoice:
    """The choice of metrics by Triton's `--metrics-config`, and the models' configurations.

    Attributes:
        recent: Model version → the recent growth of the summaries' counts.
    """

    counters: bool = True
    quantiles: tuple[float, ...] = ()
    histogram: bool = False
    recent: Mapping[Key, Mapping[str, int]] = field(default_factory=dict)
    cached: Container[str] = ()
    tags: Mapping[str, Mapping[str, str]] = field(default_factory=dict)


USUAL = MetricsChoice()
"""Triton's defaults."""


class _Latency(NamedTuple):
    """The counter, summary and statistic of a request's phase."""

    counter: Info
    summary: Info
    field: str
    which: str


_LATENCIES = (
    _Latency(catalogue.NV_REQUEST_DURATION, catalogue.NV_REQUEST_SUMMARY, stats.SUCCESS_NS, latencies.REQUEST),
    _Latency(catalogue.NV_QUEUE_DURATION, catalogue.NV_QUEUE_SUMMARY, stats.QUEUE_NS, latencies.QUEUE),
    _Latency(catalogue.NV_INPUT_DURATION, catalogue.NV_INPUT_SUMMARY, stats.INPUT_NS, latencies.INPUT),
    _Latency(catalogue.NV_INFER_DURATION, catalogue.NV_INFER_SUMMARY, stats.INFER_NS, latencies.INFER),
    _Latency(catalogue.NV_OUTPUT_DURATION, catalogue.NV_OUTPUT_SUMMARY, stats.OUTPUT_NS, latencies.OUTPUT),
)


class _CacheUse(NamedTuple):
    counted: Info
    count_field: str
    latency: _Latency


_OF_CACHE = (
    _CacheUse(
        catalogue.NV_CACHE_HITS,
        stats.CACHE_HIT_COUNT,
        _Latency(
            catalogue.NV_CACHE_HIT_DURATION, catalogue.NV_CACHE_HIT_SUMMARY, stats.CACHE_HIT_NS, latencies.CACHE_HIT
        ),
    ),
    _CacheUse(
        catalogue.NV_CACHE_MISSES,
        stats.CACHE_MISS_COUNT,
        _Latency(
            catalogue.NV_CACHE_MISS_DURATION, catalogue.NV_CACHE_MISS_SUMMARY, stats.CACHE_MISS_NS, latencies.CACHE_MISS
        ),
    ),
)


def families(
    statistics: Mapping[Key, Mapping[str, int]],
    pending: Mapping[Key, int],
    load_s: Mapping[Key, float],
    wanted: MetricsChoice = USUAL,
) -> Iterator[Family]:
    """Yields Triton's metrics of models."""
    for shown in _families(statistics, pending, load_s, wanted):
        if wanted.tags:
            shown.samples = [_tagged(sample, wanted.tags) for sample in shown.samples]
        yield shown


def _tagged(sample: SampleLine, tags: Mapping[str, Mapping[str, str]]) -> SampleLine:
    own = tags.get(dict(sample.labels)["model"], {})
    return sample._replace(labels=(*((f"_{name}", own[name]) for name in sorted(own)), *sample.labels))


def _families(
    statistics: Mapping[Key, Mapping[str, int]],
    pending: Mapping[Key, int],
    load_s: Mapping[Key, float],
    wanted: MetricsChoice,
) -> Iterator[Family]:
    yield by_model(catalogue.NV_SUCCESS, {key: of.get(stats.SUCCESS_COUNT, 0) for key, of in statistics.items()})
    failed = Family(catalogue.NV_FAILURE)
    for key, fields in statistics.items():
        for reason, count in failures(fields).items():
            failed.add(count, reason=reason.value, **labels_of(key))
    yield failed
    yield by_model(catalogue.NV_COUNT, {key: of.get(stats.INFERENCE_COUNT, 0) for key, of in statistics.items()})
    yield by_model(catalogue.NV_EXEC_COUNT, {key: of.get(stats.EXECUTION_COUNT, 0) for key, of in statistics.items()})
    if wanted.counters:
        for latency in _LATENCIES:
            totals = {key: of.get(latency.field, 0) // 1000 for key, of in statistics.items()}
            yield by_model(latency.counter, totals)
    yield from _of_cache(statistics, wanted)
    if wanted.quantiles:
        # A summary of whole requests would mix hits and executions; Triton leaves it out.
        uncached = {key: of for key, of in statistics.items() if key[0] not in wanted.cached}
        for latency in _LATENCIES:
            yield _summary(latency, uncached if latency.which == latencies.REQUEST else statistics, wanted)
    if wanted.histogram:
        histogram = Family(catalogue.NV_FIRST_RESPONSE)
        for key, fields in statistics.items():
            buckets = stats.buckets(fields, latencies.FIRST_RESPONSE)
            total_ms = fields.get(latencies.FIRST_RESPONSE_NS, 0) // 1_000_000  # whole, as in Triton
            histogram.add_histogram(buckets, total_ms, **labels_of(key))
        yield histogram
    yield by_model(catalogue.NV_PENDING, pending)
    yield by_model(catalogue.NV_LOAD, load_s)


def of_gpus(uses: Iterable[GpuUse]) -> Iterator[Family]:
    """Yields each GPU's metrics once, though several workers report it."""
    gpus: dict[str, GpuUse] = {}
    for use in uses:
        known = gpus.get(use.uuid)
        if known is None or use.energy_j >= known.energy_j:  # the latest, as energy only grows
            gpus[use.uuid] = use
    if not gpus:
        return
    for info, name in _OF_GPUS:
        yield family(info, ((getattr(use, name), {"gpu_uuid": uuid}) for uuid, use in gpus.items()))


def of_host(use: HostUse) -> Iterator[Family]:
    """Yields metrics of this gateway's machine."""
    yield family(catalogue.NV_CPU_UTILIZATION, [(use.cpu, {})])
    yield family(catalogue.NV_CPU_MEMORY_TOTAL, [(use.memory_total_bytes, {})])
    yield family(catalogue.NV_CPU_MEMORY_USED, [(use.memory_used_bytes, {})])


def failures(fields: Mapping[str, int]) -> dict[FailureReason, int]:
    """Returns the failed requests by reason."""
    counts = dict.fromkeys(FailureReason, 0)
    for name, count in fields.items():
        if name.startswith(stats.FAILURES):
            counts[REASONS.get(name.removeprefix(stats.FAILURES), _OTHER).worker] += count
        elif name.startswith(stats.REFUSALS):
            counts[REASONS.get(name.removeprefix(stats.REFUSALS), _OTHER).gateway] += count
    return counts


def _of_cache(statistics: Mapping[Key, Mapping[str, int]], wanted: MetricsChoice) -> Iterator[Family]:
    """Yields the metrics of models that use or have used the cache."""
    counts = {stats.CACHE_HIT_COUNT, stats.CACHE_MISS_COUNT}
    of_cached = {key: of for key, of in statistics.items() if key[0] in wanted.cached or counts & set(of)}
    if not of_cached:
        return
    for use in _OF_CACHE if wanted.counters else ():
        yield by_model(use.counted, {key: of.get(use.count_field, 0) for key, of in of_cached.items()})
        totals = {key: of.get(use.latency.field, 0) // 1000 for key, of in of_cached.items()}
        yield by_model(use.latency.counter, totals)
    for use in _OF_CACHE if wanted.quantiles else ():
        yield _summary(use.latency, of_cached, wanted)


def _summary(latency: _Latency, statistics: Mapping[Key, Mapping[str, int]], wanted: MetricsChoice) -> Family:
    summary = Family(latency.summary)
    count_of = _COUNTED.get(latency.which, _executed)
    for key, fields in statistics.items():
        values = latencies.quantiles(wanted.recent.get(key, {}), latency.which, wanted.quantiles)
        summary.add_summary(values, count_of(fields), fields.get(latency.field, 0) // 1000, **labels_of(key))
    return summary


def _successful(fields: Mapping[str, int]) -> int:
    return fields.get(stats.SUCCESS_COUNT, 0)


def _executed(fields: Mapping[str, int]) -> int:
    return _successful(fields) - fields.get(stats.CACHE_HIT_COUNT, 0)


_COUNTED: Mapping[str, Callable[[Mapping[str, int]], int]] = {
    latencies.REQUEST: _successful,
    latencies.QUEUE: _successful,
    latencies.CACHE_HIT: lambda fields: fields.get(stats.CACHE_HIT_COUNT, 0),
    latencies.CACHE_MISS: lambda fields: fields.get(stats.CACHE_MISS_COUNT, 0),
}
"""Latency → the count of its summary; the other summaries count executed requests."""

_OF_GPUS = (
    (catalogue.NV_GPU_UTILIZATION, "utilization"),
    (catalogue.NV_GPU_MEMORY_TOTAL, "memory_total_bytes"),
    (catalogue.NV_GPU_MEMORY_USED, "memory_used_bytes"),
    (catalogue.NV_GPU_POWER, "power_w"),
    (catalogue.NV_GPU_POWER_LIMIT, "power_limit_w"),
    (catalogue.NV_GPU_ENERGY, "energy_j"),
)
