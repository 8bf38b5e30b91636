"""Counts of one gateway by tenant, if enabled.

The first tenants have their own series until the gateway restarts; all others share one, which bounds their number.
"""

from bisect import bisect_left
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

from qinfer.observe import catalogue
from qinfer.observe.exposition import Family, family
from qinfer.observe.stats import QUEUE_BUCKETS_S, Durations

OTHERS = "(others)"
"""Tenants without their own series."""


class TenantTally:
    """Counts the requests of a gateway by tenant; `in_flight` returns the number of unanswered requests."""

    def __init__(self, most: int, process: str = "") -> None:
        self._most = most
        self._process = process
        self.in_flight: Callable[[], Mapping[str, int]] = dict
        self._named: dict[str, str] = {}
        self._requests: Counter[tuple[str, str]] = Counter()
        self._failures: Counter[tuple[str, str]] = Counter()
        self._durations: defaultdict[str, Durations] = defaultdict(Durations)

    def count_answered(self, tenant: str, model: str, seconds: float) -> None:
        """Counts a request with outputs."""
        name = self._tenant_label(tenant)
        self._requests[name, model] += 1
        series = self._durations[name]
        series.counts[bisect_left(QUEUE_BUCKETS_S, seconds)] += 1
        series.total_s += seconds

    def accepted(self, tenant: str, model: str) -> None:
        """Counts a request stored for later execution."""
        self._requests[self._tenant_label(tenant), model] += 1

    def failed(self, tenant: str, model: str, reason: str) -> None:
        """Counts a failed request; unknown models have no name."""
        name = self._tenant_label(tenant)
        self._requests[name, model] += 1
        self._failures[name, reason] += 1

    def families(self) -> Iterator[Family]:
        """Yields the metrics."""
        own = {"process": self._process}
        yield family(
            catalogue.TENANT_REQUESTS,
            ((count, {"tenant": name, "model": model, **own}) for (name, model), count in self._requests.items()),
        )
        yield family(
            catalogue.TENANT_FAILURES,
            ((count, {"tenant": name, "reason": reason, **own}) for (name, reason), count in self._failures.items()),
        )
        waiting = Counter(dict.fromkeys((name for name, _ in self._requests), 0))  # dashboards know tenants by it
        for tenant, count in self.in_flight().items():
            if tenant in self._named or count:
                waiting[self._tenant_label(tenant)] += count
        yield family(catalogue.TENANT_IN_FLIGHT, ((count, {"tenant": name, **own}) for name, count in waiting.items()))
        durations = Family(catalogue.TENANT_DURATION)
        for name, series in self._durations.items():
            durations.add_durations(series, tenant=name, **own)
        yield durations

    def of_shares(self, shares: Iterable[tuple[Mapping[str, str], Sequence[str], int, float]]) -> Iterator[Family]:
        """Yields the metrics of the tenants' shares of lanes.

        `shares`: labels of a lane, a share's tenants (several count for `OTHERS`), its entries, its part of the lane.
        """
        backlog: dict[tuple[tuple[str, str], ...], float] = {}
        parts: dict[tuple[tuple[str, str], ...], float] = {}
        for lane, tenants, entries, part in shares:
            key = (*lane.items(), ("tenant", self._tenant_label(tenants[0]) if len(tenants) == 1 else OTHERS))
            backlog[key] = backlog.get(key, 0) + entries
            parts[key] = parts.get(key, 0) + part
        yield family(catalogue.TENANT_BACKLOG, ((count, dict(key)) for key, count in backlog.items()))
        yield family(catalogue.TENANT_SHARE, ((part, dict(key)) for key, part in parts.items()))

    def _tenant_label(self, tenant: str) -> str:
        name = self._named.get(tenant)
        if name is None:
            if len(self._named) >= self._most:
                return OTHERS
            name = self._named[tenant] = tenant
        return name
