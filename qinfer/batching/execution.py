"""One batch on its way through a model instance: its items, the backend's answers, and the times.

    requests → assemble → Batch → Execution → Responder → responses

An execution is the `Context` that backends answer through. One thread at a time touches it: the event loop, or an
instance's thread. Only `call` may come from several threads at once.
"""

import itertools
import logging
import secrets
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Protocol, TypeVar

import msgspec

from qinfer.backends.base import OTHER_ROWS, Backend, Batch, OneResponse, Room
from qinfer.batching.policy import Item
from qinfer.core.call_chain import extended
from qinfer.core.messages import (
    Failure,
    InferRequest,
    OutgoingRequest,
    ResourceHolder,
    Response,
    Scalar,
    Timing,
    outgoing_call,
)
from qinfer.core.messages import SequenceFlags as Flags
from qinfer.errors import (
    Cancelled,
    DeliveryError,
    InferenceFailed,
    OutputMismatch,
    Overloaded,
    QinferError,
    RequestError,
)
from qinfer.models.spec import ModelSpec
from qinfer.observe.logs import ErrorLogger
from qinfer.observe.stats import StatsTally
from qinfer.queue.entries import Lease
from qinfer.tensors import Tensor

logger = logging.getLogger(__name__)

T = TypeVar("T")

SHARED = (OutputMismatch, Overloaded, DeliveryError, Cancelled)
"""Errors of a whole batch: wrong answers, a failing queue, callers that left."""

_PROCESS, _numbers = secrets.token_hex(4), itertools.count(1)

TOLD = 16
"""The most requests in a log line."""

Answer = tuple[Tensor, ...] | QinferError


class WorkItem(Item, kw_only=True, eq=False, gc=False):
    """A held request; without its lease (`lost`), its result is discarded.

    With `is_current`, its tensors are in another process's memory, and were the request's if it is true after a copy.
    """

    lease: Lease
    request: InferRequest
    lost: bool = False
    is_current: Callable[[], bool] | None = None

    def lose(self) -> None:
        """Takes note that the lease is lost."""
        self.lost = True


class ModelCaller(Protocol):
    """Calls other models, with `Context.call`'s errors."""

    def call(self, request: OutgoingRequest, deadline_s: float) -> Response:
        """Runs a request on its model; blocks an instance's thread.

        A `timeout_s` above 0 shortens the deadline.
        """
        ...

    def stream(self, request: OutgoingRequest, deadline_s: float) -> Iterator[Response]:
        """Runs a request with any number of responses, the last of them `final`.

        Waiting for a response blocks, and raises on failure. Dropping the iterator cancels the request.
        """
        ...


