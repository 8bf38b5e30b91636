"""Records of sequences in the queue: what is submitted, owned, taken, committed, and left unanswered."""

from collections.abc import Sequence as Items
from functools import lru_cache
from typing import NamedTuple

import msgspec

from qinfer.core.messages import Failure
from qinfer.errors import BEGIN_AGAIN, START_MISSING, InvalidRequest
from qinfer.queue.entries import Entry, Lease, Payload
from qinfer.tensors import Bytes

MAX_STATE_BYTES = 64 * 2**20
"""The largest state of a sequence; where it has several, of all together."""


NOBODYS = 0
"""Stands for the token of a life that nobody owns; those of owners begin with 1."""


_MAX_NUMBER = 21  # characters of `n` and a number of 64 bits


class SequenceId(msgspec.Struct, frozen=True):
    """A sequence within a model's partition: its tenant, and the correlation id, a number or a text."""

    tenant: str
    correlation_id: int | str

    @property
    def name(self) -> str:
        """Spells it in keys, so that no two sequences share one."""
        return _spell(self.tenant, self.correlation_id)

    @classmethod
    def of(cls, name: str) -> "SequenceId":
        """Reads a name; one that is damaged is that of no sequence."""
        tenant, _, rest = name.partition(":")
        is_number = rest[:1] == "n" and rest[1:].isdecimal() and len(rest) <= _MAX_NUMBER
        value = int(rest[1:]) if is_number else rest[1:]
        return cls(read_tenant(tenant), value)


@lru_cache(maxsize=65536)  # several calls per step
def _spell(tenant: str, correlation_id: int | str) -> str:
    kind = "n" if isinstance(correlation_id, int) else "t"
    return f"{spell_tenant(tenant)}:{kind}{correlation_id}"


def spell_tenant(tenant: str) -> str:
    """Spells a tenant in the names of its sequences."""
    return tenant.replace("%", "%25").replace(":", "%3A")


def read_tenant(spelled: str) -> str:
    """Reads a tenant in the name of a sequence."""
    return spelled.replace("%3A", ":").replace("%25", "%")


class Pin(msgspec.Struct, frozen=True, kw_only=True):
    """The model that a life of a sequence stays on from START to END.

    Attributes:
        version: The model's version, > 0.
        generation: Its generation.
        is_explicit: The state is in the model's own memory, and ends with its worker.
        idle_s: The life ends after so long without a step.
    """

    version: int
    generation: int = 0
    is_explicit: bool = False
    idle_s: float = 1.0


class Step(msgspec.Struct, frozen=True, kw_only=True):
    """One request of a sequence, to be submitted.

    Attributes:
        frame: The encoded request.
        timeout_s: Until its deadline.
        start: What its life stays on, where it is the first; `None` otherwise.
        end: It is the last one.
        number: The caller's `qinfer_step`, from 1; 0 = the step is not numbered.
        digest: Identifies the content of a START with a number: the same one sent again begins no new life.
        payload: Tensors that do not travel in the frame.
        weight: Its tenant's weight, where it is the first; 0 = not known.
    """

    frame: Bytes
    timeout_s: float
    start: Pin | None = None
    end: bool = False
    number: int = 0
    digest: str = ""
    payload: Payload | None = None
    weight: int = 0


class Place(msgspec.Struct, frozen=True):
    """A step of a life of a sequence, both counted from 1."""

    sequence: SequenceId
    life: int
    number: int


class Limits(NamedTuple):
    """The limits of `submit`; 0 = none.

    Attributes:
        steps: So many steps of one sequence wait at most.
        open: So many sequences of the partition are open at most.
    """

    steps: int = 0
    open: int = 0


NO_LIMITS = Limits()


class Submitted(msgspec.Struct, frozen=True):
    """The outcome of `submit`: where the step is; `entry` is `None` where its response is stored already."""

    place: Place
    entry: Entry | None


class Renaming(NamedTuple):
    """Says whether a model is told another id of a sequence than its own: of tenants that are not its first one.

    Attributes:
        is_other: The tenant is another one than the model's first.
        number: The number that was allotted, or reserved; 0 = none.
    """

    is_other: bool = False
    number: int = 0


UNCHANGED = Renaming()


class Owned(msgspec.Struct, frozen=True, kw_only=True):
    """A life of a sequence that a worker has become the owner of; it has a `state` where steps are committed."""

    sequence: SequenceId
    life: int
    token: int
    committed: int
    generation: int
    is_explicit: bool
    idle_s: float
    told: Renaming = UNCHANGED


class SlotShare(NamedTuple):
    """A tenant with open sequences: its weight, and how many workers have.

    Attributes:
        tenant: The tenant.
        weight: Its weight.
        held: How many sequences of it have a slot, at all workers.
        waited_s: How long the first one has waited for a slot; below 0 = none does.
    """

    tenant: str
    weight: int
    held: int
    waited_s: float


class Taken(msgspec.Struct, frozen=True):
    """A step for its sequence's owner; without a `lease` its life has ended, or only the step's caller has left."""

    place: Place
    token: int
    lease: Lease | None
    is_cancelled: bool = False


class News(msgspec.Struct, frozen=True):
    """The outcome of `take`; to be confirmed by its `ticket` with the next one."""

    ticket: str
    taken: Items[Taken]


class Committed(msgspec.Struct, frozen=True, kw_only=True):
    """A step that was executed, to be committed.

    Attributes:
        place: Which one.
        token: The owner's.
        response: The encoded response, or failure.
        state: The state after it; `None` = it has not changed, or is in the model's memory.
        idle_s: The life's idle time: so much longer a state in an object store is kept.
    """

    place: Place
    token: int
    response: Bytes
    state: Bytes | None = None
    idle_s: float = 0.0


class Unanswered(msgspec.Struct, frozen=True):
    """A step of a life that has ended: its stored response is to be published, or this failure; then `finish` it."""

    place: Place
    entry: Entry
    frame: bytes
    failure: Failure | None


class Sizes(NamedTuple):
    """Counts of a partition's sequences: open, waiting for an owner; handed over and lost since the model is known."""

    open: int
    waiting: int
    handed_over: int
    lost: int


_QUALIFIED = "qinfer:"


def told_id(sequence: SequenceId, told: Renaming) -> int | str:
    """Returns the correlation id by which a model is told of a sequence, which no sequence of another tenant has.

    A text that looks qualified is qualified, of whichever tenant: no tenant can name the id of another.
    """
    given = sequence.correlation_id
    if told.number:
        return told.number
    looks_qualified = bool(sequence.tenant) and isinstance(given, str) and given.startswith(_QUALIFIED)
    return _QUALIFIED + sequence.name if told.is_other or looks_qualified else given


NOT_KEPT = f"the response to this step of the sequence is no longer kept; {BEGIN_AGAIN}"
"""Why a repeated step has no answer."""


def start_missing(model: str, correlation_id: int | str) -> InvalidRequest:
    """Returns the error of a request without START where no such sequence is open (reference §3.4)."""
    return InvalidRequest(f"inference request for sequence {correlation_id} to model '{model}' {START_MISSING}")


def ended_text(model: str, correlation_id: int | str, number: int, reason: str) -> str:
    """Returns the error's text for a step behind the one that ended its sequence."""
    return f"sequence {correlation_id} of model '{model}' was ended at step {number}: {reason}; {BEGIN_AGAIN}"
