"""The exact reading of an infer request's JSON: Triton's order of checks, its texts, and all that it accepts.

`read` takes the texts that `kserve_types.parse` refuses: nested data, NaN and Infinity (Triton parses with rapidjson's
`kParseNanAndInfFlag`, triton-inference-server/common `triton_json.h`), and mistakes. It is slower, so it runs second.
"""

from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

from msgspec import UNSET

from qinfer.core.messages import SequenceFlags
from qinfer.errors import InvalidRequest, MalformedJson, UnsupportedDatatype
from qinfer.wire.json_pieces import LongArray
from qinfer.wire.json_scan import load
from qinfer.wire.kserve_types import INPUTS, Input, InputParameters, OutputParameters, Request, RequestedOutput

STEP = "qinfer_step"
"""Detects repeated requests of a sequence."""

STRICT_JSON = "qinfer_strict_json"
"""Null in place of NaN and infinities."""

SEQUENCE_KEYS = {"sequence_id": "id", "sequence_start": "start", "sequence_end": "end", STEP: "step"}
"""Parameters, and their fields in `SequenceFlags`."""

_TRITON = "triton_"

_NOT_UNSIGNED = "attempt to access JSON non-unsigned-integer as unsigned-integer"
_NOT_SIGNED = "attempt to access JSON non-signed-integer as signed-integer"
_NOT_NUMBER = "attempt to access JSON non-number as double"
_NOT_BOOLEAN = "attempt to access JSON non-boolean as boolean"
_NOT_STRING = "attempt to access JSON non-string as string"
_NOT_ARRAY = "attempt to access JSON non-array as array"


def read(text: bytes, max_depth: int) -> Request:
    """Reads an infer request as Triton does."""
    return build(load(text, max_depth))


def build(document: Any) -> Request:
    """Reads a parsed infer request; raises as `read`."""
    if not isinstance(document, dict):
        raise _missing("inputs")
    request_id = document.get("id", "")
    _require(isinstance(request_id, str), "id", _NOT_STRING)
    parameters = document.get("parameters", UNSET)
    if parameters is not UNSET and not isinstance(parameters, dict):
        raise MalformedJson("failed to get request params.: attempt to get members for non-object")
    return Request(
        inputs=[read_input(entry) for entry in _array(document, "inputs")],
        id=request_id,
        parameters=parameters,
        outputs=[_output(entry) for entry in _array(document, "outputs")] if "outputs" in document else [],
    )


def read_input(entry: Any) -> Input:
    """Reads one parsed input as `read` does."""
    fields = entry if isinstance(entry, dict) else {}
    raw = fields.get("parameters")
    raw = raw if isinstance(raw, dict) else {}
    size, region = raw.get("binary_data_size", UNSET), raw.get("shared_memory_region", UNSET)
    check_one_source(fields.get("data", UNSET), size, region)
    name = _string(fields, "name")
    datatype = _string(fields, "datatype")
    given = fields.get("shape")
    if isinstance(given, LongArray) and not given.is_text:
        raise InvalidRequest(f"the shape of input '{name}' has {given.top} dimensions, more than any tensor")
    shape = _array(fields, "shape")
    for dimension in shape:
        _require(_is_unsigned(dimension), "shape", _NOT_UNSIGNED)
        if dimension >= 2**63:
            raise InvalidRequest(f"a dimension of input '{name}' is {dimension}, larger than any tensor can be")
    _require(size is UNSET or _is_unsigned(size), "binary_data_size", _NOT_UNSIGNED)
    parameters = InputParameters(size, *_shared_memory(raw))
    cls = INPUTS.get(datatype)
    if cls is None:
        raise UnsupportedDatatype(f"invalid datatype for input {name}")
    data: Any = UNSET
    if "data" in fields:
        # Triton ignores its data.
        data = [] if 0 in shape else _data(fields, datatype)
    return cls(name, tuple(shape), parameters, data)


def _data(fields: Mapping[str, Any], datatype: str) -> list[Any] | LongArray:
    data = fields["data"]
    if isinstance(data, LongArray) and not data.is_text:
        return data
    return flat(_array(fields, "data"), datatype)


