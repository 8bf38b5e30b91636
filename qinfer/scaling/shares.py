"""Shares of several autoscalers of the same models in the workers that the work needs: pure, from their records.

    the records of all ──▶ decide: how many for all ──▶ apportion: how many for each ──▶ each does its own share

There is no leader. All autoscalers read the same records and come to the same shares; each starts and drains only its
own workers. Shares change by as little as the total does: running workers do not move from one machine to another.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from qinfer.models.state import ScalerRecord
from qinfer.scaling.policy import Decision, Observation, ScalingPolicy, ScalingState, adopt, decide

RECORD_TTL_S = 15.0
"""Seconds for which the record of an autoscaler is valid; then the others take its share."""


def policy_of_all(policy: ScalingPolicy, others: Iterable[ScalerRecord]) -> ScalingPolicy:
    """Returns a policy whose limits are the sums of an autoscaler's own and the others'."""
    others = tuple(others)
    return replace(
        policy,
        min_workers=policy.min_workers + sum(one.min_workers for one in others),
        max_workers=policy.max_workers + sum(one.max_workers for one in others),
    )


def apportion(total: int, peers: Iterable[ScalerRecord]) -> dict[str, int]:
    """Divides a number of workers among autoscalers, beginning with their present shares (their `target`).

    One more goes to the autoscaler that it leaves least full, relative to its maximum; one less comes from one whose
    workers do not all serve, else from the fullest. So from nothing the shares are in proportion to the maxima, and
    each share grows with the total. Ties go by id.

    Args:
        total: Workers for all; raised to the sum of the minima, and lowered to the sum of the maxima.
        peers: The records of all.

    Returns:
        Id → workers, between the minimum and the maximum of each.
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
    """The decision of an autoscaler among others.

    Attributes:
        total: The decided number of all workers.
        share: The autoscaler's own part of them.
        before: The number of all workers that was decided before.
        state: The policy's new state.
    """

    total: Decision
    share: int
    before: int
    state: ScalingState


def decide_share(
    policy: ScalingPolicy,
    state: ScalingState,
    seen: Observation,
    own: ScalerRecord,
    others: Sequence[ScalerRecord],
    *,
    has_lost_peers: bool = False,
) -> SharedDecision:
    """Decides the total and the autoscaler's own share of it; without others the result is that of `decide`.

    Steps that are the others' to take do not count as taken: the state's total is the sum of the records.

    Args:
        policy: The operator's limits for this autoscaler.
        state: The policy's state.
        seen: The observation of all workers.
        own: The autoscaler's own record, with the share until now.
        others: The records of the others.
        has_lost_peers: Whether some are gone since the last decision: the total then stays as it was with them.
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
        # The step is the others' to take.
        short_since_s = state.short_since_s if total.target > before else None
        after = replace(state, needs=after.needs, active_at_s=after.active_at_s, short_since_s=short_since_s)
    if share != own.target and total.target == before:
        total = replace(total, reason="the workers of an autoscaler that is gone are taken over")
    return SharedDecision(total=total, share=share, before=before, state=replace(after, target=reached))


class Peers:
    """The other autoscalers of the same models.

    After Redis was unreachable or has lost its data, the records of live autoscalers may be missing: known ones then
    count as alive until each has had the time to write its record again.

    Args:
        own: The autoscaler's own id.
        places: Globs of the models that its workers load.

    Attributes:
        others: The latest records of the others.
        has_lost_peers: Whether one of them is gone since the last `update`.
    """

    def __init__(self, own: str, places: Iterable[str]) -> None:
        self._own = own
        self._places = frozenset(places)
        self._is_doubtful = False
        self._doubtful_until_s = 0.0
        self.others: tuple[ScalerRecord, ...] = ()
        self.has_lost_peers = False

    def distrust_missing(self) -> None:
        """Makes the next `update` treat missing records as late ones."""
        self._is_doubtful = True

    def update(self, now_s: float, records: Iterable[ScalerRecord]) -> None:
        """Takes the records of all live autoscalers, of whatever models.

        Args:
            now_s: The monotonic time of reading.
            records: The records; if the autoscaler's own is missing, others may be missing too.
        """
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
        """Tells whether an autoscaler shares the work; one whose workers all fail to run does not."""
        runs = record.live + record.starting + record.draining > 0
        return record.id != self._own and frozenset(record.places) == self._places and (runs or not record.target)
