"""The part of CUDA's runtime that the tensorrt backend needs, by ctypes.

TensorRT's own wheels bring the library (`nvidia-cuda-runtime`). The used functions are the same in CUDA 12 and 13.
https://docs.nvidia.com/cuda/cuda-runtime-api/
"""

import ctypes
import logging
import os
import signal
from collections.abc import Iterator
from contextlib import suppress
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np

from qinfer.backends.base import Array
from qinfer.errors import BackendUnavailable

logger = logging.getLogger(__name__)

TO_DEVICE, TO_HOST = 1, 2  # cudaMemcpyKind

_SONAMES = ("libcudart.so.13", "libcudart.so.12")
_NON_BLOCKING = 1  # cudaStreamNonBlocking
_MOST_URGENT = -100  # CUDA takes the nearest priority that the GPU has
_THREAD_LOCAL = 1  # cudaStreamCaptureModeThreadLocal: other threads may allocate meanwhile
_MAJOR, _MINOR = 75, 76  # cudaDevAttrComputeCapability…
_LOST = range(700, 730)  # cudaErrorIllegalAddress, cudaErrorAssert, cudaErrorLaunchFailure, …
_PROPERTIES_BYTES = 16 * 1024  # cudaDeviceProp is about 1 KiB, beginning with the name

_pointer, _size, _int, _uint = ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_uint


class CudaError(RuntimeError):
    """CUDA refused a call, with error number `status`."""

    status = 0


class Cuda:
    """CUDA's runtime library; every method may raise `CudaError`."""

    def __init__(self, path: Path | None = None) -> None:
        self._library = ctypes.CDLL(str(path)) if path else _load()
        self._library.cudaGetErrorString.restype = ctypes.c_char_p

    def device_count(self) -> int:
        """Returns the number of GPUs."""
        count = _int(0)
        with suppress(CudaError):
            self._call_library("cudaGetDeviceCount", ctypes.byref(count))
        return count.value

    def set_device(self, device: int) -> None:
        """Selects a GPU for the calling thread."""
        self._call_library("cudaSetDevice", _int(device))

    def describe(self, device: int) -> str:
        """Returns a GPU's name and compute capability."""
        properties = ctypes.create_string_buffer(_PROPERTIES_BYTES)
        self._call_library("cudaGetDeviceProperties", properties, _int(device))
        major, minor = (self._attribute(attribute, device) for attribute in (_MAJOR, _MINOR))
        return f"{properties.value.decode(errors='replace')} {major}.{minor}"

    def allocate(self, size_bytes: int) -> int:
        """Allocates memory on the GPU; returns its address."""
        address = _pointer()
        self._call_library("cudaMalloc", ctypes.byref(address), _size(max(size_bytes, 1)))
        return address.value or 0

    def free(self, address: int) -> None:
        """Frees memory on the GPU."""
        self._call_library("cudaFree", _pointer(address))

    def allocate_pinned(self, size_bytes: int) -> tuple[int, Array]:
        """Allocates pinned host memory; returns address and array."""
        address = _pointer()
        self._call_library("cudaHostAlloc", ctypes.byref(address), _size(max(size_bytes, 1)), _uint(0))
        memory = (ctypes.c_ubyte * max(size_bytes, 1)).from_address(address.value or 0)
        return address.value or 0, np.ctypeslib.as_array(memory)

    def free_pinned(self, address: int) -> None:
        """Frees pinned memory."""
        self._call_library("cudaFreeHost", _pointer(address))

    def stream(self, *, urgent: bool = False) -> int:
        """Makes a stream; the work of urgent streams goes first."""
        stream = _pointer()
        priority = _int(_MOST_URGENT if urgent else 0)
        self._call_library("cudaStreamCreateWithPriority", ctypes.byref(stream), _uint(_NON_BLOCKING), priority)
        return stream.value or 0

    def destroy_stream(self, stream: int) -> None:
        """Destroys a stream."""
        self._call_library("cudaStreamDestroy", _pointer(stream))

    def copy(self, to: int, source: int, size_bytes: int, direction: int, stream: int) -> None:
        """Queues a copy; `direction` is `TO_DEVICE` or `TO_HOST`."""
        self._call_library(
            "cudaMemcpyAsync", _pointer(to), _pointer(source), _size(size_bytes), _int(direction), _pointer(stream)
        )

    def synchronize(self, stream: int) -> None:
        """Waits until a stream is empty."""
        self._call_library("cudaStreamSynchronize", _pointer(stream))

    def begin_capture(self, stream: int) -> None:
        """Begins to record the operations of a stream."""
        self._call_library("cudaStreamBeginCapture", _pointer(stream), _int(_THREAD_LOCAL))

    def end_capture(self, stream: int) -> int:
        """Ends a recording; returns an executable graph."""
        graph, executable = _pointer(), _pointer()
        self._call_library("cudaStreamEndCapture", _pointer(stream), ctypes.byref(graph))
        try:
            self._call_library("cudaGraphInstantiateWithFlags", ctypes.byref(executable), graph, ctypes.c_ulonglong(0))
        finally:
            self._call_library("cudaGraphDestroy", graph)
        return executable.value or 0

    def launch(self, graph: int, stream: int) -> None:
        """Queues a graph."""
        self._call_library("cudaGraphLaunch", _pointer(graph), _pointer(stream))

    def destroy_graph(self, graph: int) -> None:
        """Destroys a graph."""
        self._call_library("cudaGraphExecDestroy", _pointer(graph))

    def _attribute(self, attribute: int, device: int) -> int:
        value = _int(0)
        self._call_library("cudaDeviceGetAttribute", ctypes.byref(value), _int(attribute), _int(device))
        return value.value

    def _call_library(self, name: str, *arguments: Any) -> None:
        status = getattr(self._library, name)(*arguments)
        if status:
            reason = self._library.cudaGetErrorString(status).decode()
            error = CudaError(f"{name}: {reason} (CUDA error {status})")
            error.status = status
            raise error


def end_if_lost(device: int) -> None:
    """Ends this process by SIGTERM if CUDA is broken in it; the supervisor starts a new process."""
    try:
        cuda = Cuda()
        cuda.set_device(device)
        cuda.destroy_stream(cuda.stream())
    except BackendUnavailable:
        return
    except CudaError as error:
        if error.status in _LOST:
            logger.error("CUDA is lost to this process, which ends", extra={"gpu": device, "reason": str(error)})
            os.kill(os.getpid(), signal.SIGTERM)


def _load() -> ctypes.CDLL:
    for candidate in _candidates():
        with suppress(OSError):
            return ctypes.CDLL(candidate)
    raise BackendUnavailable(
        f"none of {', '.join(_SONAMES)} can be loaded; run: pip install nvidia-cuda-runtime-cu12 "
        "(or the one of CUDA 13)"
    )


def _candidates() -> Iterator[str]:
    yield from _SONAMES
    wheels = find_spec("nvidia")
    for root in wheels.submodule_search_locations or () if wheels else ():
        yield from map(str, sorted(Path(root).glob("*/lib/libcudart.so.*"), reverse=True))