def _shared_memory(raw: Mapping[str, Any]) -> tuple[Any, int, int]:
    region = raw.get("shared_memory_region", UNSET)
    _require(region is UNSET or isinstance(region, str), "shared_memory_region", _NOT_STRING)
    offset, size = raw.get("shared_memory_offset", 0), raw.get("shared_memory_byte_size", 0)
    _require(_is_unsigned(offset), "shared_memory_offset", _NOT_UNSIGNED)
    _require(_is_unsigned(size), "shared_memory_byte_size", _NOT_UNSIGNED)
    return region, offset, size


def check_one_source(data: Any, size: Any, region: Any) -> None:
    """Raises `InvalidRequest` unless an input has one source."""
    sources = {"data": data, "binary_data_size": size, "shared_memory_region": region}
    found = [name for name, value in sources.items() if value is not UNSET]
    if len(found) != 1:
        said = " set" + "".join(f" '{name}'" for name in found) if found else " no field is set"
        raise InvalidRequest(
            "Input must set only one of the following fields: 'data', 'binary_data_size' in 'parameters', "
            f"'shared_memory_region' in 'parameters'. But{said}"
        )


def _output(entry: Any) -> RequestedOutput:
    fields = entry if isinstance(entry, dict) else {}
    raw = fields.get("parameters")
    raw = raw if isinstance(raw, dict) else {}
    binary, classes = raw.get("binary_data", UNSET), raw.get("classification", UNSET)
    _require(binary is UNSET or isinstance(binary, bool), "binary_data", _NOT_BOOLEAN)
    if classes is not UNSET and not _is_unsigned(classes):
        raise MalformedJson(f"Unable to set 'classification': {_NOT_UNSIGNED}")
    return RequestedOutput(_string(fields, "name"), OutputParameters(binary, classes, *_shared_memory(raw)))


def flat(data: list[Any], datatype: str) -> list[Any]:
    """Flattens nested data, and checks the elements' types."""
    data = list(_leaves(data))
    types = set(map(type, data))
    if datatype == "BOOL":
        _require(types <= {bool}, "data", _NOT_BOOLEAN)
    elif datatype == "BYTES":
        _require(types <= {str}, "data", _NOT_STRING)
    elif datatype in ("FP32", "FP64"):
        _require(types <= {int, float}, "data", _NOT_NUMBER)
    elif datatype.startswith("U"):
        _require(types <= {int} and all(0 <= e < 2**64 for e in data), "data", _NOT_UNSIGNED)
    elif datatype.startswith("I"):
        _require(types <= {int} and all(-(2**63) <= e < 2**63 for e in data), "data", _NOT_SIGNED)
    return data


def _leaves(data: list[Any]) -> Iterator[Any]:
    stack = [iter(data)]
    while stack:
        for element in stack[-1]:
            if type(element) is list:
                stack.append(iter(element))
                break
            yield element
        else:
            stack.pop()


class Form(NamedTuple):
    """The form of outputs: whether they are binary data, and whether their JSON must have no NaN."""

    binary: bool = False
    strict: bool = False


def apply_parameters(parameters: Mapping[str, Any], fields: dict[str, Any]) -> Form:
    """Sorts parameters into fields of an `InferRequest`; returns the outputs' form."""
    sequence_flags = _usual_step(parameters)
    if sequence_flags is not None:
        fields["sequence"] = sequence_flags
        return _BINARY if parameters.get("binary_data_output") else _JSON
    binary = strict = False
    custom: dict[str, Any] = {}
    sequence: dict[str, Any] = {}
    for key, value in parameters.items():
        if key == "binary_data_output":
            binary = _boolean(key, value)
        elif key == STRICT_JSON:
            strict = _strict(value)
        elif key == "priority":
            fields["priority"] = _unsigned(key, value)
        elif key == "timeout":
            fields["timeout_s"] = _unsigned(key, value) / 1e6
        elif key in SEQUENCE_KEYS:
            sequence[SEQUENCE_KEYS[key]] = _of_sequence(key, value)
        else:
            custom[key] = custom_parameter(key, value)
    if custom:
        fields["parameters"] = custom
    if sequence:
        _put_sequence(sequence, fields)
    return Form(binary, strict)


