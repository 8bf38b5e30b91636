"""Explains slow requests of a tenant: looks at the server while one waits, and at what the machine did meanwhile.

The thread of an `Outliers` reads the machine's counters each second. While a request waits for longer than `SLOW_S`, it
also asks gateway and Redis for a sign of life, Redis where the entry is, and the kernel in which state each process is.
"""

import threading
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from datetime import datetime
from http.client import HTTPConnection, HTTPException
from pathlib import Path
from typing import Any, Self

import redis
from redis.backoff import NoBackoff
from redis.retry import Retry

from qinfer.queue import keys
from qinfer.queue.entries import Lane
from tests.fuzz.server import ServerMemory, WholeServer

SLOW_S = 0.5
AGES_S = (SLOW_S, 1.0, 2.0, 4.0, 8.0)
"""The ages of a request at which it is looked at."""
MOST = 5
"""The slowest requests that are kept."""
LOOK_S = 0.05
READ_S = 1.0
SIGN_OF_LIFE_S = 1.0
LATE_MS = 100
"""Redis notes its own events and commands that take longer."""
LINES = 12
_TICKS_PER_S = 100
_INFO = ("aof_delayed_fsync", "total_forks", "latest_fork_usec")


class Outliers:
    """Watches the plain requests of one tenant to one model version while the block runs.

    Attributes:
        looks: What was seen of the server while the last request waited.
        told: The slowest requests, each with its seconds and what explains it, the slowest first.
    """

    def __init__(self, server: WholeServer, model: str) -> None:
        self.looks: list[str] = []
        self.told: list[tuple[float, str]] = []
        self._server, self._processes = server, ServerMemory(server.pid)
        self._log = server.folder / "log"
        self._lane = keys.lane(Lane(model, 1))
        once = Retry(NoBackoff(), 0)
        self._redis: Any = redis.Redis(unix_socket_path=server.redis, socket_timeout=SIGN_OF_LIFE_S, retry=once)
        self._begin_s = time.monotonic()
        self._since_s = 0.0  # of the request that waits; 0 = none does
        self._late_s = 0.0
        self._read_s = 0.0
        self._before: dict[str, float] = {}
        self._log_bytes = 0
        self._looking = threading.Lock()  # a look that has begun is told
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="outliers", daemon=True)

    def __enter__(self) -> Self:
        self._redis.config_set("latency-monitor-threshold", LATE_MS)
        self._redis.config_set("slowlog-log-slower-than", LATE_MS * 1000)
        self._read()
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._is_over.set()
        self._thread.join()
        self._redis.close()

    @contextmanager
    def watching(self, number: int) -> Iterator[None]:
        """Watches a request during the block."""
        begin_s, at = time.monotonic(), time.time()
        self.looks, self._since_s = [], begin_s
        try:
            yield
        finally:
            self._since_s = 0.0
            took_s = time.monotonic() - begin_s
            if took_s >= SLOW_S and (len(self.told) < MOST or took_s > self.told[-1][0]):
                head = f"request {number} took {took_s:.2f} s, {begin_s - self._begin_s:.1f} s after the begin"
                clock = datetime.fromtimestamp(at).strftime("%H:%M:%S.%f")[:-3]  # noqa: DTZ006 - as the log has it
                with self._looking:
                    lines = [f"{head} ({clock})", *self.looks, self._meanwhile(), *self._noted(at), *self._logged()]
                self.told = sorted([*self.told, (took_s, "\n  - ".join(lines))], reverse=True)[:MOST]

    def _watch(self) -> None:
        due_s = time.monotonic() + LOOK_S
        while not self._is_over.wait(max(due_s - time.monotonic(), 0.0)):
            self._late_s = max(self._late_s, time.monotonic() - due_s)
            with self._looking:
                since_s = self._since_s  # the other thread changes it
                waits_s = time.monotonic() - since_s if since_s else 0.0
                if waits_s < SLOW_S:
                    if time.monotonic() - self._read_s >= READ_S:
                        self._read()
                elif len(self.looks) < len(AGES_S) and waits_s >= AGES_S[len(self.looks)]:
                    self.looks.append(f"after {waits_s:.1f} s: {self._look()}")
            due_s = time.monotonic() + LOOK_S

    def _read(self) -> None:
        """Reads what is compared with the same after a slow request."""
        with suppress(redis.RedisError):
            self._before, self._read_s, self._late_s = self._counters(), time.monotonic(), 0.0
            self._log_bytes = self._log.stat().st_size

    def _counters(self) -> dict[str, float]:
        about = self._redis.info("persistence") | self._redis.info("stats")
        return machine() | {name: float(about.get(name, 0)) for name in _INFO}

    def _look(self) -> str:
        """Looks at the server while a request waits."""
        begin_s = time.monotonic()
        connection = HTTPConnection(self._server.http, timeout=SIGN_OF_LIFE_S)
        try:
            connection.request("GET", "/v2/health/live")
            connection.getresponse().read()
            gateway = f"gateway lives ({(time.monotonic() - begin_s) * 1000:.0f} ms)"
        except (OSError, HTTPException) as error:
            gateway = f"gateway gives no sign of life ({error!r})"
        finally:
            connection.close()
        begin_s = time.monotonic()
        try:
            self._redis.ping()
            lives = f"Redis lives ({(time.monotonic() - begin_s) * 1000:.0f} ms)"
            return f"{gateway}; {lives}; {self._entries()}; {self._clients()}; {self._states()}"
        except redis.RedisError as error:
            return f"{gateway}; Redis gives no sign of life ({error!r}); {self._states()}"

    def _entries(self) -> str:
        """Tells where the entries of the lane are: unread, or held by a worker."""
        told, seconds = [], time.time()
        for number in {b"0", *self._redis.hkeys(self._lane + b"~")}:
            stream = self._lane if number == b"0" else self._lane + b"~" + number
            with suppress(redis.ResponseError):  # it is gone
                held = self._redis.xpending_range(stream, keys.GROUP, "-", "+", 20)
                oldest = self._redis.xrange(stream, count=1)
                unread = self._redis.xlen(stream) - len(held)
                age = f", the first for {seconds - int(oldest[0][0].partition(b'-')[0]) / 1000:.1f} s" if oldest else ""
                by = [f"{one['consumer'].decode()} for {one['time_since_delivered']} ms" for one in held[:3]]
                told.append(f"share {number.decode()}: {unread} unread{age}, held by {', '.join(by) or 'no worker'}")
        return "; ".join(sorted(told))

    def _clients(self) -> str:
        """Tells what the connections of the server asked Redis last, and whether they wait for it in a read (`b`)."""
        found = [one for one in self._redis.client_list() if one["name"].startswith("qinfer")]
        asked = Counter(f"{one['name']} {one['cmd']} {one['flags']}" for one in found)
        return "connections: " + ", ".join(f"{count} {what}" for what, count in sorted(asked.items()))

    def _states(self) -> str:
        """Tells how many threads of each process are in each state, and where in the kernel the first one waits."""
        told = []
        for pid, kind in self._processes.kinds().items():
            with suppress(OSError):
                threads = [one.read_text() for one in Path(f"/proc/{pid}/task").glob("*/stat")]
                states = Counter(text.rpartition(") ")[2][0] for text in threads)
                where = Path(f"/proc/{pid}/wchan").read_text().replace("0", "")
                told.append(f"{kind} {' '.join(f'{state}{count}' for state, count in states.items())} {where}".strip())
        return ", ".join(sorted(told))

    def _meanwhile(self) -> str:
        """Tells what the machine did since the last reading before the request."""
        try:
            now = self._counters()
        except redis.RedisError as error:
            now, because = machine(), f" (Redis: {error!r})"
        else:
            because = ""
        passed_s = time.monotonic() - self._read_s
        changes = [f"{name} {now[name] - was:.2f}" for name, was in self._before.items() if name in now]
        return f"meanwhile, {passed_s:.1f} s: looks late by {self._late_s:.2f} s, {', '.join(changes)}{because}"

    def _noted(self, since_s: float) -> list[str]:
        """Returns the events and slow commands that Redis has noted since an instant."""
        told: list[str] = []
        with suppress(redis.RedisError):
            events = [(name, at_s, ms) for name, at_s, ms, _ in self._redis.execute_command("LATENCY", "LATEST")]
            slow = [
                (each["command"][:100], each["start_time"], each["duration"] // 1000)
                for each in self._redis.slowlog_get()
            ]
            told += [
                f"Redis: {what.decode(errors='replace')} {ms} ms"
                for what, at_s, ms in events + slow
                if at_s >= since_s - 1
            ]
        return told

    def _logged(self) -> list[str]:
        """Returns the last lines of the server's log since the last reading before the request."""
        with self._log.open("rb") as file:
            file.seek(max(self._log_bytes, self._log.stat().st_size - 65536))
            lines = file.read().decode(errors="replace").splitlines()
        events = [line for line in lines if line[:1].isdigit()]  # without tracebacks
        return [f"log: {line[:200]}" for line in events[-LINES:]]


def machine() -> dict[str, float]:
    """Returns seconds since the machine's start: stolen by its host, and those in which all tasks waited for a disk."""
    fields = Path("/proc/stat").read_text().splitlines()[0].split()
    found = {"stolen s": int(fields[8]) / _TICKS_PER_S, "iowait s": int(fields[5]) / _TICKS_PER_S}
    with suppress(OSError):  # the kernel has no pressure information
        full = next(line for line in Path("/proc/pressure/io").read_text().splitlines() if line.startswith("full"))
        found["all waited for a disk s"] = int(full.rpartition("total=")[2]) / 1e6
    return found
