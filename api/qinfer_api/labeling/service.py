"""The use cases behind `/label-studio` and `/v1/label-studio`, and the states of a project's tasks.

The board has the states of all but open tasks, whose requests have theirs. `sending` = scored, and Label Studio has not
taken it yet.
"""

import asyncio
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any, Literal, get_args

import msgspec

from qinfer.core.settings import LabelingSettings, Settings
from qinfer.errors import InvalidRequest, Overloaded, RequestNotFound, SettingsError, UnsupportedFeature
from qinfer.labeling.mapping import Mapping as TaskMapping
from qinfer.labeling.mapping import MappingBook, model_version
from qinfer.labeling.rules import LabelConfig, parse_label_config
from qinfer.labeling.tasks import Board, LabelState, LabelTask, LabelTasks
from qinfer.models.catalog import ServedVersion
from qinfer.observe.stats import ModelCounts
from qinfer.queue.entries import RequestRecord
from qinfer.queue.lanes import Queue
from qinfer.queue.requests import Requests
from qinfer.submission.submit import check_stateless
from qinfer_api.auth import Auth, CallerContext
from qinfer_api.dispatcher import Dispatcher
from qinfer_api.labeling.intake import PredictionReason, TaskIntake
from qinfer_api.labeling.predict import FailedTask, PredictionCall, PredictionRun
from qinfer_api.labeling.pusher import Pusher
from qinfer_api.labeling.studio import Files, LabelStudio, check_address, targets_of
from qinfer_api.labeling.wire import (
    EventCall,
    LabelEvent,
    LabelHealth,
    LabelOrder,
    LabelPredictions,
    LabelSetup,
    LabelVersions,
    PredictCall,
    SetupCall,
)
from qinfer_api.requests.records import chosen_address, instant, path_of
from qinfer_api.requests.service import AsyncRequests

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


TASKS_CREATED = "TASKS_CREATED"

PUSH = "push"


# The time of one call of `order`; the next call continues.
_ORDER_S = 20.0