class Execution(msgspec.Struct, OneResponse, eq=False):
    """A batch that runs or has run.

    Attributes:
        apart: Whether it is part of a batch that raised: its items must not be merged with others.
        earlier: Responses before the final responses, as (item, answer, parameters).
        rows_again: Executed rows of iterated items without an answer.
        gives_way: Its calls were refused to free the instance, or a request had ended; it runs again.
    """

    items: Sequence[WorkItem]
    batch: Batch
    input_ns: int
    caller: ModelCaller | None = None
    assemble: Callable[[Room | None], Batch] | None = None
    apart: bool = False
    answers: list[Answer | None] = []
    parameters: dict[int, Mapping[str, Scalar]] = {}
    earlier: list[tuple[int, Answer, Mapping[str, Scalar]]] = []
    error: QinferError | None = None
    rows_again: int = 0
    gives_way: bool = False
    begin_ns: int = 0
    respond_ns: int = 0
    end_ns: int = 0
    _refusals: tuple[RequestError, ...] = ()
    _batch_id: str = ""

    def __post_init__(self) -> None:
        self.answers = [None] * len(self.items)

    def respond(
        self, item: int, outputs: Answer, *, final: bool = True, parameters: Mapping[str, Scalar] | None = None
    ) -> None:
        """Takes an answer from the backend; see `Context.respond`."""
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
        """Returns whether this item's caller has left."""
        return self.items[item].lost

    def call(self, request: InferRequest, made_for: int = -1) -> Response:
        """Runs another model; see `Context.call`."""
        return self._call_model(request, made_for, lambda caller: caller.call)

    def stream(self, request: InferRequest, made_for: int = -1) -> Iterator[Response]:
        """Runs another model; see `Context.stream`."""
        return self._call_model(request, made_for, lambda caller: caller.stream)

    def _call_model(
        self, request: InferRequest, made_for: int, way: Callable[[ModelCaller], Callable[[OutgoingRequest, float], T]]
    ) -> T:
        if self.caller is None:
            raise InferenceFailed("this model runs where it can't call other models")
        waited_for = [item for item in self.items if not item.lost]
        if not waited_for:
            raise Cancelled("every caller of this batch has left")
        origin, sequence = _origin(self.items, request, waited_for[0].request)
        is_told = made_for >= 0
        traced = [self.batch.requests[made_for]] if is_told else [item.request for item in waited_for]
        inherited = outgoing_call(request, extended([item.request.holders for item in waited_for], self._holder()))
        inherited.tenant = request.tenant or origin.tenant
        inherited.trace = request.trace or (traced[0] if is_told else origin).trace
        inherited.sequence = sequence
        inherited.calls = next((each.calls for each in traced if each.calls is not None), None)
        try:
            return way(self.caller)(inherited, min(item.deadline_s for item in waited_for))
        except RequestError as error:
            self._refusals = (*self._refusals, error)
            raise

    def _holder(self) -> ResourceHolder:
        request = self.items[0].request
        return ResourceHolder("" if self.end_ns else self.batch_id, request.model, {}, request.version)

    def run(self, backend: Backend) -> None:
        """Executes without raising; every item then has an answer or is `unanswered`."""
        self.begin_ns = time.perf_counter_ns()
        try:
            if self.assemble is not None and not self._assembled(self.assemble, getattr(backend, "room", None)):
                self.gives_way, self.end_ns = True, time.perf_counter_ns()
                return
            backend.execute(self.batch, self)
            self.error = self._missing()
        except QinferError as error:
            self.error = error
        except KeyboardInterrupt:
            raise
        except BaseException as error:  # the model's code may call `sys.exit`
            # Log once: its parts mostly raise the same.
            level = logging.DEBUG if self.apart else logging.ERROR
            logger.log(level, "execution failed", exc_info=True, extra=self._log_fields())
            self.error = InferenceFailed(str(error) or type(error).__name__)
        self.end_ns = time.perf_counter_ns()
        if self.error is not None and (len(self.items) == 1 or isinstance(self.error, SHARED)):
            self.answers = [self.error if answer is None else answer for answer in self.answers]
        if self._refusals:
            self.answers = [None if answer is None else self._own(answer) for answer in self.answers]
            self.earlier = [(item, self._own(answer), said) for item, answer, said in self.earlier]

    def _assembled(self, assemble: Callable[[Room | None], Batch], room: Room | None) -> bool:
        """Makes the batch; false = a request has ended, whose memory may have tensors of others, also in the batch."""
        if not self._are_current:
            return False
        self.batch = assemble(room)
        if not self._are_current:
            for array in self.batch.inputs.values():
                if array.flags.writeable:  # in memory that a model's process sees
                    array.fill(0)
            return False
        begin_ns, self.begin_ns = self.begin_ns, time.perf_counter_ns()
        self.input_ns += self.begin_ns - begin_ns
        return True

    @property
    def _are_current(self) -> bool:
        return not [item for item in self.items if item.is_current is not None and not item.is_current()]

    @property
    def batch_id(self) -> str:
        """A unique id, made on first use."""
        if not self._batch_id:
            self._batch_id = new_batch_id()
        return self._batch_id

    def is_one_of(self, tokens: Collection[str]) -> bool:
        """Tells whether these tokens include the execution's own; for any thread."""
        return bool(self._batch_id) and self._batch_id in tokens

    @property
    def unanswered(self) -> list[WorkItem]:
        """The items to run again after an exception."""
        return [item for item, answer in zip(self.items, self.answers, strict=True) if answer is None and not item.lost]

    def _missing(self) -> QinferError | None:
        # `None in` would compare tuples.
        unanswered = len([True for answer in self.answers if answer is None])
        if not unanswered:
            return None
        return OutputMismatch(
            f"the model answered {len(self.items) - unanswered} of the {len(self.items)} items "
            "of its batch; every item needs a final answer"
        )

    def _log_fields(self) -> dict[str, object]:
        requests = [item.request for item in self.items]
        return {
            "model": requests[0].model,
            "version": requests[0].version,
            "batch_id": self.batch_id,
            "items": len(requests),
            "request_ids": [request.id for request in requests[:TOLD]],
        }

    def _own(self, answer: Answer) -> Answer:
        """Returns the answer, with a call's refusal as this model's failure."""
        if isinstance(answer, RequestError) and answer in self._refusals:
            return InferenceFailed(f"a call failed: {answer.message}")
        return answer

    @property
    def infer_ns(self) -> int:
        """Time from the start to the first answer."""
        return (self.respond_ns or self.end_ns) - self.begin_ns

    @property
    def output_ns(self) -> int:
        """Time from the first answer to the end."""
        return self.end_ns - (self.respond_ns or self.end_ns)


