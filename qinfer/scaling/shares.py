"""How several autoscalers of the same models share the workers that the work asks for: pure, from their records.

    the records of all ──▶ decide: how many for all ──▶ apportion: how many for each ──▶ each does its own share

Nobody leads. Each goes by the same records and comes to the same shares; it starts and drains only its own workers.
Shares change by as little as the number for all does: what runs is not moved from one machine to another.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from qinfer.models.state import ScalerRecord
from qinfer.scaling.policy import Decision, Observation, ScalingPolicy, ScalingState, adopt, decide

RECORD_TTL_S = 15.0
"""Seconds for which what an autoscaler said holds; then the others take its share."""


def policy_of_all(policy: ScalingPolicy, others: Iterable[ScalerRecord]) -> ScalingPolicy:
    """Returns a policy with the limits of all: one's own, and those of the others, summed."""
    others = tuple(others)
    return replace(
        policy,
        min_workers=policy.min_workers + sum(one.min_workers for one in others),
        max_workers=policy.max_workers + sum(one.max_workers for one in others),
    )


def apportion(total: int, peers: Iterable[ScalerRecord]) -> dict[str, int]:
    """Divides a number of workers among autoscalers, from the shares that they have (their `target`).

    One more goes to the one that is least full with it, for its most; one less comes from one that has workers which do
    not serve, else from the fullest. So from nothing the shares are in proportion to the most workers, and the more
    there are in all, the more each has. Ties go by id.

    Args:
        total: Workers for all; below the sum of the fewest it is that sum, and likewise above.
        peers: The records of all.

    Returns:
        Id → workers, between the fewest and the most of each.
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
    """What an autoscaler among others decided.

    Attributes:
        total: How many workers there should be in all.
        share: How many of them are its own.
        before: How many there should have been in all until now.
        state: What to remember.
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
    is_left: bool = False,
) -> SharedDecision:
    """Decides for all, and what of it is one's own to do; without others it is what `decide` decides.

    What is for others to do is not remembered as done: the number in all is what their records add up to.

    Args:
        policy: The operator's will, with one's own limits.
        state: What was remembered.
        seen: What is seen of all workers.
        own: One's own record, with the share until now.
        others: The records of the others.
        is_left: Whether some are gone since the last decision: there are to be as many workers as with them.
    """
    limits = policy_of_all(policy, others)
    there = own.target + sum(one.target for one in others)
    if others and not is_left:
        state = adopt(policy, state, seen.now_s, there)
    before = min(max(state.target, limits.min_workers), limits.max_workers)
    state = replace(state, target=before)
    total, after = decide(limits, state, seen)
    share = apportion(total.target, (own, *others))[own.id]
    reached = there - own.target + share
    if share == own.target and reached != total.target:  # the others' to do
        short_since_s = state.short_since_s if total.target > before else None
        after = replace(state, needs=after.needs, active_at_s=after.active_at_s, short_since_s=short_since_s)
    if share != own.target and total.target == before:
        total = replace(total, reason="those of an autoscaler that is gone are taken over")
    return SharedDecision(total=total, share=share, before=before, state=replace(after, target=reached))


class Peers:
    """Tells which other autoscalers there are for the same models, look by look.

    After a time in which Redis could not be read, or has lost what it knew, records are missing of autoscalers that
    live: those that were known are taken to live until each has had the time to write again.

    Args:
        own: One's own id.
        places: Globs of the models that one's workers load.

    Attributes:
        others: The latest records of the others.
        is_left: Whether one of them is gone since the look before.
    """

    def __init__(self, own: str, places: Iterable[str]) -> None:
        self._own = own
        self._places = frozenset(places)
        self._is_doubtful = False
        self._doubtful_until_s = 0.0
        self.others: tuple[ScalerRecord, ...] = ()
        self.is_left = False

    def doubt(self) -> None:
        """Has the next look take missing records for late ones."""
        self._is_doubtful = True

    def see(self, now_s: float, records: Iterable[ScalerRecord]) -> None:
        """Takes the records of all live autoscalers, whatever their models.

        Args:
            now_s: When they were read; monotonic.
            records: The records; without one's own others may be missing too.
        """
        records = tuple(records)
        if self._is_doubtful or all(one.id != self._own for one in records):
            self._is_doubtful, self._doubtful_until_s = False, now_s + RECORD_TTL_S
        found = {one.id: one for one in records if self._is_peer(one)}
        known = {one.id: one for one in self.others}
        if now_s < self._doubtful_until_s:
            found = known | found
        self.is_left = not known.keys() <= found.keys()
        self.others = tuple(found[id_] for id_ in sorted(found))

    def _is_peer(self, record: ScalerRecord) -> bool:
        """Tells whether it shares the work: one whose workers all fail to run leaves it to the others."""
        runs = record.live + record.starting + record.draining > 0
        return record.id != self._own and frozenset(record.places) == self._places and (runs or not record.target)
