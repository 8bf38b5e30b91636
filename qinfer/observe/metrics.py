"""The content of `/metrics`: a gateway's own counts, and the shared store's data of workers and queues.

A gateway counts its own requests in plain integers (`GatewayTally`: one dict look-up and one bisect a request). The
data of workers and queues come from the shared store (`Snapshot`). The two are the scopes of `catalogue`, and no series
is in both. Series that have Triton's names are in `triton_metrics`.
"""

import time
from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from qinfer.errors import ErrorCode, InvalidRequest
from qinfer.observe import catalogue, exposition, stats, triton_metrics
from qinfer.observe.catalogue import Info, MetricScope
from qinfer.observe.exposition import CONTENT_TYPE, Family
from qinfer.observe.host import GpuUse, HostUse, ProcessUse


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerLoad:
    """A live worker as the metrics show it, as of its last heartbeat.

    Attributes:
        device: The device that it executes on.
        executing: Requests in its batches.
        ready: Model versions that it has ready.
        renewals: Leases that it has renewed.
        leases_lost: Leases that it has lost.
        use: CPU time and memory; `None` = not known.
        gpus: Its GPUs, where they can be asked.
    """

    device: str
    executing: int
    ready: int = 0
    renewals: int = 0
    leases_lost: int = 0
    use: ProcessUse | None = None
    gpus: tuple[GpuUse, ...] = ()


def _worker_families(workers: Mapping[str, WorkerLoad]) -> Iterator[Family]:
    """Yields the metrics of workers.

    Args:
        workers: Worker id → its load.
    """
    up, used, total, busy = map(
        Family,
        (
            catalogue.WORKER_UP,
            catalogue.DEVICE_MEMORY_USED,
            catalogue.DEVICE_MEMORY_TOTAL,
            catalogue.DEVICE_UTILIZATION,
        ),
    )
    for worker, load in workers.items():
        up.add(1, worker=worker, device=load.device)
        for gpu in load.gpus:
            device = f"gpu {gpu.number}"
            used.add(gpu.memory_used_bytes, worker=worker, device=device)
            total.add(gpu.memory_total_bytes, worker=worker, device=device)
            busy.add(gpu.utilization, worker=worker, device=device)
    yield up
    for info, value in _OF_WORKERS:
        family = Family(info)
        for worker, load in workers.items():
            known = value(load)
            if known is not None:
                family.add(known, worker=worker)
        yield family
    yield from (used, total, busy)


_OF_WORKERS: tuple[tuple[Info, Callable[[WorkerLoad], float | None]], ...] = (
    (catalogue.WORKER_EXECUTING, lambda load: load.executing),
    (catalogue.WORKER_READY_MODELS, lambda load: load.ready),
    (catalogue.WORKER_RENEWALS, lambda load: load.renewals),
    (catalogue.WORKER_LEASES_LOST, lambda load: load.leases_lost),
    (catalogue.WORKER_CPU, lambda load: load.use and load.use.cpu_s),
    (catalogue.WORKER_MEMORY, lambda load: load.use and load.use.memory_bytes),
)


__all__ = ["CONTENT_TYPE", "GatewayTally", "Snapshot", "WorkerLoad", "render", "scopes_of"]

_DURATION_BUCKETS_S = stats.QUEUE_BUCKETS_S
_UNKNOWN_MODEL = ErrorCode.MODEL_NOT_FOUND.value
_NOT_ADMITTED = (ErrorCode.QUEUE_FULL, ErrorCode.DEADLINE_INFEASIBLE, ErrorCode.QUOTA_EXCEEDED)
_EXPIRED = (f"{stats.FAILURES}{ErrorCode.DEADLINE_EXCEEDED}", f"{stats.REFUSALS}{ErrorCode.DEADLINE_EXCEEDED}")
_Key = tuple[str, int]


class _Durations:
    """One series of the duration histogram."""

    __slots__ = ("counts", "total_s")

    def __init__(self) -> None:
        self.counts = [0] * (len(_DURATION_BUCKETS_S) + 1)
        self.total_s = 0.0


