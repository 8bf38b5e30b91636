"""A life of a sequence in its owner's memory: its steps, the number of the next one, and what ends it.

The service does what this decides.
"""

import asyncio
import enum
import time

from qinfer.core.messages import InferRequest
from qinfer.errors import QinferError
from qinfer.queue.entries import Entry
from qinfer.queue.sequences.records import (
    OwnedLife,
    StepPlace,
    UnansweredStep,
    start_missing,
    step_gap,
    step_old,
    steps_full,
    told_id,
)

NEVER = 2**63


class StepFate(enum.Enum):
    """The fates of an accepted step.

    A new one is executed; a repeated one waits for the first of its number, or is answered.
    """

    NEW = enum.auto()
    WAITS = enum.auto()
    ANSWERED = enum.auto()


class HeldLife:
    """A life of a sequence that this worker owns.

    `executed` is the last step that is or will be committed. From step `ends_at` on, nothing is executed; Redis gets
    the error `ending` once earlier steps are committed. `entries` are those of uncommitted steps, `repeated` duplicates
    that wait for the first response; `arriving` reads the last payload.

    `accepted` counts the steps, END is at `last` (0 = not there yet), and `direct` has the unanswered steps of lanes.
    If another life waits behind it (`is_restarted`), it ends once they are answered. `told` are the entries of the
    sequence's own stream that were read.
    """

    def __init__(self, owned: OwnedLife) -> None:
        self.owned = owned
        self.committed = self.executed = self.accepted = owned.committed
        self.ends_at = NEVER
        self.ending: QinferError | None = None
        self.error: QinferError | None = None
        self.entries: dict[int, str] = {}
        self.last = 0
        self.is_restarted = False
        self.direct: dict[int, UnansweredStep] = {}
        self.repeated: list[UnansweredStep] = []
        self.told: set[str] = set()
        self.arriving: asyncio.Task[None] | None = None
        self.since_s = time.monotonic()
        self._told_id = told_id(owned.sequence, owned.told)

    @property
    def next_place(self) -> StepPlace:
        """The place of the first step that is not executed."""
        return self.place(self.executed + 1)

    def place(self, number: int) -> StepPlace:
        """Returns the place of a step."""
        return StepPlace(self.owned.sequence, self.owned.life, number)

    def set_told_id(self, request: InferRequest) -> None:
        """The id differs from those of other tenants' sequences."""
        if request.sequence is not None:
            request.sequence = request.sequence.told(self._told_id)

    def judge(self, model: str, number: int, limit: int) -> StepFate | QinferError:
        """Returns the fate of a step in the owner's lane, or why it is refused.

        `limit` is the most steps of the sequence that may wait; 0 = unlimited.
        """
        if number in self.entries:
            return StepFate.WAITS
        if number < self.committed:
            return step_old(model, self.place(number), self.committed)
        if number <= self.accepted:
            return StepFate.ANSWERED
        if number > self.accepted + 1:
            return step_gap(model, self.place(number), self.accepted + 1)
        if self.last:
            return start_missing(model, self.owned.sequence.correlation_id)
        return steps_full(model) if 0 < limit <= len(self.entries) else StepFate.NEW

    def accept(self, number: int, entry: Entry, *, is_end: bool) -> None:
        """Counts a new step."""
        self.accepted = number
        self.last = number if is_end else 0
        self.entries[number] = entry.entry_id
