"""Backend names → factories. A runtime is imported when a model that needs it is loaded, never before.

Third parties add backends by an entry point in the group `qinfer.backends` whose object is a `BackendFactory`.
"""

from collections.abc import Callable
from functools import partial
from importlib import import_module
from importlib.metadata import entry_points
from pathlib import Path
from typing import NamedTuple, cast

from qinfer.backends.base import Backend, BackendFactory, ManagesModels
from qinfer.errors import BackendUnavailable
from qinfer.models.config.message import ModelConfig

ENTRY_POINT_GROUP = "qinfer.backends"

CompleteConfig = Callable[[ModelConfig, Path], ModelConfig]
"""Completes a configuration; told the directory of the version to ask. It raises `ModelLoadFailed`."""


class _BuiltIn(NamedTuple):
    module: str
    attribute: str
    extra: str


_BUILT_IN = {
    "onnxruntime": _BuiltIn("qinfer.backends.onnx", "OnnxBackend", "onnx"),
    "openvino": _BuiltIn("qinfer.backends.openvino", "OpenvinoBackend", "openvino"),
    "python": _BuiltIn("qinfer.backends.python", "PythonBackend", "worker"),
    "pytorch": _BuiltIn("qinfer.backends.torch", "TorchBackend", "torch"),
    "tensorrt": _BuiltIn("qinfer.backends.tensorrt", "TensorrtBackend", "tensorrt"),
    "stub": _BuiltIn("qinfer.backends.stub", "StubBackend", ""),
}


def factory(name: str, models: ManagesModels | None = None) -> BackendFactory:
    """Returns the factory of a backend.

    Args:
        name: The backend's name.
        models: Loads what models written in Python ask for; `None` = they may not ask.

    Raises:
        BackendUnavailable: Nothing of that name is known, or its runtime is not installed.
    """
    built_in = _BUILT_IN.get(name)
    if built_in is not None:
        made = cast("Callable[..., Backend]", _imported(name, built_in))
        return made if name != "python" else partial(made, models)
    for entry_point in entry_points(group=ENTRY_POINT_GROUP, name=name):
        try:
            return cast("BackendFactory", entry_point.load())
        except ImportError as error:
            raise BackendUnavailable(f"backend '{name}' can't be imported: {error}") from error
    known = sorted({*_BUILT_IN, *entry_points(group=ENTRY_POINT_GROUP).names} - {"stub"})
    raise BackendUnavailable(
        f"no backend is called '{name}'; this worker has {', '.join(known)}: correct the configuration, "
        "or install the package that brings it where workers run"
    )


def completer(name: str) -> CompleteConfig:
    """Returns what completes the configurations of a backend's models by the models' own code.

    Raises:
        BackendUnavailable: The backend has no such thing, or its runtime is not installed.
    """
    if name != "python":
        raise BackendUnavailable(f"models of backend '{name}' can't complete their configurations")
    return cast("CompleteConfig", _imported(name, _BUILT_IN[name]._replace(attribute="complete_config")))


def _imported(name: str, built_in: _BuiltIn) -> object:
    try:
        module = import_module(built_in.module)
    except ImportError as error:
        raise BackendUnavailable(
            f"backend '{name}' needs a runtime that is not installed ({error}); "
            f"run: pip install 'qinfer-ml[{built_in.extra}]'"
        ) from (None if isinstance(error, ModuleNotFoundError) else error)
    attribute: object = getattr(module, built_in.attribute)
    return attribute
