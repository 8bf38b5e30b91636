"""The contract of global resources (the numbered promises of `qinfer.queue.resources`) on each server."""

from collections import Counter
from collections.abc import AsyncIterator, Callable
from random import Random

import pytest

from qinfer.queue.resources import ExchangeOutcome, Resources, Wish
from qinfer.queue.sequences.ownership import RENEW_OWNER
from qinfer.testing import EmbeddedServer
from tests.contract.conftest import RedisQueue
from tests.support.servers.servers import Database

LEASE_S = 10.0
MAXIMA = {"a": 2, "b": 1}
ONE, TWO, BOTH = Wish({"a": 1}), Wish({"a": 2}), Wish({"a": 1, "b": 1})

Join = Callable[[str], Resources]


@pytest.fixture
async def join(redis_queue: RedisQueue) -> AsyncIterator[Join]:
    """Makes workers, on each kind of server."""
    queue, workers = await redis_queue.connect(), list[Resources]()

    def one(name: str) -> Resources:
        workers.append(Resources(queue.router, name, LEASE_S))
        return workers[-1]

    yield one
    for worker in workers:
        await worker.close()


@pytest.fixture
async def late(timed: EmbeddedServer, database: Database) -> Join:
    """Makes workers on a server whose time moves."""
    del timed
    queue = await database.delivery()
    return lambda name: Resources(queue.router, name, LEASE_S)


async def ask(worker: Resources, wish: Wish | None = None, **back: int) -> ExchangeOutcome:
    return await worker.exchange(MAXIMA, back, wish)


async def held(*workers: Resources) -> list[dict[str, int]]:
    return [(await ask(worker)).held for worker in workers]


# --- all or none, up to the maximum (promises 1 and 2) ---


async def test_units_are_held_up_to_the_maximum(join: Join) -> None:
    one, other, third = join("w1"), join("w2"), join("w3")

    assert (await ask(one, ONE)).has_got
    assert (await ask(other, ONE)).has_got
    assert not (await ask(third, ONE)).has_got
    assert await held(one, other, third) == [{"a": 1}, {"a": 1}, {}]


async def test_all_units_of_an_execution_are_taken_or_none(join: Join) -> None:
    one, other = join("w1"), join("w2")
    await ask(one, Wish({"b": 1}))

    refused = await ask(other, BOTH)

    assert not refused.has_got
    assert refused.held == {}
    assert refused.wanted == frozenset()
    assert 0 < refused.retry_s <= LEASE_S


async def test_units_are_given_back_before_others_are_taken(join: Join) -> None:
    """So a worker waits for nothing that it holds without use."""
    one, other = join("w1"), join("w2")
    await ask(one, ONE)
    await ask(other, ONE)

    assert not (await ask(one, TWO, a=1)).has_got
    assert await held(one) == [{}]
    await ask(other, a=1)
    assert (await ask(one, TWO)).held == {"a": 2}


async def test_the_largest_maximum_of_a_live_worker_counts(join: Join) -> None:
    one, other = join("w1"), join("w2")
    await one.exchange({"a": 1}, {}, ONE)

    assert not (await other.exchange({"a": 1}, {}, ONE)).has_got
    assert (await other.exchange({"a": 2}, {}, ONE)).has_got


async def test_more_is_given_back_than_there_is(join: Join) -> None:
    """After a reply that was lost; nothing becomes negative."""
    one, other = join("w1"), join("w2")
    await ask(one, ONE)

    assert (await ask(one, a=1)).held == {}
    assert (await ask(one, a=1)).held == {}
    assert (await ask(other, TWO)).held == {"a": 2}
    assert not (await ask(one, ONE)).has_got


# --- leases (promise 3) ---


async def test_units_of_a_lease_that_ended_are_free(late: Join, timed: EmbeddedServer) -> None:
    one, other = late("w1"), late("w2")
    await ask(one, TWO)
    assert (await ask(other, ONE)).retry_s == pytest.approx(LEASE_S, abs=2)

    timed.advance(LEASE_S / 2)
    assert not (await ask(other, ONE)).has_got
    timed.advance(LEASE_S / 2 + 0.1)

    assert (await ask(other, ONE)).has_got
    assert await held(one) == [{}]


async def test_each_exchange_renews_the_lease(late: Join, timed: EmbeddedServer) -> None:
    one, other = late("w1"), late("w2")
    await ask(one, TWO)
    for _ in range(3):
        timed.advance(LEASE_S - 1)
        assert await held(one) == [{"a": 2}]

    assert not (await ask(other, ONE)).has_got


async def test_the_renewer_of_a_worker_renews_the_lease(late: Join, timed: EmbeddedServer, database: Database) -> None:
    """It runs while a model holds the interpreter, for as long as that takes."""
    one, other = late("w1"), late("w2")
    await ask(one, TWO)
    client = database.store().client
    for _ in range(6):
        timed.advance(LEASE_S - 1)
        keys = one.lease_keys
        renewed = await client.eval(RENEW_OWNER.text, len(keys), *keys, one.owner, int(LEASE_S * 1000), 0)
        assert renewed == 1

    assert not (await ask(other, ONE)).has_got
    assert await held(one) == [{"a": 2}]


