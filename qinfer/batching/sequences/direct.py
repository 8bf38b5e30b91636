"""The strategy `direct`: a sequence has one row of an instance's batches (reference §3.4)."""

from collections.abc import Sequence

from qinfer.batching.policy import Latency
from qinfer.batching.sequences.steps import Pick, Ready, SequenceStep, T
from qinfer.models.sequence_spec import DirectSpec


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
