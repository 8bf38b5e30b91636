"""A gateway's view of the endpoints: the target of each request, and the model that stands for an endpoint elsewhere.

After two seconds without a look, every request goes to the stable targets: a rollback may have been missed.

Conditions choose a target first, then weights, by a sticky key or by chance. A key chooses by weighted rendezvous
hashing (ADR 0025; Thaler and Ravishankar 1998; Schindelhauer and Schomaker 2005): each target draws an exponential
time, whose rate is its weight, from a hash of the key and the target; the first wins.
"""

import math
import time
from collections.abc import Callable, Iterator, Mapping
from hashlib import blake2b
from random import random
from typing import NamedTuple

from qinfer.core.messages import OutgoingRequest, Scalar, SequenceFlags
from qinfer.errors import BrokerUnavailable, ModelNotFound
from qinfer.models.catalog import Catalog, ServedVersion
from qinfer.models.spec import ModelSpec
from qinfer.traffic.canary import Trial
from qinfer.traffic.endpoints import Condition, Endpoint, Role, Target, misfit, read_sticky, why_no_shadow, wrong_rules
from qinfer.traffic.store import DEAF_AFTER_S, DeclaredEndpoints

_MOST_NAMED = 10  # models in an error text
_SPAN = 2**64

Header = Callable[[str], str | None]
"""Returns a header by its name in lower case."""


def no_header(_: str) -> None:
    """Stands for missing headers."""


class ChoiceInput(NamedTuple):
    """The properties of a request that a choice uses."""

    tenant: str = ""
    header: Header = no_header
    parameters: Mapping[str, Scalar] = {}
    sequence: SequenceFlags | None = None


class TargetSplit:
    """The choice among an endpoint's targets; `chance` is for requests without a key."""

    def __init__(self, endpoint: Endpoint, chance: Callable[[], float] = random) -> None:
        self._name = endpoint.name
        self._stable = endpoint.stable
        online = endpoint.answering
        self._weights = tuple((target, endpoint.weight_of(target)) for target in online)
        self._has_shares = any(weight > 0 for target, weight in self._weights if target is not self._stable)
        self._conditions = tuple((condition, target) for target in online for condition in target.when)
        self._kind, self._of = read_sticky(endpoint.sticky)
        self._chance = chance

    def choose(self, asked: ChoiceInput) -> Target:
        """Returns the target of a request."""
        for condition, target in self._conditions:
            if meets(asked, condition):
                return target
        if not self._has_shares:
            return self._stable
        key = self._sticky_key(asked)
        return by_chance(self._weights, self._chance()) if key is None else by_key(self._weights, self._name, key)

    def is_steered(self, asked: ChoiceInput) -> bool:
        """Tells whether the caller chose its target by a condition."""
        return any(
            (condition.headers or condition.parameters) and meets(asked, condition) for condition, _ in self._conditions
        )

    def _sticky_key(self, asked: ChoiceInput) -> str | None:
        if asked.sequence is not None:
            return f"{asked.tenant}\0{asked.sequence.id!r}"
        match self._kind:
            case "tenant":
                return asked.tenant or None  # a server without keys has no tenants
            case "header":
                return asked.header(self._of)
            case "parameter" if self._of in asked.parameters:
                return str(asked.parameters[self._of])
        return None


def meets(asked: ChoiceInput, condition: Condition) -> bool:
    """Tells whether a request meets a condition."""
    if condition.tenant and condition.tenant != asked.tenant:
        return False
    for name, value in condition.headers.items():
        if asked.header(name.lower()) != value:
            return False
    return all(
        name in asked.parameters and asked.parameters[name] == value for name, value in condition.parameters.items()
    )


Weights = tuple[tuple[Target, float], ...]
"""Each target with its weight; the sum of the weights is 1."""


def by_chance(weights: Weights, chance: float) -> Target:
    """Returns the target at a place in 0 … 1."""
    for target, weight in weights:
        chance -= weight
        if chance < 0:
            return target
    return next(target for target, weight in reversed(weights) if weight > 0)  # rounding


def by_key(weights: Weights, name: str, key: str) -> Target:
    """Returns the target of a key, independently for each endpoint."""
    times = [
        (_exponential(f"{name}\0{target.label}\0{key}") / weight, target) for target, weight in weights if weight > 0
    ]
    return min(times, key=lambda each: each[0])[1]


