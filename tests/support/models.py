"""Small ONNX models for tests, written as a model repository.

repository/
  identity_fp32/{config.pbtxt, 1/model.onnx}      output = input, one model per datatype
  add_sub/…                                       sum = a + b, difference = a - b
  greet/…                                         greeting = greeting ++ name (BYTES)
  accumulator/…                                   OUTPUT = INPUT + OUTPUT of the step before (sequences)
"""

from collections.abc import Sequence
from pathlib import Path

import onnx
from onnx import TensorProto, helper

from qinfer.tensors import DATATYPES

OPSET, IR_VERSION = 20, 9
MAX_BATCH_SIZE = 8

ELEMENT_TYPES = {
    "BOOL": TensorProto.BOOL,
    "UINT8": TensorProto.UINT8,
    "UINT16": TensorProto.UINT16,
    "UINT32": TensorProto.UINT32,
    "UINT64": TensorProto.UINT64,
    "INT8": TensorProto.INT8,
    "INT16": TensorProto.INT16,
    "INT32": TensorProto.INT32,
    "INT64": TensorProto.INT64,
    "FP16": TensorProto.FLOAT16,
    "BF16": TensorProto.BFLOAT16,
    "FP32": TensorProto.FLOAT,
    "FP64": TensorProto.DOUBLE,
    "BYTES": TensorProto.STRING,
}

Port = tuple[str, str, tuple[int, ...]]
"""An input or output: name, wire datatype, dims without the batch dimension (-1 is variable)."""

DIRECT = "direct { }"
OLDEST = "oldest { max_candidate_sequences: 4 }"
CONTROLS = """\
  control_input { name: "START" control { kind: CONTROL_SEQUENCE_START fp32_false_true: [ 0, 1 ] } }
  control_input { name: "END" control { kind: CONTROL_SEQUENCE_END fp32_false_true: [ 0, 1 ] } }
  control_input { name: "READY" control { kind: CONTROL_SEQUENCE_READY fp32_false_true: [ 0, 1 ] } }
  control_input { name: "CORRID" control { kind: CONTROL_SEQUENCE_CORRID data_type: TYPE_INT64 } }"""


def identity(repository: Path, datatype: str) -> str:
    """Writes `identity_<datatype>`: `y[batch, n] = x[batch, n]`; returns its name."""
    name = f"identity_{datatype.lower()}"
    nodes = [helper.make_node("Identity", ["x"], ["y"])]
    write(repository, name, nodes, [("x", datatype, (-1,))], [("y", datatype, (-1,))])
    return name


def add_sub(
    repository: Path, name: str = "add_sub", datatype: str = "FP32", max_batch_size: int = MAX_BATCH_SIZE
) -> str:
    """Writes a model with two inputs of 4 elements and two outputs, their sum and difference; returns its name."""
    nodes = [helper.make_node("Add", ["a", "b"], ["sum"]), helper.make_node("Sub", ["a", "b"], ["difference"])]
    inputs, outputs = ((one, datatype, (4,)) for one in "ab"), ((one, datatype, (4,)) for one in ("sum", "difference"))
    write(repository, name, nodes, list(inputs), list(outputs), max_batch_size=max_batch_size)
    return name


def greet(repository: Path) -> str:
    """Writes `greet`: concatenates two BYTES inputs element by element; returns its name."""
    nodes = [helper.make_node("StringConcat", ["greeting", "name"], ["text"])]
    inputs: list[Port] = [("greeting", "BYTES", (-1,)), ("name", "BYTES", (-1,))]
    write(repository, "greet", nodes, inputs, [("text", "BYTES", (-1,))])
    return "greet"


