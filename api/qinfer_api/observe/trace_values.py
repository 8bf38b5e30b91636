"""The values of the trace settings: what they begin with, what clients may write, and how they inherit (§1.16)."""

import re
from collections.abc import Mapping
from typing import Annotated, Any

import msgspec
from msgspec import UNSET, Meta, UnsetType

from qinfer.errors import InvalidRequest, UnsupportedFeature
from qinfer.models.shared_settings import TRACE, Value, of_group

START: dict[str, Value] = {
    "trace_level": ["OFF"],
    "trace_rate": "1000",
    "trace_count": "-1",
    "log_frequency": "0",
}
"""What nobody has changed."""

CHANGE = "change"
"""Stored beside the values and shown to nobody: differs after each update, so that all gateways begin anew with it."""

_MAX_UINT32 = 2**32 - 1
_INTEGER = re.compile(r"[+-]?[0-9]{1,20}")
_LEVELS = ("TIMESTAMPS", "TENSORS")
_RANGES = {
    "trace_rate": (0, _MAX_UINT32),
    "trace_count": (-1, 2**31 - 1),
    "log_frequency": (0, _MAX_UINT32),
}
_MODE = "triton"
_OFF = (
    "traces are not written on this server; whoever runs it sets QINFER_TRACE__FILE to the file that they are to be "
    "written to"
)
_OTHER_MODE = (
    "trace mode can not be updated through network protocol; the server's own environment switches OpenTelemetry on, "
    "with OTEL_EXPORTER_OTLP_ENDPOINT, beside this mode"
)


_Level = Annotated[str, Meta(extra_json_schema={"enum": ["OFF", *_LEVELS]})]
_Number = Annotated[str, Meta(extra_json_schema={"pattern": "^[+-]?[0-9]+$"})] | UnsetType | None


class TraceChanges(msgspec.Struct, frozen=True):
    """Changes of the trace settings.

    Null has the value of the level above again: of a model the server's, of the server that of its start.

    Attributes:
        trace_file: Refused: where traces go is the operator's.
        trace_mode: `triton`; others are refused.

    Example:
        {"trace_level": ["TIMESTAMPS"], "trace_rate": "100"}
    """

    trace_level: list[_Level] | UnsetType | None = UNSET
    trace_rate: _Number = UNSET
    trace_count: _Number = UNSET
    log_frequency: _Number = UNSET
    trace_file: Any = UNSET
    trace_mode: Any = None


def group_of(model: str) -> str:
    """Returns the group of a model's own values; that of the server's for an empty name."""
    return f"{TRACE}:{model}" if model else TRACE


def groups_of(stored: Mapping[str, str]) -> dict[str, dict[str, Value]]:
    """Returns the values that hold: of the server (empty name), and of each model that has its own.

    Args:
        stored: As `ControlStore.settings` returns them.
    """
    server = START | of_group(stored, TRACE)
    prefix = f"{TRACE}:"
    models = {name.removeprefix(prefix).rpartition("/")[0] for name in stored if name.startswith(prefix)}
    groups = {"": server}
    for model in models:
        own = of_group(stored, group_of(model))
        if own.keys() - {CHANGE}:
            marks = f"{server.get(CHANGE, '')} {own.get(CHANGE, '')}"
            groups[model] = server | own | {CHANGE: marks}
    return groups


def checked(changes: TraceChanges, *, is_written: bool) -> dict[str, Value]:
    """Returns what is to be stored of an update.

    Args:
        changes: The update.
        is_written: This server writes traces.

    Raises:
        UnsupportedFeature: It asks for a file, another mode, tensors, or traces where none are written.
        InvalidRequest: A value can't be used.
    """
    if changes.trace_file is not UNSET:
        raise UnsupportedFeature("trace file location can not be updated through network protocol")
    if changes.trace_mode not in (None, _MODE):
        raise UnsupportedFeature(_OTHER_MODE)
    values: dict[str, Value] = {}
    if not isinstance(changes.trace_level, UnsetType):
        values["trace_level"] = levels = _level(changes.trace_level)
        if levels and "TENSORS" in levels:
            raise UnsupportedFeature("trace level TENSORS is not supported; use TIMESTAMPS")
        if levels and "OFF" not in levels and not is_written:
            raise UnsupportedFeature(_OFF)
    for name, (least, most) in _RANGES.items():
        if (text := getattr(changes, name)) is not UNSET:
            values[name] = None if text is None else _number(name, text, least, most)
    return values


def _level(levels: list[str] | None) -> list[str] | None:
    if levels is None:
        return None
    for level in levels:
        if level == "OFF" and len(levels) > 1:
            raise InvalidRequest("Expect only one trace level 'OFF' is specified")
        if level != "OFF" and level not in _LEVELS:
            raise InvalidRequest(f"there is no trace level '{level[:100]}'; use OFF or TIMESTAMPS")
    return [level for level in _LEVELS if level in levels] or ["OFF"]


def _number(name: str, text: str, least: int, most: int) -> str:
    """Checks a number that is written as a string; returns it as Triton shows it."""
    if not _INTEGER.fullmatch(text.strip()):
        raise InvalidRequest(f"Unable to parse '{name}', got: {text[:100]}")
    number = int(text)
    if name == "trace_count" and number < least:
        raise InvalidRequest(f"Unable to parse 'trace_count'. Expecting value >= {least}, got:{text[:100]}")
    if not least <= number <= most:
        raise InvalidRequest(f"Unable to parse '{name}', value is out of range [ {least}, {most} ], got: {text[:100]}")
    return str(number)
