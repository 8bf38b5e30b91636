"""Routes of requests by priority level and queue policy."""

from typing import NamedTuple

from qinfer.models.spec import BatchingSpec, ModelSpec, QueuePolicy
from qinfer.queue.entries import DELAYED, Lane

MAX_LANES = 32
"""The most lanes of a version, because each costs a fetch three commands; more levels share lanes."""

NAMES = tuple(f"p{number}{suffix}" for number in range(1, MAX_LANES + 1) for suffix in ("", DELAYED))

_NO_POLICY = QueuePolicy()


class LaneRoute(NamedTuple):
    """The route of one level; entries of the lanes `ahead` are read first."""

    lane: Lane
    policy: QueuePolicy
    ahead: tuple[Lane, ...]

    @property
    def is_usual(self) -> bool:
        """Tells whether requests wait in one lane."""
        return not self.policy.timeout_s and len(self.ahead) == 1


class Routes:
    """The routes of one model version; if `are_plain`, all requests take the default route."""

    def __init__(self, spec: ModelSpec, version: int) -> None:
        lanes = lanes_of(spec, version)
        self._batching: BatchingSpec | None = spec.batching
        self._ahead = {lane.name: lanes[:number] for number, lane in enumerate(lanes, start=1)}
        self.are_plain = spec.batching is None or spec.batching.is_plain
        self.default = self._of_level(0 if spec.batching is None else spec.batching.default_priority)

    def for_priority(self, priority: int) -> LaneRoute:
        """Returns the route of a priority."""
        batching = self._batching
        if batching is None or not batching.priority_levels:
            return self.default
        return self._of_level(batching.level(priority))

    def _of_level(self, level: int) -> LaneRoute:
        batching = self._batching
        ahead = self._ahead[lane_name(0 if batching is None else batching.priority_levels, level)]
        return LaneRoute(ahead[-1], _NO_POLICY if batching is None else batching.policy(level), ahead)


def lane_name(levels: int, level: int) -> str:
    """Returns the lane of a level: `p1` … `p32`."""
    return f"p{_number(levels, level)}"


def lanes_of(spec: ModelSpec, version: int) -> tuple[Lane, ...]:
    """Returns a version's online lanes in reading order, without a loop over up to 2⁶⁴ levels."""
    batching = spec.batching or BatchingSpec(preferred_sizes=(1,))
    levels = batching.priority_levels
    names: list[str] = []
    for number in range(1, min(max(levels, 1), MAX_LANES) + 1):
        names.append(f"p{number}")
        if _delays(batching, number):
            names.append(f"p{number}{DELAYED}")
    return tuple(Lane(spec.name, version, name) for name in names)


def _number(levels: int, level: int) -> int:
    if levels <= MAX_LANES:
        return max(level, 1)
    return 1 + (level - 1) * MAX_LANES // levels


def _delays(batching: BatchingSpec, number: int) -> bool:
    levels = batching.priority_levels
    own = [policy for level, policy in batching.policies.items() if _number(levels, level) == number]
    if any(policy.delay for policy in own):
        return True
    size = 1 if levels <= MAX_LANES else _first(levels, number + 1) - _first(levels, number)
    return batching.default_policy.delay and len(own) < size


def _first(levels: int, number: int) -> int:
    return 1 - (1 - number) * levels // MAX_LANES
