"""GPU memory that clients share by handle (CUDA IPC), through NVIDIA's driver and `ctypes`.

The first registration loads the driver, if there is one; a gateway needs no CUDA packages.
https://docs.nvidia.com/cuda/cuda-driver-api/group__CUDA__MEM.html
"""

import ctypes
import functools
import logging
import threading
from typing import Any

from qinfer.errors import InvalidRequest, RegionUnavailable
from qinfer.tensors import Bytes

logger = logging.getLogger(__name__)

HANDLE_BYTES = 64
_LAZY_PEERS = 1  # CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS, as Triton opens handles


class DriverError(Exception):
    """The driver refused a call."""


class Handle(ctypes.Structure):
    """The driver's `CUipcMemHandle`, passed by value."""

    _fields_ = (("reserved", ctypes.c_ubyte * HANDLE_BYTES),)


class Driver:
    """The functions of `libcuda.so.1` to open and copy shared GPU memory; for any thread."""

    def __init__(self, library: Any) -> None:
        self._library = library
        self._contexts: dict[int, ctypes.c_void_p] = {}
        self._lock = threading.Lock()
        self._call("cuInit", ctypes.c_uint(0))

    def open(self, handle: bytes, device: int) -> int:
        """Opens a handle's memory, any number of times, and returns its address."""
        address = ctypes.c_uint64()
        self._use(device)
        call = ctypes.byref(address), Handle.from_buffer_copy(handle), ctypes.c_uint(_LAZY_PEERS)
        self._call("cuIpcOpenMemHandle_v2", *call)
        return address.value

    def close(self, address: int, device: int) -> None:
        """Closes memory; needed once for each `open`."""
        self._use(device)
        self._call("cuIpcCloseMemHandle", ctypes.c_uint64(address))

    def size(self, address: int, device: int) -> int:
        """Returns the size of the memory at an address, in bytes."""
        base, size = ctypes.c_uint64(), ctypes.c_size_t()
        self._use(device)
        self._call("cuMemGetAddressRange_v2", ctypes.byref(base), ctypes.byref(size), ctypes.c_uint64(address))
        return size.value

    def read(self, address: int, device: int, target: memoryview) -> None:
        """Copies what is at an address."""
        self._use(device)
        to = (ctypes.c_ubyte * len(target)).from_buffer(target)
        self._call("cuMemcpyDtoH_v2", to, ctypes.c_uint64(address), ctypes.c_size_t(len(target)))

    def write(self, address: int, device: int, data: Bytes) -> None:
        """Copies bytes to an address."""
        self._use(device)
        self._call("cuMemcpyHtoD_v2", ctypes.c_uint64(address), bytes(data), ctypes.c_size_t(len(data)))

    def _use(self, device: int) -> None:
        with self._lock:
            context = self._contexts.get(device)
            if context is None:
                found, context = ctypes.c_int(), ctypes.c_void_p()
                self._call("cuDeviceGet", ctypes.byref(found), ctypes.c_int(device))
                self._call("cuDevicePrimaryCtxRetain", ctypes.byref(context), found)
                self._contexts[device] = context
        self._call("cuCtxSetCurrent", context)

    def _call(self, name: str, *arguments: Any) -> None:
        if status := getattr(self._library, name)(*arguments):
            text = ctypes.c_char_p()
            self._library.cuGetErrorName(ctypes.c_int(status), ctypes.byref(text))
            raise DriverError(f"{name}: {(text.value or b'').decode() or status}")


class CudaObject:
    """The memory of a registered region."""

    def __init__(self, driver: Driver, name: str, handle: bytes, device: int, byte_size: int) -> None:
        self._driver, self._name, self._device = driver, name, device
        try:
            self._address = driver.open(handle, device)
        except DriverError as error:
            logger.warning("CUDA handle not opened", extra={"reason": str(error)})
            raise InvalidRequest("failed to register shared memory region: invalid args") from None
        try:
            is_too_large = byte_size > driver.size(self._address, device)
        except DriverError as error:
            logger.warning("size of CUDA memory not found", extra={"reason": str(error)})
            is_too_large = True
        if is_too_large:
            self.close()
            raise InvalidRequest(f"failed to register shared memory region '{name}': invalid args")

    def close(self) -> None:
        """Closes the memory."""
        try:
            self._driver.close(self._address, self._device)
        except DriverError as error:
            logger.warning("CUDA handle not closed", extra={"reason": str(error)})

    def read(self, position: int, target: memoryview) -> None:
        """Copies a part."""
        try:
            self._driver.read(self._address + position, self._device, target)
        except DriverError as error:
            raise self._failed(error) from None

    def write(self, position: int, data: Bytes) -> None:
        """Writes a part."""
        try:
            self._driver.write(self._address + position, self._device, data)
        except DriverError as error:
            raise self._failed(error) from None

    def _failed(self, error: DriverError) -> RegionUnavailable:
        return RegionUnavailable(f"CUDA shared memory region '{self._name}' can't be used: {error}")


@functools.cache
def driver() -> Driver | None:
    """Returns this machine's driver; `None` = no driver or no GPU."""
    try:
        return Driver(ctypes.CDLL("libcuda.so.1"))
    except (OSError, DriverError) as error:
        logger.info("no CUDA here", extra={"reason": str(error)})
        return None
