"""The batcher turns pending requests into executions: one per model version and worker, on the event loop.

    add_items ─▶ pending ─▶ policy.decide ─▶ assemble ─▶ executor ─▶ outlet.publish_responses
                    │          └─▶ expired ─▶ fail            └─▶ bisection, if it raised ─▶ executor …
                    ├─▶ outlet.give_back (items that others can run sooner)
                    └─▶ outlet.delay (items past their queue timeout, with the action DELAY)

`policy` decides, and the worker does the I/O. At most one batch is placed ahead of busy instances, fetched just before
a running one ends, so that idle workers get the other requests (docs/explanation/batching.md).
"""

import asyncio
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Protocol

from qinfer.backends.base import Batch, Room
from qinfer.batching import policy
from qinfer.batching.assemble import KeyFunction, assemble, is_large, key_function, no_key, strings_of, takes_long
from qinfer.batching.execution import Execution, ModelCaller, Observer, Responder, WorkItem
from qinfer.batching.nested import NestedRequests
from qinfer.batching.policy import NEVER_S, FetchGate, FreeSlots, LatencyModel, LentInstances, Rules
from qinfer.batching.rate_limiter import LOOK_S as LOOK_AT_TURN_S
from qinfer.batching.rate_limiter import LimitedInstances, ResourceTurns
from qinfer.batching.streams import StreamedExecution, WorkerStreams
from qinfer.core.clock import ServerClock
from qinfer.core.messages import Response
from qinfer.errors import TIMED_OUT, DeadlineExceeded, ExecutionOverdue, InferenceFailed, QinferError
from qinfer.models.spec import IN_PROCESS, ModelSpec
from qinfer.observe.stats import StatsTally
from qinfer.queue.entries import DELAYED, Lane, undivided
from qinfer.tensors import Tensor


class Bisection(deque[list[WorkItem]]):
    """The parts of batches that raised; they run unmerged, last cut first.

        [a b c d] raises ─▶ [a b] [c d] ─▶ [a b] raises ─▶ [a] [b] [c d] ─▶ …    c and d never meet a and b again

    So only an item that fails alone gets the model's error; one bad item of n costs about 2·log2(n) further executions.
    """

    def cut(self, items: Sequence[WorkItem], *, alone: bool = False) -> None:
        """Puts the halves of a batch, or each of its items, before all other items."""
        size = 1 if alone else (len(items) + 1) // 2
        self.extendleft(reversed([list(items[i : i + size]) for i in range(0, len(items), size)]))

    def take_all(self) -> list[WorkItem]:
        """Removes and returns every item, in order."""
        items = [item for batch in self for item in batch]
        self.clear()
        return items

    def take_late(self, horizon_s: float) -> list[WorkItem]:
        """Removes and returns the items due by `horizon_s`."""
        late = [item for batch in self for item in batch if item.deadline_s <= horizon_s]
        if late:
            self._keep_where(lambda item: item.deadline_s > horizon_s)
        return late

    def drop_lost(self) -> None:
        """Removes items whose lease is lost."""
        self._keep_where(lambda item: not item.lost)

    def _keep_where(self, stays: Callable[[WorkItem], bool]) -> None:
        batches = [[item for item in batch if stays(item)] for batch in self]
        self.clear()
        self.extend(batch for batch in batches if batch)

    @property
    def first_deadline_s(self) -> float:
        """The earliest deadline of all items."""
        return min((item.deadline_s for batch in self for item in batch), default=NEVER_S)


LOOK_S = 0.002
"""The time after which a fetch has found no requests."""

FIRST = "p1"
"""The lane of the highest level."""


_ALL_WAIT = (
    "all {0} instances of model '{1}' wait for calls of '{1}'; give it more instances, or send fewer requests at once"
)


