"""Rendering of published messages: predictions, errors, dead letters. Pure, and slow for large outputs."""

import logging
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

import msgspec

from qinfer.core.messages import Failure, Response
from qinfer.errors import CorruptEntry, ErrorCode, PayloadTooLarge, QinferError
from qinfer.queue.entries import Ending, RequestState
from qinfer.wire.frame import decode_responses
from qinfer_workers.bridge.config import RouteOptions
from qinfer_workers.bridge.messages import (
    CODE_HEADER,
    FINAL_HEADER,
    INDEX_HEADER,
    MODEL_HEADER,
    REASON_HEADER,
    REQUEST_ID_HEADER,
    ROUTE_HEADER,
    STATE_HEADER,
    VERSION_HEADER,
    Destination,
    Note,
    Outgoing,
    PublishGroup,
    SourceMessage,
)
from qinfer_workers.bridge.replies import EncodedReply, encode, encode_error, encode_list, encode_one

logger = logging.getLogger(__name__)

GONE = "gone"

REFUSED = "refused"

MAX_EACH = 10_000
"""They are all in memory."""

_MAX_REASON = 2000
_MAX_SHORT = 255
_MAX_KEPT_BYTES = 64 * 1024
"""The most bytes of a dead letter's headers and reasons, which must fit one AMQP frame of 128 KiB."""
_GONE_TEXT = "the prediction was computed, and has expired since"
_notes = msgspec.msgpack.Decoder(Note)


class RenderedEnd(NamedTuple):
    """The end of one request, as published."""

    state: str
    group: PublishGroup
    messages: Sequence[Outgoing]
    ending: Ending
    final: Response | None


def render(route: RouteOptions, ending: Ending, stored: Sequence[bytes] = ()) -> RenderedEnd | None:
    """Returns an ended request's messages; `None` = no recipient. `stored` are the responses before the final one."""
    try:
        note = _notes.decode(ending.notes)
    except msgspec.MsgspecError:  # damaged, or of a later version: no recipient
        logger.exception("an ended request's notes can't be read", extra={"request": ending.request_id})
        return None
    group = PublishGroup(ending_id=ending.id)
    state, responses, failure = _outcome(ending, stored)
    headers = {REQUEST_ID_HEADER: ending.request_id, STATE_HEADER: state, ROUTE_HEADER: route.name, **note.headers}
    messages: Sequence[Outgoing] = ()
    if responses:
        headers[MODEL_HEADER], headers[VERSION_HEADER] = route.model, str(responses[-1].version)
        if failure is None:
            is_stream = ending.record is not None and ending.record.decoupled
            try:
                encoded = _encoded_stream(route, note, responses) if is_stream else [encode(note.reply, responses[-1])]
                messages = [_reply(route, note, each, headers, group) for each in encoded]
            except QinferError as error:
                failure = Failure.from_error(error)
                headers[STATE_HEADER] = state = RequestState.FAILED.value
    if failure is not None:
        messages = _render_failure(route, note, failure, headers, group)
    group.left = len(messages)
    return RenderedEnd(state, group, messages, ending, responses[-1] if responses else None)


def refusal(route: RouteOptions, message: SourceMessage, error: QinferError) -> Iterator[Outgoing]:
    """Yields the error for a refused message's sender, and the dead letter."""
    code = error.code.value
    ids = {"message_id": message.message_id[:_MAX_SHORT], "correlation_id": message.correlation_id[:_MAX_SHORT]}
    if route.sink.reply_to and 0 < len(message.reply_to) <= _MAX_SHORT:
        encoded = encode_error(error.message)
        yield Outgoing(
            place=Destination.REPLY,
            routing_key=message.reply_to,
            body=encoded.body,
            content_type=encoded.content_type,
            headers={STATE_HEADER: REFUSED, ROUTE_HEADER: route.name, CODE_HEADER: code},
            group=PublishGroup(left=1),
            **ids,
        )
    yield Outgoing(
        place=Destination.DEAD_LETTER,
        routing_key=route.dead_letters.encode(),
        body=message.body,
        content_type=message.content_type[:_MAX_SHORT],
        headers=_text_headers(message.headers) | _reasons(route, code, error.message),
        reply_to=message.reply_to[:_MAX_SHORT],
        group=PublishGroup(receipt=message.receipt, left=1),
        **ids,
    )


