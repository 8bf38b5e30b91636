"""Where a request waits, how long it may, and what is ahead of it: by its priority level and its queue policy."""

from typing import NamedTuple

from qinfer.control.lanes import lane_name, lanes_of
from qinfer.delivery.base import Lane
from qinfer.repository.spec import BatchingSpec, ModelSpec, QueuePolicy

_NO_POLICY = QueuePolicy()


class Route(NamedTuple):
    """The way of the requests of one level.

    Attributes:
        lane: Where they go.
        policy: How they wait there.
        ahead: The lanes that are read before the end of theirs, theirs included: what a new request waits for.
    """

    lane: Lane
    policy: QueuePolicy
    ahead: tuple[Lane, ...]


class Routes:
    """The routes of one model version.

    Args:
        spec: The model's configuration.
        version: The version.
        partition: The queue partition.

    Attributes:
        are_plain: All requests go one way, without a queue policy: nobody needs to ask for it.
    """

    def __init__(self, spec: ModelSpec, version: int, partition: int = 0) -> None:
        lanes = lanes_of(spec, version, partition)
        self._batching = spec.batching
        self._ahead = {lane.name: lanes[:number] for number, lane in enumerate(lanes, start=1)}
        self.are_plain = spec.batching is None or spec.batching.may_prefetch
        self.default = self.of(0)

    def of(self, priority: int) -> Route:
        """Returns the route of a request that asks for this priority."""
        batching: BatchingSpec | None = self._batching
        level = 0 if batching is None else batching.level(priority)
        ahead = self._ahead[lane_name(0 if batching is None else batching.priority_levels, level)]
        return Route(ahead[-1], _NO_POLICY if batching is None else batching.policy(level), ahead)
