"""The trial of a canary: its record beside the endpoint, and the effect of each transition on the endpoint. Pure.

A trial begins when the canary target has a READY version other than the stable one: its number, or for `latest` the
newest. The endpoint has the present step as weights and targets, so that gateways know nothing of steps. A decision
becomes a `TrialChange`, stored as a whole or not at all.

A version that was rolled back stays out, even if the endpoint is declared again, until `resume`. A new declaration
during a trial begins it anew.
"""

from collections.abc import Collection, Iterable, Iterator, Mapping
from typing import NamedTuple

import msgspec
from msgspec.structs import replace

from qinfer.errors import Conflict
from qinfer.traffic import canary
from qinfer.traffic.canary import Action, CanaryCounts, CanaryDecision, CanaryPlan, CanaryState, Latencies, Verdict
from qinfer.traffic.endpoints import LATEST, Endpoint, Role, Target
from qinfer.traffic.evidence import Blocks, Counts, EvidenceBlock, merged
from qinfer.wire.versions import Record

BEGIN, CONFIRMED = "begin", "rolled back everywhere"
"""Events beside those of `Action`."""


class Trial(msgspec.Struct, frozen=True, kw_only=True, array_like=True):
    """The stored trial of a canary.

    Attributes:
        counted: Name → count of this revision so far.
        reason: Why the last transition was made, or not made.
        at_s: The time of the last transition.
        done_s: When all gateways had confirmed the rollback.
        model: The canary's model; empty = the stable target's.
    """

    state: CanaryState
    counted: dict[str, int] = {}
    reason: str = ""
    at_s: float = 0.0
    done_s: float = 0.0
    model: str = ""

    @property
    def is_on(self) -> bool:
        """Tells whether the trial goes on."""
        return not self.state.ended

    @property
    def is_rolled_back(self) -> bool:
        """Tells whether the canary was rolled back."""
        return self.state.ended == Action.ROLL_BACK.value


TRIALS = Record(Trial, "the trial of a canary")


class CheckNumbers(msgspec.Struct, frozen=True, kw_only=True):
    """The numbers of a check.

    Attributes:
        check: The check's name.
        canary_requests: The canary's requests.
        canary_bad: The bad requests among them.
        stable_requests: Stable's requests.
        stable_bad: The bad requests among them.
        evidence: The evidence that the canary is worse: 1 at the beginning.
        decides: The evidence that rolls back.
        allowed: The share that the canary's share is compared with; `null` = the share of stable.
    """

    check: str
    canary_requests: int
    canary_bad: int
    stable_requests: int
    stable_bad: int
    evidence: float
    decides: float
    allowed: float | None = None


class Event(msgspec.Struct, frozen=True, kw_only=True):
    """An event of a canary.

    Attributes:
        at_s: The time, in seconds since the epoch.
        event: begin | promote | finish | pause | resume | roll back | rolled back everywhere
        version: The canary's version.
        step: The number of the step, from 1, after it.
        reason: The reason.
        checks: The numbers of all checks then.
        model: The canary's model, if it is not the model of the stable target; else empty.
    """

    at_s: float
    event: str
    version: int
    step: int
    reason: str
    checks: tuple[CheckNumbers, ...] = ()
    model: str = ""


class TrialChange(NamedTuple):
    """A trial to store, with the endpoint and event of a transition."""

    trial: Trial
    endpoint: Endpoint | None = None
    event: Event | None = None


def candidate(endpoint: Endpoint, ready: Collection[int]) -> int:
    """Returns the version to try, or 0."""
    target, stable = endpoint.tried, endpoint.stable
    if target is None:
        return 0
    version = max(ready, default=0) if target.version == LATEST else target.number
    is_new = version > stable.number or target.version != LATEST
    return version if version in ready and is_new and (target.model, version) != stable.place else 0


def _other_model(endpoint: Endpoint) -> str:
    tried = endpoint.tried
    return "" if tried is None or tried.model == endpoint.stable.model else tried.model


def belongs(trial: Trial, endpoint: Endpoint) -> bool:
    """Tells whether to restore a lost trial: the endpoint fits it."""
    return trial.is_rolled_back or any(target.trial == trial.state.canary for target in endpoint.targets)


