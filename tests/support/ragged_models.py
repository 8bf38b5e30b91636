"""A small ONNX model of ragged batches: the sum of each request's numbers, and twice each of them."""

from pathlib import Path

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

from tests.support.models import IR_VERSION, OPSET

RAGGED = """
name: "{name}" backend: "onnxruntime" max_batch_size: {max_batch_size}
input {{ name: "x" data_type: TYPE_FP32 dims: [ -1 ] allow_ragged_batch: true }}
output {{ name: "sum" data_type: TYPE_FP32 dims: [ 1 ] }}
output {{ name: "twice" data_type: TYPE_FP32 dims: [ -1 ] }}
output {{ name: "count" data_type: TYPE_FP32 dims: [ 1 ] }}
batch_input {{ kind: BATCH_ACCUMULATED_ELEMENT_COUNT_WITH_ZERO target_name: "ends" data_type: TYPE_INT32
  source_input: "x" }}
batch_input {{ kind: BATCH_ELEMENT_COUNT target_name: "sizes" data_type: TYPE_FP32 source_input: "x" }}
batch_output {{ kind: BATCH_SCATTER_WITH_INPUT_SHAPE target_name: "twice" source_input: "x" }}
dynamic_batching {{ max_queue_delay_microseconds: {delay_us} }}
instance_group {{ count: 1 kind: KIND_CPU }}
"""


def write_ragged(repository: Path, name: str = "ragged", *, max_batch_size: int = 8, delay_us: int = 0) -> str:
    """Writes a model of requests `x: [1, n]` with `sum: [1, 1]`, `twice: [1, n]` and `count: [1, 1]`; returns its name.

    The model file has the numbers of all requests as `x: [-1]`, and tells them apart by `ends: [requests + 1]`.
    """
    directory = repository / name
    (directory / "1").mkdir(parents=True)
    text = RAGGED.format(name=name, max_batch_size=max_batch_size, delay_us=delay_us)
    (directory / "config.pbtxt").write_text(text)
    floats, integers = TensorProto.FLOAT, TensorProto.INT32
    graph = helper.make_graph(
        [
            helper.make_node("CumSum", ["x", "axis"], ["running"]),
            helper.make_node("Concat", ["zero", "running"], ["from_zero"], axis=0),
            helper.make_node("Gather", ["from_zero", "ends"], ["at_ends"]),
            helper.make_node("Slice", ["at_ends", "first", "far"], ["after"]),
            helper.make_node("Slice", ["at_ends", "start", "last"], ["before"]),
            helper.make_node("Sub", ["after", "before"], ["sums"]),
            helper.make_node("Unsqueeze", ["sums", "column"], ["sum"]),
            helper.make_node("Unsqueeze", ["sizes", "column"], ["count"]),
            helper.make_node("Add", ["x", "x"], ["twice"]),
        ],
        name,
        [
            helper.make_tensor_value_info("x", floats, [None]),
            helper.make_tensor_value_info("ends", integers, [None]),
            helper.make_tensor_value_info("sizes", floats, [None]),
        ],
        [
            helper.make_tensor_value_info("sum", floats, [None, 1]),
            helper.make_tensor_value_info("twice", floats, [None]),
            helper.make_tensor_value_info("count", floats, [None, 1]),
        ],
        [
            numpy_helper.from_array(np.array(0, np.int64), "axis"),
            numpy_helper.from_array(np.zeros(1, np.float32), "zero"),
            *[
                numpy_helper.from_array(np.array([value], np.int64), label)
                for label, value in (("first", 1), ("far", 2**31 - 1), ("start", 0), ("last", -1), ("column", 1))
            ],
        ],
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", OPSET)], ir_version=IR_VERSION)
    onnx.save(model, str(directory / "1" / "model.onnx"))
    return name
