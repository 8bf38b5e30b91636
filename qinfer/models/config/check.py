"""Checks of a configuration: mistakes that Triton refuses, and settings that qinfer does not offer.

Each field of the `ModelConfig` message is in one of three tables, which a test proves: `SUPPORTED`, `HINTS` (accepted
without effect) or `REFUSED`; a message field covers everything below it. `docs/reference/model-config.md` is made of
these tables.
"""

import re
from collections.abc import Iterator
from typing import Any

from google.protobuf.message import Message

from qinfer.errors import ModelLoadFailed
from qinfer.models.config.ensembles import ENSEMBLE, ensemble_problems
from qinfer.models.config.message import ModelConfig, model_config_pb2, preferred_size_problems, tensor_problems
from qinfer.models.config.sequences import sequence_problems
from qinfer.models.config.to_spec import SPLIT, STREAM_RESUME, parameter_problems, ragged_problems, warmup_problems

SUPPORTED = {
    "name": "The directory's name; may be omitted.",
    "platform": "Selects the backend; `tensorrt_plan`, `onnxruntime_onnx`, `pytorch_libtorch`, `torch_aoti`; "
    "`ensemble` has steps in place of a backend.",
    "backend": "The backend that executes the model; deduced from `platform` or from the model file's name.",
    "version_policy": "`latest` (the default, with 1), `all` or `specific`.",
    "max_batch_size": "0 = no batch dimension.",
    "input.name": "",
    "input.data_type": "",
    "input.dims": "-1 is variable.",
    "input.reshape": "The shape for the model; variable dimensions keep their order and the elements between them.",
    "input.optional": "",
    "input.allow_ragged_batch": "Requests of different shapes share a batch; with a batch dimension, without "
    "sequences, for the backends `onnxruntime`, `pytorch` and `python`.",
    "output.name": "",
    "output.data_type": "",
    "output.dims": "-1 is variable.",
    "output.reshape": "The shape for the model; variable dimensions keep their order and the elements between them.",
    "batch_input": "All kinds; models of the backend `python` get each request's own tensors and no batch inputs.",
    "batch_output": "Not for the backend `python`, whose models answer each request by itself.",
    "output.label_filename": "A text file in the model's directory, one label per line, at most 10 MB.",
    "optimization": "By backend: see [below](#optimization). `onnxruntime` refuses accelerators that it does not know.",
    "dynamic_batching": "All fields; `preserve_ordering` contradicts several priority levels and the action DELAY.",
    "sequence_batching.max_sequence_idle_microseconds": "1 s by default, while no request of the sequence waits.",
    "sequence_batching.control_input": "START, END, READY, and CORRID as a number or text.",
    "sequence_batching.direct": "A sequence has one row of one instance's batches to itself.",
    "sequence_batching.oldest": "A dynamic batcher of each instance gets one request of each candidate.",
    "sequence_batching.iterative_sequence": "A request is a sequence of its own, which a model of the backend `python` "
    "has executed until it answers it; if it is decoupled, with responses from each execution.",
    "sequence_batching.state.input_name": "",
    "sequence_batching.state.output_name": "",
    "sequence_batching.state.data_type": "",
    "sequence_batching.state.dims": "-1 is variable.",
    "sequence_batching.state.initial_state": "Zeros, or a file in the model's directory `initial_state` with one row.",
    "ensemble_scheduling.step.model_name": "The model of the step; another ensemble, too. One with sequences is a step "
    "only once, and not beside a decoupled one.",
    "ensemble_scheduling.step.model_version": "-1 is the highest version that is ready when the ensemble is loaded.",
    "ensemble_scheduling.step.input_map": "Input of the model → tensor of the ensemble.",
    "ensemble_scheduling.step.output_map": "Output of the model → tensor of the ensemble.",
    "ensemble_scheduling.max_inflight_requests": "Requests of each step that are in flight in a worker at once, and of "
    "each request responses of a decoupled step in the steps behind it; without it the former have no bound, and the "
    "latter are 16.",
    "instance_group.name": "",
    "instance_group.kind": "KIND_AUTO is a GPU if the installation has one and the backend can use it. KIND_MODEL "
    "leaves the choice of the device to the model, which is started as on a CPU.",
    "instance_group.count": "Instances; for KIND_GPU on each GPU.",
    "instance_group.gpus": "With KIND_GPU, the default is all GPUs of the installation.",
    "instance_group.passive": "Passive instances would execute nothing, and are not created.",
    "instance_group.rate_limiter.resources": "Needed by each execution, where the server runs with "
    "`--rate-limit execution_count`; a worker has those that are `global` once for all of its devices.",
    "instance_group.rate_limiter.priority": "Of the instances that wait for resources, the one with the lowest product "
    "of this and its number of executions goes first.",
    "default_model_filename": "A path within the version directory.",
    "parameters": "Read by the backends; those that begin with `qinfer.` are listed below.",
    "model_transaction_policy.decoupled": "A request has 0, 1 or many responses; an ensemble is decoupled if one of "
    "its steps is, regardless of its own setting.",
    "response_cache.enable": "Needs `QINFER_CACHE__CONFIG`; not for decoupled models and those with sequences.",
    "metric_tags": "Labels of its series among [Triton's metrics](metrics.md#tritons-names), with `_` in front.",
    "model_warmup": "Zeros, random data from 0 to 1, or a file in the model's directory `warmup` that begins with one "
    "row. `batch_size` requests of one row; a sample without it is not executed.",
}

