"""Tasks of labeling projects whose predictions are pushed: kept until they are sent, and looked at for a while after.

    put ──▶ waiting ──claim, move──▶ open ──move──▶ done | failed            sending = scored, and not taken yet

A task has one entry in the *board* of its project, about the latest request that was made for it. The promises, each a
test in `tests/contract/`:

1. What `put` stored is there until `ttl_s` after it ended; to put it again, for the same request, changes nothing.
2. `claim` gives a waiting task to one caller at a time, again after `lease_s` until it is moved on.
3. `move` of a task whose entry is about another request by now changes nothing; nor does one that comes late, to
   `waiting` or `open`, of a task that has come further.
4. What boards a model has is known as long as one of its tasks is.
5. No more tasks wait on a board than `put` is told may, however many put at once; what was not stored is said.
"""

from collections.abc import Mapping, Sequence
from enum import IntEnum, StrEnum
from typing import Protocol

import msgspec

MAX_BOARD_PAGE = 1000
"""The most tasks that `page` returns."""

MAX_DATA_BYTES = 64 * 1024
"""The largest data of a task that is kept here; larger ones are asked for again."""

PRUNED = 100
"""So many ended tasks whose time is over are removed at each step."""


class LabelState(StrEnum):
    """Where a task is, as far as its board knows: of an `open` one its request knows more."""

    WAITING = "waiting"
    OPEN = "open"
    SENDING = "sending"
    DONE = "done"
    FAILED = "failed"

    @property
    def is_over(self) -> bool:
        """Whether nothing more is done for the task."""
        return self in (LabelState.DONE, LabelState.FAILED)


class Placed(IntEnum):
    """What became of a task that was put: it is as it was | it waits | it was not stored, because too many wait."""

    KNOWN = 0
    STORED = 1
    REFUSED = 2


class Board(msgspec.Struct, frozen=True):
    """Which project's tasks: those that one tenant has a model predict."""

    model: str
    tenant: str
    project: int


class LabelTask(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What is known of a task.

    Attributes:
        task: Its id.
        request_id: Its request, as `records.chosen_address` takes it; it tells the data and the version apart.
        version: The model version that it is for.
        state: Where it is.
        attempt: How often it was asked for again after it had ended, 1 for the first time.
        error: Why it failed, or why it is not sent yet.
        score: The prediction's confidence, once it is done.
        created_at: When this was asked for, in seconds of the broker's time.
        updated_at: When this was written, in seconds of the broker's time.
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
    data: bytes = b""


class LabelTasks(Protocol):
    """The port; every coroutine raises `BrokerUnavailable` when the broker can't be reached."""

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
        ...

    async def claim(self, board: Board, count: int, *, lease_s: float) -> list[LabelTask]:
        """Takes up to `count` tasks that wait, those first that have waited longest; nobody else does for `lease_s`."""
        ...

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
        ...

    async def get(self, board: Board, ids: Sequence[int], *, with_data: bool = False) -> list[LabelTask | None]:
        """Returns the entries of tasks, with their data only if it is asked for; `None` where there is none."""
        ...

    async def page(self, board: Board, state: LabelState | None, after: int, count: int) -> list[LabelTask]:
        """Returns up to `count` tasks with ids above `after`, by id, without data; those of one state, or all."""
        ...

    async def counts(self, board: Board) -> Mapping[LabelState, int]:
        """Returns how many tasks of a project are in each state."""
        ...

    async def unfinished(self, model: str) -> int:
        """Returns how many tasks of a model, of all its boards, are neither done nor failed."""
        ...

    async def boards(self, model: str) -> list[Board]:
        """Returns the boards of a model that have tasks, or had some lately."""
        ...
