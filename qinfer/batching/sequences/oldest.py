"""The strategy `oldest`: one step of each candidate is batched (reference §3.4)."""

from collections.abc import Sequence

from qinfer.batching.policy import FreeSlots, Latency, Rules, decide
from qinfer.batching.sequences.steps import Pick, Ready, T
from qinfer.models.sequence_spec import OldestSpec


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
