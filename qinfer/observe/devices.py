"""What GPUs use, as NVIDIA's management library (NVML) tells it; nothing where it, or its driver, is not installed.

`pynvml` comes with `pip install 'qinfer-ml[gpu]'`, and is imported once a worker has a GPU.
"""

import importlib
import logging
from collections.abc import Callable, Collection, Mapping
from typing import Any

import msgspec

logger = logging.getLogger(__name__)


class GpuUse(msgspec.Struct, frozen=True, kw_only=True):
    """What one GPU uses, whichever processes use it; what it does not tell is 0.

    Attributes:
        number: The worker's number of it, as in `gpu 0`.
        uuid: NVIDIA's name of it.
        memory_used_bytes: Memory in use.
        memory_total_bytes: Its memory.
        utilization: Share of the last moments in which it was busy, 0 to 1.
        power_w: Power that it draws.
        power_limit_w: Power that it may draw.
        energy_j: Energy since its driver was loaded.
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
    """Reads what some GPUs use; blocking, for one thread.

    Args:
        gpus: CUDA's numbers of them, in this process; a mapping has what NVML knows each by, an index or a UUID.
    """

    def __init__(self, gpus: Collection[int]) -> None:
        self._names = gpus if isinstance(gpus, Mapping) else {number: str(number) for number in gpus}
        self._nvml: Any = None  # Any: the module has no types
        self._handles: list[tuple[int, Any]] = []
        self._is_open = False

    def read(self) -> tuple[GpuUse, ...]:
        """Returns what the GPUs use; none where NVML can't be asked."""
        if not self._is_open:
            self._is_open = True
            self._open()
        return tuple(use for number, handle in self._handles if (use := self._use(number, handle)) is not None)

    def _open(self) -> None:
        """Finds the GPUs; says once why it can't."""
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
            logger.debug("a GPU can't be asked", extra={"gpu": number, "reason": str(error)})
            return None
        return GpuUse(
            number=number,
            uuid=uuid if isinstance(uuid, str) else uuid.decode(),
            memory_used_bytes=int(memory.used),
            memory_total_bytes=int(memory.total),
            utilization=self._told(lambda: nvml.nvmlDeviceGetUtilizationRates(handle).gpu) / 100,
            power_w=self._told(lambda: nvml.nvmlDeviceGetPowerUsage(handle)) / 1000,
            power_limit_w=self._told(lambda: nvml.nvmlDeviceGetEnforcedPowerLimit(handle)) / 1000,
            energy_j=self._told(lambda: nvml.nvmlDeviceGetTotalEnergyConsumption(handle)) / 1000,
        )

    def _told(self, ask: Callable[[], int]) -> int:
        """Asks for what some GPUs do not tell."""
        try:
            return ask()
        except self._nvml.NVMLError:
            return 0
