"""Builds a TensorRT engine from an ONNX file: reads a `Build` as JSON.

A build takes minutes, holds the interpreter's lock, and may crash, so a worker runs this program.
"""

import os
import sys
from pathlib import Path

import msgspec
import tensorrt as trt

from qinfer.backends.cuda import Cuda
from qinfer.backends.tensorrt_plan import Build


class BuildFailed(Exception):
    """TensorRT can't build the engine, for the reason given."""


def main() -> int:
    """Builds the engine of standard input."""
    build = msgspec.json.decode(sys.stdin.buffer.read(), type=Build)
    try:
        Cuda().set_device(build.device)
        engine = built(build)
    except Exception as error:  # noqa: BLE001  the boundary of the process: the last line of its output is the reason
        sys.stderr.write(f"\n{str(error).replace(os.sep, ' ')}\n")
        return 1
    temporary = Path(f"{build.plan}.{os.getpid()}")
    temporary.write_bytes(engine)
    temporary.replace(build.plan)
    return 0


def built(build: Build) -> bytes:
    """Returns the serialised engine, or raises `BuildFailed`."""
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
    builder: trt.Builder, network: trt.INetworkDefinition, config: trt.IBuilderConfig, build: Build
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
