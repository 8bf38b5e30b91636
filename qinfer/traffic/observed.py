"""The counts of canaries on trial in one gateway: integer adds for each request, and one script a second.

Counts belong to a revision of the endpoint; older ones are dropped. A request is counted when it ends, for its tenant,
and only if its target was drawn, not named by its caller (`OutgoingRequest.assigned`).

- errors: only the server's failures are bad. A caller's mistake or disconnection is not counted, nor is a missed
  deadline if the caller allowed less time than 99 % of stable's answers take.
- execution: the time of a batch, compared among batches of exactly the same size: a target with more load has larger
  batches.
- latency: from the request to its answer, for the first request of a batch only. All requests of a late batch are late:
  counted one by one, they would roll back canaries as good as stable.
- disagreements: of requests that the canary executed as a shadow; each also counts under `errors`.

Answers of the response cache have no time.
"""

import math
from collections import Counter, deque
from collections.abc import Iterator, Mapping
from typing import NamedTuple

from qinfer.core.messages import Response
from qinfer.errors import ErrorCode
from qinfer.traffic.canary import DEADLINE, Trial, count_names
from qinfer.traffic.endpoints import CanaryPlan, Endpoint, Role
from qinfer.traffic.store import written_latency

MOST_LATENCIES = 200
"""The most latencies of a tenant until the next push."""

SERVER_FAILURES = frozenset(
    {
        ErrorCode.BACKEND_UNAVAILABLE,
        ErrorCode.CORRUPT_ENTRY,
        ErrorCode.DEADLINE_EXCEEDED,
        ErrorCode.DEADLINE_INFEASIBLE,
        ErrorCode.INFERENCE_FAILED,
        ErrorCode.INTERNAL,
        ErrorCode.LEASE_LOST,
        ErrorCode.MODEL_LOAD_FAILED,
        ErrorCode.MODEL_NOT_READY,
        ErrorCode.OUTPUT_MISMATCH,
        ErrorCode.QUEUE_FULL,
        ErrorCode.SEQUENCE_LOST,
        ErrorCode.STREAM_BROKEN,
    }
)
"""Failures that count against the target."""

_DEADLINES = frozenset({ErrorCode.DEADLINE_EXCEEDED, ErrorCode.DEADLINE_INFEASIBLE})

_EXECUTION, _LATENCY = "execution", "latency"
_WHOLE = 0


class _TimeCheck(NamedTuple):
    check: str
    limits: dict[int, float]


