"""Sequences of stateful models as demand, on each server; a worker takes them by hand."""

from qinfer.models.state import StoredModel
from qinfer.queue.sequences.records import SequenceId
from qinfer.scaling.work import SequenceWork, read_backlogs, read_sequences
from tests.contract.conftest import RedisQueue
from tests.support.sequences import EIGHT, SEVEN, STATEFUL, Gateway, Worker, first, later, stored

PLAIN = STATEFUL.replace('name: "sum"', 'name: "plain"').replace("sequence_batching { direct {} }", "")


async def test_open_and_waiting_sequences_are_counted_with_their_slots(queue: RedisQueue) -> None:
    """Of all versions; what waits is open, too. A model without sequences has none to count, nor has a broken one."""
    delivery = await queue.connect()
    gateway = Gateway(delivery.sequences("sum", 0))
    await gateway.send(SEVEN, first(1))
    await gateway.send(EIGHT, first(2, version=2))
    worker = await Worker(gateway, "w1").join()
    await worker.work()
    models = {"sum": stored(STATEFUL, 1, 2), "plain": stored(PLAIN, 1), "broken": StoredModel("broken", 1, "{}", (1,))}

    (found,) = await read_sequences(delivery, models)

    assert found == SequenceWork(model="sum", open=2, waiting=1, handed_over=0, lost=0, slots=4)
    assert found.workers == 1


async def test_steps_of_sequences_that_wait_are_counted_by_version(queue: RedisQueue) -> None:
    """Steps of all tenants count; those of sequences that have an owner are the worker's to count."""
    delivery = await queue.connect()
    gateway = Gateway(delivery.sequences("sum", 0))
    await gateway.send(SEVEN, first(1))
    worker = await Worker(gateway, "w1").join()
    await worker.own()
    await gateway.send(EIGHT, first(2), later(3))
    await gateway.send(SequenceId("", 9), first(4))
    await gateway.send(SequenceId("other", 9), first(5, version=2))
    models = {"sum": stored(STATEFUL, 1, 2), "plain": stored(PLAIN, 1)}

    assert await read_backlogs(delivery, models) == {("sum", 1): 3, ("sum", 2): 1}


async def test_what_a_worker_gives_back_is_handed_over_or_lost(queue: RedisQueue) -> None:
    """A state in the worker's memory ends with it."""
    delivery = await queue.connect()
    gateway = Gateway(delivery.sequences("sum", 0))
    await gateway.send(SEVEN, first(1))
    await gateway.send(EIGHT, first(2, explicit=True))
    worker = await Worker(gateway, "w1").join()
    await worker.work()
    await gateway.sequences.hand_over("w1", [SEVEN, EIGHT])

    (found,) = await read_sequences(delivery, {"sum": stored(STATEFUL, 1)})

    assert (found.open, found.waiting, found.handed_over, found.lost) == (1, 1, 1, 1)
    assert await read_sequences(delivery, {}) == ()


def test_workers_are_those_that_have_slots_for_all() -> None:
    needed = [
        SequenceWork(model="m", open=count, waiting=0, handed_over=0, lost=0, slots=4).workers
        for count in (0, 1, 4, 5, 9)
    ]

    assert needed == [0, 1, 1, 2, 3]
