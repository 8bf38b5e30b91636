"""The life of a canary as a pure state machine: counts and time → an action and its reason.

    begin ─▶ step 1 ─▶ step 2 ─▶ … ─▶ finish: the canary's version number is the stable one
               │          │
               └──────────┴─▶ roll back, as soon as a check has decided; pause, by hand or without data

Each check compares the canary's share of bad requests with stable's by one test (`qinfer.traffic.evidence`), from the
first step to the last. The checks share the plan's rate of false rollbacks evenly. Limits from stable's latencies at
the start of a step define slow requests, so that load on both targets is no evidence against the canary. With several
tenants, no tenant's requests decide alone (`qinfer.traffic.evidence`).

A step lasts its least time and number of requests, and longer while a check's evidence is more than half of the way to
a decision, or too many of the canary's requests fail. A transition is stored only if the endpoint has not changed since
(`revision`): a controller that has lost its lease changes nothing.

The *trial* is the record of it beside the endpoint. A trial begins when the canary target has a READY version other
than the stable one: its number, or for `latest` the newest. The endpoint has the present step as weights and targets,
so that gateways know nothing of steps. A decision becomes a `TrialChange`, stored as a whole or not at all. A version
that was rolled back stays out, even if the endpoint is declared again, until `resume`. A new declaration during a trial
begins it anew.
"""

import math
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from enum import StrEnum
from typing import Any, NamedTuple

import msgspec
import numpy as np
from msgspec.structs import replace

from qinfer.errors import Conflict
from qinfer.traffic.endpoints import LATEST, CanaryPlan, Check, Endpoint, Role, Step, Target
from qinfer.traffic.evidence import (
    ALONE_S,
    LEAST_OF_OTHERS,
    Blocks,
    Counts,
    Evidence,
    EvidenceBlock,
    Heard,
    bounded,
    heard,
    merged,
    told_apart,
    without,
)
from qinfer.wire.versions import Record

LEAST_LATENCIES = 100
"""The least latencies for a limit."""
_LEAST_OF_A_TENANT = 25

DEADLINE, _DEADLINE_QUANTILE = "deadline", 0.99
"""Below this limit, a missed deadline is the caller's fault."""

_CLOSE = 0.5
"""The share of a decision's evidence (of its logarithm) from which a canary stays in its step."""
_OF_OTHERS = 0.75
"""The share that the evidence must reach without the requests of any one tenant."""

Latencies = Mapping[str, Mapping[str, Mapping[str, Sequence[float]]]]
"""`execution` and `latency` → stratum → tenant → seconds."""

BY_HAND, NO_DATA = "by hand", "no data"
"""Reasons of pauses; one without data ends by itself."""


class CanaryState(msgspec.Struct, frozen=True, kw_only=True, array_like=True):
    """The stored state of a canary; times are seconds since the epoch.

    Attributes:
        stable: A version number, like `canary`.
        revision: The revision of the endpoint, which each transition raises.
        requests: The canary's requests of this step.
        stable_at_s: The time of stable's last requests.
        limits: Check → stratum → seconds above which a request is slow in this step.
        paused: Why it is paused.
        ended: The action that has ended it.
        tenants: Tenant → its requests of the canary in this step.
        without: Tenant → check → the evidence of the other tenants.
    """

    stable: int
    canary: int
    revision: int
    since_s: float
    step: int = 0
    requests: int = 0
    stable_at_s: float
    canary_at_s: float
    evidence: dict[str, Evidence]
    limits: dict[str, dict[str, float]] = {}
    paused: str = ""
    ended: str = ""
    tenants: dict[str, Heard] = {}
    without: dict[str, dict[str, Evidence]] = {}


class Action(StrEnum):
    """The effect of a decision."""

    HOLD = "hold"
    PROMOTE = "promote"
    FINISH = "finish"
    PAUSE = "pause"
    RESUME = "resume"
    ROLL_BACK = "roll back"


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

    @property
    def seen(self) -> EvidenceBlock:
        """The requests of both targets."""
        return EvidenceBlock(
            Counts(self.stable_requests, self.stable_bad), Counts(self.canary_requests, self.canary_bad)
        )

    @property
    def has_decided(self) -> bool:
        """Tells whether the canary is worse."""
        return self.evidence >= self.decides

    @property
    def is_close(self) -> bool:
        """Tells whether the evidence is beyond half of the way."""
        return self.evidence > math.exp(_CLOSE * math.log(self.decides))

    def __str__(self) -> str:
        canary, stable = self.seen.canary, self.seen.stable
        other = (
            f"{stable.bad:,} of {stable.requests:,} ({stable.share:.2%}) of stable"
            if self.allowed is None
            else f"{self.allowed:.2%} allowed"
        )
        return (
            f"{self.check}: {canary.bad:,} of {canary.requests:,} requests ({canary.share:.2%}) of the canary, "
            f"{other}; evidence {self.evidence:.3g}, {self.decides:g} decides"
        )


