"""The batcher's own rules: one batch ahead, nothing hoarded, nothing lost when models change or work stops."""

import asyncio
from collections.abc import Callable, Sequence

import numpy as np
import pytest

from qinfer.backends.base import Backend
from qinfer.backends.stub import StubBackend
from qinfer.batching.batcher import OVERDUE_S, Batcher, LoadedModel
from qinfer.batching.execution import Execution, Pending
from qinfer.batching.latency import LatencyModel
from qinfer.batching.policy import NEVER_S
from qinfer.clock import ServerClock
from qinfer.delivery.base import Entry, Lane, Lease
from qinfer.messages import InferRequest, Response
from qinfer.tensors import from_numpy
from qinfer.testing import FakeClock, eventually, stub_spec

Done = Callable[[Execution], None]


class Bench:
    """An executor that runs when told to, and an outlet that remembers."""

    def __init__(self, count: int = 1) -> None:
        self.count = count
        self.running: list[tuple[Execution, Done]] = []
        self.queued: list[tuple[Execution, Done]] = []
        self.retired = False
        self.runs_now = False
        self.backend: Backend = StubBackend()
        self.backend.load(stub_spec(), None)  # type: ignore[arg-type]  # the stub reads no file
        self.answered: list[tuple[Pending, Response]] = []
        self.given_back: list[Pending] = []

    def run_now(self, execution: Execution, expected_s: float) -> bool:
        if not self.runs_now:
            return False
        execution.run(self.backend)
        return True

    def start(self, execution: Execution, done: Done) -> None:
        (self.running if len(self.running) < self.count else self.queued).append((execution, done))

    def recall(self) -> list[Execution]:
        recalled, self.queued = [execution for execution, _ in self.queued], []
        return recalled

    def retire(self) -> None:
        self.retired = True

    def end(self) -> None:
        """Ends the oldest running execution, and begins the next."""
        execution, done = self.running.pop(0)
        if self.queued:
            self.running.append(self.queued.pop(0))
        execution.run(self.backend)
        done(execution)

    def answer(self, items: Sequence[Pending], responses: Sequence[Response]) -> None:
        self.answered.extend(zip(items, responses, strict=True))

    def give_back(self, items: Sequence[Pending]) -> None:
        self.given_back.extend(items)


class Scene:
    """A batcher on a bench."""

    def __init__(self, bench: Bench, *, known_s: float = 0.0, delay_s: float = 0.0) -> None:
        self.bench = bench
        self.time = FakeClock()
        self.clock = ServerClock(self.time, offset_s=0.0)
        latency = LatencyModel()
        if known_s:
            latency.observe(1, known_s, self.clock.now_s())
        self.spec = stub_spec(max_queue_delay_s=delay_s)
        self.batcher = Batcher(self.model(bench), self.clock, bench, latency)

    def model(self, bench: Bench, generation: int = 1) -> LoadedModel:
        return LoadedModel(spec=self.spec, version=1, generation=generation, executor=bench)

    def items(self, count: int, rows: int = 1) -> list[Pending]:
        tensor = from_numpy("x", np.ones((rows, 2), "<f4"))
        return [
            self._item(f"r{index}", InferRequest(model="stub", inputs=(tensor,), id=f"r{index}"), rows)
            for index in range(count)
        ]

    def _item(self, name: str, request: InferRequest, rows: int) -> Pending:
        now_s = self.clock.now_s()
        lease = Lease(Entry(Lane("stub", 1), f"1000-{name}"), "w1", b"")
        return Pending(rows=rows, key=None, enqueued_s=now_s, deadline_s=now_s + 60, lease=lease, request=request)

    def can_fetch(self) -> bool:
        waiter = self.batcher.fetchable()
        try:
            waiter.send(None)
        except StopIteration:
            return True
        waiter.close()
        return False


@pytest.fixture
async def scene() -> Scene:
    return Scene(Bench(), known_s=1.0)


async def test_idle_instance_starts_at_once(scene: Scene) -> None:
    """Without a delay the first item does not wait for company."""
    scene.batcher.admit(scene.items(1))

    assert len(scene.bench.running) == 1


async def test_everyone_is_answered(scene: Scene) -> None:
    """Each item of an execution gets its response."""
    items = scene.items(3)
    scene.batcher.admit(items)
    scene.bench.end()

    assert [item for item, _ in scene.bench.answered] == items
    assert all(response.failure is None for _, response in scene.bench.answered)


async def test_open_batch_grows_while_the_instance_is_busy(scene: Scene) -> None:
    """What comes during an execution runs together after it."""
    scene.batcher.admit(scene.items(1))
    for _ in range(3):
        scene.batcher.admit(scene.items(1))
    scene.bench.end()

    assert [len(execution.items) for execution, _ in scene.bench.running] == [3]


