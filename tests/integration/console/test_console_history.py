"""The hour of counts in Redis, which gateways write and add up."""

from qinfer.observe.stats import GatewayTally
from qinfer.queue import keys
from qinfer.queue.lanes import Queue
from qinfer_api.console.history import LATE_S, MOST_SERIES, OTHERS, SLOT_S, SLOTS, TOTAL, CountHistory

NUMBER = 1_000_000


def history(delivery: Queue, tally: GatewayTally, number: int = NUMBER) -> CountHistory:
    """Returns a history whose last complete slot has a number."""
    return CountHistory(delivery.router, tally, lambda: (number + 1) * SLOT_S + LATE_S + 0.1)


async def test_the_counts_of_gateways_are_added_up(delivery: Queue) -> None:
    first, second = GatewayTally("one"), GatewayTally("two")
    gateways = [history(delivery, tally) for tally in (first, second)]
    first.count_answered("m", 1, 0.004)
    second.count_answered("m", 1, 0.2)
    second.failed("m", 1, "internal")
    for gateway in gateways:
        await gateway.write(NUMBER)

    point = (await gateways[0].points("m:1"))[-1]
    total = (await gateways[1].points(TOTAL))[-1]

    assert (point.rate, point.errors) == (3 / SLOT_S, 1 / SLOT_S)
    assert 0.1 < point.p99_s <= 0.25
    assert total.rate == point.rate
    assert point.at_s == NUMBER * SLOT_S


async def test_a_slot_has_the_counts_since_the_last_one(delivery: Queue) -> None:
    tally = GatewayTally("one")
    gateway = history(delivery, tally, NUMBER + 1)
    tally.count_answered("m", 1, 0.004)
    await gateway.write(NUMBER)
    await gateway.write(NUMBER + 1)

    points = await gateway.points("m:1", 2)

    assert [point.rate for point in points] == [1 / SLOT_S, 0.0]


async def test_the_work_is_kept_while_the_console_is_used(delivery: Queue) -> None:
    gateway = history(delivery, GatewayTally("one"))

    async def work() -> dict[str, tuple[float, float]]:
        return {"m:1": (3.0, 7.0), "n:1": (1.0, 9.0)}

    gateway.work = work
    await gateway.write(NUMBER - 1)
    gateway.is_watched = lambda: True
    await gateway.write(NUMBER)

    before, last = await gateway.points(TOTAL, 2)

    assert before.work_s != before.work_s  # unknown
    assert (last.work_s, last.oldest_s) == (4.0, 9.0)


async def test_the_history_is_bounded(delivery: Queue) -> None:
    """In series by their number, and in time by an expiry."""
    tally = GatewayTally("one")
    gateway = history(delivery, tally)
    for number in range(MOST_SERIES + 50):
        tally.count_answered(f"m{number}", 1, 0.004)
    await gateway.write(NUMBER)

    _, slot = await gateway.latest()
    key = keys.count_history(NUMBER).encode()
    left_ms = await delivery.router.call(keys.slot(key), b"PTTL", key)

    assert slot is not None
    assert len(slot.counts) == MOST_SERIES + 2  # with the others and the total
    assert sum(slot.counts[OTHERS].answered) == 50
    assert 0 < left_ms <= (SLOTS + 24) * SLOT_S * 1000
    assert len(await gateway.points(TOTAL)) == SLOTS
