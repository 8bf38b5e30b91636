"""Memory cgroups: at the limit of one the kernel refuses no page, it kills a process."""

from collections.abc import Iterator
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import NamedTuple

SPARE_SHARE = 8
"""A cgroup keeps this part of its limit for what is no segment."""

_NO_LIMIT = 2**60
_FILES = ("inactive_file", "active_file")
"""Pages that the kernel gives back before it kills."""


class MemoryGroup(NamedTuple):
    """The files of a group."""

    limit: Path
    usage: Path
    pages: Path

    def left(self, nbytes: int) -> int:
        """Returns the bytes that `nbytes` and the spare part leave; negative = there are too few."""
        limit = int(self.limit.read_text())
        left = limit - limit // SPARE_SHARE - int(self.usage.read_text()) - nbytes
        return left if left >= 0 else left + self._of_files()

    def _of_files(self) -> int:
        found = [line.partition(" ") for line in self.pages.read_text().splitlines()]
        counts = {name: int(count) for name, _, count in found}
        # Without `total_`, v1 does not count the groups within.
        return sum([counts.get(f"total_{name}", counts.get(name, 0)) for name in _FILES])


def has_spare(nbytes: int, root: Path = Path("/")) -> bool:
    """Returns whether all memory cgroups of this process, v1 or v2, have so many bytes left, and something beside."""
    for group in _groups(root):
        try:
            if group.left(nbytes) < 0:
                return False
        except (OSError, ValueError):  # it has no limit any more
            continue
    return True


@cache
def _groups(root: Path) -> tuple[MemoryGroup, ...]:
    """Returns the groups around this process that had a limit at the first call; a container sees its own at most."""
    return tuple(_read_groups(root))


def _read_groups(root: Path) -> Iterator[MemoryGroup]:
    try:
        lines = (root / "proc/self/cgroup").read_text().splitlines()
    except OSError:
        return
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers and "memory" not in controllers.split(","):
            continue
        base = root / ("sys/fs/cgroup/memory" if controllers else "sys/fs/cgroup")
        limit, usage = (
            ("memory.limit_in_bytes", "memory.usage_in_bytes") if controllers else ("memory.max", "memory.current")
        )
        inner = base / path.lstrip("/")
        for directory in (inner, *inner.parents):
            with suppress(OSError, ValueError):  # it is not there, or is `max`
                if directory.is_relative_to(base) and int((directory / limit).read_text()) < _NO_LIMIT:
                    yield MemoryGroup(directory / limit, directory / usage, directory / "memory.stat")
