"""Reports of bridges, and where they are kept: in Redis they add up to totals of each route.

A report has a number and what was counted since the one before. One that was perhaps stored is sent again as it was,
and the store adds the counts of each number once: so nothing is lost while Redis is away, nor counted twice.

All keys share a hash tag, so that one script adds a report up. A bridge's number and time are in the same entry as what
it has in hand: `<until when it lives, ms> <number> <uses as JSON>`.
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import msgspec

from qinfer.bridge.metrics import RouteTally, RouteTotals
from qinfer.models.store import translated
from qinfer.queue import keys, scripts

KEPT_S = 30 * 24 * 3600.0
"""Seconds for which the totals of a route are kept that no bridge reports any more."""

REMEMBERED_S = 3600.0
"""Seconds for which the number of a bridge's last report is remembered after the bridge's own time is over."""

MOST_ROUTES = 1000
"""The most routes whose totals are returned: those reported last."""

_REPORT = scripts.load("report", "now_ms", package="qinfer.bridge").text
_LIVE = scripts.load("live", "now_ms", package="qinfer.bridge").text


class RouteUse(msgspec.Struct, frozen=True):
    """The messages in hand of one bridge for a route.

    Attributes:
        unacknowledged: Messages that the source waits for.
        unconfirmed: Ended requests whose replies are not confirmed.
        connected: Connection → 1 while it stands, else 0.
    """

    unacknowledged: int = 0
    unconfirmed: int = 0
    connected: dict[str, int] = msgspec.field(default_factory=dict)


class BridgeReport(msgspec.Struct, frozen=True, kw_only=True):
    """A report of one bridge: its counts since the last one, and its messages in hand.

    Attributes:
        process: Unique for each start of a bridge.
        number: 1 for its first report; the same for one that is sent again.
        counts: Route → field → what was counted since the report before.
        uses: Route → what it has in hand now, of all its routes.
    """

    process: str
    number: int
    counts: Mapping[str, Mapping[str, int]]
    uses: Mapping[str, RouteUse]


class BridgeReports:
    """The reports of all bridges, in Redis; coroutines raise `BrokerUnavailable` when it can't be reached.

    Args:
        client: A `redis.asyncio.Redis` or `RedisCluster`, such as `ControlStore.client`.
    """

    def __init__(self, client: Any) -> None:  # Any: the two clients share no typed interface
        self._client = client

    async def put(self, report: BridgeReport, ttl_s: float) -> None:
        """Writes what a bridge has in hand, and adds what it counted; of reports with one number, the first's only.

        A report that comes after its successor changes nothing. What a bridge has in hand disappears `ttl_s` seconds
        after the last write; 0 removes it at once.
        """
        words: list[str | int | bytes] = [_ms(REMEMBERED_S), _ms(KEPT_S), report.process, _ms(ttl_s), report.number]
        words.append(msgspec.json.encode(report.uses))
        for route, counts in report.counts.items():
            words += [route, len(counts), *(word for pair in counts.items() for word in pair)]
        names = [keys.bridges(), keys.routes(), *map(keys.route_counts, report.counts)]
        with translated():
            await self._client.eval(_REPORT, len(names), *names, *words)

    async def routes(self) -> dict[str, RouteTotals]:
        """Returns the totals of each route, by its name; the counts only grow."""
        with translated():
            live, routes = await self._client.eval(_LIVE, 2, keys.bridges(), keys.routes(), _ms(KEPT_S), MOST_ROUTES)
            names = [name.decode() for name in routes]
            async with self._client.pipeline(transaction=False) as pipe:
                for name in names:
                    pipe.hgetall(keys.route_counts(name))
                found = await pipe.execute() if names else []
        counts = {
            name: {field.decode(): int(value) for field, value in of.items()}
            for name, of in zip(names, found, strict=True)
        }
        return _merged(counts, [msgspec.json.decode(uses, type=dict[str, RouteUse]) for uses in live])

    async def close(self) -> None:
        """Closes the client."""
        await self._client.aclose()


class ReportSequence:
    """Makes the reports of one bridge; for one thread.

    Args:
        process: Its name.
        tallies: What its routes count.
    """

    def __init__(self, process: str, tallies: Sequence[RouteTally]) -> None:
        self._process = process
        self._tallies = tallies
        self._number = 0
        self._stored: dict[str, dict[str, int]] = {}
        self._totals: dict[str, dict[str, int]] | None = None  # of a report that is not known to be stored

    def next(self) -> BridgeReport:
        """Returns the next report, or the last one again, unless it was stored; what is in hand is as of now."""
        if self._totals is None:
            self._number += 1
            self._totals = {tally.route: tally.counts() for tally in self._tallies}
        return BridgeReport(
            process=self._process,
            number=self._number,
            counts={route: _since(self._stored.get(route, {}), of) for route, of in self._totals.items()},
            uses={tally.route: _use(tally) for tally in self._tallies},
        )

    def stored(self) -> None:
        """Notes that the last report was stored."""
        if self._totals is not None:
            self._stored, self._totals = self._totals, None

    @property
    def is_complete(self) -> bool:
        """Whether all that was counted is stored."""
        return self._totals is None and self._stored == {tally.route: tally.counts() for tally in self._tallies}


def _merged(counts: Mapping[str, Mapping[str, int]], live: Iterable[Mapping[str, RouteUse]]) -> dict[str, RouteTotals]:
    """Returns the totals of each route.

    Args:
        counts: Route → what all bridges counted.
        live: What each bridge that lives has in hand, by route.
    """
    totals = {route: RouteTotals(counts=of) for route, of in sorted(counts.items())}
    for uses in live:
        for route, use in uses.items():
            of = totals.get(route)
            if of is None:
                continue
            of.processes += 1
            of.unacknowledged += use.unacknowledged
            of.unconfirmed += use.unconfirmed
            for connection, standing in use.connected.items():
                of.connected[connection] = of.connected.get(connection, 0) + standing
    return totals


def _since(before: Mapping[str, int], now: Mapping[str, int]) -> dict[str, int]:
    grown = {name: value - before.get(name, 0) for name, value in now.items()}
    return {name: delta for name, delta in grown.items() if delta}


def _use(tally: RouteTally) -> RouteUse:
    connected = {key: int(is_up) for key, is_up in list(tally.connected.items())}
    return RouteUse(tally.unacknowledged, tally.unconfirmed, connected)


def _ms(seconds: float) -> int:
    return int(seconds * 1000)
