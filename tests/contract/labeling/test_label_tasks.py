"""The contract of labeling tasks (the numbered promises of `qinfer.labeling.tasks`) on each server."""

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import msgspec
import pytest

from qinfer.errors import QueueFull
from qinfer.labeling.tasks import MAX_DATA_BYTES, Board, LabelState, LabelTask, LabelTasks, PutOutcome
from qinfer.queue.durability import Durability
from qinfer.queue.lanes import Queue
from qinfer.queue.router import run_script
from qinfer.testing import eventually
from tests.contract.conftest import RedisQueue

BOARD = Board("digits", "acme", 7)
DAY_S = 86400.0
LIMIT = 2000
DONE, FAILED, OPEN, WAITING = LabelState.DONE, LabelState.FAILED, LabelState.OPEN, LabelState.WAITING
KNOWN, STORED, REFUSED = PutOutcome


def task(number: int, request_id: str = "", **changes: object) -> LabelTask:
    fields = {"task": number, "request_id": request_id or f"r{number}", "version": 1, **changes}
    return msgspec.convert(fields, LabelTask)


async def moved(delivery: Queue, number: int, state: LabelState, request_id: str = "") -> bool:
    entry = msgspec.structs.replace(task(number, request_id), state=state)
    return (await LabelTasks(delivery).move(BOARD, [entry], ttl_s=DAY_S))[0]


async def test_what_was_put_is_there(queue: RedisQueue) -> None:
    """Whole, for every process, by id and in order, counted by its state; other projects have their own."""
    delivery, other = await queue.connect(), await queue.connect()
    entries = [task(number, data=b'{"text": "a"}') for number in (30, 4, 100)]

    assert await LabelTasks(delivery).put(BOARD, entries, ttl_s=DAY_S, limit=LIMIT) == [STORED, STORED, STORED]

    tasks = LabelTasks(other)
    assert await tasks.get(BOARD, [4, 5], with_data=True) == [entries[1], None]
    assert await tasks.get(BOARD, [4, 5]) == [task(4), None]
    assert [each.task for each in await tasks.page(BOARD, None, 0, 10)] == [4, 30, 100]
    assert [each.task for each in await tasks.page(BOARD, WAITING, 4, 1)] == [30]
    assert await tasks.page(BOARD, OPEN, 0, 10) == []
    assert (await tasks.counts(BOARD))[WAITING] == 3
    assert await tasks.get(BOARD, []) == []
    assert sum((await tasks.counts(Board("digits", "other", 7))).values()) == 0


async def test_the_same_request_again_changes_nothing(queue: RedisQueue) -> None:
    """Wherever it is by then; another request for the task takes its place."""
    delivery = await queue.connect()
    tasks = LabelTasks(delivery)
    await tasks.put(BOARD, [task(1)], ttl_s=DAY_S, limit=LIMIT)
    await moved(delivery, 1, DONE)

    assert await tasks.put(BOARD, [task(1), task(2)], ttl_s=DAY_S, limit=LIMIT) == [KNOWN, STORED]
    assert (await tasks.get(BOARD, [1]))[0] == task(1, state="done")
    assert await tasks.put(BOARD, [task(1, "changed")], ttl_s=DAY_S, limit=LIMIT) == [STORED]
    assert (await tasks.get(BOARD, [1]))[0] == task(1, "changed")
    assert await tasks.counts(BOARD) == {state: 2 if state is WAITING else 0 for state in LabelState}


async def test_a_task_is_claimed_by_one(queue: RedisQueue) -> None:
    """Until its lease is over, or it has moved on."""
    delivery, other = await queue.connect(), await queue.connect()
    await LabelTasks(delivery).put(BOARD, [task(1), task(2)], ttl_s=DAY_S, limit=LIMIT)

    first = await LabelTasks(delivery).claim(BOARD, 1, lease_s=60.0)
    second = await LabelTasks(other).claim(BOARD, 5, lease_s=0.0)

    assert [each.task for each in first + second] == [1, 2]
    again = await LabelTasks(delivery).claim(BOARD, 5, lease_s=60.0)
    assert [each.task for each in again] == [2]
    await moved(delivery, 1, OPEN)
    await LabelTasks(other).move(BOARD, [task(2)], ttl_s=DAY_S, wait_s=0.0)
    assert [each.task for each in await LabelTasks(delivery).claim(BOARD, 5, lease_s=60.0)] == [2]
    await LabelTasks(other).move(BOARD, [task(2)], ttl_s=DAY_S, wait_s=60.0)
    assert await LabelTasks(delivery).claim(BOARD, 5, lease_s=60.0) == []


