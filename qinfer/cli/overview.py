"""The state of the installation, read from Redis: models, lanes, work, workers; and the sync of models."""

import asyncio
import math
import os
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path

import msgspec
from pydantic import SecretStr

from qinfer.cli.local import runfile
from qinfer.core.settings import RedisSettings, RepositorySettings, load_settings
from qinfer.errors import SettingsError
from qinfer.jobs.queue.jobs import Jobs
from qinfer.models.pins import Pin, why_lost
from qinfer.models.readiness import ModelStatus, Progress, assess, outcome
from qinfer.models.repository.open import Repositories, open_repositories
from qinfer.models.sequence_work import read_sequences
from qinfer.models.state import BULK, GATEWAY, State, WorkerRecord
from qinfer.models.store import ControlStore
from qinfer.models.sync import SyncedModel, start, sync
from qinfer.models.work import VersionWork, read_work
from qinfer.queue.clients import admin_client
from qinfer.queue.entries import Share
from qinfer.queue.lanes import Queue

LOOK_S = 1.0
"""The longest time between two looks at what is waited for."""


class PinRow(msgspec.Struct, frozen=True, kw_only=True):
    """A pin of a model version.

    Attributes:
        reason: The kind of the holder, such as `job`.
        holder: The id of the holder.
        content_hash: What the version must execute; empty = anything.
        expires_s: Seconds until it ends unless it is renewed.
    """

    reason: str
    holder: str
    content_hash: str
    expires_s: float


class ModelRow(msgspec.Struct, frozen=True, kw_only=True):
    """A model version over all workers.

    Attributes:
        name: The model's name.
        version: The version; 0 = the model can't be loaded at all.
        state: The best state on any worker.
        reason: The reason for not being READY.
        pending: The version is loading, or no worker has reported on it yet.
        pins: The pins that keep it loaded.
    """

    name: str
    version: int
    state: State
    reason: str = ""
    pending: bool = False
    pins: tuple[PinRow, ...] = ()


class ShareRow(msgspec.Struct, frozen=True, kw_only=True):
    """The share that some tenants have of a lane.

    Attributes:
        tenants: Whose it is; several where a lane has more tenants than streams. The first may also hold what is
            nobody's.
        weight: The weight of these tenants together.
        part: Their part of what is fetched while all tenants of the lane wait.
        depth: Entries of the share, waiting and in flight.
    """

    tenants: tuple[str, ...]
    weight: int
    part: float
    depth: int


class LaneRow(msgspec.Struct, frozen=True, kw_only=True):
    """A lane.

    Attributes:
        model: The model's name.
        version: The version.
        name: The lane's name.
        depth: Entries of the lane, waiting and in flight; of a bulk lane: shards.
        in_flight: Entries that a worker holds.
        oldest_age_s: The age of the oldest entry; 0 = the lane is empty.
        shares: The shares of its tenants; none while it has no tenants.
    """

    model: str
    version: int
    name: str
    depth: int
    in_flight: int = 0
    oldest_age_s: float = 0.0
    shares: tuple[ShareRow, ...] = ()


