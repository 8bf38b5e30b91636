"""The processes of a run: a Redis, gateways, workers, bulk workers; each is started again when it ends."""

import asyncio
import contextlib
import random
import signal
from collections import Counter
from collections.abc import AsyncIterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import psutil
import redis
from pydantic import SecretStr

from qinfer.core.settings import RedisSettings
from qinfer.models.state import State
from qinfer.models.store import ControlStore
from qinfer.queue import keys
from qinfer.queue.clients import admin_client
from qinfer.queue.embedded import EmbeddedRedis
from qinfer.testing import eventually
from tests.chaos import faulty
from tests.chaos.member import MODULES, Member, Role
from tests.chaos.verdict import TERMINAL, Key
from tests.e2e.conftest import clean_environment
from tests.support.servers.servers import command, is_listening

READY_WITHIN_S = 180.0
QUIET_WITHIN_S = 90.0

_STARTS_IN_S = 3.0  # about; a worker that only begins to start is not worth killing
# Helpers and models get no settings, and variables of Python.
_MARK = "PYTHON_OF_CLUSTER"
_PORTS = (20000, 32000)  # below those that the system lends to clients: a client may not sit on a dead gateway's port
_ENDS_WELL = {0, 1, -signal.SIGKILL, -signal.SIGTERM}
"""Exit codes; 1 = Redis went away again at the start, and a SIGTERM kills what has no handler yet."""

SETTINGS = {
    "QINFER_LOG__LEVEL": "WARNING",
    "QINFER_REDIS__COMMAND_TIMEOUT_S": "2",
    "QINFER_WORKER__LEASE_S": "2",
    "QINFER_WORKER__RENEW_EVERY_S": "0.5",
    "QINFER_WORKER__HEARTBEAT_EVERY_S": "0.5",
    "QINFER_WORKER__HEARTBEAT_TTL_S": "5",
    "QINFER_WORKER__DRAIN_S": "10",
    "QINFER_HTTP__DRAIN_S": "10",
    "QINFER_REQUESTS__SWEEP_EVERY_S": "0.2",
}

_SHOWN = 20  # held entries of a stream
_DEAD = "}:dlq"
_NO_WORK = (_DEAD, "}:cancels", "}:sequence-owners", *(f"}}:ended:{state}" for state in TERMINAL))


