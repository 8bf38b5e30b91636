"""`config.pbtxt`: parsed, completed, checked, and turned into a `ModelSpec` (reference §2.5, §3.2).

parse ──▶ normalise (names and backend, completion from the model file, defaults, check) ──▶ to_json / to_spec

As in Triton's ONNX Runtime backend, a model whose tensors all have a variable first dimension has a batch dimension,
and by default a `max_batch_size` of 4.
"""

from collections.abc import Collection, Sequence
from typing import Any, NamedTuple

from google.protobuf import text_format

from qinfer.errors import ModelLoadFailed
from qinfer.models.config.check import check
from qinfer.models.config.ensembles import ENSEMBLE
from qinfer.models.config.file_tensors import FileTensor, FileTensors
from qinfer.models.config.message import ModelConfig, advised, from_json, model_config_pb2, to_json, unnamed
from qinfer.models.config.sequences import fill_sequence_defaults, own_inputs, state_outputs
from qinfer.models.config.to_spec import own_batch_inputs, scattered_outputs, to_spec
from qinfer.tensors import DATATYPES

_DEFAULT_MAX_BATCH_SIZE = 4


def complete(config: ModelConfig, tensors: FileTensors) -> None:
    """Fills in inputs, outputs and batching in place, unless both are declared, as in Triton."""
    if not tensors.inputs:
        raise ModelLoadFailed(
            f"the model file of '{config.name}' declares no input, so that its outputs are constant; export it with one"
        )
    mine, kept = own_inputs(config) | own_batch_inputs(config), state_outputs(config)
    inputs = [tensor for tensor in tensors.inputs if tensor.name not in mine]
    if not config.input or not config.output:
        _complete_batching(config, tensors)
        if not config.input:
            _add(config.input, inputs, config.max_batch_size)
        if not config.output:
            _add(config.output, [o for o in tensors.outputs if o.name not in kept], config.max_batch_size)
    reshape_scalars(config, tensors)
    _compare(config, inputs, tensors.outputs)


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
    """Adds tensors; a scalar or unknown shape becomes [1] or [-1], not Triton's [1], so that any length fits."""
    for tensor in tensors:
        dims = ((-1,) if tensor.dims is None else tensor.dims)[1 if max_batch_size else 0 :]
        added = target.add(name=tensor.name, data_type=_config_datatype(tensor.datatype), dims=dims or (1,))
        if not dims and max_batch_size:
            added.reshape.SetInParent()


def reshape_scalars(config: ModelConfig, tensors: FileTensors) -> None:
    """Makes the model see a scalar where clients have [1]."""
    scalars = {tensor.name for tensor in (*tensors.inputs, *tensors.outputs) if tensor.dims == ()}
    for io in elements(config):
        if io.name in scalars:
            io.reshape.SetInParent()


def elements(config: ModelConfig) -> list[Any]:
    """Returns the tensors of shape [1], which may be scalars of the model."""
    return [io for io in (*config.input, *config.output) if not config.max_batch_size and list(io.dims) == [1]]


def _config_datatype(datatype: str) -> int:
    return int(model_config_pb2.DataType.Value(DATATYPES[datatype].config))


