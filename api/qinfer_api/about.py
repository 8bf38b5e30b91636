"""Descriptions of the server and its models, shared by REST and gRPC (reference §1.3 … §1.5).

An endpoint is described as its stable target, under its own name.
"""

from collections.abc import Iterator

import msgspec

import qinfer
from qinfer.core.settings import Settings
from qinfer.models.catalog import Catalog
from qinfer.models.spec import ModelSpec, TensorSpec
from qinfer.models.state import State
from qinfer.traffic.routing import Endpoints
from qinfer.wire.bodies import ModelIndexEntry, ModelMetadata, TensorMetadata

EXTENSIONS = (
    "classification",
    "sequence",
    "model_repository",
    "model_repository(unload_dependents)",
    "schedule_policy",
    "model_configuration",
    "system_shared_memory",
    "cuda_shared_memory",
    "binary_tensor_data",
    "parameters",
    "statistics",
    "trace",
    "logging",
)
"""Triton's list in its order, on which clients rely; an extension may be off."""


class ServerMetadata(msgspec.Struct, frozen=True):
    """The server's name and version, and its extensions of the protocol."""

    name: str
    version: str
    extensions: list[str]


def server_metadata(settings: Settings) -> ServerMetadata:
    """Returns the metadata of the server."""
    return ServerMetadata(settings.server_id, qinfer.__version__, list(EXTENSIONS))


def model_metadata(endpoints: Endpoints, name: str, version: int) -> ModelMetadata:
    """Returns the metadata of a model; version 0 lists the ready versions."""
    catalog, (model, version) = endpoints.catalog, endpoints.stable(name, version)
    spec = catalog.resolve(model, version).spec
    return ModelMetadata(
        name=name,
        versions=tuple(str(v) for v in ((version,) if version else catalog.ready_versions(model))),
        platform=spec.platform or spec.backend,
        inputs=tuple(_tensor_metadata(tensor, spec) for tensor in spec.inputs),
        outputs=tuple(_tensor_metadata(tensor, spec) for tensor in spec.outputs),
    )


def is_server_ready(settings: Settings, catalog: Catalog, *, draining: bool) -> bool:
    """Returns whether one model can answer or all failed to load; in strict mode, whether all are ready."""
    if draining:
        return False
    return catalog.is_server_ready() if settings.repository.strict_readiness else catalog.has_started()


def model_config(endpoints: Endpoints, name: str, version: int) -> str:
    """Returns a model's normalised configuration as JSON."""
    text = endpoints.catalog.config_json(*endpoints.stable(name, version))
    if name not in endpoints.by_name:
        return text
    return msgspec.json.encode({**msgspec.json.decode(text), "name": name}).decode()


def endpoint_entries(endpoints: Endpoints, *, ready: bool) -> Iterator[ModelIndexEntry]:
    """Yields endpoints for the index, in place of the models that they hide."""
    for name, routed in sorted(endpoints.by_name.items()):
        model, version = routed.stable.place
        is_ready = endpoints.catalog.find(model, version) is not None
        if name not in endpoints.catalog.known() and (is_ready or not ready):
            reason = "" if is_ready else f"its stable target {routed.stable.label} is not ready"
            state = State.READY if is_ready else State.UNAVAILABLE
            yield ModelIndexEntry(name=name, version=str(version), state=state, reason=reason)


def is_model_ready(endpoints: Endpoints, name: str, version: int) -> bool:
    """Returns whether a model, or one version of it (0 = any), can be asked.

    It needs a live worker, and an `is_ready` that does not refuse.
    """
    catalog, (model, version) = endpoints.catalog, endpoints.stable(name, version)
    if not version:
        status = catalog.status(model)
        if status.loadable_versions and not status.ready_versions:
            return False
    return catalog.says_ready(model, version)


def _tensor_metadata(tensor: TensorSpec, spec: ModelSpec) -> TensorMetadata:
    shape = (-1, *tensor.dims) if spec.max_batch_size > 0 else tuple(tensor.dims)
    return TensorMetadata(name=tensor.name, datatype=tensor.datatype, shape=shape)
