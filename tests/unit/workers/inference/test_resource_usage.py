"""What processes and GPUs use: the kernel's files, and NVML by a stand-in."""

import os
import subprocess
import sys
import types
from pathlib import Path
from typing import Any

import pytest

from qinfer.observe.host import GpuMeter, GpuUse, ProcessUse, read_use
from qinfer_workers.inference import heartbeat
from qinfer_workers.inference.devices import known_as
from qinfer_workers.inference.heartbeat import ResourceUsage

TICK_S = 1 / os.sysconf("SC_CLK_TCK")
PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")

CHILD = "import os, sys; print(os.getpid(), flush=True); sys.stdin.read()"
PARENT = f"""
import subprocess, sys, time
while time.process_time() < 0.05:
    pass
print(flush=True)
sys.stdin.readline()
sys.exit(subprocess.call([sys.executable, "-c", {CHILD!r}]))
"""
"""Works for a while, says so, and once it is told to starts a process, which says its id; ends with its input."""


class Nvml(types.ModuleType):
    """A stand-in for pynvml, of a machine with two GPUs."""

    class NVMLError(Exception):
        """As NVML's."""

    def __init__(self) -> None:
        super().__init__("pynvml")
        self.has_driver, self.knows_power = True, True
        self.asked: list[Any] = []

    def nvmlInit(self) -> None:
        if not self.has_driver:
            raise self.NVMLError("Driver Not Loaded")

    def nvmlDeviceGetHandleByIndex(self, index: int) -> str:
        self.asked.append(index)
        if index > 1:
            raise self.NVMLError("Invalid Argument")
        return f"GPU-{index}"

    def nvmlDeviceGetHandleByUUID(self, uuid: str) -> str:
        self.asked.append(uuid)
        return uuid

    def nvmlDeviceGetUUID(self, handle: str) -> str:
        return handle

    def nvmlDeviceGetMemoryInfo(self, handle: str) -> Any:
        del handle
        return types.SimpleNamespace(total=80 * 2**30, used=3 * 2**30)

    def nvmlDeviceGetUtilizationRates(self, handle: str) -> Any:
        del handle
        return types.SimpleNamespace(gpu=25, memory=1)

    def nvmlDeviceGetPowerUsage(self, handle: str) -> int:
        del handle
        if not self.knows_power:
            raise self.NVMLError("Not Supported")
        return 71_500

    def nvmlDeviceGetEnforcedPowerLimit(self, handle: str) -> int:
        del handle
        return 700_000

    def nvmlDeviceGetTotalEnergyConsumption(self, handle: str) -> int:
        del handle
        return 123_456


@pytest.fixture
def nvml(monkeypatch: pytest.MonkeyPatch) -> Nvml:
    module = Nvml()
    monkeypatch.setitem(sys.modules, "pynvml", module)
    return module


def test_what_a_gpu_uses(nvml: Nvml) -> None:
    """In bytes, watts, joules and a share; the UUID is NVIDIA's."""
    assert GpuMeter((1,)).read() == (
        GpuUse(
            number=1,
            uuid="GPU-1",
            memory_used_bytes=3 * 2**30,
            memory_total_bytes=80 * 2**30,
            utilization=0.25,
            power_w=71.5,
            power_limit_w=700.0,
            energy_j=123.456,
        ),
    )
    assert nvml.asked == [1]


@pytest.mark.parametrize(
    ("visible", "asked"), [("1,0", [1]), ("GPU-abc", ["GPU-abc"]), (" 1", [1]), (None, [0]), ("", [0])]
)
def test_cudas_numbers_are_not_nvmls(nvml: Nvml, visible: str | None, asked: list[Any]) -> None:
    """CUDA_VISIBLE_DEVICES renumbers the devices for CUDA alone."""
    (gpu,) = GpuMeter(known_as((0,), visible)).read()

    assert (gpu.number, nvml.asked) == (0, asked)


def test_what_a_gpu_does_not_tell_is_nothing(nvml: Nvml) -> None:
    """The rest is told."""
    nvml.knows_power = False

    (gpu,) = GpuMeter((0,)).read()

    assert (gpu.power_w, gpu.energy_j) == (0.0, 123.456)


def test_a_gpu_that_is_not_there_leaves_the_others(nvml: Nvml, caplog: pytest.LogCaptureFixture) -> None:
    """It is said once."""
    meter = GpuMeter((1, 7))

    assert [gpu.number for gpu in meter.read()] == [1]
    assert [gpu.number for gpu in meter.read()] == [1]
    assert caplog.text.count("a GPU is not measured") == 1


def test_without_driver_or_library_there_are_none(nvml: Nvml, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is imported where the worker has no GPU."""
    nvml.has_driver = False
    assert GpuMeter((0,)).read() == ()
    monkeypatch.setitem(sys.modules, "pynvml", None)
    assert GpuMeter((0,)).read() == ()
    assert GpuMeter(()).read() == ()


def process(proc: Path, pid: int, ticks: tuple[int, int, int, int], pages: int, children: str = "") -> None:
    """Writes the files of a process, as the kernel has them."""
    directory = proc / str(pid)
    (directory / "task" / str(pid)).mkdir(parents=True)
    words = ["S", *["0"] * 10, *map(str, ticks), *["0"] * 6, str(pages), "0"]
    (directory / "stat").write_text(f"{pid} (a (nasty) name) {' '.join(words)}")
    (directory / "task" / str(pid) / "children").write_text(children)


def test_descendants_count(tmp_path: Path) -> None:
    """With what ended children took; one that ends meanwhile is left out."""
    process(tmp_path, 1, (100, 10, 5, 1), 50, "2 9")
    process(tmp_path, 2, (20, 2, 0, 0), 30, "3")
    process(tmp_path, 3, (1, 1, 0, 0), 20)

    found = read_use(tmp_path, 1)
    assert found is not None
    assert found.cpu_s == pytest.approx(140 * TICK_S)
    assert found.memory_bytes == 100 * PAGE_BYTES
    assert read_use(tmp_path, 7) is None


def test_this_process_and_one_that_it_started() -> None:
    """The real files, and memory of the child with it; both hold still while they are read."""
    with subprocess.Popen([sys.executable, "-c", PARENT], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as parent:
        assert parent.stdin is not None
        assert parent.stdout is not None
        try:
            parent.stdout.readline()
            alone = read_use(pid=parent.pid)
            parent.stdin.write(b"\n")
            parent.stdin.flush()
            child = int(parent.stdout.readline())
            together = read_use(pid=parent.pid)
            own = read_use(pid=child)
        finally:
            parent.stdin.close()  # both end with it

    assert alone is not None
    assert together is not None
    assert own is not None
    assert together.cpu_s >= alone.cpu_s > 0
    assert own.memory_bytes > 0
    assert together.memory_bytes >= max(own.memory_bytes, alone.memory_bytes)
    here = read_use()
    assert here is not None
    assert here.memory_bytes > 0


def test_cpu_time_never_falls(monkeypatch: pytest.MonkeyPatch) -> None:
    """A process that is ending may be in nobody's account for a moment."""
    readings = iter([ProcessUse(5.0, 10), ProcessUse(4.0, 20), None])
    monkeypatch.setattr(heartbeat, "read_use", lambda: next(readings))
    meter = ResourceUsage(())

    for expected in (ProcessUse(5.0, 10), ProcessUse(5.0, 20), ProcessUse(5.0, 20)):
        meter.read()
        assert meter.process == expected