def accumulator(
    repository: Path,
    name: str = "accumulator",
    *,
    strategy: str = DIRECT,
    controls: bool = False,
    max_batch_size: int = 4,
    more: str = "",
) -> str:
    """Writes a model with an implicit state: `OUTPUT[batch, 1] = INPUT[batch, 1] + ` the same of the step before.

    Args:
        repository: Where it is written to.
        name: The model's name.
        strategy: `DIRECT`, `OLDEST`, or another text of `config.pbtxt`.
        controls: It has all control inputs, and an output `SEEN[batch, 4]` of them: START, END, READY, CORRID.
        max_batch_size: 0 = there is no batch dimension.
        more: Further lines of `sequence_batching`, such as `max_sequence_idle_microseconds: 1000000`.

    Returns:
        Its name.
    """
    nodes = [
        helper.make_node("Add", ["INPUT", "STATE_IN"], ["OUTPUT"]),
        helper.make_node("Identity", ["OUTPUT"], ["STATE_OUT"]),
    ]
    inputs: list[Port] = [("INPUT", "FP32", (1,))]
    outputs: list[Port] = [("OUTPUT", "FP32", (1,))]
    added: list[Port] = [("STATE_IN", "FP32", (1,))]
    if controls:
        added += [("START", "FP32", (1,)), ("END", "FP32", (1,)), ("READY", "FP32", (1,)), ("CORRID", "INT64", (1,))]
        outputs.append(("SEEN", "FP32", (4,)))
        nodes += [
            helper.make_node("Cast", ["CORRID"], ["corrid"], to=TensorProto.FLOAT),
            helper.make_node("Concat", ["START", "END", "READY", "corrid"], ["SEEN"], axis=-1),
        ]
    kept: list[Port] = [("STATE_OUT", "FP32", (1,))]
    write(repository, name, nodes, inputs + added, outputs + kept, max_batch_size=max_batch_size)
    state = '  state { input_name: "STATE_IN" output_name: "STATE_OUT" data_type: TYPE_FP32 dims: [ 1 ] }'
    text = sequence_batching(strategy, CONTROLS if controls else "", state, more)
    (repository / name / "config.pbtxt").write_text(config(name, inputs, outputs, max_batch_size, text))
    return name


def sequence_batching(strategy: str, *lines: str) -> str:
    """Returns `sequence_batching` of a `config.pbtxt`: the strategy, and further lines such as `CONTROLS`."""
    return "\n".join(["sequence_batching {", f"  {strategy}", *filter(None, lines), "}"])


def weighty(directory: Path, size: int) -> Path:
    """Writes a model file with a few large initializers between its head and its inputs; returns its path."""
    count, width = 4, size // 16
    weights = [
        helper.make_tensor(f"w{i}", TensorProto.FLOAT, [width], bytes(4 * width), raw=True) for i in range(count)
    ]
    nodes = [helper.make_node("Add", ["x", "w0"], ["s0"])]
    nodes += [helper.make_node("Add", [f"s{i - 1}", f"w{i}"], [f"s{i}"]) for i in range(1, count)]
    inputs = [helper.make_tensor_value_info("x", TensorProto.FLOAT, ["batch", width])]
    outputs = [helper.make_tensor_value_info(f"s{count - 1}", TensorProto.FLOAT, ["batch", width])]
    graph = helper.make_graph(nodes, "weighty", inputs, outputs, weights)
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", OPSET)], ir_version=IR_VERSION)
    path = directory / "model.onnx"
    path.write_bytes(model.SerializeToString())
    return path


def write(
    repository: Path,
    name: str,
    nodes: Sequence[onnx.NodeProto],
    inputs: Sequence[Port],
    outputs: Sequence[Port],
    *,
    max_batch_size: int = MAX_BATCH_SIZE,
    version: int = 1,
) -> Path:
    """Writes one version of a model, and its configuration; returns the version's directory."""
    version_dir = repository / name / str(version)
    version_dir.mkdir(parents=True, exist_ok=True)
    graph = helper.make_graph(
        nodes,
        name,
        [_value(port, max_batch_size) for port in inputs],
        [_value(port, max_batch_size) for port in outputs],
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", OPSET)], ir_version=IR_VERSION)
    onnx.checker.check_model(model)
    (version_dir / "model.onnx").write_bytes(model.SerializeToString())
    (repository / name / "config.pbtxt").write_text(config(name, inputs, outputs, max_batch_size))
    return version_dir


def config(
    name: str, inputs: Sequence[Port], outputs: Sequence[Port], max_batch_size: int, scheduling: str = ""
) -> str:
    """Returns the `config.pbtxt` of a model; by default it batches dynamically when it has a batch dimension."""
    lines = [f'name: "{name}"', 'backend: "onnxruntime"', f"max_batch_size: {max_batch_size}"]
    for kind, ports in (("input", inputs), ("output", outputs)):
        for port, datatype, dims in ports:
            type_ = DATATYPES[datatype].config
            lines.append(f'{kind} {{ name: "{port}" data_type: {type_} dims: [ {", ".join(map(str, dims))} ] }}')
    if scheduling or max_batch_size:
        lines.append(scheduling or "dynamic_batching { }")
    return "\n".join(lines) + "\n"


def _value(port: Port, max_batch_size: int) -> onnx.ValueInfoProto:
    name, datatype, dims = port
    shape = [f"{name}_{axis}" if dim < 0 else dim for axis, dim in enumerate(dims)]
    batch = ["batch"] if max_batch_size else []
    return helper.make_tensor_value_info(name, ELEMENT_TYPES[datatype], [*batch, *shape])
