"""The counts of bridges by route: in one bridge, summed in Redis, and as metrics.

A bridge counts in plain integers (`RouteTally`), each written by one thread, serves them on its own port and reports
them. In Redis, all reports sum up to `RouteTotals`.

A report has a number and the counts since the previous one. A report that may not be stored is sent again unchanged,
and the store adds each number once: an outage of Redis neither loses counts nor doubles them.

All keys share a hash tag for the script. A bridge's entry is `<expiry in ms> <number> <a document of its messages in
hand>`.
"""

import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from qinfer.observe import catalogue
from qinfer.observe.catalogue import Info
from qinfer.observe.exposition import Family
from qinfer.queue import keys
from qinfer.queue.router import load_script
from qinfer.queue.stored_records import StoredRecords, translated
from qinfer.wire.versions import encode_document

RECEIVED, ACCEPTED, REPEATED, UNIDENTIFIED = "received", "accepted", "repeated", "unidentified"
PAUSED_MS = "paused_ms"
"""`paused_s` in milliseconds."""
REFUSED, REPLIED, UNROUTABLE = "refused:", "replied:", "unroutable:"
"""Prefixes of counts by code, state and place: `refused:<error code>`, …"""

_COUNTING = threading.Lock()


@dataclass(slots=True)
class RouteTally:
    """The counts of one route in one bridge.

    Attributes:
        unroutable: Messages that no queue took: `reply`, `sink`, `dead_letter`.
        paused_s: The lane was full or the queue unavailable.
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
        """Returns the counts that only grow."""
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
    """The counts of one route in all bridges, including ended bridges; gauges cover the live `processes`."""

    counts: Mapping[str, int]
    processes: int = 0
    unacknowledged: int = 0
    unconfirmed: int = 0
    connected: dict[str, int] = field(default_factory=dict)


def count(counts: dict[str, int], key: str, by: int = 1) -> None:
    """Adds to a count, thread-safe: a decrease would look like a restart."""
    with _COUNTING:
        counts[key] = counts.get(key, 0) + by


class BridgeCollector(Collector):
    """The metrics of one bridge, for scrapes."""

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
    """Yields the metrics of all bridges."""
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
"""How long the totals of an unused route are kept."""

REMEMBERED_S = 3600.0
"""How long a bridge's last number is kept after its expiry."""

MOST_ROUTES = 1000

_REPORT = load_script("report", "now_ms", package="qinfer.bridge").text
_LIVE = load_script("live", "now_ms", package="qinfer.bridge").text


class RouteUse(msgspec.Struct, frozen=True):
    """One bridge's messages in hand for a route."""

    unacknowledged: int = 0
    unconfirmed: int = 0
    connected: dict[str, int] = msgspec.field(default_factory=dict)


class BridgeUses(msgspec.Struct, frozen=True):
    """The messages that one bridge holds, by route."""

    process: str
    routes: Mapping[str, RouteUse]


class BridgeReport(msgspec.Struct, frozen=True, kw_only=True):
    """A report of one bridge: its counts since the last report, and its messages in hand.

    `process` is unique for each start of a bridge; a repeated report has the same number.
    """

    process: str
    number: int
    counts: Mapping[str, Mapping[str, int]]
    uses: Mapping[str, RouteUse]


class BridgeReports:
    """The reports of all bridges, in Redis; coroutines raise `BrokerUnavailable` if it can't be reached."""

    def __init__(self, client: Any) -> None:  # the two clients share no typed interface
        self._client = client
        self._records = StoredRecords()

    async def put(self, report: BridgeReport, ttl_s: float) -> None:
        """Stores for `ttl_s` how many messages a bridge holds, and adds its counts once for each report number.

        A report that arrives after its successor has no effect.
        """
        words: list[str | int | bytes] = [_ms(REMEMBERED_S), _ms(KEPT_S), report.process, _ms(ttl_s), report.number]
        words.append(encode_document(BridgeUses(report.process, report.uses)))
        for route, counts in report.counts.items():
            words += [route, len(counts), *(word for pair in counts.items() for word in pair)]
        names = [keys.bridges(), keys.routes(), *map(keys.route_counts, report.counts)]
        with translated():
            await self._client.eval(_REPORT, len(names), *names, *words)

    async def routes(self) -> dict[str, RouteTotals]:
        """Returns the totals of each route."""
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


class ReportSequence:
    """Makes the reports of one bridge; for one thread."""

    def __init__(self, process: str, tallies: Sequence[RouteTally]) -> None:
        self._process = process
        self._tallies = tallies
        self._number = 0
        self._stored: dict[str, dict[str, int]] = {}
        self._totals: dict[str, dict[str, int]] | None = None  # of a report that may not be stored yet

    def next(self) -> BridgeReport:
        """Returns the next report, or repeats one that was not stored, with current messages in hand."""
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
        """Marks the last report as stored."""
        if self._totals is not None:
            self._stored, self._totals = self._totals, None

    @property
    def is_complete(self) -> bool:
        """Whether all counts are stored."""
        return self._totals is None and self._stored == {tally.route: tally.counts() for tally in self._tallies}


def _merged(counts: Mapping[str, Mapping[str, int]], live: Iterable[Mapping[str, RouteUse]]) -> dict[str, RouteTotals]:
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
