"""All checks of `qinfer doctor` in the order of the report, and those of workers and models."""

import asyncio
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from pydantic import SecretStr

from qinfer.cli.checks import host, redis_server, runtimes, storage
from qinfer.cli.checks.permissions import examine_permissions
from qinfer.cli.checks.report import Finding, ok, problem, warning, without
from qinfer.cli.overview import redis_settings
from qinfer.core.settings import RedisSettings, Settings, load_settings
from qinfer.errors import QinferError, SettingsError
from qinfer.models.readiness import assess
from qinfer.models.state import BEAT, BULK, Desired, State, StoredModel, WorkerRecord
from qinfer.models.store import ControlStore
from qinfer.queue.address import Address, parse_place
from qinfer.queue.clients import Login, admin_client, blocking_client
from qinfer.storage.open import driver_variables
from qinfer.wire.frame import FRAME_VERSION

_SHOWN = 5


class _Workers(NamedTuple):
    workers: list[WorkerRecord]
    bulk_workers: list[str]
    beats: list[str]
    desired: dict[str, Desired]
    stored: dict[str, StoredModel]


def examine(redis_url: str, data_dir: Path, repositories: Sequence[str], *, runtimes: bool = True) -> list[Finding]:
    """Runs all checks; blocking, for seconds.

    Args:
        redis_url: The URL of Redis; empty = that of a `qinfer up` running in `data_dir`, or else of the settings.
        data_dir: The data directory of a running `qinfer up`.
        repositories: The model repositories; empty = those of the settings.
        runtimes: Load the backends' runtimes.

    Returns:
        The findings, without secrets.
    """
    findings = [*host.examine_installation()]
    try:
        settings = load_settings()
    except SettingsError as error:
        return [
            *findings,
            problem("settings", error.message, "correct the environment; docs/reference/settings.md has all"),
        ]
    place = settings.repository.path
    settings = settings.model_copy(
        update={
            "redis": _redis(settings, redis_url, data_dir),
            "repository": settings.repository.model_copy(update={"path": ",".join(repositories) or place}),
        }
    )
    findings.append(ok("settings", "every QINFER_ variable is known and has a possible value"))
    findings += _redis_findings(settings)
    findings += host.examine_gateway(settings, data_dir)
    found, models = storage.read_models(settings.repository)
    findings += [*found, *storage.examine_stores(settings)]
    findings += runtimes_of(storage.needed_backends(models), load=runtimes)
    findings += [*host.examine_files(), *host.examine_disks(settings, data_dir)]
    return without(_secrets(settings), findings)


def runtimes_of(needed: dict[str, str], *, load: bool) -> Iterator[Finding]:
    """Yields the findings about backends and GPUs."""
    yield from runtimes.examine_backends(needed, load=load)
    yield from runtimes.examine_gpus()


def _redis(settings: Settings, url: str, data_dir: Path) -> RedisSettings:
    try:
        return redis_settings(url, data_dir)
    except SettingsError:
        # No `qinfer up` is running: programs that start now use the settings.
        return settings.redis


def _redis_findings(settings: Settings) -> list[Finding]:
    wanted = settings.redis
    try:
        place = parse_place(wanted.url.get_secret_value())
        node = place if isinstance(place, Address) else place.node
        client = blocking_client(Login.of(wanted))
    except SettingsError as error:
        return [problem("Redis", error.message)]
    except redis_server.ERRORS as error:
        return [problem("Redis", *redis_server.reason_of(error, str(place)))]
    findings: list[Finding] = []
    try:
        nodes = redis_server.nodes_of(client, str(place))
        for one in nodes:
            findings += redis_server.examine_node(one, wanted)
        findings += examine_permissions(client, wanted, node.username or "default", _broker_db(settings, node))
        findings += _worker_findings(settings)
    except redis_server.ERRORS as error:
        findings.append(problem("Redis", *redis_server.reason_of(error, str(place))))
    finally:
        client.close()
    return findings


def _worker_findings(settings: Settings) -> list[Finding]:
    try:
        found = asyncio.run(_read_workers(settings.redis))
    except QinferError as error:
        return [problem("workers", f"the records can't be read: {error.message}")]
    needs_bulk = bool(settings.bulk.enabled and settings.stores.allow)
    return [
        *examine_workers(found.workers, found.bulk_workers, found.beats, needs_bulk=needs_bulk),
        *examine_models(found.desired, found.stored, found.workers),
    ]


async def _read_workers(settings: RedisSettings) -> _Workers:
    store = ControlStore(admin_client(settings))
    try:
        desired = await store.desired()
        workers, bulk, beats = await store.workers(), await store.live_processes(BULK), await store.live_processes(BEAT)
        return _Workers(workers, bulk, beats, desired, await store.models(sorted(desired)))
    finally:
        await store.close()


