"""C backends in Triton's core: answers, errors, streams, sequences, and processes that die."""

import logging
import threading
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from qinfer.backends import parameters
from qinfer.backends.base import Array, Batch
from qinfer.backends.parameters import use_triton_files
from qinfer.backends.triton import TritonBackend
from qinfer.backends.triton_host.library import TritonFiles
from qinfer.core.messages import InferRequest, SequenceFlags
from qinfer.errors import InferenceFailed, InvalidRequest, ModelLoadFailed, ModelNotReady, SequenceLost
from qinfer.models.spec import Device
from qinfer.tensors import Tensor, from_numpy
from qinfer.testing import wait_until
from tests.support.backends import Answers
from tests.support.c_backends import compile_backends, loaded, triton, write_model
from tests.support.python_models import Streamed, spec_of


@pytest.fixture(scope="module")
def backends(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return compile_backends(tmp_path_factory.mktemp("c_backends"))


@pytest.fixture(autouse=True)
def _usual_places(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(parameters, "_engine_cache", [tmp_path / "cache"])
    yield
    use_triton_files(TritonFiles())


def ints(*values: int) -> Array:
    return np.array(values, dtype="<i4").reshape(-1, 1)


def batch_of(array: Array, *, rows: list[int] | None = None, **fields: object) -> Batch:
    rows = rows or [1] * len(array)
    requests = [InferRequest(model="m", inputs=(), client_id=f"r{n}", **fields) for n in range(len(rows))]  # type: ignore[arg-type]
    return Batch(requests=requests, rows=rows, inputs={"INPUT": array})


def run(model: TritonBackend, array: Array, **fields: object) -> Answers:
    answers = Answers()
    model.execute(batch_of(array, **fields), answers)  # type: ignore[arg-type]
    return answers


def test_each_request_of_a_batch_gets_its_own_outputs_and_parameters(tmp_path: Path, backends: Path) -> None:
    with loaded(tmp_path, backends, "identity") as model:
        answers = run(model, np.arange(12, dtype="<i4").reshape(4, 3), rows=[1, 2, 1], parameters={"delay_ms": 2})

    assert [answers.array(item).tolist() for item in range(3)] == [
        [[0, 1, 2]],
        [[3, 4, 5], [6, 7, 8]],
        [[9, 10, 11]],
    ]
    assert [answers.parameters[item] for item in range(3)] == [{"served": f"r{n}", "waited_ms": 2} for n in range(3)]


def test_floats_are_squared(tmp_path: Path, backends: Path) -> None:
    with loaded(tmp_path, backends, "square") as model:
        answers = run(model, np.array([[2.0, -3.0], [0.5, 0.0]], "<f4"))

    assert [answers.array(item).tolist() for item in range(2)] == [[[4.0, 9.0]], [[0.25, 0.0]]]


@pytest.mark.parametrize(
    ("datatype", "array"),
    [
        ("STRING", np.array([[b"a", b""], [b"\xff\x00", b"long" * 1000]], dtype=object)),
        ("BOOL", np.array([[True, False], [False, True]])),
        ("FP16", np.array([[1.5, 2], [3, -4]], "<f2")),
        ("UINT64", np.array([[2**64 - 1, 2], [3, 4]], "<u8")),
        ("FP64", np.zeros((2, 0), "<f8")),
    ],
)
def test_every_datatype_comes_back_as_it_was(tmp_path: Path, backends: Path, datatype: str, array: Array) -> None:
    with loaded(tmp_path, backends, "identity", datatype=datatype) as model:
        answers = run(model, array)

    for item in range(2):
        np.testing.assert_array_equal(answers.array(item), array[item : item + 1])
        assert answers.array(item).dtype == array.dtype


def test_bfloat16_keeps_its_bits(tmp_path: Path, backends: Path) -> None:
    array = np.array([[1.5, -2.0], [3.25, 0.0]], "<f4")

    with loaded(tmp_path, backends, "identity", datatype="BF16") as model:
        answers = run(model, array)

    assert answers.outputs(0)[0].datatype == "BF16"
    np.testing.assert_array_equal(answers.array(1), array[1:])


def test_a_large_batch_is_made_in_the_memory_of_the_process(tmp_path: Path, backends: Path) -> None:
    array = np.arange(100_000, dtype="<i4").reshape(2, -1)
    with loaded(tmp_path, backends, "identity") as model:
        places = model.room([array.nbytes])
        assert places is not None
        places[0][:] = array.view(np.uint8).reshape(-1)
        answers = run(model, places[0].view("<i4").reshape(array.shape))

    np.testing.assert_array_equal(answers.array(1), array[1:])


def test_errors_are_those_of_the_request_that_caused_them(tmp_path: Path, backends: Path) -> None:
    with loaded(tmp_path, backends, "errors") as model:
        answers = run(model, ints(0, 3, 4, 1, 0))

    assert [answers.array(0).item(), answers.array(4).item()] == [0, 0]
    assert [type(answers.error(item)) for item in (1, 2, 3)] == [InvalidRequest, ModelNotReady, InferenceFailed]
    assert answers.error(1).message == "the input asks for this error"


def test_a_failed_execution_fails_its_requests(tmp_path: Path, backends: Path) -> None:
    with loaded(tmp_path, backends, "errors") as model:
        failed = run(model, ints(-1)).error()
        then = run(model, ints(0))

    assert (type(failed), failed.message) == (ModelNotReady, "the execution failed")
    assert then.array().item() == 0


@pytest.mark.parametrize("chosen", [1, 2])
def test_an_impossible_shape_fails_its_request_only(tmp_path: Path, backends: Path, chosen: int) -> None:
    with loaded(tmp_path, backends, "shapes") as model:
        answers = run(model, ints(chosen, 0))

    assert (type(answers.error(0)), answers.array(1).item()) == (InferenceFailed, 0)
    assert answers.error(0).message.startswith("output 'OUTPUT' has 4 bytes")


def test_a_crash_costs_the_process_only(tmp_path: Path, backends: Path) -> None:
    with loaded(tmp_path, backends, "crash") as model:
        with pytest.raises(InferenceFailed, match="signal 11: SIGSEGV"):
            run(model, ints(-5))
        answers = run(model, ints(5))

    assert answers.array().item() == 5


def test_a_hang_ends_with_its_process(tmp_path: Path, backends: Path) -> None:
    more = 'dynamic_batching { } parameters { key: "qinfer.execute_timeout_s" value { string_value: "0.1" } }'
    with loaded(tmp_path, backends, "identity", more=more) as model:

        def interrupt() -> None:
            wait_until(model.interrupt, timeout_s=30)

        watchdog = threading.Thread(target=interrupt)
        watchdog.start()
        with pytest.raises(InferenceFailed, match="signal 9"):
            run(model, ints(1), parameters={"delay_ms": 600_000})
        watchdog.join()
        answers = run(model, ints(2))

    assert answers.array().item() == 2


def test_a_leak_shows_in_the_memory_of_the_model_and_ends_with_it(tmp_path: Path, backends: Path) -> None:
    with loaded(tmp_path, backends, "leak") as model:
        before = model.memory()[0].nbytes
        run(model, ints(*range(8)))
        after = model.memory()[0].nbytes

    assert after - before >= 8 * 8 * 2**20
    assert model.memory() == ()


def test_decoupled_responses_come_in_order_and_go_to_their_callers(tmp_path: Path, backends: Path) -> None:
    ctx = Streamed()
    with loaded(tmp_path, backends, "repeat") as model:
        model.execute(batch_of(np.array([[1, 2, 3], [7, 8, 9]], "<i4")), ctx)
        finals = [ctx.final(0), ctx.final(1)]

    assert ctx.numbers == {0: [1, 2, 3], 1: [7, 8, 9]}
    assert finals == [(), ()]


def test_a_decoupled_error_does_not_end_its_stream(tmp_path: Path, backends: Path) -> None:
    ctx = Streamed()
    with loaded(tmp_path, backends, "repeat") as model:
        model.execute(batch_of(np.array([[1, -1, 3]], "<i4")), ctx)
        ctx.final()

    assert (ctx.numbers[0], ctx.errors) == ([1, 3], ["a negative element"])


def test_a_caller_that_leaves_cancels_its_request_in_the_core(
    tmp_path: Path, backends: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    ctx = Streamed()
    with loaded(tmp_path, backends, "repeat") as model:
        model.execute(batch_of(np.arange(1000, dtype="<i4")[None], parameters={"delay_ms": 20}), ctx)
        ctx.await_count(2)
        ctx.cancel()
        wait_until(lambda: "cancelled after" in _output(caplog), timeout_s=30)

    assert len(ctx.numbers[0]) < 1000


def test_a_full_window_holds_the_backend_back(tmp_path: Path, backends: Path) -> None:
    ctx = Streamed(window_bytes=2048)
    with loaded(tmp_path, backends, "repeat") as model:
        model.execute(batch_of(np.arange(100, dtype="<i4")[None]), ctx)
        ctx.await_count(2)
        sent = len(ctx.numbers[0])
        ctx.take(1 << 20)
        ctx.final()

    assert sent < 100
    assert ctx.numbers[0] == list(range(100))


def test_sequences_keep_their_state_in_the_backend(tmp_path: Path, backends: Path) -> None:
    def step(values: dict[int, int], *, start: bool = False, end: bool = False) -> list[int]:
        requests = [
            InferRequest(model="m", inputs=(tensor(value),), sequence=SequenceFlags(id=id_, start=start, end=end))
            for id_, value in values.items()
        ]
        # A row without a request fills the batch up.
        batch = Batch(
            requests=[*requests, InferRequest(model="m", inputs=())],
            rows=[1] * (len(values) + 1),
            inputs={"INPUT": ints(*values.values(), 0), "START": ints(*[9] * len(values), 0)},
        )
        answers = Answers()
        model.execute(batch, answers)
        return [answers.array(item).item() for item in range(len(values))]

    with loaded(tmp_path, backends, "sequence") as model:
        sums = [
            step({5: 1, 6: 10}, start=True),
            step({6: 20, 5: 2}),
            step({5: 3, 6: 30}, end=True),
            step({5: 9}, start=True),
        ]

    assert sums == [[1, 10], [30, 3], [6, 60], [9]]


def test_a_sequence_is_lost_with_its_process(tmp_path: Path, backends: Path) -> None:
    request = InferRequest(model="m", inputs=(tensor(1),), sequence=SequenceFlags(id=5, start=True, end=False))
    batch = Batch(requests=[request], rows=[1], inputs={"INPUT": ints(1)})
    with loaded(tmp_path, backends, "sequence") as model:
        model.execute(batch, Answers())
        process = model._instance.running
        assert process is not None
        process.interrupt()
        with pytest.raises(SequenceLost):
            model.execute(batch, Answers())


def test_lines_and_metrics_of_the_backend_are_those_of_the_model(
    tmp_path: Path, backends: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    with loaded(tmp_path, backends, "identity") as model:
        run(model, ints(1, 2, 3))
        wait_until(lambda: "the subject executes" in _output(caplog), timeout_s=30)
        series = model.metrics()

    levels = {record.levelname for record in caplog.records if "subject executes" in str(getattr(record, "text", ""))}
    assert levels == {"WARNING"}
    assert [(s.name, s.kind, s.labels, s.values) for s in series] == [
        ("subject_requests", "counter", (("subject", "identity"),), (3.0,))
    ]


def test_a_library_beside_the_model_is_found_without_a_directory_of_backends(tmp_path: Path, backends: Path) -> None:
    directory = write_model(tmp_path, "mine", more="")
    (directory.parent / "libtriton_mine.so").write_bytes((backends / "identity" / "libtriton_identity.so").read_bytes())
    use_triton_files(TritonFiles(str(triton()), str(tmp_path / "none")))
    model = TritonBackend()

    model.load(spec_of(directory), directory, Device())
    answers = run(model, ints(7))
    model.unload()

    assert answers.array().item() == 7


def test_a_backend_that_the_core_refuses_fails_the_load_without_paths(tmp_path: Path, backends: Path) -> None:
    directory = write_model(tmp_path, "broken")
    (directory / "libtriton_broken.so").write_text("not a library")
    use_triton_files(TritonFiles(str(triton()), str(backends)))

    with pytest.raises(ModelLoadFailed, match="file too short") as refused:
        TritonBackend().load(spec_of(directory), directory, Device())

    assert str(tmp_path) not in refused.value.message
    assert "cache" not in refused.value.message


def tensor(value: int) -> Tensor:
    return from_numpy("INPUT", ints(value))


def _output(caplog: pytest.LogCaptureFixture) -> str:
    return "\n".join(str(getattr(record, "text", "")) for record in caplog.records)
