"""The rate limiter decides which model instances may execute next, given the resources of the worker.

It owns Triton's rules (docs/user_guide/rate_limiter.md of its server): an execution needs all resources of its instance
at once, and the waiting instance with the lowest *score* (executions x priority) goes first. Pure.

    wait ─▶ waiting ─▶ ready ─▶ begin ─▶ execution ─▶ end

Three rules go beyond Triton's, where the first waiting instance blocks all others (issue #8358 of its server):

- An instance that can't go yet reserves its units: it blocks only instances that need the same ones, and never starves.
- A *callee*, whose model is called by an execution that holds resources, goes before all others.
- A callee uses its caller's units of a resource that both need.

The batcher of a model whose executions need resources forms a batch when the rate limiter lets it begin:

    add_items ─▶ pending ─▶ want ─▶ (the rate limiter: its turn) ─▶ policy.decide ─▶ executor …

While it waits for resources, a batch grows. After a short wait its requests go back to the queue, for other workers,
and are fetched again when it is the model's turn.
"""

import itertools
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

from qinfer.batching.execution import WorkItem
from qinfer.core.messages import ResourceHolder
from qinfer.core.settings_sections import Maximum
from qinfer.models.spec import InstanceSpec

GLOBAL = -1
"""The device of resources that a worker has once."""


class Resource(NamedTuple):
    """A device's resource, numbered as in Triton (the CPU is 0), or `GLOBAL`."""

    name: str
    device: int


Needs = Mapping[Resource, int]
"""Resource → units, at least 1."""

Sources = Mapping[Resource, str]
"""Resource → the token of the caller whose units are used; empty = the worker's own."""


def needs_of(group: InstanceSpec) -> dict[Resource, int]:
    """Returns the resources of an execution."""
    units = {Resource(r.name, GLOBAL if r.is_global else group.device.number): r.units for r in group.resources}
    return {resource: count for resource, count in units.items() if count}


def maxima_of(needs: Iterable[Needs], given: Sequence[Maximum]) -> dict[Resource, int]:
    """Returns the units of each needed resource: as configured, or the largest need.

    With any maximum configured, others are 0, as in Triton.
    """
    most: dict[Resource, int] = {}
    for resource, count in itertools.chain.from_iterable(one.items() for one in needs):
        most[resource] = max(most.get(resource, 0), count)
    for resource in most if given else ():
        found = [one.units for one in given if one.name == resource.name and _is_of(one, resource)]
        most[resource] = max(found, default=0)
    return most


def check_maxima(needs: Sequence[Needs], given: Sequence[Maximum]) -> None:
    """Raises `ValueError`, with Triton's text, if an instance could never execute."""
    most, largest = maxima_of(needs, given), maxima_of(needs, ())
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


def _is_of(one: Maximum, resource: Resource) -> bool:
    return resource.device == GLOBAL or one.device is None or one.device == resource.device


@dataclass(eq=False, slots=True)
class LimitedInstance:
    """A model instance; priority 2 executes half as often as priority 1.

    Attributes:
        order: Its place in the line; 0 = it does not wait.
        callers: Tokens of the executions that wait for it and hold resources.
    """

    model: str
    needs: Needs
    priority: int
    turn: Callable[["LimitedInstance"], None] = lambda _: None
    executions: int = 0
    order: int = 0
    callers: tuple[str, ...] = ()
    token: str = ""
    sources: dict[Resource, str] = field(default_factory=dict)

    @property
    def weight(self) -> int:
        """The priority; Triton takes 0 for 1."""
        return max(self.priority, 1)

    @property
    def score(self) -> int:
        """The lowest goes first."""
        return self.executions * self.weight