class CanaryDecision(NamedTuple):
    """An action on a canary, and the state after it; one with another `revision` is a transition."""

    action: Action
    reason: str
    state: CanaryState


def initial_state(plan: CanaryPlan, stable: int, canary: int, revision: int, now_s: float) -> CanaryState:
    """Returns the state at the first step's beginning."""
    return CanaryState(
        stable=stable,
        canary=canary,
        revision=revision,
        since_s=now_s,
        stable_at_s=now_s,
        canary_at_s=now_s,
        evidence=_no_evidence(plan, 1),
    )


def _no_evidence(plan: CanaryPlan, steps: int) -> dict[str, Evidence]:
    none = {check.name: Evidence() for check in plan.checks}
    for _ in range(steps):
        none = _begun(plan, none)
    return none


def with_limits(plan: CanaryPlan, state: CanaryState, latencies: Latencies, now_s: float) -> CanaryState:
    """Adds missing limits, to be stored: gateways count by them."""
    limits = {name: dict(known) for name, known in state.limits.items()}
    waits = len(state.tenants) > 1 and now_s - state.since_s < ALONE_S
    wanted = [(check.name, check.of, check.quantile) for check in plan.checks if check.quantile]
    for name, of, quantile in (*wanted, (DEADLINE, "latency", _DEADLINE_QUANTILE)):
        for stratum, found in latencies.get(of, {}).items():
            limit = _limit([*found.values()], quantile, least=2 if waits else 1)
            if limit is not None:
                limits.setdefault(name, {}).setdefault(stratum, limit)
    return replace(state, limits=limits)


