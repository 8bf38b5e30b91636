"""The content of `/metrics`: counts of a gateway (`stats.GatewayTally`) and of the shared store (`MetricsSnapshot`)."""

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

from qinfer.errors import ErrorCode, InvalidRequest
from qinfer.models.state import State, WorkerRecord
from qinfer.models.store import Underway
from qinfer.observe import catalogue, stats, triton_metrics
from qinfer.observe.catalogue import Info, MetricScope
from qinfer.observe.exposition import Family, by_model, family, labels_of
from qinfer.observe.host import HostUse, ProcessUse
from qinfer.observe.stats import GatewayTally, Objective
from qinfer.queue.entries import BULK_LANES
from qinfer.scaling.work import SequenceWork, VersionWork

_NOT_ADMITTED = (ErrorCode.QUEUE_FULL, ErrorCode.DEADLINE_INFEASIBLE, ErrorCode.QUOTA_EXCEEDED)
_EXPIRED = (f"{stats.FAILURES}{ErrorCode.DEADLINE_EXCEEDED}", f"{stats.REFUSALS}{ErrorCode.DEADLINE_EXCEEDED}")
_Key = tuple[str, int]
_T = TypeVar("_T")


def _of_gateway(tally: GatewayTally) -> Iterator[Family]:
    own = {"process": tally.process}
    failures, durations = Family(catalogue.REQUEST_FAILURES), Family(catalogue.REQUEST_DURATION)
    totals: dict[_Key, int] = {}
    missed: dict[_Key, int] = {}
    aimed: dict[_Key, int] = {}
    for (model, version, reason), count in tally.failures.items():
        failures.add(count, reason=reason, **own, **labels_of((model, version)))
        totals[model, version] = totals.get((model, version), 0) + count
        if model and reason not in stats.BY_CALLERS:
            missed[model, version] = aimed[model, version] = missed.get((model, version), 0) + count
    for key, series in tally.durations.items():
        durations.add_durations(series, **own, **labels_of(key))
        totals[key] = totals.get(key, 0) + sum(series.counts)
        aimed[key] = aimed.get(key, 0) + sum(series.counts)
        missed[key] = missed.get(key, 0) + series.late
    yield family(catalogue.REQUESTS, ((total, own | labels_of(key)) for key, total in totals.items()))
    yield from (failures, durations)
    for info, counts in ((catalogue.SLO_REQUESTS, aimed), (catalogue.SLO_MISSED, missed)):
        yield family(info, ((count, own | labels_of(key)) for key, count in counts.items()))
    yield family(catalogue.REQUESTS_IN_FLIGHT, [(tally.in_flight(), own)])


