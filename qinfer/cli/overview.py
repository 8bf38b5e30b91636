"""One look at the queue: models with their state, lanes with their depth, workers. For `status`, `models` and `up`."""

import asyncio
import math
from collections.abc import Iterator, Sequence
from pathlib import Path

import msgspec
from pydantic import SecretStr

from qinfer.cli import runfile
from qinfer.control.base import ControlStore, State, StoredModel, WorkerRecord
from qinfer.control.lanes import lanes_of
from qinfer.control.readiness import ModelStatus, assess
from qinfer.control.redis_store import RedisControlStore
from qinfer.control.sync import SyncedModel, start, sync
from qinfer.delivery.base import Delivery, Lane
from qinfer.delivery.clients import admin_client
from qinfer.delivery.jobs import bulk_lanes
from qinfer.delivery.redis import RedisDelivery
from qinfer.errors import QinferError, SettingsError
from qinfer.repository.config import from_json, to_spec
from qinfer.repository.open import open_repositories
from qinfer.settings import LimitSettings, RedisSettings, RepositorySettings, load_settings


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
    """A lane and how many entries it holds, waiting and in flight."""

    model: str
    version: int
    name: str
    depth: int


class WorkerRow(msgspec.Struct, frozen=True, kw_only=True):
    """A live worker; `ready` names what it serves as `model:version`."""

    id: str
    device: str
    ready: tuple[str, ...]
    executing: int
    throughput_rps: float
    up_s: float


class Overview(msgspec.Struct, frozen=True, kw_only=True):
    """What `qinfer status` shows."""

    models: tuple[ModelRow, ...]
    lanes: tuple[LaneRow, ...]
    workers: tuple[WorkerRow, ...]


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


def run_sync(settings: RedisSettings, repository: RepositorySettings) -> list[SyncedModel]:
    """Writes what the repositories hold as the desired state, whatever the control mode.

    Raises:
        BrokerUnavailable: Redis can't be reached.
        SettingsError: A repository can't be read.
    """
    return asyncio.run(_sync(settings, repository, start_only=False))


def run_start(settings: RedisSettings, repository: RepositorySettings) -> list[SyncedModel]:
    """Writes the desired state that a start calls for in the present control mode.

    Raises:
        BrokerUnavailable: Redis can't be reached.
        SettingsError: A repository can't be read, or has no model of a name to load.
    """
    return asyncio.run(_sync(settings, repository, start_only=True))


async def read_overview(store: ControlStore, delivery: Delivery, max_up_s: float = math.inf) -> Overview:
    """Reads an overview from open connections."""
    now_s = delivery.clock.now_s()
    workers = [w for w in await store.workers() if now_s - w.started_at <= max_up_s]  # not ahead of the rest
    desired = await store.desired()
    stored = await store.models(desired)
    statuses = assess(desired, stored, workers).values()
    with_jobs = {model for model, _ in await delivery.jobs.models()}
    lanes = [
        lane
        for status in statuses
        for version in sorted(status.versions)
        for lane in (
            *_lanes(stored[status.model], version),
            *(bulk_lanes(status.model, version) if status.model in with_jobs else ()),
        )
    ]
    depths = await delivery.depth(lanes) if lanes else []
    return Overview(
        models=tuple(row for status in statuses for row in model_rows(status, workers)),
        lanes=tuple(
            LaneRow(model=lane.model, version=lane.version, name=lane.name, depth=depth)
            for lane, depth in zip(lanes, depths, strict=True)
        ),
        workers=tuple(_worker_row(worker, now_s) for worker in workers),
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


def _lanes(stored: StoredModel, version: int) -> tuple[Lane, ...]:
    try:
        lanes = lanes_of(to_spec(from_json(stored.config), LimitSettings()), version)
    except QinferError:  # written by another qinfer, or never right: it has no lane that we could know
        return ()
    return tuple(Lane(stored.model, version, lane.name) for lane in lanes)


async def _overview(settings: RedisSettings, max_up_s: float) -> Overview:
    delivery = await RedisDelivery.connect(settings)
    store = RedisControlStore(admin_client(settings))
    try:
        return await read_overview(store, delivery, max_up_s)
    finally:
        await store.close()
        await delivery.close()


async def _sync(settings: RedisSettings, repository: RepositorySettings, *, start_only: bool) -> list[SyncedModel]:
    source = open_repositories(repository)
    delivery = await RedisDelivery.connect(settings)
    store = RedisControlStore(admin_client(settings))
    try:
        if start_only:
            return await start(source, store, delivery, repository, again=True)
        return await sync(source, store, delivery)
    finally:
        await store.close()
        await delivery.close()


def _worker_row(worker: WorkerRecord, now_s: float) -> WorkerRow:
    return WorkerRow(
        id=worker.id,
        device=worker.device,
        ready=tuple(
            f"{model}:{version}"
            for model, versions in sorted(worker.models.items())
            for version, state in sorted(versions.items())
            if state.state is State.READY
        ),
        executing=worker.executing,
        throughput_rps=worker.throughput_rps,
        up_s=max(0.0, now_s - worker.started_at),
    )
