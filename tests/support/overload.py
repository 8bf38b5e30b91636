"""A simulated overload: production's batchers and door around a queue, workers and callers in virtual time.

`simulate` offers a trace of requests and tells what became of each; `optimum_rows` what no schedule can exceed. Nothing
waits for the wall clock: when everybody waits, the next timer is due at once.
"""

import asyncio
import heapq
import selectors
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import cache, partial
from typing import cast

import numpy as np

from qinfer.backends.stub import StubBackend
from qinfer.batching.batcher import Batcher, LoadedModel
from qinfer.batching.execution import Execution, WorkItem
from qinfer.batching.policy import LatencyModel
from qinfer.core.clock import ServerClock
from qinfer.core.messages import InferRequest, Response
from qinfer.models.catalog import Catalog, ServedVersion
from qinfer.models.readiness import Capacity
from qinfer.models.spec import BatchingSpec, Device, InstanceSpec, ModelSpec, Routes, lanes_of
from qinfer.queue.entries import DELAYED, Entry, Lane, Lease, Share
from qinfer.queue.lanes import Queue
from qinfer.submission.backlog import POLL_S, LaneLoad, LaneLoads, queue_timeout_s
from qinfer.tensors import Tensor, from_numpy
from qinfer.testing import FakeClock, stub_spec
from tests.support.batching import Done

BASE_S, ROW_S, MAX_ROWS = 0.004, 0.0005, 16
FULL_S = BASE_S + ROW_S * MAX_ROWS
TRIP_S = 0.0005
"""A round trip to the broker, and the way of a batch to its instance."""

CAPACITY_RPS = MAX_ROWS / (TRIP_S + FULL_S)
"""Rows a second of one instance that gets one full batch after the other."""

TURN_S = 1e-6
"""The least that a turn of an event loop takes."""

BEAT_S = 1.0
"""Between two heartbeats of a worker."""


@dataclass(eq=False, slots=True)
class Caller:
    """One request of a trace, and what became of it.

    Attributes:
        arrives_s: When it comes.
        rows: Its size.
        level: Its priority level; 0 = none.
        asked_s: The queue timeout that it asks for; 0 = none.
        takes_s: How long it executes; 0 = as its rows tell.
        deadline_s: When its answer is worth nothing any more, counted from its arrival.
        answered_s: When it was answered.
        is_fine: The answer was a result.
        is_turned_away: It was refused at the door.
    """

    arrives_s: float
    rows: int = 1
    level: int = 0
    asked_s: float = 0.0
    takes_s: float = 0.0
    deadline_s: float = 60.0
    answered_s: float = 0.0
    is_fine: bool = False
    is_turned_away: bool = False


@dataclass(frozen=True, kw_only=True)
class Setting:
    """The servers that a trace is offered to.

    Attributes:
        batching: The model's `dynamic_batching`.
        workers: How many there are.
        instances: Of each worker.
        gateways: Doors, each of which sees its own requests; they take turns.
        has_door: Requests are judged before they enter.
        jitter: By how much an execution is slower or faster, at random.
        max_rows: Of a batch.
        together: A batch takes as long as the longest of its requests; else as all of them, one after the other.
        known: Executions that each worker has seen before the trace begins.
    """

    batching: BatchingSpec
    workers: int = 1
    instances: int = 1
    gateways: int = 1
    has_door: bool = True
    jitter: float = 0.0
    max_rows: int = MAX_ROWS
    together: bool = False
    known: int = 50


