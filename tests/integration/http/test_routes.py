"""The routes besides infer: health, metadata, configuration, metrics, documentation."""

import asyncio
import re
from collections.abc import AsyncIterator

import httpx
import pytest
import pytest_asyncio

from qinfer.errors import BrokerUnavailable
from qinfer.models.state import WorkerRecord
from qinfer.queue.entries import Lane
from qinfer.queue.lanes import Queue
from tests.support.gateway import Running, running_gateway

pytestmark = pytest.mark.asyncio(loop_scope="module")

TENSOR = {"datatype": "FP32", "shape": [-1, 4]}


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def running() -> AsyncIterator[Running]:
    async with running_gateway() as gateway:
        yield gateway


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def client(running: Running) -> AsyncIterator[httpx.AsyncClient]:
    async with httpx.AsyncClient(base_url=running.url) as opened:
        yield opened


async def test_server_metadata(client: httpx.AsyncClient) -> None:
    """The name is Triton's, because its examples assert it (reference §1.4)."""
    about = (await client.get("/v2")).json()

    assert about["name"] == "triton"
    assert "binary_tensor_data" in about["extensions"]


async def test_live(client: httpx.AsyncClient) -> None:
    """200 without a body."""
    reply = await client.get("/v2/health/live")

    assert (reply.status_code, reply.content) == (200, b"")


async def test_ready_while_a_model_is_not(client: httpx.AsyncClient) -> None:
    """`loading` has no worker, others answer: 200 without a body, so that a load balancer keeps the gateway."""
    reply = await client.get("/v2/health/ready")

    assert (reply.status_code, reply.content) == (200, b"")


async def test_model_metadata(client: httpx.AsyncClient) -> None:
    """All ready versions, and shapes with the batch dimension."""
    assert (await client.get("/v2/models/echo")).json() == {
        "name": "echo",
        "versions": ["1", "2"],
        "platform": "stub",
        "inputs": [{"name": "x", **TENSOR}],
        "outputs": [{"name": "y", **TENSOR}],
    }


async def test_version_metadata_names_only_that_version(client: httpx.AsyncClient) -> None:
    """Reference §1.5."""
    assert (await client.get("/v2/models/echo/versions/1")).json()["versions"] == ["1"]


async def test_config_is_the_stored_json(client: httpx.AsyncClient, running: Running) -> None:
    """In the dialect of reference §2.5, as `models sync` wrote it."""
    stored = await running.store.model("echo")
    assert stored is not None

    replies = [await client.get(f"/v2/models/echo{version}/config") for version in ("", "/versions/2")]

    assert [reply.text for reply in replies] == [stored.config] * 2


@pytest.mark.parametrize(
    ("path", "status", "error"),
    [
        ("/v2/models/echo/ready", 200, None),
        ("/v2/models/echo/versions/2/ready", 200, None),
        ("/v2/models/loading/ready", 400, "Model version not ready"),
        (
            "/v2/models/loading/versions/1/ready",
            503,
            "Request for unknown model: 'loading' version 1 is not at ready state",
        ),
        ("/v2/models/loading/versions/2/ready", 404, "Request for unknown model: 'loading' version 2 is not found"),
        ("/v2/models/nope/ready", 404, "Request for unknown model: 'nope' is not found"),
        ("/v2/models/nope", 404, "Request for unknown model: 'nope' is not found"),
        ("/v2/models/nope/config", 404, "Request for unknown model: 'nope' is not found"),
        ("/v2/models/echo/versions/7", 404, "Request for unknown model: 'echo' version 7 is not found"),
        ("/v2/", 404, "Not Found"),
        ("/v2/models", 404, "Not Found"),
        ("/nothing", 404, "Not Found"),
        ("/v2/models/echo/infer", 405, "Method Not Allowed"),
    ],
)
async def test_get(client: httpx.AsyncClient, path: str, status: int, error: str | None) -> None:
    """Status and text of each case of reference §1.1 and §1.3."""
    reply = await client.get(path)

    assert reply.status_code == status
    assert (reply.json()["error"] if error else reply.content) == (error or b"")


async def test_a_version_that_is_no_number(client: httpx.AsyncClient) -> None:
    """Every route with a version checks it."""
    for path in ("", "/ready", "/config"):
        reply = await client.get(f"/v2/models/echo/versions/x{path}")

        assert reply.status_code == 400
        assert "failed to get model version from specified version string 'x'" in reply.json()["error"]


async def test_metrics(client: httpx.AsyncClient, running: Running) -> None:
    """The gateway's own counts, and the shared state."""
    await running.delivery.ensure([Lane("echo", 1)])

    text = (await client.get("/metrics")).text

    assert re.search(r'^qinfer_store_up\{process="gateway-\w+"\} 1.0$', text, re.MULTILINE)
    assert 'qinfer_backlog_requests{lane="p1",model="stuck",version="1"} 0.0' in text
    assert 'qinfer_model_ready{model="loading",version="1"} 0.0' in text


@pytest.mark.parametrize("trouble", ["away", "hangs"])
async def test_metrics_without_the_store(
    client: httpx.AsyncClient, running: Running, monkeypatch: pytest.MonkeyPatch, trouble: str
) -> None:
    """When Redis is away or hangs, what is known is still shown, and that it is away."""

    async def sizes(self: Queue, lanes: list[Lane]) -> list[int]:
        if trouble == "hangs":
            await asyncio.Event().wait()
        raise BrokerUnavailable("no Redis")

    monkeypatch.setattr("qinfer_api.observe.reporting.ANSWERS_WITHIN_S", 0.01)
    monkeypatch.setattr(Queue, "sizes", sizes)

    reply = await client.get("/metrics")

    assert reply.status_code == 200
    assert re.search(r'^qinfer_store_up\{process="gateway-\w+"\} 0.0$', reply.text, re.MULTILINE)
    assert 'qinfer_model_ready{model="echo",version="2"} 1.0' in reply.text


async def test_the_documentation_describes_infer(client: httpx.AsyncClient) -> None:
    """Bodies are parsed by hand, and documented all the same."""
    document = (await client.get("/openapi.json")).json()

    infer = document["paths"]["/v2/models/{model}/infer"]["post"]
    assert infer["requestBody"]["content"]["application/json"]["schema"] == {"$ref": "#/components/schemas/InferCall"}
    assert "inputs" in document["components"]["schemas"]["InferCall"]["properties"]
    assert set(infer["responses"]) >= {"200", "400", "404", "500", "503"}
    assert (await client.get("/docs")).status_code == 200


async def test_the_server_is_ready_once_every_model_is() -> None:
    """A second worker brings the missing model."""
    async with running_gateway() as running, httpx.AsyncClient(base_url=running.url) as client:
        (first,) = await running.store.workers()
        states = {"loading": {1: first.models["echo"][1]}}
        await running.store.heartbeat(WorkerRecord(id="w2", started_at=0.0, models=states), 3600)
        await running.refresh()

        assert (await client.get("/v2/health/ready")).status_code == 200
