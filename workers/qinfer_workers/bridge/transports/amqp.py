"""AMQP 0-9-1 (RabbitMQ): kombu opens the connection, py-amqp the channel; `amqp_frames` moves messages."""

import logging
import selectors
import socket
import time
from collections.abc import Sequence
from contextlib import suppress
from itertools import takewhile
from typing import Any

from amqp import spec
from amqp.exceptions import ChannelError, NotFound
from kombu import Connection

from qinfer_workers.bridge.config import SourceOptions
from qinfer_workers.bridge.messages import MessageRefused, Outgoing, Receipt, SettledMessages, SourceMessage
from qinfer_workers.bridge.transports.amqp_frames import (
    AckLine,
    Due,
    FrameReader,
    ReturnedMessage,
    ack_frames,
    publish_frames,
)


class Waker:
    """Waits for another owner's socket, or for `wake`."""

    def __init__(self, watched: socket.socket) -> None:
        self._watched = watched
        self._ours, self._theirs = socket.socketpair()
        self._ours.setblocking(False)
        self._theirs.setblocking(False)
        self._selector = selectors.DefaultSelector()
        self._selector.register(watched, selectors.EVENT_READ)
        self._selector.register(self._ours, selectors.EVENT_READ)

    def wait(self, timeout_s: float) -> bool:
        """Waits; returns whether the socket has data."""
        pending = getattr(self._watched, "pending", None)
        if pending is not None and pending():  # in TLS
            return True
        is_ready = False
        for key, _ in self._selector.select(timeout_s):
            if key.fileobj is self._ours:
                with suppress(BlockingIOError):
                    self._ours.recv(4096)
            else:
                is_ready = True
        return is_ready

    def wake(self) -> None:
        """Ends the present `wait`, or else the next; other threads call it."""
        with suppress(OSError):  # full: it wakes up anyway; closed: no thread waits
            self._theirs.send(b"\0")

    def close(self) -> None:
        """Closes everything except the watched socket."""
        self._selector.close()
        self._ours.close()
        self._theirs.close()


logger = logging.getLogger(__name__)

CONNECT_S = 5.0
HEARTBEAT_S = 10.0

_ACK_PATIENCE_S = 0.2
_BEAT_EVERY_S = 1.0
_CLOSE_S = 2.0
_RECEIVE_BYTES = 256 * 1024
_WRITE_BYTES = 256 * 1024


def missing_queues(client: Connection, queues: Sequence[str], exchange: str) -> list[str]:
    """Returns the missing queues; changes nothing."""
    channel: Any = client.channel()
    if exchange:
        channel.exchange_declare(exchange, "", passive=True)
    return [queue for queue in queues if not _is_there(channel, queue)]


def _is_there(channel: Any, queue: str) -> bool:
    try:
        channel.queue_declare(queue, passive=True)
    except NotFound:
        return False
    return True


class _Link:
    def __init__(self, client: Connection) -> None:
        self._client = client
        self._connection: Any = client.connection
        self._channel: Any = client.channel()
        self._beat_at_s = 0.0
        self._reader: FrameReader
        self._waker: Waker

    def _attach_reader(self, reader: FrameReader) -> None:
        self._reader = reader
        self._waker = Waker(self._connection.transport.sock)

    def _receive_messages(self, timeout_s: float) -> list[SourceMessage]:
        now_s = time.monotonic()
        if now_s - self._beat_at_s >= _BEAT_EVERY_S:
            self._beat_at_s = now_s
            self._connection.heartbeat_tick()
        if not self._waker.wait(timeout_s):
            return []
        data = self._connection.transport.sock.recv(_RECEIVE_BYTES)
        if not data:
            raise ConnectionResetError("the broker closed the connection")
        self._connection.bytes_recv += 1  # heartbeats are due only in silence
        return self._reader.feed(data)

    def _send_bytes(self, data: bytes) -> None:
        self._connection.transport.write(data)
        self._connection.bytes_sent += 1

    def _declare(self, queues: Sequence[str]) -> None:
        for queue in queues:
            if not _is_there(self._channel, queue):
                self._channel.queue_declare(queue, durable=True, auto_delete=False)

    def wake(self) -> None:
        self._waker.wake()

    def close(self) -> None:
        connection, deadline_s = self._connection, time.monotonic() + _CLOSE_S
        with suppress(Exception):  # the connection may be broken
            connection.send_method(spec.Connection.Close, "BsBB", (0, "", 0, 0))
            while connection.connected and time.monotonic() < deadline_s:
                self._receive_messages(0.1)
        self._waker.close()
        self._client.collect()


