"""The tensorrt backend's own logic, on an engine that is played: buffers, shapes, graphs. Nothing of it needs a GPU.

`Engine` doubles its input; "the GPU" is memory of this process. What TensorRT and CUDA do is covered by tests/gpu.
"""

import ctypes
import importlib
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest

from qinfer.errors import InferenceFailed, InvalidRequest, ModelLoadFailed
from qinfer.models.spec import ModelSpec
from tests.support.backends import CPU, GPU, run, spec, tensors

LOW, HIGH = (1, 2), (8, 2)
X = np.array([[1.0, 2.0], [3.0, 4.0], [5.0, 6.0]], np.float32)


class Cuda:
    """Memory of this process; a stream is a list of what is queued, a graph a copy of it."""

    def __init__(self) -> None:
        self.memory: dict[int, Any] = {}
        self.queue: list[Callable[[], None]] = []
        self.graphs: list[list[Callable[[], None]]] = []
        self.launched: list[int] = []

    def device_count(self) -> int:
        return 1

    def set_device(self, device: int) -> None:
        assert device == 0

    def allocate(self, size_bytes: int) -> int:
        block = ctypes.create_string_buffer(max(size_bytes, 1))
        self.memory[ctypes.addressof(block)] = block
        return ctypes.addressof(block)

    def allocate_pinned(self, size_bytes: int) -> tuple[int, Any]:
        address = self.allocate(size_bytes)
        return address, np.frombuffer(self.memory[address], np.uint8)

    def free(self, address: int) -> None:
        del self.memory[address]

    free_pinned = free

    def stream(self, *, urgent: bool = False) -> int:
        self.is_urgent = urgent
        return 7

    def destroy_stream(self, stream: int) -> None:
        assert stream == 7

    def copy(self, to: int, source: int, size_bytes: int, direction: int, stream: int) -> None:
        def move() -> None:
            ctypes.memmove(to, source, size_bytes)

        self.queue.append(move)

    def synchronize(self, stream: int) -> None:
        for job in self.queue:
            job()
        self.queue.clear()

    def begin_capture(self, stream: int) -> None:
        assert not self.queue

    def end_capture(self, stream: int) -> int:
        self.graphs.append(list(self.queue))
        self.queue.clear()
        return len(self.graphs)

    def launch(self, graph: int, stream: int) -> None:
        self.launched.append(graph)
        self.queue += self.graphs[graph - 1]

    def destroy_graph(self, graph: int) -> None:
        self.graphs[graph - 1] = []


class ExecutionContext:
    active_optimization_profile = 0

    def __init__(self, cuda: Cuda) -> None:
        self._cuda = cuda
        self._addresses: dict[str, int] = {}
        self._shape = HIGH

    def set_device_memory(self, memory: int, size: int) -> None:
        assert memory in self._cuda.memory

    def set_tensor_address(self, name: str, memory: int) -> None:
        self._addresses[name] = memory

    def set_input_shape(self, name: str, shape: tuple[int, ...]) -> None:
        self._shape = shape  # type: ignore[assignment]  # of the length that the test sends

    def get_tensor_shape(self, name: str) -> tuple[int, ...]:
        return self._shape

    def execute_async_v3(self, stream: int) -> bool:
        count, source, to = int(np.prod(self._shape)), self._addresses["x"], self._addresses["y"]

        def double() -> None:
            read = (ctypes.c_float * count).from_address(source)
            written = (ctypes.c_float * count).from_address(to)
            written[:] = [2 * value for value in read]

        self._cuda.queue.append(double)
        return True


class Engine:
    num_io_tensors = 2
    device_memory_size_v2 = 64

    def __init__(self, cuda: Cuda) -> None:
        self._cuda = cuda
        self.contexts = 0

    def get_tensor_name(self, index: int) -> str:
        return "xy"[index]

    def get_tensor_mode(self, name: str) -> str:
        return "input" if name == "x" else "output"

    def get_tensor_dtype(self, name: str) -> SimpleNamespace:
        return SimpleNamespace(name="FLOAT")

    def get_tensor_profile_shape(self, name: str, profile: int) -> list[tuple[int, ...]]:
        return [LOW, HIGH, HIGH]

    def is_shape_inference_io(self, name: str) -> bool:
        return False

    def create_execution_context(self, strategy: str) -> ExecutionContext:
        self.contexts += 1
        return ExecutionContext(self._cuda)


class Stage:
    """The backend with played libraries."""

    def __init__(self, backend: Any, directory: Path) -> None:
        self.cuda = Cuda()
        self.engine: Engine | None = Engine(self.cuda)
        self.backend = backend
        self._directory = directory
        (directory / "model.plan").write_bytes(b"plan")

    def load(self, model: ModelSpec) -> Any:
        self.backend.load(model, self._directory, GPU)
        return self.backend


