"""Opens connections to other queues: AMQP or Redis by the URL, else a transport of kombu such as SQS.

Publishing by kombu or to Redis waits for the broker's answer, which is the confirm. A source over a list of Redis keeps
each message until it is done:

    <list>            as producers push it (LPUSH): any text, or the envelopes of kombu and Celery
    <list>:arriving   list of the one message that woke a blocked reader
    <list>:taken      hash of id → text: messages in hand, with ids given when they were taken
    <list>:leases     sorted set of these ids by the end of their lease
    <list>:oversized  hash of id → text: too large messages, which stay there; their dead letters say so

When the leases of a killed bridge end, the next one gets its messages with the same ids.
"""

import base64
import binascii
import secrets
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from typing import Any

import msgspec
import redis
from kombu import Connection

from qinfer.errors import SettingsError
from qinfer.queue.router import load_script, ttl_ms
from qinfer_workers.bridge.amqp import CONNECT_S, HEARTBEAT_S, AmqpSink, AmqpSource, missing_queues
from qinfer_workers.bridge.config import SourceOptions
from qinfer_workers.bridge.messages import (
    COMPRESSION_HEADER,
    MessageSink,
    MessageSource,
    Outgoing,
    Receipt,
    SettledMessages,
    SourceMessage,
)

_PACKAGE = "qinfer_workers.bridge"
_TAKE = load_script("take", "now_ms", package=_PACKAGE).text
_LEASE = load_script("lease", "now_ms", package=_PACKAGE).text

LEASE_S = 30.0
"""Time until another bridge takes a killed one's messages; default of `visibility_timeout`."""

MAX_BYTES_IN_HAND = 256 * 2**20

_IDLE_S = 0.25
_BUSY_S = 0.05
_MOST_AT_ONCE = 100
_ENOUGH_BYTES = 16 * 2**20
_ENVELOPE_BYTES = 64 * 2**10  # kombu's properties and headers
_SEPARATOR, _PRIORITIES = "\x06\x16", (0, 3, 6, 9)  # kombu has a list for each priority


def is_redis(client: Connection) -> bool:
    """Returns whether a connection is to Redis."""
    return bool(client.transport.driver_name == "redis")


def check_lists(client: Connection, options: Mapping[str, Any], queues: Sequence[str]) -> None:
    """Checks options, and that queues are lists, if present."""
    _lease_s(options)
    server: Any = redis.Redis(connection_pool=client.channel().pool)
    for name in (f"{options.get('global_keyprefix', '')}{queue}" for queue in queues):
        kind = server.execute_command("TYPE", name)
        if kind not in (b"none", b"list"):
            raise SettingsError(
                f"the key '{name}' is of type {kind.decode()}, and a queue is a list; name another queue"
            )


def _lease_s(options: Mapping[str, Any]) -> float:
    given = options.get("visibility_timeout", LEASE_S)
    if isinstance(given, bool) or not isinstance(given, int | float) or not 0 < given < 10**9:
        raise SettingsError(f"options.visibility_timeout is {given!r}; give seconds, more than 0")
    return float(given)


