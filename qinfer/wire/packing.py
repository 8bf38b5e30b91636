"""JSON elements to tensor bytes and back: what a datatype and a shape make of it is looked at once."""

import struct
from collections.abc import Callable
from functools import lru_cache
from math import prod
from typing import Any, NamedTuple

from qinfer.tensors import DATATYPES, Bytes

STRUCT_CODES = {d.name: d.typecode for d in DATATYPES.values() if d.name not in ("FP16", "BF16", "BYTES")}
"""Datatypes whose JSON elements `struct` packs; BYTES has its own layout, FP16 and BF16 travel as binary only."""

_MOST_DIMENSIONS = 32
_MOST_ELEMENTS = 2**31 - 1


class Packing(NamedTuple):
    """How the elements of a datatype and shape become bytes, and bytes elements.

    Attributes:
        elements: How many there are.
        nbytes: How many bytes they take.
        pack: Makes bytes of the elements; raises `struct.error` or `OverflowError` where one is out of range.
        unpack: Makes elements of as many bytes.
    """

    elements: int
    nbytes: int
    pack: Callable[..., bytes]
    unpack: Callable[[Bytes], tuple[Any, ...]]


@lru_cache(maxsize=1024)
def packing_of(datatype: str, shape: tuple[int, ...]) -> Packing | None:
    """Returns the packing of an ordinary datatype and shape; `None` for strings, floats of 16 bits, no elements."""
    code = STRUCT_CODES.get(datatype)
    count = prod(shape) if len(shape) <= _MOST_DIMENSIONS else 0
    if code is None or not 0 < count <= _MOST_ELEMENTS:
        return None
    checked, native = struct.Struct(f"<{count}{code}"), struct.Struct(f"{count}{code}")
    return Packing(count, native.size, checked.pack, native.unpack)  # the native one reads faster, and checks no range