HINTS = {
    "sequence_batching.state.use_same_buffer_for_input_output": "States are passed from one buffer to another.",
    "sequence_batching.state.use_growable_memory": "Each step has a buffer of the size of its state.",
    "input.format": "The layout of images, on which nothing in qinfer depends.",
    "instance_group.host_policy": "Bind workers to processors by other means.",
    "model_metrics": "Metrics have their own buckets.",
}

REFUSED = {
    "runtime": "Backends can't be chosen by file.",
    "input.is_shape_tensor": "Shape tensors are not offered.",
    "output.is_shape_tensor": "Shape tensors are not offered.",
    "input.is_non_linear_format_io": "Tensors are always linear.",
    "output.is_non_linear_format_io": "Tensors are always linear.",
    "ensemble_scheduling.step.model_namespace": "Models have no namespaces.",
    "instance_group.secondary_devices": "DLA cores are not offered.",
    "instance_group.profile": "A TensorRT plan is executed with its first profile.",
    "cc_model_filenames": "The model file is the same for all GPUs.",
    "model_operations.op_library_filename": "Custom operations can't be loaded.",
    "model_repository_agents.agents": "There are no agents.",
}
"""Fields that are refused, and why: a client would notice their absence."""


def is_set(message: Message, path: str) -> bool:
    """Tells whether any message sets a field."""
    head, _, rest = path.partition(".")
    field = message.DESCRIPTOR.fields_by_name[head]
    value: Any = getattr(message, head)
    if field.message_type is None:
        return bool(value)
    if field.is_repeated:
        if not rest:
            return len(value) > 0
        return any(is_set(item, rest) for item in (value.values() if hasattr(value, "values") else value))
    return message.HasField(head) and (not rest or is_set(value, rest))


_WITHOUT_FILE = {
    "pytorch": "only a PyTorch file of torch.export declares it: write it into config.pbtxt",
    "tensorrt": "only TensorRT can read it from a plan, on the plan's GPU: write it into config.pbtxt",
}

_MAX_INSTANCES = 1024

_LABEL = re.compile("[a-zA-Z0-9_]+")
"""A metric tag, as Prometheus allows it after an underscore."""


def check(config: ModelConfig) -> None:
    """Raises `ModelLoadFailed` with all problems."""
    problems = [
        *_unsupported_fields(config),
        *_batching_problems(config),
        *_queue_problems(config),
        *sequence_problems(config),
        *ensemble_problems(config),
        *ragged_problems(config),
        *_tensor_problems(config, "input", config.input),
        *_tensor_problems(config, "output", config.output),
        *_instance_problems(config),
        *_file_problems(config),
        *_version_problems(config),
        *warmup_problems(config),
        *_tag_problems(config),
        *_stream_problems(config),
        *_cache_problems(config),
        *_split_problems(config),
        *parameter_problems(config),
    ]
    if problems:
        raise ModelLoadFailed(f"model '{config.name}': {'; '.join(problems)}")


def _unsupported_fields(config: ModelConfig) -> Iterator[str]:
    for path, why in REFUSED.items():
        if is_set(config, path):
            yield f"'{path}' is not supported by this server: {why.rstrip('.')}; remove it"


def _batching_problems(config: ModelConfig) -> Iterator[str]:
    if config.max_batch_size < 0:
        yield f"'max_batch_size' must be non-negative value in model configuration, got {config.max_batch_size}"
    sizes = config.dynamic_batching.preferred_batch_size
    yield from preferred_size_problems("dynamic batching preferred size", sizes, config)


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
    if not tensors and config.backend != "python":  # whose models may only call other models
        why = _WITHOUT_FILE.get(config.backend, "no model file to complete it from")
        yield f"the configuration has no '{kind}', and {why}"
    names = [tensor.name for tensor in tensors]
    for name in sorted({n for n in names if names.count(n) > 1}):
        yield f"{kind} '{name}' is configured more than once"
    for tensor in tensors:
        if not tensor.name:
            yield f"model {kind} must specify 'name'"
            continue
        where = f"model {kind} '{tensor.name}'"
        yield from tensor_problems(where, tensor)
        if tensor.HasField("reshape"):
            yield from _reshape_problems(where, list(tensor.dims), list(tensor.reshape.shape))


