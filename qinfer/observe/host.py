"""How busy this machine is: its CPUs and its memory, as Linux tells them."""

from pathlib import Path
from typing import NamedTuple

_IDLE = (3, 4)  # idle, iowait
_TIMES = 8  # user, nice, system, idle, iowait, irq, softirq, steal; what guests take is in user and nice


class HostUse(NamedTuple):
    """What a machine uses.

    Attributes:
        cpu: Share of the time that its CPUs worked since the reading before, 0 to 1.
        memory_total_bytes: Its memory.
        memory_used_bytes: What is not available to programs.
    """

    cpu: float
    memory_total_bytes: int
    memory_used_bytes: int


class HostMeter:
    """Reads what this machine uses.

    Args:
        proc: Where the kernel tells it.
    """

    def __init__(self, proc: Path = Path("/proc")) -> None:
        self._proc = proc
        self._idle, self._total = 0, 0
        self._cpu = 0.0
        self.read()  # the next reading is of what happens from now on

    def read(self) -> HostUse | None:
        """Returns what is used; `None` where the kernel does not tell, as outside of Linux. Blocking, but short."""
        try:
            times = [int(word) for word in self._line("stat", "cpu ").split()[:_TIMES]]
            total = int(self._line("meminfo", "MemTotal:").split()[0]) * 1024
            available = int(self._line("meminfo", "MemAvailable:").split()[0]) * 1024
            idle = sum(times[place] for place in _IDLE)
        except (OSError, ValueError, IndexError):
            return None
        passed = sum(times) - self._total
        if passed > 0:
            self._cpu = min(max(1 - (idle - self._idle) / passed, 0.0), 1.0)
            self._idle, self._total = idle, sum(times)
        return HostUse(self._cpu, total, max(total - available, 0))

    def _line(self, name: str, begin: str) -> str:
        for line in (self._proc / name).read_text().splitlines():
            if line.startswith(begin):
                return line.removeprefix(begin)
        raise ValueError(begin)
