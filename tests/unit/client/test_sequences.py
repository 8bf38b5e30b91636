"""Sequences of the client, against a gateway that answers by a script: flags, numbers, repetitions, ends."""

import asyncio
from typing import Any

import httpx
import numpy as np
import pytest

import qinfer
from qinfer import errors
from qinfer.errors import START_MISSING
from qinfer.queue.sequences.records import ended_text
from qinfer.wire.kserve_client import JSON_LENGTH_HEADER
from tests.support.scripted_gateway import Server, X, answer, reply

OTHER = np.array([[3.0, 4.0]], dtype=np.float32)
ENDED = ended_text("m", 7, 2, "the worker has ended")


def parameters_of(request: httpx.Request) -> dict[str, Any]:
    """Returns the parameters that a request was sent with, as JSON."""
    text = request.content[: int(request.headers[JSON_LENGTH_HEADER])]
    return dict(httpx.Response(200, content=text).json()["parameters"]) | {"binary_data_output": None}


def flags(*more: str, step: int, of: int | str = 7) -> dict[str, Any]:
    named = {f"sequence_{name}": True for name in more}
    return {"binary_data_output": None, "sequence_id": of, "qinfer_step": step, **named}


def test_steps_have_flags_and_numbers() -> None:
    """START on the first, END where it is asked for; parameters of the caller's own go along."""
    server = Server(answer())

    with server.client().sequence("m", correlation_id=7, version=2) as sequence:
        sequence.infer({"x": X})
        sequence.infer({"x": X}, outputs=["y"], parameters={"k": 1})
        result = sequence.infer({"x": X}, end=True)

    assert result["y"].tolist() == [4.0]
    assert server.paths == ["POST /v2/models/m/versions/2/infer"] * 3
    assert [parameters_of(request) for request in server.requests] == [
        flags("start", step=1),
        flags(step=2) | {"k": 1},
        flags("end", step=3),
    ]


def test_a_sequence_of_one_step_begins_and_ends() -> None:
    server = Server(answer())

    server.client().sequence("m", correlation_id="call 4").infer({"x": X}, end=True)

    assert parameters_of(server.requests[0]) == flags("start", "end", step=1, of="call 4")


def test_ids_are_chosen_at_random() -> None:
    client = Server(answer()).client()
    chosen = [client.sequence("m").correlation_id for _ in range(100)]

    assert len(set(chosen)) == 100
    assert all(isinstance(one, int) and 0 < one < 2**63 for one in chosen)


@pytest.mark.parametrize("wrong", [0, -1, 2**64, "", True, 1.0])
def test_ids_that_name_no_sequence_are_refused(wrong: Any) -> None:
    with pytest.raises(errors.InvalidRequest, match="correlation_id is"):
        Server(answer()).client().sequence("m", correlation_id=wrong)


@pytest.mark.parametrize("broken", [httpx.ReadError("cut"), httpx.ConnectTimeout("slow"), reply(503, error="busy")])
def test_a_step_is_repeated_with_its_number(broken: Any) -> None:
    """The server tells by the number that it is the same step."""
    server = Server(answer(), broken, answer(5.0))
    sequence = server.client().sequence("m", correlation_id=7)

    sequence.infer({"x": X})
    result = sequence.infer({"x": X})

    assert result["y"].tolist() == [5.0]
    assert server.requests[1].content == server.requests[2].content
    assert parameters_of(server.requests[2]) == flags(step=2)


def test_a_step_without_an_answer_can_only_be_sent_again() -> None:
    """With other inputs it would get the response to those that may have been executed."""
    server = Server(httpx.ReadError("cut"), answer())
    sequence = server.client(max_retries=0).sequence("m", correlation_id=7)
    with pytest.raises(errors.Unreachable):
        sequence.infer({"x": X})

    with pytest.raises(errors.InvalidRequest, match="step 1 of sequence 7 has no answer yet"):
        sequence.infer({"x": OTHER})
    sequence.infer({"x": X})
    sequence.infer({"x": OTHER})

    assert [parameters_of(request)["qinfer_step"] for request in server.requests] == [1, 1, 2]


