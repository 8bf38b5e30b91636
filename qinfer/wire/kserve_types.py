"""The infer request's JSON as msgspec structs, one per datatype, so one typed pass checks and converts the data.

`parse` reads every good request with flat data. For others `kserve_exact` gives the same structs or Triton's error.
"""

from collections.abc import Callable
from typing import Annotated, Any, Union, cast

import msgspec
from msgspec import UNSET, UnsetType

# reference §1.6
Dimension = Annotated[int, msgspec.Meta(ge=0, le=2**63 - 1)]
Natural = Annotated[int, msgspec.Meta(ge=0)]


class InputParameters(msgspec.Struct, gc=False):
    """The known parameters of an input; unknown parameters are ignored, as in Triton.

    Attributes:
        binary_data_size: The size of the input's data after the JSON, in bytes.
        shared_memory_region: The registered region that has the data.
        shared_memory_offset: The position of the data in the region, in bytes.
        shared_memory_byte_size: The size of the data in the region, in bytes.
    """

    binary_data_size: Natural | UnsetType = UNSET
    shared_memory_region: str | UnsetType = UNSET
    shared_memory_offset: Natural = 0
    shared_memory_byte_size: Natural = 0


class Input(msgspec.Struct, tag_field="datatype", gc=False):
    """Inputs' common fields; subclasses type `data`, flat and row-major."""

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
"""Each JSON datatype's element type."""


def _input_of(datatype: str, data: Any) -> type[Input]:
    field = ("data", data | UnsetType, UNSET)
    made = msgspec.defstruct(datatype.title(), [field], bases=(Input,), tag=datatype, gc=False)
    return cast("type[Input]", made)


INPUTS = {name: _input_of(name, list[element]) for name, element in ELEMENTS.items()}  # type: ignore[valid-type]

# FP16 and BF16 are refused later.
INPUTS |= {name: _input_of(name, Any) for name in ("FP16", "BF16")}

NAMES: dict[type[Input], str] = {cls: name for name, cls in INPUTS.items()}


class OutputParameters(msgspec.Struct, gc=False):
    """The known parameters of a requested output; unknown parameters are ignored, as in Triton.

    Attributes:
        binary_data: Whether the data follows the JSON as raw bytes.
        classification: The number of best classes, as BYTES `value:index[:label]`, in place of the data.
        shared_memory_region: The registered region that takes the data.
        shared_memory_offset: The position of the data in the region, in bytes.
        shared_memory_byte_size: The space for the data in the region, in bytes.
    """

    binary_data: bool | UnsetType = UNSET
    classification: Natural | UnsetType = UNSET
    shared_memory_region: str | UnsetType = UNSET
    shared_memory_offset: Natural = 0
    shared_memory_byte_size: Natural = 0


class RequestedOutput(msgspec.Struct, gc=False):
    """A requested output."""

    name: str
    parameters: OutputParameters | UnsetType = UNSET


class Request(msgspec.Struct, gc=False):
    """The body of an infer request."""

    inputs: list[Union[*INPUTS.values()]]  # type: ignore[valid-type]  # a struct for each datatype
    id: str = ""
    parameters: dict[str, bool | int | float | str] | UnsetType = UNSET
    outputs: list[RequestedOutput] = []


UNPARSABLE = (msgspec.MsgspecError, UnicodeDecodeError, RecursionError)
"""The errors of `parse` for unreadable text."""

parse: Callable[[bytes], Request] = msgspec.json.Decoder(Request).decode
"""Reads flat data, or raises one of `UNPARSABLE`."""
