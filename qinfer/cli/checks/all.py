"""The checks of `qinfer doctor`, in the order of the report."""

import asyncio
import os
import resource
import shutil
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from importlib.metadata import distributions
from pathlib import Path
from typing import NamedTuple, TypeVar
from urllib.parse import unquote, urlsplit

from pydantic import SecretStr

from qinfer.cli.checks import redis_server, runtimes
from qinfer.cli.checks.health import gateway_health
from qinfer.cli.checks.permissions import examine_permissions
from qinfer.cli.checks.report import Finding, ok, problem, warning, without
from qinfer.cli.local import runfile
from qinfer.cli.local.machine import GatewayAddress, claim_ports, gateway_addresses
from qinfer.cli.overview import redis_settings
from qinfer.core.api_keys import check_exposure
from qinfer.core.settings import RedisSettings, RepositorySettings, Settings, load_settings
from qinfer.errors import QinferError, SettingsError
from qinfer.models.config.message import from_json
from qinfer.models.readiness import assess
from qinfer.models.repository.open import open_repositories
from qinfer.models.state import BULK, GATEWAY, DesiredState, State, StoredModel, WorkerRecord
from qinfer.models.store import ControlStore
from qinfer.queue.address import NodeAddress, parse_place
from qinfer.queue.clients import Login, admin_client, blocking_client
from qinfer.storage.open import driver_variables
from qinfer.wire.frame import FRAME_VERSION

T = TypeVar("T")

_SHOWN = 5


class _Workers(NamedTuple):
    workers: list[WorkerRecord]
    bulk_workers: list[str]
    gateways: list[str]
    desired: dict[str, DesiredState]
    stored: dict[str, StoredModel]


def examine(redis_url: str, data_dir: Path, repositories: Sequence[str], *, load: bool = True) -> list[Finding]:
    """Runs all checks, blocking for seconds; findings have no secrets.

    Defaults are the running `qinfer up`'s Redis, else the settings. `load` loads the backends' runtimes.
    """
    findings = [*examine_installation()]
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
    findings += [warning("settings", f"{one}, left out", "remove it, or correct its name") for one in settings.unknown]
    if not settings.unknown:
        findings.append(ok("settings", "every QINFER_ variable is known and has a possible value"))
    findings += _redis_findings(settings)
    findings += examine_gateway(settings, data_dir)
    found, models = read_models(settings.repository)
    findings += [*found, *examine_stores(settings)]
    findings += runtimes.examine_backends(needed_backends(models), load=load)
    findings += runtimes.examine_gpus()
    findings += [*examine_files(), *examine_disks(settings, data_dir)]
    return without(_secrets(settings), findings)


def _redis(settings: Settings, url: str, data_dir: Path) -> RedisSettings:
    try:
        return redis_settings(url, data_dir)
    except SettingsError:
        # new programs use the settings
        return settings.redis


def _redis_findings(settings: Settings) -> list[Finding]:
    wanted = settings.redis
    try:
        place = parse_place(wanted.url.get_secret_value())
        node = place if isinstance(place, NodeAddress) else place.node
        client = blocking_client(Login.from_settings(wanted))
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
        *examine_gateways(found.gateways),
        *examine_workers(found.workers, found.bulk_workers, needs_bulk=needs_bulk),
        *examine_models(found.desired, found.stored, found.workers),
    ]


async def _read_workers(settings: RedisSettings) -> _Workers:
    store = ControlStore(admin_client(settings))
    try:
        desired = await store.desired()
        workers = await store.workers()
        bulk, gateways = [await store.live_processes(program) for program in (BULK, GATEWAY)]
        return _Workers(workers, bulk, gateways, desired, await store.models(sorted(desired)))
    finally:
        await store.close()


def _broker_db(settings: Settings, node: NodeAddress) -> int | None:
    if not (settings.bulk.enabled and settings.stores.allow) or settings.bulk.broker_url.get_secret_value():
        return None
    return None if settings.redis.cluster else node.db


def _secrets(settings: Settings) -> list[str]:
    found = [value for section in _sections(settings) for value in section]
    for url in (settings.redis.url, settings.bulk.broker_url):
        try:
            place = parse_place(url.get_secret_value())
        except SettingsError:
            continue
        found.append(place.password if isinstance(place, NodeAddress) else place.node.password)
    found += [value for name, value in driver_variables() if "KEY" in name or "SECRET" in name or "TOKEN" in name]
    return [secret for secret in found if len(secret) > 3]


def _sections(settings: Settings) -> Iterator[list[str]]:
    for name in type(settings).model_fields:
        section = getattr(settings, name)
        fields = getattr(type(section), "model_fields", {})
        yield [value.get_secret_value() for field in fields if isinstance(value := getattr(section, field), SecretStr)]


