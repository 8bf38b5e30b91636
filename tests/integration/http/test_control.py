"""The routes of the repository, statistics, logging and trace extensions, and restricted ones."""

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import pytest_asyncio

from qinfer.core.api_keys import Scope, add_key
from qinfer.core.settings import AuthSettings, GrpcSettings, HttpSettings, LimitSettings, RepositorySettings, Settings
from qinfer.observe.stats import StatsTally
from qinfer.testing import eventually
from qinfer_api.observe import reporting
from qinfer_api.rest import management
from tests.support.gateway import Running, running_gateway

pytestmark = pytest.mark.asyncio(loop_scope="module")

POLLING = "explicit model load / unload is not allowed if polling is enabled"
QUESTION = {"inputs": [{"name": "x", "shape": [1, 4], "datatype": "FP32", "data": [1, 2, 3, 4]}]}


def settings_of(**sections: Any) -> Settings:
    return Settings(http=HttpSettings(port=0), grpc=GrpcSettings(enabled=False)).model_copy(update=sections)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def running() -> AsyncIterator[Running]:
    async with running_gateway(settings_of(limits=LimitSettings(max_json_depth=20))) as gateway:
        yield gateway


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def client(running: Running) -> AsyncIterator[httpx.AsyncClient]:
    async with httpx.AsyncClient(base_url=running.url) as client:
        yield client


@pytest.mark.parametrize("path", ["/v2/repository/index", "/v2/repository/anything/index"])
@pytest.mark.parametrize("body", [b"", b"{}", b'{"ready": false}'])
async def test_the_index_has_every_model(client: httpx.AsyncClient, path: str, body: bytes) -> None:
    """With the versions' states; a name of a repository is ignored (reference §1.1)."""
    reply = await client.post(path, content=body)

    entries = {(entry["name"], entry.get("version")): entry for entry in reply.json()}
    assert entries["echo", "2"] == {"name": "echo", "version": "2", "state": "READY"}
    assert entries["loading", "1"]["state"] == "UNAVAILABLE"
    assert entries["loading", "1"]["reason"]


async def test_the_index_of_ready_models(client: httpx.AsyncClient) -> None:
    """Only what can be asked."""
    entries = (await client.post("/v2/repository/index", json={"ready": True})).json()

    assert {entry["state"] for entry in entries} == {"READY"}
    assert "loading" not in {entry["name"] for entry in entries}


@pytest.mark.parametrize(
    ("path", "body", "status", "error"),
    [
        ("index", b'{"ready": 1}', 500, "Invalid value for 'ready': expected a boolean"),
        ("index", b"[]", 400, "failed to parse the request JSON buffer: it must be an object"),
        ("index", b"{", 400, "failed to parse the request JSON buffer: "),
        (
            "index",
            b'{"a": ' + b"[" * 30 + b"]" * 30 + b"}",
            400,
            "JSON nesting depth exceeds maximum allowed limit (20)",
        ),
        ("models/echo/load", b"", 503, POLLING),
        ("models/echo/unload", b'{"parameters":{"unload_dependents":false}}', 503, POLLING),
        ("models/echo/load", b'{"parameters":[]}', 500, "'parameters': attempt to get members for non-object"),
        (
            "models/echo/load",
            b'{"parameters":{"config":{}}}',
            500,
            "'config': attempt to access JSON non-string as string",
        ),
        (
            "models/echo/load",
            b'{"parameters":{"file:1/m.onnx":"a"}}',
            400,
            "load parameter 'file:1/m.onnx' is not base64",
        ),
        ("models/echo/load", b'{"parameters":{"other":"a"}}', 400, "unrecognized load parameter 'other'"),
        (
            "models/echo/unload",
            b'{"parameters":{"unload_dependents":"yes"}}',
            500,
            "Unable to parse 'unload_dependents': attempt to access JSON non-boolean as boolean",
        ),
        ("mine/models/echo/load", b"", 501, "'repository_name' specification is not supported"),
        ("mine/models/echo/unload", b"", 501, "'repository_name' specification is not supported"),
    ],
)
async def test_what_the_repository_refuses(
    client: httpx.AsyncClient, path: str, body: bytes, status: int, error: str
) -> None:
    """Status and text of each case of reference §1.14."""
    reply = await client.post(f"/v2/repository/{path}", content=body)

    assert reply.status_code == status
    assert reply.json()["error"].startswith(error)


