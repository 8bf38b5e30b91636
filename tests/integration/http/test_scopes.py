"""Every documented route with a key of each scope: which keys it lets in."""

import re
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import pytest_asyncio

from qinfer.core.api_keys import Scope, add_key
from tests.support.gateway import running_gateway, settings_of

pytestmark = pytest.mark.asyncio(loop_scope="module")

FOR_VIEWERS = {
    ("get", "/v1/dead-letters"),
    ("get", "/v1/endpoints"),
    ("get", "/v1/endpoints/{endpoint}"),
    ("get", "/v1/jobs"),
    ("get", "/v1/jobs/{job_id}"),
    ("get", "/v1/models/{model}"),
    ("get", "/v1/models/{model}/backlog"),
    ("get", "/v1/models/{model}/metadata"),
    ("get", "/v1/models/{model}/requests/{request_id}"),
    ("get", "/v1/models/{model}/requests/{request_id}/timeline"),
    ("get", "/v1/models/{model}/versions/{version}"),
    ("get", "/v1/models/{model}/versions/{version}/metadata"),
    ("get", "/v1/operations"),
    ("get", "/v1/operations/{operation_id}"),
    ("get", "/v1/pauses"),
    ("get", "/v1/recordings"),
    ("get", "/v1/requests"),
    ("get", "/v1/requests/{request_id}"),
    ("get", "/v1/requests/{request_id}/timeline"),
    ("get", "/v1/workers"),
    ("get", "/v2"),
    ("get", "/v2/models/stats"),
    ("get", "/v2/models/{model}"),
    ("get", "/v2/models/{model}/config"),
    ("get", "/v2/models/{model}/stats"),
    ("get", "/v2/models/{model}/versions/{version}"),
    ("get", "/v2/models/{model}/versions/{version}/config"),
    ("get", "/v2/models/{model}/versions/{version}/stats"),
    ("post", "/v2/repository/index"),
}
"""The routes that show states and figures alone."""

FOR_ADMINISTRATORS = {
    ("delete", "/v1/endpoints/{endpoint}"),
    ("get", "/v1/endpoints/{endpoint}/differences"),
    ("get", "/v1/workers/{worker}/log"),
    ("delete", "/v1/recordings/{recording}"),
    ("get", "/v1/recordings/{recording}"),
    ("post", "/v1/endpoints/{endpoint}/{decision}"),
    ("post", "/v1/models/{model}/recordings"),
    ("post", "/v1/models/{model}/pause"),
    ("post", "/v1/models/{model}/resume"),
    ("post", "/v1/models/{model}/versions/{version}/pause"),
    ("post", "/v1/models/{model}/versions/{version}/resume"),
    ("post", "/v1/workers/{worker}/drain"),
    ("post", "/v2/logging"),
    ("post", "/v2/models/{model}/trace/setting"),
    ("post", "/v2/repository/models/{model}/load"),
    ("post", "/v2/repository/models/{model}/unload"),
    ("post", "/v2/trace/setting"),
    ("put", "/v1/endpoints/{endpoint}"),
}

Operations = dict[tuple[str, str], dict[str, Any]]


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def door(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[tuple[httpx.AsyncClient, dict[str, str]]]:
    file = Path(tmp_path_factory.mktemp("keys")) / "keys.json"
    keys = {scope.value: add_key(file, "acme", (scope,), scope.value)[1] for scope in Scope}
    async with (
        running_gateway(settings_of(auth={"mode": "keys", "keys_file": str(file)})) as running,
        httpx.AsyncClient(base_url=running.url) as client,
    ):
        yield client, keys


async def operations(client: httpx.AsyncClient) -> Operations:
    """Returns the operations that need a key; paths that have a model's name in place of `{model}` are left out."""
    paths = (await client.get("/openapi.json")).json()["paths"]
    return {
        (method, path): operation
        for path, methods in paths.items()
        for method, operation in methods.items()
        if "security" in operation and not path.startswith("/models/") and "label-studio" not in path
    }


def needed(operation: dict[str, Any]) -> Scope:
    return Scope(next(iter(operation["security"][0].values()))[0])


async def test_the_document_names_the_scope_of_each_route(door: tuple[httpx.AsyncClient, dict[str, str]]) -> None:
    found = await operations(door[0])

    of = {scope: {key for key, one in found.items() if needed(one) is scope} for scope in Scope}
    assert of[Scope.VIEWER] == FOR_VIEWERS
    assert of[Scope.ADMIN] == FOR_ADMINISTRATORS
    assert of[Scope.INFER]


@pytest.mark.parametrize("scope", Scope)
async def test_each_route_lets_in_the_keys_of_its_scope(
    door: tuple[httpx.AsyncClient, dict[str, str]], scope: Scope
) -> None:
    """A viewer's key can change nothing and read no contents; one of scope `infer` can't administer."""
    client, keys = door
    wrong: list[tuple[str, str, int]] = []

    for (method, path), operation in (await operations(client)).items():
        concrete = re.sub(r"{(\w+)}", lambda found: "1" if found[1] == "version" else "no-such", path)
        reply = await client.request(method, concrete, headers={"x-api-key": keys[scope.value]})
        is_refused = reply.status_code == 403 and "does not have the scope" in reply.text
        if is_refused != (needed(operation) not in scope.included) or reply.status_code == 401:
            wrong.append((method, path, reply.status_code))

    assert wrong == []


async def test_no_route_of_the_document_answers_without_a_key(
    door: tuple[httpx.AsyncClient, dict[str, str]],
) -> None:
    client, _ = door

    statuses = {
        key: (await client.request(key[0], re.sub(r"{\w+}", "1", key[1]))).status_code
        for key in await operations(client)
    }

    assert {key: status for key, status in statuses.items() if status != 401} == {}
