"""The `ModelConfig` message that tritonclient ships, without the gRPC runtime that `import tritonclient.grpc` brings.

Two copies of protobuf package `inference` can't live in one process, so the message must be tritonclient's own. Its
package imports grpc and numpy on the way (0.2 s and 20 MB in every gateway and worker), so the generated module is
loaded by its file and registered under its own name: a later `import tritonclient.grpc` finds and shares it.

`to_json` and `from_json` are the JSON dialect of `GET …/config` (reference §2.5): proto field names stay snake_case;
scalar and repeated fields are always present; absent sub-messages are left out; 64-bit integers are JSON numbers
(protobuf's own JSON prints strings, which perf_analyzer can't read); enums are names.
"""

import importlib.util
import json
import struct
import sys
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

from google.protobuf import json_format
from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.message import Message

from qinfer.errors import ModelLoadFailed

if TYPE_CHECKING:
    from tritonclient.grpc import model_config_pb2
    from tritonclient.grpc.model_config_pb2 import ModelConfig

_NAME = "tritonclient.grpc.model_config_pb2"


def _load() -> ModuleType:
    if _NAME in sys.modules:
        return sys.modules[_NAME]
    package = importlib.util.find_spec("tritonclient")
    if package is None or not package.submodule_search_locations:
        raise ImportError("tritonclient is not installed; pip install 'tritonclient[grpc]'")
    path = Path(package.submodule_search_locations[0], "grpc", "model_config_pb2.py")
    spec = importlib.util.spec_from_file_location(_NAME, path)
    if spec is None or spec.loader is None:
        raise ImportError(f"{_NAME} can't be loaded; pip install 'tritonclient[grpc]'")
    module = importlib.util.module_from_spec(spec)
    sys.modules[_NAME] = module
    spec.loader.exec_module(module)
    return module


if not TYPE_CHECKING:
    model_config_pb2 = _load()
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
