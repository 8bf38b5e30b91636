"""A browser as a weapon: pages of other origins, and names that were pointed at this machine, on every port."""

import asyncio

import grpc
import httpx
import pytest

from qinfer.core.settings_sections import CorsSettings, MetricsSettings
from qinfer_api.rest.side_ports import open_metrics_port
from tests.support.gateway import Running, running_gateway, settings_of

INFER = "/v2/models/echo/infer"
BODY = '{"inputs":[{"name":"x","shape":[1,4],"datatype":"FP32","data":[1,2,3,4]}]}'
FOREIGN = {"origin": "http://evil.example", "sec-fetch-site": "cross-site", "content-type": "text/plain"}


async def status(running: Running, method: str, path: str, headers: dict[str, str]) -> int:
    async with httpx.AsyncClient(base_url=running.url) as client:
        content = BODY if method == "POST" else None
        return (await client.request(method, path, content=content, headers=headers)).status_code


@pytest.mark.parametrize("fast", [True, False], ids=["fast", "route"])
@pytest.mark.parametrize(
    ("method", "path"),
    [("POST", INFER), ("POST", "/v2/repository/index"), ("GET", "/v2"), ("OPTIONS", INFER), ("GET", "/nowhere")],
)
async def test_a_foreign_page_is_refused(method: str, path: str, *, fast: bool) -> None:
    async with running_gateway(settings_of(http={"fast_path": fast})) as running:
        for headers in (FOREIGN, {"host": "evil.example"}, {"sec-fetch-site": "cross-site"}):
            assert await status(running, method, path, headers) == 403, headers


@pytest.mark.parametrize("fast", [True, False], ids=["fast", "route"])
async def test_everybody_else_calls_as_before(*, fast: bool) -> None:
    """One after the other, so that a head that is remembered is asked again."""
    async with running_gateway(settings_of(http={"fast_path": fast})) as running:
        own = {"origin": running.url, "sec-fetch-site": "same-origin"}
        for headers in ({}, own, {"host": "localhost"}, {"host": "10.0.0.7:8000"}, {}):
            assert await status(running, "POST", INFER, headers) == 200, headers


async def test_a_refused_page_does_not_reach_a_later_request() -> None:
    """The connection ends: what a page sends behind is not read."""
    async with running_gateway() as running, httpx.AsyncClient(base_url=running.url) as client:
        refused = await client.post(INFER, content=BODY, headers=FOREIGN)

        assert refused.headers["connection"] == "close"
        assert refused.json() == {
            "error": "pages of 'http://evil.example' may not call this server: QINFER_CORS__ALLOW_ORIGINS"
        }
        assert (await client.post(INFER, content=BODY)).status_code == 200


async def test_pages_that_cors_names_call_as_before() -> None:
    settings = settings_of().model_copy(update={"cors": CorsSettings(allow_origins=("http://evil.example",))})

    async with running_gateway(settings) as running:
        assert await status(running, "POST", INFER, FOREIGN) == 200


async def test_a_server_for_other_machines_has_their_names_for_it() -> None:
    """Services, compose, pods and probes call it by them."""
    async with running_gateway(settings_of(http={"host": "0.0.0.0"}, auth={"mode": "none"})) as running:
        running_url = running.url.replace("0.0.0.0", "127.0.0.1")
        async with httpx.AsyncClient(base_url=running_url) as client:
            for host in ("qinfer:8000", "qinfer.default.svc.cluster.local", "10.1.2.3:8000"):
                assert (await client.post(INFER, content=BODY, headers={"host": host})).status_code == 200
            assert (await client.post(INFER, content=BODY, headers=FOREIGN)).status_code == 403


@pytest.mark.parametrize(
    ("name", "code"), [("localhost:1", grpc.StatusCode.OK), ("evil.example", grpc.StatusCode.PERMISSION_DENIED)]
)
async def test_the_authority_of_a_call(name: str, code: grpc.StatusCode) -> None:
    async with running_gateway(settings_of(grpc={})) as running:
        rpc = running.gateway.rpc
        assert rpc is not None
        options = [("grpc.default_authority", name)]
        async with grpc.aio.insecure_channel(rpc.url.removeprefix("grpc://"), options) as channel:
            live = channel.unary_unary("/inference.GRPCInferenceService/ServerLive", bytes, bytes)
            try:
                await live(b"")
                found = grpc.StatusCode.OK
            except grpc.aio.AioRpcError as error:
                found = error.code()
    assert found is code


async def test_the_port_of_metrics() -> None:
    """The gateway's own, as it makes it."""
    settings = settings_of().model_copy(update={"metrics": MetricsSettings(port=0)})
    async with running_gateway(settings) as running, httpx.AsyncClient() as client:
        listener = open_metrics_port(settings)
        assert listener is not None
        running.gateway.serve_metrics(listener)
        port = running.gateway.metrics
        assert port is not None
        serving = asyncio.create_task(port.serve())
        found = [
            (await client.get(port.url, headers=headers)).status_code
            for headers in ({}, FOREIGN, {"host": "evil.example"})
        ]
        serving.cancel()
        await asyncio.wait([serving])

    assert found == [200, 403, 403]
