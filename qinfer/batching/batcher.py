"""The machine that turns pending requests into executions: one per model version and worker, on the event loop.

    admit ─▶ pending ─▶ policy.decide ─▶ assemble ─▶ executor ─▶ outlet.answer
                            └─▶ expired ─▶ outlet.answer        └─▶ outlet.give_back (what others can run sooner)

It decides nothing by itself (`policy` does) and does no I/O: `room` and `fetchable` tell the worker when to fetch how
much. At most one batch is placed ahead of the instances, and fetched only when the running ones are about to end, so
that a busy worker never hoards what an idle one could run (DESIGN.md §4).
"""

import asyncio
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Protocol

from qinfer.batching import policy
from qinfer.batching.assemble import KeyFunction, assemble, key_function
from qinfer.batching.execution import Execution, Pending
from qinfer.batching.latency import LatencyModel
from qinfer.batching.policy import NEVER_S, Rules, Slots
from qinfer.batching.responses import Responder
from qinfer.clock import ServerClock
from qinfer.errors import DeadlineExceeded, QinferError
from qinfer.messages import Failure, Response
from qinfer.observability.stats import StatsTally
from qinfer.repository.spec import ModelSpec

FETCH_LEAD_S = 0.003
"""How long before an execution's expected end the next batch is fetched: a few round trips to the broker."""

OVERDUE_S = 0.05
"""An execution later than expected by this, or by its expected duration if longer, gives back what waits behind it."""


class Executor(Protocol):
    """The instances of a model version, which share one queue of executions."""

    count: int
    """How many instances there are."""

    def run_now(self, execution: Execution, expected_s: float) -> bool:
        """Executes at once if that should take no time worth a change of threads; tells whether it did.

        Args:
            execution: What to run.
            expected_s: How long it should take; 0 = unknown.
        """
        ...

    def start(self, execution: Execution, done: Callable[[Execution], None]) -> None:
        """Queues an execution; `done` is called on the event loop when it ended."""
        ...

    def recall(self) -> list[Execution]:
        """Takes back the executions that did not begin."""
        ...

    def retire(self) -> None:
        """Unloads every instance once it has executed what is queued."""
        ...


