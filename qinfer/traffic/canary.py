"""The life of a canary as a pure state machine: counts and time → an action and its reason.

    begin ─▶ step 1 ─▶ step 2 ─▶ … ─▶ finish: the canary's version number is the stable one
               │          │
               └──────────┴─▶ roll back, as soon as a check has decided; pause, by hand or without data

Each check compares the canary's share of bad requests with stable's by one test (`qinfer.traffic.evidence`), from the
first step to the last. The checks share the plan's rate of false rollbacks evenly. Limits from stable's latencies at
the start of a step define slow requests, so that load on both targets proves nothing against the canary. Of several
tenants none decides alone.

A step lasts its least time and number of requests, and longer while a check's evidence is more than half of the way to
a decision, or too many of the canary's requests fail. A transition is stored only if endpoint and step have not changed
since (`revision`, `step`): a controller that has lost its lease changes nothing.
"""

import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from enum import StrEnum
from typing import Literal

import msgspec
import numpy as np
from msgspec.structs import replace

from qinfer.errors import InvalidRequest
from qinfer.traffic.evidence import (
    ALONE_S,
    LEAST_OF_OTHERS,
    Blocks,
    Evidence,
    EvidenceBlock,
    Heard,
    bounded,
    heard,
    merged,
    told_apart,
    without,
)

LEAST_LATENCIES = 100
"""The least latencies for a limit."""
_LEAST_OF_A_TENANT = 25

DEADLINE, _DEADLINE_QUANTILE = "deadline", 0.99
"""Below this limit, a missed deadline is the caller's fault."""

_CLOSE = 0.5
"""The part of the way to a decision (of its logarithm) that holds a canary back."""
_OF_OTHERS = 0.75
"""The part that the evidence must reach without any one tenant."""

Latencies = Mapping[str, Mapping[str, Mapping[str, Sequence[float]]]]
"""`execution` and `latency` → stratum → tenant → seconds."""

BY_HAND, NO_DATA = "by hand", "no data"
"""Reasons of pauses; one without data ends by itself."""


