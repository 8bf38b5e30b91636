"""What a refused request has sent is freed at once: the garbage collector comes rarely, and counts no bytes."""

import asyncio
import gc
from collections.abc import AsyncIterator, Iterator

import grpc
import httpx
import pytest
from redis.exceptions import RedisError
from tritonclient.grpc import service_pb2 as pb

from tests.support.rpc import Rpc, rpc

SIZES = {"small": 1_000, "large": 1_000_000}


@pytest.fixture
async def server() -> AsyncIterator[Rpc]:
    async with rpc() as running:
        yield running


@pytest.fixture
def garbage(collected: None) -> Iterator[list[object]]:
    """Collects nothing by itself until the test ends; what was garbage then comes into the list.

    Errors of before, such as a failure of another test that its report lets go of now, are not garbage of this one.
    """
    gc.disable()
    gc.set_debug(gc.DEBUG_SAVEALL)
    yield gc.garbage
    gc.set_debug(0)
    gc.garbage.clear()
    gc.enable()


def errors(garbage: list[object]) -> list[BaseException]:
    """Returns the errors in the garbage but Redis' own: another test may have ended the connections of all."""
    gc.collect()
    return [one for one in garbage if isinstance(one, BaseException) and not isinstance(one, RedisError | OSError)]


@pytest.mark.parametrize("size", SIZES.values(), ids=SIZES)
@pytest.mark.parametrize("model", ["nothing", "echo"], ids=["unknown model", "wrong input"])
async def test_over_grpc(server: Rpc, garbage: list[object], model: str, size: int) -> None:
    request = pb.ModelInferRequest(model_name=model)
    request.inputs.add(name="z", datatype="UINT8", shape=[1, size])
    request.raw_input_contents.append(b"z" * size)

    call = server.stub.ModelInfer(request)
    assert await call.code() in (grpc.StatusCode.NOT_FOUND, grpc.StatusCode.INVALID_ARGUMENT)
    del call, request
    await asyncio.sleep(0)

    assert errors(garbage) == []


@pytest.mark.parametrize("size", SIZES.values(), ids=SIZES)
@pytest.mark.parametrize("model", ["nothing", "echo"], ids=["unknown model", "wrong input"])
async def test_over_http(server: Rpc, garbage: list[object], model: str, size: int) -> None:
    body = {"inputs": [{"name": "z", "datatype": "UINT8", "shape": [1, size], "data": [1] * size}]}

    async with httpx.AsyncClient(base_url=server.running.url) as client:
        reply = await client.post(f"/v2/models/{model}/infer", json=body)
    assert reply.status_code in (400, 404)
    await asyncio.sleep(0)

    assert errors(garbage) == []
