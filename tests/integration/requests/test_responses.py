"""Asynchronous requests to decoupled models: the list of responses as the result, and events while they come."""

import asyncio
import json
from base64 import b64decode
from collections.abc import AsyncIterator, Sequence
from typing import Any

import httpx
import numpy as np
import pytest
import pytest_asyncio

import qinfer
from qinfer.client import RequestHandle
from qinfer.core.messages import Failure, Response
from qinfer.queue.entries import EntryAddress, Lane, Lease, RequestOutcome, RequestState, Settlement
from qinfer.tensors import from_numpy
from qinfer.testing import eventually
from qinfer.wire.frame import decode_request, encode_responses
from qinfer_api.requests import routes
from tests.support.gateway import Running, running_gateway

pytestmark = pytest.mark.asyncio(loop_scope="module")

TENSOR = {"name": "x", "shape": [1, 4], "datatype": "FP32", "data": [1, 2, 3, 4]}
BODY: dict[str, Any] = {"id": "mine", "inputs": [TENSOR]}
BINARY: dict[str, Any] = BODY | {"parameters": {"binary_data_output": True}}
THIRD = 1 / 3  # its float32 has no short decimal form
Event = dict[str, str]


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def running() -> AsyncIterator[Running]:
    async with running_gateway() as gateway:
        yield gateway


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def client(running: Running) -> AsyncIterator[httpx.AsyncClient]:
    async with httpx.AsyncClient(base_url=running.url, headers={"accept-encoding": "identity"}) as opened:
        yield opened


class Work:
    """A request to a decoupled model, and the worker that holds it."""

    def __init__(self, running: Running, record: dict[str, Any], lease: Lease) -> None:
        self._requests = running.delivery.requests
        self._lease = lease
        self._id = record["id"]
        self.links = record["links"]

    async def respond(self, index: int, *values: float) -> bool:
        """Stores responses, from an index on: one for each value."""
        blobs = [encode_responses([self._response(index + n, v, final=False)]) for n, v in enumerate(values)]
        return await self._requests.responses.append(
            self._lease, self._id, index, blobs, resumes=False, max_bytes=2**20
        )

    async def end(self, index: int, value: float | None = None, failure: Failure | None = None) -> None:
        response = self._response(index, value, final=True, failure=failure)
        outcome = RequestOutcome(
            state=RequestState.FAILED if failure else RequestState.SUCCEEDED,
            blob=encode_responses([response]),
            code=failure.code if failure else "",
            message=failure.message if failure else "",
            attempt=1,
        )
        address = EntryAddress("flow", 0, self._id)
        await self._requests.settle([Settlement(address=address, outcome=outcome, entry=self._lease.entry)])

    def _response(self, index: int, value: float | None, *, final: bool, failure: Failure | None = None) -> Response:
        outputs = () if value is None else (from_numpy("y", np.array([[value]], np.float32)),)
        return Response(
            request_id=self._id, model="flow", version=1, outputs=outputs, failure=failure, index=index, final=final
        )


async def begun(client: httpx.AsyncClient, running: Running, body: dict[str, Any] = BODY) -> Work:
    """Submits a request, which a worker takes."""
    record = (await client.post("/v1/models/flow/requests", json=body)).json()
    while True:
        for lease in await running.delivery.fetch([Lane("flow", 1)], "w1", 1, 3600):
            if decode_request(lease.frame).id == record["id"]:
                return Work(running, record, lease)


def events(text: str) -> list[Event]:
    """Reads server-sent events; lines of data are joined, as the standard has it."""
    found = []
    for block in text.split("\n\n")[:-1]:
        event: Event = {}
        for name, _, value in (line.partition(": ") for line in block.split("\n")):
            event[name] = f"{event[name]}\n{value}" if name in event else value
        found.append(event)
    return found


def values(responses: Sequence[dict[str, Any]]) -> list[float]:
    return [one["outputs"][0]["data"][0] for one in responses]