def optimum_rows(callers: Sequence[Caller], timeouts_s: Sequence[float], setting: Setting) -> float:
    """Returns how many rows can be begun within their timeouts at the most, by whoever knows the trace beforehand.

    A bound from above: all instances are one that many times as fast, which works at the rate of full batches, may
    stop and go on, and may do a part of a request. Earliest deadline first is then the best order.
    """
    rate = CAPACITY_RPS * setting.workers * setting.instances
    order = sorted(zip(callers, timeouts_s, strict=True), key=lambda pair: pair[0].arrives_s)
    waiting: list[list[float]] = []  # [deadline, rows left]
    done, now_s = 0.0, 0.0
    for number, (caller, timeout_s) in enumerate(order):
        now_s = max(now_s, caller.arrives_s)
        heapq.heappush(waiting, [caller.arrives_s + timeout_s + FULL_S, float(caller.rows)])
        until_s = order[number + 1][0].arrives_s if number + 1 < len(order) else float("inf")
        while waiting and now_s < until_s:
            first = waiting[0]
            part = min(first[1], (min(until_s, first[0]) - now_s) * rate)
            if part > 0:
                done, now_s, first[1] = done + part, now_s + part / rate, first[1] - part
            if first[1] <= 1e-9 or now_s >= first[0] - 1e-9:
                heapq.heappop(waiting)
            elif part <= 1e-9:
                break
    return done


def simulate(setting: Setting, callers: Sequence[Caller]) -> None:
    """Offers a trace; each caller's outcome is set on it."""
    clock = FakeClock()
    loop = _VirtualLoop(clock)
    try:
        loop.run_until_complete(_Simulation(setting, clock, callers).run())
        loop.run_until_complete(loop.shutdown_asyncgens())
    finally:
        loop.close()


class _Jump(selectors.BaseSelector):
    """A selector that sees nothing happen but time."""

    def __init__(self, clock: FakeClock) -> None:
        self._clock = clock
        self._real = selectors.SelectSelector()

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        if timeout is None:
            raise RuntimeError("everybody waits, and nothing is to come")
        # A turn of the loop takes time, or a timer that is due in less than a float can tell would be so for ever.
        self._clock.advance(max(timeout, TURN_S))
        return []

    def register(self, fileobj: object, events: int, data: object = None) -> selectors.SelectorKey:
        return self._real.register(fileobj, events, data)  # type: ignore[arg-type]  # the loop's own pipe

    def unregister(self, fileobj: object) -> selectors.SelectorKey:
        return self._real.unregister(fileobj)  # type: ignore[arg-type]  # see register

    def get_map(self) -> object:  # type: ignore[override]  # of the real one
        return self._real.get_map()

    def close(self) -> None:
        self._real.close()


class _VirtualLoop(asyncio.SelectorEventLoop):
    """An event loop whose timers are due as soon as there is nothing else to do."""

    def __init__(self, clock: FakeClock) -> None:
        super().__init__(_Jump(clock))
        self._fake = clock

    def time(self) -> float:
        return self._fake.monotonic_s()


class _Lanes:
    """A queue whose commands take a round trip."""

    def __init__(self) -> None:
        self.entries: dict[str, deque[WorkItem]] = {}
        self._waiters: set[asyncio.Future[None]] = set()

    def put(self, item: WorkItem, lane: str) -> None:
        self.entries.setdefault(lane, deque()).append(item)
        for waiter in self._waiters:
            if not waiter.done():
                waiter.set_result(None)

    async def fetch(self, lanes: Sequence[Lane], count: int, wait_s: float) -> list[WorkItem]:
        """Returns what is there, in the order of the lanes; waits for the first."""
        await asyncio.sleep(TRIP_S)
        found = self._take(lanes, count)
        loop = asyncio.get_running_loop()
        until_s = loop.time() + wait_s
        while not found and loop.time() < until_s:
            waiter: asyncio.Future[None] = loop.create_future()
            self._waiters.add(waiter)
            await asyncio.wait([waiter], timeout=until_s - loop.time() if wait_s < 1e6 else None)
            self._waiters.discard(waiter)
            found = self._take(lanes, count)
        return found

    def _take(self, lanes: Sequence[Lane], count: int) -> list[WorkItem]:
        found: list[WorkItem] = []
        for lane in lanes:
            entries = self.entries.get(lane.name, deque())
            while entries and len(found) < count:
                item = entries.popleft()
                item.lease = Lease(Entry(lane, item.lease.entry.entry_id), "w", b"")
                found.append(item)
        return found


