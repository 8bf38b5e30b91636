"""All checks of `qinfer doctor`, in the order in which they are read."""

import asyncio
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from pydantic import SecretStr

from qinfer.cli.checks import fleet, host, redis_server, runtimes, storage
from qinfer.cli.checks.permissions import examine_permissions
from qinfer.cli.checks.report import Finding, ok, problem, without
from qinfer.cli.overview import redis_settings
from qinfer.core.settings import RedisSettings, Settings, load_settings
from qinfer.errors import QinferError, SettingsError
from qinfer.models.state import BEAT, BULK, Desired, StoredModel, WorkerRecord
from qinfer.models.store import ControlStore
from qinfer.queue.address import Address, parse_place
from qinfer.queue.clients import admin_client, blocking_client
from qinfer.storage.open import driver_variables


class _Fleet(NamedTuple):
    workers: list[WorkerRecord]
    bulk_workers: list[str]
    beats: list[str]
    desired: dict[str, Desired]
    stored: dict[str, StoredModel]


def examine(redis_url: str, data_dir: Path, repositories: Sequence[str], *, runtimes: bool = True) -> list[Finding]:
    """Looks at everything; blocking, for seconds.

    Args:
        redis_url: Where Redis is; empty = where an `up` of `data_dir` has it, or else where the settings say.
        data_dir: Of a running `up`.
        repositories: Where models are; empty = where the settings say.
        runtimes: Load the backends' runtimes.

    Returns:
        What was found; without secrets.
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
    except SettingsError:  # no `up` runs: a program that was started now would go by its settings
        return settings.redis


def _redis_findings(settings: Settings) -> list[Finding]:
    wanted = settings.redis
    try:
        place = parse_place(wanted.url.get_secret_value())
        node = place if isinstance(place, Address) else place.node
        client = blocking_client(wanted)
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
        findings += _fleet_findings(settings)
    except redis_server.ERRORS as error:
        findings.append(problem("Redis", *redis_server.reason_of(error, str(place))))
    finally:
        client.close()
    return findings


def _fleet_findings(settings: Settings) -> list[Finding]:
    try:
        found = asyncio.run(_read_fleet(settings.redis))
    except QinferError as error:
        return [problem("workers", f"the records can't be read: {error.message}")]
    needs_bulk = bool(settings.bulk.enabled and settings.stores.allow)
    return [
        *fleet.examine_workers(found.workers, found.bulk_workers, found.beats, needs_bulk=needs_bulk),
        *fleet.examine_models(found.desired, found.stored, found.workers),
    ]


async def _read_fleet(settings: RedisSettings) -> _Fleet:
    store = ControlStore(admin_client(settings))
    try:
        desired = await store.desired()
        workers, bulk, beats = await store.workers(), await store.live_processes(BULK), await store.live_processes(BEAT)
        return _Fleet(workers, bulk, beats, desired, await store.models(sorted(desired)))
    finally:
        await store.close()


def _broker_db(settings: Settings, node: Address) -> int | None:
    """Returns the database of Celery's tasks where they are in the Redis of the queue; `None` = there are none."""
    if not (settings.bulk.enabled and settings.stores.allow) or settings.bulk.broker_url.get_secret_value():
        return None
    return None if settings.redis.cluster else node.db


def _secrets(settings: Settings) -> list[str]:
    """Returns what must not be shown, whatever a message says."""
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
