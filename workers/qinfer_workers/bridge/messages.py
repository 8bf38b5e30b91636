"""Messages of the bridge: as a source delivers them, as they are noted until the reply, and as they are published.

Ids are bytes: some producers put the 16 bytes of a UUID where others put text, and they go back as they came.
"""

import hashlib
from collections.abc import Mapping
from enum import StrEnum

import msgspec

from qinfer_workers.bridge.replies import ReplyEncoding

REQUEST_ID_HEADER = "x-qinfer-request-id"
STATE_HEADER = "x-qinfer-state"
MODEL_HEADER = "x-qinfer-model"
VERSION_HEADER = "x-qinfer-version"
ROUTE_HEADER = "x-qinfer-route"
REASON_HEADER = "x-qinfer-reason"
CODE_HEADER = "x-qinfer-code"
INDEX_HEADER = "x-qinfer-response-index"
FINAL_HEADER = "x-qinfer-response-final"


class Receipt(msgspec.Struct, frozen=True, gc=False):
    """The handle that acknowledges a message: its tag, valid for one connection, which is `epoch`."""

    epoch: int
    tag: int | str


class Delivered(msgspec.Struct, kw_only=True):
    """A message of a source.

    Attributes:
        receipt: To acknowledge it.
        body: Its body.
        content_type: As the producer said; empty = it did not.
        content_encoding: As the producer said.
        headers: Its headers.
        message_id: As the producer set it; empty = it did not.
        correlation_id: The same.
        reply_to: Where its sender wants the reply; empty = it does not say.
        broker_id: An id that the broker made and that survives redelivery; empty = there is none.
        broken: Why its properties can't be read; empty = they can.
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


class Note(msgspec.Struct, frozen=True, array_like=True):
    """The part of a message that is kept with its request until that has ended, to send the reply.

    Attributes:
        reply: How its body is written.
        message_id: The message's id, as it was identified.
        reply_to: Where its sender wants the reply.
        correlation_id: Goes back with it.
        headers: Headers of the message that its reply has too.
    """

    reply: ReplyEncoding
    message_id: bytes = b""
    reply_to: bytes = b""
    correlation_id: bytes = b""
    headers: dict[str, str] = {}


class Place(StrEnum):
    """The destination of an outgoing message, which determines the handling if no queue takes it."""

    REPLY = "reply"
    SINK = "sink"
    DEAD_LETTER = "dead_letter"


class Outgoing(msgspec.Struct, kw_only=True, eq=False):
    """A message to publish.

    Attributes:
        place: Its destination.
        exchange: Where to; empty = the default exchange.
        routing_key: Where to.
        body: Its body.
        content_type: Its content type.
        headers: Its headers, text.
        message_id: Its id.
        correlation_id: That of the message it answers.
        reply_to: That of a message that goes to the dead letters.
        group: The messages that it is published with.
    """

    place: Place
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
    """Messages that are published for one reason; when all are confirmed, it is done.

    Attributes:
        ending_id: The outbox's entry to confirm then; empty = none.
        receipt: The message to acknowledge then; `None` = none.
        left: How many messages are not confirmed yet.
        failed: A message of it was not taken: it is to be tried again.
    """

    ending_id: str = ""
    receipt: Receipt | None = None
    left: int = 0
    failed: bool = False


def identity(message: Delivered, id_header: str | None) -> bytes:
    """Returns the identity of a message, the same when it is delivered again; empty = it has none.

    Args:
        message: The message.
        id_header: A header that has it, where the properties do not.
    """
    if message.message_id:
        return message.message_id
    if message.reply_to and message.correlation_id:
        return message.correlation_id
    if id_header is not None and (value := message.headers.get(id_header)) not in (None, "", b""):
        return value if isinstance(value, bytes) else str(value).encode("utf-8", "surrogatepass")
    return message.broker_id


def request_id(route: str, message_id: bytes, model: str) -> str:
    """Returns the id of the request that a message becomes: the same each time that it is delivered.

    It has the form of the ids that gateways make, so that `GET /v1/requests/{id}` finds it.

    Args:
        route: The route's name.
        message_id: The message's identity.
        model: The model.
    """
    digest = hashlib.blake2b(route.encode() + b"\0" + message_id, digest_size=13)
    return f"{digest.hexdigest().upper()}.0.{model}"


def body_hash(message: Delivered) -> str:
    """Returns the hash by which a message that is delivered again is known to be the same."""
    digest = hashlib.sha256(message.content_type.encode("utf-8", "surrogatepass") + b"\0")
    digest.update(message.body)
    return digest.hexdigest()
