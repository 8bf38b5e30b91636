"""Completes a configuration from what the model file declares, and refuses one that contradicts it.

The rules and texts are those of Triton's ONNX Runtime backend: a model whose inputs and outputs all have a variable
first dimension has a batch dimension; its `max_batch_size` becomes 4 when the configuration has none.
"""

from collections.abc import Sequence
from typing import Any

from qinfer.errors import ModelLoadFailed
from qinfer.models.config.file_tensors import FileTensor, FileTensors
from qinfer.models.config.message import ModelConfig, model_config_pb2
from qinfer.tensors import DATATYPES

_DEFAULT_MAX_BATCH_SIZE = 4  # Triton's `default-max-batch-size`


def complete(config: ModelConfig, tensors: FileTensors) -> None:
    """Fills what the configuration leaves out, in place.

    As in Triton, a configuration with inputs and outputs is taken as it is, and one that lacks either gets its batch
    size and dynamic batching completed too.

    Raises:
        ModelLoadFailed: The configuration contradicts the model file.
    """
    if not config.input or not config.output:
        _complete_batching(config, tensors)
        if not config.input:
            _add(config.input, tensors.inputs, config.max_batch_size)
        if not config.output:
            _add(config.output, tensors.outputs, config.max_batch_size)
    _compare(config, tensors)


def _complete_batching(config: ModelConfig, tensors: FileTensors) -> None:
    if not tensors.batchable:
        if config.max_batch_size:
            raise ModelLoadFailed(
                f"autofill failed for model '{config.name}': model does not support batching while non-zero "
                "max_batch_size is specified"
            )
        return
    if config.max_batch_size == 0:
        config.max_batch_size = _DEFAULT_MAX_BATCH_SIZE
    if config.max_batch_size > 1 and config.WhichOneof("scheduling_choice") is None:
        config.dynamic_batching.SetInParent()


def _add(target: Any, tensors: Sequence[FileTensor], max_batch_size: int) -> None:
    """Adds file tensors as inputs or outputs; dims may not be empty, so a scalar is [1] to the client."""
    for tensor in tensors:
        dims = (tensor.dims or ())[1 if max_batch_size else 0 :]
        added = target.add(name=tensor.name, data_type=_config_datatype(tensor.datatype), dims=dims or (1,))
        if not dims and max_batch_size:
            added.reshape.SetInParent()


def _config_datatype(datatype: str) -> int:
    return int(model_config_pb2.DataType.Value(DATATYPES[datatype].config))


def _compare(config: ModelConfig, tensors: FileTensors) -> None:
    required = sum(not i.optional for i in config.input)
    if required > len(tensors.inputs) or len(config.input) < len(tensors.inputs):
        raise ModelLoadFailed(
            f"unable to load model '{config.name}', configuration expects {len(config.input)} inputs, "
            f"model provides {len(tensors.inputs)}"
        )
    for kind, configured, declared in (
        ("input", config.input, tensors.inputs),
        ("output", config.output, tensors.outputs),
    ):
        by_name = {tensor.name: tensor for tensor in declared}
        for io in configured:
            if io.name in by_name:
                _compare_tensor(config, io, by_name[io.name])
            elif not (kind == "input" and io.optional):
                raise ModelLoadFailed(
                    f"unexpected inference {kind} '{io.name}' for model '{config.name}', "
                    f"allowed {kind}s are: {', '.join(by_name)}"
                )


def _compare_tensor(config: ModelConfig, io: Any, tensor: FileTensor) -> None:
    expected = _config_datatype(tensor.datatype)
    if io.data_type != expected:
        raise ModelLoadFailed(
            f"model '{config.name}', tensor '{io.name}': the model expects data-type "
            f"{model_config_pb2.DataType.Name(expected)} but the model configuration specifies data-type "
            f"{model_config_pb2.DataType.Name(io.data_type)}"
        )
    if tensor.dims is None:
        return
    where = f"model '{config.name}', tensor '{io.name}'"
    shape = list(tensor.dims)
    if config.max_batch_size and (not shape or shape[0] != -1):
        raise ModelLoadFailed(
            f"{where}: for the model to support batching the shape should have at least 1 dimension and the first "
            f"dimension must be -1; but shape expected by the model is {shape}"
        )
    dims = list(io.reshape.shape if io.HasField("reshape") else io.dims)
    full = [-1, *dims] if config.max_batch_size else dims
    if full == [1] and shape == []:  # a scalar without a batch dimension: dims can't be empty
        return
    if len(full) != len(shape):
        raise ModelLoadFailed(
            f"{where}: the model expects {len(shape)} dimensions (shape {shape}) but the model configuration specifies "
            f"{len(full)} dimensions ({_batch_note(config)}shape {full})"
        )
    if any(a != b and -1 not in (a, b) for a, b in zip(full, shape, strict=True)):
        raise ModelLoadFailed(
            f"{where}: the model expects shape {shape} but the model configuration specifies shape {full}"
        )


def _batch_note(config: ModelConfig) -> str:
    if not config.max_batch_size:
        return ""
    return (
        "an initial batch dimension because max_batch_size > 0 followed by the explicit tensor shape, making complete "
    )
