"""Batches that raise: cut in halves until who is bad has failed alone, and nobody else."""

import asyncio

import pytest

from qinfer.models.spec import TensorSpec
from qinfer.tensors import Tensor, pack_bytes
from qinfer.testing import eventually
from tests.support.batching import Bench, Scene


@pytest.fixture
async def scene() -> Scene:
    return Scene(Bench(), known_s=0.001)


async def test_one_bad_item_fails_alone(scene: Scene) -> None:
    """The others of its batch succeed; halves run in order, down to the single item."""
    scene.batcher.add_items([scene.item(name) for name in ("a", "b", "bad", "c")])
    scene.bench.end_all()

    assert scene.bench.failures == {"a": "", "b": "", "bad": "inference_failed", "c": ""}
    assert scene.bench.backend.batches == [["a", "b", "bad", "c"], ["a", "b"], ["bad", "c"], ["bad"], ["c"]]


async def test_the_bad_items_failure_is_its_own(scene: Scene) -> None:
    """Each gets the text that its own execution ended with, and nothing of the execution before."""
    scene.batcher.add_items([scene.item(name) for name in ("bad1", "a", "bad2")])
    scene.bench.end_all()

    texts = [(r.request_id, r.failure.message) for _, r in scene.bench.answered if r.failure is not None]
    assert texts == [("bad1", "bad1 can't be executed"), ("bad2", "bad2 can't be executed")]
    assert [r.index for _, r in scene.bench.answered if r.request_id == "a"] == [0]


async def test_who_was_answered_before_keeps_the_answer(scene: Scene) -> None:
    """Such an item does not run again; the last one without an answer runs alone before it is blamed."""
    scene.batcher.add_items([scene.item(name) for name in ("early", "bad")])
    scene.bench.end_all()

    assert scene.bench.failures == {"early": "", "bad": "inference_failed"}
    assert scene.bench.backend.batches == [["early", "bad"], ["bad"]]


async def test_many_strings_become_objects_in_the_thread_of_an_instance() -> None:
    """Not on the event loop, which others wait for; what is malformed fails alone there, too."""
    scene = Scene(Bench(), inputs=[TensorSpec(name="x", datatype="BYTES", dims=(-1,))])
    many = pack_bytes([b"a"] * 20_000)
    for name, data in (("first", many), ("bad", many[:-1]), ("other", many)):
        item = scene.item(name)
        item.request.inputs = (Tensor("x", "BYTES", (1, 20_000), data),)
        scene.batcher.add_items([item])
    scene.bench.end()

    ((execution, _),) = scene.bench.running
    assert len(execution.items) == 2
    assert execution.batch.inputs == {}
    scene.bench.end_all()
    assert scene.bench.failures == {"first": "", "bad": "invalid_request", "other": ""}


async def test_a_batch_has_no_more_strings_than_one_request_may_have() -> None:
    scene = Scene(Bench(), inputs=[TensorSpec(name="x", datatype="BYTES", dims=(-1,))])
    for name in ("first", "a", "b", "c", "d"):
        item = scene.item(name)
        item.request.inputs = (Tensor("x", "BYTES", (1, 400_000), pack_bytes([b""] * 400_000)),)
        scene.batcher.add_items([item])
    scene.bench.end_all()

    assert scene.bench.backend.batches == [["first"], ["a", "b"], ["c", "d"]]
    assert scene.bench.failures == dict.fromkeys(("first", "a", "b", "c", "d"), "")


async def test_halves_come_before_what_waits(scene: Scene) -> None:
    """And do not mix with it."""
    scene.batcher.add_items([scene.item(name) for name in ("a", "bad")])
    scene.batcher.add_items([scene.item("later")])
    scene.bench.end_all()

    assert scene.bench.backend.batches == [["a", "bad"], ["a"], ["bad"], ["later"]]


async def test_halves_use_every_idle_instance() -> None:
    """Two instances run two halves at once."""
    scene = Scene(Bench(count=2))
    scene.batcher.add_items([scene.item(name) for name in ("a", "b", "bad", "c")])
    scene.bench.end()

    assert [len(execution.items) for execution, _ in scene.bench.running] == [2, 2]


