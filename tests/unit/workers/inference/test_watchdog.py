"""What a worker's watchdog does about executions that are late or over their limit."""

import logging
from pathlib import Path

import pytest

from qinfer.backends.base import Batch, Context
from qinfer.batching.watched import ExecutionClock
from qinfer.core.messages import InferRequest
from qinfer.errors import ExecutionOverdue, InferenceFailed
from qinfer.models.spec import Device, ModelSpec
from qinfer_workers.inference.watchdog import ExecutionWatchdog
from tests.unit.batching.test_watched import Ctx, Time

SPEC = ModelSpec(name="m", backend="stub", inputs=(), outputs=(), execute_timeout_s=10.0)
BATCH = Batch(requests=[InferRequest(model="m", inputs=())], rows=[1], inputs={})


@pytest.fixture
def now(monkeypatch: pytest.MonkeyPatch) -> Time:
    time = Time()
    monkeypatch.setattr("qinfer.batching.watched.time", time)
    return time


class Slow:
    """A backend that is looked at while it executes, at several ages."""

    short_on_loop = False

    def __init__(self, now: Time, ages_s: tuple[float, ...]) -> None:
        self.dog, self.left = ExecutionWatchdog(), list[ExecutionClock]()
        self.watched = self.dog.watched(self, SPEC, 1)
        self.watched.clock.set_limit(self.watched.clock.limits.execute)
        self._now, self._ages_s = now, ages_s
        self.shown: list[float] = []

    def load(self, spec: ModelSpec, version_dir: Path, device: Device) -> None:
        return

    def execute(self, batch: Batch, ctx: Context) -> None:
        began_s = self._now.now_s
        for age_s in self._ages_s:
            self._now.now_s = began_s + age_s
            self.dog.check_instances(self.left.append)
        self.shown = [one.seconds for one in self.dog.executing(1000.0)]
        self.ended()

    def ended(self) -> None:
        return

    def unload(self) -> None:
        return


class Interruptible(Slow):
    """One that can be interrupted."""

    interrupts = 0

    def interrupt(self) -> bool:
        self.interrupts += 1
        return True

    def ended(self) -> None:
        if self.interrupts:
            raise InferenceFailed("the process died")


def test_half_of_the_limit_is_warned_of_once(now: Time, caplog: pytest.LogCaptureFixture) -> None:
    slow = Slow(now, (4.0, 5.0, 6.0, 7.0))

    with caplog.at_level(logging.WARNING):
        slow.watched.execute(BATCH, Ctx())

    assert [record.message for record in caplog.records] == ["execution is late: it has used half of its limit"]
    assert slow.left == []


def test_what_can_be_interrupted_is(now: Time) -> None:
    slow = Interruptible(now, (10.0,))

    with pytest.raises(ExecutionOverdue, match="limit of 10 s"):
        slow.watched.execute(BATCH, Ctx())

    assert (slow.interrupts, slow.left) == (1, [])


def test_what_can_not_be_interrupted_ends_the_worker(now: Time) -> None:
    slow = Slow(now, (10.0,))

    slow.watched.execute(BATCH, Ctx())

    assert slow.left == [slow.watched.clock]


def test_a_look_that_came_late_itself_ends_nothing(now: Time) -> None:
    slow = Slow(now, ())
    slow.watched.clock.start_clock(None)
    now.now_s += 20.0

    slow.dog.check_instances(slow.left.append, may_end=False)

    assert slow.left == []


def test_an_execution_is_shown_while_it_lasts(now: Time) -> None:
    slow = Slow(now, (4.0,))

    slow.watched.execute(BATCH, Ctx())

    assert (slow.shown, slow.dog.executing(1000.0)) == ([4.0], [])


def test_what_is_unloaded_is_not_looked_at(now: Time) -> None:
    slow = Slow(now, ())
    slow.watched.clock.start_clock(None)
    slow.watched.unload()
    now.now_s += 20.0

    slow.dog.check_instances(slow.left.append)

    assert slow.left == []


class Wrong(Slow):
    """One whose answer about being ready is an exception."""

    def unready(self) -> str:
        raise RuntimeError("the device is gone")


def test_an_instance_that_raises_when_it_is_asked_is_not_ready(now: Time) -> None:
    """An exception would end the heartbeat, and with it the worker."""
    assert Wrong(now, ()).dog.unready() == {("m", 1): "RuntimeError: the device is gone"}
