"""The python backend: what a `model.py` is given, and what becomes of what it returns.

Every model is a real process.
"""

import json
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from qinfer.backends.python import PythonBackend
from qinfer.batching.assemble import assemble
from qinfer.core.messages import InferRequest
from qinfer.errors import (
    AlreadyExists,
    Cancelled,
    InferenceFailed,
    InvalidRequest,
    ModelNotFound,
    ModelNotReady,
    QinferError,
    UnknownFailure,
    UnsupportedFeature,
)
from qinfer.tensors import from_numpy
from tests.support.backends import Answers
from tests.support.python_models import ECHO, batch_of, execute, floats, load, loaded, run, write_model

# Does what the first number of a batch says; several tests share its process.
VERSATILE = execute(
    """
what = int(x(requests[0]).flat[0])
if what == 0:
    return [reply(x(request)) for request in requests]
if what == 1:
    return [
        pb_utils.InferenceResponse(error=pb_utils.TritonError(f"item {item}")) if item == 1 else reply(x(request))
        for item, request in enumerate(requests)
    ]
if what == 2:
    raise ValueError("no such thing")
if what == 3:
    return []
if what == 4:
    return tuple(requests)
if what == 5:
    return [1 for _ in requests]
if what == 6:
    return [None for _ in requests]
if what == 7:
    requests[0].get_response_sender().send(reply(x(requests[0])), flags=1)
    return None
if what == 8:
    sys.exit(3)
if what == 9:
    error = pb_utils.TritonError("coded", int(x(requests[0]).flat[1]))
    return [pb_utils.InferenceResponse(error=error)]
if what == 10:
    said = json.loads(requests[0].parameters())
    return [reply(x(requests[0]), parameters={**said, "d": str(said["d"]), "more": 15})]
if what == 11:
    return [reply(np.array([[request.is_cancelled()]], "f4")) for request in requests]
if what == 12:
    self.kept = getattr(self, "kept", [])
    self.kept.append(pb_utils.get_input_tensor_by_name(requests[0], "x"))
    return [reply(self.kept[0].as_numpy())]
if what == 13:
    return [reply(np.zeros((1, 1), "c8"))]
if what == 14:
    x(requests[0])[:] += 1
    return [reply(x(requests[0]))]
if what == 15:
    request = requests[0]
    return [reply(np.array([[request.timeout(), request.correlation_id(), request.flags()]], "f4"),
                  parameters={"id": request.request_id(), "trace": str(request.trace().get_context())})]
""",
    before="kept = []",
)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Iterator[PythonBackend]:
    with loaded(tmp_path_factory.mktemp("repository"), VERSATILE) as backend:
        yield backend


def failure(backend: PythonBackend, what: float) -> str:
    with pytest.raises(InferenceFailed) as caught:
        run(backend, floats(what))
    return caught.value.message


def test_each_request_is_its_own_rows(model: PythonBackend) -> None:
    """`execute` gets requests, not a stacked batch, and each gets its own answer."""
    array = np.array([[0, 1], [2, 3], [4, 5], [6, 7]], "<f4")

    answers = run(model, array, rows=[1, 2, 1])

    np.testing.assert_array_equal(answers.array(0), array[:1])
    np.testing.assert_array_equal(answers.array(1), array[1:3])
    np.testing.assert_array_equal(answers.array(2), array[3:])


@pytest.mark.parametrize(
    ("datatype", "dtype"),
    [
        ("BOOL", "?"),
        ("UINT8", "u1"),
        ("UINT16", "<u2"),
        ("UINT32", "<u4"),
        ("UINT64", "<u8"),
        ("INT8", "i1"),
        ("INT16", "<i2"),
        ("INT32", "<i4"),
        ("INT64", "<i8"),
        ("FP16", "<f2"),
        ("FP64", "<f8"),
    ],
)
def test_every_datatype_goes_through(model: PythonBackend, datatype: str, dtype: str) -> None:
    """In its own dtype."""
    array = np.array([[0, 1], [1, 0]]).astype(dtype)
    model._datatypes, model_datatypes = {"x": datatype}, model._datatypes
    try:
        answers = run(model, array, rows=[1, 1])
    finally:
        model._datatypes = model_datatypes

    outputs = answers.by_item[0]
    assert isinstance(outputs, tuple)
    assert outputs[0].datatype == datatype
    np.testing.assert_array_equal(answers.array(1), array[1:])


