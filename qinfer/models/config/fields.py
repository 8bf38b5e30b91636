"""What becomes of each field of the ModelConfig message: it is honoured, it is a hint, or it is refused.

A path names a field of the message; one of a message field stands for everything below it. A test walks the message and
finds each of its fields in exactly one table, so that a field which a later Triton adds can't go unnoticed.
`docs/reference/model-config.md` is made from these tables.
"""

from typing import Any

from google.protobuf.message import Message

SUPPORTED = {
    "name": "Must be the directory's name, or be left out.",
    "platform": "Tells the backend; `tensorrt_plan`, `onnxruntime_onnx`, `pytorch_libtorch`, `torch_aoti`.",
    "backend": "The backend that executes the model; deduced from `platform` or from the model file's name.",
    "version_policy": "`latest` (the default, with 1), `all` or `specific`.",
    "max_batch_size": "0 = no batch dimension.",
    "input.name": "",
    "input.data_type": "",
    "input.dims": "-1 is variable.",
    "input.reshape": "The shape that the model sees; every dimension fixed.",
    "input.optional": "",
    "output.name": "",
    "output.data_type": "",
    "output.dims": "-1 is variable.",
    "output.reshape": "The shape that the model sees; every dimension fixed.",
    "output.label_filename": "A text file in the model's directory, one label a line, at most 10 MB.",
    "optimization.graph": "The level of graph optimisation; for the backends that have levels.",
    "optimization.execution_accelerators": "For the backend `onnxruntime`; it refuses those that it has not.",
    "dynamic_batching": "All of it; `preserve_ordering` contradicts several priority levels and the action DELAY.",
    "instance_group.name": "",
    "instance_group.kind": "KIND_AUTO is a GPU where the installation has one and the backend can use it. KIND_MODEL "
    "leaves the device to the model, which is started as on a CPU.",
    "instance_group.count": "Instances; for KIND_GPU on each GPU.",
    "instance_group.gpus": "Left out with KIND_GPU, it is all GPUs of the installation.",
    "instance_group.passive": "Its instances execute nothing, and are not made.",
    "default_model_filename": "A path within the version directory.",
    "parameters": "Read by the backends; those that begin with `qinfer.` are listed below.",
    "model_warmup": "Zeros, random data, or a file of the model's directory `warmup` that holds one row.",
}

HINTS = {
    "input.format": "Says how images are laid out; nothing here depends on it.",
    "optimization.priority": "Instances of all models have the same priority.",
    "optimization.cuda": "Backends use CUDA as suits them.",
    "optimization.input_pinned_memory": "Backends use pinned memory as suits them.",
    "optimization.output_pinned_memory": "Backends use pinned memory as suits them.",
    "optimization.gather_kernel_buffer_threshold": "Batches are gathered on the host.",
    "optimization.eager_batching": "The next batch is always prepared while one executes.",
    "instance_group.host_policy": "Workers are bound to processors from outside.",
    "metric_tags": "Metrics do not carry them.",
    "model_metrics": "Metrics have their own buckets.",
}

REFUSED = {
    "runtime": "Backends can't be chosen by file.",
    "input.is_shape_tensor": "Shape tensors are not offered.",
    "output.is_shape_tensor": "Shape tensors are not offered.",
    "input.allow_ragged_batch": "Requests of different shapes do not share a batch.",
    "input.is_non_linear_format_io": "Tensors are always linear.",
    "output.is_non_linear_format_io": "Tensors are always linear.",
    "batch_input": "Requests of different shapes do not share a batch.",
    "batch_output": "Requests of different shapes do not share a batch.",
    "sequence_batching": "Sequences are not offered.",
    "ensemble_scheduling": "Ensembles are not offered; a model of the backend `python` can call others.",
    "instance_group.rate_limiter.resources": "The rate limiter is not offered.",
    "instance_group.rate_limiter.priority": "The rate limiter is not offered.",
    "instance_group.secondary_devices": "DLA cores are not offered.",
    "instance_group.profile": "A TensorRT profile is chosen by the batch's shape.",
    "cc_model_filenames": "The model file is the same for all GPUs.",
    "model_operations.op_library_filename": "Custom operations can't be loaded.",
    "model_transaction_policy.decoupled": "A request has one response.",
    "model_repository_agents.agents": "There are no agents.",
    "response_cache.enable": "There is no response cache.",
}
"""What a configuration that sets it is refused for: a client would notice its absence."""


def is_set(message: Message, path: str) -> bool:
    """Tells whether a field has another value than its default, in any of the messages that a path leads through."""
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