class ListSource:
    """`MessageSource` over a list of Redis; larger entries than `max_bytes` in base64 are not fetched.

    kombu's options `visibility_timeout`, `global_keyprefix`, `priority_steps` and `sep` apply.
    """

    def __init__(self, client: Connection, options: SourceOptions, epoch: int, max_bytes: int) -> None:
        self.epoch = epoch
        given = options.options
        name = f"{given.get('global_keyprefix', '')}{options.queue}"
        separator, steps = given.get("sep", _SEPARATOR), given.get("priority_steps", _PRIORITIES)
        self._list, self._arriving, self._oversized = name, f"{name}:arriving", f"{name}:oversized"
        self._taken, self._leases = f"{name}:taken", f"{name}:leases"
        lists = (self._arriving, name, *(f"{name}{separator}{step}" for step in steps if step))
        self._keys = (self._leases, self._taken, self._oversized, *lists)
        self._lease_s = _lease_s(given)
        self._largest_bytes = max_bytes * 4 // 3 + _ENVELOPE_BYTES
        self._prefetch = options.prefetch
        self._outstanding: dict[str, int] = {}  # id → bytes
        self._outstanding_bytes = 0
        self._awake = threading.Event()
        self._renewed_s = time.monotonic()
        self._client = client
        self._redis: Any = redis.Redis(connection_pool=client.channel().pool)
        self._take_script = self._redis.register_script(_TAKE)
        self._lease_script = self._redis.register_script(_LEASE)

    def receive(self, timeout_s: float) -> list[SourceMessage]:
        """Implements `MessageSource.receive`."""
        self._renew()
        if len(self._outstanding) >= self._prefetch or self._outstanding_bytes >= MAX_BYTES_IN_HAND:
            self._awake.wait(timeout_s)
            self._awake.clear()
            return []
        self._awake.clear()
        found = self._lease_messages()
        if not found:
            # the outstanding messages are soon done
            wait_s = _BUSY_S if self._outstanding else min(timeout_s, _IDLE_S)
            move = ("BLMOVE", self._list, self._arriving, "RIGHT", "LEFT", wait_s)
            if self._redis.execute_command(*move) is not None:
                found = self._lease_messages()
        return found

    def acknowledge(self, receipts: Sequence[Receipt]) -> None:
        """Implements `MessageSource.acknowledge`."""
        done = [str(receipt.tag) for receipt in receipts if receipt.epoch == self.epoch]
        if done:
            # no transaction: a full Redis refuses it; a leftover lease is harmless
            with self._redis.pipeline(transaction=False) as pipe:
                pipe.hdel(self._taken, *done)
                pipe.zrem(self._leases, *done)
                pipe.execute()
            self._outstanding_bytes -= sum(self._outstanding.pop(tag, 0) for tag in done)

    def wake(self) -> None:
        """Ends a wait."""
        self._awake.set()

    def close(self) -> None:
        """Ends the leases of unacknowledged messages, and disconnects."""
        with suppress(redis.RedisError, OSError):
            self._set_leases(0)
        with suppress(Exception):  # may be broken
            self._client.release()

    def _lease_messages(self) -> list[SourceMessage]:
        most = min(self._prefetch - len(self._outstanding), _MOST_AT_ONCE)
        arguments = (secrets.token_hex(8), ttl_ms(self._lease_s), most, _ENOUGH_BYTES, self._largest_bytes)
        words = iter(self._take_script(self._keys, arguments))
        found: list[SourceMessage] = []
        for tag, size, text in zip(words, words, words, strict=True):
            name = tag.decode()
            if name not in self._outstanding:  # else our own, renewed too late
                self._outstanding[name] = 0 if text is None else size
                self._outstanding_bytes += self._outstanding[name]
                receipt = Receipt(self.epoch, name)
                found.append(self._too_large(receipt, tag, size) if text is None else delivered(receipt, tag, text))
        return found

    def _too_large(self, receipt: Receipt, tag: bytes, size: int) -> SourceMessage:
        reason = (
            f"the entry has {size} bytes, and the bridge takes up to {self._largest_bytes}; it is kept in the hash "
            f"'{self._oversized}' as field '{receipt.tag}'; send less in a message, or raise 'max_bytes' of the "
            "route's 'body'"
        )
        return SourceMessage(receipt=receipt, body=b"", broker_id=tag, broken=reason)

    def _renew(self) -> None:
        if time.monotonic() - self._renewed_s >= self._lease_s / 3:
            self._renewed_s = time.monotonic()
            self._set_leases(ttl_ms(self._lease_s))

    def _set_leases(self, for_ms: int) -> None:
        if self._outstanding:
            self._lease_script((self._leases,), (for_ms, *self._outstanding))


class _Properties(msgspec.Struct):
    delivery_tag: str
    body_encoding: str | None = None
    message_id: str | None = None
    correlation_id: str | None = None
    reply_to: str | None = None


class _Envelope(msgspec.Struct, rename={"content_type": "content-type", "content_encoding": "content-encoding"}):
    body: str
    properties: _Properties
    content_type: str | None = None
    content_encoding: str | None = None
    headers: dict[str, Any] | None = None


_envelopes = msgspec.json.Decoder(_Envelope)


def delivered(receipt: Receipt, tag: bytes, text: bytes) -> SourceMessage:
    """Makes a message of an entry, or of kombu's envelope in it."""
    try:
        envelope = _envelopes.decode(text) if b'"delivery_tag"' in text else None
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        envelope = None
    if envelope is None:
        return SourceMessage(receipt=receipt, body=text, broker_id=tag)
    about, broken = envelope.properties, ""
    body = envelope.body.encode("utf-8", "surrogatepass")
    if about.body_encoding == "base64":
        try:
            body = base64.b64decode(body, validate=True)
        except binascii.Error:
            broken = "the message's body is not base64, which its envelope says that it is"
    return SourceMessage(
        receipt=receipt,
        body=body,
        content_type=envelope.content_type or "",
        content_encoding=envelope.content_encoding or "",
        headers=envelope.headers or {},
        message_id=_id(about.message_id),
        correlation_id=_id(about.correlation_id),
        reply_to=_id(about.reply_to),
        broker_id=about.delivery_tag.encode() or tag,
        broken=broken,
    )