class WorkRow(msgspec.Struct, frozen=True, kw_only=True):
    """The work of a model version, as autoscalers see it; see `qinfer.models.work.VersionWork`.

    Attributes:
        model: The model's name.
        version: The version.
        requests: Entries of the online lanes.
        rows: Rows of these entries, and `bulk_rows`.
        bulk_rows: Remaining rows of open jobs.
        rows_per_s: The speed of one worker; 0 = not known.
        work_s: Seconds that one worker needs for all rows.
        oldest_age_s: The age of the oldest request.
        workers: Live workers on which the version is READY.
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


class SequencesRow(msgspec.Struct, frozen=True, kw_only=True):
    """The sequences of a stateful model.

    Attributes:
        model: The model's name.
        open: Sequences that have begun and not ended, those that wait among them.
        waiting: Sequences that wait for a worker with a free slot.
        handed_over: Sequences that went on at another worker.
        lost: Sequences whose state was lost.
    """

    model: str
    open: int
    waiting: int
    handed_over: int
    lost: int


class WaitingJob(msgspec.Struct, frozen=True, kw_only=True):
    """A bulk job that has not ended and can't go on now.

    Attributes:
        id: The job's id.
        model: The model's name.
        version: The version.
        state: The job's state.
        waiting: Why it can't go on.
    """

    id: str
    model: str
    version: int
    state: str
    waiting: str


class WorkerModel(msgspec.Struct, frozen=True, kw_only=True):
    """A model version on one worker, with the number of requests in execution."""

    model: str
    version: int
    state: State
    reason: str = ""
    executing: int = 0


class ExecutingRow(msgspec.Struct, frozen=True, kw_only=True):
    """Something that an instance of a worker has been executing for more than a second.

    Attributes:
        model: The model's name.
        version: The version.
        what: `execution`, `warm-up` or `load`.
        since: When it began, in Redis' time.
        seconds: How long that has been at the last heartbeat.
        limit_s: How long it may take; 0 = there is no limit.
        is_late: Half of that is over, or 300 s without a limit.
        text: All of this for people.
    """

    model: str
    version: int
    what: str
    since: float
    seconds: float
    limit_s: float
    is_late: bool
    text: str


class WorkerRow(msgspec.Struct, frozen=True, kw_only=True):
    """A live worker.

    Attributes:
        id: The worker's id.
        device: The worker's device.
        ready: READY versions, as `model:version`.
        executing: Requests in execution.
        throughput_rps: Requests per second over the last heartbeats.
        up_s: Seconds since the start.
        host: The name of the machine or container.
        state: `ready`, `loading`, `draining`, or `trouble` if a model could not be loaded.
        models: All model versions, in whatever state.
        clock_offset_s: Redis' time minus the worker's clock.
        frame_versions: Readable frame versions.
        long: What its instances have been executing for more than a second.
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
    long: tuple[ExecutingRow, ...] = ()


class Overview(msgspec.Struct, frozen=True, kw_only=True):
    """The content of `qinfer status`; `gateways` and `bulk_workers` are names such as `qinfer-bulk-7@host`."""

    models: tuple[ModelRow, ...]
    lanes: tuple[LaneRow, ...]
    workers: tuple[WorkerRow, ...]
    work: tuple[WorkRow, ...] = ()
    sequences: tuple[SequencesRow, ...] = ()
    gateways: tuple[str, ...] = ()
    bulk_workers: tuple[str, ...] = ()
    waiting_jobs: tuple[WaitingJob, ...] = ()


def redis_settings(url: str, data_dir: Path) -> RedisSettings:
    """Returns the settings of a command's Redis: at `url`, else that of the `qinfer up` running in `data_dir`.

    Raises:
        SettingsError: Neither exists, or a variable is wrong.
    """
    settings = load_settings().redis
    if not url:
        run = runfile.nearest(data_dir)
        named = os.environ.get("QINFER_URL", "")
        if run is None:
            raise SettingsError(
                f"no `qinfer up` is running with the data directory {data_dir}, here or above, and this command reads "
                f"Redis{', which QINFER_URL does not name' if named else ''}; start one, or give --data-dir or --redis"
            )
        if named.rstrip("/") not in {"", run.url.rstrip("/")} and data_dir == runfile.DATA_DIR:
            raise SettingsError(
                f"QINFER_URL names another gateway than that of the `qinfer up` running here, {run.url}, and this "
                "command reads Redis; give --data-dir or --redis"
            )
        url = run.redis_url
    return with_url(settings, url)


def with_url(settings: RedisSettings, url: str) -> RedisSettings:
    """Returns the settings with another URL."""
    return settings.model_copy(update={"url": SecretStr(url)})


def run_overview(settings: RedisSettings, *, max_up_s: float = math.inf) -> Overview:
    """Connects, reads an overview, disconnects.

    Args:
        settings: The settings of Redis.
        max_up_s: Workers that have been running for longer are left out.

    Raises:
        BrokerUnavailable: Redis can't be reached.
    """
    return asyncio.run(_overview(settings, max_up_s))


