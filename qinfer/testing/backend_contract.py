"""The contract of backends as tests, which an author of a backend runs with pytest, without Redis and worker.

class TestMine(BackendContract):
    datatypes = ("FP32",)

    def create(self) -> MyBackend:
        return MyBackend()

    def write(self, version_dir: Path, datatype: str, factor: int) -> ModelSpec:
        ...  # a model of y = factor * x
"""

import os
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest

from qinfer.backends.base import Array, Backend, Batch, OneResponse, memory_of
from qinfer.backends.shapes import with_shapes
from qinfer.batching.assemble import assemble
from qinfer.core.messages import InferRequest, Response, Scalar
from qinfer.errors import ModelLoadFailed, QinferError
from qinfer.models.spec import Device, ModelSpec
from qinfer.observe.host import MemoryUse
from qinfer.tensors import DATATYPES, Tensor, from_numpy, to_numpy
from qinfer.testing import wait_until

__all__ = ["Answers", "BackendContract", "run"]

ALL_DATATYPES = tuple(DATATYPES)
_JUNK = b"this is no model\n"
PATIENCE_S = 10.0
"""The longest wait for the resources of an unloaded instance."""


class Answers(OneResponse):
    """A context that keeps the answers to a batch.

    Args:
        call: Answers calls to other models.
        cancelled: The items whose callers have left.

    Attributes:
        by_item: Position of the item → its outputs, or its error.
        parameters: Position of the item → the parameters of its response.
    """

    def __init__(self, call: Callable[[InferRequest], Response] | None = None, cancelled: Sequence[int] = ()) -> None:
        self.by_item: dict[int, tuple[Tensor, ...] | QinferError] = {}
        self.parameters: dict[int, Mapping[str, Scalar]] = {}
        self.made_for: list[int] = []
        self._call = call
        self._cancelled = cancelled

    def respond(
        self,
        item: int,
        outputs: tuple[Tensor, ...] | QinferError,
        *,
        final: bool = True,
        parameters: Mapping[str, Scalar] | None = None,
    ) -> None:
        """Keeps an answer; an item has one."""
        assert item not in self.by_item, f"item {item} was answered twice"
        self.by_item[item] = outputs
        if parameters:
            self.parameters[item] = parameters

    def cancelled(self, item: int) -> bool:
        """Returns whether the item is one of `cancelled`."""
        return item in self._cancelled

    def call(self, request: InferRequest, made_for: int = -1) -> Response:
        """Answers by the function `call`."""
        assert self._call is not None, "the backend called a model"
        self.made_for.append(made_for)
        return self._call(request)

    def array(self, item: int = 0, output: int = 0) -> Array:
        """Returns an output by its position."""
        return to_numpy(self.outputs(item)[output])

    def arrays(self, item: int = 0) -> dict[str, Array]:
        """Returns an item's outputs by name."""
        return {tensor.name: to_numpy(tensor) for tensor in self.outputs(item)}

    def outputs(self, item: int = 0) -> tuple[Tensor, ...]:
        """Returns an item's outputs; an error is an assertion's."""
        outputs = self.by_item[item]
        assert isinstance(outputs, tuple), outputs
        return outputs

    def error(self, item: int = 0) -> QinferError:
        """Returns an item's error."""
        error = self.by_item[item]
        assert isinstance(error, QinferError), error
        return error


def run(
    backend: Backend, inputs: Mapping[str, Array], rows: Sequence[int] = (1,), outputs: Sequence[str] = ()
) -> Answers:
    """Executes a batch of a request for each of `rows`, all of which ask for these outputs; empty = all."""
    answers = Answers()
    requests = [InferRequest(model="m", inputs=(), outputs=tuple(outputs)) for _ in rows]
    backend.execute(Batch(requests=requests, rows=list(rows), inputs=inputs), answers)
    return answers


class _Held(NamedTuple):
    """Resources of this process: threads, descriptors, child processes, and mapped files of a directory."""

    threads: int
    descriptors: int
    children: int
    mapped: int


