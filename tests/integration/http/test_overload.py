"""More than the server can do: refused at once, with when to try again; what was let in is neither lost nor left."""

import asyncio
import json
import re
from collections import Counter
from collections.abc import AsyncIterator
from itertools import product
from typing import Any

import httpx
import pytest

from qinfer.core.messages import Response
from qinfer.models.state import Speed, State, VersionState, WorkerRecord
from qinfer.queue.entries import Lane
from qinfer.testing import eventually
from qinfer.wire.frame import decode_request, encode_responses
from tests.support.gateway import Running, running_gateway, settings_of

TENSOR = {"name": "x", "shape": [1, 4], "datatype": "FP32", "data": [1, 2, 3, 4]}
LIMITS = {"default_timeout_s": 20.0, "max_timeout_s": 20.0, "inline_max_bytes": 1000}
FULL = "Exceeds maximum queue size"


@pytest.fixture(params=["fast", "route"])
async def running(request: pytest.FixtureRequest) -> AsyncIterator[Running]:
    settings = settings_of({"fast_path": request.param == "fast", "drain_s": 0.1}, LIMITS)
    async with running_gateway(settings) as one:
        yield one


@pytest.fixture
async def client(running: Running) -> AsyncIterator[httpx.AsyncClient]:
    limits = httpx.Limits(max_connections=None)
    async with httpx.AsyncClient(base_url=running.url, limits=limits, timeout=30) as one:
        yield one


async def ask(client: httpx.AsyncClient, model: str, **parameters: Any) -> httpx.Response:
    body = {"inputs": [TENSOR], **({"parameters": parameters} if parameters else {})}
    return await client.post(f"/v2/models/{model}/infer", json=body)


def id_of(reply: httpx.Response) -> str:
    return reply.headers["qinfer-request-id"]


async def depth(running: Running, model: str) -> dict[str, int]:
    lanes = running.gateway.catalog.lanes(model, 1)
    counts = await running.delivery.depth(lanes)
    return {lane.name: count for lane, count in zip(lanes, counts, strict=True) if count}


async def wait_for_depth(running: Running, model: str, **lanes: int) -> None:
    """Waits until just so many requests are in the lanes of a model: the gateway writes and takes out in batches."""

    async def is_so() -> bool:
        return await depth(running, model) == lanes

    await eventually(is_so, description=f"{lanes} in the lanes")


async def answer_all(running: Running, model: str, count: int) -> None:
    """Wakes the worker of a model that was stuck."""
    lane = Lane(model, 1)
    while count:
        leases = await running.delivery.fetch([lane], "late", 64, 10.0)
        requests = [decode_request(lease.frame) for lease in leases]
        responses = [Response(request_id=r.id, model=r.model, version=r.version, outputs=r.inputs) for r in requests]
        await running.delivery.publish(requests[0].reply_to, encode_responses(responses))
        await running.delivery.finish([lease.entry for lease in leases])
        count -= len(leases)


async def test_a_stuck_model_holds_as_many_as_its_capacity(running: Running, client: httpx.AsyncClient) -> None:
    """50 of 90 at once wait and are answered in the end; 40 are refused, and told when to try again."""
    calls = [asyncio.create_task(ask(client, "small")) for _ in range(90)]
    await eventually(lambda: sum(call.done() for call in calls) == 40, timeout_s=30, description="the refusals")
    await wait_for_depth(running, "small", p1=50)
    refused = [call.result() for call in calls if call.done()]

    await answer_all(running, "small", 50)
    statuses = Counter([(await call).status_code for call in calls])

    assert {reply.status_code for reply in refused} == {503}
    assert all(reply.json()["error"] == f"[request id: {id_of(reply)}] {FULL}" for reply in refused)
    assert {reply.headers["retry-after"] for reply in refused} == {"1"}
    assert statuses == {200: 50, 503: 40}
    await wait_for_depth(running, "small")
    assert (await client.get("/v2/health/live")).status_code == 200


async def test_entries_of_others_count(running: Running, client: httpx.AsyncClient) -> None:
    """Another gateway has filled the lane: at the next look this one knows."""
    for _ in range(50):
        running.delivery.submit(Lane("small", 1), b"another's", lambda _entry: None)
    first = asyncio.create_task(ask(client, "small"))
    await eventually(lambda: running.gateway.dispatcher.in_flight == 1, description="the first request")
    served = running.gateway.catalog.resolve("small", 1)
    load = running.gateway.dispatcher.submission.backlog.load(served, served.lane)
    await eventually(lambda: load.others == 50, description="a look at the depth")

    refused = await ask(client, "small")

    assert (refused.status_code, refused.json()["error"]) == (503, f"[request id: {id_of(refused)}] {FULL}")
    first.cancel()


async def test_max_queue_size_is_exact(running: Running, client: httpx.AsyncClient) -> None:
    """Triton's own limit, counted by the queue."""
    calls = [asyncio.create_task(ask(client, "bounded")) for _ in range(10)]
    await eventually(lambda: sum(call.done() for call in calls) == 7, description="the refusals")

    refused = [call.result() for call in calls if call.done()]

    assert {(r.status_code, r.headers["retry-after"]) for r in refused} == {(503, "1")}
    assert all(r.json()["error"] == f"[request id: {id_of(r)}] {FULL}" for r in refused)
    await wait_for_depth(running, "bounded", p1=3)
    await answer_all(running, "bounded", 3)
    assert Counter([(await call).status_code for call in calls]) == {200: 3, 503: 7}


