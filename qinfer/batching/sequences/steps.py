"""The steps of sequences in a worker, the strategies that batch them, and the turns of tenants at slots. Pure.

`direct`: a sequence has one row of an instance's batches. `oldest`: one step of each candidate is batched (reference
§3.4). Free slots go to the tenant with the fewest (`own.lua`). If all are taken, a waiting tenant gets a slot of the
one with the most, until neither has more than its share.
"""

from collections.abc import Collection, Sequence
from typing import Generic, NamedTuple, TypeVar

import msgspec

from qinfer.batching.execution import WorkItem
from qinfer.batching.policy import NEVER_S, FreeSlots, Item, Latency, Rules, decide
from qinfer.models.sequence_spec import DirectSpec, OldestSpec
from qinfer.queue.sequences.records import SequenceId, SlotShare, StepPlace
from qinfer.tensors import Tensor

T = TypeVar("T", bound=Item)

PATIENCE_S = 1.0
"""The wait for a free slot before another tenant gives one up."""

TURN_S = 10.0
"""The least time for which a tenant keeps its slot, with more tenants than slots."""


class PendingStep(WorkItem, kw_only=True, eq=False, gc=False):
    """A step of a sequence that this worker owns.

    Attributes:
        token: The owner's fencing token; a commit with an older token has no effect.
        state: The states after it, by input name; empty = unchanged.
        changes_failing: `state` holds although the step failed.
        is_direct: Its entry is in the owner's lane.
    """

    place: StepPlace
    token: int
    start: bool = False
    end: bool = False
    state: tuple[Tensor, ...] = ()
    changes_failing: bool = False
    is_direct: bool = False


class SequenceStep(msgspec.Struct, Generic[T], kw_only=True, eq=False):
    """A step as a scheduler reads it.

    Attributes:
        sequence: The id of the sequence; `None` = the scheduler of an iterative model assigns a number.
        start: Whether the step is the first of its sequence, or of its iterated request.
        number: 1, 2, … within its sequence; set by the scheduler.
        told_id: The correlation id that the model sees; `None` = the correlation id in `sequence`.
    """

    item: T
    sequence: SequenceId | None = None
    start: bool = False
    end: bool = False
    number: int = 0
    told_id: int | str | None = None


class Ready(msgspec.Struct, Generic[T], frozen=True):
    """An idle sequence's next step, and its slot."""

    slot: int
    step: SequenceStep[T]


class Pick(msgspec.Struct, Generic[T], frozen=True):
    """The next batch of an idle instance, with `None` for padding; empty if no batch begins before `wake_at_s`."""

    rows: Sequence[SequenceStep[T] | None]
    wake_at_s: float = NEVER_S


class StepBatch(msgspec.Struct, Generic[T], frozen=True, eq=False):
    """Steps that execute together; `None` = padding (READY is false)."""

    instance: int
    rows: Sequence[SequenceStep[T] | None]

    @property
    def steps(self) -> list[SequenceStep[T]]:
        """The rows that are not padding."""
        return [step for step in self.rows if step is not None]


def pick_direct(ready: Sequence[Ready[T]], now_s: float, spec: DirectSpec, latency: Latency) -> Pick[T]:
    """Makes an idle instance's batch: each step in its slot's row, padding between.

    The first step decides about the key, not the lowest slot, so that no shape starves.
    """
    first = ready[0].step.item
    chosen = [
        entry
        for entry in ready
        if entry is ready[0] or not (first.alone or entry.step.item.alone or entry.step.item.key != first.key)
    ]
    rows: list[SequenceStep[T] | None] = [None] * (max(entry.slot for entry in chosen) + 1)
    if len(ready) < spec.minimum_rows and not first.alone:
        items = [entry.step.item for entry in chosen]
        # The latest start for the earliest deadline.
        latest_s = min(item.deadline_s for item in items) - latency.estimate_s(len(rows))
        due_s = min(min(item.enqueued_s for item in items) + spec.max_queue_delay_s, latest_s)
        if due_s > now_s:
            return Pick((), due_s)
    for entry in chosen:
        rows[entry.slot] = entry.step
    return Pick(rows)


def rules_of(spec: OldestSpec, max_rows: int) -> Rules:
    """Returns the rules of the dynamic batcher."""
    return Rules(
        max_rows=max_rows,
        preferred=frozenset(spec.preferred_sizes),
        largest_preferred=max(spec.preferred_sizes),
        delay_s=spec.max_queue_delay_s,
    )


def pick_oldest(ready: Sequence[Ready[T]], now_s: float, rules: Rules, latency: Latency) -> Pick[T]:
    """Makes an idle instance's batch of the steps that are ready for longest.

    A step becomes ready when the one before it has ended. An instance's batches run one after another, which keeps the
    order of responses (`preserve_ordering`).
    """
    decision = decide([entry.step.item for entry in ready], now_s, FreeSlots(idle=1), rules, latency)
    return Pick([entry.step for entry in ready[: len(decision.run)]], decision.wake_at_s)


class SlotTurn(NamedTuple):
    """`giver` gives up a slot that a sequence has had for `least_s`."""

    giver: str
    taker: str
    least_s: float


def turns(shares: Collection[SlotShare], here: Collection[str]) -> list[SlotTurn]:
    """Decides which tenants give up slots: one per waiting tenant, longest wait first."""
    held = {share.tenant: share.held for share in shares}
    weights = {share.tenant: share.weight for share in shares}
    found: list[SlotTurn] = []
    for taker in sorted(shares, key=lambda share: -share.waited_s):
        givers = [tenant for tenant in here if tenant != taker.tenant and held.get(tenant, 0) > 0]
        if taker.waited_s < PATIENCE_S or not givers:
            continue
        giver = max(givers, key=lambda tenant: held[tenant] / weights[tenant])
        left, own = (held[giver] - 1) / weights[giver], held[taker.tenant]
        if own == 0 and held[giver] == 1:
            found.append(SlotTurn(giver, taker.tenant, TURN_S))
        elif own == 0 or left >= (own + 1) / taker.weight:
            found.append(SlotTurn(giver, taker.tenant, 0.0))
        else:
            continue
        held[giver] -= 1
        held[taker.tenant] += 1
    return found
