"""The local deployment of `qinfer up`: the processes of one machine, started, awaited, supervised and stopped.

    private Redis ◀── gateway (qinfer_api)             each a child of the supervisor, configured by QINFER_… variables
                  ◀── workers (qinfer_workers.inference)
                  ◀── bulk worker (qinfer_workers.jobs)

The gateway stops first, so that requests in flight are still answered, then the workers, then Redis. The bulk worker
starts when the models are loaded, so as not to delay them, and stops with the workers.
"""

import contextlib
import importlib.util
import json
import os
import shlex
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

from rich.console import Console
from rich.text import Text

from qinfer import __version__
from qinfer.cli.client import GatewayClient
from qinfer.cli.inputs import concrete, zeros
from qinfer.cli.local import runfile
from qinfer.cli.local.machine import (
    check_repository,
    child_environment,
    claim_ports,
    gateway_addresses,
    local_url,
    repository_places,
    share_cpus,
    usable_cpus,
)
from qinfer.cli.local.supervisor import KILL_MARGIN_S, Program, RestartPolicy, Supervisor
from qinfer.cli.overview import ModelRow, Overview, run_overview, run_start, with_url
from qinfer.cli.scaling.pool import MODULE
from qinfer.cli.scaling.scaler import Autoscaler, make_autoscaler
from qinfer.client import ModelMetadata, TensorMetadata
from qinfer.client.flows import model_path
from qinfer.core.api_keys import check_exposure
from qinfer.core.clock import SystemClock
from qinfer.core.settings import PREFIX, Settings, load_settings
from qinfer.core.store_urls import normalised
from qinfer.errors import BrokerUnavailable, QinferError, SettingsError
from qinfer.jobs.tasks import broker_of
from qinfer.models.state import State
from qinfer.observe import logs
from qinfer.queue.embedded import EmbeddedRedis
from qinfer.tensors import element_count

POLL_S = 0.25
"""Seconds between two reads of the workers' reports while they start."""
GATEWAY_POLICY = RestartPolicy(give_up_after=3)
REDIS_POLICY = RestartPolicy(give_up_after=5)
WORKER_POLICY = RestartPolicy()
PORT_WAIT_S = 10.0
"""Seconds to wait for the port of a killed `qinfer up`, whose gateway notices and ends."""

_FOR_JOBS = ("celery", "pyarrow")


Sections = Mapping[str, Mapping[str, Any]]
"""Section of the settings → field → value."""


@dataclass(frozen=True, slots=True, kw_only=True)
class UpOptions:
    """The options of `qinfer up`.

    Attributes:
        settings: Values in place of the environment's; a port 0 is any free one. Of the repository those that are
            empty are the environment's.
        allow_client_shm: Clients on this host may pass tensors in system shared memory.
        data_dir: The directory of the private Redis' data.
        redis_url: The Redis to use; empty = a private one.
        workers: The number of workers.
        autoscale: The minimum and maximum number of workers, in place of `workers`.
        ready_timeout_s: Seconds to wait until the models are loaded.
    """

    settings: Sections
    allow_client_shm: bool
    data_dir: Path
    redis_url: str
    workers: int
    autoscale: tuple[int, int] | None
    ready_timeout_s: float


def run_deployment(options: UpOptions) -> None:
    """Runs everything until a signal asks to stop.

    Raises:
        SettingsError: An option or setting can't work: no repository, port in use, data directory in use.
        GaveUp: The gateway or Redis failed repeatedly.
    """
    settings = load_settings()
    options = replace(options, settings=completed(options, settings))
    settings = with_sections(settings, options.settings)
    for place in settings.repository.path.split(","):
        check_repository(place)
    check_exposure(settings.auth, settings.http.host)
    console = Console(stderr=True, soft_wrap=True)
    with Supervisor(lambda line: console.print(Text(f"qinfer: {line}", style="yellow"))) as supervisor:
        if options.redis_url:
            LocalDeployment(options, settings, supervisor, console, options.redis_url).serve()
            return
        redis = PrivateRedis(options.data_dir, settings.redis.durability)
        before = runfile.read(options.data_dir)
        supervisor.add(redis, REDIS_POLICY, stop_s=KILL_MARGIN_S)
        try:
            deployment = LocalDeployment(options, settings, supervisor, console, redis.url)
            deployment.serve(after_a_kill=before is not None)
        finally:
            supervisor.stop([redis])
            runfile.remove(options.data_dir)