class Executor(Protocol):
    """The instances of a version with one queue; for a model with sequences, each instance has its own queue."""

    count: int

    def run_now(self, execution: Execution, expected_s: float, instance: int = 0) -> bool:
        """Executes at once if that is quick, and tells whether."""
        ...

    def start(self, execution: Execution, done: Callable[[Execution], None], instance: int = 0) -> None:
        """Queues an execution; `done` is called on the event loop."""
        ...

    def recall(self) -> list[Execution]:
        """Takes back the executions that have not begun."""
        ...

    def retire(self) -> None:
        """Unloads every instance after its queued batches."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadedModel:
    """A model version at one generation, loaded into instances.

    Only decoupled models have `streams`, and only models that need resources `limited`. `begun`, if the model has a
    `max_queue_size`, gets the requests of a beginning execution.
    """

    spec: ModelSpec
    version: int
    generation: int
    executor: Executor
    caller: ModelCaller | None = None
    observer: Observer | None = None
    streams: WorkerStreams | None = None
    limited: LimitedInstances | None = None
    initial_states: tuple[Tensor, ...] = ()
    begun: Callable[[Sequence[WorkItem]], None] | None = None


class Outlet(Protocol):
    """Receives finished items; its calls don't block."""

    def publish_responses(self, items: Sequence[WorkItem], responses: Sequence[Response]) -> None:
        """Publishes responses, then finishes the items' entries."""
        ...

    def give_back(self, items: Sequence[WorkItem]) -> None:
        """Releases items that another worker shall execute."""
        ...

    def delay(self, items: Sequence[WorkItem]) -> None:
        """Moves items to their level's `.delayed` lane."""
        ...


