"""Triton's clients and requests that wait: what is cancelled, times out, overtakes, or comes back in order."""

import asyncio
import queue
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import tritonclient.grpc as grpc_client
from tritonclient.utils import InferenceServerException

from tests.e2e.conftest import Stack, running
from tests.e2e.triton_clients import Answer, TritonClient, connected
from tests.support import python_models

pytestmark = [pytest.mark.long, pytest.mark.timeout(60)]

BUSY_S = 1.0
"""How long the model's instance is kept busy while others wait."""

SLOW = python_models.execute(
    """answers = []
for request in requests:
    time.sleep(float(x(request)[0, 0]))
    self.count = getattr(self, "count", 0) + 1
    answers.append(reply(np.array([[self.count]], np.float32)))
return answers"""
)
QUEUE = """
dynamic_batching {
  max_queue_delay_microseconds: 0
  priority_levels: 3
  default_priority_level: 2
  default_queue_policy { default_timeout_microseconds: 30000000 allow_timeout_override: true }
}
instance_group { count: 1 kind: KIND_CPU }
"""


@pytest.fixture(scope="module")
def stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    repository = tmp_path_factory.mktemp("models")
    version = python_models.write_model(repository, SLOW, "slow", max_batch_size=1)
    config = version.parent / "config.pbtxt"
    config.write_text(config.read_text().replace("dynamic_batching { max_queue_delay_microseconds: 0 }", QUEUE))
    with running(repository, tmp_path_factory.mktemp("up")) as stack:
        yield stack


def seconds(value: float) -> np.ndarray[Any, np.dtype[np.float32]]:
    return np.array([[value]], np.float32)


async def executed(client: TritonClient) -> int:
    """Asks how many requests the model has executed, this one included."""
    return int((await client.infer("slow", {"x": seconds(0)})).array("y")[0, 0])


@pytest.mark.parametrize("kind", ["http.aio", "grpc.aio"])
async def test_a_cancelled_request_is_never_executed(stack: Stack, kind: str) -> None:
    """It is taken out of the queue while another one keeps the model busy, whose answer comes as ever."""
    async with connected(kind, stack) as client:
        before = await executed(client)
        busy = asyncio.create_task(client.infer("slow", {"x": seconds(BUSY_S)}))
        await asyncio.sleep(BUSY_S / 10)  # it is executing
        waiting = asyncio.create_task(client.infer("slow", {"x": seconds(0)}))
        await asyncio.sleep(BUSY_S / 10)  # it is in the queue
        waiting.cancel()

        assert int((await busy).array("y")[0, 0]) == before + 1
        assert await executed(client) == before + 2
        assert waiting.cancelled()


async def test_an_asynchronous_call_can_be_cancelled(stack: Stack) -> None:
    """With the context that the client gives for it; its callback hears of it."""
    answers: queue.Queue[Any] = queue.Queue()
    async with connected("grpc", stack) as client:
        before = await executed(client)
        for value in (BUSY_S, 0):
            context = client.raw.async_infer(
                "slow", [client.input("x", seconds(value))], lambda result, error: answers.put((result, error))
            )
            await asyncio.sleep(BUSY_S / 10)
        context.cancel()

        result, error = answers.get(timeout=20)
        assert (result, error.status()) == (None, "StatusCode.CANCELLED")
        assert answers.get(timeout=20)[1] is None
        assert await executed(client) == before + 2


@pytest.mark.parametrize("kind", ["http", "http.aio", "grpc", "grpc.aio"])
async def test_the_clients_own_timeouts(stack: Stack, kind: str) -> None:
    """A client that does not wait any longer gets its error from itself; what it asked for is not executed."""
    timeout = BUSY_S / 2
    options: dict[str, Any] = {"http": {"network_timeout": timeout}, "http.aio": {"conn_timeout": timeout}}.get(
        kind, {}
    )
    async with connected("grpc.aio", stack) as other, connected(kind, stack, **options) as client:
        for _ in range(10):  # so that the gateway expects the model to be fast enough, and lets the request in
            before = await executed(other)
        busy = asyncio.create_task(other.infer("slow", {"x": seconds(BUSY_S)}))
        await asyncio.sleep(BUSY_S / 10)

        within = {} if client.is_http else {"client_timeout": timeout}
        with pytest.raises((InferenceServerException, TimeoutError)) as raised:
            await client.infer("slow", {"x": seconds(0)}, **within)

        if isinstance(raised.value, InferenceServerException):
            status = str(raised.value.status())
            assert status in ("StatusCode.DEADLINE_EXCEEDED", "499"), raised.value.message()
        await busy
        assert await executed(other) == before + 2