def _held(directory: Path) -> _Held:
    tasks = os.listdir("/proc/self/task")
    children = 0
    for task in tasks:
        with suppress(OSError):  # the thread has ended meanwhile
            children += len(Path(f"/proc/self/task/{task}/children").read_text().split())
    mapped = Path("/proc/self/maps").read_text().count(str(directory))
    return _Held(len(tasks), len(os.listdir("/proc/self/fd")), children, mapped)


class BackendContract:
    """The tests of a backend; a subclass says how to create the backend and how to write a model.

    Attributes:
        datatypes: The datatypes of tensors that models may have; the first one is used where any will do.
        rtol: The relative tolerance of answers.
        has_files: Whether a version has a file, whose absence or content can fail a load.
        thread_parameter: The parameter with the most threads of an execution; empty = without a limit.
        more_threads: Threads of the runtime beyond that number, such as one that starts the others.
    """

    datatypes: Sequence[str] = ALL_DATATYPES
    rtol = 0.0
    has_files = True
    thread_parameter = ""
    more_threads = 0

    def create(self) -> Backend:
        """Returns a new backend that has loaded nothing."""
        raise NotImplementedError

    def write(self, version_dir: Path, datatype: str, factor: int) -> ModelSpec:
        """Writes the files of a version into an existing directory; returns the configuration.

        The model is `y = factor * x` with `datatype[batch, n]`, or another one that `expected` computes; `factor` is 1
        unless the datatype is the first one. `max_batch_size` must be 4 or more.
        """
        raise NotImplementedError

    def write_ragged(self, version_dir: Path) -> ModelSpec:
        """Writes a model of `y = x` whose input is ragged, of datatype FP32 and dims [-1]; may be left out."""
        pytest.skip("the backend takes no ragged batches")

    def inputs(self, spec: ModelSpec, rows: int) -> dict[str, Array]:
        """Returns inputs of different small numbers, or their digits for BYTES."""
        return {i.name: _example(i.datatype, (rows, *(abs(d) for d in i.dims))) for i in spec.inputs}

    def expected(self, spec: ModelSpec, inputs: Mapping[str, Array], factor: int) -> dict[str, Array]:
        """Returns the outputs of the model that `write` has written: `factor` times the first input."""
        x = inputs[spec.inputs[0].name]
        return {spec.outputs[0].name: x if factor == 1 else x * factor}

    @contextmanager
    def loaded(
        self, directory: Path, datatype: str = "", factor: int = 1, **changes: Any
    ) -> Iterator[tuple[Backend, ModelSpec]]:
        """Writes and loads a version, named by its factor; `changes` are of the configuration."""
        version_dir = directory / str(factor)
        version_dir.mkdir(parents=True, exist_ok=True)
        spec = replace(self.write(version_dir, datatype or self.datatypes[0], factor), **changes)
        backend = with_shapes(self.create(), spec)
        backend.load(spec, version_dir, Device())
        try:
            yield backend, spec
        finally:
            backend.unload()

    def check(self, backend: Backend, spec: ModelSpec, factor: int = 1, rows: Sequence[int] = (1, 2)) -> None:
        """Executes a batch, and compares each item's outputs with its rows of the expected ones."""
        inputs = self.inputs(spec, sum(rows))
        self._compare(run(backend, inputs, rows), spec, inputs, factor, rows)

    def pytest_generate_tests(self, metafunc: pytest.Metafunc) -> None:
        """Makes a test of each datatype; pytest calls it."""
        if "datatype" in metafunc.fixturenames:
            metafunc.parametrize("datatype", self.datatypes)

    def test_every_datatype_goes_through(self, datatype: str, tmp_path: Path) -> None:
        with self.loaded(tmp_path, datatype) as (backend, spec):
            self.check(backend, spec)

    def test_batches_of_one_request_and_of_the_largest_size(self, tmp_path: Path) -> None:
        with self.loaded(tmp_path) as (backend, spec):
            assert isinstance(backend.short_on_loop, bool), "short_on_loop must be True or False"
            assert spec.max_batch_size >= 4, "the contract needs batches of 4 rows"
            for rows in ([1], [spec.max_batch_size], [1] * spec.max_batch_size):
                self.check(backend, spec, rows=rows)

    def test_a_request_without_rows_is_answered_with_none_or_refused(self, tmp_path: Path) -> None:
        with self.loaded(tmp_path) as (backend, spec):
            inputs = self.inputs(spec, 0)
            answers = _tried(backend, inputs, [0])

            if answers is not None and isinstance(answers.by_item[0], tuple):
                self._compare(answers, spec, inputs, 1, [0])
            self.check(backend, spec, rows=(0, 2))

    def test_an_item_gets_the_outputs_that_it_names(self, tmp_path: Path) -> None:
        with self.loaded(tmp_path) as (backend, spec):
            name = spec.outputs[-1].name
            answers = run(backend, self.inputs(spec, 2), (1, 1), [name])

            assert list(answers.arrays(0)) == list(answers.arrays(1)) == [name]

    def test_inputs_may_be_read_only_and_stay_as_they_are(self, tmp_path: Path) -> None:
        with self.loaded(tmp_path) as (backend, spec):
            inputs = self.inputs(spec, 3)
            before = {name: array.copy() for name, array in inputs.items()}
            for array in inputs.values():
                array.flags.writeable = False
            answers = run(backend, inputs, (1, 2))

            self._compare(answers, spec, before, 1, (1, 2))
            for name, array in before.items():
                np.testing.assert_array_equal(inputs[name], array, f"the backend wrote into input '{name}'")

    def test_answers_outlive_the_next_execution(self, tmp_path: Path) -> None:
        with self.loaded(tmp_path) as (backend, spec):
            inputs = self.inputs(spec, 3)
            answers = run(backend, inputs, (1, 2))
            run(backend, {name: np.zeros_like(array) for name, array in inputs.items()}, (1, 2))

            self._compare(answers, spec, inputs, 1, (1, 2))

    def test_requests_of_different_shapes_share_a_batch(self, tmp_path: Path) -> None:
        version_dir = tmp_path / "1"
        version_dir.mkdir()
        spec = self.write_ragged(version_dir)
        backend = with_shapes(self.create(), spec)
        backend.load(spec, version_dir, Device())
        arrays = [np.full((1, n), n, np.float32) for n in (3, 1, 2)]
        name = spec.inputs[0].name
        requests = [InferRequest(model="m", inputs=(from_numpy(name, array),)) for array in arrays]
        answers = Answers()
        try:
            backend.execute(assemble(requests, [1, 1, 1], {name}), answers)
        finally:
            backend.unload()

        for item, array in enumerate(arrays):
            np.testing.assert_allclose(answers.array(item), array, self.rtol)

    def test_a_batch_that_fails_leaves_the_next_one_alone(self, tmp_path: Path) -> None:
        with self.loaded(tmp_path) as (backend, spec):
            answers = _tried(backend, {}, [1, 1])

            given = [] if answers is None else list(answers.by_item.values())
            assert not any(isinstance(each, tuple) for each in given), "a batch without inputs was answered"
            self.check(backend, spec)

    def test_a_missing_file_fails_the_load_without_a_path(self, tmp_path: Path) -> None:
        self._refused(tmp_path, _remove)

    def test_a_file_that_is_no_model_fails_the_load_without_a_path(self, tmp_path: Path) -> None:
        self._refused(tmp_path, lambda file: file.write_bytes(_JUNK))

    def test_memory_is_measured_from_any_thread_and_after_the_end(self, tmp_path: Path) -> None:
        with self.loaded(tmp_path) as (backend, spec), ThreadPoolExecutor(1) as threads:
            running = threads.submit(self.check, backend, spec)
            uses = memory_of(backend)
            running.result()
        memory_of(backend)

        assert all(isinstance(use, MemoryUse) and use.nbytes >= 0 for use in uses), f"memory returned {uses}"

    def test_unload_frees_threads_files_and_processes(self, tmp_path: Path) -> None:
        """The first instance of a process may leave what all share, such as a pool of threads."""
        for _ in range(2):
            with self.loaded(tmp_path) as (backend, spec):
                self.check(backend, spec)
            del backend
        before = _held(tmp_path)
        for _ in range(3):
            with self.loaded(tmp_path) as (backend, spec):
                self.check(backend, spec)
            del backend

        def is_freed() -> bool:
            return all(now <= then for now, then in zip(_held(tmp_path), before, strict=True))

        wait_until(is_freed, PATIENCE_S, lambda: f"three instances are unloaded: {_held(tmp_path)} of {before}")
        assert _held(tmp_path).mapped == 0, "a file of the version is still mapped into memory"

    def test_two_versions_answer_for_themselves(self, tmp_path: Path) -> None:
        with self.loaded(tmp_path, factor=3) as (third, spec):
            with self.loaded(tmp_path, factor=1) as (first, _):
                for _ in range(2):
                    self.check(first, spec)
                    self.check(third, spec, 3)
            self.check(third, spec, 3)

    def test_instances_execute_at_once_in_any_thread(self, tmp_path: Path) -> None:
        meeting = threading.Barrier(2)

        def execute(backend: Backend, spec: ModelSpec) -> None:
            meeting.wait(30.0)
            for _ in range(8):
                self.check(backend, spec)

        with self.loaded(tmp_path) as one, self.loaded(tmp_path) as other:
            for _ in range(2):
                with ThreadPoolExecutor(2) as threads:
                    running = [threads.submit(execute, *each) for each in (one, other)]
                assert [each.exception() for each in running] == [None, None]

    @pytest.mark.parametrize("limit", [1, 3])
    def test_threads_are_as_many_as_configured(self, limit: int, tmp_path: Path) -> None:
        if not self.thread_parameter:
            pytest.skip("the backend has no limit of threads")
        with self.loaded(tmp_path) as (backend, spec):  # starts what all instances share
            self.check(backend, spec)
        before = _held(tmp_path).threads
        parameters = {**spec.parameters, self.thread_parameter: str(limit)}
        with self.loaded(tmp_path, parameters=parameters) as (backend, spec):
            self.check(backend, spec, rows=[spec.max_batch_size])
            added = _held(tmp_path).threads - before

        assert added < limit + self.more_threads, f"{added} threads beside the caller's, of {limit} together"

    def _refused(self, directory: Path, damage: Callable[[Path], object]) -> None:
        if not self.has_files:
            pytest.skip("the backend reads no files")
        version_dir = directory / "1"
        version_dir.mkdir()
        spec = self.write(version_dir, self.datatypes[0], 1)
        for file in [path for path in version_dir.rglob("*") if path.is_file()]:
            damage(file)
        with pytest.raises(ModelLoadFailed) as failure:
            self.create().load(spec, version_dir, Device())
        assert str(directory) not in failure.value.message, "clients read the message: it must not show a path"

    def _compare(
        self, answers: Answers, spec: ModelSpec, inputs: Mapping[str, Array], factor: int, rows: Sequence[int]
    ) -> None:
        datatypes = {output.name: output.datatype for output in spec.outputs}
        assert sorted(answers.by_item) == list(range(len(rows))), "every item needs one answer"
        end = 0
        for item, count in enumerate(rows):
            end += count
            named = {tensor.name: tensor for tensor in answers.outputs(item)}
            for name, whole in self.expected(spec, inputs, factor).items():
                assert name in named, f"output '{name}' is missing"
                found = named[name]
                assert found.datatype == datatypes[name], f"'{name}' is {found.datatype}, declared {datatypes[name]}"
                wanted = whole[end - count : end]
                if wanted.dtype.kind == "f":
                    np.testing.assert_allclose(to_numpy(found), wanted, self.rtol, err_msg=name)
                else:
                    np.testing.assert_array_equal(to_numpy(found), wanted, name)


def _remove(file: Path) -> None:
    file.unlink()


def _tried(backend: Backend, inputs: Mapping[str, Array], rows: Sequence[int]) -> Answers | None:
    """Returns the answers to a batch; `None` if the execution raises."""
    try:
        return run(backend, inputs, rows)
    except Exception:  # noqa: BLE001  any error of a backend fails its batch
        return None


def _example(datatype: str, shape: tuple[int, ...]) -> Array:
    numbers = np.arange(int(np.prod(shape)))
    if datatype == "BYTES":
        return np.array([str(n).encode() for n in numbers.tolist()] or [], dtype=object).reshape(shape)
    modulus = 2 if datatype == "BOOL" else 100
    return (numbers % modulus).astype(DATATYPES[datatype].numpy or "<f4").reshape(shape)
