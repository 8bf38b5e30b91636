"""Counts of one gateway by endpoint and target."""

import math
from bisect import bisect_left
from collections import Counter
from collections.abc import Iterator
from enum import StrEnum
from itertools import accumulate

import msgspec

from qinfer.core.messages import OutgoingRequest, Response
from qinfer.errors import ErrorCode
from qinfer.observe import catalogue
from qinfer.observe.exposition import Family, family
from qinfer.observe.stats import QUEUE_BUCKETS_S, Durations
from qinfer.traffic.canary import BY_HAND, NO_DATA
from qinfer.traffic.observed import ObservedTrials
from qinfer.traffic.routing import Endpoints

Key = tuple[str, str]


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
        self._durations: dict[Key, Durations] = {}
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
        self._time(key, seconds)

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
            self._time(key, seconds)
        else:
            self._failures[key, response.failure.code] += 1

    def _time(self, key: Key, seconds: float) -> None:
        series = self._durations.get(key)
        if series is None:
            series = self._durations[key] = Durations()
        series.counts[bisect_left(QUEUE_BUCKETS_S, seconds)] += 1
        series.total_s += seconds

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
        of = {outcome: self._shadows[(endpoint, target), outcome] for outcome in ShadowOutcome}
        return ShadowCounts(
            compared=of[ShadowOutcome.AGREED] + of[ShadowOutcome.DISAGREED],
            disagreed=of[ShadowOutcome.DISAGREED],
            failed=of[ShadowOutcome.FAILED],
            dropped=of[ShadowOutcome.DROPPED],
        )

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
            cumulative = zip((*QUEUE_BUCKETS_S, float("inf")), accumulate(series.counts), strict=True)
            durations.add_histogram(cumulative, series.total_s, **_labels(key, **own))
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
        planned = {name: routed.endpoint for name, routed in self._endpoints.by_name.items() if routed.endpoint.canary}
        trials = {name: trial for name, trial in self._endpoints.trials.items() if name in planned}
        on = {
            name: trial.state
            for name, trial in trials.items()
            if trial.is_on and trial.state.revision == planned[name].revision
        }
        of_each = {name: {"endpoint": name, **own} for name in trials}
        yield family(
            catalogue.CANARY_STEP, ((on[name].step + 1 if name in on else 0, of_each[name]) for name in trials)
        )
        yield family(
            catalogue.CANARY_PAUSED,
            (
                (int(name in on and on[name].paused == why), {"reason": why.replace(" ", "_"), **of_each[name]})
                for name in trials
                for why in (BY_HAND, NO_DATA)
            ),
        )
        yield family(
            catalogue.CANARY_ROLLED_BACK, ((int(trial.is_rolled_back), of_each[name]) for name, trial in trials.items())
        )


def key_of(request: OutgoingRequest) -> Key:
    """Returns the endpoint and target of a request."""
    return request.endpoint, f"{request.model}:{request.version}"


def witness_of(request: OutgoingRequest) -> str | None:
    """Returns the tenant for evidence; `None` = its caller chose the target."""
    return request.tenant if request.assigned else None


def _labels(key: Key, **more: str) -> dict[str, str]:
    return {"endpoint": key[0], "target": key[1], **more}
