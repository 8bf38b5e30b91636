"""Shards of ensembles: each batch of rows is a request that goes from step to step, like a request of a client.

The shard's thread waits while the event loop runs the batch: steps of models, in this worker or by their lanes. Batches
run the planned versions; outputs of a model that changed meanwhile are discarded. Jobs do not use the response cache.
"""

import asyncio
import threading
from collections.abc import Callable, Coroutine, Mapping
from concurrent.futures import CancelledError
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from qinfer.backends.base import Array, Batch, Context
from qinfer.batching.batcher import LoadedModel
from qinfer.batching.execution import WorkItem
from qinfer.core.clock import ServerClock
from qinfer.core.messages import Failure, InferRequest, OutgoingRequest
from qinfer.errors import Cancelled, ErrorCode, InferenceFailed, QinferError
from qinfer.models.ensemble_graph import PlanStep
from qinfer.models.spec import Device, ModelSpec
from qinfer.queue.entries import Entry, Lane, Lease
from qinfer.submission.pending import ResponseSink
from qinfer.tensors import Tensor, from_numpy
from qinfer_workers.inference.calls.caller import WorkerCaller
from qinfer_workers.inference.ensembles.plans import EnsemblePlanner, PlannedAgain
from qinfer_workers.inference.ensembles.run import EnsembleResponses, EnsembleRun, StepFailed
from qinfer_workers.inference.ensembles.steps import StepHandle, StepWay
from qinfer_workers.inference.executor import InstanceBorrower

T = TypeVar("T")

AT_ONCE = 2
"""One batch may be in a step, another in the next."""

_LATER = (ErrorCode.CANCELLED.value, ErrorCode.DEADLINE_EXCEEDED.value)

_LEFT = "the batch was abandoned"
_CHANGED = "a model of a step has changed while rows were scored"


class EnsembleParts(NamedTuple):
    """Parts of a worker for ensembles."""

    planner: EnsemblePlanner
    caller: WorkerCaller


class BulkSteps:
    """Submits steps with the lowest priority."""

    def __init__(self, caller: WorkerCaller) -> None:
        self._caller = caller

    def submit_step(self, step: PlanStep, request: OutgoingRequest, sink: ResponseSink, timeout_s: float) -> StepHandle:
        """Submits a step."""
        batching = step.model.batching
        request.priority = 0 if batching is None else batching.priority_levels
        return self._caller.submit_step(step, request, sink, timeout_s, cached=False)

    async def look_again(self) -> None:
        """Reads the catalog anew; see `WorkerCaller.look_again`."""
        await self._caller.look_again()


class EnsembleInstance:
    """Runs batches of a shard's thread on the event loop."""

    short_on_loop = False

    def __init__(self, lent: "EnsembleExecutor", loop: asyncio.AbstractEventLoop) -> None:
        self._lent = lent
        self._loop = loop

    def load(self, spec: ModelSpec, version_dir: Path, device: Device) -> None:
        """Does nothing."""

    def unload(self) -> None:
        """Does nothing."""

    def execute(self, batch: Batch, ctx: Context) -> None:
        """Runs a batch as one request; decoupled, each row."""
        if ctx.is_decoupled:
            self._wait(self._lent.stream(batch, ctx))
        else:
            ctx.respond(0, self._wait(self._lent.run(batch)))

    def _wait(self, running: Coroutine[Any, Any, T]) -> T:
        try:
            return asyncio.run_coroutine_threadsafe(running, self._loop).result()
        except CancelledError:
            raise Cancelled("the worker ends") from None
        except RuntimeError:  # the loop is closed
            running.close()
            raise Cancelled("the worker ends") from None


