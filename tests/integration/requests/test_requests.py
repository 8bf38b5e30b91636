"""`/v1/…/requests`: accepted, looked at, read, cancelled, over HTTP, with the queue in memory and on Redis."""

import asyncio
import gzip
import json
import re
import struct
from collections.abc import AsyncIterator
from datetime import datetime
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import httpx
import pytest
import pytest_asyncio
from pydantic import SecretStr

from qinfer.core.settings import HttpSettings, RedisSettings, RequestSettings
from qinfer.errors import InvalidRequest, ModelNotFound, QueueFull
from qinfer.queue.entries import EntryAddress
from qinfer.queue.lanes import Queue
from qinfer.testing import eventually
from tests.support.gateway import Running, running_gateway, settings_of
from tests.support.servers.servers import RedisServer, system_redis

pytestmark = pytest.mark.asyncio(loop_scope="module")

ECHO = "/v1/models/echo/requests"
STUCK = "/v1/models/stuck/requests"
TENSOR = {"name": "x", "shape": [1, 4], "datatype": "FP32", "data": [1, 2, 3, 4]}
BODY: dict[str, Any] = {"id": "mine", "inputs": [TENSOR]}


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def running() -> AsyncIterator[Running]:
    async with running_gateway() as gateway:
        yield gateway


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def client(running: Running) -> AsyncIterator[httpx.AsyncClient]:
    async with httpx.AsyncClient(base_url=running.url, headers={"accept-encoding": "identity"}) as opened:
        yield opened


async def submitted(client: httpx.AsyncClient, url: str = ECHO, body: Any = BODY, **headers: str) -> dict[str, Any]:
    reply = await client.post(url, json=body, headers={name.replace("_", "-"): text for name, text in headers.items()})
    assert reply.status_code == 202, reply.text
    found: dict[str, Any] = reply.json()
    return found


async def ended(client: httpx.AsyncClient, record: dict[str, Any]) -> httpx.Response:
    return await client.get(record["links"]["result"] + "?wait=20")


async def test_a_request_is_accepted(client: httpx.AsyncClient) -> None:
    """202, where it is, and when it will be over."""
    reply = await client.post(STUCK, json=BODY, headers={"request-timeout": "90"})

    record = reply.json()
    assert (reply.status_code, reply.headers["location"]) == (202, f"/v1/requests/{record['id']}")
    assert record["id"].endswith(".0.stuck")
    assert {name: record[name] for name in ("model", "version", "state", "attempts", "error", "webhook")} == {
        "model": "stuck",
        "version": 1,
        "state": "queued",
        "attempts": 0,
        "error": None,
        "webhook": None,
    }
    assert record["created_at"] < record["deadline_at"]
    assert record["created_at"].endswith("Z")
    assert record["finished_at"] is record["expires_at"] is None


async def test_the_result_is_the_synchronous_reply(client: httpx.AsyncClient) -> None:
    """Body and headers, as often as one likes."""
    record = await submitted(client)
    synchronous = await client.post("/v2/models/echo/infer", json=BODY)

    for _ in range(2):
        result = await ended(client, record)
        assert (result.status_code, result.content) == (200, synchronous.content)
        assert result.headers["qinfer-request-state"] == "succeeded"
        assert result.headers["content-type"] == synchronous.headers["content-type"]


async def test_binary_in_and_out(client: httpx.AsyncClient) -> None:
    """How the result is encoded was said in the request; compression is for each reader to choose."""
    raw = struct.pack("<4f", 1, 2, 3, 4)
    entry = {"name": "x", "shape": [1, 4], "datatype": "FP32", "parameters": {"binary_data_size": 16}}
    head = json.dumps({"parameters": {"binary_data_output": True}, "inputs": [entry]}).encode()
    headers = {"inference-header-content-length": str(len(head)), "content-encoding": "gzip"}
    reply = await client.post(ECHO, content=gzip.compress(head + raw), headers=headers)

    plain = await ended(client, reply.json())
    packed = await client.get(reply.json()["links"]["result"], headers={"accept-encoding": "gzip"})

    length = int(plain.headers["inference-header-content-length"])
    assert plain.content[length:] == raw
    assert packed.headers["content-encoding"] == "gzip"
    assert packed.content == plain.content


async def test_a_model_without_a_worker_takes_requests(client: httpx.AsyncClient, running: Running) -> None:
    """It is known, and can be loaded: the synchronous call is not to wait for that here."""
    record = await submitted(client, "/v1/models/loading/requests")

    assert (record["state"], record["version"]) == ("queued", 1)
    assert (await client.post("/v2/models/loading/infer", json=BODY)).status_code == 503
    assert await running.depth("loading") == 1