_JSON, _BINARY = Form(), Form(binary=True)
_OF_STEPS = frozenset((*SEQUENCE_KEYS, "binary_data_output"))


def _usual_step(parameters: Mapping[str, Any]) -> SequenceFlags | None:
    """Returns the flags of a step without mistakes and with no other parameters of the model, as most have."""
    get: Callable[..., Any] = parameters.get
    of, start, end, step = get("sequence_id"), get("sequence_start", False), get("sequence_end", False), get(STEP)
    is_known = parameters.keys() <= _OF_STEPS and type(get("binary_data_output", False)) is bool
    is_named = (type(of) is str and of) or (type(of) is int and 0 < of < 2**64)
    is_numbered = step is None or (type(step) is int and 0 < step < 2**53)
    if is_known and is_named and is_numbered and type(start) is bool and type(end) is bool:
        return SequenceFlags(of, start, end, step or 0)
    return None


_RESERVED = frozenset((*SEQUENCE_KEYS, STRICT_JSON, "priority", "timeout", "binary_data_output", "headers"))


def check_forwarded(name: str) -> None:
    """Raises `InvalidRequest` for a reserved header name."""
    lower = name.lower()
    if lower in _RESERVED or lower.startswith(_TRITON):
        raise InvalidRequest(f"parameter '{name[:100]}' is reserved for Triton usage and can't be a forwarded header")


def custom_parameter(key: str, value: Any, within: str = "") -> Any:
    """Returns a backend's parameter; errors begin with `within`."""
    if key.startswith(_TRITON):
        raise InvalidRequest(
            f"{within}parameter keys starting with 'triton_' are reserved for Triton usage and should not be specified."
        )
    if isinstance(value, str | bool | float) or (isinstance(value, int) and -(2**63) <= value < 2**63):
        return value
    raise InvalidRequest(
        f"{within}parameter '{key}' has invalid type. It should be either 'int', 'bool', 'double' or 'string'."
    )


def _strict(value: Any) -> bool:
    if not isinstance(value, bool):
        raise InvalidRequest(f"parameter '{STRICT_JSON}' is {str(value)[:40]!r}; it is true or false")
    return value


def _of_sequence(key: str, value: Any) -> Any:
    if key == STEP:
        if type(value) is not int or not 0 < value < 2**53:
            raise InvalidRequest(
                f"parameter '{STEP}' is {str(value)[:40]!r}; number the requests of a sequence 1, 2, …"
            )
        return value
    if key == "sequence_id":
        _require(_is_unsigned(value) or isinstance(value, str), key, _NOT_STRING)
        return value
    return _boolean(key, value)


def _put_sequence(sequence: dict[str, Any], fields: dict[str, Any]) -> None:
    if sequence.get("id"):
        fields["sequence"] = SequenceFlags(**sequence)
    elif "step" in sequence:
        raise InvalidRequest(f"parameter '{STEP}' numbers the requests of a sequence: send 'sequence_id' with it")


def _unsigned(key: str, value: Any) -> int:
    _require(_is_unsigned(value), key, _NOT_UNSIGNED)
    return int(value)


def _boolean(key: str, value: Any) -> bool:
    _require(isinstance(value, bool), key, _NOT_BOOLEAN)
    return bool(value)


def _is_unsigned(value: Any) -> bool:
    return type(value) is int and 0 <= value < 2**64


def _string(fields: Mapping[str, Any], name: str) -> str:
    if name not in fields:
        raise _missing(name)
    value = fields[name]
    _require(isinstance(value, str), name, _NOT_STRING)
    return str(value)


def _array(fields: Mapping[str, Any], name: str) -> list[Any]:
    if name not in fields:
        raise _missing(name)
    value = fields[name]
    _require(isinstance(value, list), name, _NOT_ARRAY)
    return list(value)


def _missing(name: str) -> MalformedJson:
    return MalformedJson(f"Unable to parse '{name}': attempt to access non-existing object member '{name}'")


def _require(good: bool, name: str, text: str) -> None:  # noqa: FBT001  # private; reads as an assertion
    if not good:
        raise MalformedJson(f"Unable to parse '{name}': {text}")
