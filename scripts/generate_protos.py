"""Writes the protobuf modules of gRPC's services from the packages that define them.

    python -m scripts.generate_protos

Files keep the names and the content that NVIDIA's and gRPC's own packages give them, so that protobuf takes both for
the same when both are loaded into one process.
"""

import re
from pathlib import Path

import grpc_health.v1.health_pb2 as health
import grpc_reflection.v1alpha.reflection_pb2 as reflection
import tritonclient.grpc.model_config_pb2 as model_config
import tritonclient.grpc.service_pb2 as grpc_service
from google.protobuf import text_format
from google.protobuf.descriptor_pb2 import FileDescriptorProto

TARGET = Path(__file__).parent.parent / "qinfer" / "wire" / "protos"

MODULE = '''"""Messages of {name}; written by scripts/generate_protos.py."""

from typing import TYPE_CHECKING, Any

from google.protobuf import descriptor_pool
from google.protobuf.internal import builder
{imports}
if TYPE_CHECKING:

    def __getattr__(name: str) -> Any: ...


DESCRIPTOR = descriptor_pool.Default().AddSerializedFile(
{content}
)

builder.BuildMessageAndEnumDescriptors(DESCRIPTOR, globals())
builder.BuildTopDescriptorsAndMessages(DESCRIPTOR, __name__, globals())
'''


def write(module: str, proto: FileDescriptorProto, serialized: bytes, imports: str = "") -> None:
    """Writes one module."""
    lines = "\n".join(f"    {serialized[at : at + 40]!r}" for at in range(0, len(serialized), 40))
    (TARGET / f"{module}.py").write_text(MODULE.format(name=proto.name, imports=imports, content=lines))


def parsed(serialized: bytes) -> FileDescriptorProto:
    """Returns the description of a file."""
    return FileDescriptorProto.FromString(serialized)


def reflection_v1() -> FileDescriptorProto:
    """Returns the reflection service's first version, which differs from v1alpha by its name alone."""
    text = str(parsed(reflection.DESCRIPTOR.serialized_pb))
    return text_format.Parse(re.sub(r"v1alpha", "v1", text), FileDescriptorProto())


def main() -> None:
    """Writes them all."""
    TARGET.mkdir(exist_ok=True)
    (TARGET / "__init__.py").write_text(
        '"""The protobuf messages of gRPC\'s services; see scripts/generate_protos.py."""\n'
    )
    for name, module in {"model_config": model_config, "health": health, "reflection_v1alpha": reflection}.items():
        serialized = module.DESCRIPTOR.serialized_pb
        write(f"{name}_pb2", parsed(serialized), serialized)
    first = reflection_v1()
    write("reflection_v1_pb2", first, first.SerializeToString(deterministic=True))
    serialized = grpc_service.DESCRIPTOR.serialized_pb
    imports = "\nfrom qinfer.wire.protos import model_config_pb2  # noqa: F401 - defines what it imports\n"
    write("grpc_service_pb2", parsed(serialized), serialized, imports)


if __name__ == "__main__":
    main()