@dataclass(frozen=True, slots=True, kw_only=True)
class MetricsSnapshot:
    """The data of the shared store at a scrape; mappings without a stated key are by (model, version).

    Attributes:
        store_up: Whether the store could be read; otherwise the other data is from earlier scrapes.
        underway: Worker → requests under way, newer than its heartbeat.
        waiting_steps: Steps of sequences that wait.
        features: The metrics of features with their own counts, such as bridges.
    """

    store_up: bool = True
    stats: Mapping[_Key, Mapping[str, int]] = field(default_factory=dict)
    work: Sequence[VersionWork] = ()
    ready: Mapping[_Key, bool] = field(default_factory=dict)
    load_failed: Mapping[_Key, bool] = field(default_factory=dict)
    objectives: Mapping[_Key, Objective] = field(default_factory=dict)
    workers: Sequence[WorkerRecord] = ()
    underway: Mapping[str, Underway] = field(default_factory=dict)
    waiting_steps: Mapping[_Key, int] = field(default_factory=dict)
    letters: Mapping[_Key, int] = field(default_factory=dict)
    sequences: Sequence[SequenceWork] = ()
    jobs: Mapping[str, int] = field(default_factory=dict)
    scaled: Mapping[str, int] = field(default_factory=dict)
    wanted_workers: int | None = None
    features: Sequence[Family] = ()
    labeling: Mapping[str, int] = field(default_factory=dict)
    host: HostUse | None = None
    use: ProcessUse | None = None

    def of_process(self, process: str) -> Iterator[Family]:
        """Yields the gateway's own metrics."""
        own = {"process": process}
        yield family(catalogue.STORE_UP, [(int(self.store_up), own)])
        if self.use is not None:
            yield family(catalogue.PROCESS_CPU, [(self.use.cpu_s, own)])
            yield family(catalogue.PROCESS_MEMORY, [(self.use.memory_bytes, own)])
            yield family(catalogue.OPEN_FDS, [(self.use.open_fds, own)])
            yield family(catalogue.MAX_FDS, [(self.use.max_fds, own)])

    def collect(self) -> Iterator[Family]:
        """Yields the installation's metrics with qinfer's names."""
        backlog, oldest = Family(catalogue.BACKLOG), Family(catalogue.OLDEST_AGE)
        for (key, lane), (entries, age_s) in self.lanes().items():
            backlog.add(entries, lane=lane, **labels_of(key))
            oldest.add(age_s, lane=lane, **labels_of(key))
        yield from (backlog, oldest)
        yield by_model(catalogue.BACKLOG_ROWS, {(of.model, of.version): of.rows for of in self.work})
        yield by_model(catalogue.BACKLOG_WORK, {(of.model, of.version): of.work_s for of in self.work})
        executing, long = self._executing(), [one for worker in self.workers for one in worker.long]
        late = Counter((one.model, one.version) for one in long if one.is_late)
        longest_s = _greatest(((one.model, one.version), one.seconds) for one in long)
        yield by_model(catalogue.EXECUTING, {key: executing[key] for key in self.ready})
        yield by_model(catalogue.EXECUTING_SECONDS, {key: longest_s.get(key, 0.0) for key in self.ready})
        yield by_model(catalogue.LATE_EXECUTIONS, {key: late[key] for key in self.ready})
        yield by_model(catalogue.MODEL_READY, self.ready)
        yield by_model(catalogue.MODEL_LOAD_FAILED, self.load_failed)
        yield by_model(catalogue.SLO_LATENCY, {key: of.latency_s for key, of in self.objectives.items()})
        yield by_model(catalogue.SLO_TARGET, {key: of.target for key, of in self.objectives.items()})
        yield by_model(catalogue.DEAD_LETTERS, self.letters)
        for info, name in _SEQUENCES:
            yield family(info, ((getattr(one, name), {"model": one.model}) for one in self.sequences))
        yield family(catalogue.JOBS, ((count, {"state": state}) for state, count in self.jobs.items()))
        yield family(catalogue.AUTOSCALE_DECISIONS, ((count, {"direction": way}) for way, count in self.scaled.items()))
        yield family(catalogue.AUTOSCALE_TARGET, [] if self.wanted_workers is None else [(self.wanted_workers, {})])
        yield from _worker_families(self.workers)
        yield from self.features
        yield from self._counted()
        yield from self._of_labeling()

    def of_triton(self, wanted: triton_metrics.MetricsChoice = triton_metrics.USUAL) -> Iterator[Family]:
        """Yields the installation's metrics with Triton's names."""
        waiting: Counter[_Key] = Counter()
        for (key, lane), (entries, _) in self.lanes().items():
            if lane not in BULK_LANES:
                waiting[key] += entries
        direct, executing = _summed(one.direct for one in self._underway()), self._executing()
        pending = {
            key: max(entries + direct[key] + self.waiting_steps.get(key, 0) - executing[key], 0)
            for key, entries in waiting.items()
        }
        load_s = _greatest(
            pair for pair in _by_version(worker.load_s for worker in self.workers) if pair[0] in self.ready
        )
        yield from triton_metrics.families(self.stats, pending, load_s, wanted)
        yield from triton_metrics.of_gpus(gpu for worker in self.workers for gpu in worker.gpus)

    def lanes(self) -> dict[tuple[_Key, str], tuple[int, float]]:
        """Returns entries, waiting and in flight, and the age of the oldest, by version and lane."""
        found: dict[tuple[_Key, str], tuple[int, float]] = {}
        for of in self.work:
            for one in of.lanes:
                key = (of.model, of.version), one.lane.name
                entries, age_s = found.get(key, (0, 0.0))
                found[key] = entries + one.entries, max(age_s, one.oldest_age_s)
        return found

    def _underway(self) -> Iterator[Underway]:
        return (self.underway.get(worker.id) or Underway(worker.busy, worker.direct) for worker in self.workers)

    def _executing(self) -> Counter[_Key]:
        return _summed(one.busy for one in self._underway())

    def _counted(self) -> Iterator[Family]:
        for info, field_name in _FIELDS:
            yield by_model(info, {key: fields.get(field_name, 0) for key, fields in self.stats.items()})
        yield by_model(
            catalogue.EXPIRED,
            {key: sum(fields.get(name, 0) for name in _EXPIRED) for key, fields in self.stats.items()},
        )
        failures, refused, rows, put_off = map(
            Family, (catalogue.EXECUTION_FAILURES, catalogue.REFUSED, catalogue.JOB_ROWS, catalogue.JOB_PUT_OFF)
        )
        for key, fields in self.stats.items():
            for name, count in fields.items():
                if name.startswith(stats.FAILURES):
                    failures.add(count, reason=name.removeprefix(stats.FAILURES), **labels_of(key))
                elif name.startswith(stats.PUT_OFF):
                    put_off.add(count, reason=name.removeprefix(stats.PUT_OFF), **labels_of(key))
            for code in _NOT_ADMITTED:
                refused.add(fields.get(stats.REFUSALS + code, 0), reason=code.value, **labels_of(key))
            for outcome, name in (("done", stats.ROWS_DONE), ("failed", stats.ROWS_FAILED)):
                rows.add(fields.get(name, 0), outcome=outcome, **labels_of(key))
        yield from (failures, refused, rows, put_off)
        for info, histogram, total in _HISTOGRAMS:
            shown = Family(info)
            for key, fields in self.stats.items():
                shown.add_histogram(stats.buckets(fields, histogram), total(fields), **labels_of(key))
            yield shown

    def _of_labeling(self) -> Iterator[Family]:
        yield family(catalogue.LABEL_WAITING, ((tasks, {"model": model}) for model, tasks in self.labeling.items()))
        failed = Family(catalogue.LABEL_FAILED)
        of = {key: fields for key, fields in self.stats.items() if any(map(fields.get, stats.LABELING))}
        for key, fields in of.items():
            for reason in stats.LabelFailure:
                failed.add(fields.get(stats.LABEL_FAILED + reason, 0), reason=reason.value, **labels_of(key))
        yield failed
        for info, field_name in _LABELING:
            yield by_model(info, {key: fields.get(field_name, 0) for key, fields in of.items()})


