"""CPU, memory and GPU use of this machine and its processes.

GPUs are read by NVIDIA's management library (NVML): `pynvml`, of `qinfer-ml[gpu]`, is imported if a worker has a GPU.
"""

import importlib
import logging
import os
import resource
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

_IDLE = (3, 4)  # idle, iowait
_TIMES = 8  # user, nice, system, idle, iowait, irq, softirq, steal; user and nice include guests


class HostUse(NamedTuple):
    """`cpu` is the share of time since the last reading, 0 to 1."""

    cpu: float
    memory_total_bytes: int
    memory_used_bytes: int


class HostMeter:
    """Reads this machine's CPU and memory use from `/proc`."""

    def __init__(self, proc: Path = Path("/proc")) -> None:
        self._proc = proc
        self._idle, self._total = 0, 0
        self._cpu = 0.0
        self.read()

    def read(self) -> HostUse | None:
        """Returns the use; `None` outside of Linux. Blocks briefly."""
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


_TICK_S = 1 / os.sysconf("SC_CLK_TCK")
_PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")
_UTIME, _CSTIME, _RSS = 11, 14, 21  # of /proc/<pid>/stat after the name; user, system, and both of ended children


class ProcessUse(NamedTuple):
    """CPU and memory use of processes.

    Attributes:
        memory_bytes: Resident memory; shared memory counts in each process.
        open_fds: The open descriptors of this process; 0 for another process, as is `max_fds`.
    """

    cpu_s: float
    memory_bytes: int
    open_fds: int = 0
    max_fds: int = 0


class MemoryUse(msgspec.Struct, frozen=True, array_like=True):
    """Memory that a loaded model holds (reference §1.13)."""

    kind: str
    number: int
    nbytes: int


def added_up(uses: Iterable[MemoryUse]) -> tuple[MemoryUse, ...]:
    """Returns the sum for each kind and number, sorted."""
    sums: Counter[tuple[str, int]] = Counter()
    for use in uses:
        sums[use.kind, use.number] += use.nbytes
    return tuple(MemoryUse(*place, nbytes) for place, nbytes in sorted(sums.items()))


def read_use(proc: Path = Path("/proc"), pid: int | None = None) -> ProcessUse | None:
    """Returns the use of a process and its descendants; `None` outside of Linux. Blocks briefly."""
    pid = os.getpid() if pid is None else pid
    own = _stat(proc, pid)
    if own is None:
        return None
    uses = [own, *(use for child in _descendants(proc, pid) if (use := _stat(proc, child)) is not None)]
    used, limit = _descriptors() if pid == os.getpid() and proc == Path("/proc") else (0, 0)
    return ProcessUse(sum(use.cpu_s for use in uses), sum(use.memory_bytes for use in uses), used, limit)


def _descriptors() -> tuple[int, int]:
    """Returns the number of open descriptors and its limit; without a free descriptor, the limit twice."""
    limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    try:
        return len(os.listdir("/proc/self/fd")) - 1, limit
    except OSError:
        return limit, limit


def _stat(proc: Path, pid: int) -> ProcessUse | None:
    try:
        words = (proc / str(pid) / "stat").read_text().rpartition(") ")[2].split()
        ticks = sum(int(word) for word in words[_UTIME : _CSTIME + 1])
        return ProcessUse(ticks * _TICK_S, int(words[_RSS]) * _PAGE_BYTES)
    except (OSError, ValueError, IndexError):
        return None


def _descendants(proc: Path, pid: int) -> Iterator[int]:
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


logger = logging.getLogger(__name__)


class GpuUse(msgspec.Struct, frozen=True, kw_only=True):
    """The use of one GPU by all processes; a value that the GPU does not report is 0.

    Attributes:
        number: The number that the worker gives the GPU, as in `gpu 0`.
        utilization: The share of the last moments in which it was busy.
        energy_j: The energy used since the GPU's driver was loaded.
    """

    number: int
    uuid: str
    memory_used_bytes: int = 0
    memory_total_bytes: int = 0
    utilization: float = 0.0
    power_w: float = 0.0
    power_limit_w: float = 0.0
    energy_j: float = 0.0


class GpuMeter:
    """Reads the use of GPUs; blocking, for one thread.

    `gpus` are CUDA's numbers in this process; a mapping has NVML's index or UUID of each.
    """

    def __init__(self, gpus: Collection[int]) -> None:
        self._names = gpus if isinstance(gpus, Mapping) else {number: str(number) for number in gpus}
        self._nvml: Any = None  # Any: the module has no types
        self._handles: list[tuple[int, Any]] = []
        self._is_open = False

    def read(self) -> tuple[GpuUse, ...]:
        """Returns the use of the GPUs; empty without NVML."""
        if not self._is_open:
            self._is_open = True
            self._find_gpus()
        return tuple(use for number, handle in self._handles if (use := self._use(number, handle)) is not None)

    def _find_gpus(self) -> None:
        if not self._names:
            return
        try:
            self._nvml = importlib.import_module("pynvml")
        except ImportError:
            logger.info("GPUs are not measured: pip install 'qinfer-ml[gpu]'")
            return
        try:
            self._nvml.nvmlInit()
        except self._nvml.NVMLError as error:
            logger.warning("GPUs are not measured", extra={"reason": str(error)})
            return
        for number, name in self._names.items():
            try:
                self._handles.append((number, self._handle(name)))
            except self._nvml.NVMLError as error:
                logger.warning("a GPU is not measured", extra={"gpu": number, "reason": str(error)})

    def _handle(self, name: str) -> Any:
        if name.isdecimal():
            return self._nvml.nvmlDeviceGetHandleByIndex(int(name))
        return self._nvml.nvmlDeviceGetHandleByUUID(name)

    def _use(self, number: int, handle: Any) -> GpuUse | None:
        nvml = self._nvml
        try:
            memory, uuid = nvml.nvmlDeviceGetMemoryInfo(handle), nvml.nvmlDeviceGetUUID(handle)
        except nvml.NVMLError as error:
            logger.debug("a GPU does not answer", extra={"gpu": number, "reason": str(error)})
            return None
        return GpuUse(
            number=number,
            uuid=uuid if isinstance(uuid, str) else uuid.decode(),
            memory_used_bytes=int(memory.used),
            memory_total_bytes=int(memory.total),
            utilization=self._reading(lambda: nvml.nvmlDeviceGetUtilizationRates(handle).gpu) / 100,
            power_w=self._reading(lambda: nvml.nvmlDeviceGetPowerUsage(handle)) / 1000,
            power_limit_w=self._reading(lambda: nvml.nvmlDeviceGetEnforcedPowerLimit(handle)) / 1000,
            energy_j=self._reading(lambda: nvml.nvmlDeviceGetTotalEnergyConsumption(handle)) / 1000,
        )

    def _reading(self, ask: Callable[[], int]) -> int:
        try:
            return ask()
        except self._nvml.NVMLError:
            return 0
