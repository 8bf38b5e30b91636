"""AMQP frames as the bridge reads and writes them, and when it acknowledges; py-amqp is the other side."""

import random
from collections.abc import Mapping
from typing import Any

import pytest
from amqp.basic_message import Message
from amqp.method_framing import frame_handler, frame_writer
from amqp.serialization import dumps, loads

from qinfer_workers.bridge.amqp import (
    AckLine,
    BrokenFrames,
    Due,
    FrameReader,
    ReturnedMessage,
    ack_frames,
    publish_frames,
)
from qinfer_workers.bridge.messages import Destination, Outgoing, PublishGroup, SourceMessage

CHANNEL, EPOCH = 1, 7
DELIVER, RETURN, ACK, NACK, CANCEL = (60, 60), (60, 50), (60, 80), (60, 120), (60, 30)
FRAME_MAX = 4096


class Pipe:
    """What py-amqp needs of a connection, and of its transport."""

    def __init__(self) -> None:
        self.frame_max = FRAME_MAX
        self.bytes_sent = self.bytes_recv = 0
        self.written = b""
        self._write_frame = frame_writer(self, self)

    def write(self, data: bytes) -> None:
        self.written += bytes(data)

    def method(
        self,
        signature: tuple[int, int],
        types: str,
        *values: object,
        body: bytes | None = None,
        channel: int = CHANNEL,
        **properties: Any,
    ) -> None:
        """Writes a method as a broker would, with content if there is a body."""
        content = None if body is None else Message(body, **properties)
        self._write_frame(1, channel, signature, dumps(types, values), content)

    def deliver(self, tag: int, body: bytes, **properties: Any) -> None:
        self.method(DELIVER, "sLbss", "consumer", tag, False, "exchange", "key", body=body, **properties)


class Reading:
    """A reader, and what it has seen."""

    def __init__(self) -> None:
        self.others: list[tuple[int, int, bytes]] = []
        self.confirms: list[tuple[int, bool, bool]] = []
        self.returned: list[ReturnedMessage] = []
        self.messages: list[SourceMessage] = []
        self.reader = FrameReader(
            CHANNEL, EPOCH, self.others.append, lambda *news: self.confirms.append(news), self.returned.append
        )

    def feed(self, data: bytes) -> "Reading":
        self.messages += self.reader.feed(data)
        return self


def published(message: Outgoing, max_frame_bytes: int = FRAME_MAX) -> tuple[list[Any], Message]:
    """Returns the arguments and the content of a message that was published, as py-amqp reads them."""
    seen: list[Any] = []
    handler = frame_handler(Pipe(), lambda *each: seen.append(each), content_methods=frozenset([(60, 40)]))
    data = publish_frames(CHANNEL, message, max_frame_bytes)
    while data:
        size = int.from_bytes(data[3:7], "big")
        assert size + 8 <= max_frame_bytes
        assert data[7 + size] == 0xCE
        handler((data[0], int.from_bytes(data[1:3], "big"), data[7 : 7 + size]))
        data = data[8 + size :]
    ((channel, method, arguments, content),) = seen
    assert (channel, method) == (CHANNEL, (60, 40))
    return loads("Bssbb", arguments, 4)[0], content


def outgoing(**fields: Any) -> Outgoing:
    return Outgoing(place=Destination.REPLY, group=PublishGroup(), **fields)


def test_a_message_is_read_with_its_properties() -> None:
    """Ids as the bytes that they were."""
    pipe = Pipe()
    pipe.deliver(
        5,
        b"body",
        content_type="application/json",
        content_encoding="utf-8",
        application_headers={"a": 1, "b": "text", "c": [1, {"d": True}]},
        delivery_mode=2,
        priority=3,
        correlation_id="c1",
        reply_to="replies",
        expiration="1000",
        message_id="m1",
        timestamp=12,
        type="t",
        app_id="app",
    )

    (message,) = Reading().feed(pipe.written).messages

    assert (message.receipt.epoch, message.receipt.tag, message.body, message.broken) == (EPOCH, 5, b"body", "")
    assert (message.content_type, message.content_encoding) == ("application/json", "utf-8")
    assert message.headers == {"a": 1, "b": "text", "c": [1, {"d": True}]}
    assert (message.correlation_id, message.reply_to, message.message_id) == (b"c1", b"replies", b"m1")


def test_messages_are_read_however_they_are_cut() -> None:
    """Long ones of several frames, empty ones, and others' frames between them."""
    pipe = Pipe()
    bodies = [b"", b"x", b"y" * (3 * FRAME_MAX + 5), b"", b"z" * 100]
    for tag, body in enumerate(bodies, start=1):
        pipe.deliver(tag, body, message_id=f"m{tag}")
        pipe.method((10, 60), "s", "blocked", channel=0)
    for seed in range(20):
        rng, seen, data = random.Random(seed), Reading(), pipe.written
        while data:
            size = rng.choice([1, 2, 7, 100, 5000])
            seen.feed(data[:size])
            data = data[size:]

        assert [message.body for message in seen.messages] == bodies
        assert [message.message_id for message in seen.messages] == [b"m1", b"m2", b"m3", b"m4", b"m5"]
        assert [(kind, channel) for kind, channel, _ in seen.others] == [(1, 0)] * 5


def test_confirms_and_returns_are_told() -> None:
    """And what else there is goes to py-amqp, heartbeats too."""
    pipe = Pipe()
    pipe.method(ACK, "Lb", 8, True)
    pipe.method(NACK, "Lb", 9, False)
    pipe.method(RETURN, "Bsss", 312, "NO_ROUTE", "e", "gone", body=b"prediction", message_id="m1")
    pipe.method(CANCEL, "sb", "consumer", False)

    seen = Reading().feed(pipe.written + b"\x08\x00\x00\x00\x00\x00\x00\xce")

    assert seen.confirms == [(8, True, True), (9, False, False)]
    assert seen.returned == [ReturnedMessage(b"e", b"gone", b"m1")]
    assert [(kind, channel) for kind, channel, _ in seen.others] == [(1, CHANNEL), (8, 0)]
    assert seen.messages == []


