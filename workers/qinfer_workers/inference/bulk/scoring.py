"""Executes slices of a shard on a model instance; a failing row does not cost other rows their outputs.

A batch that raises is halved repeatedly, down to the rows that fail alone. With a decoupled model, each row is a
request of the batch.
"""

import logging
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TypeVar

import numpy as np

from qinfer.backends.base import Array, Backend, Batch, OneResponse
from qinfer.batching.batcher import LoadedModel
from qinfer.batching.execution import Answer, ModelCaller, Responder, new_batch_id
from qinfer.core.call_chain import extended
from qinfer.core.clock import ServerClock
from qinfer.core.messages import InferRequest, OutgoingRequest, ResourceHolder, Response, Scalar, outgoing_call
from qinfer.errors import (
    Cancelled,
    DeliveryError,
    ExecutionOverdue,
    InferenceFailed,
    OutputMismatch,
    Overloaded,
    QinferError,
    RequestError,
)
from qinfer.observe.stats import JOB_ROWS_SCORED, JOB_SCORING_NS, StatsTally
from qinfer.tensors import Tensor, to_numpy
from qinfer_workers.inference.bulk.arbiter import Turn
from qinfer_workers.inference.bulk.chunks import Chunks, Outputs, Slice
from qinfer_workers.inference.bulk.row_streams import RowStreams, StreamBounds

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
