"""Turns a normalised `ModelConfig` into the `ModelSpec` of gateways and workers; owns qinfer's parameters.

Triton finds the mistakes in `model_warmup` at the load (`GenerateWarmupData` in `backend_model_instance.cc`), does not
execute a sample without `batch_size`, and lets samples give inputs that the server fills.

The texts on ragged and batch tensors are those of Triton's `ValidateBatchIO` (`model_config_utils.cc`). Mistakes that
Triton finds late, or never, are refused here.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from qinfer.core.settings import LimitSettings
from qinfer.errors import ModelLoadFailed
from qinfer.models.config.ensembles import to_steps
from qinfer.models.config.message import ModelConfig, model_config_pb2, to_json, wire_datatype
from qinfer.models.config.sequences import sequence_problems, to_sequence_spec
from qinfer.models.spec import (
    FRAMEWORKS,
    IN_PROCESS,
    MAX_PARTS,
    Accelerator,
    BatchingSpec,
    BatchInputKind,
    BatchInputSpec,
    BatchOutputSpec,
    Device,
    InstanceSpec,
    ModelSpec,
    QueuePolicy,
    ResourceSpec,
    TensorSpec,
    WarmupInput,
    WarmupSpec,
)

PREFIX = "qinfer."
DEFAULT_TIMEOUT = "qinfer.default_timeout_s"
MAX_TIMEOUT = "qinfer.max_timeout_s"
LANE_CAPACITY = "qinfer.lane_capacity"
MIN_WORKERS = "qinfer.min_workers"
TORCH_AMP = "qinfer.torch_amp"
TORCH_COMPILE = "qinfer.torch_compile"
BINARY_OUTPUTS = "qinfer.binary_outputs"
STREAM_RESUME = "qinfer.stream_resume"
CACHE_SCOPE = "qinfer.cache_scope"
SPLIT = "qinfer.split"
SLO_LATENCY = "qinfer.slo_latency_s"
SLO_TARGET = "qinfer.slo_target"
FILES_OF = "qinfer.files_of"
EXECUTE_TIMEOUT = "qinfer.execute_timeout_s"
LOAD_TIMEOUT = "qinfer.load_timeout_s"
WARMUP_TIMEOUT = "qinfer.warmup_timeout_s"
STRICT_OUTPUTS = "qinfer.strict_outputs"
MAX_STRINGS = "qinfer.max_strings"
BASE64 = "qinfer.base64"
_USUAL = LimitSettings()


def to_spec(
    config: ModelConfig, limits: LimitSettings = _USUAL, labels: Mapping[str, tuple[str, ...]] | None = None
) -> ModelSpec:
    """Reads the result of `normalise`, or raises `ModelLoadFailed`.

    `limits` hold for a model that sets no limits; a model's own maximum overrides them. `labels`: output → names of
    classes.
    """
    problems = list(parameter_problems(config))
    if problems:
        raise ModelLoadFailed(f"model '{config.name}': {'; '.join(problems)}")
    parameters = {key: config.parameters[key].string_value for key in sorted(config.parameters)}
    max_timeout_s = float(parameters.get(MAX_TIMEOUT, limits.max_timeout_s))
    default_timeout_s = float(parameters.get(DEFAULT_TIMEOUT, limits.default_timeout_s))
    return ModelSpec(
        name=config.name,
        backend=config.backend,
        platform=config.platform,
        max_batch_size=config.max_batch_size,
        inputs=tuple(_tensor_spec(i, optional=i.optional, ragged=i.allow_ragged_batch) for i in config.input),
        outputs=_outputs(config, labels or {}),
        batching=_batching(config),
        sequences=to_sequence_spec(config),
        instances=tuple(_instances(config)),
        filename=config.default_model_filename,
        parameters=parameters,
        warmup=to_warmup(config),
        default_timeout_s=min(default_timeout_s, max_timeout_s),
        max_timeout_s=max_timeout_s,
        **_optimization(config.optimization),
        lane_capacity=int(parameters.get(LANE_CAPACITY, limits.lane_capacity)),
        min_workers=int(parameters.get(MIN_WORKERS, 1)),
        decoupled=config.model_transaction_policy.decoupled,
        preserves_order=config.dynamic_batching.preserve_ordering and not config.model_transaction_policy.decoupled,
        stream_resume=STREAM_RESUME in parameters,
        is_cached=config.response_cache.enable,
        cached_for_all=parameters.get(CACHE_SCOPE) == "all",
        config_json="" if config.backend in {*IN_PROCESS, *FRAMEWORKS, ""} else to_json(config),
        steps=to_steps(config),
        max_inflight=config.ensemble_scheduling.max_inflight_requests,
        batch_inputs=to_batch_inputs(config),
        batch_outputs=to_batch_outputs(config),
        splits=parameters.get(SPLIT) == "true",
        slo_latency_s=float(parameters.get(SLO_LATENCY, 0)),
        slo_target=float(parameters.get(SLO_TARGET, 0)),
        metric_tags=dict(config.metric_tags),
        strict_outputs=parameters.get(STRICT_OUTPUTS) == "true",
        execute_timeout_s=float(parameters.get(EXECUTE_TIMEOUT, limits.execute_timeout_s)),
        load_timeout_s=float(parameters.get(LOAD_TIMEOUT, 0)),
        warmup_timeout_s=float(parameters.get(WARMUP_TIMEOUT, 0)),
        max_strings=int(parameters.get(MAX_STRINGS, limits.max_strings)),
    )


def parameter_problems(config: ModelConfig) -> Iterator[str]:
    """Yields unknown parameters and wrong values."""
    for key in sorted(config.parameters):
        if not key.startswith(PREFIX):
            continue
        text = config.parameters[key].string_value
        if key not in PARAMETERS:
            yield f"unknown parameter '{key}'; qinfer knows {', '.join(PARAMETERS)}"
        elif not _VALUES[key][1](text):
            yield f"parameter '{key}' must be {_VALUES[key][0]}, got '{text}'"


def _is_positive(text: str) -> bool:
    try:
        return 0 < float(text) < float("inf")
    except ValueError:
        return False


def _is_duration(text: str) -> bool:
    return text == "0" or _is_positive(text)


def _is_count(text: str) -> bool:
    return text.isascii() and text.isdigit() and len(text) < _MAX_DIGITS


_MAX_DIGITS = 16

_VALUES: dict[str, tuple[str, Callable[[str], bool]]] = {
    DEFAULT_TIMEOUT: ("a positive number of seconds", _is_positive),
    MAX_TIMEOUT: ("a positive number of seconds", _is_positive),
    LANE_CAPACITY: ("an integer above 0", lambda text: _is_count(text) and int(text) > 0),
    MIN_WORKERS: ("an integer of 0 or more", _is_count),
    TORCH_AMP: ("a precision of PyTorch", bool),  # the backend knows the valid values
    TORCH_COMPILE: ("a mode of torch.compile", bool),
    BINARY_OUTPUTS: ("names of outputs, with commas between", lambda text: all(map(str.strip, text.split(",")))),
    STREAM_RESUME: ("'skip'", lambda text: text == "skip"),
    CACHE_SCOPE: ("'tenant' or 'all'", lambda text: text in ("tenant", "all")),
    SPLIT: ("'true' or 'false'", lambda text: text in ("true", "false")),
    SLO_LATENCY: ("a positive number of seconds", _is_positive),
    SLO_TARGET: ("a number above 0 and below 1", lambda text: _is_positive(text) and float(text) < 1),
    FILES_OF: ("the name of a model", bool),
    EXECUTE_TIMEOUT: ("a number of seconds, or 0", _is_duration),
    LOAD_TIMEOUT: ("a number of seconds, or 0", _is_duration),
    WARMUP_TIMEOUT: ("a number of seconds, or 0", _is_duration),
    STRICT_OUTPUTS: ("'true' or 'false'", lambda text: text in ("true", "false")),
    MAX_STRINGS: ("an integer above 0", lambda text: _is_count(text) and int(text) > 0),
    BASE64: ("names of tensors with commas between them", bool),
}

PARAMETERS = {
    DEFAULT_TIMEOUT: "The timeout of a request without one.",
    MAX_TIMEOUT: "The longest timeout that a request may ask for.",
    LANE_CAPACITY: "Requests that may wait in one lane.",
    MIN_WORKERS: "0 = the model is ready without a live worker: its requests wait until one has started.",
    TORCH_AMP: "Executes with automatic mixed precision (backend `pytorch`).",
    TORCH_COMPILE: "Compiles the model when it is loaded (backend `pytorch`).",
    BINARY_OUTPUTS: "BYTES outputs that are no text: [bulk jobs](../how-to/bulk-jobs.md) write them as binary columns.",
    STREAM_RESUME: "`skip` = a stream whose worker ends is executed again, and the responses that its caller has are "
    "skipped; for decoupled models that give the same responses each time.",
    CACHE_SCOPE: "`all` = a cached response serves every tenant; `tenant`, the default: only the one that asked. The "
    "time of a hit tells what others have asked.",
    SPLIT: f"`true` = a request of more than `max_batch_size` rows is executed in at most {MAX_PARTS} parts instead of "
    "being refused; not for decoupled models, those with sequences and ragged batches.",
    SLO_LATENCY: "The time within which a request should be answered, for [alerts](../how-to/monitor.md#objectives).",
    SLO_TARGET: "The share of requests that should succeed in that time, such as `0.999`.",
    FILES_OF: "The model whose versions and other files are used with this configuration: "
    "[two configurations of one model](../how-to/model-repositories.md#serve-a-model-with-two-configurations).",
    EXECUTE_TIMEOUT: "The time that an execution may take; then it is ended: "
    "[models that hang](../how-to/models-that-hang.md). 0 = no limit. The time in called models does not count, and "
    "each response of a decoupled model restarts the clock.",
    LOAD_TIMEOUT: "The time that loading an instance may take; then the load has failed. 0, the default, = no limit.",
    WARMUP_TIMEOUT: "The time that warming an instance up may take; then the load has failed. 0, the default, = no "
    "limit.",
    STRICT_OUTPUTS: "`true` = outputs whose datatype or shape is not the declared one are refused. By default they are "
    "passed on with one warning, as in Triton; [bulk jobs](../how-to/bulk-jobs.md) refuse them in any case.",
    MAX_STRINGS: "Elements that the BYTES inputs of one request may have together; in workers, and in the processes of "
    "`python` models, each is an object of about 100 bytes.",
    BASE64: "The BYTES tensors that are no text: plain JSON (`POST /models/<name>`) has them in base64.",
}
"""Parameter → its meaning, for the reference page."""


def value_of(parameter: str) -> str:
    """Returns a description of a parameter's values."""
    return _VALUES[parameter][0]


