"""Server reflection (gRPC's doc/server-reflection.md), for clients such as grpcurl.

v1 and v1alpha differ only by the package name, which is not on the wire.
"""

import asyncio
from collections.abc import Callable, Iterator
from functools import lru_cache
from typing import Any

from google.protobuf import descriptor_pool

from qinfer.core.api_keys import Scope
from qinfer.wire.protos import reflection_v1_pb2 as pb
from qinfer.wire.protos import reflection_v1alpha_pb2
from qinfer_api.rpc.calls import CallGuard, parse
from qinfer_api.rpc.headers import Method
from qinfer_api.rpc.protocol import GrpcCall
from qinfer_api.status import GRPC_CODES

MAX_REQUEST_BYTES = 4096

_METHOD = "ServerReflectionInfo"
_NOT_FOUND, _INVALID_ARGUMENT = GRPC_CODES.index("NOT_FOUND"), GRPC_CODES.index("INVALID_ARGUMENT")
_CACHED_FILES = 64
_MAX_SHOWN = 200


def reflection_methods(guard: CallGuard, services: tuple[str, ...]) -> dict[str, Method]:
    """Returns the reflection methods by path; `services` are the names of other services."""
    own = [module.DESCRIPTOR.services_by_name["ServerReflection"].full_name for module in (pb, reflection_v1alpha_pb2)]
    reflection = _Reflection([*services, *own])
    method = guard.method(
        lambda call, _: call.run(reflection.serve(call), has_deadline=True), "metadata", Scope.INFER, takes_stream=True
    )._replace(max_message_bytes=MAX_REQUEST_BYTES, is_awaited=False)
    return {f"/{name}/{_METHOD}": method for name in own}


class _Reflection:
    """Answers from protobuf's default pool."""

    def __init__(self, services: list[str]) -> None:
        self._services = sorted(services)
        self._pool: Any = descriptor_pool.Default()
        self._with_imports = lru_cache(_CACHED_FILES)(lambda name: tuple(_files(self._pool.FindFileByName(name))))
        self._answers: dict[str, Callable[[Any], dict[str, Any]]] = {
            "file_by_filename": lambda name: self._file(self._pool.FindFileByName(name)),
            "file_containing_symbol": self._file_of_symbol,
            "file_containing_extension": self._file_of_extension,
            "all_extension_numbers_of_type": self._extension_numbers,
            "list_services": self._list_services,
        }

    async def serve(self, call: GrpcCall) -> None:
        while (blob := await call.read()) is not None:
            reply = self._reply(parse(pb.ServerReflectionRequest, blob))
            await call.write((reply.SerializeToString(),))
            await asyncio.sleep(0)  # thousands may have come at once
        call.finish_stream()

    def _reply(self, request: Any) -> Any:
        kind = request.WhichOneof("message_request")
        if kind is None:
            answer = _error(_INVALID_ARGUMENT, f"the request is empty; it must have one of {', '.join(self._answers)}")
        else:
            wanted = getattr(request, kind)
            try:
                answer = self._answers[kind](wanted)
            except KeyError:
                shown = str(wanted).strip()[:_MAX_SHOWN]
                answer = _error(_NOT_FOUND, f"{kind} '{shown}' is not known; list_services says what is served")
        return pb.ServerReflectionResponse(valid_host=request.host, original_request=request, **answer)

    def _file(self, file: Any) -> dict[str, Any]:
        return {"file_descriptor_response": {"file_descriptor_proto": self._with_imports(file.name)}}

    def _file_of_symbol(self, name: str) -> dict[str, Any]:
        try:
            return self._file(self._pool.FindFileContainingSymbol(name))
        except KeyError:  # the pool does not search methods
            return self._file(self._pool.FindMethodByName(name).containing_service.file)

    def _file_of_extension(self, wanted: Any) -> dict[str, Any]:
        extended = self._pool.FindMessageTypeByName(wanted.containing_type)
        return self._file(self._pool.FindExtensionByNumber(extended, wanted.extension_number).file)

    def _extension_numbers(self, name: str) -> dict[str, Any]:
        extensions = self._pool.FindAllExtensions(self._pool.FindMessageTypeByName(name))
        numbers = sorted(extension.number for extension in extensions)
        return {"all_extension_numbers_response": {"base_type_name": name, "extension_number": numbers}}

    def _list_services(self, _: str) -> dict[str, Any]:
        return {"list_services_response": {"service": [{"name": name} for name in self._services]}}


def _files(first: Any) -> Iterator[bytes]:
    found = {first.name: first}
    waiting = [first]
    while waiting:
        file = waiting.pop(0)
        yield file.serialized_pb
        new = [other for other in file.dependencies if other.name not in found]
        found.update((other.name, other) for other in new)
        waiting.extend(new)


def _error(code: int, message: str) -> dict[str, Any]:
    return {"error_response": {"error_code": code, "error_message": message}}
