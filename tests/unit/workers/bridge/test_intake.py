"""How messages are received and accepted: in order, again where there was no room, and over the next connection."""

import asyncio
import queue
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager

import pytest

from qinfer.bridge.reports import RouteTally
from qinfer.errors import (
    BrokerUnavailable,
    InvalidRequest,
    ModelNotFound,
    PayloadTooLarge,
    QinferError,
    QueueFull,
    SettingsError,
)
from qinfer.queue.entries import Acceptance, AcceptOutcome, EntryAddress, Lane
from qinfer.testing import eventually
from qinfer_workers.bridge.intake import FEWEST_AT_ONCE, MOST_AT_ONCE, Consumer, Refused
from qinfer_workers.bridge.messages import Receipt, SourceMessage
from qinfer_workers.bridge.reading import Work

END_S = 5.0


class FakeSource:
    """A source that gives what is put into it, and breaks when it is told to."""

    def __init__(self, epoch: int) -> None:
        self.epoch = epoch
        self.acknowledged: list[Receipt] = []
        self.is_closed = False
        self._inbox: queue.Queue[list[bytes] | None] = queue.Queue()
        self._tag = 0

    def put(self, *bodies: bytes) -> None:
        self._inbox.put(list(bodies))

    def break_off(self) -> None:
        self._inbox.put(None)

    def receive(self, timeout_s: float) -> list[SourceMessage]:
        try:
            bodies = self._inbox.get(timeout=min(timeout_s, 0.05))
        except queue.Empty:
            return []
        if bodies is None:
            raise ConnectionResetError("broken")
        messages = []
        for body in bodies:
            self._tag += 1
            messages.append(SourceMessage(receipt=Receipt(self.epoch, self._tag), body=body))
        return messages

    def acknowledge(self, receipts: Sequence[Receipt]) -> None:
        self.acknowledged += receipts

    def wake(self) -> None: ...

    def close(self) -> None:
        self.is_closed = True


class Desk:
    """A consumer between fakes: the reader, the queue, and what becomes of messages."""

    def __init__(self) -> None:
        self.sources: list[FakeSource] = []
        self.failures = 0
        self.room = 1000
        self.problems: dict[bytes, QinferError] = {}
        self.is_away = False
        self.is_known = True
        self.accepted: list[str] = []
        self.batches: list[int] = []
        self.refused: list[Refused] = []
        self.repeated = asyncio.Event()
        self.tally = RouteTally("route")
        self.consumer = Consumer(
            name="route",
            connect=self._connect,
            reader=self,  # type: ignore[arg-type]  # it has what a consumer asks of one
            accept=self.accept,
            refuse=self.refused.extend,
            again=self.repeated.set,
            tally=self.tally,
        )

    @property
    def source(self) -> FakeSource:
        return self.sources[-1]

    def done(self) -> list[int | str]:
        """Returns the tags that the last connection acknowledged."""
        return [receipt.tag for receipt in self.source.acknowledged]

    def set_model(self) -> None:
        if not self.is_known:
            raise ModelNotFound("no such model")

    def read(self, message: SourceMessage) -> Work:
        if message.body == b"bad":
            raise InvalidRequest("bad")
        if message.body == b"bug":
            raise ZeroDivisionError
        name, _, body_hash = message.body.decode().partition("/")
        address = EntryAddress("m", 0, name)
        acceptance = Acceptance(address=address, lane=Lane("m", 1), frame=b"", timeout_s=1.0, body_hash=body_hash)
        return Work(message, acceptance, message.body != b"anonymous")

    async def accept(self, acceptances: Sequence[Acceptance]) -> Sequence[AcceptOutcome | QinferError]:
        await asyncio.sleep(0)
        self.batches.append(len(acceptances))
        return [self._accept(acceptance) for acceptance in acceptances]

    def _accept(self, acceptance: Acceptance) -> AcceptOutcome | QinferError:
        request_id = acceptance.address.id
        if problem := self.problems.get(request_id.encode()):
            return problem
        if self.is_away:
            return BrokerUnavailable("away")
        if request_id in self.accepted:
            return AcceptOutcome(request_id, is_new=False, body_hash="")
        if len(self.accepted) >= self.room:
            return QueueFull("full")
        self.accepted.append(request_id)
        return AcceptOutcome(request_id, is_new=True, body_hash="")

    def _connect(self, epoch: int) -> FakeSource:
        if self.failures:
            self.failures -= 1
            raise OSError("refused")
        self.sources.append(FakeSource(epoch))
        return self.sources[-1]

    async def connected(self, count: int = 1) -> FakeSource:
        await eventually(lambda: len(self.sources) == count and self.tally.connected["source"])
        return self.source


@asynccontextmanager
async def desk() -> AsyncIterator[Desk]:
    one = Desk()
    running = asyncio.create_task(one.consumer.run())
    await one.connected()
    yield one
    one.consumer.stop()
    one.consumer.finish()
    await asyncio.wait_for(running, END_S)


def bodies(count: int) -> list[bytes]:
    return [b"r%d" % number for number in range(1, count + 1)]


