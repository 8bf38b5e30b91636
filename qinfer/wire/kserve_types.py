"""The infer request's JSON as msgspec structs: one per datatype, so that one typed pass checks and converts the data.

`parse` is the way of every good request with flat data. What it can't take - nested data, NaN, mistakes - is for
`kserve_exact`, which gives the same structs or Triton's error.
"""

from collections.abc import Callable
from typing import Annotated, Any, Union, cast

import msgspec
from msgspec import UNSET, UnsetType

# The parameters with a meaning: reference §1.6.
Dimension = Annotated[int, msgspec.Meta(ge=0, le=2**63 - 1)]
Natural = Annotated[int, msgspec.Meta(ge=0)]


class InputParameters(msgspec.Struct, gc=False):
    """The parameters of an input that have a meaning; others are ignored, as Triton does.

    Attributes:
        binary_data_size: Bytes after the JSON part.
        shared_memory_region: A registered region that has the data.
    """

    binary_data_size: Natural | UnsetType = UNSET
    shared_memory_region: str | UnsetType = UNSET
    shared_memory_offset: Natural = 0
    shared_memory_byte_size: Natural = 0


class Input(msgspec.Struct, tag_field="datatype", gc=False):
    """The common fields of the inputs of all datatypes; each subclass types its `data`, flat and row-major."""

    name: str
    shape: tuple[Dimension, ...]
    parameters: InputParameters | UnsetType = UNSET
    data: Any = UNSET


ELEMENTS: dict[str, Any] = {
    "BOOL": bool,
    **dict.fromkeys(("UINT8", "UINT16", "UINT32", "UINT64"), Natural),
    **dict.fromkeys(("INT8", "INT16", "INT32", "INT64"), int),
    **dict.fromkeys(("FP32", "FP64"), float),
    "BYTES": str,
}
"""The types of the elements of a datatype that travels as JSON."""


def _input_of(datatype: str, data: Any) -> type[Input]:
    field = ("data", data | UnsetType, UNSET)
    made = msgspec.defstruct(datatype.title(), [field], bases=(Input,), tag=datatype, gc=False)
    return cast("type[Input]", made)


INPUTS = {name: _input_of(name, list[element]) for name, element in ELEMENTS.items()}  # type: ignore[valid-type]
"""Datatype name → its struct."""

# FP16 and BF16 travel as binary data only: what `data` holds is refused later.
INPUTS |= {name: _input_of(name, Any) for name in ("FP16", "BF16")}

NAMES: dict[type[Input], str] = {cls: name for name, cls in INPUTS.items()}
"""Struct → its datatype's name."""


class OutputParameters(msgspec.Struct, gc=False):
    """The parameters of a wanted output that have a meaning; others are ignored, as Triton does.

    Attributes:
        classification: So many best classes, as BYTES `value:index[:label]`.
        shared_memory_region: A registered region that takes the data.
    """

    binary_data: bool | UnsetType = UNSET
    classification: Natural | UnsetType = UNSET
    shared_memory_region: str | UnsetType = UNSET
    shared_memory_offset: Natural = 0
    shared_memory_byte_size: Natural = 0


class Output(msgspec.Struct, gc=False):
    """A requested output."""

    name: str
    parameters: OutputParameters | UnsetType = UNSET


class Request(msgspec.Struct, gc=False):
    """The body of an infer request."""

    inputs: list[Union[*INPUTS.values()]]  # type: ignore[valid-type]  # a struct for each datatype
    id: str = ""
    parameters: dict[str, bool | int | float | str] | UnsetType = UNSET
    outputs: list[Output] = []


UNPARSABLE = (msgspec.MsgspecError, UnicodeDecodeError, RecursionError)
"""The errors that `parse` raises for text that it can't read."""

parse: Callable[[bytes], Request] = msgspec.json.Decoder(Request).decode
"""Reads a well-formed request with flat data; raises one of `UNPARSABLE` for any other."""
