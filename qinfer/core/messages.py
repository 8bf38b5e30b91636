"""The records that cross processes: a request, a response, a failure, a credit. `qinfer.wire` encodes them.

A response is `(request_id, attempt, index, final, outputs | failure)`: a request gets 0..n responses, of which the
last is `final`. Ids are made here too: `<ulid>.<partition>.<model>` tells every reader where the request's keys are.
"""

import os
import time
from collections.abc import Mapping
from typing import Annotated, Literal

import msgspec

from qinfer.errors import ErrorCode, InvalidRequest, QinferError
from qinfer.tensors import Tensor

Scalar = bool | int | float | str
"""A custom request parameter's value (reference §1.6)."""


class Sequence(msgspec.Struct, frozen=True, array_like=True):
    """The sequence flags of a request (reference §3.4).

    Attributes:
        id: The correlation ID.
        start: The request is the first of its sequence.
        end: It is the last.
        step: The caller's number of the request, 1, 2, …; 0 = it is not numbered, and a repeated one is another step.
    """

    id: int | str
    start: bool = False
    end: bool = False
    step: int = 0

    @property
    def callers_id(self) -> int | str:
        """The caller's correlation ID."""
        return self.id

    def told(self, told_id: int | str) -> "Sequence":
        """Returns the flags as the model is told them, with an id in place of the caller's."""
        if told_id == self.id:
            return self
        return ToldSequence(told_id, self.start, self.end, self.step, given_id=self.callers_id)


class ToldSequence(Sequence, frozen=True, array_like=True):
    """The flags with the correlation ID that the model is told; they do not travel.

    Attributes:
        given_id: The caller's correlation ID.
    """

    given_id: int | str = 0

    @property
    def callers_id(self) -> int | str:
        """The caller's correlation ID."""
        return self.given_id


class Holder(msgspec.Struct, frozen=True, array_like=True):
    """An execution that waits for a model that it calls, and what it holds meanwhile: an instance, and resources.

    Attributes:
        token: Names the execution, among all workers; empty = it holds nothing: an ensemble, or a decoupled model whose
            `execute` has returned.
        model: Its model.
        units: What it holds of resources of the rate limiter that are the same for all workers, by name.
        version: The version of its model.
        depth: Its place in the chain of calls, 1 = the model that a client asked.
    """

    token: str
    model: str
    units: Mapping[str, int] = {}
    version: int = 0
    depth: int = 1


class Timing(msgspec.Struct, frozen=True, array_like=True):
    """The time of each phase of a request, in nanoseconds, and the size of its batch (reference §1.13)."""

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


class Called(msgspec.Struct, frozen=True, array_like=True):
    """A request that was made for a traced one: a call by its model, or a step of its ensemble.

    Attributes:
        model: The model.
        version: The version that was asked.
        client_id: The id that the caller gave it.
        begin_s: When it was made, in the broker's time.
        end_s: When its last response was there.
        timing: Set where a worker executed it.
        tensors: Its inputs and outputs, if they are traced.
        calls: The requests that were made for it.
    """

    model: str
    version: int
    client_id: str
    begin_s: float
    end_s: float
    timing: Timing | None = None
    tensors: tuple[CalledTensor, ...] = ()
    calls: tuple["Called", ...] = ()

    @property
    def weight(self) -> int:
        """How much it takes of `MOST_CALL_BYTES`: its tensors, what its calls take, and 16 KiB."""
        tensors, calls = [len(tensor.data) for tensor in self.tensors], [call.weight for call in self.calls]
        return 16 * 1024 + sum(tensors) + sum(calls)


class CallTraces(msgspec.Struct, kw_only=True):
    """The traces of the requests that were made for a traced one.

    Attributes:
        has_tensors: They have tensors.
        ended: The traces of those that have ended; they travel with the last response.
    """

    has_tensors: bool
    ended: tuple[Called, ...] = ()

    def add(self, called: Called) -> None:
        """Takes a trace, unless those that were taken leave no room for it."""
        if sum([call.weight for call in self.ended]) + called.weight <= MOST_CALL_BYTES:
            self.ended = (*self.ended, called)


