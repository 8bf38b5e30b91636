"""Readers of idle lanes sleep, and everything wakes them, on each server; see `qinfer.queue.doorbell`."""

import asyncio
import gc
import weakref
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import suppress
from typing import Any

import pytest

from qinfer.errors import BrokerUnavailable
from qinfer.queue import doorbell, readers
from qinfer.queue.entries import Lane, Lease
from qinfer.queue.lanes import Queue
from qinfer.queue.readers import FoundEntries, TicketReader
from qinfer.testing import eventually
from tests.contract.conftest import RedisQueue
from tests.contract.queue.test_delivery import HIGH, LOW, fetch, frames, ready, submit
from tests.contract.queue.test_shares import submit as submit_of
from tests.support.sequences import SEVEN, Worker, first, later
from tests.support.sequences import Gateway as Steps

FETCH_S = 0.05


@pytest.fixture(autouse=True)
def asleep_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    """Readers fall asleep at once, and look at nothing by themselves: only what wakes them does."""
    monkeypatch.setattr(readers, "AWAKE_S", 0.0)
    monkeypatch.setattr(doorbell, "SHORTEST_S", 600.0)


class Consumer:
    """Fetches as a worker does: again and again, each for a moment only."""

    def __init__(
        self, queue: RedisQueue, delivery: Queue, name: str = "a", lanes: tuple[Lane, ...] = (HIGH, LOW)
    ) -> None:
        self.got: list[Lease] = []
        self.fetches = 0
        self.count = 100
        self._queue, self._delivery, self._name, self._lanes = queue, delivery, name, lanes
        self._task: asyncio.Task[None] | None = None

    async def asleep(self) -> "Consumer":
        """Fetches from now on, and returns when a blocking read lasts longer than a fetch."""
        self.begin()

        def is_asleep() -> bool:
            return any(reader._sleep is not None and reader._looked == reader._rings for reader in self._readers())

        await eventually(is_asleep, description="a sleeping reader")
        begun = self.fetches
        await eventually(lambda: self.fetches > begun + 2, description="fetches of a sleeping reader")
        await eventually(is_asleep, description="a sleeping reader")
        return self

    def begin(self) -> None:
        """Fetches from now on."""
        if self._task is None:
            self._task = asyncio.create_task(self._run())

    async def gets(self, count: int = 1) -> list[Lease]:
        await eventually(lambda: len(self.got) >= count, description="entries of a sleeping reader")
        return self.got

    async def stop(self) -> None:
        """Fetches nothing more, without a word to the reader: between two fetches."""
        task, self._task = self._task, None
        if task is not None:
            self._is_over = True
            await task
            self._is_over = False

    async def cancel(self) -> None:
        """Cancels the fetch under way."""
        task, self._task = self._task, None
        if task is not None:
            task.cancel()
            await asyncio.wait([task])

    _is_over = False

    def _readers(self) -> list[readers.LaneReader]:
        return list(self._delivery._readers.values())

    async def _run(self) -> None:
        while not self._is_over:
            try:
                self.got += await self._delivery.fetch(self._lanes, self._name, self.count, FETCH_S)
            except BrokerUnavailable:
                await asyncio.sleep(0.01)
            self.fetches += 1


@pytest.fixture
async def consumer(queue: RedisQueue) -> AsyncIterator[Consumer]:
    one = Consumer(queue, await ready(queue))
    yield one
    await one.cancel()


async def calls_of(queue: RedisQueue, name: str) -> int:
    stats = [info.get(f"cmdstat_{name}", {"calls": 0}) for info in queue.on_every_node("INFO", "commandstats")]
    return sum(int(one["calls"]) for one in stats)


async def test_a_sleeper_asks_redis_nothing(queue: RedisQueue, consumer: Consumer) -> None:
    """However often it fetches: one blocking read lasts."""
    await consumer.asleep()
    before = [await calls_of(queue, name) for name in ("xreadgroup", "evalsha", "eval")]
    begun = consumer.fetches

    await eventually(lambda: consumer.fetches > begun + 20, description="fetches")

    assert [await calls_of(queue, name) for name in ("xreadgroup", "evalsha", "eval")] == before


