"""Priorities and queue policies in the batcher (reference §3.3): who goes first, who is refused, who goes behind."""

import asyncio

import pytest

from qinfer.batching.policy import FETCH_LEAD_S, FETCH_S, Item, LatencyModel, Rules, is_worth_filling
from qinfer.models.spec import BatchingSpec, QueuePolicy
from qinfer.queue.entries import Lane
from qinfer.testing import eventually
from tests.support.batching import Bench, Scene

DELAYS, REJECTS = QueuePolicy(timeout_s=1.0, delay=True), QueuePolicy(timeout_s=1.0)


def batching(levels: int = 2, policy: QueuePolicy | None = None) -> BatchingSpec:
    return BatchingSpec(
        preferred_sizes=(8,),
        priority_levels=levels,
        default_priority=levels,
        default_policy=policy or QueuePolicy(),
    )


@pytest.fixture
async def scene() -> Scene:
    return Scene(Bench(), known_s=1.0, batching=batching())


def ids(scene: Scene) -> list[list[str]]:
    return scene.bench.backend.batches


async def test_a_higher_level_goes_first(scene: Scene) -> None:
    """Batches may mix levels; within one, who came first is first."""
    scene.batcher.add_items([scene.item("first")])
    scene.batcher.add_items([scene.item("low1", 4), scene.item("low2", 4), scene.item("low3", 4)])
    scene.batcher.add_items([scene.item("high", 4, priority=1)])
    scene.bench.end_all()

    assert ids(scene) == [["first"], ["high", "low1"], ["low2", "low3"]]


async def test_nothing_is_placed_ahead_where_priorities_count(scene: Scene) -> None:
    """A full batch waits until an instance does; just before, whoever goes first is still fetched."""
    lanes = [Lane("stub", 1, "p1"), Lane("stub", 1, "p2"), Lane("stub", 1, "p2.delayed")]
    scene.batcher.add_items(scene.items(1))
    scene.batcher.add_items([scene.item(f"low{n}", lane="p2") for n in range(8)])
    scene.time.advance(0.99)
    scene.batcher.add_items([])
    assert not scene.can_fetch()
    scene.time.advance(0.007)
    scene.batcher.add_items([])

    assert scene.bench.queued == []
    assert scene.can_fetch()
    assert scene.batcher.welcome(lanes) == lanes[:1]
    assert scene.batcher.plan_fetch() == (8, FETCH_LEAD_S)
    scene.batcher.add_items([scene.item("high", 8, priority=1)])
    assert not scene.can_fetch()
    scene.bench.end()
    scene.bench.end()
    assert ids(scene)[1] == ["high"]


async def test_the_next_batch_is_fetched_just_before_an_instance_is_idle() -> None:
    """As much as it lacks, from all lanes; what expires meanwhile leaves a place to be filled."""
    lanes = [Lane("stub", 1, "p1"), Lane("stub", 1, "p1.delayed")]
    scene = Scene(Bench(), known_s=1.0, batching=batching(0, REJECTS))
    scene.batcher.add_items(scene.items(1))
    scene.time.advance(0.9)
    scene.batcher.add_items([])
    assert not scene.can_fetch()
    scene.time.advance(0.097)
    scene.batcher.add_items([])

    assert scene.can_fetch()
    assert scene.batcher.plan_fetch() == (8, FETCH_LEAD_S)
    scene.batcher.add_items([scene.item("short", queue_timeout_s=0.001), *scene.items(7)])
    assert (scene.can_fetch(), len(scene.bench.queued)) == (False, 1)
    scene.time.advance(0.001)
    scene.batcher.add_items([])
    assert (scene.can_fetch(), scene.bench.queued) == (True, [])
    assert (scene.batcher.plan_fetch()[0], scene.batcher.welcome(lanes)) == (1, lanes)
    scene.batcher.add_items([scene.item("more")])
    scene.bench.end_all()
    assert len(ids(scene)[1]) == 8
    assert scene.bench.failures["short"]