async def test_one_full_batch_is_placed_ahead(scene: Scene) -> None:
    """A full batch is ready before the running one ends; a second one is not."""
    scene.batcher.admit(scene.items(1))
    scene.batcher.admit(scene.items(16))

    assert [len(execution.items) for execution, _ in scene.bench.queued] == [8]
    assert not scene.can_fetch()


async def test_fetches_late_behind_a_long_execution(scene: Scene) -> None:
    """Asks for the next batch only when the running one is about to end."""
    scene.batcher.admit(scene.items(1))
    assert not scene.can_fetch()

    scene.time.advance(0.999)
    scene.batcher.admit([])

    assert scene.can_fetch()
    count, wait_s = scene.batcher.room()
    assert count == 8
    assert wait_s < 0.1


async def test_gives_back_behind_an_overdue_execution(scene: Scene) -> None:
    """Nobody knows when it ends: what waits goes to other workers, a batch placed ahead too."""
    scene.batcher.admit(scene.items(1))
    waiting = scene.items(10)
    scene.batcher.admit(waiting)

    scene.time.advance(2.0 + OVERDUE_S)
    scene.batcher.admit([])

    assert scene.bench.given_back == waiting
    assert not scene.can_fetch()


async def test_fetches_nothing_ahead_of_an_unknown_model() -> None:
    """Without knowledge of its speed, waits until the execution ended."""
    scene = Scene(Bench())
    scene.batcher.admit(scene.items(1))
    assert not scene.can_fetch()

    scene.bench.end()

    assert scene.can_fetch()


async def test_idle_worker_waits_for_entries_as_long_as_it_likes(scene: Scene) -> None:
    """An idle worker blocks in its read, with room for a whole batch."""
    assert scene.can_fetch()
    assert scene.batcher.room() == (8, NEVER_S)


async def test_room_counts_rows(scene: Scene) -> None:
    """Having seen items of 4 rows, asks for as many entries as fit."""
    scene.batcher.admit(scene.items(1, rows=4))
    scene.bench.end()

    assert scene.batcher.room()[0] == 2


async def test_pause_gives_back_and_waits_for_what_runs(scene: Scene) -> None:
    """A pause ends when the instances are idle, and nothing is fetched during it."""
    scene.batcher.admit(scene.items(1))
    waiting = scene.items(12)
    scene.batcher.admit(waiting)
    pausing = asyncio.create_task(scene.batcher.pause())
    await eventually(lambda: len(scene.bench.given_back) == 12)
    assert not pausing.done()

    scene.bench.end()
    await pausing

    assert scene.bench.given_back == waiting
    assert not scene.can_fetch()
    scene.batcher.resume()
    assert scene.can_fetch()


async def test_lost_item_is_neither_run_nor_answered(scene: Scene) -> None:
    """A lost lease takes the item out of the queue, or its answer out of the batch."""
    running, waiting = scene.items(2), scene.items(2)
    scene.batcher.admit(running)
    scene.batcher.admit(waiting)
    scene.batcher.lost(running[0])
    scene.batcher.lost(waiting[0])
    scene.bench.end()
    scene.bench.end()

    assert [item for item, _ in scene.bench.answered] == [running[1], waiting[1]]


async def test_replace_keeps_what_waits(scene: Scene) -> None:
    """The new instances take over; the old ones end what runs, and are retired."""
    scene.batcher.admit(scene.items(1))
    waiting = scene.items(9)
    scene.batcher.admit(waiting)
    new = Bench()

    left = scene.batcher.replace(scene.model(new, generation=2))
    scene.batcher.admit(left)
    scene.bench.end()

    assert left == waiting
    assert scene.bench.retired
    assert len(new.running) == 1
    assert len(scene.bench.answered) == 1


async def test_malformed_item_fails_alone(scene: Scene) -> None:
    """An item whose bytes do not fill its shape does not spoil its batch."""
    scene.batcher.admit(scene.items(1))
    bad, good = scene.items(2)
    tensor = good.request.inputs[0]
    bad.request = InferRequest(
        model="stub", id="bad", inputs=(type(tensor)(tensor.name, "FP32", tensor.shape, b"short"),)
    )
    scene.batcher.admit([bad, good])
    scene.bench.end()
    while scene.bench.running:
        scene.bench.end()

    failures = {item.request.id: response.failure for item, response in scene.bench.answered}
    assert failures["bad"] is not None
    assert failures[good.request.id] is None


async def test_short_execution_is_answered_in_the_same_step(scene: Scene) -> None:
    """What the executor ran at once leaves no instance busy, and its items have their answers."""
    scene.bench.runs_now = True

    scene.batcher.admit(scene.items(3))

    assert [item.request.id for item, _ in scene.bench.answered] == ["r0", "r1", "r2"]
    assert scene.batcher.executing == 0
    assert scene.can_fetch()
