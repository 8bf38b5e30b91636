"""The counts of bridges: what each counts by route, how Redis adds them up, and how they are shown as metrics.

A bridge counts in plain integers (`RouteTally`), each written by one of its threads, and read by others; counts of
several threads go through `count`. It serves them on a port of its own, and reports them: in Redis the reports of all
bridges add up to `RouteTotals` of each route, which only grow.

A report has a number and what was counted since the one before. One that was perhaps stored is sent again as it was,
and the store adds the counts of each number once: so nothing is lost while Redis is away, nor counted twice.

All keys share a hash tag, so that one script adds a report up. A bridge's number and time are in the same entry as what
it has in hand: `<until when it lives, ms> <number> <a document of uses>`.
"""

import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from qinfer.models.store import StoredRecords, translated
from qinfer.observe import catalogue
from qinfer.observe.catalogue import Info
from qinfer.observe.exposition import Family
from qinfer.queue import keys
from qinfer.queue.router import load_script
from qinfer.wire.versions import encode_document

RECEIVED, ACCEPTED, REPEATED, UNIDENTIFIED = "received", "accepted", "repeated", "unidentified"
"""Fields of a route's counts, as `RouteTally` has them."""
PAUSED_MS = "paused_ms"
"""`paused_s`, in whole milliseconds."""
REFUSED, REPLIED, UNROUTABLE = "refused:", "replied:", "unroutable:"
"""Prefixes of the fields of counts by code, state and place: `refused:<error code>`, …"""

_COUNTING = threading.Lock()


@dataclass(slots=True)
class RouteTally:
    """The counts of one route in one bridge.

    Attributes:
        route: Its name.
        received: Messages from the source.
        accepted: Messages that became requests.
        repeated: Messages that were accepted before.
        unidentified: Messages without an id.
        refused: Messages put with the dead letters, by the code of the error.
        replied: Requests whose replies were confirmed, by how they ended.
        unroutable: Messages that no queue took, by what they were: `reply`, `sink`, `dead_letter`.
        paused_s: Seconds in which nothing was accepted, because the lane was full or the queue away.
        unacknowledged: Messages that the source waits for.
        unconfirmed: Ended requests whose replies are not confirmed.
        connected: Connection → whether it stands.
    """

    route: str
    received: int = 0
    accepted: int = 0
    repeated: int = 0
    unidentified: int = 0
    refused: dict[str, int] = field(default_factory=dict)
    replied: dict[str, int] = field(default_factory=dict)
    unroutable: dict[str, int] = field(default_factory=dict)
    paused_s: float = 0.0
    unacknowledged: int = 0
    unconfirmed: int = 0
    connected: dict[str, bool] = field(default_factory=dict)

    def counts(self) -> dict[str, int]:
        """Returns all that only grows, by field."""
        counts = {
            RECEIVED: self.received,
            ACCEPTED: self.accepted,
            REPEATED: self.repeated,
            UNIDENTIFIED: self.unidentified,
            PAUSED_MS: int(self.paused_s * 1000),
        }
        for prefix, by in ((REFUSED, self.refused), (REPLIED, self.replied), (UNROUTABLE, self.unroutable)):
            counts.update((prefix + key, value) for key, value in list(by.items()))
        return counts


@dataclass(slots=True)
class RouteTotals:
    """The counts of one route in all bridges.

    Attributes:
        counts: What they counted, those too that have ended: field → sum.
        processes: Bridges that live, and of these
        unacknowledged: the messages that sources wait for,
        unconfirmed: ended requests whose replies are not confirmed,
        connected: connection → how many stand.
    """

    counts: Mapping[str, int]
    processes: int = 0
    unacknowledged: int = 0
    unconfirmed: int = 0
    connected: dict[str, int] = field(default_factory=dict)


def count(counts: dict[str, int], key: str, by: int = 1) -> None:
    """Adds to one of several counts; for any thread: a count that fell back would be taken for a restart."""
    with _COUNTING:
        counts[key] = counts.get(key, 0) + by


class BridgeCollector(Collector):
    """The metrics of one bridge, as a scrape reads them.

    Args:
        process: The bridge's name.
        tallies: Of the routes.
    """

    def __init__(self, process: str, tallies: Sequence[RouteTally]) -> None:
        self._process = process
        self._tallies = tallies

    def collect(self) -> Iterator[Metric]:
        """Yields the metrics."""
        own = _merged({tally.route: tally.counts() for tally in self._tallies}, [_uses(self._tallies)])
        own_infos = {info.name: info for info in catalogue.OF_BRIDGES}
        for family in _families(own):
            info = own_infos[family.info.name]
            kind = CounterMetricFamily if info.kind == "counter" else GaugeMetricFamily
            shown = kind(info.name, info.text, labels=info.labels)
            for _, labels, value, _ in family.samples:
                words = {**dict(labels), "process": self._process}
                shown.add_metric([words[name] for name in info.labels], value)
            yield shown


