"""Shares of tenants in a lane, on each server (promise 14 of `qinfer.queue.lanes`); all other promises hold, too."""

import asyncio
from collections import Counter
from collections.abc import Sequence

import pytest

from qinfer.core.messages import InferRequest
from qinfer.errors import QinferError, QueueFull
from qinfer.queue import keys
from qinfer.queue.entries import Entry, Lane, Lease, Payload, RequestState, share_of
from qinfer.queue.lanes import Queue
from qinfer.wire.frame import encode_request
from tests.contract.conftest import RedisQueue
from tests.contract.queue.test_delivery import HIGH, LOW, fetch, frames, ready
from tests.support.leases import renew
from tests.support.requests import LANE, accept, address, ended

FLOOD = 60
HOUR_MS = 3_600_000


async def submit(delivery: Queue, tenant: str, *sent: bytes, limit: int = 0, lane: Lane = HIGH) -> list[Entry]:
    """Submits frames of a tenant, one after the other, as a gateway does that waits for none of them."""
    entries = []
    for frame in sent:
        answer = await offer(delivery, tenant, frame, limit=limit, lane=lane)
        assert isinstance(answer, Entry), answer
        entries.append(answer)
    return entries


async def offer(
    delivery: Queue, tenant: str, frame: bytes, *, limit: int = 0, payload: Payload | None = None, lane: Lane = HIGH
) -> Entry | QinferError:
    future: asyncio.Future[Entry | QinferError] = asyncio.get_running_loop().create_future()
    delivery.submit(lane, frame, future.set_result, limit=limit, tenant=tenant, payload=payload)
    return await future


async def flooded(queue: RedisQueue, *light: bytes, weights: dict[str, int] | None = None) -> Queue:
    """Returns a queue in which `heavy` has submitted `FLOOD` entries, and after them `light` some."""
    delivery = await ready(queue)
    delivery.places.weigh = (weights or {}).get if weights else (lambda _: 0)  # type: ignore[assignment]
    await submit(delivery, "heavy", *[b"heavy"] * FLOOD)
    await submit(delivery, "light", *light)
    return delivery


def counted(leases: Sequence[Lease]) -> Counter[bytes]:
    return Counter(frames(leases))


def of_light(leases: Sequence[Lease]) -> list[Lease]:
    return [lease for lease in leases if lease.frame.startswith(b"light")]


def keys_of_shares(queue: RedisQueue) -> set[str]:
    found = {key.decode().rpartition("}:")[2] for keys in queue.on_every_node("KEYS", "*~*") for key in keys}
    return {key for key in found if not key.endswith(("~tenants", "~seen"))}


def make_old(queue: RedisQueue, *tenants: str, lane: Lane = HIGH) -> None:
    """Has tenants look as if they had not submitted for an hour."""
    for tenant in tenants:
        queue.on_owner("ZINCRBY", keys.lane(lane) + b"~seen", -HOUR_MS, tenant)


async def forget(delivery: Queue) -> None:
    """Does what workers do now and then."""
    await delivery.reclaim([HIGH, LOW], "tidy", 60.0, 100)


# --- turns ---


async def test_one_tenant_has_the_lane_itself(queue: RedisQueue) -> None:
    """Nothing is divided, however many processes submit for it."""
    delivery, other = await ready(queue), await queue.connect()

    entries = await submit(delivery, "one", b"1", b"2") + await submit(other, "one", b"3", b"4")

    assert {entry.lane for entry in entries} == {HIGH}
    assert not keys_of_shares(queue)
    assert frames(await fetch(delivery)) == [b"1", b"2", b"3", b"4"]


async def test_what_is_nobodys_goes_to_the_lane_itself(queue: RedisQueue) -> None:
    """Also where tenants have divided it; it is fetched with the share of the first."""
    delivery = await flooded(queue, b"light")

    [entry] = await submit(delivery, "", b"nobody's")

    assert entry.lane == HIGH
    assert counted(await fetch(delivery))[b"nobody's"] == 1