class _Instances:
    """Instances that take the time of the model, in virtual time."""

    def __init__(self, setting: Setting, seed: int, takes_s: Callable[[Execution], float]) -> None:
        self.count = setting.instances
        self._takes_s = takes_s
        self._jitter = setting.jitter
        self._random = np.random.default_rng(seed)
        self._queued: deque[tuple[Execution, Done]] = deque()
        self._running = 0
        self._backend = StubBackend()
        self._backend.load(stub_spec(), None, Device())  # type: ignore[arg-type]  # the stub reads no file

    def run_now(self, execution: Execution, expected_s: float, instance: int = 0) -> bool:
        return False

    def start(self, execution: Execution, done: Done, instance: int = 0) -> None:
        self._queued.append((execution, done))
        self._take()

    def recall(self) -> list[Execution]:
        recalled = [execution for execution, _ in self._queued]
        self._queued.clear()
        return recalled

    def retire(self) -> None:
        """See `Executor`."""

    def _take(self) -> None:
        loop = asyncio.get_running_loop()
        while self._queued and self._running < self.count:
            execution, done = self._queued.popleft()
            self._running += 1
            takes_s = self._takes_s(execution)
            takes_s *= 1 + self._jitter * float(self._random.uniform(-1, 1))
            begin_s = loop.time() + TRIP_S
            loop.call_at(begin_s + takes_s, partial(self._end, execution, done, begin_s))

    def _end(self, execution: Execution, done: Done, begin_s: float) -> None:
        self._running -= 1
        execution.run(self._backend)
        execution.begin_ns, execution.end_ns = int(begin_s * 1e9), int(asyncio.get_running_loop().time() * 1e9)
        self._take()
        done(execution)


@dataclass(eq=False)
class _Door:
    """A gateway: its view of the lanes, and of the workers' speed as of their last heartbeats."""

    simulation: "_Simulation"
    capacity_now: Capacity = field(default_factory=Capacity)

    def __post_init__(self) -> None:
        self.backlog = LaneLoads(cast(Queue, self), cast(Catalog, self))

    async def shares(self, lanes: Sequence[Lane]) -> list[list[Share]]:
        await asyncio.sleep(TRIP_S)
        depths = self.simulation.depths(lanes)
        return [[Share(lane, depth)] for lane, depth in zip(lanes, depths, strict=True)]

    def lanes(self, model: str, version: int) -> Sequence[Lane]:
        return self.simulation.lanes

    def capacity(self, model: str, version: int) -> Capacity:
        return self.capacity_now