class Cluster:
    """See the module docstring; `running_cluster` makes one.

    Attributes:
        broker: Redis.
        data: Its directory.
        members: Gateways and workers of both kinds.
        urls: Where the gateways are.
        grpc_targets: Where they serve gRPC.
        metrics_targets: Where they serve metrics.
        enter: The beginning of the commands of all but Redis, which runs the rest in another namespace.
    """

    def __init__(self, directory: Path, repository: Path, settings: Mapping[str, str], durability: str) -> None:
        self.broker = EmbeddedRedis(directory / "data", durability=durability)
        self.data = directory / "data"
        self._directory = directory
        self._env = clean_environment() | SETTINGS | dict(settings)
        self._env |= {"QINFER_REDIS__URL": self.broker.url, "QINFER_REDIS__DURABILITY": durability}
        self._env |= {"QINFER_REPOSITORY__PATH": str(repository), _MARK: self.broker.url}
        self._env["QINFER_ALLOW_INSPECTION"] = "true"  # for `_of_environment`
        self.members: list[Member] = []
        self.urls: list[str] = []
        self.grpc_targets: list[str] = []
        self.metrics_targets: list[str] = []
        self.enter: Sequence[str] = ()
        self._tasks: list[asyncio.Task[None]] = []

    @property
    def env(self) -> Mapping[str, str]:
        """The environment of its programs, but for ports."""
        return self._env

    def add(
        self,
        role: Role,
        steps: Sequence[str] = (),
        arguments: Sequence[str] = (),
        module: str = "",
        settings: Mapping[str, str] | None = None,
    ) -> Member:
        """Starts one more, which is hurt at these steps (`faulty`), or is another program than its role's."""
        env = self._env | dict(settings or {})
        if role is Role.GATEWAY:
            ports = {name: _free_port() for name in ("HTTP", "GRPC", "METRICS")}
            env |= {f"QINFER_{name}__PORT": str(port) for name, port in ports.items()}
            self.urls.append(f"http://127.0.0.1:{ports['HTTP']}")
            self.grpc_targets.append(f"127.0.0.1:{ports['GRPC']}")
            self.metrics_targets.append(f"127.0.0.1:{ports['METRICS']}")
        if steps:
            module = faulty.__name__
            env |= faulty.environment(MODULES[role], steps, self._directory)
        log = self._directory / f"{role}-{len(self.members)}.log"
        member = Member(role, env, log, module, arguments, self.enter)
        self.members.append(member)
        self._tasks.append(asyncio.create_task(member.run()))
        return member

    def of(self, role: Role) -> list[Member]:
        return [member for member in self.members if member.role is role]

    async def running(self, role: Role, pick: int) -> Member:
        """Returns one of those of a role that run, when there is one; mostly one that has begun to work."""
        await eventually(lambda: any(member.runs for member in self.of(role)), READY_WITHIN_S, f"a running {role}")
        running = [member for member in self.of(role) if member.runs]
        busy = [member for member in running if member.age_s > _STARTS_IN_S]
        victims = busy if busy and pick % 4 else running
        return victims[pick % len(victims)]

    async def ready(self, models: tuple[str, ...]) -> None:
        """Waits until every gateway says that every model is ready."""
        async with httpx.AsyncClient(timeout=5.0) as client:
            for url in self.urls:
                for model in models:
                    try:
                        await eventually(partial(_is_ready, client, url, model), READY_WITHIN_S, f"{model} is ready")
                    except TimeoutError as error:
                        seen = await _index(client, url)
                        raise AssertionError(f"{error}; {url}: {seen}; the logs end with\n{self.logs()}") from None

    def logs(self) -> str:
        """Returns the last lines of every log."""
        return "\n".join(f"{member.role}:\n{member.log()[-1000:]}" for member in self.members)

    def errors(self) -> Counter[str]:
        """Returns what was logged as an error, with how often."""
        lines = [line for member in self.members for line in member.log().splitlines()]
        found = [line.partition('"event":"')[2].partition('"')[0] for line in lines if '"level":"ERROR"' in line]
        return Counter(found + [line for line in lines if line.startswith("Traceback")])

    async def serving(self, model: str) -> set[str]:
        """Returns the ids of the live workers in which a model is ready."""
        store = ControlStore(admin_client(RedisSettings(url=SecretStr(self.broker.url))))
        try:
            records = await store.workers()
        finally:
            await store.close()
        ready = {record.id: [version.state for version in record.models.get(model, {}).values()] for record in records}
        return {worker for worker, states in ready.items() if State.READY in states}

    def redis(self) -> redis.Redis:
        return redis.Redis.from_url(self.broker.url, protocol=2, socket_timeout=10.0)

    def restart_broker(self, *, kill: bool) -> None:
        """Ends Redis and starts it again; blocking."""
        process = self.broker.process
        assert process is not None
        process.send_signal(signal.SIGKILL if kill else signal.SIGTERM)
        process.wait(30)
        self.broker.start()

    async def quiet(self) -> None:
        """Waits until nothing is queued, due or to be told any more."""

        async def is_quiet() -> bool:
            await asyncio.sleep(0.1)  # it reads every key
            return not await asyncio.to_thread(self._holds_work)

        try:
            await eventually(is_quiet, QUIET_WITHIN_S, "empty lanes")
        except TimeoutError:
            return  # the verdict says what is left

    def keys(self) -> list[Key]:
        """Reads every key's name, type, time to live and length."""
        with self.redis() as client:
            return _read_keys(client, list(client.scan_iter(count=1000)))

    def dead_letters(self) -> int:
        with self.redis() as client:
            return sum(int(command(client, "XLEN", name)) for name in client.scan_iter(f"*{_DEAD}", 1000))

    def holders(self) -> str:
        """Tells which entries wait, who holds the others, how long unrenewed and how often delivered, and who runs."""
        lines = []
        try:
            with self.redis() as client:
                for name in client.scan_iter("qinfer:{*", 1000, "stream"):
                    lines += _held(client, name)
        except redis.RedisError as error:
            lines.append(f"Redis: {error}")
        members = (f"{one.role} {one.pid} runs for {one.age_s:.1f} s" for one in self.members if one.runs)
        return "; ".join([*(lines or ["no entry is in a lane"]), *members])

    def _holds_work(self) -> bool:
        with self.redis() as client:
            names = [*client.scan_iter("qinfer:{*", 1000, "stream"), *client.scan_iter("qinfer:{*", 1000, "zset")]
            return any(key.length for key in _read_keys(client, names) if not key.name.endswith(_NO_WORK))

    async def close(self) -> list[str]:
        """Drains everything; returns what ended badly, or has not."""
        for member in self.members:
            member.end_for_good()
        _, late = await asyncio.wait(self._tasks, timeout=30.0) if self._tasks else (set(), set())
        problems = [f"{member.role} did not end in time" for member in self.members if member.runs]
        for member in self.members:
            member.kill()
        if late:
            await asyncio.wait(late)
        await asyncio.to_thread(self.broker.stop)
        problems += [
            f"a {m.role} ended with {code}" for m in self.members for code in m.exits if code not in _ENDS_WELL
        ]
        with contextlib.suppress(TimeoutError):
            await eventually(lambda: not _of_environment(self.broker.url), 5.0)
        return problems + [f"left behind: {line}" for line in _of_environment(self.broker.url)]


