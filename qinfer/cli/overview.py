"""The state of the installation, read from Redis; and the sync of models."""

import asyncio
import math
import os
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Iterator, Sequence
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from typing import TypeVar

import msgspec
from pydantic import SecretStr

from qinfer.cli.local.machine import DATA_DIR, nearest_run
from qinfer.core.settings import LimitSettings, RedisSettings, RepositorySettings, load_settings
from qinfer.errors import SettingsError
from qinfer.jobs.queue.jobs import Jobs
from qinfer.models.readiness import LoadProgress, ModelStatus, Pin, assess, outcome, why_lost
from qinfer.models.repository.open import open_repositories
from qinfer.models.state import BULK, GATEWAY, State, WorkerRecord
from qinfer.models.store import ControlStore
from qinfer.models.sync import SyncedModel, start, sync
from qinfer.queue.clients import admin_client
from qinfer.queue.entries import Share
from qinfer.queue.lanes import Queue
from qinfer.scaling.work import VersionWork, read_sequences, read_work

T = TypeVar("T")

LOOK_S = 1.0


class PinRow(msgspec.Struct, frozen=True, kw_only=True):
    """A pin of a model version; an empty `content_hash` allows any content."""

    reason: str
    holder: str
    content_hash: str
    expires_s: float


class ModelRow(msgspec.Struct, frozen=True, kw_only=True):
    """A model version over all workers.

    `version` is 0 if it can't be loaded, `state` the best one, `pending` = loading or unreported.
    """

    name: str
    version: int
    state: State
    reason: str = ""
    pending: bool = False
    pins: tuple[PinRow, ...] = ()


class ShareRow(msgspec.Struct, frozen=True, kw_only=True):
    """Tenants' share of a lane; `part` is theirs of fetched entries while all wait."""

    tenants: tuple[str, ...]
    weight: int
    part: float
    depth: int


class LaneRow(msgspec.Struct, frozen=True, kw_only=True):
    """A lane; `depth` counts waiting and executing entries, or shards."""

    model: str
    version: int
    name: str
    depth: int
    in_flight: int = 0
    oldest_age_s: float = 0.0
    shares: tuple[ShareRow, ...] = ()


class WorkRow(msgspec.Struct, frozen=True, kw_only=True):
    """The work of a model version; `rows` are those of requests, `work_s` is the time of one worker for all work."""

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
    """The sequences of a stateful model."""

    model: str
    open: int
    waiting: int
    handed_over: int
    lost: int


class WaitingJob(msgspec.Struct, frozen=True, kw_only=True):
    """A bulk job that can't continue now."""

    id: str
    model: str
    version: int
    state: str
    waiting: str


class WorkerModel(msgspec.Struct, frozen=True, kw_only=True):
    """A model version on one worker."""

    model: str
    version: int
    state: State
    reason: str = ""
    executing: int = 0


class ExecutingRow(msgspec.Struct, frozen=True, kw_only=True):
    """An execution or load of over a second, late after half of `limit_s` or 300 s; `since` is in Redis' time."""

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

    `state` is `ready`, `loading`, `draining`, or `trouble` after a failed load. `clock_offset_s` is Redis' time minus
    the worker's time.
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
    """The content of `qinfer status`."""

    models: tuple[ModelRow, ...]
    lanes: tuple[LaneRow, ...]
    workers: tuple[WorkerRow, ...]
    work: tuple[WorkRow, ...] = ()
    sequences: tuple[SequencesRow, ...] = ()
    gateways: tuple[str, ...] = ()
    bulk_workers: tuple[str, ...] = ()
    waiting_jobs: tuple[WaitingJob, ...] = ()


def redis_settings(url: str, data_dir: Path) -> RedisSettings:
    """Returns the settings of the Redis at `url`, else of `data_dir`'s `qinfer up`."""
    settings = load_settings().redis
    if not url:
        run = nearest_run(data_dir)
        named = os.environ.get("QINFER_URL", "")
        if run is None:
            raise SettingsError(
                f"no `qinfer up` is running with the data directory {data_dir}, here or above, and this command reads "
                f"Redis{', which QINFER_URL does not name' if named else ''}; start one, or give --data-dir or --redis"
            )
        if named.rstrip("/") not in {"", run.url.rstrip("/")} and data_dir == DATA_DIR:
            raise SettingsError(
                f"QINFER_URL names another gateway than the `qinfer up` running here, {run.url}, and this "
                "command reads Redis; give --data-dir or --redis"
            )
        url = run.redis_url
    return with_url(settings, url)


def payload_limits(url: str, data_dir: Path) -> LimitSettings:
    """Returns the limits, with the payload store of `data_dir`'s `qinfer up`, unless `url` or a setting is given."""
    limits = load_settings().limits
    run = None if url or "payload_url" in limits.model_fields_set else nearest_run(data_dir)
    if run is None or not run.payload_url:
        return limits
    update = {"payload_url": run.payload_url, "payload_url_min_bytes": run.payload_url_min_bytes}
    return limits.model_copy(update=update)


def program_variables(url: str, data_dir: Path) -> dict[str, str]:
    """Returns the variables of a program that uses the Redis of `redis_settings` and its payload store."""
    limits = payload_limits(url, data_dir)
    return {
        "QINFER_REDIS__URL": redis_settings(url, data_dir).url.get_secret_value(),
        "QINFER_LIMITS__PAYLOAD_URL": limits.payload_url,
        "QINFER_LIMITS__PAYLOAD_URL_MIN_BYTES": str(limits.payload_url_min_bytes),
    }


