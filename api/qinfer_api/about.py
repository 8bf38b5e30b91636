"""The server and its models as clients see them, and settings that clients change, shared by REST and gRPC.

An endpoint is described as its stable target, under its own name (reference §1.3 … §1.5). The control store holds the
settings of logging and tracing (§1.16, §1.17), so that all processes follow. An update is checked completely before any
of it is stored.
"""

from collections.abc import Iterator, Mapping
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

import qinfer
from qinfer.core.messages import IdFactory
from qinfer.core.settings import LogSettings as LogStart
from qinfer.core.settings import Settings
from qinfer.errors import InvalidRequest, UnsupportedFeature, ValueRefused
from qinfer.models.catalog import Catalog
from qinfer.models.spec import ModelSpec, TensorSpec
from qinfer.models.state import State
from qinfer.models.store import LOGGING, ControlStore, of_group, put_group, switches_of
from qinfer.observe import logs
from qinfer.observe.logs import Switches
from qinfer.queue.stored_records import SettingValue
from qinfer.traffic.routing import Endpoints
from qinfer.wire.bodies import ModelIndexEntry, ModelMetadata, TensorMetadata
from qinfer_api.observe.trace_file import (
    CHANGE,
    START,
    TraceChanges,
    TraceFile,
    checked,
    group_of,
    groups_of,
)
from qinfer_api.status import convert_json

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

Changes = Mapping[str, object]

_LOG_FORMATS = ("default", "ISO8601")
_MAX_UINT32 = 2**32 - 1


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


class LogValues(msgspec.Struct, frozen=True):
    """The log settings.

    Attributes:
        log_file: Always empty: logs go to stderr.
        log_verbose_level: Above 0, debug lines are logged.
    """

    log_file: Literal[""]
    log_info: bool
    log_warning: bool
    log_error: bool
    log_verbose_level: Annotated[int, Meta(ge=0)]
    log_format: Literal["default", "ISO8601"]


class LogChanges(msgspec.Struct, frozen=True):
    """Changes of the log settings; omitted and null fields do not change.

    Attributes:
        log_file: Refused, because the operator chooses where logs go.

    Example:
        {"log_verbose_level": 1}
    """

    log_info: bool | None = None
    log_warning: bool | None = None
    log_error: bool | None = None
    log_verbose_level: Annotated[int, Meta(ge=0)] | None = None
    log_format: Annotated[str, Meta(extra_json_schema={"enum": list(_LOG_FORMATS)})] | None = None
    log_file: Any = None


class TraceValues(msgspec.Struct, frozen=True):
    """The trace settings.

    Attributes:
        trace_count: Traces that this process may still begin; -1 = any number.
        trace_file: The name of the file without its directory; empty: no traces are written here.
    """

    trace_level: list[Literal["OFF", "TIMESTAMPS", "TENSORS"]]
    trace_rate: str
    trace_count: str
    log_frequency: str
    trace_file: str
    trace_mode: Literal["triton"]


class SharedLogSettings:
    """The log settings; `start` holds for unset values."""

    def __init__(self, store: ControlStore, start: LogStart) -> None:
        self._store = store
        self.first = Switches.from_settings(start)

    async def read(self) -> LogValues:
        """Returns the settings."""
        return _current_values(await self._switches())

    async def update(self, changes: Changes) -> LogValues:
        """Applies changes here at once, elsewhere within two seconds.

        `None` and unknown names are ignored.
        """
        await put_group(self._store, LOGGING, _log_values(changes))
        switches = await self._switches()
        logs.apply(switches)
        return _current_values(switches)

    async def _switches(self) -> Switches:
        return switches_of(of_group(await self._store.settings(), LOGGING), self.first)


class SharedTraceSettings:
    """Trace settings of the server and of models."""

    def __init__(
        self,
        store: ControlStore,
        catalog: Catalog,
        traces: TraceFile | None = None,
        start: Mapping[str, SettingValue] = START,
    ) -> None:
        self._store = store
        self._start = start
        self._catalog = catalog
        self._traces = traces
        self._new_change = IdFactory().ulid

    async def read(self, model: str = "") -> TraceValues:
        """Returns a ready model's or (empty) the server's settings."""
        self._check_model(model)
        traces = self._traces
        stored = await (self._store.settings() if traces is None else traces.refresh(self._store))
        groups = groups_of(stored, self._start)
        values = groups.get(model, groups[""])
        shown = {name: values[name] for name in START}
        if traces is not None:
            shown["trace_count"] = str(traces.left(model))
        shown["trace_file"] = traces.name if traces is not None else ""
        return msgspec.convert(shown | {"trace_mode": "triton"}, TraceValues)

    async def update(self, changes: Changes, model: str = "") -> TraceValues:
        """Applies changes here at once, elsewhere within two seconds."""
        self._check_model(model)
        asked = convert_json(changes, TraceChanges)
        values = checked(asked, is_written=self._traces is not None)
        if values:
            values[CHANGE] = self._new_change()
            await put_group(self._store, group_of(model), values)
        return await self.read(model)

    def _check_model(self, model: str) -> None:
        if model and not self._catalog.ready_versions(model):
            raise InvalidRequest(f"Request for unknown model : {model}")


def _current_values(switches: Switches) -> LogValues:
    return LogValues(
        log_file="",
        log_info=switches.info,
        log_warning=switches.warning,
        log_error=switches.error,
        log_verbose_level=switches.verbose_level,
        log_format="ISO8601" if switches.iso8601 else "default",
    )


def _log_values(given: Changes) -> dict[str, SettingValue]:
    if given.get("log_file") is not None:
        raise UnsupportedFeature("log file location can not be updated through network protocol")
    changes = convert_json(given, LogChanges)
    level, log_format = changes.log_verbose_level, changes.log_format
    if level is not None and level > _MAX_UINT32:
        raise InvalidRequest(f"'log_verbose_level' must be within 0 and {_MAX_UINT32}, got {level}")
    if log_format is not None and log_format not in _LOG_FORMATS:
        raise ValueRefused(f"invalid argument for log_format, got: {log_format[:100]}; use default or ISO8601")
    values: dict[str, SettingValue | None] = msgspec.structs.asdict(changes)
    return {name: value for name, value in values.items() if value is not None}
