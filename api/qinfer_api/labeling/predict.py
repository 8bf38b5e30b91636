"""`predict`: each task becomes one request of the model's queue, which batches them; answers are in the tasks' order.

The response follows Label Studio 1.23: an entry of `results` is a prediction or a list of them. A failed task's entry
has no `result`, so that it is asked for again; an empty `result` would be stored.
"""

import asyncio
import contextlib
import logging
import math
import time
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from qinfer.core.messages import Failure, OutgoingRequest, Response
from qinfer.errors import DeadlineExceeded, ErrorCode, InferenceFailed, Overloaded, QinferError
from qinfer.labeling.mapping import Mapping as TaskMapping
from qinfer.labeling.rules import LabelConfig
from qinfer.models.catalog import ServedVersion
from qinfer.submission.pending import PendingCall
from qinfer_api.auth import CallerContext
from qinfer_api.dispatcher import Dispatcher
from qinfer_api.http.infer import FutureSink
from qinfer_api.labeling.studio import Files
from qinfer_api.status import AGAIN

logger = logging.getLogger(__name__)

MAX_AT_ONCE = 256
"""The most tasks of a call in the queue: enough to fill batches, too few to fill a lane."""

MADE_AT_ONCE = 16
"""The most tasks of a call whose files are in memory."""

LARGE_BYTES = 256 * 1024
"""Threads handle larger tasks and outputs."""

_LONGEST_PAUSE_S = 5.0
_LATER = {*AGAIN, ErrorCode.DEADLINE_EXCEEDED}
_TIME_IS_OVER = "the call of predict had no time left for this task; ask for it again"


class FailedTask(NamedTuple):
    """The failure of one task."""

    error: QinferError

    def as_json(self) -> dict[str, Any]:
        """Returns an entry that Label Studio does not store."""
        return {"error": self.error.message}


class PredictionCall(NamedTuple):
    """A call of `predict`; `served` is an endpoint's stable target."""

    context: CallerContext
    mapping: TaskMapping
    served: ServedVersion
    label_config: LabelConfig | None


class PredictionRun:
    """Predicts the tasks of a call while the caller waits."""

    def __init__(
        self,
        dispatcher: Dispatcher,
        files: Files,
        call: PredictionCall,
        tasks: Sequence[Mapping[str, Any]],
        timeout_s: float,
    ) -> None:
        self._dispatcher = dispatcher
        self._files = files
        self._call = call
        self._ends_s = time.monotonic() + timeout_s
        self._tasks = tasks
        self._answers: list[dict[str, Any] | FailedTask | None] = [None] * len(tasks)
        self._taken = 0
        self._answered = asyncio.Event()
        self._refused: Overloaded | None = None
        self._making = asyncio.Semaphore(MADE_AT_ONCE)

    async def all(self) -> list[dict[str, Any] | FailedTask]:
        """Returns each task's prediction or failure, in order."""
        places = iter(range(len(self._tasks)))
        async with asyncio.TaskGroup() as group:
            for _ in range(min(len(self._tasks), MAX_AT_ONCE)):
                group.create_task(self._some(places))
        if self._refused is not None:
            raise self._refused
        late = FailedTask(DeadlineExceeded(_TIME_IS_OVER))
        answers = [late if each is None else each for each in self._answers]
        errors = [each.error for each in answers if isinstance(each, FailedTask) and each.error.code in _LATER]
        if errors and len(errors) == len(answers):
            raise errors[0]
        return answers

    async def _some(self, places: Iterator[int]) -> None:
        for place in places:
            if self._refused is not None or self._left_s() <= 0:
                return
            try:
                self._answers[place] = await self._one(self._tasks[place])
            except QinferError as error:
                error.__traceback__ = error.__context__ = None  # they hold the task's data
                self._answers[place] = FailedTask(error)
            except Exception as error:  # the others are answered
                logger.exception("task failed", extra={"model": self._call.mapping.model, "error": str(error)})
                self._answers[place] = FailedTask(InferenceFailed(Failure.from_error(error).message))

    async def _one(self, task: Mapping[str, Any]) -> dict[str, Any]:
        sink = FutureSink()
        async with self._making:
            await asyncio.sleep(0)  # failing tasks would block the loop
            pending = await self._sent(task, sink)
        try:
            response = await sink.response
        finally:
            self._dispatcher.cancel(pending)
            self._answered.set()
            self._answered = asyncio.Event()
        return await prediction_of(self._call.mapping, task, response, self._call.label_config)

    async def _sent(self, task: Mapping[str, Any], sink: FutureSink) -> PendingCall:
        mapping, context = self._call.mapping, self._call.context
        fetch = self._files.fetcher_for(context.tenant, mapping.project)
        request = await request_of(mapping, self._call.served, task, fetch)
        self._dispatcher.aim(context, request)
        if not request.endpoint:
            request.version = self._call.served.version
        while True:
            left_s = self._left_s()
            if left_s <= 0:
                raise DeadlineExceeded(_TIME_IS_OVER)
            try:
                pending = self._dispatcher.submit(self._call.context, request, sink, left_s)
            except Overloaded as error:
                if not self._taken or self._dispatcher.draining:
                    self._refused = error
                    raise error from None
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(min(error.retry_after_s, left_s, _LONGEST_PAUSE_S)):
                        await self._answered.wait()
            else:
                self._taken += 1
                return pending

    def _left_s(self) -> float:
        return self._ends_s - time.monotonic()


async def request_of(
    mapping: TaskMapping, served: ServedVersion, task: Mapping[str, Any], fetch: Callable[[str], Awaitable[bytes]]
) -> OutgoingRequest:
    """Creates a task's request, with files."""
    names = mapping.files(task)
    contents = {name: await fetch(name) for name in names}
    if sum(map(len, contents.values())) > LARGE_BYTES or _is_long(task):
        request = await asyncio.to_thread(mapping.request, task, served.spec, contents)
    else:
        request = mapping.request(task, served.spec, contents)
    request.client_id = str(task.get("id", ""))[:40]
    return request


async def prediction_of(
    mapping: TaskMapping, task: Mapping[str, Any], response: Response, label_config: LabelConfig | None
) -> dict[str, Any]:
    """Creates a prediction in Label Studio's format."""
    if response.failure is not None:
        raise PredictionFailed(response.failure)
    if sum(output.nbytes for output in response.outputs) > LARGE_BYTES:
        made = await asyncio.to_thread(mapping.prediction, task, response, label_config)
    else:
        made = mapping.prediction(task, response, label_config)
    found = made.as_json()
    if not math.isfinite(found["score"] or 0.0):
        found["score"] = None
    return found


class PredictionFailed(QinferError):
    """A failure from the queue, with its code."""

    def __init__(self, failure: Failure) -> None:
        super().__init__(failure.message)
        known = failure.code in ErrorCode.__members__.values()
        self.code = ErrorCode(failure.code) if known else ErrorCode.INTERNAL  # type: ignore[misc]  # of this one only
        self.retryable = failure.retryable  # type: ignore[misc]  # as its code is


def _is_long(task: Mapping[str, Any]) -> bool:
    data = task.get("data")
    return isinstance(data, dict) and any(
        isinstance(value, str | list) and len(value) > LARGE_BYTES // 16 for value in data.values()
    )
