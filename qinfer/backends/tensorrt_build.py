"""The plan of an engine, from its options, shapes and cache key, and the program that builds it.

A build takes minutes, holds the interpreter's lock, and may crash, so a worker runs this program, which reads a `Build`
as JSON.

The options are the parameters of an accelerator `tensorrt` (`optimization.execution_accelerators.
gpu_execution_accelerator`), with the names of the onnxruntime backend: `precision_mode` (FP32, FP16, BF16, INT8),
`max_workspace_size_bytes`, `trt_builder_optimization_level`, `trt_profile_min_shapes`, `trt_profile_opt_shapes`,
`trt_profile_max_shapes`.
"""

import sys
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from qinfer.backends.cuda import Cuda
from qinfer.backends.parameters import content_digest, write_built
from qinfer.errors import ModelLoadFailed
from qinfer.models.config.file_tensors import FileTensors
from qinfer.models.spec import ModelSpec, TensorSpec

if TYPE_CHECKING:  # a plan is made, and tested, without it
    import tensorrt as trt

Shape = tuple[int, ...]
Profile = tuple[Shape, Shape, Shape]
"""An input's smallest, usual and largest shape."""

PRECISIONS = ("FP32", "FP16", "BF16", "INT8")
_LIMITS = ("trt_profile_min_shapes", "trt_profile_opt_shapes", "trt_profile_max_shapes")
_NUMBERS = ("max_workspace_size_bytes", "trt_builder_optimization_level")


class Build(msgspec.Struct, kw_only=True):
    """The input of the program; all but the paths and the device is part of the cache key.

    Attributes:
        workspace_bytes: The most GPU memory of an execution; 0 = unlimited.
        level: The effort of optimising, 0 … 5; -1 = TensorRT's default.
    """

    onnx: str = ""
    plan: str = ""
    device: int = 0
    profiles: dict[str, Profile]
    precision: str = "FP32"
    workspace_bytes: int = 0
    level: int = -1


def build_of(spec: ModelSpec, declared: FileTensors) -> Build:
    """Reads the options of a model and its file."""
    options = next((a.parameters for a in spec.gpu_accelerators if a.name == "tensorrt"), {})
    known = ("precision_mode", *_NUMBERS, *_LIMITS)
    for key, text in options.items():
        if key not in known:
            raise ModelLoadFailed(
                f"model '{spec.name}': parameter '{key}' of accelerator 'tensorrt' is not known here; "
                f"use {', '.join(known)}"
            )
        if key in _NUMBERS and not (text.isascii() and text.isdecimal()):
            raise ModelLoadFailed(f"model '{spec.name}': parameter '{key}' is '{text}'; it must be a number >= 0")
    precision = options.get("precision_mode", "FP32").upper()
    if precision not in PRECISIONS:
        raise ModelLoadFailed(
            f"model '{spec.name}': precision_mode is '{precision}'; it must be one of {', '.join(PRECISIONS)}"
        )
    return Build(
        profiles=profiles(spec, declared, options),
        precision=precision,
        workspace_bytes=int(options.get("max_workspace_size_bytes", 0)),
        level=int(options.get("trt_builder_optimization_level", -1)),
    )


def profiles(spec: ModelSpec, declared: FileTensors, options: Mapping[str, str]) -> dict[str, Profile]:
    """Returns the three shapes of each input.

    The batch dimension goes from 1 to `max_batch_size`, and is best at the largest preferred size. Variable dimensions
    need limits in the options.
    """
    given = [parse_shapes(spec.name, key, options.get(key, "")) for key in _LIMITS]
    files = {tensor.name: tensor.dims for tensor in declared.inputs}
    found: dict[str, Profile] = {}
    for tensor in spec.file_inputs:
        if all(tensor.name in shapes for shapes in given):
            smallest, usual, largest = (shapes[tensor.name] for shapes in given)
            found[tensor.name] = (smallest, usual, largest)
            continue
        dims = _merged(spec, tensor, files.get(tensor.name))
        if -1 in dims:
            raise ModelLoadFailed(
                f"model '{spec.name}': input '{tensor.name}' has variable dimensions {list(dims)}, for which TensorRT "
                f"needs limits; set {', '.join(_LIMITS)} of accelerator 'tensorrt', such as "
                f"'{tensor.name}:{'x'.join('1' if d < 0 else str(d) for d in (*_lead(spec, 1), *dims))}'"
            )
        best = spec.batching.preferred_sizes[-1] if spec.batching else spec.max_batch_size
        found[tensor.name] = tuple((*_lead(spec, n), *dims) for n in (1, best, spec.max_batch_size))  # type: ignore[assignment]  # three of them
    return found