async def test_large_tensors_travel_beside_the_stream(running: Running, client: httpx.AsyncClient) -> None:
    """The stream's entry stays small, and the worker gets them."""
    text = "x" * 600_000
    body = {"inputs": [{"name": "x", "shape": [1, 1], "datatype": "BYTES", "data": [text]}]}

    record = await submitted(client, "/v1/models/text/requests", body)

    assert (await ended(client, record)).json()["outputs"][0]["data"] == [text]
    assert running.requests[-1].payload


async def test_a_failure_is_the_result(client: httpx.AsyncClient) -> None:
    """Status and text of the synchronous call; the record says why too."""
    record = await submitted(client, "/v1/models/fails/requests")

    result = await ended(client, record)

    assert (result.status_code, result.json()) == (500, {"error": "the model raised: boom"})
    assert result.headers["qinfer-request-state"] == "failed"
    shown = (await client.get(record["links"]["self"])).json()
    assert shown["error"] == {"code": "inference_failed", "message": "the model raised: boom"}
    assert shown["finished_at"] < shown["expires_at"]


async def test_a_result_that_is_not_there_yet(client: httpx.AsyncClient) -> None:
    """202, the record, and when to ask again; a wait ends with its time."""
    record = await submitted(client, STUCK)

    for query in ("", "?wait=0.05"):
        reply = await client.get(record["links"]["result"] + query)
        assert (reply.status_code, reply.headers["retry-after"]) == (202, "1")
        assert reply.json()["state"] == "queued"


async def test_a_waiting_reader_is_told_of_the_end(client: httpx.AsyncClient, running: Running) -> None:
    """By the hint on the gateway's reply stream."""
    record = await submitted(client, STUCK)
    waits = running.gateway.requests.waits
    waiting = asyncio.ensure_future(ended(client, record))
    await eventually(lambda: record["id"] in waits._watched)

    await client.delete(record["links"]["self"])

    assert (await waiting).status_code == 400
    assert waits._watched == {}


async def test_a_reader_that_leaves_is_forgotten(running: Running, client: httpx.AsyncClient) -> None:
    """A reader's wait ends with its connection."""
    record = await submitted(client, STUCK)
    waits = running.gateway.requests.waits

    with pytest.raises(httpx.ReadTimeout):
        await client.get(record["links"]["result"] + "?wait=30", timeout=0.2)

    await eventually(lambda: not waits._watched)


async def test_cancel(client: httpx.AsyncClient, running: Running) -> None:
    """It leaves the queue, and says so from then on."""
    before = await running.depth("stuck")
    record = await submitted(client, STUCK)

    for _ in range(2):
        reply = await client.delete(record["links"]["self"])
        assert (reply.status_code, reply.json()["state"]) == (200, "cancelled")

    assert await running.depth("stuck") == before
    result = await client.get(record["links"]["result"])
    assert (result.status_code, result.json()) == (400, {"error": "the request was cancelled"})


async def test_delete_removes_the_result_of_what_has_ended(client: httpx.AsyncClient, running: Running) -> None:
    """410 as after its time to live, now; the same key stays the same request, which is not executed again."""
    key = {"idempotency-key": "once"}
    done = (await client.post(ECHO, json=BODY, headers=key)).json()
    await ended(client, done)
    executed = len(running.requests)

    reply = await client.delete(done["links"]["self"])
    result = await client.get(done["links"]["result"])
    again = await client.post(ECHO, json=BODY, headers=key)

    assert (reply.status_code, reply.json()["state"]) == (200, "succeeded")
    assert result.status_code == 410
    assert (again.json()["id"], again.headers["idempotent-replayed"]) == (done["id"], "true")
    assert len(running.requests) == executed


async def test_the_same_key_is_the_same_request(client: httpx.AsyncClient, running: Running) -> None:
    """However often and at once; another body is a conflict, another model another request."""
    executed = len(running.requests)
    replies = await asyncio.gather(
        *(client.post(ECHO, json=BODY, headers={"idempotency-key": "k1"}) for _ in range(20))
    )

    assert {reply.status_code for reply in replies} == {202}
    assert len({reply.json()["id"] for reply in replies}) == 1
    assert sorted(reply.headers.get("idempotent-replayed", "") for reply in replies) == ["", *["true"] * 19]
    await ended(client, replies[0].json())
    assert len(running.requests) == executed + 1

    other = await client.post(ECHO, json={**BODY, "id": "other"}, headers={"idempotency-key": "k1"})
    assert other.status_code == 409
    assert other.json()["error"].startswith("the Idempotency-Key belongs to a request with another body")
    elsewhere = await submitted(client, "/v1/models/fails/requests", BODY, idempotency_key="k1")
    assert elsewhere["id"].endswith(".0.fails")


