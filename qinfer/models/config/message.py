"""The `ModelConfig` message, and its JSON.

The dialect of `GET …/config` (reference §2.5): proto field names stay snake_case; scalar and repeated fields are
always present; absent sub-messages are left out; 64-bit integers are JSON numbers (protobuf's own JSON has strings,
which perf_analyzer can't read); enums are names.
"""

import functools
import json
import re
import struct
from collections.abc import Iterable, Iterator
from difflib import get_close_matches
from typing import TYPE_CHECKING, Any

from google.protobuf import json_format
from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.message import Message

from qinfer.errors import ModelLoadFailed, RequestError
from qinfer.tensors import CONFIG_DATATYPES
from qinfer.wire.json_scan import LARGE_BYTES, check_size
from qinfer.wire.protos import model_config_pb2

if TYPE_CHECKING:
    ModelConfig = Any
else:
    ModelConfig = model_config_pb2.ModelConfig

__all__ = [
    "ModelConfig",
    "advised",
    "from_json",
    "model_config_pb2",
    "preferred_size_problems",
    "tensor_problems",
    "to_json",
    "unnamed",
    "wire_datatype",
]

_UNKNOWN = (  # words of protobuf's text format and JSON
    re.compile(r'Message type "(?P<of>[\w.]+)" has no field named "(?P<field>[^"]+)"'),
    re.compile(r'Enum type "(?P<of>[\w.]+)" has no value named "?(?P<value>[^".]+)'),
    re.compile(r"Invalid enum value (?P<value>\S+) for enum type (?P<of>[\w.]+)"),
)
_OTHER_WORDS = {
    "FLOAT": "FP32", "FLOAT32": "FP32", "HALF": "FP16", "FLOAT16": "FP16", "DOUBLE": "FP64", "FLOAT64": "FP64",
    "BFLOAT16": "BF16", "INT": "INT32", "LONG": "INT64", "BOOLEAN": "BOOL", "BYTES": "STRING", "STR": "STRING",
}  # fmt: skip
_LONGEST_COMPARED = 100  # characters: the comparison is slow
_MOST_LISTED = 16
_MAX_DEPTH, _MAX_BYTES = 100, 32 * 2**20


def to_json(config: ModelConfig) -> str:
    """Prints a configuration in the dialect of `GET …/config`."""
    return json.dumps(_object(config), separators=(",", ":"))


def from_json(text: str) -> ModelConfig:
    """Reads the text of `to_json`, or raises `ModelLoadFailed`; integers may be strings."""
    if len(text) > LARGE_BYTES:
        _check_size(text)
    try:
        fields = json.loads(text.removeprefix("\ufeff"))
        if not isinstance(fields, dict):
            raise ModelLoadFailed(f"model configuration is not valid JSON: expected an object, got {text[:50]}")
        json.dumps(fields, ensure_ascii=False).encode()  # half a surrogate pair makes protobuf fail with SystemError
        return json_format.ParseDict(_listed(fields), ModelConfig())
    except (json_format.ParseError, ValueError, TypeError, RecursionError) as error:  # ParseDict lets some escape
        reason = str(error).partition("\n")[0].rpartition("Failed to parse ")[2].rstrip(".")
        raise ModelLoadFailed(f"model configuration is not valid JSON: {advised(reason)}") from None


def _listed(fields: dict[str, Any]) -> dict[str, Any]:
    """Protobuf's C++ parser accepts a single object for a list."""
    return {name: [value] if name in _lists() and isinstance(value, dict) else value for name, value in fields.items()}


@functools.cache
def _lists() -> frozenset[str]:
    return frozenset(
        name
        for of in ModelConfig.DESCRIPTOR.fields
        if of.is_repeated and of.message_type is not None and not of.message_type.GetOptions().map_entry
        for name in (of.name, of.json_name)
    )


def _check_size(text: str) -> None:
    try:
        check_size(text.encode(errors="surrogatepass"), _MAX_DEPTH, _MAX_BYTES, "none: no configuration is so large")
    except RequestError as error:
        raise ModelLoadFailed(f"model configuration is not valid JSON: {error.message}") from None


def advised(reason: str) -> str:
    """Returns protobuf's reason for refusing a text, with a suggestion."""
    for pattern in _UNKNOWN:
        found = pattern.search(reason)
        if found is not None:
            said = found.groupdict()
            advice = _near_field if "field" in said else _near_value
            hint = advice(said["of"], said.get("field") or said["value"])
            return f"{reason.rstrip('.')}; {hint}" if hint else reason
    return reason


