"""The scaling policy: the number of workers as a pure function of the work, the time and earlier decisions.

    wanted = ⌈seconds of work ÷ target_s⌉, at least 1 while anything waits or executes, within min … max

and at least enough for all open sequences, which outlast their requests.

Up: at once, or after `up_after_s` of sustained demand; the first worker always at once. Starting workers count. Down:
after `down_after_s` of lower demand, to the highest need within that time; to the minimum after `idle_s` without work.
Steps down wait `cooldown_s`, or a worker's load time, after the last step up.

A backlog alone would flap: it is empty while workers keep up. So workers that the recent throughput keeps busy are
kept, and each step down that is soon reverted delays the next step down.

Several autoscalers of the same models have no leader: all compute the same shares from their records, and start and
drain only their own workers. Shares change as little as the total, because running workers do not move.
"""

import math
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from qinfer.errors import SettingsError
from qinfer.models.state import ScalerRecord

LOAD_MARGIN = 1.5
"""Load times of a worker between a step up and a step down."""
BUSY_SHARE = 0.85
"""The part of its speed that a worker sustains without a backlog."""
MAX_PATIENCE = 16
"""The highest multiple of `down_after_s` after reverted steps down."""

FULL_S = 1.0
"""Above this work per worker all workers count as busy."""
MAX_CORRECTION = 3.0

Version = tuple[str, int]


class _Total(NamedTuple):
    at_s: float
    rows: Mapping[Version, int]
    busy: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ScalingPolicy:
    """The operator's limits and delays.

    Attributes:
        target_s: Waiting work per worker.
        idle_s: Before a step down to `min_workers`.
        cooldown_s: Between steps up and down.
    """

    min_workers: int = 0
    max_workers: int = 1
    target_s: float = 10.0
    up_after_s: float = 0.0
    down_after_s: float = 60.0
    idle_s: float = 300.0
    cooldown_s: float = 30.0

    def __post_init__(self) -> None:
        if self.max_workers < 1 or not 0 <= self.min_workers <= self.max_workers:
            raise SettingsError(
                f"{self.min_workers} to {self.max_workers} workers are not possible: the maximum must be 1 or more, "
                "and the minimum from 0 to the maximum"
            )
        if not 0 < self.target_s < math.inf:
            raise SettingsError(f"the target must be seconds above 0, got {self.target_s}")


@dataclass(frozen=True, slots=True, kw_only=True)
class QueueObservation:
    """The queue and its workers at one instant.

    Attributes:
        work_s: Seconds that one worker would need for all work.
        entries: Waiting or executing requests and rows of bulk jobs.
        used: Workers that the recent throughput keeps busy.
        load_s: The time from a worker's start until it serves; 0 = unknown.
        floor: Live workers that the most demanding model needs to be READY.
        sequence_workers: Workers whose slots hold all open sequences of the most demanding model.
    """

    now_s: float
    work_s: float
    entries: int
    executed: bool = False
    used: float = 0.0
    live: int = 0
    starting: int = 0
    load_s: float = 0.0
    floor: int = 0
    sequence_workers: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class ScalingDecision:
    """A decision of the policy; `wanted` is the number of workers that the present work alone needs."""

    target: int
    wanted: int
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ScalingState:
    """The memory of a policy.

    Attributes:
        needs: (time, workers) within the last `down_after_s`, each lower than the one before.
        patience: Multiple of `down_after_s` that lower demand must last.
    """

    target: int
    since_s: float
    active_at_s: float
    grown_at_s: float = -math.inf
    shrunk_at_s: float = -math.inf
    short_since_s: float | None = None
    needs: tuple[tuple[float, int], ...] = ()
    patience: int = 1

    @classmethod
    def initial(cls, now_s: float, target: int) -> "ScalingState":
        """Returns the first state, with `target` workers."""
        return cls(target=target, since_s=now_s, active_at_s=now_s, grown_at_s=now_s)

    def after_gap(self, now_s: float) -> "ScalingState":
        """Returns the state after a time without observations."""
        return replace(self, since_s=now_s, active_at_s=now_s, short_since_s=None, needs=())