async def test_a_tenant_that_comes_later_waits_for_no_flood(queue: RedisQueue) -> None:
    """Both have half of what is fetched while both wait."""
    delivery = await flooded(queue, *[b"light"] * 10)

    first, second = await fetch(delivery, count=8), await fetch(delivery, "b", count=12)

    assert counted(first) == {b"heavy": 4, b"light": 4}
    assert counted(second) == {b"heavy": 6, b"light": 6}


async def test_workers_that_fetch_one_at_a_time_take_turns_together(queue: RedisQueue) -> None:
    """The turns are the lane's, not the worker's."""
    await flooded(queue, *[b"light"] * 10)
    workers = [await queue.connect() for _ in range(5)]

    taken = [lease for _ in range(4) for worker in workers for lease in await fetch(worker, "w", count=1)]

    assert counted(taken) == {b"heavy": 10, b"light": 10}


async def test_what_a_tenant_does_not_use_the_others_have(queue: RedisQueue) -> None:
    """A fetch is full as long as anything waits."""
    delivery = await flooded(queue, b"light")

    assert counted(await fetch(delivery, count=20)) == {b"heavy": 19, b"light": 1}
    assert counted(await fetch(delivery, count=100)) == {b"heavy": FLOOD - 19}


async def test_who_was_away_has_saved_nothing_up(queue: RedisQueue) -> None:
    """A tenant that comes back has its share from then on, no more."""
    delivery = await flooded(queue, b"light")
    await fetch(delivery, count=30)
    await submit(delivery, "light", *[b"light"] * 20)

    assert counted(await fetch(delivery, count=20)) == {b"heavy": 10, b"light": 10}


async def test_shares_are_by_weight(queue: RedisQueue) -> None:
    """A tenant of weight 3 has three quarters beside one of weight 1."""
    delivery = await flooded(queue, *[b"light"] * 40, weights={"heavy": 1, "light": 3})

    assert counted(await fetch(delivery, count=20)) == {b"heavy": 5, b"light": 15}


async def test_a_changed_weight_holds_at_the_next_question(queue: RedisQueue) -> None:
    """What a process remembers says where entries go, not how much of them is fetched."""
    delivery = await flooded(queue, *[b"light"] * 40, weights={"heavy": 1, "light": 1})
    delivery.places.weigh = {"heavy": 1, "light": 4}.get  # type: ignore[assignment]
    delivery.places.drop_place(HIGH, "light")

    await submit(delivery, "light", b"light")

    assert counted(await fetch(delivery, count=20)) == {b"heavy": 4, b"light": 16}


async def test_each_of_many_tenants_has_its_turn(queue: RedisQueue) -> None:
    """Up to 16 have a stream each."""
    delivery = await ready(queue)
    tenants = [f"t{number}" for number in range(16)]
    for tenant in tenants:
        await submit(delivery, tenant, *[tenant.encode()] * 4)

    taken = counted(await fetch(delivery, count=32))

    assert taken == {tenant.encode(): 2 for tenant in tenants}


async def test_more_tenants_than_streams_share_them(queue: RedisQueue) -> None:
    """Streams are bounded, everything is fetched, and a tenant leaves a flooded stream for the other one of its two."""
    delivery = await ready(queue)
    for number in range(40):
        await submit(delivery, f"t{number}", b"%d" % number)
    [before] = await submit(delivery, "t39", b"39")
    delivery.places.learn(HIGH, "flood", int(before.lane.name.partition("~")[2] or 0), is_shared=True)
    await submit(delivery, "flood", *[b"flood"] * 50)

    delivery.places.drop_place(HIGH, "t39")
    [after] = await submit(delivery, "t39", b"39")

    assert after.lane != before.lane
    [shares] = await delivery.shares([HIGH])
    assert len(shares) == 16
    assert sum(counted(await fetch(delivery, count=200)).values()) == 92


async def test_lanes_of_higher_priority_come_first_whoever_has_them(queue: RedisQueue) -> None:
    """Shares divide a lane; they do not change the order of lanes."""
    delivery = await ready(queue)
    await submit(delivery, "one", *[b"low"] * 3, lane=LOW)
    await submit(delivery, "two", *[b"low"] * 3, lane=LOW)
    await submit(delivery, "one", *[b"high"] * 3)
    await submit(delivery, "two", *[b"high"] * 3)

    assert counted(await fetch(delivery, count=6)) == {b"high": 6}
    assert counted(await fetch(delivery, count=6)) == {b"low": 6}


