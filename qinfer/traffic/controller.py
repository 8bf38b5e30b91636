"""The loops behind endpoints: every gateway follows the declarations, and has the controller of canaries.

A lease selects the controller that decides.

Once a second each gateway adds its counts, and confirms the revision that it uses. The gateway with the lease decides
by all counts, and stores the result by compare-and-set. It also restores trials that Redis has lost: otherwise a bad
version would be tried again.

After a rollback it moves the requests that wait for the bad version to the stable one, until a while after every
gateway has confirmed the rollback, since earlier choices may be enqueued late.
"""

import asyncio
import logging
import math
import time
from collections import Counter
from collections.abc import Callable, Mapping
from contextlib import suppress

from qinfer.core.retry import OutageLog
from qinfer.errors import BrokerUnavailable, Conflict, EndpointNotFound
from qinfer.models.catalog import Catalog
from qinfer.models.store import ControlStore
from qinfer.queue.lanes import Queue
from qinfer.traffic.canary import Trial, TrialChange, advanced, begun, belongs, confirmed
from qinfer.traffic.endpoints import Endpoint
from qinfer.traffic.routing import Endpoints
from qinfer.traffic.store import PIN_TTL_S, DeclaredEndpoints, EndpointStore, StoredTrial
from qinfer.traffic.tally import ObservedTrials

logger = logging.getLogger(__name__)

LOOK_EVERY_S = 0.5
"""Seconds between two readings of the store without a wake-up; with little CPU time, some readings are late."""

_RETRY_S = 0.25

EVERY_S = 1.0

MOVES_S = 10.0
"""Seconds after a rollback during which requests are still moved."""


class EndpointWatch:
    """Keeps a gateway's view current, and the targets loaded."""

    def __init__(self, store: EndpointStore, view: Endpoints, now_s: Callable[[], float]) -> None:
        self.store = store
        self.view = view
        self._now_s = now_s
        self._pinned: dict[str, Endpoint] = {}
        self._pinned_s = 0.0
        self._looking = asyncio.Lock()  # the later of two looks must not be overtaken
        self._looked_s = -math.inf

    async def refresh_endpoints(self) -> None:
        """Reads the declarations, and restores lost declarations."""
        async with self._looking:
            began_s = time.monotonic()  # the look may miss later changes
            declared = await self.store.read()
            if declared.revision < self.view.revision:
                declared = await self._restored(declared)
            if declared.revision != self.view.revision:
                is_first = self.view.revision < 0 and not declared.endpoints
                about = {"revision": declared.revision, "endpoints": len(declared.endpoints)}
                logger.log(logging.DEBUG if is_first else logging.INFO, "endpoints read", extra=about)
            self.view.show(declared)
            self._looked_s = began_s
            await self._pin(declared.endpoints)

    async def run(self) -> None:
        """Follows the declarations until cancelled."""
        outage = OutageLog(logger, "endpoints can't be read", "endpoints can be read again")
        self.view.heard_s = self._looked_s
        while True:
            with outage.noted(BrokerUnavailable):
                await self.store.wait(LOOK_EVERY_S)
                await self.refresh_endpoints()
                self.view.heard_s = self._looked_s
            if outage.is_out:
                await asyncio.sleep(_RETRY_S)  # the store can't wake it

    async def _restored(self, declared: DeclaredEndpoints) -> DeclaredEndpoints:
        lost = self.view.by_name.keys() - declared.endpoints.keys()
        for name in lost:
            try:
                await self.store.put(self.view.by_name[name].endpoint, 0, self.view.revision)
            except (Conflict, EndpointNotFound):
                continue
        logger.warning("endpoints restored, Redis had lost them", extra={"endpoints": len(lost)})
        return await self.store.read()

    async def _pin(self, endpoints: Mapping[str, Endpoint]) -> None:
        now_s = asyncio.get_running_loop().time()
        is_due = now_s - self._pinned_s >= PIN_TTL_S / 4
        for name, endpoint in endpoints.items():
            if is_due or self._pinned.get(name) != endpoint:
                await self.store.pin(endpoint, self._now_s())
        for name, before in self._pinned.items():
            if endpoints.get(name) != before:
                await self.store.unpin(before, endpoints.get(name))
        self._pinned = dict(endpoints)
        self._pinned_s = now_s if is_due else self._pinned_s