class EnsembleExecutor:
    """Executes an ensemble for one shard; for the event loop."""

    count = AT_ONCE

    def __init__(self, model: LoadedModel, planned: PlannedAgain, parts: EnsembleParts, clock: ServerClock) -> None:
        self.spec = planned.plan.spec
        self._planned = planned
        self._planner = parts.planner
        self._clock = clock
        self._way = StepWay(BulkSteps(parts.caller), clock.now_s)
        self._lease = Lease(Entry(Lane(model.spec.name, model.version), "0-0"), "", b"")
        self._loop = asyncio.get_running_loop()
        self._open: set[asyncio.Task[tuple[Tensor, ...]]] = set()
        self._is_stopped = False

    def lend(self, borrower: InstanceBorrower, done: Callable[[InstanceBorrower], None]) -> None:
        """Lends an instance in a thread, then calls `done` on the event loop."""

        def use() -> None:
            borrower.run(EnsembleInstance(self, self._loop))
            try:
                self._loop.call_soon_threadsafe(done, borrower)
            except RuntimeError:
                return  # the process ends

        threading.Thread(target=use, name=f"bulk-{self.spec.name}", daemon=True).start()

    def stop(self) -> None:
        """Ends all batches."""
        self._is_stopped = True
        for running in self._open:
            running.cancel()

    async def run(self, batch: Batch) -> tuple[Tensor, ...]:
        """Runs a batch on the event loop."""
        return await self._run_request(self._item(batch.requests[0], batch.rows[0], batch.inputs))

    async def stream(self, batch: Batch, ctx: Context) -> None:
        """Runs each row of a batch on the event loop."""
        is_batched = self.spec.max_batch_size > 0

        async def row(number: int) -> None:
            inputs = {name: array[number : number + 1] if is_batched else array for name, array in batch.inputs.items()}
            item = self._item(batch.requests[number], 1, inputs)
            answer: tuple[Tensor, ...] | QinferError = ()
            try:
                await self._run_request(item, _RowResponses(ctx, number))
            except QinferError as error:
                answer = error
            with suppress(Cancelled):  # the row has failed
                ctx.offer(number, answer)

        await asyncio.gather(*[row(number) for number in range(len(batch.requests))])

    async def _run_request(self, item: WorkItem, responses: EnsembleResponses | None = None) -> tuple[Tensor, ...]:
        if self._is_stopped:
            raise Cancelled(_LEFT)
        running = self._loop.create_task(EnsembleRun(item, self._planned.plan, self._way, responses).run())
        self._open.add(running)
        failure: Failure | None = None
        try:
            outputs = await running
        except StepFailed as failed:
            failure = failed.failure
        except asyncio.CancelledError:
            if not self._is_stopped:
                raise
            failure = Failure.from_error(Cancelled(_LEFT))
        finally:
            running.cancel()
            self._open.discard(running)
        if not await self._planner.is_current(self._planned):
            raise Cancelled(_CHANGED)
        if failure is None:
            return outputs
        if failure.retryable or failure.code in _LATER:
            raise Cancelled(failure.message)
        raise InferenceFailed(failure.message)

    def _item(self, request: InferRequest, rows: int, arrays: Mapping[str, Array]) -> WorkItem:
        now_s = self._clock.now_s()
        datatypes = {tensor.name: tensor.datatype for tensor in self.spec.inputs}
        asked = InferRequest(
            model=request.model,
            version=request.version,
            id=request.id,
            inputs=tuple(from_numpy(name, array, datatypes[name]) for name, array in arrays.items()),
            outputs=request.outputs,
            tenant=request.tenant,
        )
        return WorkItem(
            rows=rows,
            key=None,
            enqueued_s=now_s,
            deadline_s=now_s + self.spec.max_timeout_s,
            lease=self._lease,
            request=asked,
        )


class _RowResponses:
    def __init__(self, ctx: Context, number: int) -> None:
        self._ctx = ctx
        self._number = number

    def send(self, outputs: tuple[Tensor, ...], *, final: bool) -> bool:
        """Offers the outputs; the caller sends the final response once all count."""
        del final
        try:
            self._ctx.offer(self._number, outputs, final=False)
        except Cancelled as error:
            raise StepFailed(Failure.from_error(error)) from None
        return True

    async def room(self) -> None:
        """Returns: there is always room."""
