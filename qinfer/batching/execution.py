"""One batch on its way through a model instance: the items, what the backend answered, and where the time went.

It is the `Context` that backends answer through. One thread at a time touches it: the event loop makes it, an
instance's thread runs it, the event loop reads it. Only `call` may come from several threads of the backend at once.
"""

import itertools
import logging
import secrets
import time
from collections.abc import Mapping, Sequence
from typing import Protocol

import msgspec

from qinfer.backends.base import Backend, Batch
from qinfer.batching.policy import Item
from qinfer.delivery.base import Lease
from qinfer.errors import (
    Cancelled,
    DeliveryError,
    InferenceFailed,
    OutputMismatch,
    Overloaded,
    QinferError,
    RequestError,
)
from qinfer.messages import InferRequest, Response, Scalar
from qinfer.tensors import Tensor

logger = logging.getLogger(__name__)

_SHARED = (OutputMismatch, Overloaded, DeliveryError, Cancelled)
"""Errors that are no single item's: the model answers wrongly, a call finds the queue full or away, nobody waits."""

_PROCESS, _numbers = secrets.token_hex(4), itertools.count(1)

TOLD = 16
"""Requests that a log line about a batch names at most."""

Answer = tuple[Tensor, ...] | QinferError
"""What an item gets: its outputs, or why there are none."""


class Pending(Item, kw_only=True, eq=False, gc=False):
    """A request in a worker's hands.

    Attributes:
        lease: The lease on its entry.
        request: The decoded request.
        lost: The lease is lost: somebody else answers, so whatever was done for it is discarded.
    """

    lease: Lease
    request: InferRequest
    lost: bool = False

    def lose(self) -> None:
        """Takes note that the lease is lost."""
        self.lost = True


class Caller(Protocol):
    """The way from one model to another."""

    def call(self, request: InferRequest, deadline_s: float) -> Response:
        """Runs a request on the model that it names; blocks an instance's thread. See `Context.call`.

        Args:
            request: Its `timeout_s` shortens the deadline, unless it is 0; other stamps than `tenant` and `trace` have
                no effect.
            deadline_s: When the answer has to be there, in the broker's time.

        Raises:
            QinferError: As `Context.call` says.
        """
        ...