async def test_a_waiting_worker_hears_of_a_new_stream(queue: RedisQueue) -> None:
    """The first entry wakes it, and has it look for the next ones at once."""
    delivery, gateway = await ready(queue), await queue.connect()
    await submit(gateway, "one", b"1")
    await delivery.finish([lease.entry for lease in await delivery.fetch([HIGH], "a", 5, 1.0)])
    waiting = asyncio.create_task(delivery.fetch([HIGH], "a", 5, 10.0))
    await asyncio.sleep(0.05)  # it blocks, which nothing shows

    entries = await submit(gateway, "two", b"first", b"second")
    first = await waiting
    second = await delivery.fetch([HIGH], "a", 5, 10.0)

    assert [entry.lane for entry in entries] == [HIGH, share_of(HIGH, 1)]
    assert (frames(first), frames(second)) == ([b"first"], [b"second"])
    assert share_of(HIGH, 1) in delivery.sources([HIGH])


# --- the other promises ---


async def test_what_is_in_a_share_is_held_renewed_and_finished_as_any_entry(queue: RedisQueue) -> None:
    """Its lane is part of its address."""
    delivery = await flooded(queue, b"light 1", b"light 2")
    leases = await fetch(delivery, count=4)

    assert renew(delivery, leases) == []
    assert await delivery.in_flight([HIGH, LOW]) == [4, 0]
    await delivery.finish([lease.entry for lease in leases])

    assert renew(delivery, leases) == leases
    assert await delivery.depth([HIGH, LOW]) == [FLOOD - 2, 0]


async def test_what_is_released_comes_first_in_its_share(queue: RedisQueue) -> None:
    """With its delivery count as it was before."""
    delivery = await flooded(queue, b"light 1", b"light 2", b"light 3")
    [first, _] = of_light(await fetch(delivery, count=4))

    await delivery.release([first])

    [again, _] = of_light(await fetch(delivery, "b", count=4))
    assert (again.frame, again.deliveries) == (b"light 1", 1)


async def test_a_dead_workers_entries_are_reclaimed_from_shares(queue: RedisQueue) -> None:
    """They are suspects."""
    delivery = await flooded(queue, b"light")
    await fetch(delivery, count=4)

    [found] = of_light(await delivery.reclaim([HIGH, LOW], "b", 0.0, 100))

    assert (found.suspect, found.deliveries, found.entry.lane) == (True, 2, share_of(HIGH, 1))


async def test_entries_of_shares_are_withdrawn_and_cancelled(queue: RedisQueue) -> None:
    """Waiting ones are removed by either, held ones by `cancel` alone, which tells the holder."""
    delivery = await flooded(queue)
    one, two = await submit(delivery, "light", b"light 1", b"light 2")
    await fetch(delivery, count=2)

    assert await delivery.withdraw([one, two]) == [False, True]
    await delivery.cancel([one])

    [(_, lane, entry_id)] = await delivery.marks.list_cancelled("digits", 0, "0")
    assert (lane, entry_id) == (one.lane, one.entry_id)
    assert await delivery.depth([HIGH]) == [FLOOD]


async def test_a_dead_letter_of_a_share_is_replayed_to_the_lane(queue: RedisQueue) -> None:
    """By then the share may be another's."""
    delivery = await flooded(queue, encode_request(InferRequest(model="digits", id="light", inputs=())))
    [lease] = [lease for lease in await fetch(delivery, count=2) if lease.frame != b"heavy"]

    assert await delivery.bury(lease, "light", "inference_failed", "no")

    [letter] = await delivery.dead_letters.list("digits")
    assert letter.lane == HIGH
    assert await delivery.dead_letters.replay("digits", letter.id)
    [shares] = await delivery.shares([HIGH])
    assert [share.entries for share in shares] == [FLOOD + 1, 0]


