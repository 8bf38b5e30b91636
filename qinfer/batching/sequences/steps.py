"""The records of sequences in a worker: a pending step, and what the schedulers and their strategies share."""

from collections.abc import Sequence
from typing import Generic, TypeVar

import msgspec

from qinfer.batching.execution import Pending
from qinfer.batching.policy import NEVER_S, Item
from qinfer.queue.sequence_records import Place, SequenceId
from qinfer.tensors import Tensor

T = TypeVar("T", bound=Item)


class PendingStep(Pending, kw_only=True, eq=False, gc=False):
    """A step of a sequence that this worker owns.

    Attributes:
        place: The sequence, its life, and the step's number.
        token: The owner's; a commit with an older one does nothing.
        start: It is the first of its life.
        end: It is the last of its life.
        state: The states after it, by the names of their inputs; set when it was executed. Empty = to be left as
            they are: the model has none, or the step failed.
        changes_failing: The states are those after it though it failed.
    """

    place: Place
    token: int
    start: bool = False
    end: bool = False
    state: tuple[Tensor, ...] = ()
    changes_failing: bool = False


class Step(msgspec.Struct, Generic[T], kw_only=True, eq=False):
    """One request of a sequence, as far as a scheduler has to know it.

    Attributes:
        item: The request, as the caller holds it.
        sequence: Its sequence; `None` = the scheduler of an iterative model numbers it.
        start: It is the first of its sequence; of a request that is iterated, in its first iteration.
        end: It is the last of its sequence.
        number: 1, 2, … within its sequence; set by the scheduler.
        told_id: The correlation id that the model is told; `None` = that of `sequence`.
    """

    item: T
    sequence: SequenceId | None = None
    start: bool = False
    end: bool = False
    number: int = 0
    told_id: int | str | None = None


class Ready(msgspec.Struct, Generic[T], frozen=True):
    """The next step of a sequence, none of whose steps executes.

    Attributes:
        slot: The slot of the sequence, 0, 1, … within its instance.
        step: The step.
    """

    slot: int
    step: Step[T]


class Pick(msgspec.Struct, Generic[T], frozen=True):
    """The work that a strategy gives an idle instance.

    Attributes:
        rows: The rows of its next batch, `None` = padding; empty = nothing to run yet.
        wake_at_s: When to ask again, if nothing else happens.
    """

    rows: Sequence[Step[T] | None]
    wake_at_s: float = NEVER_S


class StepBatch(msgspec.Struct, Generic[T], frozen=True, eq=False):
    """Steps that an instance executes together, each of another sequence.

    Attributes:
        instance: The instance that has to execute them, 0, 1, …
        rows: A step for each row; `None` = a row of padding (READY is false).
    """

    instance: int
    rows: Sequence[Step[T] | None]

    @property
    def steps(self) -> list[Step[T]]:
        """The rows that are not padding."""
        return [step for step in self.rows if step is not None]
