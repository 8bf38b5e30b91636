"""What a bridge adds to the installation's metrics: nothing is lost while the store is away, nothing counted twice."""

import asyncio
import threading
from collections.abc import Awaitable, Callable

from qinfer.bridge.reports import BridgeReport, BridgeReports, ReportSequence, RouteTally, RouteTotals, count
from qinfer.errors import BrokerUnavailable
from qinfer_workers.bridge.__main__ import Reporter
from tests.support.servers.servers import Database

WAIT_S = 20.0


class WeakReports(BridgeReports):
    """Fails where it is told to, before it writes or after.

    Attributes:
        fails: How often it is away; a report is lost.
        forgets: How often it stores a report and does not say so.
        asked: Set at each report that has come.
    """

    def __init__(self, database: Database, fails: int = 0, forgets: int = 0) -> None:
        super().__init__(database.store().client)
        self.fails, self.forgets = fails, forgets
        self.asked = asyncio.Semaphore(0)

    async def put(self, report: BridgeReport, ttl_s: float) -> None:
        try:
            if self.fails:
                self.fails -= 1
                raise BrokerUnavailable("Redis can't be reached")
            await super().put(report, ttl_s)
            if self.forgets:
                self.forgets -= 1
                raise BrokerUnavailable("no reply within 5 s")
        finally:
            self.asked.release()


async def totals(database: Database) -> RouteTotals:
    return (await BridgeReports(database.store().client).routes())["r"]


async def counted(database: Database) -> int:
    return (await totals(database)).counts["accepted"]


async def reported(reports: WeakReports, work: Callable[[RouteTally], Awaitable[None]]) -> RouteTally:
    """Runs a reporter while a route counts: 2 accepted, then what `work` counts after the first report has come."""
    tally, stop = RouteTally("r", accepted=2), asyncio.Event()
    running = asyncio.create_task(Reporter("b1", [tally], reports, every_s=0.001).run(stop))
    async with asyncio.timeout(WAIT_S):
        for _ in range(3):
            await reports.asked.acquire()
        await work(tally)
        stop.set()
        await running
    return tally


async def add(tally: RouteTally) -> None:
    tally.accepted += 5
    count(tally.refused, "conflict")


async def test_all_is_stored_at_the_end(database: Database) -> None:
    """What was counted since the last report too; the bridge does not live then."""
    await reported(WeakReports(database), add)

    route = await totals(database)
    assert (route.counts["accepted"], route.counts["refused:conflict"], route.processes) == (7, 1, 0)


async def test_a_store_that_is_away_loses_nothing(database: Database) -> None:
    """The counts are stored when it is back."""
    tally = await reported(WeakReports(database, fails=3), add)

    assert await counted(database) == tally.accepted == 7


async def test_a_report_that_was_stored_unsaid_counts_once(database: Database) -> None:
    """It is sent again as it was, and what came meanwhile afterwards."""
    tally = await reported(WeakReports(database, forgets=2), add)

    assert await counted(database) == tally.accepted == 7


async def test_the_last_report_comes_after_one_that_failed(database: Database) -> None:
    """That one is sent once more, and then the rest."""
    reports = WeakReports(database)

    async def break_store(tally: RouteTally) -> None:
        reports.forgets = 1
        while reports.forgets:
            await reports.asked.acquire()
        await add(tally)

    await reported(reports, break_store)

    assert await counted(database) == 7


def test_threads_that_count_the_same_lose_nothing() -> None:
    """A route refuses messages in the thread of its source and on its loop."""
    reading, counted = threading.Event(), threading.Event()

    class Slow(dict[str, int]):
        """Reads a count, and returns it only when the other thread has counted, or can't."""

        def get(self, key: str, default: int = 0) -> int:  # type: ignore[override]  # of one kind of default
            value = super().get(key, default)
            if not reading.is_set():
                reading.set()
                counted.wait(0.1)
            return value

    counts = Slow()
    first = threading.Thread(target=count, args=(counts, "conflict"))
    first.start()
    assert reading.wait(WAIT_S)
    count(counts, "conflict")
    counted.set()
    first.join(WAIT_S)

    assert counts == {"conflict": 2}


def test_a_report_is_the_same_until_it_is_stored() -> None:
    """Its counts; what is in hand is as of now."""
    tally = RouteTally("r", received=4, paused_s=1.2345, connected={"source": False})
    reports = ReportSequence("b1", [tally])
    first = reports.next()
    tally.received, tally.unacknowledged = 9, 3
    tally.connected["source"] = True
    again = reports.next()
    reports.stored()
    second = reports.next()
    reports.stored()

    assert first.counts == again.counts == {"r": {"received": 4, "paused_ms": 1234}}
    assert (first.number, again.number, second.number) == (1, 1, 2)
    assert (first.uses["r"].unacknowledged, again.uses["r"].unacknowledged) == (0, 3)
    assert again.uses["r"].connected == {"source": 1}
    assert second.counts == {"r": {"received": 5}}
    assert reports.is_complete
