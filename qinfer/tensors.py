"""Tensors: a name, a datatype, a shape, and little-endian row-major bytes.

Between the socket and the backend a tensor is bytes; only the two ends make numpy arrays (`to_numpy`, `from_numpy`).
BYTES tensors use the wire's layout: each element is a uint32 little-endian length followed by that many bytes
(reference §1.8). BF16 has no numpy type: it becomes float32, and is truncated on the way out, as by Triton's client.
"""

import struct
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from math import prod
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt

from qinfer.errors import InvalidRequest, UnsupportedDatatype

__all__ = ["DATATYPES", "Datatype", "Tensor", "from_numpy", "iter_bytes", "pack_bytes", "to_numpy"]

Bytes = bytes | bytearray | memoryview
"""The types of raw tensor data."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Datatype:
    """One row of the protocol's datatype table (reference §1.8).

    Attributes:
        name: The wire name, such as `FP32`.
        config: The name in `config.pbtxt`, such as `TYPE_FP32`.
        itemsize: Bytes of one element; 0 for BYTES, whose elements vary.
        numpy: The numpy dtype string of the raw bytes; `None` for BYTES and BF16.
        typecode: The `struct`/`array`/`memoryview.cast` code of one element; empty where Python has no such code.
    """

    name: str
    config: str
    itemsize: int
    numpy: str | None
    typecode: str


DATATYPES: dict[str, Datatype] = {
    name: Datatype(
        name=name, config=f"TYPE_{name if name != 'BYTES' else 'STRING'}", itemsize=size, numpy=np_, typecode=code
    )
    for name, size, np_, code in (
        ("BOOL", 1, "|b1", "?"),
        ("UINT8", 1, "|u1", "B"),
        ("UINT16", 2, "<u2", "H"),
        ("UINT32", 4, "<u4", "I"),
        ("UINT64", 8, "<u8", "Q"),
        ("INT8", 1, "|i1", "b"),
        ("INT16", 2, "<i2", "h"),
        ("INT32", 4, "<i4", "i"),
        ("INT64", 8, "<i8", "q"),
        ("FP16", 2, "<f2", "e"),
        ("BF16", 2, None, ""),
        ("FP32", 4, "<f4", "f"),
        ("FP64", 8, "<f8", "d"),
        ("BYTES", 0, None, ""),
    )
}
CONFIG_DATATYPES: dict[str, Datatype] = {d.config: d for d in DATATYPES.values()}
NUMPY_DATATYPES: dict[np.dtype[Any], str] = {np.dtype(d.numpy): d.name for d in DATATYPES.values() if d.numpy}

_LENGTH = struct.Struct("<I")
_PIECE = 8192  # elements of a BYTES tensor packed at once


class Tensor(msgspec.Struct, frozen=True, gc=False):
    """A named tensor as raw bytes.

    Attributes:
        name: The input's or output's name in the model configuration.
        datatype: A key of `DATATYPES`.
        shape: All dimensions, including the batch dimension; no dimension is negative.
        data: The elements, little-endian, row-major, no padding; BYTES elements with their length prefix. A memoryview
            has the format `B` and one dimension.
    """

    name: str
    datatype: str
    shape: tuple[int, ...]
    data: Bytes

    @property
    def nbytes(self) -> int:
        """The size of `data` in bytes."""
        return len(self.data)


def datatype(name: str) -> Datatype:
    """Returns the wire datatype of this name, or raises `UnsupportedDatatype`."""
    try:
        return DATATYPES[name]
    except KeyError:
        raise UnsupportedDatatype(f"unknown datatype '{name}'; expected one of {', '.join(DATATYPES)}") from None


def numpy_dtype(name: str) -> np.dtype[Any]:
    """Returns the dtype of `to_numpy`'s array: object for BYTES, float32 for BF16; raises `UnsupportedDatatype`."""
    return np.dtype({"BYTES": "O", "BF16": "<f4"}.get(name) or datatype(name).numpy)


def element_count(shape: Sequence[int]) -> int:
    """Returns the number of elements of `shape`; 1 for a scalar."""
    return prod(shape)


def iter_bytes(data: Bytes) -> Iterator[memoryview]:
    """Iterates over the elements of a raw BYTES tensor without copying them.

    Raises:
        InvalidRequest: A length indicator is cut off, or points past the end (texts of reference §1.8).
    """
    view = memoryview(data)
    position, end = 0, len(view)
    while position < end:
        if position + 4 > end:
            raise InvalidRequest("incomplete string length indicator for inference input")
        (length,) = _LENGTH.unpack_from(view, position)
        position += 4
        if position + length > end:
            raise InvalidRequest(
                "incomplete string data for inference input, expecting string of length " + str(length)
            )
        yield view[position : position + length]
        position += length


