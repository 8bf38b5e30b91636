"""The batcher against everything that may happen to it, in any order: nothing lost, nothing twice, no rule broken."""

import asyncio
import logging
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from itertools import count
from typing import Any

import numpy as np
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from qinfer.batching.batcher import Batcher, LoadedModel
from qinfer.batching.execution import Execution, WorkItem
from qinfer.batching.policy import NEVER_S, Rules
from qinfer.core.clock import ServerClock
from qinfer.core.messages import InferRequest
from qinfer.models.spec import BatchingSpec, QueuePolicy
from qinfer.queue.entries import Entry, Lane, Lease
from qinfer.tensors import Tensor, from_numpy
from qinfer.testing import FakeClock, stub_spec
from tests.support.batching import Bench, Done, StillLoop, ends_at_once

MAX_ROWS = 4
TICK_S = 0.5  # all instants of a run are multiples of it, so that no rounding decides

policies = st.builds(QueuePolicy, timeout_s=st.just(1.0), delay=st.booleans())
batchings = st.builds(
    lambda delay_s, levels, policy, preferred: BatchingSpec(
        preferred_sizes=tuple(sorted(preferred)),
        max_queue_delay_s=delay_s,
        priority_levels=levels,
        default_priority=levels,
        default_policy=policy,
    ),
    st.sampled_from([0.0, 2 * TICK_S]),
    st.sampled_from([0, 0, 2]),
    st.one_of(st.just(QueuePolicy()), policies),
    st.frozensets(st.integers(1, MAX_ROWS), min_size=1, max_size=2),
)
asked = st.fixed_dictionaries(
    {
        "rows": st.integers(1, MAX_ROWS),
        "width": st.sampled_from([1, 1, 1, 2]),
        "kind": st.sampled_from(["good", "good", "good", "bad", "bad", "early", "malformed"]),
        "priority": st.integers(0, 2),
        "left": st.integers(1, 8),
        "patience": st.sampled_from([0, 0, 1, 3]),
        "suspect": st.sampled_from([False, False, False, True]),
        "delayed": st.sampled_from([False, False, False, True]),
    }
)


class WatchedBench(Bench):
    """Instances of one generation, which tell the machine what is placed and what begins."""

    def __init__(self, machine: "BatcherMachine", instances: int) -> None:
        super().__init__(instances)
        self.machine = machine

    def run_now(self, execution: Execution, expected_s: float, instance: int = 0) -> bool:
        """See `Executor`."""
        if not self.runs_now or self.running or self.queued:
            return False
        self.machine.placed(self, execution)
        self.machine.begins(execution)
        self.run(execution)
        return True

    def start(self, execution: Execution, done: Done, instance: int = 0) -> None:
        """See `Executor`."""
        self.machine.placed(self, execution)
        super().start(execution, done)

    def recall(self) -> list[Execution]:
        """See `Executor`."""
        recalled = super().recall()
        for execution in recalled:
            self.machine.comes_back(execution, [item for item in execution.items if not item.lost])
        return recalled

    def take(self) -> None:
        """See `Bench`."""
        before = len(self.running)
        super().take()
        if not self.machine.stalls:  # else nobody knows when it begins
            for execution, _ in self.running[before:]:
                self.machine.begins(execution)

    def run(self, execution: Execution) -> None:
        """Executes in the time that the machine says, from an instant of its clock: real ones round differently."""
        execution.run(self.backend)
        execution.begin_ns = int(self.machine.time.monotonic_s() * 1e9)
        execution.end_ns = execution.begin_ns + int(self.machine.took_s * 1e9)
        execution.respond_ns = 0
        self.machine.ran(execution)

    def end(self, position: int = 0) -> None:
        """See `Bench`."""
        execution, done = self.running.pop(position)
        self.run(execution)
        self.take()
        done(execution)

    @property
    def held(self) -> list[WorkItem]:
        """What it runs or is to run."""
        return [item for execution, _ in (*self.running, *self.queued) for item in execution.items]


