"""Waiting work in seconds of one worker: the measure of autoscalers; and the open sequences of stateful models.

    rows   = requests of the mean number of rows + remaining rows of open bulk jobs
    work_s = rows ÷ rows a second of one worker       desired workers = ⌈work_s ÷ seconds of work for each⌉
    of sequences:                                     desired workers = ⌈open sequences ÷ slots of one worker⌉

Requests in flight count, too, and so do sequences that wait for an owner; an open sequence holds a slot even while no
step of it waits. No live worker is needed: lanes, statistics and speeds outlive workers.
"""

import asyncio
import math
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from functools import lru_cache

import msgspec

from qinfer.errors import QinferError
from qinfer.models.config.config import from_json, to_spec
from qinfer.models.readiness import assess
from qinfer.models.spec import LANE_NAMES, lanes_of
from qinfer.models.state import DesiredState, OpenRows, Speed, StoredModel, WorkerRecord, pause_of
from qinfer.models.store import ControlStore
from qinfer.observe import stats
from qinfer.queue.entries import BULK_LANES, Lane, LaneSize, bulk_lanes
from qinfer.queue.lanes import Queue

ASSUMED_ROW_S = 0.1
"""Used until a worker has executed a row."""

_FIELDS = (stats.SUCCESS_COUNT, stats.CACHE_HIT_COUNT, stats.INFERENCE_COUNT, stats.JOB_ROWS_SCORED, stats.EXECUTION_NS)

_PARTITION = 0


class LaneWork(msgspec.Struct, frozen=True, kw_only=True):
    """Entries of one lane (in a bulk lane, shards), waiting and in flight."""

    lane: Lane
    entries: int
    oldest_age_s: float


class VersionWork(msgspec.Struct, frozen=True, kw_only=True):
    """The work of a model version; `work_s` is 0 while it is paused, because no worker would take it.

    Attributes:
        lanes: Online, then bulk lanes. Without a READY worker, the filled lanes of an earlier configuration precede
            them: the next worker reads them.
        rows: Estimated for the online lanes' `requests`, plus `bulk_rows`; plus one while a worker has to complete the
            configuration.
        rows_per_s: The speed of one worker; 0 = unknown.
    """

    model: str
    version: int
    lanes: tuple[LaneWork, ...] = ()
    requests: int = 0
    rows: int = 0
    bulk_rows: int = 0
    rows_per_s: float = 0.0
    work_s: float = 0.0
    oldest_age_s: float = 0.0
    workers: tuple[str, ...] = ()


class WorkInputs(msgspec.Struct, frozen=True, kw_only=True):
    """The data of a version for `work_of`.

    Attributes:
        counts: Requests and rows executed, nanoseconds of execution.
    """

    lanes: tuple[tuple[Lane, LaneSize], ...] = ()
    jobs: tuple[OpenRows, ...] = ()
    counts: Mapping[str, int] = msgspec.field(default_factory=dict)
    speed: Speed | None = None
    is_pending: bool = False
    is_paused: bool = False


async def read_work(
    store: ControlStore,
    delivery: Queue,
    open_rows: Callable[[], Awaitable[Sequence[OpenRows]]],
    *,
    model: str = "",
) -> tuple[VersionWork, ...]:
    """Reads the work of loaded models, or of one `model`."""
    workers, desired, pauses = await asyncio.gather(store.workers(), store.desired(), store.pauses())
    wanted = {name for name, wish in desired.items() if wish.load}
    if model:
        wish = desired.get(model)
        desired = {} if wish is None else {model: msgspec.structs.replace(wish, load=True)}
    stored = await store.models(sorted(desired))
    jobs = await open_rows()
    # only a pin may keep an open job's version
    pinned = {(job.model, job.version) for job in jobs if job.rows and job.model in stored}
    versions = sorted({*_versions(desired, stored, workers), *pinned})
    lanes = _lanes(versions, stored, jobs)
    earlier = _earlier_lanes(versions, stored, workers)
    flat = [lane for of_version in (*lanes.values(), *earlier.values()) for lane in of_version]
    sizes, counts, speeds = await asyncio.gather(
        delivery.sizes(flat), store.some_stats(versions, _FIELDS), store.speeds(versions)
    )
    size_of = dict(zip(flat, sizes, strict=True))
    return tuple(
        work_of(
            *key,
            WorkInputs(
                lanes=(
                    *((lane, size_of[lane]) for lane in earlier.get(key, ()) if size_of[lane].entries),
                    *((lane, size_of[lane]) for lane in lanes[key]),
                ),
                jobs=tuple(job for job in jobs if (job.model, job.version) == key),
                counts=counts.get(key, {}),
                speed=speeds.get(key),
                is_pending=bool(stored[key[0]].pending) and key[0] in wanted,
                is_paused=pause_of(pauses, *key) is not None,
            ),
            workers,
        )
        for key in versions
    )


