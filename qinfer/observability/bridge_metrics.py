"""The metrics of a bridge, which it serves on a port of its own: plain integers, counted by route.

Each number is written by one thread of the bridge and read at a scrape.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

RECEIVED = "qinfer_bridge_received_messages_total"
ACCEPTED = "qinfer_bridge_accepted_messages_total"
REPEATED = "qinfer_bridge_repeated_messages_total"
UNIDENTIFIED = "qinfer_bridge_unidentified_messages_total"
REFUSED = "qinfer_bridge_refused_messages_total"
REPLIED = "qinfer_bridge_replies_total"
UNROUTABLE = "qinfer_bridge_unroutable_messages_total"
PAUSED = "qinfer_bridge_paused_seconds_total"
UNACKNOWLEDGED = "qinfer_bridge_unacknowledged_messages"
UNCONFIRMED = "qinfer_bridge_unconfirmed_replies"
CONNECTED = "qinfer_bridge_connected"

_ROUTE = ("route",)


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
        for name, text, counted in _COUNTERS:
            family = CounterMetricFamily(name, text, labels=_ROUTE)
            for tally in self._tallies:
                family.add_metric((tally.route,), counted(tally))
            yield family
        for name, text, label, counts in _COUNTERS_BY:
            family = CounterMetricFamily(name, text, labels=(*_ROUTE, label))
            for tally in self._tallies:
                for key, value in counts(tally):
                    family.add_metric((tally.route, key), value)
            yield family
        for name, text, gauged in _GAUGES:
            gauge = GaugeMetricFamily(name, text, labels=_ROUTE)
            for tally in self._tallies:
                gauge.add_metric((tally.route,), gauged(tally))
            yield gauge
        up = GaugeMetricFamily(CONNECTED, "1 while a connection to a queue stands.", labels=(*_ROUTE, "connection"))
        for tally in self._tallies:
            for key, is_up in list(tally.connected.items()):
                up.add_metric((tally.route, key), float(is_up))
        yield up


_Counted = Callable[[RouteTally], float]
_Counts = Callable[[RouteTally], Iterable[tuple[str, int]]]

_COUNTERS: tuple[tuple[str, str, _Counted], ...] = (
    (RECEIVED, "Messages that came from the source, each delivery.", lambda tally: tally.received),
    (ACCEPTED, "Messages that became requests.", lambda tally: tally.accepted),
    (REPEATED, "Messages that had been accepted before, recognised by their id.", lambda tally: tally.repeated),
    (
        UNIDENTIFIED,
        "Messages without an id, which can't be recognised when they come again.",
        lambda tally: tally.unidentified,
    ),
    (
        PAUSED,
        "Seconds without accepting messages, because the model's lane was full or the queue away.",
        lambda tally: tally.paused_s,
    ),
)
_COUNTERS_BY: tuple[tuple[str, str, str, _Counts], ...] = (
    (
        REFUSED,
        "Messages put with the dead letters because they could not become requests.",
        "reason",
        lambda tally: list(tally.refused.items()),
    ),
    (
        REPLIED,
        "Requests whose reply or dead letter the other broker has confirmed, by their state.",
        "state",
        lambda tally: list(tally.replied.items()),
    ),
    (
        UNROUTABLE,
        "Published messages that no queue took: reply (its caller is gone), sink or dead_letter (tried again).",
        "place",
        lambda tally: list(tally.unroutable.items()),
    ),
)
_GAUGES: tuple[tuple[str, str, _Counted], ...] = (
    (UNACKNOWLEDGED, "Messages in hand that the source still holds.", lambda tally: tally.unacknowledged),
    (UNCONFIRMED, "Ended requests in hand whose reply is not confirmed.", lambda tally: tally.unconfirmed),
)
