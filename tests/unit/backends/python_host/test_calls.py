"""Calls of a `model.py` to other models (BLS): `exec` and `async_exec`, answered by the test in place of the queue."""

import threading
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from qinfer.backends.base import AnsweredNotFound
from qinfer.backends.python import PythonBackend
from qinfer.core.messages import Failure, InferRequest, Response
from qinfer.errors import (
    Cancelled,
    InferenceFailed,
    InvalidRequest,
    ModelNotFound,
    ModelNotReady,
    QueueFull,
    UnknownFailure,
    UnsupportedFeature,
)
from qinfer.tensors import from_numpy, to_numpy
from tests.support.backends import Answers
from tests.support.python_models import DECOUPLED, Streamed, batch_of, execute, floats, loaded

CALL = """
def call(request, **more):
    return pb_utils.InferenceRequest(
        model_name="other", requested_output_names=["y"], inputs=[pb_utils.Tensor("x", x(request))], **more)
"""

FORWARD = (
    execute(
        """
responses = []
for request in requests:
    response = call(request, request_id="theirs", timeout=2_000_000, model_version=3, parameters={"a": 1}).exec()
    if response.has_error():
        error = response.error()
        responses.append(pb_utils.InferenceResponse(error=pb_utils.TritonError(error.message(), error.code())))
    else:
        tensor = pb_utils.get_output_tensor_by_name(response, "y")
        responses.append(pb_utils.InferenceResponse([tensor], parameters=json.loads(response.parameters())))
return responses
"""
    )
    + CALL
)


def ask(backend: PythonBackend, answers: Answers, *values: float) -> None:
    backend.execute(batch_of(floats(*values)), answers)


def test_a_model_calls_another(tmp_path: Path) -> None:
    """The call says what the model said, and its outputs and parameters come back."""
    asked: list[InferRequest] = []

    def other(request: InferRequest) -> Response:
        asked.append(request)
        doubled = from_numpy("y", to_numpy(request.inputs[0]) * 2)
        return Response(request_id="", outputs=(doubled,), parameters={"said": True})

    answers = Answers(other)
    with loaded(tmp_path, FORWARD) as backend:
        ask(backend, answers, 1, 2)

    assert [float(answers.array(item).item()) for item in (0, 1)] == [2.0, 4.0]
    assert answers.parameters[0] == {"said": True}
    assert (asked[0].model, asked[0].version, asked[0].outputs) == ("other", 3, ("y",))
    assert (asked[0].client_id, asked[0].timeout_s, asked[0].parameters) == ("theirs", 2.0, {"a": 1})


def test_a_call_is_made_for_the_request_whose_trace_it_has(tmp_path: Path) -> None:
    """As Triton's `trace=request.trace()`; one without, and one of an earlier batch, are for none of them."""

    def other(request: InferRequest) -> Response:
        return Response(request_id="", outputs=request.inputs)

    answers = [Answers(other), Answers(other)]
    code = """
for trace in (requests[1].trace(), None, getattr(self, "kept", None)):
    call(requests[0], trace=trace).exec()
self.kept = requests[0].trace()
return [reply(x(request)) for request in requests]
"""
    with loaded(tmp_path, execute(code) + CALL) as backend:
        ask(backend, answers[0], 1, 2)
        ask(backend, answers[1], 3, 4)

    assert [each.made_for for each in answers] == [[1, -1, -1], [1, -1, -1]]


def test_large_tensors_of_calls(tmp_path: Path) -> None:
    """Go by shared memory, to the other model and back."""

    def other(request: InferRequest) -> Response:
        return Response(request_id="", outputs=(from_numpy("y", to_numpy(request.inputs[0]) + 1),))

    answers = Answers(other)
    array = np.arange(300_000, dtype="<f4").reshape(1, -1)
    with loaded(tmp_path, FORWARD) as backend:
        backend.execute(batch_of(array), answers)

    np.testing.assert_array_equal(answers.array(), array + 1)


def own(refusal: InvalidRequest) -> InferenceFailed:
    """Makes the refusal of a call the calling model's own failure, as callers in workers do."""
    error = InferenceFailed(f"a call failed: {refusal.message}")
    error.__cause__ = refusal
    return error


