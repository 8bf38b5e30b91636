"""Many requests in one call: accepted and ended, each as if it were alone."""

from qinfer.errors import InvalidRequest, QueueFull
from qinfer.queue.entries import MAX_NOTES_BYTES, AcceptOutcome, Lane, RequestState
from qinfer.queue.values import LARGE_BYTES
from tests.contract.conftest import RedisQueue
from tests.support.requests import LANE, accept, acceptance, address, ended, fetch, settle

LARGE = LARGE_BYTES + 1
MANY = 100


async def test_many_are_accepted_and_ended(queue: RedisQueue) -> None:
    """Of several models, with values of every size; and they can be repeated."""
    delivery = await queue.connect()
    sizes = [0, 1, LARGE, 10, 2**20, 2**20]
    batch = [
        acceptance(f"r{number}", ("digits", "other")[number % 2], payload=bytes(sizes[number % len(sizes)]))
        for number in range(12)
    ] + [acceptance(f"r{number}") for number in range(12, MANY)]

    found = await delivery.requests.accept_all(batch)

    assert found == [AcceptOutcome(each.address.id, is_new=True, body_hash=each.body_hash) for each in batch]
    leases = {lease.frame: lease for lease in await fetch(delivery)}
    digits = {bytes(each.frame): each for each in batch if each.address.model == "digits"}
    assert leases.keys() == digits.keys()
    for frame, each in digits.items():
        assert bool(leases[frame].entry.payload_id) == bool(each.payload)
        if each.payload:
            assert await delivery.payload(leases[frame].entry, each.address.id) == each.payload
    again = await delivery.requests.accept_all(batch)
    assert [(each.id, each.is_new) for each in again if isinstance(each, AcceptOutcome)] == [
        (each.address.id, False) for each in batch
    ]
    ends = [
        ended(each.address.id, model=each.address.model, blob=bytes(LARGE if i == 5 else i + 1))
        for i, each in enumerate(batch)
    ]
    assert await settle(delivery, *ends) == [True] * MANY
    assert await settle(delivery, *ends) == [False] * MANY
    for number in (0, 5, 50, MANY - 1):
        assert await delivery.requests.result(batch[number].address) == ends[number].outcome.blob
    assert await delivery.depth([LANE]) == await delivery.depth([Lane("other", 1)]) == [0]


async def test_each_of_many_is_told_what_became_of_it(queue: RedisQueue) -> None:
    """One that is known, one that was refused, and one that found the lane full, among others."""
    delivery = await queue.connect()
    await accept(delivery, "known")
    wrong = acceptance("wrong", outbox="box", notes=bytes(MAX_NOTES_BYTES + 1))
    limited = [acceptance(f"r{number}", limit=3) for number in range(4)]

    found = await delivery.requests.accept_all(
        [acceptance("known"), wrong, *limited, acceptance("known", body_hash="x"), acceptance("last")]
    )

    kinds = [each.is_new if isinstance(each, AcceptOutcome) else type(each) for each in found]
    assert kinds == [False, InvalidRequest, True, True, QueueFull, QueueFull, False, True]
    conflict = found[6]
    assert isinstance(conflict, AcceptOutcome)
    assert conflict.body_hash == "hash of known"
    record = await delivery.requests.record(address("last"))
    assert record is not None
    assert record.state is RequestState.QUEUED


async def test_of_many_ends_some_may_be_late(queue: RedisQueue) -> None:
    """Unknown ones, and one that ended before, do not keep the others."""
    delivery = await queue.connect()
    await delivery.requests.accept_all([acceptance(f"r{number}") for number in range(3)])
    await settle(delivery, ended("r1", RequestState.CANCELLED))

    assert await settle(delivery, ended("r0"), ended("r1"), ended("unknown"), ended("r2")) == [True, False, False, True]

    record = await delivery.requests.record(address("r1"))
    assert record is not None
    assert record.state is RequestState.CANCELLED


async def test_none_of_none(queue: RedisQueue) -> None:
    """Nothing to do is no error."""
    requests = (await queue.connect()).requests

    assert await requests.accept_all([]) == []
    assert await requests.settle([]) == []
