"""Records of sequences in the queue."""

import enum
from collections.abc import Sequence as Items
from functools import lru_cache
from typing import Annotated, NamedTuple

import msgspec

from qinfer.core.messages import Failure
from qinfer.errors import BEGIN_AGAIN, START_MISSING, InvalidRequest, QueueFull
from qinfer.queue.entries import Entry, Lease, Payload
from qinfer.tensors import Bytes, Tensor
from qinfer.wire.versions import Record

MAX_STATE_BYTES = 64 * 2**20

NOBODYS = 0
"""The token of a life without an owner; the tokens of owners begin with 1."""

# The length of `n` and a number of 64 bits.
_MAX_NUMBER = 21


class SequenceId(msgspec.Struct, frozen=True):
    """A tenant's correlation id at a model."""

    tenant: str
    correlation_id: int | str

    @property
    def name(self) -> str:
        """The spelling in keys."""
        return _spell(self.tenant, self.correlation_id)

    @classmethod
    def parse(cls, name: str) -> "SequenceId":
        """Reads a name; a damaged one matches no sequence."""
        tenant, _, rest = name.partition(":")
        is_number = rest[:1] == "n" and rest[1:].isdecimal() and len(rest) <= _MAX_NUMBER
        value = int(rest[1:]) if is_number else rest[1:]
        return cls(read_tenant(tenant), value)


@lru_cache(maxsize=65536)
def _spell(tenant: str, correlation_id: int | str) -> str:
    kind = "n" if isinstance(correlation_id, int) else "t"
    return f"{spell_tenant(tenant)}:{kind}{correlation_id}"


def spell_tenant(tenant: str) -> str:
    """Spells a tenant in its sequences' names."""
    return tenant.replace("%", "%25").replace(":", "%3A")


def read_tenant(spelled: str) -> str:
    """Reads a tenant in a sequence's name."""
    return spelled.replace("%3A", ":").replace("%25", "%")


class SequencePin(msgspec.Struct, frozen=True, kw_only=True):
    """The model that a life keeps; an `explicit` state is in the worker's memory."""

    version: int
    generation: int = 0
    is_explicit: bool = False
    idle_s: float = 1.0


class StepRequest(msgspec.Struct, frozen=True, kw_only=True):
    """One request of a sequence.

    `start` is the life's model, in its first step only; `number` the caller's `qinfer_step`, from 1 (0 = not numbered).
    `digest` identifies a repeated START; `weight` is the tenant's, in the first step (0 = unknown).
    """

    frame: Bytes
    timeout_s: float
    start: SequencePin | None = None
    end: bool = False
    number: int = 0
    digest: str = ""
    payload: Payload | None = None
    weight: int = 0


class StepPlace(msgspec.Struct, frozen=True):
    """A step of a life, both counted from 1; number 0 = the owner numbers it."""

    sequence: SequenceId
    life: int
    number: int


class SubmitLimits(NamedTuple):
    """Waiting steps per sequence, and open sequences of the partition; 0 = unlimited."""

    steps: int = 0
    open: int = 0


NO_LIMITS = SubmitLimits()


class SubmittedStep(msgspec.Struct, frozen=True):
    """A step's place; without `entry` its response is already stored."""

    place: StepPlace
    entry: Entry | None


class Renaming(NamedTuple):
    """Whether the tenant is another than the model's first, and the number that the model sees (0 = no number)."""

    is_other: bool = False
    number: int = 0


UNCHANGED = Renaming()


class OwnedLife(msgspec.Struct, frozen=True, kw_only=True):
    """A life that a worker now owns, since this `era`; it has a `state` if steps are committed.

    So many owners have died (`deaths`) since the last commit. `done` has the numbers of committed entries that may be
    unanswered, `closed` the lanes of former owners, which may have steps of the life (`Sequences.left_steps`).
    """

    sequence: SequenceId
    life: int
    token: int
    committed: int
    generation: int
    is_explicit: bool
    idle_s: float
    told: Renaming = UNCHANGED
    era: bytes = b""
    deaths: int = 0
    done: dict[str, int] = {}
    closed: tuple[str, ...] = ()


class SlotShare(NamedTuple):
    """A tenant with open sequences, of which `held` have a slot.

    `waited_s` is the wait of its first sequence without a slot, negative without one.
    """

    tenant: str
    weight: int
    held: int
    waited_s: float


class Delivery(enum.Enum):
    """The kinds of news for an owner.

    A step by a ticket, or in the owner's lane; that a life is over, or another waits behind it; that a step's caller
    has left, or has waited until its deadline.
    """

    TICKET = "ticket"
    STEP = "step"
    OVER = "over"
    RESTART = "restart"
    CANCEL = "cancel"


class Sender(NamedTuple):
    """The gateway of a step, and how many steps it had sent: which of two steps of one gateway was sent first."""

    gateway: str = ""
    sent: int = 0


