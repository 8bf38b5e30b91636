"""The workers of one `qinfer up`: a fixed number of them, or as many as the work asks for."""

import logging
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Protocol

from qinfer.cli.local.machine import share_cpus, usable_cpus
from qinfer.cli.local.restart import RestartPolicy
from qinfer.cli.local.supervisor import Process, Program, Supervisor
from qinfer.cli.scaling.pool import MODULE, Fleet
from qinfer.cli.scaling.queue_watch import QueueWatch
from qinfer.cli.scaling.scaler import Autoscaler, crowded, policy_of
from qinfer.cli.scaling.scaling_file import ScalingFile
from qinfer.core.settings import Settings

logger = logging.getLogger(__name__)

KILL_MARGIN_S = 5.0
"""Seconds above a program's own drain limit before it is killed."""
WORKER_POLICY = RestartPolicy()


class Crew(Protocol):
    """Some workers under a supervisor."""

    @property
    def least(self) -> int:
        """The fewest workers that there are."""
        ...

    @property
    def about(self) -> str:
        """How many there are or will be, in words."""
        ...

    @property
    def processes(self) -> Sequence[Process]:
        """All that may run."""
        ...

    def start(self) -> None:
        """Starts the fewest."""
        ...

    def step(self) -> None:
        """Does what is due; called whenever the supervisor's `wait` returns."""
        ...

    def close(self) -> None:
        """Ends all but the workers."""
        ...


class FixedCrew:
    """A fixed number of workers.

    Args:
        supervisor: Looks after them.
        env: Their environment.
        count: How many.
        drain_s: Seconds that one gives itself to drain.
    """

    def __init__(self, supervisor: Supervisor, env: Mapping[str, str], count: int, drain_s: float) -> None:
        self._supervisor = supervisor
        self._stop_s = drain_s + KILL_MARGIN_S
        self.least = count
        self.about = str(count)
        self.processes = [
            Program(f"worker {number}", MODULE, env, cpus)
            for number, cpus in enumerate(share_cpus(usable_cpus(), count), start=1)
        ]

    def start(self) -> None:
        """See `Crew`."""
        for worker in self.processes:
            self._supervisor.add(worker, WORKER_POLICY, stop_s=self._stop_s)

    def step(self) -> None:
        """See `Crew`."""

    def close(self) -> None:
        """See `Crew`."""


def autoscaler(
    settings: Settings, supervisor: Supervisor, env: Mapping[str, str], say: Callable[[str], None] | None = None
) -> Autoscaler:
    """Returns what keeps as many workers under a supervisor as the work asks for.

    Args:
        settings: With the Redis that is used, and the limits.
        supervisor: Looks after the workers.
        env: Their environment.
        say: Called with lines for people; without it they are logged.

    Raises:
        SettingsError: The limits make no sense together, or the record can't be written.
    """
    policy = policy_of(settings.autoscale)
    if warning := crowded(policy):
        if say is not None:
            say(warning)
        else:
            logger.warning("workers share cores", extra={"what": warning})
    shares = share_cpus(usable_cpus(), policy.max_workers)
    stop_s = settings.worker.drain_s + KILL_MARGIN_S
    fleet = Fleet(supervisor, env, shares, stop_s=stop_s, policy=WORKER_POLICY)
    watch = QueueWatch(settings.redis, settings.worker.models, settings.autoscale.every_s, supervisor.poke)
    record = ScalingFile(Path(settings.autoscale.record)) if settings.autoscale.record else None
    return Autoscaler(policy, fleet, watch, settings.worker.models, say, record=record)