def completed(options: UpOptions, settings: Settings) -> Sections:
    """Returns the values that `qinfer up` and its programs use in place of the environment's.

    Args:
        options: The options.
        settings: The settings of the environment.

    Raises:
        SettingsError: A location of --allow-store is none.
    """
    given = settings.repository
    repository = {name: getattr(given, name) for name in ("path", "overlay", "load_models", "min_workers")}
    repository |= {name: value for name, value in options.settings["repository"].items() if value not in ("", ())}
    repository["path"] = ",".join(repository_places(repository["path"]))
    if not repository["overlay"] and not options.redis_url and repository["control_mode"] == "explicit":
        repository["overlay"] = str((options.data_dir / "overlay").resolve())
    if options.autoscale and options.autoscale[0] == 0:
        repository["min_workers"] = 0
    stores = {"allow": allowed_stores(options.settings["stores"]["allow"], settings)}
    return {**options.settings, "repository": repository, "stores": stores}


def with_sections(settings: Settings, sections: Sections) -> Settings:
    """Returns the settings with other values."""
    changed = {name: getattr(settings, name).model_copy(update=dict(of)) for name, of in sections.items()}
    return settings.model_copy(update=changed)


class FixedPool:
    """A worker pool of fixed size.

    Args:
        supervisor: The supervisor of the workers.
        env: The workers' environment.
        count: The number of workers.
        drain_s: A worker's own drain limit in seconds.
    """

    def __init__(self, supervisor: Supervisor, env: Mapping[str, str], count: int, drain_s: float) -> None:
        self._supervisor = supervisor
        self._stop_s = drain_s + KILL_MARGIN_S
        self.least = count
        self.about = str(count)
        self.processes = [
            Program(f"worker {number}", MODULE, env, cpus)
            for number, cpus in enumerate(share_cpus(usable_cpus(), count), start=1)
        ]

    def start(self) -> None:
        """Starts the workers."""
        for worker in self.processes:
            self._supervisor.add(worker, WORKER_POLICY, stop_s=self._stop_s)

    def step(self) -> None:
        """Does nothing: the number of workers stays."""

    def close(self) -> None:
        """Does nothing: the workers are the supervisor's to stop."""


WorkerPool = FixedPool | Autoscaler


class PrivateRedis:
    """The embedded Redis as a process under the supervisor."""

    name = "Redis"

    def __init__(self, data_dir: Path, durability: str) -> None:
        self._redis = EmbeddedRedis(data_dir, durability=durability)
        self.url = self._redis.url

    def start(self) -> None:
        """Starts Redis and waits until its data is loaded; a restart keeps the lock on the data directory."""
        self._redis.start()

    def poll(self) -> int | None:
        """See `Process`."""
        return self._redis.process.poll() if self._redis.process else 0

    def terminate(self) -> None:
        """Ends Redis with its data on disk, and waits for the end, which is near as nobody writes any more."""
        self._redis.stop()

    kill = terminate


class Ports(NamedTuple):
    """The gateway's ports; 0 = off."""

    http: int
    grpc: int
    metrics: int


