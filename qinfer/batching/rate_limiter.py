"""The rate limiter decides which model instances may execute next, given the resources of the worker.

It owns Triton's rules (docs/user_guide/rate_limiter.md of its server): an execution needs all resources of its instance
at once, and the waiting instance with the lowest *score* (executions x priority) goes first. Pure.

    wait ─▶ waiting ─▶ decide ─▶ granted ─▶ execution ─▶ release_grant ─▶ decide …

Three rules go beyond Triton's, where the first waiting instance blocks all others (issue #8358 of its server):

- An instance that can't go yet reserves its units: it blocks only instances that need the same units, and never
  starves.
- A *callee*, whose model is called by an execution that holds resources, goes before all other instances.
- A callee uses its caller's units of a resource that both need.
"""

import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

from qinfer.core.messages import ResourceHolder
from qinfer.core.settings_sections import Maximum
from qinfer.models.spec import InstanceSpec

GLOBAL = -1
"""The device of shared resources."""


class Resource(NamedTuple):
    """A device's resource, numbered as in Triton (the CPU is 0), or `GLOBAL`."""

    name: str
    device: int


Needs = Mapping[Resource, int]
"""Resource → units, at least 1."""


Own = Needs | None
"""Units to take; `None` = the instance waits for units that a caller holds."""


def needs_of(group: InstanceSpec) -> dict[Resource, int]:
    """Returns the resources of an execution."""
    units = {Resource(r.name, GLOBAL if r.is_global else group.device.number): r.units for r in group.resources}
    return {resource: count for resource, count in units.items() if count}


def maxima_of(needs: Iterable[Needs], given: Sequence[Maximum]) -> dict[Resource, int]:
    """Returns the units of each needed resource: as configured, or the largest need.

    If any maximum is configured, a resource without one has 0 units, as in Triton.
    """
    most = _largest(needs)
    for resource in most if given else ():
        found = [one.units for one in given if one.name == resource.name and _is_of(one, resource)]
        most[resource] = max(found, default=0)
    return most


def check_maxima(needs: Sequence[Needs], given: Sequence[Maximum]) -> None:
    """Raises `ValueError`, with Triton's text, if an instance could never execute."""
    most, largest = maxima_of(needs, given), _largest(needs)
    for resource, count in largest.items():
        if most[resource] < count:
            raise ValueError(
                f'Resource count for "{resource.name}" is limited to {most[resource]} which will prevent scheduling of '
                f"one or more model instances, the minimum required count is {count}"
            )
    shared = {resource.name for resource in most if resource.device == GLOBAL}
    for resource in most:
        if resource.device != GLOBAL and resource.name in shared:
            raise ValueError(
                f'Resource "{resource.name}" is present as both global and device-specific resource in the model '
                "configuration."
            )


def _largest(needs: Iterable[Needs]) -> dict[Resource, int]:
    most: dict[Resource, int] = {}
    for one in needs:
        for resource, count in one.items():
            most[resource] = max(most.get(resource, 0), count)
    return most


def _is_of(one: Maximum, resource: Resource) -> bool:
    return resource.device == GLOBAL or one.device is None or one.device == resource.device


class ResourceGrant:
    """Resources that an execution holds.

    Attributes:
        token: Unique among all workers.
        held: Own and borrowed units.
        borrowed: Resource → the lender's grant.
        lent: Units that callees use.
        has_ended: Callees return lent units later.
        is_elsewhere: Only the units lent here are known.
    """

    __slots__ = ("borrowed", "has_ended", "held", "is_elsewhere", "lent", "model", "token")

    def __init__(self, token: str, model: str, held: Mapping[Resource, int]) -> None:
        self.token = token
        self.model = model
        self.held = dict(held)
        self.borrowed: dict[Resource, ResourceGrant] = {}
        self.lent: dict[Resource, int] = {}
        self.has_ended = self.is_elsewhere = False

    def has_free(self, resource: Resource, count: int) -> bool:
        """Returns whether units may be lent now."""
        return self.held.get(resource, 0) - self.lent.get(resource, 0) >= count

    @property
    def holder(self) -> ResourceHolder:
        """The grant for calls, with global units only."""
        units = {resource.name: count for resource, count in self.held.items() if resource.device == GLOBAL}
        return ResourceHolder(self.token, self.model, units)


