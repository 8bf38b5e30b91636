"""What a worker uses, read in a thread of its own: neither files nor a driver may hold up its heartbeat."""

import threading
from collections.abc import Collection

from qinfer.observe.devices import GpuMeter, GpuUse
from qinfer.observe.process_use import ProcessUse, read_use

EVERY_S = 2.0
"""Seconds between two readings: Triton's interval."""


class UseMeter:
    """Reads CPU time, memory and GPUs again and again.

    Args:
        gpus: The worker's GPUs, as for `GpuMeter`.
        every_s: Seconds between two readings.

    Attributes:
        process: The last reading of the processes; `None` = there was none.
        gpus: The last reading of the GPUs.
    """

    def __init__(self, gpus: Collection[int], every_s: float = EVERY_S) -> None:
        self.process: ProcessUse | None = None
        self.gpus: tuple[GpuUse, ...] = ()
        self._meter = GpuMeter(gpus)
        self._every_s = every_s
        self._ended = threading.Event()

    def start(self) -> None:
        """Begins; the thread ends with `stop`."""
        threading.Thread(target=self._run, name="use", daemon=True).start()

    def stop(self) -> None:
        """Ends after the reading under way."""
        self._ended.set()

    def read(self) -> None:
        """Reads once. CPU time never falls, though a process that just ended may be in neither account."""
        use = read_use()
        if use is not None:
            cpu_s = max(use.cpu_s, self.process.cpu_s if self.process is not None else 0.0)
            self.process = ProcessUse(cpu_s, use.memory_bytes)
        self.gpus = self._meter.read()

    def _run(self) -> None:
        while True:
            self.read()
            if self._ended.wait(self._every_s):
                return
