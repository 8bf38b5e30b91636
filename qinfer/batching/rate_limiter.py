"""The rate limiter's decisions: which model instances may execute next, given the resources that there are.

It owns Triton's rules (docs/user_guide/rate_limiter.md of its server): an execution needs all resources of its instance
at once, and of the instances that wait, the one with the lowest *score* (executions x priority) goes first. It awaits
nothing, reads no clock and knows no Redis: property tests drive what workers run.

    wait ─▶ waiting ─▶ decide ─▶ granted ─▶ execution ─▶ ended ─▶ decide …

Three rules go beyond Triton's, whose first waiting instance holds up all others (issue #8358 of its server):

- An instance that can't go yet holds up only those that need what it needs: nobody starves, and nothing else waits.
- A *callee*, an instance that waits because an execution that holds resources calls its model, goes before all others.
- A callee that needs what a caller of it holds uses the caller's share, and takes nothing of it itself.
"""

import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

from qinfer.core.messages import Holder
from qinfer.core.settings_rate_limit import Maximum
from qinfer.models.spec import InstanceSpec

GLOBAL = -1
"""The device of a resource that is the same for all devices, and for all workers."""


class Resource(NamedTuple):
    """A resource.

    Attributes:
        name: Its name.
        device: The device that has it, as Triton numbers them: the CPU counts as 0; `GLOBAL` = all have the same.
    """

    name: str
    device: int


Needs = Mapping[Resource, int]
"""Resource → how many units of it are needed, or held; each at least 1."""


Own = Needs | None
"""The units that an instance has to take itself; `None` = a share that it needs is in use."""


def needs_of(group: InstanceSpec) -> dict[Resource, int]:
    """Returns what an execution of an instance of a group needs."""
    units = {Resource(r.name, GLOBAL if r.is_global else group.device.number): r.units for r in group.resources}
    return {resource: count for resource, count in units.items() if count}


def maxima_of(needs: Iterable[Needs], given: Sequence[Maximum]) -> dict[Resource, int]:
    """Returns how many units there are of each resource that is needed: what the largest need is, or what was given.

    Args:
        needs: What each instance needs.
        given: What was given; where anything was, resources that were not have no units, as in Triton.
    """
    most = _largest(needs)
    for resource in most if given else ():
        found = [one.units for one in given if one.name == resource.name and _is_of(one, resource)]
        most[resource] = max(found, default=0)
    return most


def check_maxima(needs: Sequence[Needs], given: Sequence[Maximum]) -> None:
    """Refuses needs that could never be met.

    Args:
        needs: What each instance needs.
        given: As for `maxima_of`.

    Raises:
        ValueError: Some instance would never execute; with Triton's text.
    """
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
    """Tells whether a given maximum counts for a resource; those of global ones count whatever device they name."""
    return resource.device == GLOBAL or one.device is None or one.device == resource.device


class Grant:
    """Resources that an execution holds: its own units, and its callers' shares.

    Attributes:
        token: Names it, among all workers.
        model: Whose execution holds them.
        held: All units that it holds, its own and borrowed ones; those of callers' shares are in `borrowed`, too.
        borrowed: Resource → the grant that it is borrowed from.
        lent: Units that callees use.
        has_ended: The execution has ended; units that are lent are returned when the callee ends.
        is_elsewhere: Another worker counts it; only what is lent of it here is known.
    """

    __slots__ = ("borrowed", "has_ended", "held", "is_elsewhere", "lent", "model", "token")

    def __init__(self, token: str, model: str, held: Mapping[Resource, int]) -> None:
        self.token = token
        self.model = model
        self.held = dict(held)
        self.borrowed: dict[Resource, Grant] = {}
        self.lent: dict[Resource, int] = {}
        self.has_ended = self.is_elsewhere = False

    def has_free(self, resource: Resource, count: int) -> bool:
        """Tells whether so many units of a resource may be lent now."""
        return self.held.get(resource, 0) - self.lent.get(resource, 0) >= count

    @property
    def holder(self) -> Holder:
        """The same as calls tell it: global units only, for those of a device are another worker's business."""
        units = {resource.name: count for resource, count in self.held.items() if resource.device == GLOBAL}
        return Holder(self.token, self.model, units)


