"""`model_warmup` of a configuration: its checks, and its samples as specs.

Triton finds the same mistakes at the load (`GenerateWarmupData` in `backend_model_instance.cc`), does not execute a
sample without `batch_size`, and lets samples give inputs that the server fills.
"""

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

from qinfer.models.config.message import ModelConfig, wire_datatype
from qinfer.models.config.sequences import sequence_problems, to_sequence_spec
from qinfer.models.spec import WarmupInput, WarmupSpec


class _Input(NamedTuple):
    datatype: str
    dims: Sequence[int]


def executed_samples(config: ModelConfig) -> list[Any]:
    """Returns the samples that are executed."""
    return [sample for sample in config.model_warmup if sample.batch_size]


def to_warmup(config: ModelConfig) -> tuple[WarmupSpec, ...]:
    """Returns the samples of a checked configuration."""
    return tuple(
        WarmupSpec(
            name=sample.name,
            batch_size=sample.batch_size,
            inputs={
                name: WarmupInput(
                    wire_datatype(data.data_type), tuple(data.dims), data.random_data, data.input_data_file
                )
                for name, data in sorted(sample.inputs.items())
            },
            count=max(sample.count, 1),
        )
        for sample in executed_samples(config)
    )


def warmup_problems(config: ModelConfig) -> Iterator[str]:
    """Yields the mistakes in the samples."""
    inputs = {i.name: _Input(wire_datatype(i.data_type), i.dims) for i in config.input}
    if config.HasField("sequence_batching") and not any(sequence_problems(config)):
        sequences = to_sequence_spec(config)
        assert sequences is not None
        inputs |= {control.name: _Input(control.datatype, [1]) for control in sequences.controls}
        inputs |= {state.input: _Input(state.datatype, state.dims) for state in sequences.states}
    for sample in executed_samples(config):
        warmup = f"model warmup '{sample.name}'"
        if sample.batch_size > max(config.max_batch_size, 1):
            yield f"{warmup} has batch_size {sample.batch_size} > {max(config.max_batch_size, 1)}"
        missing = [i.name for i in config.input if not i.optional and i.name not in sample.inputs]
        if missing:
            yield f"{warmup} lacks input(s) {', '.join(missing)}"
        for name in sorted(sample.inputs):
            if name not in inputs:
                yield f"{warmup} has input '{name}', which the model does not have"
            else:
                yield from (f"{warmup} {wrong}" for wrong in _mistakes(sample.inputs[name], name, inputs[name]))


def _mistakes(data: Any, name: str, wanted: _Input) -> Iterator[str]:
    if data.WhichOneof("input_data_type") is None:
        yield f"must give input '{name}' zero_data, random_data or an input_data_file"
    if wire_datatype(data.data_type) != wanted.datatype:
        yield f"must give input '{name}' the model's data_type, {wanted.datatype}"
    dims = list(data.dims)
    is_fixed = all(dim > 0 for dim in dims) and len(dims) == len(wanted.dims)
    if not is_fixed or any(takes not in (-1, dim) for dim, takes in zip(dims, wanted.dims, strict=False)):
        yield f"must give input '{name}' fixed dims that the model takes, {list(wanted.dims)}, got {dims}"
