"""The checks of `qinfer doctor`, in the order of its report. A process of its own loads each runtime: it may crash."""

import asyncio
import json
import os
import resource
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from importlib.metadata import distributions, entry_points, packages_distributions, version
from importlib.util import find_spec
from pathlib import Path
from typing import NamedTuple, TypeVar
from urllib.parse import unquote, urlsplit

from pydantic import SecretStr

from qinfer.backends.registry import ENTRY_POINT_GROUP
from qinfer.cli.checks import redis_server
from qinfer.cli.checks.doctor import Finding, Severity, ok, problem, warning
from qinfer.cli.checks.healthcheck import gateway_health
from qinfer.cli.local.machine import GatewayAddress, claim_ports, gateway_addresses, nearest_run
from qinfer.cli.overview import payload_limits, redis_settings
from qinfer.core.api_keys import check_exposure
from qinfer.core.settings import RedisSettings, RepositorySettings, Settings, load_settings
from qinfer.errors import QinferError, SettingsError
from qinfer.models.config.message import from_json
from qinfer.models.readiness import assess
from qinfer.models.repository.open import open_repositories
from qinfer.models.state import BULK, GATEWAY, DesiredState, State, StoredModel, WorkerRecord
from qinfer.models.store import ControlStore
from qinfer.queue.clients import Login, NodeAddress, admin_client, blocking_client, parse_place
from qinfer.segments.shelf import owners
from qinfer.storage.local import local_path
from qinfer.storage.open import driver_variables
from qinfer.wire.frame import USUAL_VERSION

T = TypeVar("T")

HIDDEN = "…"
FILES_WARNING, FILES_PROBLEM = 8192, 512
"""Limits of open files; a connection takes one file."""
DISK_WARNING_BYTES, DISK_PROBLEM_BYTES = 2 * 2**30, 200 * 2**20
_SHOWN = 5
_GATEWAY_S, _STORE_S = 3.0, 30.0


def examine(redis_url: str, data_dir: Path, repositories: Sequence[str], *, load: bool = True) -> list[Finding]:
    """Runs all checks, blocking for seconds; findings have no secrets.

    Defaults are the running `qinfer up`'s Redis, else the settings. `load` loads the backends' runtimes.
    """
    findings = [*examine_installation()]
    try:
        settings = load_settings()
    except SettingsError as error:
        remedy = "correct the environment; docs/reference/settings.md has all"
        return [*findings, problem("settings", error.message, remedy)]
    try:
        redis = redis_settings(redis_url, data_dir)
    except SettingsError:
        # new programs use the settings
        redis = settings.redis
    repository = settings.repository.model_copy(update={"path": ",".join(repositories) or settings.repository.path})
    settings = settings.model_copy(update={"redis": redis, "repository": repository})
    findings += [warning("settings", f"{one}, left out", "remove it, or correct its name") for one in settings.unknown]
    if not settings.unknown:
        findings.append(ok("settings", "every QINFER_ variable is known and has a possible value"))
    findings += [*_redis_findings(settings, memory_directory(settings, data_dir)), *examine_gateway(settings, data_dir)]
    found, models = read_models(settings.repository)
    settings = settings.model_copy(update={"limits": payload_limits(redis_url, data_dir)})
    findings += [*found, *examine_stores(settings), *examine_memory(settings, data_dir)]
    needed = {from_json(m.config).backend: m.model for m in reversed(models) if m.config and not m.uses}
    findings += [*examine_backends(needed, load=load), *examine_gpus()]
    return without(_secrets(settings), [*findings, *_examine_files(), *_examine_disks(settings, data_dir)])


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


def _redis_findings(settings: Settings, memory: Path) -> Iterator[Finding]:
    wanted, shown = settings.redis, ""
    try:
        place = parse_place(wanted.url.get_secret_value())
        node, shown = place if isinstance(place, NodeAddress) else place.node, str(place)
        has_broker = _has_jobs(settings) and not (settings.bulk.broker_url.get_secret_value() or wanted.cluster)
        with blocking_client(Login.from_settings(wanted)) as client:
            for one in redis_server.nodes_of(client, shown):
                yield from redis_server.examine_node(one, wanted)
            user = node.username or "default"
            yield from redis_server.examine_permissions(client, wanted, user, node.db if has_broker else None)
        yield from asyncio.run(_worker_findings(wanted, memory, needs_bulk=_has_jobs(settings)))
    except QinferError as error:
        yield problem("Redis", error.message)
    except redis_server.ERRORS as error:
        yield problem("Redis", *redis_server.reason_of(error, shown))