@pytest.mark.parametrize(
    "problem", [QueueFull("full"), BrokerUnavailable("away"), SettingsError("the password is wrong")]
)
async def test_what_is_not_the_messages_fault_is_tried_again(problem: QinferError) -> None:
    async with desk() as one:
        one.problems[b"r1"] = problem
        one.source.put(b"r1")
        await eventually(lambda: bool(one.batches))
        assert (one.refused, one.source.acknowledged) == ([], [])
        one.problems.clear()
        await eventually(lambda: one.done() == [1])

    assert one.tally.counts["paused_ms"] > 0


@pytest.mark.parametrize("problem", [InvalidRequest("notes"), PayloadTooLarge("large")])
async def test_a_message_that_the_queue_refuses_is_refused(problem: QinferError) -> None:
    async with desk() as one:
        one.problems[b"r1"] = problem
        one.source.put(b"r1")
        await eventually(lambda: [error for _, error in one.refused] == [problem])

    assert one.source.acknowledged == []


async def test_an_id_with_another_body_is_refused_and_a_repetition_is_told() -> None:
    async with desk() as one:
        one.source.put(b"r1", b"r1", b"r1/other")
        await eventually(lambda: one.done() == [1, 2])

    assert ["used before" in error.message for _, error in one.refused] == [True]
    assert (one.tally.counts["accepted"], one.tally.counts["repeated"]) == (1, 1)
    assert one.repeated.is_set()


async def test_what_is_read_is_accepted_and_what_is_done_is_acknowledged() -> None:
    """What can't be read is told, and in hand until its dead letter is confirmed; a bug costs one message."""
    async with desk() as one:
        source = one.source
        source.put(b"good", b"bad", b"bug", b"anonymous")
        await eventually(lambda: one.done() == [1, 4])
        assert [(message.body, error.message) for message, error in one.refused] == [
            (b"bad", "bad"),
            (b"bug", "internal error; the bridge's log has more"),
        ]
        assert (one.tally.counts["received"], one.tally.counts["unidentified"], one.tally.unacknowledged) == (4, 1, 2)
        one.consumer.done([Receipt(1, 3), Receipt(0, 2)])
        await eventually(lambda: one.done() == [1, 4, 3])
        assert one.tally.unacknowledged == 1

    assert source.is_closed


async def test_messages_are_accepted_in_order_and_in_batches() -> None:
    async with desk() as one:
        one.source.put(*bodies(600))
        await eventually(lambda: len(one.done()) == 600)

    assert one.done() == list(range(1, 601))
    assert one.batches == [MOST_AT_ONCE, MOST_AT_ONCE, 600 - 2 * MOST_AT_ONCE]
    assert (one.tally.counts["accepted"], one.tally.counts["repeated"]) == (600, 0)


async def test_a_full_lane_is_tried_again_with_less_when_there_may_be_room() -> None:
    """What found no room stays in order, and nothing is acknowledged before."""
    async with desk() as one:
        one.room = 10
        one.source.put(*bodies(300))
        await eventually(lambda: len(one.done()) == 10)
        one.room = 300
        one.consumer.notify_room()
        await eventually(lambda: len(one.done()) == 300)

    assert one.done() == list(range(1, 301))
    assert FEWEST_AT_ONCE in one.batches[1:]
    assert max(one.batches[1:]) > FEWEST_AT_ONCE
    assert one.refused == []


async def test_a_full_lane_that_has_room_now_and_then_is_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    async with desk() as one:
        for number in range(5):
            one.room = number
            one.batches.clear()
            one.source.put(b"r%d" % number)
            await eventually(lambda: bool(one.batches))
            one.room += 1
            one.consumer.notify_room()
            await eventually(lambda: len(one.done()) == one.room)

    assert [record.message for record in caplog.records] == ["the model's lane is full, messages wait in the source"]


async def test_messages_are_received_while_the_lane_is_full() -> None:
    """The source stops at its prefetch."""
    async with desk() as one:
        one.room = 0
        one.source.put(b"r1")
        await eventually(lambda: bool(one.batches))
        one.source.put(b"r2", b"r3")
        await eventually(lambda: one.tally.unacknowledged == 3)

    assert one.done() == []  # a lane that stays full does not keep the program


async def test_a_connection_that_breaks_is_made_again() -> None:
    """With a new epoch: receipts of the old one are dropped, for what they were of comes again."""
    async with desk() as one:
        first = one.source
        one.room = 0
        first.put(b"r1")
        await eventually(lambda: bool(one.batches))
        one.failures = 1
        first.break_off()
        second = await one.connected(2)
        assert first.is_closed
        assert (second.epoch, one.tally.unacknowledged) == (2, 0)
        one.room = 1
        second.put(b"r1")
        await eventually(lambda: one.done() == [1])
        one.consumer.done([Receipt(1, 1), Receipt(2, 7)])
        await eventually(lambda: one.done() == [1, 7])

    assert first.acknowledged == []


async def test_messages_wait_for_their_model() -> None:
    async with desk() as one:
        one.is_known = False
        one.source.put(b"r1")
        await eventually(lambda: one.tally.counts["received"] == 1)
        assert one.accepted == []
        one.is_known = True
        await eventually(lambda: one.done() == [1])


async def test_what_is_done_after_the_stop_is_acknowledged() -> None:
    """What was refused last is not to come again."""
    async with desk() as one:
        source = one.source
        source.put(b"bad")
        await eventually(lambda: bool(one.refused))
        one.consumer.stop()
        one.consumer.done([Receipt(1, 1)])

    assert source.acknowledged == [Receipt(1, 1)]
