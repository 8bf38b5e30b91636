"""What becomes of answers and entries when the broker refuses, or when time has passed unnoticed."""

import asyncio
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from qinfer.batching.execution import WorkItem
from qinfer.core.clock import SystemClock
from qinfer.core.messages import Failure, InferRequest, Response
from qinfer.core.settings import RedisSettings
from qinfer.errors import BrokerUnavailable, InferenceFailed
from qinfer.observe.stats import StatsTally
from qinfer.queue.connection import CommandRefused, Reply
from qinfer.queue.entries import Entry, Lane, Lease, Settlement
from qinfer.queue.lanes import Queue
from qinfer.queue.router import Router
from qinfer.tensors import Bytes, from_numpy
from qinfer.testing import eventually
from qinfer.wire.frame import decode_responses
from qinfer_workers.inference import publisher
from qinfer_workers.inference.publisher import HeldWork, LeaseKeeper, Publisher, place_of
from tests.support.inline_workers import NoRenewals


class Offline(Queue):
    """A queue that is not connected: what a test does not replace fails."""

    def __init__(self) -> None:
        settings = RedisSettings()
        super().__init__(settings, Router(settings), SystemClock())


class Refusing(Offline):
    """A queue that takes nothing back."""

    async def release(self, leases: Sequence[Lease], *, rest_s: float = 0.0) -> None:
        raise CommandRefused("WRONGTYPE", "WRONGTYPE Operation against a key holding the wrong kind of value")


class Releasing(Offline):
    """A queue that notes what is released."""

    def __init__(self) -> None:
        super().__init__()
        self.released: list[Lease] = []

    async def release(self, leases: Sequence[Lease], *, rest_s: float = 0.0) -> None:
        self.released += leases


class Burying(Offline):
    """A queue that takes its time to bury the first entry, and refuses the second."""

    def __init__(self) -> None:
        super().__init__()
        self.go = asyncio.Event()
        self.burying = 0

    async def bury(self, lease: Lease, request_id: str, code: str, reason: str, frame: bytes = b"") -> bool:
        self.burying += 1
        await self.go.wait()
        if request_id == "r2":
            raise CommandRefused("WRONGTYPE", "WRONGTYPE Operation against a key holding the wrong kind of value")
        return True

    async def publish(self, reply_to: str, blob: Bytes) -> bool:
        return True


class Letters(Offline):
    """A queue that notes the frames of dead letters."""

    def __init__(self) -> None:
        super().__init__()
        self.frames: list[bytes] = []

    async def bury(self, lease: Lease, request_id: str, code: str, reason: str, frame: bytes = b"") -> bool:
        self.frames.append(frame)
        return True

    async def publish(self, reply_to: str, blob: Bytes) -> bool:
        return True


class Storing(Offline):
    """A queue that takes its time to end requests."""

    def __init__(self) -> None:
        super().__init__()
        self.go = asyncio.Event()
        self.settling = 0
        self.requests.settle = self._settle  # type: ignore[method-assign]  # it is the test's own

    async def _settle(self, settlements: Sequence[Settlement], operation: bytes = b"") -> list[bool]:
        self.settling += 1
        await self.go.wait()
        return [True] * len(settlements)


class Noting(Offline):
    """A queue that notes what leaves.

    Attributes:
        writes: How often answers were published or stored.
        seen: The ids of requests whose answers were published or stored.
        finished: The ids of entries, those that were finished together in one list.
    """

    def __init__(self) -> None:
        super().__init__()
        self.writes = 0
        self.seen: list[str] = []
        self.finished: list[list[str]] = []
        self.requests.settle = self._settle  # type: ignore[method-assign]  # it is the test's own

    async def publish(self, reply_to: str, blob: Bytes) -> bool:
        self.writes += 1
        self.seen += [response.request_id for response in decode_responses(blob)]
        return True

    async def finish(self, entries: Sequence[Entry]) -> None:
        self.finished.append([entry.entry_id for entry in entries])

    async def _settle(self, settlements: Sequence[Settlement], operation: bytes = b"") -> list[bool]:
        self.writes += 1
        self.seen += [settlement.address.id for settlement in settlements]
        return [True] * len(settlements)