_SQS_WAIT_S = 1  # kombu's 10 s would delay acknowledgements


def open_source(options: SourceOptions, max_bytes: int, epoch: int) -> MessageSource:
    """Connects, makes a missing queue, and consumes; any exception: the broker can't be used."""
    with _connected(options.url.get_secret_value(), options.options) as client:
        if is_redis(client):
            return ListSource(client, options, epoch, max_bytes)
        return (AmqpSource if _is_amqp(client) else KombuSource)(client, options, epoch)


def open_sink(url: str, options: Mapping[str, Any], queues: Sequence[str], exchange: str = "") -> MessageSink:
    """Connects to publish, and makes missing queues."""
    with _connected(url, options) as client:
        return AmqpSink(client, queues, exchange) if _is_amqp(client) else KombuSink(client, queues)


def find_missing_queues(url: str, options: Mapping[str, Any], queues: Sequence[str], exchange: str = "") -> list[str]:
    """Returns the missing queues, if the transport can tell."""
    missing: list[str] = []
    with _connected(url, options) as client:
        if _is_amqp(client):
            missing = missing_queues(client, queues, exchange)
        elif is_redis(client):
            check_lists(client, options, queues)
        else:
            client.channel()
        client.collect()
    return missing


@contextmanager
def _connected(url: str, options: Mapping[str, Any]) -> Iterator[Connection]:
    if url.lower().startswith("sqs"):
        options = {"wait_time_seconds": _SQS_WAIT_S, **options}
    elif url.lower().startswith(("redis", "sentinel")):
        options = {"socket_timeout": 2 * CONNECT_S, "socket_keepalive": True, **options}
    client = Connection(url, connect_timeout=CONNECT_S, heartbeat=HEARTBEAT_S, transport_options=options)
    try:
        client.ensure_connection(max_retries=1, interval_start=0.0, interval_step=0.0, timeout=2 * CONNECT_S)
        yield client
    except BaseException:
        client.collect()
        raise


def _is_amqp(client: Connection) -> bool:
    return bool(client.transport.driver_name == "py-amqp")


_BATCH_S = 0.02
_FOLLOWING_S = 0.005


class KombuSource:
    """A queue that kombu emulates; waits can't be interrupted, so they are short."""

    def __init__(self, client: Connection, options: SourceOptions, epoch: int) -> None:
        self.epoch = epoch
        self._client = client
        self._channel: Any = client.channel()
        self._channel.Message = _compressed(self._channel.Message)
        self._prefetch = options.prefetch
        self._outstanding: set[str] = set()
        self._received: list[SourceMessage] = []
        self._awake = threading.Event()
        if options.declare:
            self._channel.queue_declare(options.queue, durable=True)
        self._channel.basic_qos(0, options.prefetch, False)
        self._channel.basic_consume(options.queue, no_ack=False, callback=self._on_message, consumer_tag="bridge")

    def receive(self, timeout_s: float) -> list[SourceMessage]:
        """Implements `MessageSource.receive`."""
        if len(self._outstanding) >= self._prefetch:
            self._awake.wait(timeout_s)
            self._awake.clear()
            return []
        self._awake.clear()
        wait_s = _BATCH_S if self._outstanding else min(timeout_s, _IDLE_S)  # the outstanding messages are soon done
        ends_s = time.monotonic() + wait_s + _BATCH_S
        with suppress(TimeoutError):
            while len(self._outstanding) < self._prefetch and len(self._received) < _MOST_AT_ONCE:
                self._client.drain_events(timeout=wait_s)
                wait_s = _FOLLOWING_S
                if time.monotonic() >= ends_s:
                    break
        received, self._received = self._received, []
        return received

    def acknowledge(self, receipts: Sequence[Receipt]) -> None:
        """Implements `MessageSource.acknowledge`."""
        for receipt in receipts:
            if receipt.epoch == self.epoch:
                self._channel.basic_ack(receipt.tag)
                self._outstanding.discard(str(receipt.tag))

    def wake(self) -> None:
        """Ends a wait."""
        self._awake.set()

    def close(self) -> None:
        """Puts unacknowledged messages back, and disconnects."""
        with suppress(Exception):  # it may be broken; the broker puts messages back at their timeout
            self._channel.qos.restore_unacked()  # `close` would write the messages to a file
        with suppress(Exception):
            self._channel.close()
        _release(self._client, self._channel)

    def _on_message(self, message: Any) -> None:
        self._outstanding.add(str(message.delivery_tag))
        self._received.append(_delivered(Receipt(self.epoch, message.delivery_tag), message))


