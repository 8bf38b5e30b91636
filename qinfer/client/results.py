"""The return values of the client's calls, and how they are read from streams. Pure.

Gateways send the server-sent events `response` and `error`, and `state` of a stored request; other events are skipped
(docs/reference/http-api.md, "Streams with exact tensors").
"""

import binascii
from base64 import b64decode
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple
from urllib.parse import quote

import msgspec
import numpy.typing as npt

from qinfer.client.steps import BY_CODE, make
from qinfer.core.messages import Response
from qinfer.errors import Cancelled, DeadlineExceeded, InferenceFailed, InvalidRequest, OutputMismatch, QinferError
from qinfer.tensors import Tensor, to_numpy
from qinfer.wire.kserve_client import decode_response

Array = npt.NDArray[Any]
_Plain = tuple[str, str, tuple[int, ...], bytes]

MAX_NAME_CHARACTERS = 4096
"""Gateways accept fewer characters."""

ENDED = ("succeeded", "failed", "expired", "cancelled")


class InferResult(Mapping[str, Array]):
    """A model's outputs by name, as arrays: BYTES are arrays of `bytes`, BF16 is float32.

    Arrays are read-only, because they share memory with the reply; copy one to write to it. BYTES and BF16 are
    converted at each access.

    Attributes:
        model: The model that answered.
        version: The model's version.
        id: The `id` of the request; may be empty.
        tensors: The outputs as they were sent, with their datatypes.
    """

    __slots__ = ("_by_name", "id", "model", "tensors", "version")

    def __init__(self, response: Response, client_id: str = "") -> None:
        self.model = response.model
        self.version = response.version
        self.id = client_id
        self.tensors: tuple[Tensor, ...] = response.outputs
        self._by_name = {tensor.name: tensor for tensor in response.outputs}

    def __getitem__(self, name: str) -> Array:
        """Returns an output.

        Raises:
            KeyError: The reply has no output of that name.
            InvalidRequest: The output's bytes do not fill its shape.
        """
        return to_numpy(self._by_name[name])

    def __iter__(self) -> Iterator[str]:
        """Returns the outputs' names in the reply's order."""
        return iter(self._by_name)

    def __len__(self) -> int:
        """Returns the number of outputs."""
        return len(self._by_name)

    def __reduce__(self) -> tuple[object, ...]:
        """Returns the data for `pickle` and `copy`: names, numbers and bytes, without views of a reply."""
        tensors = tuple((one.name, one.datatype, one.shape, bytes(one.data)) for one in self.tensors)
        return _restored, (self.model, self.version, self.id, tensors)

    def __repr__(self) -> str:
        outputs = ", ".join(f"{tensor.name}: {tensor.datatype} {list(tensor.shape)}" for tensor in self.tensors)
        return f"<InferResult of {self.model} version {self.version}: {outputs}>"


def _restored(model: str, version: int, client_id: str, tensors: Iterable[_Plain]) -> InferResult:
    outputs = tuple(Tensor(name, datatype, shape, data) for name, datatype, shape, data in tensors)
    return InferResult(Response(request_id="", model=model, version=version, outputs=outputs), client_id)


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestHandle:
    """An asynchronous request: what `submit` returns, and `result`, `status` and `cancel` take.

    Attributes:
        id: The request's id.
        url: The request's path on the gateway.
    """

    id: str
    url: str

    @classmethod
    def of(cls, request_id: str) -> "RequestHandle":
        """Returns the handle of a request by the id that the server made, for instance in another process."""
        return cls(id=request_id, url=f"/v1/requests/{path_part('the request id', request_id)}")

    @classmethod
    def named(cls, model: str, request_id: str) -> "RequestHandle":
        """Returns the handle of a request by the id that its caller chose, which is unique within its model."""
        path = f"/v1/models/{path_part('the model', model)}/requests/{path_part('the request id', request_id)}"
        return cls(id=request_id, url=path)


def handle_of(request: RequestHandle | str) -> RequestHandle:
    """Returns a handle unchanged, or the handle of a server-made id."""
    return request if isinstance(request, RequestHandle) else RequestHandle.of(request)