def begun(endpoint: Endpoint, trial: Trial | None, ready: Collection[int], now_s: float) -> TrialChange | None:
    """Returns the start of a due trial, if any."""
    version = candidate(endpoint, ready)
    if endpoint.canary is None or not version:
        return None
    model = _other_model(endpoint)
    if trial is not None and (model, version) == (trial.model, trial.state.canary) and trial.is_rolled_back:
        return None
    return _begin_trial(endpoint, endpoint.canary, version, f"{_format_target(model, version)} is ready", now_s)


def _begin_trial(endpoint: Endpoint, plan: CanaryPlan, version: int, reason: str, now_s: float) -> TrialChange:
    state = canary.initial_state(plan, endpoint.stable.number, version, endpoint.revision, now_s)
    return _change(endpoint, plan, state, BEGIN, reason, now_s)


def advanced(
    endpoint: Endpoint, trial: Trial, counted: Mapping[str, int], latencies: Latencies, now_s: float
) -> TrialChange:
    """Returns a trial's next state, given all counts of this revision."""
    assert endpoint.canary is not None
    plan, state = endpoint.canary, canary.with_limits(endpoint.canary, trial.state, latencies, now_s)
    parts = parts_of(_since(counted, trial.counted))
    blocks = merged(parts.values())
    seen = CanaryCounts(now_s=now_s, revision=state.revision, step=state.step, blocks=blocks, parts=parts)
    decision, after = canary.decide(plan, state, seen)
    if decision.action is Action.HOLD:
        return TrialChange(replace(trial, state=after, counted=dict(counted), reason=decision.reason))
    return _change(endpoint, plan, after, decision.action.value, decision.reason, now_s)


def by_hand(
    endpoint: Endpoint, trial: Trial | None, action: Action, reason: str, ready: Collection[int], now_s: float
) -> TrialChange:
    """Returns a person's change, or raises `Conflict`; `RESUME` also tries a bad version again."""
    plan = endpoint.canary
    if plan is None:
        raise Conflict(f"endpoint '{endpoint.name}' has no plan for canaries; declare `canary` with steps")
    if trial is None or not trial.is_on or trial.state.revision != endpoint.revision:
        version = candidate(endpoint, ready)
        if action is Action.RESUME and version and trial is not None and trial.is_rolled_back:
            return _begin_trial(endpoint, plan, version, reason, now_s)
        raise Conflict(f"endpoint '{endpoint.name}' has no canary on trial: {_why_none(endpoint, trial)}")
    decision, after = _decided_by_hand(plan, trial.state, action, reason, now_s)
    return _change(endpoint, plan, after, decision.action.value, decision.reason, now_s)


def _why_none(endpoint: Endpoint, trial: Trial | None) -> str:
    if trial is None:
        return "the first trial begins when a version of the canary target is ready"
    version = _format_target(trial.model, trial.state.canary)
    if trial.is_rolled_back:
        return f"{version} was rolled back; resume tries it again while it is ready"
    if trial.state.ended:
        return f"{version} was promoted; the next trial begins with another version, or when the endpoint is put again"
    return f"the endpoint was put again during the trial of {version}, which restarts within two seconds"


def _decided_by_hand(
    plan: CanaryPlan, state: CanaryState, action: Action, reason: str, now_s: float
) -> tuple[CanaryDecision, CanaryState]:
    match action:
        case Action.PROMOTE:
            return canary.promote(plan, state, now_s, reason)
        case Action.ROLL_BACK:
            return canary.roll_back(plan, state, reason)
        case Action.PAUSE if not state.paused:
            return canary.pause_canary(plan, state, canary.BY_HAND, reason)
        case Action.RESUME if state.paused:
            return canary.resume_canary(plan, state, reason)
    raise Conflict(f"the canary is {'paused' if state.paused else 'not paused'} already")


def confirmed(
    endpoint: Endpoint, trial: Trial, heard: Iterable[int], now_s: float, moved: int = 0
) -> TrialChange | None:
    """Returns a rollback's end, once each live gateway knows it."""
    if not trial.is_rolled_back or trial.done_s or any(revision < trial.state.revision for revision in heard):
        return None
    done = replace(trial, done_s=now_s)
    reason = f"every gateway confirmed it {now_s - trial.at_s:.1f} s after the rollback"
    if moved:
        reason += f"; {moved} requests that waited for it were moved to version {trial.state.stable}"
    return TrialChange(done, None, _event(endpoint.canary, done, CONFIRMED, reason, now_s))


