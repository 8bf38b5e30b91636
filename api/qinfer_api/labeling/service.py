"""The use cases behind `/label-studio` and `/v1/label-studio`."""

import time
from collections.abc import Mapping, Sequence
from typing import Any

from qinfer.core.settings import LabelingSettings, Settings
from qinfer.errors import InvalidRequest, Overloaded, SettingsError, UnsupportedFeature
from qinfer.labeling.label_config import LabelConfig, parse_label_config
from qinfer.labeling.mapping import Mapping as TaskMapping
from qinfer.labeling.mapping import model_version
from qinfer.labeling.tasks import Board, LabelTasks
from qinfer.models.catalog import ServedVersion
from qinfer.observe.stats import ModelCounts
from qinfer.queue.lanes import Queue
from qinfer.submission.submit import check_stateless
from qinfer_api.auth import Auth, CallerContext
from qinfer_api.dispatcher import Dispatcher
from qinfer_api.labeling.files import Files, targets_of
from qinfer_api.labeling.intake import PredictionReason, TaskIntake
from qinfer_api.labeling.mappings import MappingBook
from qinfer_api.labeling.predict import FailedTask, PredictionCall, PredictionRun
from qinfer_api.labeling.pusher import Pusher
from qinfer_api.labeling.status import Statuses
from qinfer_api.labeling.studio import LabelStudio, check_address
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
from qinfer_api.requests.service import AsyncRequests

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