def _near_field(message: str, unknown: str) -> str:
    fields = list(ModelConfig.DESCRIPTOR.file.pool.FindMessageTypeByName(message).fields_by_name)
    everywhere = model_config_pb2.DESCRIPTOR.message_types_by_name.values()
    elsewhere = [of.full_name for of in everywhere if unknown in of.fields_by_name]
    if len(elsewhere) == 1 and (path := _path_to(elsewhere[0])):
        return f"it is a field of '{path}'"
    near = _nearest(re.sub(r"(?<=[a-z])(?=[A-Z])", "_", unknown).lower(), fields)
    if near:
        return f"did you mean '{near}'?"
    return f"it has {', '.join(fields)}" if len(fields) <= _MOST_LISTED else ""


def _near_value(enum: str, unknown: str) -> str:
    values = list(ModelConfig.DESCRIPTOR.file.pool.FindEnumTypeByName(enum).values_by_name)
    by_word = {value.rpartition("_")[2] if "_" in value else value: value for value in values}
    word = unknown.upper().rpartition("_")[2]
    near = by_word.get(_OTHER_WORDS.get(word, word)) or _nearest(unknown.upper(), values)
    return f"did you mean '{near}'?" if near else f"it has {', '.join(values)}"


def _nearest(unknown: str, known: list[str]) -> str:
    return next(iter(get_close_matches(unknown[:_LONGEST_COMPARED], known, n=1)), "")


def _path_to(message: str) -> str:
    fields = ModelConfig.DESCRIPTOR.fields
    return next((f.name for f in fields if f.message_type is not None and f.message_type.full_name == message), "")


def unnamed(message: Message) -> str:
    """Returns the first enum number without a name, which protobuf accepts."""
    for field, value in message.ListFields():
        of = field.message_type
        values = value if field.is_repeated else (value,)
        if of is not None and of.GetOptions().map_entry:
            values = value.values() if of.fields_by_name["value"].message_type is not None else ()
        for one in values:
            if field.enum_type is not None and one not in field.enum_type.values_by_number:
                return (
                    f"{field.name} is {one}, which has no meaning; it has {', '.join(field.enum_type.values_by_name)}"
                )
            if of is not None and (found := unnamed(one)):
                return f"{field.name}.{found}"
    return ""


def wire_datatype(number: int) -> str:
    """Returns the wire's name of a `data_type`; empty for `TYPE_INVALID`."""
    datatype = CONFIG_DATATYPES.get(model_config_pb2.DataType.Name(number))
    return "" if datatype is None else datatype.name


def tensor_problems(where: str, tensor: Any) -> Iterator[str]:
    """Yields the mistakes in datatype and dimensions."""
    if tensor.data_type == model_config_pb2.TYPE_INVALID:
        yield f"{where} must specify 'data_type'"
    if not tensor.dims:
        yield f"{where} must specify 'dims'"
    if any(dim < 1 and dim != -1 for dim in tensor.dims):
        yield (
            f"{where} dimension must be integer >= 1, or -1 to indicate a variable-size dimension, "
            f"got {list(tensor.dims)}"
        )


def preferred_size_problems(what: str, sizes: Iterable[int], config: ModelConfig) -> Iterator[str]:
    """Yields the mistakes in the preferred sizes of a batcher."""
    for size in sizes:
        if size <= 0:
            yield f"{what} must be positive for {config.name}, got {size}"
        elif size > config.max_batch_size:
            yield f"{what} must be <= max batch size for {config.name}, got {size} > {config.max_batch_size}"


def _object(message: Message) -> dict[str, Any]:
    return {
        field.name: _field(message, field)
        for field in message.DESCRIPTOR.fields
        if not field.has_presence or message.HasField(field.name)
    }


def _field(message: Message, field: Any) -> Any:  # Any: the two descriptor classes share no type
    value = getattr(message, field.name)
    if field.message_type is not None and field.message_type.GetOptions().map_entry:
        value_field = field.message_type.fields_by_name["value"]
        return {str(key): _json_value(value[key], value_field) for key in sorted(value)}
    if field.is_repeated:
        return [_json_value(item, field) for item in value]
    return _json_value(value, field)


def _json_value(value: Any, field: Any) -> Any:
    if field.message_type is not None:
        return _object(value)
    if field.enum_type is not None:
        named = field.enum_type.values_by_number.get(value)
        return value if named is None else named.name
    if field.type == FieldDescriptor.TYPE_FLOAT:
        return _shortest_float32(value)
    return value


def _shortest_float32(value: float) -> float:
    """Returns the shortest double that is the same float32."""
    for digits in range(6, 9):
        short = float(f"{value:.{digits}g}")
        if struct.pack("f", short) == struct.pack("f", value):
            return short
    return value