async def test_what_was_delayed_before_waits_on_where_requests_are_refused_now() -> None:
    """Its queue timeout is over, and ends nothing: a batch with it is taken back by its deadline only."""
    scene = Scene(Bench(), known_s=1.0, batching=batching(0, REJECTS))
    scene.batcher.add_items(scene.items(1))
    old = [scene.item(f"old{n}", queue_timeout_s=0.1, lane="p1.delayed", age_s=9.0) for n in range(8)]
    scene.batcher.add_items(old)
    scene.time.advance(0.01)
    scene.batcher.add_items([])

    assert len(scene.bench.queued) == 1
    scene.bench.end_all()
    assert len(ids(scene)[1]) == 8


async def test_the_places_of_what_has_expired_are_filled_before_a_batch_starts() -> None:
    """By another fetch."""
    scene = Scene(Bench(), batching=batching(0, REJECTS))
    for rows in (1, 8):  # 1 s and 0.1 s a row
        scene.latency.observe(rows, 1.0 + 0.1 * rows, scene.clock.now_s())
    scene.batcher.plan_fetch()
    scene.batcher.add_items(
        [*(scene.item(f"late{n}", queue_timeout_s=1e-6, age_s=1.0) for n in range(6)), *scene.items(2)]
    )

    assert (scene.bench.running, scene.can_fetch()) == ([], True)
    assert scene.batcher.plan_fetch()[0] == 6
    scene.batcher.add_items([scene.item(f"more{n}") for n in range(6)])
    scene.bench.end_all()
    assert [len(batch) for batch in ids(scene)] == [8]
    assert sum(bool(code) for code in scene.bench.failures.values()) == 6


@pytest.mark.parametrize(
    ("rows", "deadline_s", "queue_deadline_s", "delays", "pays"),
    [
        (7, 9.0, 9.0, False, False),
        (3, 9.0, 9.0, False, True),
        (8, 9.0, 9.0, False, False),
        (3, 0.018, 9.0, False, False),
        (3, 9.0, 0.002, False, False),
        (3, 9.0, 0.002, True, True),
    ],
    ids=["nearly full", "under half", "full", "due", "refused soon", "delayed soon"],
)
def test_a_short_batch_waits_for_one_fetch_where_that_pays(
    *, rows: int, deadline_s: float, queue_deadline_s: float, delays: bool, pays: bool
) -> None:
    """More rows a second, and nobody late because of it: 1 ms and 2 ms a row here, of 8 at most."""
    latency = LatencyModel()
    for size in (1, 8):
        latency.observe(size, 0.001 + 0.002 * size, 0.0)
    rules = Rules(max_rows=8, preferred=frozenset({8}), largest_preferred=8, prefetch=False)
    items = [Item(1, None, 0.0, deadline_s, queue_deadline_s=queue_deadline_s, delays=delays)] * rows

    assert is_worth_filling(items, 0.0, rules, latency) is pays
    assert not is_worth_filling(items, 0.0, rules, LatencyModel())


async def test_a_batch_does_not_wait_for_more_where_there_is_none() -> None:
    """Fewer came than were asked for: the queue is empty."""
    scene = Scene(Bench(), batching=batching(0, REJECTS))
    for rows in (1, 8):
        scene.latency.observe(rows, 1.0 + 0.1 * rows, scene.clock.now_s())
    scene.batcher.plan_fetch()
    scene.batcher.add_items([scene.item("late", queue_timeout_s=1e-6, age_s=1.0), scene.item("alone")])
    scene.bench.end_all()

    assert ids(scene) == [["alone"]]


async def test_a_batch_that_waits_for_more_starts_without_it() -> None:
    """The wait is bounded."""
    scene = Scene(Bench(), batching=batching(0, REJECTS))
    for rows in (1, 8):
        scene.latency.observe(rows, 1.0 + 0.1 * rows, scene.clock.now_s())
    scene.batcher.plan_fetch()
    scene.batcher.add_items(
        [*(scene.item(f"late{n}", queue_timeout_s=1e-6, age_s=1.0) for n in range(7)), scene.item("r")]
    )
    assert scene.bench.running == []
    scene.time.advance(FETCH_S)
    scene.batcher.add_items([])
    scene.bench.end_all()

    assert ids(scene) == [["r"]]