def examine_gateways(gateways: Sequence[str]) -> Iterator[Finding]:
    """Yields the finding about live gateways."""
    if gateways:
        yield ok("gateways", f"{len(gateways)} live: {', '.join(gateways[:_SHOWN])}")
    else:
        yield warning("gateways", "none is live: requests can't be sent", "start python -m qinfer_api")


def examine_workers(
    workers: Sequence[WorkerRecord], bulk_workers: Sequence[str], *, needs_bulk: bool
) -> Iterator[Finding]:
    """Yields findings about the workers."""
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
    for worker in workers:
        for one in worker.late:
            remedy = "docs/how-to/models-that-hang.md: find out where it hangs, set qinfer.execute_timeout_s"
            yield problem("executions", f"{one.text} on {worker.id}", remedy)
    yield from _frames(workers)
    if needs_bulk and not bulk_workers:
        yield warning("bulk workers", "none is live: bulk jobs wait", "start python -m qinfer_workers.jobs")
    elif bulk_workers:
        yield ok("bulk workers", f"{len(bulk_workers)} live")


def examine_models(
    desired: Mapping[str, DesiredState], stored: Mapping[str, StoredModel], workers: Sequence[WorkerRecord]
) -> Iterator[Finding]:
    """Yields findings about models that should be loaded."""
    statuses = assess(desired, stored, workers)
    lacking = [
        (f"{name} {version}", state.state, state.reason or state.unready)
        for name, status in statuses.items()
        for version, state in sorted(status.versions.items())
        if (state.state is not State.READY or state.unready) and not status.error
    ]
    lacking += [(name, State.UNAVAILABLE, status.error) for name, status in statuses.items() if status.error]
    for what, state, reason in lacking[:_SHOWN]:
        make = problem if state is State.UNAVAILABLE and workers else warning
        yield make(
            "models",
            f"{what} is {state.value}: {reason}",
            "see the model's own is_ready, which reports it"
            if state is State.READY
            else "correct the model's files, or start a worker that has what they need; "
            "qinfer models list shows the state",
        )
    if len(lacking) > _SHOWN:
        yield warning("models", f"{len(lacking) - _SHOWN} more are not READY", "qinfer models list shows them")
    if not lacking:
        yield ok(
            "models", f"all {len(statuses)} that should be loaded are READY" if statuses else "none should be loaded"
        )


def _frames(workers: Sequence[WorkerRecord]) -> Iterator[Finding]:
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


FILES_WARNING, FILES_PROBLEM = 8192, 512
"""Limits of open files; a connection takes one file."""
DISK_WARNING_BYTES, DISK_PROBLEM_BYTES = 2 * 2**30, 200 * 2**20

_TIMEOUT_S = 3.0


def examine_installation(path: Sequence[str] | None = None) -> Iterator[Finding]:
    """Yields a problem if another project's `qinfer` is installed, too."""
    where = sys.path if path is None else list(path)
    for other in distributions(name="qinfer", path=where):
        if any(file.parts[:1] == ("qinfer",) for file in other.files or ()):
            yield problem(
                "installation",
                f"the distribution qinfer {other.version} is installed beside qinfer-ml, and both own `import qinfer`",
                "pip uninstall --yes qinfer qinfer-ml, and install qinfer-ml with its extras again",
            )


