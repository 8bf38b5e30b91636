"""The local deployment of `qinfer up`: the processes of one machine, started, awaited, supervised and stopped.

    private Redis ◀── gateway (qinfer_api)             each a child of the supervisor, configured by QINFER_… variables
                  ◀── workers (qinfer_workers.inference)      each with its own environment of the variables it reads
                  ◀── bulk worker (qinfer_workers.jobs)

The gateway stops first, so that requests in flight are answered, then the workers, then Redis. The bulk worker starts
when models are loaded. This process imports little; `preparation` runs in another one.
"""

import builtins
import json
import os
import signal
import sys
import time
import webbrowser
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import dataclass, field
from datetime import UTC, datetime
from multiprocessing import get_context
from multiprocessing.connection import Connection
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, Self, TypeVar, Union

import msgspec
from rich.console import Console
from rich.status import Status
from rich.text import Text

from qinfer import errors
from qinfer.cli.local.machine import (
    GatewayAddress,
    RunFile,
    claim_ports,
    read_run,
    remove_run,
    share_cpus,
    usable_cpus,
    write_run,
)
from qinfer.cli.local.supervisor import KILL_MARGIN_S, Program, RestartPolicy, Supervisor
from qinfer.core.clock import SystemClock
from qinfer.core.processes import protect_process, system_environment
from qinfer.errors import QinferError
from qinfer.queue.embedded import EmbeddedRedis

if TYPE_CHECKING:
    from qinfer.cli.scaling.scaler import Autoscaler


class Messages:
    """Lines of text, on stderr."""

    def __init__(self) -> None:
        self._console = Console(stderr=True, soft_wrap=True)

    def say(self, line: str) -> None:
        """Reports an event."""
        self._console.print(Text(f"qinfer: {line}"))

    def warn(self, line: str) -> None:
        """Reports a problem."""
        self._console.print(Text(f"qinfer: {line}", style="yellow"))

    def show(self, lines: Sequence[str]) -> None:
        """Shows the summary in rich's markup."""
        for line in lines:
            # a wrapped command can't be pasted
            self._console.print(Text.from_markup(line), soft_wrap=True)

    def progress(self, text: str) -> AbstractContextManager[Status]:
        """Shows progress during the block."""
        return self._console.status(text)


