"""What a worker knows of its leases, and when it has to look."""

import asyncio
from collections.abc import Iterator

import pytest

from qinfer.batching.execution import WorkItem
from qinfer.core.clock import ServerClock
from qinfer.core.messages import InferRequest
from qinfer.queue.entries import Entry, Lane, Lease
from qinfer.testing import FakeClock, eventually
from qinfer_workers.inference import publisher
from qinfer_workers.inference.publisher import HeldWork, LeaseKeeper, place_of

LANE, OTHER = Lane("stub", 1), Lane("other", 1)
LEASE_S = 10.0


class Asked:
    """Renewals that renew nothing by themselves."""

    def __init__(self) -> None:
        self.times = 0

    async def run(self, keeper: LeaseKeeper) -> None:
        raise NotImplementedError

    def ask(self) -> None:
        self.times += 1


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> FakeClock:
    fake = FakeClock()

    class Time:
        monotonic = staticmethod(fake.monotonic_s)

    monkeypatch.setattr(publisher, "time", Time)
    return fake


@pytest.fixture
def lost() -> list[HeldWork]:
    return []


@pytest.fixture
def asked() -> Asked:
    return Asked()


@pytest.fixture
def keeper(clock: FakeClock, lost: list[HeldWork], asked: Asked) -> Iterator[LeaseKeeper]:
    return LeaseKeeper(asked, ServerClock(clock, 0.0), LEASE_S, list, lost.append)  # type: ignore[return-value]


def item(number: int = 0, lane: Lane = LANE, deadline_s: float = 1e6) -> WorkItem:
    request = InferRequest(model=lane.model, inputs=(), id=f"r{number}")
    lease = Lease(Entry(lane, f"1000-{number}"), "w", b"")
    return WorkItem(rows=1, key=None, enqueued_s=1.0, deadline_s=deadline_s, lease=lease, request=request)


def test_leases_are_sure_for_a_lease_time_after_a_renewal(keeper: LeaseKeeper, clock: FakeClock) -> None:
    """Whatever came later was fetched later."""
    mine = [item()]
    clock.advance(LEASE_S - 1)
    keeper.hold(mine)
    assert keeper.is_sure(mine)
    clock.advance(2)
    assert not keeper.is_sure(mine)

    keeper.renewed(clock.monotonic_s(), set())

    assert keeper.is_sure(mine)


def test_a_lane_that_can_not_be_renewed_leaves_the_others_sure(keeper: LeaseKeeper, clock: FakeClock) -> None:
    """A node of a cluster that is away makes nobody else wait."""
    mine, others = [item()], [item(1, OTHER)]
    for _ in range(2):
        clock.advance(LEASE_S / 2)
        keeper.renewed(clock.monotonic_s(), set(), [OTHER])

    assert keeper.is_sure(mine)
    assert not keeper.is_sure(others)
    keeper.renewed(clock.monotonic_s(), set())
    assert keeper.is_sure(others)


async def test_confirm_waits_for_a_renewal_that_began_later(
    keeper: LeaseKeeper, clock: FakeClock, asked: Asked
) -> None:
    """One that was under way may have passed the item by."""
    mine = [item()]
    before_s = clock.monotonic_s()
    clock.advance(1.0)
    confirming = asyncio.ensure_future(keeper.confirm(mine))
    await eventually(lambda: asked.times == 1)
    keeper.renewed(before_s, set())
    await eventually(lambda: asked.times == 2)
    keeper.renewed(clock.monotonic_s(), set(), [LANE])
    await eventually(lambda: asked.times == 3)
    assert not confirming.done()

    keeper.renewed(clock.monotonic_s(), set())

    await confirming


def test_a_lost_lease_is_told_once(keeper: LeaseKeeper, clock: FakeClock, lost: list[HeldWork]) -> None:
    """What was dropped meanwhile, or fetched again since, is not lost."""
    gone, dropped, kept = item(1), item(2), item(3)
    keeper.hold([gone, dropped, kept])
    clock.advance(1.0)
    began_s = clock.monotonic_s()
    clock.advance(1.0)
    again = item(4)
    keeper.hold([again])
    keeper.drop([dropped])

    for _ in range(2):
        keeper.renewed(began_s, {place_of(gone), place_of(dropped), place_of(again)})

    assert lost == [gone]
    assert set(keeper.held()) == {kept, again}
    assert keeper.holds(kept.lease.entry)
    assert not keeper.holds(gone.lease.entry)


def test_what_nobody_waits_for_any_more_is_not_renewed(keeper: LeaseKeeper, clock: FakeClock) -> None:
    """A model that never returns does not keep an entry in flight for ever."""
    now_s = clock.monotonic_s()
    mine, late = item(1, deadline_s=now_s + 100.0), item(2, deadline_s=now_s - LEASE_S)
    keeper.hold([mine, late])

    assert keeper.wanted() == [(mine, now_s + 100.0 + LEASE_S)]


async def test_nothing_is_fetched_from_lanes_that_can_not_be_renewed(
    keeper: LeaseKeeper, clock: FakeClock, asked: Asked
) -> None:
    """Though nothing of them is held, and the others are well."""
    keeper.renewed(clock.monotonic_s(), set(), [OTHER])
    assert keeper.can_renew([LANE])
    assert not keeper.can_renew([LANE, OTHER])

    waiting = asyncio.create_task(keeper.watch([OTHER]))
    await asyncio.sleep(0)
    clock.advance(1)
    keeper.renewed(clock.monotonic_s(), set(), [OTHER])
    await asyncio.sleep(0)
    was_done = waiting.done()
    clock.advance(1)
    keeper.renewed(clock.monotonic_s(), set())
    await waiting

    assert not was_done
    assert keeper.can_renew([OTHER])
