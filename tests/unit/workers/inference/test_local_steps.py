"""The short cut of an ensemble's steps: into the batcher of the same worker, and back into the lane from there."""

import asyncio
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any, cast

import pytest

from qinfer.batching.batcher import Batcher
from qinfer.batching.execution import WorkItem as Item
from qinfer.core.messages import OutgoingRequest, Response
from qinfer.models.catalog import ServedVersion
from qinfer.models.spec import Routes
from qinfer.queue.entries import Entry, Lane, Lease
from qinfer.submission.pending import PendingCall
from qinfer.submission.submit import Submission
from qinfer.testing import FakeClock, stub_spec
from qinfer_workers.inference.ensembles.local import LocalSteps

SPEC = stub_spec()
LANE = Lane(SPEC.name, 1)
SERVED = ServedVersion(spec=SPEC, version=1, generation=7, lane=LANE, routes=Routes(SPEC, 1))


class Fakes:
    """A batcher, an outlet and a submission that note what they get."""

    def __init__(self) -> None:
        self.next_rows, self.paused = 4, False
        self.model = SimpleNamespace(generation=7)
        self.admitted: list[list[str]] = []
        self.lost_items: list[str] = []
        self.answered: list[str] = []
        self.given_back: list[str] = []
        self.enqueued: list[tuple[str, Lane]] = []
        self.delivered: list[str] = []
        self.items: list[Item] = []
        self.pending = SimpleNamespace(deliver=lambda response: self.delivered.append(response.request_id))

    def classify(self, _: Item) -> None:
        """Sets nothing."""

    def add_items(self, items: Sequence[Item]) -> None:
        self.items += items
        self.admitted.append([item.request.id for item in items])

    def lost(self, item: Item) -> None:
        self.lost_items.append(item.request.id)

    def publish_responses(self, items: Sequence[Item], responses: Sequence[Response]) -> None:
        self.answered += [response.request_id for response in responses]

    def give_back(self, items: Sequence[Item]) -> None:
        self.given_back += [item.request.id for item in items]

    def enqueue(self, waiting: PendingCall, request: OutgoingRequest, lane: Lane) -> None:
        self.enqueued.append((waiting.request_id, lane))


@pytest.fixture
def fakes() -> Fakes:
    return Fakes()


@pytest.fixture
async def local(fakes: Fakes) -> LocalSteps:
    clock: Any = SimpleNamespace(now_s=FakeClock(100.0).monotonic_s)
    one = LocalSteps(cast(Any, fakes), clock, lambda *_: cast(Batcher, fakes))
    one.submission = cast(Submission, fakes)
    return one


def waiting(name: str) -> PendingCall:
    return PendingCall(name, "", SPEC.name, 1, cast(Any, None), 0.0)


def take(local: LocalSteps, name: str, rows: int = 1) -> bool:
    request = OutgoingRequest(model=SPEC.name, inputs=(), id=name, timeout_s=5.0)
    return local.try_admit(SERVED, request, rows, waiting(name))


def fetched(name: str) -> Item:
    """Returns an item that came by the lane."""
    request = OutgoingRequest(model=SPEC.name, inputs=(), id=name)
    return Item(
        rows=1, key=None, enqueued_s=0.0, deadline_s=9.0, lease=Lease(Entry(LANE, "1-0"), "w", b""), request=request
    )


async def turn() -> None:
    """Lets the event loop call what is due."""
    await asyncio.sleep(0)
    await asyncio.sleep(0)


async def test_steps_of_one_turn_are_admitted_together(local: LocalSteps, fakes: Fakes) -> None:
    assert take(local, "a")
    assert take(local, "b", rows=2)

    await turn()

    assert fakes.admitted == [["a", "b"]]
    assert local.counts() == {(SPEC.name, 1): 2}
    assert [item.deadline_s for item in fakes.items] == [105.0, 105.0]


async def test_what_has_no_room_in_the_next_batch_is_not_taken(local: LocalSteps) -> None:
    assert take(local, "a", rows=3)

    assert not take(local, "b", rows=2)
    assert take(local, "c")


async def test_another_generation_is_not_asked(local: LocalSteps, fakes: Fakes) -> None:
    """Its lane is: whoever takes it from there checks it again."""
    fakes.model.generation = 8

    assert not take(local, "a")


async def test_answers_go_apart(local: LocalSteps, fakes: Fakes) -> None:
    """Those of steps to their ensembles, not before the batcher is done; the others to their callers."""
    take(local, "a")
    await turn()
    other = fetched("f")

    local.publish_responses([fakes.items[0], other], [Response(request_id="a"), Response(request_id="f")])

    assert (fakes.answered, fakes.delivered) == (["f"], [])
    await turn()
    assert fakes.delivered == ["a"]


async def test_what_is_given_back_goes_into_the_lane(local: LocalSteps, fakes: Fakes) -> None:
    take(local, "a")
    await turn()

    local.give_back([fakes.items[0], fetched("f")])

    assert (fakes.enqueued, fakes.given_back) == ([("a", LANE)], ["f"])


async def test_a_paused_batcher_gets_no_steps(local: LocalSteps, fakes: Fakes) -> None:
    take(local, "a")
    fakes.paused = True

    await turn()

    assert (fakes.admitted, fakes.enqueued) == ([], [("a", LANE)])


async def test_a_step_that_is_left_is_not_executed(local: LocalSteps, fakes: Fakes) -> None:
    take(local, "a")
    take(local, "b")
    local.abandon_step(waiting("a"))
    await turn()

    local.abandon_step(waiting("b"))
    local.give_back(fakes.items)

    assert fakes.admitted == [["b"]]
    assert fakes.lost_items == ["a", "b"]
    assert not fakes.enqueued
