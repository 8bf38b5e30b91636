"""Tasks of labeling projects whose predictions are pushed: kept until they are sent, and looked at for a while after.

    put ──▶ waiting ──claim, move──▶ open ──move──▶ done | failed            sending = scored, and not taken yet

A task has one entry in the *board* of its project, about the latest request that was made for it. The promises, each a
test in `tests/contract/`:

1. What `put` stored is there until `ttl_s` after it ended; to put it again, for the same request, changes nothing.
2. `claim` gives a waiting task to one caller at a time, again after `lease_s` until it is moved on.
3. `move` of a task whose entry is about another request by now changes nothing; nor does one that comes late, to
   `waiting` or `open`, of a task that has come further.
4. What boards a model has is known as long as one of its tasks is.
5. No more tasks wait on a board than `put` allows, however many put at once; the caller learns what was not stored.
"""

import asyncio
from collections.abc import Iterator, Mapping, Sequence
from enum import IntEnum, StrEnum
from functools import partial
from typing import Any

import msgspec

from qinfer.queue import keys
from qinfer.queue.deliveries import Kind
from qinfer.queue.lanes import Queue
from qinfer.queue.router import Call, load_script, run_script

MAX_BOARD_PAGE = 1000
"""The most tasks that `page` returns."""

MAX_DATA_BYTES = 64 * 1024
"""The largest data of a task that is kept here; larger ones are asked for again."""

_STEP = 500  # tasks stored by one script: others wait while it runs
_WORDS = 5  # of a task in that script
_STEP_BYTES = 2**20  # and so many bytes of theirs, but for a single one
_STEP_SCRIPT = load_script("step", "now_ms", "deliveries", package="qinfer.labeling")


class LabelState(StrEnum):
    """The state of a task as far as its board knows: of an `open` one its request knows more."""

    WAITING = "waiting"
    OPEN = "open"
    SENDING = "sending"
    DONE = "done"
    FAILED = "failed"

    @property
    def is_over(self) -> bool:
        """Whether nothing more is done for the task."""
        return self in (LabelState.DONE, LabelState.FAILED)


_STATES = tuple(LabelState)


class Placed(IntEnum):
    """The outcome of putting a task: it is as it was | it waits | it was not stored, because too many wait."""

    KNOWN = 0
    STORED = 1
    REFUSED = 2


class Board(msgspec.Struct, frozen=True):
    """The board of a project: its tasks that one tenant has a model predict."""

    model: str
    tenant: str
    project: int