async def test_a_file_of_too_much_base64(client: httpx.AsyncClient, monkeypatch: pytest.MonkeyPatch) -> None:
    """Triton's decoder counts in `int`."""
    monkeypatch.setattr(management, "_MAX_ENCODED", 3)

    reply = await client.post("/v2/repository/models/echo/load", json={"parameters": {"file:1/m.onnx": "QUFB"}})

    assert reply.status_code == 400
    assert reply.json()["error"] == "'file:1/m.onnx' exceeds the maximum allowed data size limit INT_MAX"


async def test_unloading_withdraws_readiness() -> None:
    """At once; what was unloaded stays in the index, and an unknown name is no mistake (reference §1.14)."""
    settings = settings_of(repository=RepositorySettings(control_mode="explicit"))
    async with running_gateway(settings) as running, httpx.AsyncClient(base_url=running.url) as client:
        assert (await client.get("/v2/models/asleep/ready")).status_code == 200

        replies = [await client.post(f"/v2/repository/models/{name}/unload") for name in ("asleep", "nothing")]

        assert [(reply.status_code, reply.content) for reply in replies] == [(200, b"")] * 2
        assert (await client.get("/v2/models/asleep/ready")).status_code == 404
        index = (await client.post("/v2/repository/index")).json()
        assert {"name": "asleep", "version": "1", "state": "UNAVAILABLE", "reason": "unloaded"} in index

        failed = await client.post("/v2/repository/models/nothing/load", json={"parameters": {}})
        assert failed.status_code == 500
        assert failed.json()["error"].startswith("failed to load 'nothing', failed to poll from model repository")


async def test_statistics(client: httpx.AsyncClient, running: Running) -> None:
    """Of one version, of all of a model, of all models."""
    tally = StatsTally()
    tally.executed(2, [1000, 2000], 1, 2, 3, begin_s=12.5)
    await running.store.add_stats("echo", 2, tally.drain())

    (version,) = (await client.get("/v2/models/echo/versions/2/stats")).json()["model_stats"]
    versions = (await client.get("/v2/models/echo/stats")).json()["model_stats"]
    every = (await client.get("/v2/models/stats")).json()["model_stats"]

    assert (version["name"], version["version"], version["last_inference"]) == ("echo", "2", 12500)
    assert version["inference_stats"]["queue"] == {"count": 2, "ns": 3000}
    assert version["batch_stats"][0]["compute_infer"] == {"count": 1, "ns": 2}
    assert [entry["version"] for entry in versions] == ["1", "2"]
    assert version in every
    assert "loading" not in {entry["name"] for entry in every}


@pytest.mark.parametrize(
    ("path", "error"),
    [
        ("/v2/models/nothing/stats", "requested model 'nothing' is not available"),
        ("/v2/models/echo/versions/7/stats", "requested model version is not available for model 'echo'"),
        ("/v2/models/echo/versions/0/stats", "failed to get model version from specified version string '0'"),
    ],
)
async def test_statistics_of_what_is_not_there(client: httpx.AsyncClient, path: str, error: str) -> None:
    """400, while metadata answers 404 (reference §1.5)."""
    reply = await client.get(path)

    assert reply.status_code == 400
    assert reply.json()["error"].startswith(error)


