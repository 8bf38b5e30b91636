"""The requests of an ensemble in a worker: in place of a `Batcher`, which executes; ensembles only ask others to.

    admit ─▶ Run ─▶ steps of other models … ─▶ ended ─▶ outlet.answer

A request that waits for its steps has no instance and no thread. How many are held is bounded, by number and by bytes,
so that a worker's memory is. Steps of ensembles within ensembles are steps of the outer one: no request waits for
another's place here.
"""

import asyncio
import time
from collections.abc import Callable, Sequence

from qinfer.batching.batcher import LoadedModel, Outlet
from qinfer.batching.execution import Execution, Pending, Responder
from qinfer.batching.policy import NEVER_S
from qinfer.core.clock import ServerClock
from qinfer.core.messages import Failure, Response, Timing
from qinfer.errors import TIMED_OUT, DeadlineExceeded, OutputMismatch, QinferError
from qinfer.models.ensemble_graph import Plan
from qinfer.observe.stats import ModelCounts, StatsTally
from qinfer.queue.entries import Lane
from qinfer_workers.inference.ensembles.run import Outcome, Run, Spent, Steps

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


class EnsembleBatcher:
    """See the module docstring; the worker sees a `Batcher`.

    Args:
        model: The ensemble.
        plan: What it runs.
        clock: The broker's time, in which deadlines and enqueue times are.
        outlet: Where answers go.
        steps: Where steps go.
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
        steps: Steps,
        nested: NestedCounts,
    ) -> None:
        self._clock = clock
        self._outlet = outlet
        self._steps = steps
        self._nested = nested
        self._runs: dict[Pending, Run] = {}
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
            run = self._runs[item] = Run(item, self._plan, self._steps, self._clock.now_s, self._ended)
            self._held_bytes += _nbytes(item)
            run.begin()
        self._look()

    async def fetchable(self) -> None:
        """Waits until more items are welcome."""
        await self._fetchable.wait()

    def welcome(self, lanes: Sequence[Lane]) -> Sequence[Lane]:
        """Returns the lanes from which to fetch now: all."""
        return lanes

    def room(self) -> tuple[int, float]:
        """Tells how many entries to fetch now, and for how many seconds to wait for the first: for ever."""
        return max(MAX_REQUESTS - len(self._runs), 1), NEVER_S

    def lost(self, item: Pending) -> None:
        """Ends an item whose lease is lost: steps that have not begun are taken out of the queue."""
        item.lose()
        if (run := self._runs.get(item)) is not None:
            run.stop()
            self._forget(item)
            self._look()

    def fail(self, items: Sequence[Pending], error: QinferError) -> None:
        """Answers items with an error, without executing them."""
        self._outlet.answer(items, self._responder.failures(items, error, self._clock.now_s(), self.tally))

    async def pause(self) -> None:
        """Asks for no more requests, and returns when those that are here have ended."""
        self.paused = True
        self._look()
        await self._idle.wait()

    async def idle(self) -> None:
        """Waits until no request is here."""
        await self._idle.wait()

    def resume(self) -> None:
        """Ends a pause."""
        self.paused = False
        self._look()

    def _ended(self, run: Run, item: Pending, outcome: Outcome) -> None:
        """Answers a request that has ended."""
        self._forget(item)
        self.completed += 1
        waited_ns = max(int((self._clock.now_s() - item.enqueued_s) * 1e9) - (run.spent.end_ns - run.spent.begin_ns), 0)
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