class Labeling:
    """Serves Label Studio's calls; each gateway has one."""

    def __init__(
        self,
        settings: Settings,
        delivery: Queue,
        dispatcher: Dispatcher,
        requests: AsyncRequests,
        counts: ModelCounts,
        auth: Auth | None,
    ) -> None:
        own = settings.labeling
        tasks = LabelTasks(delivery)
        self._dispatcher = dispatcher
        self._requests = requests
        self._book = check_labeling(own)
        self._studio = LabelStudio(own) if own.url else None
        self._files = Files(own, settings.stores, self._studio, is_shared=lambda: dispatcher.has_tenants)
        self._timeout_s = own.predict_timeout_s
        self.statuses = Statuses(tasks, delivery.requests)
        self.intake = TaskIntake(
            settings,
            tasks=tasks,
            requests=requests,
            book=self._book,
            files=self._files,
            studio=self._studio,
            counts=counts,
            auth=auth,
        )
        self.pusher: Pusher | None = None
        if self._studio is not None:
            self.pusher = Pusher(settings, delivery, self.intake, self._book, self._studio)

    async def close(self) -> None:
        """Closes the HTTP clients."""
        await self._files.close()
        if self._studio is not None:
            await self._studio.close()

    async def health(self, model: str) -> LabelHealth:
        """Checks that a model accepts requests."""
        await self._book.current()
        self._requests.resolve(model, 0)
        return LabelHealth("UP", model)

    async def setup(self, context: CallerContext, model: str, asked: SetupCall) -> LabelSetup:
        """Checks a project's mapping."""
        mapping, served = await self._found(context, model, asked.project)
        if mapping.mode == PUSH:
            self._check_studio(model)
        config = _parsed(asked.label_config)
        mapping.check(served.spec, config)
        return LabelSetup(model_version(served.spec.name, served.version))

    async def versions(self, model: str) -> LabelVersions:
        """Returns the ready versions, newest first."""
        model = await self._known(model)
        ready = sorted(self._requests.catalog.ready_versions(model), reverse=True)
        return LabelVersions([model_version(model, version) for version in ready])

    async def predict(self, context: CallerContext, model: str, asked: PredictCall) -> LabelPredictions:
        """Returns each task's prediction; in push mode queues the tasks."""
        project = asked.project or _project_of(asked)
        mapping, served = await self._found(context, model, project)
        version = model_version(served.spec.name, served.version)
        if mapping.mode == PUSH:
            board = self._board(context, model, project)
            await self._queue_tasks(board, mapping, served, asked.tasks, PredictionReason.ASKED)
            return LabelPredictions([[] for _ in asked.tasks], version)
        config = _parsed(asked.label_config)
        mapping.check(served.spec, config)
        call = PredictionCall(context, mapping, served, config)
        try:
            answers = await PredictionRun(self._dispatcher, self._files, call, asked.tasks, self._timeout_s).all()
        except Overloaded as error:
            raise self._dispatcher.refuse(model, served.version, error) from None
        if asked.is_interactive and len(answers) == 1 and isinstance(answers[0], FailedTask):
            raise answers[0].error
        return LabelPredictions([each.as_json() if isinstance(each, FailedTask) else each for each in answers], version)

    async def event(self, context: CallerContext, model: str, event: EventCall) -> LabelEvent:
        """Handles a webhook: queues new tasks durably."""
        if event.action != TASKS_CREATED:
            await self._book.current()
            return LabelEvent(event.action, 0)
        mapping, served = await self._found(context, model, event.project)
        if mapping.mode != PUSH:
            return LabelEvent(event.action, 0)
        if event.tasks is None:
            raise InvalidRequest("the webhook has no tasks; switch on its payload in Label Studio")
        board = self._board(context, model, event.project)
        queued = await self._queue_tasks(board, mapping, served, event.tasks, PredictionReason.CREATED)
        return LabelEvent(event.action, queued)

    async def order(self, context: CallerContext, model: str, project: int, page: int, *, every: bool) -> LabelOrder:
        """Queues a project's tasks without predictions."""
        mapping, served = await self._found(context, model, project)
        board = self._board(context, model, project)
        if mapping.mode != PUSH:
            raise InvalidRequest(
                f"mapping '{mapping.name}' of model '{model}' answers predictions and pushes none; give it mode: push"
            )
        assert self._studio is not None  # `_board` has checked it
        ends_s = time.monotonic() + _ORDER_S
        found = queued = 0
        following: int | None = page
        while following is not None:
            tasks, has_more = await self._studio.tasks(project, following)
            for each in (False, True):  # predictions may be lost
                wanted = [task for task in tasks if bool(task.get("total_predictions")) is each]
                if wanted and (every or not each):
                    found += len(wanted)
                    reason = PredictionReason.CREATED if each else PredictionReason.ORDERED
                    taken = await self.intake.put(board, mapping, served, wanted, reason)
                    queued += taken.queued
                    if taken.refused and not queued:
                        raise self._requests.refuse(model, served.version, self.intake.full(board, taken))
                    if taken.refused:
                        return LabelOrder(found, queued, following)
            following = following + 1 if has_more else None
            if time.monotonic() >= ends_s:
                break
        return LabelOrder(found, queued, following)

    async def board(self, context: CallerContext, model: str, project: int) -> Board:
        """Returns the board of a known model."""
        await self._known(model)
        self._requests.check_up(model)
        return Board(model, context.tenant, project)

    async def _queue_tasks(
        self,
        board: Board,
        mapping: TaskMapping,
        served: ServedVersion,
        tasks: Sequence[Mapping[str, Any]],
        reason: PredictionReason,
    ) -> int:
        taken = await self.intake.put(board, mapping, served, tasks, reason)
        if taken.refused:
            raise self._requests.refuse(board.model, served.version, self.intake.full(board, taken))
        return taken.queued

    async def _known(self, name: str) -> str:
        await self._book.current()
        model, _ = self._dispatcher.endpoints.stable(name, 0)
        self._requests.catalog.status(model)
        return model

    async def _found(
        self, context: CallerContext, model: str, project: int | None
    ) -> tuple[TaskMapping, ServedVersion]:
        await self._known(model)
        is_shared = self._dispatcher.has_tenants
        mapping = await self._book.for_tenant(model, project, context.tenant, is_shared=is_shared)
        if mapping.mode == PUSH:
            return mapping, self._requests.resolve(model, mapping.version)
        served = self._dispatcher.resolve(model, mapping.version)
        check_stateless(served)
        return mapping, served

    def _check_studio(self, model: str) -> None:
        if self._studio is None:
            raise UnsupportedFeature(f"predictions of model '{model}' are pushed, but QINFER_LABELING__URL is not set")

    def _board(self, context: CallerContext, model: str, project: int | None) -> Board:
        self._check_studio(model)
        if project is None:
            raise InvalidRequest("predictions are pushed to a project, but the call does not name it")
        self._requests.check_up(model)
        return Board(model, context.tenant, project)


def _parsed(label_config: str | None) -> LabelConfig | None:
    return parse_label_config(label_config) if label_config and label_config.strip() else None


def _project_of(asked: PredictCall) -> int | None:
    project = asked.tasks[0].get("project") if asked.tasks else None
    return project if type(project) is int and project > 0 else None


def check_labeling(settings: LabelingSettings) -> MappingBook:
    """Loads the mappings and checks the settings."""
    if settings.url:
        check_address(settings)
        if not settings.mappings:
            raise SettingsError("QINFER_LABELING__URL is set, and QINFER_LABELING__MAPPINGS, which it needs, is not")
    targets_of(settings)
    return MappingBook(settings.mappings)
