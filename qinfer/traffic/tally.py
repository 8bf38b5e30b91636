"""The counts of one gateway: of endpoints by target, for metrics, and of canaries on trial, as evidence.

The evidence costs integer adds for each request, and one script a second. Its counts belong to a revision of the
endpoint; older ones are dropped. A request is counted when it ends, for its tenant, and only if its target was drawn,
not named by its caller (`OutgoingRequest.assigned`).

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
from collections import Counter, defaultdict, deque
from collections.abc import Iterator, Mapping
from enum import StrEnum
from typing import NamedTuple

import msgspec

from qinfer.core.messages import OutgoingRequest, Response
from qinfer.errors import ErrorCode
from qinfer.observe import catalogue
from qinfer.observe.exposition import Family, family
from qinfer.observe.stats import Durations
from qinfer.traffic.canary import BY_HAND, DEADLINE, NO_DATA, Trial, count_names
from qinfer.traffic.endpoints import CanaryPlan, Endpoint, Role
from qinfer.traffic.routing import Endpoints
from qinfer.traffic.store import written_latency

Key = tuple[str, str]

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


class TargetCounts:
    """The counts of a target, for one event loop."""

    def __init__(self, role: Role, plan: CanaryPlan) -> None:
        self._role = role
        self._timed: dict[str, dict[str, dict[int, float]]] = {_EXECUTION: {}, _LATENCY: {}}  # check → stratum → limit
        for check in plan.checks:
            if check.quantile:
                self._timed[check.of][check.name] = {}
        self._deadline: dict[int, float] = {}
        self._requests: Counter[tuple[str, int, str]] = Counter()
        self._bad: Counter[tuple[str, int, str]] = Counter()
        self._samples: dict[str, deque[tuple[str, int, float]]] = {}
        self._last_ns = -1

    def set_limits(self, limits: Mapping[str, Mapping[str, float]]) -> None:
        """Uses the limits of a trial."""
        own = {**self._timed[_EXECUTION], **self._timed[_LATENCY], DEADLINE: self._deadline}
        for name, known in own.items():
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
        for kind, found in enumerate((self._requests, self._bad)):
            for (check, stratum, tenant), count in found.items():
                if count:
                    counts[count_names(self._role, check, _stratum_text(stratum), tenant)[kind]] = count
            found.clear()
        latencies = [
            written_latency(of, _stratum_text(stratum), seconds, tenant)
            for tenant, sample in self._samples.items()
            for of, stratum, seconds in sample
        ]
        self._samples.clear()
        return counts, latencies

    def _time(self, of: str, stratum: int, tenant: str, seconds: float) -> None:
        lacks_limit = of == _LATENCY and not self._deadline
        for check, limits in self._timed[of].items():
            limit = limits.get(stratum)
            if limit is None:
                lacks_limit = True
            else:
                self._requests[check, stratum, tenant] += 1
                self._bad[check, stratum, tenant] += seconds > limit
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
            if endpoint is None or endpoint.canary is None or not trial.is_at(endpoint):
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


class ShadowOutcome(StrEnum):
    """The end of a shadow; see `ShadowCounts`."""

    AGREED = "agreed"
    DISAGREED = "disagreed"
    FAILED = "failed"
    DROPPED = "dropped"


class ShadowCounts(msgspec.Struct, frozen=True, kw_only=True):
    """Shadows of a target, in one gateway.

    Attributes:
        compared: Shadows whose answer was compared with that of the stable target.
        disagreed: Compared shadows of which an output has a row that disagrees.
        failed: The shadow target answered with an error, or with outputs that can't be compared.
        dropped: Not compared: too many shadows are in flight, the stable target has not answered, or the shadow was not
            executed in time.
    """

    compared: int = 0
    disagreed: int = 0
    failed: int = 0
    dropped: int = 0


class TargetTally:
    """Counts the requests of targets, for one event loop."""

    def __init__(self, endpoints: Endpoints, process: str = "") -> None:
        self._endpoints = endpoints
        self.process = process
        self._requests: Counter[Key] = Counter()
        self._failures: Counter[tuple[Key, str]] = Counter()
        self._durations: defaultdict[Key, Durations] = defaultdict(Durations)
        self.observed = ObservedTrials()
        self._shadows: Counter[tuple[Key, ShadowOutcome]] = Counter()

    def accepted(self, request: OutgoingRequest) -> None:
        """Counts a request stored for later."""
        self._requests[key_of(request)] += 1

    def count_answered(self, key: Key, seconds: float, response: Response, tenant: str | None = "") -> None:
        """Counts a request with outputs; without a tenant, it is no evidence."""
        self._requests[key] += 1
        if tenant is not None and (on_trial := self.observed.by_target.get(key)) is not None:
            on_trial.count_answered(seconds, response, tenant)
        self._durations[key].add(seconds)

    def failed(self, key: Key, reason: str, tenant: str | None = "", given_s: float = math.inf) -> None:
        """Counts a request without outputs; without a tenant, it is no evidence.

        `given_s` is its caller's time limit; infinite = the model's default.
        """
        self._requests[key] += 1
        self._failures[key, reason] += 1
        if tenant is not None and (on_trial := self.observed.by_target.get(key)) is not None:
            on_trial.failed(reason, tenant, given_s)

    def moved(self, key: Key, seconds: float, response: Response) -> None:
        """Counts a request that had waited for another target: no evidence."""
        self._requests[key] += 1
        if response.failure is None:
            self._durations[key].add(seconds)
        else:
            self._failures[key, response.failure.code] += 1

    def requests(self, endpoint: str, model: str, version: int) -> int:
        """Returns a version's requests from an endpoint."""
        return self._requests[endpoint, f"{model}:{version}"]

    def shadow(self, key: Key, outcome: ShadowOutcome, tenant: str | None = "") -> None:
        """Counts an ended shadow; without a tenant, it is no evidence."""
        self._shadows[key, outcome] += 1
        if tenant is None or (on_trial := self.observed.by_target.get(key)) is None:
            return
        if outcome is ShadowOutcome.FAILED:
            on_trial.failed(ErrorCode.INFERENCE_FAILED, tenant)
        elif outcome is not ShadowOutcome.DROPPED:
            on_trial.compared(tenant, disagrees=outcome is ShadowOutcome.DISAGREED)

    def shadows(self, endpoint: str, target: str) -> ShadowCounts:
        """Returns an endpoint's shadows on a target."""
        agreed, disagreed, failed, dropped = (self._shadows[(endpoint, target), outcome] for outcome in ShadowOutcome)
        return ShadowCounts(compared=agreed + disagreed, disagreed=disagreed, failed=failed, dropped=dropped)

    def families(self) -> Iterator[Family]:
        """Yields the metrics."""
        own = {"process": self.process}
        shown = {name: routed.endpoint for name, routed in self._endpoints.by_name.items()}
        yield family(catalogue.ENDPOINT_REQUESTS, ((n, _labels(key, **own)) for key, n in self._requests.items()))
        yield family(
            catalogue.ENDPOINT_FAILURES,
            ((n, _labels(key, reason=reason, **own)) for (key, reason), n in self._failures.items()),
        )
        yield family(
            catalogue.ENDPOINT_SHADOWS,
            ((n, _labels(key, outcome=outcome.value, **own)) for (key, outcome), n in self._shadows.items()),
        )
        durations = Family(catalogue.ENDPOINT_DURATION)
        for key, series in self._durations.items():
            durations.add_durations(series, **_labels(key, **own))
        yield durations
        yield family(
            catalogue.ENDPOINT_WEIGHT,
            (
                (one.weight_of(target), _labels((name, target.label), role=target.role.value, **own))
                for name, one in shown.items()
                for target in one.targets
            ),
        )
        yield from self._trials(own)
        yield family(catalogue.ENDPOINT_REVISION, [(max(self._endpoints.revision, 0), own)])
        yield family(catalogue.ENDPOINTS_UNHEARD, [(self._endpoints.unheard, own)])

    def _trials(self, own: dict[str, str]) -> Iterator[Family]:
        steps, paused = Family(catalogue.CANARY_STEP), Family(catalogue.CANARY_PAUSED)
        rolled_back = Family(catalogue.CANARY_ROLLED_BACK)
        for name, trial in self._endpoints.trials.items():
            routed, labels = self._endpoints.by_name.get(name), {"endpoint": name, **own}
            if routed is None or routed.endpoint.canary is None:
                continue
            is_on = trial.is_at(routed.endpoint)
            steps.add(trial.state.step + 1 if is_on else 0, **labels)
            for why in (BY_HAND, NO_DATA):
                paused.add(int(is_on and trial.state.paused == why), reason=why.replace(" ", "_"), **labels)
            rolled_back.add(int(trial.is_rolled_back), **labels)
        yield from (steps, paused, rolled_back)


def key_of(request: OutgoingRequest) -> Key:
    """Returns the endpoint and target of a request."""
    return request.endpoint, f"{request.model}:{request.version}"


def witness_of(request: OutgoingRequest) -> str | None:
    """Returns the tenant for evidence; `None` = its caller chose the target."""
    return request.tenant if request.assigned else None


def _labels(key: Key, **more: str) -> dict[str, str]:
    return {"endpoint": key[0], "target": key[1], **more}
