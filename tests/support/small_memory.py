"""A memory cgroup (v2) for programs of a test, with a limit at which the kernel kills one of them."""

from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

import pytest

from qinfer.testing import wait_until

_ROOT = Path("/sys/fs/cgroup")


class SmallMemory:
    """See the module docstring; it needs root and the memory controller, else the test is skipped."""

    def __init__(self, name: str, most_bytes: int) -> None:
        self._group = _ROOT / name
        try:
            if "memory" not in (_ROOT / "cgroup.subtree_control").read_text().split():
                pytest.skip("the root of cgroup v2 does not hand on the memory controller here")
            self._group.mkdir()
            self.limit(most_bytes)
        except OSError as error:
            pytest.skip(f"no memory cgroup (v2) can be made here: {error}")
        with suppress(OSError):  # without swap there is no such file
            (self._group / "memory.swap.max").write_text("0")

    def enter(self) -> Sequence[str]:
        """Returns the beginning of a command that runs in the group."""
        return ["sh", "-c", f'echo $$ > {self._group}/cgroup.procs && exec "$@"', "sh"]

    def limit(self, most_bytes: int) -> None:
        """Sets the limit."""
        (self._group / "memory.max").write_text(str(most_bytes))

    @property
    def used_bytes(self) -> int:
        """Returns the bytes in use, without pages of files, which the kernel gives back."""
        counts = dict(line.split() for line in (self._group / "memory.stat").read_text().splitlines())
        files = sum(int(counts[name]) for name in ("inactive_file", "active_file"))
        return int((self._group / "memory.current").read_text()) - files

    @property
    def killed(self) -> int:
        """How many processes the kernel has killed at the limit."""
        lines = (self._group / "memory.events").read_text().splitlines()
        return next(int(line.split()[1]) for line in lines if line.startswith("oom_kill "))

    def close(self) -> None:
        """Removes the group, when its last process has ended."""
        wait_until(lambda: not (self._group / "cgroup.procs").read_text())
        self._group.rmdir()
