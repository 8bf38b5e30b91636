"""`/v2/systemsharedmemory/…` and `/v2/cudasharedmemory/…`: what clients share with this gateway (reference §1.15).

Regions are used by infer requests, and registered by those who may make such: the scope is that of inference. CUDA's
are never taken: where shared memory is on there are just none of them, so that clients which clear both kinds at their
start can go on.
"""

import asyncio
from typing import Any

import msgspec
from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response as HttpResponse

from qinfer.codec.json_depth import check_depth
from qinfer.codec.kserve_exact import load
from qinfer.control.api_keys import Scope
from qinfer.errors import InvalidRequest, MalformedJson
from qinfer_api.http.replies import Reply
from qinfer_api.rest.bodies import read_body
from qinfer_api.rest.extension_schema import CUDA_REGISTER, REGION_ACTION, REGION_REGISTER, REGION_STATUS
from qinfer_api.rest.services import Services, needs, send

_SYSTEM, _CUDA = "/v2/systemsharedmemory", "/v2/cudasharedmemory"
_MAX_BODY_BYTES = 64 * 1024


def shared_memory_routes(services: Services) -> APIRouter:
    """Returns the routes of both kinds of shared memory."""
    router = APIRouter(tags=["shared memory"], dependencies=[needs(services, Scope.INFER)])
    _add_system(router, services)
    _add_cuda(router, services)
    return router


def _add_system(router: APIRouter, services: Services) -> None:
    memory = services.shared_memory

    @router.get(f"{_SYSTEM}/status", name="system_regions", **REGION_STATUS)
    async def system_regions() -> HttpResponse:
        """Tells the registered regions."""
        return send(Reply(200, msgspec.json.encode(memory.status())))

    @router.get(f"{_SYSTEM}/region/{{region}}/status", name="system_region", **REGION_STATUS)
    async def system_region(region: str) -> HttpResponse:
        """Tells about one region."""
        return send(Reply(200, msgspec.json.encode(memory.status(region))))

    @router.post(f"{_SYSTEM}/register", name="register_nothing", include_in_schema=False)
    async def register_nothing() -> HttpResponse:
        """Refuses: a region has a name."""
        memory.register("", "", 0, 0)
        return send(Reply(200, b""))

    @router.post(f"{_SYSTEM}/region/{{region}}/register", name="register_system_region", **REGION_REGISTER)
    async def register_system_region(region: str, request: Request) -> HttpResponse:
        """Opens a shared memory object of this host under a name."""
        await _register(services, region, request)
        return send(Reply(200, b""))

    @router.post(f"{_SYSTEM}/unregister", name="unregister_system_regions", **REGION_ACTION)
    async def unregister_system_regions() -> HttpResponse:
        """Forgets all regions."""
        memory.unregister_all()
        return send(Reply(200, b""))

    @router.post(f"{_SYSTEM}/region/{{region}}/unregister", name="unregister_system_region", **REGION_ACTION)
    async def unregister_system_region(region: str) -> HttpResponse:
        """Forgets a region; one that is not registered is forgotten already."""
        memory.unregister(region)
        return send(Reply(200, b""))


def _add_cuda(router: APIRouter, services: Services) -> None:
    memory = services.shared_memory

    @router.get(f"{_CUDA}/status", name="cuda_regions", **REGION_STATUS)
    async def cuda_regions() -> HttpResponse:
        """Tells that there are none."""
        memory.check_cuda()
        return send(Reply(200, b"[]"))

    @router.post(f"{_CUDA}/unregister", name="unregister_cuda_regions", **REGION_ACTION)
    async def unregister_cuda_regions() -> HttpResponse:
        """Does nothing: there are none."""
        memory.check_cuda()
        return send(Reply(200, b""))

    @router.post(f"{_CUDA}/region/{{region}}/unregister", name="unregister_cuda_region", **REGION_ACTION)
    async def unregister_cuda_region(region: str) -> HttpResponse:
        """Does nothing: there is none."""
        memory.check_cuda()
        return send(Reply(200, b""))

    @router.get(f"{_CUDA}/region/{{region}}/status", name="cuda_region", **REGION_STATUS)
    async def cuda_region(region: str) -> HttpResponse:
        """Tells that there is none of that name."""
        memory.check_cuda(region)
        return send(Reply(200, b"[]"))

    @router.post(f"{_CUDA}/register", name="register_cuda_nothing", include_in_schema=False)
    async def register_cuda_nothing() -> HttpResponse:
        """Refuses, as with a name."""
        memory.register_cuda()

    @router.post(f"{_CUDA}/region/{{region}}/register", name="register_cuda_region", **CUDA_REGISTER)
    async def register_cuda_region(region: str) -> HttpResponse:
        """Refuses: CUDA shared memory is not supported."""
        memory.register_cuda()


async def _register(services: Services, region: str, request: Request) -> None:
    memory = services.shared_memory
    memory.check_allowed()
    body = await _read(services, request)
    if "key" not in body:
        raise InvalidRequest("Shared memory register request has no 'key' field")
    if not isinstance(body["key"], str):
        raise MalformedJson("attempt to access JSON non-string as string")
    if "byte_size" not in body:
        raise InvalidRequest("Shared memory register request has no 'byte_size' field")
    offset, byte_size = _unsigned(body.get("offset", 0)), _unsigned(body["byte_size"])
    await asyncio.to_thread(memory.register, region, body["key"], offset, byte_size)


async def _read(services: Services, request: Request) -> dict[str, Any]:
    body = bytes(await read_body(request, _MAX_BODY_BYTES))
    max_depth = services.settings.limits.max_json_depth
    check_depth(body, max_depth)
    document = load(body, max_depth)
    return document if isinstance(document, dict) else {}


def _unsigned(value: Any) -> int:
    if type(value) is not int or not 0 <= value < 2**64:
        raise MalformedJson("attempt to access JSON non-unsigned-integer as unsigned-integer")
    return value
