"""A stand-in for the CUDA driver: memory of this process behind the same C functions."""

import ctypes
from typing import Any

HANDLE = b"handle".ljust(64, b"\0")
NO_CONTEXT, NOT_FOUND = 201, 500


class FakeCuda:
    """Has one piece of memory, which `HANDLE` opens; `broken` names functions that fail."""

    def __init__(self, size: int = 64) -> None:
        self.memory = (ctypes.c_ubyte * size)(*range(size))
        self.opened = 0
        self.devices: list[int] = []
        self.broken: set[str] = set()

    def __getattr__(self, name: str) -> Any:
        """Returns a function of the library."""

        def call(*arguments: Any) -> int:
            if name in self.broken:
                return NOT_FOUND
            return int(getattr(self, f"_{name}")(*arguments) or 0)

        return call

    def _cuInit(self, _: Any) -> None:
        return

    def _cuDeviceGet(self, found: Any, device: Any) -> None:
        self.devices.append(device.value)
        found._obj.value = device.value

    def _cuDevicePrimaryCtxRetain(self, context: Any, device: Any) -> None:
        context._obj.value = 1000 + device.value

    def _cuCtxSetCurrent(self, context: Any) -> int:
        return 0 if context.value else NO_CONTEXT

    def _cuIpcOpenMemHandle_v2(self, address: Any, handle: Any, _: Any) -> int:
        if bytes(handle.reserved) != HANDLE:
            return NOT_FOUND
        self.opened += 1
        address._obj.value = ctypes.addressof(self.memory)
        return 0

    def _cuIpcCloseMemHandle(self, address: Any) -> None:
        assert address.value == ctypes.addressof(self.memory)
        self.opened -= 1

    def _cuMemGetAddressRange_v2(self, _: Any, size: Any, address: Any) -> None:
        assert address.value == ctypes.addressof(self.memory)
        size._obj.value = len(self.memory)

    def _cuMemcpyDtoH_v2(self, to: Any, address: Any, size: Any) -> None:
        ctypes.memmove(to, address.value, size.value)

    def _cuMemcpyHtoD_v2(self, address: Any, data: bytes, size: Any) -> None:
        ctypes.memmove(address.value, data, size.value)

    def _cuGetErrorName(self, _: Any, text: Any) -> None:
        text._obj.value = b"CUDA_ERROR_NOT_FOUND"