def pack_bytes(elements: Iterable[bytes]) -> bytes:
    """Encodes elements as the data of a BYTES tensor, in pieces that bound the temporary memory."""
    left, pieces = iter(elements), list[bytes]()
    while piece := list(islice(left, _PIECE)):
        parts: list[bytes] = []
        for element in piece:
            parts.append(_LENGTH.pack(len(element)))
            parts.append(element)
        pieces.append(b"".join(parts))
    return pieces[0] if len(pieces) == 1 else b"".join(pieces)


def to_numpy(tensor: Tensor) -> npt.NDArray[Any]:
    """Makes an array of `tensor.shape`; BYTES become an object array of `bytes`, BF16 becomes float32.

    The array shares the memory of `tensor.data` unless the datatype is BYTES or BF16; it is read-only if `data` is.

    Raises:
        InvalidRequest: The bytes do not fill the shape.
    """
    kind = datatype(tensor.datatype)
    if kind.name == "BYTES":
        return _shaped(object_array(string_elements(tensor)), tensor)
    count = element_count(tensor.shape)
    if tensor.nbytes != count * kind.itemsize:
        raise InvalidRequest(
            f"'{tensor.name}' has {tensor.nbytes} bytes, its shape {list(tensor.shape)} needs {count * kind.itemsize}"
        )
    if kind.numpy is None:
        return _shaped(from_bf16(np.frombuffer(tensor.data, dtype="<u2")), tensor)
    return _shaped(np.frombuffer(tensor.data, dtype=kind.numpy), tensor)


def string_elements(tensor: Tensor) -> list[bytes]:
    """Returns the elements of a BYTES tensor; raises `InvalidRequest` unless they fill its bytes and its shape."""
    data, count = tensor.data, element_count(tensor.shape)
    if count == 1 and int.from_bytes(data[:4], "little") + 4 == len(data):
        return [bytes(data[4:])]
    elements = [bytes(element) for element in iter_bytes(data)]
    if len(elements) != count:
        raise InvalidRequest(f"expected {count} string elements for '{tensor.name}', got {len(elements)}")
    return elements


def object_array(elements: Sequence[bytes]) -> npt.NDArray[Any]:
    """Makes a flat array of objects; numpy would make one of `S`, which drops zeros at the end."""
    array = np.empty(len(elements), dtype=object)
    array[:] = elements
    return array


def _shaped(array: npt.NDArray[Any], tensor: Tensor) -> npt.NDArray[Any]:
    try:
        return array.reshape(tensor.shape)
    except ValueError:  # numpy's limits hold even if another dimension is 0
        raise InvalidRequest(f"'{tensor.name}' has a shape larger than any array can be: {tensor.shape}") from None


def from_numpy(name: str, array: npt.NDArray[Any], datatype: str | None = None) -> Tensor:
    """Makes a tensor of an array, sharing its memory when it is contiguous and little-endian.

    Args:
        name: The tensor's name.
        array: Any numeric or boolean array; object, `S` and `U` arrays become BYTES, `ml_dtypes.bfloat16` BF16.
        datatype: The wire datatype, by default the array's own; needed only for BF16 of float32.

    Raises:
        UnsupportedDatatype: No wire datatype holds the array's dtype.
    """
    if datatype == "BF16":
        return Tensor(name, "BF16", array.shape, _raw(to_bf16(array)))
    if array.dtype.kind in "OSU" and datatype in (None, "BYTES"):
        flat = (e if isinstance(e, bytes) else str(e).encode() for e in array.ravel().tolist())
        return Tensor(name, "BYTES", array.shape, pack_bytes(flat))
    wire = NUMPY_DATATYPES.get(array.dtype)
    if wire is None and array.dtype.name == "bfloat16" and datatype is None:  # the type is from ml_dtypes
        return Tensor(name, "BF16", array.shape, _raw(array.view("<u2")))
    if wire is None and array.dtype.kind in "iuf":
        array = array.astype(array.dtype.newbyteorder("<"))
        wire = NUMPY_DATATYPES.get(array.dtype)
    if wire is None or (datatype is not None and datatype != wire):
        raise UnsupportedDatatype(f"'{name}' is an array of {array.dtype}; cast it to {datatype or 'a wire datatype'}")
    return Tensor(name, wire, array.shape, _raw(array))


def to_bf16(array: npt.NDArray[Any]) -> npt.NDArray[Any]:
    """Returns BF16 bits: the top half of each float32, truncated as by Triton's own client (reference §1.8)."""
    bits: npt.NDArray[Any] = (np.ascontiguousarray(array, dtype="<f4").view("<u4") >> 16).astype("<u2")
    return bits


def from_bf16(bits: npt.NDArray[Any]) -> npt.NDArray[Any]:
    """Returns BF16 bits as float32."""
    return (bits.astype("<u4") << 16).view("<f4")


def _raw(array: npt.NDArray[Any]) -> Bytes:
    if not array.size:
        return b""  # memoryview can't cast a shape with a zero
    return (array if array.flags.c_contiguous else np.ascontiguousarray(array)).data.cast("B")
