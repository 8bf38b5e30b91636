"""The batcher of a limited model, beside another model that holds the resource both need."""

from collections.abc import Callable, Sequence
from dataclasses import replace

import pytest

from qinfer.batching.batcher import Batcher
from qinfer.batching.execution import Execution
from qinfer.batching.policy import PATIENCE_S
from qinfer.batching.rate_limiter import LOOK_S, Ledger, LimitedInstance, Resource
from qinfer.core.messages import ResourceHolder
from tests.support.batching import Bench, Done, Scene

NEEDS = {Resource("r", 0): 1}
CALLER = ResourceHolder("other", "other")


class LimitedBench(Bench):
    """One limited instance, and another model's that executes from the beginning."""

    def __init__(self) -> None:
        super().__init__()
        self.turn: Callable[[], None] = lambda: None
        self.ledger = Ledger()
        self.mine, self.other = LimitedInstance("stub", NEEDS, 1), LimitedInstance("other", NEEDS, 1)
        self.ledger.add([self.mine, self.other])
        self.ledger.wait(self.other)
        self.ledger.begin(self.other, "other")

    @property
    def ready(self) -> int:
        return int(self.mine in self.ledger.ready())

    def want(self, count: int, callers: Sequence[ResourceHolder]) -> None:
        if count:
            self.ledger.wait(self.mine, callers)
        else:
            self.ledger.leave(self.mine)

    def refusal(self, callers: Sequence[ResourceHolder]) -> str:
        return self.ledger.refusal([self.mine], callers)

    def start(self, execution: Execution, done: Done, instance: int = 0) -> None:
        self.ledger.begin(self.mine, execution.batch_id)
        super().start(execution, done, instance)

    def end_other(self) -> None:
        """Ends the other model's execution, which has more work; gives the batcher its turn."""
        self.ledger.end(self.other)
        self.ledger.wait(self.other)
        if self.ready:
            self.turn()


class LimitedScene(Scene):
    def __init__(self, *, delay_s: float = 0.0) -> None:
        self.limited = LimitedBench()
        super().__init__(Bench(), delay_s=delay_s)
        self.bench = self.limited
        self.batcher = Batcher(
            replace(self.model(self.limited), limited=self.limited), self.clock, self.limited, self.latency
        )

    @property
    def waits(self) -> bool:
        """Whether the instance is in line."""
        return self.limited.mine.order > 0

    def wait_too_long(self) -> None:
        self.time.advance(PATIENCE_S)
        self.batcher._pump()


@pytest.fixture
async def scene() -> LimitedScene:
    return LimitedScene()


async def test_a_batch_grows_while_it_waits_for_resources(scene: LimitedScene) -> None:
    for name in ("a", "b"):
        scene.batcher.add_items([scene.item(name)])
    before = len(scene.limited.running)

    scene.limited.end_other()
    scene.limited.end()

    assert (before, scene.limited.backend.batches) == (0, [["a", "b"]])


async def test_a_full_batch_that_waits_fetches_no_more(scene: LimitedScene) -> None:
    scene.batcher.add_items(scene.items(scene.spec.max_batch_size))
    scene.time.advance(PATIENCE_S / 2)
    scene.batcher._pump()

    assert not scene.can_fetch()


async def test_a_batch_that_may_still_fill_reserves_nothing() -> None:
    scene = LimitedScene(delay_s=1.0)

    scene.batcher.add_items(scene.items(1))
    before = scene.waits
    scene.time.advance(1.0)
    scene.batcher._pump()

    assert (before, scene.waits) == (False, True)


async def test_requests_that_wait_too_long_are_given_back_and_the_instance_stays_in_line(scene: LimitedScene) -> None:
    scene.batcher.add_items(scene.items(2))

    scene.wait_too_long()

    assert [item.request.id for item in scene.limited.given_back] == ["r0", "r1"]
    assert (scene.can_fetch(), scene.waits, scene.batcher.has_work) == (False, True, True)


async def test_its_resources_are_reserved_while_it_fetches_at_its_turn(scene: LimitedScene) -> None:
    scene.batcher.add_items(scene.items(1))
    scene.wait_too_long()

    scene.limited.end_other()

    assert scene.can_fetch()
    assert scene.batcher.plan_fetch()[1] == 0.0
    assert scene.limited.other not in scene.limited.ledger.ready()
    scene.batcher.add_items(scene.items(1))
    assert len(scene.limited.running) == 1


async def test_a_fetch_without_requests_ends_its_turn(scene: LimitedScene) -> None:
    scene.batcher.add_items(scene.items(1))
    scene.wait_too_long()
    scene.limited.end_other()
    scene.batcher.plan_fetch()

    scene.batcher.add_items(())

    assert not scene.waits
    assert scene.limited.other in scene.limited.ledger.ready()


async def test_a_fetch_that_began_before_its_turn_does_not_end_it(scene: LimitedScene) -> None:
    scene.batcher.add_items(scene.items(1))
    scene.batcher.plan_fetch()
    scene.wait_too_long()
    scene.limited.end_other()

    scene.batcher.add_items(())

    assert scene.waits
    assert scene.can_fetch()


async def test_its_turn_ends_although_a_fetch_takes_long(scene: LimitedScene) -> None:
    scene.batcher.add_items(scene.items(1))
    scene.wait_too_long()
    scene.limited.end_other()
    scene.batcher.plan_fetch()

    scene.time.advance(LOOK_S)
    scene.batcher._pump()

    assert not scene.waits


async def test_a_fetch_ends_before_the_waiting_requests_are_given_back(scene: LimitedScene) -> None:
    scene.batcher.add_items(scene.items(1))
    scene.time.advance(PATIENCE_S / 2)
    scene.batcher._pump()

    assert scene.batcher.plan_fetch()[1] == pytest.approx(PATIENCE_S / 2)


async def test_requests_whose_callers_hold_resources_are_not_given_back(scene: LimitedScene) -> None:
    """In the lane, they could stay behind requests that wait for their callers."""
    call, plain = scene.item("call"), scene.item("plain")
    call.request.holders = (CALLER,)
    other = LimitedInstance("third", NEEDS, 1)
    scene.limited.ledger.add([other])
    scene.limited.ledger.wait(other, [CALLER])
    scene.limited.ledger.begin(other, "third")

    scene.batcher.add_items([call, plain])
    scene.wait_too_long()

    assert [item.request.id for item in scene.limited.given_back] == ["plain"]
    assert scene.waits


async def test_a_call_that_needs_more_than_its_caller_holds_fails_at_once(scene: LimitedScene) -> None:
    scene.limited.mine.needs = {Resource("r", 0): 2}
    call = scene.item("call")
    call.request.holders = (CALLER,)

    scene.batcher.add_items([call])

    assert scene.limited.failures == {"call": "inference_failed"}
    assert not scene.waits
