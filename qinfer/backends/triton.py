"""Backends that are none of qinfer's: Triton's, written in C, by Triton's own core in a process of its own.

A crash or hang costs that process only, as with a `model.py`.
"""

import os
from collections.abc import Sequence
from functools import partial
from pathlib import Path

from qinfer.backends.base import ManagesModels
from qinfer.backends.parameters import engine_cache, model_variables, triton_files
from qinfer.backends.python import HostedModel, PythonBackend
from qinfer.backends.python_host.messages import LoadModel
from qinfer.backends.triton_host import model
from qinfer.backends.triton_host.library import find_backend, place
from qinfer.errors import BackendUnavailable
from qinfer.models.spec import Device, ModelSpec

_LIBRARY_PATH = "LD_LIBRARY_PATH"


class TritonBackend(PythonBackend):
    """Runs a model by `libtriton_<backend>.so`; `others` names this worker's other backends."""

    def __init__(self, models: ManagesModels | None = None, others: Sequence[str] = ()) -> None:
        super().__init__(models, partial(_in_core, others))


def _in_core(others: Sequence[str], spec: ModelSpec, version_dir: Path, device: Device) -> HostedModel:
    if find_backend(triton_files(), spec.backend, version_dir) is None:
        raise BackendUnavailable(
            f"no backend is called '{spec.backend}'; this worker has {', '.join(others)}, and libtriton_{spec.backend}"
            ".so is neither beside the model nor in Triton's directory of backends (QINFER_WORKER__TRITON_BACKENDS): "
            "correct the configuration, or install the backend where workers run"
        )
    placed = place(triton_files(), spec, version_dir, device, engine_cache() / "triton")
    args = {
        model.LIBRARY: str(placed.library),
        model.REPOSITORY: str(placed.repository),
        model.BACKENDS: str(placed.backends),
    }
    message = LoadModel(str(version_dir), spec.filename, args, model.__name__)
    paths = (placed.search_path, model_variables().get(_LIBRARY_PATH, ""))
    return HostedModel(message, None, {_LIBRARY_PATH: os.pathsep.join(filter(None, paths))})
