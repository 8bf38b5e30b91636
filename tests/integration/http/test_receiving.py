"""What a gateway receives at a time is bounded over all HTTP bodies: large ones wait, others are refused."""

import asyncio
import contextlib
import gzip
import json
import threading
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from qinfer.core.api_keys import Scope, add_key
from qinfer.testing import eventually
from qinfer_api.http.infer import InferCodec
from qinfer_api.receiving import PATIENCE_S
from tests.integration.http.test_connection import Client, connected
from tests.support.gateway import Running, running_gateway, settings_of

BUDGET = 2**20
LARGE = 400_000
MIDDLE = 200_000  # small enough for the fast path
SMALL = 20_000
URL = "/v2/models/echo/infer"
INFER = json.dumps({"inputs": [{"name": "x", "shape": [1, 4], "datatype": "FP32", "data": [1, 2, 3, 4]}]}).encode()


def body(size: int) -> bytes:
    """Returns an infer request of that many bytes."""
    return INFER + b" " * (size - len(INFER))


def head(size: int | None, *headers: str) -> bytes:
    """Returns the head of a request; `None` = its body is chunked."""
    length = "Transfer-Encoding: chunked" if size is None else f"Content-Length: {size}"
    return "\r\n".join([f"POST {URL} HTTP/1.1", "Host: localhost", length, *headers]).encode() + b"\r\n\r\n"


def chunk(data: bytes) -> bytes:
    return b"%x\r\n%b\r\n" % (len(data), data)


@pytest.fixture(params=["fast", "route"])
async def running(request: pytest.FixtureRequest) -> AsyncIterator[Running]:
    http = {"drain_s": 0.1, "fast_path": request.param == "fast"}
    async with running_gateway(settings_of(http, {"max_receiving_bytes": BUDGET})) as one:
        yield one


async def until_held(running: Running, size: int) -> None:
    """Waits until bodies of that many bytes are let in."""

    async def is_so() -> bool:
        return running.gateway.receiving.held_bytes == size

    await eventually(is_so, description=f"{size} bytes of unfinished bodies")


async def until_waiting(running: Running, count: int) -> None:
    """Waits until so many bodies wait for their turn."""

    async def is_so() -> bool:
        return running.gateway.receiving.waiting == count

    await eventually(is_so, description=f"{count} waiting bodies")


@contextlib.asynccontextmanager
async def holding(running: Running, size: int, *headers: str) -> AsyncIterator[Client]:
    """Holds memory for a body of which the last byte does not come."""
    before = running.gateway.receiving.held_bytes
    async with connected(running) as client:
        client.send(head(size, *headers) + body(size)[:-1])
        await until_held(running, before + size)
        yield client


async def is_refused(client: Client) -> None:
    status, headers, text = await client.reply()
    assert status == 503
    assert int(headers["retry-after"]) >= 1
    assert b"QINFER_LIMITS__MAX_RECEIVING_BYTES" in text


async def test_a_large_body_waits_until_another_is_whole(running: Running) -> None:
    async with holding(running, LARGE) as first, holding(running, LARGE), connected(running) as late:
        late.send(head(LARGE) + body(LARGE))
        await until_waiting(running, 1)
        assert running.gateway.receiving.held_bytes == 2 * LARGE

        first.send(b" ")

        assert (await first.reply())[0] == 200
        assert (await late.reply())[0] == 200
        await until_held(running, LARGE)
    await until_held(running, 0)


async def test_small_bodies_are_refused_when_all_is_spent(running: Running) -> None:
    async with holding(running, 2 * BUDGET), connected(running) as client:
        client.send(head(None) + chunk(body(1000)))
        await is_refused(client)


async def test_a_compressed_body_waits_for_the_memory_of_what_comes_of_it(running: Running) -> None:
    """Else a few kilobytes of many clients would become gigabytes."""
    compressed = gzip.compress(body(LARGE))
    async with holding(running, LARGE) as first, holding(running, LARGE), connected(running) as late:
        late.send(head(len(compressed), "Content-Encoding: gzip") + compressed)
        await until_waiting(running, 1)

        first.send(b" ")

        assert (await first.reply())[0] == 200
        assert (await late.reply())[0] == 200
        await until_held(running, LARGE)