class Outlet(Protocol):
    """Where items go when the batcher is done with them; neither call blocks."""

    def answer(self, items: Sequence[Pending], responses: Sequence[Response]) -> None:
        """Publishes responses, then finishes the items' entries."""
        ...

    def give_back(self, items: Sequence[Pending]) -> None:
        """Releases items that did not begin to execute."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadedModel:
    """A model version at one generation, loaded into instances."""

    spec: ModelSpec
    version: int
    generation: int
    executor: Executor


class Batcher:
    """See the module docstring.

    Args:
        model: What to run on; `replace` exchanges it.
        clock: The broker's time, in which deadlines and enqueue times are.
        outlet: Where answers go.
        latency: What warm-up runs taught about the model's speed.
    """

    def __init__(
        self, model: LoadedModel, clock: ServerClock, outlet: Outlet, latency: LatencyModel | None = None
    ) -> None:
        self._clock = clock
        self._outlet = outlet
        self._loop = asyncio.get_running_loop()
        self._pending: list[Pending] = []
        self._unanswered: list[Execution] = []
        self._rows_per_item = 1.0
        self._timer: asyncio.TimerHandle | None = None
        self._fetch_wait_s = NEVER_S
        self._fetchable = asyncio.Event()
        self._idle = asyncio.Event()
        self.executing = 0
        self.completed = 0
        self.paused = False
        self.tally = StatsTally()
        self._adopt(model, latency)

    def _adopt(self, model: LoadedModel, latency: LatencyModel | None) -> None:
        self.model = model
        self.key_of: KeyFunction = key_function(model.spec)
        self._rules = Rules.of(model.spec)
        self._responder = Responder(model.spec, model.version)
        self._done = partial(self._ended, self._responder)
        self._latency = latency or LatencyModel()
        self._expected_ends: dict[Execution, float] = {}
        self._pump()

    def replace(self, model: LoadedModel, latency: LatencyModel | None = None) -> list[Pending]:
        """Goes on with another generation of the model; the old instances end what runs, and are unloaded.

        Returns:
            What did not start, out of the batcher's hands: check it against the new configuration, and admit it again.
        """
        old = self.model.executor
        self._recall()
        waiting, self._pending = self._pending, []
        self._adopt(model, latency)
        old.retire()
        return waiting

    def admit(self, items: Sequence[Pending]) -> None:
        """Takes items in, and runs what can run."""
        if items:
            self._rows_per_item = max(sum(item.rows for item in items), 1) / len(items)
            self._pending.extend(items)
        self._pump()

    async def fetchable(self) -> None:
        """Waits until more items are welcome."""
        await self._fetchable.wait()

    def room(self) -> tuple[int, float]:
        """Tells how many entries to fetch now, and for how many seconds to wait for the first (maybe `NEVER_S`)."""
        batches = max(self._slots().idle, 1)
        if not self._rules.merge:
            return max(batches - len(self._pending), 1), self._fetch_wait_s
        rows = batches * self._rules.max_rows - sum(item.rows for item in self._pending)
        return max(int(rows / self._rows_per_item), 1), self._fetch_wait_s

    def lost(self, item: Pending) -> None:
        """Forgets an item whose lease is lost; if it is executing, its answer will be discarded."""
        item.lost = True
        if item in self._pending:
            self._pending.remove(item)
            self._pump()

    def fail(self, items: Sequence[Pending], error: QinferError) -> None:
        """Answers items with an error, without executing them."""
        failure = Failure.of(error)
        self.tally.failed(failure.code, len(items))
        self._outlet.answer(items, [self._responder.failure(item, failure) for item in items])

    async def pause(self) -> None:
        """Asks for no more work, gives back what did not start, and returns when the rest has ended."""
        self.paused = True
        self._recall()
        self._give_back()
        self._pump()
        await self._idle.wait()

    async def idle(self) -> None:
        """Waits until nothing executes."""
        await self._idle.wait()

    def resume(self) -> None:
        """Ends a pause."""
        self.paused = False
        self._pump()

    def _slots(self) -> Slots:
        idle = self.model.executor.count - len(self._expected_ends)
        return Slots(max(idle, 0), 1 if idle >= 0 else 0)

    def _pump(self) -> None:
        """Starts and expires what is due now; then sets the fetch gate and the one timer."""
        now_s = self._clock.now_s()
        wake_at_s = NEVER_S
        while self._pending:
            decision = policy.decide(self._pending, now_s, self._slots(), self._rules, self._latency)
            self._pending = list(decision.keep)
            if decision.expired:
                self.fail(decision.expired, DeadlineExceeded("Request timeout expired"))
            if not decision.run:
                wake_at_s = decision.wake_at_s
                break
            self._start(decision.run, now_s)
        if self.executing or self._pending:
            self._idle.clear()
        else:
            self._idle.set()
        self._arm(now_s, min(wake_at_s, self._set_gate(now_s, wake_at_s)))
        ended, self._unanswered = self._unanswered, []
        for execution in ended:
            self._answer(self._responder, execution)

    def _set_gate(self, now_s: float, wake_at_s: float) -> float:
        """Opens or closes the fetch gate; returns when to look at it again."""
        slots = self._slots()
        open_at_s = again_at_s = NEVER_S
        if self.paused:
            pass
        elif slots.idle:
            open_at_s = now_s
            self._fetch_wait_s = max(wake_at_s - now_s, 0.001)
        elif self._latency.known:
            expected_s = min(self._expected_ends.values())
            overdue_at_s = expected_s + max(OVERDUE_S, self._latency.estimate_s(1))
            if now_s >= overdue_at_s:
                # Nobody knows how long the instances stay busy: let idle workers have what waits behind them.
                self._recall()
                self._give_back()
            else:
                again_at_s = overdue_at_s
                if slots.ahead:
                    open_at_s = expected_s - FETCH_LEAD_S
                    self._fetch_wait_s = FETCH_LEAD_S
        if open_at_s <= now_s:
            self._fetchable.set()
            return again_at_s
        self._fetchable.clear()
        return min(again_at_s, open_at_s)

    def _arm(self, now_s: float, wake_at_s: float) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._timer = None if wake_at_s == NEVER_S else self._loop.call_later(max(wake_at_s - now_s, 0.0), self._pump)

    def _start(self, items: list[Pending], now_s: float) -> None:
        """Assembles a batch and queues it."""
        begin_ns = time.perf_counter_ns()
        rows = [item.rows for item in items]
        try:
            batch = assemble([item.request for item in items], rows)
        except QinferError as error:
            if len(items) == 1:
                self.fail(items, error)
                return
            for item in items:  # one of them is malformed: alone, it fails alone
                self._start([item], now_s)
            return
        execution = Execution(items, batch, time.perf_counter_ns() - begin_ns)
        begins_s = min(self._expected_ends.values(), default=now_s) if not self._slots().idle else now_s
        expected_s = self._latency.estimate_s(sum(rows))
        self._expected_ends[execution] = max(begins_s, now_s) + expected_s
        self.executing += len(items)
        if self.model.executor.run_now(execution, expected_s):
            self._count(execution)
            self._unanswered.append(execution)
        else:
            self.model.executor.start(execution, self._done)

    def _count(self, execution: Execution) -> None:
        """Takes note that an execution has ended."""
        self.executing -= len(execution.items)
        self.completed += len(execution.items)
        took_s = (execution.end_ns - execution.begin_ns) / 1e9
        if self._expected_ends.pop(execution, None) is not None and execution.error is None:
            self._latency.observe(execution.batch.size, took_s, self._clock.now_s())

    def _ended(self, responder: Responder, execution: Execution) -> None:
        """Takes an execution back from its instance: next batch first, then the answers of this one."""
        self._count(execution)
        self._pump()
        self._answer(responder, execution)

    def _answer(self, responder: Responder, execution: Execution) -> None:
        begin_s = self._clock.now_s() - (time.perf_counter_ns() - execution.begin_ns) / 1e9
        items, responses = responder.responses(execution, begin_s, self.tally)
        if items:
            self._outlet.answer(items, responses)

    def _recall(self) -> None:
        """Takes back what waits for an instance."""
        for execution in reversed(self.model.executor.recall()):
            self._expected_ends.pop(execution, None)
            self.executing -= len(execution.items)
            self._pending = [*execution.items, *self._pending]

    def _give_back(self) -> None:
        if self._pending:
            items, self._pending = self._pending, []
            self._outlet.give_back(items)