def decide(policy: ScalingPolicy, state: ScalingState, seen: QueueObservation) -> tuple[ScalingDecision, ScalingState]:
    """Decides how many workers there should be; returns the new state, too."""
    wanted = wanted_workers(policy, seen)
    busy = min(math.ceil(seen.used / BUSY_SHARE), state.target)
    state = _noted(policy, state, seen, max(wanted, busy))
    if wanted > state.target:
        return _up(policy, state, seen, wanted)
    state = replace(state, short_since_s=None)
    decision = _down(policy, state, seen, wanted)
    if decision.target == state.target:
        return decision, state
    shrunk_at_s = seen.now_s if decision.target else state.shrunk_at_s
    return decision, replace(state, target=decision.target, shrunk_at_s=shrunk_at_s)


def adopt(policy: ScalingPolicy, state: ScalingState, now_s: float, target: int) -> ScalingState:
    """Returns the state after others changed the number of workers to `target`."""
    if target > state.target:
        # Only the first step up reverts the last step down.
        is_first = state.shrunk_at_s > state.grown_at_s
        patience = _patience(policy, state, now_s) if is_first else state.patience
        return replace(state, target=target, grown_at_s=now_s, patience=patience)
    if target < state.target:
        return replace(state, target=target, shrunk_at_s=now_s if target else state.shrunk_at_s)
    return state


def wanted_workers(policy: ScalingPolicy, seen: QueueObservation) -> int:
    """Returns the need of the present work, within the limits."""
    by_work = math.ceil(min(seen.work_s / policy.target_s, policy.max_workers))
    least = max(_floor(policy, seen), seen.sequence_workers, int(seen.entries > 0))
    return min(max(by_work, least), policy.max_workers)


def _floor(policy: ScalingPolicy, seen: QueueObservation) -> int:
    return min(max(policy.min_workers, seen.floor), policy.max_workers)


def _noted(policy: ScalingPolicy, state: ScalingState, seen: QueueObservation, need: int) -> ScalingState:
    oldest_s = seen.now_s - policy.down_after_s * state.patience
    needs = tuple(one for one in state.needs if one[1] > need and one[0] > oldest_s)
    is_active = seen.entries > 0 or seen.sequence_workers > 0 or seen.executed
    return replace(
        state,
        needs=(*needs, (seen.now_s, need)),
        active_at_s=seen.now_s if is_active else state.active_at_s,
    )


def _up(
    policy: ScalingPolicy, state: ScalingState, seen: QueueObservation, wanted: int
) -> tuple[ScalingDecision, ScalingState]:
    short_since_s = seen.now_s if state.short_since_s is None else state.short_since_s
    state = replace(state, short_since_s=short_since_s)
    floor = _floor(policy, seen)
    is_time = seen.now_s - short_since_s >= policy.up_after_s
    target = wanted if is_time else max(state.target, floor, min(wanted, 1))
    if target == state.target:
        reason = f"{wanted} are wanted for {seen.now_s - short_since_s:.0f} s of {policy.up_after_s:g} s"
        return ScalingDecision(target=target, wanted=wanted, reason=reason), state
    why = _why_so_many(policy, seen, wanted)
    patience = _patience(policy, state, seen.now_s)
    grown = replace(state, target=target, grown_at_s=seen.now_s, short_since_s=None, patience=patience)
    return ScalingDecision(target=target, wanted=wanted, reason=why), grown


def _patience(policy: ScalingPolicy, state: ScalingState, now_s: float) -> int:
    """Doubles when a step up reverts a recent step down."""
    was_hasty = now_s - state.shrunk_at_s < 2 * policy.down_after_s * state.patience
    return min(state.patience * 2, MAX_PATIENCE) if was_hasty else 1


