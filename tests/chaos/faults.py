"""What is done to the processes, and when: planned from a seed, then carried out.

`plan` is pure: the same seed gives the same faults, each of a kind, at a time, against one of the processes of a role.
"""

import asyncio
import random
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum

from tests.chaos.cluster import Cluster
from tests.chaos.member import Member, Role
from tests.support.servers.servers import command

LEASE_S = 2.0

_STOPS_S = (1.2 * LEASE_S, 2.5 * LEASE_S)
"""For how long a process is stopped: its leases end meanwhile."""


class Kind(StrEnum):
    """What is done to a process."""

    KILL = "kill"
    """SIGKILL; a supervisor starts another."""
    END = "end"
    """SIGTERM: it drains."""
    STOP = "stop"
    """SIGSTOP, and SIGCONT after more than a lease; a wire stands still for as long."""
    CUT = "cut"
    """Every connection to Redis is closed, or one between machines in the middle of a message."""


@dataclass(frozen=True, slots=True)
class Fault:
    """One thing that goes wrong.

    Attributes:
        at_s: When, in seconds from the start.
        kind: What.
        role: To whom; which of them, `pick` says.
        pick: A number; the process is the one at this position, modulo how many run.
    """

    at_s: float
    kind: Kind
    role: Role
    pick: int

    @property
    def stop_s(self) -> float:
        """How long a stop lasts."""
        first_s, last_s = _STOPS_S
        return first_s + (last_s - first_s) * self.pick / 100


_VICTIMS = (Role.WORKER, Role.WORKER, Role.WORKER, Role.GATEWAY, Role.GATEWAY, Role.BROKER)
_OTHERS = (
    (Kind.END, Role.WORKER),
    (Kind.STOP, Role.WORKER),
    (Kind.STOP, Role.WORKER),
    (Kind.END, Role.GATEWAY),
    (Kind.STOP, Role.GATEWAY),
    (Kind.END, Role.BROKER),
    (Kind.CUT, Role.BROKER),
)


def plan(
    seed: int, seconds: float, kills: int, more: Sequence[Role] = (), also: Sequence[tuple[Kind, Role]] = ()
) -> list[Fault]:
    """Returns `kills` kills spread over the time, and half as many faults of other kinds in between.

    Args:
        seed: The same gives the same faults.
        seconds: How long.
        kills: How many.
        more: Who is killed beside workers, gateways and Redis.
        also: Faults beside the usual ones of other kinds.
    """
    rng = random.Random(seed)
    step_s = seconds / max(kills, 1)
    faults = []
    victims = rng.sample((*_VICTIMS, *more), len(_VICTIMS) + len(more))
    for number in range(kills):
        role = victims[number % len(victims)]
        faults.append(Fault(step_s * (number + rng.random()), Kind.KILL, role, rng.randrange(100)))
    others = rng.sample((*_OTHERS, *also), len(_OTHERS) + len(also))
    for number in range(kills // 2):
        kind, role = others[number % len(others)]
        faults.append(Fault(rng.uniform(0, seconds), kind, role, rng.randrange(100)))
    return sorted(faults, key=lambda fault: fault.at_s)


class Chaos:
    """Carries a plan out.

    Args:
        cluster: Whose processes.
        faults: What to do, in the order of time.

    Attributes:
        done: How often each was done.
        broker_kills: When Redis was killed, by the loop's clock.
    """

    def __init__(self, cluster: Cluster, faults: list[Fault]) -> None:
        self._cluster = cluster
        self._faults = faults
        self.done: Counter[str] = Counter()
        self.broker_kills: list[float] = []

    @property
    def kills(self) -> int:
        """Processes that were ended by SIGKILL."""
        return sum(count for name, count in self.done.items() if name.startswith(Kind.KILL))

    async def run(self) -> None:
        """Does everything at its time; a fault whose victim is still starting waits for it."""
        loop = asyncio.get_running_loop()
        start_s = loop.time()
        async with asyncio.TaskGroup() as stops:
            for fault in self._faults:
                await asyncio.sleep(max(start_s + fault.at_s - loop.time(), 0.0))
                await self._do(fault, stops)
                self.done[f"{fault.kind}-{fault.role}"] += 1

    async def _do(self, fault: Fault, stops: asyncio.TaskGroup) -> None:
        if fault.role is Role.BROKER:
            await self._trouble_broker(fault.kind)
        else:
            self._hurt(await self._cluster.running(fault.role, fault.pick), fault, stops)

    def _hurt(self, victim: Member, fault: Fault, stops: asyncio.TaskGroup) -> None:
        if fault.kind is Kind.KILL:
            victim.kill()
        elif fault.kind is Kind.END:
            victim.end()
        else:
            stops.create_task(victim.stop_for(fault.stop_s))

    async def _trouble_broker(self, kind: Kind) -> None:
        if kind is Kind.CUT:
            with self._cluster.redis() as client:
                await asyncio.to_thread(command, client, "CLIENT", "KILL", "TYPE", "normal", "SKIPME", "yes")
            return
        if kind is Kind.KILL:
            self.broker_kills.append(asyncio.get_running_loop().time())
        await asyncio.to_thread(self._cluster.restart_broker, kill=kind is Kind.KILL)
