"""The responses of a stream: server-sent events read piece by piece, and their results. Pure.

Gateways send the events `response` and `error`, and `state` of a stored request; other events are skipped
(docs/reference/http-api.md, "Streams with exact tensors").
"""

import binascii
from base64 import b64decode
from collections.abc import Iterator
from typing import Any, NamedTuple

import msgspec

from qinfer.client.results import ENDED, InferResult
from qinfer.client.steps import BY_CODE, make
from qinfer.errors import Cancelled, DeadlineExceeded, InferenceFailed, OutputMismatch, QinferError
from qinfer.wire.kserve_client import decode_response

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