def test_bf16_is_float32_to_the_model(tmp_path: Path) -> None:
    """And BF16 again to the client, because its configuration says so."""
    code = execute("assert x(requests[0]).dtype == 'f4'\nreturn [reply(x(request) * 2) for request in requests]")
    with loaded(tmp_path, code, datatype="BF16") as backend:
        answers = run(backend, floats(1.5, 2.0))

    outputs = answers.by_item[1]
    assert isinstance(outputs, tuple)
    assert (outputs[0].datatype, outputs[0].nbytes) == ("BF16", 2)
    assert [float(answers.array(item).item()) for item in (0, 1)] == [3.0, 4.0]


def test_strings_are_objects_of_bytes(tmp_path: Path) -> None:
    """As in Triton; `str` and `np.bytes_` are strings too on the way out."""
    code = execute(
        "assert all(type(e) is bytes for r in requests for e in x(r).flat)\n"
        "return [reply(np.array([[e.decode() + '!'] for e in x(r).flat], dtype=object)) for r in requests]"
    )
    array = np.array([[b"a"], ["ü".encode()], [b"" * 70_000]], dtype=object)
    with loaded(tmp_path, code, datatype="STRING", dims="1") as backend:
        answers = run(backend, array, rows=[2, 1])

    assert answers.array(0).tolist() == [[b"a!"], ["ü!".encode()]]
    assert answers.array(1).tolist() == [[b"!"]]


def test_large_tensors_go_by_shared_memory(model: PythonBackend) -> None:
    """In both directions, several times, with the answers kept meanwhile."""
    arrays = [np.arange(500_000, dtype="<f4").reshape(2, -1) * (n + 1) for n in range(5)]

    answers = [run(model, array) for array in arrays]

    for array, answer in zip(arrays, answers, strict=True):
        np.testing.assert_array_equal(answer.array(0), array[:1])
        np.testing.assert_array_equal(answer.array(1), array[1:])


def test_what_a_model_keeps_stays_as_it_was(model: PythonBackend) -> None:
    """Later batches do not write over the memory of a tensor that somebody holds."""
    first = np.full((1, 200_000), 12, "<f4")

    run(model, first)
    for value in range(3):
        run(model, np.full((1, 200_000), 0.1 * value, "<f4"))
    second = first.copy()
    second[0, 1:] = 99

    np.testing.assert_array_equal(run(model, second).array(), first)


def test_a_model_may_write_to_its_inputs(model: PythonBackend) -> None:
    """They are its own: what was sent stays as it is."""
    array = floats(14)

    assert run(model, array).array() == 15
    assert array == 14


def test_an_error_fails_its_request_only(model: PythonBackend) -> None:
    """The others are answered."""
    answers = run(model, floats(1, 2, 3))

    assert isinstance(answers.error(1), InferenceFailed)
    assert answers.error(1).message == "item 1"
    assert [float(answers.array(item).item()) for item in (0, 2)] == [1.0, 3.0]


@pytest.mark.parametrize(
    ("code", "kind"),
    [
        (0, UnknownFailure),
        (1, InferenceFailed),
        (2, ModelNotFound),
        (3, InvalidRequest),
        (4, ModelNotReady),
        (5, UnsupportedFeature),
        (6, AlreadyExists),
        (7, Cancelled),
    ],
)
def test_the_code_of_an_error_is_the_clients(model: PythonBackend, code: int, kind: type[QinferError]) -> None:
    """Triton's error codes are the kinds of failure that clients see."""
    error = run(model, np.array([[9, code]], "<f4")).error()

    assert (type(error), error.message) == (kind, "coded")


