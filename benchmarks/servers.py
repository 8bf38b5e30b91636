"""The servers that are compared: how each is started, found ready, and how its processes are called in the table."""

import os
import shutil
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import httpx
import psutil

from benchmarks import environments, processes
from benchmarks.bodies import GRPC, GRPC_PATH, Body, WrongAnswer, check_answer, register, shared_object
from benchmarks.models import MAX_BATCH_SIZE, MODEL_PY, THREADS
from benchmarks.proxied import GRPC_PROXIED

TRITON = environments.ROOT / ".venv/tools/tritonserver"
"""Where `scripts/tools` puts NVIDIA's server: a virtual environment, with the server's files in `server`."""
START_WAIT_S = 60.0
"""How long a server may take until it gives its first right answer."""


class ServerFailed(Exception):
    """A server did not come up; the message has the end of its log."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Launch:
    """What a server needs to be started with.

    Attributes:
        model: The model's name.
        model_file: The ONNX file.
        repository: The Triton repository that holds it.
        directory: An empty directory for data and logs.
        port: The HTTP port.
        grpc_port: The gRPC port, of those that have one.
        region: The shared memory object that the server gets, with the example and room for its output; empty = none.
    """

    model: str
    model_file: Path
    repository: Path
    directory: Path
    port: int
    grpc_port: int
    region: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Command:
    """One process to start, with what its environment has besides ours."""

    argv: tuple[str, ...]
    env: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerKind:
    """A kind of server.

    Attributes:
        name: Its name in tables and options.
        commands: The processes to start, in order.
        roles: (text in a command line, role), the first match counts.
        environment: The peer whose virtual environment it needs; empty = ours.
        can_pause: SIGSTOP does it no harm.
    """

    name: str
    commands: Callable[[Launch], list[Command]]
    roles: tuple[tuple[str, str], ...]
    environment: str = ""
    can_pause: bool = True


@dataclass(slots=True, kw_only=True)
class Server:
    """A server that runs.

    Attributes:
        kind: Its kind.
        launch: How it is started.
        check: Raises `WrongAnswer`, or an error of HTTP, while it is not ready.
        roots: Its processes, without their children.
    """

    kind: ServerKind
    launch: Launch
    check: Callable[["Server"], None]
    roots: list[psutil.Popen] = field(default_factory=list)

    @property
    def url(self) -> str:
        """The URL of the model over HTTP."""
        return f"http://127.0.0.1:{self.launch.port}/v2/models/{self.launch.model}/infer"

    @property
    def grpc_url(self) -> str:
        """The URL of the call over gRPC."""
        return f"http://127.0.0.1:{self.launch.grpc_port}{GRPC_PATH}"

    def start(self) -> None:
        """Starts its processes in an empty directory, and waits until it answers rightly.

        Raises:
            ServerFailed: It ended, or was not ready in time.
        """
        shutil.rmtree(self.launch.directory, ignore_errors=True)
        self.launch.directory.mkdir(parents=True)
        log = self.launch.directory / "log"
        inherited = {name: value for name, value in os.environ.items() if not name.startswith("QINFER_")}
        for command in self.kind.commands(self.launch):
            env = {**inherited, **command.env}
            self.roots.append(processes.start(command.argv, log=log, env=env, cwd=environments.ROOT))
        _wait_until_right(self, self.check, log)

    def stop(self) -> None:
        """Ends its processes."""
        processes.stop(self.roots)
        self.roots.clear()

    def address(self, encoding: str) -> str:
        """Returns the URL that is asked in an encoding."""
        return self.grpc_url if encoding in (GRPC, GRPC_PROXIED) else self.url

    def usage(self) -> processes.Usage:
        """Returns CPU time and memory of its processes by role."""
        return processes.usage(self.roots, self.kind.roles)


@contextmanager
def running(kind: ServerKind, launch: Launch, body: Body) -> Iterator[Server]:
    """Starts a server, waits until it answers `body` rightly, and stops it whatever happens.

    Raises:
        ServerFailed: It ended, or gave no right answer in time.
    """
    content = body.model.example().tobytes() + bytes(body.expected.nbytes)

    def check(server: Server) -> None:
        if launch.region:
            register(server.url, launch.region, len(content))
        check_answer(server.url, body)

    with ExitStack() as stack:
        if launch.region:
            stack.enter_context(shared_object(launch.region, content))
        yield stack.enter_context(started(kind, launch, check))


@contextmanager
def started(kind: ServerKind, launch: Launch, check: Callable[[Server], None]) -> Iterator[Server]:
    """Starts a server, waits until it passes a check, and stops it whatever happens.

    Args:
        kind: What is started.
        launch: How.
        check: Raises `WrongAnswer`, or an error of HTTP, while the server is not ready.

    Raises:
        ServerFailed: It ended, or was not ready in time.
    """
    server = Server(kind=kind, launch=launch, check=check)
    try:
        server.start()
        yield server
    finally:
        server.stop()


def _wait_until_right(server: Server, check: Callable[[Server], None], log: Path) -> None:
    give_up_at = time.monotonic() + START_WAIT_S
    problem: Exception | str = "no answer"
    while time.monotonic() < give_up_at:
        ended = [process for process in server.roots if process.poll() is not None]
        if ended:
            problem = f"process ended with {ended[0].returncode}"
            break
        try:
            check(server)
        except (httpx.HTTPError, WrongAnswer) as error:
            problem = error
            time.sleep(0.1)
        else:
            return
    tail = log.read_text(errors="replace")[-2000:]
    raise ServerFailed(f"{server.kind.name} did not come up ({problem}); its log ends:\n{tail}")


def _qinfer(launch: Launch) -> list[Command]:
    """The real thing, as a user starts it: private Redis with AOF everysec, one gateway, one worker."""
    return [
        Command(
            argv=(
                *(str(Path(sys.executable).with_name("qinfer")), "up"),
                *("--model-repository", str(launch.repository)),
                *("--data-dir", str(launch.directory / "data")),
                *("--http-port", str(launch.port), "--grpc-port", str(launch.grpc_port), "--metrics-port", "0"),
                *("--workers", "1"),
                *(("--allow-client-shm",) if launch.region else ()),
            ),
        )
    ]


def _peer_env(launch: Launch) -> dict[str, str]:
    return {
        "BENCH_MODEL": launch.model,
        "BENCH_MODEL_FILE": str(launch.model_file),
        "BENCH_PORT": str(launch.port),
        "BENCH_THREADS": str(THREADS),
        "BENCH_MAX_BATCH_SIZE": str(MAX_BATCH_SIZE),
    }


def _peer(peer: str, **env: str) -> Callable[[Launch], list[Command]]:
    """Returns what starts a peer that is one program."""

    def commands(launch: Launch) -> list[Command]:
        python = str(environments.ensure(peer))
        return [Command(argv=(python, "-m", f"benchmarks.peers.{peer}.server"), env={**_peer_env(launch), **env})]

    return commands


def _celery(launch: Launch) -> list[Command]:
    """A private Redis with the durability that qinfer's has, one worker process, one gateway process."""
    python, redis_port = str(environments.ensure("celery")), str(processes.free_port())
    redis = ("--bind", "127.0.0.1", "--port", redis_port, "--dir", str(launch.directory), "--save", "")
    aof = ("--appendonly", "yes", "--appendfsync", "everysec")
    worker = ("-m", "celery", "-A", "benchmarks.peers.celery.tasks", "worker", "--pool", "solo", "--concurrency", "1")
    quiet = ("--without-gossip", "--without-mingle", "--without-heartbeat", "--loglevel", "WARNING")
    env = {**_peer_env(launch), "BENCH_REDIS_URL": f"redis://127.0.0.1:{redis_port}/0"}
    return [
        Command(argv=(_redis_server(), *redis, *aof)),
        Command(argv=(python, *worker, *quiet), env=env),
        Command(argv=(python, "-m", "benchmarks.peers.celery.server"), env=env),
    ]


