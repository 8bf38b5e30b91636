"""The requests of an ensemble in a worker: in place of a `Batcher`, which executes; ensembles only ask others to.

    admit ─▶ Run ─▶ steps of other models … ─▶ ended ─▶ outlet.answer

A request that waits for its steps has no instance and no thread. How many are held is bounded, by number and by bytes,
so that a worker's memory is. Steps of ensembles within ensembles are steps of the outer one: no request waits for
another's place here. The responses of decoupled ensembles leave one by one, by a stream (`streams`).
"""

import asyncio
import time
from collections.abc import Callable, Sequence
from typing import NamedTuple

from qinfer.batching.batcher import LoadedModel, Outlet
from qinfer.batching.execution import Execution, Pending, Responder
from qinfer.batching.policy import NEVER_S
from qinfer.core.clock import ServerClock
from qinfer.core.messages import Failure, Response, Timing
from qinfer.errors import TIMED_OUT, DeadlineExceeded, OutputMismatch, QinferError
from qinfer.models.ensemble_graph import Plan
from qinfer.observe.responses import end_of
from qinfer.observe.stats import ModelCounts, StatsTally
from qinfer.queue.entries import Lane
from qinfer_workers.inference.ensembles.run import Outcome, Run, Spent, Steps
from qinfer_workers.inference.ensembles.streams import StreamedResponses
from qinfer_workers.inference.ensembles.traces import RunTrace
from qinfer_workers.inference.tracing import Spans

MAX_REQUESTS = 256
"""The most requests of one ensemble version that a worker holds."""

MAX_BYTES = 256 * 2**20
"""While the inputs of its requests are larger, no more are fetched."""

STEP_FAILED = "step_failed"
"""The reason of an ensemble's failures in statistics, Triton's OTHER (reference §4); a step's model counts its own."""


class NestedCounts(ModelCounts):
    """Statistics of ensembles that are steps of others: they have no request of their own in a lane."""

    def __init__(self) -> None:
        super().__init__()
        self._tallies: dict[tuple[str, int], StatsTally] = {}

    def tally(self, ensemble: str, version: int) -> StatsTally:
        """Returns where the requests of an ensemble version are counted."""
        return self._tallies.setdefault((ensemble, version), StatsTally())

    def drain(self) -> dict[tuple[str, int], dict[str, int]]:
        """See the base."""
        for (ensemble, version), tally in self._tallies.items():
            self.merge(ensemble, version, tally.drain())
        self._tallies.clear()
        return super().drain()


class NoInstances:
    """The `Executor` of an ensemble, which executes nothing."""

    count = 0

    def run_now(self, execution: Execution, expected_s: float, instance: int = 0) -> bool:
        """Refuses."""
        del execution, expected_s, instance
        return False

    def start(self, execution: Execution, done: Callable[[Execution], None], instance: int = 0) -> None:
        """Is never called: an ensemble makes no executions."""
        raise AssertionError("an ensemble has no instance to execute anything on", execution, done, instance)

    def recall(self) -> list[Execution]:
        """Returns nothing."""
        return []

    def retire(self) -> None:
        """Has nothing to unload."""


class Ways(NamedTuple):
    """The ways of steps to their models.

    Attributes:
        near: The usual one, which may take the short cut.
        far: That of requests which a worker held that has died: by the lanes.
    """

    near: Steps
    far: Steps