def scopes_of(text: str) -> frozenset[MetricScope]:
    """Returns the scopes of `?scope=` (empty = both)."""
    if not text:
        return frozenset((MetricScope.CLUSTER, MetricScope.PROCESS))
    if text not in (MetricScope.CLUSTER, MetricScope.PROCESS):
        raise InvalidRequest(f"unknown scope '{text[:60]}': it must be cluster or process, or be left out for both")
    return frozenset((MetricScope(text),))


def shown_metrics(
    tally: GatewayTally,
    snapshot: MetricsSnapshot,
    scopes: Iterable[MetricScope] = tuple(MetricScope),
    wanted: triton_metrics.MetricsChoice = triton_metrics.USUAL,
    *,
    more: Iterable[Family] = (),
) -> list[Family]:
    """Returns the metrics, Triton's names last, for any thread."""
    shown, tritons = list[Family](), list[Family]()
    if MetricScope.PROCESS in scopes:
        shown += [*_of_gateway(tally), *more, *snapshot.of_process(tally.process)]
        tritons += [] if snapshot.host is None else triton_metrics.of_host(snapshot.host)
    if MetricScope.CLUSTER in scopes:
        shown += snapshot.collect()
        tritons = [*snapshot.of_triton(wanted), *tritons]
    return [*shown, *tritons]


