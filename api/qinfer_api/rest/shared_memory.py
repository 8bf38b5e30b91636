"""`/v2/systemsharedmemory/…` and `/v2/cudasharedmemory/…`: what clients share with this gateway (reference §1.15).

Regions are used by infer requests, and registered by those who may make such: the scope is that of inference. CUDA's
are never taken: where shared memory is on there are just none of them, so that clients which clear both kinds at their
start can go on.
"""

import asyncio
from typing import Annotated

import msgspec
from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response as HttpResponse

from qinfer.core.api_keys import Scope
from qinfer_api.http.infer import Reply
from qinfer_api.json_types import decode_json
from qinfer_api.rest.openapi import answer, body, errors, operation
from qinfer_api.rest.services import Services, needs, read_body, send, send_json
from qinfer_api.shared_memory import Region

_SYSTEM, _CUDA = "/v2/systemsharedmemory", "/v2/cudasharedmemory"
_MAX_BODY_BYTES = 64 * 1024


class RegionCall(msgspec.Struct, frozen=True):
    """A region to be registered.

    Attributes:
        key: The name of the shared memory object, as `shm_open` takes it.
        offset: Where the region begins in the object, in bytes.

    Example:
        {"key": "/images", "byte_size": 1048576}
    """

    key: str
    byte_size: Annotated[int, msgspec.Meta(ge=0)]
    offset: Annotated[int, msgspec.Meta(ge=0)] = 0


class CudaHandle(msgspec.Struct, frozen=True):
    """A handle as CUDA makes it, in base64."""

    b64: str = ""


class CudaRegionCall(msgspec.Struct, frozen=True):
    """A region of CUDA's memory."""

    raw_handle: CudaHandle
    device_id: Annotated[int, msgspec.Meta(ge=0)]
    byte_size: Annotated[int, msgspec.Meta(ge=1)]


_CALL = "Shared memory register request"
_DONE, _REFUSED = {200: answer("Done.")}, errors(400, 401, 403, 500, 501)
_STATUS = operation(
    "Look at shared memory regions",
    {200: answer("The regions.", list[Region]), **errors(400, 401, 403, 404, 501)},
)
_ACTION = operation("Forget shared memory regions", {**_DONE, **errors(400, 401, 403, 501)})
_REGISTER = operation("Register a system shared memory region", {**_DONE, **_REFUSED}, takes=body(RegionCall))
_REGISTER_CUDA = operation(
    "Register a CUDA shared memory region (always refused)", {**_DONE, **_REFUSED}, takes=body(CudaRegionCall)
)


def shared_memory_routes(services: Services) -> APIRouter:
    """Returns the routes of both kinds of shared memory."""
    router = APIRouter(tags=["shared memory"], dependencies=[needs(services, Scope.INFER)])
    _add_system(router, services)
    _add_cuda(router, services)
    return router


def _add_system(router: APIRouter, services: Services) -> None:
    memory = services.shared_memory

    @router.get(f"{_SYSTEM}/status", name="system_regions", **_STATUS)
    async def system_regions() -> HttpResponse:
        """Tells the registered regions."""
        return send_json(memory.status())

    @router.get(f"{_SYSTEM}/region/{{region}}/status", name="system_region", **_STATUS)
    async def system_region(region: str) -> HttpResponse:
        """Tells about one region."""
        return send_json(memory.status(region))

    @router.post(f"{_SYSTEM}/register", name="register_nothing", include_in_schema=False)
    async def register_nothing() -> HttpResponse:
        """Refuses: a region has a name."""
        memory.register("", "", 0, 0)
        return send(Reply(200, b""))

    @router.post(f"{_SYSTEM}/region/{{region}}/register", name="register_system_region", **_REGISTER)
    async def register_system_region(region: str, request: Request) -> HttpResponse:
        """Opens a shared memory object of this host under a name."""
        await _register(services, region, request)
        return send(Reply(200, b""))

    @router.post(f"{_SYSTEM}/unregister", name="unregister_system_regions", **_ACTION)
    async def unregister_system_regions() -> HttpResponse:
        """Forgets all regions."""
        memory.unregister_all()
        return send(Reply(200, b""))

    @router.post(f"{_SYSTEM}/region/{{region}}/unregister", name="unregister_system_region", **_ACTION)
    async def unregister_system_region(region: str) -> HttpResponse:
        """Forgets a region; one that is not registered is forgotten already."""
        memory.unregister(region)
        return send(Reply(200, b""))


def _add_cuda(router: APIRouter, services: Services) -> None:
    memory = services.shared_memory

    @router.get(f"{_CUDA}/status", name="cuda_regions", **_STATUS)
    async def cuda_regions() -> HttpResponse:
        """Tells that there are none."""
        memory.check_cuda()
        return send(Reply(200, b"[]"))

    @router.post(f"{_CUDA}/unregister", name="unregister_cuda_regions", **_ACTION)
    async def unregister_cuda_regions() -> HttpResponse:
        """Does nothing: there are none."""
        memory.check_cuda()
        return send(Reply(200, b""))

    @router.post(f"{_CUDA}/region/{{region}}/unregister", name="unregister_cuda_region", **_ACTION)
    async def unregister_cuda_region(region: str) -> HttpResponse:
        """Does nothing: there is none."""
        memory.check_cuda()
        return send(Reply(200, b""))

    @router.get(f"{_CUDA}/region/{{region}}/status", name="cuda_region", **_STATUS)
    async def cuda_region(region: str) -> HttpResponse:
        """Tells that there is none of that name."""
        memory.check_cuda(region)
        return send(Reply(200, b"[]"))

    @router.post(f"{_CUDA}/register", name="register_cuda_nothing", include_in_schema=False)
    async def register_cuda_nothing() -> HttpResponse:
        """Refuses, as with a name."""
        memory.register_cuda()

    @router.post(f"{_CUDA}/region/{{region}}/register", name="register_cuda_region", **_REGISTER_CUDA)
    async def register_cuda_region(region: str) -> HttpResponse:
        """Refuses: CUDA shared memory is not supported."""
        memory.register_cuda()


async def _register(services: Services, region: str, request: Request) -> None:
    memory = services.shared_memory
    memory.check_allowed()
    text = bytes(await read_body(request, _MAX_BODY_BYTES))
    call = decode_json(text, RegionCall, services.settings.limits.max_json_depth, call=_CALL)
    await asyncio.to_thread(memory.register, region, call.key, call.offset, call.byte_size)
