"""One look at the installation: models, lanes, work, workers. For `status`, `queues`, `workers`, `models` and `up`."""

import asyncio
import math
from collections.abc import Awaitable, Callable, Iterator, Sequence
from functools import partial
from pathlib import Path

import msgspec
from pydantic import SecretStr

from qinfer.cli.local import runfile
from qinfer.core.settings import RedisSettings, RepositorySettings, load_settings
from qinfer.errors import SettingsError
from qinfer.jobs.queue.jobs import Jobs
from qinfer.models.readiness import ModelStatus, assess
from qinfer.models.repository.base import Repository
from qinfer.models.repository.open import open_repositories
from qinfer.models.state import BULK, State, WorkerRecord
from qinfer.models.store import ControlStore
from qinfer.models.sync import SyncedModel, start, sync
from qinfer.models.work import VersionWork, read_work
from qinfer.queue.clients import admin_client
from qinfer.queue.redis import Delivery


class ModelRow(msgspec.Struct, frozen=True, kw_only=True):
    """A model version over all workers.

    Attributes:
        name: The model's name.
        version: The version; 0 when the model can't be loaded at all.
        state: The best state that a worker has it in.
        reason: Why it is not READY.
        pending: It is loading, or no worker has reported on it yet.
    """

    name: str
    version: int
    state: State
    reason: str = ""
    pending: bool = False


class LaneRow(msgspec.Struct, frozen=True, kw_only=True):
    """A lane.

    Attributes:
        model: The model's name.
        version: The version.
        name: The lane's name.
        depth: How many entries it holds, waiting and in flight; of a bulk lane: shards.
        in_flight: How many of them a worker holds.
        oldest_age_s: How long its oldest entry has been in the queue; 0 when it is empty.
    """

    model: str
    version: int
    name: str
    depth: int
    in_flight: int = 0
    oldest_age_s: float = 0.0


class WorkRow(msgspec.Struct, frozen=True, kw_only=True):
    """The work of a model version, as autoscalers see it; see `qinfer.models.work.VersionWork`.

    Attributes:
        model: The model's name.
        version: The version.
        requests: Entries of its online lanes.
        rows: The rows of those, and `bulk_rows`.
        bulk_rows: Rows that open jobs have yet to do.
        rows_per_s: What one worker does; 0 = not known.
        work_s: Seconds that one worker would need for all rows.
        oldest_age_s: The age of the oldest request.
        workers: How many live workers have it READY.
    """

    model: str
    version: int
    requests: int
    rows: int
    bulk_rows: int
    rows_per_s: float
    work_s: float
    oldest_age_s: float
    workers: int


class WorkerModel(msgspec.Struct, frozen=True, kw_only=True):
    """A model version in one worker, and how many requests of it execute there now."""

    model: str
    version: int
    state: State
    reason: str = ""
    executing: int = 0


class WorkerRow(msgspec.Struct, frozen=True, kw_only=True):
    """A live worker.

    Attributes:
        id: Its id.
        device: What it runs on.
        ready: What it serves, as `model:version`.
        executing: Requests in its batches now.
        throughput_rps: Requests a second over its last heartbeats.
        up_s: Seconds since its start.
        host: The name of its machine or container.
        state: `ready`, `loading`, `draining`, or `trouble` where it could not load a model.
        models: What it has, whatever the state.
        clock_offset_s: Redis' time minus its clock.
        frame_versions: Frame versions that it can read.
    """

    id: str
    device: str
    ready: tuple[str, ...]
    executing: int
    throughput_rps: float
    up_s: float
    host: str = ""
    state: str = "ready"
    models: tuple[WorkerModel, ...] = ()
    clock_offset_s: float = 0.0
    frame_versions: tuple[int, ...] = ()


class Overview(msgspec.Struct, frozen=True, kw_only=True):
    """What `qinfer status` shows; `bulk_workers` are names such as `qinfer-bulk-7@host`."""

    models: tuple[ModelRow, ...]
    lanes: tuple[LaneRow, ...]
    workers: tuple[WorkerRow, ...]
    work: tuple[WorkRow, ...] = ()
    bulk_workers: tuple[str, ...] = ()


def redis_settings(url: str, data_dir: Path) -> RedisSettings:
    """Returns where a command finds Redis: at `url`, else where the `up` that runs in `data_dir` keeps it.

    Raises:
        SettingsError: Neither is there, or a variable is wrong.
    """
    settings = load_settings().redis
    if not url:
        run = runfile.read(data_dir)
        if run is None or not run.is_alive():
            raise SettingsError(
                f"no `qinfer up` runs with the data directory {data_dir}; start one, or give --data-dir or --redis"
            )
        url = run.redis_url
    return with_url(settings, url)


def with_url(settings: RedisSettings, url: str) -> RedisSettings:
    """Returns the settings with another URL."""
    return settings.model_copy(update={"url": SecretStr(url)})


def run_overview(settings: RedisSettings, *, max_up_s: float = math.inf) -> Overview:
    """Connects, looks once, disconnects.

    Args:
        settings: Where Redis is.
        max_up_s: Workers that run longer are left out: `up` waits for its own.

    Raises:
        BrokerUnavailable: Redis can't be reached.
    """
    return asyncio.run(_overview(settings, max_up_s))


