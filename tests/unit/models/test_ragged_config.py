"""`allow_ragged_batch`, `batch_input` and `batch_output` of a configuration."""

import pytest

from qinfer.errors import ModelLoadFailed
from qinfer.models.config.config import normalise, parse, to_spec
from qinfer.models.config.file_tensors import FileTensor, FileTensors
from qinfer.models.spec import BatchInputKind, BatchInputSpec, BatchOutputSpec, ModelSpec, TensorSpec

CONFIG = """
backend: "onnxruntime" max_batch_size: 8
input { name: "x" data_type: TYPE_FP32 dims: [ -1, 2 ] allow_ragged_batch: true }
input { name: "z" data_type: TYPE_FP32 dims: [ 1 ] optional: true }
output { name: "y" data_type: TYPE_FP32 dims: [ -1, 2 ] }
output { name: "w" data_type: TYPE_FP32 dims: [ 1, 1, -1 ] }
"""
COUNTS = 'batch_input { target_name: "n" data_type: TYPE_INT32 source_input: "x" }'
SHAPES = 'batch_input { kind: BATCH_ITEM_SHAPE target_name: "s" data_type: TYPE_FP32 source_input: "x" }'
SCATTER = 'batch_output { target_name: "y" source_input: "x" }'


def spec(text: str) -> ModelSpec:
    return to_spec(normalise(parse(text), "m"))


def test_a_configuration_is_read() -> None:
    one = spec(CONFIG + COUNTS + SHAPES + SCATTER)

    assert one.batch_inputs == (
        BatchInputSpec(BatchInputKind.ELEMENT_COUNT, "n", "INT32", "x", 2),
        BatchInputSpec(BatchInputKind.ITEM_SHAPE, "s", "FP32", "x", 2),
    )
    assert one.batch_outputs == (BatchOutputSpec("y", (-1, -1, 2), "x"),)
    assert [output.ragged for output in one.outputs] == [True, False]


def test_the_model_file_has_what_is_ragged_as_one_dimension() -> None:
    """And the inputs that the server makes besides those of requests."""
    shapes = {i.name: i.file_shape(batched=True) for i in spec(CONFIG + COUNTS + SHAPES).file_inputs}

    assert shapes == {"x": (-1,), "z": (-1, 1), "n": (-1,), "s": (-1, 2)}
    assert TensorSpec(name="x", datatype="FP32", dims=(2,)).file_shape(batched=False) == (2,)


def test_a_configuration_is_compared_with_its_file() -> None:
    """Batch inputs are no inputs of requests, and what is ragged has one dimension."""
    inputs = [
        FileTensor(name="x", datatype="FP32", dims=(-1,)),
        FileTensor(name="z", datatype="FP32", dims=(-1, 1)),
        FileTensor(name="n", datatype="INT32", dims=(-1,)),
    ]
    outputs = (
        FileTensor(name="y", datatype="FP32", dims=(-1,)),
        FileTensor(name="w", datatype="FP32", dims=(-1, 1, 1, -1)),
    )
    right = FileTensors(inputs=tuple(inputs), outputs=outputs)
    wrong = FileTensors(inputs=(FileTensor(name="x", datatype="FP32", dims=(-1, -1, 2)), *inputs[1:]), outputs=outputs)

    assert normalise(parse(CONFIG + COUNTS + SCATTER), "m", tensors=right).name == "m"
    with pytest.raises(ModelLoadFailed, match="the model expects 3 dimensions"):
        normalise(parse(CONFIG + COUNTS + SCATTER), "m", tensors=wrong)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('batch_input { target_name: "n" data_type: TYPE_INT32 }', "expects 1 source input, got 0"),
        (COUNTS.replace('"x"', '"q"'), "unknown source input name 'q'"),
        (COUNTS.replace("INT32", "INT64"), "batch input data type must be TYPE_INT32 or TYPE_FP32"),
        (COUNTS.replace('"x"', '"z"'), "can't have the optional input 'z' as its source"),
        (COUNTS.replace('"n"', '"x"'), "batch input 'x' is an input already"),
        (COUNTS + COUNTS, "batch input 'n' is an input already"),
        ('batch_input { data_type: TYPE_INT32 source_input: "x" }', "must have a 'target_name'"),
        ('batch_output { target_name: "q" source_input: "x" }', "unknown target output name 'q'"),
        (SCATTER + SCATTER, "target output name 'y' can only be specified once"),
        ('batch_output { target_name: "w" source_input: "x" }', "variable dimension that its source input 'x' lacks"),
        ('batch_output { target_name: "y" }', "expects 1 source input, got 0"),
        ("sequence_batching { }", "not supported with 'sequence_batching'"),
    ],
)
def test_mistakes_are_refused(text: str, message: str) -> None:
    """With Triton's text where it has one."""
    with pytest.raises(ModelLoadFailed, match=message):
        normalise(parse(CONFIG + text), "m")


@pytest.mark.parametrize(
    ("before", "after", "message"),
    [
        ("max_batch_size: 8", "", "are for models with a batch dimension"),
        ("onnxruntime", "openvino", "not supported by the backend 'openvino'"),
        ("dims: [ -1, 2 ] allow", "dims: [ 2 ] reshape { shape: [ 1, 2 ] } allow", "both 'allow_ragged_batch' and"),
    ],
)
def test_models_that_have_no_ragged_batches(before: str, after: str, message: str) -> None:
    with pytest.raises(ModelLoadFailed, match=message):
        normalise(parse(CONFIG.replace(before, after)), "m")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("max_batch_size: 0", "not for models without a batch dimension"),
        ("model_transaction_policy { decoupled: true }", "not for decoupled models"),
        (COUNTS, "not for models with 'batch_input' or 'batch_output'"),
    ],
)
def test_models_whose_requests_are_not_split(text: str, message: str) -> None:
    split = 'parameters { key: "qinfer.split" value { string_value: "true" } }'
    plain = CONFIG.replace("allow_ragged_batch: true", "").replace("max_batch_size: 8", "")
    batched = plain if "max_batch_size" in text else plain + "max_batch_size: 8\n"

    assert spec(plain + "max_batch_size: 8\n" + split).splits
    with pytest.raises(ModelLoadFailed, match=message):
        spec(f"{batched}{text}\n{split}")