def _origin(items: Sequence[WorkItem], call: InferRequest, default: InferRequest) -> tuple[InferRequest, Flags | None]:
    """Returns the request that a call is made for, and its flags with the caller's sequence id.

    The model sees internal ids, because tenants' ids may be equal.
    """
    flags = call.sequence
    if flags is None:
        return default, None
    for item in items:
        told = item.request.sequence
        if told is not None and told.id == flags.id:
            return item.request, msgspec.structs.replace(flags, id=told.callers_id)
    return default, flags


def new_batch_id() -> str:
    """Returns an id that is unique among workers."""
    return f"{_PROCESS}-{next(_numbers)}"


class ResponsePart(msgspec.Struct, frozen=True):
    """A stream's `Response` without its answer."""

    index: int
    final: bool
    parameters: Mapping[str, Scalar]
    timing: Timing
    credit_to: str


_FENCE = ErrorLogger(logging.getLogger(__name__), "observer failed; requests are still answered")


class Observer(Protocol):
    """Observes executions before the answers leave."""

    def executed(self, execution: Execution, begin_s: float) -> None:
        """Records an ended execution; `begin_s` is on the items' clock."""
        ...

    def refused(self, items: Sequence[WorkItem], error: QinferError, now_s: float) -> None:
        """Records items that got an error without execution."""
        ...


