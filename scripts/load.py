"""A small load generator for the demo: keep-alive connections over asyncio streams, one request in flight on each."""

import asyncio
import json
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """What came back for one request.

    Attributes:
        item: The position in `bodies` of the request that was asked.
        status: The HTTP status.
        reply: The parsed JSON body.
        latency_s: From the first byte sent to the last byte received.
    """

    item: int
    status: int
    reply: dict[str, Any]
    latency_s: float


async def ask_all(
    port: int,
    path: str,
    bodies: Sequence[bytes],
    *,
    rounds: int,
    connections: int,
    halfway: Callable[[], None] = lambda: None,
) -> list[Answer]:
    """Posts every body `rounds` times over `connections` connections; answers come in no particular order.

    `halfway` is called once, before the second half of the requests is sent.
    """
    requests = [_request(path, body) for body in bodies]
    items = _all_items(len(requests), rounds, halfway)
    answers: list[Answer] = []
    async with asyncio.TaskGroup() as group:
        for _ in range(connections):
            group.create_task(_connection(port, requests, items, answers))
    return answers


def _all_items(count: int, rounds: int, halfway: Callable[[], None]) -> Iterator[int]:
    for number in range(rounds * count):
        if number == rounds * count // 2:
            halfway()
        yield number % count


def _request(path: str, body: bytes) -> bytes:
    head = f"POST {path} HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Length: {len(body)}\r\n\r\n"
    return head.encode() + body


async def _connection(port: int, requests: Sequence[bytes], items: Iterator[int], answers: list[Answer]) -> None:
    """Takes items, shared by all connections, until there are none."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    try:
        for item in items:
            began_s = time.perf_counter()
            writer.write(requests[item])
            head = await reader.readuntil(b"\r\n\r\n")
            body = await reader.readexactly(_content_length(head))
            latency_s = time.perf_counter() - began_s
            status, reply = int(head[9:12]), json.loads(body or b"{}")
            answers.append(Answer(item=item, status=status, reply=reply, latency_s=latency_s))
    finally:
        writer.close()


def _content_length(head: bytes) -> int:
    for line in head.split(b"\r\n"):
        name, _, value = line.partition(b":")
        if name.lower() == b"content-length":
            return int(value)
    raise ValueError(f"a reply without Content-Length: {head[:200]!r}")
