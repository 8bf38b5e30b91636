"""Turns a normalised `ModelConfig` into the `ModelSpec` that gateways and workers read; owns qinfer's parameters."""

from collections.abc import Iterable, Iterator
from typing import Any

from qinfer.errors import ModelLoadFailed
from qinfer.repository.model_config import ModelConfig, model_config_pb2
from qinfer.repository.spec import BatchingSpec, ModelSpec, TensorSpec, WarmupSpec
from qinfer.settings import LimitSettings
from qinfer.tensors import CONFIG_DATATYPES

PREFIX = "qinfer."
DEFAULT_TIMEOUT = "qinfer.default_timeout_s"
MAX_TIMEOUT = "qinfer.max_timeout_s"
KNOWN_PARAMETERS = (DEFAULT_TIMEOUT, MAX_TIMEOUT)


def to_spec(config: ModelConfig, limits: LimitSettings) -> ModelSpec:
    """Reads a normalised configuration.

    Args:
        config: As `normalise` returned it.
        limits: Timeouts for a model that sets none; a model's own maximum counts for that model.

    Raises:
        ModelLoadFailed: A datatype or qinfer's own parameters are wrong, which `normalise` would have refused.
    """
    problems = list(parameter_problems(config, KNOWN_PARAMETERS))
    if problems:
        raise ModelLoadFailed(f"model '{config.name}': {'; '.join(problems)}")
    parameters = {key: config.parameters[key].string_value for key in sorted(config.parameters)}
    max_timeout_s = float(parameters.get(MAX_TIMEOUT, limits.max_timeout_s))
    default_timeout_s = float(parameters.get(DEFAULT_TIMEOUT, limits.default_timeout_s))
    graph = config.optimization.graph
    return ModelSpec(
        name=config.name,
        backend=config.backend,
        platform=config.platform,
        max_batch_size=config.max_batch_size,
        inputs=tuple(_tensor(i, optional=i.optional, ragged=i.allow_ragged_batch) for i in config.input),
        outputs=tuple(_tensor(o) for o in config.output),
        batching=_batching(config),
        instance_count=sum(group.count for group in config.instance_group if not group.passive) or 1,
        filename=config.default_model_filename,
        parameters=parameters,
        warmup=tuple(_warmup(sample, config.max_batch_size) for sample in config.model_warmup),
        default_timeout_s=min(default_timeout_s, max_timeout_s),
        max_timeout_s=max_timeout_s,
        graph_level=graph.level if config.optimization.HasField("graph") else None,
    )


def parameter_problems(config: ModelConfig, known: Iterable[str]) -> Iterator[str]:
    """Yields what is wrong with qinfer's own parameters: an unknown name, or a timeout that is no positive number."""
    for key in sorted(config.parameters):
        if not key.startswith(PREFIX):
            continue
        if key not in known:
            yield f"unknown parameter '{key}'; qinfer knows {', '.join(known)}"
        elif not _is_positive(config.parameters[key].string_value):
            yield f"parameter '{key}' must be a positive number of seconds, got '{config.parameters[key].string_value}'"


def _is_positive(text: str) -> bool:
    try:
        return 0 < float(text) < float("inf")
    except ValueError:
        return False


def _tensor(io: Any, *, optional: bool = False, ragged: bool = False) -> TensorSpec:
    return TensorSpec(
        name=io.name,
        datatype=_datatype(io.data_type),
        dims=tuple(io.dims),
        optional=optional,
        ragged=ragged,
        reshape=tuple(io.reshape.shape) if io.HasField("reshape") else None,
    )


def _datatype(number: int) -> str:
    name = model_config_pb2.DataType.Name(number)
    if name not in CONFIG_DATATYPES:
        raise ModelLoadFailed(f"data_type {name} is not one of {', '.join(CONFIG_DATATYPES)}")
    return CONFIG_DATATYPES[name].name


def _batching(config: ModelConfig) -> BatchingSpec | None:
    if config.max_batch_size == 0 or not config.HasField("dynamic_batching"):
        return None
    batching = config.dynamic_batching
    return BatchingSpec(
        preferred_sizes=tuple(sorted(set(batching.preferred_batch_size))) or (config.max_batch_size,),
        max_queue_delay_s=batching.max_queue_delay_microseconds / 1e6,
    )


def _warmup(sample: Any, max_batch_size: int) -> WarmupSpec:
    return WarmupSpec(
        name=sample.name,
        batch_size=max(sample.batch_size, 1) if max_batch_size else 0,
        inputs={
            name: (_datatype(data.data_type), tuple(data.dims), data.random_data)
            for name, data in sorted(sample.inputs.items())
        },
        count=max(sample.count, 1),
    )