async def test_a_deadline_that_cannot_be_met_is_refused(running: Running, client: httpx.AsyncClient) -> None:
    """The text has the wait at best and the timeout, and Retry-After what is between them; a batch is not judged."""
    ready = {"stuck": {1: VersionState(State.READY, 1)}}
    record = WorkerRecord(id="w1", started_at=0, models=ready, best_speeds={"stuck": {1: 0.3}})
    await running.store.heartbeat(record, 3600)
    await running.refresh()
    calls = [asyncio.create_task(ask(client, "stuck")) for _ in range(9)]
    await eventually(lambda: running.gateway.dispatcher.in_flight == 9, description="a batch, and one more")

    refused = await ask(client, "stuck")

    assert refused.status_code == 503
    assert refused.json()["error"] == (
        f"[request id: {id_of(refused)}] "
        "the requests ahead take at least 30.0 s, and this one is worth waiting for 20 s; "
        "try again later, or with a longer timeout"
    )
    assert refused.headers["retry-after"] == "10"
    await answer_all(running, "stuck", 9)
    assert {(await call).status_code for call in calls} == {200}


async def test_a_model_that_sleeps_can_always_be_woken(running: Running, client: httpx.AsyncClient) -> None:
    """READY without a worker: the first request waits for one, however long its start takes; the next are judged."""
    await running.store.put_speed("asleep", 1, Speed(10.0, 100.0, 10.0))
    await running.refresh()
    first = asyncio.create_task(ask(client, "asleep"))
    await eventually(lambda: running.gateway.dispatcher.in_flight == 1, description="the first request")

    second = await ask(client, "asleep")

    assert second.status_code == 503
    assert "the requests ahead take at least 50.1 s" in second.json()["error"]
    await answer_all(running, "asleep", 1)
    assert (await first).status_code == 200


async def test_levels_have_lanes(running: Running, client: httpx.AsyncClient) -> None:
    """By `priority`; 0 and what does not exist are the default level."""
    calls = [asyncio.create_task(ask(client, "levels", priority=level)) for level in (1, 3)]
    await eventually(lambda: running.gateway.dispatcher.in_flight == 2, description="the requests")

    await wait_for_depth(running, "levels", p1=1, p3=1)
    default = await ask(client, "levels")
    unknown = await ask(client, "levels", priority=9)

    for reply in (default, unknown):  # refused at the end of the default level's queue timeout
        assert (reply.status_code, reply.json()["error"]) == (
            503,
            "Request timeout expired",
        )
    await wait_for_depth(running, "levels", p1=1, p3=1)
    for call in calls:
        call.cancel()


async def test_what_is_no_unsigned_integer_is_refused(client: httpx.AsyncClient) -> None:
    """With Triton's text, whether the model has a policy or not."""
    for model, parameter, value in product(
        ("echo", "levels"), ("timeout", "priority"), (-1, 1.5, "1", True, None, 2**64)
    ):
        reply = await ask(client, model, **{parameter: value})

        assert reply.status_code == 500, (model, parameter, value)
        assert f"Unable to parse '{parameter}'" in reply.json()["error"], (model, parameter, value)


async def test_without_a_policy_they_have_no_effect(client: httpx.AsyncClient) -> None:
    """As with Triton: a microsecond is not what is asked for (reference §1.12)."""
    for parameters in ({"timeout": 1}, {"priority": 7}, {"timeout": 0, "priority": 0}):
        assert (await ask(client, "echo", **parameters)).status_code == 200, parameters


async def test_a_client_that_goes_away_leaves_nothing_behind(running: Running, client: httpx.AsyncClient) -> None:
    """Its queued work is cancelled."""
    call = asyncio.create_task(ask(client, "stuck"))
    await eventually(lambda: running.gateway.dispatcher.in_flight == 1, description="the request")

    async def is_queued() -> bool:
        return await running.depth("stuck") == 1

    async def is_gone() -> bool:
        return await running.depth("stuck") == 0

    await eventually(is_queued, description="the request in the queue")
    call.cancel()
    await asyncio.wait([call])

    await eventually(is_gone, description="an empty queue")
    assert running.gateway.dispatcher.in_flight == 0


async def test_large_tensors_leave_small_entries(running: Running, client: httpx.AsyncClient) -> None:
    """They travel beside the stream, and are what the worker reads."""
    rows = {**TENSOR, "name": "x", "datatype": "BYTES", "shape": [1, 1], "data": ["y" * 5000]}
    call = asyncio.create_task(client.post("/v2/models/text/infer", content=json.dumps({"inputs": [rows]})))

    reply = await call

    assert reply.status_code == 200
    assert running.requests[-1].payload
    assert reply.json()["outputs"][0]["data"] == ["y" * 5000]


async def test_what_is_not_ready_says_when_to_try_again(client: httpx.AsyncClient) -> None:
    """Retry-After is a whole number, and only where trying again can help."""
    not_ready = await client.post("/v2/models/loading/versions/1/infer", json={"inputs": [TENSOR]})
    unknown = await ask(client, "thought up")

    assert not_ready.status_code == 503
    assert re.fullmatch(r"\d+", not_ready.headers["retry-after"])
    assert unknown.status_code == 404
    assert "retry-after" not in unknown.headers


@pytest.mark.parametrize("url", ["/v2/models/stuck/infer", "/v1/models/stuck/requests"])
@pytest.mark.parametrize(
    "field", [{"id": "x" * 2**21}, {"parameters": {"text": "x" * 2**21}}], ids=["id", "parameters"]
)
async def test_what_is_no_tensor_is_bounded(
    running: Running, client: httpx.AsyncClient, url: str, field: dict[str, Any]
) -> None:
    """It travels in the stream's entry, however large, and a lane holds many of them."""
    reply = await client.post(url, json={"inputs": [TENSOR], **field})

    assert (reply.status_code, len(reply.content) < 300) == (400, True)
    assert "more than 1048576; send what is large as a tensor" in reply.json()["error"]
    assert await depth(running, "stuck") == {}
    assert running.gateway.dispatcher.in_flight == 0