def run_sync(settings: RedisSettings, repository: RepositorySettings, *, may_empty: bool) -> list[SyncedModel]:
    """Writes what the repositories hold as the desired state, whatever the control mode.

    Args:
        settings: The way to Redis.
        repository: Where models come from.
        may_empty: See `control.sync.sync`.

    Raises:
        BrokerUnavailable: Redis can't be reached.
        SettingsError: A repository can't be read, or none has a model.
    """
    return asyncio.run(
        _sync(settings, repository, partial(sync, min_workers=repository.min_workers, may_empty=may_empty))
    )


def run_start(settings: RedisSettings, repository: RepositorySettings) -> list[SyncedModel]:
    """Writes the desired state that a start calls for in the present control mode.

    Raises:
        BrokerUnavailable: Redis can't be reached.
        SettingsError: A repository can't be read, or has no model of a name to load.
    """
    return asyncio.run(_sync(settings, repository, partial(start, settings=repository, again=True)))


async def read_overview(store: ControlStore, delivery: Delivery, max_up_s: float = math.inf) -> Overview:
    """Reads an overview from open connections."""
    now_s = delivery.clock.now_s()
    workers = [w for w in await store.workers() if now_s - w.started_at <= max_up_s]  # not ahead of the rest
    desired = await store.desired()
    statuses = assess(desired, await store.models(desired), workers).values()
    work = await read_work(store, delivery, Jobs(delivery).open_rows)
    return Overview(
        models=tuple(row for status in statuses for row in model_rows(status, workers)),
        lanes=await _lane_rows(work, delivery),
        workers=tuple(_worker_row(worker, now_s) for worker in workers),
        work=tuple(_work_row(version) for version in work),
        bulk_workers=tuple(await store.live_processes(BULK)),
    )


def model_rows(status: ModelStatus, workers: Sequence[WorkerRecord]) -> Iterator[ModelRow]:
    """Yields a row for each version of a model; one of version 0 when it can't be loaded at all."""
    if status.error or not status.versions:
        reason = status.error or "it has no version"
        yield ModelRow(name=status.model, version=0, state=State.UNAVAILABLE, reason=reason)
        return
    for version, state in sorted(status.versions.items()):
        reported = any(
            (own := worker.models.get(status.model, {}).get(version)) is not None and own.generation == state.generation
            for worker in workers
        )
        yield ModelRow(
            name=status.model,
            version=version,
            state=state.state,
            reason=state.reason,
            pending=not reported or state.state is State.LOADING,
        )


async def _lane_rows(work: Sequence[VersionWork], delivery: Delivery) -> tuple[LaneRow, ...]:
    lanes = [lane for version in work for lane in version.lanes]
    in_flight = await delivery.in_flight([lane.lane for lane in lanes])
    return tuple(
        LaneRow(
            model=lane.lane.model,
            version=lane.lane.version,
            name=lane.lane.name,
            depth=lane.entries,
            in_flight=min(held, lane.entries),  # it was asked for later
            oldest_age_s=round(lane.oldest_age_s, 3),
        )
        for lane, held in zip(lanes, in_flight, strict=True)
    )


def _work_row(work: VersionWork) -> WorkRow:
    return WorkRow(
        model=work.model,
        version=work.version,
        requests=work.requests,
        rows=work.rows,
        bulk_rows=work.bulk_rows,
        rows_per_s=round(work.rows_per_s, 3),
        work_s=round(work.work_s, 6),
        oldest_age_s=round(work.oldest_age_s, 3),
        workers=len(work.workers),
    )


async def _overview(settings: RedisSettings, max_up_s: float) -> Overview:
    delivery = await Delivery.connect(settings)
    store = ControlStore(admin_client(settings))
    try:
        return await read_overview(store, delivery, max_up_s)
    finally:
        await store.close()
        await delivery.close()


async def _sync(
    settings: RedisSettings,
    repository: RepositorySettings,
    way: Callable[[Repository, ControlStore, Delivery], Awaitable[list[SyncedModel]]],
) -> list[SyncedModel]:
    source = open_repositories(repository)
    delivery = await Delivery.connect(settings)
    store = ControlStore(admin_client(settings))
    try:
        return await way(source, store, delivery)
    finally:
        await store.close()
        await delivery.close()


def _worker_row(worker: WorkerRecord, now_s: float) -> WorkerRow:
    models = tuple(
        WorkerModel(
            model=model,
            version=version,
            state=state.state,
            reason=state.reason,
            executing=worker.busy.get(model, {}).get(version, 0),
        )
        for model, versions in sorted(worker.models.items())
        for version, state in sorted(versions.items())
    )
    return WorkerRow(
        id=worker.id,
        device=worker.device,
        ready=tuple(f"{one.model}:{one.version}" for one in models if one.state is State.READY),
        executing=worker.executing,
        throughput_rps=worker.throughput_rps,
        up_s=max(0.0, now_s - worker.started_at),
        host=worker.host,
        state=_state(worker, {one.state for one in models}),
        models=models,
        clock_offset_s=round(worker.clock_offset_s, 3),
        frame_versions=worker.frame_versions,
    )


def _state(worker: WorkerRecord, states: set[State]) -> str:
    if worker.draining:
        return "draining"
    if State.LOADING in states:
        return "loading"
    return "trouble" if State.UNAVAILABLE in states else "ready"
