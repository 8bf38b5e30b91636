"""The `ModelConfig` message, and its JSON.

`to_json` and `from_json` are the JSON dialect of `GET …/config` (reference §2.5): proto field names stay snake_case;
scalar and repeated fields are always present; absent sub-messages are left out; 64-bit integers are JSON numbers
(protobuf's own JSON prints strings, which perf_analyzer can't read); enums are names.
"""

import json
import struct
from typing import TYPE_CHECKING, Any

from google.protobuf import json_format
from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.message import Message

from qinfer.errors import ModelLoadFailed
from qinfer.wire.protos import model_config_pb2

if TYPE_CHECKING:
    ModelConfig = Any
else:
    ModelConfig = model_config_pb2.ModelConfig

__all__ = ["ModelConfig", "from_json", "model_config_pb2", "to_json"]


def to_json(config: ModelConfig) -> str:
    """Prints a configuration in the dialect of `GET …/config`."""
    return json.dumps(_object(config), separators=(",", ":"))


def from_json(text: str) -> ModelConfig:
    """Reads what `to_json` printed; integers may also be strings, as in protobuf's own JSON.

    Raises:
        ModelLoadFailed: The text is no JSON, or has a field that ModelConfig has not.
    """
    try:
        fields = json.loads(text)
        if not isinstance(fields, dict):
            raise ModelLoadFailed(f"model configuration is not valid JSON: expected an object, got {text[:50]}")
        json.dumps(fields, ensure_ascii=False).encode()  # half a surrogate pair makes protobuf fail with SystemError
        return json_format.ParseDict(fields, ModelConfig())
    except (json_format.ParseError, ValueError, TypeError, RecursionError) as error:  # ParseDict lets some escape
        raise ModelLoadFailed(f"model configuration is not valid JSON: {error}") from None


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
        return {str(key): _value(value[key], value_field) for key in sorted(value)}
    if field.is_repeated:
        return [_value(item, field) for item in value]
    return _value(value, field)


def _value(value: Any, field: Any) -> Any:
    if field.message_type is not None:
        return _object(value)
    if field.enum_type is not None:
        named = field.enum_type.values_by_number.get(value)
        return value if named is None else named.name
    if field.type == FieldDescriptor.TYPE_FLOAT:
        return _shortest_float32(value)
    return value


def _shortest_float32(value: float) -> float:
    """Returns the double with the fewest digits that is the same float32: 0.1, not 0.10000000149011612."""
    for digits in range(6, 9):
        short = float(f"{value:.{digits}g}")
        if struct.pack("f", short) == struct.pack("f", value):
            return short
    return value