async def test_what_is_late_is_not_run_again(scene: Scene) -> None:
    """A half that waits for an instance is expired when its deadline comes."""
    first, second = scene.item("bad"), scene.item("a")
    scene.batcher.add_items([first, second])
    scene.bench.end()
    scene.time.advance(60.0)
    scene.batcher.add_items([])

    assert scene.bench.failures == {"a": "deadline_exceeded"}
    scene.bench.end_all()
    assert scene.bench.backend.batches == [["bad", "a"], ["bad"]]


async def test_a_lost_item_is_not_run_again(scene: Scene) -> None:
    """Whether its lease is lost during the execution or while its half waits."""
    bad, during, after = (scene.item(name) for name in ("bad", "during", "after"))
    scene.batcher.add_items([bad, during, after])
    scene.batcher.lost(during)
    scene.bench.end()
    scene.batcher.lost(after)
    scene.bench.end_all()

    assert scene.bench.failures == {"bad": "inference_failed"}
    assert scene.bench.backend.batches == [["bad", "during", "after"], ["bad"]]


async def test_counts_are_of_requests_that_ended(scene: Scene) -> None:
    """Executing and completed count each request once; each repetition is counted as one, and none teaches a speed."""
    scene.batcher.add_items([scene.item(name) for name in ("a", "b", "bad", "c")])
    scene.bench.end()
    assert (scene.batcher.executing, scene.batcher.completed) == (2, 0)
    assert not scene.is_idle()

    scene.bench.end_all()

    assert (scene.batcher.executing, scene.batcher.completed) == (0, 4)
    assert scene.is_idle()
    stats = scene.batcher.tally.drain()
    assert (stats["retries"], stats["success_count"], stats["failures:inference_failed"]) == (4 + 2, 3, 1)


async def test_a_batch_that_ran_at_once_is_cut_too(scene: Scene) -> None:
    """Its halves go to the instances: the event loop has waited long enough."""
    scene.bench.runs_now = True

    scene.batcher.add_items([scene.item(name) for name in ("a", "bad")])
    assert scene.bench.backend.batches == [["a", "bad"]]
    scene.bench.end_all()

    assert scene.bench.failures == {"a": "", "bad": "inference_failed"}


async def test_a_pause_gives_halves_back(scene: Scene) -> None:
    """Those that wait, and those of a batch that raises during the pause."""
    scene.batcher.add_items([scene.item(name) for name in ("bad", "a", "b", "c")])
    scene.bench.end()
    pausing = asyncio.create_task(scene.batcher.pause_batching())
    await eventually(lambda: len(scene.bench.given_back) == 2)

    scene.bench.end()
    await pausing

    assert [item.request.id for item in scene.bench.given_back] == ["b", "c", "bad", "a"]
    assert scene.bench.answered == []


async def test_a_new_generation_does_not_get_halves_unchecked(scene: Scene) -> None:
    """What waits is handed to be checked; a batch of the old generation that raises is given back."""
    scene.batcher.add_items([scene.item(name) for name in ("bad", "a", "b", "c")])
    scene.bench.end()

    waiting = scene.batcher.replace(scene.model(Bench(), generation=2))
    scene.bench.end()

    assert [item.request.id for item in waiting] == ["b", "c"]
    assert [item.request.id for item in scene.bench.given_back] == ["bad", "a"]
    assert scene.is_idle()


async def test_halves_that_no_instance_took_stay_halves(scene: Scene) -> None:
    """Recalled, they neither mix with what waits nor with each other."""
    scene.batcher.add_items([scene.item(name) for name in ("bad", "a")])
    scene.bench.stalled = True
    scene.bench.end()
    scene.batcher.add_items([scene.item("later")])

    waiting = scene.batcher.replace(scene.model(Bench(), generation=2))

    assert [item.request.id for item in waiting] == ["bad", "a", "later"]
