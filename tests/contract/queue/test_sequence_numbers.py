"""The numbers by which models are told of sequences of tenants that are not their first, on each server."""

import pytest

from qinfer.core.messages import Failure
from qinfer.errors import BrokerUnavailable
from qinfer.queue import keys
from qinfer.queue.sequences.records import OwnedLife, Renaming, SequenceId, StepPlace, told_id
from qinfer.testing import eventually
from tests.contract.conftest import RedisQueue
from tests.support.sequences import LEASE_S, Gateway, first, sequences_of

FIRST, OTHER, THIRD = (SequenceId(tenant, 7) for tenant in ("acme", "evil", "third"))
FAILURE = Failure("execution_failed", "the model broke")
HIGHEST = {32: 2**31 - 2, 64: 2**53 - 2}
"""The first number that is allotted, of the type with so many bits."""


@pytest.fixture
async def gateway(queue: RedisQueue) -> Gateway:
    return Gateway(sequences_of(await queue.connect()))


async def own(gateway: Gateway, worker: str = "w1", bits: int | None = 64) -> dict[SequenceId, OwnedLife]:
    """Has a worker own what waits."""
    await gateway.sequences.renew(worker, [1], LEASE_S)
    found = await gateway.sequences.own(worker, 1, 32, told_bits=bits)
    assert found is not None
    return {owned.sequence: owned for owned in found}


async def begin(gateway: Gateway, *sequences: SequenceId, worker: str = "w1", bits: int | None = 64) -> list[Renaming]:
    """Begins sequences one after the other, and has a worker own them."""
    await gateway.sequences.join(worker, [1], LEASE_S)
    told = []
    for sequence in sequences:
        await gateway.send(sequence, first(1))
        told.append((await own(gateway, worker, bits))[sequence].told)
    return told


@pytest.mark.parametrize("bits", [32, 64])
async def test_only_others_than_the_first_tenant_get_numbers(gateway: Gateway, bits: int) -> None:
    told = await begin(gateway, SequenceId("", 7), FIRST, OTHER, SequenceId("acme", 8), THIRD, bits=bits)

    highest = HIGHEST[bits]
    assert told == [(False, 0), (False, 0), (True, highest), (False, 0), (True, highest - 1)]
    assert [told_id(FIRST, told[1]), told_id(OTHER, told[2])] == [7, highest]


async def test_a_model_that_takes_text_is_told_whose_it_is(gateway: Gateway) -> None:
    texts = SequenceId("acme", "a"), SequenceId("evil", "a"), OTHER, SequenceId("acme", "qinfer:evil:ta")

    told = await begin(gateway, *texts, bits=0)

    ids = [told_id(sequence, each) for sequence, each in zip(texts, told, strict=True)]
    assert ids == ["a", "qinfer:evil:ta", "qinfer:evil:n7", "qinfer:acme:tqinfer:evil:ta"]


async def test_who_is_told_nothing_gets_no_numbers(gateway: Gateway) -> None:
    assert await begin(gateway, FIRST, OTHER, bits=None) == [(False, 0), (False, 0)]


async def test_a_number_stays_when_its_owner_drains_or_dies(gateway: Gateway) -> None:
    (_, told) = await begin(gateway, FIRST, OTHER)
    await gateway.sequences.join("w2", [1], LEASE_S)

    await gateway.sequences.hand_over("w1", [OTHER])
    given = (await own(gateway, "w2"))[OTHER].told
    await gateway.sequences.renew("w2", [1], 0.0)

    async def is_reaped() -> bool:
        return bool(await gateway.sequences.reap())

    await eventually(is_reaped, description="the end of a lease")
    reaped = (await own(gateway))[OTHER].told

    assert told.number
    assert given == reaped == told


async def test_a_number_outlives_a_restart_of_redis(own_redis: RedisQueue) -> None:
    """Redis writes at once here; no other sequence gets the number afterwards."""
    gateway = Gateway(sequences_of(await own_redis.connect()))
    (_, told) = await begin(gateway, FIRST, OTHER)
    own_redis.nodes[0].stop()
    own_redis.nodes[0].start()

    async def is_given_back() -> bool:
        try:
            return bool(await gateway.sequences.hand_over("w1", [OTHER]))
        except BrokerUnavailable:
            return False

    await eventually(is_given_back, description="redis after its restart")
    after = (await own(gateway))[OTHER].told
    (third,) = await begin(gateway, THIRD, worker="w2")

    assert after == told
    assert third == (True, told.number - 1)


