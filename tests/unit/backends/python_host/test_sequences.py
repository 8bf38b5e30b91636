"""Sequences in the `python` backend: what a `model.py` hears of them, its calls to stateful models, rescheduling."""

import os
import signal
from pathlib import Path

import numpy as np
import pytest

from qinfer.backends.base import Array, Batch
from qinfer.backends.python import PythonBackend
from qinfer.core.messages import InferRequest, Response, SequenceFlags
from qinfer.errors import InferenceFailed, SequenceLost
from qinfer.tensors import Tensor, from_numpy
from qinfer.testing import wait_until
from tests.support.backends import Answers
from tests.support.python_models import (
    batch_of,
    execute,
    floats,
    load,
    loaded,
    run,
    write_accumulator,
    write_model,
)

LATER = execute(
    """
responses = []
for request in requests:
    if x(request) == 7:
        request.set_release_flags(pb_utils.TRITONSERVER_REQUEST_RELEASE_RESCHEDULE)
        responses.append(reply(x(request)) if self.is_wrong else None)
    else:
        responses.append(reply(x(request)))
return responses
""",
    before="is_wrong = False",
)


class Again(Answers):
    """Keeps the items that are to be executed again."""

    def __init__(self) -> None:
        super().__init__()
        self.again: list[int] = []

    def reschedule(self, item: int, states: tuple[Tensor, ...] = ()) -> None:
        assert not states
        self.again.append(item)


def step(correlation_id: int | str, *, start: bool = False, end: bool = False) -> InferRequest:
    return InferRequest(model="m", inputs=(), sequence=SequenceFlags(correlation_id, start, end))


def controls(**rows: list[float]) -> dict[str, Array]:
    """Returns control inputs, a column each."""
    return {
        name: np.array(column, "<i8" if name == "CORRID" else "<f4").reshape(-1, 1) for name, column in rows.items()
    }


def test_a_model_hears_of_sequences_by_control_inputs_flags_and_ids(tmp_path: Path) -> None:
    """Rows of padding are requests that are not READY; their inputs are zeros."""
    backend = load(write_accumulator(tmp_path))
    padding = InferRequest(model="m", inputs=())
    first = Batch(
        requests=[step(7, start=True), padding, step("b", start=True, end=True)],
        rows=[1, 1, 1],
        inputs={"x": floats(1, 0, 5)} | controls(START=[1, 0, 1], END=[0, 0, 1], READY=[1, 0, 1], CORRID=[7, 0, 8]),
    )
    second = Batch(
        requests=[step(7)],
        rows=[1],
        inputs={"x": floats(2)} | controls(START=[0], END=[0], READY=[1], CORRID=[7]),
    )
    answers, later = Answers(), Answers()

    backend.execute(first, answers)
    backend.execute(second, later)
    backend.unload()

    assert [answers.array(item).item() for item in range(3)] == [1, 0, 5]
    assert later.array().item() == 3
    assert answers.parameters[0] == {"correlation_id": 7, "flags": 1}
    assert answers.parameters[2] == {"correlation_id": "b", "flags": 3}
    assert later.parameters[0] == {"correlation_id": 7, "flags": 0}


def test_a_call_may_be_a_request_of_a_sequence(tmp_path: Path) -> None:
    asked: list[InferRequest] = []

    def other(request: InferRequest) -> Response:
        asked.append(request)
        return Response(request_id="", outputs=(from_numpy("y", floats(0)),))

    code = execute(
        """
for correlation_id, flags in ((2**64 - 1, 1), ("b", 3), ("b", 0), (0, 0)):
    request = pb_utils.InferenceRequest("", correlation_id, [], ["y"], "other", flags=flags)
    assert not request.exec().has_error()
return [reply(x(request)) for request in requests]
"""
    )
    with loaded(tmp_path, code) as backend:
        backend.execute(batch_of(floats(1)), Answers(other))

    assert [request.sequence for request in asked] == [
        SequenceFlags(2**64 - 1, start=True),
        SequenceFlags("b", start=True, end=True),
        SequenceFlags("b"),
        None,
    ]


def iterative(tmp_path: Path, code: str) -> PythonBackend:
    """Loads a model whose requests may be rescheduled."""
    return load(write_model(tmp_path, code, scheduling="sequence_batching { iterative_sequence: true }"))


def test_a_request_that_is_rescheduled_has_no_answer_yet(tmp_path: Path) -> None:
    backend, answers = iterative(tmp_path, LATER), Again()

    backend.execute(batch_of(floats(1, 7, 2)), answers)
    backend.unload()

    assert answers.again == [1]
    assert [answers.array(item).item() for item in (0, 2)] == [1, 2]


def test_a_request_that_is_rescheduled_may_not_be_answered(tmp_path: Path) -> None:
    """As in Triton."""
    backend = iterative(tmp_path, LATER.replace("is_wrong = False", "is_wrong = True"))

    with pytest.raises(InferenceFailed, match="Expected a None object in the execute function return list"):
        run(backend, floats(7))
    backend.unload()


def test_a_death_loses_what_the_model_kept_of_rescheduled_requests(tmp_path: Path) -> None:
    """The batch is told, even if it is not to blame: others are to begin anew."""
    backend = iterative(tmp_path, execute("os._exit(7)"))

    with pytest.raises(SequenceLost, match=r"died \(exit code 7\) with the state in its memory"):
        run(backend, floats(1))
    backend.unload()


def accumulated(number: float, *, start: bool = False) -> Batch:
    """Returns a batch of one step of sequence 7."""
    inputs = {"x": floats(number)} | controls(START=[start], END=[0], READY=[1], CORRID=[7])
    return Batch(requests=[step(7, start=start)], rows=[1], inputs=inputs)


def die(backend: PythonBackend) -> None:
    """Kills the process of a backend, and waits for another one."""
    process = backend._instance.process()
    assert process is not None
    os.kill(process.pid, signal.SIGKILL)
    wait_until(lambda: backend._instance.process() not in (None, process), description="another process")


def test_a_death_between_two_batches_is_told_to_the_next_one(tmp_path: Path) -> None:
    """Though another process would take it: it knows nothing of the sequences. Then that one is used."""
    backend = load(write_accumulator(tmp_path))
    backend.execute(accumulated(1, start=True), Answers())
    die(backend)

    with pytest.raises(SequenceLost, match="SIGKILL"):
        backend.execute(accumulated(2), Answers())
    answers = Answers()
    backend.execute(accumulated(3, start=True), answers)
    backend.unload()

    assert answers.array(0).item() == 3


def test_a_death_that_loses_no_iteration_is_not_told(tmp_path: Path) -> None:
    backend = iterative(tmp_path, LATER)
    run(backend, floats(1))
    die(backend)

    answers = run(backend, floats(2))
    backend.unload()

    assert answers.array(0).item() == 2
