"""What is published: predictions, errors to callers, dead letters. Pure; large outputs take a while: use a thread."""

import logging
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import msgspec

from qinfer.core.messages import Failure, Response
from qinfer.errors import CorruptEntry, ErrorCode, QinferError
from qinfer.queue.request_records import Ending, RequestState
from qinfer.wire.frame import decode_responses
from qinfer_workers.bridge.bodies.decode import Encoded, encode, encode_error
from qinfer_workers.bridge.config import RouteOptions
from qinfer_workers.bridge.messages import (
    CODE_HEADER,
    MODEL_HEADER,
    REASON_HEADER,
    REQUEST_ID_HEADER,
    ROUTE_HEADER,
    STATE_HEADER,
    VERSION_HEADER,
    Delivered,
    Note,
    Outgoing,
    Parcel,
    Place,
)

logger = logging.getLogger(__name__)

GONE = "gone"
"""The state of a request whose answer is not kept any more."""

REFUSED = "refused"
"""The state that the sender of a message is told which was not accepted."""

_MAX_REASON = 2000
_MAX_SHORT = 255
_MAX_KEPT_BYTES = 64 * 1024
"""Of a refused message's headers: with the reasons they must fit one frame of AMQP, which has 128 KiB."""
_GONE_TEXT = "the prediction was there; the time that it is kept for is over"
_notes = msgspec.msgpack.Decoder(Note)


class Told(NamedTuple):
    """The end of one request as it is published.

    Attributes:
        state: How it ended.
        parcel: Confirmed when all of its messages are.
        messages: What is published.
    """

    state: str
    parcel: Parcel
    messages: Sequence[Outgoing]


def tell(route: RouteOptions, ending: Ending) -> Told | None:
    """Returns what is to be published of a request that ended; `None` = nothing can be said of it any more.

    Args:
        route: The route.
        ending: The end, as the outbox gave it.
    """
    try:
        note = _notes.decode(ending.notes)
    except msgspec.MsgspecError:  # of a version that is to come, or damaged: nobody knows whom to tell
        logger.exception("an ended request's notes can't be read", extra={"request": ending.request_id})
        return None
    parcel = Parcel(ending_id=ending.id)
    state, response, failure = _outcome(ending)
    headers = {REQUEST_ID_HEADER: ending.request_id, STATE_HEADER: state, ROUTE_HEADER: route.name, **note.headers}
    if response is not None:
        headers[MODEL_HEADER], headers[VERSION_HEADER] = response.model or route.model, str(response.version)
    if response is not None and failure is None:
        try:
            encoded = encode(note.reply, response)
        except QinferError as error:
            failure = Failure.of(error)
            headers[STATE_HEADER] = state = RequestState.FAILED.value
        else:
            return Told(state, parcel, _sealed(parcel, [_reply(route, note, encoded, headers, parcel)]))
    assert failure is not None
    return Told(state, parcel, _sealed(parcel, _failed(route, note, failure, headers, parcel)))


def refuse(route: RouteOptions, message: Delivered, error: QinferError) -> Outgoing:
    """Returns a message as it goes to the dead letters, with the reason.

    Args:
        route: The route.
        message: The message, acknowledged when the dead letter is confirmed.
        error: Why.
    """
    return Outgoing(
        place=Place.DEAD_LETTER,
        routing_key=route.dead_letters.encode(),
        body=message.body,
        content_type=message.content_type[:_MAX_SHORT],
        headers=_kept(message.headers) | _reasons(route, error.code.value, error.message),
        message_id=message.message_id[:_MAX_SHORT],
        correlation_id=message.correlation_id[:_MAX_SHORT],
        reply_to=message.reply_to[:_MAX_SHORT],
        parcel=Parcel(receipt=message.receipt, left=1),
    )


