"""The rate limiter of a worker: carries out the decisions of `qinfer.batching.rate_limiter` (Triton's `--rate-limit`).

    executors ── wait, release_grant ──▶ Ledger ── decide ──▶ LimitedInstance.granted ──▶ executors
                                            │ missing, idle         ▲
                                            └──────▶ SharedUnits ───┘ exchanges global units in Redis

It decides once an event-loop tick. Idle global units stay here until other workers wait for them.
"""

import asyncio
import logging
import time
from collections.abc import Callable, Collection, Sequence
from contextlib import suppress

from qinfer.batching.rate_limiter import GLOBAL, Ledger, LimitedInstance, needs_of
from qinfer.core.messages import ResourceHolder
from qinfer.core.retry import OutageLog
from qinfer.core.settings import Settings
from qinfer.core.settings_sections import Maximum
from qinfer.errors import ModelLoadFailed, QinferError
from qinfer.models.spec import InstanceSpec, ModelSpec
from qinfer.queue.lanes import Queue
from qinfer.queue.resources import Resources, Units, Wish
from qinfer_workers.inference.devices import groups_of
from qinfer_workers.inference.limited_executors import LimitedExecutor, PermitExecutor, StagedExecutor
from qinfer_workers.inference.loader import LoadedVersion, Loader
from qinfer_workers.inference.publisher import LeaseKeeper, OwnerLease

logger = logging.getLogger(__name__)

_RETRY_S = 0.5
_PARTS = 3


class RateLimiter:
    """Grants resources to instances; on the event loop, except `check`."""

    def __init__(
        self, maxima: Sequence[Maximum], resources: Resources, lease_s: float, gpus: Collection[int] = ()
    ) -> None:
        self.ledger = Ledger(maxima, resources.owner)
        self.shared = SharedUnits(self.ledger, resources, lease_s, self._decide)
        self._gpus = gpus
        self._is_due = False

    def check(self, spec: ModelSpec) -> None:
        """Refuses a model that never gets its resources, with Triton's text."""
        try:
            self.ledger.check(groups_of(spec, self._gpus))
        except ValueError as error:
            raise ModelLoadFailed(str(error)) from None

    def executor(self, loaded: LoadedVersion, loop: asyncio.AbstractEventLoop, name: str) -> LimitedExecutor:
        """Returns the executor of a limited model."""
        groups = [group for group in groups_of(loaded.spec, self._gpus) for _ in range(group.count)]
        instances = [self._instance(loaded.spec.name, group) for group in groups]
        kind: type[LimitedExecutor] = StagedExecutor if loaded.spec.sequences else PermitExecutor
        executor = kind(loaded.instances, instances, self, loop, name)
        self.ledger.add(instances)
        self.shared.open()
        return executor

    def wait(self, instance: LimitedInstance, callers: tuple[ResourceHolder, ...]) -> None:
        """Notes that an instance has work."""
        self.ledger.wait(instance, callers)
        self._changed()

    def leave_queue(self, instance: LimitedInstance) -> None:
        """Notes that an instance has no work."""
        self.ledger.leave_queue(instance)
        self._changed()

    def release_grant(self, instance: LimitedInstance, *, has_executed: bool) -> None:
        """Takes back the grant of an instance."""
        self.ledger.release_grant(instance, has_executed=has_executed)
        self._changed()

    def remove(self, instances: Sequence[LimitedInstance]) -> None:
        """Removes idle instances."""
        self.ledger.remove(instances)
        self._changed()

    def holds(self, callers: Sequence[ResourceHolder]) -> bool:
        """Returns whether callers hold resources."""
        return self.ledger.holds(callers)

    def conflict(self, spec: ModelSpec, callers: Sequence[ResourceHolder]) -> str:
        """Returns why other workers can't run a model whose resources its callers hold, or ""."""
        return self.ledger.conflict(spec.name, map(needs_of, groups_of(spec, self._gpus)), callers)

    def refusal(self, instances: Sequence[LimitedInstance], callers: Sequence[ResourceHolder]) -> str:
        """Returns why callers would wait for themselves, or ""."""
        if not instances:
            return ""
        return self.ledger.refusal(instances[0].model, [instance.needs for instance in instances], callers)

    def _instance(self, model: str, group: InstanceSpec) -> LimitedInstance:
        return LimitedInstance(model, needs_of(group), group.priority, lambda _: None)

    def _changed(self) -> None:
        if not self._is_due:
            self._is_due = True
            asyncio.get_running_loop().call_soon(self._decide_all)

    def _decide_all(self) -> None:
        self._is_due = False
        self.shared.return_units()
        self._decide()

    def _decide(self) -> None:
        for instance in self.ledger.decide():
            instance.granted(instance)
        self.shared.want()


def open_limiter(
    settings: Settings, queue: Queue, worker_id: str, keeper: LeaseKeeper, loader: Loader
) -> RateLimiter | None:
    """Makes a worker's rate limiter; `None` = it is off."""
    if settings.rate_limit.mode == "off":
        return None
    lease_s = settings.worker.lease_s
    resources = Resources(queue.router, worker_id, lease_s)
    keeper.owners[resources.owner] = OwnerLease(resources.lease_keys)
    limiter = RateLimiter(settings.rate_limit.maxima, resources, lease_s, loader.gpus)
    loader.limiter = limiter.check
    return limiter