async def test_what_is_late_changes_nothing(queue: RedisQueue) -> None:
    """A task that is asked for again meanwhile stays so; one that is gone is told of nevertheless."""
    delivery = await queue.connect()
    await LabelTasks(delivery).put(BOARD, [task(1, "old")], ttl_s=DAY_S, limit=LIMIT)
    await LabelTasks(delivery).put(BOARD, [task(1, "new")], ttl_s=DAY_S, limit=LIMIT)

    assert not await moved(delivery, 1, DONE, "old")
    assert (await LabelTasks(delivery).get(BOARD, [1]))[0] == task(1, "new")
    assert await moved(delivery, 1, DONE, "new")
    assert [await moved(delivery, 1, state, "new") for state in (OPEN, WAITING)] == [False, False]
    assert not await moved(delivery, 3, OPEN)
    assert await moved(delivery, 2, FAILED)
    assert (await LabelTasks(delivery).counts(BOARD))[FAILED] == 1


async def test_what_is_over_is_forgotten(queue: RedisQueue) -> None:
    """After its time, with the next step; what is not over stays."""
    delivery = await queue.connect()
    await LabelTasks(delivery).put(BOARD, [task(1), task(2)], ttl_s=DAY_S, limit=LIMIT)
    await moved(delivery, 1, DONE)

    async def is_forgotten() -> bool:
        await LabelTasks(delivery).move(BOARD, [task(2, state="open")], ttl_s=0.001)
        return await LabelTasks(delivery).page(BOARD, None, 0, 10) == [task(2, state="open")]

    await eventually(is_forgotten)
    assert (await LabelTasks(delivery).counts(BOARD))[DONE] == 0


async def test_boards_are_known(queue: RedisQueue) -> None:
    """Those of a model, with their tenants, whatever these are called."""
    delivery = await queue.connect()
    boards = [Board("digits", "", 1), Board("digits", "a.b-c_~", 22), Board("other", "", 3)]
    for board in boards:
        await LabelTasks(delivery).put(board, [task(1)], ttl_s=DAY_S, limit=LIMIT)

    assert sorted(await LabelTasks(delivery).boards("digits"), key=lambda board: board.project) == boards[:2]
    assert await LabelTasks(delivery).boards("unknown") == []


async def test_what_is_not_over_is_counted(queue: RedisQueue) -> None:
    """Of all boards of a model: what waits, is open or is being sent."""
    delivery = await queue.connect()
    await LabelTasks(delivery).put(BOARD, [task(number) for number in range(1, 6)], ttl_s=DAY_S, limit=LIMIT)
    await LabelTasks(delivery).put(Board(BOARD.model, "another", 7), [task(1)], ttl_s=DAY_S, limit=LIMIT)
    for number, state in enumerate((DONE, FAILED, OPEN, LabelState.SENDING), 1):
        assert await moved(delivery, number, state)

    assert await LabelTasks(delivery).unfinished(BOARD.model) == 4
    assert await LabelTasks(delivery).unfinished("unknown") == 0


async def test_so_many_wait_and_no_more(queue: RedisQueue) -> None:
    """The first of those that come. What is known, or waits already, needs no room; what moves on makes some."""
    delivery = await queue.connect()
    tasks = LabelTasks(delivery)
    await tasks.put(BOARD, [task(1), task(2), task(3)], ttl_s=DAY_S, limit=4)
    await moved(delivery, 3, OPEN)

    placed = await tasks.put(BOARD, [task(number) for number in range(1, 7)], ttl_s=DAY_S, limit=4)

    assert placed == [KNOWN, KNOWN, KNOWN, STORED, STORED, REFUSED]
    assert (await tasks.get(BOARD, [6]))[0] is None
    again = [task(1, "changed"), task(3, "changed"), task(6)]
    assert await tasks.put(BOARD, again, ttl_s=DAY_S, limit=4) == [STORED, REFUSED, REFUSED]
    assert (await tasks.get(BOARD, [3]))[0] == task(3, state="open")
    assert await tasks.put(Board(BOARD.model, "other", 7), [task(6)], ttl_s=DAY_S, limit=4) == [STORED]
    await moved(delivery, 2, OPEN)
    assert await tasks.put(BOARD, [task(6), task(7)], ttl_s=DAY_S, limit=4) == [STORED, REFUSED]
    assert (await tasks.counts(BOARD))[WAITING] == 4