@pytest.fixture
def stage(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Stage]:
    played = ModuleType("tensorrt")
    made: list[Stage] = []
    vars(played).update(
        __version__="10.0",
        Logger=type("Logger", (), {"WARNING": 1, "__init__": lambda self, level: None}),
        init_libnvinfer_plugins=lambda log, namespace: True,
        TensorIOMode=SimpleNamespace(INPUT="input", OUTPUT="output"),
        ExecutionContextAllocationStrategy=SimpleNamespace(USER_MANAGED="user"),
        Runtime=lambda log: SimpleNamespace(deserialize_cuda_engine=lambda plan: made[0].engine),
        IExecutionContext=ExecutionContext,
        ICudaEngine=Engine,
    )
    monkeypatch.setitem(sys.modules, "tensorrt", played)
    monkeypatch.delitem(sys.modules, "qinfer.backends.tensorrt", raising=False)
    module = importlib.import_module("qinfer.backends.tensorrt")
    monkeypatch.setattr(module, "Cuda", lambda: made[0].cuda)
    made.append(Stage(module.TensorrtBackend(), tmp_path))
    yield made[0]
    sys.modules.pop("qinfer.backends.tensorrt", None)


def model(**changes: Any) -> ModelSpec:
    return spec("tensorrt", tensors(("x", "FP32", (2,))), tensors(("y", "FP32", (2,))), **changes)


def test_each_item_gets_its_rows(stage: Stage) -> None:
    """Batches of any size go through the same buffers; an answer is not overwritten by the next execution."""
    backend = stage.load(model())
    first = run(backend, {"x": X}, rows=(1, 2))
    run(backend, {"x": X[:1] * 0}, rows=(1,))
    np.testing.assert_array_equal(first.arrays(0)["y"], 2 * X[:1])
    np.testing.assert_array_equal(first.arrays(1)["y"], 2 * X[1:])
    backend.unload()
    assert stage.cuda.memory == {}


@pytest.mark.parametrize("urgent", [False, True])
def test_the_stream_has_the_priority_of_the_model(stage: Stage, *, urgent: bool) -> None:
    stage.load(model(urgent=urgent)).unload()

    assert stage.cuda.is_urgent is urgent


def test_a_graph_per_shape(stage: Stage) -> None:
    """A shape that has occurred twice is recorded, in a context of its own, and replayed with new data."""
    backend = stage.load(model(cuda_graphs=True))
    for factor in range(1, 5):
        for size in (1, 3):
            answers = run(backend, {"x": X[:size] * factor}, rows=(size,))
            np.testing.assert_array_equal(answers.arrays()["y"], 2 * factor * X[:size])
    assert stage.cuda.launched == [1, 2, 1, 2]
    assert stage.engine is not None
    assert stage.engine.contexts == 1 + 1 + 2  # to derive shapes, for what is new, one for each graph
    backend.unload()
    assert stage.cuda.memory == {}
    assert stage.cuda.graphs == [[], []]


def test_shapes_that_the_engine_has_not(stage: Stage) -> None:
    """A batch beyond the profile, and a missing input, fail by name."""
    backend = stage.load(model(max_batch_size=16))
    with pytest.raises(InferenceFailed, match=r"'x' has shape \[9, 2\]; the engine takes \[1, 2\] to \[8, 2\]"):
        run(backend, {"x": np.zeros((9, 2), np.float32)}, rows=(9,))
    with pytest.raises(InvalidRequest, match="input 'x' is missing"):
        run(backend, {}, rows=(1,))


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"inputs": tensors(("z", "FP32", (2,)))}, "unexpected inference input 'x' .* the engine has x"),
        ({"outputs": tensors(("y", "FP16", (2,)))}, "output 'y': the engine has FP32, its configuration FP16"),
    ],
)
def test_engine_and_configuration_disagree(changes: dict[str, Any], text: str, stage: Stage) -> None:
    """Each contradiction is named."""
    given: dict[str, Any] = {"inputs": tensors(("x", "FP32", (2,))), "outputs": tensors(("y", "FP32", (2,))), **changes}
    with pytest.raises(ModelLoadFailed, match=text):
        stage.load(spec("tensorrt", given["inputs"], given["outputs"]))


def test_a_plan_of_another_gpu_or_version(stage: Stage) -> None:
    """TensorRT gives no engine then; the message says what a plan fits."""
    stage.engine = None
    with pytest.raises(ModelLoadFailed, match=r"TensorRT 10.0 can't read 'model.plan' .* build it again"):
        stage.load(model())


def test_it_runs_on_gpus_only(stage: Stage, tmp_path: Path) -> None:
    """An instance on the CPU is refused."""
    with pytest.raises(ModelLoadFailed, match="is for the CPU, and TensorRT runs on GPUs only"):
        stage.backend.load(model(), tmp_path, CPU)
