"""The board: tasks of labeling projects whose predictions are pushed, kept until they are sent and for a while after.

    put ──▶ waiting ──claim, move──▶ open ──move──▶ done | failed            sending = scored, and not taken yet

A task has one entry on the *board* of its project, about its latest request. The promises, each a test in
`tests/contract/`:

1. `put` stores a task until `ttl_s` after its end; a second `put` for the same request changes nothing.
2. `claim` gives a waiting task to one caller at a time, and again after `lease_s` until it is moved on.
3. `move` changes nothing if the entry is about another request, nor if it comes late: a move to `waiting` or `open` of
a task that has advanced.
4. A model's boards are known while one of its tasks is.
5. No more tasks wait on a board than `put` allows, even with concurrent calls; the caller learns which were not stored.
"""

import asyncio
from collections.abc import Iterator, Mapping, Sequence
from enum import IntEnum, StrEnum
from functools import partial
from typing import Any

import msgspec

from qinfer.queue import keys
from qinfer.queue.deliveries import DeliveryKind
from qinfer.queue.lanes import Queue
from qinfer.queue.router import Call, load_script, run_script

MAX_BOARD_PAGE = 1000

MAX_DATA_BYTES = 64 * 1024
"""Larger data of a task is fetched again, instead of stored."""

# Tasks of one script, which blocks other clients while it runs.
_STEP = 500
_WORDS = 5
_STEP_BYTES = 2**20  # data per script, except for a single larger task
_STEP_SCRIPT = load_script("step", "now_ms", "deliveries", package="qinfer.labeling")


class LabelState(StrEnum):
    """The request of an `open` task knows more."""

    WAITING = "waiting"
    OPEN = "open"
    SENDING = "sending"
    DONE = "done"
    FAILED = "failed"

    @property
    def is_over(self) -> bool:
        """Whether the task is finished."""
        return self in (LabelState.DONE, LabelState.FAILED)


_STATES = tuple(LabelState)


class PutOutcome(IntEnum):
    """`refused`: too many tasks wait."""

    KNOWN = 0
    STORED = 1
    REFUSED = 2


class Board(msgspec.Struct, frozen=True):
    """The board of a project: the tasks that one tenant sends to a model."""

    model: str
    tenant: str
    project: int