def families(routes: Mapping[str, RouteTotals]) -> Iterator[Family]:
    """Yields the metrics of all bridges together.

    Args:
        routes: Route → its totals.
    """
    yield from _families(routes)
    living = Family(catalogue.BRIDGE_PROCESSES)
    for route, totals in routes.items():
        living.add(totals.processes, route=route)
    yield living


def _families(routes: Mapping[str, RouteTotals]) -> Iterator[Family]:
    yield from _counted(routes)
    for info, gauged in _GAUGES:
        family = Family(info)
        for route, totals in routes.items():
            if totals.processes:
                family.add(gauged(totals), route=route)
        yield family
    connected = Family(catalogue.BRIDGE_CONNECTED)
    for route, totals in routes.items():
        for connection, standing in totals.connected.items():
            connected.add(standing, connection=connection, route=route)
    yield connected


def _counted(routes: Mapping[str, RouteTotals]) -> Iterator[Family]:
    for info, name, scale in _COUNTERS:
        family = Family(info)
        for route, totals in routes.items():
            family.add(totals.counts.get(name, 0) / scale, route=route)
        yield family
    for info, prefix, label in _COUNTERS_BY:
        family = Family(info)
        for route, totals in routes.items():
            for name in totals.counts:
                if name.startswith(prefix):
                    family.add(totals.counts[name], **{"route": route, label: name.removeprefix(prefix)})
        yield family


_COUNTERS: tuple[tuple[Info, str, int], ...] = (
    (catalogue.BRIDGE_RECEIVED, RECEIVED, 1),
    (catalogue.BRIDGE_ACCEPTED, ACCEPTED, 1),
    (catalogue.BRIDGE_REPEATED, REPEATED, 1),
    (catalogue.BRIDGE_UNIDENTIFIED, UNIDENTIFIED, 1),
    (catalogue.BRIDGE_PAUSED, PAUSED_MS, 1000),
)
_COUNTERS_BY: tuple[tuple[Info, str, str], ...] = (
    (catalogue.BRIDGE_REFUSED, REFUSED, "reason"),
    (catalogue.BRIDGE_REPLIED, REPLIED, "state"),
    (catalogue.BRIDGE_UNROUTABLE, UNROUTABLE, "place"),
)
_GAUGES: tuple[tuple[Info, Callable[[RouteTotals], int]], ...] = (
    (catalogue.BRIDGE_UNACKNOWLEDGED, lambda totals: totals.unacknowledged),
    (catalogue.BRIDGE_UNCONFIRMED, lambda totals: totals.unconfirmed),
)


KEPT_S = 30 * 24 * 3600.0
"""Seconds for which the totals of a route are kept that no bridge reports any more."""

REMEMBERED_S = 3600.0
"""Seconds for which the number of a bridge's last report is remembered after the bridge's own time is over."""

MOST_ROUTES = 1000
"""The most routes whose totals are returned: those reported last."""

_REPORT = load_script("report", "now_ms", package="qinfer.bridge").text
_LIVE = load_script("live", "now_ms", package="qinfer.bridge").text


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


class BridgeUses(msgspec.Struct, frozen=True):
    """The messages in hand of one bridge, by route."""

    process: str
    routes: Mapping[str, RouteUse]


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
        self._records = StoredRecords()

    async def put(self, report: BridgeReport, ttl_s: float) -> None:
        """Writes what a bridge has in hand, and adds what it counted; of reports with one number, the first's only.

        A report that comes after its successor changes nothing. What a bridge has in hand disappears `ttl_s` seconds
        after the last write; 0 removes it at once.
        """
        words: list[str | int | bytes] = [_ms(REMEMBERED_S), _ms(KEPT_S), report.process, _ms(ttl_s), report.number]
        words.append(encode_document(BridgeUses(report.process, report.uses)))
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
        counts = {name: self._records.counts(of, f"route {name}") for name, of in zip(names, found, strict=True)}
        read = [self._records.one(uses, BridgeUses, "a bridge") for uses in live]
        return _merged(counts, [of.routes for of in read if of is not None])

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
            uses=_uses(self._tallies),
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


def _uses(tallies: Iterable[RouteTally]) -> dict[str, RouteUse]:
    """Returns what a bridge has in hand now, by route."""
    return {
        tally.route: RouteUse(
            tally.unacknowledged,
            tally.unconfirmed,
            {connection: int(is_up) for connection, is_up in list(tally.connected.items())},
        )
        for tally in tallies
    }


def _ms(seconds: float) -> int:
    return int(seconds * 1000)