@pytest.mark.parametrize("flip", range(60))
def test_headers_that_can_not_be_read_break_one_message(flip: int) -> None:
    """Whatever byte of them is wrong, the connection goes on."""
    pipe = Pipe()
    pipe.deliver(1, b"first", application_headers={"name": "value", "deep": {"x": 1}}, message_id="m1")
    start = pipe.written.index(b"name") - 7  # the flags, the length of the table, that of the name
    data = bytearray(pipe.written)
    data[start + flip % 40] ^= 0xFF
    pipe.deliver(2, b"second")

    messages = Reading().feed(bytes(data) + pipe.written[len(data) :]).messages

    assert messages[-1].body == b"second"
    assert len(messages) == 2


def test_what_is_no_amqp_ends_the_connection() -> None:
    """There is no way to find the next frame."""
    with pytest.raises(BrokenFrames):
        Reading().feed(b"\x01\x00\x01\x00\x00\x00\x01AB")


@pytest.mark.parametrize("size", [0, 1, FRAME_MAX - 8, FRAME_MAX - 7, 10 * FRAME_MAX])
def test_a_message_is_published_as_py_amqp_reads_it(size: int) -> None:
    """Persistent, mandatory, in frames that the connection takes."""
    headers: Mapping[str, str] = {"x-qinfer-state": "succeeded", "text": "Grüße"}
    message = outgoing(
        exchange=b"e",
        routing_key=b"predictions",
        body=b"b" * size,
        content_type="application/json",
        headers=headers,
        message_id=b"m1",
        correlation_id=b"c1",
        reply_to=b"r",
    )

    (_, exchange, routing_key, mandatory, immediate), content = published(message)

    assert (exchange, routing_key, mandatory, immediate) == ("e", "predictions", True, False)
    assert (content.body or b"") == message.body
    assert content.properties == {
        "content_type": "application/json",
        "application_headers": headers,
        "delivery_mode": 2,
        "correlation_id": "c1",
        "reply_to": "r",
        "message_id": "m1",
    }


def test_ids_go_back_as_the_bytes_that_came() -> None:
    """A UUID's 16 bytes are no text."""
    raw = bytes(range(128, 144))
    pipe = Pipe()
    data = publish_frames(CHANNEL, outgoing(body=b"", message_id=raw, correlation_id=raw), FRAME_MAX)
    header = data[data.index(b"\xce") + 1 :]
    pipe.method(DELIVER, "sLbss", "consumer", 1, False, "", "")

    (message,) = Reading().feed(pipe.written + header).messages

    assert (message.message_id, message.correlation_id) == (raw, raw)


def test_acknowledgements_are_written_at_once() -> None:
    """One for many, and single ones."""
    seen = Reading().feed(ack_frames(CHANNEL, Due(7, [9, 300])))

    assert seen.confirms == [(7, True, True), (9, False, True), (300, False, True)]


PATIENCE_S = 0.2


def line() -> AckLine:
    return AckLine(PATIENCE_S)


def test_one_acknowledgement_is_for_all_that_are_done() -> None:
    """However many come, and in whatever order."""
    acks = line()

    assert acks.due([1, 2, 3], 0.0) == Due(3)
    assert acks.due([6, 5, 4], 0.0) == Due(6)
    assert acks.due([], 9.0) == Due()


def test_what_is_done_out_of_order_waits_a_moment() -> None:
    """The one before it mostly follows."""
    acks = line()

    assert acks.due([2, 3], 0.0) == Due()
    assert acks.waits
    assert acks.due([1], 0.1) == Due(3)
    assert not acks.waits


def test_what_waits_too_long_is_acknowledged_singly() -> None:
    """The message before it keeps it no longer, and later ones go on as before."""
    acks = line()

    assert acks.due([2, 4], 0.0) == Due()
    assert acks.due([], PATIENCE_S) == Due(0, [2, 4])
    assert acks.due([3], 0.3) == Due()
    assert acks.due([], 0.3 + PATIENCE_S) == Due(0, [3])
    assert acks.due([1], 0.6) == Due(1)
    assert acks.due([5], 0.6) == Due(5)


def test_a_tag_that_was_acknowledged_is_never_named_again() -> None:
    """RabbitMQ closes a channel that does, for many too."""
    acks = line()
    assert acks.due([2, 3], 0.0) == Due()
    assert acks.due([], 1.0) == Due(0, [2, 3])

    assert acks.due([1], 1.0) == Due(1)
    assert acks.due([4], 1.0) == Due(4)


def test_what_is_left_is_told_at_the_end() -> None:
    acks = line()
    acks.due([1, 3, 4], 0.0)

    assert acks.left() == [3, 4]


def test_every_message_is_acknowledged_once_whatever_the_order() -> None:
    """A broker that is simulated: it refuses tags that it does not have."""
    for seed in range(50):
        rng = random.Random(seed)
        order = sorted(range(1, 101), key=lambda tag: tag + rng.uniform(0, 30))
        acks, outstanding, now_s = line(), set(range(1, 101)), 0.0
        while order or outstanding:
            count = rng.randint(0, 10)
            done, order = order[:count], order[count:]
            now_s += rng.uniform(0, 0.15)
            due = acks.due(done, now_s)
            if due.up_to:
                assert due.up_to in outstanding
                outstanding -= set(range(1, due.up_to + 1))
            for tag in due.tags:
                outstanding.remove(tag)
            assert now_s < 60