class BatcherMachine(RuleBasedStateMachine):
    """See the module docstring; the outlet is a bench of its own, whose instances are never used."""

    def __init__(self) -> None:
        super().__init__()
        logging.disable(logging.CRITICAL)
        self.time = FakeClock()
        self.clock = ServerClock(self.time, offset_s=0.0)
        self.loop = StillLoop(self.time)
        self.outlet = Bench()
        self.waiting: list[WorkItem] = []
        """What the batcher holds and has not placed."""
        self.cut: list[WorkItem] = []
        """Those of `waiting` that may not be merged any more."""
        self.lost: list[WorkItem] = []
        self.admitted: list[WorkItem] = []
        self.pausing: asyncio.Task[None] | None = None
        self.took_s, self.stalls = 0.0, False
        self.numbers = count()

    @initialize(
        batching=batchings,
        instances=st.integers(1, 2),
        known=st.booleans(),
        took_s=st.sampled_from([0.001, 1.0]),
        stalls=st.booleans(),
    )
    def load(self, *, batching: BatchingSpec, instances: int, known: bool, took_s: float, stalls: bool) -> None:
        """Loads the first generation."""
        self.took_s, self.stalls = took_s, stalls
        self.benches = [WatchedBench(self, instances)]
        with self.running():
            self.batcher = Batcher(self.model(batching, 1), self.clock, self.outlet)
        if known:
            self.batcher._latency.observe(1, took_s, self.clock.now_s())

    def model(self, batching: BatchingSpec, generation: int) -> LoadedModel:
        """Returns a generation on the newest bench."""
        spec = replace(stub_spec(dims=(-1,), max_batch_size=MAX_ROWS), batching=batching)
        return LoadedModel(spec=spec, version=1, generation=generation, executor=self.benches[-1])

    @contextmanager
    def running(self) -> Iterator[None]:
        """Makes the loop the running one, so that plain calls are as if made on it; then lets timers and tasks run."""
        asyncio._set_running_loop(self.loop)
        try:
            yield
        finally:
            asyncio._set_running_loop(None)
            for _ in range(3):
                self.loop.run_until_complete(asyncio.sleep(0))
            self.settle()

    def settle(self) -> None:
        """Takes note of what left the batcher."""
        gone = {id(item) for item in self.left}
        self.waiting = [item for item in self.waiting if id(item) not in gone]
        self.cut = [item for item in self.cut if id(item) not in gone]

    @property
    def left(self) -> list[WorkItem]:
        """Everything that left the batcher: answered, given back, delayed or lost."""
        answered = [item for item, response in self.outlet.answered if response.final]
        return [*answered, *self.outlet.given_back, *self.outlet.delayed, *self.lost]

    def placed(self, bench: WatchedBench, execution: Execution) -> None:
        """Checks a batch that the batcher formed."""
        self.settle()
        items, rules, now_s = list(execution.items), Rules.from_spec(self.batcher.model.spec), self.clock.now_s()
        assert bench is self.benches[-1], "a batch for instances that are to be unloaded"
        assert 1 <= sum(item.rows for item in items) <= MAX_ROWS
        assert len({item.request.inputs[0].shape[1:] for item in items}) == 1
        assert len(items) == 1 or not any(item.alone for item in items)
        assert all(item.deadline_s > now_s and not item.lost for item in items)
        assert all(any(item is w for w in self.waiting) for item in items), "a batch of what is not there to run"
        held = len(bench.running) + len(bench.queued)
        assert held < bench.count + (1 if rules.ahead and not execution.apart else 0), "more than has a place"
        chosen = {id(item) for item in items}
        cut = {id(item) for item in self.cut}
        assert execution.apart or not chosen & cut, "what was cut is merged again"
        self.waiting = [item for item in self.waiting if id(item) not in chosen]
        self.cut = [item for item in self.cut if id(item) not in chosen]
        if not execution.apart:
            assert not self.cut, "halves come before everything else"
            rank = dict(zip(map(id, self.waiting), self.ranks(self.waiting, rules, now_s), strict=True))
            live = [rank[id(item)] for item in self.waiting if not self.is_over(item, rules, now_s)]
            assert not live or max(self.ranks(items, rules, now_s)) <= min(live), "somebody was overtaken"

    def begins(self, execution: Execution) -> None:
        """Checks an execution that begins."""
        assert all(item.lost or item.deadline_s > self.clock.now_s() for item in execution.items), "expired work runs"

    def ran(self, execution: Execution) -> None:
        """Takes note of an execution that ended."""
        again = execution.unanswered
        assert not again or len(execution.items) > 1, "what ran alone is answered"
        self.waiting += again
        self.cut += again

    def comes_back(self, execution: Execution, items: list[WorkItem]) -> None:
        """Takes note of a batch that did not begin."""
        self.waiting += items
        self.cut += items if execution.apart else []

    def ranks(self, items: list[WorkItem], rules: Rules, now_s: float) -> list[tuple[float, float, int]]:
        """Returns items' places in the queue."""
        order = dict(zip(map(id, self.admitted), range(len(self.admitted)), strict=True))
        ranks: list[tuple[float, float, int]] = []
        for item in items:
            late = item.delayed or (item.delays and item.queue_deadline_s <= now_s)
            if rules.prefetch:
                ranks.append((0, 0, order[id(item)]))
            elif late:
                ranks.append((item.level, item.queue_deadline_s, 0))
            else:
                ranks.append((item.level, -NEVER_S, order[id(item)]))
        return ranks

    def is_over(self, item: WorkItem, rules: Rules, now_s: float) -> bool:
        """Tells whether an item is to be refused."""
        impatient = item.queue_deadline_s <= now_s and not item.delays and not item.delayed
        return item.deadline_s <= now_s or (not rules.prefetch and impatient)

    @rule(wanted=st.lists(asked, min_size=1, max_size=5))
    def admit(self, wanted: list[dict[str, Any]]) -> None:
        """Entries were fetched, or suspects reclaimed."""
        items = [self.item(**fields) for fields in wanted]
        self.take_in(items)

    def item(self, **asked: Any) -> WorkItem:
        """Makes an item."""
        name, now_s = f"{asked['kind']}{next(self.numbers)}", self.clock.now_s()
        tensor = from_numpy("x", np.ones((asked["rows"], asked["width"]), "<f4"))
        if asked["kind"] == "malformed":
            tensor = Tensor("x", "FP32", tensor.shape, b"short")
        return WorkItem(
            rows=asked["rows"],
            key=None,
            enqueued_s=now_s,
            deadline_s=now_s + asked["left"] * TICK_S,
            alone=asked["suspect"],
            lease=Lease(Entry(Lane("stub", 1, "p1.delayed" if asked["delayed"] else "p1"), f"1000-{name}"), "w", b""),
            request=InferRequest(
                model="stub",
                inputs=(tensor,),
                id=name,
                priority=asked["priority"],
                queue_timeout_s=asked["patience"] * TICK_S,
            ),
        )

    def take_in(self, items: list[WorkItem]) -> None:
        """Admits items, as the worker does."""
        for item in items:
            self.batcher.classify(item)
        again = {id(item) for item in items}
        self.admitted = [*(item for item in self.admitted if id(item) not in again), *items]
        self.waiting += items
        with self.running():
            self.batcher.add_items(items)

    @precondition(lambda self: any(bench.running for bench in self.benches))
    @rule(choice=st.integers(0, 7))
    def end(self, choice: int) -> None:
        """An execution ends, whichever."""
        running = [(bench, position) for bench in self.benches for position in range(len(bench.running))]
        bench, position = running[choice % len(running)]
        with self.running():
            bench.end(position)

    @rule(ticks=st.integers(1, 3))
    def advance(self, ticks: int) -> None:
        """Time passes; timers come as late as it jumped."""
        self.time.advance(ticks * TICK_S)
        with self.running():
            pass

    @precondition(lambda self: not all(item.lost for item in self.holdings()))
    @rule(choice=st.integers(0, 31))
    def lose(self, choice: int) -> None:
        """A lease is lost."""
        items = [item for item in self.holdings() if not item.lost]
        item = items[choice % len(items)]
        self.lost.append(item)
        with self.running():
            self.batcher.lost(item)

    @precondition(lambda self: self.pausing is None)
    @rule()
    def pause(self) -> None:
        """The worker empties its hands."""
        self.pausing = self.loop.create_task(self.batcher.pause_batching())
        with self.running():
            pass

    @precondition(lambda self: self.pausing is not None)
    @rule()
    def resume(self) -> None:
        """The worker goes on."""
        assert self.pausing is not None
        self.pausing.cancel()
        self.pausing = None
        with self.running():
            self.batcher.resume_batching()

    @rule(batching=batchings, instances=st.integers(1, 2))
    def replace(self, batching: BatchingSpec, instances: int) -> None:
        """Another generation of the model is loaded."""
        old = self.benches[-1]
        self.benches.append(WatchedBench(self, instances))
        with self.running():
            waiting = self.batcher.replace(self.model(batching, len(self.benches)))
        assert old.retired
        assert {id(item) for item in waiting} == {id(item) for item in self.holdings(executing=False)}
        self.waiting, self.cut = [], []
        self.take_in(waiting)

    @rule(runs_now=st.booleans())
    def change_speed(self, *, runs_now: bool) -> None:
        """Executions become short enough for the event loop, or do not."""
        self.benches[-1].runs_now = runs_now

    @precondition(lambda self: self.stalls)
    @rule(stalled=st.booleans())
    def stall(self, *, stalled: bool) -> None:
        """Idle instances get no time to begin what is placed, or get it again."""
        self.benches[-1].stalled = stalled
        self.benches[-1].take()

    def holdings(self, *, executing: bool = True) -> list[WorkItem]:
        """Returns what the batcher is to answer for."""
        held = [item for bench in self.benches for item in bench.held] if executing else []
        return [*held, *self.waiting]

    @invariant()
    def nothing_leaves_twice(self) -> None:
        """Each item is answered once, or given back, or delayed, or lost: one of them, once."""
        ids = [id(item) for item in self.left]
        assert len(ids) == len(set(ids))

    @invariant()
    def nothing_disappears(self) -> None:
        """What has not left is executing, or waits."""
        here = {id(item) for item in (*self.left, *self.holdings())}
        assert here == {id(item) for item in self.admitted}
        waits = {id(item) for item in (*self.batcher._pending, *(i for b in self.batcher._bisection for i in b))}
        assert waits == {id(item) for item in self.waiting}

    @invariant()
    def counts_are_right(self) -> None:
        """`executing` is what the instances hold, and idle means: neither that nor anything waiting."""
        held = sum(len(bench.held) for bench in self.benches)
        assert self.batcher.executing == held
        assert ends_at_once(self.batcher.idle(), self.loop) == (held == 0 and not self.waiting)

    @invariant()
    def nothing_late_waits(self) -> None:
        """What is past its deadline is answered, whether instances are busy or not; and so is what is refused.

        What another generation left may wait for a look for requests of higher levels, which ends before time passes.
        """
        rules, now_s = Rules.from_spec(self.batcher.model.spec), self.clock.now_s()
        if now_s < self.batcher._look_until_s < NEVER_S:
            return
        pending = {id(item) for item in self.batcher._pending}
        for item in self.waiting:
            assert item.deadline_s > now_s
            assert id(item) not in pending or not self.is_over(item, rules, now_s)

    @invariant()
    def idle_instances_ask_for_work(self) -> None:
        """And a batcher that is paused does not."""
        bench = self.benches[-1]
        asks = ends_at_once(self.batcher.fetchable(), self.loop)
        if self.batcher.paused:
            assert not asks
        elif len(bench.running) + len(bench.queued) < bench.count:
            assert asks
        assert self.batcher.plan_fetch()[0] >= 1

    def teardown(self) -> None:
        """Lets everything end: then everything has left, and the statistics agree with the answers."""
        try:
            if hasattr(self, "batcher"):
                for _ in range(40):
                    self.advance(1)
                    for bench in self.benches:
                        bench.stalled = False
                        bench.take()
                        while bench.running:
                            with self.running():
                                bench.end()
                assert self.holdings() == []
                self.counts_are_right()
                self.nothing_disappears()
                finals = [response for _, response in self.outlet.answered if response.final]
                stats = self.batcher.tally.drain()
                failed = sum(count for name, count in stats.items() if name.startswith("failures:"))
                assert stats.get("success_count", 0) == sum(response.failure is None for response in finals)
                assert failed == sum(response.failure is not None for response in finals)
        finally:
            if self.pausing is not None:
                self.pausing.cancel()
                self.loop.run_until_complete(asyncio.sleep(0))
            self.loop.close()
            logging.disable(logging.NOTSET)


BatcherMachine.TestCase.settings = settings(stateful_step_count=30, deadline=None)
TestBatcher = BatcherMachine.TestCase