class SharedUnits:
    """This worker's units of global resources, for `Ledger.pool`."""

    def __init__(self, ledger: Ledger, resources: Resources, lease_s: float, decide: Callable[[], None]) -> None:
        self._ledger = ledger
        self._resources = resources
        self._lease_s = lease_s
        self._decide = decide
        self._opened, self._changed = asyncio.Event(), asyncio.Event()
        self._wanted: frozenset[str] = frozenset()
        self._back: dict[str, int] = {}
        """Units being given back."""
        self._asked: dict[tuple[tuple[str, int], ...], tuple[Wish, float]] = {}
        """Queued wishes, and when to repeat them (monotonic)."""
        self._valid_until_s = 0.0

    @property
    def is_open(self) -> bool:
        """Whether any model has needed a global resource."""
        return self._opened.is_set()

    def open(self) -> None:
        """Starts the exchange, if there are global resources."""
        if any(resource.device == GLOBAL for resource in self._ledger.maxima):
            self._opened.set()
            self._changed.set()

    def return_units(self) -> None:
        """Gives back wanted units; drops all if the lease may have ended."""
        pool = self._ledger.pool
        if pool and time.monotonic() >= self._valid_until_s:
            pool.clear()
            self._changed.set()
        for name in self._wanted:
            idle = self._ledger.idle(name)
            if pool.get(name) and idle > 0:
                pool[name] -= idle
                self._back[name] = self._back.get(name, 0) + idle
                self._changed.set()

    def want(self) -> None:
        """Starts an exchange if the missing units may have changed."""
        if self.is_open and (self._asked or self._ledger.missing()):
            self._changed.set()

    async def run(self) -> None:
        """Exchanges units until cancelled."""
        await self._opened.wait()
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._follow_news())
            outage = OutageLog(logger, "global resources can't be exchanged", "global resources are exchanged again")
            while True:
                self._changed.clear()
                wait_s = _RETRY_S
                try:
                    wait_s = await self._exchange()
                    outage.over()
                except QinferError as error:
                    outage.failed(error.message)
                    self._ask_again()
                    await asyncio.sleep(_RETRY_S)
                with suppress(TimeoutError):
                    async with asyncio.timeout(wait_s):
                        await self._changed.wait()

    async def end_lease(self) -> None:
        """Ends the lease; without Redis it expires."""
        with suppress(QinferError):
            if self.is_open:
                await self._resources.end_lease()
        await self._resources.close()

    async def _exchange(self) -> float:
        missing = {_units_key(units): Wish(units, is_callee) for units, is_callee in self._ledger.missing()}
        given_up = [wish for key, (wish, _) in self._asked.items() if key not in missing]
        self._asked = {key: asked for key, asked in self._asked.items() if key in missing}
        now_s = time.monotonic()
        if given_up or self._back or now_s >= self._renew_at_s:
            await self._once(None, given_up)
        for key, wish in missing.items():
            before, again_s = self._asked.get(key, (wish, 0.0))
            if now_s >= again_s or wish != before:
                self._asked[key] = wish, float("inf")
                await self._once(wish)
        next_s = min([self._renew_at_s, *(again_s for _, again_s in self._asked.values())])
        return max(next_s - time.monotonic(), 0.0)

    @property
    def _renew_at_s(self) -> float:
        return self._valid_until_s - self._lease_s * (1 - 1 / _PARTS)

    async def _once(self, wish: Wish | None, given_up: Sequence[Wish] = ()) -> None:
        pool = self._ledger.pool
        for name in wish.units if wish is not None else ():
            # wishes are granted whole
            idle = max(self._ledger.idle(name), 0)
            if idle:
                pool[name] -= idle
                self._back[name] = self._back.get(name, 0) + idle
        maxima = {r.name: count for r, count in self._ledger.maxima.items() if r.device == GLOBAL}
        back, began_s = self._back, time.monotonic()
        self._back = {}
        done = await self._resources.exchange(maxima, back, wish, given_up)
        self._valid_until_s = began_s + self._lease_s
        self._ledger.pool = {name: units - self._back.get(name, 0) for name, units in done.held.items()}
        self._wanted = done.wanted
        if wish is not None:
            key = _units_key(wish.units)
            if done.has_got:
                self._asked.pop(key, None)
            elif key in self._asked:
                self._asked[key] = wish, began_s + done.retry_s
        # local instances first
        self._decide()
        self.return_units()

    def _ask_again(self) -> None:
        self._asked = {key: (wish, 0.0) for key, (wish, _) in self._asked.items()}

    async def _follow_news(self) -> None:
        last = "0"
        while True:
            try:
                news = await self._resources.wait(last)
            except QinferError:
                await asyncio.sleep(_RETRY_S)
                continue
            if news is None:
                continue
            last = news.last
            if news.has_freed:
                self._ask_again()
                self._changed.set()
            if news.wanted:
                self._wanted |= news.wanted
                self.return_units()


def _units_key(units: Units) -> tuple[tuple[str, int], ...]:
    return tuple(sorted(units.items()))