class Instance:
    """A model instance, as the limiter knows it.

    Args:
        model: The model's name.
        needs: What its executions need.
        priority: Its weight: with 2 it executes half as often as with 1; 0 counts as 1.
        granted: Called by whoever acts on a decision.

    Attributes:
        grant: What its execution holds; `None` = none was granted.
    """

    __slots__ = ("callers", "executions", "grant", "granted", "model", "needs", "order", "priority")

    def __init__(self, model: str, needs: Needs, priority: int, granted: Callable[["Instance"], None]) -> None:
        self.model = model
        self.needs = dict(needs)
        self.priority = max(priority, 1)
        self.granted = granted
        self.executions = 0
        self.order = 0
        """The instance's place among those that wait, by when they began to; 0 = it does not wait."""
        self.callers: tuple[Holder, ...] = ()
        self.grant: Grant | None = None

    @property
    def score(self) -> int:
        """The lowest goes first."""
        return self.executions * self.priority


class Ledger:
    """The resources of one worker, who holds them, and who waits.

    Args:
        given: The maxima that were given.
        name: Begins the tokens of its grants.

    Attributes:
        pool: The units of each global resource that this worker has; what it has of others is its maxima.
        maxima: How many units there are of each resource.
    """

    def __init__(self, given: Sequence[Maximum] = (), name: str = "") -> None:
        self.pool: dict[str, int] = {}
        self.maxima: dict[Resource, int] = {}
        self._given = given
        self._name = name
        self._instances: list[Instance] = []
        self._waiting: list[Instance] = []
        self._grants: dict[str, Grant] = {}
        self._used: dict[Resource, int] = {}
        self._numbers = itertools.count(1)

    def check(self, groups: Sequence[InstanceSpec]) -> None:
        """Refuses instances that could never execute beside those that there are.

        Raises:
            ValueError: With Triton's text.
        """
        check_maxima([*(instance.needs for instance in list(self._instances)), *map(needs_of, groups)], self._given)

    def add(self, instances: Sequence[Instance]) -> None:
        """Takes instances of a model that is loaded; `check` has accepted them.

        They begin with as many executions as makes them equal to the first of the others: a model that is loaded late
        has its turns, not all turns until it has caught up.
        """
        first = min((instance.score for instance in self._instances), default=0)
        for instance in instances:
            instance.executions = first // instance.priority
        self._instances += instances
        self._count()

    def remove(self, instances: Sequence[Instance]) -> None:
        """Forgets instances that execute nothing any more."""
        for instance in instances:
            self.leave(instance)
            self._instances.remove(instance)
        self._count()

    def wait(self, instance: Instance, callers: tuple[Holder, ...] = ()) -> None:
        """Takes note that an instance has work; `callers` wait for it, and may hold resources."""
        instance.callers = tuple(one for one in callers if self._share(one).held)
        if not instance.order:
            instance.order = next(self._numbers)
            self._waiting.append(instance)

    def leave(self, instance: Instance) -> None:
        """Takes note that an instance has no work any more."""
        if instance.order:
            instance.order, instance.callers = 0, ()
            self._waiting.remove(instance)

    def decide(self) -> list[Instance]:
        """Grants what can be granted; returns the instances that may execute now."""
        granted: list[Instance] = []
        free = self._free()
        for instance, own, lenders in self._in_order(free):
            if own is not None and all(free[resource] >= count for resource, count in own.items()):
                self._grant(instance, own, lenders)
                granted.append(instance)
        return granted

    def missing(self) -> list[tuple[dict[str, int], bool]]:
        """Returns the global units that waiting instances need and this worker's pool lacks, and if one is a callee.

        A worker that has all units that there are waits for its own executions, and not for other workers.
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

    def ended(self, instance: Instance, *, has_executed: bool = True) -> None:
        """Takes back what was granted to an instance; what its callees still use follows when they end."""
        grant = instance.grant
        assert grant is not None, "nothing was granted"
        instance.grant = None
        instance.executions += has_executed
        grant.has_ended = True
        del self._grants[grant.token]
        for resource, count in grant.held.items():
            self._give_up(grant, resource, count - grant.lent.get(resource, 0))

    def idle(self, name: str) -> int:
        """Returns how many units of a global resource this worker has that no execution holds; negative = too few."""
        return self.pool.get(name, 0) - self._used.get(Resource(name, GLOBAL), 0)

    def conflict(self, model: str, needs: Iterable[Needs], callers: Sequence[Holder]) -> str:
        """Returns why a call can't be executed by another worker, or in a way in which it can't use what callers hold.

        Args:
            model: The model that is called. Where it is not in this worker, units of devices are no matter.
            needs: What each of its instances needs.
            callers: Its callers.

        Returns:
            The reason; empty = it can.
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

    def holds(self, callers: Sequence[Holder]) -> bool:
        """Tells whether any of these callers holds resources."""
        return any(self._share(caller).held for caller in callers)

    def refusal(self, model: str, needs: Iterable[Needs], callers: Sequence[Holder]) -> str:
        """Returns why an execution can't be had by a caller, which holds too little for it and would wait for itself.

        Args:
            model: The model that is called.
            needs: What each of its instances needs.
            callers: What its callers hold.

        Returns:
            The reason; empty = none.
        """
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

    def _count(self) -> None:
        self.maxima = maxima_of([instance.needs for instance in self._instances], self._given)

    def _free(self) -> dict[Resource, int]:
        """Returns the units of each resource that may be granted."""
        units = {r: self.pool.get(r.name, 0) if r.device == GLOBAL else count for r, count in self.maxima.items()}
        return {resource: count - self._used.get(resource, 0) for resource, count in units.items()}

    def _in_order(self, free: dict[Resource, int]) -> Iterator[tuple[Instance, Own, dict[Resource, Grant]]]:
        """Yields the waiting instances in their order, each with its own needs and the callers that it borrows from.

        What one needs is kept from those behind it, whether it is granted or not. Only callees keep nothing from one
        another until it is granted: the one in front may wait for the caller of the one behind.
        """
        waiting = sorted(self._waiting, key=lambda one: (one.score, one.order))
        callees = [instance for instance in waiting if instance.callers]
        for instance in callees:
            own, lenders = self._plan(instance)
            yield instance, own, lenders
            if instance.grant is not None:
                _keep(free, own)
        for instance in callees:
            if instance.grant is None:
                _keep(free, self._plan(instance)[0])
        for instance in waiting:
            if not instance.callers and instance.grant is None:
                yield instance, instance.needs, {}
                _keep(free, instance.needs)

    def _plan(self, instance: Instance) -> tuple[Own, dict[Resource, Grant]]:
        """Returns what a callee has to take itself, and from which caller it borrows what."""
        shares = [self._share(caller) for caller in instance.callers]
        own: dict[Resource, int] = {}
        lenders: dict[Resource, Grant] = {}
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

    def _share(self, caller: Holder) -> Grant:
        """Returns what a caller holds; a caller of another worker, or one that has ended, by what it said."""
        grant = self._grants.get(caller.token)
        if grant is not None:
            return grant
        is_mine = caller.token.startswith(f"{self._name}/")
        units = {} if is_mine else {Resource(name, GLOBAL): count for name, count in caller.units.items()}
        grant = Grant(caller.token, caller.model, units)
        grant.is_elsewhere = True
        return grant

    def _grant(self, instance: Instance, own: Mapping[Resource, int], lenders: Mapping[Resource, Grant]) -> None:
        grant = Grant(f"{self._name}/{next(self._numbers)}", instance.model, instance.needs)
        grant.borrowed = dict(lenders)
        for resource, count in own.items():
            self._used[resource] = self._used.get(resource, 0) + count
        for resource, lender in lenders.items():
            lender.lent[resource] = lender.lent.get(resource, 0) + instance.needs[resource]
            if lender.is_elsewhere:
                self._grants[lender.token] = lender
        self._grants[grant.token] = grant
        self.leave(instance)
        instance.grant = grant

    def _give_up(self, grant: Grant, resource: Resource, count: int) -> None:
        """Returns units of a grant that has ended, to its caller or to all."""
        lender = grant.borrowed.get(resource)
        if lender is None:
            self._used[resource] -= count
            return
        lender.lent[resource] -= count
        if lender.has_ended:
            self._give_up(lender, resource, count)
        elif lender.is_elsewhere and not any(lender.lent.values()):
            self._grants.pop(lender.token, None)


def _keep(free: dict[Resource, int], own: Own) -> None:
    """Keeps units from those behind."""
    for resource, count in (own or {}).items():
        free[resource] = max(free[resource] - count, 0)
