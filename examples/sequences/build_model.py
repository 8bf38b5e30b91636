"""A stateful model: silero-vad's detector of speech, its state and its context kept by the server.

    pip install --no-deps silero-vad onnx
    python examples/sequences/build_model.py models

makes `models/silero_vad_16k` and `models/silero_vad_8k` of the one file in the package. For each frame of a call, input
`FRAME` float32[batch, 512] (at 8 kHz 256 samples), a model gives `PROBABILITY` float32[batch, 1]: that somebody speaks.

The package's file has `state` float32[2, batch, 128] and the rate as inputs, and wants each frame with the end of the
one before in front, which callers have to keep. Here the rate is fixed, and both are states of the sequence, with the
batch first: `STATE` float32[batch, 2, 128] and `CONTEXT` float32[batch, 64].
"""

import sys
from importlib.util import find_spec
from pathlib import Path
from typing import NamedTuple

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper


class Rate(NamedTuple):
    """A sampling rate, the samples of a frame, and those of the frame before that go in front."""

    hertz: int
    frame: int
    context: int

    @property
    def model(self) -> str:
        """The model's name."""
        return f"silero_vad_{self.hertz // 1000}k"


RATES = (Rate(16000, 512, 64), Rate(8000, 256, 32))
CONFIG = """\
name: "{rate.model}"
backend: "onnxruntime"
max_batch_size: 64
input {{ name: "FRAME" data_type: TYPE_FP32 dims: [ {rate.frame} ] }}
output {{ name: "PROBABILITY" data_type: TYPE_FP32 dims: [ 1 ] }}
sequence_batching {{
  oldest {{ max_candidate_sequences: 1024 }}
  max_sequence_idle_microseconds: 10000000
  state [
    {{ input_name: "STATE" output_name: "STATE_OUT" data_type: TYPE_FP32 dims: [ 2, 128 ] }},
    {{ input_name: "CONTEXT" output_name: "CONTEXT_OUT" data_type: TYPE_FP32 dims: [ {rate.context} ] }}
  ]
}}
"""


def packaged_model() -> Path:
    """Returns the file in the installed package, which is not imported: it would load PyTorch."""
    package = find_spec("silero_vad")
    if package is None or package.origin is None:
        raise SystemExit("silero-vad is not installed: pip install --no-deps silero-vad")
    return Path(package.origin).parent / "data" / "silero_vad.onnx"


def build(repository: Path, source: Path | None = None) -> None:
    """Writes both models into `repository`, made of the file `source`, by default that of the package."""
    packaged = onnx.load(source or packaged_model())
    for rate in RATES:
        directory = repository / rate.model
        (directory / "1").mkdir(parents=True, exist_ok=True)
        (directory / "config.pbtxt").write_text(CONFIG.format(rate=rate))
        (directory / "1" / "model.onnx").write_bytes(with_states(packaged, rate).SerializeToString())


def with_states(packaged: onnx.ModelProto, rate: Rate) -> onnx.ModelProto:
    """Makes the model of one rate, with states whose first dimension is the batch.

    The file's graph is one `If` on the rate, whose branches read `input` and `state`. The nodes of the right branch
    become the graph's own, between those that make these two and those that take the results.
    """
    branch = _branch(packaged.graph, "then_branch" if rate.hertz == 16000 else "else_branch")
    probability, state = [output.name for output in branch.output]
    before = [
        helper.make_node("Concat", ["CONTEXT", "FRAME"], ["input"], axis=1),
        helper.make_node("Transpose", ["STATE"], ["state"], perm=[1, 0, 2]),
    ]
    after = [
        helper.make_node("Identity", [probability], ["PROBABILITY"]),
        helper.make_node("Transpose", [state], ["STATE_OUT"], perm=[1, 0, 2]),
        helper.make_node("Slice", ["FRAME", "context_begin", "context_end", "context_axis"], ["CONTEXT_OUT"]),
    ]
    graph = helper.make_graph(
        [*before, *branch.node, *after],
        rate.model,
        [_floats("FRAME", rate.frame), _floats("STATE", 2, 128), _floats("CONTEXT", rate.context)],
        [_floats("PROBABILITY", 1), _floats("STATE_OUT", 2, 128), _floats("CONTEXT_OUT", rate.context)],
        [
            _integer("context_begin", rate.frame - rate.context),
            _integer("context_end", rate.frame),
            _integer("context_axis", 1),
        ],
    )
    model = helper.make_model(graph, opset_imports=packaged.opset_import, ir_version=packaged.ir_version)
    onnx.checker.check_model(model)
    return model


def _branch(graph: onnx.GraphProto, name: str) -> onnx.GraphProto:
    (choice,) = [node for node in graph.node if node.op_type == "If"]
    (branch,) = [attribute.g for attribute in choice.attribute if attribute.name == name]
    return branch


def _floats(name: str, *dims: int) -> onnx.ValueInfoProto:
    return helper.make_tensor_value_info(name, TensorProto.FLOAT, ["batch", *dims])


def _integer(name: str, value: int) -> onnx.TensorProto:
    return numpy_helper.from_array(np.array([value], np.int64), name)


if __name__ == "__main__":
    build(Path(sys.argv[1]))
    print(f"made {' and '.join(rate.model for rate in RATES)} in {sys.argv[1]}")
