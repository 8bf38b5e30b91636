"""Asynchronous requests on Redis beyond the contract: lifetimes, large values, full memory, repair."""

from collections.abc import Callable

import pytest

from qinfer.errors import BrokerUnavailable, QueueFull
from qinfer.queue import keys
from qinfer.queue.connection import RedisConnection
from qinfer.queue.deliveries import WEBHOOKS
from qinfer.queue.entries import MARGIN_S, MAX_WATCHERS, RequestState, reply_address
from qinfer.queue.requests import AT_ONCE
from qinfer.queue.values import Values
from tests.contract.conftest import RedisQueue
from tests.contract.queue.test_delivery import listening
from tests.support.requests import LANE, accept, address, ended, fetch, settle, webhooks

HOOK = "https://example.org/hook"
LARGE = 2**20 + 1
QUEUE = keys.deliveries("digits", 0, WEBHOOKS)
RECORD, RESULT = keys.request("digits", 0, "r1"), keys.result("digits", 0, "r1")
PAYLOAD = keys.payload("digits", 0, "r1")


def names(queue: RedisQueue) -> set[str]:
    """Returns what there is of the partition, without what its keys begin with."""
    found = [key.decode() for on_node in queue.on_every_node("KEYS", "*{digits#0}*") for key in on_node]
    return {name.removeprefix("qinfer:{digits#0}:") for name in found}


# --- keys ---


@pytest.mark.parametrize("size", [1, LARGE], ids=["small", "large"])
async def test_every_key_of_a_request_has_its_time_to_live(redis_queue: RedisQueue, size: int) -> None:
    """From the start the whole time that it may need, from the end what the result and the tombstone need."""
    delivery = await redis_queue.connect()
    await accept(
        delivery,
        payload=bytes(size),
        timeout_s=100.0,
        result_ttl_s=200.0,
        tombstone_ttl_s=300.0,
        idempotency_key="k",
        idempotency_ttl_s=50.0,
        webhook=HOOK,
    )

    def ttl_s(key: str) -> float:
        return float(redis_queue.on_owner("PTTL", key)) / 1000

    assert names(redis_queue) == {"1:p1", "request:r1", "payload:r1", "due", "idem::k"}
    assert ttl_s(RECORD) == pytest.approx(600.0 + MARGIN_S, abs=30.0)
    assert ttl_s(PAYLOAD) == pytest.approx(600.0 + MARGIN_S, abs=30.0)
    assert ttl_s(keys.idempotency("digits", 0, "", "k")) == pytest.approx(50.0, abs=30.0)
    await settle(delivery, ended(blob=bytes(size)))
    assert names(redis_queue) == {
        "1:p1",
        "request:r1",
        "result:r1",
        "idem::k",
        "deliveries:webhooks",
        "ended:succeeded",
    }
    assert ttl_s(RECORD) == pytest.approx(500.0, abs=30.0)
    assert ttl_s(RESULT) == pytest.approx(200.0, abs=30.0)


@pytest.mark.parametrize("size", [1, LARGE], ids=["small", "large"])
async def test_nothing_is_left_of_what_was_refused_or_late(redis_queue: RedisQueue, size: int) -> None:
    """A payload or result that came for nothing is removed at once."""
    delivery = await redis_queue.connect()
    await accept(delivery)
    before = names(redis_queue)

    await accept(delivery, payload=bytes(size))
    with pytest.raises(QueueFull):
        await accept(delivery, "r2", payload=bytes(size), limit=1)
    assert names(redis_queue) == before

    await settle(delivery, ended())
    before = names(redis_queue)
    await settle(delivery, ended(blob=bytes(size)), ended("other", blob=bytes(size)))
    assert names(redis_queue) == before


async def test_an_id_that_another_begins_with_is_another(redis_queue: RedisQueue) -> None:
    """A tenant's name may be another's with something behind it: neither touches what is the other's."""
    delivery = await redis_queue.connect()
    await accept(delivery, "r1@a~", payload=b"theirs")
    await accept(delivery, "r1@a", payload=b"x")

    await accept(delivery, "r1@a", payload=b"x")
    await settle(delivery, ended("r1@a"), ended("r1@a"))

    [lease] = await fetch(delivery)
    assert await delivery.payload(lease.entry, "r1@a~") == b"theirs"


