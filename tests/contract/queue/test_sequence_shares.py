"""Slots of sequences among tenants, on each server: free ones go to the tenant that has the fewest."""

import time

import msgspec
import pytest

from qinfer.core.messages import Failure
from qinfer.errors import QueueFull
from qinfer.queue import keys
from qinfer.queue.sequences.records import SequenceId, SlotShare, StepPlace, SubmitLimits
from qinfer.testing import eventually
from tests.contract.conftest import RedisQueue
from tests.contract.queue.test_sequences import waits
from tests.support.sequences import Gateway, Worker, first, later, sequences_of

FAILURE = Failure("cancelled", "nobody waits")


@pytest.fixture
async def gateway(queue: RedisQueue) -> Gateway:
    return Gateway(sequences_of(await queue.connect()))


async def begin(gateway: Gateway, tenant: str, *ids: int, weight: int = 0, limits: SubmitLimits | None = None) -> None:
    """Begins sequences of a tenant."""
    for number in ids:
        step = msgspec.structs.replace(first(number), weight=weight)
        await gateway.sequences.submit(SequenceId(tenant, number), step, limits or SubmitLimits())


async def owned(worker: Worker, count: int) -> list[str]:
    """Has a worker own sequences; returns whose they are."""
    return [found.sequence.tenant for found in await worker.own(count)]


async def shares(gateway: Gateway) -> dict[str, tuple[int, int, bool]]:
    """Returns of each tenant its weight, how many have slots, and whether any waits."""
    found: list[SlotShare] = await gateway.sequences.shares(1)
    return {one.tenant: (one.weight, one.held, one.waited_s >= 0) for one in found}


async def test_free_slots_go_to_the_tenant_with_the_fewest(gateway: Gateway) -> None:
    """Whichever worker has them, and however many of another wait in front."""
    await begin(gateway, "evil", *range(1, 6))
    one, other = await Worker(gateway, "w1").join(), await Worker(gateway, "w2").join()
    assert await owned(one, 2) == ["evil"] * 2
    await begin(gateway, "acme", *range(1, 4))

    assert await owned(other, 2) == ["acme"] * 2
    assert sorted(await owned(one, 4)) == ["acme", "evil", "evil", "evil"]


async def test_shares_are_by_weight(gateway: Gateway) -> None:
    await begin(gateway, "evil", *range(1, 9))
    await begin(gateway, "acme", *range(1, 9), weight=3)
    worker = await Worker(gateway, "w1").join()

    found = await owned(worker, 8)

    assert (found.count("acme"), found.count("evil")) == (6, 2)
    assert await shares(gateway) == {"": (1, 0, False), "acme": (3, 6, True), "evil": (1, 2, True)}


async def test_of_equal_tenants_the_one_that_waits_longest_is_next(gateway: Gateway) -> None:
    worker = await Worker(gateway, "w1").join()
    for tenant in ("c", "a", "b", ""):
        await begin(gateway, tenant, 1)
        begun_ms = time.time_ns() // 1_000_000
        await eventually(lambda before=begun_ms: time.time_ns() // 1_000_000 > before)  # type: ignore[misc]

    assert [await owned(worker, 1) for _ in range(4)] == [["c"], ["a"], ["b"], [""]]


async def test_a_worker_with_a_free_slot_hears_of_each_tenant(gateway: Gateway) -> None:
    """Also of what another worker has left."""
    one, _ = await Worker(gateway, "w1").join(), await Worker(gateway, "w2").join()
    await begin(gateway, "acme", 1, 2)

    assert await waits(gateway, "w2", "", has_slots=True)
    await one.own(1)
    assert await waits(gateway, "w2", "", has_slots=True)
    await one.own(1)
    assert not await waits(gateway, "w2", "", has_slots=True)


async def test_what_waits_is_counted(gateway: Gateway) -> None:
    worker = await Worker(gateway, "w1").join()
    await begin(gateway, "", 1)
    await begin(gateway, "acme", 1, 2)

    assert (await gateway.sequences.sizes([1]))[:2] == (3, 3)
    await worker.own(1)
    assert (await gateway.sequences.sizes([1]))[:2] == (3, 2)


async def test_a_sequence_that_ends_while_it_waits_is_not_owned(gateway: Gateway) -> None:
    worker = await Worker(gateway, "w1").join()
    await begin(gateway, "acme", 1, 2)

    await gateway.sequences.fail(StepPlace(SequenceId("acme", 1), 1, 1), FAILURE)

    assert [found.sequence for found in await worker.own()] == [SequenceId("acme", 2)]
    assert await shares(gateway) == {"": (1, 0, False), "acme": (1, 1, False)}


async def test_a_tenant_without_sequences_has_no_share(gateway: Gateway) -> None:
    worker = await Worker(gateway, "w1").join()
    await begin(gateway, "acme", 1)
    await gateway.send(SequenceId("acme", 1), later(1, end=True))

    await worker.work()

    assert await shares(gateway) == {"": (1, 0, False)}


async def test_what_an_earlier_version_has_left_of_a_share_is_swept(gateway: Gateway, queue: RedisQueue) -> None:
    """Its workers know no sets of tenants: sequences stay there that have ended."""
    worker = await Worker(gateway, "w1").join()
    await begin(gateway, "acme", 1, 2)
    await worker.own()
    router, opened = (await queue.connect()).router, keys.sequences("sum", 0)
    for number in (1, 2):
        await router.call(keys.slot(opened), b"ZREM", opened.encode(), SequenceId("acme", number).name.encode())

    await gateway.sequences.sweep()

    assert await shares(gateway) == {"": (1, 0, False)}


async def test_one_tenant_can_not_use_up_the_open_sequences(gateway: Gateway) -> None:
    """One that has fewer than its share is let in where others have filled them."""
    limits = SubmitLimits(open=4)
    await begin(gateway, "evil", 1, 2, 3, 4, limits=limits)

    await begin(gateway, "acme", 1, 2, limits=limits)

    for tenant in ("acme", "evil", ""):
        with pytest.raises(QueueFull):
            await begin(gateway, tenant, 9, limits=limits)


async def test_a_slot_is_given_up_by_one_worker_at_a_time(gateway: Gateway) -> None:
    assert await gateway.sequences.claim("acme", 60.0)
    assert not await gateway.sequences.claim("acme", 60.0)
    assert await gateway.sequences.claim("evil", 60.0)