class Wired(Noting):
    """A queue whose writes are answered by the test.

    Attributes:
        replies: The callbacks of the writes that `publish_now` made, in order.
    """

    def __init__(self) -> None:
        super().__init__()
        self.replies: list[Reply] = []

    def publish_now(self, reply_to: str, blob: Bytes, reply: Reply) -> None:
        self.writes += 1
        self.seen += [response.request_id for response in decode_responses(blob)]
        self.replies.append(reply)


def pending(number: int = 0, reply_to: str = "reply:g") -> WorkItem:
    request = InferRequest(model="stub", inputs=(), id=f"r{number}", reply_to=reply_to)
    lease = Lease(Entry(Lane("stub", 1), f"1000-{number}"), "w", b"")
    return WorkItem(rows=1, key=None, enqueued_s=1.0, deadline_s=61.0, lease=lease, request=request)


def keeper_of(delivery: Queue, lease_s: float = 10.0) -> LeaseKeeper:
    return LeaseKeeper(NoRenewals(), delivery.clock, lease_s, list, lambda _: None)


async def test_what_can_not_be_read_is_held_until_it_is_released() -> None:
    """However long the pause is, beside the lease; nobody else takes what comes back in a moment."""
    delivery = Releasing()
    keeper = keeper_of(delivery)
    first, second = pending(1), pending(2)

    async with asyncio.TaskGroup() as tasks:
        publisher = Publisher(delivery, keeper, tasks)
        publisher.release_later(first, 60.0)
        publisher.release_later(second, 0.0)
        await eventually(lambda: delivery.released == [second.lease])
        await eventually(lambda: keeper.held() == [first])
        await publisher.finish_accepted()

    assert delivery.released == [second.lease, first.lease]
    assert keeper.held() == []


async def test_a_lease_is_held_while_its_entry_is_buried() -> None:
    """Its tensors may take longer than a lease to be copied; after that it is renewed no longer, buried or refused."""
    delivery = Burying()
    keeper = keeper_of(delivery)
    items = [pending(1), pending(2)]
    error = InferenceFailed("it was given up")

    async with asyncio.TaskGroup() as tasks:
        publisher = Publisher(delivery, keeper, tasks)
        for item in items:
            response = Response(request_id=item.request.id, failure=Failure.from_error(error))
            publisher.bury(item.lease, error, StatsTally(), (item, response))
        await eventually(lambda: delivery.burying == 2)
        assert keeper.held() == items
        delivery.go.set()
        await publisher.finish_accepted()

    assert keeper.held() == []


async def test_the_tensors_of_a_letter_are_stored_again_after_an_outage() -> None:
    delivery, error, item = Letters(), InferenceFailed("it was given up"), pending(1)
    tries = 0

    async def letter() -> tuple[Lease, bytes]:
        nonlocal tries
        tries += 1
        if tries == 1:
            raise BrokerUnavailable("the connection is down")
        return item.lease, b"frame"

    async with asyncio.TaskGroup() as tasks:
        publisher = Publisher(delivery, keeper_of(delivery), tasks)
        response = Response(request_id="r1", failure=Failure.from_error(error))
        publisher.bury(item.lease, error, StatsTally(), (item, response), letter)
        await publisher.finish_accepted()

    assert (tries, delivery.frames) == (2, [b"frame"])


@pytest.mark.parametrize(("nbytes", "is_held"), [(64, False), (2**20 + 1, True)])
async def test_a_lease_is_held_while_its_result_is_stored_elsewhere(nbytes: int, *, is_held: bool) -> None:
    """A store that is slow or away takes longer than a lease; what is one write to Redis is dropped before it."""
    delivery = Storing()
    keeper = keeper_of(delivery)
    keeper.renewed(time.monotonic(), ())
    item = pending(1, reply_to="")
    keeper.hold([item])

    async with asyncio.TaskGroup() as tasks:
        publisher = Publisher(delivery, keeper, tasks)
        publisher.publish_responses(
            [item], [Response(request_id="r1", outputs=(from_numpy("y", np.zeros((nbytes,), "u1")),))]
        )
        await eventually(lambda: delivery.settling == 1)
        assert keeper.held() == [item] * is_held
        delivery.go.set()
        await publisher.finish_accepted()

    assert keeper.held() == []


