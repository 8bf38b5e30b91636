"""Messages of the bridge: as delivered, as noted until the reply, and as published; and the ports to other queues.

Ids are bytes, because some producers use the 16 bytes of a UUID. Rendering is pure, and slow for large outputs.

Each source and sink serves one thread. A link is one connection: an exception other than `MessageRefused` shows that it
is broken, and a `LinkThread` opens another one, with a new epoch.
"""

import hashlib
import logging
from collections.abc import Iterator, Mapping, Sequence
from enum import StrEnum
from typing import NamedTuple, Protocol

import msgspec

from qinfer.core.messages import Failure, Response
from qinfer.errors import CorruptEntry, ErrorCode, PayloadTooLarge, QinferError
from qinfer.queue.entries import Ending, RequestState
from qinfer.wire.frame import decode_responses
from qinfer_workers.bridge.config import RouteOptions
from qinfer_workers.bridge.replies import EncodedReply, ReplyEncoding, encode, encode_error, encode_list, encode_one

REQUEST_ID_HEADER = "x-qinfer-request-id"
STATE_HEADER = "x-qinfer-state"
MODEL_HEADER = "x-qinfer-model"
VERSION_HEADER = "x-qinfer-version"
ROUTE_HEADER = "x-qinfer-route"
REASON_HEADER = "x-qinfer-reason"
CODE_HEADER = "x-qinfer-code"
INDEX_HEADER = "x-qinfer-response-index"
FINAL_HEADER = "x-qinfer-response-final"
COMPRESSION_HEADER = "compression"


class Receipt(msgspec.Struct, frozen=True, gc=False):
    """Acknowledges a message of the connection `epoch`."""

    epoch: int
    tag: int | str


class SourceMessage(msgspec.Struct, kw_only=True):
    """A message of a source; empty properties are not set.

    `broker_id` survives redelivery; `broken` says why properties can't be read.
    """

    receipt: Receipt
    body: bytes
    content_type: str = ""
    content_encoding: str = ""
    headers: Mapping[str, object] = msgspec.field(default_factory=dict)
    message_id: bytes = b""
    correlation_id: bytes = b""
    reply_to: bytes = b""
    broker_id: bytes = b""
    broken: str = ""


Refused = tuple[SourceMessage, QinferError]


class Note(msgspec.Struct, frozen=True, array_like=True):
    """The part of a message kept for the reply."""

    reply: ReplyEncoding
    message_id: bytes = b""
    reply_to: bytes = b""
    correlation_id: bytes = b""
    headers: dict[str, str] = {}


class Destination(StrEnum):
    """The destination, and what happens if no queue takes a message."""

    REPLY = "reply"
    SINK = "sink"
    DEAD_LETTER = "dead_letter"


class Outgoing(msgspec.Struct, kw_only=True, eq=False):
    """A message to publish."""

    place: Destination
    exchange: bytes = b""
    routing_key: bytes = b""
    body: bytes = b""
    content_type: str = ""
    headers: Mapping[str, str] = msgspec.field(default_factory=dict)
    message_id: bytes = b""
    correlation_id: bytes = b""
    reply_to: bytes = b""
    group: "PublishGroup"


class PublishGroup(msgspec.Struct, kw_only=True, eq=False):
    """Messages published together.

    Once `left` is 0, `ending_id` is confirmed or `receipt` acknowledged; a `failed` group is tried again.
    """

    ending_id: str = ""
    receipt: Receipt | None = None
    left: int = 0
    failed: bool = False


def identity(message: SourceMessage, id_header: str | None) -> bytes:
    """Returns a message's identity, equal at each delivery; empty = unknown."""
    if message.message_id:
        return message.message_id
    if message.reply_to and message.correlation_id:
        return message.correlation_id
    if id_header is not None and (value := message.headers.get(id_header)) not in (None, "", b""):
        return value if isinstance(value, bytes) else str(value).encode("utf-8", "surrogatepass")
    return message.broker_id


def request_id(route: str, message_id: bytes, model: str) -> str:
    """Returns a request's id, equal at each delivery, in gateways' form."""
    digest = hashlib.blake2b(route.encode() + b"\0" + message_id, digest_size=13)
    return f"{digest.hexdigest().upper()}.0.{model}"


def body_hash(message: SourceMessage) -> str:
    """Returns the hash that identifies a redelivered message."""
    digest = hashlib.sha256(message.content_type.encode("utf-8", "surrogatepass") + b"\0")
    digest.update(message.body)
    return digest.hexdigest()


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


class MessageRefused(Exception):
    """The broker closed the connection because of a published message; it does not say which one."""


class MessageSource(Protocol):
    """Consumes one queue, to which unacknowledged messages return at the end."""

    epoch: int

    def receive(self, timeout_s: float) -> list[SourceMessage]:
        """Waits for messages or `wake`; also acknowledges, and sends heartbeats."""
        ...

    def acknowledge(self, receipts: Sequence[Receipt]) -> None:
        """Acknowledges messages, maybe later; drops receipts of other connections."""
        ...

    def wake(self) -> None:
        """Ends a `receive` soon; for other threads."""
        ...

    def close(self) -> None:
        """Acknowledges settled messages, and closes the connection."""
        ...


class SettledMessages(NamedTuple):
    """Messages that a queue has, that were refused, or that no queue takes."""

    taken: Sequence[Outgoing] = ()
    refused: Sequence[Outgoing] = ()
    unroutable: Sequence[Outgoing] = ()


class MessageSink(Protocol):
    """A connection that publishes."""

    def send(self, messages: Sequence[Outgoing]) -> None:
        """Publishes without waiting for confirms."""
        ...

    def wait_settled(self, timeout_s: float) -> SettledMessages:
        """Waits for outcomes or `wake`; each message is settled once. Raises `MessageRefused`."""
        ...

    def wake(self) -> None:
        """Ends a `wait_settled` soon; for other threads."""
        ...

    def close(self) -> None:
        """Closes the connection."""
        ...
