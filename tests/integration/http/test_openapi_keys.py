"""What `/openapi.json` says of API keys is what a gateway asks for: each operation is called with each kind of key."""

import re
from base64 import b64encode
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import httpx
import pytest

from qinfer.core.api_keys import Scope, add_key
from scripts.reference_http import document
from tests.support.gateway import running_gateway, settings_of

DOCUMENT = document()


class Door(NamedTuple):
    """A client of a gateway that asks for keys, and a key of each scope."""

    client: httpx.AsyncClient
    keys: dict[Scope, str]

    async def status(self, method: str, path: str, headers: dict[str, str] | None = None) -> int:
        return (await self.client.request(method, path, headers=headers)).status_code


@pytest.fixture
async def door(tmp_path: Path) -> AsyncIterator[Door]:
    file = tmp_path / "keys.json"
    keys = {scope: add_key(file, "acme", (scope,), scope)[1] for scope in Scope}
    settings = settings_of(auth={"mode": "keys", "keys_file": str(file)})
    async with running_gateway(settings) as running, httpx.AsyncClient(base_url=running.url) as client:
        yield Door(client, keys)


def operations() -> Iterator[tuple[str, str, dict[str, Any]]]:
    for path, methods in DOCUMENT["paths"].items():
        for method, operation in methods.items():
            yield re.sub(r"{(\w+)}", "1", path), method, operation


def presented(scheme: str, key: str) -> dict[str, str]:
    """Returns the header of a security scheme, as the document describes it."""
    told = DOCUMENT["components"]["securitySchemes"][scheme]
    if told["type"] == "apiKey":
        assert told["in"] == "header"
        return {told["name"]: key}
    credentials = key if told["scheme"] == "bearer" else b64encode(f"any:{key}".encode()).decode()
    return {"authorization": f"{told['scheme'].title()} {credentials}"}


async def test_operations_ask_for_the_keys_that_they_name(door: Door) -> None:
    """By each header that they name, and for no key where they name none."""
    wrong = []
    for path, method, operation in operations():
        security = operation.get("security", [])
        without = await door.status(method, path)
        wrong += [f"{method} {path}: {without} without a key"] if (without == 401) is not bool(security) else []
        for scheme, scopes in (next(iter(one.items())) for one in security):
            (needed,) = scopes
            for scope, key in door.keys.items():
                status = await door.status(method, path, presented(scheme, key))
                is_let_in = Scope(needed) in scope.included
                if status == 401 or (status == 403) is is_let_in:
                    wrong.append(f"{method} {path}: {status} with {scheme} and {scope}")

    assert wrong == []


def test_schemes_and_scopes_are_all_used() -> None:
    used = [one for _, _, operation in operations() for one in operation.get("security", [])]

    assert {scheme for one in used for scheme in one} == DOCUMENT["components"]["securitySchemes"].keys()
    assert {scope for one in used for (scope,) in one.values()} == set(Scope)
    assert len([operation for _, _, operation in operations() if "security" not in operation]) < 8
