"""What `qinfer up` does: builds the processes of one machine, waits until they are ready, looks after them, stops them.

    private Redis ◀── gateway (qinfer_api)             each a child of the supervisor, configured by QINFER_… variables
                  ◀── workers (qinfer_workers.inference)
                  ◀── bulk worker (qinfer_workers.jobs)

Order matters at the end: the gateway first, so that what is in flight is still answered, then the workers, then Redis.
The bulk worker starts when the models are loaded, so as not to delay them, and ends with the workers.
"""

import contextlib
import json
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from rich.console import Console
from rich.text import Text

from qinfer.cli.client import GatewayClient
from qinfer.cli.local import runfile
from qinfer.cli.local.bulk import allowed_stores, jobs_line, why_no_bulk_worker
from qinfer.cli.local.machine import (
    Address,
    check_repository,
    child_environment,
    claim_ports,
    local_url,
    repository_places,
)
from qinfer.cli.local.restart import RestartPolicy
from qinfer.cli.local.summary import print_summary
from qinfer.cli.local.supervisor import Program, Supervisor
from qinfer.cli.local.worker_pool import KILL_MARGIN_S, WORKER_POLICY, Crew, FixedCrew, autoscaler
from qinfer.cli.overview import Overview, run_overview, run_start, with_url
from qinfer.core.api_keys import check_exposure
from qinfer.core.clock import SystemClock
from qinfer.core.settings import Settings, load_settings
from qinfer.errors import BrokerUnavailable, QinferError
from qinfer.models.state import State
from qinfer.observe import logs
from qinfer.queue.embedded import EmbeddedRedis