class GatewayTally:
    """Counts what one gateway answered; used by its event loop only.

    Args:
        process: The gateway's name.

    Attributes:
        in_flight: Called at each scrape for the number of requests without an answer; the gateway sets it.
        refusals: What this gateway adds to the models' statistics.
    """

    def __init__(self, process: str = "") -> None:
        self.in_flight: Callable[[], int] = lambda: 0
        self.refusals = stats.RefusalTally()
        self.process = process
        self._answered: dict[_Key, _Durations] = {}
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

    def collect(self) -> Iterator[Family]:
        """Yields this gateway's metrics."""
        requests, failures = Family(catalogue.REQUESTS), Family(catalogue.REQUEST_FAILURES)
        durations, in_flight = Family(catalogue.REQUEST_DURATION), Family(catalogue.REQUESTS_IN_FLIGHT)
        totals: dict[_Key, int] = {}
        for (model, version, reason), count in self._failed.items():
            failures.add(count, reason=reason, process=self.process, **_labels((model, version)))
            totals[model, version] = totals.get((model, version), 0) + count
        for key, series in self._answered.items():
            cumulative = _cumulative(_DURATION_BUCKETS_S, series.counts)
            durations.add_histogram(cumulative, series.total_s, process=self.process, **_labels(key))
            totals[key] = totals.get(key, 0) + cumulative[-1][1]
        for key, total in totals.items():
            requests.add(total, process=self.process, **_labels(key))
        in_flight.add(self.in_flight(), process=self.process)
        yield from (requests, failures, durations, in_flight)