class CanaryController:
    """Counts, confirms, and if `decides`, decides about canaries."""

    def __init__(
        self,
        store: EndpointStore,
        view: Endpoints,
        observed: ObservedTrials,
        owner: str,
        queue: Queue,
        *,
        decides: bool = True,
    ) -> None:
        self._store = store
        self._trials = store.trials
        self._view = view
        self._observed = observed
        self._owner = owner
        self._now_s = queue.clock.now_s
        self._moves = queue.moves
        self._moved: Counter[tuple[str, int]] = Counter()
        self._decides = decides

    async def run(self) -> None:
        """Works once a second; gives the lease back when cancelled."""
        try:
            await self._work()
        finally:
            if self._decides:
                with suppress(BrokerUnavailable, TimeoutError):  # the lease expires
                    async with asyncio.timeout(EVERY_S):
                        await self._trials.release_lease(self._owner)

    async def _work(self) -> None:
        outage = OutageLog(logger, "canaries not checked", "canaries checked again")
        while True:
            with outage.noted(BrokerUnavailable):
                await self.round()
            await asyncio.sleep(EVERY_S)

    async def round(self) -> None:
        """Confirms, counts, and decides if this gateway has the lease."""
        if not self._view.is_stale:
            await self._trials.confirm(self._owner, self._view.revision)
        stored = await self._trials.read()
        known = {name: trial for name, trial in self._view.trials.items() if name in self._view.by_name}
        lost = {name: trial for name, trial in known.items() if name not in stored}
        self._view.trials = lost | {name: one.trial for name, one in stored.items()}
        for name, revision, counts, latencies in self._observed.new_counts():
            await self._trials.count(name, revision, counts, latencies)
        declared = {name: routed.endpoint for name, routed in self._view.by_name.items()}
        self._observed.follow(declared, self._view.trials)
        has_canaries = self._decides and any(endpoint.canary for endpoint in declared.values())
        if has_canaries and await self._trials.lead(self._owner):
            for name, endpoint in (await self._store.read()).endpoints.items():
                if name in lost and belongs(lost[name], endpoint):
                    await self._trials.change(endpoint, None, TrialChange(lost[name]))
                else:
                    await self._look_after(endpoint, stored.get(name))

    async def _look_after(self, endpoint: Endpoint, stored: StoredTrial | None) -> None:
        change = await self._change_of(endpoint, stored)
        if change is None or not await self._trials.change(endpoint, stored, change):
            return  # another gateway was first
        if change.event is not None:
            event = change.event
            about = {"endpoint": endpoint.name, "version": event.version, "step": event.step, "reason": event.reason}
            logger.info("canary: %s", event.event, extra=about)

    async def _change_of(self, endpoint: Endpoint, stored: StoredTrial | None) -> TrialChange | None:
        trial, name, revision = None if stored is None else stored.trial, endpoint.name, endpoint.revision
        if endpoint.canary is None:
            return None
        if trial is not None and trial.is_at(endpoint):
            counted = await self._trials.counted(name, revision)
            latencies = await self._trials.latencies(name, revision)
            return advanced(endpoint, trial, counted, latencies, self._now_s())
        if trial is not None and trial.is_rolled_back and (not trial.done_s or self._now_s() < trial.done_s + MOVES_S):
            heard = (await self._trials.heard()).values()
            moved = await self._move(endpoint, trial)  # after `heard`: their earlier requests are enqueued by now
            if (change := confirmed(endpoint, trial, heard, self._now_s(), moved)) is not None:
                return change
        return begun(endpoint, trial, self._view.ready_to_try(endpoint), self._now_s())

    async def _move(self, endpoint: Endpoint, trial: Trial) -> int:
        """Returns how many requests for a bad version were moved to the stable one so far.

        The requests stay if the stable version is not READY, or belongs to another model: a late answer is better than
        no answer, and lanes of two models may be on two nodes.
        """
        bad, stable, catalog = trial.state.canary, endpoint.stable, self._view.catalog
        key = endpoint.name, trial.state.revision
        if trial.model or bad == stable.number or catalog.find(*stable.place) is None:
            return self._moved[key]
        moved = await self._moves.move(catalog.lanes(stable.model, bad), stable.number, endpoint.name)
        if moved:
            self._moved[key] += moved
            about = {"endpoint": endpoint.name, "version": bad, "to": stable.number, "requests": moved}
            logger.info("canary: waiting requests moved", extra=about)
        return self._moved[key]


class EndpointFollower:
    """Endpoints in a bridge, or in a worker whose models make calls.

    Like a gateway, it counts, confirms, and uses stable targets while it hears of no changes. Any thread may use its
    `view`.
    """

    def __init__(self, catalog: Catalog, control: ControlStore, owner: str, queue: Queue) -> None:
        self.owner, self.catalog = owner, catalog
        self.view = Endpoints(catalog)
        self.observed = ObservedTrials()
        store = EndpointStore(control)
        self._watch = EndpointWatch(store, self.view, queue.clock.now_s)
        self._canaries = CanaryController(store, self.view, self.observed, owner, queue, decides=False)

    async def load_endpoints(self) -> None:
        """Reads the declarations for the first time."""
        await self._watch.refresh_endpoints()

    async def run(self) -> None:
        """Follows the declarations until cancelled."""
        async with asyncio.TaskGroup() as group:
            group.create_task(self._watch.run())
            group.create_task(self._canaries.run())
