"""Messages of the bridge: as delivered, as noted until the reply, and as published.

Ids are bytes, because some producers use the 16 bytes of a UUID.
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