def test_a_step_that_was_refused_leaves_no_gap() -> None:
    """The corrected step has the number of the refused one."""
    server = Server(answer(), reply(400, error="unexpected shape for input 'x'"), answer())
    sequence = server.client().sequence("m", correlation_id=7)
    sequence.infer({"x": X})

    with pytest.raises(errors.InvalidRequest, match="unexpected shape"):
        sequence.infer({"x": OTHER})
    sequence.infer({"x": X})

    assert [parameters_of(request)["qinfer_step"] for request in server.requests] == [1, 2, 2]


def test_a_sequence_goes_on_after_a_failure_of_the_model() -> None:
    """The failure is the response to its step."""
    server = Server(reply(500, error="the model raised"), answer())
    sequence = server.client().sequence("m", correlation_id=7)

    with pytest.raises(errors.InferenceFailed, match="the model raised"):
        sequence.infer({"x": X})
    sequence.infer({"x": OTHER})

    assert [parameters_of(request) for request in server.requests] == [flags("start", step=1), flags(step=2)]


@pytest.mark.parametrize(("status", "expected"), [(400, errors.SequenceEnded), (503, errors.SequenceLost)])
def test_the_end_of_a_sequence_has_a_class_of_its_own(status: int, expected: type[errors.QinferError]) -> None:
    """A step is not repeated then: it would be refused again."""
    server = Server(answer(), reply(status, error=ENDED))
    sequence = server.client().sequence("m", correlation_id=7)
    sequence.infer({"x": X})

    with pytest.raises(errors.SequenceEnded, match="was ended at step 2") as caught:
        sequence.infer({"x": X})

    assert type(caught.value) is expected
    assert len(server.requests) == 2


def test_a_sequence_that_was_idle_for_too_long_has_ended() -> None:
    """Triton's text says that START is missing, which is right for the first step only."""
    missing = reply(400, error=f"inference request for sequence 7 to model 'm' {START_MISSING}")
    server = Server(answer(), missing)
    sequence = server.client().sequence("m", correlation_id=7)
    sequence.infer({"x": X})

    with pytest.raises(errors.SequenceEnded, match="sequence 7 of model 'm' has ended"):
        sequence.infer({"x": X})


def test_nothing_is_sent_after_the_end() -> None:
    server = Server(answer())
    sequence = server.client().sequence("m", correlation_id=7)
    sequence.infer({"x": X}, end=True)

    with pytest.raises(errors.InvalidRequest, match="begin another one"):
        sequence.infer({"x": X})

    assert len(server.requests) == 1


def test_flags_are_not_for_the_caller_to_set() -> None:
    with pytest.raises(errors.InvalidRequest, match="qinfer_step, sequence_end"):
        Server(answer()).client().sequence("m").infer({"x": X}, parameters={"sequence_end": True, "qinfer_step": 9})


@pytest.mark.parametrize(("step", "sent"), [({}, 1), ({"qinfer_step": 2}, 3)])
def test_only_numbered_steps_are_repeated(step: dict[str, int], sent: int) -> None:
    """The server would take a repeated step without a number for the next one."""
    server = Server(httpx.ReadError("cut"))

    with pytest.raises(errors.Unreachable):
        server.client(max_retries=2).infer("m", {"x": X}, parameters={"sequence_id": 7, **step})

    assert len(server.requests) == sent


async def test_steps_of_tasks_go_one_after_the_other() -> None:
    """However many tasks share a sequence, no number is used twice."""
    server = Server(answer())
    at_once: list[int] = []
    running = 0

    async def handle(request: httpx.Request) -> httpx.Response:
        nonlocal running
        running += 1
        at_once.append(running)
        await asyncio.sleep(0)
        running -= 1
        return server(request)

    client = qinfer.AsyncClient("http://gateway", transport=httpx.MockTransport(handle))
    async with client, client.sequence("m", correlation_id=7) as sequence:
        await asyncio.gather(*(sequence.infer({"x": X}) for _ in range(5)))

    assert at_once == [1] * 5
    assert [parameters_of(request)["qinfer_step"] for request in server.requests] == [1, 2, 3, 4, 5]