def _reshape_problems(where: str, dims: list[int], shape: list[int]) -> Iterator[str]:
    if any(size < 1 and size != -1 for size in shape):
        yield (
            f"{where} reshape dimensions must be integer >= 1, or -1 to indicate a variable-size dimension, got {shape}"
        )
    elif _sizes(dims) != _sizes(shape):
        yield f"{where} has different size for dims and reshape: {dims} and {shape}"


def _sizes(dims: list[int]) -> list[int]:
    sizes = [1]
    for size in dims:
        if size == -1:
            sizes.append(1)
        else:
            sizes[-1] *= size
    return sizes


def _instance_problems(config: ModelConfig) -> Iterator[str]:
    kinds = model_config_pb2.ModelInstanceGroup
    for group in config.instance_group:
        where = f"instance group {group.name} of model {config.name}"
        if not 1 <= group.count <= _MAX_INSTANCES:
            yield f"{where} must specify 'count' >= 1 and <= {_MAX_INSTANCES}, got {group.count}"
        if group.kind in (kinds.KIND_CPU, kinds.KIND_MODEL) and group.gpus:
            yield f"{where} has kind {kinds.Kind.Name(group.kind)} but specifies one or more GPUs"
        if group.kind == kinds.KIND_GPU and not group.gpus:
            yield (
                f"{where} has kind KIND_GPU but no GPUs are available; name them in 'gpus', "
                "or set QINFER_REPOSITORY__GPUS to how many the workers have"
            )
        if any(gpu < 0 for gpu in group.gpus) or len(set(group.gpus)) != len(group.gpus):
            yield f"{where} must name different GPUs by their numbers from 0, got {list(group.gpus)}"
    if config.instance_group and all(group.passive for group in config.instance_group):
        yield f"every instance group of model {config.name} is passive, so that nothing would execute it"


def _file_problems(config: ModelConfig) -> Iterator[str]:
    for setting, path in (
        ("default_model_filename", config.default_model_filename),
        *((f"label_filename of output '{output.name}'", output.label_filename) for output in config.output),
        *(
            (f"input_data_file of model warmup '{sample.name}'", data.input_data_file)
            for sample in config.model_warmup
            for data in sample.inputs.values()
        ),
        *(
            (f"data_file of the initial_state of state '{state.input_name}'", initial.data_file)
            for state in config.sequence_batching.state
            for initial in state.initial_state
        ),
    ):
        if path and not is_inside(path):
            yield f"{setting} must be a path within the model's directory, without '..', got '{path}'"


def is_inside(path: str) -> bool:
    """Tells whether a path stays within its directory."""
    parts = path.split("/")
    return path.isprintable() and "\\" not in path and not {"", ".", ".."} & set(parts)


def _version_problems(config: ModelConfig) -> Iterator[str]:
    policy = config.version_policy
    if policy.HasField("specific") and not policy.specific.versions:
        yield "'version_policy.specific' must list at least one version"
    if policy.HasField("latest") and policy.latest.num_versions == 0:
        yield "'version_policy.latest.num_versions' must be >= 1"


def _tag_problems(config: ModelConfig) -> Iterator[str]:
    for name in sorted(config.metric_tags):
        if not _LABEL.fullmatch(name):
            yield f"metric tag '{name}' is no name of a label: use letters, digits and underscores"


def _stream_problems(config: ModelConfig) -> Iterator[str]:
    # An ensemble is decoupled if one of its steps is, which is unknown here.
    is_decoupled = config.model_transaction_policy.decoupled or config.platform == ENSEMBLE
    if STREAM_RESUME in config.parameters and not is_decoupled:
        yield f"parameter '{STREAM_RESUME}' is for decoupled models; set 'decoupled: true', or remove it"


def _cache_problems(config: ModelConfig) -> Iterator[str]:
    if not config.response_cache.enable:
        return
    for name, is_so in (
        ("decoupled' transaction policy", config.model_transaction_policy.decoupled),
        ("sequence_batching' scheduler", config.HasField("sequence_batching")),
    ):
        if is_so:
            yield (
                f"Response Cache does not currently support model {config.name} with '{name}. "
                "Please disable the response cache."
            )


def _split_problems(config: ModelConfig) -> Iterator[str]:
    if SPLIT not in config.parameters or config.parameters[SPLIT].string_value != "true":
        return
    for what, is_so in (
        ("models without a batch dimension", config.max_batch_size == 0),
        ("decoupled models", config.model_transaction_policy.decoupled),
        ("models with 'sequence_batching'", config.HasField("sequence_batching")),
        ("models with 'batch_input' or 'batch_output'", bool(config.batch_input or config.batch_output)),
    ):
        if is_so:
            yield f"parameter '{SPLIT}' is not for {what}; remove it"