@pytest.mark.parametrize("reply_to", ["reply:g", ""])
async def test_nothing_is_answered_while_leases_may_have_ended(reply_to: str) -> None:
    """After a stop longer than a lease, the owner is asked first; what is lost is another's to answer."""
    delivery = Noting()
    lease_s = 1e-9  # time has passed since the last renewal, however soon it is
    items = [pending(1, reply_to), pending(2, reply_to)]
    keeper: LeaseKeeper

    class OnDemand:
        async def run(self, keeper: LeaseKeeper) -> None:
            raise NotImplementedError

        def ask(self) -> None:
            asked.set()

    asked = asyncio.Event()
    keeper = LeaseKeeper(OnDemand(), delivery.clock, lease_s, list, lambda item: setattr(item, "lost", True))
    keeper.hold(items)
    async with asyncio.TaskGroup() as tasks:
        publisher = Publisher(delivery, keeper, tasks)
        publisher.publish_responses(items, [Response(request_id=item.request.id) for item in items])
        await asked.wait()
        assert delivery.seen == []
        keeper.renewed(float("inf"), {place_of(items[0])})
        await eventually(lambda: bool(delivery.seen))
        await publisher.finish_accepted()

    assert delivery.seen == ["r2"]


@pytest.mark.parametrize("reply_to", ["reply:g", ""])
async def test_a_batch_that_is_lost_before_it_is_answered_is_not_counted(reply_to: str) -> None:
    delivery = Noting()
    items = [pending(1, reply_to), pending(2, reply_to)]
    asked = asyncio.Event()
    renewals: Any = SimpleNamespace(ask=asked.set)
    keeper = LeaseKeeper(renewals, delivery.clock, 1e-9, list, lambda item: setattr(item, "lost", True))
    keeper.hold(items)
    async with asyncio.TaskGroup() as tasks:
        outlet = Publisher(delivery, keeper, tasks)
        outlet.publish_responses(items, responses(items))
        await asked.wait()
        keeper.renewed(float("inf"), {place_of(item) for item in items})
        await outlet.finish_accepted()

    assert (delivery.writes, delivery.seen, outlet.durations.drain()) == (0, [], {})


async def test_a_renewal_loses_only_leases_that_were_held_when_it_began(monkeypatch: pytest.MonkeyPatch) -> None:
    """An entry that was fetched again meanwhile stays."""
    keeper = keeper_of(Offline())
    before, after = pending(1), pending(2)
    monkeypatch.setattr("time.monotonic", lambda: 100.0)
    keeper.hold([before])
    monkeypatch.setattr("time.monotonic", lambda: 100.5)
    keeper.hold([after])

    keeper.renewed(100.0, {place_of(before), place_of(after)})

    assert (keeper.held(), keeper.losses) == ([after], 1)


async def test_a_refused_release_is_left_to_the_end_of_its_lease(caplog: pytest.LogCaptureFixture) -> None:
    """It is logged, its lease is renewed no longer, and nothing else ends."""
    delivery = Refusing()
    keeper = keeper_of(delivery)
    item = pending()
    keeper.hold([item])

    async with asyncio.TaskGroup() as tasks:
        publisher = Publisher(delivery, keeper, tasks)
        publisher.give_back([item])
        await publisher.finish_accepted()

    assert not keeper.holds(item.lease.entry)
    assert "refused by Redis" in caplog.text


def responses(items: Sequence[WorkItem]) -> list[Response]:
    return [Response(request_id=item.request.id) for item in items]


@asynccontextmanager
async def publishing(delivery: Queue) -> AsyncIterator[Publisher]:
    """A publisher with leases that last; what it has begun has ended when the block has."""
    async with asyncio.TaskGroup() as tasks:
        outlet = Publisher(delivery, keeper_of(delivery, lease_s=60.0), tasks)
        yield outlet
        await outlet.finish_accepted()