def refusal(route: RouteOptions, message: Delivered, error: QinferError) -> Outgoing | None:
    """Returns what the sender of a refused message is told; `None` where it gave no `reply_to`.

    Nothing waits for its confirm: should it be lost, the dead letter still tells.
    """
    if not (route.sink.reply_to and 0 < len(message.reply_to) <= _MAX_SHORT):
        return None
    encoded = encode_error(error.message)
    return Outgoing(
        place=Place.REPLY,
        routing_key=message.reply_to,
        body=encoded.body,
        content_type=encoded.content_type,
        headers={STATE_HEADER: REFUSED, ROUTE_HEADER: route.name, CODE_HEADER: error.code.value},
        message_id=message.message_id[:_MAX_SHORT],
        correlation_id=message.correlation_id[:_MAX_SHORT],
        parcel=Parcel(left=1),
    )


def _kept(headers: Mapping[str, object]) -> dict[str, str]:
    """Returns the headers that a dead letter has too: texts, as many as there is room for."""
    kept: dict[str, str] = {}
    room = _MAX_KEPT_BYTES
    for name, value in headers.items():
        if isinstance(name, str) and isinstance(value, str):
            name_bytes = len(name.encode("utf-8", "surrogatepass"))
            size = name_bytes + len(value.encode("utf-8", "surrogatepass"))
            if name_bytes <= _MAX_SHORT and size <= room:
                kept[name] = value
                room -= size
    return kept


def _outcome(ending: Ending) -> tuple[str, Response | None, Failure | None]:
    """Returns how a request ended: its state, its response, and its failure."""
    record = ending.record
    if record is None:
        return GONE, None, Failure(ErrorCode.RESULT_EXPIRED.value, _GONE_TEXT)
    response: Response | None = None
    if ending.blob is not None:
        try:
            (response,) = decode_responses(ending.blob)
        except (CorruptEntry, ValueError):
            logger.exception("a stored response can't be read", extra={"request": ending.request_id})
    if record.state is not RequestState.SUCCEEDED:
        failure = response.failure if response is not None else None
        return record.state.value, response, failure or Failure(record.code, record.message)
    if response is None:
        return GONE, None, Failure(ErrorCode.RESULT_EXPIRED.value, _GONE_TEXT)
    return record.state.value, response, response.failure


def _failed(
    route: RouteOptions, note: Note, failure: Failure, headers: dict[str, str], parcel: Parcel
) -> list[Outgoing]:
    """Returns the dead letter of a request that failed, and the error for its caller where one waits."""
    encoded = encode_error(failure.message, note.reply.client_id)
    letter = Outgoing(
        place=Place.DEAD_LETTER,
        routing_key=route.dead_letters.encode(),
        body=encoded.body,
        content_type=encoded.content_type,
        headers=headers | _reasons(route, failure.code, failure.message),
        message_id=note.message_id,
        correlation_id=note.correlation_id,
        reply_to=note.reply_to,
        parcel=parcel,
    )
    if not note.reply_to:
        return [letter]
    return [letter, _reply(route, note, encoded, headers | {CODE_HEADER: failure.code}, parcel)]


def _reply(route: RouteOptions, note: Note, encoded: Encoded, headers: dict[str, str], parcel: Parcel) -> Outgoing:
    """Returns a message for the caller, or for the route's sink."""
    sink = route.sink
    is_reply = bool(note.reply_to)
    return Outgoing(
        place=Place.REPLY if is_reply else Place.SINK,
        exchange=b"" if is_reply else sink.exchange.encode(),
        routing_key=note.reply_to or sink.routing_key.encode(),
        body=encoded.body,
        content_type=encoded.content_type,
        headers=headers | dict(encoded.headers) if encoded.headers else headers,
        message_id=note.message_id,
        correlation_id=note.correlation_id,
        parcel=parcel,
    )


def _reasons(route: RouteOptions, code: str, text: str) -> dict[str, str]:
    return {ROUTE_HEADER: route.name, CODE_HEADER: code, REASON_HEADER: text[:_MAX_REASON]}


def _sealed(parcel: Parcel, messages: list[Outgoing]) -> list[Outgoing]:
    parcel.left = len(messages)
    return messages