def _has_jobs(settings: Settings) -> bool:
    return bool(settings.bulk.enabled and settings.stores.allow)


async def _worker_findings(redis: RedisSettings, memory: Path, *, needs_bulk: bool) -> list[Finding]:
    # A queue would refuse a Redis whose settings are wrong.
    store = ControlStore(admin_client(redis))
    try:
        desired, workers = await store.desired(), await store.workers()
        stored = await store.models(sorted(desired))
        gateways, bulk_workers = [await store.live_processes(program) for program in (GATEWAY, BULK)]
        listening = await store.announced_tensors()
    finally:
        await store.close()
    live = ok("gateways", f"{len(gateways)} live: {', '.join(gateways[:_SHOWN])}")
    none = warning("gateways", "none is live: requests can't be sent", "start python -m qinfer_api")
    return [
        live if gateways else none,
        *examine_workers(workers, bulk_workers, needs_bulk=needs_bulk),
        *examine_sharing(memory, len(workers), len(listening)),
        *examine_models(desired, stored, workers),
    ]


def without(secrets: Sequence[str], findings: Sequence[Finding]) -> list[Finding]:
    """Returns the findings without secrets."""
    hidden = sorted({secret for secret in secrets if secret}, key=len, reverse=True)

    def clean(text: str) -> str:
        for secret in hidden:
            text = text.replace(secret, HIDDEN)
        return text

    return [one._replace(text=clean(one.text), remedy=clean(one.remedy)) for one in findings]


def memory_directory(settings: Settings, data_dir: Path) -> Path:
    """Returns where processes that share memory find one another."""
    return Path(settings.segments.directory or data_dir.resolve() / "memory")


def examine_sharing(directory: Path, workers: int, listening: int) -> Iterator[Finding]:
    """Yields a warning if live workers do not share the memory, and no process listens for other machines."""
    sharing = sum(owner.startswith("worker-") for owner in owners(directory))
    if sharing >= workers or not directory.is_dir():
        return
    text = f"{workers - sharing} of {workers} live workers do not share '{directory}': "
    if listening:
        yield ok("large tensors", f"{text}they read tensors over TCP from {listening} processes, if they connect")
    else:
        remedy = "docs/how-to/large-tensors.md: give all workers of this machine the directory"
        told = f"{text}large tensors for models that they may load go through Redis"
        yield warning("large tensors", told, remedy)


def examine_memory(settings: Settings, data_dir: Path) -> Iterator[Finding]:
    """Says whether large tensors pass through Redis, or stay in memory that gateways share."""
    given, directory = settings.segments.directory, memory_directory(settings, data_dir)
    if not directory.is_dir():
        remedy = "gateways make it" if given else "QINFER_SEGMENTS__DIRECTORY keeps them in memory on one machine"
        yield ok("large tensors", f"pass through Redis: there is no directory '{directory}'; {remedy}")
    elif directory.stat().st_mode & 0o077:
        yield problem(
            "large tensors", f"'{directory}' is open to others, and gateways refuse it", f"chmod 700 {directory}"
        )
    else:
        text = f"stay in memory that {len(owners(directory))} gateways and workers share in '{directory}'"
        yield ok("large tensors", text)


def _secrets(settings: Settings) -> list[str]:
    sections = [getattr(settings, name) for name in type(settings).model_fields]
    fields = [getattr(one, name) for one in sections for name in getattr(type(one), "model_fields", {})]
    found = [value.get_secret_value() for value in fields if isinstance(value, SecretStr)]
    for url in (settings.redis.url, settings.bulk.broker_url):
        with suppress(ValueError):
            found.append(unquote(urlsplit(url.get_secret_value()).password or ""))
    found += [value for name, value in driver_variables() if "KEY" in name or "SECRET" in name or "TOKEN" in name]
    return [secret for secret in found if len(secret) > 3]