def examine_files() -> Iterator[Finding]:
    """Yields the finding about the limit of open files."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY:
        yield ok("open files", "no limit")
        return
    text = f"a process may have {soft:,} open (hard limit {hard:,}); each connection is one"
    remedy = "raise it: ulimit -n 65536, LimitNOFILE= of systemd, or ulimits of docker-compose"
    if soft < FILES_PROBLEM:
        yield problem("open files", text, remedy)
    elif soft < FILES_WARNING:
        yield warning("open files", text, remedy)
    else:
        yield ok("open files", text)


def examine_disks(settings: Settings, data_dir: Path) -> Iterator[Finding]:
    """Yields a finding for each location of large files."""
    places = {"data directory": data_dir if data_dir.exists() else None}
    places["model cache"] = Path(settings.repository.cache_dir) if settings.repository.cache_dir else None
    places["spool directory"] = Path(settings.bulk.spool_dir) if settings.bulk.spool_dir else None
    for name, path in places.items():
        if path is not None:
            yield _disk(name, path)


def examine_gateway(settings: Settings, data_dir: Path) -> Iterator[Finding]:
    """Yields findings about a running gateway, or about free ports."""
    try:
        check_exposure(settings.auth, settings.http.host)
    except SettingsError as error:
        yield problem("access", error.message)
    run = runfile.nearest(data_dir)
    if run is not None and run.is_alive():
        health = gateway_health(run.url, ready=False, timeout_s=_TIMEOUT_S)
        remedy = "see the output of `qinfer up`"
        yield (
            ok("gateway", f"`qinfer up` is running: {health.text}")
            if health.is_healthy
            else problem("gateway", health.text, remedy)
        )
        return
    health = gateway_health("", ready=False, timeout_s=_TIMEOUT_S)
    if health.is_healthy:
        yield ok("gateway", health.text)
        return
    addresses = gateway_addresses(settings)
    taken = [address for address in addresses if address.port and _is_taken(address)]
    for address in taken:
        variable = {"--http-port": "HTTP", "--grpc-port": "GRPC", "--metrics-port": "METRICS"}[address.option]
        yield problem(
            "ports",
            f"port {address.port} is in use, and no gateway of qinfer answers there",
            f"stop the program that has it, or set QINFER_{variable}__PORT",
        )
    if not taken:
        ports = ", ".join(str(address.port) for address in addresses)
        yield ok("gateway", f"none runs on this machine; its ports are free: {ports}")


def _is_taken(address: GatewayAddress) -> bool:
    try:
        claim_ports([address], lambda: False)
    except SettingsError:
        return True
    return False


def _disk(name: str, path: Path) -> Finding:
    place = path.absolute()
    while not place.exists() and place != place.parent:
        place = place.parent
    try:
        free = shutil.disk_usage(place).free
    except OSError as error:
        return problem(name, f"{path} can't be read: {error.strerror}")
    text = f"{path}: {free / 2**30:.1f} GiB free"
    remedy = "free some space: queued or copied data is written there"
    if free < DISK_PROBLEM_BYTES:
        return problem(name, text, remedy)
    return warning(name, text, remedy) if free < DISK_WARNING_BYTES else ok(name, text)


_LIMIT_S = 30.0
_DEFAULT = "models"


def read_models(settings: RepositorySettings) -> tuple[list[Finding], Sequence[StoredModel]]:
    """Returns findings about the repositories, and the models; blocking."""
    subject = "model repository"
    is_default = settings.path == _DEFAULT
    if is_default and not Path(_DEFAULT).is_dir():
        text = f"the default directory '{_DEFAULT}' does not exist, and no other is set"
        return [warning(subject, text, "give --model-repository, or set QINFER_REPOSITORY__PATH")], ()
    try:
        models = _within(open_repositories(settings).scan)
    except (SettingsError, TimeoutError) as error:
        text = error.message if isinstance(error, SettingsError) else f"no answer within {_LIMIT_S:g} s"
        return [
            problem(
                subject, f"{_without_password(settings.path)}: {text}", "correct QINFER_REPOSITORY__PATH, or its store"
            )
        ], ()
    wrong = [model for model in models if model.error]
    findings = [
        problem(
            "model", f"{model.model}: {model.error}", "correct its files; docs/reference/model-config.md has the fields"
        )
        for model in wrong
    ]
    place = _without_password(settings.path)
    if not models:
        findings.append(warning(subject, f"{place} has no model"))
    else:
        findings.append(ok(subject, f"{place}: {len(models) - len(wrong)} of {len(models)} models are valid"))
    return findings, models


def needed_backends(models: Sequence[StoredModel]) -> dict[str, str]:
    """Returns the needed backends, each with the name of a model."""
    return {
        from_json(model.config).backend: model.model for model in reversed(models) if model.config and not model.uses
    }


def examine_stores(settings: Settings) -> Iterator[Finding]:
    """Yields a finding for each store; blocking."""
    if not settings.stores.allow:
        yield ok(
            "stores",
            "the settings here allow none (QINFER_STORES__ALLOW); those of `qinfer up --allow-store` are its own",
        )
    for url in settings.stores.allow:
        yield _store(f"store {_without_password(url)}", url)
    if settings.limits.payload_url:
        yield _store("payload store", settings.limits.payload_url)


def _store(subject: str, url: str) -> Finding:
    remedy = "check the bucket, and the credentials and endpoint in the store's own variables"
    parts = urlsplit(url)
    if parts.scheme in ("file", "local"):
        path = Path(unquote(parts.path))
        if not path.is_dir():
            return problem(subject, f"{path} is not a directory on this machine", "create or mount it")
        if not os.access(path, os.R_OK | os.W_OK | os.X_OK):
            return warning(subject, f"{path} can't be written by this user", "required if jobs write there")
        return ok(subject, "readable and writable")
    try:
        from qinfer.storage.open import store_for

        _within(lambda: next(iter(store_for(url).scan(url)), None))
    except QinferError as error:
        return problem(subject, error.message, remedy)
    except TimeoutError:
        return problem(subject, f"no answer within {_LIMIT_S:g} s", remedy)
    return ok(subject, "readable")


def _within(work: Callable[[], T]) -> T:
    """Runs a check in a thread, which is abandoned after a time limit."""
    threads = ThreadPoolExecutor(1, thread_name_prefix="doctor")
    try:
        return threads.submit(work).result(_LIMIT_S)
    finally:
        threads.shutdown(wait=False, cancel_futures=True)


def _without_password(path: str) -> str:
    parts = urlsplit(path)
    return (
        path.replace(f"{parts.netloc.rpartition('@')[0]}@", "") if "@" in parts.netloc and ":" in parts.netloc else path
    )
