"""The division of workers among several autoscalers of the same models: pure, from their records.

    the records of all ──▶ decide: how many for all ──▶ apportion: how many for each ──▶ each does its own share

There is no leader: all compute the same shares, and start and drain only their own workers. Shares change as little as
the total, because running workers do not move between machines.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from qinfer.models.state import ScalerRecord
from qinfer.scaling.policy import QueueObservation, ScalingDecision, ScalingPolicy, ScalingState, adopt, decide

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