class Step(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A step of a canary.

    Attributes:
        weight: The share of requests that the canary answers, from 0 to less than 1.
        shadow: The share of requests that the canary executes beside stable, which answers them.
        least_s: The least time of the step, in seconds.
        least_requests: The least number of the canary's requests.
    """

    weight: float = 0.0
    shadow: float = 0.0
    least_s: float = 60.0
    least_requests: int = 100


class Check(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A comparison of the canary's share of bad requests.

    Attributes:
        of: The bad requests: those with `errors`; those with an `execution` time, or a `latency` for the caller, above
            stable's quantile; those with `disagreements`.
        quantile: The quantile of `execution` and `latency`, such as 0.5 or 0.99.
        tolerated: The odds ratio up to which the canary may be worse than stable; 1 = not worse.
        allowed: A share to compare with instead of the share of stable; `disagreements` need one.
    """

    of: Literal["errors", "execution", "latency", "disagreements"]
    quantile: float = 0.0
    tolerated: float = 1.0
    allowed: float | None = None

    @property
    def name(self) -> str:
        """The check's name, such as `errors` or `execution p99`."""
        return f"{self.of} p{self.quantile * 100:g}" if self.quantile else self.of


CHECKS = (
    Check(of="errors"),
    Check(of="execution", quantile=0.5),
    Check(of="execution", quantile=0.99),
    Check(of="latency", quantile=0.99),
    Check(of="disagreements", allowed=0.01),
)


class CanaryPlan(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The declared steps and checks of an endpoint's canaries.

    Attributes:
        steps: The steps in order; promotion follows the last.
        checks: The checks.
        false_rollbacks: The highest rate of rollbacks among canaries as good as stable.
        no_data_s: Seconds without requests of a target after which the canary is paused.
        most_errors: The highest share of failed requests with which the canary leaves a step by itself, however many of
            stable's fail; 1 = all may fail.
    """

    steps: tuple[Step, ...]
    checks: tuple[Check, ...] = CHECKS
    false_rollbacks: float = 0.01
    no_data_s: float = 600.0
    most_errors: float = 0.1

    @property
    def decides(self) -> float:
        """The evidence that decides a check."""
        return len(self.checks) / self.false_rollbacks


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


class CanaryCounts(msgspec.Struct, frozen=True, kw_only=True):
    """The counts of all gateways since the last decision, at a revision and step.

    Attributes:
        blocks: Check → stratum → requests; `errors` has all requests, execution times are by batch size.
        parts: Tenant → its part of them; empty = one tenant sent all.
    """

    now_s: float
    revision: int
    step: int
    blocks: Blocks
    parts: Mapping[str, Blocks] = {}


class Action(StrEnum):
    """The effect of a decision."""

    HOLD = "hold"
    PROMOTE = "promote"
    FINISH = "finish"
    PAUSE = "pause"
    RESUME = "resume"
    ROLL_BACK = "roll back"


class Verdict(msgspec.Struct, frozen=True, kw_only=True):
    """The numbers of a check; an `allowed` of `None` = stable's share."""

    check: str
    seen: EvidenceBlock
    evidence: float
    decides: float
    allowed: float | None = None

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


class CanaryDecision(msgspec.Struct, frozen=True, kw_only=True):
    """An action on a canary, and the stable version from now on."""

    action: Action
    reason: str
    verdicts: tuple[Verdict, ...]
    stable: int


def checked(plan: CanaryPlan) -> CanaryPlan:
    """Returns a plan, or raises `InvalidRequest`."""
    if not plan.steps:
        raise InvalidRequest("a canary has no steps; give it at least one, such as weight 0.05")
    for number, step in enumerate(plan.steps, 1):
        if not (0 <= step.weight < 1 and 0 <= step.shadow <= 1 and step.weight + step.shadow > 0):
            raise InvalidRequest(
                f"step {number} has weight {step.weight:g} and shadow {step.shadow:g}; make weight a share from 0 to "
                "less than 1, shadow one from 0 to 1, and one of them more than 0"
            )
        if not (0 <= step.least_s < math.inf and step.least_requests >= 1):
            raise InvalidRequest(
                f"step {number} lasts {step.least_s:g} s and {step.least_requests} requests at least; make the time 0 "
                "or more, and the requests 1 or more"
            )
    for check in plan.checks:
        _check_numbers(check)
    names = [check.name for check in plan.checks]
    if "errors" not in names or len(set(names)) < len(names):
        raise InvalidRequest(f"the checks are {', '.join(names) or 'none'}; name each once, and errors among them")
    if not 0 < plan.most_errors <= 1:
        raise InvalidRequest(f"most_errors is {plan.most_errors:g}; make it a share above 0, up to 1 for any")
    if not (0 < plan.false_rollbacks < 1 and plan.no_data_s > 0):
        raise InvalidRequest(
            f"false_rollbacks is {plan.false_rollbacks:g} and no_data_s {plan.no_data_s:g}; make the first a share "
            "between 0 and 1, and the second more than 0"
        )
    return plan


def _check_numbers(check: Check) -> None:
    is_latency = check.of in ("execution", "latency")
    if is_latency != (0 < check.quantile < 1):
        raise InvalidRequest(
            f"the check of {check.of} has the quantile {check.quantile:g}; "
            + ("make it one between 0 and 1, such as 0.99" if is_latency else "leave it out")
        )
    if not 1 <= check.tolerated <= 100:
        raise InvalidRequest(
            f"the check '{check.name}' tolerates {check.tolerated:g}; make it an odds ratio from 1 to 100"
        )
    if check.of == "disagreements" and check.allowed is None:
        raise InvalidRequest("the check of disagreements allows no share; say how many are allowed, such as 0.01")
    if check.allowed is not None and (is_latency or not 0 <= check.allowed < 1):
        raise InvalidRequest(
            f"the check '{check.name}' allows {check.allowed:g}; "
            + ("leave it out, the quantile says it" if is_latency else "make it a share from 0 to less than 1")
        )


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
    none = Evidence()
    for _ in range(steps):
        none = none.begun(1.0 / len(plan.steps))
    return {check.name: none for check in plan.checks}


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


def decide(plan: CanaryPlan, state: CanaryState, seen: CanaryCounts) -> tuple[CanaryDecision, CanaryState]:
    """Decides after further requests; a state with another `revision` is a transition."""
    if reason := _why_not_counted(state, seen):
        return _decision(plan, state, Action.HOLD, reason), state
    state = _observed(plan, state, seen)
    verdicts = verdicts_of(plan, state)
    names = bounded(state.tenants, state.since_s, seen.now_s, plan.no_data_s)
    if guilty := [str(one) for one in verdicts if one.has_decided and _others_agree(plan, state, one.check, names)]:
        return roll_back(plan, state, "; ".join(guilty))
    silent_s = seen.now_s - min(state.stable_at_s, state.canary_at_s)
    if silent_s >= plan.no_data_s and not state.paused:
        target = "stable" if state.stable_at_s < state.canary_at_s else "the canary"
        return pause_canary(plan, state, NO_DATA, f"{target} has had no requests for {silent_s:.0f} s")
    if state.paused == NO_DATA and silent_s < plan.no_data_s:
        return resume_canary(plan, state, "there are requests again")
    if reason := _why_not_yet(plan, state, seen.now_s, names) or "; ".join(_doubts(plan, state, verdicts, names)):
        return _decision(plan, state, Action.HOLD, reason), state
    return promote(plan, state, seen.now_s, f"no check has found the canary worse in {state.requests:,} requests")


def _why_not_counted(state: CanaryState, seen: CanaryCounts) -> str:
    if state.ended:
        return f"it has ended: {state.ended}"
    if (seen.revision, seen.step) != (state.revision, state.step):
        return f"the counts belong to revision {seen.revision}, step {seen.step + 1}"
    return ""


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


def _doubts(plan: CanaryPlan, state: CanaryState, verdicts: Sequence[Verdict], names: Collection[str]) -> Iterator[str]:
    for verdict in verdicts:
        if verdict.has_decided:
            yield f"one tenant alone is no reason to roll back; decide by hand: {verdict}"
        elif verdict.is_close:
            yield f"close: {verdict}"
        elif any(state.without[name][verdict.check].value >= plan.decides for name in names):
            yield f"one tenant's requests hide what those of the others show; decide by hand: {verdict}"
    counted = [each for name in ("", *names) if (each := without(state.tenants, name)).requests]
    if counted and all(each.bad > plan.most_errors * each.requests for each in counted):
        yield (
            f"{counted[0].bad:,} of {counted[0].requests:,} requests of the canary in this step have failed; "
            f"most_errors allows {plan.most_errors:.2%}, however many of stable's fail"
        )


def promote(plan: CanaryPlan, state: CanaryState, now_s: float, reason: str) -> tuple[CanaryDecision, CanaryState]:
    """Begins the next step; after the last, the canary is stable."""
    if state.step + 1 >= len(plan.steps):
        ended = replace(state, revision=state.revision + 1, stable=state.canary, ended=Action.FINISH.value)
        return _decision(plan, ended, Action.FINISH, reason), ended
    part = 1.0 / len(plan.steps)
    after = replace(
        state,
        revision=state.revision + 1,
        step=state.step + 1,
        since_s=now_s,
        requests=0,
        evidence={name: one.begun(part) for name, one in state.evidence.items()},
        limits={},
        paused="",
        tenants=dict.fromkeys(state.tenants, Heard()),
        without={
            tenant: {name: one.begun(part) for name, one in others.items()} for tenant, others in state.without.items()
        },
    )
    return _decision(plan, after, Action.PROMOTE, f"to step {after.step + 1} of {len(plan.steps)}: {reason}"), after


def roll_back(plan: CanaryPlan, state: CanaryState, reason: str) -> tuple[CanaryDecision, CanaryState]:
    """Ends the canary."""
    ended = replace(state, revision=state.revision + 1, ended=Action.ROLL_BACK.value)
    return _decision(plan, ended, Action.ROLL_BACK, reason), ended


def pause_canary(plan: CanaryPlan, state: CanaryState, why: str, reason: str) -> tuple[CanaryDecision, CanaryState]:
    """Keeps the canary in its step; checks go on."""
    paused = replace(state, revision=state.revision + 1, paused=why)
    return _decision(plan, paused, Action.PAUSE, f"{why}: {reason}" if reason else why), paused


def resume_canary(plan: CanaryPlan, state: CanaryState, reason: str) -> tuple[CanaryDecision, CanaryState]:
    """Ends a pause."""
    resumed = replace(state, revision=state.revision + 1, paused="")
    return _decision(plan, resumed, Action.RESUME, reason), resumed


def verdicts_of(plan: CanaryPlan, state: CanaryState) -> tuple[Verdict, ...]:
    """Returns the numbers of all checks."""
    return tuple(
        Verdict(
            check=check.name,
            seen=state.evidence[check.name].seen,
            evidence=state.evidence[check.name].value,
            decides=plan.decides,
            allowed=check.allowed,
        )
        for check in plan.checks
    )


def _observed(plan: CanaryPlan, state: CanaryState, seen: CanaryCounts) -> CanaryState:
    parts = told_apart(seen.parts or {"": seen.blocks}, state.tenants)
    tenants, others = heard(state.tenants, parts, seen.now_s), dict[str, dict[str, Evidence]]()
    for name in tenants if len(tenants) > 1 else ():
        before = state.without.get(name) or (
            _no_evidence(plan, state.step + 1) if name in state.tenants else state.evidence
        )
        others[name] = _evidence(plan, before, merged(part for other, part in parts.items() if other != name))
    all_ = sum(seen.blocks.get("errors", {}).values(), EvidenceBlock())
    return replace(
        state,
        evidence=_evidence(plan, state.evidence, seen.blocks),
        tenants=tenants,
        without=others,
        requests=state.requests + all_.canary.requests,
        stable_at_s=seen.now_s if all_.stable.requests else state.stable_at_s,
        canary_at_s=seen.now_s if all_.canary.requests else state.canary_at_s,
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


def _decision(plan: CanaryPlan, state: CanaryState, action: Action, reason: str) -> CanaryDecision:
    return CanaryDecision(action=action, reason=reason, verdicts=verdicts_of(plan, state), stable=state.stable)