def examine_workers(
    workers: Sequence[WorkerRecord], bulk_workers: Sequence[str], *, needs_bulk: bool
) -> Iterator[Finding]:
    """Yields findings about the workers."""
    if workers:
        draining = sum(worker.draining for worker in workers)
        yield ok("workers", f"{len(workers)} live" + (f", {draining} draining" if draining else ""))
    else:
        remedy = "start python -m qinfer_workers.inference"
        yield warning("workers", "none is live: requests wait in their lanes", remedy)
    for worker in workers:
        finding = redis_server.clock("clock of a worker", worker.clock_offset_s, f"Redis minus {worker.id}")
        if finding.remedy:
            yield finding
        for one in worker.late:
            remedy = "docs/how-to/models-that-hang.md: find out where it hangs, set qinfer.execute_timeout_s"
            yield problem("executions", f"{one.text} on {worker.id}", remedy)
    yield from _frames(workers)
    if needs_bulk and not bulk_workers:
        yield warning("bulk workers", "none is live: bulk jobs wait", "start python -m qinfer_workers.jobs")
    elif bulk_workers:
        yield ok("bulk workers", f"{len(bulk_workers)} live")


def _frames(workers: Sequence[WorkerRecord]) -> Iterator[Finding]:
    behind = [worker.id for worker in workers if USUAL_VERSION not in worker.frame_versions]
    if behind:
        text = f"{', '.join(behind[:_SHOWN])} can't read frames of version {USUAL_VERSION}, which this qinfer writes"
        yield problem("frame versions", text, "upgrade the workers before the gateways")
    elif len({worker.frame_versions for worker in workers}) > 1:
        yield warning("frame versions", "workers of several versions of qinfer are live", "finish the upgrade")


def examine_models(
    desired: Mapping[str, DesiredState], stored: Mapping[str, StoredModel], workers: Sequence[WorkerRecord]
) -> Iterator[Finding]:
    """Yields findings about models that should be loaded."""
    statuses = assess(desired, stored, workers)
    lacking = [(name, State.UNAVAILABLE, status.error) for name, status in statuses.items() if status.error]
    lacking += [
        (f"{name} {version}", state.state, state.reason or state.unready)
        for name, status in statuses.items()
        for version, state in sorted(status.versions.items())
        if (state.state is not State.READY or state.unready) and not status.error
    ]
    for what, state, reason in lacking[:_SHOWN]:
        remedy = (
            "correct the model's files, or start a worker that has what they need; qinfer models list shows the state"
        )
        if state is State.READY:
            remedy = "see the model's own is_ready, which reports it"
        make = problem if state is State.UNAVAILABLE and workers else warning
        yield make("models", f"{what} is {state.value}: {reason}", remedy)
    if len(lacking) > _SHOWN:
        yield warning("models", f"{len(lacking) - _SHOWN} more are not READY", "qinfer models list shows them")
    if not lacking:
        text = f"all {len(statuses)} that should be loaded are READY" if statuses else "none should be loaded"
        yield ok("models", text)


def examine_gateway(settings: Settings, data_dir: Path) -> Iterator[Finding]:
    """Yields findings about a running gateway, or about free ports."""
    try:
        check_exposure(settings.auth, settings.http.host)
    except SettingsError as error:
        yield problem("access", error.message)
    up = nearest_run(data_dir)
    health = gateway_health(up.url if up else "", ready=False, timeout_s=_GATEWAY_S)
    if health.is_healthy:
        yield ok("gateway", f"`qinfer up` is running: {health.text}" if up else health.text)
    elif up is not None:
        yield problem("gateway", health.text, "see the output of `qinfer up`")
    else:
        taken = [address for address in gateway_addresses(settings) if address.port and _is_taken(address)]
        for address in taken:
            variable = {"--http-port": "HTTP", "--grpc-port": "GRPC", "--metrics-port": "METRICS"}[address.option]
            text = f"port {address.port} is in use, and no gateway of qinfer answers there"
            yield problem("ports", text, f"stop the program that has it, or set QINFER_{variable}__PORT")
        if not taken:
            ports = ", ".join(str(address.port) for address in gateway_addresses(settings))
            yield ok("gateway", f"none runs on this machine; its ports are free: {ports}")


def _is_taken(address: GatewayAddress) -> bool:
    try:
        claim_ports([address], lambda: False)
    except SettingsError:
        return True
    return False


def read_models(settings: RepositorySettings) -> tuple[list[Finding], Sequence[StoredModel]]:
    """Returns findings about the repositories, and the models; blocking."""
    subject, place = "model repository", _without_password(settings.path)
    if settings.path == "models" and not Path("models").is_dir():
        text = "the default directory 'models' does not exist, and no other is set"
        return [warning(subject, text, "give --model-repository, or set QINFER_REPOSITORY__PATH")], ()
    try:
        models = _within_time(open_repositories(settings).scan)
    except QinferError as error:
        return [problem(subject, f"{place}: {error.message}", "correct QINFER_REPOSITORY__PATH, or its store")], ()
    remedy = "correct its files; docs/reference/model-config.md has the fields"
    wrong = [problem("model", f"{model.model}: {model.error}", remedy) for model in models if model.error]
    if not models:
        return [warning(subject, f"{place} has no model")], models
    return [*wrong, ok(subject, f"{place}: {len(models) - len(wrong)} of {len(models)} models are valid")], models


