"""How fast a model version is executed: what its live workers measured, or what was stored when there are none."""

from collections.abc import Iterable
from typing import NamedTuple

from qinfer.control.base import State, WorkerRecord


class Capacity(NamedTuple):
    """The speed that a version's backlog is worked off with.

    Attributes:
        rps: Requests a second, of all live workers together; 0 = unknown.
        start_s: Seconds until the first is executed; 0 while a worker has it loaded.
        workers: Live workers that have it loaded.
    """

    rps: float = 0.0
    start_s: float = 0.0
    workers: int = 0


def capacity_of(workers: Iterable[WorkerRecord], model: str, version: int) -> Capacity:
    """Sums up the speeds of the workers that have a version READY; unknown while one of them has measured nothing."""
    speeds = [
        worker.speeds.get(model, {}).get(version, 0.0)
        for worker in workers
        if (state := worker.models.get(model, {}).get(version)) is not None and state.state is State.READY
    ]
    return Capacity(sum(speeds) if all(speeds) else 0.0, 0.0, len(speeds))