class Ledger:
    """One worker's resources, executions and waiting instances; `changed` is called if others may be ready."""

    def __init__(self, given: Sequence[Maximum] = (), changed: Callable[[], None] = lambda: None) -> None:
        self.maxima: dict[Resource, int] = {}
        self._given = given
        self._tell = changed
        self._instances: list[LimitedInstance] = []
        self._waiting: list[LimitedInstance] = []
        self._executing: dict[str, LimitedInstance] = {}
        self._used: Counter[tuple[str, Resource]] = Counter()
        """Units by source."""
        self._ready: dict[LimitedInstance, Sources] | None = None
        """`None` = not decided since the last change."""
        self._numbers = itertools.count(1)

    def check(self, groups: Sequence[InstanceSpec]) -> None:
        """Raises `ValueError`, with Triton's text, if instances could never execute."""
        check_maxima([*(instance.needs for instance in list(self._instances)), *map(needs_of, groups)], self._given)

    def add(self, instances: Sequence[LimitedInstance]) -> None:
        """Adds instances at the lowest present score: they have nothing to catch up."""
        first = min((instance.score for instance in self._instances), default=0)
        for instance in instances:
            instance.executions = first // instance.weight
        self._instances += instances
        self._update_maxima()

    def remove(self, instances: Sequence[LimitedInstance]) -> None:
        """Removes instances that execute nothing."""
        for instance in instances:
            self.leave(instance)
            self._instances.remove(instance)
        self._update_maxima()

    def wait(self, instance: LimitedInstance, callers: Sequence[ResourceHolder] = ()) -> None:
        """Adds an instance with work, and its callers."""
        tokens = tuple(caller.token for caller in callers if self._held(caller.token))
        if instance.order and instance.callers == tokens:
            return
        instance.callers = tokens
        if not instance.order:
            instance.order = next(self._numbers)
            self._waiting.append(instance)
        self._changed()

    def leave(self, instance: LimitedInstance) -> None:
        """Removes an instance without work."""
        if instance.order:
            instance.order, instance.callers = 0, ()
            self._waiting.remove(instance)
            self._changed()

    def ready(self) -> Mapping[LimitedInstance, Sources]:
        """Returns the waiting instances that may begin now, all of them, in order."""
        if self._ready is None:
            self._ready = self._decide()
        return self._ready

    def begin(self, instance: LimitedInstance, token: str) -> None:
        """Takes the resources of a ready instance, for an execution with a unique token."""
        instance.token, instance.sources = token, dict(self.ready()[instance])
        self._used.update(_units(instance, instance.sources))
        self._executing[token] = instance
        self.leave(instance)

    def end(self, instance: LimitedInstance, *, has_executed: bool = True) -> None:
        """Returns its resources to their sources; those that callees still use follow when these end."""
        token, instance.token = instance.token, ""
        del self._executing[token]
        instance.executions += has_executed
        for resource, source in instance.sources.items():
            lent = self._used.pop((token, resource), 0)
            self._used[source, resource] -= instance.needs[resource] - lent
            for callee in self._executing.values() if lent else ():
                if callee.sources.get(resource) == token:
                    callee.sources[resource] = source
        self._changed()

    def holds(self, callers: Iterable[ResourceHolder]) -> bool:
        """Returns whether any of these callers holds resources of this worker."""
        return any(self._held(caller.token) for caller in callers)

    def conflict(self, model: str, callers: Sequence[ResourceHolder]) -> str:
        """Returns why a call that can't use its callers' units would wait for them, or ""."""
        for resource in itertools.chain.from_iterable(one.needs for one in self._instances if one.model == model):
            for caller in callers:
                if resource in self._held(caller.token):
                    return (
                        f"model '{model}' needs resource '{resource.name}', which its caller, model '{caller.model}', "
                        "holds: a model that is decoupled or has sequences can't use its caller's units; let one of "
                        "them need less"
                    )
        return ""

    def refusal(self, instances: Sequence[LimitedInstance], callers: Sequence[ResourceHolder]) -> str:
        """Returns why a call would wait for its caller, or ""."""
        for one, caller in itertools.product(instances, callers):
            for resource, count in one.needs.items():
                most = max(self._held(each.token).get(resource, 0) for each in callers)
                if resource in self._held(caller.token) and most < count:
                    return (
                        f"model '{one.model}' needs {count} of resource '{resource.name}', of which its caller, model "
                        f"'{caller.model}', holds {self._held(caller.token)[resource]}: it would wait for its caller; "
                        "let the caller hold as many, or none"
                    )
        return ""

    def _changed(self) -> None:
        self._ready = None
        self._tell()

    def _update_maxima(self) -> None:
        self.maxima = maxima_of([instance.needs for instance in self._instances], self._given)
        self._changed()

    def _decide(self) -> dict[LimitedInstance, Sources]:
        used, ready = self._used.copy(), dict[LimitedInstance, Sources]()
        line = sorted(self._waiting, key=lambda one: (not one.callers, one.score, one.order))
        for one in line:
            # Callees reserve nothing against one another, because the first may wait for the second's caller.
            if one.callers and (sources := self._sources(one, used)) is not None:
                ready[one] = sources
                used.update(_units(one, sources))
        for one in line:
            if one not in ready:
                if not one.callers and (sources := self._sources(one, used)) is not None:
                    ready[one] = sources
                used.update(_units(one, {resource: "" for resource in one.needs if not self._lenders(one, resource)}))
        return ready

    def _sources(self, instance: LimitedInstance, used: Counter[tuple[str, Resource]]) -> Sources | None:
        sources: dict[Resource, str] = {}
        for resource, count in instance.needs.items():
            for source in self._lenders(instance, resource) or [""]:
                held = self._held(source) if source else self.maxima
                if held[resource] - used[source, resource] >= count:
                    sources[resource] = source
                    break
            else:
                return None
        return sources

    def _lenders(self, instance: LimitedInstance, resource: Resource) -> list[str]:
        return [token for token in instance.callers if resource in self._held(token)]

    def _held(self, token: str) -> Needs:
        instance = self._executing.get(token)
        return {} if instance is None else instance.needs


