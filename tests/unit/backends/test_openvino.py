"""The openvino backend on the CPU."""

import ctypes
from pathlib import Path
from typing import Any

import numpy as np
import openvino as ov
import pytest

from qinfer.backends.openvino import OpenvinoBackend, properties
from qinfer.errors import InferenceFailed, InvalidRequest, ModelLoadFailed
from qinfer.models.spec import ModelSpec
from qinfer.observe.host import MemoryUse
from qinfer.testing.backend_contract import BackendContract
from tests.support import models
from tests.support.backends import CPU, GPU, run, save_scaled, spec, tensors, xy

A = np.arange(12, dtype=np.float32).reshape(3, 4)
PORTS = tensors(("a", "FP32", (4,)), ("b", "FP32", (4,)))
RESULTS = tensors(("sum", "FP32", (4,)), ("difference", "FP32", (4,)))


@pytest.fixture(scope="module")
def version_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Holds `add_sub` as model.xml."""
    directory = tmp_path_factory.mktemp("openvino")
    models.add_sub(directory)
    version = directory / "add_sub" / "1"
    ov.save_model(ov.Core().read_model(version / "model.onnx"), version / "model.xml", compress_to_fp16=False)
    (version / "model.onnx").unlink()
    return version


def loaded(version_dir: Path, model: ModelSpec) -> OpenvinoBackend:
    backend = OpenvinoBackend()
    backend.load(model, version_dir, CPU)
    return backend


class TestContract(BackendContract):
    datatypes = ("FP32", "BOOL", "UINT8", "INT8", "INT16", "INT32", "INT64", "FP16", "BF16", "FP64")
    thread_parameter = "INFERENCE_NUM_THREADS"
    more_threads = 1

    def create(self) -> OpenvinoBackend:
        return OpenvinoBackend()

    def write(self, version_dir: Path, datatype: str, factor: int) -> ModelSpec:
        save_scaled(version_dir, datatype, factor)
        return xy("openvino", datatype)


def test_the_memory_of_a_model_is_the_size_of_its_files(version_dir: Path) -> None:
    backend = loaded(version_dir, spec("openvino", PORTS, RESULTS))

    assert backend.memory() == (MemoryUse("CPU", 0, sum(file.stat().st_size for file in version_dir.iterdir())),)


class _SignalStack(ctypes.Structure):
    _fields_ = (("address", ctypes.c_void_p), ("flags", ctypes.c_int), ("size", ctypes.c_size_t))


def signal_stack() -> tuple[int | None, int]:
    """Returns where this thread's signal handlers run: sigaltstack(2)."""
    stack = _SignalStack()
    ctypes.CDLL(None).sigaltstack(None, ctypes.byref(stack))
    return stack.address, stack.size


def test_signals_can_be_handled_when_models_are_gone(version_dir: Path) -> None:
    """OpenVINO gives the thread that loads a model a stack for signals; without memory behind it a signal kills."""
    before = signal_stack()

    first, second = (loaded(version_dir, spec("openvino", PORTS, RESULTS)) for _ in range(2))
    first.unload()
    second.unload()

    assert signal_stack() == before


def test_the_configuration_may_list_tensors_in_another_order(version_dir: Path) -> None:
    """Tensors are found by name."""
    backend = loaded(version_dir, spec("openvino", PORTS[::-1], RESULTS[::-1]))
    answers = run(backend, {"b": A + 1, "a": A}, rows=(3,))
    np.testing.assert_array_equal(answers.arrays()["difference"], np.full((3, 4), -1, np.float32))


def test_a_fixed_batch_dimension_is_made_variable(tmp_path: Path) -> None:
    """A model saved for one row takes batches; SKIP_OV_DYNAMIC_BATCHSIZE with padding keeps to its size."""
    save_scaled(tmp_path, "FP32", shape=[1, 4])
    ports = tensors(("x", "FP32", (4,))), tensors(("y", "FP32", (4,)))
    np.testing.assert_array_equal(
        run(loaded(tmp_path, spec("openvino", *ports)), {"x": A}, rows=(1, 2)).arrays(1)["y"], A[1:]
    )
    save_scaled(tmp_path, "FP32", shape=[8, 4])
    parameters = {"SKIP_OV_DYNAMIC_BATCHSIZE": "YES", "ENABLE_BATCH_PADDING": "YES"}
    padded = loaded(tmp_path, spec("openvino", *ports, parameters=parameters))
    np.testing.assert_array_equal(run(padded, {"x": A}, rows=(3,)).arrays()["y"], A)
    bare = loaded(tmp_path, spec("openvino", *ports, parameters={"SKIP_OV_DYNAMIC_BATCHSIZE": "YES"}))
    with pytest.raises(InferenceFailed, match="OpenVINO error"):
        run(bare, {"x": A}, rows=(3,))


