"""Server reflection of a real gateway: what grpcurl and its like read before they call."""

import asyncio
from collections.abc import Callable, Iterable
from pathlib import Path
from types import ModuleType
from typing import Any

import grpc
import pytest
from google.protobuf.descriptor_pb2 import FileDescriptorProto
from google.protobuf.descriptor_pool import DescriptorPool
from google.protobuf.message_factory import GetMessageClass
from grpc_reflection.v1alpha.proto_reflection_descriptor_database import ProtoReflectionDescriptorDatabase

from qinfer.core.api_keys import hash_key
from qinfer.wire.protos import reflection_v1_pb2, reflection_v1alpha_pb2
from qinfer_api.rpc.reflection import MAX_REQUEST_BYTES
from tests.support.rpc import Rpc, infer_request, rpc, value_of

SERVICES = [
    "grpc.health.v1.Health",
    "grpc.reflection.v1.ServerReflection",
    "grpc.reflection.v1alpha.ServerReflection",
    "inference.GRPCInferenceService",
]
NOT_FOUND, INVALID_ARGUMENT = 5, 3


def info(server: Rpc, messages: ModuleType = reflection_v1_pb2) -> Callable[..., Any]:
    """Returns the bidirectional call of a version of reflection."""
    service = messages.DESCRIPTOR.services_by_name["ServerReflection"]
    call: Callable[..., Any] = server.channel.stream_stream(
        f"/{service.full_name}/ServerReflectionInfo",
        request_serializer=messages.ServerReflectionRequest.SerializeToString,
        response_deserializer=messages.ServerReflectionResponse.FromString,
    )
    return call


async def ask(server: Rpc, *requests: dict[str, Any], messages: ModuleType = reflection_v1_pb2) -> list[Any]:
    """Returns the replies to requests that one call sends."""
    sent = (messages.ServerReflectionRequest(**request) for request in requests)
    return [reply async for reply in info(server, messages)(sent)]


def names(reply: Any) -> list[str]:
    """Returns the names of the files of a reply."""
    return [FileDescriptorProto.FromString(file).name for file in reply.file_descriptor_response.file_descriptor_proto]


@pytest.mark.parametrize("messages", [reflection_v1_pb2, reflection_v1alpha_pb2])
async def test_both_versions_answer_all_requests_of_a_call_in_order(messages: ModuleType) -> None:
    async with rpc() as server:
        requests: list[dict[str, Any]] = [
            {"host": "here", "list_services": ""},
            {"file_by_filename": "model_config.proto"},
            {"file_containing_symbol": "inference.ModelInferRequest.InferInputTensor"},
        ]
        services, file, symbol = await ask(server, *requests, messages=messages)

    assert [service.name for service in services.list_services_response.service] == SERVICES
    assert services.valid_host == "here"
    assert services.original_request == messages.ServerReflectionRequest(**requests[0])
    assert names(file) == ["model_config.proto"]
    assert names(symbol) == ["grpc_service.proto", "model_config.proto"]


@pytest.mark.parametrize(
    ("symbol", "file"),
    [
        ("inference.GRPCInferenceService", "grpc_service.proto"),
        ("inference.GRPCInferenceService.ModelInfer", "grpc_service.proto"),
        ("inference.ModelInferRequest.model_name", "grpc_service.proto"),
        ("inference.DataType", "model_config.proto"),
        ("inference.TYPE_FP32", "model_config.proto"),
        ("grpc.health.v1.Health", "grpc_health/v1/health.proto"),
        ("grpc.reflection.v1.ServerReflection", "grpc_reflection/v1/reflection.proto"),
        ("grpc.reflection.v1alpha.ServerReflection", "grpc_reflection/v1alpha/reflection.proto"),
    ],
)
async def test_symbols_of_all_kinds_are_found(symbol: str, file: str) -> None:
    async with rpc() as server:
        (reply,) = await ask(server, {"file_containing_symbol": symbol})

    assert names(reply)[0] == file


@pytest.mark.parametrize(
    "request_",
    [
        {"file_by_filename": "other.proto"},
        {"file_by_filename": ""},
        {"file_containing_symbol": "inference.Nothing"},
        {"file_containing_symbol": "inference.GRPCInferenceService.Nothing"},
        {"file_containing_symbol": "ü\0x"},
        {"file_containing_extension": {"containing_type": "inference.ModelInferRequest", "extension_number": 7}},
        {"file_containing_extension": {"containing_type": "inference.Nothing", "extension_number": -1}},
        {"all_extension_numbers_of_type": "inference.Nothing"},
    ],
)
async def test_what_is_not_there_is_an_answer_and_the_call_goes_on(request_: dict[str, Any]) -> None:
    async with rpc() as server:
        nothing, services = await ask(server, request_, {"list_services": ""})

    assert nothing.error_response.error_code == NOT_FOUND
    assert nothing.original_request == reflection_v1_pb2.ServerReflectionRequest(**request_)
    assert len(services.list_services_response.service) == len(SERVICES)


