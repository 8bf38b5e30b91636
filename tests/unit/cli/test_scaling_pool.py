"""The pool of an autoscaler with real, tiny processes in place of workers."""

import signal
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest

from qinfer.cli.local.supervisor import RestartPolicy, Supervisor
from qinfer.cli.scaling import scaler as module
from qinfer.cli.scaling.scaler import PoolWorker, ScalingPool
from qinfer.models.state import State, VersionState, WorkerRecord
from qinfer.testing import FakeClock, wait_until

SOURCE = """
import pathlib, signal, sys
signal.signal(signal.SIGTERM, lambda *_: sys.exit(0) if not pathlib.Path({stubborn!r}).exists() else None)
pathlib.Path({begun!r}).joinpath(str(__import__("os").getpid())).touch()
while True: signal.pause()
"""


class Scene:
    """A pool of three slots, and what its workers' heartbeats say."""

    def __init__(self, supervisor: Supervisor, directory: Path) -> None:
        self.begun, self.stubborn = directory / "begun", directory / "stubborn"
        self.begun.mkdir()
        (directory / "tiny_worker.py").write_text(SOURCE.format(stubborn=str(self.stubborn), begun=str(self.begun)))
        self.supervisor, self.clock = supervisor, FakeClock()
        self.pool = ScalingPool(
            supervisor,
            {"PYTHONPATH": str(directory)},
            [(), (), ()],
            stop_s=2.0,
            policy=RestartPolicy(first_delay_s=0.01),
            clock=self.clock,
        )

    @property
    def workers(self) -> list[PoolWorker]:
        return [one for one in self.pool.processes if isinstance(one, PoolWorker)]

    def begin(self, target: int) -> None:
        """Resizes, and waits until all processes run."""
        self.pool.resize(target)
        wait_until(lambda: all((self.begun / str(worker.pid)).exists() for worker in self.workers), 20.0)

    def beat(self, *workers: PoolWorker, state: State = State.READY, executing: int = 0) -> list[WorkerRecord]:
        return [
            WorkerRecord(
                id=f"{socket.gethostname()}-{worker.pid}-0a1b2c3d",
                started_at=0.0,
                models={"m": {1: VersionState(state, 1)}},
                executing=executing,
            )
            for worker in workers
        ]

    def until(self, processes: int) -> None:
        """Lets the supervisor and the pool notice what ended."""
        while len(self.pool.processes) != processes:
            self.supervisor.wait(5.0)
            self.pool.update([])


@pytest.fixture
def said() -> list[str]:
    return []


@pytest.fixture
def scene(said: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Scene]:
    monkeypatch.setattr(module, "MODULE", "tiny_worker")
    with Supervisor(said.append) as supervisor:
        scene = Scene(supervisor, tmp_path)
        yield scene
        scene.stubborn.unlink(missing_ok=True)
        supervisor.stop(scene.pool.processes)


def test_workers_start_and_leave(scene: Scene, said: list[str]) -> None:
    """Slots are the lowest that are free; nobody is restarted who was asked to leave."""
    scene.begin(2)
    assert [worker.name for worker in scene.workers] == ["worker 1", "worker 2"]
    assert (scene.pool.size, scene.pool.starting, scene.pool.live, scene.pool.draining) == (2, 2, 0, 0)

    scene.pool.resize(0)
    assert (scene.pool.size, scene.pool.draining) == (0, 2)
    scene.until(0)

    assert scene.pool.draining == 0
    assert said == []
    assert (scene.pool.restarts, scene.pool.kills) == (0, 0)


def test_heartbeats_tell_who_serves(scene: Scene) -> None:
    """By host and process; one that loads still, or has reported no model, does not. The time until then is kept."""
    scene.begin(3)
    one, two, three = scene.workers
    stranger = WorkerRecord(id=f"elsewhere-{three.pid}-0a1b2c3d", started_at=0.0, models={"m": {}})
    scene.clock.advance(7.0)

    scene.pool.update([*scene.beat(one), *scene.beat(two, state=State.LOADING), stranger])

    assert (scene.pool.live, scene.pool.starting) == (1, 2)
    assert scene.pool.start_s == 7.0
    scene.clock.advance(1.0)
    scene.pool.update(scene.beat(one))
    assert scene.pool.start_s == 7.0


def test_the_least_useful_leave_first(scene: Scene) -> None:
    """Those that do not serve, then those that execute least, then the latest."""
    scene.pool.resize(1)
    scene.clock.advance(1.0)
    scene.begin(3)
    one, two, three = scene.workers
    scene.pool.update([*scene.beat(one, executing=5), *scene.beat(two)])

    scene.pool.resize(2)
    assert three not in scene.workers[:2]
    scene.pool.resize(1)

    assert scene.workers[0] is one


def test_there_are_never_more_processes_than_slots(scene: Scene, said: list[str]) -> None:
    """Who drains keeps the slot, and its memory; the next one starts when it has ended, by force after its time."""
    scene.begin(3)
    one = scene.workers[0]
    scene.pool.update(scene.beat(*scene.workers[1:]))
    scene.stubborn.touch()

    scene.pool.resize(2)
    scene.pool.resize(3)
    assert (scene.pool.size, scene.pool.draining) == (2, 1)
    scene.until(2)
    scene.stubborn.unlink()
    scene.pool.resize(3)

    assert said == ["worker 1 is killed: it did not end within 2 s"]
    assert (scene.pool.kills, one.poll()) == (1, -9)
    assert sorted(worker.slot for worker in scene.workers) == [1, 2, 3]


def test_crashes_are_counted(scene: Scene, said: list[str]) -> None:
    """A worker that crashed starts again in its slot, and counts as one that does not serve."""
    scene.begin(1)
    (worker,) = scene.workers
    scene.pool.update(scene.beat(worker))

    worker.send_signal(signal.SIGKILL)
    while worker.starts < 2:
        scene.supervisor.wait(5.0)
    scene.pool.update(scene.beat(worker)[:0])

    assert (scene.pool.live, scene.pool.restarts) == (0, 1)
    assert len(said) == 1
