"""Many asynchronous requests in one script on Redis: one that can't be written stops no other."""

import pytest

from qinfer.queue import keys
from qinfer.queue.connection import CommandRefused
from qinfer.queue.entries import AcceptOutcome
from tests.contract.conftest import RedisQueue
from tests.support.requests import accept, acceptance, address, ended, settle


async def test_a_record_of_another_kind_stops_no_other_request(redis_queue: RedisQueue) -> None:
    """Each is tried alone then; that of this one stays as it is."""
    delivery = await redis_queue.connect()
    redis_queue.on_owner("SET", keys.request("digits", 0, "r1"), "no hash")

    found = await delivery.requests.accept_all([acceptance(f"r{number}") for number in range(3)])

    assert [type(each) for each in found] == [AcceptOutcome, CommandRefused, AcceptOutcome]
    redis_queue.on_owner("DEL", keys.request("digits", 0, "r1"))
    for number in (0, 2):
        assert await delivery.requests.record(address(f"r{number}")) is not None


async def test_a_record_of_another_kind_stops_no_end(redis_queue: RedisQueue) -> None:
    """The others end at once; that this one did not is said."""
    delivery = await redis_queue.connect()
    for number in range(3):
        await accept(delivery, f"r{number}")
    record = keys.request("digits", 0, "r1")
    redis_queue.on_owner("DEL", record)
    redis_queue.on_owner("SET", record, "no hash")

    with pytest.raises(CommandRefused, match="WRONGTYPE"):
        await settle(delivery, *(ended(f"r{number}") for number in range(3)))

    redis_queue.on_owner("DEL", record)
    for number in (0, 2):
        found = await delivery.requests.record(address(f"r{number}"))
        assert found is not None
        assert found.state.is_terminal, number