@pytest.mark.parametrize("lane", [HIGH, LOW])
async def test_an_entry_wakes_a_sleeper(queue: RedisQueue, consumer: Consumer, lane: Lane) -> None:
    """The entry comes with the blocking read, without a ring."""
    await consumer.asleep()
    rings = await calls_of(queue, "xrevrange")

    await submit(await queue.connect(), lane, b"1")

    assert frames(await consumer.gets()) == [b"1"]
    assert await calls_of(queue, "xrevrange") == rings


async def test_levels_keep_their_order_after_a_sleep(queue: RedisQueue, consumer: Consumer) -> None:
    """Entries that came together are taken from the highest level on."""
    await consumer.asleep()
    gateway = await queue.connect()
    futures = []
    for lane, frame in ((LOW, b"low"), (HIGH, b"high"), (LOW, b"low"), (HIGH, b"high")):
        futures.append(asyncio.get_running_loop().create_future())
        gateway.submit(lane, frame, futures[-1].set_result)
    await asyncio.gather(*futures)

    got = await consumer.gets(4)

    assert sorted(frames(got)) == [b"high", b"high", b"low", b"low"]
    assert frames(got)[-1] == b"low"


async def test_an_entry_that_is_given_back_wakes_a_sleeper(queue: RedisQueue, consumer: Consumer) -> None:
    """The entry's delivery count is as before."""
    other = await queue.connect()
    await submit(other, HIGH, b"1")
    leases = await fetch(other, "b")
    await consumer.asleep()

    await other.release(leases)

    assert [(lease.frame, lease.deliveries) for lease in await consumer.gets()] == [(b"1", 1)]


async def test_an_entry_that_has_to_rest_wakes_a_sleeper_afterwards(queue: RedisQueue, consumer: Consumer) -> None:
    """The worker that gave it back rings when its rest is over."""
    other = await queue.connect()
    await submit(other, HIGH, b"1")
    leases = await fetch(other, "b")
    await consumer.asleep()

    await other.release(leases, rest_s=0.3)

    assert frames(await consumer.gets()) == [b"1"]


async def test_all_sleepers_learn_of_a_tenants_stream(queue: RedisQueue, consumer: Consumer) -> None:
    """The one that got the entry which tells of it goes away; the other gets what comes to that stream."""
    first = Consumer(queue, await queue.connect(), "b")
    await first.asleep()
    await consumer.asleep()
    gateway = await queue.connect()
    await submit_of(gateway, "heavy", b"1")
    await submit_of(gateway, "light", b"2")
    await eventually(lambda: len(first.got) + len(consumer.got) == 2, description="both entries")
    await first.asleep()
    await consumer.asleep()
    await first.cancel()
    before = len(consumer.got)

    await submit_of(gateway, "light", b"3")

    assert frames(await consumer.gets(before + 1))[-1] == b"3"


async def test_sleepers_learn_of_a_tenants_stream_while_suspects_wait(queue: RedisQueue, consumer: Consumer) -> None:
    """Suspects are for `reclaim` and wake no sleeper; the new stream is told of all the same."""
    other = await queue.connect()
    await submit(other, HIGH, b"1")
    await other.release(await _suspects(other))
    await consumer.asleep()
    gateway = await queue.connect()

    await submit_of(gateway, "heavy", b"2")
    await submit_of(gateway, "light", b"3", b"4")

    assert sorted(frames(await consumer.gets(3))) == [b"2", b"3", b"4"]


async def _suspects(delivery: Queue) -> list[Lease]:
    await fetch(delivery, "dead")
    return await delivery.reclaim([HIGH, LOW], "b", idle_s=0.0, count=100)


