"""The calls of the model repository extension (reference §1.14, §2.1)."""

import asyncio
from collections.abc import Mapping
from typing import Any

from tritonclient.grpc import service_pb2 as pb

from qinfer.core.api_keys import Scope
from qinfer.errors import InvalidRequest, UnsupportedFeature
from qinfer.models.control import ModelControl
from qinfer_api.rpc.calls import Guard, Handler

_GROUP = "model-repository"
_FILE = "file:"


def repository_calls(guard: Guard, models: ModelControl) -> dict[str, Handler]:
    """Returns the handlers: name → handler."""

    async def index(request: Any) -> Any:
        _check_repository(request)
        found = await models.index(ready=request.ready)
        return pb.RepositoryIndexResponse(
            models=[
                pb.RepositoryIndexResponse.ModelIndex(
                    name=entry.name, version=entry.version, state=entry.state, reason=entry.reason
                )
                for entry in found
            ]
        )

    async def load(request: Any) -> Any:
        _check_repository(request)
        config, files = await asyncio.to_thread(_overrides, request.parameters)  # the files are copied
        await models.load(request.model_name, config, files)
        return pb.RepositoryModelLoadResponse()

    async def unload(request: Any) -> Any:
        _check_repository(request)
        dependents = False
        for name, parameter in request.parameters.items():
            if name == "unload_dependents":
                dependents = _of_kind(name, parameter, "bool_param")
        await models.unload(request.model_name, unload_dependents=dependents)
        return pb.RepositoryModelUnloadResponse()

    return {
        "RepositoryIndex": guard.unary(pb.RepositoryIndexRequest, index, _GROUP),
        "RepositoryModelLoad": guard.unary(pb.RepositoryModelLoadRequest, load, _GROUP, Scope.ADMIN),
        "RepositoryModelUnload": guard.unary(pb.RepositoryModelUnloadRequest, unload, _GROUP, Scope.ADMIN),
    }


def _check_repository(request: Any) -> None:
    if request.repository_name:
        raise UnsupportedFeature("'repository_name' specification is not supported")


def _overrides(parameters: Mapping[str, Any]) -> tuple[str | None, dict[str, bytes]]:
    """Returns the configuration and the files that come with a load request."""
    config: str | None = None
    files: dict[str, bytes] = {}
    for name, parameter in parameters.items():
        if name == "config":
            config = _of_kind(name, parameter, "string_param")
        elif name.startswith(_FILE):
            files[name.removeprefix(_FILE)] = _of_kind(name, parameter, "bytes_param")
        else:
            raise InvalidRequest(f"unrecognized load parameter '{name[:100]}'; 'config' and 'file:…' are known")
    return config, files


def _of_kind(name: str, parameter: Any, kind: str) -> Any:
    if parameter.WhichOneof("parameter_choice") != kind:
        raise InvalidRequest(f"invalid value type for load parameter '{name[:100]}', expected {kind}.")
    return getattr(parameter, kind)
