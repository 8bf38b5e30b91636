"""What bridges say of themselves: reports that add up to totals of each route (`observability.bridge_metrics`).

A report has a number and what was counted since the one before. One that was perhaps stored is sent again as it was,
and the store adds the counts of each number once: so nothing is lost while the store is away, nor counted twice.
"""

from collections.abc import Iterable, Mapping, Sequence

import msgspec

from qinfer.bridge.metrics import RouteTally, RouteTotals

KEPT_S = 30 * 24 * 3600.0
"""For so long the totals of a route are kept that no bridge reports any more."""

REMEMBERED_S = 3600.0
"""For so long after its time the number of a bridge's last report is remembered."""

MOST_ROUTES = 1000
"""Of so many routes totals are told, those reported last."""


class RouteUse(msgspec.Struct, frozen=True):
    """What one bridge has in hand for a route.

    Attributes:
        unacknowledged: Messages that the source waits for.
        unconfirmed: Ended requests whose replies are not confirmed.
        connected: Connection → 1 while it stands, else 0.
    """

    unacknowledged: int = 0
    unconfirmed: int = 0
    connected: dict[str, int] = msgspec.field(default_factory=dict)


class BridgeReport(msgspec.Struct, frozen=True, kw_only=True):
    """What one bridge did and does.

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


class Reports:
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
        """The last report was stored."""
        if self._totals is not None:
            self._stored, self._totals = self._totals, None

    @property
    def is_complete(self) -> bool:
        """Whether all that was counted is stored."""
        return self._totals is None and self._stored == {tally.route: tally.counts() for tally in self._tallies}


def merged(counts: Mapping[str, Mapping[str, int]], live: Iterable[Mapping[str, RouteUse]]) -> dict[str, RouteTotals]:
    """Returns what is said of each route.

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