MOST_CALL_BYTES = 2**20
"""The traces of requests that were made for one take so much together: 64 without tensors."""


class InferRequest(msgspec.Struct, kw_only=True):
    """One inference request, checked against nothing yet; written to by the dispatcher only, which stamps it.

    Attributes:
        model: The model's name.
        version: The version asked for; 0 lets the dispatcher choose the highest ready one, and it replaces the 0.
        id: qinfer's own id, empty until the dispatcher stamps it.
        client_id: The `id` the client gave, echoed in the reply; may be empty, need not be unique.
        inputs: The input tensors, in the request's order.
        outputs: Names of the outputs wanted; empty means all.
        parameters: Custom parameters, handed to the backend.
        priority: The level asked for; 0 is the model's default.
        timeout_s: How long the answer is worth waiting for; 0 until the dispatcher stamps it.
        reply_to: The address of the process that waits, `reply:<owner>`; empty for asynchronous requests.
        tenant: Whose request it is.
        trace: W3C `traceparent`; empty when the request is not traced.
        partition: The queue partition it goes to.
        generation: The model generation that the request was checked against.
        attempt: Executions so far.
        sequence: Set for stateful models.
        queue_timeout_s: How long it may wait before it executes, by its model's queue policy; 0 = as long as its
            `timeout_s`.
        payload: True when the tensors' bytes are stored beside the stream (claim check) and not in the frame.
        holders: The executions that wait for its answer, where a model makes the request.
        inputs_digest: A hash of its inputs, where its response may be cached and they were hashed already. It does not
            travel.
        step_key: Names the first request of a sequence that is a step of an ensemble, by the ensemble's request: when
            that is executed again, it is the same. It does not travel.
        endpoint: The endpoint that it named, once its target was chosen: model and version are the target's then. It
            does not travel.
        spares_outputs: The outputs that it names may be left out, as a step of an ensemble has it.
        assigned: The endpoint drew its target: its caller named none, and met no condition on headers or parameters. It
            does not travel.
        moves: The endpoint's stable target may answer it, if its own target is rolled back while it waits. It does not
            travel in the frame.
        calls: Takes the traces of the requests that are made for it, where it is traced; what is in it does not travel.
        made_for: The position, in the batch of a model that calls, of the request that it is made for; -1 = the model
            does not say. It does not travel.
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
    sequence: Sequence | None = None
    queue_timeout_s: float = 0.0
    payload: bool = False
    holders: tuple[Holder, ...] = ()
    inputs_digest: bytes = b""
    step_key: str = ""
    endpoint: str = ""
    assigned: bool = False
    moves: bool = False
    spares_outputs: bool = False
    calls: CallTraces | None = None
    made_for: int = -1

    @property
    def moves_by(self) -> str:
        """The endpoint that may have it moved to another version while it waits; empty = none may."""
        return self.endpoint if self.moves else ""


class Failure(msgspec.Struct, frozen=True, array_like=True):
    """The reason why there are no outputs: an `ErrorCode`, its text for the client, and whether a retry can help."""

    code: str
    message: str
    retryable: bool = False

    @classmethod
    def of(cls, error: BaseException) -> "Failure":
        """Describes an error; a foreign one becomes `internal`, its text kept out of the client's sight."""
        if isinstance(error, QinferError):
            return cls(error.code.value, error.message, error.retryable)
        return cls(ErrorCode.INTERNAL.value, "internal error; the server's log has the request id", False)


