"""`predict`: N tasks in, N answers out, in order; each task is one request of the model's queue, which batches them.

What Label Studio 1.23 does with an answer decides what one looks like. An entry of `results` is a prediction, or a list
of them; one without `result` is logged there and left out, and the task is asked for again later, which is what a task
that failed wants. A prediction with an empty `result` would be stored, and the task never asked for again.
"""

import asyncio
import contextlib
import logging
import math
import time
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from qinfer.core.messages import Failure, InferRequest, Response
from qinfer.errors import DeadlineExceeded, ErrorCode, InferenceFailed, Overloaded, QinferError
from qinfer.labeling.label_config import LabelConfig
from qinfer.labeling.mapping import Mapping as TaskMapping
from qinfer.models.catalog import Served
from qinfer.submission.pending import Pending
from qinfer_api.auth import Context
from qinfer_api.dispatcher import Dispatcher
from qinfer_api.http.infer import FutureSink
from qinfer_api.labeling.files import Files
from qinfer_api.status import AGAIN

logger = logging.getLogger(__name__)

MAX_AT_ONCE = 256
"""Tasks of one call that are in the queue at a time: enough to fill batches, too few to fill a lane."""

MADE_AT_ONCE = 16
"""Tasks that are made requests of at a time. Their files are in memory, and between them others get their turn."""

LARGE_BYTES = 256 * 1024
"""The most bytes of a task or an output that is worked on outside a thread."""

_LONGEST_PAUSE_S = 5.0
_LATER = {*AGAIN, ErrorCode.DEADLINE_EXCEEDED}
_TIME_IS_OVER = "the call of predict had no time left for this task; ask for it again"


class Failed(NamedTuple):
    """The failure of one task."""

    error: QinferError

    def as_json(self) -> dict[str, Any]:
        """Returns an entry that Label Studio logs and does not store."""
        return {"error": self.error.message}


class Call(NamedTuple):
    """A call of `predict`.

    Attributes:
        context: Who asks, authorized.
        mapping: How tasks become requests, and responses predictions.
        served: The model; of an endpoint, its stable target.
        label_config: The project's; `None` = it was not said.
    """

    context: Context
    mapping: TaskMapping
    served: Served
    label_config: LabelConfig | None


class Predictor:
    """The predictions that a caller waits for.

    Args:
        dispatcher: The queue.
        files: Where the files of tasks come from.
        timeout_s: How long a call may take.
    """

    def __init__(self, dispatcher: Dispatcher, files: Files, timeout_s: float) -> None:
        self._dispatcher = dispatcher
        self._files = files
        self._timeout_s = timeout_s

    async def predict(self, call: Call, tasks: Sequence[Mapping[str, Any]]) -> "list[dict[str, Any] | Failed]":
        """Returns an answer for each task, in their order: a prediction as Label Studio has it, or why there is none.

        Raises:
            QinferError: No task was taken, because the server has no room for any, or all have failed for reasons of
                the server's that pass.
        """
        run = _Run(self._dispatcher, self._files, call, tasks, self._timeout_s)
        answers = await run.all()
        errors = [each.error for each in answers if isinstance(each, Failed) and each.error.code in _LATER]
        if errors and len(errors) == len(answers):
            raise errors[0]
        return answers