def run_sync(settings: RedisSettings, repository: RepositorySettings, *, may_empty: bool) -> list[SyncedModel]:
    """Writes the content of the repositories as the desired state, in any control mode.

    Args:
        settings: The settings of Redis.
        repository: The settings of the repositories.
        may_empty: See `control.sync.sync`.

    Raises:
        BrokerUnavailable: Redis can't be reached.
        SettingsError: A repository can't be read, or none has a model.
    """
    return asyncio.run(
        _sync(settings, repository, partial(sync, min_workers=repository.min_workers, may_empty=may_empty))
    )


class WaitedModel(msgspec.Struct, frozen=True, kw_only=True):
    """How the load of a model has ended, or that it goes on.

    Attributes:
        model: Its name.
        progress: `ready`, `failed` or `waiting`.
        reason: Why it is not ready.
    """

    model: str
    progress: Progress
    reason: str = ""


def run_wait(settings: RedisSettings, synced: Sequence[SyncedModel], timeout_s: float) -> list[WaitedModel]:
    """Waits until every model that was synced is ready or has failed, or the time is over.

    Raises:
        BrokerUnavailable: Redis can't be reached.
    """
    return asyncio.run(_wait(settings, [model.model for model in synced if not model.removed], timeout_s))


def run_start(settings: RedisSettings, repository: RepositorySettings) -> list[SyncedModel]:
    """Writes the desired state for a start in the present control mode.

    Raises:
        BrokerUnavailable: Redis can't be reached.
        SettingsError: A repository can't be read, or has no model of a name to load.
    """
    return asyncio.run(_sync(settings, repository, partial(start, settings=repository, again=True)))


async def read_overview(store: ControlStore, delivery: Queue, max_up_s: float = math.inf) -> Overview:
    """Reads an overview from open connections."""
    now_s = delivery.clock.now_s()
    # Workers are read first, so that they are not ahead of the rest.
    workers = [w for w in await store.workers() if now_s - w.started_at <= max_up_s]
    desired = await store.desired()
    stored = await store.models(desired)
    statuses = assess(desired, stored, workers).values()
    jobs = Jobs(delivery)
    work = await read_work(store, delivery, jobs.open_rows)
    rows = [row for status in statuses for row in model_rows(status, workers)]
    pins = await store.pins()
    return Overview(
        models=tuple(_with_pins(rows, pins, now_s, lambda pin: why_lost(pin, workers, desired.get(pin.model)))),
        lanes=await _lane_rows(work, delivery),
        workers=tuple(_worker_row(worker, now_s) for worker in workers),
        work=tuple(_work_row(version) for version in work),
        sequences=tuple(
            SequencesRow(**{name: getattr(of, name) for name in SequencesRow.__struct_fields__})
            for of in await read_sequences(delivery, stored)
        ),
        gateways=tuple(await store.live_processes(GATEWAY)),
        bulk_workers=tuple(await store.live_processes(BULK)),
        waiting_jobs=tuple(
            WaitingJob(id=job.id, model=job.model, version=job.version, state=job.state, waiting=why)
            for job in await jobs.unfinished()
            if (why := job.waiting or job.put_off)
        ),
    )


def model_rows(status: ModelStatus, workers: Sequence[WorkerRecord]) -> Iterator[ModelRow]:
    """Yields a row for each version of a model; one of version 0 if the model can't be loaded at all."""
    if status.error or not status.versions:
        reason = status.error or "it has no version"
        yield ModelRow(name=status.model, version=0, state=State.UNAVAILABLE, reason=reason)
        return
    for version, state in sorted(status.versions.items()):
        reported = any(
            (own := worker.state_of(status.model, version)) is not None and own.generation == state.generation
            for worker in workers
        )
        yield ModelRow(
            name=status.model,
            version=version,
            state=state.state,
            reason=state.reason or state.unready,
            pending=not reported or state.state is State.LOADING,
        )


