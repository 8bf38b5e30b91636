"""Reports of bridges, as two processes see them."""

import asyncio
from typing import Any, NamedTuple

import pytest

from qinfer.bridge.reports import BridgeReport, BridgeReports, RouteUse
from qinfer.queue import keys
from qinfer.queue.clients import admin_client
from tests.contract.conftest import ControlPair, RedisQueue

LONG_S, SHORT_S = 30.0, 0.05


class ReportsPair(NamedTuple):
    """The reports, as two processes have them."""

    one: BridgeReports
    other: BridgeReports


@pytest.fixture
def reports(stores: ControlPair) -> ReportsPair:
    return ReportsPair(BridgeReports(stores.one.client), BridgeReports(stores.other.client))


def report(
    process: str = "b1", number: int = 1, *, unacknowledged: int = 0, route: str = "r", **counts: int
) -> BridgeReport:
    use = RouteUse(unacknowledged, 1, {"source": 1, "sink": 0})
    return BridgeReport(process=process, number=number, counts={route: counts}, uses={route: use})


async def test_counts_of_all_bridges_add_up(reports: ReportsPair) -> None:
    """By route; a route that counted nothing yet is there."""
    await reports.one.put(report(accepted=3, received=4), LONG_S)
    await reports.other.put(report("b2", accepted=5), LONG_S)
    await reports.one.put(report("b1", 2, accepted=1), LONG_S)
    await reports.one.put(report("b3", route="{é}:r"), LONG_S)

    found = await reports.other.routes()

    assert set(found) == {"r", "{é}:r"}
    assert found["r"].counts == {"accepted": 9, "received": 4}
    assert found["{é}:r"].counts == {}


async def test_what_a_newer_bridge_has_in_hand_is_refused_and_hides_no_other(
    queue: RedisQueue, reports: ReportsPair, caplog: pytest.LogCaptureFixture
) -> None:
    client = admin_client(queue.settings)
    await reports.one.put(report(accepted=3), LONG_S)
    value: Any = await client.hget(keys.bridges(), "b1")
    await client.hset(keys.bridges(), "b2", value.replace(b'"wire":1', b'"wire":2'))
    await client.aclose()

    found = (await reports.other.routes())["r"]

    assert (found.counts, found.processes) == ({"accepted": 3}, 1)
    refused = "wire version 2 was written by a newer qinfer; this program reads version 1"
    assert any(refused in record.__dict__.get("error", "") for record in caplog.records)


async def test_a_report_that_comes_again_adds_nothing(reports: ReportsPair) -> None:
    """Not even once the bridge's time is over; what it has in hand is the latest."""
    await reports.one.put(report(accepted=3), SHORT_S)
    await reports.one.put(report(accepted=3), SHORT_S)
    await asyncio.sleep(2 * SHORT_S)
    await reports.other.put(report("b2", accepted=10), LONG_S)

    await reports.one.put(report(accepted=3, unacknowledged=8), LONG_S)
    await reports.one.put(report("b1", 2, accepted=4, unacknowledged=9), LONG_S)

    found = (await reports.other.routes())["r"]
    assert (found.counts, found.processes, found.unacknowledged) == ({"accepted": 17}, 2, 9)


async def test_a_report_that_comes_after_its_successor_changes_nothing(reports: ReportsPair) -> None:
    """Nor may the successor add anything once more."""
    second = report("b1", 2, accepted=4, unacknowledged=9)
    await reports.one.put(report(accepted=3), LONG_S)
    await reports.one.put(second, LONG_S)

    await reports.one.put(report(accepted=3, unacknowledged=1), SHORT_S)
    late = (await reports.other.routes())["r"]
    await reports.one.put(second, LONG_S)

    again = (await reports.other.routes())["r"]
    assert (late.counts, late.processes, late.unacknowledged) == ({"accepted": 7}, 1, 9)
    assert again.counts == {"accepted": 7}


async def test_what_is_in_hand_is_of_live_bridges(reports: ReportsPair) -> None:
    """The sum over those whose time is not over; counts stay."""
    await reports.one.put(report("b1", accepted=1, unacknowledged=5), LONG_S)
    await reports.one.put(report("b2", accepted=1, unacknowledged=7), LONG_S)
    await reports.one.put(report("dead", accepted=1, unacknowledged=100), SHORT_S)
    await asyncio.sleep(2 * SHORT_S)

    found = (await reports.other.routes())["r"]
    await reports.one.put(report("b1", 2, accepted=1), 0.0)
    await reports.one.put(report("b2", 2), 0.0)
    ended = (await reports.other.routes())["r"]

    assert (found.processes, found.unacknowledged, found.unconfirmed) == (2, 12, 2)
    assert found.connected == {"source": 2, "sink": 0}
    assert (ended.processes, ended.unacknowledged, ended.connected) == (0, 0, {})
    assert (found.counts, ended.counts) == ({"accepted": 3}, {"accepted": 4})


async def test_nothing_is_kept_for_ever(queue: RedisQueue, reports: ReportsPair) -> None:
    """A dead bridge goes after an hour, a route that nobody reports after a month."""
    client = admin_client(queue.settings)
    await reports.one.put(report("dead", route="old", accepted=1), LONG_S)
    long_ago_ms = 1000
    await client.hset(keys.bridges(), "dead", f"{long_ago_ms} 1 {{}}")
    await client.zadd(keys.routes(), {"old": long_ago_ms})

    await reports.one.put(report(accepted=1), LONG_S)

    assert set(await reports.other.routes()) == {"r"}
    assert await client.hkeys(keys.bridges()) == [b"b1"]
    assert await client.zrange(keys.routes(), 0, -1) == [b"r"]
    for name in (keys.bridges(), keys.routes(), keys.route_counts("r"), keys.route_counts("old")):
        assert await client.pttl(name) > 0
    await client.aclose()
