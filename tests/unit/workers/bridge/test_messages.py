"""How messages are identified, and what is published of the requests that they became."""

from typing import Any

import msgspec
import numpy as np
import pytest

from qinfer.core.messages import Failure, Response, parse_request_id
from qinfer.errors import InvalidRequest
from qinfer.queue.entries import Ending, EntryAddress, RequestRecord, RequestState
from qinfer.tensors import from_numpy
from qinfer.wire.frame import encode_responses
from qinfer_workers.bridge.amqp import publish_frames
from qinfer_workers.bridge.config import RouteOptions, parse_config
from qinfer_workers.bridge.messages import (
    GONE,
    Destination,
    Note,
    Receipt,
    SourceMessage,
    body_hash,
    identity,
    refusal,
    render,
    request_id,
)
from qinfer_workers.bridge.replies import ReplyEncoding

RECEIPT = Receipt(1, 1)


def message(**fields: Any) -> SourceMessage:
    return SourceMessage(receipt=RECEIPT, body=fields.pop("body", b"body"), **fields)


def route(**sink: Any) -> RouteOptions:
    one = {"name": "digits", "model": "m", "source": {"url": "amqp://b//", "queue": "tasks"}, "sink": sink}
    return parse_config({"routes": [one]}, {}).routes[0]


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({"message_id": b"m", "correlation_id": b"c", "reply_to": b"r", "broker_id": b"b"}, b"m"),
        ({"correlation_id": b"c", "reply_to": b"r", "headers": {"task": "h"}, "broker_id": b"b"}, b"c"),
        ({"correlation_id": b"c", "headers": {"task": "h"}, "broker_id": b"b"}, b"h"),
        ({"headers": {"task": 7}}, b"7"),
        ({"headers": {"task": b"\xff"}}, b"\xff"),
        ({"headers": {"task": ""}, "broker_id": b"b"}, b"b"),
        ({"correlation_id": b"c", "broker_id": b"b"}, b"b"),
        ({"reply_to": b"r"}, b""),
    ],
)
def test_the_first_id_that_there_is_identifies_a_message(fields: dict[str, Any], expected: bytes) -> None:
    """A correlation id does only where a reply is to be correlated: others give one to many messages."""
    assert identity(message(**fields), "task") == expected


def test_a_request_has_the_id_that_its_message_gives() -> None:
    """Always the same, of the form that gateways know, and others for other routes and messages."""
    ids = {request_id(name, each, "m") for name in ("a", "b") for each in (b"1", b"2", bytes(300))}

    assert len(ids) == 6
    assert request_id("a", b"1", "m") in ids
    assert {parse_request_id(each)[1:] for each in ids} == {(0, "m")}


def test_a_body_is_told_from_others() -> None:
    """By its bytes and its content type."""
    hashes = {body_hash(message(body=body, content_type=kind)) for body in (b"a", b"") for kind in ("x", "y", "")}

    assert len(hashes) == 6


def ending(state: RequestState, *, blob: bytes | None = None, note: Note | None = None, **record: Any) -> Ending:
    address = EntryAddress("m", 0, "id")
    known = RequestRecord(address=address, state=state, version=2, **record)
    given = note or Note(ReplyEncoding(), b"m1", b"", b"c1", {"batch": "7"})
    return Ending(id="1-0", request_id="id", record=known, notes=msgspec.msgpack.encode(given), blob=blob)


def prediction() -> bytes:
    output = from_numpy("y", np.ones((1, 2), "<f4"))
    return encode_responses([Response(request_id="id", model="m", version=2, outputs=(output,))])


def test_a_prediction_goes_to_the_sink() -> None:
    """With the message's ids, and headers of the request."""
    rendered = render(route(exchange="e", routing_key="k"), ending(RequestState.SUCCEEDED, blob=prediction()))

    assert rendered is not None
    (sent,) = rendered.messages
    assert (sent.place, sent.exchange, sent.routing_key) == (Destination.SINK, b"e", b"k")
    assert (sent.message_id, sent.correlation_id, sent.group.ending_id, sent.group.left) == (b"m1", b"c1", "1-0", 1)
    assert sent.headers == {
        "x-qinfer-request-id": "id",
        "x-qinfer-state": "succeeded",
        "x-qinfer-route": "digits",
        "x-qinfer-model": "m",
        "x-qinfer-version": "2",
        "batch": "7",
    }
    assert msgspec.json.decode(sent.body)["outputs"][0]["data"] == [1.0, 1.0]


def test_reply_to_is_a_queue_of_the_default_exchange() -> None:
    note = Note(ReplyEncoding(), b"m1", b"replies", b"c1")

    rendered = render(route(exchange="e"), ending(RequestState.SUCCEEDED, blob=prediction(), note=note))

    assert rendered is not None
    (sent,) = rendered.messages
    assert (sent.place, sent.exchange, sent.routing_key) == (Destination.REPLY, b"", b"replies")


