"""Messages of grpc_reflection/v1/reflection.proto; written by scripts/generate_protos.py."""

from typing import TYPE_CHECKING, Any

from google.protobuf import descriptor_pool
from google.protobuf.internal import builder

if TYPE_CHECKING:

    def __getattr__(name: str) -> Any: ...


DESCRIPTOR = descriptor_pool.Default().AddSerializedFile(
    b"\n#grpc_reflection/v1/reflection.proto\x12\x12g"
    b'rpc.reflection.v1"\x85\x02\n\x17ServerReflectionRe'
    b"quest\x12\x0c\n\x04host\x18\x01 \x01(\t\x12\x1a\n\x10file_by_filename\x18"
    b"\x03 \x01(\tH\x00\x12 \n\x16file_containing_symbol\x18\x04 \x01(\tH"
    b"\x00\x12I\n\x19file_containing_extension\x18\x05 \x01(\x0b2$.g"
    b"rpc.reflection.v1.ExtensionRequestH\x00\x12'\n\x1d"
    b"all_extension_numbers_of_type\x18\x06 \x01(\tH\x00\x12\x17\n"
    b"\rlist_services\x18\x07 \x01(\tH\x00B\x11\n\x0fmessage_reques"
    b't"E\n\x10ExtensionRequest\x12\x17\n\x0fcontaining_type'
    b'\x18\x01 \x01(\t\x12\x18\n\x10extension_number\x18\x02 \x01(\x05"\xb8\x03\n\x18Ser'
    b"verReflectionResponse\x12\x12\n\nvalid_host\x18\x01 \x01("
    b"\t\x12E\n\x10original_request\x18\x02 \x01(\x0b2+.grpc.refle"
    b"ction.v1.ServerReflectionRequest\x12N\n\x18file"
    b"_descriptor_response\x18\x04 \x01(\x0b2*.grpc.reflec"
    b"tion.v1.FileDescriptorResponseH\x00\x12U\n\x1eall_"
    b"extension_numbers_response\x18\x05 \x01(\x0b2+.grpc."
    b"reflection.v1.ExtensionNumberResponseH\x00\x12"
    b"I\n\x16list_services_response\x18\x06 \x01(\x0b2'.grpc.r"
    b"eflection.v1.ListServiceResponseH\x00\x12;\n\x0eer"
    b"ror_response\x18\x07 \x01(\x0b2!.grpc.reflection.v1."
    b'ErrorResponseH\x00B\x12\n\x10message_response"7\n\x16F'
    b"ileDescriptorResponse\x12\x1d\n\x15file_descriptor"
    b'_proto\x18\x01 \x03(\x0c"K\n\x17ExtensionNumberResponse\x12'
    b"\x16\n\x0ebase_type_name\x18\x01 \x01(\t\x12\x18\n\x10extension_num"
    b'ber\x18\x02 \x03(\x05"K\n\x13ListServiceResponse\x124\n\x07serv'
    b"ice\x18\x01 \x03(\x0b2#.grpc.reflection.v1.ServiceRe"
    b'sponse"\x1f\n\x0fServiceResponse\x12\x0c\n\x04name\x18\x01 \x01(\t"'
    b":\n\rErrorResponse\x12\x12\n\nerror_code\x18\x01 \x01(\x05\x12\x15\n\r"
    b"error_message\x18\x02 \x01(\t2\x89\x01\n\x10ServerReflection"
    b"\x12u\n\x14ServerReflectionInfo\x12+.grpc.reflecti"
    b"on.v1.ServerReflectionRequest\x1a,.grpc.ref"
    b"lection.v1.ServerReflectionResponse(\x010\x01b"
    b"\x06proto3"
)

builder.BuildMessageAndEnumDescriptors(DESCRIPTOR, globals())
builder.BuildTopDescriptorsAndMessages(DESCRIPTOR, __name__, globals())