async def test_a_few_published_items_are_finished_together(monkeypatch: pytest.MonkeyPatch) -> None:
    """A script call for each batch of one would cost Redis as much as the answers do."""
    monkeypatch.setattr(publisher, "FINISH_DELAY_S", 600.0)
    delivery = Noting()
    async with publishing(delivery) as outlet:
        outlet.publish_responses([pending(1)], responses([pending(1)]))
        await eventually(lambda: len(delivery.seen) == 1)
        outlet.publish_responses([pending(2)], responses([pending(2)]))
        await eventually(lambda: len(delivery.seen) == 2)
        assert delivery.finished == []

    assert delivery.finished == [["1000-1", "1000-2"]]


async def test_many_published_items_are_finished_with_the_next_answers(monkeypatch: pytest.MonkeyPatch) -> None:
    """In the same write; nothing waits for the timer."""
    monkeypatch.setattr(publisher, "FINISH_DELAY_S", 600.0)
    delivery = Noting()
    many = [pending(number) for number in range(publisher.FINISH_COUNT)]
    async with publishing(delivery) as outlet:
        outlet.publish_responses(many, responses(many))
        await eventually(lambda: len(delivery.seen) == len(many))
        outlet.publish_responses([pending(100)], responses([pending(100)]))
        await eventually(lambda: len(delivery.seen) > len(many))
        assert delivery.finished == [[item.lease.entry.entry_id for item in many]]


async def test_what_nothing_comes_after_is_finished_all_the_same() -> None:
    """After a moment, whether or not the timer had been set for what came before it."""
    delivery = Noting()
    many = [pending(number) for number in range(publisher.FINISH_COUNT)]
    async with publishing(delivery) as outlet:
        outlet.publish_responses(many, responses(many))
        await eventually(lambda: len(delivery.seen) == len(many))
        outlet.publish_responses([pending(100)], responses([pending(100)]))
        await eventually(lambda: sum(map(len, delivery.finished)) == len(many) + 1)


class Opened(Publisher):
    """A publisher that tells which leases are renewed."""

    def held(self) -> list[HeldWork]:
        return self._keeper.held()


@asynccontextmanager
async def published_now(delivery: Wired, items: Sequence[WorkItem]) -> AsyncIterator[Opened]:
    """A publisher with leases that last, which has taken the answers of `items` in this turn."""
    async with asyncio.TaskGroup() as tasks:
        outlet = Opened(delivery, keeper_of(delivery, lease_s=60.0), tasks)
        outlet.hold(items)
        if items:
            outlet.publish_responses(items, responses(items))
        yield outlet
        await outlet.finish_accepted()


LOST = BrokerUnavailable("the connection to the queue broke before it answered; try again")


async def test_small_answers_leave_in_the_turn_that_executed_them() -> None:
    """Small answers are one write for all callers of a gateway, without a task."""
    delivery = Wired()
    items = [pending(1), pending(2)]
    async with published_now(delivery, items):
        assert (delivery.writes, delivery.seen) == (1, ["r1", "r2"])
        assert len(asyncio.all_tasks()) == 1
        delivery.replies[0](b"1-0")


async def test_an_entry_is_finished_after_the_reply_that_its_answer_is_in_redis() -> None:
    """Entries are finished in the order of replies, and counted once then."""
    delivery = Wired()
    async with published_now(delivery, [pending(1)]) as outlet:
        outlet.publish_responses([pending(2)], responses([pending(2)]))
        delivery.replies[1](b"2-0")
        await eventually(lambda: delivery.finished == [["1000-2"]])
        delivery.replies[0](b"1-0")
        await outlet.finish_accepted()
        assert delivery.finished == [["1000-2"], ["1000-1"]]
        assert len(outlet.durations.drain()) == 1


async def test_answers_are_published_again_if_the_connection_is_lost_before_its_reply() -> None:
    """Until an answer is in Redis, its entry stays in the queue and the lease is renewed."""
    delivery = Wired()
    item = pending(1)
    async with published_now(delivery, [item]) as outlet:
        delivery.replies[0](LOST)
        assert (delivery.finished, outlet.held()) == ([], [item])
        await outlet.finish_accepted()
        assert (delivery.seen, delivery.finished) == (["r1", "r1"], [["1000-1"]])


