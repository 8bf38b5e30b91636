"""When a bulk worker can't go on, and what its threads are counted for."""

import asyncio
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from qinfer.testing import eventually
from qinfer_workers.jobs.__main__ import EventLoop, TimedOut, Watchdog
from tests.support.jobs.bulk_bench import bench
from tests.support.servers.servers import Database

pytestmark = pytest.mark.usefixtures("timed")  # the databases are on it


LONG_S = 30.0


@pytest.fixture
def loop() -> Iterator[EventLoop]:
    one = EventLoop()
    yield one
    one.close()


@pytest.fixture
def go_on() -> Iterator[threading.Event]:
    event = threading.Event()
    yield event
    event.set()


async def test_a_loop_that_hangs_is_trouble(
    database: Database, tmp_path: Path, loop: EventLoop, go_on: threading.Event, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing that runs on it would ever end."""
    one = Watchdog(loop, (await bench(database, tmp_path)).services, lambda: None)

    async def block() -> None:
        go_on.wait()

    assert one.problem() == ""
    with pytest.raises(TimedOut):
        await asyncio.to_thread(loop.run, block(), 0.01)

    monkeypatch.setattr("qinfer_workers.jobs.__main__.ANSWER_S", 0.01)
    assert one.problem() == "the event loop hangs"


async def test_threads_that_never_come_back_are_trouble(
    database: Database, tmp_path: Path, loop: EventLoop, go_on: threading.Event, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not as long as somebody waits for them, nor when they came back at last."""
    monkeypatch.setattr("qinfer_workers.jobs.__main__.HANGING_S", 0.0)
    services = (await bench(database, tmp_path, plan_threads=2)).services
    one = Watchdog(loop, services, lambda: None)
    begun = threading.Event()

    def hang() -> None:
        begun.set()
        go_on.wait()

    waiting = asyncio.create_task(services.in_thread(hang))
    assert await asyncio.to_thread(begun.wait, LONG_S)
    assert one.problem() == ""
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting
    assert one.problem() == "1 threads wait for stores that never answer"
    go_on.set()

    await eventually(lambda: one.problem() == "")


async def test_a_process_in_trouble_is_asked_to_stop(
    database: Database, tmp_path: Path, loop: EventLoop, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Once; it ends in order where it can."""
    monkeypatch.setattr("qinfer_workers.jobs.__main__.LOOK_EVERY_S", 0.001)
    monkeypatch.setattr(loop, "answers", lambda _: False)
    asked = threading.Event()
    one = Watchdog(loop, (await bench(database, tmp_path)).services, asked.set)

    one.start()

    assert await asyncio.to_thread(asked.wait, LONG_S)
    one.stop_watching()