async def test_what_was_decompressed_is_counted_until_it_is_decoded(
    running: Running, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As large as it has become, and not as it might have; and with the most that its tensors may take."""
    reached, left, decode = threading.Event(), threading.Event(), InferCodec.decode

    def slowly(*arguments: Any) -> Any:
        reached.set()
        left.wait(timeout=60)
        return decode(*arguments)

    monkeypatch.setattr(InferCodec, "decode", slowly)
    async with connected(running) as client:
        client.send(head(None, "Content-Encoding: gzip") + chunk(gzip.compress(body(LARGE))) + b"0\r\n\r\n")
        await asyncio.to_thread(reached.wait, 60)

        assert running.gateway.receiving.held_bytes == LARGE + 4 * LARGE
        left.set()
        assert (await client.reply())[0] == 200
    await until_held(running, 0)


async def test_a_body_without_a_length_is_refused_where_memory_ends(running: Running) -> None:
    async with holding(running, LARGE), holding(running, LARGE), connected(running) as client:
        client.send(head(None) + chunk(body(LARGE)))
        await is_refused(client)
        await until_held(running, 2 * LARGE)


async def test_a_body_without_a_length_is_counted_as_it_grows(running: Running) -> None:
    async with connected(running) as client:
        client.send(head(None) + chunk(body(LARGE)))
        await until_held(running, LARGE)
        client.send(chunk(b" " * 1000))
        await until_held(running, LARGE + 1000)
        client.send(b"0\r\n\r\n")

        assert (await client.reply())[0] == 200
    await until_held(running, 0)


@pytest.mark.parametrize(
    ("request_bytes", "status"),
    [
        pytest.param(head(LARGE) + b"!" * LARGE, 400, id="no JSON"),
        pytest.param(head(LARGE, "Content-Encoding: gzip") + b"!" * LARGE, 400, id="no gzip"),
        pytest.param(head(None) + chunk(b" " * LARGE) + b"!\r\n", 400, id="broken chunk"),
    ],
)
async def test_errors_leave_nothing_reserved(running: Running, request_bytes: bytes, status: int) -> None:
    async with connected(running) as client:
        client.send(request_bytes)

        assert (await client.reply())[0] == status
        await until_held(running, 0)


async def test_clients_that_leave_hold_nothing(running: Running) -> None:
    async with holding(running, LARGE), holding(running, LARGE), connected(running) as waiting:
        waiting.send(head(LARGE) + body(LARGE)[:-1])
        await until_waiting(running, 1)
    await until_held(running, 0)


async def test_a_client_that_leaves_waits_no_longer(running: Running) -> None:
    """Its place is free at once, and not only when its turn comes."""
    async with holding(running, LARGE), holding(running, LARGE):
        async with connected(running) as waiting:
            waiting.send(head(LARGE) + body(LARGE)[:1000])
            await until_waiting(running, 1)

        await until_waiting(running, 0)
        assert running.gateway.receiving.held_bytes == 2 * LARGE


@pytest.mark.parametrize(
    ("sent", "held"),
    [
        pytest.param(head(LARGE) + body(LARGE)[:1000], LARGE, id="a length"),
        pytest.param(head(MIDDLE) + body(MIDDLE)[:1000], MIDDLE, id="middle size"),
        pytest.param(head(None, "Content-Encoding: gzip") + chunk(bytes(500)), 516_500, id="chunks"),
    ],
)
async def test_a_body_that_comes_too_slowly_loses_its_memory(running: Running, sent: bytes, held: int) -> None:
    """Long before its time to be sent is over, and with its connection."""
    async with connected(running) as slow:
        slow.send(sent)
        await until_held(running, held)

        for _ in range(PATIENCE_S + 1):
            running.gateway.receiving.second_passed()

        assert await slow.is_closed()
        await until_held(running, 0)


async def test_a_body_of_middle_size_waits_too(running: Running) -> None:
    async with holding(running, LARGE) as first, holding(running, LARGE), connected(running) as late:
        late.send(head(MIDDLE) + body(MIDDLE)[:-1])
        await until_waiting(running, 1)

        first.send(b" ")
        assert (await first.reply())[0] == 200
        await until_held(running, LARGE + MIDDLE)
        late.send(b" " + head(len(INFER)) + INFER)

        assert (await late.reply())[0] == 200
        assert (await late.reply())[0] == 200
        await until_held(running, LARGE)


async def test_a_body_of_middle_size_gives_its_memory_back(running: Running) -> None:
    async with holding(running, MIDDLE) as broken:
        broken.send(b"!")
        assert (await broken.reply())[0] == 400
        await until_held(running, 0)
        broken.send(head(len(INFER)) + INFER)
        assert (await broken.reply())[0] == 200
    async with holding(running, MIDDLE):
        pass
    await until_held(running, 0)


async def test_a_connection_outlives_a_refusal(running: Running) -> None:
    async with holding(running, 2 * BUDGET) as first, connected(running) as client:
        client.send(head(SMALL) + body(SMALL)[:-1])
        await is_refused(client)
        client.send(b" ")
        first.writer.close()
        await until_held(running, 0)

        client.send(head(len(INFER)) + INFER)
        assert (await client.reply())[0] == 200


async def test_a_turn_that_does_not_come_is_refused_in_time() -> None:
    settings = settings_of({"drain_s": 0.1, "request_read_timeout_s": 2.0}, {"max_receiving_bytes": BUDGET})
    async with running_gateway(settings) as running, connected(running) as client:
        first = running.gateway.receiving.reserve("another", BUDGET, lambda: None)
        client.send(head(MIDDLE) + body(MIDDLE)[:-1])
        await is_refused(client)

        assert first is not None
        first.release()
        await until_waiting(running, 0)
        await until_held(running, 0)


async def test_a_tenant_that_holds_less_goes_first(tmp_path: Path) -> None:
    file = tmp_path / "keys.json"
    ours, theirs = (f"Authorization: Bearer {add_key(file, name, (Scope.INFER,), name)[1]}" for name in ("a", "b"))
    settings = settings_of({"drain_s": 0.1}, {"max_receiving_bytes": BUDGET}, {"mode": "keys", "keys_file": str(file)})
    async with (
        running_gateway(settings) as running,
        holding(running, LARGE, ours) as first,
        holding(running, LARGE, ours),
        connected(running) as again,
        connected(running) as other,
    ):
        again.send(head(LARGE, ours) + body(LARGE)[:-1])
        await until_waiting(running, 1)
        other.send(head(LARGE, theirs) + body(LARGE)[:-1])
        await until_waiting(running, 2)

        first.send(b" ")
        assert (await first.reply())[0] == 200
        other.send(b" ")
        assert (await other.reply())[0] == 200


@pytest.mark.parametrize("size", [MIDDLE, LARGE])
async def test_strangers_reserve_nothing(tmp_path: Path, size: int) -> None:
    file = tmp_path / "keys.json"
    add_key(file, "a", (Scope.INFER,), "a")
    settings = settings_of({"drain_s": 0.1}, {"max_receiving_bytes": BUDGET}, {"mode": "keys", "keys_file": str(file)})
    async with running_gateway(settings) as running, connected(running) as client:
        client.send(head(size) + body(size)[:-1])

        assert (await client.reply())[0] == 401
        assert running.gateway.receiving.held_bytes == 0
