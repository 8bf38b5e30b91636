"""The `ModelConfig` message that tritonclient ships, without the gRPC runtime that `import tritonclient.grpc` brings.

Two copies of protobuf package `inference` can't live in one process, so the message must be tritonclient's own. Its
package imports grpc and numpy on the way (0.2 s and 20 MB in every gateway and worker), so the generated module is
loaded by its file and registered under its own name: a later `import tritonclient.grpc` finds and shares it.
"""

import importlib.util
import sys
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tritonclient.grpc import model_config_pb2
    from tritonclient.grpc.model_config_pb2 import ModelConfig

_NAME = "tritonclient.grpc.model_config_pb2"


def _load() -> ModuleType:
    if _NAME in sys.modules:
        return sys.modules[_NAME]
    package = importlib.util.find_spec("tritonclient")
    if package is None or not package.submodule_search_locations:
        raise ImportError("tritonclient is not installed; pip install 'tritonclient[grpc]'")
    path = Path(package.submodule_search_locations[0], "grpc", "model_config_pb2.py")
    spec = importlib.util.spec_from_file_location(_NAME, path)
    if spec is None or spec.loader is None:
        raise ImportError(f"{_NAME} can't be loaded; pip install 'tritonclient[grpc]'")
    module = importlib.util.module_from_spec(spec)
    sys.modules[_NAME] = module
    spec.loader.exec_module(module)
    return module


if not TYPE_CHECKING:
    model_config_pb2 = _load()
    ModelConfig = model_config_pb2.ModelConfig

__all__ = ["ModelConfig", "model_config_pb2"]