FAILURES = [
    (
        ModelNotFound("no such model"),
        ModelNotFound,
        "Failed for execute the inference request. Model 'other' is not ready. no such model",
    ),
    (AnsweredNotFound("no such row"), ModelNotFound, "no such row"),
    (InvalidRequest("bad shape"), InvalidRequest, "bad shape"),
    (UnsupportedFeature("not by me"), UnsupportedFeature, "not by me"),
    (UnknownFailure("odd"), UnknownFailure, "odd"),
    (own(InvalidRequest("bad shape")), InvalidRequest, "bad shape"),
    (InferenceFailed("it failed"), InferenceFailed, "it failed"),
    (QueueFull("too much"), ModelNotReady, "too much"),
    (RuntimeError("private"), InferenceFailed, "RuntimeError"),
]


def test_a_call_that_fails_is_a_response_with_an_error(tmp_path: Path) -> None:
    """The model decides what to make of it."""

    def other(request: InferRequest) -> Response:
        raise FAILURES[int(to_numpy(request.inputs[0]).item())][0]

    with loaded(tmp_path, FORWARD) as backend:
        for number, (_, kind, text) in enumerate(FAILURES):
            answers = Answers(other)
            ask(backend, answers, number)
            assert (type(answers.error()), answers.error().message) == (kind, text)


def test_asynchronous_calls_run_at_once(tmp_path: Path) -> None:
    """Both are under way before either is answered."""
    both = threading.Barrier(2, timeout=20)

    def other(request: InferRequest) -> Response:
        both.wait()
        return Response(request_id="", outputs=(from_numpy("y", to_numpy(request.inputs[0])),))

    code = (
        execute(
            """
import asyncio
responses = await asyncio.gather(*[call(request).async_exec() for request in requests])
return [pb_utils.InferenceResponse(response.output_tensors()) for response in responses]
"""
        ).replace("def execute", "async def execute")
        + CALL
    )
    answers = Answers(other)
    with loaded(tmp_path, code) as backend:
        ask(backend, answers, 1, 2)

    assert [float(answers.array(item).item()) for item in (0, 1)] == [1.0, 2.0]


REFUSED = [
    ("pb_utils.InferenceRequest('', 0, [], [], '').exec()", "a request needs a model_name to be executed"),
    ("pb_utils.load_model('other')", "models can't be loaded, unloaded or looked at from here"),
    ("requests[0].set_release_flags(2)", "a request can't be rescheduled"),
    ("requests[0].get_response_sender().send()", "Inference Response object must be provided"),
]


def test_what_is_not_offered_is_refused(tmp_path: Path) -> None:
    """By an exception that says so."""
    code = execute("\n".join(f"if x(requests[0]) == {n}: {body}" for n, (body, _) in enumerate(REFUSED))) + CALL
    with loaded(tmp_path, code) as backend:
        for number, (_, text) in enumerate(REFUSED):
            with pytest.raises(InferenceFailed) as caught:
                ask(backend, Answers(), number)
            assert f"TritonModelException: {text}" in caught.value.message


def test_calls_are_part_of_a_batch(tmp_path: Path) -> None:
    """Nothing answers one that `initialize` makes."""
    code = execute(
        "return [reply(x(request), parameters={'said': self.said}) for request in requests]",
        before="""
def initialize(self, args):
    try:
        pb_utils.InferenceRequest(model_name="other", requested_output_names=[], inputs=[]).exec()
    except pb_utils.TritonModelException as error:
        self.said = str(error)
""",
    )
    answers = Answers()
    with loaded(tmp_path, code) as backend:
        ask(backend, answers, 1)

    assert answers.parameters[0] == {"said": "other models can be called within `execute` only"}


def test_a_process_that_dies_in_a_call(tmp_path: Path) -> None:
    """Fails its batch; the call's answer has nowhere to go, and the next batch calls again."""
    released = threading.Event()

    def other(request: InferRequest) -> Response:
        if to_numpy(request.inputs[0]) == 1:
            released.wait(20)
        return Response(request_id="", outputs=(from_numpy("y", to_numpy(request.inputs[0])),))

    code = (
        execute(
            """
if x(requests[0]) == 1:
    import threading
    threading.Timer(0.1, lambda: os._exit(4)).start()
return [pb_utils.InferenceResponse(call(request).exec().output_tensors()) for request in requests]
"""
        )
        + CALL
    )
    answers = Answers(other)
    with loaded(tmp_path, code) as backend:
        with pytest.raises(InferenceFailed, match=r"died \(exit code 4\)"):
            ask(backend, Answers(other), 1)
        ask(backend, answers, 2)
        released.set()

    assert answers.array() == 2.0


