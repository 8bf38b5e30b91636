"""What is published of a stream: one message with the list of all responses, or one for each of them."""

from collections.abc import Sequence
from typing import Any

import msgspec
import numpy as np
import pytest

from qinfer.core.messages import Failure, Response
from qinfer.queue.entries import Ending, EntryAddress, RequestRecord, RequestState
from qinfer.tensors import Tensor, from_numpy
from qinfer.wire.frame import encode_responses
from qinfer.wire.outputs import OutputPlan
from qinfer_workers.bridge.config import RouteOptions, parse_config
from qinfer_workers.bridge.messages import Destination, Note, Outgoing, RenderedEnd, render
from qinfer_workers.bridge.replies import ReplyEncoding

BROKEN = Failure("inference_failed", "no second token")


def route(responses: str) -> RouteOptions:
    one = {"name": "r", "model": "m", "responses": responses, "source": {"url": "amqp://b//", "queue": "tasks"}}
    return parse_config({"routes": [one]}, {}).routes[0]


def y(*values: float) -> tuple[Tensor, ...]:
    return (from_numpy("y", np.array([values], "<f4")),)


def stream(*given: "tuple[Tensor, ...] | Failure", final: tuple[Tensor, ...] = ()) -> list[Response]:
    """Returns the responses of a model that ends by a final one, empty unless it has outputs."""
    found = [
        Response(request_id="id", model="m", version=2, index=index, final=False, failure=each)
        if isinstance(each, Failure)
        else Response(request_id="id", model="m", version=2, index=index, final=False, outputs=each)
        for index, each in enumerate(given)
    ]
    return [*found, Response(request_id="id", model="m", version=2, index=len(given), outputs=final)]


def rendered(responses: str, given: Sequence[Response], **reply: Any) -> RenderedEnd:
    """Renders the end of a stream, with all its stored responses."""
    note = Note(ReplyEncoding(**reply), b"m1", b"replies", b"c1")
    *stored, blob = [encode_responses([each]) for each in given]
    record = RequestRecord(address=EntryAddress("m", 0, "id"), state=RequestState.SUCCEEDED, version=2, decoupled=True)
    end = Ending(id="1-0", request_id="id", record=record, notes=msgspec.msgpack.encode(note), blob=blob)
    found = render(route(responses), end, stored)
    assert found is not None
    assert found.group.left == len(found.messages)
    return found


def data(body: Any) -> list[float]:
    return list(body["outputs"][0]["data"])


def positions(messages: Sequence[Outgoing]) -> list[tuple[str, str]]:
    names = ("x-qinfer-response-index", "x-qinfer-response-final")
    return [(each.headers[names[0]], each.headers[names[1]]) for each in messages]


def test_one_message_has_all_responses() -> None:
    """In their order, each as the prediction of another model; the empty final response is left out."""
    (sent,) = rendered("one", stream(y(0), y(1)), client_id="mine").messages

    found = msgspec.json.decode(sent.body)["responses"]
    assert [(each["id"], data(each)) for each in found] == [("mine", [0]), ("mine", [1])]
    assert (sent.place, sent.message_id, sent.content_type) == (Destination.REPLY, b"m1", "application/json")
    assert sent.headers["x-qinfer-state"] == "succeeded"
    assert "x-qinfer-response-index" not in sent.headers


def test_a_final_response_with_outputs_is_one_of_them() -> None:
    (sent,) = rendered("one", stream(y(0), final=y(1))).messages
    assert [data(each) for each in msgspec.json.decode(sent.body)["responses"]] == [[0], [1]]


def test_each_response_is_a_message() -> None:
    """The last one with outputs is final, whether the model ended with it or after it."""
    for given in (stream(y(0), y(1), y(2)), stream(y(0), y(1), final=y(2))):
        messages = rendered("each", given).messages

        assert [data(msgspec.json.decode(each.body)) for each in messages] == [[0], [1], [2]]
        assert positions(messages) == [("0", "false"), ("1", "false"), ("2", "true")]
        assert {(each.message_id, each.headers["x-qinfer-request-id"]) for each in messages} == {(b"m1", "id")}


def test_a_stream_without_responses_is_told() -> None:
    (one,) = rendered("one", stream()).messages
    (each,) = rendered("each", stream()).messages
    (row,) = rendered("each", stream(), form="json").messages

    assert one.body == b'{"responses":[]}'
    assert (msgspec.json.decode(each.body)["outputs"], positions([each])) == ([], [("0", "true")])
    assert row.body == b"{}"


def test_an_error_that_the_model_went_on_after_is_one_of_the_responses() -> None:
    given = stream(y(0), BROKEN, y(2))

    (one,) = rendered("one", given, form="json").messages
    messages = rendered("each", given, form="json").messages

    assert one.body == b'{"responses":[{"y":0.0},{"error":"no second token"},{"y":2.0}]}'
    assert [each.body for each in messages] == [b'{"y":0.0}', b'{"error":"no second token"}', b'{"y":2.0}']
    assert [each.headers.get("x-qinfer-code") for each in messages] == [None, "inference_failed", None]


def test_rows_of_a_response_are_a_list() -> None:
    two = (from_numpy("y", np.array([[1], [2]], "<f4")),)
    (sent,) = rendered("one", stream(two, y(3)), form="jsonl").messages
    assert sent.body == b'{"responses":[[{"y":1.0},{"y":2.0}],[{"y":3.0}]]}'


def test_binary_outputs_follow_all_the_json() -> None:
    (sent,) = rendered("one", stream(y(0), y(1)), plan=OutputPlan(binary=True)).messages

    length = int(sent.headers["inference-header-content-length"])
    found = msgspec.json.decode(sent.body[:length])["responses"]
    assert [each["outputs"][0]["parameters"]["binary_data_size"] for each in found] == [4, 4]
    assert np.frombuffer(sent.body[length:], "<f4").tolist() == [0, 1]


def test_a_stream_that_lacks_responses_is_gone() -> None:
    """Their time was over before that of the end."""
    for responses in ("one", "each"):
        found = rendered(responses, stream(y(0), y(1))[1:])

        assert found.state == "gone"
        assert [each.place for each in found.messages] == [Destination.DEAD_LETTER, Destination.REPLY]


def test_a_row_has_one_row() -> None:
    two = (from_numpy("y", np.array([[1], [2]], "<f4")),)
    found = rendered("each", stream(y(0), two), form="json")

    assert found.state == "failed"
    assert "2 rows" in found.messages[0].headers["x-qinfer-reason"]


def test_messages_of_a_stream_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """All or none: nobody reads a part of a stream as the whole."""
    monkeypatch.setattr("qinfer_workers.bridge.messages.MAX_EACH", 2)

    assert len(rendered("each", stream(y(0), y(1))).messages) == 2
    found = rendered("each", stream(y(0), y(1), y(2)))
    assert [each.headers["x-qinfer-code"] for each in found.messages] == ["payload_too_large"] * 2
    assert rendered("one", stream(y(0), y(1), y(2))).state == "succeeded"