async def test_a_payload_goes_with_the_entry_of_a_share(queue: RedisQueue) -> None:
    """It is read and removed as any other."""
    delivery = await flooded(queue)
    entry = await offer(delivery, "light", b"light", payload=Payload("r1", b"tensors", 60.0))
    assert isinstance(entry, Entry)

    [lease] = of_light(await fetch(delivery, count=2))

    assert lease.entry == entry
    assert await delivery.payload(lease.entry, "r1") == b"tensors"
    await delivery.finish([lease.entry])
    assert await delivery.payload(lease.entry, "r1") is None


async def test_what_was_delayed_loses_its_share(queue: RedisQueue) -> None:
    """It goes behind all others of its level."""
    delivery = await flooded(queue, b"light")
    [lease] = of_light(await fetch(delivery, count=2))

    await delivery.delay([lease], "p1.delayed")

    behind = Lane("digits", 1, "p1.delayed")
    await delivery.ensure([behind])
    [moved] = await delivery.fetch([behind], "b", 5, 0.0)
    assert moved.entry.origin == lease.entry.entry_id


async def test_sizes_are_of_all_shares(queue: RedisQueue) -> None:
    """So that autoscalers see all that waits, and how old the oldest is."""
    delivery = await flooded(queue, b"light")
    await delivery.finish([lease.entry for lease in await fetch(delivery) if lease.frame == b"heavy"])

    [size] = await delivery.sizes([HIGH])

    assert size.entries == 1
    assert size.oldest_age_s >= 0


async def test_an_asynchronous_request_knows_its_share(queue: RedisQueue) -> None:
    """It is running while it is held there, and settled there."""
    delivery = await queue.connect()
    await delivery.ensure([LANE])
    await accept(delivery, "r1", tenant="heavy")
    await accept(delivery, "r2", tenant="light")
    await accept(delivery, "r3", tenant="light")

    leases = await delivery.fetch([LANE], "a", 5, 0.0)

    assert sorted(lease.entry.lane.name for lease in leases) == ["p1", "p1~1", "p1~1"]
    record = await delivery.requests.record(address("r3"))
    assert record is not None
    assert record.state is RequestState.RUNNING
    assert await delivery.requests.settle([ended("r2"), ended("r3")]) == [True, True]
    assert await delivery.depth([LANE]) == [1]


# --- limits ---


async def test_a_full_lane_lets_in_who_has_less_than_its_share(queue: RedisQueue) -> None:
    """Up to its share of the limit; who has filled the lane is refused."""
    delivery = await ready(queue)
    await submit(delivery, "heavy", *[b"heavy"] * 10, limit=10)
    assert isinstance(await offer(delivery, "heavy", b"heavy", limit=10), QueueFull)

    light = [await offer(delivery, "light", b"light", limit=10) for _ in range(6)]

    assert [isinstance(answer, Entry) for answer in light] == [True] * 5 + [False]
    assert isinstance(await offer(delivery, "heavy", b"heavy", limit=10), QueueFull)
    assert await delivery.depth([HIGH]) == [15]


async def test_the_first_entries_of_a_tenant_may_be_submitted_at_once(queue: RedisQueue) -> None:
    """One is in the lane itself, for those who do not know of the share yet, and the others are in the share."""
    delivery = await ready(queue)
    await submit(delivery, "heavy", b"heavy", limit=10)
    await delivery.finish([lease.entry for lease in await fetch(delivery)])

    answers = await asyncio.gather(*(offer(delivery, "light", b"light", limit=3) for _ in range(5)))

    assert [isinstance(answer, Entry) for answer in answers] == [True] * 3 + [False] * 2
    leases = await fetch(delivery)
    assert sorted(lease.entry.lane.name for lease in leases) == ["p1", "p1~1", "p1~1"]
    assert {lease.frame for lease in leases} == {b"light"}


async def test_a_lane_of_one_tenant_has_its_whole_limit(queue: RedisQueue) -> None:
    """Another's empty share takes nothing away."""
    delivery = await ready(queue)
    await submit(delivery, "light", b"light")
    await submit(delivery, "heavy", b"heavy")
    await delivery.finish([lease.entry for lease in await fetch(delivery)])

    await submit(delivery, "heavy", *[b"heavy"] * 10, limit=10)

    assert isinstance(await offer(delivery, "heavy", b"heavy", limit=10), QueueFull)


