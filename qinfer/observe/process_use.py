"""What this process, and those that it started, take of CPU and memory, as Linux tells it."""

import os
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

_TICK_S = 1 / os.sysconf("SC_CLK_TCK")
_PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")
_UTIME, _CSTIME, _RSS = 11, 14, 21  # of /proc/<pid>/stat behind the name; user, system, and both of ended children


class ProcessUse(NamedTuple):
    """What processes use.

    Attributes:
        cpu_s: CPU time since they started, in user and system mode.
        memory_bytes: Resident memory; what several share is counted in each.
    """

    cpu_s: float
    memory_bytes: int


def read_use(proc: Path = Path("/proc"), pid: int | None = None) -> ProcessUse | None:
    """Returns what a process and its descendants use, those that ended included; `None` outside of Linux.

    Blocking, but short: a few small files for each thread and process.

    Args:
        proc: Where the kernel tells it.
        pid: The process; `None` = this one.
    """
    pid = os.getpid() if pid is None else pid
    own = _stat(proc, pid)
    if own is None:
        return None
    uses = [own, *(use for child in _descendants(proc, pid) if (use := _stat(proc, child)) is not None)]
    return ProcessUse(sum(use.cpu_s for use in uses), sum(use.memory_bytes for use in uses))


def _stat(proc: Path, pid: int) -> ProcessUse | None:
    """Returns what one process uses, with its ended children's CPU time; `None` when it is gone."""
    try:
        words = (proc / str(pid) / "stat").read_text().rpartition(") ")[2].split()
        ticks = sum(int(word) for word in words[_UTIME : _CSTIME + 1])
        return ProcessUse(ticks * _TICK_S, int(words[_RSS]) * _PAGE_BYTES)
    except (OSError, ValueError, IndexError):
        return None


def _descendants(proc: Path, pid: int) -> Iterator[int]:
    """Yields the processes that a process started and that still run, and theirs; none where the kernel hides them."""
    try:
        threads = list((proc / str(pid) / "task").iterdir())
    except OSError:
        return
    for thread in threads:
        try:
            children = [int(word) for word in (thread / "children").read_text().split()]
        except (OSError, ValueError):
            continue
        for child in children:
            yield child
            yield from _descendants(proc, child)
