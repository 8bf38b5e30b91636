"""The protobuf messages of gRPC's services, made of the descriptors (`*.binpb`) that scripts/generate_protos.py writes.

`grpc_service_pb2` and the others have the names that protoc's modules have; each is loaded when it is first named.
"""

import sys
from pathlib import Path
from types import ModuleType
from typing import Any

from google.protobuf import descriptor_pool
from google.protobuf.internal import builder

_FOLDER = Path(__file__).parent
_IMPORTS = {"grpc_service_pb2": "model_config_pb2"}


def __getattr__(name: str) -> Any:
    path = _FOLDER / f"{name}.binpb"
    if not name.endswith("_pb2") or not path.exists():
        raise AttributeError(f"module '{__name__}' has no attribute '{name}'")
    if name in _IMPORTS and _IMPORTS[name] not in globals():
        __getattr__(_IMPORTS[name])
    module = ModuleType(f"{__name__}.{name}")
    descriptor = descriptor_pool.Default().AddSerializedFile(path.read_bytes())
    found = vars(module) | {"DESCRIPTOR": descriptor}
    builder.BuildMessageAndEnumDescriptors(descriptor, found)
    builder.BuildTopDescriptorsAndMessages(descriptor, module.__name__, found)
    vars(module).update(found)
    sys.modules[module.__name__] = module
    return globals().setdefault(name, module)