def _redis_server() -> str:
    path = shutil.which("redis-server")
    if path is None:
        raise ServerFailed("redis-server is not installed; on Debian: apt-get install redis-server")
    return path


def _triton(launch: Launch) -> list[Command]:
    """NVIDIA's server with the model in its Python backend; threads, ports and pools of the server as they come."""
    model = launch.directory / "models" / launch.model
    shutil.copytree(launch.repository / launch.model, model)
    shutil.copy(MODEL_PY, model / "1")
    config = (launch.repository / launch.model / "config.pbtxt").read_text()
    (model / "config.pbtxt").write_text(config.replace('backend: "onnxruntime"', 'backend: "python"'))
    return [triton_command(launch, model.parent)]


def triton_command(launch: Launch, models: Path) -> Command:
    """Returns what starts NVIDIA's server with a repository of models of its Python backend."""
    files = TRITON / "server"
    argv = (
        *(str(files / "bin/tritonserver"), "--backend-directory", str(files / "backends")),
        *("--model-repository", str(models), "--allow-metrics", "false"),
        *("--http-address", "127.0.0.1", "--http-port", str(launch.port)),
        *("--grpc-address", "127.0.0.1", "--grpc-port", str(launch.grpc_port)),
    )
    path = os.pathsep.join((str(files.resolve().parents[1]), str(environments.ROOT)))
    return Command(argv=argv, env={**_peer_env(launch), "PYTHONPATH": path})