class Response(msgspec.Struct, frozen=True, kw_only=True):
    """One response to a request.

    Attributes:
        request_id: The id of the request answered.
        model: The model that answered.
        version: The version that answered.
        outputs: The outputs; empty with a failure, and in a decoupled model's empty final response.
        failure: Set when the request failed.
        attempt: The execution that made it; readers follow one attempt only.
        index: 0, 1, … within the attempt.
        final: True on the last response of the request.
        timing: Set by the worker when it executed the request.
        stored: True when the outputs are stored beside the reply stream (`Queue.take_result`) and not in the blob.
        parameters: What the model returns besides its outputs (reference §1.6).
        credit_to: The reply address of the worker that counts the window of this stream, for `Credit`s; empty where
            nobody counts, as on every final response.
        cache: Whether the response cache had it, where its model uses one. It does not travel.
        called: The traces of requests that were made for it, on the final response to a traced one.
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
    called: tuple[Called, ...] = ()

    @property
    def nbytes(self) -> int:
        """Bytes of its outputs, by which the windows of streams count."""
        size = 0
        for tensor in self.outputs:
            size += len(tensor.data)
        return size

    @property
    def says_something(self) -> bool:
        """Whether it is more than the word that no other comes."""
        return not self.final or bool(self.outputs or self.parameters or self.failure is not None)


RESPONSE_OVERHEAD_BYTES = 256
"""A response takes so much more of a window than its outputs: tiny ones may not fill Redis and gateways either."""


class Credit(msgspec.Struct, frozen=True, array_like=True):
    """Word from the reader of a stream to its worker: so much was taken, and makes room in the stream's window.

    Attributes:
        request_id: The request whose responses are read.
        attempt: The execution whose responses were taken.
        taken_bytes: Bytes of outputs taken since the stream began. Cumulative, so that one that is lost, late or
            repeated does no harm.
        cancelled: The reader wants no more, and still takes what the model sends.
    """

    request_id: str
    attempt: Annotated[int, msgspec.Meta(ge=0)]
    taken_bytes: Annotated[int, msgspec.Meta(ge=0)]
    cancelled: bool = False


_ALPHABET = "0123456789ABCDEFGHJKMNPQRSTVWXYZ"  # Crockford's base 32
_PAIRS = tuple(a + b for a in _ALPHABET for b in _ALPHABET)
_LAST = (1 << 20) - 1


def _base32(value: int, characters: int) -> str:
    return "".join(_ALPHABET[(value >> (5 * i)) & 31] for i in reversed(range(characters)))


class IdFactory:
    """Makes ULIDs cheaply: 48 bits of milliseconds, 60 random bits drawn anew every 2^20 ids, and a counter of 20 bits.

    Ids of one factory ascend within a draw; ids of different factories collide with a chance of 2^-60 a millisecond.
    """

    def __init__(self) -> None:
        self._millisecond = -1
        self._prefix = ""
        self._random = ""
        self._counter = 0

    def ulid(self) -> str:
        """Returns a new ULID of 26 characters (github.com/ulid/spec)."""
        millisecond = time.time_ns() // 1_000_000
        counter = self._counter
        if not counter:
            self._random = _base32(int.from_bytes(os.urandom(8), "big") >> 4, 12)
        if millisecond != self._millisecond or not counter:
            self._millisecond = millisecond
            self._prefix = _base32(millisecond, 10) + self._random
        self._counter = (counter + 1) & _LAST
        return f"{self._prefix}{_PAIRS[counter >> 10]}{_PAIRS[counter & 1023]}"

    def request_id(self, model: str, partition: int = 0) -> str:
        """Returns a new request id, `<ulid>.<partition>.<model>`."""
        return f"{self.ulid()}.{partition}.{model}"


def parse_request_id(request_id: str) -> tuple[str, int, str]:
    """Splits a server-made id into (ulid, partition, model).

    Raises:
        InvalidRequest: It is not of that form.
    """
    ulid, _, rest = request_id.partition(".")
    partition, _, model = rest.partition(".")
    if len(ulid) != 26 or not partition.isdecimal() or not model:
        raise InvalidRequest(f"'{request_id[:100]}' is not a request id; expected <ulid>.<partition>.<model>")
    return ulid, int(partition), model