class JsonMessages(Messages):
    """JSON objects, one a line, on stderr."""

    def say(self, line: str) -> None:
        """Reports an event."""
        self._write_event("INFO", line)

    def warn(self, line: str) -> None:
        """Reports a problem."""
        self._write_event("WARNING", line)

    def fail(self, message: str) -> None:
        """Reports the reason for the end."""
        self._write_event("ERROR", "qinfer up failed", error=message)

    def show(self, lines: Sequence[str]) -> None:
        """Shows the summary as one line."""
        plain = [" ".join(Text.from_markup(line).plain.split()) for line in lines]
        self._write_event("INFO", "running", summary=[line for line in plain if line])

    def progress(self, text: str) -> AbstractContextManager[Status]:
        """Shows nothing."""
        return nullcontext(Status(text, console=Console(quiet=True)))

    def _write_event(self, level: str, event: str, **more: object) -> None:
        at = datetime.now(UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")
        line = {"at": at, "level": level, "logger": "qinfer.up", "event": event, "process": "up", **more}
        sys.stderr.write(f"{json.dumps(line, ensure_ascii=False)}\n")
        sys.stderr.flush()


T = TypeVar("T")

Sections = Mapping[str, Mapping[str, Any]]
"""Section of the settings → field → value."""


@dataclass(frozen=True, slots=True, kw_only=True)
class UpOptions:
    """The options of `qinfer up`.

    `apps` declare models by `@qinfer.model`; `is_dev` follows the saves of their files after `began_ns` (Unix time).
    `settings` replace those of the environment; empty settings of the repository replace nothing. Without `redis_url` a
    private Redis runs, with at most `redis_memory_bytes` (0 = half of the memory).
    """

    settings: Sections
    apps: Sequence[str] = ()
    is_dev: bool = False
    allow_client_shm: bool
    data_dir: Path
    redis_url: str
    redis_memory_bytes: int
    workers: int
    autoscale: tuple[int, int] | None
    open_console: bool = False
    ready_timeout_s: float
    began_ns: int = field(default_factory=time.time_ns)

    @property
    def functions(self) -> Path:
        """The repository of the models of apps."""
        return self.data_dir.resolve() / "functions"


class Ports(NamedTuple):
    """The gateway's ports; 0 = off."""

    http: int
    grpc: int
    metrics: int
    console: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class SupervisionPlan:
    """The settings that supervision needs."""

    addresses: Sequence[GatewayAddress]
    gateway_drain_s: float
    worker_drain_s: float
    apps_environment: Mapping[str, str]


@dataclass(frozen=True, slots=True, kw_only=True)
class Launch:
    """The gateway's URL, the programs' environments, why no bulk worker can run, and the payload store."""

    url: str
    gateway: Mapping[str, str]
    worker: Mapping[str, str]
    bulk: Mapping[str, str]
    no_bulk: str
    payload_url: str
    payload_url_min_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class StartProgress:
    """The state of a start; `pending` models are loading or unreported."""

    pending: int
    workers: int
    is_live: bool


class _Answer(msgspec.Struct, omit_defaults=True):
    """A method's result or error; `module` is the one that an `ImportError` misses."""

    result: Any = None
    error: str = ""
    args: list[int | str | None] = []
    module: str | None = None

    @classmethod
    def from_error(cls, error: Exception) -> Self:
        args = [each if isinstance(each, int | str | None) else str(each) for each in error.args]
        if isinstance(error, OSError) and error.filename is not None:
            args.append(str(error.filename))
        known = next(
            kind.__name__
            for kind in type(error).__mro__
            if hasattr(errors, kind.__name__) or kind.__module__ == "builtins"
        )
        return cls(error=known, args=args, module=getattr(error, "name", None))

    def raised(self) -> Exception:
        kind: type[Exception] = getattr(errors, self.error, None) or getattr(builtins, self.error)
        found = kind.__new__(kind, *self.args)
        found.args = tuple(self.args)
        if isinstance(found, ImportError):
            found.name = self.module
        return found


class Preparer:
    """A `Preparation` in its own process; a context manager."""

    def __init__(self, options: UpOptions) -> None:
        self._options = options

    def __enter__(self) -> Self:
        """Starts the process."""
        context = get_context("fork")
        self._pipe, theirs = context.Pipe()
        self._process = context.Process(target=_serve_pipe, args=(theirs, self._pipe, self._options), daemon=True)
        self._process.start()
        theirs.close()
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Ends the process, at most once."""
        self._pipe.close()
        # it may wait for Redis
        self._process.kill()
        self._process.join()

    def ask(self, kind: type[T], method: str, *args: str | float) -> T:
        """Calls a method of the `Preparation`, which returns a value of a kind."""
        try:
            self._pipe.send_bytes(msgspec.msgpack.encode((method, args)))
            answer = msgspec.msgpack.decode(self._pipe.recv_bytes(), type=_Answer)
        except (EOFError, OSError):
            raise QinferError("the process that prepares the start ended; its own message is above") from None
        if answer.error:
            raise answer.raised()
        return msgspec.convert(answer.result, kind)


def _serve_pipe(pipe: "Connection[Any, Any]", theirs: "Connection[Any, Any]", options: UpOptions) -> None:
    theirs.close()
    for number in (signal.SIGINT, signal.SIGHUP):
        # the supervisor ends this process
        signal.signal(number, signal.SIG_IGN)
    preparation = None
    with suppress(EOFError, ConnectionError):
        while True:
            method, args = msgspec.msgpack.decode(pipe.recv_bytes())
            try:
                from qinfer.cli.local.preparation import Preparation

                preparation = preparation or Preparation(options)
                answer = _Answer(getattr(preparation, method)(*args))
            except (QinferError, OSError, ImportError) as error:
                answer = _Answer.from_error(error)
            pipe.send_bytes(msgspec.msgpack.encode(answer))


POLL_S = 0.25
GATEWAY_POLICY = RestartPolicy(give_up_after=3)
REDIS_POLICY = RestartPolicy(give_up_after=5)
WORKER_POLICY = RestartPolicy()
PORT_WAIT_S = 10.0
"""Time for a killed `qinfer up`'s gateway to end."""


def run_deployment(options: UpOptions) -> None:
    """Runs everything until a signal asks to stop."""
    protect_process(os.environ)
    messages = JsonMessages() if options.settings["log"]["format"] == "json" else Messages()
    with (
        Preparer(options) as preparer,
        Supervisor(messages.warn) as supervisor,
    ):
        plan = preparer.ask(SupervisionPlan, "check_settings")
        if options.redis_url:
            LocalDeployment(options, plan, preparer, supervisor, messages).serve(options.redis_url)
            return
        redis = EmbeddedRedis(
            options.data_dir,
            durability=options.settings["redis"]["durability"],
            environment=system_environment(os.environ),
            max_memory_bytes=options.redis_memory_bytes,
        )
        before = read_run(options.data_dir)
        supervisor.add(redis, REDIS_POLICY, stop_s=KILL_MARGIN_S)
        try:
            deployment = LocalDeployment(options, plan, preparer, supervisor, messages)
            deployment.serve(redis.url, after_a_kill=before is not None)
        finally:
            supervisor.stop([redis])
            remove_run(options.data_dir)


class FixedPool:
    """A worker pool of fixed size."""

    def __init__(self, supervisor: Supervisor, env: Mapping[str, str], count: int, drain_s: float) -> None:
        self._supervisor = supervisor
        self._stop_s = drain_s + KILL_MARGIN_S
        self.least = count
        self.about = str(count)
        self.processes = [
            Program(f"worker {number}", "qinfer_workers.inference", env, cpus)
            for number, cpus in enumerate(share_cpus(usable_cpus(), count), start=1)
        ]

    def start(self) -> None:
        """Starts the workers."""
        for worker in self.processes:
            self._supervisor.add(worker, WORKER_POLICY, stop_s=self._stop_s)

    def step(self) -> None:
        """Does nothing."""

    def close(self) -> None:
        """Does nothing: the supervisor stops workers."""


WorkerPool = Union[FixedPool, "Autoscaler"]


class LocalDeployment:
    """The gateway, the workers and the bulk worker of one `qinfer up`."""

    def __init__(
        self, options: UpOptions, plan: SupervisionPlan, preparer: Preparer, supervisor: Supervisor, messages: Messages
    ) -> None:
        self._options = options
        self._plan = plan
        self._preparer = preparer
        self._supervisor = supervisor
        self._messages = messages
        self._clock = SystemClock()

    def serve(self, redis_url: str, *, after_a_kill: bool = False) -> None:
        """Starts, waits until ready, serves until a signal, drains."""
        options, supervisor = self._options, self._supervisor
        ports = self._claim_ports(PORT_WAIT_S if after_a_kill else 0.0)
        launch = self._preparer.ask(Launch, "write_desired", redis_url, *ports)
        if not options.redis_url:
            payloads = (launch.payload_url, launch.payload_url_min_bytes)
            write_run(options.data_dir, RunFile(os.getpid(), launch.url, redis_url, *payloads))
        gateway = Program("gateway", "qinfer_api", launch.gateway)
        bulk = Program("bulk worker", "qinfer_workers.jobs", launch.bulk)
        pool = self._worker_pool(launch.worker, redis_url)
        try:
            supervisor.add(gateway, GATEWAY_POLICY, stop_s=self._plan.gateway_drain_s + KILL_MARGIN_S)
            pool.start()
            self._wait_until_settled(pool)
            lines = [] if supervisor.stop_asked else self._preparer.ask(list[str], "summary", pool.about)
            console = self._preparer.ask(str, "console_url") if options.open_console and lines else ""
            self._preparer.close()
            if lines:
                self._messages.show(lines)
            if console and not webbrowser.open(console):
                self._messages.warn(f"no browser opens here; open {console} yourself")
            if not (launch.no_bulk or supervisor.stop_asked):
                supervisor.add(bulk, WORKER_POLICY, stop_s=self._plan.worker_drain_s + KILL_MARGIN_S)
            with self._watch():
                supervisor.run(pool.step)
            self._messages.say("stopping" if options.is_dev else "stopping; accepted requests are answered first")
        finally:
            # the last requests may need a new worker
            supervisor.stop([gateway], meanwhile=pool.step)
            pool.close()
            supervisor.stop([*pool.processes, bulk])

    def _watch(self) -> AbstractContextManager[object]:
        options = self._options
        if not options.is_dev:
            return nullcontext()
        from qinfer.functions.app import watch_apps

        environment, say = self._plan.apps_environment, self._messages.say
        return watch_apps(options.apps, options.functions, environment, say, options.began_ns)

    def _worker_pool(self, env: Mapping[str, str], redis_url: str) -> WorkerPool:
        if self._options.autoscale is None:
            return FixedPool(self._supervisor, env, self._options.workers, self._plan.worker_drain_s)
        from qinfer.cli.local.preparation import scaling_settings
        from qinfer.cli.scaling.scaler import make_autoscaler
        from qinfer.observe import logs

        settings = scaling_settings(self._options, redis_url)
        logs.configure(settings.log, "up", unknown=settings.unknown)
        return make_autoscaler(settings, self._supervisor, env, self._messages.say)

    def _wait_until_settled(self, pool: WorkerPool) -> None:
        began_s = self._clock.monotonic_s()
        with self._messages.progress("starting…") as status:
            while not self._supervisor.stop_asked:
                self._supervisor.wait(POLL_S)
                pool.step()
                elapsed_s = self._clock.monotonic_s() - began_s
                seen = self._preparer.ask(StartProgress, "read_progress", pool.least, elapsed_s)
                settled = seen.workers >= pool.least and not seen.pending and seen.is_live
                if settled or elapsed_s >= self._options.ready_timeout_s:
                    break
                status.update(f"loading models, {seen.pending} to go…" if seen.pending else "starting…")

    def _claim_ports(self, wait_s: float) -> Ports:
        deadline_s = self._clock.monotonic_s() + wait_s

        def try_again() -> bool:
            if wait_s:
                self._supervisor.wait(POLL_S)
            return self._clock.monotonic_s() < deadline_s and not self._supervisor.stop_asked

        addresses = self._plan.addresses
        claimed = claim_ports(addresses, try_again)
        ports = {address.option: port for address, port in zip(addresses, claimed, strict=True)}
        return Ports(*(ports.get(f"--{name}-port", 0) for name in Ports._fields))
