"""Processes: start, find, measure and stop, by process id only."""

import contextlib
import fcntl
import signal
import socket
import subprocess
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import psutil

STOP_WAIT_S = 5.0
"""How long a server may take to end; mosec does not end on SIGTERM and is killed after it."""


class AlreadyRunning(SystemExit):
    """Another benchmark is running; uncaught, it prints its message and ends with 1."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Usage:
    """What a server's processes have used so far, by role (`gateway`, `worker`, `redis` …).

    Attributes:
        cpu_s: User and system time.
        rss_bytes: Resident memory.
    """

    cpu_s: dict[str, float] = field(default_factory=dict)
    rss_bytes: dict[str, int] = field(default_factory=dict)

    def cpu_since(self, earlier: "Usage") -> dict[str, float]:
        """Seconds of CPU time used since `earlier`; a role that restarted in between counts from zero."""
        return {role: max(0.0, used - earlier.cpu_s.get(role, 0.0)) for role, used in self.cpu_s.items()}


@contextlib.contextmanager
def alone(directory: Path) -> Iterator[None]:
    """Refuses a second benchmark in this checkout: both would measure each other.

    Raises:
        AlreadyRunning: Another one holds the lock.
    """
    directory.mkdir(parents=True, exist_ok=True)
    with (directory / "lock").open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise AlreadyRunning("another benchmark is running in this checkout; wait until it ends") from None
        yield


def free_port() -> int:
    """Returns a TCP port of the loopback that nothing listens on."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def start(command: Sequence[str], *, log: Path, env: Mapping[str, str], cwd: Path) -> psutil.Popen:
    """Starts a server in a session of its own, so that Ctrl-C reaches only us and we stop it in order."""
    with log.open("ab") as output:
        return psutil.Popen(
            list(command),
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            env=dict(env),
            cwd=cwd,
            start_new_session=True,
        )


def family(roots: Iterable[psutil.Process]) -> list[psutil.Process]:
    """Returns the processes and all their descendants that live."""
    found: dict[int, psutil.Process] = {}
    for root in roots:
        try:
            found.update({p.pid: p for p in (root, *root.children(recursive=True))})
        except psutil.NoSuchProcess:
            continue
    return list(found.values())


def usage(roots: Iterable[psutil.Process], roles: Sequence[tuple[str, str]]) -> Usage:
    """Sums CPU time and memory of the processes below `roots`, by role.

    Args:
        roots: The processes that were started.
        roles: (text, role): the first text found in a process's command line gives its role; none = `other`.
    """
    cpu_s: defaultdict[str, float] = defaultdict(float)
    rss_bytes: defaultdict[str, int] = defaultdict(int)
    for process in family(roots):
        try:
            with process.oneshot():
                line = " ".join(process.cmdline())
                times = process.cpu_times()
                resident = process.memory_info().rss
        except (psutil.NoSuchProcess, psutil.ZombieProcess):
            continue
        role = next((role for text, role in roles if text in line), "other")
        cpu_s[role] += times.user + times.system
        rss_bytes[role] += resident
    return Usage(cpu_s=dict(cpu_s), rss_bytes=dict(rss_bytes))


def pause(roots: Sequence[psutil.Process]) -> None:
    """Stops processes and their descendants, until they are resumed."""
    for process in family(roots):
        _signal(process, signal.SIGSTOP)


def resume(roots: Sequence[psutil.Process]) -> None:
    """Lets stopped processes go on, descendants first: a parent that watches its children finds them alive."""
    for process in reversed(family(roots)):
        _signal(process, signal.SIGCONT)


def stop(roots: Sequence[psutil.Popen]) -> None:
    """Asks the processes to end, the last started first, and kills what is left of them and of their descendants.

    A Ctrl-C in the middle skips the waiting, not the killing.
    """
    members = family(roots)
    try:
        for root in reversed(roots):
            _signal(root, signal.SIGTERM)
            psutil.wait_procs([root], timeout=STOP_WAIT_S)
    finally:
        _, alive = psutil.wait_procs(members, timeout=0.1)
        for process in alive:
            _signal(process, signal.SIGKILL)
        psutil.wait_procs(alive, timeout=5)


def _signal(process: psutil.Process, number: signal.Signals) -> None:
    with contextlib.suppress(psutil.NoSuchProcess):
        process.send_signal(number)
