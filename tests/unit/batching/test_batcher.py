"""The batcher's own rules: one batch ahead, nothing hoarded, nothing lost when models change or work stops."""

import asyncio
from contextlib import suppress
from dataclasses import replace

import pytest

from qinfer.batching.batcher import Batcher
from qinfer.batching.execution import Execution
from qinfer.batching.policy import NEVER_S, OVERDUE_S
from qinfer.core.messages import InferRequest
from qinfer.testing import eventually
from tests.support.batching import Bench, Done, Scene


@pytest.fixture
async def scene() -> Scene:
    return Scene(Bench(), known_s=1.0)


async def test_idle_instance_starts_at_once(scene: Scene) -> None:
    """Without a delay the first item does not wait for company."""
    scene.batcher.add_items(scene.items(1))

    assert len(scene.bench.running) == 1


@pytest.mark.parametrize(
    ("backend", "is_later"), [("onnxruntime", False), ("python", True), ("forest", True), ("identity", True)]
)
async def test_large_batches_are_made_in_the_memory_of_a_models_process(backend: str, *, is_later: bool) -> None:
    """By the thread of its instance; `identity` stands for Triton's backends in C."""
    scene = Scene(Bench())
    scene.spec = replace(scene.spec, backend=backend)
    batcher = Batcher(scene.model(scene.bench), scene.clock, scene.bench)

    batcher.add_items([scene.item("r0", rows=20_000)])

    assert (scene.bench.running[0][0].assemble is not None) is is_later


async def test_everyone_is_answered(scene: Scene) -> None:
    """Each item of an execution gets its response."""
    items = scene.items(3)
    scene.batcher.add_items(items)
    scene.bench.end()

    assert [item for item, _ in scene.bench.answered] == items
    assert all(response.failure is None for _, response in scene.bench.answered)


async def test_open_batch_grows_while_the_instance_is_busy(scene: Scene) -> None:
    """What comes during an execution runs together after it."""
    scene.batcher.add_items(scene.items(1))
    for _ in range(3):
        scene.batcher.add_items(scene.items(1))
    scene.bench.end()

    assert [len(execution.items) for execution, _ in scene.bench.running] == [3]


async def test_one_full_batch_is_placed_ahead(scene: Scene) -> None:
    """A full batch is ready before the running one ends; a second one is not."""
    scene.batcher.add_items(scene.items(1))
    scene.batcher.add_items(scene.items(16))

    assert [len(execution.items) for execution, _ in scene.bench.queued] == [8]
    assert not scene.can_fetch()


async def test_fetches_late_behind_a_long_execution(scene: Scene) -> None:
    """Asks for the next batch only when the running one is about to end."""
    scene.batcher.add_items(scene.items(1))
    assert not scene.can_fetch()

    scene.time.advance(0.999)
    scene.batcher.add_items([])

    assert scene.can_fetch()
    count, wait_s = scene.batcher.plan_fetch()
    assert count == 8
    assert wait_s < 0.1


async def test_gives_back_behind_an_overdue_execution(scene: Scene) -> None:
    """Nobody knows when it ends: what waits goes to other workers, a batch placed ahead too."""
    scene.batcher.add_items(scene.items(1))
    waiting = scene.items(10)
    scene.batcher.add_items(waiting)

    scene.time.advance(2.0 + OVERDUE_S)
    scene.batcher.add_items([])

    assert scene.bench.given_back == waiting
    assert not scene.can_fetch()


async def test_fetches_nothing_ahead_of_an_unknown_model() -> None:
    """Without knowledge of its speed, waits until the execution ended."""
    scene = Scene(Bench())
    scene.batcher.add_items(scene.items(1))
    assert not scene.can_fetch()

    scene.bench.end()

    assert scene.can_fetch()


async def test_idle_worker_waits_for_entries_as_long_as_it_likes(scene: Scene) -> None:
    """An idle worker blocks in its read, with room for a whole batch."""
    assert scene.can_fetch()
    assert scene.batcher.plan_fetch() == (8, NEVER_S)


async def test_room_counts_rows(scene: Scene) -> None:
    """Having seen items of 4 rows, asks for as many entries as fit."""
    scene.batcher.add_items(scene.items(1, rows=4))
    scene.bench.end()

    assert scene.batcher.plan_fetch()[0] == 2


async def test_pause_gives_back_and_waits_for_what_runs(scene: Scene) -> None:
    """A pause ends when the instances are idle, and nothing is fetched during it."""
    scene.batcher.add_items(scene.items(1))
    waiting = scene.items(12)
    scene.batcher.add_items(waiting)
    pausing = asyncio.create_task(scene.batcher.pause_batching())
    await eventually(lambda: len(scene.bench.given_back) == 12)
    assert not pausing.done()

    scene.bench.end()
    await pausing

    assert scene.bench.given_back == waiting
    assert not scene.can_fetch()
    scene.batcher.resume_batching()
    assert scene.can_fetch()


async def test_lost_item_is_neither_run_nor_answered(scene: Scene) -> None:
    """A lost lease takes the item out of the queue, or its answer out of the batch."""
    running, waiting = scene.items(2), scene.items(2)
    scene.batcher.add_items(running)
    scene.batcher.add_items(waiting)
    scene.batcher.lost(running[0])
    scene.batcher.lost(waiting[0])
    scene.bench.end()
    scene.bench.end()

    assert [item for item, _ in scene.bench.answered] == [running[1], waiting[1]]