def examine_stores(settings: Settings) -> Iterator[Finding]:
    """Yields a finding for each store; blocking."""
    for url in settings.stores.allow:
        yield _store(f"store {_without_password(url)}", url)
    if settings.limits.payload_url:
        yield _store("payload store", settings.limits.payload_url)


def _store(subject: str, url: str) -> Finding:
    if (path := local_path(url)) is not None:
        if not path.is_dir():
            return problem(subject, f"{path} is not a directory on this machine", "create or mount it")
        if not os.access(path, os.R_OK | os.W_OK | os.X_OK):
            return warning(subject, f"{path} can't be written by this user", "required if jobs write there")
        return ok(subject, "readable and writable")
    try:
        from qinfer.storage.open import store_for

        _within_time(lambda: next(iter(store_for(url).scan(url)), None))
    except QinferError as error:
        remedy = "check the bucket, and the credentials and endpoint in the store's own variables"
        return problem(subject, error.message, remedy)
    return ok(subject, "readable")


def _within_time(work: Callable[[], T]) -> T:
    """Runs a check in a thread, which is abandoned after a time limit."""
    threads = ThreadPoolExecutor(1, thread_name_prefix="doctor")
    try:
        return threads.submit(work).result(_STORE_S)
    except TimeoutError:
        raise SettingsError(f"no answer within {_STORE_S:g} s") from None
    finally:
        threads.shutdown(wait=False, cancel_futures=True)


def _without_password(path: str) -> str:
    netloc = urlsplit(path).netloc
    return path.replace(f"{netloc.rpartition('@')[0]}@", "") if "@" in netloc and ":" in netloc else path


def _examine_files() -> Iterator[Finding]:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    text = f"a process may have {soft:,} open (hard limit {hard:,}); each connection is one"
    remedy = "raise it: ulimit -n 65536, LimitNOFILE= of systemd, or ulimits of docker-compose"
    if soft == resource.RLIM_INFINITY or soft >= FILES_WARNING:
        yield ok("open files", "no limit" if soft == resource.RLIM_INFINITY else text)
    else:
        yield (problem if soft < FILES_PROBLEM else warning)("open files", text, remedy)


def _examine_disks(settings: Settings, data_dir: Path) -> Iterator[Finding]:
    places = {
        "data directory": str(data_dir) if data_dir.exists() else "",
        "model cache": settings.repository.cache_dir,
    }
    places["spool directory"] = settings.bulk.spool_dir
    places["payload store"] = str(local_path(settings.limits.payload_url) or "")
    for name, path in places.items():
        if not path:
            continue
        place = next(one for one in (Path(path).absolute(), *Path(path).absolute().parents) if one.exists())
        free = shutil.disk_usage(place).free
        level = Severity.PROBLEM if free < DISK_PROBLEM_BYTES else Severity.WARNING
        remedy = "free some space: queued or copied data is written there"
        if free >= DISK_WARNING_BYTES:
            level, remedy = Severity.OK, ""
        yield Finding(name, level, f"{path}: {free / 2**30:.1f} GiB free", remedy)


_LIMIT_S = 90.0


class Runtime(NamedTuple):
    """A backend's runtime; `devices` is a Python expression."""

    module: str
    extra: str
    devices: str


RUNTIMES: Mapping[str, Runtime] = {
    "onnxruntime": Runtime(
        "onnxruntime",
        "onnx",
        "[p.removesuffix('ExecutionProvider') for p in onnxruntime.get_available_providers()]",
    ),
    "pytorch": Runtime(
        "torch", "torch", "['CPU', *(torch.cuda.get_device_name(n) for n in range(torch.cuda.device_count()))]"
    ),
    "tensorrt": Runtime("tensorrt", "tensorrt", "[]"),
    "openvino": Runtime("openvino", "openvino", "list(openvino.Core().available_devices)"),
    "tensorflow": Runtime("tensorflow", "tensorflow", "['CPU']"),
    "litert": Runtime("ai_edge_litert", "litert", "['CPU']"),
    "forest": Runtime("treelite", "forest", "['CPU']"),
    "jax": Runtime("jax", "jax", "['CPU']"),
    "mlflow": Runtime("mlflow", "mlflow", "['CPU']"),
}


