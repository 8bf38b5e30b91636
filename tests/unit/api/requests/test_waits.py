"""Waiters of one request share its reads, and no other request's; a hint makes them read anew."""

import asyncio

import pytest

from qinfer.errors import BrokerUnavailable
from qinfer.queue.entries import EntryAddress, RequestRecord, RequestState
from qinfer_api.requests.service import Waits

ADDRESS = EntryAddress("m", 0, "chosen@acme")
TWIN = EntryAddress("other", 0, "chosen@acme")


class Records:
    """Records in memory; each read waits for `permit`."""

    def __init__(self) -> None:
        self.states = {ADDRESS: RequestState.QUEUED, TWIN: RequestState.QUEUED}
        self.reads: list[tuple[str, str]] = []
        self.permit = asyncio.Event()
        self.permit.set()
        self.error: Exception | None = None

    async def record(self, address: EntryAddress, reply_to: str) -> RequestRecord:
        self.reads.append((address.model, reply_to))
        state = self.states[address]
        await self.permit.wait()
        if self.error is not None:
            raise self.error
        return RequestRecord(address=address, state=state, version=1)


@pytest.fixture
def records() -> Records:
    return Records()


@pytest.fixture
def waits(records: Records) -> Waits:
    return Waits(records, "gateway")  # type: ignore[arg-type]


def waiters(waits: Waits, count: int, address: EntryAddress = ADDRESS) -> "list[asyncio.Task[RequestRecord | None]]":
    wait = waits.wait_for_end
    return [asyncio.create_task(wait(address, 20, lambda: None, f"tenant {number}")) for number in range(count)]


async def until_read(records: Records, count: int) -> None:
    async with asyncio.timeout(10):
        while len(records.reads) < count:  # noqa: ASYNC110 - a list has no event
            await asyncio.sleep(0)
        for _ in range(10):
            await asyncio.sleep(0)


async def test_a_hundred_waiters_read_once_and_once_more_after_a_hint(waits: Waits, records: Records) -> None:
    waiting = waiters(waits, 100)
    await until_read(records, 1)
    records.states[ADDRESS] = RequestState.SUCCEEDED
    waits.wake(ADDRESS.id)

    found = await asyncio.gather(*waiting)

    assert {record.state for record in found if record is not None} == {RequestState.SUCCEEDED}
    assert (len(found), records.reads) == (100, [("m", "gateway"), ("m", "")])


async def test_a_read_that_began_before_a_hint_serves_no_later_waiter(waits: Waits, records: Records) -> None:
    records.permit.clear()
    early = waiters(waits, 1)
    await until_read(records, 1)
    records.states[ADDRESS] = RequestState.SUCCEEDED
    waits.wake(ADDRESS.id)
    late = waiters(waits, 1)
    await until_read(records, 2)
    records.permit.set()

    found = await asyncio.gather(*early, *late)

    assert [record.state for record in found if record is not None] == [RequestState.SUCCEEDED] * 2


async def test_requests_of_two_models_with_one_id_are_read_apart(waits: Waits, records: Records) -> None:
    records.states[TWIN] = RequestState.SUCCEEDED
    waiting, twins = waiters(waits, 1), waiters(waits, 1, TWIN)

    (twin,) = await asyncio.gather(*twins)

    assert twin is not None
    assert (twin.address, twin.state) == (TWIN, RequestState.SUCCEEDED)
    records.states[ADDRESS] = RequestState.FAILED
    waits.wake(ADDRESS.id)
    (found,) = await asyncio.gather(*waiting)
    assert found is not None
    assert (found.address, found.state) == (ADDRESS, RequestState.FAILED)


async def test_an_error_ends_those_who_waited_for_the_read_and_no_others(waits: Waits, records: Records) -> None:
    records.error = BrokerUnavailable("Redis is away")
    failed = await asyncio.gather(*waiters(waits, 2), return_exceptions=True)
    records.error, records.states[ADDRESS] = None, RequestState.SUCCEEDED

    (found,) = await asyncio.gather(*waiters(waits, 1))

    assert [type(error) for error in failed] == [BrokerUnavailable] * 2
    assert found is not None
    assert found.state is RequestState.SUCCEEDED
    assert records.reads == [("m", "gateway")] * 2


async def test_a_waiter_that_leaves_takes_no_read_from_others(waits: Waits, records: Records) -> None:
    records.permit.clear()
    waiting = waiters(waits, 2)
    await until_read(records, 1)
    waiting[0].cancel()
    records.states[ADDRESS] = RequestState.SUCCEEDED
    records.permit.set()
    waits.wake(ADDRESS.id)

    found = await asyncio.gather(*waiting, return_exceptions=True)

    assert isinstance(found[0], asyncio.CancelledError)
    assert isinstance(found[1], RequestRecord)
