"""`pb_utils.Tensor`: a name and a numpy array, with DLPack both ways, in host memory. BF16 is float32 for the model.

https://github.com/triton-inference-server/python_backend#interoperability-and-gpu-support
"""

from typing import Any

import numpy as np
import numpy.typing as npt

from qinfer.backends.python_host.errors import TritonModelException, text
from qinfer.tensors import DATATYPES, from_numpy
from qinfer.tensors import Tensor as WireTensor

Array = npt.NDArray[Any]

NUMBERS = {
    name: number
    for number, name in enumerate((*(d for d in DATATYPES if d not in ("BF16", "BYTES")), "BYTES", "BF16"), start=1)
}
"""Datatype → its number (TRITONSERVER_DataType of tritonserver.h)."""

_BY_DTYPE = {np.dtype(d.numpy): NUMBERS[d.name] for d in DATATYPES.values() if d.numpy}
_CPU = 1  # kDLCPU (dlpack.h)
_new = object.__new__


class Tensor:
    """A tensor of a request or response.

    Args:
        name: The name of the tensor.
        numpy_array: The elements of the tensor. Strings are `bytes` or `str` in an array of dtype `object`, or
            `np.bytes_`.
    """

    __slots__ = ("_array", "_datatype", "_name")

    def __init__(self, name: str, numpy_array: Array, _datatype: str | None = None) -> None:
        if not isinstance(numpy_array, np.ndarray):
            raise TypeError(f"tensor '{name}' is made of a numpy array, got {type(numpy_array).__name__}")
        self._name = name if type(name) is str and name and name.isascii() else _named(name)
        if numpy_array.dtype.kind in "UV" and numpy_array.dtype.name != "bfloat16":
            raise TritonModelException(
                "Tensor dtype used for numpy_array is not support by Python backend. Please use np.object_ instead."
            )
        self._array = numpy_array
        self._datatype = _datatype

    @staticmethod
    def received(name: str, array: Array, datatype: str | None) -> "Tensor":
        """Returns an unchecked tensor; Triton has no such method."""
        tensor: Tensor = _new(Tensor)
        tensor._name, tensor._array, tensor._datatype = name, array, datatype
        return tensor

    def name(self) -> str:
        """Returns the name of the tensor."""
        return self._name

    def as_numpy(self) -> Array:
        """Returns the elements of the tensor: the array itself, not a copy."""
        return self._array

    def triton_dtype(self) -> int:
        """Returns the number of the tensor's datatype, as `numpy_to_triton_type` does."""
        if self._datatype is not None:
            return NUMBERS[self._datatype]
        return NUMBERS["BYTES"] if self._array.dtype.kind in "OS" else _BY_DTYPE.get(self._array.dtype, 0)

    def shape(self) -> list[int]:
        """Returns the dimensions of the tensor."""
        return list(self._array.shape)

    def is_cpu(self) -> bool:
        """Returns True: the tensor is in host memory."""
        return True

    def to_dlpack(self) -> Any:
        """Returns a DLPack capsule that shares the tensor's memory."""
        return self.__dlpack__()

    def __dlpack__(self, **options: Any) -> Any:
        if self._array.dtype.kind in "OS":
            raise TritonModelException("DLPack does not have support for string tensors.")
        del options
        # As in Triton, a capsule keeps the tensor.
        return np.asarray(_HeldTensor(self)).__dlpack__()

    def __dlpack_device__(self) -> tuple[int, int]:
        return (_CPU, 0)

    @staticmethod
    def from_dlpack(name: str, tensor: Any) -> "Tensor":
        """Makes a tensor from a tensor of another library; a tensor on a GPU is copied to host memory first."""
        name = _named(name)
        if not hasattr(tensor, "__dlpack__"):
            if type(tensor).__name__ != "PyCapsule":
                raise TritonModelException(
                    "Provided tensor is not supported. Tensor must be a DLPack capsule or have a `__dlpack__` attribute"
                )
            return Tensor(name, np.from_dlpack(_Capsule(tensor)))
        if tensor.__dlpack_device__()[0] != _CPU:
            copy = getattr(tensor, "cpu", None) or getattr(tensor, "get", None)  # `cpu` is torch's, `get` is cupy's
            if copy is None:
                raise TritonModelException(f"tensor '{name}' is not in host memory; copy it there first")
            tensor = copy()
            if isinstance(tensor, np.ndarray):
                return Tensor(name, tensor)
        if str(getattr(tensor, "dtype", "")) == "torch.bfloat16":
            return Tensor(name, np.from_dlpack(tensor.float()), "BF16")
        try:
            return Tensor(name, np.from_dlpack(tensor))
        except (BufferError, RuntimeError, TypeError) as error:
            raise TritonModelException(f"tensor '{name}' can't be taken by DLPack: {error}") from None

    def to_wire(self, datatype: str | None) -> WireTensor:
        """Returns the tensor for the worker, in the given datatype."""
        narrow = "BF16" in (self._datatype, datatype) and self._array.dtype == np.float32
        return from_numpy(self._name, self._array, "BF16" if narrow else None)


def _named(name: object) -> str:
    named = text(name, "the name of a tensor")
    if not named:
        raise TritonModelException("Tensor name cannot be an empty string.")
    return named


class _HeldTensor:
    def __init__(self, tensor: Tensor) -> None:
        self._tensor = tensor
        self.__array_interface__ = tensor.as_numpy().__array_interface__


class _Capsule:
    """Wraps a capsule for numpy, which needs a producer."""

    def __init__(self, capsule: Any) -> None:
        self._capsule = capsule

    def __dlpack__(self, **options: Any) -> Any:
        del options
        return self._capsule

    def __dlpack_device__(self) -> tuple[int, int]:
        return (_CPU, 0)