def test_an_exception_fails_the_batch(model: PythonBackend) -> None:
    """With Triton's words and the exception's, and without a path; the process goes on."""
    assert failure(model, 2) == "Failed to process the request(s) for model 'm', message: ValueError: no such thing"
    assert failure(model, 8) == "Failed to process the request(s) for model 'm', message: SystemExit: 3"
    assert run(model, floats(0)).array() == 0.0


@pytest.mark.parametrize(
    ("what", "text"),
    [
        (3, "InferenceRequest(s) size is:1, and InferenceResponse(s) size is:0"),
        (4, "Expected a list in the execute return, found type '<class 'tuple'>'."),
        (5, "Expected an 'InferenceResponse' object in the execute function return list, found type '<class 'int'>'."),
    ],
)
def test_what_execute_may_not_return(model: PythonBackend, what: int, text: str) -> None:
    """Triton's texts."""
    assert text in failure(model, what)


def test_a_response_that_is_missing(model: PythonBackend) -> None:
    """`None` answers nothing, unless the response was sent."""
    assert run(model, floats(6)).error().message == "the model returned no response to the request"
    assert run(model, floats(7)).array() == 7.0


def test_outputs_of_no_wire_datatype_fail_their_request(model: PythonBackend) -> None:
    """Complex numbers have none."""
    assert "complex64" in run(model, floats(13)).error().message


def test_outputs_that_nobody_asked_for_are_left_out(model: PythonBackend) -> None:
    """The worker refuses one that was asked for and is not there: see `Responder`."""
    assert run(model, floats(0), outputs=("y",)).array() == 0.0
    assert run(model, floats(0), outputs=("z",)).outputs() == ()


def test_parameters_go_both_ways(model: PythonBackend) -> None:
    """A request's as JSON, a response's as a dict."""
    said = {"a": True, "b": 2, "c": "ü", "d": 0.5}

    assert run(model, floats(10), parameters=said).parameters[0] == {**said, "d": "0.5", "more": 15}


def test_cancelled_requests_can_be_told(model: PythonBackend) -> None:
    """`is_cancelled` asks the worker."""
    answers = Answers(cancelled=(1,))

    model.execute(batch_of(floats(11, 0, 0)), answers)

    assert [float(answers.array(item).item()) for item in range(3)] == [0.0, 1.0, 0.0]


def test_the_rest_of_a_request(model: PythonBackend) -> None:
    """Id, timeout in microseconds, trace; no sequence."""
    answers = run(model, floats(15), client_id="mine", timeout_s=0.5, trace="00-ab-cd-01")

    assert answers.array().tolist() == [[500_000, 0, 0]]
    assert answers.parameters[0] == {"id": "mine", "trace": '{"traceparent": "00-ab-cd-01"}'}


def test_a_coroutine_is_awaited(tmp_path: Path) -> None:
    """On one event loop for all batches."""
    code = ECHO.replace("def execute", "async def execute")
    with loaded(tmp_path, code) as backend:
        assert run(backend, floats(1)).array() == 1.0
        assert run(backend, floats(2)).array() == 2.0


LATER = """
import asyncio
what, loop = int(x(requests[0]).flat[0]), asyncio.get_running_loop()
def send(request):
    request.get_response_sender().send(reply(x(request)), flags=1)
async def answer(request):
    await asyncio.sleep(0.01)
    if what == 3:
        raise ValueError("no such thing")
    if what == 4:
        sys.exit(7)
    send(request)
if what == 2:
    for request in requests:
        loop.call_later(0.01, send, request)
else:
    for request in requests:
        loop.create_task(answer(request))
"""


@pytest.fixture(scope="module")
def late(tmp_path_factory: pytest.TempPathFactory) -> Iterator[PythonBackend]:
    code = execute(LATER).replace("def execute", "async def execute")
    with loaded(tmp_path_factory.mktemp("repository"), code) as backend:
        yield backend


@pytest.mark.parametrize("what", [1, 2], ids=["task", "callback"])
def test_the_event_loop_answers_after_execute_has_returned(late: PythonBackend, what: int) -> None:
    answers = run(late, floats(what, 0, 5))

    assert [float(answers.array(item).item()) for item in range(3)] == [what, 0.0, 5.0]