async def test_a_sequence_of_an_earlier_version_gets_its_number_at_its_next_owner(gateway: Gateway) -> None:
    """The sequence keeps it where a worker of the earlier version owns it in between."""
    await begin(gateway, FIRST)
    (before,) = await begin(gateway, OTHER, bits=None)
    told = []
    for bits in (64, None, 64):
        await gateway.sequences.hand_over("w1", [OTHER])
        told.append((await own(gateway, bits=bits))[OTHER].told)

    assert before == (False, 0)
    assert told[0].number
    assert told[2] == told[0]


async def test_lives_of_one_sequence_have_one_number(gateway: Gateway) -> None:
    """One behind the other, and one after the other has ended."""
    (_, told) = await begin(gateway, FIRST, OTHER)
    await gateway.send(OTHER, first(2))
    await gateway.sequences.fail(StepPlace(OTHER, 1, 1), FAILURE)
    second = (await own(gateway))[OTHER].told
    await gateway.sequences.fail(StepPlace(OTHER, 2, 1), FAILURE)
    await gateway.send(OTHER, first(3))
    third = (await own(gateway))[OTHER].told

    assert second == third == told


async def test_a_number_of_the_first_tenant_is_never_anothers(gateway: Gateway) -> None:
    """Whichever came first; a number that is too large for the type counts by its low bits."""
    taken, next_one = SequenceId("acme", 2**40 + HIGHEST[32]), SequenceId("acme", HIGHEST[32] - 1)

    told = await begin(gateway, taken, OTHER, next_one, SequenceId("acme", 5), bits=32)

    assert told == [(False, HIGHEST[32]), (True, HIGHEST[32] - 1), (False, HIGHEST[32] - 2), (False, 0)]


async def test_a_number_is_free_once_its_sequence_is_forgotten(gateway: Gateway, queue: RedisQueue) -> None:
    (_, told) = await begin(gateway, FIRST, OTHER)
    key = keys.sequence_number("sum", 0, told.number)
    client = (await queue.connect()).router
    slot = keys.slot(key)
    assert await client.call(slot, b"GET", key.encode()) == OTHER.name.encode()
    assert await client.call(slot, b"PTTL", key.encode()) > 86400_000

    await gateway.sequences.fail(StepPlace(OTHER, 1, 1), FAILURE)

    assert 0 < await client.call(slot, b"PTTL", key.encode()) <= 300_000


async def test_a_request_without_a_record_keeps_its_number_for_a_time(gateway: Gateway) -> None:
    sequences = gateway.sequences

    told = [await sequences.assign_id(sequence, 64) for sequence in (FIRST, OTHER, THIRD, OTHER)]

    assert told == [(False, 0), (True, HIGHEST[64]), (True, HIGHEST[64] - 1), (True, HIGHEST[64])]


@pytest.mark.parametrize("command", ["SET {} x", "HSET {} last x", "RPUSH {} x"])
async def test_counts_that_are_damaged_begin_again(gateway: Gateway, queue: RedisQueue, command: str) -> None:
    """Numbers that are in use are passed over."""
    (_, told) = await begin(gateway, FIRST, OTHER)
    key = keys.sequence_numbers("sum", 0)
    router = (await queue.connect()).router
    await router.call(keys.slot(key), b"DEL", key.encode())
    await router.call(keys.slot(key), *command.format(key).encode().split())

    again = await begin(gateway, SequenceId("acme", 8), THIRD, worker="w2")

    assert again[1].number not in {0, told.number}


async def test_a_full_redis_still_tells_of_a_sequence(redis_queue: RedisQueue) -> None:
    """A request that waited here for memory would hold its own: delivered requests make room."""
    sequences = sequences_of(await redis_queue.connect())
    await sequences.assign_id(FIRST, 64)
    redis_queue.on_every_node("CONFIG", "SET", "maxmemory", "1")
    try:
        told = await sequences.assign_id(OTHER, 64)
    finally:
        redis_queue.on_every_node("CONFIG", "SET", "maxmemory", "0")

    assert told == (True, HIGHEST[64])