class Execution:
    """A batch that runs, or ran; see the module docstring for who may touch it when.

    Args:
        items: The batch's items, in batch order.
        batch: The assembled arrays.
        input_ns: How long assembling took.
        caller: Takes the batch's calls to other models; without one they fail.
        apart: It is half of a batch that raised: its items must not be merged with others.
    """

    __slots__ = (
        "_batch_id",
        "_caller",
        "_refusals",
        "answers",
        "apart",
        "batch",
        "begin_ns",
        "earlier",
        "end_ns",
        "error",
        "input_ns",
        "items",
        "parameters",
        "respond_ns",
    )

    def __init__(
        self,
        items: Sequence[Pending],
        batch: Batch,
        input_ns: int,
        caller: Caller | None = None,
        *,
        apart: bool = False,
    ) -> None:
        self.items = items
        self.batch = batch
        self.input_ns = input_ns
        self.apart = apart
        self._caller = caller
        self._refusals: tuple[RequestError, ...] = ()
        self._batch_id = ""
        self.answers: list[Answer | None] = [None] * len(items)
        self.parameters: dict[int, Mapping[str, Scalar]] = {}
        """What the model said besides the outputs of its final answers, by item."""
        self.earlier: list[tuple[int, Answer, Mapping[str, Scalar]]] = []
        """Responses that were not final, as (item, answer, parameters), in order."""
        self.error: QinferError | None = None
        self.begin_ns = self.respond_ns = self.end_ns = 0

    def respond(
        self, item: int, outputs: Answer, *, final: bool = True, parameters: Mapping[str, Scalar] | None = None
    ) -> None:
        """Takes an answer from the backend; see `Context.respond`.

        Raises:
            OutputMismatch: The item has its final answer already.
        """
        if not self.respond_ns:
            self.respond_ns = time.perf_counter_ns()
        if self.answers[item] is not None:
            raise OutputMismatch(f"the model answered item {item} of its batch after that item's final answer")
        if not final:
            self.earlier.append((item, outputs, parameters or {}))
            return
        self.answers[item] = outputs
        if parameters:
            self.parameters[item] = parameters

    def cancelled(self, item: int) -> bool:
        """Tells whether nobody waits for this item any more."""
        return self.items[item].lost

    def call(self, request: InferRequest) -> Response:
        """Runs another model; see `Context.call`."""
        if self._caller is None:
            raise InferenceFailed("this model runs where it can't call other models")
        waited_for = [item for item in self.items if not item.lost]
        if not waited_for:
            raise Cancelled("nobody waits for this batch any more")
        first = waited_for[0].request
        inherited = msgspec.structs.replace(
            request, tenant=request.tenant or first.tenant, trace=request.trace or first.trace
        )
        try:
            return self._caller.call(inherited, min(item.deadline_s for item in waited_for))
        except RequestError as error:
            self._refusals = (*self._refusals, error)
            raise

    def run(self, backend: Backend) -> None:
        """Executes the batch; afterwards every item has an answer, or is `unanswered` and has to run again.

        Raises nothing: the instance's thread must live.
        """
        self.begin_ns = time.perf_counter_ns()
        try:
            backend.execute(self.batch, self)
            # Not `None in`, which would ask each tuple whether it equals None.
            if unanswered := len([True for answer in self.answers if answer is None]):
                self.error = OutputMismatch(
                    f"the model answered {len(self.items) - unanswered} of the {len(self.items)} items "
                    "of its batch; every item needs a final answer"
                )
        except QinferError as error:
            self.error = error
        except KeyboardInterrupt:
            raise
        except BaseException as error:  # the boundary to the model's code, which may even call `sys.exit`
            # Once for each batch: what it is cut into mostly raises the same.
            level = logging.DEBUG if self.apart else logging.ERROR
            logger.log(level, "execution failed", exc_info=True, extra=self._told())
            self.error = InferenceFailed(str(error) or type(error).__name__)
        self.end_ns = time.perf_counter_ns()
        if self.error is not None and (len(self.items) == 1 or isinstance(self.error, _SHARED)):
            self.answers = [self.error if answer is None else answer for answer in self.answers]
        if self._refusals:
            self.answers = [None if answer is None else self._own(answer) for answer in self.answers]
            self.earlier = [(item, self._own(answer), said) for item, answer, said in self.earlier]

    @property
    def batch_id(self) -> str:
        """This execution's own id, unique among all workers; made when it is first asked for."""
        if not self._batch_id:
            self._batch_id = f"{_PROCESS}-{next(_numbers)}"
        return self._batch_id

    @property
    def unanswered(self) -> list[Pending]:
        """The items that somebody waits for and that have no answer, because their batch raised: run them again."""
        return [item for item, answer in zip(self.items, self.answers, strict=True) if answer is None and not item.lost]

    def _told(self) -> dict[str, object]:
        """Returns what a log line about it says."""
        requests = [item.request for item in self.items]
        return {
            "model": requests[0].model,
            "version": requests[0].version,
            "batch_id": self.batch_id,
            "items": len(requests),
            "request_ids": [request.id for request in requests[:TOLD]],
        }

    def _own(self, answer: Answer) -> Answer:
        """Makes the refusal of a call this model's failure: its client sent nothing wrong."""
        if isinstance(answer, RequestError) and answer in self._refusals:
            return InferenceFailed(f"a call failed: {answer.message}")
        return answer

    @property
    def infer_ns(self) -> int:
        """Time from the start of the execution to the first answer."""
        return (self.respond_ns or self.end_ns) - self.begin_ns

    @property
    def output_ns(self) -> int:
        """Time from the first answer to the end of the execution."""
        return self.end_ns - (self.respond_ns or self.end_ns)
