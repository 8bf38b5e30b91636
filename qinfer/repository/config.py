"""`config.pbtxt`: read, completed, checked, and turned into what the rest of qinfer reads (reference §2.5, §3.2).

parse ──▶ normalise (names and backend, completion from the model file, defaults, check) ──▶ to_json / to_spec
"""

from collections.abc import Collection

from google.protobuf import text_format

from qinfer.errors import ModelLoadFailed
from qinfer.repository.complete import complete
from qinfer.repository.config_check import check
from qinfer.repository.config_json import from_json, to_json
from qinfer.repository.config_spec import to_spec
from qinfer.repository.model_config import ModelConfig, model_config_pb2
from qinfer.repository.onnx_metadata import FileTensors

__all__ = ["ModelConfig", "from_json", "normalise", "parse", "to_json", "to_spec"]

_BACKENDS = (  # backend, platform, the file that tells it (reference §2.5)
    ("onnxruntime", "onnxruntime_onnx", "model.onnx"),
    ("tensorrt", "tensorrt_plan", "model.plan"),
    ("pytorch", "pytorch_libtorch", "model.pt"),
    ("pytorch", "torch_aoti", "model.pt2"),
    ("openvino", "", "model.xml"),
    ("python", "", "model.py"),
)
_BACKEND_OF_PLATFORM = {platform: backend for backend, platform, _ in _BACKENDS if platform}
_PLATFORM_OF_BACKEND = {backend: platform for backend, platform, _ in reversed(_BACKENDS)}
_FILE_OF_BACKEND = {backend: file for backend, _, file in reversed(_BACKENDS)}

_CPU_INSTANCES = {"onnxruntime": 2}  # Triton's default for this backend on a CPU; 1 for the others


def parse(text: str) -> ModelConfig:
    """Parses the text of a `config.pbtxt`.

    Raises:
        ModelLoadFailed: The text is wrong; the message names line and column.
    """
    try:
        return text_format.Parse(text, ModelConfig())
    except text_format.ParseError as error:
        line, column = error.GetLine(), error.GetColumn()
        where = f"config.pbtxt, line {line}, column {column}" if line else "config.pbtxt"
        reason = str(error).partition(" : ")[2] or str(error)
        raise ModelLoadFailed(f"{where}: {reason}") from None


def normalise(
    config: ModelConfig, name: str, files: Collection[str] = (), tensors: FileTensors | None = None
) -> ModelConfig:
    """Returns the configuration as Triton would show it: complete, with defaults, and checked.

    Args:
        config: What `config.pbtxt` says; empty when there is none. It is left as it is.
        name: The name of the model's directory.
        files: File names in its version directories, from which a backend that is not named is deduced.
        tensors: What the model file declares, to complete the configuration from and to compare it with, if known.

    Raises:
        ModelLoadFailed: The configuration is incomplete, contradictory, or uses what qinfer does not offer.
    """
    normal = ModelConfig()
    normal.CopyFrom(config)
    if normal.name not in ("", name):
        raise ModelLoadFailed(
            f"unexpected directory name '{name}' for model '{normal.name}', directory name must equal model name"
        )
    normal.name = name
    fill_backend(normal, files)
    if tensors is not None:
        complete(normal, tensors)
    _fill_defaults(normal)
    check(normal)
    return normal


def fill_backend(config: ModelConfig, files: Collection[str] = ()) -> None:
    """Fills backend, platform and model file name from one another, else from the files that are there.

    Raises:
        ModelLoadFailed: Nothing tells the backend, or backend and platform contradict each other.
    """
    if config.platform == "ensemble":  # has no backend; `check` says what is the matter with it
        return
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
    deduced = next((row for row in _BACKENDS if row[2] in files), None)
    if not config.backend and of_platform is None:
        if deduced is None:
            expected = ", ".join(file for _, _, file in _BACKENDS)
            raise ModelLoadFailed(
                f"must specify 'platform' or 'backend' for {config.name}; "
                f"its version directories have none of {expected} to tell it"
            )
        config.backend, config.platform, config.default_model_filename = deduced
        return
    config.backend = config.backend or of_platform
    config.platform = config.platform or _PLATFORM_OF_BACKEND.get(config.backend, "")
    config.default_model_filename = config.default_model_filename or _FILE_OF_BACKEND.get(config.backend, "")


def _fill_defaults(config: ModelConfig) -> None:
    """Applies the defaults of reference §2.5; qinfer has no GPU backend yet, so that KIND_AUTO is the CPU."""
    if config.version_policy.WhichOneof("policy_choice") is None:
        config.version_policy.latest.num_versions = 1
    batching = config.dynamic_batching
    if config.HasField("dynamic_batching") and not batching.preferred_batch_size and config.max_batch_size > 0:
        batching.preferred_batch_size.append(config.max_batch_size)
    for pinned in (config.optimization.input_pinned_memory, config.optimization.output_pinned_memory):
        pinned.enable = True
    if not config.instance_group:
        config.instance_group.add(name=config.name)
    for index, group in enumerate(config.instance_group):
        group.name = group.name or f"{config.name}_{index}"
        if group.kind == model_config_pb2.ModelInstanceGroup.KIND_AUTO:
            group.kind = (
                model_config_pb2.ModelInstanceGroup.KIND_GPU
                if group.gpus
                else model_config_pb2.ModelInstanceGroup.KIND_CPU
            )
        if group.count == 0:
            on_cpu = group.kind == model_config_pb2.ModelInstanceGroup.KIND_CPU
            group.count = _CPU_INSTANCES.get(config.backend, 1) if on_cpu else 1
