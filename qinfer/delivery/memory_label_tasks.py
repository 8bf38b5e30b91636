"""Tasks of labeling projects in one process's memory; nothing outlives it."""

from collections.abc import Mapping, Sequence

import msgspec

from qinfer.clock import ServerClock
from qinfer.delivery.label_tasks import MAX_BOARD_PAGE, PRUNED, Board, LabelState, LabelTask, Placed


class MemoryLabelTasks:
    """`LabelTasks` without a broker.

    Args:
        clock: The queue's time.
    """

    def __init__(self, clock: ServerClock) -> None:
        self._clock = clock
        self._entries: dict[Board, dict[int, LabelTask]] = {}
        self._due: dict[Board, dict[int, float]] = {}
        self._ended: dict[Board, dict[int, float]] = {}

    async def put(self, board: Board, tasks: Sequence[LabelTask], *, ttl_s: float, limit: int) -> list[Placed]:
        """See `LabelTasks.put`."""
        entries, due = self._entries.setdefault(board, {}), self._due.setdefault(board, {})
        placed = []
        for task in tasks:
            known = entries.get(task.task)
            if known is not None and known.request_id == task.request_id:
                placed.append(Placed.KNOWN)
            elif task.task not in due and len(due) >= limit:
                placed.append(Placed.REFUSED)
            else:
                placed.append(Placed.STORED)
                self._store(board, task, 0.0)
        self._prune(board, ttl_s)
        return placed

    async def claim(self, board: Board, count: int, *, lease_s: float) -> list[LabelTask]:
        """See `LabelTasks.claim`."""
        due, now_s = self._due.get(board, {}), self._clock.now_s()
        taken = sorted((at_s, task) for task, at_s in due.items() if at_s <= now_s)[:count]
        due.update((task, now_s + lease_s) for _, task in taken)
        return [self._entries[board][task] for _, task in taken]

    async def move(self, board: Board, tasks: Sequence[LabelTask], *, ttl_s: float, wait_s: float = 0.0) -> list[bool]:
        """See `LabelTasks.move`."""
        entries = self._entries.setdefault(board, {})
        wanted = []
        for task in tasks:
            known = entries.get(task.task)
            if task.state in (LabelState.WAITING, LabelState.OPEN):
                is_waiting = known is not None and known.state is LabelState.WAITING
                wanted.append(is_waiting and known is not None and known.request_id == task.request_id)
            else:
                wanted.append(known is None or known.request_id == task.request_id)
            if wanted[-1]:
                self._store(board, task, wait_s)
        self._prune(board, ttl_s)
        return wanted

    async def get(self, board: Board, ids: Sequence[int], *, with_data: bool = False) -> list[LabelTask | None]:
        """See `LabelTasks.get`."""
        entries = self._entries.get(board, {})
        found = [entries.get(task) for task in ids]
        return found if with_data else [each and _without_data(each) for each in found]

    async def page(self, board: Board, state: LabelState | None, after: int, count: int) -> list[LabelTask]:
        """See `LabelTasks.page`."""
        entries = sorted(self._entries.get(board, {}).items())
        found = [entry for task, entry in entries if task > after and state in (None, entry.state)]
        return [_without_data(entry) for entry in found[: min(count, MAX_BOARD_PAGE)]]

    async def counts(self, board: Board) -> Mapping[LabelState, int]:
        """See `LabelTasks.counts`."""
        states = [entry.state for entry in self._entries.get(board, {}).values()]
        return {state: states.count(state) for state in LabelState}

    async def unfinished(self, model: str) -> int:
        """See `LabelTasks.unfinished`."""
        boards = await self.boards(model)
        return sum(not entry.state.is_over for board in boards for entry in self._entries[board].values())

    async def boards(self, model: str) -> list[Board]:
        """See `LabelTasks.boards`."""
        return [board for board in self._entries if board.model == model]

    def _store(self, board: Board, task: LabelTask, wait_s: float) -> None:
        now_s = self._clock.now_s()
        due, ended = self._due.setdefault(board, {}), self._ended.setdefault(board, {})
        self._entries[board][task.task] = task
        due.pop(task.task, None)
        ended.pop(task.task, None)
        if task.state is LabelState.WAITING:
            due[task.task] = now_s + wait_s
        elif task.state.is_over:
            ended[task.task] = now_s

    def _prune(self, board: Board, ttl_s: float) -> None:
        ended, now_s = self._ended.get(board, {}), self._clock.now_s()
        for task in [task for task, at_s in ended.items() if at_s <= now_s - ttl_s][:PRUNED]:
            del self._entries[board][task], ended[task]


def _without_data(task: LabelTask) -> LabelTask:
    return msgspec.structs.replace(task, data=b"")