STREAM = (
    execute(
        """
self.kept = getattr(self, "kept", [])
if self.kept:
    kept = self.kept.pop()
    said = [response.error().message() for response in kept]
    return [reply(x(requests[0]), parameters={"said": json.dumps(said)})]
what, taken = int(x(requests[0]).flat[0]), []
responses = call(requests[0]).exec(decoupled=True)
for response in responses:
    tensors = response.output_tensors()
    error = response.error()
    taken.append(error.message() if error else float(tensors[0].as_numpy().flat[0]) if tensors else "empty")
    if what == 4 and len(taken) == 2:
        self.kept.append(responses)
        break
    if what in (5, 6, 7) and len(taken) == 2:
        responses.cancel()
if what == 0:
    again = len(list(responses)), len(list(responses))
    assert again == (4, 4), again
    assert next(responses, None) is None
if what != 4:
    responses.cancel()
del responses
return [reply(x(requests[0]), parameters={"taken": json.dumps(taken)})]
"""
    )
    + CALL
)


class Called:
    """A decoupled model: gives numbers, and notes how far it came; cancelled, it goes on for two in case 6."""

    def __init__(self) -> None:
        self.given = 0
        self.cancelled = threading.Event()
        self.closed = threading.Event()
        self._responses: Iterator[Response] = iter(())

    def __call__(self, request: InferRequest) -> Iterator[Response]:
        what = int(to_numpy(request.inputs[0]).flat[0])
        if what == 2:
            raise ModelNotFound("no such model")
        self._responses = self._given(what)
        return Responses(self)

    def next(self) -> Response:
        return next(self._responses)

    def close(self) -> None:
        self._responses = iter(())

    def _given(self, what: int) -> Iterator[Response]:
        try:
            for number in range(3 if what < 4 else 100):
                if what > 4 and number == 2:
                    assert self.cancelled.wait(20)
                if what == 5 and number == 2:
                    raise Cancelled("stopped")
                if what == 6 and number == 4:
                    break
                if what == 7 and number == 2:
                    break
                self.given += 1
                outputs = (from_numpy("y", np.full((1, 1), number, "<f4")),)
                yield Response(request_id="", outputs=outputs, final=what == 1 and number == 2, index=number)
            if what == 3:
                raise InferenceFailed("it failed")
            yield Response(request_id="", index=3)
        finally:
            self.closed.set()


class Responses:
    """An iterator whose end cancels the call, as the worker's."""

    def __init__(self, called: Called) -> None:
        self.cancel, self._called = called.cancelled.set, called

    def __iter__(self) -> "Responses":
        return self

    def __next__(self) -> Response:
        return self._called.next()

    def __del__(self) -> None:
        self._called.close()


@pytest.mark.parametrize(
    ("what", "taken"),
    [
        (0, '[0.0, 1.0, 2.0, "empty"]'),
        (1, "[0.0, 1.0, 2.0]"),
        (2, """["Failed for execute the inference request. Model 'other' is not ready. no such model"]"""),
        (3, '[0.0, 1.0, 2.0, "it failed"]'),
        (5, '[0.0, 1.0, "stopped"]'),
        (6, '[0.0, 1.0, 2.0, 3.0, "empty"]'),
        (7, '[0.0, 1.0, "empty"]'),
    ],
)
def test_the_responses_of_a_decoupled_model_are_iterated(tmp_path: Path, what: int, taken: str) -> None:
    """The last is an empty response, a failure, or what a cancelled model says; it may go on before."""
    called = Called()
    answers = Streamed(stream=called)
    with loaded(tmp_path, STREAM) as backend:
        ask(backend, answers, what)

    assert answers.parameters[0] == {"taken": taken}


def test_errors_among_the_responses_have_their_codes(tmp_path: Path) -> None:
    failures = ("invalid_request", "model_not_found", "unknown", "inference_failed", "of a newer qinfer")

    def other(request: InferRequest) -> Iterator[Response]:
        for number, code in enumerate(failures):
            yield Response(request_id="", final=False, failure=Failure(code, "no"), index=number)
        yield Response(request_id="", index=len(failures))

    code = (
        execute(
            """
errors = [response.error() for response in call(requests[0]).exec(decoupled=True)]
return [reply(x(requests[0]), parameters={"codes": json.dumps([error and error.code() for error in errors])})]
"""
        )
        + CALL
    )
    answers = Streamed(stream=other)
    with loaded(tmp_path, code) as backend:
        ask(backend, answers, 1)

    assert answers.parameters[0] == {"codes": "[3, 2, 0, 1, 1, null]"}


