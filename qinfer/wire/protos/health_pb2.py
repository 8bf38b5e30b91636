"""Messages of grpc_health/v1/health.proto; written by scripts/generate_protos.py."""

from typing import TYPE_CHECKING, Any

from google.protobuf import descriptor_pool
from google.protobuf.internal import builder

if TYPE_CHECKING:

    def __getattr__(name: str) -> Any: ...


DESCRIPTOR = descriptor_pool.Default().AddSerializedFile(
    b"\n\x1bgrpc_health/v1/health.proto\x12\x0egrpc.heal"
    b'th.v1"%\n\x12HealthCheckRequest\x12\x0f\n\x07service\x18\x01'
    b' \x01(\t"\xa9\x01\n\x13HealthCheckResponse\x12A\n\x06status\x18\x01'
    b" \x01(\x0e21.grpc.health.v1.HealthCheckRespons"
    b'e.ServingStatus"O\n\rServingStatus\x12\x0b\n\x07UNKN'
    b"OWN\x10\x00\x12\x0b\n\x07SERVING\x10\x01\x12\x0f\n\x0bNOT_SERVING\x10\x02\x12\x13\n\x0fS"
    b'ERVICE_UNKNOWN\x10\x032\xae\x01\n\x06Health\x12P\n\x05Check\x12".g'
    b"rpc.health.v1.HealthCheckRequest\x1a#.grpc."
    b'health.v1.HealthCheckResponse\x12R\n\x05Watch\x12"'
    b".grpc.health.v1.HealthCheckRequest\x1a#.grp"
    b"c.health.v1.HealthCheckResponse0\x01Ba\n\x11io."
    b"grpc.health.v1B\x0bHealthProtoP\x01Z,google.go"
    b"lang.org/grpc/health/grpc_health_v1\xaa\x02\x0eGr"
    b"pc.Health.V1b\x06proto3"
)

builder.BuildMessageAndEnumDescriptors(DESCRIPTOR, globals())
builder.BuildTopDescriptorsAndMessages(DESCRIPTOR, __name__, globals())