def test_parameters_become_properties() -> None:
    """Triton's names, the older ones included; instances share the cores."""
    assert properties(spec("openvino", PORTS, RESULTS, parameters={"CPU_THREADS_NUM": "3"})) == {
        "INFERENCE_NUM_THREADS": "3",
        "NUM_STREAMS": "1",
        "INFERENCE_PRECISION_HINT": "f32",
    }
    given = {
        "INFERENCE_NUM_THREADS": "2",
        "CPU_THROUGHPUT_STREAMS": "auto",
        "PERFORMANCE_HINT": "throughput",
        "COMPILATION_NUM_THREADS": "1",
        "HINT_BF16": "yes",
    }
    assert properties(spec("openvino", PORTS, RESULTS, parameters=given)) == {
        "INFERENCE_NUM_THREADS": "2",
        "NUM_STREAMS": "AUTO",
        "PERFORMANCE_HINT": "THROUGHPUT",
        "COMPILATION_NUM_THREADS": "1",
        "INFERENCE_PRECISION_HINT": "bf16",
    }


@pytest.mark.parametrize(
    ("parameters", "text"),
    [
        ({"NUM_STREAMS": "many"}, "'NUM_STREAMS' of model 'm' is 'MANY'; it must be a number above 0, auto or numa"),
        ({"PERFORMANCE_HINT": "speed"}, "'PERFORMANCE_HINT' of model 'm' is 'speed'; it must be one of latency"),
        ({"CPU_EXTENSION_PATH": "/lib/x.so"}, "'CPU_EXTENSION_PATH' of model 'm' is not supported"),
        ({"TARGET_DEVICE": "NPU"}, "'TARGET_DEVICE' of model 'm' is 'NPU'; OpenVINO finds .*CPU"),
    ],
)
def test_wrong_parameters(parameters: dict[str, str], text: str, version_dir: Path) -> None:
    """Each is named, with what it may be."""
    with pytest.raises(ModelLoadFailed, match=text):
        loaded(version_dir, spec("openvino", PORTS, RESULTS, parameters=parameters))


@pytest.mark.parametrize(
    ("inputs", "outputs", "text"),
    [
        (PORTS[:1], RESULTS, "has 2 inputs, its configuration 1"),
        (PORTS, tensors(("total", "FP32", (4,))), "unexpected inference output 'total' .* are: difference, sum"),
        (PORTS, tensors(("sum", "FP64", (4,))), "output 'sum': the model has FP32, its configuration FP64"),
        (
            PORTS,
            tensors(("sum", "FP32", (5,))),
            r"output 'sum': the model has shape \[-1, 4\], its configuration \[-1, 5\]",
        ),
    ],
)
def test_model_and_configuration_disagree(inputs: Any, outputs: Any, text: str, version_dir: Path) -> None:
    """Each contradiction is named."""
    with pytest.raises(ModelLoadFailed, match=text):
        loaded(version_dir, spec("openvino", inputs, outputs))


def test_a_missing_input(version_dir: Path) -> None:
    """OpenVINO would take the tensor of the run before."""
    with pytest.raises(InvalidRequest, match="input 'b' is missing"):
        run(loaded(version_dir, spec("openvino", PORTS, RESULTS)), {"a": A}, rows=(3,))


def test_files_that_are_none(tmp_path: Path) -> None:
    """The machine's paths are not shown."""
    with pytest.raises(ModelLoadFailed, match=r"no file 'model.xml'"):
        loaded(tmp_path, spec("openvino", PORTS, RESULTS))
    (tmp_path / "model.xml").write_text("<net/>")
    with pytest.raises(ModelLoadFailed, match=r"OpenVINO can't load model 'm': .+") as failure:
        loaded(tmp_path, spec("openvino", PORTS, RESULTS))
    assert str(tmp_path) not in failure.value.message


def test_gpus_are_refused(version_dir: Path) -> None:
    """OpenVINO can't run on NVIDIA's."""
    with pytest.raises(ModelLoadFailed, match=r"where backend 'openvino' can't run; .* KIND_CPU"):
        OpenvinoBackend().load(spec("openvino", PORTS, RESULTS), version_dir, GPU)


def test_what_openvino_says_is_told_whole(version_dir: Path) -> None:
    """Numbers and names keep their dots."""
    backend = loaded(version_dir, spec("openvino", PORTS, RESULTS))
    with pytest.raises(InferenceFailed, match=r"the tensor \(shape=\(3\.5\)\)"):
        run(backend, {"a": np.ones((3, 5), np.float32), "b": np.ones((3, 5), np.float32)}, rows=(3,))
