"""What a configuration may not say: the mistakes that Triton refuses, and the settings that qinfer does not offer.

A setting whose absence a client would notice is refused by name, never ignored; hints that change speed only
(`optimization`, `rate_limiter`, `metric_tags`, …) are accepted. `preserve_ordering` holds for each connection anyway,
but contradicts priorities and delays.
"""

from collections.abc import Callable, Iterator
from math import prod
from typing import Any

from qinfer.errors import ModelLoadFailed
from qinfer.repository.config_spec import KNOWN_PARAMETERS, parameter_problems
from qinfer.repository.model_config import ModelConfig, model_config_pb2

_UNSUPPORTED: tuple[tuple[str, Callable[[ModelConfig], bool]], ...] = (
    ("sequence_batching", lambda c: c.HasField("sequence_batching")),
    ("ensemble_scheduling", lambda c: c.HasField("ensemble_scheduling") or c.platform == "ensemble"),
    ("batch_input", lambda c: bool(c.batch_input)),
    ("batch_output", lambda c: bool(c.batch_output)),
    ("model_transaction_policy.decoupled", lambda c: c.model_transaction_policy.decoupled),
    ("response_cache.enable", lambda c: c.response_cache.enable),
    ("model_operations.op_library_filename", lambda c: bool(c.model_operations.op_library_filename)),
    ("model_repository_agents", lambda c: bool(c.model_repository_agents.agents)),
    ("runtime", lambda c: bool(c.runtime)),
    ("input.allow_ragged_batch", lambda c: any(i.allow_ragged_batch for i in c.input)),
    ("is_shape_tensor", lambda c: any(t.is_shape_tensor for t in (*c.input, *c.output))),
    ("is_non_linear_format_io", lambda c: any(t.is_non_linear_format_io for t in (*c.input, *c.output))),
    (
        "model_warmup.inputs.input_data_file",
        lambda c: any(i.HasField("input_data_file") for w in c.model_warmup for i in w.inputs.values()),
    ),
)


def check(config: ModelConfig) -> None:
    """Refuses a configuration that can't be served as it says.

    Raises:
        ModelLoadFailed: With every problem found.
    """
    problems = [
        *(f"'{setting}' is not supported by this server; remove it" for setting, used in _UNSUPPORTED if used(config)),
        *_batching_problems(config),
        *_queue_problems(config),
        *_tensor_problems(config, "input", config.input),
        *_tensor_problems(config, "output", config.output),
        *_instance_problems(config),
        *_version_problems(config),
        *_warmup_problems(config),
        *parameter_problems(config, KNOWN_PARAMETERS),
    ]
    if problems:
        raise ModelLoadFailed(f"model '{config.name}': {'; '.join(problems)}")


def _batching_problems(config: ModelConfig) -> Iterator[str]:
    if config.max_batch_size < 0:
        yield f"'max_batch_size' must be non-negative value in model configuration, got {config.max_batch_size}"
    for size in config.dynamic_batching.preferred_batch_size:
        if size <= 0:
            yield f"dynamic batching preferred size must be positive for {config.name}, got {size}"
        elif size > config.max_batch_size:
            yield (
                f"dynamic batching preferred size must be <= max batch size for {config.name}, "
                f"got {size} > {config.max_batch_size}"
            )


def _queue_problems(config: ModelConfig) -> Iterator[str]:
    batching = config.dynamic_batching
    levels, default, name = batching.priority_levels, batching.default_priority_level, config.name
    policies = batching.priority_queue_policy
    if levels and not 1 <= default <= levels:
        yield f"default priority level must be in range [1, {levels}] for {name}, got {default}"
    for level in sorted(policies) if levels else ():
        if not 1 <= level <= levels:
            yield f"priority queue policy must have priority level in range [1, {levels}] for {name}, got {level}"
    if not batching.preserve_ordering:
        return
    if levels > 1:
        yield f"Only one priority level is allowed when 'preserve_ordering' is true for {name}, got {levels}"
    if any(_delays(policy) for policy in (batching.default_queue_policy, *policies.values())):
        yield f"Queue policy can not have DELAY as timeout action when 'preserve_ordering' is true for {name}"