async def test_extensions_are_found() -> None:
    """Triton's messages have none; those of the files that protobuf itself has loaded are served as well."""
    pool: Any = reflection_v1_pb2.DESCRIPTOR.pool
    file = FileDescriptorProto(name="extensions.proto", package="tests.extended", syntax="proto2")
    file.message_type.add(name="Open").extension_range.add(start=100, end=200)
    for name, number in (("second", 120), ("first", 110)):
        file.extension.add(name=name, number=number, label=1, type=5, extendee=".tests.extended.Open")
    pool.AddSerializedFile(file.SerializeToString())
    extension = {"containing_type": "tests.extended.Open", "extension_number": 110}

    async with rpc() as server:
        found, numbers, none = await ask(
            server,
            {"file_containing_extension": extension},
            {"all_extension_numbers_of_type": "tests.extended.Open"},
            {"all_extension_numbers_of_type": "inference.ModelInferRequest"},
        )

    assert names(found) == ["extensions.proto"]
    assert numbers.all_extension_numbers_response.base_type_name == "tests.extended.Open"
    assert list(numbers.all_extension_numbers_response.extension_number) == [110, 120]
    assert none.WhichOneof("message_response") == "all_extension_numbers_response"
    assert not none.all_extension_numbers_response.extension_number


async def test_an_empty_request_is_an_error_of_its_own() -> None:
    async with rpc() as server:
        (reply,) = await ask(server, {})

    assert reply.error_response.error_code == INVALID_ARGUMENT
    assert "list_services" in reply.error_response.error_message


async def test_a_client_without_definitions_makes_calls() -> None:
    """What reflection gives suffices to build messages, as grpcurl does: here in a pool that knows nothing else."""

    def build(target: str) -> tuple[list[str], Any, Any]:
        with grpc.insecure_channel(target) as channel:
            database = ProtoReflectionDescriptorDatabase(channel)
            pool = DescriptorPool(database)
            service = pool.FindServiceByName("inference.GRPCInferenceService")
            method = service.FindMethodByName("ModelInfer")
            kinds = [GetMessageClass(kind) for kind in (method.input_type, method.output_type)]
            call = channel.unary_unary(
                f"/{service.full_name}/{method.name}",
                request_serializer=kinds[0].SerializeToString,
                response_deserializer=kinds[1].FromString,
            )
            request = kinds[0].FromString(infer_request(value=3.0).SerializeToString())
            return sorted(database.get_services()), request, call(request)

    async with rpc() as server:
        services, request, reply = await asyncio.to_thread(build, server.running.grpc_target)

    assert services == SERVICES
    assert request.model_name == "echo"
    assert value_of(reply) == 3.0


async def code_of(server: Rpc, requests: Iterable[Any] | None, metadata: Any = None) -> str:
    """Returns the status of a call, and reads its replies; without requests, one that is refused by its head."""
    call = info(server)(None if requests is None else iter(requests), metadata=metadata)
    try:
        if requests is None:
            await call.read()
        async for _ in call:
            pass
    except grpc.aio.AioRpcError as error:
        return error.code().name
    return str((await call.code()).name)


async def test_a_request_that_is_too_large_or_none_ends_the_call() -> None:
    large = reflection_v1_pb2.ServerReflectionRequest(file_by_filename="x" * MAX_REQUEST_BYTES)
    raw = f"/{SERVICES[1]}/ServerReflectionInfo"

    async with rpc() as server:
        too_large = await code_of(server, [large])
        garbage = server.channel.stream_stream(raw)(iter([b"\xff"]))
        with pytest.raises(grpc.aio.AioRpcError) as error:
            await garbage.read()
        empty = await code_of(server, [])

    assert too_large == "RESOURCE_EXHAUSTED"
    assert error.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert empty == "OK"


async def test_thousands_of_requests_on_one_call_are_answered_while_others_are_served() -> None:
    """The replies, 19 KB each, wait for their client, and no reply of another call waits for them."""
    request = reflection_v1_pb2.ServerReflectionRequest(file_containing_symbol="inference.DataType")

    async with rpc() as server:
        call = info(server)([request] * 3000)
        reply = await server.stub.ModelInfer(infer_request())
        count = len([answer async for answer in call if names(answer) == ["model_config.proto"]])

    assert value_of(reply) == 1.0
    assert count == 3000


async def test_it_asks_for_what_metadata_asks_for(tmp_path: Path) -> None:
    """A key of scope `infer` where keys are required, and the secret where the group `metadata` is restricted."""
    path = tmp_path / "keys.json"
    digest = hash_key("the-key")
    path.write_text(f'{{"keys": [{{"id": "k", "tenant": "t", "sha256": "{digest}", "scopes": ["infer"]}}]}}')
    request = [reflection_v1_pb2.ServerReflectionRequest(list_services="")]

    async with rpc(auth={"mode": "keys", "keys_file": str(path)}) as server:
        without = await code_of(server, None)
        bearer = await code_of(server, request, (("authorization", "Bearer the-key"),))
        plain = await code_of(server, request, (("x-api-key", "the-key"),))
    async with rpc({"restricted": ["metadata:secret=s3"]}) as server:
        restricted = await code_of(server, None)
        allowed = await code_of(server, request, (("triton-grpc-protocol-secret", "s3"),))

    assert [without, bearer, plain] == ["UNAUTHENTICATED", "OK", "OK"]
    assert [restricted, allowed] == ["UNAVAILABLE", "OK"]