@pytest.mark.parametrize(
    ("what", "text"), [(3, "ValueError: no such thing"), (4, "SystemExit: 7")], ids=["raises", "exits"]
)
def test_a_task_that_ends_without_an_answer_fails_its_request(late: PythonBackend, what: int, text: str) -> None:
    """The event loop runs on: the next request is answered."""
    failed = run(late, floats(what))

    assert text in failed.error().message
    assert run(late, floats(1)).array() == 1.0


def test_initialize_gets_tritons_arguments(tmp_path: Path) -> None:
    """Their keys, all of them strings; helpers beside the model can be imported; no byte code is left there."""
    code = execute(
        "return [reply(x(r), parameters={'said': json.dumps([self.args, pb_utils.get_model_dir(), VALUE])})"
        " for r in requests]",
        before="def initialize(self, args):\n    self.args = args",
    ).replace("import ctypes", "from .helper import VALUE\nimport ctypes")
    directory = write_model(tmp_path, code, more="instance_group { count: 1 kind: KIND_CPU }")
    (directory / "helper.py").write_text("VALUE = 7\n")
    backend = load(directory)
    try:
        args, model_dir, value = json.loads(str(run(backend, floats(0)).parameters[0]["said"]))
    finally:
        backend.unload()

    config = json.loads(args.pop("model_config"))
    assert (config["name"], config["max_batch_size"], config["input"][0]["dims"]) == ("m", 64, [-1])
    assert args == {
        "model_instance_kind": "CPU",
        "model_instance_name": "m_0_0",
        "model_instance_device_id": "0",
        "model_repository": str(tmp_path / "m"),
        "model_version": "1",
        "model_name": "m",
    }
    assert (model_dir, value) == (str(directory), 7)
    assert sorted(path.name for path in directory.iterdir()) == ["helper.py", "model.py"]


def test_large_inputs_are_assembled_in_memory_of_the_process(tmp_path: Path) -> None:
    """One copy on the way there; small ones go with the message."""
    images = [np.full((1, 50_000), value, "<f4") for value in range(3)]
    requests = [InferRequest(model="m", inputs=(from_numpy("x", image),)) for image in images]
    with loaded(tmp_path, ECHO) as backend:
        for _ in range(3):
            answers, batch = Answers(), assemble(requests, [1, 1, 1], room=backend.room)
            backend.execute(batch, answers)
            for item, image in enumerate(images):
                np.testing.assert_array_equal(answers.array(item), image)
            assert not batch.inputs["x"].flags.owndata
        process = backend._instance.process()
        assert process is not None
        assert process.channel._count <= 2  # the process gives one back with its next answer
        assert backend.room([64]) is None


@pytest.mark.parametrize(
    "second",
    [
        "reply(x(request)[:, ::-1][:, :1])",
        'reply(x(request).astype("<f8"))',
        "reply(x(request).reshape(-1))",
        'reply(x(request), "other")',
        'reply(x(request), parameters={"a": 1})',
        'reply(np.zeros((0, 2), "<f4"))',
        'reply(np.array([["a", "b"]], object))',
        'reply(np.array(3, "<f4"))',
    ],
)
def test_unlike_answers_are_what_the_model_returned(tmp_path: Path, second: str) -> None:
    """Whatever the first of the batch is."""
    body = f"return [{second} if item else reply(x(request)) for item, request in enumerate(requests)]"
    with loaded(tmp_path, execute(body)) as backend:
        answers = run(backend, np.array([[1, 2], [3, 4], [5, 6]], "<f4"))

    assert answers.array(0).tolist() == [[1, 2]]
    expected = {
        "[:, :1]": [[4]],
        "f8": [[3, 4]],
        "(-1)": [3, 4],
        "other": None,
        "param": [[3, 4]],
        "zeros": [],
        "object": [[b"a", b"b"]],
        "array(3": 3,
    }
    (wanted,) = [value for key, value in expected.items() if key in second]
    assert (answers.array(1).tolist() if answers.outputs(1) else None) == wanted
