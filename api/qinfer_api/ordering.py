"""The order of answers of models with `preserve_ordering`: that of the requests' submission at this gateway.

An answer that comes before an earlier answer of the same model version is counted and encoded in its turn. A large one
is fetched only then, so that it does not hold memory that an earlier one needs.
"""

from collections import deque
from collections.abc import Callable
from typing import Any
from weakref import WeakValueDictionary

from qinfer.core.messages import OutgoingRequest, Response
from qinfer.errors import QueueFull
from qinfer.queue.entries import FULL
from qinfer.submission.pending import Counter, Inner, PendingCall, PendingRequests, ResponseSink
from qinfer.submission.submit import Entrance


class OrderedEntrance(Entrance):
    """Answers in order; at most `most` requests wait."""

    def __init__(self, inner: Entrance, order: "AnswerOrder", most: int) -> None:
        super().__init__(inner.served, inner)
        self._inner, self._order, self._most = inner, order, most

    def submit(
        self, request: OutgoingRequest, sink: ResponseSink, timeout_s: float, quota: Counter | None = None
    ) -> PendingCall:
        """See `Entrance.submit`."""
        order = self._order
        if len(order) >= self._most:
            raise QueueFull(FULL)
        place = OrderedSink(order, self.lane.table, sink)
        order.append(place)
        try:
            pending = place.pending = self._inner.submit(request, place, timeout_s, quota)
        except BaseException:
            place.give_up_place()
            raise
        order.advance()
        return pending


class Ordering:
    """Wraps entrances; each version has one order."""

    def __init__(self, max_in_flight: int) -> None:
        self._max_in_flight = max_in_flight
        self._orders: WeakValueDictionary[tuple[str, int], AnswerOrder] = WeakValueDictionary()

    def wrap(self, entrance: Entrance) -> Entrance:
        """Lets an entrance answer in order, if its model wants it."""
        if not entrance.spec.preserves_order:
            return entrance
        key = entrance.spec.name, entrance.served.version
        order = self._orders.get(key)
        if order is None:
            order = self._orders[key] = AnswerOrder()
        return OrderedEntrance(entrance, order, self._max_in_flight)


class AnswerOrder(deque["OrderedSink"]):
    """The unanswered requests of a version."""

    def advance(self) -> None:
        """Delivers the answers whose turn has come."""
        while self and self[0].is_ready:
            self.popleft().take_turn()
        if self and (first := self[0].pending) is not None:
            first.comes_first()


class OrderedSink(Inner):
    """A request's sink until its turn."""

    __slots__ = ("_came", "_has_left", "_inner", "_order", "_table", "pending")

    def __init__(self, order: AnswerOrder, table: PendingRequests, inner: ResponseSink) -> None:
        self._order, self._table, self._inner = order, table, inner
        self._came: list[tuple[Callable[[PendingCall, Any], None], Response | Exception]] = []
        self._has_left = False
        self.pending: PendingCall | None = None

    @property
    def is_ready(self) -> bool:
        """Whether later requests may answer."""
        return self._has_left or (self.pending is not None and bool(self._came))

    def is_behind(self) -> bool:
        """Returns whether earlier answers come first."""
        return self._order[0] is not self

    def deliver(self, response: Response) -> None:
        """Stores the response for its turn."""
        self._came.append((self._table.answer_caller, response))
        self._order.advance()

    def fail(self, error: Exception) -> None:
        """Stores the failure for its turn."""
        self._came.append((self._table.fail, error))
        self._order.advance()

    def give_up_place(self) -> None:
        """Gives up the place: the caller has left."""
        self._has_left = True
        self._came.clear()
        if self.pending is not None:
            self.pending.sink = self._inner
        self._order.advance()

    def take_turn(self) -> None:
        """Delivers the stored responses; later responses bypass this object."""
        pending, came = self.pending, self._came
        if pending is None or not came:
            return
        pending.sink = self._inner
        if pending not in self._table:
            pending.load = None  # counted when the answer came
        for tell, outcome in came:
            tell(pending, outcome)
