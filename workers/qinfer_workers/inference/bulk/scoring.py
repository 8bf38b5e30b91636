"""Executes slices of a shard on a model instance; a failing row does not cost other rows their outputs.

A batch that raises is halved repeatedly, down to the rows that fail alone. With a decoupled model, each row is a
request of the batch.
"""

import logging
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import NamedTuple, TypeVar

import numpy as np

from qinfer.backends.base import Array, Backend, Batch, Context, OneResponse
from qinfer.batching.batcher import LoadedModel
from qinfer.batching.execution import Answer, ModelCaller, Responder, new_batch_id
from qinfer.batching.streams import nbytes_of
from qinfer.core.call_chain import extended
from qinfer.core.clock import ServerClock
from qinfer.core.messages import (
    RESPONSE_OVERHEAD_BYTES,
    InferRequest,
    OutgoingRequest,
    ResourceHolder,
    Response,
    Scalar,
    outgoing_call,
)
from qinfer.errors import (
    Cancelled,
    DeadlineExceeded,
    DeliveryError,
    ExecutionOverdue,
    InferenceFailed,
    OutputMismatch,
    Overloaded,
    PayloadTooLarge,
    QinferError,
    RequestError,
)
from qinfer.observe.stats import JOB_ROWS_SCORED, JOB_SCORING_NS, StatsTally
from qinfer.tensors import Tensor, to_numpy
from qinfer_workers.inference.bulk.arbiter import Turn
from qinfer_workers.inference.bulk.chunks import Chunks, Outputs, Slice

_LOOK_S = 0.5


class StreamBounds(NamedTuple):
    """Limits of the responses to a row, and of the model's silence."""

    row_bytes: int
    idle_s: float


@dataclass(slots=True)
class _RowStream:
    responses: list[dict[str, Array]] = field(default_factory=list)
    nbytes: int = 0
    is_open: bool = True
    error: QinferError | None = None


class RowStreams(OneResponse):
    """The `Context` of a decoupled bulk batch; an item is a row. Thread-safe."""

    def __init__(
        self, rows: int, bounds: StreamBounds, problem: Callable[[Sequence[Tensor]], str | None], calls: Context
    ) -> None:
        self._rows = [_RowStream() for _ in range(rows)]
        self._bounds, self._problem, self._calls = bounds, problem, calls
        self._changed = threading.Condition()
        self._callbacks: dict[int, Callable[[int], None]] = {}
        self._heard_s = time.monotonic()
        self._is_over = False

    @property
    def is_decoupled(self) -> bool:
        """Always true."""
        return True

    def respond(
        self, item: int, outputs: Answer, *, final: bool = True, parameters: Mapping[str, Scalar] | None = None
    ) -> None:
        """Stores a response; an error ends its row, even if not final."""
        del parameters
        row = self._rows[item]
        with self._changed:
            self._heard_s = time.monotonic()
            if self._is_over or row.error is not None:
                raise Cancelled("the row was abandoned")
            if not row.is_open:
                raise OutputMismatch("the model answered a row after its final response")
            self._add_response(row, outputs)
            row.is_open = row.error is None and not final
            self._changed.notify_all()
            if isinstance(row.error, PayloadTooLarge):
                raise Cancelled(row.error.message)

    def on_taken(self, item: int, callback: Callable[[int], None]) -> None:
        """Calls back when the row is abandoned."""
        with self._changed:
            self._callbacks[item] = callback

    def cancelled(self, item: int) -> bool:
        """Returns whether the row is abandoned."""
        return self._is_over or self._rows[item].error is not None or self._calls.cancelled(item)

    def call(self, request: InferRequest, made_for: int = -1) -> Response:
        """Runs another model."""
        return self._calls.call(request, made_for)

    def stream(self, request: InferRequest, made_for: int = -1) -> Iterator[Response]:
        """Runs another decoupled model."""
        return self._calls.stream(request, made_for)

    def wait(self, progress: Callable[[], None]) -> None:
        """Waits for final responses; late rows fail."""
        with self._changed:
            while any(row.is_open for row in self._rows):
                if self._calls.cancelled(0):
                    raise Cancelled("the batch was abandoned")
                left_s = self._heard_s + self._bounds.idle_s - time.monotonic()
                if left_s <= 0:
                    self._give_up()
                    return
                self._changed.wait(min(left_s, _LOOK_S))
                progress()

    def close(self) -> None:
        """Rejects further responses, and tells the model."""
        with self._changed:
            self._is_over = True
            callbacks, self._callbacks = self._callbacks, {}
        for callback in callbacks.values():
            callback(0)

    def outputs(self, names: Sequence[str], *, is_batched: bool) -> dict[str, Array]:
        """Returns outputs as `[rows]` of tuples with an array per response."""
        arrays = {}
        for name in names:
            arrays[name] = np.empty(len(self._rows), object)
            for number, row in enumerate(self._rows):
                values = (response[name] for response in row.responses)
                arrays[name][number] = tuple(v.reshape(v.shape[1:]) for v in values) if is_batched else tuple(values)
        return arrays

    def errors(self) -> dict[int, QinferError]:
        """Returns errors by position in the batch."""
        return {number: row.error for number, row in enumerate(self._rows) if row.error is not None}

    def _add_response(self, row: _RowStream, outputs: Answer) -> None:
        if isinstance(outputs, QinferError):
            row.error = outputs
            return
        row.nbytes += nbytes_of(outputs) + RESPONSE_OVERHEAD_BYTES
        if row.nbytes > self._bounds.row_bytes:
            row.error = PayloadTooLarge(
                f"the responses of the row take more than {self._bounds.row_bytes} bytes; ask for less, or raise "
                "QINFER_BULK__MAX_READ_BYTES, which is 16 times as much"
            )
        elif outputs and (problem := self._problem(outputs)) is not None:
            row.error = OutputMismatch(problem)
        elif outputs:
            # Copied: it may be memory of the model's process, which waits for the return.
            row.responses.append({tensor.name: np.array(to_numpy(tensor)) for tensor in outputs})

    def _give_up(self) -> None:
        text = f"the model sent no response for {self._bounds.idle_s:g} s, and no final one for the row"
        for row in self._rows:
            if row.is_open:
                row.is_open, row.error = False, DeadlineExceeded(text)