LOOK_EVERY_S = 0.25
"""Between two looks at what the children report while they start."""
GATEWAY_POLICY = RestartPolicy(give_up_after=3)
REDIS_POLICY = RestartPolicy(give_up_after=5)
PORT_PATIENCE_S = 10.0
"""Seconds that the port of an `up` that was killed gets to become free: its gateway notices and ends."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StackOptions:
    """The options of `qinfer up`: `redis_url` is empty for a private Redis, a port 0 for any free one.

    Empty `model_repositories` and `load_models` are those of the settings. `autoscale` is the fewest and the most
    workers, in place of `workers`.
    """

    model_repositories: tuple[str, ...]
    control_mode: str
    load_models: tuple[str, ...]
    poll_s: float
    strict_readiness: bool
    data_dir: Path
    host: str
    http_port: int
    grpc_port: int
    metrics_port: int
    allow_client_shm: bool
    redis_url: str
    workers: int
    autoscale: tuple[int, int] | None
    allow_stores: tuple[str, ...]
    log_format: str
    log_level: str
    ready_timeout_s: float
    durability: str


def run_stack(options: StackOptions) -> None:
    """Runs everything until a signal asks to stop.

    Raises:
        SettingsError: Something can't work as it is set: no repository, port in use, data directory in use.
        GaveUp: The gateway or Redis failed again and again.
    """
    settings = with_options(load_settings(), options)
    for place in settings.repository.path.split(","):
        check_repository(place)
    check_exposure(settings.auth, options.host)
    console = Console(stderr=True, soft_wrap=True)
    with Supervisor(lambda line: console.print(Text(f"qinfer: {line}", style="yellow"))) as supervisor:
        if options.redis_url:
            Stack(options, settings, supervisor, console, options.redis_url).serve()
            return
        redis = PrivateRedis(options.data_dir, options.durability)
        before = runfile.read(options.data_dir)
        supervisor.add(redis, REDIS_POLICY, stop_s=KILL_MARGIN_S)
        try:
            stack = Stack(options, settings, supervisor, console, redis.url)
            stack.serve(after_a_kill=before is not None)
        finally:
            supervisor.stop([redis])
            runfile.remove(options.data_dir)


def with_options(settings: Settings, options: StackOptions) -> Settings:
    """Returns the settings as the options of `up` have them, where they are about repositories and ports."""
    given = settings.repository
    overlay = given.overlay
    if not overlay and not options.redis_url and options.control_mode == "explicit":
        overlay = str((options.data_dir / "overlay").resolve())
    changes = {
        "path": ",".join(repository_places(",".join(options.model_repositories) or given.path)),
        "overlay": overlay,
        "control_mode": options.control_mode,
        "load_models": options.load_models or given.load_models,
        "poll_s": options.poll_s,
        "strict_readiness": options.strict_readiness,
    }
    if options.autoscale and options.autoscale[0] == 0:
        changes["min_workers"] = 0
    scaling = settings.autoscale
    if options.autoscale:
        least, most = options.autoscale
        scaling = scaling.model_copy(update={"min_workers": least, "max_workers": most})
    return settings.model_copy(
        update={
            "repository": given.model_copy(update=changes),
            "autoscale": scaling,
            "grpc": settings.grpc.model_copy(update={"port": options.grpc_port}),
            "metrics": settings.metrics.model_copy(update={"port": options.metrics_port}),
            "stores": settings.stores.model_copy(update={"allow": allowed_stores(options.allow_stores, settings)}),
        }
    )


class PrivateRedis:
    """The embedded Redis as a process of the supervisor."""

    name = "Redis"

    def __init__(self, data_dir: Path, durability: str) -> None:
        self._redis = EmbeddedRedis(data_dir, durability=durability)
        self.url = self._redis.url

    def start(self) -> None:
        """Starts it and waits until it has loaded its data; a restart keeps the lock on the data directory."""
        self._redis.start()

    def poll(self) -> int | None:
        """See `Process`."""
        return self._redis.process.poll() if self._redis.process else 0

    def terminate(self) -> None:
        """Ends it with its data on disk, and waits for that: it takes moments, nobody else writes any more."""
        self._redis.stop()

    kill = terminate


class Ports(NamedTuple):
    """Where the gateway listens; 0 = it does not."""

    http: int
    grpc: int
    metrics: int


class Stack:
    """The gateway, the workers and the bulk worker of one `qinfer up`.

    Args:
        options: What was asked for.
        settings: The rest, from the environment.
        supervisor: Looks after them.
        console: For people.
        redis_url: The queue.
    """

    def __init__(
        self, options: StackOptions, settings: Settings, supervisor: Supervisor, console: Console, redis_url: str
    ) -> None:
        self._options = options
        self._settings = settings
        self._supervisor = supervisor
        self._console = console
        self._redis_url = redis_url
        self._redis = with_url(settings.redis, redis_url).model_copy(update={"durability": options.durability})
        self._clock = SystemClock()

    def serve(self, *, after_a_kill: bool = False) -> None:
        """Starts, waits until ready, serves until a signal asks to stop, drains.

        Args:
            after_a_kill: The last `up` here did not end properly: its gateway may still hold the port for a moment.
        """
        options, supervisor = self._options, self._supervisor
        ports = self._claim_ports(self._patience(PORT_PATIENCE_S if after_a_kill else 0.0))
        run_start(self._redis, self._settings.repository)
        url = local_url(options.host, ports.http, tls=bool(self._settings.http.tls_certfile))
        if not options.redis_url:
            runfile.write(options.data_dir, runfile.RunFile(os.getpid(), url, self._redis_url))
        env = child_environment(os.environ, self._child_settings(ports))
        gateway = Program("gateway", "qinfer_api", env)
        crew = self._crew(env)
        bulk = Program("bulk worker", "qinfer_workers.jobs", env)
        try:
            supervisor.add(gateway, GATEWAY_POLICY, stop_s=self._settings.http.drain_s + KILL_MARGIN_S)
            crew.start()
            no_bulk = why_no_bulk_worker(self._settings, self._redis_url)
            self._announce(url, ports, no_bulk, crew)
            if not (no_bulk or supervisor.stop_asked):
                supervisor.add(bulk, WORKER_POLICY, stop_s=KILL_MARGIN_S)
            while not supervisor.stop_asked:
                supervisor.wait()
                crew.step()
            self._console.print("qinfer: stopping; what was accepted is answered first")
        finally:
            supervisor.stop([gateway], meanwhile=crew.step)  # what it waits for may need a worker
            crew.close()
            supervisor.stop([*crew.processes, bulk])

    def _crew(self, env: Mapping[str, str]) -> Crew:
        if self._options.autoscale is None:
            return FixedCrew(self._supervisor, env, self._options.workers, self._settings.worker.drain_s)
        log = {"level": self._options.log_level, "format": self._options.log_format}
        logs.configure(self._settings.log.model_copy(update=log), "up")
        settings = self._settings.model_copy(update={"redis": self._redis})
        return autoscaler(settings, self._supervisor, env, self._say)

    def _say(self, line: str) -> None:
        self._console.print(Text(f"qinfer: {line}"))

    def _announce(self, url: str, ports: Ports, no_bulk: str, crew: Crew) -> None:
        """Waits until the models are loaded or failed, and prints what there is."""
        with GatewayClient(url, verify=False) as client:
            overview = self._wait_until_settled(client, crew)
            if self._supervisor.stop_asked:
                return
            example = None
            ready = next((m.name for m in overview.models if m.state is State.READY), None)
            with contextlib.suppress(QinferError):  # an example is not worth stopping for
                example = client.metadata(ready) if ready else None
            print_summary(
                self._console,
                url=url,
                data=self._where(),
                workers=crew.about,
                overview=overview,
                example=example,
                jobs=jobs_line(self._settings, no_bulk),
                grpc=self._at(self._settings.grpc.host, ports.grpc).partition("//")[2],
                metrics=f"{address}/metrics"
                if (address := self._at(self._settings.metrics.host, ports.metrics))
                else "",
            )

    def _wait_until_settled(self, client: GatewayClient, crew: Crew) -> Overview:
        began_s = self._clock.monotonic_s()
        overview = Overview(models=(), lanes=(), workers=())
        with self._console.status("starting…") as spinner:
            while not self._supervisor.stop_asked:
                self._supervisor.wait(LOOK_EVERY_S)
                crew.step()
                elapsed_s = self._clock.monotonic_s() - began_s
                overview = self._look(elapsed_s) or overview
                # Without a worker nobody reports on the models, and those are ready that want none.
                pending = sum(m.pending and (bool(crew.least) or m.state is not State.READY) for m in overview.models)
                settled = len(overview.workers) >= crew.least and not pending and client.is_live()
                if settled or elapsed_s >= self._options.ready_timeout_s:
                    break
                spinner.update(f"loading {pending} models…" if pending else "starting…")
        return overview

    def _look(self, elapsed_s: float) -> Overview | None:
        """Reads what the workers of this start report; `None` while Redis can't be asked."""
        try:
            return run_overview(self._redis, max_up_s=elapsed_s + 1.0)
        except BrokerUnavailable:
            return None

    def _patience(self, limit_s: float) -> Callable[[], bool]:
        deadline_s = self._clock.monotonic_s() + limit_s

        def wait_a_little() -> bool:
            self._supervisor.wait(LOOK_EVERY_S)
            return self._clock.monotonic_s() < deadline_s and not self._supervisor.stop_asked

        return wait_a_little if limit_s else lambda: False

    def _at(self, host: str, port: int) -> str:
        return local_url(host or self._options.host, port) if port else ""

    def _claim_ports(self, patience: Callable[[], bool]) -> Ports:
        options, grpc, metrics = self._options, self._settings.grpc, self._settings.metrics
        addresses = [Address(options.host, options.http_port, "--http-port")]
        if grpc.enabled:
            addresses.append(Address(grpc.host or options.host, grpc.port, "--grpc-port"))
        if metrics.enabled:
            addresses.append(Address(metrics.host or options.host, metrics.port, "--metrics-port"))
        claimed = zip(addresses, claim_ports(addresses, patience), strict=True)
        ports = {address.option: port for address, port in claimed}
        return Ports(ports["--http-port"], ports.get("--grpc-port", 0), ports.get("--metrics-port", 0))

    def _child_settings(self, ports: Ports) -> dict[str, str]:
        options, repository = self._options, self._settings.repository
        return {
            "QINFER_REDIS__URL": self._redis_url,
            "QINFER_REDIS__DURABILITY": options.durability,
            "QINFER_HTTP__HOST": options.host,
            "QINFER_HTTP__PORT": str(ports.http),
            "QINFER_GRPC__PORT": str(ports.grpc),
            "QINFER_METRICS__PORT": str(ports.metrics),
            "QINFER_ALLOW_CLIENT_SHM": str(options.allow_client_shm).lower(),
            "QINFER_STORES__ALLOW": json.dumps(self._settings.stores.allow),
            "QINFER_REPOSITORY__PATH": repository.path,
            "QINFER_REPOSITORY__OVERLAY": repository.overlay,
            "QINFER_REPOSITORY__CONTROL_MODE": repository.control_mode,
            "QINFER_REPOSITORY__LOAD_MODELS": json.dumps(repository.load_models),
            "QINFER_REPOSITORY__POLL_S": str(repository.poll_s),
            "QINFER_REPOSITORY__STRICT_READINESS": str(repository.strict_readiness).lower(),
            "QINFER_REPOSITORY__MIN_WORKERS": str(repository.min_workers),
            "QINFER_LOG__FORMAT": options.log_format,
            "QINFER_LOG__LEVEL": options.log_level,
        }

    def _where(self) -> str:
        if self._options.redis_url:
            return "the Redis of --redis"
        return f"{self._options.data_dir}/ (kept over restarts, crashes and kill -9)"