async def test_what_comes_between_two_fetches_is_kept(queue: RedisQueue) -> None:
    """The next fetch has it."""
    consumer = Consumer(queue, await ready(queue))
    await consumer.asleep()
    await consumer.stop()
    await submit(await queue.connect(), HIGH, b"1")

    consumer.begin()

    assert [(lease.frame, lease.deliveries) for lease in await consumer.gets()] == [(b"1", 1)]
    await consumer.cancel()


async def test_what_comes_when_nobody_fetches_any_more_goes_to_others(queue: RedisQueue) -> None:
    """A paused worker keeps nothing: it goes back as it was, and wakes another sleeper."""
    paused, other = Consumer(queue, await ready(queue)), Consumer(queue, await queue.connect(), "b")
    await paused.asleep()
    await paused.stop()
    await other.asleep()

    await submit(await queue.connect(), HIGH, b"1", b"2")

    assert {(lease.frame, lease.deliveries) for lease in await other.gets(2)} == {(b"1", 1), (b"2", 1)}
    await other.cancel()


async def test_a_cancelled_sleeper_takes_nothing(queue: RedisQueue) -> None:
    """The sleeper's read ends, and the entries that it had got go back."""
    consumer, other = Consumer(queue, await ready(queue)), await queue.connect()
    await consumer.asleep()
    await consumer.cancel()

    await submit(other, HIGH, b"1")

    assert frames(await fetch(other, "b", wait_s=5.0)) == [b"1"]
    assert frames(await fetch(consumer._delivery, "a", wait_s=0.1)) == []


async def test_a_fetch_of_other_lanes_ends_a_sleep(queue: RedisQueue, consumer: Consumer) -> None:
    """The fetch sees at once what waits in its lanes."""
    await consumer.asleep()
    await consumer.stop()

    assert await consumer._delivery.fetch([HIGH], "a", 1, 0.0) == []

    await submit(await queue.connect(), LOW, b"1")
    assert frames(await consumer._delivery.fetch([LOW], "a", 1, 0.0)) == [b"1"]


async def test_sleepers_survive_that_connections_are_killed(queue: RedisQueue, consumer: Consumer) -> None:
    """An entry that is given back while the bell is not heard is found when it is armed again."""
    other = await queue.connect()
    await submit(other, HIGH, b"1", b"2")
    leases = await fetch(other, "b")
    await consumer.asleep()
    await other.release(leases[:1])
    queue.on_every_node("CLIENT", "KILL", "TYPE", "normal", "SKIPME", "yes")

    async def is_released() -> bool:
        try:
            await other.release(leases[1:])
        except BrokerUnavailable:
            return False
        return True

    await eventually(is_released, description="a release")
    got = {lease.entry for lease in await consumer.gets()}
    assert got <= {lease.entry for lease in leases}
    await consumer.asleep()
    await submit(other, HIGH, b"3")
    await eventually(lambda: b"3" in frames(consumer.got), description="an entry after the kill")


async def test_a_flush_wakes_sleepers(queue: RedisQueue, consumer: Consumer) -> None:
    """Their lanes are made again."""
    await consumer.asleep()

    queue.on_every_node("FLUSHALL")
    await asyncio.sleep(0)
    gateway = await queue.connect()

    async def comes() -> bool:
        await submit(gateway, HIGH, b"1")
        return bool(consumer.got)

    await eventually(comes, description="an entry after the flush")


async def test_releases_at_any_time_are_found(queue: RedisQueue, consumer: Consumer) -> None:
    """Also while the sleeper looks, or its read is on the way."""
    other = await queue.connect()
    await submit(other, HIGH, *[b"%d" % number for number in range(100)])
    leases = await fetch(other, "b")
    consumer.count = 1
    await consumer.asleep()

    for number, lease in enumerate(leases):
        await other.release([lease])
        await eventually(lambda n=number: len(consumer.got) > n)  # type: ignore[misc]  # of a loop's variable
        if number % 3:
            await asyncio.sleep(number % 7 / 1000)

    assert len({lease.entry for lease in consumer.got}) == 100