def _tensor_spec(io: Any, *, optional: bool = False, ragged: bool = False, labels: tuple[str, ...] = ()) -> TensorSpec:
    return TensorSpec(
        name=io.name,
        datatype=wire_datatype(io.data_type),
        dims=tuple(io.dims),
        optional=optional,
        ragged=ragged,
        reshape=tuple(io.reshape.shape) if io.HasField("reshape") else None,
        labels=tuple(labels),
    )


def _outputs(config: ModelConfig, labels: Mapping[str, tuple[str, ...]]) -> tuple[TensorSpec, ...]:
    scattered = scattered_outputs(config)
    return tuple(_tensor_spec(o, ragged=o.name in scattered, labels=labels.get(o.name, ())) for o in config.output)


def _optimization(optimization: Any) -> dict[str, Any]:
    def pins(field: str) -> bool:
        return not optimization.HasField(field) or bool(getattr(optimization, field).enable)

    return {
        "graph_level": optimization.graph.level if optimization.HasField("graph") else None,
        "gpu_accelerators": _accelerators(optimization.execution_accelerators.gpu_execution_accelerator),
        "cpu_accelerators": _accelerators(optimization.execution_accelerators.cpu_execution_accelerator),
        "cuda_graphs": optimization.cuda.graphs,
        "urgent": optimization.priority == model_config_pb2.ModelOptimizationPolicy.PRIORITY_MAX,
        "pins_inputs": pins("input_pinned_memory"),
        "pins_outputs": pins("output_pinned_memory"),
    }