def test_a_called_model_is_no_faster_than_its_caller(tmp_path: Path) -> None:
    """Responses are fetched one by one, and the end of the batch ends the call."""
    called = Called()
    answers = Streamed(stream=called)
    with loaded(tmp_path, STREAM) as backend:
        ask(backend, answers, 4)
        assert called.closed.wait(20)

    assert called.given == 2
    assert answers.parameters[0] == {"taken": "[0.0, 1.0]"}


def test_a_call_ends_with_its_batch(tmp_path: Path) -> None:
    """An iterator that the model keeps for a later batch has an error as its last response."""
    called = Called()
    answers, later = Streamed(stream=called), Streamed(stream=Called())
    with loaded(tmp_path, STREAM) as backend:
        ask(backend, answers, 4)
        assert called.closed.wait(20)
        ask(backend, later, 0)

    assert later.parameters[0] == {"said": '["the batch that called has ended"]'}


def test_asynchronous_iteration_within_a_decoupled_model(tmp_path: Path) -> None:
    """A decoupled model passes on what another sends, by `async for`, after `execute` has returned."""
    code = (
        execute(
            """
sender = requests[0].get_response_sender()
responses = await call(requests[0]).async_exec(decoupled=True)
async for response in responses:
    if response.output_tensors():
        sender.send(pb_utils.InferenceResponse(response.output_tensors()))
sender.send(flags=1)
"""
        ).replace("def execute", "async def execute")
        + CALL
    )
    called = Called()
    answers = Streamed(stream=called)
    with loaded(tmp_path, code, more=DECOUPLED) as backend:
        ask(backend, answers, 0)

        assert answers.final() == ()

    assert answers.numbers == {0: [0.0, 1.0, 2.0]}


def test_a_thread_of_a_decoupled_model_may_call(tmp_path: Path) -> None:
    """For as long as a request is open, after `execute` has returned."""
    code = (
        execute(
            """
import threading
def work(request):
    sender = request.get_response_sender()
    response = call(request).exec()
    sender.send(pb_utils.InferenceResponse(response.output_tensors()), flags=1)
threading.Timer(0.05, work, args=(requests[0],)).start()
"""
        )
        + CALL
    )
    answers = Streamed()
    answers._call = lambda request: Response(request_id="", outputs=(from_numpy("y", to_numpy(request.inputs[0])),))
    with loaded(tmp_path, code, more=DECOUPLED) as backend:
        ask(backend, answers, 3)
        answers.final()

    assert answers.numbers == {0: [3.0]}


POOL = (
    execute(
        """
import multiprocessing
with multiprocessing.get_context("fork").Pool(4) as pool:
    sums = pool.map(ask, range(12))
    refused = pool.apply(stream)
return [reply(x(request), parameters={"sums": json.dumps(sums), "refused": refused}) for request in requests]
"""
    )
    + """
def ask(number):
    large = np.full((1, 20_000), number, "f4")
    request = pb_utils.InferenceRequest("", 0, [pb_utils.Tensor("x", large)], ["y"], "other")
    response = request.exec()
    return float(response.output_tensors()[0].as_numpy().sum())

def stream():
    try:
        pb_utils.InferenceRequest("", 0, [], ["y"], "other").exec(decoupled=True)
    except pb_utils.TritonModelException as error:
        return str(error)
"""
)


def test_processes_that_the_model_forks_may_call(tmp_path: Path) -> None:
    """As a pool does; several at once, with tensors of any size."""

    def other(request: InferRequest) -> Response:
        return Response(request_id="", outputs=(from_numpy("y", to_numpy(request.inputs[0]) * 2),))

    answers = Answers(other)
    with loaded(tmp_path, POOL) as backend:
        ask(backend, answers, 1)

    assert answers.parameters[0] == {
        "sums": str([n * 40_000.0 for n in range(12)]),
        "refused": "a process that the model has forked can call models that give one response only",
    }
