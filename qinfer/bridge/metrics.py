"""The metrics of bridges: what one counts by route, and how all of them together are shown.

A bridge counts in plain integers (`RouteTally`), each written by one of its threads, and read by others; counts of
several threads go through `count`. It serves them on a port of its own, and adds them up in the control store, where
all bridges' make `RouteTotals` that only grow.
"""

import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from qinfer.observe import catalogue
from qinfer.observe.catalogue import Info
from qinfer.observe.exposition import Family

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
        own = {
            tally.route: RouteTotals(
                counts=tally.counts(),
                processes=1,
                unacknowledged=tally.unacknowledged,
                unconfirmed=tally.unconfirmed,
                connected={key: int(is_up) for key, is_up in list(tally.connected.items())},
            )
            for tally in self._tallies
        }
        own_infos = {info.name: info for info in catalogue.OF_BRIDGES}
        for family in _families(own):
            info = own_infos[family.info.name]
            kind = CounterMetricFamily if info.kind == "counter" else GaugeMetricFamily
            shown = kind(info.name, info.text, labels=info.labels)
            for _, labels, value in family.samples:
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
