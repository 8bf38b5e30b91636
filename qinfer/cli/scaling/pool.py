"""The worker processes of one machine whose number changes: started, told apart, drained.

Each has a *slot*, a number from 1 and its share of the cores, as if the most workers ran: so one worker is as fast as
the next, however many there are. A worker that drains keeps its slot until it has ended.
"""

import socket
from collections.abc import Iterable, Mapping, Sequence

from qinfer.cli.local.restart import RestartPolicy
from qinfer.cli.local.supervisor import Process, Program, Supervisor
from qinfer.core.clock import Clock, SystemClock
from qinfer.models.state import State, WorkerRecord

MODULE = "qinfer_workers.inference"
_PATIENT_STARTS = 3
"""Starts of a worker that crashes after which it does not count as one that is about to serve."""


class FleetWorker(Program):
    """A worker process with what is known of it.

    Args:
        slot: Its number, from 1.
        env: See `Program`.
        cpus: See `Program`.
        clock: Tells the time.
    """

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
        """See `Program`; counts."""
        self.starts += 1
        self.started_s = self._clock.monotonic_s()
        self.is_ready = False
        super().start()

    def kill(self) -> None:
        """See `Program`; counts."""
        self.kills += 1
        super().kill()


class Fleet:
    """Some workers, under a supervisor.

    Args:
        supervisor: Looks after them.
        env: Their environment.
        shares: The cores of each slot; as many as there may be workers.
        stop_s: Seconds that one gets to drain before it is killed.
        policy: How one that crashed is restarted.
        clock: Tells the time.

    Attributes:
        start_s: The longest time that one of them took from its start until it served.
    """

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
        self._here: list[FleetWorker] = []
        self._leaving: list[FleetWorker] = []
        self._gone_restarts = 0
        self._gone_kills = 0
        self.start_s = 0.0

    @property
    def size(self) -> int:
        """Workers that are there to stay: those that serve, start, or wait for their restart."""
        return len(self._here)

    @property
    def live(self) -> int:
        """Workers that serve."""
        return sum(worker.is_ready for worker in self._here)

    @property
    def starting(self) -> int:
        """Workers that are about to serve."""
        return sum(not worker.is_ready and worker.starts <= _PATIENT_STARTS for worker in self._here)

    @property
    def draining(self) -> int:
        """Workers that end what they have in hand."""
        return len(self._leaving)

    @property
    def processes(self) -> list[Process]:
        """All that may run."""
        return [*self._here, *self._leaving]

    @property
    def restarts(self) -> int:
        """How often one of them was started again after it had ended by itself."""
        return self._gone_restarts + sum(worker.starts - 1 for worker in self._here + self._leaving)

    @property
    def kills(self) -> int:
        """How often one of them was killed because it did not end in time."""
        return self._gone_kills + sum(worker.kills for worker in self._here + self._leaving)

    def note(self, records: Iterable[WorkerRecord]) -> None:
        """Takes the heartbeats of all live workers: which of these serve, and what they execute."""
        host = socket.gethostname()
        by_start = {record.id.rpartition("-")[0]: record for record in records}  # <host>-<pid>-<random>
        now_s = self._clock.monotonic_s()
        for worker in self._here:
            record = by_start.get(f"{host}-{worker.pid}")
            was_ready, worker.is_ready = worker.is_ready, record is not None and _serves(record)
            worker.executing = record.executing if record else 0
            if worker.is_ready and not was_ready:
                self.start_s = max(self.start_s, now_s - worker.started_s)
        for worker in [one for one in self._leaving if not self._supervisor.looks_after(one)]:
            self._leaving.remove(worker)
            self._gone_restarts += worker.starts - 1
            self._gone_kills += worker.kills

    def resize(self, target: int) -> None:
        """Starts or drains workers until there are `target`; never more processes than slots, so some may come later.

        Those that do not serve yet leave first, then those that execute least, then the latest.

        Raises:
            OSError: A process can't be started.
        """
        while self.size > target:
            worker = min(self._here, key=lambda one: (one.is_ready, one.executing, -one.started_s))
            self._here.remove(worker)
            self._leaving.append(worker)
            self._supervisor.dismiss(worker)
        taken = {worker.slot for worker in self._here + self._leaving}
        free = [slot for slot in range(1, len(self._shares) + 1) if slot not in taken]
        for slot in free[: max(target - self.size, 0)]:
            worker = FleetWorker(slot, self._env, self._shares[slot - 1], self._clock)
            self._supervisor.add(worker, self._policy, stop_s=self._stop_s)
            self._here.append(worker)


def _serves(record: WorkerRecord) -> bool:
    """Tells whether a worker has loaded what it can; one that has not begun reports no model."""
    states = [version.state for versions in record.models.values() for version in versions.values()]
    return State.LOADING not in states and bool(states)
