"""The benchmark models, built in code with fixed seeds and written as a Triton model repository.

Every server of a comparison loads the same `model.onnx` with the same thread options (`THREADS`): what differs is
only the way of a request to it and back.
"""

import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from math import prod
from pathlib import Path

import numpy as np
import numpy.typing as npt
import onnx
from onnx import TensorProto, helper, numpy_helper

THREADS = 1
"""ONNX Runtime's intra-op and inter-op threads, the same for qinfer, every peer and the in-process bound."""

MAX_BATCH_SIZE = 64

OPSET = 17

FloatArray = npt.NDArray[np.float32]


@dataclass(frozen=True, slots=True, kw_only=True)
class BenchModel:
    """A model of the benchmark.

    Attributes:
        name: Its name, also in the URL.
        input_dims: Dimensions of the input `x` without the batch dimension.
        output_dims: Dimensions of the output `y` without the batch dimension.
        build: Makes the ONNX model.
        backend: The backend; `python` runs the network by `peers/triton/model.py`.
    """

    name: str
    input_dims: tuple[int, ...]
    output_dims: tuple[int, ...]
    build: Callable[[], onnx.ModelProto]
    backend: str = "onnxruntime"

    def example(self, rows: int = 1) -> FloatArray:
        """Returns a fixed input, float32[rows, *input_dims], with values of few digits as clients send them."""
        generator = np.random.default_rng(7)
        return generator.uniform(-1, 1, (rows, *self.input_dims)).round(4).astype(np.float32)


class _Graph:
    """Collects nodes and seeded weights; each method returns the name of the tensor it made."""

    def __init__(self, seed: int) -> None:
        self._random = np.random.default_rng(seed)
        self._nodes: list[onnx.NodeProto] = []
        self._weights: list[onnx.TensorProto] = []
        self.multiply_adds = 0

    def weight(self, *shape: int, fan_in: int) -> str:
        name = f"w{len(self._weights)}"
        values = self._random.normal(0.0, (2.0 / fan_in) ** 0.5, shape).astype(np.float32)
        self._weights.append(numpy_helper.from_array(values, name))
        return name

    def constant(self, *values: int) -> str:
        name = f"w{len(self._weights)}"
        self._weights.append(numpy_helper.from_array(np.array(values, np.int64), name))
        return name

    def node(self, operator: str, *inputs: str, output: str = "", **attributes: object) -> str:
        output = output or f"t{len(self._nodes)}"
        self._nodes.append(helper.make_node(operator, inputs, [output], **attributes))
        return output

    def dense(self, x: str, width_in: int, width_out: int, output: str = "") -> str:
        self.multiply_adds += width_in * width_out
        weight, bias = self.weight(width_in, width_out, fan_in=width_in), self.weight(width_out, fan_in=width_in)
        return self.node("Gemm", x, weight, bias, output=output)

    def conv(self, x: str, channels: tuple[int, int], side_out: int, stride: int = 1) -> str:
        """Adds a 3x3 convolution whose square output is `side_out` pixels wide."""
        into, out = channels
        self.multiply_adds += 9 * into * out * side_out * side_out
        weight, bias = self.weight(out, into, 3, 3, fan_in=9 * into), self.weight(out, fan_in=9 * into)
        return self.node("Conv", x, weight, bias, kernel_shape=[3, 3], pads=[1, 1, 1, 1], strides=[stride, stride])

    def finish(self, name: str, input_dims: Sequence[int], output_dims: Sequence[int]) -> onnx.ModelProto:
        graph = helper.make_graph(
            self._nodes,
            name,
            [helper.make_tensor_value_info("x", TensorProto.FLOAT, ["batch", *input_dims])],
            [helper.make_tensor_value_info("y", TensorProto.FLOAT, ["batch", *output_dims])],
            self._weights,
        )
        model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", OPSET)], ir_version=8)
        model.metadata_props.add(key="multiply_adds", value=str(self.multiply_adds))
        onnx.checker.check_model(model)
        return model


def mlp(name: str, widths: Sequence[int], seed: int) -> onnx.ModelProto:
    """A multilayer perceptron with ReLU between its dense layers."""
    graph, x, last = _Graph(seed), "x", len(widths) - 2
    for layer, (width_in, width_out) in enumerate(pairwise(widths)):
        x = graph.dense(x, width_in, width_out, output="y" if layer == last else "")
        x = x if layer == last else graph.node("Relu", x)
    return graph.finish(name, [widths[0]], [widths[-1]])


