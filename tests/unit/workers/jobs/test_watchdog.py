"""When a bulk worker can't go on, and what its threads are counted for."""

import asyncio
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from qinfer.errors import BrokerUnavailable
from qinfer.testing import eventually
from qinfer_workers.jobs import event_loop
from qinfer_workers.jobs.event_loop import EventLoop, TimedOut, Watchdog
from tests.support.jobs.bulk_bench import bench
from tests.support.servers.servers import Database

pytestmark = pytest.mark.usefixtures("timed")  # the databases are on it


LONG_S = 30.0
ALIVE = threading.current_thread()


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
    one = Watchdog(loop, (await bench(database, tmp_path)).services, lambda: None, lambda: 0, ALIVE)

    async def block() -> None:
        go_on.wait()

    assert one.problem() == ""
    with pytest.raises(TimedOut):
        await asyncio.to_thread(loop.run, block(), 0.01)

    monkeypatch.setattr(event_loop, "ANSWER_S", 0.01)
    assert one.problem() == "the event loop hangs"


async def test_threads_that_never_come_back_are_trouble(
    database: Database, tmp_path: Path, loop: EventLoop, go_on: threading.Event, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not as long as somebody waits for them, nor when they came back at last."""
    monkeypatch.setattr(event_loop, "HANGING_S", 0.0)
    services = (await bench(database, tmp_path, plan_threads=2)).services
    one = Watchdog(loop, services, lambda: None, lambda: 0, ALIVE)
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


async def test_a_celery_that_takes_no_tasks_is_trouble(
    database: Database, tmp_path: Path, loop: EventLoop, monkeypatch: pytest.MonkeyPatch
) -> None:
    """There should be sweeps."""
    one = Watchdog(loop, (await bench(database, tmp_path)).services, lambda: None, lambda: 0, ALIVE)
    monkeypatch.setattr(loop, "quiet_s", lambda: 299.0)
    assert one.problem() == ""
    monkeypatch.setattr(loop, "quiet_s", lambda: 301.0)

    assert one.problem().startswith("no task has come for 301 s")


async def test_without_a_beat_of_its_own_only_what_waits_is_trouble(
    database: Database, tmp_path: Path, loop: EventLoop, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Others may take all the sweeps, or there is no beat; what waits now and then is about to be taken."""
    waiting = [0]

    def ask() -> int:
        if waiting[0] < 0:
            raise BrokerUnavailable("away")
        return waiting[0]

    one = Watchdog(loop, (await bench(database, tmp_path)).services, lambda: None, ask)
    monkeypatch.setattr(loop, "quiet_s", lambda: 301.0)
    seen = [0, *[3] * (event_loop.WAITING_LOOKS - 1), 0, *[3] * (event_loop.WAITING_LOOKS - 1), -1]
    for waiting[0] in [*seen, *[3] * (event_loop.WAITING_LOOKS - 1)]:
        assert one.problem() == ""
    waiting[0] = 3

    assert one.problem() == "no task has come for 301 s, and 3 wait"


async def test_a_process_in_trouble_is_asked_to_stop(
    database: Database, tmp_path: Path, loop: EventLoop, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Once; it ends in order where it can."""
    monkeypatch.setattr(event_loop, "LOOK_EVERY_S", 0.001)
    monkeypatch.setattr(loop, "quiet_s", lambda: 301.0)
    asked = threading.Event()
    one = Watchdog(loop, (await bench(database, tmp_path)).services, asked.set, lambda: 0, ALIVE)

    one.start()

    assert await asyncio.to_thread(asked.wait, LONG_S)
    one.stop_watching()
