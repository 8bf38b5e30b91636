"""A batcher on a bench: its executor runs when told to, its outlet remembers, its clock stands still."""

import asyncio
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from qinfer.backends.base import Batch, Context
from qinfer.backends.stub import StubBackend
from qinfer.batching.batcher import Batcher, LoadedModel
from qinfer.batching.execution import Execution, WorkItem
from qinfer.batching.policy import LatencyModel
from qinfer.core.clock import ServerClock
from qinfer.core.messages import InferRequest, Response
from qinfer.models.spec import BatchingSpec, Device, TensorSpec
from qinfer.queue.entries import Entry, Lane, Lease
from qinfer.tensors import from_numpy
from qinfer.testing import FakeClock, stub_spec

Done = Callable[[Execution], None]


class StillLoop(asyncio.SelectorEventLoop):
    """An event loop whose timers follow a clock that stands still."""

    def __init__(self, clock: FakeClock) -> None:
        super().__init__()
        self._fake = clock

    def time(self) -> float:
        """Returns the present of the fake clock."""
        return self._fake.monotonic_s()


class PickyBackend(StubBackend):
    """Echoes, but answers items whose id begins with `early` first, and then raises if there is one with `bad`.

    Attributes:
        batches: The ids of each execution.
    """

    def __init__(self) -> None:
        super().__init__()
        self.batches: list[list[str]] = []

    def execute(self, batch: Batch, ctx: Context) -> None:
        """See the class."""
        ids = [request.id for request in batch.requests]
        self.batches.append(ids)
        bad = [name for name in ids if name.startswith("bad")]
        if not bad:
            super().execute(batch, ctx)
            return
        for position, request in enumerate(batch.requests):
            if request.id.startswith("early"):
                ctx.respond(position, request.inputs and (from_numpy("y", np.ones(request.inputs[0].shape, "<f4")),))
            else:
                ctx.respond(position, (), final=False)
        raise ValueError(f"{bad[0]} can't be executed")


class Bench:
    """An executor that runs when told to, and an outlet that remembers.

    Args:
        count: Instances.

    Attributes:
        runs_now: It executes at once what it can.
        stalled: Idle instances take nothing, as if their threads got no time.
    """

    def __init__(self, count: int = 1) -> None:
        self.count = count
        self.running: list[tuple[Execution, Done]] = []
        self.queued: list[tuple[Execution, Done]] = []
        self.retired = False
        self.runs_now = False
        self.stalled = False
        self.backend = PickyBackend()
        self.backend.load(stub_spec(), None, Device())  # type: ignore[arg-type]  # the stub reads no file
        self.answered: list[tuple[WorkItem, Response]] = []
        self.given_back: list[WorkItem] = []
        self.delayed: list[WorkItem] = []

    def run_now(self, execution: Execution, expected_s: float, instance: int = 0) -> bool:
        """See `Executor`."""
        if not self.runs_now or self.running:
            return False
        execution.run(self.backend)
        return True

    def start(self, execution: Execution, done: Done, instance: int = 0) -> None:
        """See `Executor`."""
        self.queued.append((execution, done))
        self.take()

    def take(self) -> None:
        """Lets idle instances begin what is queued."""
        while self.queued and not self.stalled and len(self.running) < self.count:
            self.running.append(self.queued.pop(0))

    def recall(self) -> list[Execution]:
        """See `Executor`."""
        recalled, self.queued = [execution for execution, _ in self.queued], []
        return recalled

    def retire(self) -> None:
        """See `Executor`."""
        self.retired = True

    def end(self, position: int = 0) -> None:
        """Ends a running execution, the oldest unless another is named, and begins the next."""
        execution, done = self.running.pop(position)
        self.take()
        execution.run(self.backend)
        done(execution)

    def end_all(self) -> None:
        """Ends executions until none is running."""
        while self.running:
            self.end()

    @property
    def failures(self) -> dict[str, str]:
        """Request id → error code of what failed, and empty for what succeeded."""
        return {r.request_id: "" if r.failure is None else r.failure.code for _, r in self.answered if r.final}

    def publish_responses(self, items: Sequence[WorkItem], responses: Sequence[Response]) -> None:
        """See `Outlet`."""
        waiting = {item.request.id: item for item in items}
        self.answered.extend((waiting[response.request_id], response) for response in responses)

    def give_back(self, items: Sequence[WorkItem]) -> None:
        """See `Outlet`."""
        self.given_back.extend(items)

    def delay(self, items: Sequence[WorkItem]) -> None:
        """See `Outlet`."""
        self.delayed.extend(items)


class Scene:
    """A batcher on a bench.

    Args:
        bench: The bench.
        known_s: How long a row takes, as far as the batcher knows; 0 = it does not know.
        delay_s: The model's queue delay.
        batching: All of its `dynamic_batching`, if more than the delay is to be set.
        inputs: The model's inputs; the stub's own if there are none.
    """

    def __init__(
        self,
        bench: Bench,
        *,
        known_s: float = 0.0,
        delay_s: float = 0.0,
        batching: BatchingSpec | None = None,
        inputs: Sequence[TensorSpec] = (),
    ) -> None:
        self.bench = bench
        self.time = FakeClock()
        self.clock = ServerClock(self.time, offset_s=0.0)
        self.latency = LatencyModel()
        if known_s:
            self.latency.observe(1, known_s, self.clock.now_s())
        self.spec = stub_spec(max_queue_delay_s=delay_s)
        if batching is not None:
            self.spec = replace(self.spec, batching=batching)
        if inputs:
            self.spec = replace(self.spec, inputs=tuple(inputs))
        self.batcher = Batcher(self.model(bench), self.clock, bench, self.latency)

    def model(self, bench: Bench, generation: int = 1) -> LoadedModel:
        """Returns the model, loaded into a bench's instances."""
        return LoadedModel(spec=self.spec, version=1, generation=generation, executor=bench)

    def items(self, count: int, rows: int = 1) -> list[WorkItem]:
        """Returns items called `r0`, `r1` and so on."""
        return [self.item(f"r{index}", rows) for index in range(count)]

    def item(
        self,
        name: str,
        rows: int = 1,
        *,
        priority: int = 0,
        queue_timeout_s: float = 0.0,
        lane: str = "p1",
        age_s: float = 0.0,
    ) -> WorkItem:
        """Returns an item that was enqueued `age_s` ago, 60 s before its deadline."""
        tensor, now_s = from_numpy("x", np.ones((rows, 2), "<f4")), self.clock.now_s() - age_s
        item = WorkItem(
            rows=rows,
            key=None,
            enqueued_s=now_s,
            deadline_s=now_s + 60,
            lease=Lease(Entry(Lane("stub", 1, lane), f"1000-{name}"), "w1", b""),
            request=InferRequest(
                model="stub", inputs=(tensor,), id=name, priority=priority, queue_timeout_s=queue_timeout_s
            ),
        )
        self.batcher.classify(item)
        return item

    def can_fetch(self) -> bool:
        """Tells whether the batcher wants more."""
        return ends_at_once(self.batcher.fetchable())

    def is_idle(self) -> bool:
        """Tells whether the batcher says that nothing executes or waits to."""
        return ends_at_once(self.batcher.idle())


def ends_at_once(waiter: Coroutine[Any, Any, None], loop: asyncio.AbstractEventLoop | None = None) -> bool:
    """Tells whether a coroutine ends without waiting; `loop` is its loop, where none is running."""
    running = asyncio._get_running_loop()
    asyncio._set_running_loop(loop or running)
    try:
        waiter.send(None)
    except StopIteration:
        return True
    finally:
        asyncio._set_running_loop(running)
    waiter.close()
    return False
