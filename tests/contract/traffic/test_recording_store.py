"""The contract of recordings, on each server: bounds of all gateways together, pages, and their end."""

import asyncio
import time

import pytest

from qinfer.errors import Conflict, InvalidRequest, RequestNotFound
from qinfer.traffic.recordings import COPIES, KEPT_S, RecordingStore
from qinfer.wire.bodies import RecordedRequest, RecordedTensor, Recording
from tests.contract.conftest import ControlPair


def copy_of(number: int, size: int = 8) -> bytes:
    tensor = RecordedTensor(name="x", datatype="UINT8", shape=(size,), data=bytes([number]) * size)
    return COPIES.encode(RecordedRequest(arrival_ms=float(number), inputs=(tensor,), parameters={"n": number}))


async def begun(
    store: RecordingStore, model: str = "m", requests: int = 5, nbytes: int = 10_000, seconds: float = 60.0
) -> Recording:
    return await store.open_recording(model, requests, nbytes, seconds, time.time())


async def numbers_of(store: RecordingStore, of: Recording) -> list[int]:
    """Returns the numbers of all copies, page by page until the end."""
    found, after = list[int](), ""
    while not (page := await store.page_of_copies(of.id, after, time.time())).ended:
        found += [int(one.arrival_ms) for one in page.requests]
        after = page.next
    return found


async def test_copies_of_several_gateways_are_one_recording(stores: ControlPair) -> None:
    one, other = RecordingStore(stores.one), RecordingStore(stores.other)
    made = await begun(one)

    assert await other.running() == [made]
    assert not await one.append_copies(made, [copy_of(0), copy_of(1)], 0)
    assert not await other.append_copies(made, [copy_of(2)], 3)
    assert await one.append_copies(made, [copy_of(3), copy_of(4), copy_of(5)], 0)

    page = await other.page_of_copies(made.id, "", time.time())
    assert [one.parameters["n"] for one in page.requests] == [0, 1, 2, 3, 4]
    assert page.requests[0].inputs[0].data == bytes(8)
    assert (page.recording, page.dropped, page.ended) == (made, 3, False)
    assert await numbers_of(one, made) == [0, 1, 2, 3, 4]


async def test_bytes_bound_a_recording(stores: ControlPair) -> None:
    store = RecordingStore(stores.one)
    made = await begun(store, nbytes=3 * len(copy_of(0)) + 1)

    is_full = [await store.append_copies(made, [copy_of(number)], 0) for number in range(4)]

    assert is_full == [False, False, False, True]
    assert await numbers_of(store, made) == [0, 1, 2]


async def test_an_ended_recording_takes_no_copies_and_its_model_may_be_recorded_again(stores: ControlPair) -> None:
    one, other = RecordingStore(stores.one), RecordingStore(stores.other)
    made = await begun(one)
    await one.append_copies(made, [copy_of(0)], 0)
    with pytest.raises(Conflict, match="'m' is being recorded"):
        await begun(other)
    beside = await begun(other, "another")

    await other.end_recording(made.id)

    assert await one.running() == [beside]
    assert await one.append_copies(made, [copy_of(1)], 0)
    assert await numbers_of(one, made) == [0]
    assert (await begun(other)).id != made.id


async def test_everything_of_a_recording_expires(stores: ControlPair) -> None:
    store = RecordingStore(stores.one)
    made = await begun(store, seconds=1.0)
    await store.append_copies(made, [copy_of(0)], 0)

    names = [key async for key in stores.one.client.scan_iter(match="*recorded*")]
    lives_ms = [await stores.one.client.pttl(name) for name in (*names, "qinfer:recordings")]

    assert len(names) == 2
    assert all(0 < life_ms <= (KEPT_S + 1) * 1000 for life_ms in lives_ms)


async def test_copies_that_come_later_are_waited_for(stores: ControlPair) -> None:
    one, other = RecordingStore(stores.one), RecordingStore(stores.other)
    made = await begun(one)

    reading = asyncio.ensure_future(one.page_of_copies(made.id, "", time.time()))
    await other.append_copies(made, [copy_of(7)], 0)

    assert [one.parameters["n"] for one in (await reading).requests] == [7]


@pytest.mark.parametrize(("requests", "nbytes", "seconds"), [(0, 1, 1.0), (1, 2**40, 1.0), (1, 1, -1.0)])
async def test_bounds_are_bounded(stores: ControlPair, requests: int, nbytes: int, seconds: float) -> None:
    with pytest.raises(InvalidRequest, match="is not possible"):
        await begun(RecordingStore(stores.one), "m", requests, nbytes, seconds)


async def test_an_unknown_recording_is_told(stores: ControlPair) -> None:
    store = RecordingStore(stores.one)

    with pytest.raises(RequestNotFound, match="there is no recording 'none'"):
        await store.page_of_copies("none", "", time.time())
    with pytest.raises(RequestNotFound):
        await store.end_recording("none")