async def test_a_deadline_whose_request_nobody_knows_is_forgotten(redis_queue: RedisQueue) -> None:
    """Or the sweep would find it again and again, before all others."""
    delivery = await redis_queue.connect()
    await accept(delivery, timeout_s=0.001)
    redis_queue.on_owner("UNLINK", RECORD)

    assert await settle(delivery, ended(state=RequestState.EXPIRED)) == [False]

    assert "due" not in names(redis_queue)


async def test_a_result_that_is_hardly_kept_ends_its_request(redis_queue: RedisQueue) -> None:
    """Redis takes no time to live below a millisecond."""
    delivery = await redis_queue.connect()
    await accept(delivery, result_ttl_s=0.0004)

    assert await settle(delivery, ended()) == [True]


async def test_large_tensors_do_not_swell_the_stream(redis_queue: RedisQueue) -> None:
    """50 MB lie beside it: the lane is what readers and failovers carry around."""
    delivery = await redis_queue.connect()

    await accept(delivery, payload=bytes(50 * 10**6))

    assert redis_queue.on_owner("MEMORY", "USAGE", keys.lane(LANE)) < 10_000
    assert redis_queue.on_owner("STRLEN", PAYLOAD) == 50 * 10**6


async def test_only_large_values_have_a_connection_of_their_own(redis_queue: RedisQueue) -> None:
    """It is opened when the first of them comes."""
    delivery = await redis_queue.connect()

    def is_open() -> bool:
        return any("qinfer-values" in str(clients) for clients in redis_queue.on_every_node("CLIENT", "LIST"))

    await accept(delivery, payload=b"x")
    await settle(delivery, ended(blob=b"x"))
    await delivery.requests.result(address())
    assert not is_open()
    await accept(delivery, "r2", payload=bytes(LARGE))
    assert is_open()


