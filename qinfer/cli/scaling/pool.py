"""A pool of worker processes whose number changes: started, identified by their heartbeats, drained.

Each worker has a *slot*, even while draining: its share of the cores, for the maximum number of workers, so that all
are equally fast.
"""

import signal
import socket
from collections.abc import Iterable, Mapping, Sequence

from qinfer.cli.local.supervisor import Process, Program, RestartPolicy, Supervisor
from qinfer.core.clock import Clock, SystemClock
from qinfer.models.state import State, WorkerRecord

MODULE = "qinfer_workers.inference"
_MAX_STARTS = 3
"""Starts after which a crashing worker no longer counts as starting."""


class PoolWorker(Program):
    """A worker process of a pool, with its history."""

    def __init__(self, slot: int, env: Mapping[str, str], cpus: Sequence[int], clock: Clock) -> None:
        super().__init__(f"worker {slot}", MODULE, env, cpus)
        self.slot = slot
        self.starts = 0
        self.kills = 0
        self.started_s = 0.0
        self.is_ready = False
        self.executing = 0
        self._clock = clock

    def start(self) -> None:
        """Counts, and starts the worker."""
        self.starts += 1
        self.started_s = self._clock.monotonic_s()
        self.is_ready = False
        super().start()

    def send_signal(self, number: int) -> None:
        """Sends a signal, and counts kills."""
        self.kills += number == signal.SIGKILL
        super().send_signal(number)


class ScalingPool:
    """A pool of workers, at most one for each slot of `shares`."""

    def __init__(
        self,
        supervisor: Supervisor,
        env: Mapping[str, str],
        shares: Sequence[Sequence[int]],
        *,
        stop_s: float,
        policy: RestartPolicy,
        clock: Clock | None = None,
    ) -> None:
        self._supervisor = supervisor
        self._env = env
        self._shares = shares
        self._stop_s = stop_s
        self._policy = policy
        self._clock = clock or SystemClock()
        self._here: list[PoolWorker] = []
        self._leaving: list[PoolWorker] = []
        self._gone_restarts = 0
        self._gone_kills = 0
        self.start_s = 0.0

    @property
    def size(self) -> int:
        """Workers that serve, start, or wait for a restart."""
        return len(self._here)

    @property
    def live(self) -> int:
        """Serving workers."""
        return sum(worker.is_ready for worker in self._here)

    @property
    def starting(self) -> int:
        """Starting workers."""
        return sum(not worker.is_ready and worker.starts <= _MAX_STARTS for worker in self._here)

    @property
    def draining(self) -> int:
        """Draining workers."""
        return len(self._leaving)

    @property
    def processes(self) -> list[Process]:
        """All processes that may be running."""
        return [*self._here, *self._leaving]

    @property
    def restarts(self) -> int:
        """Restarts of crashed workers."""
        return self._gone_restarts + sum(worker.starts - 1 for worker in self._here + self._leaving)

    @property
    def kills(self) -> int:
        """Workers that did not end in time."""
        return self._gone_kills + sum(worker.kills for worker in self._here + self._leaving)

    def update(self, records: Iterable[WorkerRecord]) -> None:
        """Takes live workers' heartbeats."""
        host = socket.gethostname()
        # An id is <host>-<pid>-<random>.
        by_start = {record.id.rpartition("-")[0]: record for record in records}
        now_s = self._clock.monotonic_s()
        for worker in self._here:
            record = by_start.get(f"{host}-{worker.pid}")
            was_ready, worker.is_ready = worker.is_ready, record is not None and _serves(record)
            worker.executing = record.executing if record else 0
            if worker.is_ready and not was_ready:
                self.start_s = max(self.start_s, now_s - worker.started_s)
        for worker in [one for one in self._leaving if not self._supervisor.supervises(one)]:
            self._leaving.remove(worker)
            self._gone_restarts += worker.starts - 1
            self._gone_kills += worker.kills

    def resize(self, target: int) -> None:
        """Starts or drains workers until there are `target`, once slots are free.

        Workers that are not serving leave first, then the least busy, then the latest.
        """
        while self.size > target:
            worker = min(self._here, key=lambda one: (one.is_ready, one.executing, -one.started_s))
            self._here.remove(worker)
            self._leaving.append(worker)
            self._supervisor.dismiss(worker)
        taken = {worker.slot for worker in self._here + self._leaving}
        free = [slot for slot in range(1, len(self._shares) + 1) if slot not in taken]
        for slot in free[: max(target - self.size, 0)]:
            worker = PoolWorker(slot, self._env, self._shares[slot - 1], self._clock)
            self._supervisor.add(worker, self._policy, stop_s=self._stop_s)
            self._here.append(worker)


def _serves(record: WorkerRecord) -> bool:
    states = [version.state for versions in record.models.values() for version in versions.values()]
    return State.LOADING not in states and bool(states)