class Responder:
    """Makes the responses of one model version.

    If configured, or `strict`, it refuses outputs that contradict the configuration; else it warns once, as in Triton.
    """

    def __init__(
        self, spec: ModelSpec, version: int, observer: Observer | None = None, *, strict: bool = False
    ) -> None:
        self._model = spec.name
        self._version = version
        self._observer = observer
        self._batched = spec.max_batch_size > 0
        self._max_rows = spec.max_batch_size
        self._count = len(spec.outputs)
        self._outputs = {o.name: (o.datatype, o.dims, -1 not in o.dims) for o in spec.outputs}
        self._is_strict = strict or spec.strict_outputs
        # A `model.py` and an ensemble split no rows.
        self._may_have_other_rows = not (self._is_strict or spec.splits) and (spec.backend == "python" or spec.steps)
        self._is_warned = False
        self._fine: dict[str, tuple[str, tuple[int, ...], int]] = {}
        """Each output's last accepted (datatype, shape, rows)."""

    def build_responses(
        self, execution: Execution, begin_s: float, tally: StatsTally
    ) -> tuple[list[WorkItem], list[Response]]:
        """Answers the items that are neither lost nor run again."""
        input_ns, infer_ns, output_ns = execution.input_ns, execution.infer_ns, execution.output_ns
        size, earlier = execution.batch.size, self._earlier(execution) if execution.earlier else None
        queue_ns: list[int] = []
        items: list[WorkItem] = []
        responses: list[Response] = []
        rows_done, failed_ns = execution.rows_again, 0
        for position, item in enumerate(execution.items):
            answer = execution.answers[position]
            if item.lost or answer is None:
                continue
            items.append(item)
            index = 0
            if earlier and (before := earlier.get(position)):
                responses += before
                index = len(before)
            waited_ns = max(int((begin_s - item.enqueued_s) * 1e9) - input_ns, 0)
            response = self._final(item, answer, index, Timing(waited_ns, input_ns, infer_ns, output_ns, size))
            if execution.parameters:
                response = msgspec.structs.replace(response, parameters=execution.parameters.get(position, {}))
            if item.request.calls is not None:
                response = msgspec.structs.replace(response, called=item.request.calls.ended)
            responses.append(response)
            if response.failure is None:
                queue_ns.append(waited_ns)
                rows_done += item.rows
            else:
                tally.failed(response.failure.code)
                failed_ns += waited_ns + input_ns + infer_ns + output_ns
        if queue_ns or rows_done:
            tally.max_rows = self._max_rows
            tally.executed(rows_done, queue_ns, input_ns, infer_ns, output_ns, begin_s)
        if failed_ns:
            tally.spent_failing(failed_ns)
        self.observe(execution, begin_s)
        return items, responses

    def observe(self, execution: Execution, begin_s: float) -> None:
        """Passes an ended execution to the observer."""
        if self._observer is not None:
            with _FENCE:
                self._observer.executed(execution, begin_s)

    def streamed(self, item: WorkItem, answer: Answer | Failure, part: ResponsePart) -> Response:
        """Makes a stream's response, from any thread; a mismatch ends it."""
        outputs: tuple[Tensor, ...] = ()
        failure, final = None, part.final
        if isinstance(answer, Failure):
            failure = answer
        elif not isinstance(answer, tuple):
            failure = Failure.from_error(answer)
        elif problem := self._problem_of_any(answer, due(item.request)):
            failure, final = Failure.from_error(OutputMismatch(problem)), True
        else:
            outputs = answer
        return Response(
            request_id=item.request.id,
            model=self._model,
            version=self._version,
            outputs=outputs,
            failure=failure,
            attempt=item.lease.deliveries,
            index=part.index,
            final=final,
            timing=part.timing,
            parameters=part.parameters,
            credit_to="" if final else part.credit_to,
            called=item.request.calls.ended if final and item.request.calls is not None else (),
        )

    def count(self, item: WorkItem, response: Response, now_s: float, tally: StatsTally) -> None:
        """Counts a request whose stream ends."""
        timing = response.timing or Timing()
        spent_ns = timing.input_ns + timing.infer_ns
        if response.failure is not None:
            tally.failed(response.failure.code)
            tally.spent_failing(timing.queue_ns + spent_ns)
            return
        tally.max_rows, tally.is_streamed = self._max_rows, True
        tally.executed(item.rows, [timing.queue_ns], timing.input_ns, timing.infer_ns, 0, now_s - spent_ns / 1e9)

    def failures(
        self, items: Sequence[WorkItem], error: QinferError, now_s: float, tally: StatsTally
    ) -> list[Response]:
        """Answers items that were not executed."""
        failure = Failure.from_error(error)
        tally.failed(failure.code, len(items))
        tally.spent_failing(int(sum(max(now_s - item.enqueued_s, 0.0) for item in items) * 1e9))
        if self._observer is not None:
            with _FENCE:
                self._observer.refused(items, error, now_s)
        return [
            Response(
                request_id=item.request.id,
                model=self._model,
                version=self._version,
                failure=failure,
                attempt=item.lease.deliveries,
            )
            for item in items
        ]

    def _final(self, item: WorkItem, answer: Answer, index: int, timing: Timing) -> Response:
        outputs: tuple[Tensor, ...] = ()
        failure: Failure | None = None
        if not isinstance(answer, tuple):
            failure = Failure.from_error(answer)
        elif problem := self.problem(answer, due(item.request), item.rows):
            failure = Failure.from_error(OutputMismatch(problem))
        else:
            outputs = answer
        return Response(
            request_id=item.request.id,
            model=self._model,
            version=self._version,
            outputs=outputs,
            failure=failure,
            attempt=item.lease.deliveries,
            index=index,
            timing=timing,
        )

    def problem(self, outputs: Sequence[Tensor], wanted: Sequence[str], rows: int) -> str | None:
        """Returns why outputs are refused; `None`, which is quick, if they are good."""
        if len(outputs) != (len(wanted) or self._count):
            if missing := _missing(wanted, outputs):
                return missing
            if len({tensor.name for tensor in outputs}) < len(outputs):
                return f"the model returned {len(outputs)} outputs, some of them twice"
        for tensor in outputs:
            if self._fine.get(tensor.name) == (tensor.datatype, tensor.shape, rows):
                continue
            expected = self._outputs.get(tensor.name)
            if expected is None:
                return f"the model returned an output '{tensor.name}' that its configuration does not have"
            if self._batched and tensor.shape[:1] != (rows,) and not self._may_have_other_rows:
                return _mismatch_text(tensor, f"its first dimension must be {rows}; {OTHER_ROWS}")
            if other := self._other(tensor, rows, *expected):
                if self._is_strict:
                    return other
                self._warn(other)
            self._fine[tensor.name] = (tensor.datatype, tensor.shape, rows)
        return None

    def _other(self, tensor: Tensor, rows: int, datatype: str, dims: tuple[int, ...], fixed: bool) -> str:  # noqa: FBT001
        shape = tensor.shape[1:] if self._batched else tensor.shape
        if tensor.datatype != datatype:
            return _mismatch_text(tensor, f"its configuration says {datatype}")
        if self._batched and tensor.shape[:1] != (rows,):
            return _mismatch_text(tensor, f"its first dimension is not {rows}, the rows of the request")
        if shape != dims and (fixed or not _fits(shape, dims)):
            return _mismatch_text(
                tensor, f"its configuration says {list(dims)}{' after the batch' if self._batched else ''}"
            )
        return ""

    def _warn(self, other: str) -> None:
        if self._is_warned:
            return
        self._is_warned = True
        logger.warning(
            "an output differs from the model's configuration and is passed on; qinfer.strict_outputs refuses it",
            extra={"model": self._model, "version": self._version, "reason": other},
        )

    def _problem_of_any(self, outputs: Sequence[Tensor], wanted: Sequence[str]) -> str | None:
        if outputs and wanted and (missing := _missing(wanted, outputs)):
            return missing
        for tensor in outputs:
            rows = tensor.shape[0] if tensor.shape else 0
            if problem := self.problem((tensor,), (tensor.name,), rows):
                return problem
        return None

    def _earlier(self, execution: Execution) -> dict[int, list[Response]]:
        made: dict[int, list[Response]] = {}
        for position, answer, parameters in execution.earlier:
            item = execution.items[position]
            mine = made.setdefault(position, [])
            mine.append(
                Response(
                    request_id=item.request.id,
                    model=self._model,
                    version=self._version,
                    outputs=answer if isinstance(answer, tuple) else (),
                    failure=Failure.from_error(answer) if isinstance(answer, QinferError) else None,
                    attempt=item.lease.deliveries,
                    index=len(mine),
                    final=False,
                    parameters=parameters,
                )
            )
        return made


def due(request: InferRequest) -> tuple[str, ...]:
    """Returns the outputs that a request requires."""
    return () if request.spares_outputs else request.outputs


def _missing(wanted: Sequence[str], outputs: Sequence[Tensor]) -> str:
    given = {tensor.name for tensor in outputs}
    return next((f"the model returned no output '{name}'" for name in wanted if name not in given), "")


def _fits(shape: tuple[int, ...], dims: tuple[int, ...]) -> bool:
    return len(shape) == len(dims) and all(d in (-1, s) for s, d in zip(shape, dims, strict=True))


def _mismatch_text(tensor: Tensor, rule: str) -> str:
    return f"the model returned output '{tensor.name}' as {tensor.datatype}{list(tensor.shape)}; {rule}"
