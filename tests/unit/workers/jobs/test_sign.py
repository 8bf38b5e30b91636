"""The bulk worker's sign of life, beside its tasks."""

import pytest

from qinfer.errors import BrokerUnavailable
from qinfer.models.state import BULK
from qinfer.models.store import ControlStore
from qinfer.testing import wait_until
from qinfer_workers import liveness as signs
from qinfer_workers.jobs.event_loop import EventLoop


class Shaky(ControlStore):
    """It is away at the first sign, and notes the others."""

    def __init__(self) -> None:
        super().__init__(None)
        self.asked = 0
        self.signed: set[tuple[str, str]] = set()

    async def sign(self, program: str, process: str, ttl_s: float) -> None:
        self.asked += 1
        if self.asked == 1:
            raise BrokerUnavailable("away")
        self.signed.add((program, process))


def test_signs_are_given_for_as_long_as_the_loop_lives(monkeypatch: pytest.MonkeyPatch) -> None:
    """A Redis that is away does not end them; they count as no task, which the watch goes by; the close ends them."""
    monkeypatch.setattr(signs, "EVERY_S", 0.001)
    store, loop = Shaky(), EventLoop()
    quiet_since_s = loop.quiet_s()

    loop.start(signs.give_signs(store, "b@host", BULK))
    wait_until(lambda: store.asked >= 3, 10.0, lambda: "three signs")
    running, quiet_s = loop.running, loop.quiet_s()
    loop.close()

    assert store.signed == {(BULK, "b@host")}
    assert (running, quiet_s > quiet_since_s) == (0, True)
