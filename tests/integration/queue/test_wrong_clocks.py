"""Wall clocks that are five seconds off change nothing: deadlines are kept in Redis' time."""

import time
from collections.abc import AsyncIterator

import pytest
from pydantic import SecretStr

from qinfer.core.messages import InferRequest
from qinfer.core.settings import RedisSettings
from qinfer.models.store import ControlStore
from qinfer.queue.clients import admin_client
from qinfer.queue.entries import Acceptance, EntryAddress
from qinfer.queue.lanes import Queue
from qinfer.testing import eventually
from qinfer.wire.frame import encode_request
from tests.support.inline_workers import InlineWorkers, inline_workers, value
from tests.support.servers.servers import RedisServer


@pytest.fixture(params=[-5.0, 5.0], ids=["behind", "ahead"])
async def scene(
    request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch, redis_server: RedisServer
) -> AsyncIterator[InlineWorkers]:
    """Workers and callers whose clock is wrong, around a Redis whose clock is right."""
    right_s, right_ns = time.time, time.time_ns
    monkeypatch.setattr(time, "time", lambda: right_s() + request.param)
    monkeypatch.setattr(time, "time_ns", lambda: right_ns() + int(request.param * 1e9))
    redis_server.client().flushall()
    settings = RedisSettings(url=SecretStr(redis_server.url))
    delivery, store = await Queue.connect(settings), ControlStore(admin_client(settings))
    async with inline_workers(delivery, store) as one:
        yield one
    await store.close()
    await delivery.close()


async def test_a_request_in_time_is_executed(scene: InlineWorkers) -> None:
    """A timeout shorter than the error of the clock is enough."""
    await scene.model()
    await scene.worker()

    assert value(await scene.submit(3.0, timeout_s=2.0)) == 3.0


async def test_a_request_too_late_is_not_executed(scene: InlineWorkers) -> None:
    """It expires at its deadline, and not five seconds later."""
    await scene.model()
    await scene.worker()
    first = await scene.busy()
    late = scene.submit(1.0, timeout_s=0.1)
    expired_s = scene.delivery.clock.now_s() + 0.2
    await eventually(lambda: scene.delivery.clock.now_s() > expired_s, description="the deadline")
    scene.go()

    failure = (await late).failure

    assert failure is not None
    assert failure.code == "deadline_exceeded"
    assert value(await first) == 0.0


async def test_an_asynchronous_request_is_due_at_its_deadline(scene: InlineWorkers) -> None:
    """Not before it, with no worker at all, and the record says when."""
    requests = scene.delivery.requests
    address = EntryAddress("stub", 0, "mine@")
    frame = encode_request(InferRequest(model="stub", version=1, id=address.id, inputs=(), timeout_s=1.0))
    await scene.delivery.ensure([scene.lane])
    await requests.accept(Acceptance(address=address, lane=scene.lane, frame=frame, timeout_s=1.0))
    at_once = await requests.due("stub", 0, 10)

    async def is_due() -> bool:
        return await requests.due("stub", 0, 10) == [address]

    await eventually(is_due, description="the deadline")
    record = await requests.record(address)

    assert at_once == []
    assert record is not None
    assert record.deadline_at - record.created_at == pytest.approx(1.0, abs=0.01)
