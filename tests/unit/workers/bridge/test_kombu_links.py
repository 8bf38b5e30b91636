"""The bridge's links by kombu's channels, over its transport in memory."""

import zlib
from contextlib import closing
from typing import Any

import pytest
from kombu import Connection, Producer

from qinfer_workers.bridge.config import SourceOptions
from qinfer_workers.bridge.kombu import KombuSink, KombuSource
from qinfer_workers.bridge.messages import Destination, Outgoing, PublishGroup, SourceMessage

QUEUE = "bridge-kombu-links"


def client() -> Connection:
    connection = Connection("memory://")
    connection.ensure_connection(max_retries=1)
    return connection


def outgoing(number: int) -> Outgoing:
    return Outgoing(place=Destination.SINK, routing_key=QUEUE.encode(), body=b"%d" % number, group=PublishGroup(left=1))


def bodies(connection: Connection) -> list[bytes]:
    channel, found = connection.channel(), []
    while (raw := channel.basic_get(QUEUE, no_ack=True)) is not None:
        found.append(channel.message_to_python(raw).body)
    return found


def test_a_message_that_can_not_be_published_is_given_back(monkeypatch: pytest.MonkeyPatch) -> None:
    """What was published before it is settled, and is not published again; those after it go by the next connection."""
    connection = client()
    sink = KombuSink(connection, [QUEUE])
    messages = [outgoing(number) for number in range(4)]
    publish = sink._publish

    def picky(message: Outgoing) -> None:
        if message is messages[2]:
            raise OverflowError("too large")
        publish(message)

    monkeypatch.setattr(sink, "_publish", picky)
    sink.send(messages)
    sink.send([outgoing(9)])

    assert sink.wait_settled(0.0) == (messages[:2], [messages[2]], ())
    with pytest.raises(OverflowError, match="too large"):
        sink.wait_settled(0.0)
    assert bodies(connection) == [b"0", b"1"]
    sink.close()


def test_compressed_bodies_stay_as_they_came() -> None:
    """Also those that are put back: kombu would decompress them, without a bound, when they are received."""
    connection, queue = client(), f"{QUEUE}-compressed"
    options = SourceOptions.model_validate({"url": "memory://", "queue": queue})
    source = KombuSource(connection, options, 1)
    with closing(client()) as other:
        Producer(other).publish({"a": 1}, routing_key=queue, compression="zlib")

    (first,) = source.receive(5.0)
    source.close()
    (again,) = KombuSource(client(), options, 2).receive(5.0)

    assert zlib.decompress(first.body) == b'{"a": 1}'
    assert first.headers["compression"] == "application/x-gzip"
    assert (again.body, again.headers, again.broken) == (first.body, first.headers, "")


def test_texts_that_are_no_utf_8_break_no_connection() -> None:
    """Half of a surrogate pair, which JSON can carry, in an id and a header."""
    connection, queue = client(), f"{QUEUE}-texts"
    options = SourceOptions.model_validate({"url": "memory://", "queue": queue})
    source = KombuSource(connection, options, 1)
    properties: dict[str, Any] = {"message_id": "\ud800", "delivery_tag": "t", "delivery_info": {}}
    channel = connection.channel()
    prepared = channel.prepare_message(b"body", headers={"a": "\ud800"}, properties=properties)
    channel.basic_publish(prepared, exchange="", routing_key=queue)

    received: list[SourceMessage] = []
    while not received:
        received = source.receive(0.1)

    assert (received[0].message_id, received[0].headers) == (b"\xed\xa0\x80", {"a": "\ud800"})
    source.close()


def test_what_cannot_be_put_back_is_written_nowhere(monkeypatch: pytest.MonkeyPatch) -> None:
    """Kombu would leave the messages, bodies and all, in a file of the temporary directory."""
    dumped: list[object] = []
    queue = f"{QUEUE}-lost"
    monkeypatch.setattr("kombu.transport.virtual.base.emergency_dump_state", lambda *given, **_: dumped.append(given))
    connection = client()
    source = KombuSource(connection, SourceOptions.model_validate({"url": "memory://", "queue": queue}), 1)
    channel = connection.channel()
    channel.basic_publish(
        channel.prepare_message(b"body", properties={"delivery_tag": "t", "delivery_info": {}}),
        exchange="",
        routing_key=queue,
    )
    assert source.receive(0.1)

    def fail(_: object) -> None:
        raise ConnectionError

    monkeypatch.setattr(source._channel, "_restore", fail)
    monkeypatch.setattr(source._channel, "do_restore", True)  # as of transports over a network
    source.close()

    assert not dumped