def _why_so_many(policy: ScalingPolicy, seen: QueueObservation, wanted: int) -> str:
    if wanted <= seen.sequence_workers and seen.work_s <= policy.target_s * (wanted - 1):
        return _why_for_sequences(policy, seen)
    if wanted == seen.floor and seen.work_s <= policy.target_s * (wanted - 1):
        return f"a model needs {seen.floor} live"
    if wanted == policy.min_workers and not seen.entries:
        return f"the minimum is {policy.min_workers}"
    what = f"{seen.work_s:.1f} s of work at {policy.target_s:g} s a worker"
    if seen.work_s > policy.target_s * policy.max_workers:
        asked = math.ceil(min(seen.work_s / policy.target_s, 1e6))
        return f"{what} asks for {asked}, the maximum is {policy.max_workers}"
    return what


def _why_for_sequences(policy: ScalingPolicy, seen: QueueObservation) -> str:
    what = f"open sequences need the slots of {seen.sequence_workers}"
    if seen.sequence_workers > policy.max_workers:
        return f"{what}, the maximum is {policy.max_workers}"
    return what


def _down(policy: ScalingPolicy, state: ScalingState, seen: QueueObservation, wanted: int) -> ScalingDecision:
    floor, target, now_s = _floor(policy, seen), state.target, seen.now_s

    def stay(reason: str) -> ScalingDecision:
        return ScalingDecision(target=target, wanted=wanted, reason=reason)

    if wanted >= target or target <= floor:
        return stay("enough")
    cooldown_s = max(policy.cooldown_s, LOAD_MARGIN * seen.load_s)
    idle_s = now_s - state.active_at_s
    if now_s - state.grown_at_s < cooldown_s:
        return stay(f"{now_s - state.grown_at_s:.0f} s of {cooldown_s:.0f} s after the last step up")
    if idle_s >= policy.idle_s and wanted <= floor:
        return ScalingDecision(target=floor, wanted=wanted, reason=f"nothing to do for {idle_s:.0f} s")
    lower = max(*(need for _, need in state.needs), floor, 1)
    after_s, watched_s = policy.down_after_s * state.patience, now_s - state.since_s
    if lower < target and watched_s >= after_s and not seen.starting:
        return ScalingDecision(target=lower, wanted=wanted, reason=f"{lower} sufficed for {after_s:g} s")
    return stay("enough" if lower >= target else f"{lower} may suffice, after {after_s:g} s of lower demand")


class Throughput:
    """Estimates how many workers the throughput of the last `over_s` seconds keeps busy.

    While work waited all the time, all workers were busy, and their throughput corrects the measured speed of one.
    """

    def __init__(self, over_s: float = 10.0) -> None:
        self._over_s = over_s
        self._totals: deque[_Total] = deque()
        self._correction = 1.0
        self.executed = False
        """Whether anything was, between the last two observations."""

    def observe(
        self, now_s: float, rows: Mapping[Version, int], rows_per_s: Mapping[Version, float], live: int, work_s: float
    ) -> float:
        """Takes totals of executed rows; returns how many workers they keep busy."""
        totals = self._totals
        self.executed = bool(totals) and any(count > totals[-1].rows.get(key, 0) for key, count in rows.items())
        totals.append(_Total(now_s, dict(rows), live if work_s > live * FULL_S else 0))
        while len(totals) > 2 and totals[1].at_s <= now_s - self._over_s:
            totals.popleft()
        first = totals[0]
        if now_s <= first.at_s:
            return 0.0
        share = sum(
            max(count - first.rows.get(key, count), 0) / rows_per_s[key]
            for key, count in rows.items()
            if rows_per_s.get(key, 0.0) > 0
        )
        used = share / (now_s - first.at_s)
        if used and now_s - first.at_s >= self._over_s and {one.busy for one in totals} == {live} != {0}:
            self._correction = min(max(live / used, 1 / MAX_CORRECTION), MAX_CORRECTION)
        return used * self._correction


RECORD_TTL_S = 15.0
"""The time after which others take an autoscaler's share."""


def policy_of_all(policy: ScalingPolicy, others: Iterable[ScalerRecord]) -> ScalingPolicy:
    """Returns a policy with the sums of all limits."""
    others = tuple(others)
    return replace(
        policy,
        min_workers=policy.min_workers + sum(one.min_workers for one in others),
        max_workers=policy.max_workers + sum(one.max_workers for one in others),
    )