def _units(instance: LimitedInstance, sources: Sources) -> dict[tuple[str, Resource], int]:
    return {(source, resource): instance.needs[resource] for resource, source in sources.items()}


LOOK_S = 0.05
"""How long resources stay reserved for a fetch."""


class LimitedInstances(Protocol):
    """Instances that may begin while they are ready; `turn` is called if one is, after a wait."""

    ledger: Ledger
    turn: Callable[[], None]

    @property
    def ready(self) -> int:
        """How many executions may begin now."""
        ...

    def want(self, count: int, callers: Sequence[ResourceHolder]) -> None:
        """Lets `count` idle instances wait for resources, and no more."""
        ...

    def refusal(self, callers: Sequence[ResourceHolder]) -> str:
        """Returns why these callers' request can't be executed."""
        ...


class ResourceTurns:
    """The place of a batcher in the rate limiter's line."""

    def __init__(self, instances: LimitedInstances, changed: Callable[[], None]) -> None:
        self.wanted = 0
        self.looks_until_s = 0.0
        """The end of a fetch's reservation, or 0."""
        self._is_looking = False
        self._instances = instances
        instances.turn = changed

    @property
    def ready(self) -> int:
        """How many executions may begin now."""
        return self._instances.ready

    @property
    def waits(self) -> bool:
        """Whether batches wait, and may not begin."""
        return self.wanted > 0 and not self._instances.ready

    def line_up(self, items: Sequence[WorkItem], count: int) -> None:
        """Lets `count` instances wait."""
        self.wanted = max(count, 0)
        callers = {holder.token: holder for item in items for holder in item.request.holders}
        self._instances.want(self.wanted, list(callers.values()) if self.wanted else ())

    def begin_fetch(self) -> None:
        """Notes whether resources are reserved; an earlier fetch may have missed requests."""
        self._is_looking = self.looks_until_s > 0

    def end_fetch(self, *, is_empty: bool) -> None:
        """Ends the reservation after a fetch within it."""
        if self._is_looking or not is_empty:
            self.looks_until_s = 0.0

    def refusal(self, item: WorkItem) -> str:
        """Returns why an item would wait for its callers, or ""."""
        return self._instances.refusal(item.request.holders) if item.request.holders else ""

    def holds(self, item: WorkItem) -> bool:
        """Returns whether its callers hold resources that others in the lane may wait for."""
        return self._instances.ledger.holds(item.request.holders)