@dataclass(frozen=True, slots=True, kw_only=True)
class Snapshot:
    """The data of the shared store at a scrape.

    Attributes:
        store_up: It could be read; otherwise the rest is what is still known.
        stats: (model, version) → statistics, the fields of `observability.stats`.
        depth: (model, version, lane) → entries of an online lane, waiting and in flight.
        shards: (model, version, lane) → entries of a bulk lane, of models that have bulk jobs.
        ages_s: (model, version, lane) → how long its oldest entry has been in the queue.
        rows: (model, version) → rows to be executed.
        work_s: (model, version) → seconds that one worker would need for them.
        ready: (model, version) → whether it can be asked.
        workers: Worker id → its load.
        executing: (model, version) → requests that instances execute, of all workers, at their last heartbeats.
        load_s: (model, version) → seconds that its last load took, in the worker where it took longest.
        letters: (model, version) → dead letters; version 0 = it is not known yet.
        jobs: State → bulk jobs.
        scaled: Direction → decisions of all autoscalers.
        wanted_workers: How many workers the live autoscalers want; `None` = none lives.
        features: The metrics of features that keep their own counts, such as bridges.
        labeling: Model → labeling tasks that are not over; of models that have labeling tasks.
        host: What the gateway's machine uses; `None` = not known.
        use: What the gateway itself uses; `None` = not known.
    """

    store_up: bool = True
    stats: Mapping[_Key, Mapping[str, int]] = field(default_factory=dict)
    depth: Mapping[tuple[str, int, str], int] = field(default_factory=dict)
    shards: Mapping[tuple[str, int, str], int] = field(default_factory=dict)
    ages_s: Mapping[tuple[str, int, str], float] = field(default_factory=dict)
    rows: Mapping[_Key, int] = field(default_factory=dict)
    work_s: Mapping[_Key, float] = field(default_factory=dict)
    ready: Mapping[_Key, bool] = field(default_factory=dict)
    workers: Mapping[str, WorkerLoad] = field(default_factory=dict)
    executing: Mapping[_Key, int] = field(default_factory=dict)
    load_s: Mapping[_Key, float] = field(default_factory=dict)
    letters: Mapping[_Key, int] = field(default_factory=dict)
    jobs: Mapping[str, int] = field(default_factory=dict)
    scaled: Mapping[str, int] = field(default_factory=dict)
    wanted_workers: int | None = None
    features: Sequence[Family] = ()
    labeling: Mapping[str, int] = field(default_factory=dict)
    host: HostUse | None = None
    use: ProcessUse | None = None

    def of_process(self, process: str) -> Iterator[Family]:
        """Yields what is about the gateway itself."""
        yield _single(catalogue.STORE_UP, int(self.store_up), process=process)
        if self.use is not None:
            yield _single(catalogue.PROCESS_CPU, self.use.cpu_s, process=process)
            yield _single(catalogue.PROCESS_MEMORY, self.use.memory_bytes, process=process)

    def collect(self) -> Iterator[Family]:
        """Yields what is about the whole installation, but for Triton's names."""
        backlog, ages = Family(catalogue.BACKLOG), Family(catalogue.OLDEST_AGE)
        for (model, version, lane), depth in (*self.depth.items(), *self.shards.items()):
            backlog.add(depth, lane=lane, **_labels((model, version)))
        for (model, version, lane), age_s in self.ages_s.items():
            ages.add(age_s, lane=lane, **_labels((model, version)))
        yield from (backlog, ages)
        yield _by_model(catalogue.BACKLOG_ROWS, self.rows)
        yield _by_model(catalogue.BACKLOG_WORK, self.work_s)
        yield _by_model(catalogue.EXECUTING, {key: self.executing.get(key, 0) for key in self.ready})
        yield _by_model(catalogue.MODEL_READY, self.ready)
        yield _by_model(catalogue.DEAD_LETTERS, self.letters)
        jobs, decisions, target = map(
            Family, (catalogue.JOBS, catalogue.AUTOSCALE_DECISIONS, catalogue.AUTOSCALE_TARGET)
        )
        for state, count in self.jobs.items():
            jobs.add(count, state=state)
        for direction, count in self.scaled.items():
            decisions.add(count, direction=direction)
        if self.wanted_workers is not None:
            target.add(self.wanted_workers)
        yield from (jobs, decisions, target)
        yield from _worker_families(self.workers)
        yield from self.features
        yield from self._counted()
        yield from self._of_labeling()

    def of_triton(self, wanted: triton_metrics.Wanted = triton_metrics.USUAL) -> Iterator[Family]:
        """Yields the metrics of the installation that have Triton's names; `wanted` are those that can be chosen."""
        waiting: dict[_Key, int] = {}
        for (model, version, _), depth in self.depth.items():
            waiting[model, version] = waiting.get((model, version), 0) + depth
        # Depth is of now, and what executes of up to a heartbeat ago.
        pending = {key: max(depth - self.executing.get(key, 0), 0) for key, depth in waiting.items()}
        yield from triton_metrics.families(self.stats, pending, self.load_s, wanted)
        yield from triton_metrics.of_gpus(gpu for load in self.workers.values() for gpu in load.gpus)

    def _counted(self) -> Iterator[Family]:
        """Yields what is made of the statistics."""
        for info, field_name in _FIELDS:
            yield _by_model(info, {key: fields.get(field_name, 0) for key, fields in self.stats.items()})
        yield _by_model(
            catalogue.EXPIRED,
            {key: sum(fields.get(name, 0) for name in _EXPIRED) for key, fields in self.stats.items()},
        )
        failures, refused, rows = map(Family, (catalogue.EXECUTION_FAILURES, catalogue.REFUSED, catalogue.JOB_ROWS))
        for key, fields in self.stats.items():
            for name, count in fields.items():
                if name.startswith(stats.FAILURES):
                    failures.add(count, reason=name.removeprefix(stats.FAILURES), **_labels(key))
            for code in _NOT_ADMITTED:
                refused.add(fields.get(stats.REFUSALS + code, 0), reason=code.value, **_labels(key))
            for outcome, name in (("done", stats.ROWS_DONE), ("failed", stats.ROWS_FAILED)):
                rows.add(fields.get(name, 0), outcome=outcome, **_labels(key))
        yield from (failures, refused, rows)
        for info, histogram, total in _HISTOGRAMS:
            family = Family(info)
            for key, fields in self.stats.items():
                family.add_histogram(stats.buckets(fields, histogram), total(fields), **_labels(key))
            yield family

    def _of_labeling(self) -> Iterator[Family]:
        """Yields what is about tasks whose predictions are pushed, of models that ever had some."""
        waiting, failed = Family(catalogue.LABEL_WAITING), Family(catalogue.LABEL_FAILED)
        for model, tasks in self.labeling.items():
            waiting.add(tasks, model=model)
        of = {key: fields for key, fields in self.stats.items() if any(map(fields.get, stats.LABELING))}
        for key, fields in of.items():
            for reason in stats.LabelFailure:
                failed.add(fields.get(stats.LABEL_FAILED + reason, 0), reason=reason.value, **_labels(key))
        yield from (waiting, failed)
        for info, field_name in _LABELING:
            yield _by_model(info, {key: fields.get(field_name, 0) for key, fields in of.items()})