def with_url(settings: RedisSettings, url: str) -> RedisSettings:
    """Returns the settings with another URL."""
    return settings.model_copy(update={"url": SecretStr(url)})


def run(
    settings: RedisSettings,
    work: Callable[[ControlStore, Queue], Awaitable[T]],
    limits: LimitSettings | None = None,
) -> T:
    """Runs `work` with connections to the store and the queue; with `limits` also to the payload store."""

    async def work_connected() -> T:
        async with connected(settings, limits) as (store, queue):
            return await work(store, queue)

    return asyncio.run(work_connected())


def run_overview(settings: RedisSettings, *, max_up_s: float = math.inf) -> Overview:
    """Reads an overview; leaves out workers that have run for more than `max_up_s`."""
    return run(settings, partial(read_overview, max_up_s=max_up_s))


def run_sync(settings: RedisSettings, repository: RepositorySettings, *, may_empty: bool) -> list[SyncedModel]:
    """Makes the repositories' content the desired state."""
    source, least = open_repositories(repository), repository.min_workers
    return run(settings, partial(sync, source, min_workers=least, may_empty=may_empty))


def run_start(settings: RedisSettings, repository: RepositorySettings) -> list[SyncedModel]:
    """Writes the desired state for a start."""
    return run(settings, partial(start, open_repositories(repository), settings=repository, again=True))


def run_wait(
    settings: RedisSettings, synced: Sequence[SyncedModel], timeout_s: float
) -> dict[str, tuple[LoadProgress, str]]:
    """Waits until synced models are ready or failed, or for the timeout; returns their progress and its reasons."""
    names = [model.model for model in synced if not model.removed]

    async def wait(store: ControlStore, _: Queue) -> dict[str, tuple[LoadProgress, str]]:
        ends_s = time.monotonic() + timeout_s
        while True:
            workers, stored = await store.workers(), await store.models(names)
            found: dict[str, tuple[LoadProgress, str]] = {
                name: outcome(stored[name], workers) for name in names if name in stored
            }
            left_s = ends_s - time.monotonic()
            if left_s <= 0 or all(progress is not LoadProgress.WAITING for progress, _ in found.values()):
                return found
            await store.wait(min(LOOK_S, left_s))

    return run(settings, wait)


async def read_overview(store: ControlStore, delivery: Queue, max_up_s: float = math.inf) -> Overview:
    """Reads an overview from open connections."""
    now_s = delivery.clock.now_s()
    # The workers are read first, because they must not be newer than the other data.
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
        work=tuple(_row(WorkRow, version, workers=len(version.workers)) for version in work),
        sequences=tuple(_row(SequencesRow, of) for of in await read_sequences(delivery, stored)),
        gateways=tuple(await store.live_processes(GATEWAY)),
        bulk_workers=tuple(await store.live_processes(BULK)),
        waiting_jobs=tuple(
            _row(WaitingJob, job, waiting=why) for job in await jobs.unfinished() if (why := job.waiting or job.put_off)
        ),
    )


def model_rows(status: ModelStatus, workers: Sequence[WorkerRecord]) -> Iterator[ModelRow]:
    """Yields a row for each version; 0 = can't be loaded."""
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
    """Adds pins to rows, rows for pinned versions, and why a pin can't be kept."""
    pinned: dict[tuple[str, int], list[PinRow]] = {}
    lost: dict[tuple[str, int], str] = {}
    for pin in pins:
        lost[pin.model, pin.version] = lost.get((pin.model, pin.version)) or why_gone(pin)
        one = _row(PinRow, pin, expires_s=round(max(pin.expires_at - now_s, 0.0), 3))
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
            # read later than the depth
            in_flight=min(held, lane.entries),
            oldest_age_s=round(lane.oldest_age_s, 3),
            shares=share_rows(of_lane),
        )
        for lane, held, of_lane in zip(lanes, in_flight, shares, strict=True)
    )


def share_rows(shares: Sequence[Share]) -> tuple[ShareRow, ...]:
    """Returns tenants' shares of a lane, largest first."""
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


def _row(kind: type[T], source: object, **own: object) -> T:
    """Returns a row with a source's attributes of the same names, numbers rounded, and its `own`."""
    names: Iterable[str] = kind.__struct_fields__  # type: ignore[attr-defined]  # a msgspec.Struct
    taken = {name: getattr(source, name) for name in names if name not in own}
    return kind(**{name: round(v, 6) if isinstance(v, float) else v for name, v in taken.items()}, **own)


@asynccontextmanager
async def connected(
    settings: RedisSettings, limits: LimitSettings | None = None
) -> AsyncIterator[tuple[ControlStore, Queue]]:
    """Connects to the store and the queue for the block."""
    delivery = await Queue.connect(settings, limits)
    store = ControlStore(admin_client(settings))
    try:
        yield store, delivery
    finally:
        await store.close()
        await delivery.close()


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
    return _row(
        WorkerRow,
        worker,
        ready=tuple(f"{one.model}:{one.version}" for one in models if one.state is State.READY),
        up_s=max(0.0, now_s - worker.started_at),
        state=worker.condition,
        models=models,
        long=tuple(_row(ExecutingRow, one) for one in worker.long),
    )