async def test_a_large_payload_that_went_away_in_between_is_sent_again(
    redis_queue: RedisQueue, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing is accepted without it: the caller repeats."""
    delivery = await redis_queue.connect()
    with monkeypatch.context() as patch:
        patch.setattr(Values, "_write_large", _lost)

        with pytest.raises(BrokerUnavailable, match="try again"):
            await accept(delivery, payload=bytes(LARGE))

    assert names(redis_queue) == set()
    assert (await accept(delivery, payload=bytes(LARGE))).is_new


async def test_a_large_result_that_went_away_in_between_is_sent_again(
    redis_queue: RedisQueue, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing ends without it: the caller repeats."""
    delivery = await redis_queue.connect()
    await accept(delivery)
    before = names(redis_queue)
    with monkeypatch.context() as patch:
        patch.setattr(Values, "_write_large", _lost)

        with pytest.raises(BrokerUnavailable, match="try again"):
            await settle(delivery, ended(blob=bytes(LARGE)))

    assert names(redis_queue) == before
    assert await settle(delivery, ended(blob=bytes(LARGE))) == [True]


async def _lost(*_: object, **__: object) -> None:
    """Stores nothing."""


# --- writes ---


async def test_the_ends_of_a_batch_leave_in_one_write(redis_queue: RedisQueue, monkeypatch: pytest.MonkeyPatch) -> None:
    """However many they are; each script ends some, so that none takes long."""
    delivery = await redis_queue.connect()
    for number in range(2 * AT_ONCE + 2):
        await accept(delivery, f"r{number}")
    await settle(delivery, ended("other"), ended("another"))  # the script is known
    writes: list[int] = []
    flush: Callable[[RedisConnection], None] = RedisConnection._flush

    def counted(connection: RedisConnection) -> None:
        if connection._out:
            writes.append(len(connection._out))
        flush(connection)

    monkeypatch.setattr(RedisConnection, "_flush", counted)

    assert all(await settle(delivery, *(ended(f"r{number}") for number in range(2 * AT_ONCE + 2))))

    assert [count for count in writes if count > 1] == [3]


async def test_full_memory_refuses_requests_and_lets_them_end(redis_queue: RedisQueue) -> None:
    """Requests that end give memory back; refused ones store nothing."""
    try:
        await _check_full_memory(redis_queue)
    finally:
        redis_queue.on_every_node("CONFIG", "SET", "maxmemory", "0")


async def test_full_memory_stops_no_webhook(redis_queue: RedisQueue) -> None:
    """Not even the first that anyone asks for."""
    delivery = await redis_queue.connect()
    await accept(delivery, webhook=HOOK)
    await settle(delivery, ended())
    redis_queue.on_every_node("CONFIG", "SET", "maxmemory", "1")
    try:
        assert len(await webhooks(delivery)) == 1
    finally:
        redis_queue.on_every_node("CONFIG", "SET", "maxmemory", "0")


async def _check_full_memory(queue: RedisQueue) -> None:
    delivery = await queue.connect()
    await accept(delivery, payload=b"x", webhook=HOOK)
    before = names(queue)
    queue.on_every_node("CONFIG", "SET", "maxmemory", "1")

    with pytest.raises(QueueFull, match="memory is full"):
        await accept(delivery, "r2", payload=b"x")
    assert names(queue) == before
    record = await delivery.requests.record(address(), reply_address("g1"))
    assert record is not None

    assert await settle(delivery, ended()) == [True]

    assert await delivery.requests.result(address()) == b"blob of succeeded"
    assert names(queue) == {"1:p1", "request:r1", "result:r1", "deliveries:webhooks", "ended:succeeded"}


async def test_an_accepted_request_survives_the_servers_restart(own_redis: RedisQueue) -> None:
    """With its payload, its deadline and its key; and so does its end."""
    delivery = await own_redis.connect(durability="always")
    await accept(delivery, "r1", payload=bytes(LARGE), idempotency_key="k")
    await accept(delivery, "r2", webhook=HOOK, timeout_s=0.01)
    await settle(delivery, ended("r2", RequestState.EXPIRED))
    [server] = own_redis.nodes
    server.process.kill()
    server.process.wait()
    server.start()

    after = await own_redis.connect(durability="always")

    assert (await accept(after, "r3", idempotency_key="k")).id == "r1"
    [lease] = await fetch(after)
    assert (lease.frame, await after.payload(lease.entry, "r1")) == (b"r1", bytes(LARGE))
    assert await after.requests.result(address("r2")) == b"blob of expired"
    assert len(await webhooks(after)) == 1


async def test_scripts_that_a_server_forgot_are_sent_again(redis_queue: RedisQueue) -> None:
    """After a restart or a failover it knows none."""
    delivery = await redis_queue.connect()
    await accept(delivery)
    redis_queue.on_every_node("SCRIPT", "FLUSH")

    assert await settle(delivery, ended(), ended("other")) == [True, False]


async def test_without_a_connection_the_caller_is_told(own_redis: RedisQueue) -> None:
    """Accepting and settling raise what may be tried again."""
    delivery = await own_redis.connect(command_timeout_s=0.2)
    await accept(delivery)
    own_redis.nodes[0].stop()

    for attempt in (accept(delivery, "r2"), settle(delivery, ended()), delivery.requests.record(address())):
        with pytest.raises(BrokerUnavailable):
            await attempt


# --- watchers ---


async def test_only_so_many_processes_watch_one_request(redis_queue: RedisQueue) -> None:
    """The latest are told: the others have asked again by then, or are gone."""
    delivery = await redis_queue.connect()
    await accept(delivery)
    async with listening(delivery, "first") as first, listening(delivery, "last") as last:
        await delivery.requests.record(address(), reply_address("first"))
        for number in range(MAX_WATCHERS - 1):
            await delivery.requests.record(address(), reply_address(f"g{number}"))
        await delivery.requests.record(address(), reply_address("last"))

        await settle(delivery, ended())

        await last.get()
        await delivery.publish(reply_address("first"), b"end")
        assert await first.get() == b"end"


# --- webhooks ---


async def test_the_queue_of_webhooks_lives_a_day_longer_than_the_records(redis_queue: RedisQueue) -> None:
    """Where no gateway delivers webhooks any more, nothing is left; a later short-lived request takes nothing away."""
    delivery = await redis_queue.connect()
    for name, seconds in (("r1", 500.0), ("r2", 100.0)):
        await accept(delivery, name, webhook=HOOK, result_ttl_s=seconds, tombstone_ttl_s=seconds)
        await settle(delivery, ended(name))

    assert float(redis_queue.on_owner("PTTL", QUEUE)) / 1000 == pytest.approx(1000.0 + 86400.0, abs=30.0)
    assert len(await webhooks(delivery)) == 2