def work_of(model: str, version: int, seen: WorkInputs, workers: Iterable[WorkerRecord] = ()) -> VersionWork:
    """Returns the work of one version."""
    ready = [worker for worker in workers if worker.is_ready(model, version)]
    online = [size for lane, size in seen.lanes if lane.name not in BULK_LANES]
    requests = sum(size.entries for size in online)
    shards = sum(size.entries for lane, size in seen.lanes if lane.name in BULK_LANES)
    bulk_rows = max(sum(job.rows for job in seen.jobs), shards)  # the shards of a cancelled job are taken back soon
    rows_per_s = _rows_per_s(ready, model, version, seen)
    rows = math.ceil(requests * _rows_per_request(seen.counts)) + bulk_rows + int(seen.is_pending)
    return VersionWork(
        model=model,
        version=version,
        lanes=tuple(
            LaneWork(lane=lane, entries=size.entries, oldest_age_s=size.oldest_age_s) for lane, size in seen.lanes
        ),
        requests=requests,
        rows=rows,
        bulk_rows=bulk_rows,
        rows_per_s=rows_per_s,
        work_s=0.0 if seen.is_paused else rows / rows_per_s if rows_per_s else rows * ASSUMED_ROW_S,
        oldest_age_s=max((size.oldest_age_s for size in online), default=0.0),
        workers=tuple(sorted(worker.id for worker in ready)),
    )


def _versions(
    desired: Mapping[str, DesiredState], stored: Mapping[str, StoredModel], workers: Sequence[WorkerRecord]
) -> list[tuple[str, int]]:
    statuses = assess(desired, stored, workers)
    return [
        (name, version) for name, status in statuses.items() if name in stored for version in sorted(status.versions)
    ]


def _lanes(
    versions: Iterable[tuple[str, int]], stored: Mapping[str, StoredModel], jobs: Iterable[OpenRows]
) -> dict[tuple[str, int], list[Lane]]:
    partitions: dict[str, set[int]] = {}
    for job in jobs:
        partitions.setdefault(job.model, set()).add(job.partition)
    found: dict[tuple[str, int], list[Lane]] = {}
    for model, version in versions:
        lanes = [Lane(model, version, name) for name in _online(stored[model].config)]
        for partition in sorted(partitions.get(model, ())):
            lanes += bulk_lanes(model, version, partition)
        found[model, version] = lanes
    return found


def _earlier_lanes(
    versions: Iterable[tuple[str, int]], stored: Mapping[str, StoredModel], workers: Sequence[WorkerRecord]
) -> dict[tuple[str, int], list[Lane]]:
    found: dict[tuple[str, int], list[Lane]] = {}
    for model, version in versions:
        own = _online(stored[model].config)
        if own and not any(worker.is_ready(model, version) for worker in workers):
            found[model, version] = [Lane(model, version, name) for name in LANE_NAMES if name not in own]
    return found


@lru_cache(maxsize=4096)
def _online(config: str) -> tuple[str, ...]:
    try:
        return tuple(lane.name for lane in lanes_of(to_spec(from_json(config)), 1))
    except QinferError:  # the configuration is of another qinfer, incomplete, or wrong
        return ()


def _rows_per_request(counts: Mapping[str, int]) -> float:
    requests = counts.get(stats.SUCCESS_COUNT, 0) - counts.get(stats.CACHE_HIT_COUNT, 0)
    rows = counts.get(stats.INFERENCE_COUNT, 0) - counts.get(stats.JOB_ROWS_SCORED, 0)
    return max(rows / requests, 1.0) if requests else 1.0


def _rows_per_s(ready: Sequence[WorkerRecord], model: str, version: int, seen: WorkInputs) -> float:
    measured = [rps for worker in ready if (rps := worker.speeds.get(model, {}).get(version, 0.0))]
    stored_rps = seen.speed.rps if seen.speed is not None else 0.0
    rps = sum(measured) / len(measured) if measured else stored_rps
    if rps:
        return rps * _rows_per_request(seen.counts)
    rows, executing_s = seen.counts.get(stats.INFERENCE_COUNT, 0), seen.counts.get(stats.EXECUTION_NS, 0) / 1e9
    if rows and executing_s:
        return rows / executing_s
    return sum(job.rows_per_s for job in seen.jobs) / max(len(ready), 1)


class SequenceWork(msgspec.Struct, frozen=True, kw_only=True):
    """The sequences of a stateful model.

    Attributes:
        open: Sequences that have begun and not ended, including waiting sequences.
        waiting: Sequences that wait for a worker with a free slot.
    """

    model: str
    open: int
    waiting: int
    handed_over: int
    lost: int
    slots: int

    @property
    def workers(self) -> int:
        """The workers with slots for all open sequences."""
        return math.ceil(self.open / self.slots)


async def read_sequences(queue: Queue, stored: Mapping[str, StoredModel]) -> tuple[SequenceWork, ...]:
    """Returns the stateful models' sequences, sorted."""
    slots = {name: count for name, model in sorted(stored.items()) if (count := _slots(model.config))}
    sizes = await asyncio.gather(*(queue.sequences(name, _PARTITION).sizes(stored[name].versions) for name in slots))
    return tuple(
        SequenceWork(model=name, slots=slots[name], **size._asdict()) for name, size in zip(slots, sizes, strict=True)
    )


async def read_backlogs(queue: Queue, stored: Mapping[str, StoredModel]) -> dict[tuple[str, int], int]:
    """Returns (model, version) → steps without a worker."""
    keys = [(name, version) for name, model in stored.items() if _slots(model.config) for version in model.versions]
    counts = await asyncio.gather(*(queue.sequences(name, _PARTITION).backlog(version) for name, version in keys))
    return dict(zip(keys, counts, strict=True))


@lru_cache(maxsize=4096)
def _slots(config: str) -> int:
    try:
        spec = to_spec(from_json(config))
    except QinferError:
        return 0
    return spec.instance_count * spec.sequences.slots if spec.is_stateful and spec.sequences else 0