async def test_the_same_body_is_the_same_however_it_is_packed(client: httpx.AsyncClient) -> None:
    """The content counts, not its encoding on the way."""
    content = json.dumps(BODY).encode()
    first = await client.post(ECHO, content=content, headers={"idempotency-key": "k2"})

    packed = {"idempotency-key": "k2", "content-encoding": "gzip"}
    second = await client.post(ECHO, content=gzip.compress(content), headers=packed)

    assert second.json()["id"] == first.json()["id"]


async def test_an_id_of_ones_own(client: httpx.AsyncClient) -> None:
    """It lives below its model, where the server's ids are found too."""
    record = await submitted(client, ECHO, request_id="row-17")

    assert record["id"] == "row-17"
    assert record["links"]["self"] == "/v1/models/echo/requests/row-17"
    assert (await ended(client, record)).status_code == 200
    assert (await submitted(client, ECHO, request_id="row-17"))["state"] == "succeeded"
    again = await client.post(ECHO, json={**BODY, "id": "2"}, headers={"request-id": "row-17"})
    assert (again.status_code, "request id 'row-17' belongs to" in again.json()["error"]) == (409, True)
    assert (await client.get("/v1/requests/row-17")).status_code == 404
    made = await submitted(client)
    assert (await client.get(f"/v1/models/echo/requests/{made['id']}")).status_code == 200
    assert (await client.get(f"/v1/models/fails/requests/{made['id']}")).status_code == 404


async def test_a_model_has_timeouts_of_its_own(client: httpx.AsyncClient) -> None:
    """The model's default and maximum take precedence over the settings."""
    url = "/v1/models/hasty/requests"
    record = await submitted(client, url)
    created, deadline = (datetime.fromisoformat(record[name]) for name in ("created_at", "deadline_at"))
    too_long = await client.post(url, json=BODY, headers={"request-timeout": "41"})

    assert (deadline - created).total_seconds() == pytest.approx(30, abs=0.01)
    assert too_long.status_code == 400
    assert "choose one from 0.001 to 40 seconds" in too_long.json()["error"]


@pytest.mark.parametrize(
    ("headers", "text"),
    [
        ({"request-timeout": "0"}, "a request timeout of 0 s is not possible"),
        ({"request-timeout": "-1"}, "Request-Timeout is a number of seconds"),
        ({"request-timeout": "nan"}, "Request-Timeout is a number of seconds, such as 2.5; got 'nan'"),
        ({"request-timeout": "soon"}, "Request-Timeout is a number of seconds, such as 2.5; got 'soon'"),
        ({"request-timeout": "86401"}, "choose one from 0.001 to 86400 seconds"),
        ({"idempotency-key": ""}, "1 to 255 visible ASCII characters"),
        ({"idempotency-key": "a b"}, "1 to 255 visible ASCII characters"),
        ({"idempotency-key": "k" * 256}, "1 to 255 visible ASCII characters"),
        ({"request-id": ""}, "the Request-Id is empty"),
        ({"request-id": "a@b"}, "'a@b' can't be a request id"),
        ({"request-id": ".."}, "'..' can't be a request id"),
        ({"request-id": "."}, "'.' can't be a request id"),
        ({"request-id": "i" * 129}, "can't be a request id; use 1 to 128"),
        ({"request-id": "01ARZ3NDEKTSV4RRFFQ69G5FAV.0.echo"}, "has the form of the ids that the server makes"),
        ({"webhook-url": "https://example.org/hook"}, "webhooks may not go to 'example.org'; QINFER_WEBHOOKS__ALLOW"),
    ],
)
async def test_wrong_headers_are_named(client: httpx.AsyncClient, headers: dict[str, str], text: str) -> None:
    """400, what it was, and what is possible."""
    reply = await client.post(ECHO, json=BODY, headers=headers)

    assert reply.status_code == 400
    assert text in reply.json()["error"]