def _text_headers(headers: Mapping[str, object]) -> dict[str, str]:
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


def _outcome(ending: Ending, stored: Sequence[bytes]) -> tuple[str, Sequence[Response], Failure | None]:
    record = ending.record
    gone = GONE, (), Failure(ErrorCode.RESULT_EXPIRED.value, _GONE_TEXT)
    if record is None:
        return gone
    responses: list[Response] = []
    if ending.blob is not None:
        try:
            responses = [response for blob in (*stored, ending.blob) for response in decode_responses(blob)]
        except (CorruptEntry, ValueError):
            logger.exception("a stored response can't be read", extra={"request": ending.request_id})
    final = responses[-1] if responses else None
    if record.state is not RequestState.SUCCEEDED:
        failure = final.failure if final is not None else None
        return record.state.value, responses, failure or Failure(record.code, record.message)
    # some may have expired
    if final is None or final.index != len(responses) - 1:
        return gone
    return record.state.value, responses, final.failure


def _encoded_stream(route: RouteOptions, note: Note, responses: Sequence[Response]) -> Iterator[EncodedReply]:
    """Encodes a stream; leaves out an empty final response, unless it is the only one."""
    saying = [response for response in responses if response.says_something]
    if route.responses == "one":
        yield encode_list(note.reply, saying)
        return
    if len(saying) > MAX_EACH:
        raise PayloadTooLarge(
            f"the stream has {len(saying)} responses, more than the {MAX_EACH} that a bridge sends one by one; set the "
            "route's 'responses' to one, or ask the model for fewer"
        )
    sent = saying or responses
    for index, response in enumerate(sent):
        encoded = encode_one(note.reply, response)
        told = {INDEX_HEADER: str(index), FINAL_HEADER: "true" if index == len(sent) - 1 else "false"}
        if response.failure is not None:
            told[CODE_HEADER] = response.failure.code
        yield encoded._replace(headers={**encoded.headers, **told})


def _render_failure(
    route: RouteOptions, note: Note, failure: Failure, headers: dict[str, str], group: PublishGroup
) -> list[Outgoing]:
    encoded = encode_error(failure.message, note.reply.client_id)
    dead_letter = Outgoing(
        place=Destination.DEAD_LETTER,
        routing_key=route.dead_letters.encode(),
        body=encoded.body,
        content_type=encoded.content_type,
        headers=headers | _reasons(route, failure.code, failure.message),
        message_id=note.message_id,
        correlation_id=note.correlation_id,
        reply_to=note.reply_to,
        group=group,
    )
    if not note.reply_to:
        return [dead_letter]
    return [dead_letter, _reply(route, note, encoded, headers | {CODE_HEADER: failure.code}, group)]


def _reply(
    route: RouteOptions, note: Note, encoded: EncodedReply, headers: dict[str, str], group: PublishGroup
) -> Outgoing:
    sink = route.sink
    is_reply = bool(note.reply_to)
    return Outgoing(
        place=Destination.REPLY if is_reply else Destination.SINK,
        exchange=b"" if is_reply else sink.exchange.encode(),
        routing_key=note.reply_to or sink.routing_key.encode(),
        body=encoded.body,
        content_type=encoded.content_type,
        headers=headers | dict(encoded.headers) if encoded.headers else headers,
        message_id=note.message_id,
        correlation_id=note.correlation_id,
        group=group,
    )


def _reasons(route: RouteOptions, code: str, text: str) -> dict[str, str]:
    return {ROUTE_HEADER: route.name, CODE_HEADER: code, REASON_HEADER: text[:_MAX_REASON]}