def _ceiling(launch: Launch) -> list[Command]:
    return [Command(argv=(sys.executable, "-m", "benchmarks.ceiling"), env=_peer_env(launch))]


def why_not(name: str) -> str:
    """Returns why a server can't be measured here; empty where it can."""
    if name == "triton" and not (TRITON / "server/backends/python/triton_python_backend_stub").exists():
        return "NVIDIA's server is not here; `scripts/tools tritonserver` fetches it"
    return ""


_MOSEC_ROLES = (("spawn_main", "worker"), ("peers.mosec", "supervisor"), ("mosec", "front"))

KINDS = {
    kind.name: kind
    for kind in (
        ServerKind(
            name="qinfer",
            commands=_qinfer,
            roles=(
                ("qinfer_api", "gateway"),
                ("python_host", "model"),
                ("qinfer_workers", "worker"),
                ("redis-server", "redis"),
                ("model-repository", "supervisor"),
            ),
            can_pause=False,
        ),
        ServerKind(
            name="triton",
            commands=_triton,
            roles=(("triton_python_backend_stub", "model"), ("tritonserver", "server")),
        ),
        ServerKind(name="ceiling", commands=_ceiling, roles=(("", "processes"),)),
        *(
            ServerKind(
                name=name,
                commands=_peer("fastapi_direct", BENCH_JSON=json),
                roles=(("fastapi_direct", "server"),),
                environment="fastapi_direct",
            )
            for name, json in (("fastapi_direct", "stock"), ("fastapi_orjson", "orjson"))
        ),
        ServerKind(name="mosec", commands=_peer("mosec", BENCH_JSON="stock"), roles=_MOSEC_ROLES, environment="mosec"),
        ServerKind(
            name="mosec_orjson", commands=_peer("mosec", BENCH_JSON="orjson"), roles=_MOSEC_ROLES, environment="mosec"
        ),
        ServerKind(name="litserve", commands=_peer("litserve"), roles=(("", "processes"),), environment="litserve"),
        ServerKind(
            name="celery",
            commands=_celery,
            roles=(("celery.server", "gateway"), ("celery.tasks", "worker"), ("redis-server", "redis")),
            environment="celery",
        ),
    )
}
