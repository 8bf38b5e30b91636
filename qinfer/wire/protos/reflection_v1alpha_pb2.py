"""Messages of grpc_reflection/v1alpha/reflection.proto; written by scripts/generate_protos.py."""

from typing import TYPE_CHECKING, Any

from google.protobuf import descriptor_pool
from google.protobuf.internal import builder

if TYPE_CHECKING:

    def __getattr__(name: str) -> Any: ...


DESCRIPTOR = descriptor_pool.Default().AddSerializedFile(
    b"\n(grpc_reflection/v1alpha/reflection.pro"
    b'to\x12\x17grpc.reflection.v1alpha"\x8a\x02\n\x17ServerRe'
    b"flectionRequest\x12\x0c\n\x04host\x18\x01 \x01(\t\x12\x1a\n\x10file_by"
    b"_filename\x18\x03 \x01(\tH\x00\x12 \n\x16file_containing_sym"
    b"bol\x18\x04 \x01(\tH\x00\x12N\n\x19file_containing_extension"
    b"\x18\x05 \x01(\x0b2).grpc.reflection.v1alpha.Extensi"
    b"onRequestH\x00\x12'\n\x1dall_extension_numbers_of_"
    b"type\x18\x06 \x01(\tH\x00\x12\x17\n\rlist_services\x18\x07 \x01(\tH\x00B\x11\n"
    b'\x0fmessage_request"E\n\x10ExtensionRequest\x12\x17\n\x0f'
    b"containing_type\x18\x01 \x01(\t\x12\x18\n\x10extension_numbe"
    b'r\x18\x02 \x01(\x05"\xd1\x03\n\x18ServerReflectionResponse\x12\x12\n\n'
    b"valid_host\x18\x01 \x01(\t\x12J\n\x10original_request\x18\x02 \x01"
    b"(\x0b20.grpc.reflection.v1alpha.ServerRefle"
    b"ctionRequest\x12S\n\x18file_descriptor_response"
    b"\x18\x04 \x01(\x0b2/.grpc.reflection.v1alpha.FileDes"
    b"criptorResponseH\x00\x12Z\n\x1eall_extension_numbe"
    b"rs_response\x18\x05 \x01(\x0b20.grpc.reflection.v1al"
    b"pha.ExtensionNumberResponseH\x00\x12N\n\x16list_se"
    b"rvices_response\x18\x06 \x01(\x0b2,.grpc.reflection."
    b"v1alpha.ListServiceResponseH\x00\x12@\n\x0eerror_r"
    b"esponse\x18\x07 \x01(\x0b2&.grpc.reflection.v1alpha."
    b'ErrorResponseH\x00B\x12\n\x10message_response"7\n\x16F'
    b"ileDescriptorResponse\x12\x1d\n\x15file_descriptor"
    b'_proto\x18\x01 \x03(\x0c"K\n\x17ExtensionNumberResponse\x12'
    b"\x16\n\x0ebase_type_name\x18\x01 \x01(\t\x12\x18\n\x10extension_num"
    b'ber\x18\x02 \x03(\x05"P\n\x13ListServiceResponse\x129\n\x07serv'
    b"ice\x18\x01 \x03(\x0b2(.grpc.reflection.v1alpha.Serv"
    b'iceResponse"\x1f\n\x0fServiceResponse\x12\x0c\n\x04name\x18\x01'
    b' \x01(\t":\n\rErrorResponse\x12\x12\n\nerror_code\x18\x01 \x01('
    b"\x05\x12\x15\n\rerror_message\x18\x02 \x01(\t2\x93\x01\n\x10ServerRefle"
    b"ction\x12\x7f\n\x14ServerReflectionInfo\x120.grpc.ref"
    b"lection.v1alpha.ServerReflectionRequest\x1a"
    b"1.grpc.reflection.v1alpha.ServerReflecti"
    b"onResponse(\x010\x01b\x06proto3"
)

builder.BuildMessageAndEnumDescriptors(DESCRIPTOR, globals())
builder.BuildTopDescriptorsAndMessages(DESCRIPTOR, __name__, globals())
