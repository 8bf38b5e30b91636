"""The calls of the trace and logging extensions (reference §1.16, §1.17, §2.1)."""

from typing import Any

import msgspec
from tritonclient.grpc import service_pb2 as pb

from qinfer.errors import InvalidRequest
from qinfer_api.rpc.calls import Guard, Handler
from qinfer_api.server_settings import LogSettings, LogValues, TraceSettings

_LEVELS = "trace_level"
_LOG_KINDS = {
    "log_file": "string_param",
    "log_info": "bool_param",
    "log_warning": "bool_param",
    "log_error": "bool_param",
    "log_verbose_level": "uint32_param",
    "log_format": "string_param",
}


def settings_calls(guard: Guard, trace: TraceSettings, log: LogSettings) -> dict[str, Handler]:
    """Returns the handlers: name → handler. A call without settings asks for them, one with settings changes them."""

    async def trace_setting(request: Any) -> Any:
        model = request.model_name
        changes = {name: _trace_value(name, list(value.value)) for name, value in request.settings.items()}
        shown = await (trace.update(changes, model) if changes else trace.read(model))
        setting = pb.TraceSettingResponse.SettingValue
        return pb.TraceSettingResponse(
            settings={
                n: setting(value=[v] if isinstance(v, str) else v) for n, v in msgspec.structs.asdict(shown).items()
            }
        )

    async def log_settings(request: Any) -> Any:
        changes = {name: _log_value(name, value) for name, value in request.settings.items() if name in _LOG_KINDS}
        shown = await (log.update(changes) if changes else log.read())
        return pb.LogSettingsResponse(settings=_logged(shown))

    return {
        "TraceSetting": guard.unary(pb.TraceSettingRequest, trace_setting, "trace", is_change=_has_settings),
        "LogSettings": guard.unary(pb.LogSettingsRequest, log_settings, "logging", is_change=_has_settings),
    }


def _has_settings(request: Any) -> bool:
    return bool(request.settings)


def _trace_value(name: str, values: list[str]) -> object:
    """Returns a setting as JSON would have it; no value clears it."""
    if not values:
        return None
    if name == _LEVELS:
        return values
    if len(values) > 1:
        raise InvalidRequest(f"expect only 1 value for '{name[:100]}', got {len(values)}")
    return values[0]


def _log_value(name: str, value: Any) -> object:
    kind = value.WhichOneof("parameter_choice")
    if kind is None:
        return None
    if kind != _LOG_KINDS[name]:
        raise InvalidRequest(f"invalid value type for '{name}' setting, expected {_LOG_KINDS[name]}.")
    return getattr(value, kind)


def _logged(shown: LogValues) -> dict[str, Any]:
    setting = pb.LogSettingsResponse.SettingValue
    return {name: setting(**{_LOG_KINDS[name]: value}) for name, value in msgspec.structs.asdict(shown).items()}
