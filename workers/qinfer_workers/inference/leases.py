"""The leases that this worker holds: when they were last renewed, which are lost, and the process that renews them.

A thread would survive a busy event loop too; a model that keeps the GIL would stop it. So `qinfer_workers.renewer` is a
process of its own.
"""

import asyncio
import logging
import sys
import threading
import time
from asyncio.subprocess import PIPE, Process
from collections.abc import Callable, Collection, Iterable
from contextlib import suppress
from typing import Protocol

import msgspec

from qinfer.core.clock import ServerClock
from qinfer.core.processes import packed, received
from qinfer.core.retry import Backoff, OutageLog
from qinfer.core.settings import Settings
from qinfer.queue import keys, scripts
from qinfer.queue.clients import Login
from qinfer.queue.entries import Entry, Lane, Lease
from qinfer_workers import renewer

logger = logging.getLogger(__name__)

Place = tuple[Lane, str]
"""Where an entry is: its lane, and its id there."""
_RETRY_S = 0.5
_LONGEST_RETRY_S = 5.0


class Held(Protocol):
    """A request or a shard that a worker holds; compared by identity."""

    @property
    def lease(self) -> Lease:
        """The lease on its entry."""
        ...

    @property
    def deadline_s(self) -> float:
        """The instant from which nobody waits for it, in the broker's time."""
        ...

    def lose(self) -> None:
        """Takes note that the lease is lost."""
        ...


class Renewals(Protocol):
    """Renews what a keeper holds."""

    async def run(self, keeper: "LeaseKeeper") -> None:
        """Renews again and again until cancelled, and reports each outcome to `LeaseKeeper.renewed`."""
        ...

    def ask(self) -> None:
        """Has everything that is held by now renewed at once."""
        ...


class LeaseKeeper:
    """Keeps account of the leases. Used on the event loop, but `held`, which any thread may call.

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
        """Renews these from now on."""
        now_s = time.monotonic()
        with self._lock:
            for item in items:
                self._held[item] = now_s

    def drop(self, items: Iterable[Held]) -> None:
        """Renews these no longer."""
        with self._lock:
            for item in items:
                self._held.pop(item, None)

    def holds(self, entry: Entry) -> bool:
        """Tells whether this worker holds an entry already."""
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


class ProcessRenewals:
    """Renews in a process of its own, which is started again should it end.

    Args:
        settings: Where Redis is, and how often to renew.
        consumer: The worker's id.
    """

    def __init__(self, settings: Settings, consumer: str) -> None:
        self._hello = renewer.Hello(
            redis=Login.of(settings.redis),
            group=keys.GROUP,
            consumer=consumer.encode(),
            script=scripts.RENEW.text,
            every_s=settings.worker.renew_every_s,
            longest_s=max(settings.limits.max_timeout_s, settings.requests.max_timeout_s),
        )
        self._lanes: dict[bytes, Lane] = {}
        self._asked = asyncio.Event()
        self._outage = OutageLog(logger, "leases not renewed", "leases are renewed again")
        self._endings = OutageLog(
            logger,
            "the renewer of leases ended, starting another; without one nothing is fetched",
            "a renewer of leases is running",
            level=logging.ERROR,
        )
        self._backoff = Backoff(_RETRY_S, _LONGEST_RETRY_S)

    async def run(self, keeper: LeaseKeeper) -> None:
        """See `Renewals.run`; what can't be started is tried again, less and less often."""
        while True:
            try:
                self._endings.failed(f"it ended with status {await self._run_one(keeper)}")
            except OSError as error:  # no memory, or too many processes or files
                self._endings.failed(f"it can't be started: {error.strerror}")
            await asyncio.sleep(self._backoff.next_s())

    async def _run_one(self, keeper: LeaseKeeper) -> int | None:
        """Starts a process and talks to it until it ends; returns its exit status."""
        command = [sys.executable, "-P", "-m", renewer.__name__]
        process = await asyncio.create_subprocess_exec(*command, stdin=PIPE, stdout=PIPE)
        try:
            async with asyncio.TaskGroup() as tasks:
                sender = tasks.create_task(self._send(process, keeper))
                await self._listen(process, keeper)
                sender.cancel()
        finally:
            with suppress(ProcessLookupError):
                process.kill()
            await process.wait()
        return process.returncode

    def ask(self) -> None:
        """See `Renewals.ask`."""
        self._asked.set()

    async def _send(self, process: Process, keeper: LeaseKeeper) -> None:
        """Sends what is held, again and again."""
        assert process.stdin is not None
        pause_s = self._hello.every_s / renewer.REPORTS_PER_RENEWAL
        with suppress(ConnectionError):  # it ended: `_listen` knows
            process.stdin.write(packed(self._hello))
            while True:
                held = self._held(keeper)
                held.now = self._asked.is_set()
                self._asked.clear()
                process.stdin.write(packed(held))
                await process.stdin.drain()
                with suppress(TimeoutError):
                    async with asyncio.timeout(pause_s):
                        await self._asked.wait()

    def _held(self, keeper: LeaseKeeper) -> renewer.Held:
        held = renewer.Held({})
        for lane in keeper.lanes():
            self._lanes[keys.lane(lane)] = lane
            held.lanes[keys.lane(lane)] = {}
        for item, until_s in keeper.wanted():
            entry = item.lease.entry
            self._lanes[keys.lane(entry.lane)] = entry.lane
            held.lanes.setdefault(keys.lane(entry.lane), {})[entry.entry_id.encode()] = until_s
        return held

    async def _listen(self, process: Process, keeper: LeaseKeeper) -> None:
        """Hands reports to the keeper until the process ends."""
        assert process.stdout is not None
        decoder = msgspec.msgpack.Decoder(renewer.Report)
        with suppress(asyncio.IncompleteReadError, ConnectionError):
            while True:
                self._take(decoder.decode(await received(process.stdout)), keeper)

    def _take(self, report: renewer.Report, keeper: LeaseKeeper) -> None:
        """Hands a report to the keeper."""
        self._backoff.reset()
        self._endings.over()
        for reason in report.failed.values():
            self._outage.failed(reason)
        if not report.failed:
            self._outage.over()
        lost = {(self._lanes[lane], entry_id.decode()) for lane, entry_id in report.lost}
        keeper.renewed(report.began_s, lost, [self._lanes[lane] for lane in report.failed], report.renewed)