logger = logging.getLogger(__name__)

T = TypeVar("T")

EXECUTION_FAILED = "execution_failed"

_OWN_WORK = 0.2
"""A thread that works a smaller share of the time waits for a device or another process."""

_LATER = (Overloaded, DeliveryError, Cancelled)


@dataclass(frozen=True, slots=True, kw_only=True)
class Purpose:
    """The model that scores rows, and for which job.

    `progress` is called after each batch, in any thread.
    """

    model: LoadedModel
    clock: ServerClock
    request_id: str
    tenant: str = ""
    progress: Callable[[], None] = lambda: None
    outputs: tuple[str, ...] = ()
    row_bytes: int = 4 * 2**20


class Scorer:
    """Scores a shard's slices, from several instance threads."""

    def __init__(self, purpose: Purpose, chunks: Chunks) -> None:
        self.chunks = chunks
        self.purpose = purpose
        self.executions = Executions()
        self.error: QinferError | None = None
        self._spec = purpose.model.spec
        self._responder = Responder(self._spec, purpose.model.version, strict=True)
        self._due = purpose.outputs or tuple(output.name for output in self._spec.outputs)
        self._request = InferRequest(
            model=self._spec.name,
            version=purpose.model.version,
            id=purpose.request_id,
            inputs=(),
            outputs=purpose.outputs,
            tenant=purpose.tenant,
            generation=purpose.model.generation,
        )
        self._is_warned = False

    def run(self, instance: Backend, part: Slice, watch: "DeviceStopwatch") -> None:
        """Executes a slice; `watch` also covers the time since the previous slice."""
        try:
            outputs, failed = self._execute(instance, part, watch)
        except _LATER as error:
            self._stop(error)
        except OutputMismatch as error:  # not a row's fault
            self.chunks.fail(part, error.code.value, error.message)
        except QinferError as error:
            self._handle_failure(part, error)
        except KeyboardInterrupt:
            raise
        except BaseException as error:  # noqa: BLE001  the boundary to the model's code, which may even call `sys.exit`
            self._warn(part)
            self._handle_failure(part, InferenceFailed(str(error) or type(error).__name__))
        else:
            if len(failed) < part.rows:
                self.executions.add(part.rows - len(failed), watch.laps_ns, self.purpose.clock.now_s())
            if failed:
                self._settle_slice(part, outputs, failed)
            else:
                self.chunks.done(part, outputs, watch.seconds())

    def _execute(
        self, instance: Backend, part: Slice, watch: "DeviceStopwatch"
    ) -> tuple[Outputs, Mapping[int, QinferError]]:
        inputs = part.inputs()
        is_batched = self._spec.max_batch_size > 0
        if not is_batched:
            inputs = {name: array[0] for name, array in inputs.items()}
        if self._spec.decoupled:
            return self._stream(instance, inputs, part.rows, watch)
        rows = part.rows if is_batched else 1
        way = _BulkContext(self)
        watch.lap()
        instance.execute(Batch(requests=[self._request], rows=[rows], inputs=inputs), way)
        watch.lap()
        if way.answer is None:
            raise OutputMismatch("the model did not answer its batch")
        if isinstance(way.answer, QinferError):
            raise way.answer
        problem = self._problem(way.answer, rows)
        if problem is not None:
            raise OutputMismatch(problem)
        arrays = {tensor.name: to_numpy(tensor) for tensor in way.answer}
        watch.lap()
        return arrays if is_batched else {name: array[np.newaxis] for name, array in arrays.items()}, {}

    def _stream(
        self, instance: Backend, inputs: Mapping[str, Array], rows: int, watch: "DeviceStopwatch"
    ) -> tuple[Outputs, Mapping[int, QinferError]]:
        purpose = self.purpose
        bounds = StreamBounds(purpose.row_bytes, self._spec.default_timeout_s)
        streams = RowStreams(rows, bounds, partial(self._problem, rows=1), _BulkContext(self))
        watch.lap()
        try:
            instance.execute(Batch(requests=[self._request] * rows, rows=[1] * rows, inputs=inputs), streams)
            streams.wait(purpose.progress)
        except Cancelled as error:
            if self.chunks.is_stopped or not streams.errors():
                raise
            if rows > 1:  # one row's end does not end the other rows
                raise InferenceFailed(error.message) from error
        finally:
            streams.close()
        watch.lap()
        failed = streams.errors()
        if (later := next((error for error in failed.values() if isinstance(error, _LATER)), None)) is not None:
            raise later
        names = [tensor.name for tensor in self._spec.outputs if tensor.name in (purpose.outputs or (tensor.name,))]
        outputs = streams.outputs(names, is_batched=self._spec.max_batch_size > 0)
        watch.lap()
        return outputs, failed

    def _problem(self, outputs: Sequence[Tensor], rows: int) -> str | None:
        problem = self._responder.problem(outputs, self._due, rows)
        return problem and f"{problem} (a bulk job takes outputs only as they are declared)"

    def _settle_slice(self, part: Slice, outputs: Outputs, failed: Mapping[int, QinferError]) -> None:
        """Stores the outputs of a slice; rows that failed beside others run again alone."""
        start = 0
        for place in (*sorted(failed), part.rows):
            if start < place:
                good = {name: array[start:place] for name, array in outputs.items()}
                self.chunks.done(part.within(start, place), good, 0.0)
            start = place + 1
            if place == part.rows:
                return
            row, error = part.within(place, start), failed[place]
            if part.rows > 1 and isinstance(error, InferenceFailed):
                self.chunks.again(row)
            else:
                self._handle_failure(row, error)

    def _handle_failure(self, part: Slice, error: QinferError) -> None:
        if part.rows > 1 and isinstance(error, ExecutionOverdue):
            for place in range(part.rows):
                self.chunks.again(part.within(place, place + 1))
        elif part.rows > 1:
            self.chunks.cut(part)
        else:
            code = EXECUTION_FAILED if isinstance(error, InferenceFailed) else error.code.value
            self.chunks.fail(part, code, error.message)

    def _stop(self, error: QinferError) -> None:
        self.error = error
        self.chunks.stop()

    def _warn(self, part: Slice) -> None:
        level = logging.DEBUG if self._is_warned else logging.WARNING
        self._is_warned = True
        extra = {"model": self._spec.name, "rows": part.rows, "shard": self.purpose.request_id}
        logger.log(level, "bulk batch failed", exc_info=True, extra=extra)


