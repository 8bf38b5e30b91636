"""The requests that wait for their answers: a table of sinks by request id, with deadlines.

Adding and removing are O(1). Deadlines fall into buckets of 10 ms, and one timer is set for the earliest bucket:
100,000 waiting requests cost one timer. A deadline fires at most one bucket late, and never early.
"""

from collections.abc import Callable
from typing import Protocol

from qinfer.clock import Clock
from qinfer.delivery.base import Entry
from qinfer.messages import Response
from qinfer_api.auth import Quota
from qinfer_api.backlog import Load

_BUCKETS_PER_S = 100


class Sink(Protocol):
    """Where the responses of one request go: a future, an HTTP connection, a gRPC stream."""

    def deliver(self, response: Response) -> None:
        """Takes a response; called on the event loop, for the last time with `response.final`."""
        ...


class Pending:
    """A request that was submitted and not yet answered in full.

    Attributes:
        request_id: qinfer's id of it.
        client_id: The id its client gave; may be empty.
        model: The model it is for.
        version: The version it is for.
        sink: Who gets its responses.
        started_s: When it was submitted, on the monotonic clock.
        entry: Its place in the queue, once the broker confirmed it.
        abandoned: Nobody waits for it any more: its entry is to be finished as soon as it is known.
        attempt: The execution whose responses are followed; 0 before the first response.
        bucket: The table's own: the bucket of its deadline.
        load: The lane it was sent to, which counts it until it leaves the table.
        quota: Its tenant's, which counts it too.
        deadline_s: While the table has its queue timeout for a deadline: the deadline that comes after it.
        is_late: It has waited for longer than its queue timeout.
        is_fetched: Its outputs, which are beside the reply stream, are being fetched.
    """

    __slots__ = (
        "abandoned",
        "attempt",
        "bucket",
        "client_id",
        "deadline_s",
        "entry",
        "is_fetched",
        "is_late",
        "load",
        "model",
        "quota",
        "request_id",
        "sink",
        "started_s",
        "version",
    )

    def __init__(self, request_id: str, client_id: str, model: str, version: int, sink: Sink, started_s: float) -> None:
        self.request_id = request_id
        self.client_id = client_id
        self.model = model
        self.version = version
        self.sink = sink
        self.started_s = started_s
        self.entry: Entry | None = None
        self.abandoned = False
        self.attempt = 0
        self.bucket = 0
        self.load: Load | None = None
        self.quota: Quota | None = None
        self.deadline_s = 0.0
        self.is_late = False
        self.is_fetched = False


class Timer(Protocol):
    """What `call_later` returns."""

    def cancel(self) -> None:
        """Unsets the timer."""
        ...


class SinkTable:
    """Pending requests by id.

    Args:
        clock: The monotonic clock of the deadlines.
        call_later: Sets a timer: (delay in seconds, callback); an event loop's `call_later`.
        expired: Called with each request whose deadline passed, after it left the table.
    """

    def __init__(
        self,
        clock: Clock,
        call_later: Callable[[float, Callable[[], None]], Timer],
        expired: Callable[[Pending], None],
    ) -> None:
        self._clock = clock
        self._call_later = call_later
        self._expired = expired
        self._pending: dict[str, Pending] = {}
        self._buckets: dict[int, dict[str, Pending]] = {}
        self._timer: Timer | None = None
        self._timer_bucket = 0

    def __len__(self) -> int:
        return len(self._pending)

    def __contains__(self, pending: Pending) -> bool:
        return pending.request_id in self._pending

    def add(self, pending: Pending, deadline_s: float) -> None:
        """Adds a request that is to be answered before `deadline_s` on the monotonic clock; it is counted from now."""
        if pending.load is not None:
            pending.load.own += 1
        if pending.quota is not None:
            pending.quota.in_flight += 1
        number = pending.bucket = int(deadline_s * _BUCKETS_PER_S) + 1
        self._pending[pending.request_id] = pending
        bucket = self._buckets.get(number)
        if bucket is None:
            bucket = self._buckets[number] = {}
            if self._timer is None or number < self._timer_bucket:
                self._set_timer(number)
        bucket[pending.request_id] = pending

    def remove(self, pending: Pending) -> bool:
        """Removes a request; tells whether it was still there."""
        if self._pending.pop(pending.request_id, None) is None:
            return False
        self._forget(pending)
        return True

    def take(self, response: Response) -> Pending | None:
        """Returns the request that a response belongs to, and removes it if the response is its last.

        `None` for an id that is unknown (answered, expired, cancelled) and for another attempt than the one followed.
        One whose outputs are yet to be fetched stays.
        """
        pending = self._pending.get(response.request_id)
        if pending is None:
            return None
        if not pending.attempt:
            pending.attempt = response.attempt
        elif pending.attempt != response.attempt:
            return None
        if response.final and not response.stored:
            del self._pending[response.request_id]
            self._forget(pending)
        return pending

    def clear(self) -> list[Pending]:
        """Removes and returns all requests, and unsets the timer."""
        everyone = list(self._pending.values())
        self._pending.clear()
        self._buckets.clear()
        for pending in everyone:
            _uncount(pending)
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        return everyone

    def _forget(self, pending: Pending) -> None:
        bucket = self._buckets[pending.bucket]
        del bucket[pending.request_id]
        if not bucket:
            del self._buckets[pending.bucket]
        _uncount(pending)

    def _set_timer(self, number: int) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._timer_bucket = number
        self._timer = self._call_later(max(0.0, number / _BUCKETS_PER_S - self._clock.monotonic_s()), self._expire)

    def _expire(self) -> None:
        self._timer = None
        due = int(self._clock.monotonic_s() * _BUCKETS_PER_S + 1e-6)  # rounding may not make a bucket miss its timer
        for number in sorted(n for n in self._buckets if n <= due):
            for pending in list(self._buckets.get(number, {}).values()):
                if self.remove(pending):
                    self._expired(pending)
        if self._buckets and self._timer is None:
            self._set_timer(min(self._buckets))


def _uncount(pending: Pending) -> None:
    if pending.load is not None:
        pending.load.own -= 1
        pending.load.left += 1
    if pending.quota is not None:
        pending.quota.in_flight -= 1
