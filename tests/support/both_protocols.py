"""The same call over HTTP and gRPC, for tests that compare their errors."""

from typing import Any

import grpc
import httpx
import pytest

from tests.support.rpc import Rpc


async def over_http(server: Rpc, method: str, url: str, body: bytes, headers: dict[str, str]) -> tuple[int, str]:
    """Asks what is to be refused; returns the status and the text."""
    async with httpx.AsyncClient(base_url=server.running.url, timeout=30) as client:
        reply = await client.request(method, url, content=body, headers=headers)
    return reply.status_code, reply.json()["error"]


async def over_grpc(call: Any) -> tuple[str, str]:
    """Awaits a call that is to be refused; returns the code and the text."""
    with pytest.raises(grpc.aio.AioRpcError) as error:
        await call
    return error.value.code().name, error.value.details() or ""


def status_of(code: str) -> int:
    """Returns the HTTP status that goes with a gRPC code where Triton's table has both."""
    statuses = {"NOT_FOUND": 404, "INVALID_ARGUMENT": 400, "UNAVAILABLE": 503, "INTERNAL": 500, "UNIMPLEMENTED": 501}
    return {**statuses, "ALREADY_EXISTS": 400, "UNAUTHENTICATED": 401, "PERMISSION_DENIED": 403}[code]
