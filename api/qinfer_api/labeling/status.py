"""Where the tasks of a project are, as `/v1/label-studio` tells it.

    queued ──▶ processing ──▶ sending ──▶ done | failed        sending = scored, and Label Studio has not taken it yet

The board knows what is waiting, over, or could not be sent; of what is open its request knows more.
"""

import asyncio
from collections.abc import Mapping, Sequence
from typing import Any

from qinfer.delivery.label_tasks import Board, LabelState, LabelTask, LabelTasks
from qinfer.delivery.requests import RequestRecord, Requests
from qinfer.errors import RequestNotFound
from qinfer.labeling.mapping import model_version
from qinfer_api.records import chosen_address, instant, path_of

STATES = ("queued", "processing", "sending", "done", "failed")
"""What a task can be in."""

MAX_LIMIT = 1000
"""The most tasks of one page."""

LOOKED_AT = 500
"""So many open tasks, those with the lowest ids, are looked at to count how many are processing; lanes are in order."""

_BOARD_STATES: Mapping[str, Sequence[LabelState]] = {
    "queued": (LabelState.WAITING, LabelState.OPEN),
    "processing": (LabelState.OPEN,),
    "sending": (LabelState.OPEN, LabelState.SENDING),
    "done": (LabelState.DONE,),
    "failed": (LabelState.FAILED, LabelState.OPEN),
}
_LOST = "its request is not known any more; have the task scored again"


class Statuses:
    """One per gateway.

    Args:
        tasks: The boards.
        requests: The records of requests.
    """

    def __init__(self, tasks: LabelTasks, requests: Requests) -> None:
        self._tasks = tasks
        self._requests = requests

    async def page(self, board: Board, state: str, after: int, limit: int) -> dict[str, Any]:
        """Returns a page of a project's tasks by id, and how many are in each state.

        Args:
            board: Which project's.
            state: Only those in this state; empty = all. A page may then have fewer tasks, and be followed by another.
            after: Only tasks with ids above it.
            limit: How many at most.

        Returns:
            `{"counts": …, "tasks": …, "next": …}`; `next` is the `after` of the next page, `None` after the last.
        """
        found = await self._found(board, state, after, limit)
        shown = await self._shown(board, found)
        following = found[-1].task if len(found) == limit else None
        tasks = [task for task in shown if not state or task["state"] == state]
        return {"counts": await self.counts(board), "tasks": tasks, "next": following}

    async def one(self, board: Board, task: int) -> dict[str, Any]:
        """Returns where a task is.

        Raises:
            RequestNotFound: It was never asked for, or it ended too long ago.
        """
        (entry,) = await self._tasks.get(board, [task])
        if entry is None:
            raise RequestNotFound(
                f"task {task} of project {board.project} is not known for model '{board.model}': it was not queued, "
                "or it ended too long ago"
            )
        return (await self._shown(board, [entry]))[0]

    async def counts(self, board: Board) -> dict[str, int]:
        """Returns how many tasks of a project are in each state."""
        known = await self._tasks.counts(board)
        opened = await self._shown(board, await self._tasks.page(board, LabelState.OPEN, 0, LOOKED_AT))
        counts = dict.fromkeys(STATES, 0)
        for task in opened:
            counts[task["state"]] += 1
        since = max(len(opened) - known[LabelState.OPEN], 0)  # they were waiting when that was counted
        counts["queued"] += max(known[LabelState.WAITING] - since, 0) + max(known[LabelState.OPEN] - len(opened), 0)
        counts["sending"] += known[LabelState.SENDING]
        counts["done"] += known[LabelState.DONE]
        counts["failed"] += known[LabelState.FAILED]
        return counts

    async def _found(self, board: Board, state: str, after: int, limit: int) -> list[LabelTask]:
        if not state:
            return await self._tasks.page(board, None, after, limit)
        pages = [await self._tasks.page(board, each, after, limit) for each in _BOARD_STATES[state]]
        return sorted((entry for page in pages for entry in page), key=lambda entry: entry.task)[:limit]

    async def _shown(self, board: Board, entries: Sequence[LabelTask]) -> list[dict[str, Any]]:
        opened = {entry.task for entry in entries if entry.state is LabelState.OPEN}
        addresses = [chosen_address(board.model, entry.request_id, board.tenant) for entry in entries]
        asked = [address for address, entry in zip(addresses, entries, strict=True) if entry.task in opened]
        records = iter(await asyncio.gather(*map(self._requests.record, asked)))
        shown = []
        for address, entry in zip(addresses, entries, strict=True):
            state, error = entry.state.value, entry.error
            if entry.task in opened:
                state, error = _state_of(next(records))
            elif entry.state is LabelState.WAITING:
                state = "queued"
            shown.append(
                {
                    "task": entry.task,
                    "state": state,
                    "error": error or None,
                    "score": entry.score,
                    "model_version": model_version(board.model, entry.version),
                    "attempt": entry.attempt,
                    "updated_at": instant(entry.updated_at),
                    "request": path_of(address),
                }
            )
        return shown


def _state_of(record: RequestRecord | None) -> tuple[str, str]:
    """Returns the state of an open task, and why; its request tells."""
    if record is None:
        return "failed", _LOST
    if record.state.is_terminal:
        return "sending", ""
    return ("processing" if record.state.value == "running" else "queued"), ""