async def test_what_is_put_at_once_is_bounded(queue: RedisQueue) -> None:
    """By several processes, and by more steps than one; a limit that was lowered meanwhile removes nothing."""
    deliveries = [await queue.connect() for _ in range(3)]
    parts = [[task(number) for number in range(start, start + 700)] for start in (1, 701, 1401)]

    placed = await asyncio.gather(
        *(
            LabelTasks(each).put(BOARD, part, ttl_s=DAY_S, limit=1000)
            for each, part in zip(deliveries, parts, strict=True)
        )
    )

    assert [each for part in placed for each in part].count(STORED) == 1000
    tasks = LabelTasks(deliveries[0])
    assert await tasks.put(BOARD, [task(9999)], ttl_s=DAY_S, limit=1) == [REFUSED]
    assert (await tasks.counts(BOARD))[WAITING] == 1000


async def test_many_tasks_are_stored_in_steps(queue: RedisQueue) -> None:
    """More than one script takes."""
    delivery = await queue.connect()

    stored = await LabelTasks(delivery).put(
        BOARD, [task(number) for number in range(1, 1202)], ttl_s=DAY_S, limit=LIMIT
    )

    assert stored == [STORED] * 1201
    assert (await LabelTasks(delivery).counts(BOARD))[WAITING] == 1201
    assert len(await LabelTasks(delivery).page(BOARD, None, 0, 5000)) == 1000


async def test_data_is_kept_until_a_task_is_over(queue: RedisQueue) -> None:
    """Who takes it up has it, and who asks for it; who looks where tasks are does not read all of it."""
    tasks = LabelTasks(await queue.connect())
    whole = task(1, data=b'{"text": "a"}')
    await tasks.put(BOARD, [whole], ttl_s=DAY_S, limit=LIMIT)

    assert await tasks.claim(BOARD, 1, lease_s=60.0) == [whole]
    assert await tasks.page(BOARD, None, 0, 10) == [task(1)]
    sending = msgspec.structs.replace(whole, state=LabelState.SENDING)
    await tasks.move(BOARD, [sending], ttl_s=DAY_S)
    assert await tasks.get(BOARD, [1], with_data=True) == [sending]
    await moved(await queue.connect(), 1, DONE)
    assert await tasks.get(BOARD, [1], with_data=True) == [task(1, state="done")]


async def test_full_memory_refuses_tasks_and_lets_them_end(redis_queue: RedisQueue) -> None:
    """What was pushed can be confirmed, which makes room."""
    delivery = await redis_queue.connect()
    await LabelTasks(delivery).put(BOARD, [task(1, data=b"{}")], ttl_s=DAY_S, limit=LIMIT)
    redis_queue.on_every_node("CONFIG", "SET", "maxmemory", "1")
    try:
        with pytest.raises(QueueFull, match="memory is full"):
            await LabelTasks(delivery).put(BOARD, [task(2)], ttl_s=DAY_S, limit=LIMIT)
        assert await moved(delivery, 1, DONE)
    finally:
        redis_queue.on_every_node("CONFIG", "SET", "maxmemory", "0")

    assert (await LabelTasks(delivery).counts(BOARD))[DONE] == 1


async def test_what_was_put_is_as_safe_as_a_request(redis_queue: RedisQueue, monkeypatch: pytest.MonkeyPatch) -> None:
    """Label Studio does not repeat what it was told is taken."""
    delivery, written, write = await redis_queue.connect(), [], Durability.write

    async def noted(self: Durability, model: str, partition: int, operation: Callable[..., Awaitable[Any]]) -> Any:
        written.append((model, partition))
        return await write(self, model, partition, operation)

    monkeypatch.setattr(Durability, "write", noted)
    await LabelTasks(delivery).put(BOARD, [task(1)], ttl_s=DAY_S, limit=LIMIT)

    assert written == [("digits", 0)]


async def test_large_tasks_are_stored_a_few_at_a_time(redis_queue: RedisQueue, monkeypatch: pytest.MonkeyPatch) -> None:
    """While a script and its data are on their way all others wait."""
    delivery, sizes, run = await redis_queue.connect(), [], run_script

    async def sized(*words: Any, **options: Any) -> Any:
        sizes.append(sum(len(word) for word in words if isinstance(word, bytes)))
        return await run(*words, **options)

    monkeypatch.setattr("qinfer.labeling.tasks.run_script", sized)
    entries = [task(number, data=b"x" * MAX_DATA_BYTES) for number in range(1, 101)]

    assert await LabelTasks(delivery).put(BOARD, entries, ttl_s=DAY_S, limit=LIMIT) == [STORED] * 100
    assert len(sizes) > 5
    assert max(sizes) < 2 * 2**20
    assert await LabelTasks(delivery).get(BOARD, [100], with_data=True) == [entries[-1]]