async def test_what_a_gateway_ends_itself_is_counted_as_failed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Refused by a full queue, and given up by clients: no worker ever counts these."""
    monkeypatch.setattr(reporting, "FLUSH_EVERY_S", 0.01)
    path = "/v2/models/bounded/infer"
    async with running_gateway(settings_of()) as running, httpx.AsyncClient(base_url=running.url) as client:

        async def is_full() -> bool:
            return await running.depth("bounded") == 3

        async def counts() -> dict[str, int]:
            fields = await running.store.stats("bounded", 1)
            return {name: count for name, count in fields.items() if name.startswith("refusals:")}

        async def are_counted() -> bool:
            return await counts() == {"refusals:queue_full": 1, "refusals:cancelled": 3}

        waiting = [asyncio.create_task(client.post(path, json=QUESTION)) for _ in range(3)]
        await eventually(is_full, description="three requests in the lane")
        assert (await client.post(path, json=QUESTION)).status_code == 503
        for task in waiting:
            task.cancel()
        await asyncio.wait(waiting)

        await eventually(are_counted, description="the statistics")
        (shown,) = (await client.get("/v2/models/bounded/stats")).json()["model_stats"]
        assert shown["inference_stats"]["fail"]["count"] == 4
        assert shown["inference_stats"]["fail"]["ns"] > 0
        assert shown["inference_stats"]["success"]["count"] == 0


async def test_log_settings(client: httpx.AsyncClient, running: Running) -> None:
    """They are read, changed, and kept where every gateway reads them."""
    before = (await client.get("/v2/logging")).json()
    changed = await client.post("/v2/logging", json={"log_info": False, "log_verbose_level": 2})

    assert before == {
        "log_file": "",
        "log_info": True,
        "log_warning": True,
        "log_error": True,
        "log_verbose_level": 0,
        "log_format": "default",
    }
    assert changed.json() == before | {"log_info": False, "log_verbose_level": 2}
    assert (await client.get("/v2/logging")).json() == changed.json()
    stored = (await running.store.settings()).items()
    assert stored >= {"logging/log_info": "false", "logging/log_verbose_level": "2"}.items()


@pytest.mark.parametrize(
    ("path", "body", "status", "error"),
    [
        ("/v2/logging", b'{"log_file": "x"}', 501, "log file location can not be updated through network protocol"),
        ("/v2/logging", b'{"log_format": "x"}', 503, "invalid argument for log_format, got: x"),
        ("/v2/logging", b'{"log_info": "x"}', 500, "'log_info': attempt to access JSON non-boolean as boolean"),
        ("/v2/logging", b"", 400, "failed to parse the request JSON buffer: "),
        ("/v2/trace/setting", b'{"trace_file": "x"}', 501, "trace file location can not be updated through network"),
        ("/v2/trace/setting", b'{"trace_level": ["TIMESTAMPS"]}', 501, "traces are not written on this server; set"),
        (
            "/v2/trace/setting",
            b'{"trace_level": ["TENSORS"]}',
            501,
            "traces are not written on this server; set QINFER_TRACE__FILE",
        ),
        ("/v2/trace/setting", b'{"trace_mode": "opentelemetry"}', 501, "trace mode can not be updated through network"),
        ("/v2/trace/setting", b'{"trace_rate": 1}', 500, "'trace_rate': attempt to access JSON non-string as string"),
        ("/v2/models/nothing/trace/setting", b"{}", 400, "Request for unknown model : nothing"),
        ("/v2/models/loading/trace/setting", b"{}", 400, "Request for unknown model : loading"),
    ],
)
async def test_what_settings_refuse(client: httpx.AsyncClient, path: str, body: bytes, status: int, error: str) -> None:
    """Status and text of each case of reference §1.16 and §1.17."""
    reply = await client.post(path, content=body)

    assert reply.status_code == status
    assert reply.json()["error"].startswith(error)


async def test_trace_settings(client: httpx.AsyncClient) -> None:
    """Strings, a model's own beside the server's."""
    mine = await client.post("/v2/models/echo/trace/setting", json={"trace_rate": "5"})
    server = await client.post("/v2/trace/setting", json={"log_frequency": "3", "trace_mode": "triton"})

    assert mine.json()["trace_level"] == ["OFF"]
    assert server.json() == {
        "trace_level": ["OFF"],
        "trace_rate": "1000",
        "trace_count": "-1",
        "log_frequency": "3",
        "trace_file": "",
        "trace_mode": "triton",
    }
    assert (await client.get("/v2/models/echo/trace/setting")).json() == server.json() | {"trace_rate": "5"}


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [
        ("GET", "/v2/repository/index", 405),
        ("GET", "/v2/repository/models/echo/load", 405),
        ("POST", "/v2/models/echo/stats", 405),
        ("POST", "/v2/models/stats", 405),
        ("DELETE", "/v2/logging", 405),
        ("GET", "/v2/logging/", 404),
        ("GET", "/v2/models/echo/stats/", 404),
        ("GET", "/v2/models/echo/versions/1/trace/setting", 404),
        ("POST", "/v2/repository/models/echo", 404),
    ],
)
async def test_other_methods_and_paths(client: httpx.AsyncClient, method: str, path: str, status: int) -> None:
    """405 on what is there, 404 on what is not, both with a JSON text (reference §1.1)."""
    reply = await client.request(method, path)

    assert reply.status_code == status
    assert reply.json() == {"error": {404: "Not Found", 405: "Method Not Allowed"}[status]}


RESTRICTED = {
    "health": [("GET", "/v2/health/live"), ("GET", "/v2/health/ready"), ("GET", "/v2/models/echo/ready")],
    "metadata": [("GET", "/v2"), ("GET", "/v2/models/echo"), ("GET", "/v2/models/echo/versions/1")],
    "inference": [("POST", "/v2/models/echo/infer"), ("POST", "/v2/models/echo/generate"), ("GET", "/v1/requests/x")],
    "shared-memory": [("GET", "/v2/systemsharedmemory/status"), ("GET", "/v2/cudasharedmemory/status")],
    "model-config": [("GET", "/v2/models/echo/config"), ("GET", "/v2/models/echo/versions/1/config")],
    "model-repository": [("POST", "/v2/repository/index"), ("POST", "/v2/repository/models/echo/load")],
    "statistics": [("GET", "/v2/models/stats"), ("GET", "/v2/models/echo/stats")],
    "trace": [("GET", "/v2/trace/setting"), ("POST", "/v2/models/echo/trace/setting")],
    "logging": [("GET", "/v2/logging"), ("POST", "/v2/logging")],
}


async def test_restricted_routes_need_their_header() -> None:
    """Each group its own; all else is refused with 403 and Triton's text, on the fast path too (reference §1.2)."""
    entries = tuple(f"{group}:X-{group}={group}-secret" for group in RESTRICTED)
    settings = settings_of(http=HttpSettings(port=0, restricted=entries))
    async with running_gateway(settings) as running, httpx.AsyncClient(base_url=running.url) as client:
        for group, routes in RESTRICTED.items():
            for method, path in routes:
                refused = await client.request(method, path, json=QUESTION, headers={"x-other": "secret"})
                taken = await client.request(method, path, json=QUESTION, headers={f"X-{group}": f"{group}-secret"})

                assert (refused.status_code, refused.json()) == (
                    403,
                    {"error": f"This API is restricted, expecting header 'x-{group}'"},
                )
                assert taken.status_code != 403, path
        reply = await client.post("/v2/models/echo/infer", json=QUESTION, headers={"x-inference": "inference-secret"})
        assert reply.json()["outputs"][0]["data"] == [1, 2, 3, 4]
        assert (await client.get("/metrics")).status_code == 200


