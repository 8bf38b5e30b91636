"""How messages are accepted: in order, again where there was no room, and none of a connection that is gone."""

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager

import pytest

from qinfer.bridge.reports import RouteTally
from qinfer.errors import BrokerUnavailable, InvalidRequest, PayloadTooLarge, QinferError, QueueFull, SettingsError
from qinfer.queue.entries import Acceptance, AcceptOutcome, EntryAddress, Lane
from qinfer.testing import eventually
from qinfer_workers.bridge.messages import Receipt, Refused, SourceMessage
from qinfer_workers.bridge.reading import FEWEST_AT_ONCE, MOST_AT_ONCE, Disposition, MessageIntake, Work, disposition_of


def work(number: int, epoch: int = 1) -> Work:
    address = EntryAddress("m", 0, f"r{number}")
    acceptance = Acceptance(address=address, lane=Lane("m", 1), frame=b"", timeout_s=1.0, body_hash="hash")
    return Work(SourceMessage(receipt=Receipt(epoch, number), body=b""), acceptance, True)


@pytest.mark.parametrize(
    ("result", "disposition"),
    [
        (AcceptOutcome("r1", is_new=True, body_hash="hash"), Disposition.NEW),
        (AcceptOutcome("r1", is_new=False, body_hash="hash"), Disposition.KNOWN),
        (AcceptOutcome("r1", is_new=False, body_hash="other"), Disposition.REFUSE),
        (QueueFull("full"), Disposition.FULL),
        (BrokerUnavailable("away"), Disposition.AWAY),
        (SettingsError("the password is wrong"), Disposition.AWAY),
        (InvalidRequest("notes"), Disposition.REFUSE),
        (PayloadTooLarge("large"), Disposition.REFUSE),
    ],
)
def test_what_becomes_of_a_message(result: AcceptOutcome | QinferError, disposition: Disposition) -> None:
    """Only what is wrong with the message itself is held against it."""
    assert disposition_of(work(1), result)[0] is disposition


class Desk:
    """The queue, and what becomes of messages."""

    def __init__(self) -> None:
        self.room = 1000
        self.is_away = False
        self.accepted: list[str] = []
        self.batches: list[int] = []
        self.done: list[int | str] = []
        self.refused: list[Refused] = []
        self.epoch = 1
        self.repeated = asyncio.Event()
        self.tally = RouteTally("route")
        self.intake = MessageIntake(
            name="route",
            accept=self.accept,
            done=lambda receipts: self.done.extend(receipt.tag for receipt in receipts),
            refuse=self.refused.extend,
            again=self.repeated.set,
            epoch=lambda: self.epoch,
            tally=self.tally,
        )

    async def accept(self, acceptances: Sequence[Acceptance]) -> Sequence[AcceptOutcome | QinferError]:
        await asyncio.sleep(0)
        self.batches.append(len(acceptances))
        return [self._accept(acceptance) for acceptance in acceptances]

    def _accept(self, acceptance: Acceptance) -> AcceptOutcome | QinferError:
        request_id = acceptance.address.id
        if self.is_away:
            return BrokerUnavailable("away")
        if request_id in self.accepted:
            return AcceptOutcome(request_id, is_new=False, body_hash="hash")
        if len(self.accepted) >= self.room:
            return QueueFull("full")
        self.accepted.append(request_id)
        return AcceptOutcome(request_id, is_new=True, body_hash="hash")


@asynccontextmanager
async def desk() -> AsyncIterator[Desk]:
    one = Desk()
    running = asyncio.create_task(one.intake.run())
    yield one
    one.intake.stop()
    await running


async def becomes(condition: Callable[[], bool]) -> None:
    await eventually(condition)


async def test_messages_are_accepted_in_order_and_in_batches() -> None:
    """From any thread."""
    async with desk() as one:
        await asyncio.to_thread(one.intake.add, [work(number) for number in range(600)])
        await becomes(lambda: len(one.done) == 600)

    assert one.done == list(range(600))
    assert one.batches == [MOST_AT_ONCE, MOST_AT_ONCE, 600 - 2 * MOST_AT_ONCE]
    assert (one.tally.accepted, one.tally.repeated) == (600, 0)


async def test_a_full_lane_is_tried_again_with_less_when_there_may_be_room() -> None:
    """What found no room stays in order, and nothing is acknowledged before."""
    async with desk() as one:
        one.room = 10
        one.intake.add([work(number) for number in range(300)])
        await becomes(lambda: one.tally.paused_s > 0 or len(one.batches) > 1)
        assert one.done == list(range(10))
        one.room = 300
        one.intake.notify_room()
        await becomes(lambda: len(one.done) == 300)

    assert one.done == list(range(300))
    assert one.batches[1] == FEWEST_AT_ONCE
    assert max(one.batches[1:]) > FEWEST_AT_ONCE
    assert one.refused == []


async def test_a_full_lane_that_has_room_now_and_then_is_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    async with desk() as one:
        for number in range(5):
            one.room = number
            one.batches.clear()
            one.intake.add([work(number)])
            await becomes(lambda: bool(one.batches))
            one.room += 1
            one.intake.notify_room()
            await becomes(lambda: len(one.done) == one.room)

    assert [record.message for record in caplog.records] == ["the model's lane is full, messages wait in the source"]


async def test_a_queue_that_is_away_is_waited_for() -> None:
    async with desk() as one:
        one.is_away = True
        one.intake.add([work(1)])
        await becomes(lambda: len(one.batches) >= 2)
        assert (one.done, one.refused) == ([], [])
        one.is_away = False
        await becomes(lambda: one.done == [1])

    assert one.tally.paused_s > 0


async def test_messages_of_an_earlier_connection_are_left_to_the_source() -> None:
    """It sends them again."""
    async with desk() as one:
        one.epoch = 2
        one.intake.add([work(1, epoch=1), work(2, epoch=2)])
        await becomes(lambda: one.done == [2])

    assert one.accepted == ["r2"]


async def test_a_stop_leaves_the_rest() -> None:
    """A lane that stays full does not keep the program."""
    async with desk() as one:
        one.room = 0
        one.intake.add([work(1)])
        await becomes(lambda: bool(one.batches))

    assert one.done == []


async def test_repetitions_are_counted_and_told() -> None:
    async with desk() as one:
        one.intake.add([work(1), work(1)])
        await becomes(lambda: len(one.done) == 2)

    assert (one.tally.accepted, one.tally.repeated) == (1, 1)
    assert one.repeated.is_set()
