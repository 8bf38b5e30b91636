"""qinfer's client against real gateways: lists, generate, index, statistics, headers, TLS, keys, several gateways."""

import asyncio
import pickle
from collections.abc import AsyncIterator, Callable
from contextlib import aclosing
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import pytest

import qinfer
from qinfer.core.api_keys import Scope, add_key
from qinfer.errors import ControlDisabled, InferenceFailed, InvalidRequest, Unauthorized, Unreachable
from tests.support.certificates import write_certificate
from tests.support.gateway import Running, running_gateway, settings_of

T = TypeVar("T")
X = [[1.0, 2.0, 3.0, 4.0]]


@pytest.fixture
async def running() -> AsyncIterator[Running]:
    async with running_gateway(settings_of({"header_forward_pattern": "told_.*"})) as gateway:
        yield gateway


async def asked(url: str | list[str], ask: Callable[[qinfer.Client], T], **options: Any) -> T:
    """Returns what a blocking client answers, which runs in a thread."""

    def run() -> T:
        with qinfer.Client(url, timeout_s=20.0, **options) as client:
            return ask(client)

    return await asyncio.to_thread(run)


async def test_lists_are_sent_as_the_model_wants_them(running: Running) -> None:
    """Numbers, texts and half floats; both ways of asking, and a result that travels between processes."""
    async with qinfer.AsyncClient(running.url) as client:
        numbers = await client.infer("echo", {"x": [[1, 2, 3, 4]]})
        texts = await client.infer("text", {"x": [["grüße", b"b"]]})
        halves = await client.infer("half", {"x": [[0.5, 1.5]]})
        handle = await client.submit("echo", {"x": X})
        stored = await client.result(handle)

    assert (numbers["y"].dtype.name, numbers["y"].tolist()) == ("float32", X)
    assert texts["y"].tolist() == [["grüße".encode(), b"b"]]
    assert halves["y"].dtype.name == "float16"
    assert pickle.loads(pickle.dumps(stored))["y"].tolist() == X


async def test_a_wrong_shape_of_a_list_is_the_servers_refusal(running: Running) -> None:
    with pytest.raises(InvalidRequest, match="shape"):
        await asked(running.url, lambda client: client.infer("echo", {"x": [1.0, 2.0]}))


async def test_generate(running: Running) -> None:
    def ask(client: qinfer.Client) -> tuple[dict[str, Any], list[dict[str, Any]]]:
        one = client.generate("echo", {"x": np.array(X[0])}, id="7", headers={"told_me": "b"})
        return one, list(client.generate_stream("echo", {"x": X[0]}, parameters={"responses": 3}))

    one, many = await asked(running.url, ask)

    assert one == {"id": "7", "model_name": "echo", "model_version": "2", "y": X[0], "told_me": "b"}
    assert [response["y"] for response in many] == [X[0]] * 3


async def test_generate_of_the_other_client(running: Running) -> None:
    """A stream that is left frees its connection, and a failure is raised."""
    async with qinfer.AsyncClient(running.url) as client:
        stream = client.generate_stream("echo", {"x": X[0]}, parameters={"responses": 3})
        async with aclosing(stream) as responses:  # type: ignore[type-var]  # it is a generator
            await anext(responses)
        again = await client.generate("one", {"x": "hello"})
        with pytest.raises(InferenceFailed, match="boom"):
            await anext(client.generate_stream("fails", {"x": X[0]}))

    assert again["y"] == "hello"


async def test_index_statistics_and_configuration(running: Running) -> None:
    def ask(client: qinfer.Client) -> tuple[Any, ...]:
        return client.index(), client.index(ready=True), client.statistics("echo", 1), client.config("echo")

    index, ready, (statistics,), config = await asked(running.url, ask)

    states = {(entry.name, entry.version): entry.state for entry in index}
    assert (states["echo", "2"], states["loading", "1"]) == ("READY", "UNAVAILABLE")
    assert {entry.state for entry in ready} == {"READY"}
    assert (statistics.name, statistics.version) == ("echo", "1")
    assert "inference_stats" in statistics.fields
    assert config["max_batch_size"] == 8


@pytest.mark.parametrize("ask", [lambda c: c.load("echo"), lambda c: c.unload("echo")], ids=["load", "unload"])
async def test_a_server_that_does_not_load_says_so_at_once(running: Running, ask: Callable[[Any], None]) -> None:
    with pytest.raises(ControlDisabled, match="not allowed if polling is enabled"):
        await asked(running.url, ask)


async def test_another_gateway_takes_over() -> None:
    """In the middle of a stream of requests, of which none fails."""
    async with (
        running_gateway() as first,
        running_gateway() as second,
        qinfer.AsyncClient([first.url, second.url], timeout_s=20.0) as client,
    ):
        await client.infer("echo", {"x": X})
        first.gateway.stop()
        assert first.serving is not None
        await first.serving
        results = [await client.infer("echo", {"x": X}) for _ in range(3)]
        assert await client.is_live()
        assert await client.is_ready("echo")

    assert [result["y"].tolist() for result in results] == [X] * 3
    assert (len(first.requests), len(second.requests)) == (1, 3)


async def test_a_key_of_the_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _, key = add_key(tmp_path / "keys.json", "acme", (Scope.INFER,))
    settings = settings_of(auth={"mode": "keys", "keys_file": str(tmp_path / "keys.json")})
    monkeypatch.setenv("QINFER_API_KEY", key)

    async with running_gateway(settings) as running:
        found = await asked(running.url, lambda client: client.infer("echo", {"x": X}))
        with pytest.raises(Unauthorized):
            await asked(running.url, lambda client: client.infer("echo", {"x": X}), api_key="")

    assert found["y"].tolist() == X


async def test_an_authority_of_ones_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("SSL_CERT_FILE", raising=False)
    authority = write_certificate(tmp_path, "authority")
    write_certificate(tmp_path, "server", authority)
    tls = {"tls_certfile": str(tmp_path / "server.pem"), "tls_keyfile": str(tmp_path / "server.key")}

    async with running_gateway(settings_of(tls)) as running:
        found = await asked(
            running.url, lambda client: client.infer("echo", {"x": X}), ca_file=tmp_path / "authority.pem"
        )
        with pytest.raises(Unreachable, match="ca_file"):
            await asked(running.url, lambda client: client.infer("echo", {"x": X}))

    assert running.url.startswith("https://")
    assert found["y"].tolist() == X