def _accelerators(entries: Any) -> tuple[Accelerator, ...]:
    return tuple(Accelerator(entry.name, dict(sorted(entry.parameters.items()))) for entry in entries)


def _instances(config: ModelConfig) -> Iterator[InstanceSpec]:
    for group in config.instance_group:
        if group.passive:
            continue
        # As in Triton, the last of several resources with one name counts.
        named = {r.name: ResourceSpec(r.name, r.count, getattr(r, "global")) for r in group.rate_limiter.resources}
        resources = tuple(named.values())
        on_gpu = group.kind == model_config_pb2.ModelInstanceGroup.KIND_GPU
        for device in [Device("gpu", number) for number in group.gpus] if on_gpu else [Device()]:
            yield InstanceSpec(
                device=device,
                count=group.count,
                name=group.name,
                resources=resources,
                priority=group.rate_limiter.priority,
            )


def _batching(config: ModelConfig) -> BatchingSpec | None:
    """Returns the rules of batching; without a batch dimension, only priorities and queue policies apply."""
    if not config.HasField("dynamic_batching"):
        return None
    batching = config.dynamic_batching
    levels = batching.priority_levels
    spec = BatchingSpec(
        preferred_sizes=tuple(sorted(set(batching.preferred_batch_size))) or (max(config.max_batch_size, 1),),
        max_queue_delay_s=batching.max_queue_delay_microseconds / 1e6,
        priority_levels=levels,
        default_priority=batching.default_priority_level if levels else 0,
        default_policy=_policy(batching.default_queue_policy),
        policies={
            level: _policy(batching.priority_queue_policy[level]) for level in sorted(batching.priority_queue_policy)
        }
        if levels
        else {},
    )
    return None if config.max_batch_size == 0 and spec.is_plain else spec


def _policy(policy: Any) -> QueuePolicy:
    timeout_us = policy.default_timeout_microseconds
    return QueuePolicy(
        max_queue_size=policy.max_queue_size,
        timeout_s=timeout_us / 1e6,
        delay=timeout_us > 0 and policy.timeout_action == model_config_pb2.ModelQueuePolicy.DELAY,
        allow_override=policy.allow_timeout_override,
    )


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
