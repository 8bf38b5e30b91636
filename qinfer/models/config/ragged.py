"""`allow_ragged_batch`, `batch_input` and `batch_output` of a configuration: checks and specs.

The texts are those of Triton's `ValidateBatchIO` (`model_config_utils.cc`). Mistakes that Triton finds late, or never,
are refused here.
"""

from collections.abc import Iterator
from typing import Any

from qinfer.models.config.message import ModelConfig, model_config_pb2, wire_datatype
from qinfer.models.spec import BatchInputKind, BatchInputSpec, BatchOutputSpec

_DATATYPES = (model_config_pb2.TYPE_INT32, model_config_pb2.TYPE_FP32)
_REFUSING = ("tensorrt", "openvino")


def own_batch_inputs(config: ModelConfig) -> set[str]:
    """Returns the model file's inputs that the server makes."""
    return {name for made in config.batch_input for name in made.target_name}


def scattered_outputs(config: ModelConfig) -> set[str]:
    """Returns the outputs that the file gives flat."""
    return {name for made in config.batch_output for name in made.target_name}


def to_batch_inputs(config: ModelConfig) -> tuple[BatchInputSpec, ...]:
    """Reads `batch_input`, one for each target."""
    ranks = {io.name: len(io.dims) for io in config.input}
    return tuple(
        BatchInputSpec(
            kind=BatchInputKind(model_config_pb2.BatchInput.Kind.Name(made.kind)),
            name=name,
            datatype=wire_datatype(made.data_type),
            source=made.source_input[0],
            rank=ranks[made.source_input[0]],
        )
        for made in config.batch_input
        for name in made.target_name
    )


def to_batch_outputs(config: ModelConfig) -> tuple[BatchOutputSpec, ...]:
    """Reads `batch_output`, one for each target."""
    dims = {io.name: (-1, *io.dims) for io in config.output}
    return tuple(
        BatchOutputSpec(name=name, dims=dims[name], source=made.source_input[0])
        for made in config.batch_output
        for name in made.target_name
    )


def ragged_problems(config: ModelConfig) -> Iterator[str]:
    """Yields the mistakes in ragged and batch tensors."""
    ragged = [io for io in config.input if io.allow_ragged_batch]
    if not (ragged or config.batch_input or config.batch_output):
        return
    what = "'allow_ragged_batch', 'batch_input' and 'batch_output'"
    if config.max_batch_size == 0:
        yield f"{what} are for models with a batch dimension; set 'max_batch_size', or remove them"
    if config.HasField("sequence_batching"):
        yield f"{what} are not supported with 'sequence_batching'; remove either"
    if config.backend in _REFUSING:
        yield f"{what} are not supported by the backend '{config.backend}'; serve the model by 'onnxruntime'"
    for io in ragged:
        if io.HasField("reshape"):
            yield f"model input '{io.name}' can't have both 'allow_ragged_batch' and 'reshape'"
    yield from _input_problems(config)
    yield from _output_problems(config)


def _input_problems(config: ModelConfig) -> Iterator[str]:
    taken = {io.name for io in config.input}
    for made in config.batch_input:
        kind = model_config_pb2.BatchInput.Kind.Name(made.kind)
        yield from _source_problems(config, f"batch input kind '{kind}'", made.source_input)
        if made.data_type not in _DATATYPES:
            yield "batch input data type must be TYPE_INT32 or TYPE_FP32"
        if not made.target_name:
            yield f"batch input kind '{kind}' must have a 'target_name'"
        for name in made.target_name:
            if name in taken:
                yield f"batch input '{name}' is an input already; give each input of the model one meaning"
            taken.add(name)


def _output_problems(config: ModelConfig) -> Iterator[str]:
    outputs, sources = {io.name: io for io in config.output}, {io.name: io for io in config.input}
    taken: set[str] = set()
    for made in config.batch_output:
        kind = model_config_pb2.BatchOutput.Kind.Name(made.kind)
        yield from _source_problems(config, f"batch output kind '{kind}'", made.source_input)
        for name in made.target_name:
            if name not in outputs:
                yield f"unknown target output name '{name}'"
                continue
            if name in taken:
                yield f"target output name '{name}' can only be specified once"
            taken.add(name)
            output = outputs[name]
            if output.HasField("reshape"):
                yield f"model output '{name}' can't be both a 'batch_output' and have a 'reshape'"
            for source in made.source_input:
                if source in sources and any(dim == -1 for dim in output.dims[len(sources[source].dims) :]):
                    yield f"batch output '{name}' has a variable dimension that its source input '{source}' lacks"


def _source_problems(config: ModelConfig, where: str, names: Any) -> Iterator[str]:
    if len(names) != 1:
        yield f"{where} expects 1 source input, got {len(names)}"
    inputs = {io.name: io for io in config.input}
    for name in names:
        if name not in inputs:
            yield f"unknown source input name '{name}'"
        elif inputs[name].optional:
            yield f"{where} can't have the optional input '{name}' as its source: a request may lack it"
        elif inputs[name].HasField("reshape"):
            yield f"{where} can't have input '{name}' as its source, which has a 'reshape'"