class LabelTask(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The entry of a task; instants are on Redis' clock.

    `request_id` differs for other data or another version. For an endpoint, `version` is the version of the stable
    target until the request is made; `model` is then the model of the request's target, otherwise empty. `attempt`
    counts from 1. `data` (JSON) is empty once finished or above `MAX_DATA_BYTES`.
    """

    task: int
    request_id: str
    version: int
    state: LabelState = LabelState.WAITING
    attempt: int = 1
    error: str = ""
    score: float | None = None
    created_at: float = 0.0
    updated_at: float = 0.0
    model: str = ""
    data: bytes = b""


class LabelTasks:
    """The tasks of all boards; every coroutine may raise `BrokerUnavailable`."""

    def __init__(self, queue: Queue) -> None:
        self._router = queue.router
        self._durability = queue.durability
        self._deliveries = queue.deliveries

    async def put(self, board: Board, tasks: Sequence[LabelTask], *, ttl_s: float, limit: int) -> list[PutOutcome]:
        """Stores waiting tasks in order, replacing entries about other requests, until `limit` of the board wait.

        A task that replaces a waiting one needs no room.
        """
        return [PutOutcome(each) for each in await self._step("put", board, tasks, ttl_s, limit=limit)]

    async def claim(self, board: Board, count: int, *, lease_s: float) -> list[LabelTask]:
        """Claims up to `count` waiting tasks, oldest first."""
        kind = DeliveryKind(_kind_name(board), lease_s, lease_s)
        items = await self._deliveries.take_due(board.model, 0, kind, count)
        tasks = await self.get(board, [int(item.text) for item in items], with_data=True)
        gone = [item.id for item, task in zip(items, tasks, strict=True) if task is None]
        await self._deliveries.done(board.model, 0, kind, gone)
        return [task for task in tasks if task is not None]

    async def move(self, board: Board, tasks: Sequence[LabelTask], *, ttl_s: float, wait_s: float = 0.0) -> list[bool]:
        """Stores states unless the entry is about another request; returns which were stored.

        Waiting tasks are not claimed for `wait_s`.
        """
        return [bool(each) for each in await self._step("move", board, tasks, ttl_s, wait_s)]

    async def get(self, board: Board, ids: Sequence[int], *, with_data: bool = False) -> list[LabelTask | None]:
        """Returns the entries of tasks, with data on request."""
        call, tasks = self._call_for(board), list[LabelTask | None]()
        for start in range(0, len(ids), _STEP):
            part = ids[start : start + _STEP]
            entries = await call(b"HMGET", _board_key(board, "entries"), *part)
            data = await call(b"HMGET", _board_key(board, "data"), *part) if with_data else [None] * len(part)
            tasks += [None if entry is None else _task_of(entry, its) for entry, its in zip(entries, data, strict=True)]
        return tasks

    async def page(self, board: Board, state: LabelState | None, after: int, count: int) -> list[LabelTask]:
        """Returns up to `count` tasks above `after`, by id and without data."""
        count = min(count, MAX_BOARD_PAGE)
        states = _STATES if state is None else (state,)
        above = f"({after}"
        ids: set[int] = set()
        for each in states:
            name = _board_key(board, each.value)
            found = await self._call_for(board)(b"ZRANGEBYSCORE", name, above, b"+inf", b"LIMIT", 0, count)
            ids.update(map(int, found))
        return [task for task in await self.get(board, sorted(ids)[:count]) if task is not None]

    async def counts(self, board: Board) -> Mapping[LabelState, int]:
        """Counts the tasks of a project by state."""
        return {state: await self._count_tasks(board, state) for state in _STATES}

    async def unfinished(self, model: str) -> int:
        """Counts a model's unfinished tasks on all boards."""
        boards, states = await self.boards(model), [state for state in _STATES if not state.is_over]
        return sum(await asyncio.gather(*(self._count_tasks(board, state) for board in boards for state in states)))

    async def boards(self, model: str) -> list[Board]:
        """Returns the boards of a model with recent tasks."""
        name = keys.label_boards(model).encode()
        found = await partial(self._router.call, keys.slot(name))(b"ZRANGE", name, 0, -1)
        named = (member.decode().partition(":") for member in found)
        return [Board(model, tenant, int(project)) for project, _, tenant in named]

    async def _step(
        self, what: str, board: Board, tasks: Sequence[LabelTask], ttl_s: float, wait_s: float = 0.0, limit: int = 0
    ) -> list[int]:
        queue = keys.deliveries(board.model, 0, _kind_name(board)).encode()
        names = [_board_key(board, "entries"), _board_key(board, "data"), queue, _board_key(board, "ended")]
        names += [keys.label_boards(board.model).encode(), *(_board_key(board, state.value) for state in _STATES)]
        about = (what, f"{board.project}:{board.tenant}", int(wait_s * 1000), max(int(ttl_s * 1000), 1), limit)
        placed: list[int] = []
        for words in _steps(tasks):
            arguments = (*about, len(_STATES), *(state.value for state in _STATES), *words)

            async def write(call: Call, arguments: tuple[str | int | bytes, ...] = arguments) -> Any:
                return await run_script(call, _STEP_SCRIPT, names, *arguments)

            is_promise = what == "put"
            found = await (
                self._durability.write(board.model, 0, write) if is_promise else write(self._call_for(board))
            )
            placed += found
        return placed

    async def _count_tasks(self, board: Board, state: LabelState) -> int:
        return int(await self._call_for(board)(b"ZCARD", _board_key(board, state.value)))

    def _call_for(self, board: Board) -> Call:
        return partial(self._router.call, keys.slot(_board_key(board, "entries")))


def _kind_name(board: Board) -> str:
    return f"labels:{board.project}:{board.tenant}"


def _board_key(board: Board, part: str) -> bytes:
    return keys.label_board(board.model, board.tenant, board.project, part).encode()


def _steps(tasks: Sequence[LabelTask]) -> Iterator[list[str | int | bytes]]:
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
    """Decodes an entry: lines with the request's id and the queue's item, then the task without its data."""
    task = msgspec.msgpack.decode(entry.split(b"\n", 2)[2], type=LabelTask)
    return msgspec.structs.replace(task, data=data) if data else task