@contextlib.asynccontextmanager
async def running_cluster(
    directory: Path,
    repository: Path,
    *,
    gateways: int = 2,
    workers: int = 3,
    bulk: int = 0,
    durability: str = "everysec",
    settings: Mapping[str, str] | None = None,
    steps: Mapping[Role, Sequence[str]] | None = None,
) -> AsyncIterator[Cluster]:
    """Runs gateways and workers on a Redis of their own; they must end well, and leave no process behind."""
    cluster = Cluster(directory, repository, settings or {}, durability)
    problems: list[str] = []
    try:
        await asyncio.to_thread(cluster.broker.start)
        for role, count in ((Role.GATEWAY, gateways), (Role.WORKER, workers), (Role.BULK, bulk)):
            for _ in range(count):
                cluster.add(role, (steps or {}).get(role, ()))
        yield cluster
    finally:
        problems = await cluster.close()
    assert problems == []


def _held(client: redis.Redis, name: bytes) -> list[str]:
    """Tells what a stream holds; its consumers are the ids of workers, which name their processes."""
    length = int(command(client, "XLEN", name))
    if not length or not command(client, "XINFO GROUPS", name):
        return []
    held: Any = client.xpending_range(name, keys.GROUP, "-", "+", _SHOWN)
    told = [
        f"{one['message_id'].decode()} is held by {one['consumer'].decode()}, "
        f"idle {one['time_since_delivered']} ms, delivery {one['times_delivered']}"
        for one in held
    ]
    return [f"{name.decode()} has {length} entries", *told]


def _read_keys(client: redis.Redis, names: list[bytes]) -> list[Key]:
    with client.pipeline(transaction=False) as pipe:
        for name in names:
            pipe.type(name)
            pipe.pttl(name)
        found = pipe.execute()
    read = [_key(client, *one) for one in zip(names, found[::2], found[1::2], strict=True)]
    return [key for key in read if key is not None]


def _key(client: redis.Redis, name: bytes, kind: bytes, ttl_ms: int) -> Key | None:
    """Returns what a key is; `None` for one whose time ended meanwhile, as that of a dead process's reply stream."""
    try:
        return None if kind == b"none" else _existing_key(client, name, kind, ttl_ms)
    except redis.ResponseError:
        if client.exists(name):
            raise
        return None


def _existing_key(client: redis.Redis, name: bytes, kind: bytes, ttl_ms: int) -> Key:
    length = pending = 0
    if kind == b"stream":
        length = int(command(client, "XLEN", name))
        pending = sum(int(group["pending"]) for group in command(client, "XINFO GROUPS", name))
    elif kind == b"zset":
        length = int(command(client, "ZCARD", name))
    return Key(name.decode(), kind.decode(), ttl_ms, length, pending)


async def _index(client: httpx.AsyncClient, url: str) -> str:
    """Returns what a gateway says of its models, or why it says nothing."""
    try:
        return (await client.post(f"{url}/v2/repository/index")).text
    except httpx.HTTPError as error:
        return repr(error)


async def _is_ready(client: httpx.AsyncClient, url: str, model: str) -> bool:
    await asyncio.sleep(0.05)
    with contextlib.suppress(httpx.TransportError):
        return (await client.get(f"{url}/v2/models/{model}/ready")).status_code == 200
    return False


def _free_port() -> int:
    ports = random.sample(range(*_PORTS), 100)
    return next(port for port in ports if not is_listening(port))


def _of_environment(url: str) -> list[str]:
    """Lists processes that were started for this Redis and still run."""
    found = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            if process.status() != psutil.STATUS_ZOMBIE and process.environ().get(_MARK) == url:
                found.append(" ".join(process.cmdline()[1:]))
    return found