def _by_version(of_workers: Iterable[Mapping[str, Mapping[int, _T]]]) -> Iterator[tuple[_Key, _T]]:
    for of_worker in of_workers:
        for model, versions in of_worker.items():
            for version, value in versions.items():
                yield (model, version), value


def _summed(of_workers: Iterable[Mapping[str, Mapping[int, int]]]) -> Counter[_Key]:
    total: Counter[_Key] = Counter()
    for key, count in _by_version(of_workers):
        total[key] += count
    return total


def _greatest(pairs: Iterable[tuple[_Key, float]]) -> dict[_Key, float]:
    found: dict[_Key, float] = {}
    for key, value in pairs:
        found[key] = max(found.get(key, 0.0), value)
    return found


def _worker_families(workers: Sequence[WorkerRecord]) -> Iterator[Family]:
    yield family(catalogue.WORKER_UP, ((1, {"worker": worker.id, "device": worker.device}) for worker in workers))
    for info, value in _OF_WORKERS:
        known = ((value(worker), {"worker": worker.id}) for worker in workers)
        yield family(info, ((found, labels) for found, labels in known if found is not None))
    ways = [(count, way, worker.id) for worker in workers for way, count in worker.tensor_ways.items()]
    yield family(catalogue.WORKER_SEGMENT_REQUESTS, ((count, {"way": way, "worker": id_}) for count, way, id_ in ways))
    gpus = [({"worker": worker.id, "device": f"gpu {gpu.number}"}, gpu) for worker in workers for gpu in worker.gpus]
    for info, name in _OF_GPUS:
        yield family(info, ((getattr(gpu, name), labels) for labels, gpu in gpus))


_OF_WORKERS: tuple[tuple[Info, Callable[[WorkerRecord], float | None]], ...] = (
    (catalogue.WORKER_EXECUTING, lambda worker: worker.executing),
    (catalogue.WORKER_READY_MODELS, lambda one: sum(of.state is State.READY for _, of in _by_version([one.models]))),
    (catalogue.WORKER_RENEWALS, lambda worker: worker.renewals),
    (catalogue.WORKER_LEASES_LOST, lambda worker: worker.leases_lost),
    (catalogue.WORKER_CPU, lambda worker: worker.cpu_s if worker.memory_bytes else None),
    (catalogue.WORKER_MEMORY, lambda worker: worker.memory_bytes or None),
    (catalogue.WORKER_SEGMENT_BYTES, lambda worker: worker.tensor_bytes),
)
_OF_GPUS = (
    (catalogue.DEVICE_MEMORY_USED, "memory_used_bytes"),
    (catalogue.DEVICE_MEMORY_TOTAL, "memory_total_bytes"),
    (catalogue.DEVICE_UTILIZATION, "utilization"),
)
_SEQUENCES = (
    (catalogue.SEQUENCES_OPEN, "open"),
    (catalogue.SEQUENCES_WAITING, "waiting"),
    (catalogue.SEQUENCES_HANDED_OVER, "handed_over"),
    (catalogue.SEQUENCES_LOST, "lost"),
)
_FIELDS = (
    (catalogue.EXECUTED_REQUESTS, stats.SUCCESS_COUNT),
    (catalogue.RETRIES, stats.RETRIES),
    (catalogue.REDELIVERIES, stats.REDELIVERIES),
    (catalogue.DEAD_LETTERS_TOTAL, stats.DEAD_LETTERS),
    (catalogue.MODEL_LOAD_FAILURES, stats.LOAD_FAILURES),
    (catalogue.OVERDUE_EXECUTIONS, stats.OVERDUE),
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
