"""`/v2/repository/…`: which models there are, and loading and unloading them (reference §1.14)."""

import asyncio
import base64
import binascii
from typing import Any

import msgspec
from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response as HttpResponse

from qinfer.control.api_keys import Scope
from qinfer.control.models import IndexEntry
from qinfer.errors import InvalidRequest, MalformedJson, UnsupportedFeature
from qinfer_api.http.replies import Reply
from qinfer_api.rest.control_schema import INDEX, LOAD, UNLOAD
from qinfer_api.rest.json_body import JsonObject, read_object, take_bool, take_object
from qinfer_api.rest.services import Services, needs, restricted, send

_FILE = "file:"


def repository_routes(services: Services) -> APIRouter:
    """Returns the routes of the model repository extension."""
    router = APIRouter(tags=["model repository"], dependencies=restricted(services, "model-repository"))
    reading = [needs(services, Scope.INFER)]
    _add_control(router, services)

    @router.post("/v2/repository/index", name="repository_index", dependencies=reading, **INDEX)
    @router.post("/v2/repository/{repository}/index", dependencies=reading, include_in_schema=False)
    async def index(request: Request) -> HttpResponse:
        """Lists the models of the repositories, with the state of those that were ever loaded."""
        body = await read_object(services, request, may_be_empty=True)
        entries = await services.models.index(ready=take_bool(body, "ready"))
        return send(Reply(200, msgspec.json.encode([_shown(entry) for entry in entries])))

    return router


def _add_control(router: APIRouter, services: Services) -> None:
    controlling: dict[str, Any] = {"dependencies": [needs(services, Scope.ADMIN)]}
    hidden: dict[str, Any] = {**controlling, "include_in_schema": False}

    @router.post("/v2/repository/models/{model}/load", name="repository_load", **controlling, **LOAD)
    async def load(model: str, request: Request) -> HttpResponse:
        """Loads a model, or loads it anew; answers when it is ready."""
        body = await read_object(services, request, may_be_empty=True)
        config, files = await asyncio.to_thread(_overrides, take_object(body, "parameters"))
        await services.models.load(model, config, files)
        return send(Reply(200, b""))

    @router.post("/v2/repository/models/{model}/unload", name="repository_unload", **controlling, **UNLOAD)
    async def unload(model: str, request: Request) -> HttpResponse:
        """Unloads a model: from now on it takes no requests; what waits is still answered."""
        body = await read_object(services, request, may_be_empty=True)
        dependents = take_bool(take_object(body, "parameters"), "unload_dependents")
        await services.models.unload(model, unload_dependents=dependents)
        return send(Reply(200, b""))

    @router.post("/v2/repository/{repository}/models/{model}/load", **hidden)
    @router.post("/v2/repository/{repository}/models/{model}/unload", **hidden)
    async def in_repository() -> HttpResponse:
        """Refuses: models have one name over all repositories."""
        raise UnsupportedFeature("'repository_name' specification is not supported")


def _shown(entry: IndexEntry) -> dict[str, str]:
    members = {"name": entry.name, "version": entry.version, "state": entry.state, "reason": entry.reason}
    return {name: value for name, value in members.items() if value}


def _overrides(parameters: JsonObject) -> tuple[str | None, dict[str, bytes]]:
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