def _change(
    endpoint: Endpoint, plan: CanaryPlan, state: CanaryState, event: str, reason: str, now_s: float
) -> TrialChange:
    trial = Trial(state=state, reason=reason, at_s=now_s, model=_other_model(endpoint))
    return TrialChange(trial, shaped(endpoint, plan, state), _event(plan, trial, event, reason, now_s))


def shaped(endpoint: Endpoint, plan: CanaryPlan, state: CanaryState) -> Endpoint:
    """Returns the endpoint in a state of its canary."""
    rest = endpoint.at_rest()
    match state.ended:
        case Action.FINISH.value:
            targets: Iterable[Target] = _finished(rest, state.canary)
        case "":
            targets = _at_step(rest, plan.steps[state.step], state.canary)
        case _:
            return rest
    return replace(rest, targets=tuple(targets))


def _finished(rest: Endpoint, version: int) -> Iterator[Target]:
    for target in rest.targets:
        if target.role is Role.STABLE:
            yield replace(target, model=_other_model(rest) or target.model, version=version)
        elif target.role is not Role.CANARY or target.version == LATEST:
            yield target  # a canary with a number has become the stable target


def _at_step(rest: Endpoint, step: canary.Step, version: int) -> Iterator[Target]:
    for target in rest.targets:
        yield replace(target, weight=step.weight, trial=version) if target.role is Role.CANARY else target
    if step.shadow:
        model = _other_model(rest) or rest.stable.model
        yield Target(model=model, version=version, role=Role.SHADOW, weight=step.shadow, trial=version)


def _event(plan: CanaryPlan | None, trial: Trial, event: str, reason: str, now_s: float) -> Event:
    state, model = trial.state, trial.model
    numbers, step = tuple(numbers_of(plan, state)), state.step + 1
    return Event(at_s=now_s, event=event, version=state.canary, step=step, reason=reason, checks=numbers, model=model)


def _format_target(model: str, version: int) -> str:
    return f"{model}:{version}" if model else f"version {version}"


def numbers_of(plan: CanaryPlan | None, state: CanaryState) -> Iterator[CheckNumbers]:
    """Yields the checks' numbers, unless the plan's checks have changed."""
    if plan is None or {check.name for check in plan.checks} != state.evidence.keys():
        return
    for verdict in canary.verdicts_of(plan, state):
        yield _numbers(verdict)


def _numbers(verdict: Verdict) -> CheckNumbers:
    stable, tried = verdict.seen.stable, verdict.seen.canary
    return CheckNumbers(
        check=verdict.check,
        canary_requests=tried.requests,
        canary_bad=tried.bad,
        stable_requests=stable.requests,
        stable_bad=stable.bad,
        evidence=verdict.evidence,
        decides=verdict.decides,
        allowed=verdict.allowed,
    )


def count_names(role: Role, check: str, stratum: str, tenant: str = "") -> tuple[str, str]:
    """Returns the names of two counts: a tenant's requests, and the bad requests among them."""
    of, whose = f"{role}|{check}|{stratum}", f"|{tenant}" if tenant else ""
    return f"{of}|requests{whose}", f"{of}|bad{whose}"


def parts_of(counts: Mapping[str, int]) -> dict[str, Blocks]:
    """Returns tenant → check → stratum → requests, for a decision."""
    found: dict[str, dict[str, dict[str, EvidenceBlock]]] = {}
    for tenant, check, stratum in {_place_of(name) for name in counts}:
        of = check, stratum, tenant
        block = EvidenceBlock(_counts(counts, Role.STABLE, *of), _counts(counts, Role.CANARY, *of))
        found.setdefault(tenant, {}).setdefault(check, {})[stratum] = block
    return {**found}


def _place_of(count: str) -> tuple[str, str, str]:
    _, check, stratum, _, *tenant = count.split("|", 4)
    return "".join(tenant), check, stratum


def _counts(counts: Mapping[str, int], role: Role, check: str, stratum: str, tenant: str) -> Counts:
    requests, bad = (counts.get(name, 0) for name in count_names(role, check, stratum, tenant))
    return Counts(requests, min(bad, requests))


def _since(now: Mapping[str, int], before: Mapping[str, int]) -> dict[str, int]:
    """Returns the increases of the counts; lost counts begin anew."""
    if any(now.get(name, 0) < count for name, count in before.items()):
        before = {}
    return {name: count - before.get(name, 0) for name, count in now.items()}
