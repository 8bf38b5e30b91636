"""Regions of memory on GPUs, with a stand-in for the driver."""

from typing import Any

import pytest

from qinfer.core.messages import Response
from qinfer.errors import AlreadyExists, InvalidRequest, RegionNotFound, RegionUnavailable
from qinfer.tensors import Tensor
from qinfer.wire.outputs import OutputPlan, Special
from qinfer_api import shared_memory
from qinfer_api.cuda_memory import CudaObject, Driver
from qinfer_api.http.infer import reply_bytes
from qinfer_api.shared_memory import CudaRegion, SharedMemory, TakesLong
from tests.support.cuda import HANDLE, FakeCuda


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> FakeCuda:
    fake = FakeCuda()
    found = Driver(fake)
    monkeypatch.setattr(shared_memory, "driver", lambda: found)
    return fake


@pytest.fixture
def memory(cuda: FakeCuda) -> SharedMemory:
    del cuda
    return SharedMemory(allowed=True)


def test_a_region_is_read_and_written(memory: SharedMemory, cuda: FakeCuda) -> None:
    memory.register_cuda("r", HANDLE, 1, 32)

    memory.write("r", 8, b"\xff\xfe")

    assert bytes(memory.view("r", 7, 4)) == bytes([7, 0xFF, 0xFE, 10])
    assert cuda.devices == [1]
    with pytest.raises(InvalidRequest, match="Invalid offset \\+ byte size for shared memory region: 'r'"):
        memory.view("r", 30, 4)


@pytest.mark.parametrize("device", [-1, 2**31, 2**32])
def test_a_number_that_no_device_has_is_refused(memory: SharedMemory, cuda: FakeCuda, device: int) -> None:
    """CUDA takes an `int`: 2**32 would be the first device."""
    with pytest.raises(InvalidRequest, match="failed to register shared memory region 'r': invalid args"):
        memory.register_cuda("r", HANDLE, device, 32)

    assert cuda.devices == []


def test_a_name_that_is_taken_meanwhile_leaves_nothing_open(
    memory: SharedMemory, cuda: FakeCuda, monkeypatch: pytest.MonkeyPatch
) -> None:
    def beside(*arguments: Any) -> CudaObject:
        monkeypatch.setattr(shared_memory, "CudaObject", CudaObject)
        memory.register_cuda("r", HANDLE, 1, 16)
        return CudaObject(*arguments)

    monkeypatch.setattr(shared_memory, "CudaObject", beside)
    with pytest.raises(AlreadyExists):
        memory.register_cuda("r", HANDLE, 1, 32)

    assert memory.cuda_status("r") == [CudaRegion("r", 1, 16)]
    memory.unregister("r", CudaRegion)
    assert cuda.opened == 0


def test_the_status_tells_each_kind_apart(memory: SharedMemory) -> None:
    """The texts are Triton's."""
    memory.register_cuda("r", HANDLE, 0, 32)

    assert memory.cuda_status() == memory.cuda_status("r") == [CudaRegion("r", 0, 32)]
    assert memory.status() == []
    with pytest.raises(RegionNotFound, match="'r' is registered as CUDA shared memory, not system shared memory"):
        memory.status("r")
    with pytest.raises(RegionNotFound, match="Unable to find cuda shared memory region: 'no'"):
        memory.cuda_status("no")
    with pytest.raises(AlreadyExists, match="shared memory region 'r' already in manager"):
        memory.register_cuda("r", HANDLE, 0, 32)


def test_a_region_is_closed_when_nothing_uses_it(memory: SharedMemory, cuda: FakeCuda) -> None:
    """A region of the other kind stays."""
    memory.register_cuda("r", HANDLE, 0, 32)
    held = memory.limited(100)
    held.check("r", 0, 32)

    memory.unregister("r")
    memory.unregister("r", CudaRegion)

    assert cuda.opened == 1
    del held
    assert cuda.opened == 0
    assert memory.cuda_status() == []


@pytest.mark.parametrize(
    ("handle", "byte_size", "broken", "text"),
    [
        (HANDLE[1:], 32, "", "'raw_handle' must be a valid base64 encoded cudaIpcMemHandle_t"),
        (bytes(64), 32, "", "failed to register shared memory region: invalid args"),
        (HANDLE, 65, "", "failed to register shared memory region 'r': invalid args"),
        (HANDLE, 0, "", "failed to register shared memory region 'r': invalid args"),
        (HANDLE, 32, "cuMemGetAddressRange_v2", "failed to register shared memory region 'r': invalid args"),
        (HANDLE, 32, "cuDeviceGet", "failed to register shared memory region: invalid args"),
    ],
)
def test_a_handle_that_can_not_be_used(
    memory: SharedMemory, cuda: FakeCuda, handle: bytes, byte_size: int, broken: str, text: str
) -> None:
    cuda.broken.add(broken)

    with pytest.raises(InvalidRequest) as caught:
        memory.register_cuda("r", handle, 0, byte_size)

    assert caught.value.message == text
    assert (cuda.opened, memory.cuda_status()) == (0, [])


@pytest.mark.parametrize("broken", ["cuMemcpyDtoH_v2", "cuMemcpyHtoD_v2"])
def test_memory_that_is_lost(memory: SharedMemory, cuda: FakeCuda, broken: str) -> None:
    """The process that shares the memory may have ended."""
    memory.register_cuda("r", HANDLE, 0, 32)
    cuda.broken.add(broken)

    with pytest.raises(RegionUnavailable, match=f"region 'r' can't be used: {broken}: CUDA_ERROR_NOT_FOUND"):
        memory.write("r", 0, bytes(memory.view("r", 0, 4)))


def test_a_machine_without_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shared_memory, "driver", lambda: None)

    with pytest.raises(InvalidRequest, match="failed to register CUDA shared memory region: 'r', GPUs not supported"):
        SharedMemory(allowed=True).register_cuda("r", HANDLE, 0, 32)


def test_copies_to_a_gpu_may_wait(memory: SharedMemory) -> None:
    memory.register_cuda("r", HANDLE, 1, 32)
    regions = memory.limited(100, lambda _: None)
    regions.check("r", 0, 8)
    plan = OutputPlan(special={"y": Special(region="r", byte_size=8)}, held=regions)

    assert reply_bytes(Response(request_id="1", outputs=(Tensor("y", "UINT8", (8,), bytes(8)),)), plan) == 8
    with pytest.raises(TakesLong):
        regions.view("r", 0, 8)