def parse_shapes(model: str, key: str, text: str) -> dict[str, Shape]:
    """Reads `name:1x3x224x224,other:1x8`, the notation of onnxruntime and trtexec."""
    shapes: dict[str, Shape] = {}
    for part in filter(None, (p.strip() for p in text.split(","))):
        name, _, dims = part.rpartition(":")
        numbers = dims.split("x")
        if not name or not all(n.isascii() and n.isdecimal() for n in numbers):
            raise ModelLoadFailed(f"model '{model}': '{part}' in {key} must be of the form input:1x3x224x224")
        shapes[name] = tuple(map(int, numbers))
    return shapes


def cache_key(build: Build, files: Path, gpu: str, tensorrt: str) -> str:
    """Names an engine in the cache, by all `files`."""
    profiles = msgspec.json.encode(build.profiles, order="sorted").decode()
    return content_digest(files, gpu, tensorrt, build.precision, str(build.workspace_bytes), str(build.level), profiles)


def _lead(spec: ModelSpec, rows: int) -> Shape:
    return (rows,) if spec.max_batch_size else ()


def _merged(spec: ModelSpec, tensor: TensorSpec, file: Shape | None) -> Shape:
    """Returns the dimensions without the batch dimension, with the dimension of the file in place of each -1."""
    dims = tensor.seen_dims
    rest = (file or ())[1 if spec.max_batch_size else 0 :]
    if len(rest) != len(dims):
        return dims
    return tuple(f if d < 0 else d for d, f in zip(dims, rest, strict=True))


class BuildFailed(Exception):
    """TensorRT can't build the engine, for the reason given."""


def main() -> int:
    """Builds the engine of standard input."""
    build = msgspec.json.decode(sys.stdin.buffer.read(), type=Build)
    return write_built(lambda: built(build), build.onnx, build.plan)


def built(build: Build) -> bytes:
    """Returns the serialised engine, or raises `BuildFailed`."""
    Cuda().set_device(build.device)
    import tensorrt as trt

    logger = trt.Logger(trt.Logger.WARNING)
    trt.init_libnvinfer_plugins(logger, "")
    builder = trt.Builder(logger)
    network = builder.create_network(0)
    parser = trt.OnnxParser(network, logger)
    if not parser.parse_from_file(build.onnx):
        reasons = "; ".join(parser.get_error(i).desc() for i in range(parser.num_errors))
        raise BuildFailed(f"TensorRT can't read the ONNX file: {reasons}")
    config = builder.create_builder_config()
    if build.workspace_bytes:
        config.set_memory_pool_limit(trt.MemoryPoolType.WORKSPACE, build.workspace_bytes)
    if build.level >= 0:
        config.builder_optimization_level = build.level
    if build.precision != "FP32":
        flag = getattr(trt.BuilderFlag, build.precision, None)
        if flag is None:
            raise BuildFailed(
                f"TensorRT {trt.__version__} takes precisions from the model's own types; export the model in "
                f"{build.precision}, and remove precision_mode"
            )
        config.set_flag(flag)
    _add_profile(builder, network, config, build)
    serialised = builder.build_serialized_network(network, config)
    if serialised is None:
        raise BuildFailed("TensorRT can't build the engine; its own messages are in the worker's log")
    return bytes(serialised)


def _add_profile(
    builder: "trt.Builder", network: "trt.INetworkDefinition", config: "trt.IBuilderConfig", build: Build
) -> None:
    profile = builder.create_optimization_profile()
    for index in range(network.num_inputs):
        tensor = network.get_input(index)
        if tensor.name not in build.profiles:
            raise BuildFailed(f"the ONNX file has an input '{tensor.name}', which the configuration lacks")
        if -1 in tuple(tensor.shape):
            smallest, usual, largest = build.profiles[tensor.name]
            profile.set_shape(tensor.name, smallest, usual, largest)
    config.add_optimization_profile(profile)


if __name__ == "__main__":
    sys.exit(main())