def told(found: Sequence[Event]) -> list[Any]:
    """Returns each event's state, or the value of its response."""
    data = [(event["event"], json.loads(event["data"])) for event in found]
    return [one["state"] if name == "state" else one["outputs"][0]["data"][0] for name, one in data]


async def test_stored_responses_that_are_large_together_wait_for_memory(
    client: httpx.AsyncClient, running: Running, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They are read at once, to be one answer, whose memory comes back when that was read."""
    monkeypatch.setattr(routes, "LARGE_BYTES", 10)
    work = await begun(client, running)
    await work.respond(0, 0.5, 1.5)
    await work.end(2)
    budget = running.gateway.receiving
    body = budget.reserve("body", budget._max_bytes, lambda: None)
    assert body is not None

    asked = asyncio.create_task(client.get(work.links["result"]))
    await eventually(lambda: budget.waiting == 1, description="an answer that waits")
    body.release()

    assert values((await asked).json()["responses"]) == [0.5, 1.5]
    await eventually(lambda: budget.held_bytes == 0, description="no memory in use")


async def test_the_result_is_the_list_of_all_responses(client: httpx.AsyncClient, running: Running) -> None:
    """Each as infer would answer it, the final one as the others."""
    work = await begun(client, running)
    await work.respond(0, 0.5, 1.5)
    await work.end(2, 2.5)

    result = await client.get(work.links["result"])

    assert result.status_code == 200
    assert values(result.json()["responses"]) == [0.5, 1.5, 2.5]
    assert result.json()["responses"][0] == {
        "id": "mine",
        "model_name": "flow",
        "model_version": "1",
        "outputs": [{"name": "y", "datatype": "FP32", "shape": [1, 1], "data": [0.5]}],
    }


@pytest.mark.parametrize("responses", [0, 1, 2])
async def test_an_empty_final_response_is_none(client: httpx.AsyncClient, running: Running, responses: int) -> None:
    work = await begun(client, running)
    await work.respond(0, *range(responses))
    await work.end(responses)

    result = await client.get(work.links["result"])

    assert values(result.json()["responses"]) == list(range(responses))


async def test_binary_outputs_follow_the_list(client: httpx.AsyncClient, running: Running) -> None:
    work = await begun(client, running, BINARY)
    await work.respond(0, THIRD)
    await work.end(1, 2.0)

    result = await client.get(work.links["result"])

    length = int(result.headers["inference-header-content-length"])
    sizes = [one["outputs"][0]["parameters"] for one in json.loads(result.content[:length])["responses"]]
    assert sizes == [{"binary_data_size": 4}] * 2
    assert result.content[length:] == np.array([THIRD, 2.0], np.float32).tobytes()


async def test_a_failed_stream_has_no_result_and_its_responses_stay_readable(
    client: httpx.AsyncClient, running: Running
) -> None:
    """The result is the error; who wants what came before it reads the events."""
    work = await begun(client, running)
    await work.respond(0, 0.5)
    await work.end(1, failure=Failure("inference_failed", "the model raised: boom"))

    result = await client.get(work.links["result"])
    followed = events((await client.get(work.links["events"])).text)

    assert (result.status_code, result.json()["error"]) == (500, "the model raised: boom")
    assert told(followed) == [0.5, "failed"]


async def test_events_come_while_the_model_executes(client: httpx.AsyncClient, running: Running) -> None:
    """Each response is there before the next is made."""
    work = await begun(client, running)
    texts: list[str] = []

    async with client.stream("GET", work.links["events"]) as reply:
        async for chunk in reply.aiter_text():
            texts.append(chunk)
            count = "".join(texts).count("event: response")
            if count < 3:
                await work.respond(count, count + 0.5)
            elif count == 3:
                await work.end(3, 3.5)

    found = events("".join(texts))
    assert told(found) == ["running", 0.5, 1.5, 2.5, 3.5, "succeeded"]
    assert [event["id"] for event in found] == [
        *("1-running", "1-running.1", "1-running.2", "1-running.3"),
        *("1-running.4", "1-succeeded.4"),
    ]


async def test_who_comes_back_goes_on_after_the_last_event(client: httpx.AsyncClient, running: Running) -> None:
    """At any point: no response is told twice, and none is left out."""
    work = await begun(client, running)
    await work.respond(0, 0.5, 1.5)
    await work.end(2, 2.5)
    found = events((await client.get(work.links["events"])).text)

    for position, event in enumerate(found[:-1]):
        rest = await client.get(work.links["events"], headers={"last-event-id": event["id"]})
        assert told(events(rest.text)) == told(found)[position + 1 :]
    over = await client.get(work.links["events"], headers={"last-event-id": found[-1]["id"]})

    assert told(found) == [0.5, 1.5, 2.5, "succeeded"]
    assert (over.status_code, over.content) == (204, b"")


@pytest.mark.parametrize("seen", ["1-running.x", "1-running.-1", "1-running." + "9" * 5000, "…", ".1"])
async def test_an_event_id_of_another_server_does_no_harm(
    client: httpx.AsyncClient, running: Running, seen: str
) -> None:
    work = await begun(client, running)
    await work.respond(0, 0.5)
    await work.end(1)

    followed = await client.get(work.links["events"], headers={b"last-event-id": seen.encode()})

    assert told(events(followed.text))[-1] == "succeeded"


async def test_binary_outputs_in_events(client: httpx.AsyncClient, running: Running) -> None:
    """The second line of the data has the outputs' bytes, in base64, exactly."""
    work = await begun(client, running, BINARY)
    await work.respond(0, THIRD)
    await work.end(1)

    response, _ = events((await client.get(work.links["events"])).text)

    text, outputs = response["data"].split("\n")
    assert json.loads(text)["outputs"][0]["parameters"] == {"binary_data_size": 4}
    assert b64decode(outputs) == np.array([THIRD], np.float32).tobytes()


async def test_the_record_counts_stored_responses(client: httpx.AsyncClient, running: Running) -> None:
    """The record of a model with a single response has no such count."""
    work = await begun(client, running)
    await work.respond(0, 0.5, 1.5)
    plain = (await client.post("/v1/models/echo/requests", json=BODY)).json()

    record = (await client.get(work.links["self"])).json()

    assert (record["state"], record["responses"]) == ("running", 2)
    assert "responses" not in plain
    await work.end(2)


async def test_a_long_poll_waits_for_the_end_and_not_for_a_response(
    client: httpx.AsyncClient, running: Running
) -> None:
    work = await begun(client, running)
    polling = asyncio.ensure_future(client.get(work.links["result"] + "?wait=30"))

    await work.respond(0, 0.5)
    record = (await client.get(work.links["self"])).json()
    await work.end(1)

    assert record["responses"] == 1
    assert values((await polling).json()["responses"]) == [0.5]


async def test_a_cancelled_stream_takes_no_more_responses(client: httpx.AsyncClient, running: Running) -> None:
    work = await begun(client, running)
    assert await work.respond(0, 0.5)

    await client.delete(work.links["self"])

    assert not await work.respond(1, 1.5)
    assert told(events((await client.get(work.links["events"])).text)) == [0.5, "cancelled"]


async def test_the_python_client_follows_a_request(client: httpx.AsyncClient, running: Running) -> None:
    work = await begun(client, running)
    await work.respond(0, 0.5, 1.5)

    async with qinfer.AsyncClient(running.url) as python:
        results = python.responses(RequestHandle(id="", url=work.links["self"]))
        found = [(await anext(results))["y"].item()]
        await work.end(2, 2.5)
        found += [result["y"].item() async for result in results]

    assert found == [0.5, 1.5, 2.5]