def apportion(total: int, peers: Iterable[ScalerRecord]) -> dict[str, int]:
    """Divides workers among autoscalers, starting from their present shares (`target`).

    A further worker goes to the autoscaler that is then least full relative to its maximum; a surplus worker comes from
    an autoscaler with unready workers, else from the fullest. The id decides ties.
    """
    by_id = {one.id: one for one in peers}
    shares = {id_: min(max(one.target, one.min_workers), one.max_workers) for id_, one in by_id.items()}

    def fullness_with_one_more(id_: str) -> tuple[float, str]:
        return (shares[id_] + 1) / by_id[id_].max_workers, id_

    def readiness_to_give(id_: str) -> tuple[bool, float, str]:
        one, share = by_id[id_], shares[id_]
        return share > one.live, share / one.max_workers, id_

    for _ in range(total - sum(shares.values())):
        room = [id_ for id_, one in by_id.items() if shares[id_] < one.max_workers]
        if room:
            shares[min(room, key=fullness_with_one_more)] += 1
    for _ in range(sum(shares.values()) - total):
        spare = [id_ for id_, one in by_id.items() if shares[id_] > one.min_workers]
        if spare:
            shares[max(spare, key=readiness_to_give)] -= 1
    return shares


@dataclass(frozen=True, slots=True, kw_only=True)
class SharedDecision:
    """The total and the own share."""

    total: ScalingDecision
    share: int
    state: ScalingState


def decide_share(
    policy: ScalingPolicy,
    state: ScalingState,
    seen: QueueObservation,
    own: ScalerRecord,
    others: Sequence[ScalerRecord],
    *,
    has_lost_peers: bool = False,
) -> SharedDecision:
    """Decides the total and the own share; an autoscaler without peers decides as `decide` does.

    Steps that other autoscalers have to take do not count as taken. If the records of peers are lost, the total stays
    as it was with these peers.
    """
    limits = policy_of_all(policy, others)
    there = own.target + sum(one.target for one in others)
    if others and not has_lost_peers:
        state = adopt(policy, state, seen.now_s, there)
    before = min(max(state.target, limits.min_workers), limits.max_workers)
    state = replace(state, target=before)
    total, after = decide(limits, state, seen)
    share = apportion(total.target, (own, *others))[own.id]
    reached = there - own.target + share
    if share == own.target and reached != total.target:
        # Another autoscaler takes the step.
        short_since_s = state.short_since_s if total.target > before else None
        after = replace(state, needs=after.needs, active_at_s=after.active_at_s, short_since_s=short_since_s)
    if share != own.target and total.target == before:
        total = replace(total, reason="the workers of an autoscaler that is gone are taken over")
    return SharedDecision(total=total, share=share, state=replace(after, target=reached))


class Peers:
    """The other autoscalers of the same models, given by the globs `places`.

    After an outage or data loss of Redis, they count as alive until they had time to write their records again.
    """

    def __init__(self, own: str, places: Iterable[str]) -> None:
        self._own = own
        self._places = frozenset(places)
        self._is_doubtful = False
        self._doubtful_until_s = 0.0
        self.others: tuple[ScalerRecord, ...] = ()
        self.has_lost_peers = False

    def distrust_missing(self) -> None:
        """Makes the next `update` treat missing records as late."""
        self._is_doubtful = True

    def update(self, now_s: float, records: Iterable[ScalerRecord]) -> None:
        """Takes all live records; if the own one is missing, others may be missing, too."""
        records = tuple(records)
        if self._is_doubtful or all(one.id != self._own for one in records):
            self._is_doubtful, self._doubtful_until_s = False, now_s + RECORD_TTL_S
        found = {one.id: one for one in records if self._is_peer(one)}
        known = {one.id: one for one in self.others}
        if now_s < self._doubtful_until_s:
            found = known | found
        self.has_lost_peers = not known.keys() <= found.keys()
        self.others = tuple(found[id_] for id_ in sorted(found))

    def _is_peer(self, record: ScalerRecord) -> bool:
        """Returns whether the other shares the work; one whose workers all fail does not."""
        runs = record.live + record.starting + record.draining > 0
        return record.id != self._own and frozenset(record.places) == self._places and (runs or not record.target)