class TargetCounts:
    """The counts of a target, for one event loop."""

    def __init__(self, role: Role, plan: CanaryPlan) -> None:
        self._role = role
        self._timed: dict[str, list[_TimeCheck]] = {_EXECUTION: [], _LATENCY: []}
        for check in plan.checks:
            if check.quantile:
                self._timed[check.of].append(_TimeCheck(check.name, {}))
        self._deadline: dict[int, float] = {}
        self._requests: Counter[tuple[str, int, str]] = Counter()
        self._bad: Counter[tuple[str, int, str]] = Counter()
        self._samples: dict[str, deque[tuple[str, int, float]]] = {}
        self._last_ns = -1

    def set_limits(self, limits: Mapping[str, Mapping[str, float]]) -> None:
        """Uses the limits of a trial."""
        own = [(one.check, one.limits) for timed in self._timed.values() for one in timed]
        for name, known in (*own, (DEADLINE, self._deadline)):
            known.update({int(stratum or _WHOLE): at for stratum, at in limits.get(name, {}).items()})

    def count_answered(self, seconds: float, response: Response, tenant: str = "") -> None:
        """Counts a request with outputs."""
        if self.executed(response, tenant):
            self._time(_LATENCY, _WHOLE, tenant, seconds)

    def executed(self, response: Response, tenant: str = "") -> bool:
        """Counts a request with outputs; returns whether its latency counts."""
        self._requests["errors", _WHOLE, tenant] += 1
        if response.cache == "hit":
            return False
        timing = response.timing
        if timing is not None and timing.batch_size:
            if timing.infer_ns == self._last_ns:
                return False  # the others of its batch follow at once
            self._last_ns = timing.infer_ns
            self._time(_EXECUTION, timing.batch_size, tenant, timing.infer_ns * 1e-9)
        return True

    def failed(self, reason: str, tenant: str = "", given_s: float = math.inf) -> None:
        """Counts a request without outputs."""
        is_callers = reason in _DEADLINES and given_s < self._deadline.get(_WHOLE, math.inf)
        if reason in SERVER_FAILURES and not is_callers:
            self._requests["errors", _WHOLE, tenant] += 1
            self._bad["errors", _WHOLE, tenant] += 1

    def compared(self, tenant: str = "", *, disagrees: bool) -> None:
        """Counts a compared shadow of the canary."""
        self._requests["errors", _WHOLE, tenant] += 1
        self._requests["disagreements", _WHOLE, tenant] += 1
        self._bad["disagreements", _WHOLE, tenant] += disagrees

    def new_counts(self) -> tuple[dict[str, int], list[str]]:
        """Returns new counts, and latencies for missing limits."""
        counts: dict[str, int] = {}
        for (check, stratum, tenant), requests in self._requests.items():
            of_all, of_bad = count_names(self._role, check, _stratum_text(stratum), tenant)
            counts[of_all] = requests
            if bad := self._bad[check, stratum, tenant]:
                counts[of_bad] = bad
        self._requests.clear()
        self._bad.clear()
        latencies = [
            written_latency(of, _stratum_text(stratum), seconds, tenant)
            for tenant, sample in self._samples.items()
            for of, stratum, seconds in sample
        ]
        self._samples.clear()
        return counts, latencies

    def _time(self, of: str, stratum: int, tenant: str, seconds: float) -> None:
        lacks_limit = of == _LATENCY and not self._deadline
        for one in self._timed[of]:
            limit = one.limits.get(stratum)
            if limit is None:
                lacks_limit = True
            else:
                self._requests[one.check, stratum, tenant] += 1
                self._bad[one.check, stratum, tenant] += seconds > limit
        if lacks_limit and self._role is Role.STABLE:
            self._samples.setdefault(tenant, deque(maxlen=MOST_LATENCIES)).append((of, stratum, seconds))


def _stratum_text(stratum: int) -> str:
    return str(stratum) if stratum else ""


class TrialCounts(NamedTuple):
    """The counts of one trial at a revision of its endpoint."""

    revision: int
    stable: TargetCounts
    canary: TargetCounts


class ObservedTrials:
    """The trials that this gateway counts, by `key_of`."""

    def __init__(self) -> None:
        self.by_target: dict[tuple[str, str], TargetCounts] = {}
        self._known: dict[str, TrialCounts] = {}

    def follow(self, endpoints: Mapping[str, Endpoint], trials: Mapping[str, Trial]) -> None:
        """Counts the present trials."""
        known: dict[str, TrialCounts] = {}
        by_target: dict[tuple[str, str], TargetCounts] = {}
        for name, trial in trials.items():
            endpoint, state = endpoints.get(name), trial.state
            if endpoint is None or endpoint.canary is None or state.ended or state.revision != endpoint.revision:
                continue
            observation = self._known.get(name)
            if observation is None or observation.revision != state.revision:
                stable, tried = (TargetCounts(role, endpoint.canary) for role in (Role.STABLE, Role.CANARY))
                observation = TrialCounts(state.revision, stable, tried)
            model, (_, *both) = endpoint.stable.model, observation
            labels = f"{model}:{state.stable}", f"{trial.model or model}:{state.canary}"
            for label, counts in zip(labels, both, strict=True):
                counts.set_limits(state.limits)
                by_target[name, label] = counts
            known[name] = observation
        self._known, self.by_target = known, by_target

    def new_counts(self) -> Iterator[tuple[str, int, dict[str, int], list[str]]]:
        """Yields endpoint, revision, new counts and latencies."""
        for name, observation in self._known.items():
            counts, latencies = observation.stable.new_counts()
            counts |= observation.canary.new_counts()[0]
            if counts or latencies:
                yield name, observation.revision, counts, latencies
