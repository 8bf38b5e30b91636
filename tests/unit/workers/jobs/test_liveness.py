"""The bulk worker reports liveness beside its tasks."""

import pytest

from qinfer.errors import BrokerUnavailable
from qinfer.models import store as control_store
from qinfer.models.state import BULK
from qinfer.models.store import ControlStore
from qinfer.testing import wait_until
from qinfer_workers.jobs.__main__ import EventLoop


class Shaky(ControlStore):
    """A store that is away at the first report, and notes the others."""

    def __init__(self) -> None:
        super().__init__(None)
        self.asked = 0
        self.live: dict[tuple[str, str], float] = {}

    async def report_liveness(self, program: str, process: str, ttl_s: float) -> None:
        self.asked += 1
        if self.asked == 1:
            raise BrokerUnavailable("away")
        self.live[program, process] = ttl_s


def test_liveness_is_reported_for_as_long_as_the_loop_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    """A Redis that is away does not end them; the close ends them."""
    monkeypatch.setattr(control_store, "LIVENESS_EVERY_S", 0.001)
    store, loop = Shaky(), EventLoop()

    loop.start(control_store.report_liveness(store, "b@host", BULK))
    wait_until(lambda: store.asked >= 3, 10.0, lambda: "three reports")
    live = dict(store.live)
    loop.close()

    assert live == {(BULK, "b@host"): control_store.LIVENESS_HOLDS_S}
    assert store.live == {(BULK, "b@host"): 0.0}
