"""`stream`: many inputs at a time, never too many, in order or not, ended early or by an error."""

import asyncio
import json
import subprocess
import sys
import threading
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import aclosing
from itertools import count
from typing import Any

import httpx
import numpy as np
import pytest

import qinfer
from qinfer.client.steps import Flow, Pause
from qinfer.client.streams import stream_in_tasks, stream_in_threads
from qinfer.core.messages import Response
from qinfer.errors import InferenceFailed, InvalidRequest
from qinfer.tensors import from_numpy, to_numpy
from qinfer.wire.kserve_json import decode_infer, encode_infer


class Calls:
    """Calls that are counted while they run, and end when they may."""

    def __init__(self) -> None:
        self.running = self.most = self.cancelled = 0
        self.gate = asyncio.Event()
        self.gate.set()

    async def double(self, index: int, item: int) -> int:
        self.running += 1
        self.most = max(self.most, self.running)
        try:
            await asyncio.sleep(0)
            await self.gate.wait()
        except asyncio.CancelledError:
            self.cancelled += 1
            raise
        finally:
            self.running -= 1
        if item == 13:
            raise InferenceFailed("unlucky")
        return 2 * item


async def awaited(flow: Any) -> Any:
    return await flow


def in_tasks(items: Any, call: Callable[[int, Any], Awaitable[Any]], **options: Any) -> AsyncIterator[tuple[int, Any]]:
    """Streams calls that are coroutines in place of flows."""
    return stream_in_tasks(items, call, awaited, **options)  # type: ignore[arg-type]


def finish(flow: Flow[Any]) -> Any:
    """Runs a flow that needs no answers."""
    try:
        while True:
            flow.send(None)
    except StopIteration as end:
        return end.value


def in_threads(items: Any, call: Callable[[int, Any], Any], **options: Any) -> Iterator[tuple[int, Any]]:
    """Streams calls that are functions in place of flows."""

    def plan(index: int, item: Any) -> Flow[Any]:
        yield from ()
        return call(index, item)

    return stream_in_threads(items, plan, finish, **options)


@pytest.mark.parametrize("ordered", [True, False], ids=["ordered", "unordered"])
async def test_tasks_are_bounded(*, ordered: bool) -> None:
    """Never more calls at a time than asked for; each input has one answer, a failure too."""
    calls = Calls()

    found = [pair async for pair in in_tasks(range(50), calls.double, concurrency=7, ordered=ordered)]

    assert calls.most == 7
    assert {index: str(value) for index, value in found} == {n: "unlucky" if n == 13 else str(2 * n) for n in range(50)}
    assert not ordered or [index for index, _ in found] == list(range(50))


async def test_tasks_read_no_further_than_needed() -> None:
    """Endless inputs are fine: what is taken and not handed out stays within the bound, one slow answer in front."""
    taken: list[int] = []
    slow = asyncio.Event()

    def inputs() -> Iterator[int]:
        for n in count():
            taken.append(n)
            yield n

    async def call(index: int, item: int) -> int:
        if item == 0:
            await slow.wait()
        elif item == 4:
            slow.set()  # the last that can be taken while the first is held up
        return item

    async with aclosing(in_tasks(inputs(), call, concurrency=5, ordered=True)) as stream:  # type: ignore[type-var]
        first = await anext(stream)

    assert first == (0, 0)
    assert len(taken) <= 6


async def test_tasks_take_asynchronous_inputs() -> None:
    """An answer does not wait for the next input."""
    more = asyncio.Event()

    async def inputs() -> AsyncIterator[int]:
        yield 1
        await more.wait()
        yield 2

    found = []
    async for pair in in_tasks(inputs(), Calls().double, concurrency=4, ordered=True):
        found.append(pair)
        more.set()

    assert found == [(0, 2), (1, 4)]


