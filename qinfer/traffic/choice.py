"""The choice of a target: conditions first, then weights, by a sticky key or by chance. Pure.

A key chooses by weighted rendezvous hashing (ADR 0025; Thaler and Ravishankar 1998; Schindelhauer and Schomaker 2005):
each target draws an exponential time, whose rate is its weight, from a hash of the key and the target; the first wins.
"""

import math
from collections.abc import Callable, Mapping
from hashlib import blake2b
from random import random
from typing import NamedTuple

from qinfer.core.messages import Scalar, SequenceFlags
from qinfer.traffic.endpoints import Condition, Endpoint, Target, read_sticky

Header = Callable[[str], str | None]
"""Returns a header by its name in lower case."""

_SPAN = 2**64


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