def scopes_of(text: str) -> frozenset[MetricScope]:
    """Returns the scopes that `?scope=` asks for; empty = both.

    Raises:
        InvalidRequest: There is no such scope.
    """
    if not text:
        return frozenset((MetricScope.CLUSTER, MetricScope.PROCESS))
    if text not in (MetricScope.CLUSTER, MetricScope.PROCESS):
        raise InvalidRequest(f"unknown scope '{text[:60]}': it must be cluster or process, or be left out for both")
    return frozenset((MetricScope(text),))


def render(
    tally: GatewayTally,
    snapshot: Snapshot,
    scopes: Iterable[MetricScope] = tuple(MetricScope),
    wanted: triton_metrics.Wanted = triton_metrics.USUAL,
) -> bytes:
    """Returns the body of `GET /metrics`, in the Prometheus text format (`CONTENT_TYPE`), Triton's names last.

    Args:
        tally: What the gateway counted.
        snapshot: What the shared store said.
        scopes: What to show.
        wanted: Which of Triton's metrics to show of those that can be chosen.
    """
    shown, tritons = list[Family](), list[Family]()
    if MetricScope.PROCESS in scopes:
        shown += [*tally.collect(), *snapshot.of_process(tally.process)]
        tritons += [] if snapshot.host is None else triton_metrics.of_host(snapshot.host)
    if MetricScope.CLUSTER in scopes:
        shown += snapshot.collect()
        tritons = [*snapshot.of_triton(wanted), *tritons]
    return exposition.render([*shown, *tritons])


def _single(info: Info, value: float, **labels: str) -> Family:
    family = Family(info)
    family.add(value, **labels)
    return family


def _by_model(info: Info, values: Mapping[_Key, float]) -> Family:
    family = Family(info)
    for key, value in values.items():
        family.add(value, **_labels(key))
    return family


def _labels(key: _Key) -> dict[str, str]:
    return {"model": key[0], "version": str(key[1]) if key[1] else ""}


def _cumulative(bounds: Iterable[float], counts: Iterable[int]) -> list[tuple[float, int]]:
    total, pairs = 0, []
    for bound, count in zip((*bounds, float("inf")), counts, strict=True):
        total += count
        pairs.append((bound, total))
    return pairs


_FIELDS = (
    (catalogue.EXECUTED_REQUESTS, stats.SUCCESS_COUNT),
    (catalogue.RETRIES, stats.RETRIES),
    (catalogue.REDELIVERIES, stats.REDELIVERIES),
    (catalogue.DEAD_LETTERS_TOTAL, stats.DEAD_LETTERS),
)
_LABELING = (
    (catalogue.LABEL_QUEUED, stats.LABEL_QUEUED),
    (catalogue.LABEL_PUSHED, stats.LABEL_PUSHED),
    (catalogue.LABEL_RETRIES, stats.LABEL_RETRIES),
)
_HISTOGRAMS: tuple[tuple[Info, str, Callable[[Mapping[str, int]], float]], ...] = (
    (catalogue.QUEUE_WAIT, stats.QUEUE, lambda fields: fields.get(stats.QUEUE_NS, 0) / 1e9),
    (catalogue.ASSEMBLE, stats.ASSEMBLE, lambda fields: sum(of.input_ns for of in stats.batches(fields)) / 1e9),
    (catalogue.EXECUTION, stats.EXECUTION, lambda fields: fields.get(stats.EXECUTION_NS, 0) / 1e9),
    (catalogue.PUBLISH, stats.PUBLISH, lambda fields: fields.get(stats.PUBLISH_NS, 0) / 1e9),
    (catalogue.BATCH_SIZE, stats.BATCH, lambda fields: fields.get(stats.INFERENCE_COUNT, 0)),
    (catalogue.BATCH_FILL, stats.FILL, lambda fields: fields.get(stats.FILL_PERMILLE, 0) / 1000),
)
