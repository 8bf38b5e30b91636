"""Endpoints of files: written when a gateway starts, each content once."""

from pathlib import Path
from typing import Any

import httpx
import msgspec
import pytest

from qinfer.core.settings import Settings
from qinfer.core.settings_sections import EndpointSettings
from qinfer.testing import eventually
from tests.support.endpoints import another, canary, declare, split
from tests.support.gateway import Running, declare_more, running_gateway, settings_of


def settings_with(directory: Path) -> Settings:
    return settings_of().model_copy(update={"endpoints": EndpointSettings(path=str(directory))})


def write(directory: Path, declaration: dict[str, Any]) -> None:
    (directory / "of-file.json").write_bytes(msgspec.json.encode(declaration))


async def stable_of(running: Running) -> str:
    async with httpx.AsyncClient(base_url=running.url) as client:
        reply = await client.get("/v1/endpoints/of-file")
        assert reply.status_code == 200
        return str(reply.json()["targets"][0]["target"])


async def test_what_was_changed_since_survives_a_restart(tmp_path: Path) -> None:
    """Until the file is edited: then it says again what is to be."""
    write(tmp_path, split(canary(0.1)))
    async with running_gateway(settings_with(tmp_path)) as first:
        assert await stable_of(first) == "echo:1"
        await declare([first], "of-file", split(stable="echo:2"))

        async with another(first, settings_with(tmp_path)) as second:
            assert await stable_of(second) == "echo:2"

        write(tmp_path, split(canary(0.2)))
        async with another(first, settings_with(tmp_path)) as third:
            assert await stable_of(third) == "echo:1"


async def test_a_declaration_waits_for_its_models(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A gateway may start before anybody has written them."""
    monkeypatch.setattr("qinfer_api.endpoints.routes.AGAIN_S", 0.05)
    write(tmp_path, split(stable="newcomer:1"))
    async with running_gateway(settings_with(tmp_path)) as running:
        assert "of-file" not in running.gateway.dispatcher.endpoints.by_name

        await declare_more(running, "newcomer")

        async def is_there() -> bool:
            return "of-file" in running.gateway.dispatcher.endpoints.by_name

        await eventually(is_there, description="the endpoint of the file")
