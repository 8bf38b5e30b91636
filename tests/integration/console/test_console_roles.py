"""The console's tasks in a gateway: the audit trail, the stream of figures, and what happens where one fails."""

import asyncio
import json
import logging
from collections.abc import AsyncIterator

import pytest

from qinfer.errors import BrokerUnavailable, QueueFull
from qinfer.observe.logs import AUDIT
from qinfer.queue.lanes import Queue
from qinfer_api.console import live, routes
from qinfer_api.console.audit import AuditTrail
from qinfer_api.console.live import ConsoleState, Live
from tests.support.gateway import Running, running_gateway


def noted(trail: AuditTrail, *paths: str) -> None:
    for path in paths:
        record = logging.LogRecord(AUDIT, logging.INFO, "", 0, "administrative act", (), None)
        record.path = path
        trail.emit(record)


async def test_a_line_of_the_audit_log_is_copied_once(delivery: Queue) -> None:
    """The page of the audit log, which copies waiting lines too, copies none twice."""
    trail = AuditTrail(delivery.router)
    noted(trail, "a", "b", "c")

    await asyncio.gather(*(trail.copy_waiting() for _ in range(3)))

    assert [line.about["path"] for line in await trail.lines()] == ["c", "b", "a"]


async def test_a_line_waits_while_redis_is_away(delivery: Queue, monkeypatch: pytest.MonkeyPatch) -> None:
    trail = AuditTrail(delivery.router)
    noted(trail, "a", "b")

    async def away(*_: object) -> None:
        raise BrokerUnavailable("away")

    with monkeypatch.context() as patch:
        patch.setattr(delivery.router, "call", away)
        with pytest.raises(BrokerUnavailable):
            await trail.copy_waiting()
    await trail.copy_waiting()

    assert [line.about["path"] for line in await trail.lines()] == ["b", "a"]


async def test_a_part_of_the_console_that_fails_costs_the_gateway_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(routes, "AGAIN_S", 0.0)
    again, runs = asyncio.Event(), 0

    async def run() -> None:
        nonlocal runs
        runs += 1
        if runs > 1:
            again.set()
            await asyncio.Event().wait()
        raise QueueFull("the queue's memory is full; try again")

    task = asyncio.create_task(routes._kept(run))
    await asyncio.wait_for(again.wait(), 10)

    assert not task.done()
    task.cancel()


@pytest.fixture
async def running() -> AsyncIterator[Running]:
    async with running_gateway() as one:
        await one.refresh()
        yield one


async def test_a_slow_browser_misses_no_figure(running: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    parts = running.gateway._console._parts
    followed = Live(parts.services.catalog, parts.store, running.delivery, parts.history)
    figures: dict[str, float] = {"a": 1, "b": 1, "gone": 1}

    async def read() -> ConsoleState:
        return ConsoleState(at_s=0.0, figures=dict(figures))

    async def tick(**changed: float) -> None:
        figures.update(changed)
        followed.recount()
        await followed._tick()

    monkeypatch.setattr(followed, "_read", read)
    await tick()
    stream = followed.events(lambda: True, "", sees_all=True)
    first = await anext(stream)
    await tick(a=2)
    figures.pop("gone")
    await tick(b=2)
    second = await anext(stream)
    await stream.aclose()  # type: ignore[attr-defined]  # it is a generator

    assert b"gone" in first
    event, data = second.decode().split("\n\n")[0].split("\n")
    assert event == "event: figures"
    assert json.loads(data.removeprefix("data: ")) == {"a": 2, "b": 2, "gone": None}


async def test_a_tenant_leaves_streams_to_others(running: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(live, "MOST_STREAMS", 3)
    followed = running.gateway._console._parts.live
    streams = [followed.events(lambda: True, "acme", sees_all=False) for _ in range(2)]
    for stream in streams:
        await anext(stream)

    assert followed.is_full("acme")
    assert not followed.is_full("other")

    for stream in streams:
        await stream.aclose()  # type: ignore[attr-defined]
    assert not followed.is_full("acme")
