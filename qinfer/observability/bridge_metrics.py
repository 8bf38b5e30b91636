"""The metrics of a bridge, which it serves on a port of its own: plain integers, counted by route.

Each number is written by one thread of the bridge and read at a scrape.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from qinfer.observability import catalogue
from qinfer.observability.catalogue import Info


@dataclass(slots=True)
class RouteTally:
    """What one route of a bridge counts.

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


def count(counts: dict[str, int], key: str, by: int = 1) -> None:
    """Adds to one of several counts."""
    counts[key] = counts.get(key, 0) + by


class BridgeCollector(Collector):
    """What a scrape of a bridge gives.

    Args:
        tallies: Of the routes.
    """

    def __init__(self, tallies: Sequence[RouteTally]) -> None:
        self._tallies = tallies

    def collect(self) -> Iterator[Metric]:
        """Yields the metrics."""
        for info, counted in _COUNTERS:
            family = CounterMetricFamily(info.name, info.text, labels=info.labels)
            for tally in self._tallies:
                family.add_metric((tally.route,), counted(tally))
            yield family
        for info, counts in _COUNTERS_BY:
            family = CounterMetricFamily(info.name, info.text, labels=info.labels)
            is_first = info.labels[0] == "route"
            for tally in self._tallies:
                for key, value in counts(tally):
                    family.add_metric((tally.route, key) if is_first else (key, tally.route), value)
            yield family
        for info, gauged in _GAUGES:
            gauge = GaugeMetricFamily(info.name, info.text, labels=info.labels)
            for tally in self._tallies:
                gauge.add_metric((tally.route,), gauged(tally))
            yield gauge
        connected = catalogue.BRIDGE_CONNECTED
        up = GaugeMetricFamily(connected.name, connected.text, labels=connected.labels)
        for tally in self._tallies:
            for key, is_up in list(tally.connected.items()):
                up.add_metric((key, tally.route), float(is_up))
        yield up


_Counted = Callable[[RouteTally], float]
_Counts = Callable[[RouteTally], Iterable[tuple[str, int]]]

_COUNTERS: tuple[tuple[Info, _Counted], ...] = (
    (catalogue.BRIDGE_RECEIVED, lambda tally: tally.received),
    (catalogue.BRIDGE_ACCEPTED, lambda tally: tally.accepted),
    (catalogue.BRIDGE_REPEATED, lambda tally: tally.repeated),
    (catalogue.BRIDGE_UNIDENTIFIED, lambda tally: tally.unidentified),
    (catalogue.BRIDGE_PAUSED, lambda tally: tally.paused_s),
)
_COUNTERS_BY: tuple[tuple[Info, _Counts], ...] = (
    (catalogue.BRIDGE_REFUSED, lambda tally: list(tally.refused.items())),
    (catalogue.BRIDGE_REPLIED, lambda tally: list(tally.replied.items())),
    (catalogue.BRIDGE_UNROUTABLE, lambda tally: list(tally.unroutable.items())),
)
_GAUGES: tuple[tuple[Info, _Counted], ...] = (
    (catalogue.BRIDGE_UNACKNOWLEDGED, lambda tally: tally.unacknowledged),
    (catalogue.BRIDGE_UNCONFIRMED, lambda tally: tally.unconfirmed),
)
