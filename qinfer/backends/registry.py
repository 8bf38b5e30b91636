"""Backend names → factories. A runtime is imported when a model that needs it is loaded, never before.

Third parties add backends by an entry point in the group `qinfer.backends` whose object is a `BackendFactory`.
"""

from importlib import import_module
from importlib.metadata import entry_points
from typing import NamedTuple, cast

from qinfer.backends.base import BackendFactory
from qinfer.errors import BackendUnavailable

ENTRY_POINT_GROUP = "qinfer.backends"


class _BuiltIn(NamedTuple):
    module: str
    attribute: str
    extra: str


_BUILT_IN = {
    "onnxruntime": _BuiltIn("qinfer.backends.onnx", "OnnxBackend", "onnx"),
    "stub": _BuiltIn("qinfer.backends.stub", "StubBackend", ""),
}


def factory(name: str) -> BackendFactory:
    """Returns the factory of a backend.

    Raises:
        BackendUnavailable: Nothing of that name is known, or its runtime is not installed.
    """
    built_in = _BUILT_IN.get(name)
    if built_in is not None:
        try:
            module = import_module(built_in.module)
        except ImportError as error:
            raise BackendUnavailable(
                f"backend '{name}' needs a runtime that is not installed ({error}); "
                f"run: pip install 'qinfer[{built_in.extra}]'"
            ) from error
        return cast("BackendFactory", getattr(module, built_in.attribute))
    for entry_point in entry_points(group=ENTRY_POINT_GROUP, name=name):
        try:
            return cast("BackendFactory", entry_point.load())
        except ImportError as error:
            raise BackendUnavailable(f"backend '{name}' can't be imported: {error}") from error
    known = sorted({*_BUILT_IN, *entry_points(group=ENTRY_POINT_GROUP).names})
    raise BackendUnavailable(f"no backend is called '{name}'; this worker has {', '.join(known)}")