@pytest.mark.parametrize("gone", [(0,), (1, 2), (0, 1, 2)])
async def test_what_was_overwritten_while_it_was_copied_is_not_executed(scene: Scene, gone: tuple[int, ...]) -> None:
    """A request that has ended at its gateway leaves its memory to another one; the others of its batch go on."""
    items = scene.items(3)
    for number, item in enumerate(items):
        item.is_current = lambda number=number: number not in gone
    scene.batcher.add_items(items)
    scene.bench.end_all()

    assert [item for item, _ in scene.bench.answered] == [item for n, item in enumerate(items) if n not in gone]
    assert [item.lost for item in items] == [number in gone for number in range(3)]
    await asyncio.wait_for(scene.batcher.pause_batching(), 5.0)


async def test_a_lost_item_of_a_batch_that_waits_for_an_instance_is_not_executed(scene: Scene) -> None:
    """The batch is made anew, and another item has its place."""
    scene.batcher.add_items(scene.items(1))
    waiting = scene.items(9)
    scene.batcher.add_items(waiting)

    scene.batcher.lost(waiting[2])
    await asyncio.sleep(0)

    (ahead,) = [execution for execution, _ in scene.bench.queued]
    assert list(ahead.items) == [*waiting[:2], *waiting[3:]]
    assert scene.batcher.executing == 9


class CountingBench(Bench):
    """Notes how many items the batches have that are made."""

    def __init__(self) -> None:
        super().__init__()
        self.made: list[int] = []

    def start(self, execution: Execution, done: Done, instance: int = 0) -> None:
        self.made.append(len(execution.items))
        super().start(execution, done, instance)


async def test_items_that_are_lost_together_have_their_batch_made_anew_once() -> None:
    """Such as those of a caller that leaves; others have their places."""
    scene = Scene(bench := CountingBench(), known_s=1.0)
    scene.batcher.add_items(scene.items(1))
    waiting = scene.items(12)
    scene.batcher.add_items(waiting)

    for item in waiting[:4]:
        scene.batcher.lost(item)
    await asyncio.sleep(0)

    assert bench.made == [1, 8, 8]
    assert [list(execution.items) for execution, _ in bench.queued] == [waiting[4:]]


async def test_a_batcher_that_pauses_gives_no_lost_item_back(scene: Scene) -> None:
    """Neither of a batch that waits for an instance, nor of what comes after it."""
    scene.batcher.add_items(scene.items(1))
    waiting = scene.items(12)
    scene.batcher.add_items(waiting)
    for item in (waiting[0], waiting[-1]):
        scene.batcher.lost(item)

    with suppress(TimeoutError):
        async with asyncio.timeout(0):
            await scene.batcher.pause_batching()

    assert scene.bench.given_back == waiting[1:-1]


async def test_replace_keeps_what_waits(scene: Scene) -> None:
    """The new instances take over; the old ones end what runs, and are retired."""
    scene.batcher.add_items(scene.items(1))
    waiting = scene.items(9)
    scene.batcher.add_items(waiting)
    new = Bench()

    left = scene.batcher.replace(scene.model(new, generation=2))
    scene.batcher.add_items(left)
    scene.bench.end()

    assert left == waiting
    assert scene.bench.retired
    assert len(new.running) == 1
    assert len(scene.bench.answered) == 1


async def test_malformed_item_fails_alone(scene: Scene) -> None:
    """An item whose bytes do not fill its shape does not spoil its batch."""
    scene.batcher.add_items(scene.items(1))
    bad, good = scene.items(2)
    tensor = good.request.inputs[0]
    bad.request = InferRequest(
        model="stub", id="bad", inputs=(type(tensor)(tensor.name, "FP32", tensor.shape, b"short"),)
    )
    scene.batcher.add_items([bad, good])
    scene.bench.end()
    while scene.bench.running:
        scene.bench.end()

    failures = {item.request.id: response.failure for item, response in scene.bench.answered}
    assert failures["bad"] is not None
    assert failures[good.request.id] is None


async def test_short_execution_is_answered_in_the_same_step(scene: Scene) -> None:
    """What the executor ran at once leaves no instance busy, and its items have their answers."""
    scene.bench.runs_now = True

    scene.batcher.add_items(scene.items(3))

    assert [item.request.id for item, _ in scene.bench.answered] == ["r0", "r1", "r2"]
    assert scene.batcher.executing == 0
    assert scene.can_fetch()


async def test_an_overdue_execution_takes_nothing_from_an_idle_instance() -> None:
    """The idle instance's thread takes its batch in a moment; a batch given back would come again, and again."""
    scene = Scene(Bench(2), known_s=1.0)
    scene.batcher.add_items(scene.items(1))
    scene.time.advance(2.0 + OVERDUE_S)
    scene.bench.stalled = True

    scene.batcher.add_items(scene.items(1))

    assert scene.bench.given_back == []
    scene.bench.stalled = False
    scene.bench.take()
    assert len(scene.bench.running) == 2


async def test_a_batch_that_no_instance_took_is_overdue_too(scene: Scene) -> None:
    """Threads may be starved: what was recalled frees its instance, and the batcher asks for work again."""
    scene.bench.stalled = True
    items = scene.items(1)
    scene.batcher.add_items(items)
    scene.time.advance(2.0 + OVERDUE_S)
    scene.batcher.add_items([])

    assert scene.bench.given_back == items
    assert scene.can_fetch()
    assert scene.is_idle()
