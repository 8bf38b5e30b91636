"""The responses of a stream: server-sent events as they arrive, piece by piece, and the results that they carry.

Pure, so that both clients share it. The events of a gateway are `response` and `error`; others are skipped
(docs/reference/http-api.md, "Streams with exact tensors").
"""

import binascii
from base64 import b64decode
from collections.abc import Iterator
from typing import NamedTuple

import msgspec

from qinfer.client.results import InferResult
from qinfer.client.steps import BY_CODE, make
from qinfer.errors import InferenceFailed, OutputMismatch, QinferError
from qinfer.wire.kserve_client import decode_response

_END = b"\n\n"


class Event(NamedTuple):
    """A server-sent event: its name, and the lines of its data."""

    name: str
    data: list[bytes]


class EventReader:
    """Reads events from the pieces of a reply, which end anywhere."""

    def __init__(self) -> None:
        self._text = bytearray()

    def feed(self, piece: bytes) -> Iterator[Event]:
        """Yields the events that are complete with this piece; comments are none."""
        searched = max(len(self._text) - 1, 0)
        self._text += piece
        begin = 0
        while (end := self._text.find(_END, max(begin, searched))) >= 0:
            event = _event(bytes(self._text[begin:end]))
            begin = end + len(_END)
            if event is not None:
                yield event
        del self._text[:begin]


def result_of(event: Event) -> InferResult | None:
    """Returns the result that an event carries; `None` = it carries none.

    Raises:
        QinferError: It tells that the stream failed, with the error's code.
        OutputMismatch: It can't be read.
    """
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


def error_of(data: bytes) -> QinferError:
    """Returns the error that the data of an event names by its code."""
    try:
        problem = msgspec.json.decode(data, type=dict[str, str])
    except (msgspec.DecodeError, UnicodeDecodeError):
        problem = {}
    message = problem.get("error", "the stream failed, and what came does not tell why")
    return make(BY_CODE.get(problem.get("code", ""), InferenceFailed), message)


def _event(block: bytes) -> Event | None:
    name, data = "message", []
    for line in block.split(b"\n"):
        field, _, value = line.partition(b":")
        value = value.removeprefix(b" ")
        if field == b"event":
            name = value.decode(errors="replace")
        elif field == b"data":
            data.append(value)
    return Event(name, data) if data else None