class Executions:
    """Counts a shard's executions; thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._tally = StatsTally()
        self._rows = 0
        self._began_ns = self._ended_ns = 0

    def add(self, rows: int, laps_ns: Sequence[int], now_s: float) -> None:
        """Counts an execution with laps of inputs, model and outputs."""
        input_ns, infer_ns, output_ns = laps_ns
        ended_ns, whole_ns = time.perf_counter_ns(), input_ns + infer_ns + output_ns
        with self._lock:
            self._tally.executed(rows, (), input_ns, infer_ns, output_ns, now_s - whole_ns / 1e9)
            self._rows += rows
            self._began_ns = self._began_ns or ended_ns - whole_ns
            self._ended_ns = ended_ns

    def drain(self) -> dict[str, int]:
        """Returns the statistics since the last call."""
        with self._lock:
            counted = {JOB_ROWS_SCORED: self._rows, JOB_SCORING_NS: self._ended_ns - self._began_ns}
            self._rows, self._began_ns = 0, self._ended_ns
            return self._tally.drain() | {field: count for field, count in counted.items() if count}


class DeviceStopwatch:
    """Measures how long the device was busy; if this thread is the device, in its own time."""

    def __init__(self) -> None:
        self.laps_ns: list[int] = []
        self._worked_laps_s: list[float] = []
        self._began_s = time.perf_counter()
        self._worked_s = self._lap_worked_s = time.thread_time()
        self._lap_ns = time.perf_counter_ns()

    def lap(self) -> None:
        """Ends a lap."""
        now_ns, worked_s = time.perf_counter_ns(), time.thread_time()
        self.laps_ns.append(now_ns - self._lap_ns)
        self._worked_laps_s.append(worked_s - self._lap_worked_s)
        self._lap_ns, self._lap_worked_s = now_ns, worked_s

    def seconds(self) -> float:
        """Returns the running time, after two laps."""
        if self._worked_laps_s[1] > _OWN_WORK * self.laps_ns[1] / 1e9:
            return time.thread_time() - self._worked_s
        return time.perf_counter() - self._began_s


class BorrowedInstance:
    """An instance lent to a shard for one turn."""

    def __init__(self, scorer: Scorer, turn: Turn) -> None:
        self._scorer = scorer
        self._turn = turn

    def run(self, instance: Backend) -> None:
        """Scores slices until the turn or the slices end."""
        chunks = self._scorer.chunks
        chunks.add_consumer()
        watch = DeviceStopwatch()
        try:
            while (part := chunks.next_batch()) is not None:
                self._scorer.run(instance, part, watch)
                watch = DeviceStopwatch()
                self._scorer.purpose.progress()
                if not self._turn.goes_on():
                    break
        finally:
            chunks.remove_consumer()


class _BulkContext(OneResponse):
    def __init__(self, scorer: Scorer) -> None:
        self.answer: Answer | None = None
        self._scorer = scorer
        self._token = ""

    def respond(
        self, item: int, outputs: Answer, *, final: bool = True, parameters: Mapping[str, Scalar] | None = None
    ) -> None:
        del item, parameters
        if self.answer is not None:
            raise OutputMismatch("the model answered its batch after the final answer")
        if not final:
            raise OutputMismatch("the model gives several responses to a request; a bulk job needs one for each row")
        self.answer = outputs

    def cancelled(self, item: int) -> bool:
        del item
        return self._scorer.chunks.is_stopped

    def call(self, request: InferRequest, made_for: int = -1) -> Response:
        del made_for
        return self._call_model(request, lambda caller: caller.call)

    def stream(self, request: InferRequest, made_for: int = -1) -> Iterator[Response]:
        del made_for
        return self._call_model(request, lambda caller: caller.stream)

    def _call_model(
        self, request: InferRequest, way: Callable[[ModelCaller], Callable[[OutgoingRequest, float], T]]
    ) -> T:
        purpose = self._scorer.purpose
        caller, spec = purpose.model.caller, purpose.model.spec
        if caller is None:
            raise InferenceFailed("this model runs where it can't call other models")
        if self._scorer.chunks.is_stopped:
            raise Cancelled("the batch was abandoned")
        self._token = self._token or new_batch_id()
        holder = ResourceHolder(self._token, spec.name, {}, purpose.model.version)
        whose = outgoing_call(request, extended([()], holder))
        whose.tenant = request.tenant or purpose.tenant
        try:
            return way(caller)(whose, purpose.clock.now_s() + spec.default_timeout_s)
        except RequestError as error:
            raise InferenceFailed(f"a call failed: {error.message}") from error