class AmqpSource(_Link):
    """`MessageSource` over AMQP."""

    def __init__(self, client: Connection, options: SourceOptions, epoch: int) -> None:
        super().__init__(client)
        self.epoch = epoch
        self._acks = AckLine(_ACK_PATIENCE_S)
        if options.declare:
            self._declare([options.queue])
        self._channel.basic_qos(0, options.prefetch, False)
        self._channel.basic_consume(options.queue, callback=_unexpected)
        self._attach_reader(FrameReader(self._channel.channel_id, epoch, self._connection.on_inbound_frame))

    def receive(self, timeout_s: float) -> list[SourceMessage]:
        """Implements `MessageSource.receive`."""
        if self._acks.waits:
            timeout_s = min(timeout_s, _ACK_PATIENCE_S)
            self._acknowledge([])
        return self._receive_messages(timeout_s)

    def acknowledge(self, receipts: Sequence[Receipt]) -> None:
        """Implements `MessageSource.acknowledge`."""
        self._acknowledge([int(receipt.tag) for receipt in receipts if receipt.epoch == self.epoch])

    def close(self) -> None:
        """Acknowledges settled messages, and disconnects."""
        with suppress(OSError):
            self._send_bytes(ack_frames(self._channel.channel_id, Due(0, self._acks.left())))
        super().close()

    def _acknowledge(self, tags: Sequence[int]) -> None:
        due = self._acks.due(tags, time.monotonic())
        if due.up_to or due.tags:
            self._send_bytes(ack_frames(self._channel.channel_id, due))


class AmqpSink(_Link):
    """`MessageSink` over AMQP, with publisher confirms."""

    def __init__(self, client: Connection, queues: Sequence[str], exchange: str = "") -> None:
        super().__init__(client)
        self._declare(queues)
        if exchange:
            self._channel.exchange_declare(exchange, "", passive=True)
        self._channel.confirm_select()
        self._sent: dict[int, Outgoing] = {}  # unconfirmed, by ascending tag
        self._last_tag = 0
        self._returned: set[int] = set()  # tags
        self._taken: list[Outgoing] = []
        self._refused: list[Outgoing] = []
        self._unroutable: list[Outgoing] = []
        self._attach_reader(
            FrameReader(
                self._channel.channel_id, 0, self._connection.on_inbound_frame, self._on_confirm, self._on_return
            )
        )

    def send(self, messages: Sequence[Outgoing]) -> None:
        """Implements `MessageSink.send`."""
        channel_id, longest = self._channel.channel_id, self._connection.frame_max
        pieces: list[bytes] = []
        size = 0
        for message in messages:
            try:
                pieces.append(publish_frames(channel_id, message, longest))
            except ValueError:  # sent, it would end every connection
                logger.exception("a message can't be published")
                self._refused.append(message)
                continue
            self._last_tag += 1
            self._sent[self._last_tag] = message
            size += len(pieces[-1])
            if size >= _WRITE_BYTES:
                self._send_bytes(b"".join(pieces))
                pieces, size = [], 0
        if pieces:
            self._send_bytes(b"".join(pieces))

    def wait_settled(self, timeout_s: float) -> SettledMessages:
        """Implements `MessageSink.wait_settled`."""
        try:
            self._receive_messages(0.0 if self._refused else timeout_s)
        except ChannelError as error:  # such as a too large message
            raise MessageRefused(str(error)) from error
        settled = SettledMessages(self._taken, self._refused, self._unroutable)
        self._taken, self._refused, self._unroutable = [], [], []
        return settled

    def _on_confirm(self, tag: int, is_multiple: bool, is_taken: bool) -> None:  # noqa: FBT001 - as it is in the frame
        tags = list(takewhile(lambda sent: sent <= tag, self._sent)) if is_multiple else [tag]
        for each in tags:
            message = self._sent.pop(each, None)
            if message is None:
                continue
            if each in self._returned:
                self._returned.discard(each)
                self._unroutable.append(message)
            elif is_taken:
                self._taken.append(message)
            else:
                self._refused.append(message)

    def _on_return(self, returned: ReturnedMessage) -> None:
        for tag, message in self._sent.items():
            if tag not in self._returned and returned == (message.exchange, message.routing_key, message.message_id):
                self._returned.add(tag)
                return


def _unexpected(*_: object) -> None:
    raise AssertionError("a message went by the reader")