class _Run:
    """The tasks of one call on their way."""

    def __init__(
        self, dispatcher: Dispatcher, files: Files, call: Call, tasks: Sequence[Mapping[str, Any]], timeout_s: float
    ) -> None:
        self._dispatcher = dispatcher
        self._files = files
        self._call = call
        self._ends_s = time.monotonic() + timeout_s
        self._tasks = tasks
        self._answers: list[dict[str, Any] | Failed | None] = [None] * len(tasks)
        self._taken = 0
        self._answered = asyncio.Event()
        self._refused: Overloaded | None = None
        self._making = asyncio.Semaphore(MADE_AT_ONCE)

    async def all(self) -> list[dict[str, Any] | Failed]:
        places = iter(range(len(self._tasks)))
        async with asyncio.TaskGroup() as group:
            for _ in range(min(len(self._tasks), MAX_AT_ONCE)):
                group.create_task(self._some(places))
        if self._refused is not None:
            raise self._refused
        late = Failed(DeadlineExceeded(_TIME_IS_OVER))
        return [late if each is None else each for each in self._answers]

    async def _some(self, places: Iterator[int]) -> None:
        for place in places:
            if self._refused is not None or self._left_s() <= 0:
                return
            try:
                self._answers[place] = await self._one(self._tasks[place])
            except QinferError as error:
                error.__traceback__ = error.__context__ = None  # which keep all that the task had in memory
                self._answers[place] = Failed(error)
            except Exception as error:  # the boundary of a task: the others are answered, whatever it is
                logger.exception("task failed", extra={"model": self._call.mapping.model, "error": str(error)})
                self._answers[place] = Failed(InferenceFailed(Failure.of(error).message))

    async def _one(self, task: Mapping[str, Any]) -> dict[str, Any]:
        """Gets the prediction of a task.

        Raises:
            QinferError: It fails; the others do not.
        """
        sink = FutureSink()
        async with self._making:
            await asyncio.sleep(0)  # a task that fails at once waits for nothing
            pending = await self._sent(task, sink)
        try:
            response = await sink.response
        finally:
            self._dispatcher.cancel(pending)  # does nothing once it is answered
            self._answered.set()
            self._answered = asyncio.Event()
        return await prediction_of(self._call.mapping, task, response, self._call.label_config)

    async def _sent(self, task: Mapping[str, Any], sink: FutureSink) -> Pending:
        """Sends the request of a task, again and again while the server has no room for it."""
        mapping, context = self._call.mapping, self._call.context
        fetch = self._files.of(context.tenant, mapping.project)
        request = await request_of(mapping, self._call.served, task, fetch)
        if not self._dispatcher.choose(context, request):
            request.version = self._call.served.version
        while True:
            left_s = self._left_s()
            if left_s <= 0:
                raise DeadlineExceeded(_TIME_IS_OVER)
            try:
                pending = self._dispatcher.submit(self._call.context, request, sink, left_s)
            except Overloaded as error:
                if not self._taken or self._dispatcher.draining:
                    self._refused = error  # nothing is under way: the whole call can be made again
                    raise error from None
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(min(error.retry_after_s, left_s, _LONGEST_PAUSE_S)):
                        await self._answered.wait()  # which makes room
            else:
                self._taken += 1
                return pending

    def _left_s(self) -> float:
        return self._ends_s - time.monotonic()


async def request_of(
    mapping: TaskMapping, served: Served, task: Mapping[str, Any], fetch: Callable[[str], Awaitable[bytes]]
) -> InferRequest:
    """Makes the request of a task, of its files too.

    Raises:
        QinferError: The task does not fit the mapping, or a file can't be had.
    """
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
    """Makes the prediction of a task, as Label Studio has it: `result`, `score`, `model_version`.

    Raises:
        QinferError: The response is a failure, or does not fit the mapping or the label config.
    """
    if response.failure is not None:
        raise Unanswered(response.failure)
    if sum(output.nbytes for output in response.outputs) > LARGE_BYTES:
        made = await asyncio.to_thread(mapping.prediction, task, response, label_config)
    else:
        made = mapping.prediction(task, response, label_config)
    found = made.as_json()
    if not math.isfinite(found["score"] or 0.0):
        found["score"] = None
    return found


class Unanswered(QinferError):
    """The queue gave a failure instead of outputs; its code is that of the failure."""

    def __init__(self, failure: Failure) -> None:
        super().__init__(failure.message)
        known = failure.code in ErrorCode.__members__.values()
        self.code = ErrorCode(failure.code) if known else ErrorCode.INTERNAL  # type: ignore[misc]  # of this one only
        self.retryable = failure.retryable  # type: ignore[misc]  # as its code is


def _is_long(task: Mapping[str, Any]) -> bool:
    """Returns whether a task has a field that takes long to read."""
    data = task.get("data")
    return isinstance(data, dict) and any(
        isinstance(value, str | list) and len(value) > LARGE_BYTES // 16 for value in data.values()
    )