def _compare(config: ModelConfig, inputs: Sequence[FileTensor], outputs: Sequence[FileTensor]) -> None:
    required = sum(not i.optional for i in config.input)
    if required > len(inputs) or len(config.input) < len(inputs):
        raise ModelLoadFailed(
            f"unable to load model '{config.name}', configuration expects {len(config.input)} inputs, "
            f"model provides {len(inputs)}"
        )
    for kind, configured, declared in (("input", config.input, inputs), ("output", config.output, outputs)):
        by_name = {tensor.name: tensor for tensor in declared}
        for io in configured:
            if io.name in by_name:
                _compare_tensor(config, io, by_name[io.name])
            elif not (kind == "input" and io.optional):
                raise ModelLoadFailed(
                    f"unexpected inference {kind} '{io.name}', allowed {kind}s are: {', '.join(by_name)}"
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
    if isinstance(io, model_config_pb2.ModelOutput) and io.name in scattered_outputs(config):
        return  # the model may give it in any shape
    dims = list(io.reshape.shape if io.HasField("reshape") else io.dims)
    full = [-1, *dims] if config.max_batch_size else dims
    if isinstance(io, model_config_pb2.ModelInput) and io.allow_ragged_batch:
        full = [-1]
    if len(full) != len(shape):
        batch = "an initial batch dimension because max_batch_size > 0 followed by the explicit tensor shape, "
        complete_shape = f"{batch}making complete shape" if config.max_batch_size else "shape"
        raise ModelLoadFailed(
            f"{where}: the model expects {len(shape)} dimensions (shape {shape}) but the model configuration specifies "
            f"{len(full)} dimensions ({complete_shape} {full})"
        )
    if any(a != b and -1 not in (a, b) for a, b in zip(full, shape, strict=True)):
        raise ModelLoadFailed(
            f"{where}: the model expects shape {shape} but the model configuration specifies shape {full}"
        )


__all__ = [
    "ModelConfig",
    "elements",
    "from_json",
    "identify",
    "normalise",
    "parse",
    "place",
    "reshape_scalars",
    "to_json",
    "to_spec",
]


class _KnownBackend(NamedTuple):
    backend: str
    platform: str
    file: str


_BACKENDS = (
    _KnownBackend("onnxruntime", "onnxruntime_onnx", "model.onnx"),
    _KnownBackend("tensorrt", "tensorrt_plan", "model.plan"),
    _KnownBackend("pytorch", "pytorch_libtorch", "model.pt"),
    _KnownBackend("pytorch", "torch_aoti", "model.pt2"),
    _KnownBackend("openvino", "", "model.xml"),
    _KnownBackend("python", "", "model.py"),
    _KnownBackend("tensorflow", "tensorflow_savedmodel", "model.savedmodel"),
    _KnownBackend("litert", "", "model.tflite"),
    _KnownBackend("forest", "", "xgboost.json"),
    _KnownBackend("forest", "", "xgboost.ubj"),
    _KnownBackend("forest", "", "checkpoint.tl"),
    _KnownBackend("jax", "", "model.jax"),
    _KnownBackend("mlflow", "", "MLmodel"),
    _KnownBackend("forest", "", "model.txt"),
)
_RENAMED = {"fil": "forest"}
"""Triton's name of a backend → ours."""

FILES_OF = {
    known.backend: tuple(each.file for each in _BACKENDS if each.backend == known.backend) for known in _BACKENDS
}
"""Backend → the usual names of its models' files."""

_BACKEND_OF_PLATFORM = {known.platform: known.backend for known in _BACKENDS if known.platform}
_ON_GPU = frozenset({"onnxruntime", "pytorch", "tensorrt", "python"})  # KIND_AUTO puts these backends on a GPU

_CPU_INSTANCES = {"onnxruntime": 2}  # Triton's default for this backend on a CPU; 1 for the other backends


def parse(text: str, source: str = "config.pbtxt") -> ModelConfig:
    """Parses a `config.pbtxt`, or raises `ModelLoadFailed`."""
    try:
        return text_format.Parse(text.removeprefix("\ufeff"), ModelConfig())
    except text_format.ParseError as error:
        line, column = error.GetLine(), error.GetColumn()
        where = f"{source}, line {line}, column {column}" if line else source
        reason = str(error).partition(" : ")[2] or str(error)
        raise ModelLoadFailed(f"{where}: {advised(reason)}") from None


def normalise(
    config: ModelConfig,
    name: str,
    files: Collection[str] = (),
    tensors: FileTensors | None = None,
    gpus: int = 0,
) -> ModelConfig:
    """Returns the configuration as Triton would show it: complete, with defaults, and checked.

    `files` in version directories identify the default backend; `tensors` are those of the model file, if known; `gpus`
    is the number of GPUs for instance groups that name none of them. `config` stays unchanged.
    """
    normal = identify(config, name, files)
    if tensors is not None:
        complete(normal, tensors)
    _fill_defaults(normal, gpus)
    check(normal)
    return normal


def identify(config: ModelConfig, name: str, files: Collection[str] = ()) -> ModelConfig:
    """Returns only name, backend, platform and file name."""
    normal = ModelConfig()
    normal.CopyFrom(config)
    if normal.name not in ("", name):
        raise ModelLoadFailed(
            f"unexpected directory name '{name}' for model '{normal.name}', directory name must equal model name"
        )
    normal.name = name
    if problem := unnamed(normal):
        raise ModelLoadFailed(f"model '{name}': {problem}")
    _fill_backend(normal, files)
    return normal


def _fill_backend(config: ModelConfig, files: Collection[str]) -> None:
    if config.platform == ENSEMBLE:
        return
    config.backend = _RENAMED.get(config.backend, config.backend)
    of_platform = _BACKEND_OF_PLATFORM.get(config.platform)
    if config.platform and of_platform is None and not config.backend:
        known = ", ".join(sorted(_BACKEND_OF_PLATFORM))
        raise ModelLoadFailed(
            f"unexpected platform type '{config.platform}' for {config.name}; set 'backend', or one of {known}"
        )
    if of_platform and config.backend not in ("", of_platform):
        raise ModelLoadFailed(
            f"unexpected 'platform' and 'backend' pair, got:{config.platform}, {config.backend}; "
            f"this platform is run by {of_platform}"
        )
    deduced = next((known for known in _BACKENDS if known.file in files), None)
    if not config.backend and of_platform is None:
        if deduced is None:
            expected = ", ".join(known.file for known in _BACKENDS)
            raise ModelLoadFailed(
                f"must specify 'platform' or 'backend' for {config.name}; "
                f"its version directories have none of {expected}, which would identify it"
            )
        config.backend, config.platform, config.default_model_filename = deduced
        return
    config.backend = config.backend or of_platform
    rows = [r for r in _BACKENDS if r.backend == config.backend and config.platform in ("", r.platform)]
    row = next((r for r in rows if r.file in files), rows[0] if rows else None)
    if row is not None:
        config.platform = config.platform or row.platform
        config.default_model_filename = config.default_model_filename or row.file


def _fill_defaults(config: ModelConfig, gpus: int) -> None:
    if config.version_policy.WhichOneof("policy_choice") is None:
        config.version_policy.latest.num_versions = 1
    if config.platform == ENSEMBLE:
        return
    batching = config.dynamic_batching
    if config.HasField("dynamic_batching") and not batching.preferred_batch_size and config.max_batch_size > 0:
        batching.preferred_batch_size.append(config.max_batch_size)
    fill_sequence_defaults(config)
    for pinned in ("input_pinned_memory", "output_pinned_memory"):
        if not config.optimization.HasField(pinned):
            getattr(config.optimization, pinned).enable = True
    place(config, gpus)


def place(config: ModelConfig, gpus: int) -> None:
    """Completes the instance groups in place."""
    if not config.instance_group:
        config.instance_group.add(name=config.name)
    for index, group in enumerate(config.instance_group):
        group.name = group.name or f"{config.name}_{index}"
        _fill_group(config.backend, group, gpus)


def _fill_group(backend: str, group: Any, gpus: int) -> None:
    kinds = model_config_pb2.ModelInstanceGroup
    if group.kind == kinds.KIND_AUTO:
        on_gpu = bool(group.gpus) or (gpus > 0 and backend in _ON_GPU)
        group.kind = kinds.KIND_GPU if on_gpu else kinds.KIND_CPU
    if group.kind == kinds.KIND_GPU and not group.gpus:
        group.gpus.extend(range(gpus))
    if group.count == 0:
        group.count = _CPU_INSTANCES.get(backend, 1) if group.kind == kinds.KIND_CPU else 1
