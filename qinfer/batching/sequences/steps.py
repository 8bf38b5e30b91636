"""The records of sequence steps in a worker: as it holds them, and as a scheduler reads them."""

from collections.abc import Sequence
from typing import Generic, TypeVar

import msgspec

from qinfer.batching.execution import WorkItem
from qinfer.batching.policy import NEVER_S, Item
from qinfer.queue.sequences.records import SequenceId, StepPlace
from qinfer.tensors import Tensor

T = TypeVar("T", bound=Item)


class PendingStep(WorkItem, kw_only=True, eq=False, gc=False):
    """A step of a sequence that this worker owns.

    Attributes:
        token: The owner's fencing token; a commit with an older token has no effect.
        state: The states after it, by input name; empty = unchanged.
        changes_failing: `state` holds although the step failed.
    """

    place: StepPlace
    token: int
    start: bool = False
    end: bool = False
    state: tuple[Tensor, ...] = ()
    changes_failing: bool = False


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
