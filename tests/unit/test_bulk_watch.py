"""When a bulk worker can't go on, and what its threads are counted for."""

import asyncio
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from qinfer.errors import BrokerUnavailable
from qinfer.testing import eventually
from qinfer_workers.bulk import watch
from qinfer_workers.bulk.bridge import Bridge, TimedOut
from qinfer_workers.bulk.watch import Watch
from tests.bulk_office import bench

LONG_S = 30.0


@pytest.fixture
def bridge() -> Iterator[Bridge]:
    one = Bridge()
    yield one
    one.close()


@pytest.fixture
def go_on() -> Iterator[threading.Event]:
    event = threading.Event()
    yield event
    event.set()


async def test_a_loop_that_hangs_is_trouble(
    tmp_path: Path, bridge: Bridge, go_on: threading.Event, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing that runs on it would ever end."""
    one = Watch(bridge, (await bench(tmp_path)).office, lambda: None)

    async def block() -> None:
        go_on.wait()

    assert one.trouble() == ""
    with pytest.raises(TimedOut):
        await asyncio.to_thread(bridge.run, block(), 0.01)

    monkeypatch.setattr(watch, "ANSWER_S", 0.01)
    assert one.trouble() == "the event loop hangs"


async def test_threads_that_never_come_back_are_trouble(
    tmp_path: Path, bridge: Bridge, go_on: threading.Event, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not as long as somebody waits for them, nor when they came back at last."""
    monkeypatch.setattr(watch, "HANGING_S", 0.0)
    office = (await bench(tmp_path, plan_threads=2)).office
    one = Watch(bridge, office, lambda: None)
    begun = threading.Event()

    def hang() -> None:
        begun.set()
        go_on.wait()

    waiting = asyncio.create_task(office.in_thread(hang))
    assert await asyncio.to_thread(begun.wait, LONG_S)
    assert one.trouble() == ""
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting
    assert one.trouble() == "1 threads wait for stores that never answer"
    go_on.set()

    await eventually(lambda: one.trouble() == "")


async def test_a_celery_that_takes_no_tasks_is_trouble(
    tmp_path: Path, bridge: Bridge, monkeypatch: pytest.MonkeyPatch
) -> None:
    """There should be sweeps."""
    one = Watch(bridge, (await bench(tmp_path)).office, lambda: None)
    monkeypatch.setattr(bridge, "quiet_s", lambda: 299.0)
    assert one.trouble() == ""
    monkeypatch.setattr(bridge, "quiet_s", lambda: 301.0)

    assert one.trouble().startswith("no task has come for 301 s")


async def test_without_a_beat_of_its_own_only_what_waits_is_trouble(
    tmp_path: Path, bridge: Bridge, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Others may take all the sweeps, or there is no beat; what waits now and then is about to be taken."""
    waiting = [0]

    def ask() -> int:
        if waiting[0] < 0:
            raise BrokerUnavailable("away")
        return waiting[0]

    one = Watch(bridge, (await bench(tmp_path)).office, lambda: None, ask)
    monkeypatch.setattr(bridge, "quiet_s", lambda: 301.0)
    seen = [0, *[3] * (watch.WAITING_LOOKS - 1), 0, *[3] * (watch.WAITING_LOOKS - 1), -1]
    for waiting[0] in [*seen, *[3] * (watch.WAITING_LOOKS - 1)]:
        assert one.trouble() == ""
    waiting[0] = 3

    assert one.trouble() == "no task has come for 301 s, and 3 wait"


async def test_a_process_in_trouble_is_asked_to_stop(
    tmp_path: Path, bridge: Bridge, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Once; it ends in order where it can."""
    monkeypatch.setattr(watch, "LOOK_EVERY_S", 0.001)
    monkeypatch.setattr(bridge, "quiet_s", lambda: 301.0)
    asked = threading.Event()
    one = Watch(bridge, (await bench(tmp_path)).office, asked.set)

    one.start()

    assert await asyncio.to_thread(asked.wait, LONG_S)
    one.end()


async def test_the_first_error_keeps_the_rest_from_being_begun(tmp_path: Path, go_on: threading.Event) -> None:
    """A store that is away would be asked thousands of times more, before anything else has a turn."""
    office = (await bench(tmp_path, plan_threads=1)).office
    begun: list[int] = []

    def look(number: int) -> None:
        begun.append(number)
        if number == 0:
            raise ValueError(number)
        go_on.wait()

    with pytest.raises(ValueError, match="0"):
        await office.each_in_thread(look, range(1000))

    go_on.set()
    await office.in_thread(lambda: None)
    assert begun in ([0], [0, 1])