class EnsembleBatcher:
    """See the module docstring; the worker sees a `Batcher`.

    Args:
        model: The ensemble.
        plan: What it runs.
        clock: The broker's time, in which deadlines and enqueue times are.
        outlet: Where answers go.
        ways: Where steps go.
        nested: Where ensembles within it are counted.

    Attributes:
        model: The same.
        tally: The statistics.
        paused: No more requests are welcome.
        completed: Requests that have ended.
        expected_ends: None: it executes nothing.
    """

    def __init__(
        self,
        model: LoadedModel,
        plan: Plan,
        *,
        clock: ServerClock,
        outlet: Outlet,
        ways: Ways,
        nested: NestedCounts,
    ) -> None:
        self._clock = clock
        self._outlet = outlet
        self._ways = ways
        self._nested = nested
        self._runs: dict[Pending, Run] = {}
        self._streamed: dict[Pending, StreamedResponses] = {}
        self._traces: dict[Pending, RunTrace] = {}
        self._held_bytes = 0
        self._fetchable, self._idle = asyncio.Event(), asyncio.Event()
        self.tally = StatsTally()
        self.paused = False
        self.completed = 0
        self.expected_ends: dict[Execution, float] = {}
        self.replace_plan(model, plan)
        self._look()

    def replace_plan(self, model: LoadedModel, plan: Plan) -> None:
        """Goes on with another generation; requests that have begun end on the steps that they began with."""
        self.model = model
        self._plan = plan
        self._responder = Responder(model.spec, model.version, model.observer)

    @property
    def executing(self) -> int:
        """Requests that have begun: all that are here."""
        return len(self._runs)

    @property
    def has_work(self) -> bool:
        """Whether requests are here; for any thread."""
        return not self._idle.is_set()

    @property
    def versions(self) -> frozenset[tuple[str, int]]:
        """The model versions that present and further requests run."""
        return self._plan.versions.union(*[run.plan.versions for run in self._runs.values()])

    def speed_rps(self) -> float:
        """Returns 0: its speed is that of its steps' models, which other requests share."""
        return 0.0

    def classify(self, item: Pending) -> None:
        """Sets nothing: requests of an ensemble are not batched."""

    def admit(self, items: Sequence[Pending]) -> None:
        """Takes items in, and begins them."""
        now_s = self._clock.now_s()
        for item in items:
            if item.deadline_s <= now_s:
                self.fail([item], DeadlineExceeded(TIMED_OUT))
                continue
            streamed = self._open_stream(item)
            # What may have ended a worker is not to do so unseen, under the lease of the ensemble's entry.
            steps = self._recorded(item, self._ways.far if item.alone else self._ways.near)
            run = self._runs[item] = Run(item, self._plan, steps, self._clock.now_s, self._ended, streamed)
            self._held_bytes += _nbytes(item)
            if streamed is not None:
                streamed.follow(run)
            run.begin()
        self._look()

    async def fetchable(self) -> None:
        """Waits until more items are welcome."""
        await self._fetchable.wait()

    def welcome(self, lanes: Sequence[Lane]) -> Sequence[Lane]:
        """Returns the lanes from which to fetch now: all."""
        return lanes

    @property
    def has_room(self) -> bool:
        """Whether more requests are welcome."""
        return self._fetchable.is_set()

    def room(self) -> tuple[int, float]:
        """Tells how many entries to fetch now, and for how many seconds to wait for the first: for ever."""
        return max(MAX_REQUESTS - len(self._runs), 1), NEVER_S

    def lost(self, item: Pending) -> None:
        """Ends an item whose lease is lost: steps that have not begun are taken out of the queue."""
        item.lose()
        self._drop(item)

    def _drop(self, item: Pending) -> None:
        """Ends an item that needs no answer any more."""
        if (run := self._runs.get(item)) is not None:
            run.stop()
            self._forget(item)
            self._look()

    def fail(self, items: Sequence[Pending], error: QinferError) -> None:
        """Answers items with an error, without executing them."""
        self._outlet.answer(items, self._responder.failures(items, error, self._clock.now_s(), self.tally))

    def hold(self) -> None:
        """Asks for no more requests; those that are here go on."""
        self.paused = True
        self._look()

    async def pause(self) -> None:
        """Asks for no more requests, and returns when those that are here have ended."""
        self.hold()
        await self._idle.wait()

    async def idle(self) -> None:
        """Waits until no request is here."""
        await self._idle.wait()

    def resume(self) -> None:
        """Ends a pause."""
        self.paused = False
        self._look()

    def _recorded(self, item: Pending, steps: Steps) -> Steps:
        """Returns a way of steps that records them, if the item's request is recorded."""
        spans = self.model.observer
        trace = spans.ensemble(item, self._plan) if isinstance(spans, Spans) else None
        if trace is None:
            return steps
        self._traces[item] = trace
        return trace.over(steps)

    def _open_stream(self, item: Pending) -> StreamedResponses | None:
        """Opens the way of the responses to a request of a decoupled ensemble."""
        table = self.model.streams
        if table is None:
            return None
        streamed = StreamedResponses(table, item, self._responder, self._count_stream, self._drop)
        self._streamed[item] = streamed
        return streamed

    def _ended(self, run: Run, item: Pending, outcome: Outcome) -> None:
        """Answers a request that has ended."""
        if item in self._traces:
            self._traces[item].ended(outcome if isinstance(outcome, Failure) else None)
        streamed = self._streamed.get(item)
        self._forget(item)
        self.completed += 1
        if streamed is not None:
            streamed.end(outcome if isinstance(outcome, Failure) else None)
            self._look()
            return
        waited_ns = self._waited_ns(run, item)
        problem = None
        if not isinstance(outcome, Failure):
            problem = self._responder.problem(outcome, item.request.outputs, item.rows)
        failure = outcome if isinstance(outcome, Failure) else None
        if problem is not None:
            failure = Failure.of(OutputMismatch(f"in ensemble '{self.model.spec.name}', {problem}"))
        self._count(run, item, waited_ns, failure)
        spent = run.spent
        response = Response(
            request_id=item.request.id,
            model=self.model.spec.name,
            version=self.model.version,
            outputs=outcome if failure is None and not isinstance(outcome, Failure) else (),
            failure=failure,
            attempt=item.lease.deliveries,
            timing=Timing(waited_ns, spent.input_ns, spent.infer_ns, spent.output_ns, item.rows),
        )
        self._outlet.answer([item], [response])
        self._look()

    def _waited_ns(self, run: Run, item: Pending) -> int:
        lasted_ns = (run.spent.end_ns or time.perf_counter_ns()) - run.spent.begin_ns
        return max(int((self._clock.now_s() - item.enqueued_s) * 1e9) - lasted_ns, 0)

    def _count_stream(self, run: Run, item: Pending, response: Response) -> None:
        """Counts a response of a stream, and with the final one its request."""
        timing = response.timing or Timing()
        self.tally.responses.responded(response.index, end_of(response), timing.infer_ns)
        if not response.index and response.failure is None:
            self.tally.first_response(timing.queue_ns + timing.infer_ns)
        if response.final:
            run.spent.end_ns = run.spent.end_ns or time.perf_counter_ns()
            self._count(run, item, self._waited_ns(run, item), response.failure)

    def _count(self, run: Run, item: Pending, waited_ns: int, failure: Failure | None) -> None:
        """Counts a request, and the ensembles within it whose steps have run."""
        begin_s = self._clock.now_s() - (time.perf_counter_ns() - run.spent.begin_ns) / 1e9
        if failure is None:
            _count_success(self.tally, item.rows, run.spent, waited_ns, begin_s)
        else:
            self.tally.failed(STEP_FAILED)
            self.tally.spent_failing(waited_ns + run.spent.end_ns - run.spent.begin_ns)
        for position, spent in run.nested.items():
            one = run.plan.nested[position]
            tally = self._nested.tally(one.ensemble, one.version)
            if failure is None:
                _count_success(tally, item.rows, spent, 0, begin_s)
            elif position in run.failed_in:
                tally.failed(STEP_FAILED)
                tally.spent_failing(run.spent.end_ns - spent.begin_ns)

    def _forget(self, item: Pending) -> None:
        del self._runs[item]
        self._streamed.pop(item, None)
        if item in self._traces:
            self._traces.pop(item).close()
        self._held_bytes -= _nbytes(item)

    def _look(self) -> None:
        """Opens or closes the fetch gate."""
        (self._idle.clear if self._runs else self._idle.set)()
        is_open = not self.paused and len(self._runs) < MAX_REQUESTS and self._held_bytes < MAX_BYTES
        (self._fetchable.set if is_open else self._fetchable.clear)()


def _count_success(tally: StatsTally, rows: int, spent: Spent, waited_ns: int, begin_s: float) -> None:
    """Counts a request as Triton does: its steps' times, added up, and as its duration what has passed."""
    tally.executed(rows, [waited_ns], spent.input_ns, spent.infer_ns, spent.output_ns, begin_s)
    tally.lasted_longer(spent.end_ns - spent.begin_ns - spent.computed_ns)


def _nbytes(item: Pending) -> int:
    return sum([tensor.nbytes for tensor in item.request.inputs])