async def test_what_changes_the_server_takes_the_scope_admin(tmp_path: Path) -> None:
    """Reading takes that of inference."""
    file = tmp_path / "keys.json"
    keys = [add_key(file, scope.value, (scope,), scope.value)[1] for scope in (Scope.INFER, Scope.ADMIN)]
    settings = settings_of(auth=AuthSettings(mode="keys", keys_file=str(file)))
    changing = ["/v2/repository/models/echo/load", "/v2/repository/models/echo/unload"]
    changing += ["/v2/logging", "/v2/trace/setting", "/v2/models/echo/trace/setting"]
    reading = ["/v2/logging", "/v2/trace/setting", "/v2/models/echo/trace/setting", "/v2/models/stats"]
    async with running_gateway(settings) as running, httpx.AsyncClient(base_url=running.url) as client:
        infer, admin = ({"x-api-key": key} for key in keys)
        for path in changing:
            assert (await client.post(path, content=b"{}")).status_code == 401
            assert (await client.post(path, content=b"{}", headers=infer)).status_code == 403
            assert (await client.post(path, content=b"{}", headers=admin)).status_code in (200, 503)
        for path in reading:
            assert (await client.get(path)).status_code == 401
            assert (await client.get(path, headers=infer)).status_code == 200
        assert (await client.post("/v2/repository/index", headers=infer)).status_code == 200
        assert (await client.post("/v2/repository/index")).status_code == 401


async def test_strict_readiness() -> None:
    """The server is not ready while one model is not: 400 without a body (reference §1.3)."""
    settings = settings_of(repository=RepositorySettings(strict_readiness=True))
    async with running_gateway(settings) as running, httpx.AsyncClient(base_url=running.url) as client:
        reply = await client.get("/v2/health/ready")

        assert (reply.status_code, reply.content) == (400, b"")
        assert (await client.get("/v2/models/echo/ready")).status_code == 200
        assert (await client.get("/v2/models/loading/ready")).status_code == 400


async def test_the_documentation_describes_every_route(client: httpx.AsyncClient) -> None:
    """With the bodies that are parsed by hand."""
    paths = (await client.get("/openapi.json")).json()["paths"]

    for path in ("/v2/repository/index", "/v2/repository/models/{model}/load", "/v2/logging", "/v2/trace/setting"):
        assert "requestBody" in paths[path]["post"], path
    assert "ModelStats" in str(paths["/v2/models/{model}/versions/{version}/stats"]["get"]["responses"]["200"])
