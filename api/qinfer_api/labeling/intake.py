"""The intake of tasks whose predictions are pushed: tasks are stored on their project's board, then become requests.

`TaskIntake.put` stores any number of tasks in one step, so a webhook's tasks are safe before it is answered. `feed`
makes requests in every gateway, without a leader. A request id derives from task and data, so that equal data is scored
once.
"""

import asyncio
import contextlib
import hashlib
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from enum import Enum
from typing import Any, NamedTuple

import msgspec

from qinfer.core.messages import Failure
from qinfer.core.settings import Settings
from qinfer.errors import (
    DeliveryError,
    InferenceFailed,
    InvalidRequest,
    Overloaded,
    QinferError,
    QueueFull,
    QuotaExceeded,
)
from qinfer.labeling.mapping import Mapping as TaskMapping
from qinfer.labeling.mapping import MappingBook
from qinfer.labeling.tasks import MAX_DATA_BYTES, Board, LabelState, LabelTask, LabelTasks, PutOutcome
from qinfer.models.catalog import ServedVersion
from qinfer.models.config.to_spec import MAX_TIMEOUT
from qinfer.observe.stats import (
    LABEL_FAILED,
    LABEL_PUSHED,
    LABEL_QUEUED,
    LABEL_RETRIES,
    LabelFailure,
    ModelCounts,
)
from qinfer.wire.outputs import OutputPlan
from qinfer_api.auth import Auth, CallerContext
from qinfer_api.labeling.predict import request_of
from qinfer_api.labeling.studio import Files, LabelStudio
from qinfer_api.labeling.wire import task_id
from qinfer_api.requests.service import AsyncRequests, SubmitOptions

LOOK_AGAIN_S = 0.25


class TaskPace:
    """Paces tasks by the tenant's rate, counted when they become requests; interactive calls go first."""

    def __init__(self, auth: Auth | None, look_again: Callable[[], object]) -> None:
        self._auth = auth
        self._look_again = look_again
        self._behind: set[Board] = set()
        self._timer: asyncio.TimerHandle | None = None

    def task_capacity(self, board: Board, most: int) -> int:
        """Returns how many tasks may become requests now."""
        if self._auth is None:
            return most
        if not self._auth.has_key(board.tenant):
            return 0
        room = int(min(self._auth.spare(board.tenant), most))
        if not room and board in self._behind and self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(LOOK_AGAIN_S, self._on_timer)
        return room

    def took(self, board: Board, count: int, room: int) -> None:
        """Notes whether a board had too few tasks."""
        if count < room:
            self._behind.discard(board)
        else:
            self._behind.add(board)

    @contextlib.contextmanager
    def charged(self, tenant: str) -> Iterator[None]:
        """Charges a request; refunds it if the block fails."""
        if self._auth is None:
            yield
            return
        self._auth.charge_tenant(tenant)
        try:
            yield
        except BaseException:
            self._auth.give_back(tenant)
            raise

    def _on_timer(self) -> None:
        self._timer = None
        self._look_again()


logger = logging.getLogger(__name__)

OUTBOX = "label-studio"

LEASE_S = 60.0
"""Seconds before another gateway may take a claimed task."""

# Few tasks at once, because their files are in memory.
_AT_ONCE = 16
_SUBMIT_S = LEASE_S - 10.0  # slower tasks come again
_TOO_SLOW = f"its files took longer than {_SUBMIT_S:g} s to fetch"
_LATER_S = 10.0
_MUCH_LATER_S = 600.0
_ASKED_AGAIN_S = 60.0
_COUNTED = {LabelState.DONE: LABEL_PUSHED, LabelState.SENDING: LABEL_RETRIES}


class Notes(msgspec.Struct, frozen=True, array_like=True):
    """A request's notes for the pusher."""

    tenant: str
    project: int
    task: int
    endpoint: str = ""


class PredictionReason(Enum):
    """Why tasks are requested.

    `CREATED`: they are new. `ASKED`: Label Studio asks; a task whose prediction was sent a while ago is scored again.
    `ORDERED`: a person asks; failed tasks are scored again too.
    """

    CREATED = "created"
    ASKED = "asked"
    ORDERED = "ordered"


class StoredTasks(NamedTuple):
    """The tasks that were queued, and refused for lack of room."""

    queued: int
    refused: int


