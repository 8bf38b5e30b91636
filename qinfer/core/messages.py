"""The records that cross processes: requests, responses, failures and credits; `qinfer.wire` encodes them.

A request gets 0..n responses, of which the last is `final`. Ids are made here too: `<ulid>.<partition>.<model>` locates
the request's keys.
"""

import os
import time
from collections.abc import Mapping
from typing import Annotated, Literal, Protocol

import msgspec

from qinfer.errors import ErrorCode, InvalidRequest, QinferError
from qinfer.tensors import Tensor

Scalar = bool | int | float | str
"""A custom request parameter's value (reference §1.6)."""

MAX_SEQUENCE_ID_BYTES = 128
"""Triton's `STRING_CORRELATION_ID_MAX_LENGTH_BYTES`; longer ids are refused, or of models without sequences."""

_Natural = Annotated[int, msgspec.Meta(ge=0)]


class SequenceFlags(msgspec.Struct, frozen=True, array_like=True):
    """The sequence flags of a request (reference §3.4).

    `step` is the number, from 1, that the caller gave the request. A request with 0 has no number: its repetition is
    another step.
    """

    id: int | str
    start: bool = False
    end: bool = False
    step: int = 0

    @property
    def callers_id(self) -> int | str:
        """The caller's correlation ID."""
        return self.id

    def told(self, told_id: int | str) -> "SequenceFlags":
        """Returns the flags with `told_id`, which the model sees, in place of the caller's id."""
        if told_id == self.id:
            return self
        return ToldSequence(told_id, self.start, self.end, self.step, given_id=self.callers_id)


class ToldSequence(SequenceFlags, frozen=True, array_like=True):
    """The flags with the id that the model sees; `given_id` is the caller's id. They never leave the process."""

    given_id: int | str = 0

    @property
    def callers_id(self) -> int | str:
        """The caller's correlation ID."""
        return self.given_id


class ResourceHolder(msgspec.Struct, frozen=True, array_like=True):
    """An execution that waits for a call of another model.

    Attributes:
        token: An id that is unique among all workers; empty = the execution holds nothing: an ensemble, or a decoupled
            model whose `execute` has returned.
        units: Empty; earlier workers wrote their units of global resources.
        depth: The place of the execution in the chain of calls, from 1.
    """

    token: str
    model: str
    units: Mapping[str, int] = {}
    version: int = 0
    depth: int = 1


class Timing(msgspec.Struct, frozen=True, array_like=True):
    """The phases of a request, and the size of its batch (reference §1.13)."""

    queue_ns: int = 0
    input_ns: int = 0
    infer_ns: int = 0
    output_ns: int = 0
    batch_size: int = 0


class CalledTensor(msgspec.Struct, frozen=True, array_like=True):
    """The beginning of a tensor of a traced call."""

    is_output: bool
    name: str
    datatype: str
    shape: tuple[int, ...]
    data: bytes


class CallRecord(msgspec.Struct, frozen=True, array_like=True):
    """A call by a traced request's model, or a step of its ensemble.

    `begin_s` and `end_s`, its last response, are instants of Redis' clock.
    """

    model: str
    version: int
    client_id: str
    begin_s: float
    end_s: float
    timing: Timing | None = None
    tensors: tuple[CalledTensor, ...] = ()
    calls: tuple["CallRecord", ...] = ()

    @property
    def weight(self) -> int:
        """Returns the bytes of the record that count in `MOST_CALL_BYTES`."""
        tensors, calls = [len(tensor.data) for tensor in self.tensors], [call.weight for call in self.calls]
        return 16 * 1024 + sum(tensors) + sum(calls)


class CallTraces(msgspec.Struct, kw_only=True):
    """The records of requests that models made while they executed a traced request."""

    has_tensors: bool
    ended: tuple[CallRecord, ...] = ()

    def add(self, called: CallRecord) -> None:
        """Adds a trace if there is room."""
        if sum([call.weight for call in self.ended]) + called.weight <= MOST_CALL_BYTES:
            self.ended = (*self.ended, called)


MOST_CALL_BYTES = 2**20
"""The most bytes of the records of a request's calls: 64 calls without tensors."""


class MemoryReference(msgspec.Struct, frozen=True, array_like=True):
    """Where a pending request's tensors lie in the memory of the process that submitted it (ADR 0041).

    Attributes:
        owner: The name of the process.
        offset: The beginning of the slab in the segment; the tensors are behind its header.
        size: Bytes of the tensors.
        generation: The number of this use of the slab.
    """

    owner: str
    segment: _Natural
    offset: _Natural
    size: _Natural
    generation: _Natural