class LocalDeployment:
    """The gateway, the workers and the bulk worker of one `qinfer up`.

    Args:
        options: The options.
        settings: All other settings, from the environment.
        supervisor: The supervisor of the processes.
        console: The console for messages.
        redis_url: The URL of the Redis with the queue.
    """

    def __init__(
        self, options: UpOptions, settings: Settings, supervisor: Supervisor, console: Console, redis_url: str
    ) -> None:
        self._options = options
        self._settings = settings
        self._supervisor = supervisor
        self._console = console
        self._redis_url = redis_url
        self._redis = with_url(settings.redis, redis_url)
        self._clock = SystemClock()

    def serve(self, *, after_a_kill: bool = False) -> None:
        """Starts, waits until ready, serves until a signal asks to stop, drains.

        Args:
            after_a_kill: The last `qinfer up` here was killed: its gateway may still hold the port for a moment.
        """
        options, supervisor = self._options, self._supervisor
        ports = self._claim_ports(PORT_WAIT_S if after_a_kill else 0.0)
        run_start(self._redis, self._settings.repository)
        url = local_url(self._settings.http.host, ports.http, tls=bool(self._settings.http.tls_certfile))
        if not options.redis_url:
            runfile.write(options.data_dir, runfile.RunFile(os.getpid(), url, self._redis_url))
        env = child_environment(os.environ, self._child_settings(ports))
        gateway = Program("gateway", "qinfer_api", env)
        pool = self._worker_pool(env)
        bulk = Program("bulk worker", "qinfer_workers.jobs", env)
        try:
            supervisor.add(gateway, GATEWAY_POLICY, stop_s=self._settings.http.drain_s + KILL_MARGIN_S)
            pool.start()
            no_bulk = why_no_bulk_worker(self._settings, self._redis_url)
            self._announce(url, ports, no_bulk, pool)
            if not (no_bulk or supervisor.stop_asked):
                supervisor.add(bulk, WORKER_POLICY, stop_s=KILL_MARGIN_S)
            supervisor.run(pool.step)
            self._console.print("qinfer: stopping; accepted requests are answered first")
        finally:
            # The gateway's last requests may need a new worker.
            supervisor.stop([gateway], meanwhile=pool.step)
            pool.close()
            supervisor.stop([*pool.processes, bulk])

    def _worker_pool(self, env: Mapping[str, str]) -> WorkerPool:
        if self._options.autoscale is None:
            return FixedPool(self._supervisor, env, self._options.workers, self._settings.worker.drain_s)
        logs.configure(self._settings.log, "up")
        least, most = self._options.autoscale
        settings = with_sections(self._settings, {"autoscale": {"min_workers": least, "max_workers": most}})
        settings = settings.model_copy(update={"redis": self._redis})
        return make_autoscaler(
            settings, self._supervisor, env, lambda line: self._console.print(Text(f"qinfer: {line}"))
        )

    def _announce(self, url: str, ports: Ports, no_bulk: str, pool: WorkerPool) -> None:
        """Waits until the models are loaded or failed, and prints the summary."""
        with GatewayClient(url, verify=False) as client:
            overview = self._wait_until_settled(client, pool)
            if self._supervisor.stop_asked:
                return
            example = None
            ready = next((m.name for m in overview.models if m.state is State.READY), None)
            # An example is not worth a failure.
            with contextlib.suppress(QinferError):
                example = client.metadata(ready) if ready else None
            facts = [
                _fact("URL", (url, "bold cyan"), ("   /docs and /metrics too", "dim")),
                *self._other_ports(ports),
                *_models(overview.models),
                _fact("Workers", pool.about),
                _fact("Jobs", jobs_line(self._settings, no_bulk)),
                _fact("Data", self._where()),
                _fact("Stop", "Ctrl-C", ("   answers what was accepted first; twice: at once", "dim")),
            ]
            if example is not None:
                facts += [Text(), _fact("Try", (example_line(url, example), "green"))]
            for line in [Text(), _title(overview.models), Text(), *facts, Text()]:
                # A command that is cut into lines can't be pasted.
                self._console.print(Text("  ") + line if line else "", soft_wrap=True)

    def _wait_until_settled(self, client: GatewayClient, pool: WorkerPool) -> Overview:
        began_s = self._clock.monotonic_s()
        overview = Overview(models=(), lanes=(), workers=())
        with self._console.status("starting…") as spinner:
            while not self._supervisor.stop_asked:
                self._supervisor.wait(POLL_S)
                pool.step()
                elapsed_s = self._clock.monotonic_s() - began_s
                # While Redis can't be reached, the last overview is kept; workers of an earlier start do not count.
                with contextlib.suppress(BrokerUnavailable):
                    overview = run_overview(self._redis, max_up_s=elapsed_s + 1.0)
                # Without a worker nobody reports on the models, and models that need none are ready.
                pending = sum(m.pending and (bool(pool.least) or m.state is not State.READY) for m in overview.models)
                settled = len(overview.workers) >= pool.least and not pending and client.is_live()
                if settled or elapsed_s >= self._options.ready_timeout_s:
                    break
                spinner.update(f"loading {pending} models…" if pending else "starting…")
        return overview

    def _other_ports(self, ports: Ports) -> Iterator[Text]:
        """Yields the addresses of gRPC and metrics, where they are enabled."""
        settings = self._settings
        if ports.grpc:
            address = local_url(settings.grpc.host or settings.http.host, ports.grpc)
            yield _fact("gRPC", (address.partition("//")[2], "cyan"))
        if ports.metrics:
            address = local_url(settings.metrics.host or settings.http.host, ports.metrics)
            yield _fact("Metrics", (f"{address}/metrics", "cyan"))

    def _claim_ports(self, wait_s: float) -> Ports:
        """Claims the gateway's ports; waits up to `wait_s` for those in use."""
        deadline_s = self._clock.monotonic_s() + wait_s

        def try_again() -> bool:
            if wait_s:
                self._supervisor.wait(POLL_S)
            return self._clock.monotonic_s() < deadline_s and not self._supervisor.stop_asked

        addresses = gateway_addresses(self._settings)
        claimed = claim_ports(addresses, try_again)
        ports = {address.option: port for address, port in zip(addresses, claimed, strict=True)}
        return Ports(ports["--http-port"], ports.get("--grpc-port", 0), ports.get("--metrics-port", 0))

    def _child_settings(self, ports: Ports) -> dict[str, str]:
        sections = {name: dict(of) for name, of in self._options.settings.items()}
        sections["redis"]["url"] = self._redis_url
        for name, port in ports._asdict().items():
            sections[name]["port"] = port
        values = {f"{section}__{name}": value for section, of in sections.items() for name, value in of.items()}
        values["allow_client_shm"] = self._options.allow_client_shm
        return {
            f"{PREFIX}{name}".upper(): value if isinstance(value, str) else json.dumps(value)
            for name, value in values.items()
        }

    def _where(self) -> str:
        if self._options.redis_url:
            return "the Redis of --redis"
        return f"{self._options.data_dir}/ (kept over restarts, crashes and kill -9)"


