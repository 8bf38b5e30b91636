"""When beat's process goes on, and when it ends."""

import asyncio
import os
import socket

import pytest

from qinfer.errors import BrokerUnavailable
from qinfer.models.state import BEAT
from qinfer.models.store import ControlStore
from qinfer_workers.jobs import beat as program
from qinfer_workers.jobs.beat import Beat, look_after

NAME = f"qinfer-beat-{os.getpid()}@{socket.gethostname()}"


class Standing(Beat):
    """One without a thread.

    Args:
        lives: At so many looks.
        silent_s: How long it sent nothing, at the first look.
    """

    def __init__(self, lives: int = 1000, silent_s: float = 0.0) -> None:
        self.lives = lives
        self.silent_s = silent_s

    @property
    def is_alive(self) -> bool:
        self.lives -= 1
        return self.lives >= 0

    def quiet_s(self) -> float:
        return self.silent_s

    def excuse(self) -> None:
        self.silent_s = 0.0


class Away(ControlStore):
    """A Redis that can't be reached; ends the test at the third report."""

    def __init__(self, stop: asyncio.Event) -> None:
        super().__init__(None)
        self.stop = stop
        self.asked = 0

    async def report_liveness(self, program: str, process: str, ttl_s: float) -> None:
        self.asked += 1
        if self.asked == 3:
            self.stop.set()
        raise BrokerUnavailable("away")


@pytest.fixture(autouse=True)
def _soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(program, "LIVENESS_EVERY_S", 0.001)


async def test_a_beat_that_dies_ends_the_process(store: ControlStore) -> None:
    """It was seen to live before."""
    code = await look_after(Standing(lives=2), store, asyncio.Event(), longest_s=300.0)

    assert (code, await store.live_processes(BEAT)) == (os.EX_SOFTWARE, [NAME])


async def test_a_beat_that_can_not_send_ends_the_process(store: ControlStore) -> None:
    """While Redis answers, so that another connection may do."""
    assert await look_after(Standing(silent_s=301.0), store, asyncio.Event(), longest_s=300.0) == 70


async def test_a_redis_that_is_away_ends_nothing() -> None:
    """It stops when it is asked to."""
    stop = asyncio.Event()

    assert await look_after(Standing(silent_s=301.0), Away(stop), stop, longest_s=300.0) == os.EX_OK
