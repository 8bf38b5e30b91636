"""The Celery app of the bulk worker: its settings, and what becomes of a use case's end."""

import asyncio
import threading
from collections.abc import Coroutine
from typing import Any, TypeVar

import pytest
from celery.exceptions import Reject
from pydantic import SecretStr

from qinfer.core.settings import BulkSettings, RedisSettings, Settings
from qinfer.errors import InvalidRequest, StoreUnavailable
from qinfer.jobs.tasks import FINALISE, PLAN, QUEUE
from qinfer_workers.jobs.__main__ import EventLoop, TimedOut, WorkStopped, longest_pause_s, make_app

SETTINGS = Settings(
    redis=RedisSettings(url=SecretStr("rediss://:secret@queue/1")),
    bulk=BulkSettings(plan_timeout_s=7200, sweep_every_s=4),
)

LONG_S = 30.0
T = TypeVar("T")


class Inline(EventLoop):
    """Runs a use case at once, and raises what it is told to."""

    def __init__(self, error: Exception | None = None) -> None:
        self.error = error
        self.limits_s: list[float] = []

    def run(self, work: Coroutine[Any, Any, T], limit_s: float) -> T:
        self.limits_s.append(limit_s)
        result = asyncio.run(work)
        if self.error is not None:
            raise self.error
        return result


class Retried(Exception):
    """What the stand-in for Celery's `retry` raises."""


def app_with(runner: Inline, seen: list[str]) -> Any:
    async def use_case(job_id: str) -> None:
        seen.append(job_id)

    return make_app(SETTINGS, runner, dict.fromkeys((PLAN, FINALISE), use_case))


def retry_of(app: Any, name: str, retries: int, monkeypatch: pytest.MonkeyPatch) -> float:
    """Runs a task that has been tried before; returns how long it waits now."""
    asked: dict[str, Any] = {}

    def retry(**options: Any) -> Exception:
        asked.update(options)
        return Retried()

    task = app.tasks[name]
    monkeypatch.setattr(task, "retry", retry)
    task.push_request(retries=retries)
    with pytest.raises(Retried):
        task.run("job")
    task.pop_request()
    return float(asked["countdown"])


def test_the_settings_are_those_that_are_safe_on_redis() -> None:
    """Each of them is a known trap."""
    conf = app_with(Inline(), []).conf

    assert (conf.task_serializer, conf.accept_content) == ("json", ["json"])
    assert conf.task_acks_late
    assert conf.task_reject_on_worker_lost
    assert conf.worker_prefetch_multiplier == 1
    assert conf.broker_transport_options["visibility_timeout"] > 7200
    assert conf.broker_transport_options["socket_timeout"] > 0
    assert conf.broker_transport_options["socket_keepalive"]
    assert conf.task_ignore_result
    assert conf.worker_send_task_events
    assert conf.task_default_queue == QUEUE
    assert conf.broker_use_ssl == {"ssl_cert_reqs": "required"}


def test_a_task_hands_its_job_over() -> None:
    """By id, which is all that travels."""
    seen: list[str] = []
    app = app_with(Inline(), seen)

    app.tasks[PLAN].run("one")
    app.tasks[FINALISE].run("two")

    assert seen == ["one", "two"]


def test_each_task_has_a_limit() -> None:
    """A step ends itself before, and the broker hands its task to another only later."""
    runner = Inline()
    app = app_with(runner, [])

    for name in (PLAN, FINALISE):
        app.tasks[name].run("")

    longest_s = app.conf.broker_transport_options["visibility_timeout"]
    assert all(7200 < limit_s < longest_s for limit_s in runner.limits_s)


def test_trouble_is_tried_again_later_and_later(monkeypatch: pytest.MonkeyPatch) -> None:
    """But never so late that a sweep takes the task for lost."""
    app = app_with(Inline(StoreUnavailable("no space")), [])

    pauses = [retry_of(app, PLAN, retries, monkeypatch) for retries in (0, 1, 2, 1000)]

    assert pauses == [0.5, 1.0, 2.0, longest_pause_s(SETTINGS)]
    assert longest_pause_s(SETTINGS) < 3 * 4


def test_what_can_not_be_cured_by_trying_is_shown_as_failed() -> None:
    """In Flower and the log."""
    with pytest.raises(InvalidRequest):
        app_with(Inline(InvalidRequest("a defect")), []).tasks[PLAN].run("job")


def test_a_task_that_is_broken_off_goes_back_to_the_queue() -> None:
    """The process ends; another does it."""
    with pytest.raises(Reject) as caught:
        app_with(Inline(WorkStopped()), []).tasks[PLAN].run("job")

    assert caught.value.requeue is True


def test_the_bridge_runs_coroutines_of_threads_until_it_is_stopped() -> None:
    """What runs then is broken off, and what closes the adapters still runs."""
    loop = EventLoop()
    begun, closed = asyncio.Event(), []

    async def never() -> None:
        begun.set()
        loop.stop()
        await asyncio.Event().wait()

    async def five() -> int:
        return 5

    async def close() -> None:
        closed.append(begun.is_set())

    assert loop.run(five(), LONG_S) == 5
    with pytest.raises(WorkStopped):
        loop.run(never(), LONG_S)
    with pytest.raises(WorkStopped):
        loop.run(five(), LONG_S)
    loop.close(close())
    assert closed == [True]


def test_what_takes_too_long_is_broken_off() -> None:
    """Its thread is free again, and the coroutine learns it; an error of its own stays what it is."""
    loop, told = EventLoop(), threading.Event()

    async def never() -> None:
        try:
            await asyncio.Event().wait()
        finally:
            told.set()

    async def late() -> None:
        raise TimeoutError("its own")

    with pytest.raises(TimedOut, match="and was cancelled"):
        loop.run(never(), 0.01)
    assert told.wait(LONG_S)
    with pytest.raises(TimeoutError, match="its own"):
        loop.run(late(), LONG_S)
    loop.close()


def test_a_loop_that_hangs_is_told_from_one_that_runs() -> None:
    """A task on a loop that hangs is broken off all the same."""
    loop, go_on = EventLoop(), threading.Event()

    async def block() -> None:
        go_on.wait()

    assert loop.answers(LONG_S)
    with pytest.raises(TimedOut):
        loop.run(block(), 0.01)
    assert not loop.answers(0.01)
    go_on.set()
    assert loop.answers(LONG_S)
    loop.close()
