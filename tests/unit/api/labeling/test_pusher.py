"""How often a prediction on which Label Studio fails is pushed."""

from types import SimpleNamespace
from typing import Any, cast

import pytest

from qinfer.core.settings import LabelingSettings, Settings
from qinfer.labeling.tasks import Board, LabelTask
from qinfer.queue.entries import Ending
from qinfer_api.labeling import pusher
from qinfer_api.labeling.pusher import Pusher
from qinfer_api.labeling.studio import StudioFailed

BOARD = Board("text", "", 12)


class Intake:
    """Notes which tasks fail, and which wait."""

    def __init__(self) -> None:
        self.failed: list[int] = []
        self.waiting: list[int] = []

    async def fail(self, board: Board, entry: LabelTask, *about: Any) -> None:
        self.failed.append(entry.task)

    async def move(self, board: Board, entry: LabelTask, *about: Any, **more: Any) -> None:
        self.waiting.append(entry.task)


async def test_pushes_of_a_task_are_counted_while_many_others_fail(monkeypatch: pytest.MonkeyPatch) -> None:
    """Only the task that failed longest ago is forgotten for a new one."""
    monkeypatch.setattr(pusher, "_REMEMBERED", 2)
    intake, done = Intake(), []

    async def confirm(model: str, partition: int, kind: Any, ids: list[str]) -> None:
        done.extend(ids)

    deliveries, absent = SimpleNamespace(done=confirm), cast("Any", None)
    delivery: Any = SimpleNamespace(requests=None, router=None, durability=None, deliveries=deliveries)
    settings = Settings(labeling=LabelingSettings(max_attempts=3))
    pushes = Pusher(settings, delivery, cast("Any", intake), absent, absent)

    for task in (1, 2, 1, 3, 1):
        entry = LabelTask(task=task, request_id=f"r{task}", version=1)
        await pushes._try_later(BOARD, Ending(id=f"e{task}", request_id=f"r{task}"), entry, StudioFailed("status 500"))

    assert (intake.failed, done, intake.waiting) == ([1], ["e1"], [1, 2, 1, 3])