class TaskIntake:
    """One gateway's intake; `arrived` is set when `feed` may have work."""

    def __init__(  # noqa: PLR0913 - keywords
        self,
        settings: Settings,
        *,
        tasks: LabelTasks,
        requests: AsyncRequests,
        book: MappingBook,
        files: Files,
        studio: LabelStudio | None,
        counts: ModelCounts,
        auth: Auth | None,
    ) -> None:
        self._settings = settings.labeling
        self._limits = settings.requests
        self._tasks = tasks
        self._requests = requests
        self._book = book
        self._files = files
        self._studio = studio
        self._counts = counts
        self.arrived = asyncio.Event()
        self._pace = TaskPace(auth, self.arrived.set)

    async def put(
        self,
        board: Board,
        mapping: TaskMapping,
        served: ServedVersion,
        tasks: Sequence[Mapping[str, Any]],
        reason: PredictionReason,
    ) -> StoredTasks:
        """Stores the tasks that fit."""
        ids = [task_id(task) for task in tasks]
        known = await self._tasks.get(board, ids)
        entries = await asyncio.to_thread(self._entries, board, mapping, served.version, tasks, known, reason)
        if not entries:
            return StoredTasks(0, 0)
        ttl_s, limit = self._settings.record_ttl_s, self._settings.max_waiting_tasks
        placed = await self._tasks.put(board, entries, ttl_s=ttl_s, limit=limit)
        taken = StoredTasks(placed.count(PutOutcome.STORED), placed.count(PutOutcome.REFUSED))
        if taken.queued:
            self.arrived.set()
            self._counts.add(served.spec.name, served.version, LABEL_QUEUED, taken.queued)
        return taken

    def full(self, board: Board, taken: StoredTasks) -> QueueFull:
        """Returns the error for tasks that did not fit."""
        return QueueFull(
            f"{taken.refused} tasks of project {board.project} were not queued for model '{board.model}', "
            f"{taken.queued} were: {self._settings.max_waiting_tasks} wait, the most that "
            "QINFER_LABELING__MAX_WAITING_TASKS allows; queue the others later by "
            f"POST /v1/label-studio/{board.model}/projects/{board.project}/tasks",
            _LATER_S,
        )

    def _entries(
        self,
        board: Board,
        mapping: TaskMapping,
        version: int,
        tasks: Sequence[Mapping[str, Any]],
        known: Sequence[LabelTask | None],
        reason: PredictionReason,
    ) -> list[LabelTask]:
        now_s, entries = self._requests.now_s(), []
        about = hashlib.sha256(mapping.model_dump_json(exclude={"project", "name", "mode", "priority"}).encode())
        for task, entry in zip(tasks, known, strict=True):
            number = task_id(task)
            data = msgspec.json.encode(task.get("data"), order="deterministic")
            content = about.copy()
            content.update(data)
            name = f"ls-{board.project}-{number}-v{version}-{content.hexdigest()[:16]}"
            attempt = _attempt(entry, name, reason, now_s)
            if attempt:
                entries.append(
                    LabelTask(
                        task=number,
                        request_id=_request_id(name, attempt),
                        version=version,
                        attempt=attempt,
                        created_at=now_s,
                        updated_at=now_s,
                        data=data if len(data) <= MAX_DATA_BYTES else b"",
                    )
                )
        return entries

    async def feed(self, board: Board) -> int:
        """Turns waiting tasks into requests; 0 = no more now."""
        room = self._pace.task_capacity(board, _AT_ONCE)
        if not room:
            return 0
        claimed = await self._tasks.claim(board, room, lease_s=LEASE_S)
        self._pace.took(board, len(claimed), room)
        fed = await asyncio.gather(*(self._feed(board, entry) for entry in claimed), return_exceptions=True)
        if error := next((each for each in fed if isinstance(each, BaseException)), None):
            raise error
        return len(claimed) if all(fed) else 0

    async def _feed(self, board: Board, entry: LabelTask) -> bool:
        """Returns whether there may be room for more."""
        try:
            async with asyncio.timeout(_SUBMIT_S):
                made = await self._submit(board, entry)
        except DeliveryError:
            raise
        except TimeoutError:
            await self._wait(board, entry, _TOO_SLOW, self._pause_s(entry))
        except QuotaExceeded as error:  # the rate never makes a task fail
            await self.move(board, entry, LabelState.WAITING, error=error.message, wait_s=error.retry_after_s)
            return False
        except Overloaded as error:
            await self._wait(board, entry, error.message, error.retry_after_s)
            return False
        except QinferError as error:
            if error.retryable:
                await self._wait(board, entry, error.message, self._pause_s(entry))
            else:
                await self.fail(board, entry, error.message)
        except Exception as error:  # the others continue
            logger.exception("task can't be queued", extra={"model": board.model, "request_id": entry.request_id})
            await self.fail(board, entry, InferenceFailed(Failure.from_error(error).message).message)
        else:
            await self.move(board, made, LabelState.OPEN)
        return True

    async def _submit(self, board: Board, entry: LabelTask) -> LabelTask:
        """Submits a task's request; the returned entry has the version."""
        is_shared = self._requests.dispatcher.has_tenants
        mapping = await self._book.for_tenant(board.model, board.project, board.tenant, is_shared=is_shared)
        is_endpoint = board.model in self._requests.dispatcher.endpoints.by_name
        served = self._requests.resolve(board.model, mapping.version if is_endpoint else entry.version)
        task = await self.task_of(board, entry)
        request = await request_of(mapping, served, task, self._files.fetcher_for(board.tenant, mapping.project))
        context = CallerContext(board.tenant)
        self._requests.dispatcher.aim(context, request)
        if not request.endpoint:
            request.version = entry.version
        longest_s = float(served.spec.parameters.get(MAX_TIMEOUT, self._limits.max_timeout_s))
        submission = SubmitOptions(
            body_hash=entry.request_id,
            timeout_s=min(self._settings.task_timeout_s, longest_s),
            request_id=entry.request_id,
            outbox=OUTBOX,
            notes=msgspec.msgpack.encode(Notes(board.tenant, board.project, entry.task, request.endpoint)),
            result_ttl_s=self._settings.result_ttl_s,
        )
        with self._pace.charged(board.tenant):
            await self._requests.submit(context, request, OutputPlan(), submission)
        model = request.model if request.endpoint else ""
        return msgspec.structs.replace(entry, model=model, version=request.version)

    def outboxes(self, model: str) -> set[str]:
        """Returns the models where a mapping's requests may end."""
        routed = self._requests.dispatcher.endpoints.by_name.get(model)
        return {model} | ({target.model for target in routed.endpoint.answering} if routed is not None else set())

    async def task_of(self, board: Board, entry: LabelTask) -> dict[str, Any]:
        """Returns a task's data, stored or fetched."""
        if entry.data:
            return {"id": entry.task, "data": msgspec.json.decode(entry.data)}
        if self._studio is None:
            raise InferenceFailed("the task's data is too large to be kept, and QINFER_LABELING__URL is not set")
        task = await self._studio.task(entry.task)
        if task.get("project", board.project) != board.project:
            raise InvalidRequest(f"task {entry.task} is not of project {board.project} in Label Studio")
        return task

    async def move(
        self, board: Board, entry: LabelTask, state: LabelState, *, error: str = "", wait_s: float = 0.0
    ) -> None:
        """Stores the state of a task."""
        await self.move_all(board, [msgspec.structs.replace(entry, error=error)], state, wait_s=wait_s)

    async def fail(
        self, board: Board, entry: LabelTask, error: str, reason: LabelFailure = LabelFailure.NOT_QUEUED
    ) -> None:
        """Stores a failure; `error` is for people, `reason` for metrics."""
        entry = msgspec.structs.replace(entry, error=error)
        await self.move_all(board, [entry], LabelState.FAILED, field=LABEL_FAILED + reason)

    async def move_all(
        self, board: Board, entries: Sequence[LabelTask], state: LabelState, *, wait_s: float = 0.0, field: str = ""
    ) -> None:
        """Stores the state of tasks, and drops finished tasks' data.

        Waiting tasks rest for `wait_s`; `field` counts tasks that were unfinished.
        """
        now_s = self._requests.now_s()
        moved = [
            msgspec.structs.replace(each, state=state, updated_at=now_s, data=b"" if state.is_over else each.data)
            for each in entries
        ]
        stored = await self._tasks.move(board, moved, ttl_s=self._settings.record_ttl_s, wait_s=wait_s)
        if field := field or _COUNTED.get(state, ""):
            for each, is_stored in zip(entries, stored, strict=True):
                if is_stored and each.version and not each.state.is_over:
                    self._counts.add(each.model or board.model, each.version, field)

    def _pause_s(self, entry: LabelTask) -> float:
        return min(max(self._requests.now_s() - entry.created_at, _LATER_S), _MUCH_LATER_S)

    async def _wait(self, board: Board, entry: LabelTask, error: str, wait_s: float) -> None:
        if self._requests.now_s() - entry.created_at > self._settings.task_timeout_s:
            await self.fail(board, entry, f"it was not queued in time: {error}")
        else:
            await self.move(board, entry, LabelState.WAITING, error=error, wait_s=wait_s)


def _attempt(entry: LabelTask | None, name: str, reason: PredictionReason, now_s: float) -> int:
    """Returns the new attempt's number; 0 = the prediction was requested already."""
    if entry is None or entry.request_id not in (name, _request_id(name, entry.attempt)):
        return 1
    is_old = now_s - entry.updated_at > _ASKED_AGAIN_S
    wanted = {
        PredictionReason.CREATED: False,
        PredictionReason.ASKED: entry.state is LabelState.DONE and is_old,
        PredictionReason.ORDERED: entry.state.is_over,
    }
    return entry.attempt + 1 if wanted[reason] else 0


def _request_id(name: str, attempt: int) -> str:
    return name if attempt == 1 else f"{name}-{attempt}"
