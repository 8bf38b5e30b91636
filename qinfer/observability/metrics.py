"""Every metric that qinfer exposes, and how the text of `/metrics` is made.

A gateway counts its own requests in plain integers (`GatewayTally`: one dict look-up and one bisect a request). What
workers and queues know comes from the shared store (`Snapshot`): every gateway shows the same numbers of those, so
aggregate them over gateways with `max`, not `sum`; their help texts say "shared". Those that have Triton's names are in
`observability.triton_metrics`.
"""

import time
from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

from qinfer.errors import ErrorCode
from qinfer.observability import stats, triton_metrics
from qinfer.observability.host import HostUse

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"

REQUESTS = "qinfer_requests_total"
REQUEST_FAILURES = "qinfer_request_failures_total"
REQUEST_DURATION = "qinfer_request_duration_seconds"
REQUESTS_IN_FLIGHT = "qinfer_requests_in_flight"
BACKLOG = "qinfer_backlog_requests"
QUEUE_WAIT = "qinfer_queue_wait_seconds"
BATCH_SIZE = "qinfer_batch_size_rows"
EXECUTION = "qinfer_execution_seconds"
EXECUTED_REQUESTS = "qinfer_executed_requests_total"
EXECUTION_FAILURES = "qinfer_execution_failures_total"
RETRIES = "qinfer_retries_total"
DEAD_LETTERS = "qinfer_dead_letters_total"
WORKER_UP = "qinfer_worker_up"
WORKER_EXECUTING = "qinfer_worker_executing_requests"
MODEL_READY = "qinfer_model_ready"
STORE_UP = "qinfer_store_up"

_DURATION_BUCKETS_S = stats.QUEUE_BUCKETS_S
_MODEL = ("model", "version")
_UNKNOWN_MODEL = ErrorCode.MODEL_NOT_FOUND.value


class _Durations:
    """One series of the duration histogram."""

    __slots__ = ("counts", "total_s")

    def __init__(self) -> None:
        self.counts = [0] * (len(_DURATION_BUCKETS_S) + 1)
        self.total_s = 0.0


