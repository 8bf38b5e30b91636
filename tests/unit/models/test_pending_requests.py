"""The table of pending requests: deadlines, removal, and following one attempt."""

import asyncio
from collections.abc import Sequence
from typing import cast

from qinfer.core.messages import Response
from qinfer.queue.entries import Entry, Lane
from qinfer.queue.lanes import Queue
from qinfer.submission.pending import PendingCall, PendingRequests
from qinfer.tensors import Tensor
from tests.support.timers import Clock


class Ignore:
    no_stream = ""

    def deliver(self, response: Response) -> None:
        raise AssertionError("the table hands requests back, it does not deliver")


def pending(request_id: str) -> PendingCall:
    return PendingCall(request_id, "", "m", 1, Ignore(), 0.0)


def table() -> tuple[PendingRequests, Clock, list[str]]:
    clock, expired = Clock(), list[str]()

    def answered(request: PendingCall, response: Response) -> None:
        raise AssertionError("nothing is received")

    def failed(request: PendingCall, error: Exception) -> None:
        expired.append(request.request_id)

    return PendingRequests(cast(Queue, None), clock, clock.call_later, answered, failed), clock, expired


def test_a_request_expires_after_its_deadline_and_not_before() -> None:
    """A deadline fires at most one bucket late and never early."""
    sinks, clock, expired = table()
    sinks.add(pending("a"), 1000.505)

    clock.move_to(1000.504)
    early = list(expired)
    clock.move_to(1000.5151)

    assert (early, expired, len(sinks)) == ([], ["a"], 0)


def test_a_timer_that_fires_a_little_early_is_set_again() -> None:
    """A loop may call back before the clock shows the time: the request must still expire."""
    sinks, clock, expired = table()
    sinks.add(pending("a"), 1000.505)
    clock.now_s = 1000.5

    (timer,) = clock.timers
    timer.callback()
    clock.move_to(1000.6)

    assert expired == ["a"]


def test_an_earlier_deadline_moves_the_timer() -> None:
    """The timer is always that of the earliest bucket, and only one is set."""
    sinks, clock, expired = table()
    sinks.add(pending("late"), 1060.0)
    sinks.add(pending("soon"), 1001.0)

    live = [t for t in clock.timers if not t.cancelled]
    clock.move_to(1001.02)

    assert len(live) == 1
    assert expired == ["soon"]
    clock.move_to(1060.02)
    assert expired == ["soon", "late"]


class Slow:
    """A queue that begins to cancel entries, and ends it when it is asked a second time."""

    def __init__(self) -> None:
        self.begun = asyncio.Event()
        self.cancelled: list[Entry] = []

    async def cancel(self, entries: Sequence[Entry]) -> None:
        if not self.begun.is_set():
            self.begun.set()
            await asyncio.Event().wait()
        self.cancelled += entries


async def test_what_a_task_did_not_cancel_is_left_to_the_next() -> None:
    """A worker that ends stops the task that cleans up, and then cleans up itself."""
    sinks, _, _ = table()
    queue = sinks._queue = cast(Queue, Slow())
    slow = cast(Slow, queue)
    item = pending("a")
    item.entry = Entry(Lane("m", 1), "1-0")
    sinks.add(item, 1000.5)
    sinks.cancel(item)

    first = asyncio.create_task(sinks.discard())
    await slow.begun.wait()
    first.cancel()
    await asyncio.wait([first])
    await sinks.discard()

    assert slow.cancelled == [item.entry]


def test_a_removed_request_does_not_expire() -> None:
    """Removing is cancelling."""
    sinks, clock, expired = table()
    item = pending("a")
    sinks.add(item, 1000.5)

    removed = sinks.remove(item)
    clock.move_to(1002.0)

    assert (removed, expired, len(sinks)) == (True, [], 0)
    assert not sinks.remove(item)


def test_thousands_of_requests_need_one_timer() -> None:
    """Many requests within a bucket share its timer, and many buckets set only the first."""
    sinks, clock, expired = table()
    for number in range(10_000):
        sinks.add(pending(str(number)), 1001.0 + number / 1000)

    assert len([t for t in clock.timers if not t.cancelled]) == 1
    clock.move_to(1012.0)
    assert len(expired) == 10_000


def test_the_final_response_takes_the_request_out() -> None:
    """Responses before the final one leave it there."""
    sinks, _, _ = table()
    item = pending("a")
    sinks.add(item, 1001.0)

    first = sinks.request_of(Response(request_id="a", index=0, final=False))
    last = sinks.request_of(Response(request_id="a", index=1, final=True))
    again = sinks.request_of(Response(request_id="a", index=1, final=True))

    assert (first, last, again) == (item, item, None)


def test_one_attempt_is_followed() -> None:
    """Responses of another execution of the same request are dropped."""
    sinks, _, _ = table()
    item = pending("a")
    sinks.add(item, 1001.0)

    sinks.request_of(Response(request_id="a", attempt=2, final=False))
    other = sinks.request_of(Response(request_id="a", attempt=1, final=True))

    assert other is None
    assert len(sinks) == 1


def test_clear_hands_everyone_back_and_unsets_the_timer() -> None:
    """What is cleared can neither expire nor be answered."""
    sinks, clock, expired = table()
    sinks.add(pending("a"), 1001.0)

    everyone = sinks.clear()
    clock.move_to(1002.0)

    assert [p.request_id for p in everyone] == ["a"]
    assert expired == []


def stream(sinks: PendingRequests, request_id: str) -> PendingCall:
    """Adds a stream whose responses may be 60 s apart, for 100 s in all."""
    item = PendingCall(request_id, "", "m", 1, Ignore(), 1000.0)
    sinks.open_stream(item, resumes=False, pause_s=60.0, timeout_s=100.0)
    sinks.add(item, 1060.0)
    return item


def word(index: int, *, final: bool = False) -> Response:
    y = Tensor("y", "UINT8", (4,), b"word")
    return Response(request_id="a", index=index, final=final, outputs=(y,), credit_to="reply:worker-1")


def test_a_stream_expires_when_no_response_comes() -> None:
    """The first one is waited for as long as any answer."""
    sinks, clock, expired = table()
    stream(sinks, "a")

    clock.move_to(1060.02)

    assert (expired, len(sinks)) == (["a"], 0)


def test_each_response_of_a_stream_moves_its_deadline() -> None:
    sinks, clock, expired = table()
    item = stream(sinks, "a")
    assert item.stream is not None
    clock.move_to(1030.0)
    sinks.request_of(word(0))
    item.stream.took(4)

    clock.move_to(1060.02)
    early = list(expired)
    clock.move_to(1090.02)

    assert (early, expired) == ([], ["a"])


def test_a_stream_waits_for_who_takes_its_responses() -> None:
    """Not beyond its own deadline, however slow its caller is."""
    sinks, clock, expired = table()
    stream(sinks, "a")
    clock.move_to(1010.0)
    sinks.request_of(word(0))

    clock.move_to(1071.0)
    early = list(expired)
    clock.move_to(1100.02)

    assert (early, expired) == ([], ["a"])


def test_the_final_response_ends_a_stream() -> None:
    """What comes again finds no request."""
    sinks, clock, expired = table()
    item = stream(sinks, "a")

    taken = [
        sinks.request_of(word(0)),
        sinks.request_of(word(0)),
        sinks.request_of(word(1, final=True)),
        sinks.request_of(word(1, final=True)),
    ]
    clock.move_to(1200.0)

    assert taken == [item, None, item, None]
    assert (expired, len(sinks)) == ([], 0)
