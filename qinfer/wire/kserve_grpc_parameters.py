"""Parameters over gRPC: values of a `oneof`, with Triton's texts for those of the wrong type (reference §2.2).

What the parameters mean is not written here: `kserve_parameters` knows it, for both protocols.
"""

from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

from qinfer.core.messages import InferRequest, Scalar
from qinfer.errors import InvalidRequest
from qinfer.wire.kserve_parameters import apply_parameters
from qinfer.wire.outputs import OutputPlan, Regions, read_special

_PLAIN = OutputPlan()
_EMPTY_FINAL = "triton_enable_empty_final_response"
_INTEGERS = ("int64_param", "uint64_param")
_KINDS = {  # what Triton's messages call for, and what is taken: both kinds of integers everywhere
    "sequence_id": ("int64_param or string_param", (*_INTEGERS, "string_param")),
    "sequence_start": ("bool_param", ("bool_param",)),
    "sequence_end": ("bool_param", ("bool_param",)),
    "priority": ("int64_param or uint64_param", _INTEGERS),
    "timeout": ("int64_param", _INTEGERS),
}


class Region(NamedTuple):
    """A part of a shared memory region: its name, and where in it."""

    region: str
    offset: int
    byte_size: int


def apply_request_parameters(parameters: Mapping[str, Any], request: InferRequest) -> bool:
    """Writes the parameters of a request into its fields.

    Args:
        parameters: Name → `InferParameter`.
        request: Gets priority, timeout, sequence and the custom parameters.

    Returns:
        Whether a decoupled model that ends without a last response gives an empty one.

    Raises:
        InvalidRequest: A parameter has the wrong type or value, or a name that is reserved.
    """
    known: dict[str, Any] = {}
    custom: dict[str, Scalar] = {}
    empty_final = False
    for name, parameter in parameters.items():
        kind, value = _value(parameter)
        if name in _KINDS:
            known[name] = _known(name, kind, value)
        elif name == _EMPTY_FINAL:
            if kind != "bool_param":
                raise InvalidRequest(f"invalid value type for '{name}' parameter, expected bool_param.")
            empty_final = bool(value)
        elif name.startswith("triton_"):
            raise InvalidRequest(
                "parameter keys starting with 'triton_' are reserved for Triton usage. Only the following keys "
                f"starting with 'triton_' are allowed: {_EMPTY_FINAL}"
            )
        elif value is None or (kind == "uint64_param" and value >= 2**63):
            raise InvalidRequest(
                f"invalid value type for '{name}' parameter, expected int64_param, bool_param, or string_param."
            )
        else:
            custom[name] = value
    fields: dict[str, Any] = {}
    apply_parameters(known, fields)
    for name, value in fields.items():
        setattr(request, name, value)
    if custom:
        request.parameters = custom
    return empty_final


def shared_memory_of(tensor: Any) -> Region | None:
    """Returns the region that an input or an output is in; `None` when it is in none.

    Raises:
        InvalidRequest: The three parameters have wrong types or values, or one is missing.
    """
    parameters = tensor.parameters
    where = f"for tensor '{tensor.name}'"
    if "shared_memory_region" not in parameters:
        for name in ("shared_memory_offset", "shared_memory_byte_size"):
            if name in parameters:
                raise InvalidRequest(f"'{name}' can not be specified without 'shared_memory_region' parameter {where}")
        return None
    kind, region = _value(parameters["shared_memory_region"])
    if kind != "string_param":
        raise InvalidRequest(f"invalid value type for 'shared_memory_region' parameter {where}, expected string_param.")
    if "shared_memory_byte_size" not in parameters:
        raise InvalidRequest(
            f"'shared_memory_byte_size' must be specified along with 'shared_memory_region' parameter {where}"
        )
    numbers = [0, 0]
    for position, name in enumerate(("shared_memory_offset", "shared_memory_byte_size")):
        if name in parameters:
            kind, number = _value(parameters[name])
            if kind not in _INTEGERS or number < 0:
                raise InvalidRequest(f"invalid value type for '{name}' parameter {where}, expected int64_param.")
            numbers[position] = number
    return Region(region, *numbers)


def plan_outputs(outputs: Iterable[Any], regions: Regions) -> tuple[tuple[str, ...], OutputPlan]:
    """Returns the names of the outputs that are asked for, and how they are given back.

    Args:
        outputs: The requested outputs.
        regions: The shared memory that clients registered.

    Raises:
        InvalidRequest: A parameter of an output has the wrong type or value, or they contradict each other.
        QinferError: A region is not registered or too small, or shared memory is off.
    """
    names, special = [], {}
    for output in outputs:
        names.append(output.name)
        if not output.parameters:
            continue
        wanted: dict[str, Any] = {}
        region = shared_memory_of(output)
        if region is not None:
            wanted = {f"shared_memory_{field}": value for field, value in region._asdict().items()}
        if "classification" in output.parameters:
            wanted["classification"] = _classes(output.parameters["classification"])
        found = read_special(wanted, regions)
        if found is not None:
            special[output.name] = found
    return tuple(names), OutputPlan(special=special) if special else _PLAIN


def to_parameter(value: Scalar) -> dict[str, Scalar]:
    """Returns what an `InferParameter` is made of, for a parameter of a response."""
    if isinstance(value, bool):
        return {"bool_param": value}
    if isinstance(value, int):
        return {"int64_param" if value < 2**63 else "uint64_param": value}
    return {"double_param" if isinstance(value, float) else "string_param": value}


def _classes(parameter: Any) -> int:
    kind, count = _value(parameter)
    if kind not in _INTEGERS:
        raise InvalidRequest("invalid value type for 'classification' parameter, expected int64_param")
    if count <= 0:
        raise InvalidRequest("invalid value for 'classification' parameter, expected >= 0")
    return int(count)


def _value(parameter: Any) -> tuple[str, Any]:
    kind = parameter.WhichOneof("parameter_choice") or ""
    return kind, getattr(parameter, kind) if kind else None


def _known(name: str, kind: str, value: Any) -> Any:
    expected, kinds = _KINDS[name]
    if kind not in kinds:
        raise InvalidRequest(f"invalid value type for '{name}' parameter, expected {expected}.")
    if name == "sequence_id" and kind == "int64_param":
        return value % 2**64  # ids are unsigned: Triton reads the same bits
    if kind == "int64_param" and value < 0:
        raise InvalidRequest(f"invalid value for '{name}', expected value >= 0.")
    return value
