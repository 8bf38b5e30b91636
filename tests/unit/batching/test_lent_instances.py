"""Instances that are lent: what comes meanwhile makes one batch, and waits for them only for a moment."""

import pytest

from qinfer.batching.policy import FETCH_EVERY_S, NEVER_S, PATIENCE_S, LentInstances
from tests.support.batching import Bench, Scene


@pytest.fixture
async def scene() -> Scene:
    """Returns a batcher with one instance, which is lent."""
    made = Scene(Bench(), known_s=0.01)
    made.batcher.lend(1)
    return made


async def test_what_comes_makes_one_batch(scene: Scene) -> None:
    """Not one of what came first, and another of the rest."""
    for name in ("a", "b", "c"):
        scene.batcher.add_items([scene.item(name)])
    before = len(scene.bench.running)

    scene.batcher.lend(-1)
    scene.bench.end()

    assert (before, scene.bench.backend.batches) == (0, [["a", "b", "c"]])


async def test_a_lender_hears_of_what_comes(scene: Scene) -> None:
    """Or it would go on and on."""
    assert scene.can_fetch()
    assert not scene.batcher.has_work

    scene.batcher.add_items(scene.items(1))

    assert scene.batcher.has_work


async def test_what_comes_is_fetched_in_few_steps(scene: Scene) -> None:
    """Each fetch costs a round trip, and nothing can begin anyway."""
    scene.batcher.add_items(scene.items(1))
    at_once = scene.can_fetch()
    scene.time.advance(FETCH_EVERY_S)
    scene.batcher._pump()

    assert (at_once, scene.can_fetch()) == (False, True)


async def test_what_waits_too_long_is_given_back(scene: Scene) -> None:
    """An idle worker may have it; and nothing is fetched until the instance is back, which is still wanted."""
    scene.batcher.add_items(scene.items(2))
    scene.time.advance(PATIENCE_S)
    scene.batcher._pump()

    assert [item.request.id for item in scene.bench.given_back] == ["r0", "r1"]
    assert not scene.can_fetch()
    assert scene.batcher.has_work

    scene.batcher.lend(-1)

    assert scene.can_fetch()
    assert not scene.batcher.has_work


async def test_a_pause_waits_for_no_lent_instance(scene: Scene) -> None:
    """Whoever lent it ends by itself."""
    scene.batcher.add_items(scene.items(1))
    scene.time.advance(PATIENCE_S)
    scene.batcher._pump()

    await scene.batcher.pause_batching()

    assert scene.batcher.paused


async def test_instances_of_a_new_generation_are_not_lent(scene: Scene) -> None:
    """The old ones may hang."""
    bench = Bench()
    scene.batcher.replace(scene.model(bench, generation=2))

    scene.batcher.add_items(scene.items(1))

    assert len(bench.running) == 1


async def test_other_instances_go_on() -> None:
    """One of two is lent."""
    scene = Scene(Bench(count=2))
    scene.batcher.lend(1)

    scene.batcher.add_items(scene.items(1))

    assert len(scene.bench.running) == 1


def test_patience_begins_with_the_first_that_waits() -> None:
    """Instances may be lent for long where nobody wants them."""
    lent = LentInstances()
    lent.change(1)

    assert lent.decide_fetch(0.0, 0) == (True, NEVER_S)
    assert lent.decide_fetch(1000.0, 1) == (False, 1000.0 + FETCH_EVERY_S)
    assert lent.decide_fetch(1000.0 + FETCH_EVERY_S, 1) == (True, 1000.0 + PATIENCE_S)
    assert lent.decide_fetch(1000.0 + PATIENCE_S, 1) == (False, NEVER_S)
    assert lent.is_overdue

    lent.change(-1)
    lent.change(1)

    assert lent.decide_fetch(2000.0, 0) == (True, NEVER_S)