@pytest.mark.parametrize(
    ("url", "body", "status", "text"),
    [
        ("/v1/models/nope/requests", BODY, 404, "Request for unknown model: 'nope' is not found"),
        ("/v1/models/echo/versions/9/requests", BODY, 404, "'echo' version 9 is not found"),
        ("/v1/models/echo/versions/x/requests", BODY, 400, "version should be an integral value > 0"),
        (ECHO, {"inputs": []}, 400, "] expected 1 inputs but got 0 inputs"),
        (ECHO, {"inputs": 1}, 400, ""),
        (ECHO, {}, 400, ""),
        (ECHO, {"inputs": [{"name": "x", "shape": [1, 4], "datatype": "FP32", "data": ["a"] * 4}]}, 400, ""),
    ],
)
async def test_what_is_wrong_is_said_at_once(
    client: httpx.AsyncClient, url: str, body: Any, status: int, text: str
) -> None:
    """No request is accepted that can't be executed."""
    reply = await client.post(url, json=body)

    assert (reply.status_code, list(reply.json())) == (status, ["error"])
    assert text in reply.json()["error"]


@pytest.mark.parametrize("path", ["", "/result", "/events"])
@pytest.mark.parametrize(
    "request_id",
    ["01ARZ3NDEKTSV4RRFFQ69G5FAV.0.echo", "x", "%00", "01ARZ3NDEKTSV4RRFFQ69G5FAV." + "9" * 5000 + ".echo"],
    ids=["unused", "foreign", "nul", "endless"],
)
async def test_unknown_requests(client: httpx.AsyncClient, request_id: str, path: str) -> None:
    """404, whatever the id looks like."""
    reply = await client.get(f"/v1/requests/{request_id}{path}")

    assert reply.status_code == 404
    assert "is not known" in reply.json()["error"]


async def test_a_wait_has_to_be_a_number(client: httpx.AsyncClient) -> None:
    """Said before anything is looked up."""
    reply = await client.get("/v1/requests/01ARZ3NDEKTSV4RRFFQ69G5FAV.0.echo/result?wait=long")

    assert (reply.status_code, "wait is a number of seconds" in reply.json()["error"]) == (400, True)


async def test_a_full_lane_refuses_with_429(client: httpx.AsyncClient) -> None:
    """An honest `Retry-After`, an integer; the queue counts, not what this gateway remembers."""
    replies = [await client.post("/v1/models/bounded/requests", json=BODY) for _ in range(5)]

    assert [reply.status_code for reply in replies] == [202, 202, 202, 429, 429]
    assert replies[3].json()["error"] == "[request id: mine] Exceeds maximum queue size"
    assert int(replies[3].headers["retry-after"]) >= 1


@pytest.mark.parametrize(("name", "is_known"), [("idempotency-key", True), ("request-id", True), ("accept", False)])
async def test_a_repetition_is_answered_however_full_the_lane_is(
    running: Running, client: httpx.AsyncClient, monkeypatch: pytest.MonkeyPatch, name: str, *, is_known: bool
) -> None:
    """Whoever repeats a request that was accepted is not told to come back later; another one is."""
    model = "/v1/models/small/requests"
    headers = {name: f"full-{name}"}
    first = await client.post(model, json=BODY, headers=headers)
    monkeypatch.setattr(
        running.gateway.dispatcher.submission.backlog,
        "judge",
        lambda *_, **__: QueueFull("Exceeds maximum queue size"),
    )

    again = await client.post(model, json=BODY, headers=headers)
    other = await client.post(model, json=BODY, headers={name: "other"})

    assert (first.status_code, again.status_code, other.status_code) == (202, 202 if is_known else 429, 429)
    assert other.json()["error"] == "[request id: mine] Exceeds maximum queue size"
    if is_known:
        assert (again.json()["id"], again.headers["idempotent-replayed"]) == (first.json()["id"], "true")


@pytest.mark.parametrize("name", ["idempotency-key", "request-id"])
@pytest.mark.parametrize("since", ["unloaded", "changed"])
async def test_a_repetition_is_answered_whatever_became_of_its_model(
    running: Running, client: httpx.AsyncClient, monkeypatch: pytest.MonkeyPatch, name: str, since: str
) -> None:
    """A caller that was cut off would take a refusal for the answer: that its request was never accepted."""
    headers = {name: f"{since}-{name}"}
    first = await client.post(ECHO, json=BODY, headers=headers)
    if since == "unloaded":
        monkeypatch.setattr(running.gateway.catalog, "accepting", Mock(side_effect=ModelNotFound("no such model")))
    else:
        monkeypatch.setattr(running.gateway.dispatcher, "check", Mock(side_effect=InvalidRequest("no such input")))

    again = await client.post(ECHO, json=BODY, headers=headers)
    conflicting = await client.post(ECHO, json={**BODY, "id": "2"}, headers=headers)
    others = [await client.post(ECHO, json=BODY, headers={name: "new"}), await client.post(ECHO, json=BODY)]

    assert (again.status_code, again.json()["id"]) == (202, first.json()["id"])
    assert again.headers["idempotent-replayed"] == "true"
    assert conflicting.status_code == 409
    assert [other.status_code for other in others] == [404 if since == "unloaded" else 400] * 2


