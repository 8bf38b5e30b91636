"""The buffers of a tensorrt instance: for each tensor one on the GPU, and one on the host, of the largest size."""

from math import prod
from typing import NamedTuple

import numpy as np

from qinfer.backends.base import Array
from qinfer.backends.cuda import TO_DEVICE, TO_HOST, Cuda
from qinfer.tensors import DATATYPES

Shape = tuple[int, ...]


class Port(NamedTuple):
    """A tensor of an engine, with its largest shape."""

    name: str
    datatype: str
    shape: Shape
    is_input: bool


class Buffers:
    """See the module docstring.

    Args:
        cuda: CUDA, with the instance's GPU as the present one.
        ports: The engine's tensors.
        scratch_bytes: What executions need beside them; all of an instance's share it, because they never overlap.
    """

    def __init__(self, cuda: Cuda, ports: list[Port], scratch_bytes: int) -> None:
        self._cuda = cuda
        self._ports = {port.name: port for port in ports}
        self._host: dict[str, tuple[int, Array]] = {}
        self.addresses: dict[str, int] = {}
        """Name → address on the GPU."""
        self.scratch, self.scratch_bytes = 0, scratch_bytes
        try:
            self.scratch = cuda.allocate(scratch_bytes)
            for port in ports:
                size_bytes = prod(port.shape) * _itemsize(port)
                self.addresses[port.name] = cuda.allocate(size_bytes)
                self._host[port.name] = cuda.allocate_pinned(size_bytes)
        except BaseException:
            self.free()
            raise

    def fill(self, name: str, array: Array) -> None:
        """Copies an input into its pinned buffer."""
        port = self._ports[name]
        if port.datatype == "BF16":  # float32 on this side of the backend
            array = (np.ascontiguousarray(array, dtype="<f4").view("<u4") >> 16).astype("<u2")
        view = self._host[name][1][: array.nbytes].view(array.dtype).reshape(array.shape)
        np.copyto(view, array)

    def read(self, name: str, shape: Shape) -> Array:
        """Copies an output out of its pinned buffer, which the next execution overwrites."""
        port = self._ports[name]
        raw = self._host[name][1][: self._size_bytes(name, shape)]
        if port.datatype == "BF16":
            return (raw.view("<u2").astype("<u4") << 16).view("<f4").reshape(shape)
        copied: Array = raw.view(DATATYPES[port.datatype].numpy or "<u2").reshape(shape).copy()
        return copied

    def to_device(self, name: str, shape: Shape, stream: int) -> None:
        """Queues the copy of an input to the GPU."""
        size_bytes = self._size_bytes(name, shape)
        self._cuda.copy(self.addresses[name], self._host[name][0], size_bytes, TO_DEVICE, stream)

    def to_host(self, name: str, shape: Shape, stream: int) -> None:
        """Queues the copy of an output from the GPU."""
        self._cuda.copy(self._host[name][0], self.addresses[name], self._size_bytes(name, shape), TO_HOST, stream)

    def free(self) -> None:
        """Frees everything."""
        for address in (self.scratch, *self.addresses.values()):
            if address:
                self._cuda.free(address)
        for address, _ in self._host.values():
            self._cuda.free_pinned(address)
        self.scratch = 0
        self.addresses.clear()
        self._host.clear()

    def _size_bytes(self, name: str, shape: Shape) -> int:
        return prod(shape) * _itemsize(self._ports[name])


def _itemsize(port: Port) -> int:
    return DATATYPES[port.datatype].itemsize