async def test_what_did_not_fit_into_a_batch_can_still_be_overtaken(scene: Scene) -> None:
    """Just before the instance is idle the worker looks for what has come since: at least for one, at most a batch."""
    scene.batcher.add_items([scene.item("low1", 4), scene.item("low2", 3), scene.item("low3", 2)])
    scene.time.advance(6.9)
    scene.batcher.add_items([])
    assert not scene.can_fetch()
    scene.time.advance(0.1)
    scene.batcher.add_items([])

    assert scene.can_fetch()
    assert scene.batcher.plan_fetch() == (2, FETCH_LEAD_S)
    scene.batcher.add_items([scene.item("high", 8, priority=1)])
    assert not scene.can_fetch()
    scene.bench.end_all()
    assert ids(scene) == [["low1", "low2"], ["high"], ["low3"]]


async def test_an_unknown_level_is_the_default_one(scene: Scene) -> None:
    """So is none."""
    levels = [scene.item("r", priority=priority).level for priority in (0, 1, 2, 3)]

    assert levels == [2, 1, 2, 2]


async def test_who_has_waited_too_long_is_refused() -> None:
    """At the queue timeout, also while everything is busy, with Triton's text."""
    scene = Scene(Bench(), batching=batching(0, REJECTS))
    scene.batcher.add_items([scene.item("runs", queue_timeout_s=1.0)])
    scene.batcher.add_items([scene.item("waits", queue_timeout_s=1.0), scene.item("patient")])
    scene.time.advance(1.0)
    scene.batcher.add_items([])

    assert [(r.request_id, r.failure and r.failure.message) for _, r in scene.bench.answered] == [
        ("waits", "Request timeout expired")
    ]
    scene.bench.end_all()
    assert ids(scene) == [["runs"], ["patient"]]


async def test_who_is_delayed_waits_behind_the_others_of_its_level() -> None:
    """Ahead of lower levels still; in the batcher it just changes its place."""
    scene = Scene(Bench(), batching=batching(2, DELAYS))
    scene.batcher.add_items([scene.item("busy")])
    scene.batcher.add_items([scene.item("late", 4, priority=1, queue_timeout_s=1.0)])
    scene.time.advance(1.0)
    scene.batcher.add_items([scene.item("low", 4), scene.item("new", 4, priority=1, queue_timeout_s=1.0)])
    scene.batcher.add_items([scene.item("new2", 4, priority=1)])
    scene.bench.end_all()

    assert ids(scene) == [["busy"], ["new", "new2"], ["late", "low"]]
    assert scene.bench.delayed == []


async def test_what_comes_late_is_sent_behind_those_still_in_the_queue() -> None:
    """An item that was delayed before is taken in, and so is a suspect, whose wait is over."""
    scene = Scene(Bench(), batching=batching(0, DELAYS))
    late = scene.item("late", queue_timeout_s=1.0)
    again = scene.item("again", queue_timeout_s=1.0, lane="p1.delayed")
    suspect = scene.item("suspect", queue_timeout_s=1.0)
    suspect.alone = True
    scene.batcher.classify(suspect)
    scene.time.advance(1.0)

    scene.batcher.add_items([late, again, suspect])
    scene.bench.end_all()

    assert scene.bench.delayed == [late]
    assert ids(scene) == [["suspect"], ["again"]]


async def test_what_was_delayed_before_is_never_refused() -> None:
    """Not even by a model whose policy has changed since."""
    scene = Scene(Bench(), batching=batching(0, REJECTS))
    item = scene.item("again", queue_timeout_s=1.0, lane="p1.delayed")
    scene.time.advance(1.0)
    scene.batcher.add_items([item])

    assert len(scene.bench.running) == 1


async def test_what_is_given_back_late_goes_behind_too() -> None:
    """Each item to one of the two, none to both."""
    scene = Scene(Bench(), batching=batching(0, DELAYS))
    scene.batcher.add_items([scene.item("busy")])
    late, patient = scene.item("late", queue_timeout_s=1.0), scene.item("patient")
    scene.batcher.add_items([late, patient])
    scene.time.advance(1.0)
    pausing = asyncio.create_task(scene.batcher.pause_batching())
    await eventually(lambda: scene.bench.given_back == [patient])

    assert scene.bench.delayed == [late]
    scene.bench.end()
    await pausing
