"""The order of the answers of models with `preserve_ordering`: that in which the gateway submitted their requests.

A request takes its place when it is submitted, by whichever connection it came, and keeps it until it is answered,
fails, or its caller leaves. An answer that comes before that of an earlier request of the same model version waits for
it; it is counted, and encoded, when its turn has come. A large one is fetched only then: it may not hold the memory
that an earlier one needs. Requests to other models pass no code of this module.
"""

from collections import deque
from collections.abc import Callable
from typing import Any
from weakref import WeakValueDictionary

from qinfer.core.messages import InferRequest, Response
from qinfer.errors import QueueFull
from qinfer.models.catalog import Served
from qinfer.queue.entries import FULL
from qinfer.submission.pending import Counter, Inner, Pending, PendingRequests, Sink
from qinfer.submission.submit import Submission


class Ordering:
    """Submits the requests of models whose answers keep the order of their requests; one for each gateway.

    Args:
        submission: The way into the queue.
        max_in_flight: Requests of one model version that may be without an answer, or have one that waits.
    """

    def __init__(self, submission: Submission, max_in_flight: int) -> None:
        self._submission = submission
        self._max_in_flight = max_in_flight
        self._orders: WeakValueDictionary[tuple[str, int], _Order] = WeakValueDictionary()

    def submit(
        self, served: Served, request: InferRequest, sink: Sink, timeout_s: float, quota: Counter | None = None
    ) -> Pending:
        """Submits a request, as `Submission.submit` does."""
        key = served.spec.name, served.version
        order = self._orders.get(key)
        if order is None:
            order = self._orders[key] = _Order()
        if len(order) >= self._max_in_flight:
            raise QueueFull(FULL)
        place = OrderedSink(order, self._submission.pending, sink)
        order.append(place)
        try:
            pending = place.pending = self._submission.submit(served, request, place, timeout_s, quota)
        except BaseException:
            place.leave()
            raise
        order.advance()  # a cached response is there already
        return pending


class _Order(deque["OrderedSink"]):
    """The requests of one model version whose turn has not come, in the order in which they were submitted."""

    def advance(self) -> None:
        """Gives the first request its turn, and those behind it, as far as their answers are there."""
        while self and self[0].is_ready:
            self.popleft().take_turn()
        if self and (first := self[0].pending) is not None:
            first.comes_first()


class OrderedSink(Inner):
    """Stands for the sink of a request until its turn has come.

    Args:
        order: Where it has its place.
        table: The pending requests.
        inner: The request's own sink.

    Attributes:
        pending: The request, once it is submitted.
    """

    __slots__ = ("_came", "_has_left", "_inner", "_order", "_table", "pending")

    def __init__(self, order: _Order, table: PendingRequests, inner: Sink) -> None:
        self._order, self._table, self._inner = order, table, inner
        self._came: list[tuple[Callable[[Pending, Any], None], Response | Exception]] = []
        self._has_left = False
        self.pending: Pending | None = None

    @property
    def is_ready(self) -> bool:
        """Whether those behind it need not wait for it any more."""
        return self._has_left or (self.pending is not None and bool(self._came))

    def is_behind(self) -> bool:
        """See the base."""
        return self._order[0] is not self

    def deliver(self, response: Response) -> None:
        """Takes the response, to be handed on when its turn has come."""
        self._came.append((self._table.answer, response))
        self._order.advance()

    def fail(self, error: Exception) -> None:
        """Takes the failure, to be handed on when its turn has come."""
        self._came.append((self._table.fail, error))
        self._order.advance()

    def leave(self) -> None:
        """Gives its place up, and drops an answer that waits: its caller has left."""
        self._has_left = True
        self._came.clear()
        if self.pending is not None:
            self.pending.sink = self._inner
        self._order.advance()

    def take_turn(self) -> None:
        """Hands on what came; what comes later, such as a second response, goes to the request's own sink."""
        pending, came = self.pending, self._came
        if pending is None or not came:
            return
        pending.sink = self._inner
        if pending not in self._table:
            pending.load = None  # which counted it when its answer came
        for tell, outcome in came:
            tell(pending, outcome)