class KeptTensors(Protocol):
    """Tensors in the memory of this process, until each that holds them has released them."""

    reference: MemoryReference
    tenant: str

    def view(self) -> memoryview:
        """Returns the bytes of the tensors."""
        ...

    def hold(self) -> "KeptTensors":
        """Returns them to one more that holds them."""
        ...

    def release(self, *, unanswered: bool = False) -> None:
        """Gives the memory back with the last that holds them; once for each."""
        ...


class InferRequest(msgspec.Struct, kw_only=True):
    """One inference request, unchecked; only the dispatcher changes it.

    Attributes:
        version: The model's version; the dispatcher replaces 0 by the highest ready version.
        client_id: The `id` from the client, echoed in the reply; may be empty, need not be unique.
        outputs: The names wanted; empty = all.
        priority: 0 = the model's default.
        timeout_s: Seconds from the enqueueing to the deadline.
        reply_to: `reply:<owner>` of the process that waits; empty for asynchronous requests.
        trace: W3C `traceparent`; empty = not traced.
        queue_timeout_s: The longest wait by its model's queue policy; 0 = `timeout_s`.
        payload: The tensors' bytes are stored beside the stream (claim check).
        spares_outputs: Named outputs may be missing, as for an ensemble's step.
        calls: Traces of requests made for it; they don't travel.
        memory: Where the tensors are, if they are in the memory of the process that waits.
    """

    model: str
    inputs: tuple[Tensor, ...]
    version: int = 0
    id: str = ""
    client_id: str = ""
    outputs: tuple[str, ...] = ()
    parameters: Mapping[str, Scalar] = msgspec.field(default_factory=dict)
    priority: int = 0
    timeout_s: float = 0.0
    reply_to: str = ""
    tenant: str = ""
    trace: str = ""
    partition: int = 0
    generation: int = 0
    attempt: int = 0
    sequence: SequenceFlags | None = None
    queue_timeout_s: float = 0.0
    payload: bool = False
    holders: tuple[ResourceHolder, ...] = ()
    spares_outputs: bool = False
    calls: CallTraces | None = None
    memory: MemoryReference | None = None


class OutgoingRequest(InferRequest, kw_only=True):
    """A request in the process that submits it, with fields that the queue does not carry.

    Attributes:
        inputs_digest: For the response cache, if there is one already.
        step_key: Identifies a sequence's first request that is an ensemble's step, also when that is executed again.
        endpoint: The named one; model and version are its target's.
        assigned: The endpoint drew its target: the caller named none, and met no condition.
        moves: The endpoint's stable target may answer it if its target is rolled back.
        landed: The memory that has its tensors already, each from its `landed_at` on.
    """

    inputs_digest: bytes = b""
    step_key: str = ""
    endpoint: str = ""
    assigned: bool = False
    moves: bool = False
    landed: KeptTensors | None = None
    landed_at: tuple[int, ...] = ()

    @property
    def moves_by(self) -> str:
        """The endpoint that may move the request to another target while it waits."""
        return self.endpoint if self.moves else ""


def outgoing_call(request: InferRequest, holders: tuple[ResourceHolder, ...]) -> OutgoingRequest:
    """Returns the request that a model's call submits, without stamps other than tenant and trace."""
    return OutgoingRequest(
        model=request.model,
        inputs=request.inputs,
        version=request.version,
        client_id=request.client_id,
        outputs=request.outputs,
        parameters=request.parameters,
        priority=request.priority,
        timeout_s=request.timeout_s,
        tenant=request.tenant,
        trace=request.trace,
        sequence=request.sequence,
        holders=holders,
        spares_outputs=request.spares_outputs,
    )


class Failure(msgspec.Struct, frozen=True, array_like=True):
    """An `ErrorCode`, its text for the client, and whether a retry can help."""

    code: str
    message: str
    retryable: bool = False

    @classmethod
    def from_error(cls, error: BaseException) -> "Failure":
        """Describes an error; an error of another library becomes `internal`, without its text."""
        if isinstance(error, QinferError):
            return cls(error.code.value, error.message, error.retryable)
        return cls(ErrorCode.INTERNAL.value, "internal error; the server's log has the request id", False)


