"""The values of the trace settings: what they begin with, what clients may write, and how they inherit (§1.16)."""

import re
from collections.abc import Mapping

from qinfer.control.shared_settings import TRACE, Value, of_group
from qinfer.errors import InvalidRequest, MalformedJson, UnsupportedFeature

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


def checked(changes: Mapping[str, object], *, is_written: bool) -> dict[str, Value]:
    """Returns what is to be stored of an update; names that are not known are left out.

    Args:
        changes: Setting → value, or `None` for the value of the level above.
        is_written: This server writes traces.

    Raises:
        UnsupportedFeature: It asks for a file, another mode, tensors, or traces where none are written.
        MalformedJson: A value is of the wrong type.
        InvalidRequest: A value can't be used.
    """
    if "trace_file" in changes:
        raise UnsupportedFeature("trace file location can not be updated through network protocol")
    if changes.get("trace_mode") not in (None, _MODE):
        raise UnsupportedFeature(_OTHER_MODE)
    values: dict[str, Value] = {}
    if "trace_level" in changes:
        values["trace_level"] = levels = _level(changes["trace_level"])
        if levels and "TENSORS" in levels:
            raise UnsupportedFeature("trace level TENSORS is not supported; use TIMESTAMPS")
        if levels and "OFF" not in levels and not is_written:
            raise UnsupportedFeature(_OFF)
    for name, (least, most) in _RANGES.items():
        if name in changes:
            values[name] = _number(name, changes[name], least, most)
    return values


def wrong_type(name: str, kind: str) -> MalformedJson:
    """Returns Triton's error for a value of another type."""
    return MalformedJson(f"'{name}': attempt to access JSON non-{kind} as {kind}")


def _level(levels: object) -> list[str] | None:
    if levels is None:
        return None
    if not isinstance(levels, list):
        raise wrong_type("trace_level", "array")
    for level in levels:
        if not isinstance(level, str):
            raise wrong_type("trace_level", "string")
        if level == "OFF" and len(levels) > 1:
            raise InvalidRequest("Expect only one trace level 'OFF' is specified")
        if level != "OFF" and level not in _LEVELS:
            raise InvalidRequest(f"there is no trace level '{level[:100]}'; use OFF or TIMESTAMPS")
    return [level for level in _LEVELS if level in levels] or ["OFF"]


def _number(name: str, text: object, least: int, most: int) -> str | None:
    """Checks a number that is written as a string; returns it as Triton shows it."""
    if text is None:
        return None
    if not isinstance(text, str):
        raise wrong_type(name, "string")
    if not _INTEGER.fullmatch(text.strip()):
        raise InvalidRequest(f"Unable to parse '{name}', got: {text[:100]}")
    number = int(text)
    if name == "trace_count" and number < least:
        raise InvalidRequest(f"Unable to parse 'trace_count'. Expecting value >= {least}, got:{text[:100]}")
    if not least <= number <= most:
        raise InvalidRequest(f"Unable to parse '{name}', value is out of range [ {least}, {most} ], got: {text[:100]}")
    return str(number)