class GatewayTally:
    """Counts what one gateway answered; used by its event loop only.

    Attributes:
        in_flight: Called at each scrape for the number of requests without an answer; the gateway sets it.
        refusals: What this gateway adds to the models' statistics.
    """

    def __init__(self) -> None:
        self.in_flight: Callable[[], int] = lambda: 0
        self.refusals = stats.RefusalTally()
        self._answered: dict[tuple[str, int], _Durations] = {}
        self._failed: dict[tuple[str, int, str], int] = {}

    def answered(self, model: str, version: int, seconds: float) -> None:
        """Counts a request answered with outputs, `seconds` after it was received."""
        series = self._answered.get((model, version))
        if series is None:
            series = self._answered[model, version] = _Durations()
        series.counts[bisect_left(_DURATION_BUCKETS_S, seconds)] += 1
        series.total_s += seconds

    def failed(self, model: str, version: int, reason: str) -> None:
        """Counts a request answered with an error, by `ErrorCode` value.

        Unknown models share one series without a name: clients may not make series of names they think up.
        """
        key = ("", 0, reason) if reason == _UNKNOWN_MODEL else (model, version, reason)
        self._failed[key] = self._failed.get(key, 0) + 1

    def ended(self, model: str, version: int, reason: str, started_s: float | None = None) -> None:
        """Counts a request that this gateway ended itself, so that no worker counts it, for the models' statistics.

        Args:
            model: A model that exists.
            version: Its version.
            reason: The `ErrorCode` value.
            started_s: When it was received, in monotonic time; `None` = it never waited, or nobody knows how long.
        """
        seconds = 0.0 if started_s is None else time.monotonic() - started_s
        self.refusals.refused(model, version, reason, seconds)

    def collect(self) -> Iterator[Metric]:
        """Yields this gateway's metrics."""
        requests = CounterMetricFamily(REQUESTS, "Requests answered by this gateway, failures included.", labels=_MODEL)
        failures = CounterMetricFamily(
            REQUEST_FAILURES, "Requests answered with an error by this gateway.", labels=(*_MODEL, "reason")
        )
        durations = HistogramMetricFamily(
            REQUEST_DURATION, "Seconds from receiving a request to its outputs, in this gateway.", labels=_MODEL
        )
        totals: dict[tuple[str, int], int] = {}
        for (model, version, reason), count in self._failed.items():
            failures.add_metric((model, _version(version), reason), count)
            totals[model, version] = totals.get((model, version), 0) + count
        for key, series in self._answered.items():
            cumulative = _cumulative(_DURATION_BUCKETS_S, series.counts)
            durations.add_metric(_labels(key), _texts(cumulative), series.total_s)
            totals[key] = totals.get(key, 0) + cumulative[-1][1]
        for key, total in totals.items():
            requests.add_metric(_labels(key), total)
        yield from (requests, failures, durations)
        in_flight = GaugeMetricFamily(REQUESTS_IN_FLIGHT, "Requests that this gateway has not answered yet.")
        in_flight.add_metric((), self.in_flight())
        yield in_flight


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerLoad:
    """A live worker as the metrics show it: what it runs on, and how many requests it executes now."""

    device: str
    executing: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Snapshot:
    """What the shared store said at a scrape.

    Attributes:
        store_up: It could be read; otherwise the rest is what is still known.
        stats: (model, version) → statistics, the fields of `observability.stats`.
        depth: (model, version, lane) → entries of an online lane, waiting and in flight.
        shards: (model, version, lane) → entries of a bulk lane, of models that have bulk jobs.
        ready: (model, version) → whether it can be asked.
        workers: Worker id → its load.
        executing: (model, version) → requests that instances execute, of all workers, at their last heartbeats.
        load_s: (model, version) → seconds that its last load took, in the worker where it took longest.
        host: What the gateway's machine uses; `None` = not known.
    """

    store_up: bool = True
    stats: Mapping[tuple[str, int], Mapping[str, int]] = field(default_factory=dict)
    depth: Mapping[tuple[str, int, str], int] = field(default_factory=dict)
    shards: Mapping[tuple[str, int, str], int] = field(default_factory=dict)
    ready: Mapping[tuple[str, int], bool] = field(default_factory=dict)
    workers: Mapping[str, WorkerLoad] = field(default_factory=dict)
    executing: Mapping[tuple[str, int], int] = field(default_factory=dict)
    load_s: Mapping[tuple[str, int], float] = field(default_factory=dict)
    host: HostUse | None = None

    def collect(self) -> Iterator[Metric]:
        """Yields the shared metrics."""
        store = GaugeMetricFamily(STORE_UP, "1 if this gateway could read the shared store at this scrape.")
        store.add_metric((), float(self.store_up))
        yield store
        backlog = GaugeMetricFamily(
            BACKLOG,
            "Requests in a lane, or shards of bulk jobs in a bulk lane, waiting and in flight (shared).",
            labels=(*_MODEL, "lane"),
        )
        for (model, version, lane), depth in (*self.depth.items(), *self.shards.items()):
            backlog.add_metric((model, _version(version), lane), depth)
        ready = GaugeMetricFamily(MODEL_READY, "1 if a live worker can execute the version (shared).", labels=_MODEL)
        for key, is_ready in self.ready.items():
            ready.add_metric(_labels(key), float(is_ready))
        up = GaugeMetricFamily(WORKER_UP, "1 for each live worker (shared).", labels=("worker", "device"))
        executing = GaugeMetricFamily(
            WORKER_EXECUTING, "Requests in a worker's batches at its last heartbeat (shared).", labels=("worker",)
        )
        for worker, load in self.workers.items():
            up.add_metric((worker, load.device), 1)
            executing.add_metric((worker,), load.executing)
        yield from (backlog, ready, up, executing)
        yield from self._executions()

    def of_triton(self) -> Iterator[triton_metrics.Family]:
        """Yields the metrics that have Triton's names: shared ones, and those of the machine."""
        waiting: dict[tuple[str, int], int] = {}
        for (model, version, _), depth in self.depth.items():
            waiting[model, version] = waiting.get((model, version), 0) + depth
        # Depth is of now, and what executes of up to a heartbeat ago.
        pending = {key: max(depth - self.executing.get(key, 0), 0) for key, depth in waiting.items()}
        yield from triton_metrics.families(self.stats, pending, self.load_s)
        if self.host is not None:
            yield from triton_metrics.of_host(self.host)

    def _executions(self) -> Iterator[Metric]:
        requests = CounterMetricFamily(
            EXECUTED_REQUESTS, "Requests that workers executed successfully (shared).", labels=_MODEL
        )
        failures = CounterMetricFamily(
            EXECUTION_FAILURES, "Requests that failed in a worker (shared).", labels=(*_MODEL, "reason")
        )
        retries = CounterMetricFamily(
            RETRIES, "Requests executed again because their batch raised, each time (shared).", labels=_MODEL
        )
        dead_letters = CounterMetricFamily(
            DEAD_LETTERS, "Requests that workers gave up and put with the dead letters (shared).", labels=_MODEL
        )
        for key, fields in self.stats.items():
            requests.add_metric(_labels(key), fields.get(stats.SUCCESS_COUNT, 0))
            retries.add_metric(_labels(key), fields.get(stats.RETRIES, 0))
            dead_letters.add_metric(_labels(key), fields.get(stats.DEAD_LETTERS, 0))
            for name, count in fields.items():
                if name.startswith(stats.FAILURES):
                    failures.add_metric((*_labels(key), name.removeprefix(stats.FAILURES)), count)
        yield from (requests, failures, retries, dead_letters)
        for name, text, histogram, sum_field, unit in (
            (
                QUEUE_WAIT,
                "Seconds from enqueueing a request to the start of its execution",
                stats.QUEUE,
                stats.QUEUE_NS,
                1e9,
            ),
            (EXECUTION, "Seconds that executing a batch took", stats.EXECUTION, stats.EXECUTION_NS, 1e9),
            (BATCH_SIZE, "Rows of an executed batch", stats.BATCH, stats.INFERENCE_COUNT, 1),
        ):
            family = HistogramMetricFamily(name, f"{text} (shared).", labels=_MODEL)
            for key, fields in self.stats.items():
                family.add_metric(
                    _labels(key), _texts(stats.buckets(fields, histogram)), fields.get(sum_field, 0) / unit
                )
            yield family


def render(tally: GatewayTally, snapshot: Snapshot) -> bytes:
    """Returns the body of `GET /metrics`, in the Prometheus text format (`CONTENT_TYPE`)."""
    registry = CollectorRegistry(auto_describe=False)
    registry.register(_Both(tally, snapshot))
    return generate_latest(registry) + triton_metrics.render(snapshot.of_triton())


class _Both(Collector):
    def __init__(self, tally: GatewayTally, snapshot: Snapshot) -> None:
        self._parts = (tally, snapshot)

    def collect(self) -> Iterable[Metric]:
        for part in self._parts:
            yield from part.collect()


def _labels(key: tuple[str, int]) -> tuple[str, str]:
    return key[0], _version(key[1])


def _version(version: int) -> str:
    return str(version) if version else ""


def _cumulative(bounds: Iterable[float], counts: Iterable[int]) -> list[tuple[float, int]]:
    total, pairs = 0, []
    for bound, count in zip((*bounds, float("inf")), counts, strict=True):
        total += count
        pairs.append((bound, total))
    return pairs


def _texts(cumulative: Iterable[tuple[float, int]]) -> list[tuple[str, float]]:
    return [("+Inf" if bound == float("inf") else str(float(bound)), count) for bound, count in cumulative]