def allowed_stores(given: Sequence[str], settings: Settings) -> tuple[str, ...]:
    """Returns the locations that jobs may read and write: those of the options, and of the setting.

    Args:
        given: URLs such as s3://bucket/folder, and directories of this machine.
        settings: The settings, for `stores.allow`.

    Raises:
        SettingsError: A location is neither.
    """
    urls = [place if "://" in place else f"file://{Path(place).resolve()}" for place in given]
    try:
        return tuple(dict.fromkeys([*map(normalised, urls), *settings.stores.allow]))
    except SettingsError as error:
        raise SettingsError(f"--allow-store: {error.message}") from None


def why_no_bulk_worker(settings: Settings, redis_url: str) -> str:
    """Returns the reason or the remedy if there is no bulk worker; empty = one can run.

    Args:
        settings: The settings.
        redis_url: The URL of the Redis with the queue.
    """
    if not settings.bulk.enabled:
        return "QINFER_BULK__ENABLED is false"
    if not settings.stores.allow:
        return "allow a location to read and write: --allow-store ./data"
    if missing := [name for name in _FOR_JOBS if importlib.util.find_spec(name) is None]:
        return f"{' and '.join(missing)} is not installed: pip install 'qinfer-ml[bulk]'"
    try:
        broker_of(settings.model_copy(update={"redis": with_url(settings.redis, redis_url)}))
    except SettingsError as error:
        return error.message
    return ""


def jobs_line(settings: Settings, no_worker: str) -> str:
    """Returns the text about bulk jobs in the summary.

    Args:
        settings: The settings, with the allowed locations.
        no_worker: The reason why there is no bulk worker; empty = there is one.
    """
    return f"off; {no_worker}" if no_worker else f"within {', '.join(settings.stores.allow)}"


INLINE_ELEMENTS = 16
"""Larger example tensors are made by a shell pipe instead of being written out."""


def example_line(url: str, model: ModelMetadata) -> str:
    """Returns a short shell line that sends zeros to a model, whatever the size of its inputs."""
    # JSON can't carry these datatypes.
    if any(i.datatype in {"FP16", "BF16"} for i in model.inputs):
        inputs = " ".join(f"--input {shlex.quote(i.name)}=zeros" for i in model.inputs)
        return f"qinfer infer {shlex.quote(model.name)} --url {url} {inputs}"
    body = shlex.quote(json.dumps({"inputs": [_input(i) for i in model.inputs]}))
    for tensor in model.inputs:
        count = element_count(concrete(tensor.shape))
        body = body.replace(f'"{_placeholder(count)}"', f"['$(yes 0 | head -n {count} | paste -sd, -)']")
    return f"curl -s {url}{model_path(model.name)}/infer -d {body}"


def _title(models: Sequence[ModelRow]) -> Text:
    others = sum(model.state is not State.READY for model in models)
    state = ("is ready", "") if not others else (f"is running; models that are not ready: {others}", "yellow")
    return Text.assemble(("qinfer", "bold"), f" {__version__} ", state)


def _models(models: Sequence[ModelRow]) -> Iterator[Text]:
    ready = sum(model.state is State.READY for model in models)
    yield _fact("Models", f"{ready} of {len(models)} ready" if models else "none are to be loaded")
    for model in models:
        style = {State.READY: "green", State.UNAVAILABLE: "red"}.get(model.state, "yellow")
        name = f"{model.name} {model.version or ''}".rstrip()
        yield _fact("", f"{name:<24} ", (f"{model.state.value:<12}", style), model.reason)


def _fact(label: str, *parts: str | tuple[str, str]) -> Text:
    return Text.assemble((f"{label:<9}", "dim"), *parts)


def _input(tensor: TensorMetadata) -> dict[str, Any]:
    shape = concrete(tensor.shape)
    count = element_count(shape)
    data: object = _placeholder(count)
    if tensor.datatype == "BYTES":
        data = [""] * count
    elif count <= INLINE_ELEMENTS:
        data = zeros(tensor.datatype, shape).ravel().tolist()
    return {"name": tensor.name, "shape": list(shape), "datatype": tensor.datatype, "data": data}


def _placeholder(count: int) -> str:
    return f"@zeros:{count}@"