async def test_who_waits_and_dies_is_out_of_line(late: Join, timed: EmbeddedServer) -> None:
    one, dead, other = late("w1"), late("w2"), late("w3")
    await ask(one, ONE)
    await ask(dead, TWO)
    timed.advance(LEASE_S / 2)
    await held(one)
    assert not (await ask(other, ONE)).has_got

    timed.advance(LEASE_S / 2 + 0.1)

    assert (await ask(other, ONE)).has_got


async def test_a_worker_that_leaves_frees_its_units_and_its_place(join: Join) -> None:
    one, other, third = join("w1"), join("w2"), join("w3")
    await ask(one, ONE)
    await ask(other, TWO)
    assert not (await ask(third, ONE)).has_got

    await other.end_lease()

    assert (await ask(third, ONE)).has_got
    await one.end_lease()
    assert (await ask(third, TWO, a=1)).has_got


# --- order (promise 4) ---


async def test_who_came_first_gets_units_first(join: Join) -> None:
    """Units that suffice for one behind are kept for one before that needs more."""
    one, other, third = join("w1"), join("w2"), join("w3")
    await ask(one, ONE)
    await ask(other, TWO)
    assert not (await ask(third, ONE)).has_got
    assert (await ask(one)).wanted == {"a"}

    await ask(one, a=1)

    assert not (await ask(third, ONE)).has_got
    assert (await ask(other, TWO)).has_got


async def test_others_do_not_wait_for_what_they_do_not_need(join: Join) -> None:
    one, other, third = join("w1"), join("w2"), join("w3")
    await ask(one, TWO)
    await ask(other, ONE)

    assert (await ask(third, Wish({"b": 1}))).has_got


async def test_callees_go_first(join: Join) -> None:
    one, other, third = join("w1"), join("w2"), join("w3")
    await ask(one, TWO)
    await ask(other, ONE)
    await ask(third, Wish({"a": 2}, is_callee=True))

    await ask(one, a=1)
    assert not (await ask(other, ONE)).has_got
    await ask(one, a=1)
    assert (await ask(third, Wish({"a": 2}, is_callee=True))).has_got


async def test_a_wish_that_is_given_up_holds_up_nobody(join: Join) -> None:
    one, other, third = join("w1"), join("w2"), join("w3")
    await ask(one, ONE)
    await ask(other, TWO)
    assert not (await ask(third, ONE)).has_got

    await other.exchange(MAXIMA, {}, None, [TWO])

    assert (await ask(third, ONE)).has_got


# --- news (promise 5) ---


async def test_holders_learn_that_others_wait_and_those_that_units_are_free(join: Join) -> None:
    one, other = join("w1"), join("w2")
    await ask(one, TWO)
    await ask(other, BOTH)

    told = await one.wait("0")
    assert told is not None
    assert not told.has_freed
    assert told.wanted == {"a", "b"}
    mine = await other.wait("0")
    assert mine is not None
    assert mine.wanted == frozenset()

    await ask(one, a=1)

    freed = await other.wait(mine.last)
    assert freed is not None
    assert freed.has_freed
    assert await other.wait(freed.last) is None


# --- all of them at once ---


async def test_nothing_is_exceeded_whatever_happens(late: Join, timed: EmbeddedServer) -> None:
    """Workers take, give back, wait, give up, die and come back under other names, in any order."""
    random = Random(7)
    needs = [{"a": 1}, {"a": 2}, {"b": 1}, {"a": 1, "b": 1}]
    workers = [late(f"w{number}") for number in range(4)]
    has: dict[Resources, Counter[str]] = {worker: Counter() for worker in workers}
    for step in range(400):
        number = random.randrange(4)
        worker, mine = workers[number], has[workers[number]]
        wish = Wish(random.choice(needs), random.random() < 0.2)
        match random.choice(["take", "take", "take", "give", "give", "give up", "die", "time"]):
            case "take":
                got = await ask(worker, wish)
                if got.has_got:
                    mine.update(wish.units)
                assert got.held == +mine
            case "give":
                back = {name: random.randint(1, count) for name, count in (+mine).items()}
                mine.subtract(back)
                assert (await worker.exchange(MAXIMA, back)).held == +mine
            case "give up":
                await worker.exchange(MAXIMA, {}, None, [wish])
            case "die":
                workers[number] = late(f"w{number}-{step}")
                has[workers[number]] = Counter()
            case "time":
                timed.advance(LEASE_S / 3)
                for live in workers:
                    assert (await ask(live)).held == +has[live]
                has = {live: has[live] for live in workers} if random.random() < 0.3 else has
        total: Counter[str] = Counter()
        for live in workers:
            total.update(has[live])
        assert all(total[name] <= most for name, most in MAXIMA.items())

    timed.advance(LEASE_S + 1)
    fresh = late("fresh")
    assert (await ask(fresh, BOTH)).has_got
