"""Backend names → factories; a runtime is imported when a model first needs it.

Other packages add backends by an entry point in the group `qinfer.backends`, whose object is a `BackendFactory`.
"""

from collections.abc import Callable
from functools import partial
from importlib import import_module
from importlib.metadata import entry_points
from importlib.util import find_spec
from pathlib import Path
from typing import NamedTuple, cast

from qinfer.backends.base import Backend, BackendFactory, ManagesModels
from qinfer.errors import BackendUnavailable
from qinfer.models.config.message import ModelConfig
from qinfer.models.spec import FRAMEWORKS

ENTRY_POINT_GROUP = "qinfer.backends"

CompleteConfig = Callable[[ModelConfig, Path], ModelConfig]
"""Completes a version's configuration; raises `ModelLoadFailed`."""


class _BuiltIn(NamedTuple):
    module: str
    attribute: str
    extra: str


_BUILT_IN = {
    "onnxruntime": _BuiltIn("qinfer.backends.onnx", "OnnxBackend", "onnx"),
    "openvino": _BuiltIn("qinfer.backends.openvino", "OpenvinoBackend", "openvino"),
    **{name: _BuiltIn("qinfer.backends.isolated", "FrameworkBackend", name) for name in FRAMEWORKS},
    "python": _BuiltIn("qinfer.backends.python", "PythonBackend", "worker"),
    "pytorch": _BuiltIn("qinfer.backends.torch", "TorchBackend", "torch"),
    "tensorrt": _BuiltIn("qinfer.backends.tensorrt", "TensorrtBackend", "tensorrt"),
    "stub": _BuiltIn("qinfer.backends.stub", "StubBackend", ""),
}
_OTHERS = _BuiltIn("qinfer.backends.triton", "TritonBackend", "worker")
"""Runs every other backend: one of Triton's."""


def factory(name: str, models: ManagesModels | None = None) -> BackendFactory:
    """Returns a backend's factory; `models` is for Python models. Unknown names are left to Triton's core."""
    built_in = _BUILT_IN.get(name)
    if built_in is not None:
        made = cast("Callable[..., Backend]", _imported(name, built_in))
        if name in FRAMEWORKS:
            return partial(made, name)
        return made if name != "python" else partial(made, models)
    for entry_point in entry_points(group=ENTRY_POINT_GROUP, name=name):
        try:
            return cast("BackendFactory", entry_point.load())
        except ImportError as error:
            raise BackendUnavailable(f"backend '{name}' can't be imported: {error}") from error
    return partial(cast("Callable[..., Backend]", _imported(name, _OTHERS)), models, known_names())


def known_names() -> list[str]:
    """Returns the names of this installation's backends, without those of Triton."""
    return sorted({*_BUILT_IN, *entry_points(group=ENTRY_POINT_GROUP).names} - {"stub"})


def listed() -> list[tuple[str, str, str]]:
    """Returns name, origin and remedy of each backend but Triton's; the remedy is empty if the backend is usable."""
    rows = []
    for name in known_names():
        built_in = _BUILT_IN.get(name)
        problem = ""
        try:
            if built_in is not None:
                _imported(name, built_in)
            if name in FRAMEWORKS:
                _check_packages(name)
        except BackendUnavailable as error:
            problem = error.message
        rows.append((name, "qinfer" if built_in is not None else "package", problem))
    return rows


def completer(name: str) -> CompleteConfig:
    """Returns the completer of a backend's configurations."""
    if name != "python" and name not in FRAMEWORKS:
        raise BackendUnavailable(f"models of backend '{name}' can't complete their configurations")
    complete = cast(
        "Callable[..., ModelConfig]", _imported(name, _BUILT_IN[name]._replace(attribute="complete_config"))
    )
    return complete if name == "python" else partial(complete, name)


def _check_packages(framework: str) -> None:
    """Raises if the worker's environment lacks a framework, which only the processes of models import."""
    from qinfer.backends.isolated import PACKAGES

    if absent := [package for package in PACKAGES[framework] if find_spec(package) is None]:
        raise BackendUnavailable(
            f"backend '{framework}' needs {' and '.join(absent)}, which the workers' environment lacks; run: "
            f"pip install 'qinfer-ml[{framework}]'"
        )


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
