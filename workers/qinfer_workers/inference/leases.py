"""The leases in this worker's hands: which there are, when they were last renewed, and which of them are lost.

Who renews them is beside the worker (`renewals`): an event loop that is busy for seconds must not lose its leases.
"""

import asyncio
import logging
import threading
import time
from collections.abc import Callable, Collection, Iterable
from typing import Protocol

from qinfer.core.clock import ServerClock
from qinfer.queue.base import Entry, Lane, Lease

logger = logging.getLogger(__name__)

Place = tuple[Lane, str]
"""Where an entry is: its lane, and its id there."""


class Held(Protocol):
    """What a worker holds, a request or a shard; one is told from another by identity."""

    @property
    def lease(self) -> Lease:
        """The lease on its entry."""
        ...

    @property
    def deadline_s(self) -> float:
        """When nobody waits for it any more, in the broker's time."""
        ...

    def lose(self) -> None:
        """Takes note that the lease is lost."""
        ...


class Renewals(Protocol):
    """Renews what a keeper holds; `renewals` has one in a thread and one in a process."""

    async def run(self, keeper: "LeaseKeeper") -> None:
        """Renews again and again until cancelled, and tells the keeper what came of it (`LeaseKeeper.renewed`)."""
        ...

    def ask(self) -> None:
        """Has everything that is held by now renewed at once."""
        ...


class LeaseKeeper:
    """See the module docstring. Used on the event loop, but `held`, which any thread may call.

    Args:
        renewals: Renews.
        clock: The broker's time, in which deadlines are.
        lease_s: Seconds without renewal after which another worker may take an entry.
        lanes: Tells the lanes that this worker fetches from.
        on_lost: Called for each held item whose lease is lost.

    Attributes:
        renewals: Leases that were renewed, each time.
        losses: Held items whose lease was lost.
    """

    def __init__(
        self,
        renewals: Renewals,
        clock: ServerClock,
        lease_s: float,
        lanes: Callable[[], Iterable[Lane]],
        on_lost: Callable[[Held], None],
    ) -> None:
        self.lanes = lanes
        self.renewals = self.losses = 0
        self._renewals = renewals
        self._clock = clock
        self._lease_s = lease_s
        self._on_lost = on_lost
        self._held: dict[Held, float] = {}
        self._lock = threading.Lock()
        self._renewed_at = time.monotonic()
        self._failing: dict[Lane, float] = {}
        """Lanes whose last renewal failed: when one succeeded last."""
        self._renewed = asyncio.Event()

    async def run(self) -> None:
        """Has the leases renewed until cancelled."""
        await self._renewals.run(self)

    async def watch(self, lanes: Collection[Lane]) -> None:
        """Waits until what is fetched from the lanes from now on will be renewed, whatever the model's code does."""
        asked_s = time.monotonic()
        while self._renewed_at < asked_s or not self.can_renew(lanes):
            self._renewals.ask()
            await self._renewed.wait()

    def can_renew(self, lanes: Iterable[Lane]) -> bool:
        """Tells whether leases on these lanes were renewed when it was last tried, and not too long ago.

        Where they can't be, nothing is to be fetched: other workers would have it while it executes here.
        """
        is_fresh = self._renewed_at > time.monotonic() - self._lease_s
        return is_fresh and (not self._failing or self._failing.keys().isdisjoint(lanes))

    def hold(self, items: Iterable[Held]) -> None:
        """Has these renewed from now on."""
        now_s = time.monotonic()
        with self._lock:
            for item in items:
                self._held[item] = now_s

    def drop(self, items: Iterable[Held]) -> None:
        """Has these renewed no longer."""
        with self._lock:
            for item in items:
                self._held.pop(item, None)

    def holds(self, entry: Entry) -> bool:
        """Tells whether an entry is in this worker's hands already."""
        place = entry.lane, entry.entry_id
        return any(place_of(item) == place for item in self.held())

    def held(self) -> list[Held]:
        """Returns what is held."""
        with self._lock:
            return list(self._held)

    def wanted(self) -> list[tuple[Held, float]]:
        """Returns what is to be renewed, and on the monotonic clock until when.

        A lease time after its deadline nobody waits for an item, which must not be in flight for ever because a model
        never returns.
        """
        now_s = time.monotonic()
        ends = ((item, self._clock.to_monotonic_s(item.deadline_s) + self._lease_s) for item in self.held())
        return [(item, end_s) for item, end_s in ends if end_s > now_s]

    def is_sure(self, items: Iterable[Held]) -> bool:
        """Tells whether none of these leases can have ended unnoticed.

        What was held at the last renewal that succeeded has been renewed since, and what came later was fetched later.
        After a SIGSTOP, or a call that stopped the interpreter, that may be too long ago.
        """
        since_s = time.monotonic() - self._lease_s
        return self._renewed_at > since_s and (
            not self._failing or all(self._sure_at(item) > since_s for item in items)
        )

    async def confirm(self, items: Iterable[Held]) -> None:
        """Waits until each of these, which are held, was renewed after now, or found lost."""
        asked_s = time.monotonic()
        items = list(items)
        while any(self._sure_at(item) < asked_s for item in items):
            self._renewals.ask()
            await self._renewed.wait()

    def renewed(self, began_s: float, lost: Collection[Place], failed: Collection[Lane] = (), count: int = 0) -> None:
        """Takes the outcome of a renewal.

        Args:
            began_s: When it began, on the monotonic clock.
            lost: What it found lost, finished by another or owned by another.
            failed: The lanes of which nothing is known.
            count: How many leases it renewed.
        """
        self.renewals += count
        self._failing = {lane: self._failing.get(lane, self._renewed_at) for lane in failed}
        self._renewed_at = began_s
        self._renewed.set()  # wakes those that wait now
        self._renewed.clear()
        if not lost:
            return
        found = 0
        for item in self.held():
            if place_of(item) not in lost or not self._is_older(item, began_s):
                continue  # else it was finished meanwhile, or released and fetched again
            self.drop([item])
            logger.debug("lease lost", extra={"entry_id": item.lease.entry.entry_id})
            self._on_lost(item)
            found += 1
        self.losses += found
        if found:  # mostly because callers went away, or gave up
            logger.info("leases lost", extra={"count": found})

    def _sure_at(self, item: Held) -> float:
        return self._failing.get(item.lease.entry.lane, self._renewed_at)

    def _is_older(self, item: Held, began_s: float) -> bool:
        return self._held.get(item, began_s + 1) <= began_s


def place_of(item: Held) -> Place:
    """Returns where an item's entry is."""
    return item.lease.entry.lane, item.lease.entry.entry_id
