"""SIGTERM while Triton's clients wait: what is in flight is answered, what comes later finds no server."""

import asyncio
import os
import signal
import urllib.request
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tritonclient.utils import InferenceServerException

from qinfer.testing import eventually
from tests.e2e.conftest import Stack, is_ready, running
from tests.e2e.triton_clients import connected
from tests.support import python_models
from tests.support.models import CONTROLS, DIRECT, sequence_batching

pytestmark = [pytest.mark.long, pytest.mark.timeout(120)]

HELD = """open({begun!r}, "a").write(str(os.getpid()) + "\\n")
while not os.path.exists({gate!r}):
    time.sleep(0.01)
return [reply(x(request)) for request in requests]"""
STREAM = """for request in requests:
    sender = request.get_response_sender()
    for number in range(3):
        while number and not os.path.exists({gate!r}):
            time.sleep(0.01)
        sender.send(reply(np.full_like(x(request), number)))
    sender.send(flags=pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL)
return None"""
ONE = np.ones((1, 1), np.float32)


@pytest.fixture
def stack(tmp_path: Path) -> Iterator[Stack]:
    """Models that execute until there is a file `gate`; a file `begun` tells how many do."""
    places = {"gate": str(tmp_path / "gate"), "begun": str(tmp_path / "begun")}
    held, stream = (python_models.execute(code.format(**places)) for code in (HELD, STREAM))
    repository, batching = tmp_path / "models", sequence_batching(DIRECT, CONTROLS)
    python_models.write_model(repository, held, "held", dims=1, max_batch_size=1, scheduling="")
    python_models.write_model(repository, held, "steps", dims=1, max_batch_size=4, scheduling=batching)
    python_models.write_model(repository, stream, "stream", dims=1, more=python_models.DECOUPLED)
    with running(repository, tmp_path, QINFER_WORKER__DRAIN_S="200") as one:
        yield one


async def test_what_is_in_flight_is_answered(stack: Stack, tmp_path: Path) -> None:
    """An execution, a request behind it, a step of a sequence and a stream; a second signal changes nothing."""
    numbers: list[float] = []
    async with connected("http.aio", stack) as http, connected("grpc.aio", stack) as grpc:

        async def read() -> None:
            async def requests() -> AsyncIterator[dict[str, Any]]:
                yield {"model_name": "stream", "inputs": [grpc.input("x", ONE)]}

            async for answer, error in grpc.raw.stream_infer(requests()):
                assert error is None
                numbers.append(float(answer.as_numpy("y")[0, 0]))

        async def all_begun() -> bool:
            begun = tmp_path / "begun"
            return bool(numbers) and begun.exists() and len(begun.read_text().split()) == 2

        flags = {"sequence_id": 7, "sequence_start": True, "sequence_end": True}
        calls = [
            asyncio.create_task(http.infer("held", {"x": ONE})),
            asyncio.create_task(grpc.infer("steps", {"x": ONE}, **flags)),
        ]
        stream = asyncio.create_task(read())
        await eventually(all_begun, 30.0, description="the executions")
        calls.append(asyncio.create_task(grpc.infer("held", {"x": 2 * ONE})))
        await eventually(lambda: pending(stack, "held", 1), 30.0, description="the request behind them")

        os.kill(stack.pid, signal.SIGTERM)
        await eventually(lambda: refuses(stack), 30.0, description="the end of new connections")
        os.kill(stack.pid, signal.SIGTERM)
        async with connected("grpc.aio", stack) as late:
            with pytest.raises(InferenceServerException) as refused:
                await late.infer("held", {"x": ONE})
        (tmp_path / "gate").touch()

        answers = [(await call).array("y").tolist() for call in calls]
        await stream

    assert refused.value.status() == "StatusCode.UNAVAILABLE"
    assert answers == [[[1]], [[1]], [[2]]]
    assert numbers == [0, 1, 2]


async def test_an_open_sequence_holds_up_no_stop(stack: Stack, tmp_path: Path) -> None:
    """Its next step can't come once the gateway has ended: the worker does not wait until `drain_s` is half over.

    The end of `stack` fails if that takes 40 s.
    """
    (tmp_path / "gate").touch()
    async with connected("grpc.aio", stack) as grpc:
        answer = await grpc.infer("steps", {"x": ONE}, sequence_id=7, sequence_start=True)

    assert answer.array("y").tolist() == [[1]]


async def pending(stack: Stack, model: str, count: int) -> bool:
    """Tells whether so many requests of a model wait for their execution."""

    def page() -> str:
        with urllib.request.urlopen(f"http://{stack.address}/metrics", timeout=10) as reply:
            return str(reply.read().decode())

    line = f'nv_inference_pending_request_count{{model="{model}",version="1"}} {count}'
    return line in (await asyncio.to_thread(page)).splitlines()


async def refuses(stack: Stack) -> bool:
    return not await asyncio.to_thread(is_ready, stack.address)
