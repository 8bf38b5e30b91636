"""Tasks of labeling projects on Redis: hashes of entries and of data, an index for each state, a queue of what waits.

put, move   label_step.lua        claim   label_claim.lua        get, page, counts, boards   plain reads
"""

import asyncio
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import msgspec

from qinfer.delivery import keys, scripts
from qinfer.delivery.durability import Durability
from qinfer.delivery.label_tasks import MAX_BOARD_PAGE, Board, LabelState, LabelTask, Placed
from qinfer.delivery.router import Router

_STATES = tuple(LabelState)
_STEP = 500  # tasks stored by one script: others wait while it runs
_WORDS = 5  # of a task in that script
_STEP_BYTES = 2**20  # and so many bytes of theirs, but for a single one


class RedisLabelTasks:
    """`LabelTasks` beside `RedisDelivery`'s lanes.

    Args:
        router: The way to Redis.
        durability: Makes what was put as safe as the settings ask.
    """

    def __init__(self, router: Router, durability: Durability) -> None:
        self._router = router
        self._durability = durability

    async def put(self, board: Board, tasks: Sequence[LabelTask], *, ttl_s: float, limit: int) -> list[Placed]:
        """See `LabelTasks.put`."""
        return [Placed(each) for each in await self._step("put", board, tasks, ttl_s, limit=limit)]

    async def claim(self, board: Board, count: int, *, lease_s: float) -> list[LabelTask]:
        """See `LabelTasks.claim`."""
        names = [_key(board, part) for part in ("entries", "data", "due")]
        found = await scripts.run(self._call(board), scripts.LABEL_CLAIM, names, count, int(lease_s * 1000))
        return [_task_of(entry, data) for entry, data in found]

    async def move(self, board: Board, tasks: Sequence[LabelTask], *, ttl_s: float, wait_s: float = 0.0) -> list[bool]:
        """See `LabelTasks.move`."""
        return [bool(each) for each in await self._step("move", board, tasks, ttl_s, wait_s)]

    async def get(self, board: Board, ids: Sequence[int], *, with_data: bool = False) -> list[LabelTask | None]:
        """See `LabelTasks.get`."""
        call, tasks = self._call(board), list[LabelTask | None]()
        for start in range(0, len(ids), _STEP):
            part = ids[start : start + _STEP]
            entries = await call(b"HMGET", _key(board, "entries"), *part)
            data = await call(b"HMGET", _key(board, "data"), *part) if with_data else [None] * len(part)
            tasks += [None if entry is None else _task_of(entry, its) for entry, its in zip(entries, data, strict=True)]
        return tasks

    async def page(self, board: Board, state: LabelState | None, after: int, count: int) -> list[LabelTask]:
        """See `LabelTasks.page`."""
        count = min(count, MAX_BOARD_PAGE)
        states = _STATES if state is None else (state,)
        above = f"({after}"
        ids: set[int] = set()
        for each in states:
            name = _key(board, each.value)
            found = await self._call(board)(b"ZRANGEBYSCORE", name, above, b"+inf", b"LIMIT", 0, count)
            ids.update(map(int, found))
        return [task for task in await self.get(board, sorted(ids)[:count]) if task is not None]

    async def counts(self, board: Board) -> Mapping[LabelState, int]:
        """See `LabelTasks.counts`."""
        return {state: await self._count(board, state) for state in _STATES}

    async def unfinished(self, model: str) -> int:
        """See `LabelTasks.unfinished`."""
        boards, states = await self.boards(model), [state for state in _STATES if not state.is_over]
        return sum(await asyncio.gather(*(self._count(board, state) for board in boards for state in states)))

    async def boards(self, model: str) -> list[Board]:
        """See `LabelTasks.boards`."""
        name = keys.label_boards(model).encode()
        found = await partial(self._router.call, keys.slot(name))(b"ZRANGE", name, 0, -1)
        named = (member.decode().partition(":") for member in found)
        return [Board(model, tenant, int(project)) for project, _, tenant in named]

    async def _step(
        self, what: str, board: Board, tasks: Sequence[LabelTask], ttl_s: float, wait_s: float = 0.0, limit: int = 0
    ) -> list[int]:
        names = [_key(board, part) for part in ("entries", "data", "due", "ended")]
        names += [keys.label_boards(board.model).encode(), *(_key(board, state.value) for state in _STATES)]
        about = (what, f"{board.project}:{board.tenant}", int(wait_s * 1000), max(int(ttl_s * 1000), 1), limit)
        placed: list[int] = []
        for words in _steps(tasks):
            arguments = (*about, len(_STATES), *(state.value for state in _STATES), *words)

            async def write(
                call: Callable[..., Awaitable[Any]], arguments: tuple[str | int | bytes, ...] = arguments
            ) -> Any:
                return await scripts.run(call, scripts.LABEL_STEP, names, *arguments)

            is_promise = what == "put"
            found = await (self._durability.write(board.model, 0, write) if is_promise else write(self._call(board)))
            placed += found
        return placed

    async def _count(self, board: Board, state: LabelState) -> int:
        return int(await self._call(board)(b"ZCARD", _key(board, state.value)))

    def _call(self, board: Board) -> Callable[..., Awaitable[Any]]:
        return partial(self._router.call, keys.slot(_key(board, "entries")))


def _key(board: Board, part: str) -> bytes:
    return keys.label_board(board.model, board.tenant, board.project, part).encode()


def _steps(tasks: Sequence[LabelTask]) -> Iterator[list[str | int | bytes]]:
    """Cuts tasks into the words of one script each."""
    words: list[str | int | bytes] = []
    size = 0
    for task in tasks:
        if words and (len(words) == _WORDS * _STEP or size + len(task.data) > _STEP_BYTES):
            yield words
            words, size = [], 0
        bare = msgspec.structs.replace(task, data=b"")
        words += [task.task, task.request_id, task.state.value, msgspec.msgpack.encode(bare), task.data]
        size += len(task.data)
    if words:
        yield words


def _task_of(entry: bytes, data: bytes | None) -> LabelTask:
    """Reads an entry: the request's id in a line of its own, for the scripts, then all of it but its data."""
    task = msgspec.msgpack.decode(entry.partition(b"\n")[2], type=LabelTask)
    return msgspec.structs.replace(task, data=data) if data else task