def _with_pins(
    rows: Sequence[ModelRow], pins: Sequence[Pin], now_s: float, why_gone: Callable[[Pin], str]
) -> list[ModelRow]:
    """Returns rows with their pins, sorted, and why these can't be kept; each pinned version has a row."""
    pinned: dict[tuple[str, int], list[PinRow]] = {}
    lost: dict[tuple[str, int], str] = {}
    for pin in pins:
        lost[pin.model, pin.version] = lost.get((pin.model, pin.version)) or why_gone(pin)
        one = PinRow(
            reason=pin.reason,
            holder=pin.holder,
            content_hash=pin.content_hash,
            expires_s=round(max(pin.expires_at - now_s, 0.0), 3),
        )
        pinned.setdefault((pin.model, pin.version), []).append(one)
    shown = {(row.name, row.version): row for row in rows}
    for key, reason in lost.items():
        name, version = key
        new = ModelRow(name=name, version=version, state=State.UNAVAILABLE, pending=not reason)
        row = shown.get(key, new)
        shown[key] = msgspec.structs.replace(row, reason=reason or row.reason)
    return [msgspec.structs.replace(row, pins=tuple(pinned.get(key, ()))) for key, row in sorted(shown.items())]


async def _lane_rows(work: Sequence[VersionWork], delivery: Queue) -> tuple[LaneRow, ...]:
    lanes = [lane for version in work for lane in version.lanes]
    in_flight = await delivery.in_flight([lane.lane for lane in lanes])
    shares = await delivery.shares([lane.lane for lane in lanes], named=True)
    return tuple(
        LaneRow(
            model=lane.lane.model,
            version=lane.lane.version,
            name=lane.lane.name,
            depth=lane.entries,
            # The number was read later.
            in_flight=min(held, lane.entries),
            oldest_age_s=round(lane.oldest_age_s, 3),
            shares=share_rows(of_lane),
        )
        for lane, held, of_lane in zip(lanes, in_flight, shares, strict=True)
    )


def share_rows(shares: Sequence[Share]) -> tuple[ShareRow, ...]:
    """Returns the shares that tenants have of a lane, those with the most entries first."""
    owned = sorted((share for share in shares if share.tenants), key=lambda share: -share.entries)
    weights = sum(share.weight for share in owned)
    return tuple(
        ShareRow(
            tenants=share.tenants,
            weight=share.weight,
            part=round(share.weight / weights, 4),
            depth=share.entries,
        )
        for share in owned
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


@asynccontextmanager
async def connected(settings: RedisSettings) -> AsyncIterator[tuple[ControlStore, Queue]]:
    """Connects to the control store and the queue until the block ends."""
    delivery = await Queue.connect(settings)
    store = ControlStore(admin_client(settings))
    try:
        yield store, delivery
    finally:
        await store.close()
        await delivery.close()


async def _overview(settings: RedisSettings, max_up_s: float) -> Overview:
    async with connected(settings) as (store, delivery):
        return await read_overview(store, delivery, max_up_s)


async def _sync(
    settings: RedisSettings,
    repository: RepositorySettings,
    way: Callable[[Repositories, ControlStore, Queue], Awaitable[list[SyncedModel]]],
) -> list[SyncedModel]:
    source = open_repositories(repository)
    async with connected(settings) as (store, delivery):
        return await way(source, store, delivery)


async def _wait(settings: RedisSettings, names: Sequence[str], timeout_s: float) -> list[WaitedModel]:
    ends_s = time.monotonic() + timeout_s
    async with connected(settings) as (store, _):
        while True:
            workers = await store.workers()
            stored = await store.models(names)
            found = [
                WaitedModel(model=name, progress=progress, reason=reason)
                for name, (progress, reason) in (
                    (name, outcome(stored[name], workers)) for name in names if name in stored
                )
            ]
            left_s = ends_s - time.monotonic()
            if left_s <= 0 or all(model.progress is not Progress.WAITING for model in found):
                return found
            # Workers wake whoever waits when they have loaded a model.
            await store.wait(min(LOOK_S, left_s))


def _worker_row(worker: WorkerRecord, now_s: float) -> WorkerRow:
    models = tuple(
        WorkerModel(
            model=model,
            version=version,
            state=state.state,
            reason=state.reason or state.unready,
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
        long=tuple(
            ExecutingRow(**{name: getattr(one, name) for name in ExecutingRow.__struct_fields__}) for one in worker.long
        ),
    )


def _state(worker: WorkerRecord, states: set[State]) -> str:
    if worker.draining:
        return "draining"
    if State.LOADING in states:
        return "loading"
    return "trouble" if State.UNAVAILABLE in states else "ready"
