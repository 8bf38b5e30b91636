"""The states of a project's tasks, as shown by `/v1/label-studio`.

The board has the states of all but open tasks, whose requests have theirs. `sending` = scored, and Label Studio has not
taken it yet.
"""

import asyncio
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Literal, get_args

import msgspec

from qinfer.errors import RequestNotFound
from qinfer.labeling.mapping import model_version
from qinfer.labeling.tasks import Board, LabelState, LabelTask, LabelTasks
from qinfer.queue.entries import RequestRecord
from qinfer.queue.requests import Requests
from qinfer_api.requests.records import chosen_address, instant, path_of

TaskState = Literal["queued", "processing", "sending", "done", "failed"]

STATES: tuple[TaskState, ...] = get_args(TaskState)

MAX_LIMIT = 1000

COUNTED_OPEN = 500

_BOARD_STATES: Mapping[str, Sequence[LabelState]] = {
    "queued": (LabelState.WAITING, LabelState.OPEN),
    "processing": (LabelState.OPEN,),
    "sending": (LabelState.OPEN, LabelState.SENDING),
    "done": (LabelState.DONE,),
    "failed": (LabelState.FAILED, LabelState.OPEN),
}
_STATES: Mapping[LabelState, TaskState] = {
    LabelState.SENDING: "sending",
    LabelState.DONE: "done",
    LabelState.FAILED: "failed",
}
_LOST = "its request has expired; have the task scored again"


class LabelCounts(msgspec.Struct, frozen=True):
    """The number of tasks in each state."""

    queued: int
    processing: int
    sending: int
    done: int
    failed: int


class LabelTaskBody(msgspec.Struct, frozen=True, kw_only=True):
    """A task whose prediction is pushed.

    Attributes:
        state: queued | processing | sending (scored, not yet accepted by Label Studio) | done | failed
        error: Why it failed, or is not sent yet.
        attempt: 1, plus 1 for each repetition.
        request: The path of its request, while that is known.

    Example:
        {"task": 7, "state": "done", "error": null, "score": 0.97, "model_version": "sentiment:1", "attempt": 1,
         "updated_at": "2026-01-31T12:00:00.000Z",
         "request": "/v1/models/sentiment/requests/ls-12-7-v1-0123456789abcdef"}
    """

    task: int
    state: TaskState
    error: str | None
    score: float | None
    model_version: str
    attempt: int
    updated_at: str | None
    request: str


class LabelTasksBody(msgspec.Struct, frozen=True):
    """A page of a project's tasks.

    Attributes:
        next: The `after` of the next page; null after the last.

    Example:
        {"counts": {"queued": 4, "processing": 8, "sending": 0, "done": 87, "failed": 1}, "tasks": [], "next": null}
    """

    counts: LabelCounts
    tasks: list[LabelTaskBody]
    next: int | None


class Statuses:
    """Reads the states of tasks; each gateway has one."""

    def __init__(self, tasks: LabelTasks, requests: Requests) -> None:
        self._tasks = tasks
        self._requests = requests

    async def page(self, board: Board, state: str, after: int, limit: int) -> LabelTasksBody:
        """Returns a page of tasks by id, with counts; with a `state` it may be short and have a successor."""
        found = await self._found(board, state, after, limit)
        shown = await self._task_bodies(board, found)
        following = found[-1].task if len(found) == limit else None
        tasks = [task for task in shown if not state or task.state == state]
        return LabelTasksBody(await self.counts(board), tasks, following)

    async def one(self, board: Board, task: int) -> LabelTaskBody:
        """Returns the state of a task."""
        (entry,) = await self._tasks.get(board, [task])
        if entry is None:
            raise RequestNotFound(
                f"task {task} of project {board.project} is not known for model '{board.model}': it was not queued, "
                "or it ended too long ago"
            )
        return (await self._task_bodies(board, [entry]))[0]

    async def counts(self, board: Board) -> LabelCounts:
        """Counts a project's tasks by state."""
        known = await self._tasks.counts(board)
        opened = await self._task_bodies(board, await self._tasks.page(board, LabelState.OPEN, 0, COUNTED_OPEN))
        counts = Counter[TaskState](task.state for task in opened)
        since = max(len(opened) - known[LabelState.OPEN], 0)
        counts["queued"] += max(known[LabelState.WAITING] - since, 0) + max(known[LabelState.OPEN] - len(opened), 0)
        for state, shown in _STATES.items():
            counts[shown] += known[state]
        return LabelCounts(*(counts[state] for state in STATES))

    async def _found(self, board: Board, state: str, after: int, limit: int) -> list[LabelTask]:
        if not state:
            return await self._tasks.page(board, None, after, limit)
        pages = [await self._tasks.page(board, each, after, limit) for each in _BOARD_STATES[state]]
        return sorted((entry for page in pages for entry in page), key=lambda entry: entry.task)[:limit]

    async def _task_bodies(self, board: Board, entries: Sequence[LabelTask]) -> list[LabelTaskBody]:
        opened = {entry.task for entry in entries if entry.state is LabelState.OPEN}
        addresses = [chosen_address(entry.model or board.model, entry.request_id, board.tenant) for entry in entries]
        asked = [address for address, entry in zip(addresses, entries, strict=True) if entry.task in opened]
        records = iter(await asyncio.gather(*map(self._requests.record, asked)))
        shown = []
        for address, entry in zip(addresses, entries, strict=True):
            state, error = _STATES.get(entry.state, "queued"), entry.error
            if entry.task in opened:
                state, error = _state_of(next(records))
            shown.append(
                LabelTaskBody(
                    task=entry.task,
                    state=state,
                    error=error or None,
                    score=entry.score,
                    model_version=model_version(entry.model or board.model, entry.version),
                    attempt=entry.attempt,
                    updated_at=instant(entry.updated_at),
                    request=path_of(address),
                )
            )
        return shown


def _state_of(record: RequestRecord | None) -> tuple[TaskState, str]:
    if record is None:
        return "failed", _LOST
    if record.state.is_terminal:
        return "sending", ""
    return ("processing" if record.state.value == "running" else "queued"), ""