def _delays(policy: Any) -> bool:
    delay = model_config_pb2.ModelQueuePolicy.DELAY
    return bool(policy.default_timeout_microseconds) and policy.timeout_action == delay


def _tensor_problems(config: ModelConfig, kind: str, tensors: Any) -> Iterator[str]:
    if not tensors:
        yield f"the configuration has no '{kind}', and no model file to complete it from"
    names = [tensor.name for tensor in tensors]
    for name in sorted({n for n in names if names.count(n) > 1}):
        yield f"{kind} '{name}' is configured more than once"
    for tensor in tensors:
        if not tensor.name:
            yield f"model {kind} must specify 'name'"
            continue
        where = f"model {kind} '{tensor.name}'"
        if tensor.data_type == model_config_pb2.TYPE_INVALID:
            yield f"{where} must specify 'data_type'"
        if not tensor.dims:
            yield f"{where} must specify 'dims'"
        if any(dim < 1 and dim != -1 for dim in tensor.dims):
            yield (
                f"{where} dimension must be integer >= 1, or -1 to indicate a variable-size dimension, "
                f"got {list(tensor.dims)}"
            )
        if tensor.HasField("reshape"):
            yield from _reshape_problems(config, where, list(tensor.dims), list(tensor.reshape.shape))


def _reshape_problems(config: ModelConfig, where: str, dims: list[int], shape: list[int]) -> Iterator[str]:
    if not shape and config.max_batch_size == 0:
        yield f"{where} cannot have empty reshape for non-batching model"
    elif -1 in dims or any(size < 1 for size in shape):
        yield f"{where} with 'reshape' must have dims and shape >= 1; variable sizes are not supported with it"
    elif prod(dims) != prod(shape):
        yield f"{where} has different size for dims and reshape: {dims} and {shape}"


def _instance_problems(config: ModelConfig) -> Iterator[str]:
    for group in config.instance_group:
        if group.count < 0:
            yield f"instance group {group.name} of model {config.name} must specify 'count' >= 1, got {group.count}"
        if group.kind == model_config_pb2.ModelInstanceGroup.KIND_CPU and group.gpus:
            yield f"instance group {group.name} of model {config.name} has kind KIND_CPU but specifies one or more GPUs"
    if config.instance_group and all(group.passive for group in config.instance_group):
        yield f"every instance group of model {config.name} is passive, so that nothing would execute it"


def _version_problems(config: ModelConfig) -> Iterator[str]:
    policy = config.version_policy
    if policy.HasField("specific") and not policy.specific.versions:
        yield "'version_policy.specific' must list at least one version"
    if policy.HasField("latest") and policy.latest.num_versions == 0:
        yield "'version_policy.latest.num_versions' must be >= 1"


def _warmup_problems(config: ModelConfig) -> Iterator[str]:
    inputs = {i.name: i for i in config.input}
    for sample in config.model_warmup:
        if sample.batch_size > max(config.max_batch_size, 1):
            yield f"model warmup '{sample.name}' has batch_size {sample.batch_size} > {config.max_batch_size}"
        missing = [name for name, i in inputs.items() if not i.optional and name not in sample.inputs]
        if missing:
            yield f"model warmup '{sample.name}' lacks input(s) {', '.join(missing)}"
        for name in sorted(sample.inputs):
            data = sample.inputs[name]
            if name not in inputs:
                yield f"model warmup '{sample.name}' has input '{name}', which the model has not"
            elif data.data_type != inputs[name].data_type or any(dim < 1 for dim in data.dims):
                yield f"model warmup '{sample.name}' must give input '{name}' the model's data_type and fixed dims"