# --- the life of a share ---


async def test_a_lane_is_plain_again_when_one_tenant_is_left(queue: RedisQueue) -> None:
    """An empty stream goes with its tenant; one that holds something stays."""
    delivery = await flooded(queue, b"light 1", b"light 2")
    leases = of_light(await fetch(delivery, count=3))
    make_old(queue, "light")
    await forget(delivery)
    assert keys_of_shares(queue) >= {"1:p1~", "1:p1~1"}

    await delivery.finish([lease.entry for lease in leases])
    await delivery.finish([lease.entry for lease in of_light(await fetch(delivery, count=3))])
    await forget(delivery)

    assert not keys_of_shares(queue)
    assert delivery.sources([HIGH, LOW])[2:] == [share_of(HIGH, 1)]
    await fetch(delivery, count=1)
    assert delivery.sources([HIGH, LOW]) == [HIGH, LOW]


async def test_who_remembers_a_stream_that_is_gone_gets_another(queue: RedisQueue) -> None:
    """A gateway's memory may be older than the stream: nothing is put where nobody reads."""
    delivery = await flooded(queue, b"light")
    gateway = await queue.connect()
    await submit(gateway, "light", b"light")
    await delivery.finish([lease.entry for lease in of_light(await fetch(delivery, count=4))])
    make_old(queue, "light")
    await forget(delivery)

    await submit(gateway, "third", b"third")
    [entry] = await submit(gateway, "light", b"light")

    assert entry.lane in (share_of(HIGH, 1), share_of(HIGH, 2))
    assert counted(await fetch(delivery, count=4))[b"light"] == 1


async def test_a_tenant_that_is_left_alone_moves_to_the_lane_itself(queue: RedisQueue) -> None:
    """What waits in its stream is fetched, too; then the lane is plain."""
    delivery = await flooded(queue, b"light 1")
    await delivery.finish([lease.entry for lease in await fetch(delivery) if lease.frame == b"heavy"])
    make_old(queue, "heavy")
    await forget(delivery)
    delivery.places.drop_place(HIGH, "light")

    [entry] = await submit(delivery, "light", b"light 2")

    assert entry.lane == HIGH
    leases = await delivery.reclaim([HIGH], "b", 0.0, 10) + await fetch(delivery)
    assert sorted(frames(leases)) == [b"light 1", b"light 2"]
    await delivery.finish([lease.entry for lease in leases])
    await forget(delivery)
    assert not keys_of_shares(queue)


async def test_nothing_is_lost_when_the_data_is(redis_queue: RedisQueue) -> None:
    """After FLUSHALL tenants get new places, and a worker that waits reads them."""
    delivery = await flooded(redis_queue, b"light")
    await fetch(delivery, count=2)
    redis_queue.on_every_node("FLUSHALL")

    await submit(delivery, "light", b"light")
    await submit(delivery, "heavy", b"heavy")

    got: list[bytes] = []
    while len(got) < 2:
        got += frames(await fetch(delivery, wait_s=1.0))
    assert sorted(got) == [b"heavy", b"light"]


async def test_a_stream_that_somebody_deleted_is_made_again(redis_queue: RedisQueue) -> None:
    """Its entries are gone, as those of a deleted lane; the next one is fetched."""
    delivery = await flooded(redis_queue, b"light")
    await fetch(delivery, count=2)
    redis_queue.on_owner("DEL", keys.lane(share_of(HIGH, 1)))

    await submit(delivery, "light", b"light")

    assert counted(await fetch(delivery, count=4))[b"light"] == 1


@pytest.mark.parametrize("limit", [0, 100], ids=["plain", "by script"])
async def test_a_tenants_name_may_be_any_text(queue: RedisQueue, limit: int) -> None:
    """Bridges take names from their files."""
    delivery = await ready(queue)
    names = ["a b", "x~1", "ü 1 2", "0", "{tag}", "\n"]
    for name in names:
        await submit(delivery, name, name.encode(), name.encode(), limit=limit)

    assert counted(await fetch(delivery)) == {name.encode(): 2 for name in names}