def _mean(name: str, dims: Sequence[int], seed: int) -> onnx.ModelProto:
    """Means along the last dimension, and a dense layer: almost no computation for large inputs."""
    graph = _Graph(seed)
    means = graph.node("Flatten", graph.node("ReduceMean", "x", axes=[len(dims)], keepdims=0))
    graph.dense(means, prod(dims[:-1]), 8, output="y")
    return graph.finish(name, dims, [8])


def _spread(name: str, width: int, dims: Sequence[int], seed: int) -> onnx.ModelProto:
    """The mean of a small input, times a weight for each element of a large output."""
    graph = _Graph(seed)
    mean = graph.node("ReduceMean", "x", axes=[1], keepdims=1)
    flat = graph.node("Mul", mean, graph.weight(1, prod(dims), fan_in=1))
    graph.node("Reshape", flat, graph.constant(0, *dims), output="y")
    return graph.finish(name, [width], dims)


def _large(name: str, *dims: int) -> BenchModel:
    return BenchModel(name=name, input_dims=dims, output_dims=(8,), build=lambda: _mean(name, dims, 4))


_IMAGE = _large("image", 3, 224, 224)


def _conv(name: str, seed: int, side_in: int, stride: int) -> onnx.ModelProto:
    """A residual net on square images; with a side of 32 after the first layer, 50 M multiply-adds, or 100 MFLOP."""
    graph = _Graph(seed)
    first = side_in // stride
    x = graph.node("Relu", graph.conv("x", (3, 24), first, stride=stride))
    for channels, side in ((24, first), (48, first // 2)):
        for _ in range(2):
            inner = graph.node("Relu", graph.conv(x, (channels, channels), side))
            x = graph.node("Relu", graph.node("Add", x, graph.conv(inner, (channels, channels), side)))
        x = graph.node("Relu", graph.conv(x, (channels, 2 * channels), side // 2, stride=2))
    pooled = graph.node("Flatten", graph.node("GlobalAveragePool", x))
    graph.dense(pooled, 96, 10, output="y")
    return graph.finish(name, [3, side_in, side_in], [10])


_TINY = BenchModel(name="tiny", input_dims=(16,), output_dims=(8,), build=lambda: mlp("tiny", (16, 64, 8), 1))
SCRIPT, SCRIPT_IMAGE = "script", "script_image"
"""The networks of `tiny` and `image` in a `model.py`, the same file in qinfer and in Triton."""
MODEL_PY = Path(__file__).parent / "peers/triton/model.py"

MODELS = {
    model.name: model
    for model in (
        _TINY,
        replace(_TINY, name=SCRIPT, backend="python"),
        BenchModel(
            name="mlp", input_dims=(512,), output_dims=(256,), build=lambda: mlp("mlp", (512, 2048, 2048, 256), 2)
        ),
        BenchModel(name="conv", input_dims=(3, 64, 64), output_dims=(10,), build=lambda: _conv("conv", 3, 64, 2)),
        BenchModel(name="photo", input_dims=(3, 224, 224), output_dims=(10,), build=lambda: _conv("photo", 3, 224, 4)),
        _large("embedding", 64, 64),
        _large("patch", 3, 112, 112),
        _IMAGE,
        replace(_IMAGE, name=SCRIPT_IMAGE, backend="python"),
        _large("frames", 8, 3, 224, 224),
        BenchModel(
            name="mask",
            input_dims=(16,),
            output_dims=(3, 224, 224),
            build=lambda: _spread("mask", 16, (3, 224, 224), 6),
        ),
    )
}


def write_repository(model: BenchModel, root: Path) -> Path:
    """Writes `root/<name>/{config.pbtxt,1/model.onnx}` and returns the path of the ONNX file."""
    path = root / model.name / "1" / "model.onnx"
    path.parent.mkdir(parents=True, exist_ok=True)
    onnx.save(model.build(), path)
    if model.backend == "python":
        shutil.copy(MODEL_PY, path.parent)
    (root / model.name / "config.pbtxt").write_text(_config(model))
    return path


def _config(model: BenchModel) -> str:
    def tensor(name: str, dims: tuple[int, ...]) -> str:
        return f'{{ name: "{name}" data_type: TYPE_FP32 dims: {list(dims)} }}'

    def option(key: str, value: int) -> str:
        return f'parameters {{ key: "{key}" value {{ string_value: "{value}" }} }}'

    return "\n".join(
        (
            f'name: "{model.name}"',
            f'backend: "{model.backend}"',
            f"max_batch_size: {MAX_BATCH_SIZE}",
            f"input [ {tensor('x', model.input_dims)} ]",
            f"output [ {tensor('y', model.output_dims)} ]",
            "dynamic_batching { }",
            "instance_group [ { kind: KIND_CPU count: 1 } ]",
            option("intra_op_thread_count", THREADS),
            option("inter_op_thread_count", THREADS),
            "",
        )
    )