def _exponential(text: str) -> float:
    """Returns the text's exponentially distributed number, of rate 1."""
    digest = blake2b(text.encode(errors="surrogatepass"), digest_size=8).digest()
    return -math.log((int.from_bytes(digest) + 0.5) / _SPAN)


class RoutedEndpoint(NamedTuple):
    """An endpoint with its choice prepared."""

    endpoint: Endpoint
    stable: Target
    split: TargetSplit
    shadows: tuple[tuple[Target, float], ...]


class Endpoints:
    """The endpoints, and the choice among their targets.

    Attributes:
        revision: The last change in the view; -1 = nothing was read yet.
        heard_s: The monotonic time of the last look; infinite = the store is not followed.
        unheard: Requests that went to a stable target because of missed looks.
    """

    def __init__(self, catalog: Catalog) -> None:
        self.catalog = catalog
        self.by_name: Mapping[str, RoutedEndpoint] = {}
        self.revision = -1
        self.heard_s = math.inf
        self.trials: Mapping[str, Trial] = {}
        self.unheard = 0
        self._fits: dict[tuple[str, str], tuple[ModelSpec, ModelSpec, bool]] = {}

    def show(self, declared: DeclaredEndpoints) -> None:
        """Replaces the view."""
        known = self.by_name
        self.by_name = {
            name: known[name] if name in known and known[name].endpoint == endpoint else _routed(endpoint)
            for name, endpoint in declared.endpoints.items()
        }
        self.revision = declared.revision

    @property
    def is_stale(self) -> bool:
        """Tells by the clock whether changes may have been missed.

        A process that was stopped for long reads requests first.
        """
        return time.monotonic() - self.heard_s >= DEAF_AFTER_S

    def stable(self, name: str, version: int) -> tuple[str, int]:
        """Returns the model and version that stand for an endpoint: its stable target; a model stays as it is."""
        routed = self.by_name.get(name)
        if routed is None:
            return name, version
        return self._version_of(routed, version) if version else routed.stable.place

    def choose(self, request: OutgoingRequest, tenant: str, header: Header = no_header) -> bool:
        """Replaces model and version of a request to an endpoint; returns whether it was one.

        Raises `ModelNotFound` if no target has the requested version, or `BrokerUnavailable` if the requested version
        is not the stable target's and the view is not current.
        """
        routed = self.by_name.get(request.model)
        if routed is None or request.endpoint:
            return False
        if request.version:
            model, version = self._version_of(routed, request.version)
            if self.is_stale and (model, version) != routed.stable.place:
                raise BrokerUnavailable(
                    f"this gateway has not read the endpoints for {DEAF_AFTER_S:g} s; until it can, '{request.model}' "
                    f"answers only by its stable target, {routed.stable.label}; try again"
                )
        elif self.is_stale:
            self.unheard += 1
            model, version = routed.stable.place
        else:
            asked = ChoiceInput(tenant, header, request.parameters, request.sequence)
            model, version = self._usable(routed, routed.split.choose(asked))
            request.assigned = not routed.split.is_steered(asked)
            request.moves = model == routed.stable.model and version != routed.stable.number
        request.endpoint, request.model, request.version = request.model, model, version
        request.generation = 0  # it may have been checked against another model
        return True

    def shadows(self, request: OutgoingRequest) -> list[Target]:
        """Draws the shadows of a request to stable."""
        routed = self.by_name.get(request.endpoint)
        if routed is None or not routed.shadows or self.is_stale:
            return []
        if (request.model, request.version) != routed.stable.place or request.sequence is not None:
            return []
        return [target for target, weight in routed.shadows if random() < weight]  # noqa: S311  a share, no secret

    def has(self, name: str, model: str, version: int) -> bool:
        """Tells whether an endpoint may use a model version now."""
        routed = self.by_name.get(name)
        return routed is not None and any(
            (target.model, self.resolved(target)) == (model, version) for target in routed.endpoint.answering
        )

    def resolved(self, target: Target) -> int:
        """Returns a target's present version; 0 = no version is READY."""
        return target.number or max(self.catalog.ready_versions(target.model), default=0)

    def ready_to_try(self, endpoint: Endpoint) -> tuple[int, ...]:
        """Returns the READY versions of the canary's model."""
        return () if endpoint.tried is None else self.catalog.ready_versions(endpoint.tried.model)

    def refusals(self, endpoint: Endpoint) -> Iterator[str]:
        """Yields the missing, unfit or hidden models of an endpoint."""
        if not endpoint.hides_model and self._is_model(endpoint.name):
            yield f"it would hide the model '{endpoint.name}'; rename it, or set hides_model to true"
        stable = self._spec(endpoint.stable)
        for target in endpoint.targets:
            spec = self._spec(target)
            if not self._is_model(target.model):
                yield f"target '{target.label}': {self._why_no_model(target.model)}"
            elif target.number and target.number not in self.catalog.versions(target.model):
                there = ", ".join(map(str, self.catalog.versions(target.model))) or "none"
                yield f"target '{target.label}': the model has no such version; its versions are {there}"
            elif stable is not None and spec is not None and (why := misfit(stable, spec)):
                yield f"target '{target.label}' does not fit '{endpoint.stable.label}': {why}"
            elif target.role is Role.SHADOW and spec is not None and (why := why_no_shadow(spec)):
                yield f"target '{target.label}': {why}"
        if stable is not None:
            yield from wrong_rules(endpoint, stable)
            has_shadows = endpoint.canary is not None and any(step.shadow for step in endpoint.canary.steps)
            tried = self._spec(endpoint.tried or endpoint.stable) or stable
            if has_shadows and (why := why_no_shadow(tried)):
                yield f"a step of the canary has a shadow: {why}"

    def problems(self, endpoint: Endpoint) -> Iterator[str]:
        """Yields why something can't be used as declared."""
        yield from self.refusals(endpoint)
        if endpoint.canary is not None and endpoint.tried is None and endpoint.name not in self.trials:
            yield "it plans canaries, and no target is one: add a target with the version latest"
        for target in endpoint.targets:
            if self._is_model(target.model) and self.catalog.find(target.model, self.resolved(target)) is None:
                yield f"target '{target.label}' is not ready" + (
                    "" if target.role is Role.STABLE else ": its requests go to the stable target"
                )

    def _why_no_model(self, name: str) -> str:
        if name in self.by_name:
            return "it is an endpoint, and targets are models"
        known = sorted(self.catalog.known())
        more = f" and {len(known) - _MOST_NAMED} more" if len(known) > _MOST_NAMED else ""
        return f"there is no such model; there are {', '.join(known[:_MOST_NAMED]) or 'none'}{more}"

    def _spec(self, target: Target) -> ModelSpec | None:
        return self.catalog.spec(target.model)

    def _is_model(self, name: str) -> bool:
        return name in self.catalog.known()

    def _version_of(self, routed: RoutedEndpoint, version: int) -> tuple[str, int]:
        online = routed.endpoint.answering
        for target in (routed.stable, *online):
            if self.resolved(target) == version:
                return target.model, version
        labels = ", ".join(target.label for target in online)
        raise ModelNotFound(
            f"Request for unknown model: '{routed.endpoint.name}' version {version} is not found: the targets of that "
            f"endpoint are {labels}"
        )

    def _usable(self, routed: RoutedEndpoint, target: Target) -> tuple[str, int]:
        """Replaces a target that is not READY, or does not fit, by stable."""
        stable, catalog = routed.stable, self.catalog
        if target is stable:
            return stable.place
        version = self.resolved(target)
        served = catalog.find(target.model, version)
        if served is None or (target.model == stable.model and not target.number and version < stable.number):
            return stable.place
        if target.model != stable.model and not self._is_fit(catalog.find(*stable.place), served):
            return stable.place
        return target.model, version

    def _is_fit(self, stable: ServedVersion | None, other: ServedVersion) -> bool:
        if stable is None:
            return True
        key = stable.spec.name, other.spec.name
        known = self._fits.get(key)
        if known is None or known[0] is not stable.spec or known[1] is not other.spec:
            known = self._fits[key] = stable.spec, other.spec, not misfit(stable.spec, other.spec)
        return known[2]


def _routed(endpoint: Endpoint) -> RoutedEndpoint:
    shadows = ((target, target.weight or 0.0) for target in endpoint.targets if target.role is Role.SHADOW)
    return RoutedEndpoint(
        endpoint, endpoint.stable, TargetSplit(endpoint), tuple(each for each in shadows if each[1] > 0)
    )