@pytest.mark.parametrize("kind", ["http.aio", "grpc.aio"])
async def test_a_request_that_waits_too_long_is_refused(stack: Stack, kind: str) -> None:
    """With its own `timeout`, as the model's queue policy allows."""
    async with connected(kind, stack) as client:
        before = await executed(client)
        busy = asyncio.create_task(client.infer("slow", {"x": seconds(BUSY_S)}))
        await asyncio.sleep(BUSY_S / 10)

        refusal = await client.refusal("infer", "slow", [client.input("x", seconds(0))], timeout=50_000)

        assert refusal[0] == "UNAVAILABLE"
        assert "Request timeout expired" in refusal[1]
        await busy
        assert await executed(client) == before + 2


@pytest.mark.parametrize("kind", ["http.aio", "grpc.aio"])
async def test_a_higher_priority_overtakes(stack: Stack, kind: str) -> None:
    """1 before the default of 2, and that before 3, in whatever order they came."""
    async with connected(kind, stack) as client:
        before = await executed(client)
        tasks: list[asyncio.Task[Answer]] = [asyncio.create_task(client.infer("slow", {"x": seconds(BUSY_S)}))]
        for priority in (3, 0, 1):
            await asyncio.sleep(BUSY_S / 10)
            tasks.append(asyncio.create_task(client.infer("slow", {"x": seconds(0)}, priority=priority)))

        order = [int((await task).array("y")[0, 0]) - before for task in tasks]

    assert order == [1, 4, 3, 2]


def test_a_stream_can_be_given_up(stack: Stack) -> None:
    """What waits of it is not executed, and another stream is served."""
    answers: queue.Queue[Any] = queue.Queue()
    keepalive = grpc_client.KeepAliveOptions(keepalive_time_ms=10_000, keepalive_permit_without_calls=True)
    with grpc_client.InferenceServerClient(stack.grpc_address, keepalive_options=keepalive) as client:
        client.start_stream(lambda result, error: answers.put((result, error)))
        client.async_stream_infer("slow", _inputs(0), request_id="first")
        first = answers.get(timeout=20)[0]
        for value in (BUSY_S, 0, 0, 0):
            client.async_stream_infer("slow", _inputs(value))
        client.stop_stream(cancel_requests=True)
        assert answers.get(timeout=20)[1].status() == "StatusCode.CANCELLED"

        client.start_stream(lambda result, error: answers.put((result, error)))
        for number in range(3):
            client.async_stream_infer("slow", _inputs(0), request_id=str(number))
        again = [answers.get(timeout=20)[0] for _ in range(3)]
        client.stop_stream()

    assert [result.get_response().id for result in (first, *again)] == ["first", "0", "1", "2"]
    counts = [int(result.as_numpy("y")[0, 0]) for result in (first, *again)]
    assert counts[1] - counts[0] in (1, 2), "only the one that was executing may have been executed"
    assert counts[1:] == [counts[1], counts[1] + 1, counts[1] + 2]


async def test_an_asyncio_stream_can_be_given_up(stack: Stack) -> None:
    """Its iterator ends with an error, and the client is as good as before."""
    async with connected("grpc.aio", stack) as client:

        async def requests() -> Any:
            for value in (0, BUSY_S, 0):
                yield {"model_name": "slow", "inputs": [client.input("x", seconds(value))]}
            await asyncio.Event().wait()

        answers = client.raw.stream_infer(requests())
        before = int((await anext(answers))[0].as_numpy("y")[0, 0])
        assert answers.cancel()
        with pytest.raises((InferenceServerException, asyncio.CancelledError)):
            await anext(answers)

        assert await executed(client) in (before + 1, before + 2)


def _inputs(value: float) -> list[grpc_client.InferInput]:
    one = grpc_client.InferInput("x", [1, 1], "FP32")
    one.set_data_from_numpy(seconds(value))
    return [one]