class KombuSink:
    """A queue that kombu emulates.

    kombu does not tell whether connection or message fails: the message counts as refused; another connection
    continues.
    """

    def __init__(self, client: Connection, queues: Sequence[str]) -> None:
        self._client = client
        self._channel: Any = client.channel()
        self._awake = threading.Event()
        self._taken: list[Outgoing] = []
        self._refused: list[Outgoing] = []
        self._broken: Exception | None = None
        for queue in queues:
            self._channel.queue_declare(queue, durable=True)

    def send(self, messages: Sequence[Outgoing]) -> None:
        """Implements `MessageSink.send`."""
        for message in messages:
            if self._broken is not None:
                return  # the next connection sends the other messages
            try:
                self._publish(message)
                self._taken.append(message)
            except Exception as error:  # noqa: BLE001 - the boundary to kombu, whose transports raise what they like
                self._broken = error
                self._refused.append(message)

    def wait_settled(self, timeout_s: float) -> SettledMessages:
        """Implements `MessageSink.wait_settled`."""
        settled = SettledMessages(self._taken, self._refused)
        if not any(settled):
            if self._broken is not None:
                raise self._broken
            self._awake.wait(timeout_s)
        self._awake.clear()
        self._taken, self._refused = [], []
        return settled

    def wake(self) -> None:
        """Ends a wait."""
        self._awake.set()

    def close(self) -> None:
        """Closes the connection."""
        _release(self._client, self._channel)

    def _publish(self, message: Outgoing) -> None:
        properties = {
            name: value.decode("utf-8", "replace")
            for name, value in (
                ("message_id", message.message_id),
                ("correlation_id", message.correlation_id),
                ("reply_to", message.reply_to),
            )
            if value
        }
        prepared = self._channel.prepare_message(
            message.body,
            content_type=message.content_type,
            content_encoding="binary",
            headers=dict(message.headers),
            properties={**properties, "delivery_mode": 2},
        )
        exchange, routing_key = message.exchange.decode(), message.routing_key.decode("utf-8", "replace")
        self._channel.basic_publish(prepared, exchange=exchange, routing_key=routing_key)


def _compressed(kind: Any) -> Any:
    """Leaves bodies compressed: kombu decompresses without a bound."""

    class Compressed(kind):  # type: ignore[misc]  # each transport has its own
        def __init__(self, payload: dict[str, Any], channel: Any = None, **more: Any) -> None:
            headers = dict(payload.get("headers") or {})
            compression = headers.pop(COMPRESSION_HEADER, None)
            super().__init__({**payload, "headers": headers}, channel=channel, **more)
            if compression is not None:
                self.headers[COMPRESSION_HEADER] = compression

        def serializable(self) -> dict[str, Any]:
            return {**super().serializable(), "headers": dict(self.headers)}

    return Compressed


def _delivered(receipt: Receipt, message: Any) -> SourceMessage:
    properties = message.properties
    body = message.body or b""
    return SourceMessage(
        receipt=receipt,
        body=body.encode("utf-8", "surrogatepass") if isinstance(body, str) else bytes(body),
        content_type=_text_or_empty(message.content_type),
        content_encoding=_text_or_empty(message.content_encoding),
        headers=message.headers if isinstance(message.headers, dict) else {},
        message_id=_id(properties.get("message_id")),
        correlation_id=_id(properties.get("correlation_id")),
        reply_to=_id(properties.get("reply_to")),
        broker_id=_id(_broker_id(properties)),
        broken="the message's body can't be unpacked" if message.errors else "",
    )


def _broker_id(properties: Any) -> object:
    """Returns the id that the broker keeps, because SQS changes the tag at redelivery."""
    info = properties.get("delivery_info")
    sqs = info.get("sqs_message") if isinstance(info, dict) else None
    return sqs.get("MessageId") if isinstance(sqs, dict) else properties.get("delivery_tag")


def _text_or_empty(value: object) -> str:
    return value if isinstance(value, str) else ""


def _id(value: object) -> bytes:
    if value is None:
        return b""
    return value if isinstance(value, bytes) else str(value).encode("utf-8", "surrogatepass")


def _release(client: Connection, channel: Any) -> None:
    """Closes boto's connection, too, which kombu leaves open."""
    with suppress(Exception):
        client.release()
    with suppress(Exception):
        if (boto := getattr(channel, "_sqs", None)) is not None:
            boto.close()