class LimitedInstance:
    """A model instance; priority 2 executes half as often as priority 1."""

    __slots__ = ("callers", "executions", "grant", "granted", "model", "needs", "order", "priority")

    def __init__(self, model: str, needs: Needs, priority: int, granted: Callable[["LimitedInstance"], None]) -> None:
        self.model = model
        self.needs = dict(needs)
        self.priority = max(priority, 1)
        self.granted = granted
        self.executions = 0
        self.order = 0
        """The place of the instance among those that wait; 0 = the instance does not wait."""
        self.callers: tuple[ResourceHolder, ...] = ()
        self.grant: ResourceGrant | None = None

    @property
    def score(self) -> int:
        """The score of the instance; the waiting instance with the lowest score goes first."""
        return self.executions * self.priority


class Ledger:
    """One worker's resources, holders, and waiting instances.

    `pool` has this worker's units of global resources, `maxima` all units of each resource.
    """

    def __init__(self, given: Sequence[Maximum] = (), name: str = "") -> None:
        self.pool: dict[str, int] = {}
        self.maxima: dict[Resource, int] = {}
        self._given = given
        self._name = name
        self._instances: list[LimitedInstance] = []
        self._waiting: list[LimitedInstance] = []
        self._grants: dict[str, ResourceGrant] = {}
        self._used: dict[Resource, int] = {}
        self._numbers = itertools.count(1)

    def check(self, groups: Sequence[InstanceSpec]) -> None:
        """Raises `ValueError`, with Triton's text, if instances could never execute."""
        check_maxima([*(instance.needs for instance in list(self._instances)), *map(needs_of, groups)], self._given)

    def add(self, instances: Sequence[LimitedInstance]) -> None:
        """Adds instances at the lowest present score: they have nothing to catch up."""
        first = min((instance.score for instance in self._instances), default=0)
        for instance in instances:
            instance.executions = first // instance.priority
        self._instances += instances
        self._update_maxima()

    def remove(self, instances: Sequence[LimitedInstance]) -> None:
        """Removes instances that execute nothing."""
        for instance in instances:
            self.leave_queue(instance)
            self._instances.remove(instance)
        self._update_maxima()

    def wait(self, instance: LimitedInstance, callers: tuple[ResourceHolder, ...] = ()) -> None:
        """Adds an instance with work, and its callers."""
        instance.callers = tuple(one for one in callers if self._share(one).held)
        if not instance.order:
            instance.order = next(self._numbers)
            self._waiting.append(instance)

    def leave_queue(self, instance: LimitedInstance) -> None:
        """Removes an instance without work."""
        if instance.order:
            instance.order, instance.callers = 0, ()
            self._waiting.remove(instance)

    def decide(self) -> list[LimitedInstance]:
        """Grants resources; returns the instances that may execute."""
        granted: list[LimitedInstance] = []
        free = self._free()
        for instance, own, lenders in self._in_order(free):
            if own is not None and all(free[resource] >= count for resource, count in own.items()):
                self._grant(instance, own, lenders)
                granted.append(instance)
        return granted

    def missing(self) -> list[tuple[dict[str, int], bool]]:
        """Returns the global units that waiting instances lack, and whether for a callee.

        A worker with all units waits for its own executions.
        """
        found: dict[tuple[tuple[str, int], ...], bool] = {}
        free = self._free()
        for instance, own, _ in self._in_order(free):
            if own is None or not all(free[r] >= count for r, count in own.items() if r.device != GLOBAL):
                continue
            units = {r: count for r, count in own.items() if r.device == GLOBAL}
            if any(free[r] < count and self.pool.get(r.name, 0) < self.maxima[r] for r, count in units.items()):
                found.setdefault(tuple((r.name, count) for r, count in sorted(units.items())), bool(instance.callers))
        return [(dict(units), is_callee) for units, is_callee in found.items()]

    def release_grant(self, instance: LimitedInstance, *, has_executed: bool = True) -> None:
        """Takes back a grant, except lent units."""
        grant = instance.grant
        assert grant is not None, "nothing was granted"
        instance.grant = None
        instance.executions += has_executed
        grant.has_ended = True
        del self._grants[grant.token]
        for resource, count in grant.held.items():
            self._give_up(grant, resource, count - grant.lent.get(resource, 0))

    def idle(self, name: str) -> int:
        """Returns the unused global units of this worker; negative = it has too few."""
        return self.pool.get(name, 0) - self._used.get(Resource(name, GLOBAL), 0)

    def conflict(self, model: str, needs: Iterable[Needs], callers: Sequence[ResourceHolder]) -> str:
        """Returns why a call that can't borrow its callers' units would wait for its caller.

        A device's units matter only if the model is in this worker.
        """
        is_here = any(instance.model == model for instance in self._instances)
        shares = [self._share(caller) for caller in callers]
        for resource in itertools.chain.from_iterable(needs):
            for share in shares:
                if share.held.get(resource) and (is_here or resource.device == GLOBAL):
                    return (
                        f"model '{model}' needs resource '{resource.name}', which its caller, model '{share.model}', "
                        "holds: only in the worker that calls it can it use the same units, if it is neither decoupled "
                        "nor has sequences; load it there, or let one of them need less"
                    )
        return ""

    def holds(self, callers: Sequence[ResourceHolder]) -> bool:
        """Returns whether any of these callers holds resources."""
        return any(self._share(caller).held for caller in callers)

    def refusal(self, model: str, needs: Iterable[Needs], callers: Sequence[ResourceHolder]) -> str:
        """Returns why a call would wait for its caller."""
        shares = [self._share(caller) for caller in callers]
        for resource, count in itertools.chain.from_iterable(one.items() for one in needs):
            holding = [share for share in shares if share.held.get(resource)]
            if holding and all(share.held[resource] < count for share in holding):
                return (
                    f"model '{model}' needs {count} of resource '{resource.name}', of which its caller, model "
                    f"'{holding[0].model}', holds {holding[0].held[resource]}: it would wait for its caller; let the "
                    "caller hold as many, or none"
                )
        return ""

    def _update_maxima(self) -> None:
        self.maxima = maxima_of([instance.needs for instance in self._instances], self._given)

    def _free(self) -> dict[Resource, int]:
        units = {r: self.pool.get(r.name, 0) if r.device == GLOBAL else count for r, count in self.maxima.items()}
        return {resource: count - self._used.get(resource, 0) for resource, count in units.items()}

    def _in_order(
        self, free: dict[Resource, int]
    ) -> Iterator[tuple[LimitedInstance, Own, dict[Resource, ResourceGrant]]]:
        """Yields the waiting instances; each reserves its needs, granted or not.

        Callees reserve nothing against one another, because the first may wait for the second's caller.
        """
        waiting = sorted(self._waiting, key=lambda one: (one.score, one.order))
        callees = [instance for instance in waiting if instance.callers]
        for instance in callees:
            own, lenders = self._plan(instance)
            yield instance, own, lenders
            if instance.grant is not None:
                _reserve_units(free, own)
        for instance in callees:
            if instance.grant is None:
                _reserve_units(free, self._plan(instance)[0])
        for instance in waiting:
            if not instance.callers and instance.grant is None:
                yield instance, instance.needs, {}
                _reserve_units(free, instance.needs)

    def _plan(self, instance: LimitedInstance) -> tuple[Own, dict[Resource, ResourceGrant]]:
        shares = [self._share(caller) for caller in instance.callers]
        own: dict[Resource, int] = {}
        lenders: dict[Resource, ResourceGrant] = {}
        for resource, count in instance.needs.items():
            holding = [share for share in shares if share.held.get(resource)]
            lender = next((share for share in holding if share.has_free(resource, count)), None)
            if lender is not None:
                lenders[resource] = lender
            elif holding:
                return None, {}
            else:
                own[resource] = count
        return own, lenders

    def _share(self, caller: ResourceHolder) -> ResourceGrant:
        grant = self._grants.get(caller.token)
        if grant is not None:
            return grant
        is_mine = caller.token.startswith(f"{self._name}/")
        units = {} if is_mine else {Resource(name, GLOBAL): count for name, count in caller.units.items()}
        grant = ResourceGrant(caller.token, caller.model, units)
        grant.is_elsewhere = True
        return grant

    def _grant(
        self, instance: LimitedInstance, own: Mapping[Resource, int], lenders: Mapping[Resource, ResourceGrant]
    ) -> None:
        grant = ResourceGrant(f"{self._name}/{next(self._numbers)}", instance.model, instance.needs)
        grant.borrowed = dict(lenders)
        for resource, count in own.items():
            self._used[resource] = self._used.get(resource, 0) + count
        for resource, lender in lenders.items():
            lender.lent[resource] = lender.lent.get(resource, 0) + instance.needs[resource]
            if lender.is_elsewhere:
                self._grants[lender.token] = lender
        self._grants[grant.token] = grant
        self.leave_queue(instance)
        instance.grant = grant

    def _give_up(self, grant: ResourceGrant, resource: Resource, count: int) -> None:
        lender = grant.borrowed.get(resource)
        if lender is None:
            self._used[resource] -= count
            return
        lender.lent[resource] -= count
        if lender.has_ended:
            self._give_up(lender, resource, count)
        elif lender.is_elsewhere and not any(lender.lent.values()):
            self._grants.pop(lender.token, None)


def _reserve_units(free: dict[Resource, int], own: Own) -> None:
    for resource, count in (own or {}).items():
        free[resource] = max(free[resource] - count, 0)
