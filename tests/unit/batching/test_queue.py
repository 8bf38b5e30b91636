"""Priorities and queue policies in the batcher (reference §3.3): who goes first, who is refused, who goes behind."""

import asyncio

import pytest

from qinfer.batching.batcher import FETCH_LEAD_S
from qinfer.models.spec import BatchingSpec, QueuePolicy
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
    scene.batcher.admit([scene.item("first")])
    scene.batcher.admit([scene.item("low1", 4), scene.item("low2", 4), scene.item("low3", 4)])
    scene.batcher.admit([scene.item("high", 4, priority=1)])
    scene.bench.end_all()

    assert ids(scene) == [["first"], ["high", "low1"], ["low2", "low3"]]


async def test_nothing_is_placed_ahead_where_priorities_count(scene: Scene) -> None:
    """A full batch waits until an instance does, and nothing is fetched before."""
    scene.batcher.admit(scene.items(1))
    scene.batcher.admit(scene.items(8))
    scene.time.advance(0.999)
    scene.batcher.admit([])

    assert scene.bench.queued == []
    assert not scene.can_fetch()


async def test_what_did_not_fit_into_a_batch_can_still_be_overtaken(scene: Scene) -> None:
    """Just before the instance is idle the worker looks for what has come since: at least for one, at most a batch."""
    scene.batcher.admit([scene.item("low1", 4), scene.item("low2", 3), scene.item("low3", 2)])
    scene.time.advance(6.9)
    scene.batcher.admit([])
    assert not scene.can_fetch()
    scene.time.advance(0.1)
    scene.batcher.admit([])

    assert scene.can_fetch()
    assert scene.batcher.room() == (2, FETCH_LEAD_S)
    scene.batcher.admit([scene.item("high", 8, priority=1)])
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
    scene.batcher.admit([scene.item("runs", queue_timeout_s=1.0)])
    scene.batcher.admit([scene.item("waits", queue_timeout_s=1.0), scene.item("patient")])
    scene.time.advance(1.0)
    scene.batcher.admit([])

    assert [(r.request_id, r.failure and r.failure.message) for _, r in scene.bench.answered] == [
        ("waits", "Request timeout expired")
    ]
    scene.bench.end_all()
    assert ids(scene) == [["runs"], ["patient"]]


async def test_who_is_delayed_waits_behind_the_others_of_its_level() -> None:
    """Ahead of lower levels still; in the batcher it just changes its place."""
    scene = Scene(Bench(), batching=batching(2, DELAYS))
    scene.batcher.admit([scene.item("busy")])
    scene.batcher.admit([scene.item("late", 4, priority=1, queue_timeout_s=1.0)])
    scene.time.advance(1.0)
    scene.batcher.admit([scene.item("low", 4), scene.item("new", 4, priority=1, queue_timeout_s=1.0)])
    scene.batcher.admit([scene.item("new2", 4, priority=1)])
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

    scene.batcher.admit([late, again, suspect])
    scene.bench.end_all()

    assert scene.bench.delayed == [late]
    assert ids(scene) == [["suspect"], ["again"]]


async def test_what_was_delayed_before_is_never_refused() -> None:
    """Not even by a model whose policy has changed since."""
    scene = Scene(Bench(), batching=batching(0, REJECTS))
    item = scene.item("again", queue_timeout_s=1.0, lane="p1.delayed")
    scene.time.advance(1.0)
    scene.batcher.admit([item])

    assert len(scene.bench.running) == 1


async def test_what_is_given_back_late_goes_behind_too() -> None:
    """Each item to one of the two, none to both."""
    scene = Scene(Bench(), batching=batching(0, DELAYS))
    scene.batcher.admit([scene.item("busy")])
    late, patient = scene.item("late", queue_timeout_s=1.0), scene.item("patient")
    scene.batcher.admit([late, patient])
    scene.time.advance(1.0)
    pausing = asyncio.create_task(scene.batcher.pause())
    await eventually(lambda: scene.bench.given_back == [patient])

    assert scene.bench.delayed == [late]
    scene.bench.end()
    await pausing
