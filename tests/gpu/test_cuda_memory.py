"""CUDA shared memory on a GPU: memory of another process is opened by its handle, read and written."""

import subprocess
import sys

import pytest

from qinfer.errors import InvalidRequest
from qinfer_api.cuda_memory import CudaObject, driver

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(120)]

LENDER = """
import ctypes, sys

cuda = ctypes.CDLL("libcuda.so.1")
device, context, address = ctypes.c_int(), ctypes.c_void_p(), ctypes.c_uint64()
handle, data = (ctypes.c_ubyte * 64)(), (ctypes.c_ubyte * 1024)(*[number % 256 for number in range(1024)])
assert cuda.cuInit(0) == 0
assert cuda.cuDeviceGet(ctypes.byref(device), 0) == 0
assert cuda.cuDevicePrimaryCtxRetain(ctypes.byref(context), device) == 0
assert cuda.cuCtxSetCurrent(context) == 0
assert cuda.cuMemAlloc_v2(ctypes.byref(address), ctypes.c_size_t(1024)) == 0
assert cuda.cuMemcpyHtoD_v2(address, data, ctypes.c_size_t(1024)) == 0
assert cuda.cuIpcGetMemHandle(handle, address) == 0
print(bytes(handle).hex(), flush=True)
sys.stdin.readline()
assert cuda.cuMemcpyDtoH_v2(data, address, ctypes.c_size_t(1024)) == 0
print(bytes(data[:4]).hex(), flush=True)
"""
"""Shares memory that counts from 0, and prints its first bytes at its end."""


def read(memory: CudaObject, position: int) -> bytes:
    """Returns four bytes."""
    found = bytearray(4)
    memory.read(position, memoryview(found))
    return bytes(found)


def test_memory_of_another_process() -> None:
    found = driver()
    if found is None:
        pytest.skip("this machine has no GPU")
    command = [sys.executable, "-c", LENDER]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as lender:
        assert lender.stdin is not None
        assert lender.stdout is not None
        handle = bytes.fromhex(lender.stdout.readline())
        region, same = (CudaObject(found, name, handle, 0, 1024) for name in ("r", "s"))

        assert read(region, 254) == bytes([254, 255, 0, 1])
        region.write(1, b"\x07\x08")
        assert read(same, 0) == bytes([0, 7, 8, 3])
        with pytest.raises(InvalidRequest, match="invalid args"):
            CudaObject(found, "large", handle, 0, 2**40)

        region.close()
        same.close()
        out, _ = lender.communicate("\n")
    assert bytes.fromhex(out) == bytes([0, 7, 8, 3])
