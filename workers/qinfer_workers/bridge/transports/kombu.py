"""Opens connections to other queues: AMQP or Redis by the URL, else a transport of kombu such as SQS.

Publishing by kombu or to Redis waits for the broker's answer, which is the confirm.
"""

import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from typing import Any

from kombu import Connection

from qinfer_workers.bridge.config import SourceOptions
from qinfer_workers.bridge.content import COMPRESSION_HEADER
from qinfer_workers.bridge.messages import MessageSink, MessageSource, Outgoing, Receipt, SettledMessages, SourceMessage
from qinfer_workers.bridge.transports.amqp import CONNECT_S, HEARTBEAT_S, AmqpSink, AmqpSource, missing_queues
from qinfer_workers.bridge.transports.redis_list import ListSource, check_lists, is_redis

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
_IDLE_S = 0.25
_MOST_AT_ONCE = 100


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