class LoadedRuntime(NamedTuple):
    """The devices of a loaded runtime, or an error."""

    devices: tuple[str, ...]
    error: str = ""


def examine_backends(needed: Mapping[str, str], *, load: bool) -> Iterator[Finding]:
    """Yields a finding for each backend.

    `needed` maps backends to models that need them. Without `load`, only packages are searched.
    """
    installed = {name: runtime for name, runtime in RUNTIMES.items() if find_spec(runtime.module) is not None}
    with ThreadPoolExecutor(2, thread_name_prefix="runtimes") as threads:
        loaded = dict(zip(installed, threads.map(load_runtime, installed.values()), strict=True)) if load else {}
    packages = packages_distributions()
    for name, runtime in RUNTIMES.items():
        if name not in installed:
            yield _absent(name, runtime, needed.get(name, ""))
            continue
        text = " ".join([runtime.module, *map(version, packages.get(runtime.module, [])[:1])])
        if error := loaded.get(name, LoadedRuntime(())).error:
            remedy = f"reinstall it: pip install --force-reinstall 'qinfer-ml[{runtime.extra}]'"
            yield problem(f"backend {name}", f"{text} is installed and can't be loaded: {error}", remedy)
        else:
            devices = ", ".join(loaded[name].devices) if name in loaded else ""
            yield ok(f"backend {name}", f"{text}; {devices}" if devices else text)
    yield ok("backend python", f"Python {sys.version.split()[0]}, in processes of its own")
    for name in sorted(entry_points(group=ENTRY_POINT_GROUP).names):
        yield ok(f"backend {name}", "of another package")
    if not installed:
        yield warning(
            "backends",
            "no runtime is installed: a worker here runs python models only",
            "pip install 'qinfer-ml[onnx]'",
        )


def load_runtime(runtime: Runtime) -> LoadedRuntime:
    """Loads a runtime in its own process; blocking, for seconds."""
    code = f"import json, {runtime.module}; print(); print(json.dumps({runtime.devices}))"
    try:
        done = subprocess.run(  # noqa: S603 - our own interpreter and words
            [sys.executable, "-P", "-c", code], capture_output=True, text=True, timeout=_LIMIT_S, check=False
        )
    except subprocess.TimeoutExpired:
        return LoadedRuntime((), f"loading takes more than {_LIMIT_S:g} s")
    if done.returncode < 0:
        return LoadedRuntime((), f"it crashes (signal {-done.returncode})")
    if done.returncode:
        return LoadedRuntime((), (done.stderr.strip().splitlines() or ["unknown"])[-1])
    return LoadedRuntime(tuple(map(str, json.loads(done.stdout.strip().splitlines()[-1]))))


def examine_gpus(dev: Path = Path("/dev")) -> Iterator[Finding]:
    """Yields a finding for each NVIDIA GPU, by the driver's own program."""
    here = sorted(path.name for path in dev.glob("nvidia[0-9]*"))
    if not here:
        yield ok("GPU", "none")
        return
    fields = "name,driver_version,memory.used,memory.total"
    try:
        asked = subprocess.run(  # noqa: S603 - constants
            ["nvidia-smi", f"--query-gpu={fields}", "--format=csv,noheader"],  # noqa: S607
            capture_output=True, text=True, timeout=_LIMIT_S, check=True,
        )  # fmt: skip
    except (OSError, subprocess.SubprocessError):
        yield problem("GPU", f"{', '.join(here)}; nvidia-smi does not answer", "install NVIDIA's driver")
        return
    for number, line in enumerate(asked.stdout.strip().splitlines()):
        name, driver, used, total = (*line.split(", "), *[""] * 4)[:4]
        yield ok(f"GPU {number}", f"{name}, driver {driver}, {used} of {total} used")
    if find_spec("pynvml") is None:
        yield warning("GPU", "there are no metrics of it", "pip install 'qinfer-ml[gpu]'")


def _absent(name: str, runtime: Runtime, model: str) -> Finding:
    remedy = f"pip install 'qinfer-ml[{runtime.extra}]'"
    if model:
        text = f"not installed here, and model '{model}' needs it where workers run"
        return warning(f"backend {name}", text, remedy)
    return ok(f"backend {name}", "not installed")
