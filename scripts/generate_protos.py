"""Writes the descriptors of gRPC's services from the packages that define them.

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


def reflection_v1() -> bytes:
    """Returns the reflection service's first version, which differs from v1alpha by its name alone."""
    text = str(FileDescriptorProto.FromString(reflection.DESCRIPTOR.serialized_pb))
    first = text_format.Parse(re.sub(r"v1alpha", "v1", text), FileDescriptorProto())
    return first.SerializeToString(deterministic=True)


def main() -> None:
    """Writes them all."""
    theirs = {
        "model_config": model_config,
        "grpc_service": grpc_service,
        "health": health,
        "reflection_v1alpha": reflection,
    }
    files = {name: module.DESCRIPTOR.serialized_pb for name, module in theirs.items()}
    for name, serialized in {**files, "reflection_v1": reflection_v1()}.items():
        (TARGET / f"{name}_pb2.binpb").write_bytes(serialized)


if __name__ == "__main__":
    main()