class Batcher:
    """Batches a version's requests; instants are on Redis' clock."""

    def __init__(
        self, model: LoadedModel, clock: ServerClock, outlet: Outlet, latency: LatencyModel | None = None
    ) -> None:
        self._clock = clock
        self._outlet = outlet
        self._loop = asyncio.get_running_loop()
        self._pending: list[WorkItem] = []
        self._bisection = Bisection()
        self._nested = NestedRequests()
        self._lent = LentInstances()
        self._unanswered: list[Execution] = []
        self._rows_per_item = 1.0
        self._asked_count = 0
        self._timer: asyncio.TimerHandle | None = None
        self._fetch_wait_s = self._ahead_until_s = self._look_until_s = NEVER_S
        self._asked_at_s = NEVER_S
        # The last fetch found no higher level.
        self._has_looked = True
        self._fetchable, self._idle = asyncio.Event(), asyncio.Event()
        self.executing = self.completed = 0
        self.paused = self._has_lost = False
        self.tally = StatsTally()
        self._adopt(model, latency)

    def _adopt(self, model: LoadedModel, latency: LatencyModel | None) -> None:
        self.model = model
        self._key_of: KeyFunction = key_function(model.spec)
        self._ragged = frozenset(i.name for i in model.spec.inputs if i.ragged)
        is_plain = model.spec.copies_once and all(i.datatype != "BF16" and not i.ragged for i in model.spec.inputs)
        self._may_have_room = is_plain and model.spec.backend not in IN_PROCESS
        self._has_strings = any(i.datatype == "BYTES" for i in model.spec.inputs)
        self._rules = Rules.from_spec(model.spec)
        self._responder = Responder(model.spec, model.version, model.observer)
        self._done = partial(self._on_execution_end, self._responder)
        self._latency = latency or LatencyModel()
        self.expected_ends: dict[Execution, float] = {}
        self._ahead: Sequence[WorkItem] = ()  # placed ahead, for `begun`
        self._turns = None if model.limited is None else ResourceTurns(model.limited, self._on_turn)
        self._pump()

    def replace(self, model: LoadedModel, latency: LatencyModel | None = None) -> list[WorkItem]:
        """Switches to another generation; the old instances end their batches and are unloaded.

        Returns the items that have not started: check them again, `classify` them, and pass them to `add_items`.
        """
        old, self._lent = self.model.executor, LentInstances()
        self._recall()
        self._drop_lost()
        waiting = [*self._nested.waiting, *self._take_waiting()]
        self._nested = NestedRequests()
        self._adopt(model, latency)
        old.retire()
        return waiting

    def classify(self, item: WorkItem) -> None:
        """Sets key, level and queue deadline; a suspect has no deadline."""
        item.key = None if self._key_of is no_key else self._key_of(item.request)
        if self._rules.prefetch or (batching := self.model.spec.batching) is None:
            return
        item.level = batching.level(item.request.priority)
        item.delayed = item.lease.entry.lane.name.endswith(DELAYED)
        timeout_s = item.request.queue_timeout_s
        item.queue_deadline_s = item.enqueued_s + timeout_s if timeout_s and not item.alone else NEVER_S
        item.delays = batching.policy(item.level).delay

    def add_items(self, items: Sequence[WorkItem]) -> None:
        """Takes fetched items and starts batches; call it after an empty fetch, too.

        Items whose queue timeout delays them go to the `.delayed` lane.
        """
        # There are probably more.
        more = 0 < self._asked_count <= len(items)
        self._asked_count = 0
        self._has_looked, self._look_until_s, self._asked_at_s = not more, NEVER_S, NEVER_S
        if self._turns is not None:
            self._turns.end_fetch(is_empty=not items)
            items = self._refuse_endless(items, self._turns)
        elif [True for item in items if item.request.holders]:
            items = self._take_nested(items)
        if items and not self._rules.prefetch:
            items = self._delay(items)
        if items:
            self._rows_per_item = max(sum([item.rows for item in items]), 1) / len(items)
            self._pending.extend(items)
        self._pump(more=more)

    async def fetchable(self) -> None:
        """Waits until more items may be fetched."""
        await self._fetchable.wait()

    def welcome(self, lanes: Sequence[Lane]) -> Sequence[Lane]:
        """Returns the lanes to fetch from: with a full batch, those before its last item."""
        if not self._rules.levels or not self._can_be_overtaken or self._rules.may_grow(self._waiting_rows):
            return lanes
        last, names = self._last_lane, [lane.name for lane in lanes]
        return lanes[: names.index(last)] if last in names else lanes

    def plan_fetch(self) -> tuple[int, float]:
        """Returns how many entries to fetch, and how long to wait."""
        batches = max(self._idle_count(), 1)
        if self._turns is not None:
            self._turns.begin_fetch()
        if not self._rules.merge:
            count = max(batches - len(self._pending), 1)
        else:
            rows = batches * self._rules.max_rows
            waiting = self._waiting_rows if self._pending else 0
            if not self._rules.levels or self._rules.may_grow(waiting) or not self._can_be_overtaken:
                rows -= waiting
            count = max(int(rows / self._rows_per_item), 1)
        self._asked_count = count
        if self._rules.levels:
            self._asked_at_s = self._clock.now_s()
        return count, self._fetch_wait_s

    def speed_rps(self, *, at_best: bool = False) -> float:
        """Returns requests per second, or the most possible; 0 = unknown."""
        rows = self._rules.max_rows if self._rules.merge else self._rows_per_item
        full_s = (self._latency.best_s if at_best else self._latency.full_s)(max(round(rows), 1))
        return self.model.executor.count * rows / self._rows_per_item / full_s if full_s else 0.0

    def lost(self, item: WorkItem) -> None:
        """Forgets an item whose lease is lost."""
        item.lost = True
        if not self._has_lost:
            self._has_lost = True
            self._loop.call_soon(self._pump)

    def fail(self, items: Sequence[WorkItem], error: QinferError) -> None:
        """Answers items with an error, without executing them."""
        self._outlet.publish_responses(items, self._responder.failures(items, error, self._clock.now_s(), self.tally))

    async def pause_batching(self) -> None:
        """Gives back waiting items, and awaits the other items."""
        self.paused = True
        self._recall()
        self._drop_lost()
        self._give_back()
        self._pump()
        await self._idle.wait()

    @property
    def has_work(self) -> bool:
        """Whether an item is here; for any thread."""
        return not self._idle.is_set()

    @property
    def has_room(self) -> bool:
        """Whether at most half a batch is here."""
        rows = sum(item.rows for item in self._pending) + self.executing * self._rows_per_item
        return self._rules.merge and 2 * rows <= self._rules.max_rows and self._nested.depth == 1

    @property
    def next_rows(self) -> int:
        """The rows that may join the next batches."""
        if self.paused or self._lent.count:
            return 0
        batches = max(self._idle_count(), 0) + 1
        return batches * (self._rules.max_rows if self._rules.merge else 1) - self._waiting_rows

    @property
    def waiting(self) -> list[WorkItem]:
        """The items that wait for an instance."""
        ahead = [item for execution in self.expected_ends if not execution.begin_ns for item in execution.items]
        return [*ahead, *self._nested.waiting, *self._pending]

    async def idle(self) -> None:
        """Waits until no item is here."""
        await self._idle.wait()

    def lend(self, count: int) -> None:
        """Lends instances; a negative count returns them."""
        self._lent.change(count)
        self._pump()

    def resume_batching(self) -> None:
        """Forms batches again after `pause_batching`."""
        self.paused = False
        self._pump()

    @property
    def _free_count(self) -> int:
        return self.model.executor.count - len(self.expected_ends) - self._lent.count

    def _idle_count(self) -> int:
        """Returns the number of idle instances, below 0 if a batch is placed ahead."""
        if self._turns is not None and self._turns.wanted:
            return min(self._free_count, self._turns.ready)
        if self._nested.depth == 1:
            return self._free_count
        return max(min(self._free_count, self._nested.count_free(0, self.expected_ends, self.model.executor.count)), 0)

    @property
    def _waiting_rows(self) -> int:
        return sum(item.rows for item in self._pending)

    @property
    def _last_lane(self) -> str:
        batch = policy.next_batch(self._pending, self._rules)
        return undivided(batch[-1].lease.entry.lane.name) if batch else FIRST

    @property
    def _can_be_overtaken(self) -> bool:
        return self._rules.levels and self._last_lane != FIRST

    def _looks_first(self, now_s: float) -> bool:
        if self._has_looked or not self._can_be_overtaken or self._idle_count() <= 0:
            return False
        self._look_until_s = min(self._look_until_s, min(self._asked_at_s, now_s) + LOOK_S)
        return now_s < self._look_until_s

    @property
    def _may_be_ahead(self) -> bool:
        return self._rules.ahead and not self._lent.count and self._nested.depth == 1

    @property
    def _next_has_room(self) -> bool:
        is_full = self._waiting_rows >= self._rules.max_rows if self._rules.merge else self._pending
        return not (is_full or self._bisection)

    @property
    def _fetches_ahead(self) -> bool:
        """Whether more requests may join the next batch while all instances are busy."""
        if self._idle_count() < 0 or self._bisection:
            return False
        may_join = (self._may_be_ahead and self._next_has_room) or self._rules.may_grow(self._waiting_rows)
        return may_join or self._can_be_overtaken

    def _slots(self) -> FreeSlots:
        idle = self._idle_count()
        return FreeSlots(max(idle, 0), 1 if idle >= 0 and self._turns is None and self._may_be_ahead else 0)

    def _pump(self, now_s: float | None = None, *, more: bool = False) -> None:
        """Starts and expires due items, then sets fetch gate and timer."""
        now_s = self._clock.now_s() if now_s is None else now_s
        wake_at_s = NEVER_S
        self._line_up(now_s)
        self._drop_lost()
        if now_s >= self._ahead_until_s:
            self._recall()
        self._start_nested(now_s)
        while self._pending or self._bisection:
            if self._bisection:
                self._start_bisected(now_s)
            if self._rules.levels and self._looks_first(now_s):
                wake_at_s = self._look_until_s
                break
            slots = FreeSlots(0) if self._bisection else self._slots()
            decision = policy.decide(self._pending, now_s, slots, self._rules, self._latency)
            self._pending = list(decision.keep)
            if decision.expired:
                self.fail(decision.expired, DeadlineExceeded(TIMED_OUT))
            if not decision.run:
                wake_at_s = min(decision.wake_at_s, self._bisection.first_deadline_s)
                break
            is_short = more and not decision.keep
            if is_short and policy.is_worth_filling(decision.run, now_s, self._rules, self._latency):
                self._pending, wake_at_s = decision.run, now_s + policy.FETCH_S
                break
            self._start_batch(decision.run, now_s)
        wake_at_s = min(wake_at_s, self._set_gate(now_s, wake_at_s), self._nested.first_deadline_s)
        waits = self._pending or self._bisection or self._nested.waiting
        has_work = self.executing or waits or (self._lent.is_overdue and not self.paused)
        (self._idle.clear if has_work else self._idle.set)()
        if self._timer is not None:
            self._timer.cancel()
        wait_s = min(wake_at_s, self._ahead_until_s) - now_s
        self._timer = None if wait_s == NEVER_S else self._loop.call_later(max(wait_s, 0.0), self._pump)
        while self._unanswered:
            self._answer_items(self._responder, self._unanswered.pop(0))
        self._line_up(now_s)

    def _set_gate(self, now_s: float, wake_at_s: float) -> float:
        """Lets the worker fetch or not; returns when to decide again."""
        if self._turns is not None and not (self._lent.count or self._turns.waits):
            self._lent.reset()
        gate = self._decide_gate(now_s, wake_at_s)
        if gate.gives_back:
            if gate.recalls:
                self._recall()
            self._give_back()
            gate = self._decide_gate(now_s, wake_at_s)
        if gate.open_at_s > now_s:
            self._fetchable.clear()
            return min(gate.again_at_s, gate.open_at_s)
        self._fetchable.set()
        self._fetch_wait_s = gate.wait_s
        return gate.again_at_s

    def _decide_gate(self, now_s: float, wake_at_s: float) -> FetchGate:
        """Returns the gate of the first rule that applies."""
        idle, turns = self._idle_count(), self._turns
        if turns is not None and turns.looks_until_s and not self._has_waiting:
            return FetchGate(now_s, 0.0, again_at_s=turns.looks_until_s)
        if turns is not None and turns.waits:
            return self._wait_for_instance(now_s, has_room=self._next_has_room)
        if self._lent.count and not (idle > 0 or self.expected_ends or self.paused):
            return self._wait_for_instance(now_s)
        if self.paused or (idle <= 0 and not self._latency.known):
            return policy.CLOSED
        if idle > 0:
            return FetchGate(now_s, max(wake_at_s - now_s, 0.001) if self._look_until_s == NEVER_S else 0.0)
        ends_s, usual_s = self.expected_ends.values(), self._latency.estimate_s(1)
        return policy.decide_gate(now_s, ends_s, usual_s, is_placed=idle < 0, fetches_ahead=self._fetches_ahead)

    def _wait_for_instance(self, now_s: float, *, has_room: bool = True) -> FetchGate:
        is_open, again_at_s = self._lent.decide_fetch(now_s, len(self._pending) + len(self._bisection))
        # A fetch ends before the requests are given back: it would not see them.
        wait_s = max(again_at_s - now_s, 0.001)
        open_at_s = now_s if is_open and has_room else NEVER_S
        return FetchGate(open_at_s, wait_s, again_at_s, gives_back=self._lent.is_overdue)

    @property
    def _has_waiting(self) -> bool:
        return bool(self._pending or self._bisection)

    def _on_turn(self) -> None:
        self._lent.reset()
        if self._turns is not None and not (self._has_waiting or self._turns.looks_until_s):
            self._turns.looks_until_s = self._clock.now_s() + LOOK_AT_TURN_S
        self._pump()

    def _line_up(self, now_s: float) -> None:
        """Lets an instance for each due batch wait for resources."""
        turns = self._turns
        if turns is None:
            return
        if now_s >= turns.looks_until_s:
            turns.looks_until_s = 0.0
        count = self._count_due(now_s)
        if not (self._has_waiting or self.paused):
            count = int(self._lent.is_overdue or turns.looks_until_s > 0)
        items = [*self._pending, *(item for batch in self._bisection for item in batch)]
        turns.line_up(items, min(count, self._free_count))

    def _count_due(self, now_s: float) -> int:
        if self._bisection:
            return len(self._bisection)
        if not policy.decide(self._pending, now_s, FreeSlots(1), self._rules, self._latency).run:
            return 0
        return -(-self._waiting_rows // self._rules.max_rows) if self._rules.merge else len(self._pending)

    def _refuse_endless(self, items: Sequence[WorkItem], turns: ResourceTurns) -> list[WorkItem]:
        kept: list[WorkItem] = []
        for item in items:
            if reason := turns.refusal(item):
                self.fail([item], InferenceFailed(reason))
            else:
                kept.append(item)
        return kept

    def _start_batch(self, items: list[WorkItem], now_s: float, *, apart: bool = False) -> None:
        begin_ns = time.perf_counter_ns()
        rows, requests = [item.rows for item in items], [item.request for item in items]
        is_late = self._has_strings and takes_long(requests)
        if is_late and len(items) > 1 and strings_of(requests) > self.model.spec.max_strings:
            self._bisection.cut(items)  # it may have too many strings
            return
        later: Callable[[Room | None], Batch] | None = None
        if is_late or (self._may_have_room and is_large(requests)):
            later = lambda room: assemble(requests, rows, self._ragged, None if is_late else room)  # noqa: E731
        try:
            batch = assemble(requests, rows, self._ragged) if later is None else Batch(requests=requests, rows=rows)
        except QinferError as error:
            if len(items) == 1:
                self.fail(items, error)
            else:
                self._bisection.cut(items)  # a malformed one fails alone
            return
        if gone := [item for item in items if item.is_current is not None and not item.is_current()]:
            self._start_without(gone, items, now_s, apart=apart)
            return
        self._has_looked, self._look_until_s = False, NEVER_S
        execution = self._execution(items, batch, time.perf_counter_ns() - begin_ns, apart=apart)
        execution.assemble = later
        begins_s = now_s
        is_ahead = self._idle_count() <= 0 and self._nested.depth == 1
        if is_ahead:
            begins_s = min(self.expected_ends.values())
            self._ahead_until_s = min([item.ends_s for item in items])
        if self.model.begun is not None:
            if is_ahead:
                self._ahead = items
            else:
                self.model.begun(items)
        expected_s = self._latency.estimate_s(sum(rows))
        self.expected_ends[execution] = max(begins_s, now_s) + expected_s
        self.executing += len(items)
        may_run_now = later is None and not apart and self.model.streams is None
        if may_run_now and self.model.executor.run_now(execution, expected_s):
            self._count_execution(execution)
            self._unanswered.append(execution)
        else:
            self.model.executor.start(execution, self._done)

    def _start_without(self, gone: list[WorkItem], items: list[WorkItem], now_s: float, *, apart: bool) -> None:
        """Starts a batch without the requests that ended at their gateways, where others may use the memory."""
        for item in gone:
            self.lost(item)
        if rest := [item for item in items if not item.lost]:
            self._start_batch(rest, now_s, apart=apart)

    def _execution(self, items: list[WorkItem], batch: Batch, input_ns: int, *, apart: bool) -> Execution:
        model = self.model
        if model.streams is None:
            return Execution(items, batch, input_ns, model.caller, apart=apart)
        return StreamedExecution(
            items,
            batch,
            input_ns,
            model.caller,
            apart=apart,
            table=model.streams,
            responder=self._responder,
            tally=self.tally,
        )

    def _start_bisected(self, now_s: float) -> None:
        late = self._bisection.take_late(now_s + self._latency.floor_s(now_s))
        if late:
            self.fail(late, DeadlineExceeded(TIMED_OUT))
        while self._bisection and self._idle_count() > 0:
            self._start_batch(self._bisection.popleft(), now_s, apart=True)

    def _take_nested(self, items: Sequence[WorkItem]) -> list[WorkItem]:
        depth = self._nested.depth
        others = self._nested.split_off(items)
        if self._nested.depth > depth:
            self._recall()  # it could take an instance kept for calls
        return others

    def _start_nested(self, now_s: float) -> None:
        """Starts nested requests; if all instances wait for calls, one gives way."""
        if not self._nested.waiting:
            return
        if late := self._nested.late(now_s):
            self.fail(late, DeadlineExceeded(TIMED_OUT))
        count = self.model.executor.count
        while self._free_count > 0 and (item := self._nested.next(self.expected_ends, count)) is not None:
            self._start_batch([item], now_s)
        gone = [one for one in self.expected_ends if one.gives_way]
        if self._free_count <= 0 and (victim := self._nested.victim(self.expected_ends)) is not None:
            victim.gives_way = not (victim.is_decoupled or victim.earlier)
            gone = [victim]
        for one in gone:
            if refused := self._nested.waiting_for(one):
                self.fail(refused, InferenceFailed(_ALL_WAIT.format(count, self.model.spec.name)))

    def _count_execution(self, execution: Execution) -> None:
        again: Sequence[WorkItem] = execution.unanswered if execution.error is not None else ()
        if execution.gives_way:
            again = [item for item in execution.items if not item.lost]
        self.executing -= len(execution.items)
        self.completed += len(execution.items) - len(again)
        if isinstance(execution, StreamedExecution):
            execution.leave_open()
        is_current = self.expected_ends.pop(execution, None) is not None
        if is_current:
            self._ahead_until_s = NEVER_S
            if self._ahead and self.model.begun is not None:
                self.model.begun(self._ahead)
                self._ahead = ()
        if again:
            self.tally.retried(len(again))
            if is_current and not self.paused and execution.gives_way:
                self._pending = [*self._nested.split_off(again), *self._pending]
            elif is_current and not self.paused:
                # Each may last as long: run each alone.
                self._bisection.cut(again, alone=isinstance(execution.error, ExecutionOverdue))
            else:
                self._outlet.give_back(again)
        elif is_current and execution.error is None:
            self._observe(execution)

    def _observe(self, execution: Execution) -> None:
        begin_s, end_s, now_s = execution.begin_ns / 1e9, execution.end_ns / 1e9, self._clock.now_s()
        rows = execution.batch.size
        self._latency.observe(rows, end_s - begin_s, now_s)
        # A batch that waited to grow says nothing about gaps.
        has_grown = self._rules.delay_s > 0 and rows < self._rules.largest_preferred
        oldest_s = now_s if has_grown else min(execution.items[0].enqueued_s, execution.items[-1].enqueued_s)
        self._latency.observe_gap(begin_s, end_s, now_s - oldest_s, self.model.executor.count)

    def _on_execution_end(self, responder: Responder, execution: Execution) -> None:
        """Starts the next batch before it answers this one."""
        self._count_execution(execution)
        self._pump()
        self._answer_items(responder, execution)

    def _answer_items(self, responder: Responder, execution: Execution) -> None:
        if execution.gives_way:
            return
        begin_s = self._clock.now_s() - (time.perf_counter_ns() - execution.begin_ns) / 1e9
        if execution.is_decoupled:
            responder.observe(execution, begin_s)
            return
        items, responses = responder.build_responses(execution, begin_s, self.tally)
        if items:
            self._outlet.publish_responses(items, responses)

    def _recall(self) -> None:
        self._ahead_until_s = NEVER_S
        self._ahead = ()
        for execution in reversed(self.model.executor.recall()):
            self.expected_ends.pop(execution, None)
            self.executing -= len(execution.items)
            items = [item for item in execution.items if not item.lost]
            if items and self._nested.depth > 1:
                items = self._nested.split_off(items)
            if execution.apart and items:
                self._bisection.appendleft(items)
            else:
                self._pending = [*items, *self._pending]

    def _drop_lost(self) -> None:
        if not self._has_lost:
            return
        self._has_lost = False
        if any(item.lost for execution in self.expected_ends if not execution.begin_ns for item in execution.items):
            self._recall()
        self._pending = [item for item in self._pending if not item.lost]
        self._nested.waiting = [item for item in self._nested.waiting if not item.lost]
        self._bisection.drop_lost()

    def _take_waiting(self) -> list[WorkItem]:
        items, self._pending = [*self._bisection.take_all(), *self._pending], []
        return items

    def _give_back(self) -> None:
        turns, kept = self._turns, list[WorkItem]()
        if turns is not None and not self.paused:
            kept = [item for item in self._pending if turns.holds(item)]
            self._pending = [item for item in self._pending if item not in kept]
        items, self._pending = self._take_waiting(), kept
        if self.paused:
            items, self._nested.waiting = [*self._nested.waiting, *items], []
        if items and not self._rules.prefetch:
            items = self._delay(items)
        if items:
            self._outlet.give_back(items)

    def _delay(self, items: Sequence[WorkItem]) -> list[WorkItem]:
        now_s = self._clock.now_s()
        over = [item for item in items if item.overstays(now_s)]
        if not over:
            return list(items)
        self._outlet.delay(over)
        return [item for item in items if not item.overstays(now_s)]