class _Simulation:
    def __init__(self, setting: Setting, clock: FakeClock, callers: Sequence[Caller]) -> None:
        self._setting = setting
        self._clock = ServerClock(clock, offset_s=0.0)
        self._begin_s = clock.monotonic_s()
        self._callers = callers
        self.spec: ModelSpec = replace(
            stub_spec(),
            batching=setting.batching,
            max_batch_size=setting.max_rows,
            instances=(InstanceSpec(count=setting.instances),),
        )
        self.lanes = lanes_of(self.spec, 1)
        self._routes = Routes(self.spec, 1)
        self._served = ServedVersion(spec=self.spec, version=1, generation=1, lane=self.lanes[0], routes=self._routes)
        self._queue = _Lanes()
        self._open: dict[str, tuple[Caller, LaneLoad]] = {}
        self._unanswered, self._all_answered = len(callers), asyncio.Event()

    async def run(self) -> None:
        loop = asyncio.get_running_loop()
        self._batchers = [self._batcher(number) for number in range(self._setting.workers)]
        self._doors = [_Door(self) for _ in range(self._setting.gateways)]
        for number, caller in enumerate(self._callers):
            loop.call_at(self._begin_s + caller.arrives_s, self._arrive, number, caller)
        async with asyncio.TaskGroup() as group:
            loops = [self._beat(), *map(self._work, self._batchers), *map(self._poll, self._doors)]
            tasks = [group.create_task(one) for one in loops]
            await self._all_answered.wait()
            for task in tasks:
                task.cancel()

    def depths(self, lanes: Sequence[Lane]) -> list[int]:
        """Returns how many entries of each lane are not answered."""
        counts = dict.fromkeys((lane.name for lane in lanes), 0)
        for _, load in self._open.values():
            counts[load.lane.name] += 1
        return [counts[lane.name] for lane in lanes]

    def publish_responses(self, items: Sequence[WorkItem], responses: Sequence[Response]) -> None:
        """See `Outlet`."""
        now_s = self._clock.now_s() - self._begin_s
        for response in responses:
            caller, load = self._open.pop(response.request_id)
            caller.answered_s, caller.is_fine = now_s, response.failure is None
            load.own -= 1
            load.left += 1
            load.executed += response.failure is None
            self._count_down()

    def give_back(self, items: Sequence[WorkItem]) -> None:
        """See `Outlet`."""
        for item in items:
            self._queue.put(item, item.lease.entry.lane.name)

    def delay(self, items: Sequence[WorkItem]) -> None:
        """See `Outlet`."""
        for item in items:
            self._queue.put(item, item.lease.entry.lane.name + DELAYED)

    def _batcher(self, number: int) -> Batcher:
        latency = LatencyModel()
        for rows in (1, MAX_ROWS) * (self._setting.known // 2):
            latency.observe(rows, BASE_S + ROW_S * rows, self._clock.now_s())
        instances = _Instances(self._setting, number, self._takes_s)
        model = LoadedModel(spec=self.spec, version=1, generation=1, executor=instances)
        return Batcher(model, self._clock, self, latency)

    def _takes_s(self, execution: Execution) -> float:
        own_s = [self._open[item.request.id][0].takes_s for item in execution.items]
        return (max if self._setting.together else sum)(own_s) or BASE_S + ROW_S * execution.batch.size

    async def _work(self, batcher: Batcher) -> None:
        while True:
            await batcher.fetchable()
            count, wait_s = batcher.plan_fetch()
            items = await self._queue.fetch(batcher.welcome(self.lanes), count, min(wait_s, 2.0))
            for item in items:
                batcher.classify(item)
            batcher.add_items(items)
            await asyncio.sleep(0)

    async def _poll(self, door: _Door) -> None:
        while True:
            await door.backlog.poll()
            await asyncio.sleep(POLL_S)

    async def _beat(self) -> None:
        while True:
            speeds = [batcher.speed_rps(at_best=True) for batcher in self._batchers]
            for door in self._doors:
                door.capacity_now = Capacity(sum(speeds) if all(speeds) else 0.0, 0.0, len(speeds))
            await asyncio.sleep(BEAT_S)

    def _count_down(self) -> None:
        self._unanswered -= 1
        if not self._unanswered:
            self._all_answered.set()

    def _arrive(self, number: int, caller: Caller) -> None:
        door, route = self._doors[number % len(self._doors)], self._routes.for_priority(caller.level)
        if self._setting.has_door and door.backlog.judge(self._served, route, caller.deadline_s, caller.asked_s):
            caller.answered_s, caller.is_turned_away = caller.arrives_s, True
            self._count_down()
            return
        load = door.backlog.load(self._served, route.lane)
        load.own += 1
        name, now_s = f"r{number}", self._clock.now_s()
        self._open[name] = caller, load
        request = InferRequest(
            model=self.spec.name, inputs=(_tensor(caller.rows),), id=name, priority=caller.level,
            queue_timeout_s=queue_timeout_s(route.policy, caller.asked_s),
        )  # fmt: skip
        lease = Lease(Entry(route.lane, f"{number + 1}-0"), "", b"")
        item = WorkItem(
            rows=caller.rows, key=None, enqueued_s=now_s, deadline_s=now_s + caller.deadline_s, lease=lease,
            request=request,
        )  # fmt: skip
        self._queue.put(item, route.lane.name)


@cache
def _tensor(rows: int) -> Tensor:
    return from_numpy("x", np.ones((rows, 2), "<f4"))