async def test_a_connection_that_breaks_after_the_last_fetch_prints_nothing(
    queue: RedisQueue, consumer: Consumer
) -> None:
    """A program that stops fetches nothing more; asyncio prints what nobody has asked a task for."""
    told = list[dict[str, Any]]()
    asyncio.get_running_loop().set_exception_handler(lambda _, context: told.append(context))
    await consumer.asleep()
    await consumer.stop()
    [reader] = [one for one in consumer._readers() if one._sleep is not None]
    assert reader._sleep is not None
    task = weakref.ref(reader._sleep.task)

    reader._link._link.reset()
    reader._sleep = None
    del reader
    await eventually(lambda: gc.collect() >= 0 and task() is None, description="the end of the read")

    assert told == []


# --- tickets of sequences ---


class Tickets:
    """A worker that waits for sequences, and a gateway that submits their steps."""

    def __init__(self, delivery: Queue, submits: Queue) -> None:
        self.steps = Steps(submits.sequences("sum", 0))
        self.bell = delivery.doorbell
        self.sequences = delivery.sequences("sum", 0)
        self.reader: TicketReader = self.sequences.reader("w1", 1, delivery.doorbell)

    async def asleep(self, after: str = "", *, has_slots: bool = True) -> "asyncio.Task[FoundEntries]":
        """Returns a read that lasts."""
        while not self.bell.is_armed:
            await self.reader.sleep("", has_slots=False)
        read = asyncio.create_task(self.reader.sleep(after, has_slots=has_slots))
        await eventually(lambda: self.reader.is_asleep, description="a sleeping reader")
        return read


@pytest.fixture
async def tickets(queue: RedisQueue) -> AsyncIterator[Tickets]:
    one = Tickets(await queue.connect(), await queue.connect())
    yield one
    await one.reader.close()


async def test_a_sequence_that_waits_for_an_owner_wakes_a_worker(tickets: Tickets) -> None:
    read = await tickets.asleep()

    await tickets.steps.send(SEVEN, first(1))

    assert (await read).sequences


@pytest.mark.parametrize("has_slots", [True, False])
async def test_a_step_wakes_the_owner_of_its_sequence(tickets: Tickets, *, has_slots: bool) -> None:
    owner = await Worker(Steps(tickets.sequences), "w1").join()
    await tickets.steps.send(SEVEN, first(1))
    await owner.work()
    read = await tickets.asleep(owner.ticket, has_slots=has_slots)

    await tickets.steps.send(SEVEN, later(2))

    assert (await read).steps


async def test_sequences_that_a_worker_gives_back_wake_another(tickets: Tickets) -> None:
    owner = await Worker(tickets.steps, "w2").join()
    await tickets.steps.send(SEVEN, first(1))
    await owner.work()
    read = await tickets.asleep()

    await tickets.steps.sequences.hand_over("w2", [SEVEN])

    assert (await read).sequences


async def test_a_ring_has_a_sleeping_worker_look_for_sequences(tickets: Tickets) -> None:
    read = await tickets.asleep()

    tickets.bell.alarm()

    assert not any(await read)


@pytest.mark.parametrize("words", [("CLIENT", "KILL", "TYPE", "normal", "SKIPME", "yes"), ("FLUSHALL",)])
async def test_sequences_are_found_after_trouble(queue: RedisQueue, tickets: Tickets, words: tuple[str, ...]) -> None:
    """A read that broke is begun again, as the worker does."""
    read = await tickets.asleep()

    queue.on_every_node(*words)

    async def is_found() -> bool:
        nonlocal read
        await _quietly(lambda: tickets.steps.send(SEVEN, first(1)))
        if read.done() and read.exception() is not None:
            read = asyncio.create_task(tickets.reader.sleep("", has_slots=True))
        return read.done() and read.exception() is None and read.result().sequences

    await eventually(is_found, description="a sequence")


async def _quietly(work: Callable[[], Awaitable[Any]]) -> None:
    with suppress(BrokerUnavailable):
        await work()
