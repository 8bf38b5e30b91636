"""The infer request's JSON as msgspec structs: one per datatype, so that one typed pass checks and converts the data.

`parse` is the way of every good request with flat data. What it can't take - nested data, NaN, mistakes - is for
`kserve_exact`, which gives the same structs or Triton's error.
"""

from collections.abc import Callable
from typing import Annotated, Any, get_args

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


class Bool(Input, tag="BOOL"):
    """BOOL."""

    data: list[bool] | UnsetType = UNSET


class Uint8(Input, tag="UINT8"):
    """UINT8."""

    data: list[Natural] | UnsetType = UNSET


class Uint16(Input, tag="UINT16"):
    """UINT16."""

    data: list[Natural] | UnsetType = UNSET


class Uint32(Input, tag="UINT32"):
    """UINT32."""

    data: list[Natural] | UnsetType = UNSET


class Uint64(Input, tag="UINT64"):
    """UINT64."""

    data: list[Natural] | UnsetType = UNSET


class Int8(Input, tag="INT8"):
    """INT8."""

    data: list[int] | UnsetType = UNSET


class Int16(Input, tag="INT16"):
    """INT16."""

    data: list[int] | UnsetType = UNSET


class Int32(Input, tag="INT32"):
    """INT32."""

    data: list[int] | UnsetType = UNSET


class Int64(Input, tag="INT64"):
    """INT64."""

    data: list[int] | UnsetType = UNSET


class Fp32(Input, tag="FP32"):
    """FP32."""

    data: list[float] | UnsetType = UNSET


class Fp64(Input, tag="FP64"):
    """FP64."""

    data: list[float] | UnsetType = UNSET


class Bytes(Input, tag="BYTES"):
    """BYTES."""

    data: list[str] | UnsetType = UNSET


class Fp16(Input, tag="FP16"):
    """FP16: only as binary data; what `data` holds is refused later."""


class Bf16(Input, tag="BF16"):
    """BF16: only as binary data; what `data` holds is refused later."""


AnyInput = Bool | Uint8 | Uint16 | Uint32 | Uint64 | Int8 | Int16 | Int32 | Int64 | Fp32 | Fp64 | Bytes | Fp16 | Bf16

INPUTS: dict[str, type[AnyInput]] = {cls.__struct_config__.tag: cls for cls in get_args(AnyInput)}
"""Datatype name → its struct."""

NAMES: dict[type[Any], str] = {cls: name for name, cls in INPUTS.items()}
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

    inputs: list[AnyInput]
    id: str = ""
    parameters: dict[str, bool | int | float | str] | UnsetType = UNSET
    outputs: list[Output] = []


UNPARSABLE = (msgspec.MsgspecError, UnicodeDecodeError, RecursionError)
"""The errors that `parse` raises for text that it can't read."""

parse: Callable[[bytes], Request] = msgspec.json.Decoder(Request).decode
"""Reads a well-formed request with flat data; raises one of `UNPARSABLE` for any other."""