@pytest.mark.parametrize("state", [RequestState.FAILED, RequestState.EXPIRED, RequestState.CANCELLED])
@pytest.mark.parametrize("has_blob", [True, False])
def test_a_failure_goes_to_the_dead_letters_and_the_caller(state: RequestState, *, has_blob: bool) -> None:
    """Both are one group: it is done when both are taken."""
    failure = Failure("inference_failed", "no such digit")
    blob = encode_responses([Response(request_id="id", model="m", version=2, failure=failure)]) if has_blob else None
    note = Note(ReplyEncoding(client_id="mine"), b"m1", b"replies", b"c1")
    end = ending(state, blob=blob, note=note, code=failure.code, message=failure.message)

    rendered = render(route(), end)

    assert rendered is not None
    dead_letter, reply = rendered.messages
    assert rendered.group.left == 2
    assert (dead_letter.place, dead_letter.routing_key, dead_letter.reply_to) == (
        Destination.DEAD_LETTER,
        b"tasks.dead",
        b"replies",
    )
    assert (dead_letter.headers["x-qinfer-reason"], dead_letter.headers["x-qinfer-code"]) == (
        failure.message,
        failure.code,
    )
    assert (reply.place, reply.headers["x-qinfer-state"]) == (Destination.REPLY, state.value)
    assert msgspec.json.decode(reply.body) == {"error": "no such digit", "id": "mine"}


@pytest.mark.parametrize(
    "end",
    [
        ending(RequestState.SUCCEEDED),
        msgspec.structs.replace(ending(RequestState.SUCCEEDED), record=None),
        ending(RequestState.SUCCEEDED, blob=b"damaged"),
    ],
)
def test_a_prediction_that_has_expired_is_reported_as_gone(end: Ending) -> None:
    rendered = render(route(routing_key="k"), end)

    assert rendered is not None
    (dead_letter,) = rendered.messages
    assert (rendered.state, dead_letter.place, dead_letter.headers["x-qinfer-state"]) == (
        GONE,
        Destination.DEAD_LETTER,
        GONE,
    )
    assert "has expired since" in dead_letter.headers["x-qinfer-reason"]


def test_nothing_is_published_of_notes_that_can_not_be_read() -> None:
    """There is nobody to be found in them."""
    assert render(route(routing_key="k"), msgspec.structs.replace(ending(RequestState.FAILED), notes=b"\xc1")) is None


def test_a_refused_message_is_kept_as_it_was() -> None:
    """Body, ids and what of its headers is text, and the reason, which has a bound."""
    given = message(
        body=b"\x00",
        content_type="image/png",
        headers={"a": "b", "n": 1, "x" * 300: "y"},
        message_id=b"m",
        correlation_id=b"c",
        reply_to=b"r",
    )

    *_, dead_letter = refusal(route(), given, InvalidRequest("r" * 5000))

    assert (dead_letter.place, dead_letter.routing_key, dead_letter.body) == (
        Destination.DEAD_LETTER,
        b"tasks.dead",
        b"\x00",
    )
    assert (dead_letter.message_id, dead_letter.correlation_id, dead_letter.reply_to) == (b"m", b"c", b"r")
    assert dead_letter.group.receipt == RECEIPT
    assert dead_letter.headers == {
        "a": "b",
        "x-qinfer-route": "digits",
        "x-qinfer-code": "invalid_request",
        "x-qinfer-reason": "r" * 2000,
    }


def test_the_sender_of_a_refused_message_gets_the_error() -> None:
    """It waits for a reply, and not at the dead letters; who gave no address is not told."""
    reply, _ = refusal(route(), message(reply_to=b"r", correlation_id=b"c"), InvalidRequest("no such input"))

    assert (reply.place, reply.routing_key, reply.correlation_id) == (Destination.REPLY, b"r", b"c")
    assert reply.body == b'{"error":"no such input"}'
    assert (reply.headers["x-qinfer-state"], reply.headers["x-qinfer-code"]) == ("refused", "invalid_request")
    assert [each.place for each in refusal(route(), message(), InvalidRequest("x"))] == [Destination.DEAD_LETTER]


@pytest.mark.parametrize(
    "fields",
    [
        {"headers": {f"h{number}": "x" * 30_000 for number in range(4)}},
        {"headers": {"\ud800": "x"}},
        {"headers": {"x": "\ud800", "y": "\udc80"}},
        {"content_type": "\ufffd" * 255},
        {"content_type": "\ud800"},
    ],
    ids=["large", "name", "value", "type", "surrogate"],
)
def test_every_dead_letter_can_be_published(fields: dict[str, Any]) -> None:
    """One that could not would keep all others from their predictions, for ever: it is published until it is taken."""
    *_, dead_letter = refusal(route(), message(**fields), InvalidRequest("\U0001f600" * 5000))

    written = publish_frames(1, dead_letter, 131072)

    assert len(written) < 131072
    assert dead_letter.headers["x-qinfer-reason"]


def test_properties_that_are_no_text_identify_a_message() -> None:
    """Producers in JSON can write half a surrogate pair."""
    given = message(headers={"task": "\ud800"}, content_type="\ud800")

    assert identity(given, "task") == b"\xed\xa0\x80"
    assert body_hash(given) != body_hash(message(content_type="x"))
