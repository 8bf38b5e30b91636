"""How ends are taken from an outbox, told and confirmed: by a route's `Endings`, between fakes."""

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Any

import msgspec
import pytest

from qinfer.errors import QinferError, SettingsError
from qinfer.queue.deliveries import outbox as outbox_kind
from qinfer.queue.entries import Ending, EntryAddress, RequestRecord, RequestState
from qinfer.testing import eventually
from qinfer_workers.bridge.messages import PublishGroup, RenderedEnd
from qinfer_workers.bridge.route import Endings

MIB = 2**20


class Outbox:
    """An outbox, and what was published of it."""

    def __init__(self, sizes: Sequence[int]) -> None:
        self.waiting = [
            Ending(id=f"{n}-0", request_id=f"r{n}", record=None, notes=b"", blob=b"\0" * size)
            for n, size in enumerate(sizes)
        ]
        self.posted: list[str] = []
        self.confirmed: list[str] = []
        self.errors: list[QinferError] = []
        self.read_errors: list[QinferError] = []
        self.reads = 0
        self.streams: dict[str, list[bytes]] = {}
        self.stored: dict[str, list[bytes]] = {}
        self.requests = self.deliveries = self.responses = self
        self.one = Endings(
            delivery=self,  # type: ignore[arg-type]  # it has what is asked of one
            model="m",
            kind=outbox_kind("box", 10.0),
            render=self.rendered,
            post=lambda rendered: self.posted.extend(each.group.ending_id for each in rendered),
            took=lambda: None,
        )

    def rendered(self, ending: Ending, stored: Sequence[bytes]) -> RenderedEnd:
        self.stored[ending.request_id] = list(stored)
        return RenderedEnd("succeeded", PublishGroup(ending_id=ending.id), [], ending, None)

    def stream(self, number: int, count: int) -> None:
        """Makes an end that of a stream, with so many responses before it."""
        address = EntryAddress("m", 0, f"r{number}")
        record = RequestRecord(address=address, state=RequestState.SUCCEEDED, version=1, decoupled=True)
        self.waiting[number] = msgspec.structs.replace(self.waiting[number], record=record)
        self.streams[address.id] = [b"%d" % index for index in range(count)]

    async def read(self, address: EntryAddress, index: int) -> list[bytes]:
        if self.read_errors:
            raise self.read_errors.pop()
        return self.streams[address.id][index : index + 2]

    async def endings(self, *_: Any, **__: Any) -> list[Ending]:
        self.reads += 1
        if self.errors:
            raise self.errors.pop()
        taken, self.waiting = self.waiting[:2], self.waiting[2:]
        return taken

    async def done(self, *given: Any) -> None:
        if self.errors:
            raise self.errors.pop()
        self.confirmed += given[-1]


@asynccontextmanager
async def outbox(*sizes: int) -> AsyncIterator[Outbox]:
    box = Outbox(sizes)
    running = asyncio.create_task(box.one.run())
    yield box
    box.one.confirm([each for each in box.posted if each not in box.confirmed])
    box.one.stop()
    await running


async def test_large_results_wait_in_the_outbox_until_others_are_published(monkeypatch: pytest.MonkeyPatch) -> None:
    """A sink that is away must not fill the memory; small ones are taken by thousands."""
    monkeypatch.setattr("qinfer_workers.bridge.route.MOST_BYTES_IN_HAND", 3 * MIB)
    async with outbox(*[MIB] * 8) as box:
        await eventually(lambda: len(box.posted) == 4)
        box.one.wake()
        await asyncio.sleep(0.05)
        assert (len(box.posted), box.one.in_hand) == (4, 4)
        box.one.confirm(box.posted[:2])
        await eventually(lambda: len(box.posted) == 6)
        box.one.drop(box.posted[2])
        box.one.confirm(box.posted[3:])
        await eventually(lambda: len(box.posted) == 8)


async def test_the_responses_of_a_stream_come_with_its_end() -> None:
    """All pages of them, in their order; other ends have none."""
    async with outbox(1, 1, 1) as box:
        box.stream(1, 5)
        box.stream(2, 0)
        await eventually(lambda: len(box.posted) == 3)

    assert box.stored == {"r0": [], "r1": [b"0", b"1", b"2", b"3", b"4"], "r2": []}


async def test_a_stream_waits_until_there_is_room_for_its_responses(monkeypatch: pytest.MonkeyPatch) -> None:
    """They are not read before: the memory that streams take is bounded."""
    monkeypatch.setattr("qinfer_workers.bridge.route.MOST_BYTES_IN_HAND", MIB)
    async with outbox(MIB, 1) as box:
        box.stream(1, 3)
        await eventually(lambda: box.posted == ["0-0"])
        assert "r1" not in box.stored
        box.one.confirm(["0-0"])
        await eventually(lambda: box.posted == ["0-0", "1-0"])


async def test_a_stream_whose_responses_can_not_be_read_comes_again() -> None:
    async with outbox(1) as box:
        box.stream(0, 3)
        ending = box.waiting[0]
        box.read_errors = [SettingsError("the password is wrong")]
        await eventually(lambda: not box.read_errors)
        assert (box.posted, box.one.in_hand) == ([], 0)
        box.waiting = [ending]
        box.one.wake()
        await eventually(lambda: box.stored == {"r0": [b"0", b"1", b"2"]})


async def test_whatever_redis_says_it_is_asked_again() -> None:
    """A wrong password, or an error of a script, is told and does not end the bridge."""
    async with outbox(1) as box:
        box.errors = [SettingsError("the password is wrong")]
        box.one.wake()
        await eventually(lambda: not box.errors and len(box.posted) == 1)
        box.errors = [SettingsError("the password is wrong")]
        box.one.confirm(box.posted)
        await eventually(lambda: box.confirmed == ["0-0"])