def _limit(found: Sequence[Sequence[float]], quantile: float, least: int) -> float | None:
    """Returns the median of the tenants' quantiles, given `least` such tenants."""
    if sum(map(len, found)) < LEAST_LATENCIES:
        return None
    enough = [seconds for seconds in found if len(seconds) >= _LEAST_OF_A_TENANT]
    if len(enough) < least:
        return None if least > 1 else float(np.quantile(np.concatenate(found), quantile))
    own = sorted(float(np.quantile(seconds, quantile)) for seconds in enough)
    return own[(len(own) - 1) // 2]


def decide(plan: CanaryPlan, state: CanaryState, now_s: float, parts: Mapping[str, Blocks]) -> CanaryDecision:
    """Decides after further requests at this revision and step: those of all gateways, by tenant."""
    if state.ended:
        return CanaryDecision(Action.HOLD, f"it has ended: {state.ended}", state)
    state = _observed(plan, state, now_s, parts or {"": {}})
    verdicts = numbers_of(plan, state)
    names = bounded(state.tenants, state.since_s, now_s, plan.no_data_s)
    if guilty := [str(one) for one in verdicts if one.has_decided and _others_agree(plan, state, one.check, names)]:
        return roll_back(state, "; ".join(guilty))
    silent_s = now_s - min(state.stable_at_s, state.canary_at_s)
    if silent_s >= plan.no_data_s and not state.paused:
        target = "stable" if state.stable_at_s < state.canary_at_s else "the canary"
        return pause_canary(state, NO_DATA, f"{target} has had no requests for {silent_s:.0f} s")
    if state.paused == NO_DATA and silent_s < plan.no_data_s:
        return resume_canary(state, "there are requests again")
    if reason := _why_not_yet(plan, state, now_s, names) or "; ".join(_doubts(plan, state, verdicts, names)):
        return CanaryDecision(Action.HOLD, reason, state)
    return promote(plan, state, now_s, f"no check has found the canary worse in {state.requests:,} requests")


def _others_agree(plan: CanaryPlan, state: CanaryState, check: str, names: Collection[str]) -> bool:
    return all(state.without[name][check].log >= _OF_OTHERS * math.log(plan.decides) for name in names)


def _why_not_yet(plan: CanaryPlan, state: CanaryState, now_s: float, names: Collection[str]) -> str:
    """Returns why the step goes on, or an empty text.

    One tenant's requests are at most half of a step's while the others have sent none or few.
    """
    if state.paused:
        return f"paused: {state.paused}"
    step, lasts_s = plan.steps[state.step], now_s - state.since_s
    half = math.ceil(step.least_requests / 2)
    early = [name for name in names if without(state.tenants, name).requests < LEAST_OF_OTHERS]
    requests = state.requests - sum(max(state.tenants[name].requests - half, 0) for name in early)
    if lasts_s < step.least_s or requests < step.least_requests:
        more = f", of one tenant {half:,} at most" if requests < state.requests else ""
        return (
            f"step {state.step + 1} of {len(plan.steps)}: {max(lasts_s, 0):.0f} s of at least {step.least_s:g} s, "
            f"{requests:,} requests of at least {step.least_requests:,}{more}"
        )
    return ""


def _doubts(
    plan: CanaryPlan, state: CanaryState, verdicts: Sequence[CheckNumbers], names: Collection[str]
) -> Iterator[str]:
    for verdict in verdicts:
        if verdict.has_decided:
            yield f"one tenant alone is no reason to roll back; decide by hand: {verdict}"
        elif verdict.is_close:
            yield f"close: {verdict}"
        elif any(state.without[name][verdict.check].value >= plan.decides for name in names):
            yield f"the requests of the other tenants alone would decide; decide by hand: {verdict}"
    counted = [each for name in ("", *names) if (each := without(state.tenants, name)).requests]
    if counted and all(each.bad > plan.most_errors * each.requests for each in counted):
        yield (
            f"{counted[0].bad:,} of {counted[0].requests:,} requests of the canary in this step have failed; "
            f"most_errors allows {plan.most_errors:.2%}, however many of stable's fail"
        )


def promote(plan: CanaryPlan, state: CanaryState, now_s: float, reason: str) -> CanaryDecision:
    """Begins the next step; after the last, the canary is stable."""
    if state.step + 1 >= len(plan.steps):
        return _transition(state, Action.FINISH, reason, stable=state.canary, ended=Action.FINISH.value)
    return _transition(
        state,
        Action.PROMOTE,
        f"to step {state.step + 2} of {len(plan.steps)}: {reason}",
        step=state.step + 1,
        since_s=now_s,
        requests=0,
        evidence=_begun(plan, state.evidence),
        limits={},
        paused="",
        tenants=dict.fromkeys(state.tenants, Heard()),
        without={tenant: _begun(plan, others) for tenant, others in state.without.items()},
    )


def roll_back(state: CanaryState, reason: str) -> CanaryDecision:
    """Ends the canary."""
    return _transition(state, Action.ROLL_BACK, reason, ended=Action.ROLL_BACK.value)


def pause_canary(state: CanaryState, why: str, reason: str) -> CanaryDecision:
    """Keeps the canary in its step; checks go on."""
    return _transition(state, Action.PAUSE, f"{why}: {reason}" if reason else why, paused=why)


def resume_canary(state: CanaryState, reason: str) -> CanaryDecision:
    """Ends a pause."""
    return _transition(state, Action.RESUME, reason, paused="")


def _transition(state: CanaryState, action: Action, reason: str, **changes: Any) -> CanaryDecision:
    return CanaryDecision(action, reason, replace(state, revision=state.revision + 1, **changes))


def _begun(plan: CanaryPlan, evidence: Mapping[str, Evidence]) -> dict[str, Evidence]:
    return {name: one.begun(1.0 / len(plan.steps)) for name, one in evidence.items()}


def numbers_of(plan: CanaryPlan | None, state: CanaryState) -> tuple[CheckNumbers, ...]:
    """Returns the numbers of all checks, unless the plan's checks have changed."""
    if plan is None or {check.name for check in plan.checks} != state.evidence.keys():
        return ()
    return tuple(_numbers(plan, check, state.evidence[check.name]) for check in plan.checks)


def _numbers(plan: CanaryPlan, check: Check, known: Evidence) -> CheckNumbers:
    stable, tried = known.seen.stable, known.seen.canary
    return CheckNumbers(
        check=check.name,
        canary_requests=tried.requests,
        canary_bad=tried.bad,
        stable_requests=stable.requests,
        stable_bad=stable.bad,
        evidence=known.value,
        decides=plan.decides,
        allowed=check.allowed,
    )


def _observed(plan: CanaryPlan, state: CanaryState, now_s: float, found: Mapping[str, Blocks]) -> CanaryState:
    parts, blocks = told_apart(found, state.tenants), merged(found.values())
    tenants, others = heard(state.tenants, parts, now_s), dict[str, dict[str, Evidence]]()
    for name in tenants if len(tenants) > 1 else ():
        before = state.without.get(name) or (
            _no_evidence(plan, state.step + 1) if name in state.tenants else state.evidence
        )
        others[name] = _evidence(plan, before, merged(part for other, part in parts.items() if other != name))
    all_ = sum(blocks.get("errors", {}).values(), EvidenceBlock())
    return replace(
        state,
        evidence=_evidence(plan, state.evidence, blocks),
        tenants=tenants,
        without=others,
        requests=state.requests + all_.canary.requests,
        stable_at_s=now_s if all_.stable.requests else state.stable_at_s,
        canary_at_s=now_s if all_.canary.requests else state.canary_at_s,
    )


def _evidence(plan: CanaryPlan, before: Mapping[str, Evidence], seen: Blocks) -> dict[str, Evidence]:
    evidence = dict(before)
    for check in plan.checks:
        known, blocks = evidence[check.name], seen.get(check.name, {})
        if check.allowed is None:
            evidence[check.name] = known.against_stable(blocks, check.tolerated)
        else:
            evidence[check.name] = known.against_share(blocks, check.allowed)
    return evidence


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

    def is_at(self, endpoint: Endpoint) -> bool:
        """Tells whether the trial goes on, at this revision of the endpoint."""
        return self.is_on and self.state.revision == endpoint.revision

    @property
    def is_rolled_back(self) -> bool:
        """Tells whether the canary was rolled back."""
        return self.state.ended == Action.ROLL_BACK.value


TRIALS = Record(Trial, "the trial of a canary")


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
    state = initial_state(plan, endpoint.stable.number, version, endpoint.revision, now_s)
    return _change(endpoint, plan, state, BEGIN, reason, now_s)


def advanced(
    endpoint: Endpoint, trial: Trial, counted: Mapping[str, int], latencies: Latencies, now_s: float
) -> TrialChange:
    """Returns a trial's next state, given all counts of this revision."""
    assert endpoint.canary is not None
    plan, state = endpoint.canary, with_limits(endpoint.canary, trial.state, latencies, now_s)
    decision = decide(plan, state, now_s, parts_of(_since(counted, trial.counted)))
    if decision.action is Action.HOLD:
        return TrialChange(replace(trial, state=decision.state, counted=dict(counted), reason=decision.reason))
    return _change(endpoint, plan, decision.state, decision.action.value, decision.reason, now_s)


def by_hand(
    endpoint: Endpoint, trial: Trial | None, action: Action, reason: str, ready: Collection[int], now_s: float
) -> TrialChange:
    """Returns a person's change, or raises `Conflict`; `RESUME` also tries a bad version again."""
    plan = endpoint.canary
    if plan is None:
        raise Conflict(f"endpoint '{endpoint.name}' has no plan for canaries; declare `canary` with steps")
    if trial is None or not trial.is_at(endpoint):
        version = candidate(endpoint, ready)
        if action is Action.RESUME and version and trial is not None and trial.is_rolled_back:
            return _begin_trial(endpoint, plan, version, reason, now_s)
        raise Conflict(f"endpoint '{endpoint.name}' has no canary on trial: {_why_none(endpoint, trial)}")
    decision = _decided_by_hand(plan, trial.state, action, reason, now_s)
    return _change(endpoint, plan, decision.state, decision.action.value, decision.reason, now_s)


def _why_none(endpoint: Endpoint, trial: Trial | None) -> str:
    if trial is None:
        return "the first trial begins when a version of the canary target is ready"
    version = _format_target(trial.model, trial.state.canary)
    if trial.is_rolled_back:
        return f"{version} was rolled back; resume tries it again while it is ready"
    if trial.state.ended:
        return f"{version} was promoted; the next trial begins with another version, or when the endpoint is put again"
    return f"the endpoint was put again during the trial of {version}, which restarts within two seconds"


def _decided_by_hand(plan: CanaryPlan, state: CanaryState, action: Action, reason: str, now_s: float) -> CanaryDecision:
    match action:
        case Action.PROMOTE:
            return promote(plan, state, now_s, reason)
        case Action.ROLL_BACK:
            return roll_back(state, reason)
        case Action.PAUSE if not state.paused:
            return pause_canary(state, BY_HAND, reason)
        case Action.RESUME if state.paused:
            return resume_canary(state, reason)
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


def _at_step(rest: Endpoint, step: Step, version: int) -> Iterator[Target]:
    for target in rest.targets:
        yield replace(target, weight=step.weight, trial=version) if target.role is Role.CANARY else target
    if step.shadow:
        model = _other_model(rest) or rest.stable.model
        yield Target(model=model, version=version, role=Role.SHADOW, weight=step.shadow, trial=version)


def _event(plan: CanaryPlan | None, trial: Trial, event: str, reason: str, now_s: float) -> Event:
    state, model = trial.state, trial.model
    numbers, step = numbers_of(plan, state), state.step + 1
    return Event(at_s=now_s, event=event, version=state.canary, step=step, reason=reason, checks=numbers, model=model)


def _format_target(model: str, version: int) -> str:
    return f"{model}:{version}" if model else f"version {version}"


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