async def test_leaving_a_stream_cancels_its_tasks() -> None:
    """Nothing runs on after the iteration."""
    calls = Calls()
    stream = in_tasks(count(), calls.double, concurrency=4, ordered=True)

    async with aclosing(stream):  # type: ignore[type-var]
        async for _ in stream:
            calls.gate.clear()
            break

    assert calls.running == 0


@pytest.mark.parametrize("ordered", [True, False], ids=["ordered", "unordered"])
async def test_broken_inputs_come_last_in_tasks(*, ordered: bool) -> None:
    """Requests that were sent before the inputs broke are answered; then the inputs' own error is raised."""
    found: list[Any] = []

    async def collect() -> None:
        async for pair in in_tasks(broken_inputs(), Calls().double, concurrency=2, ordered=ordered):
            found.append(pair)  # noqa: PERF401  # a new list would be lost with the error

    with pytest.raises(RuntimeError, match="disk"):
        await collect()

    assert sorted(found) == [(0, 0), (1, 2), (2, 4)]


async def test_a_defect_in_a_task_is_not_hidden() -> None:
    """Anything but a `QinferError` ends the stream."""

    async def call(index: int, item: int) -> int:
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        [pair async for pair in in_tasks(range(3), call, concurrency=2, ordered=True)]


def test_a_defect_in_a_thread_is_not_hidden() -> None:
    """As with tasks."""
    with pytest.raises(ZeroDivisionError):
        list(in_threads(range(3), lambda index, item: 1 // 0, concurrency=2, ordered=True))


@pytest.mark.parametrize("ordered", [True, False], ids=["ordered", "unordered"])
def test_threads_are_bounded(*, ordered: bool) -> None:
    """As with tasks: never more than asked for, and each input has one answer."""
    lock, running, most = threading.Lock(), 0, 0
    together = threading.Barrier(7)

    def call(index: int, item: int) -> int:
        nonlocal running, most
        with lock:
            running += 1
            most = max(most, running)
        if index < 7:
            together.wait(10)  # they can only go on when all seven are there
        with lock:
            running -= 1
        if item == 13:
            raise InferenceFailed("unlucky")
        return 2 * item

    found = list(in_threads(range(50), call, concurrency=7, ordered=ordered))

    assert most == 7
    assert {index: str(value) for index, value in found} == {n: "unlucky" if n == 13 else str(2 * n) for n in range(50)}
    assert not ordered or [index for index, _ in found] == list(range(50))


def test_threads_read_no_further_than_needed() -> None:
    """A slow first answer does not let the rest pile up."""
    taken: list[int] = []
    slow = threading.Event()

    def inputs() -> Iterator[int]:
        for n in count():
            taken.append(n)
            yield n

    def call(index: int, item: int) -> int:
        if item == 0:
            assert slow.wait(10)
        elif item == 4:
            slow.set()
        return item

    stream = in_threads(inputs(), call, concurrency=5, ordered=True)

    assert next(stream) == (0, 0)
    assert len(taken) <= 6


def test_leaving_a_stream_ends_its_threads() -> None:
    """A call ends at its next step, its pauses at once, and the caller does not wait for them."""
    pauses, ended = threading.Event(), threading.Event()

    def plan(index: int, item: int) -> Flow[int]:
        try:
            if index:
                pauses.set()
                yield Pause(1e6)
        finally:
            if index:
                ended.set()
        return item

    stream = stream_in_threads(range(2), plan, finish, concurrency=2, ordered=False)

    assert next(stream) == (0, 0)
    assert pauses.wait(10)
    stream.close()  # type: ignore[attr-defined]

    assert ended.wait(10)


def test_a_program_does_not_wait_for_what_it_left() -> None:
    """A call that hangs would otherwise hold up Ctrl-C until its timeout."""
    script = """
import threading
from qinfer.client.streams import stream_in_threads

def plan(index, item):
    yield
    return index

def run(flow):
    try:
        return next(flow) or next(flow)
    except StopIteration as end:
        return end.value or threading.Event().wait()

stream = stream_in_threads(range(9), plan, run, concurrency=3, ordered=False)
print(next(stream))
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=30, check=True)

    assert done.stdout == "(1, 1)\n"
    assert done.stderr == ""


@pytest.mark.parametrize("ordered", [True, False], ids=["ordered", "unordered"])
def test_broken_inputs_come_last_in_threads(*, ordered: bool) -> None:
    """As with tasks."""
    found: list[Any] = []
    stream = in_threads(broken_inputs(), lambda index, item: 2 * item, concurrency=2, ordered=ordered)

    with pytest.raises(RuntimeError, match="disk"):
        found.extend(stream)

    assert sorted(found) == [(0, 0), (1, 2), (2, 4)]


def broken_inputs() -> Iterator[int]:
    yield from range(3)
    raise RuntimeError("disk")


@pytest.mark.parametrize("concurrency", [0, -1])
def test_no_concurrency_is_wrong(concurrency: int) -> None:
    """It is said when the stream is made, not when it is first read."""
    client = qinfer.Client("http://gateway")

    with pytest.raises(InvalidRequest, match="expected at least 1"):
        client.stream("m", [], concurrency=concurrency)


class Doubling:
    """A gateway that doubles `x`, in both ways of asking; it knows requests by their keys."""

    def __init__(self) -> None:
        self.results: dict[str, httpx.Response] = {}
        self.executed = 0

    def __call__(self, request: httpx.Request) -> httpx.Response:
        if request.method == "GET":
            return self.results[request.url.path.split("/")[3]]
        if request.url.path.endswith("/infer"):
            return self._execute(request)
        key = request.headers["Idempotency-Key"]
        if key not in self.results:
            self.results[key] = self._execute(request)
        return httpx.Response(202, content=json.dumps({"id": key}))

    def _execute(self, request: httpx.Request) -> httpx.Response:
        self.executed += 1
        length = int(request.headers["Inference-Header-Content-Length"])
        asked, plan = decode_infer(request.content, length, "m", 0)
        y = from_numpy("y", to_numpy(asked.inputs[0]) * 2)
        encoded = encode_infer(Response(request_id="r", model="m", version=1, outputs=(y,)), "", plan)
        headers = {"Inference-Header-Content-Length": str(encoded.json_length)}
        return httpx.Response(200, content=encoded.body, headers=headers)


def rows(number: int) -> Iterator[dict[str, Any]]:
    return ({"x": np.array([float(n)])} for n in range(number))


async def by_tasks(server: Doubling, **options: Any) -> list[tuple[int, float]]:
    async with qinfer.AsyncClient("http://gateway", transport=httpx.MockTransport(server)) as client:
        return [(n, float(r["y"][0])) async for n, r in client.stream("m", rows(9), **options)]  # type: ignore[index]


async def by_threads(server: Doubling, **options: Any) -> list[tuple[int, float]]:
    with qinfer.Client("http://gateway", transport=httpx.MockTransport(server)) as client:
        return [(n, float(r["y"][0])) for n, r in client.stream("m", rows(9), **options)]  # type: ignore[index]


@pytest.mark.parametrize("stream", [by_tasks, by_threads], ids=["tasks", "threads"])
async def test_both_clients_stream(stream: Callable[..., Awaitable[list[tuple[int, float]]]]) -> None:
    """Arrays in, results out."""
    assert await stream(Doubling(), concurrency=4) == [(n, 2.0 * n) for n in range(9)]


@pytest.mark.parametrize("stream", [by_tasks, by_threads], ids=["tasks", "threads"])
async def test_a_stream_with_keys_is_resumed(stream: Callable[..., Awaitable[list[tuple[int, float]]]]) -> None:
    """The second stream with the same keys executes nothing."""
    server = Doubling()
    options: dict[str, Any] = {"concurrency": 4, "keys": lambda index, item: f"run-{index}"}

    first = await stream(server, **options)
    second = await stream(server, **options)

    assert first == second == [(n, 2.0 * n) for n in range(9)]
    assert server.executed == 9