class DeliveredStep(msgspec.Struct, frozen=True):
    """News for the owner; only steps have a `lease`.

    `limit` is the most waiting steps of its sequence (0 = unlimited), of a step in the owner's lane. `entry_id` and
    `code` name a cancelled step of that lane, and why.
    """

    place: StepPlace
    token: int
    lease: Lease | None
    what: Delivery = Delivery.TICKET
    limit: int = 0
    entry_id: str = ""
    code: str = ""
    sender: Sender = Sender()


class DeliveredSteps(msgspec.Struct, frozen=True):
    """The outcome of `Sequences.take_steps`; pass `ticket` to the next call.

    If Redis may have lost confirmed writes, `era` differs from that of the call before.
    """

    ticket: str
    taken: Items[DeliveredStep]
    era: bytes = b""


class CommittedStep(msgspec.Struct, frozen=True, kw_only=True):
    """An executed step; `state` is `None` if it is unchanged, or in the model's memory.

    The record does not know whether it `ends` the life, whether the response before it is still needed
    (`keeps_previous`), and its entry, unless its caller's number is enough to know it again.
    """

    place: StepPlace
    token: int
    response: Bytes
    state: Bytes | None = None
    idle_s: float = 0.0
    ends: bool = False
    keeps_previous: bool = False
    entry_id: str = ""


def done_name(entry: Entry) -> str:
    """Returns the name of a step's entry in `OwnedLife.done`: a lane and a sequence's own stream may have equal ids."""
    return f"steps/{entry.entry_id}" if entry.lane.name.startswith("steps:") else entry.entry_id


class UnansweredStep(msgspec.Struct, frozen=True):
    """A step of an ended life: publish the failure, or its stored response, then `finish` it.

    A step without a number, of a closed lane, is to be submitted anew (`Sequences.move`).
    """

    place: StepPlace
    entry: Entry
    frame: bytes
    failure: Failure | None
    sender: Sender = Sender()


class SequenceCounts(NamedTuple):
    """Open and waiting sequences, and all handed over and lost so far."""

    open: int
    waiting: int
    handed_over: int
    lost: int


_QUALIFIED = "qinfer:"


def told_id(sequence: SequenceId, told: Renaming) -> int | str:
    """Returns the correlation id that a model sees, unique among all tenants.

    An id that looks qualified gets one more qualifier, so that no tenant can use an id of another tenant.
    """
    given = sequence.correlation_id
    if told.number:
        return told.number
    looks_qualified = bool(sequence.tenant) and isinstance(given, str) and given.startswith(_QUALIFIED)
    return _QUALIFIED + sequence.name if told.is_other or looks_qualified else given


NOT_KEPT = f"the response to this step of the sequence is no longer kept; {BEGIN_AGAIN}"
"""The error of a repeated step without a stored response."""


def start_missing(model: str, correlation_id: int | str) -> InvalidRequest:
    """Returns the error for a request that is no START of a sequence that is not open (reference §3.4)."""
    return InvalidRequest(f"inference request for sequence {correlation_id} to model '{model}' {START_MISSING}")


def step_gap(model: str, place: StepPlace, expected: int) -> InvalidRequest:
    """Returns the error for a numbered step that is sent before the one in front of it."""
    of = f"sequence {place.sequence.correlation_id} to model '{model}'"
    return InvalidRequest(f"step {place.number} of {of} leaves a gap: send step {expected} first")


def step_old(model: str, place: StepPlace, committed: int) -> InvalidRequest:
    """Returns the error for a repeated step whose response is no longer kept."""
    of = f"sequence {place.sequence.correlation_id} to model '{model}'"
    return InvalidRequest(
        f"the response to step {place.number} of {of} is no longer kept: step {committed} is committed"
    )


def steps_full(model: str) -> QueueFull:
    """Returns the error for a step, or a START, behind too many others."""
    return QueueFull(f"too many steps or sequences wait at model '{model}'; try again later")


def ended_text(model: str, correlation_id: int | str, number: int, reason: str) -> str:
    """Returns the text for steps behind the one that ended the sequence."""
    return f"sequence {correlation_id} of model '{model}' was ended at step {number}: {reason}; {BEGIN_AGAIN}"


class _State(msgspec.Struct, array_like=True, gc=False):
    name: str
    datatype: str
    shape: tuple[Annotated[int, msgspec.Meta(ge=0)], ...]
    data: bytes


class _States(msgspec.Struct, array_like=True):
    states: list[_State]


_RECORD = Record(_States, "the state of a sequence")


def encode_states(states: tuple[Tensor, ...]) -> bytes:
    """Encodes a step's states, by input name."""
    return _RECORD.encode(_States([_State(s.name, s.datatype, s.shape, bytes(s.data)) for s in states]))


def decode_states(raw: bytes) -> tuple[Tensor, ...]:
    """Decodes states."""
    return tuple(Tensor(s.name, s.datatype, s.shape, s.data) for s in _RECORD.decode(raw).states)