def _broker_db(settings: Settings, node: Address) -> int | None:
    """Returns the database of Celery's tasks if they are in the Redis of the queue; else `None`."""
    if not (settings.bulk.enabled and settings.stores.allow) or settings.bulk.broker_url.get_secret_value():
        return None
    return None if settings.redis.cluster else node.db


def _secrets(settings: Settings) -> list[str]:
    """Returns the secrets, which no message may show."""
    found = [value for section in _sections(settings) for value in section]
    for url in (settings.redis.url, settings.bulk.broker_url):
        try:
            place = parse_place(url.get_secret_value())
        except SettingsError:
            continue
        found.append(place.password if isinstance(place, Address) else place.node.password)
    found += [value for name, value in driver_variables() if "KEY" in name or "SECRET" in name or "TOKEN" in name]
    return [secret for secret in found if len(secret) > 3]


def _sections(settings: Settings) -> Iterator[list[str]]:
    for name in type(settings).model_fields:
        section = getattr(settings, name)
        fields = getattr(type(section), "model_fields", {})
        yield [value.get_secret_value() for field in fields if isinstance(value := getattr(section, field), SecretStr)]


def examine_workers(
    workers: Sequence[WorkerRecord], bulk_workers: Sequence[str], beats: Sequence[str], *, needs_bulk: bool
) -> Iterator[Finding]:
    """Yields the findings about the workers.

    Args:
        workers: The live workers.
        bulk_workers: The live bulk workers.
        beats: The live processes with Celery's beat.
        needs_bulk: Bulk jobs can be submitted.
    """
    if workers:
        draining = sum(worker.draining for worker in workers)
        drains = f", {draining} draining" if draining else ""
        yield ok("workers", f"{len(workers)} live{drains}")
    else:
        yield warning(
            "workers", "none is live: requests wait in their lanes", "start python -m qinfer_workers.inference"
        )
    for worker in workers:
        finding = redis_server.clock("clock of a worker", worker.clock_offset_s, f"Redis minus {worker.id}")
        if finding.remedy:
            yield finding
    yield from _frames(workers)
    if needs_bulk and not bulk_workers:
        yield warning("bulk workers", "none is live: bulk jobs wait", "start python -m qinfer_workers.jobs")
    elif bulk_workers:
        yield ok("bulk workers", f"{len(bulk_workers)} live")
    if bulk_workers and not beats:
        remedy = "start python -m qinfer_workers.jobs.beat, or set QINFER_BULK__BEAT=true for bulk workers"
        yield warning("beat", "none is live: stuck and expired bulk jobs are not found", remedy)


def examine_models(
    desired: Mapping[str, Desired], stored: Mapping[str, StoredModel], workers: Sequence[WorkerRecord]
) -> Iterator[Finding]:
    """Yields the findings about the models that should be loaded."""
    statuses = assess(desired, stored, workers)
    lacking = [
        (f"{name} {version}", state.state, state.reason)
        for name, status in statuses.items()
        for version, state in sorted(status.versions.items())
        if state.state is not State.READY and not status.error
    ]
    lacking += [(name, State.UNAVAILABLE, status.error) for name, status in statuses.items() if status.error]
    for what, state, reason in lacking[:_SHOWN]:
        make = problem if state is State.UNAVAILABLE and workers else warning
        yield make(
            "models",
            f"{what} is {state.value}: {reason}",
            "correct the model's files; qinfer models list shows the state",
        )
    if len(lacking) > _SHOWN:
        yield warning("models", f"{len(lacking) - _SHOWN} more are not READY", "qinfer models list shows them")
    if not lacking:
        yield ok(
            "models", f"all {len(statuses)} that should be loaded are READY" if statuses else "none should be loaded"
        )


def _frames(workers: Sequence[WorkerRecord]) -> Iterator[Finding]:
    """Compares the frame versions of workers with that of this installation, and with one another."""
    behind = [worker.id for worker in workers if FRAME_VERSION not in worker.frame_versions]
    if behind:
        yield problem(
            "frame versions",
            f"{', '.join(behind[:_SHOWN])} can't read frames of version {FRAME_VERSION}, which this qinfer writes",
            "upgrade the workers before the gateways",
        )
    elif len({worker.frame_versions for worker in workers}) > 1:
        yield warning("frame versions", "workers of several versions of qinfer are live", "finish the upgrade")
    elif workers:
        yield ok("frame versions", f"all workers read version {FRAME_VERSION}")