async def test_a_body_that_is_too_large_is_refused_with_a_key_too() -> None:
    """It can't be compared with what was accepted; it is read once."""

    async def parts() -> AsyncIterator[bytes]:
        for _ in range(20):
            yield bytes(100)

    settings = settings_of().model_copy(update={"http": HttpSettings(max_input_bytes=1000)})
    async with running_gateway(settings) as running, httpx.AsyncClient(base_url=running.url) as client:
        for model in ("echo", "unknown"):
            path = f"/v1/models/{model}/requests"
            reply = await client.post(path, content=parts(), headers={"idempotency-key": "large"})
            assert (reply.status_code, "1000" in reply.json()["error"]) == (400, True)


async def test_results_and_tombstones_end() -> None:
    """410 while it is known that there was one."""
    settings = settings_of().model_copy(update={"requests": RequestSettings(result_ttl_s=0.05)})
    async with running_gateway(settings) as running, httpx.AsyncClient(base_url=running.url) as client:
        for model in ("echo", "fails"):
            record = await submitted(client, f"/v1/models/{model}/requests")
            await ended(client, record)

            async def is_gone(url: str = record["links"]["result"]) -> bool:
                return (await client.get(url)).status_code == 410

            await eventually(is_gone)
            assert (await client.get(record["links"]["self"])).json()["state"] in ("succeeded", "failed")


async def test_requests_expire_without_a_worker() -> None:
    """By the janitor: 503 with Triton's text, the lane is empty, and it was counted."""
    settings = settings_of().model_copy(update={"requests": RequestSettings(sweep_every_s=0.02)})
    async with running_gateway(settings) as running, httpx.AsyncClient(base_url=running.url) as client:
        record = await submitted(client, "/v1/models/loading/requests", BODY, request_timeout="0.05")

        result = await ended(client, record)

        assert (result.status_code, result.json()) == (503, {"error": "Request timeout expired"})
        assert (result.headers["qinfer-request-state"], await running.depth("loading")) == ("expired", 0)
        counted = (
            r'qinfer_request_failures_total\{model="loading",process="[^"]+",reason="deadline_exceeded",version="1"\}'
        )
        assert re.search(counted + r" 1\.0$", (await client.get("/metrics")).text, re.MULTILINE)
        stored = await running.delivery.requests.record(EntryAddress("loading", 0, record["id"]))
        assert stored is not None
        assert stored.code == "deadline_exceeded"


async def test_it_is_in_the_openapi_document(client: httpx.AsyncClient) -> None:
    """Each route with its headers, bodies and an example."""
    document = (await client.get("/openapi.json")).json()

    submit = document["paths"]["/v1/models/{model}/requests"]["post"]
    names = {parameter["name"] for parameter in submit["parameters"]}
    assert {"model", "Request-Timeout", "Idempotency-Key", "Request-Id", "Webhook-Url", "Prefer"} <= names
    assert {"202", "200", "400", "404", "409", "429", "503"} <= set(submit["responses"])
    assert document["components"]["schemas"]["RequestBody"]["example"]["state"] == "queued"
    for path in ("", "/result", "/events"):
        assert "get" in document["paths"]["/v1/requests/{request_id}" + path]
        assert "get" in document["paths"]["/v1/models/{model}/requests/{request_id}" + path]


async def test_requests_are_refused_at_once_while_redis_is_away(tmp_path: Path) -> None:
    """The refusal says when to try again, and comes before the time that a command may take."""
    with RedisServer(system_redis(), tmp_path, "--appendonly", "yes") as server:
        queue = await Queue.connect(RedisSettings(url=SecretStr(server.url), command_timeout_s=3600))
        async with running_gateway(delivery=queue) as running, httpx.AsyncClient(base_url=running.url) as client:
            record = await submitted(client, STUCK)
            server.stop()
            await eventually(lambda: not any(link.is_up for link in queue.router.nodes()))
            replies = [
                await client.post(STUCK, json=BODY),
                await client.post(STUCK, json=BODY, headers={"idempotency-key": "one"}),
                await client.get(record["links"]["self"]),
                await client.delete(record["links"]["self"]),
                await client.get("/v1/models/stuck/backlog"),
            ]
            server.start()
            await eventually(lambda: any(link.is_up for link in queue.router.nodes()))

    assert [(reply.status_code, "retry-after" in reply.headers) for reply in replies] == [(503, True)] * 5