def path_part(what: str, name: str) -> str:
    """Quotes a name for a path."""
    if not isinstance(name, str):
        raise InvalidRequest(f"{what} is of type {type(name).__name__}; make it a text")
    if len(name) > MAX_NAME_CHARACTERS:
        raise InvalidRequest(f"{what} has {len(name)} characters; {MAX_NAME_CHARACTERS} are the most")
    try:
        return quote(name, safe="")
    except UnicodeEncodeError as error:
        raise InvalidRequest(f"{what} can't be written as UTF-8: {error.reason}") from None


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestStatus:
    """The state of an asynchronous request.

    Attributes:
        id: The request's id.
        model: The model.
        version: The model's version.
        state: `queued`, `running`, `succeeded`, `failed`, `expired` or `cancelled`.
        fields: All fields of the gateway's answer, such as times and number of attempts.
    """

    id: str
    model: str
    version: int
    state: str
    fields: Mapping[str, Any]

    @property
    def has_ended(self) -> bool:
        """True if the state is final."""
        return self.state in ENDED


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelStatistics:
    """The statistics of a model version since it was loaded, over all workers.

    Attributes:
        name: The model's name.
        version: The version.
        inference_count: Rows that were executed.
        execution_count: Executions; rows per execution are the mean batch.
        last_inference: Milliseconds since 1970 of the last request; 0 = there was no request.
        fields: All fields of the gateway's answer, as Triton has them: `inference_stats`, `batch_stats` and others.
    """

    name: str
    version: str
    inference_count: int = 0
    execution_count: int = 0
    last_inference: int = 0
    fields: Mapping[str, Any] = field(default_factory=dict)


_END = b"\n\n"


class StreamEvent(NamedTuple):
    """A server-sent event; `id` may be empty."""

    name: str
    data: list[bytes]
    id: str = ""


class EventReader:
    """Reads events from the pieces of a reply, which end anywhere."""

    def __init__(self) -> None:
        self._text = bytearray()

    def feed(self, piece: bytes) -> Iterator[StreamEvent]:
        """Yields the events that this piece completes, without comments."""
        searched = max(len(self._text) - 1, 0)
        self._text += piece
        begin = 0
        while (end := self._text.find(_END, max(begin, searched))) >= 0:
            event = _event(bytes(self._text[begin:end]))
            begin = end + len(_END)
            if event is not None:
                yield event
        del self._text[:begin]


class Follower:
    """Follows a stored request by its events; the next connection continues after the event `seen`."""

    def __init__(self) -> None:
        self.seen = ""
        self.has_ended = False

    def result_of(self, event: StreamEvent) -> InferResult | None:
        """Returns an event's result, if any; raises the error of a request that ended badly."""
        result = result_of(event)
        self.seen = event.id or self.seen
        if event.name == "state":
            self._apply_state(_object(b"\n".join(event.data)))
        return result

    def _apply_state(self, record: dict[str, Any]) -> None:
        state, problem = record.get("state"), record.get("error")
        self.has_ended = state in ENDED
        if not self.has_ended or state == "succeeded":
            return
        problem = problem if isinstance(problem, dict) else {}
        other = {"expired": DeadlineExceeded, "cancelled": Cancelled}.get(str(state), InferenceFailed)
        raise make(BY_CODE.get(str(problem.get("code")), other), str(problem.get("message") or f"the request {state}"))


def result_of(event: StreamEvent) -> InferResult | None:
    """Returns an event's result, if any; raises the error of a failed stream."""
    if event.name == "error":
        raise error_of(b"\n".join(event.data))
    if event.name != "response" or not event.data:
        return None
    text, *binary = event.data
    try:
        outputs = b64decode(b"".join(binary), validate=True)
    except binascii.Error as error:
        raise OutputMismatch(f"the binary outputs of a response can't be read: {error}") from None
    response, client_id = decode_response(text + outputs, len(text))
    return InferResult(response, client_id)


def object_of(event: StreamEvent) -> dict[str, Any] | None:
    """Returns the JSON object of generate_stream's event, if any; raises the error of a failed stream."""
    if event.name != "message" or not event.data:
        return None
    data = b"\n".join(event.data)
    found = _object(data)
    # In a response, `model_name` accompanies an output named `error`.
    if "error" in found and "model_name" not in found:
        raise error_of(data)
    return found


def error_of(data: bytes) -> QinferError:
    """Returns the error in an event's data, by its code."""
    problem = _object(data)
    message = str(problem.get("error", "the stream failed without a reason"))
    return make(BY_CODE.get(str(problem.get("code")), InferenceFailed), message)


def _object(text: bytes) -> dict[str, Any]:
    """Any other text gives an empty object."""
    try:
        return msgspec.json.decode(text, type=dict[str, Any])
    except (msgspec.DecodeError, UnicodeDecodeError):
        return {}


def _event(block: bytes) -> StreamEvent | None:
    name, event_id, data = "message", "", []
    for line in block.split(b"\n"):
        field, _, value = line.partition(b":")
        value = value.removeprefix(b" ")
        if field == b"event":
            name = value.decode(errors="replace")
        elif field == b"id":
            event_id = value.decode(errors="replace")
        elif field == b"data":
            data.append(value)
    return StreamEvent(name, data, event_id) if data else None
