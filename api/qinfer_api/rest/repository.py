"""`/v2/repository/…`: which models there are, and loading and unloading them (reference §1.14)."""

import asyncio
import base64
import binascii
from collections.abc import Mapping
from typing import Annotated, Any

import msgspec
from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response as HttpResponse

from qinfer.core.api_keys import Scope
from qinfer.errors import InvalidRequest, MalformedJson, UnsupportedFeature
from qinfer.models.control import IndexEntry
from qinfer_api.http.infer import Reply
from qinfer_api.rest.openapi import Json, answer, body, errors, operation
from qinfer_api.rest.services import Services, needs, read_json, restricted, send, send_json

_FILE = "file:"
_UNPARSED = "Unable to parse "


_LOAD_PARAMETERS: Json = {
    "properties": {"config": {"type": "string", "description": "A model configuration in JSON."}},
    "additionalProperties": {"type": "string", "description": "`file:<version>/<name>`: the file in base64."},
}


class IndexCall(msgspec.Struct, frozen=True):
    """A question for the index.

    Attributes:
        ready: Only versions that are ready.

    Example:
        {"ready": true}
    """

    ready: bool = False


class LoadCall(msgspec.Struct, frozen=True):
    r"""Parameters of loading a model.

    Example:
        {"parameters": {"config": "{\"max_batch_size\": 16}"}}
    """

    parameters: Annotated[dict[str, Any], msgspec.Meta(extra_json_schema=_LOAD_PARAMETERS)] = {}


class UnloadParameters(msgspec.Struct, frozen=True):
    """Parameters of unloading a model."""

    unload_dependents: bool = False


class UnloadCall(msgspec.Struct, frozen=True):
    """Parameters of unloading a model.

    Example:
        {"parameters": {"unload_dependents": false}}
    """

    parameters: UnloadParameters = UnloadParameters()


_REFUSALS = errors(400, 401, 403, 500, 501, 503)
_INDEX = operation(
    "List the models",
    {200: answer("The models.", list[IndexEntry]), **_REFUSALS},
    takes=body(IndexCall, required=False),
)
_LOAD = operation("Load a model", {200: answer("Done."), **_REFUSALS}, takes=body(LoadCall, required=False))
_UNLOAD = operation("Unload a model", {200: answer("Done."), **_REFUSALS}, takes=body(UnloadCall, required=False))


def repository_routes(services: Services) -> APIRouter:
    """Returns the routes of the model repository extension."""
    router = APIRouter(tags=["model repository"], dependencies=restricted(services, "model-repository"))
    reading = [needs(services, Scope.INFER)]
    _add_control(router, services)

    @router.post("/v2/repository/index", name="repository_index", dependencies=reading, **_INDEX)
    @router.post("/v2/repository/{repository}/index", dependencies=reading, include_in_schema=False)
    async def index(request: Request) -> HttpResponse:
        """Lists the models of the repositories, with the state of those that were ever loaded."""
        call = await read_json(services, request, IndexCall, prefix=_UNPARSED, may_be_empty=True)
        return send_json(await services.models.index(ready=call.ready))

    return router


def _add_control(router: APIRouter, services: Services) -> None:
    controlling: dict[str, Any] = {"dependencies": [needs(services, Scope.ADMIN)]}
    hidden: dict[str, Any] = {**controlling, "include_in_schema": False}

    @router.post("/v2/repository/models/{model}/load", name="repository_load", **controlling, **_LOAD)
    async def load(model: str, request: Request) -> HttpResponse:
        """Loads a model, or loads it anew; answers when it is ready."""
        call = await read_json(services, request, LoadCall, may_be_empty=True)
        config, files = await asyncio.to_thread(_overrides, call.parameters)
        await services.models.load(model, config, files)
        return send(Reply(200, b""))

    @router.post("/v2/repository/models/{model}/unload", name="repository_unload", **controlling, **_UNLOAD)
    async def unload(model: str, request: Request) -> HttpResponse:
        """Unloads a model: it accepts no more requests, and waiting requests are still answered."""
        call = await read_json(services, request, UnloadCall, prefix=_UNPARSED, may_be_empty=True)
        await services.models.unload(model, unload_dependents=call.parameters.unload_dependents)
        return send(Reply(200, b""))

    @router.post("/v2/repository/{repository}/models/{model}/load", **hidden)
    @router.post("/v2/repository/{repository}/models/{model}/unload", **hidden)
    async def in_repository() -> HttpResponse:
        """Refuses: models have one name over all repositories."""
        raise UnsupportedFeature("'repository_name' specification is not supported")


def _overrides(parameters: Mapping[str, Any]) -> tuple[str | None, dict[str, bytes]]:
    """Returns the configuration and the files that come with a load request."""
    config: str | None = None
    files: dict[str, bytes] = {}
    for name, value in parameters.items():
        if not isinstance(value, str):
            raise MalformedJson(f"'{name[:100]}': attempt to access JSON non-string as string")
        if name == "config":
            config = value
        elif name.startswith(_FILE):
            files[name.removeprefix(_FILE)] = _decoded(name, value)
        else:
            raise InvalidRequest(f"unrecognized load parameter '{name[:100]}'; 'config' and 'file:…' are known")
    return config, files


def _decoded(name: str, text: str) -> bytes:
    try:
        return base64.b64decode(text.replace("\n", "").replace("\r", ""), validate=True)
    except (binascii.Error, ValueError):
        raise InvalidRequest(f"load parameter '{name[:100]}' is no base64; encode the file's bytes with it") from None