class Response(msgspec.Struct, frozen=True, kw_only=True):
    """One response to a request.

    Attributes:
        outputs: The outputs; empty with a failure, and in a decoupled model's empty final response.
        attempt: The execution that made the response; readers follow only one execution.
        index: The number of the response within the attempt.
        stored: Whether the outputs are stored beside the reply stream (`Queue.take_result`).
        parameters: Values besides the outputs (reference §1.6).
        credit_to: Gets `Credit`s, if its worker limits this stream by a window; empty on final responses.
        cache: The look-up in the response cache; local to a process.
    """

    request_id: str
    model: str = ""
    version: int = 0
    outputs: tuple[Tensor, ...] = ()
    failure: Failure | None = None
    attempt: int = 1
    index: int = 0
    final: bool = True
    timing: Timing | None = None
    stored: bool = False
    parameters: Mapping[str, Scalar] = msgspec.field(default_factory=dict)
    credit_to: str = ""
    cache: Literal["", "hit", "miss"] = ""
    called: tuple[CallRecord, ...] = ()

    @property
    def nbytes(self) -> int:
        """The bytes of the outputs."""
        size = 0
        for tensor in self.outputs:
            size += len(tensor.data)
        return size

    @property
    def says_something(self) -> bool:
        """Tells whether it is more than an empty end of the stream."""
        return not self.final or bool(self.outputs or self.parameters or self.failure is not None)


RESPONSE_OVERHEAD_BYTES = 256
"""The bytes that each response counts for beside its outputs, so that tiny ones can't fill Redis and gateways."""


class Credit(msgspec.Struct, frozen=True, array_like=True):
    """A message from a stream's reader to its worker, which makes room in the window.

    Attributes:
        taken_bytes: Since the stream began; cumulative, so that a credit may be lost or repeated.
        cancelled: The reader needs no more responses, and still takes those that the model sends.
    """

    request_id: str
    attempt: _Natural
    taken_bytes: _Natural
    cancelled: bool = False


_ALPHABET = "0123456789ABCDEFGHJKMNPQRSTVWXYZ"  # Crockford's base 32
_PAIRS = tuple(a + b for a in _ALPHABET for b in _ALPHABET)
_LAST = (1 << 20) - 1


def _base32(value: int, characters: int) -> str:
    return "".join(_ALPHABET[(value >> (5 * i)) & 31] for i in reversed(range(characters)))


class IdFactory:
    """Makes ULIDs: 48 bits of milliseconds, 60 random bits drawn anew every 2^20 ids, and a counter of 20 bits.

    Ids of one factory ascend within a draw; ids of different factories collide with a chance of 2^-60 a millisecond.
    """

    def __init__(self) -> None:
        self._millisecond = -1
        self._prefix = ""
        self._random = ""
        self._counter = 0

    def ulid(self) -> str:
        """Returns a ULID (github.com/ulid/spec)."""
        return self.new_id("")

    def new_id(self, end: str) -> str:
        """Returns a ULID and what follows it."""
        millisecond = time.time_ns() // 1_000_000
        counter = self._counter
        if not counter:
            self._random = _base32(int.from_bytes(os.urandom(8), "big") >> 4, 12)
        if millisecond != self._millisecond or not counter:
            self._millisecond = millisecond
            high, low = divmod(millisecond, 1 << 30)
            first, second, third = _PAIRS[low >> 20], _PAIRS[low >> 10 & 1023], _PAIRS[low & 1023]
            self._prefix = f"{_PAIRS[high >> 10]}{_PAIRS[high & 1023]}{first}{second}{third}{self._random}"
        self._counter = (counter + 1) & _LAST
        return f"{self._prefix}{_PAIRS[counter >> 10]}{_PAIRS[counter & 1023]}{end}"

    def request_id(self, model: str, partition: int = 0) -> str:
        """Returns `<ulid>.<partition>.<model>`."""
        return self.new_id(end_of_id(model, partition))


def end_of_id(model: str, partition: int) -> str:
    """Returns what follows the ULID in the ids of a model's requests."""
    return f".{partition}.{model}"


def parse_request_id(request_id: str) -> tuple[str, int, str]:
    """Splits an id into (ulid, partition, model)."""
    ulid, _, rest = request_id.partition(".")
    partition, _, model = rest.partition(".")
    if len(ulid) != 26 or not partition.isdecimal() or not model:
        raise InvalidRequest(f"'{request_id[:100]}' is not a request id; expected <ulid>.<partition>.<model>")
    return ulid, int(partition), model