class LabelTask(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The entry of a task.

    Attributes:
        task: Its id.
        request_id: Its request, as `records.chosen_address` takes it; another one for other data or another version.
        version: The model version that it is for; of an endpoint, the stable target's until its request is made.
        state: Where it is.
        attempt: How often it was asked for again after it had ended, 1 for the first time.
        error: Why it failed, or why it is not sent yet.
        score: The prediction's confidence, once it is done.
        created_at: When this was asked for, in seconds of the broker's time.
        updated_at: When this was written, in seconds of the broker's time.
        model: The model that its request went to, where the board is an endpoint's; empty = the board's.
        data: The task's data as JSON; empty once it is over, or where it is larger than `MAX_DATA_BYTES`.
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
    """The tasks of all boards; every coroutine raises `BrokerUnavailable` when the broker can't be reached.

    Args:
        queue: The connected queue, of which the requests are entries.
    """

    def __init__(self, queue: Queue) -> None:
        self._router = queue.router
        self._durability = queue.durability
        self._deliveries = queue.deliveries

    async def put(self, board: Board, tasks: Sequence[LabelTask], *, ttl_s: float, limit: int) -> list[Placed]:
        """Stores tasks that wait, the first of them first, as many as may; entries about other requests are replaced.

        Args:
            board: Which project's.
            tasks: The tasks.
            ttl_s: How long those that are over can be looked at.
            limit: How many of the board may wait. One that takes the place of one that waits needs no room.

        Returns:
            For each, what became of it; known = its entry is about this request already, wherever that is.
        """
        return [Placed(each) for each in await self._step("put", board, tasks, ttl_s, limit=limit)]

    async def claim(self, board: Board, count: int, *, lease_s: float) -> list[LabelTask]:
        """Takes up to `count` tasks that wait, those first that have waited longest; nobody else does for `lease_s`."""
        kind = Kind(_kind_name(board), lease_s, lease_s)
        items = await self._deliveries.take(board.model, 0, kind, count)
        tasks = await self.get(board, [int(item.text) for item in items], with_data=True)
        gone = [item.id for item, task in zip(items, tasks, strict=True) if task is None]
        await self._deliveries.done(board.model, 0, kind, gone)
        return [task for task in tasks if task is not None]

    async def move(self, board: Board, tasks: Sequence[LabelTask], *, ttl_s: float, wait_s: float = 0.0) -> list[bool]:
        """Stores tasks as they are now, in one step, where their entries are about the same requests, or are gone.

        Args:
            board: Which project's.
            tasks: The tasks.
            ttl_s: How long those that are over can be looked at.
            wait_s: Those that wait are not claimed for so long.

        Returns:
            For each, whether it was stored.
        """
        return [bool(each) for each in await self._step("move", board, tasks, ttl_s, wait_s)]

    async def get(self, board: Board, ids: Sequence[int], *, with_data: bool = False) -> list[LabelTask | None]:
        """Returns the entries of tasks, with their data only if it is asked for; `None` where there is none."""
        call, tasks = self._call(board), list[LabelTask | None]()
        for start in range(0, len(ids), _STEP):
            part = ids[start : start + _STEP]
            entries = await call(b"HMGET", _key(board, "entries"), *part)
            data = await call(b"HMGET", _key(board, "data"), *part) if with_data else [None] * len(part)
            tasks += [None if entry is None else _task_of(entry, its) for entry, its in zip(entries, data, strict=True)]
        return tasks

    async def page(self, board: Board, state: LabelState | None, after: int, count: int) -> list[LabelTask]:
        """Returns up to `count` tasks with ids above `after`, by id, without data; those of one state, or all."""
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
        """Returns how many tasks of a project are in each state."""
        return {state: await self._count(board, state) for state in _STATES}

    async def unfinished(self, model: str) -> int:
        """Returns how many tasks of a model, of all its boards, are neither done nor failed."""
        boards, states = await self.boards(model), [state for state in _STATES if not state.is_over]
        return sum(await asyncio.gather(*(self._count(board, state) for board in boards for state in states)))

    async def boards(self, model: str) -> list[Board]:
        """Returns the boards of a model that have tasks, or had some lately."""
        name = keys.label_boards(model).encode()
        found = await partial(self._router.call, keys.slot(name))(b"ZRANGE", name, 0, -1)
        named = (member.decode().partition(":") for member in found)
        return [Board(model, tenant, int(project)) for project, _, tenant in named]

    async def _step(
        self, what: str, board: Board, tasks: Sequence[LabelTask], ttl_s: float, wait_s: float = 0.0, limit: int = 0
    ) -> list[int]:
        queue = keys.deliveries(board.model, 0, _kind_name(board)).encode()
        names = [_key(board, "entries"), _key(board, "data"), queue, _key(board, "ended")]
        names += [keys.label_boards(board.model).encode(), *(_key(board, state.value) for state in _STATES)]
        about = (what, f"{board.project}:{board.tenant}", int(wait_s * 1000), max(int(ttl_s * 1000), 1), limit)
        placed: list[int] = []
        for words in _steps(tasks):
            arguments = (*about, len(_STATES), *(state.value for state in _STATES), *words)

            async def write(call: Call, arguments: tuple[str | int | bytes, ...] = arguments) -> Any:
                return await run_script(call, _STEP_SCRIPT, names, *arguments)

            is_promise = what == "put"
            found = await (self._durability.write(board.model, 0, write) if is_promise else write(self._call(board)))
            placed += found
        return placed

    async def _count(self, board: Board, state: LabelState) -> int:
        return int(await self._call(board)(b"ZCARD", _key(board, state.value)))

    def _call(self, board: Board) -> Call:
        return partial(self._router.call, keys.slot(_key(board, "entries")))


def _kind_name(board: Board) -> str:
    return f"labels:{board.project}:{board.tenant}"


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
    """Reads an entry: the request's id and the item in the queue in lines of their own, then all of it but its data."""
    task = msgspec.msgpack.decode(entry.split(b"\n", 2)[2], type=LabelTask)
    return msgspec.structs.replace(task, data=data) if data else task