async def test_what_is_lost_before_the_connection_is_belongs_to_its_new_owner() -> None:
    """A lost item is neither published again nor finished."""
    delivery = Wired()
    item = pending(1)
    async with published_now(delivery, [item]) as outlet:
        item.lose()
        delivery.replies[0](LOST)
        await outlet.finish_accepted()
        assert (delivery.seen, any(delivery.finished)) == (["r1"], False)


async def test_a_drain_waits_for_the_replies_to_answers() -> None:
    """A process that ended before could not publish them again."""
    delivery = Wired()
    async with published_now(delivery, [pending(1)]) as outlet:
        draining = asyncio.ensure_future(outlet.finish_accepted())
        for _ in range(5):
            await asyncio.sleep(0)
        assert not draining.done()
        delivery.replies[0](LOST)
        await draining
        assert (delivery.seen, delivery.finished) == (["r1", "r1"], [["1000-1"]])


@pytest.mark.parametrize("reply", [LOST, b"1-0"])
async def test_a_closed_publisher_leaves_entries_to_the_end_of_their_leases(reply: object) -> None:
    delivery = Wired()
    async with published_now(delivery, [pending(1)]) as outlet:
        outlet.close()
        delivery.replies[0](reply)
        await outlet.flush()
        assert (delivery.seen, delivery.finished, delivery.writes) == (["r1"], [], 1)


async def test_an_answer_that_redis_refuses_is_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    """The lease of a refused answer is renewed no longer."""

    class WrongType(Wired):
        async def publish(self, reply_to: str, blob: Bytes) -> bool:
            raise CommandRefused("WRONGTYPE", "WRONGTYPE Operation against a key holding the wrong kind of value")

    delivery = WrongType()
    async with published_now(delivery, [pending(1)]) as outlet:
        delivery.replies[0](CommandRefused("WRONGTYPE", "WRONGTYPE Operation against a key"))
        await outlet.finish_accepted()
        assert (outlet.held(), delivery.finished) == ([], [])
        assert [record.message for record in caplog.records] == ["refused by Redis"]


async def test_answers_wait_for_a_connection_that_is_down_or_full() -> None:
    """A task tries again; nothing is published twice."""

    class Full(Wired):
        def publish_now(self, reply_to: str, blob: Bytes, reply: Reply) -> None:
            raise BrokerUnavailable("too much is waiting to be written to the queue; try again")

    delivery = Full()
    async with published_now(delivery, [pending(1)]) as outlet:
        assert delivery.seen == []
        await outlet.finish_accepted()
        assert (delivery.seen, delivery.finished) == (["r1"], [["1000-1"]])


async def test_an_answer_that_cannot_be_encoded_ends_the_worker_by_its_task() -> None:
    """The batcher that hands over the answer goes on until then."""
    unreadable = Response(request_id="r1", failure=Failure("internal", "\ud800"))
    tasks = list[int]()

    async def publish() -> None:
        async with published_now(Wired(), []) as outlet:
            outlet.publish_responses([pending(1)], [unreadable])
            tasks.append(len(asyncio.all_tasks()))

    with pytest.raises(ExceptionGroup) as raised:
        await publish()
    assert tasks == [2]
    assert raised.group_contains(UnicodeEncodeError)


@pytest.mark.parametrize(
    "answer",
    [
        Response(request_id="r1", index=1),
        Response(request_id="r1", final=False),
        Response(request_id="r1", outputs=(from_numpy("y", np.zeros((2**20 + 1,), "u1")),)),
    ],
    ids=["last of a stream", "of a stream", "large"],
)
async def test_other_answers_are_published_by_tasks(answer: Response) -> None:
    """The responses of a stream in order, large ones when they are stored."""
    delivery = Wired()
    async with published_now(delivery, []) as outlet:
        outlet.publish_responses([pending(1)], [answer])
        assert delivery.replies == []
        outlet.close()
