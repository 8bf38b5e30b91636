"""Settings that clients change while the server runs: what is logged, and what is traced (reference §1.16, §1.17).

They are kept in the control store, so that all gateways show the same and all processes follow. An update is checked
whole before anything of it is stored.
"""

import re
from collections.abc import Mapping

from qinfer.control.base import ControlStore
from qinfer.control.catalog import Catalog
from qinfer.control.shared_settings import LOGGING, TRACE, Value, of_group, put_group, switches_of
from qinfer.errors import InvalidRequest, MalformedJson, UnsupportedFeature, ValueRefused
from qinfer.observability import logs
from qinfer.observability.logs import Switches
from qinfer.settings import LogSettings as LogStart

Changes = Mapping[str, object]

_LOG_FLAGS = ("log_info", "log_warning", "log_error")
_LOG_FORMATS = ("default", "ISO8601")
_MAX_UINT32 = 2**32 - 1
_INTEGER = re.compile(r"[+-]?[0-9]{1,20}")

_TRACE_LEVELS = ("TIMESTAMPS", "TENSORS")
_TRACE_START: dict[str, Value] = {
    "trace_level": ["OFF"],
    "trace_rate": "1000",
    "trace_count": "-1",
    "log_frequency": "0",
}
_TRACE_RANGES = {
    "trace_rate": (0, _MAX_UINT32),
    "trace_count": (-1, 2**31 - 1),
    "log_frequency": (0, _MAX_UINT32),
}


class LogSettings:
    """The log settings, of all processes together.

    Args:
        store: Where they are kept.
        start: What this process started with; it holds for what no client has set.
    """

    def __init__(self, store: ControlStore, start: LogStart) -> None:
        self._store = store
        self.first = Switches.of(start)

    async def read(self) -> dict[str, bool | int | str]:
        """Returns them: `log_file`, `log_info`, `log_warning`, `log_error`, `log_verbose_level`, `log_format`.

        Raises:
            BrokerUnavailable: The store can't be reached.
        """
        return _shown(await self._switches())

    async def update(self, changes: Changes) -> dict[str, bool | int | str]:
        """Changes some of them; in this process from now on, in the others within about two seconds.

        Args:
            changes: Setting → value; what is `None` or not known is left out.

        Returns:
            All of them, as they are now.

        Raises:
            UnsupportedFeature: `log_file` is among them.
            MalformedJson: A value is of the wrong type.
            ValueRefused: `log_format` is none that is known.
            InvalidRequest: `log_verbose_level` is too large.
            BrokerUnavailable: The store can't be reached.
        """
        await put_group(self._store, LOGGING, _log_values(changes))
        switches = await self._switches()
        logs.apply(switches)
        return _shown(switches)

    async def _switches(self) -> Switches:
        return switches_of(of_group(await self._store.settings(), LOGGING), self.first)


class TraceSettings:
    """The trace settings: the server's, and those that differ for a model.

    They are kept and shown; no traces are written yet.

    Args:
        store: Where they are kept.
        catalog: Knows the models.
    """

    def __init__(self, store: ControlStore, catalog: Catalog) -> None:
        self._store = store
        self._catalog = catalog

    async def read(self, model: str = "") -> dict[str, list[str] | str]:
        """Returns them: `trace_level` is a list; rate, count, log frequency, file and mode are strings.

        Args:
            model: A model; empty = the server's.

        Raises:
            InvalidRequest: The model is unknown, or not ready.
            BrokerUnavailable: The store can't be reached.
        """
        self._check(model)
        stored = await self._store.settings()
        merged = _TRACE_START | of_group(stored, TRACE)
        if model:
            merged |= of_group(stored, _of_model(model))
        shown = {name: value if isinstance(value, list) else str(value) for name, value in merged.items()}
        return shown | {"trace_file": "", "trace_mode": "triton"}

    async def update(self, changes: Changes, model: str = "") -> dict[str, list[str] | str]:
        """Changes some of them.

        Args:
            changes: Setting → value, or `None` to have the server's value again (for the server's own: the value at the
                start); what is not known is left out.
            model: A model; empty = the server's.

        Returns:
            All of them, as they are now.

        Raises:
            UnsupportedFeature: `trace_file` is among them.
            MalformedJson: A value is of the wrong type.
            InvalidRequest: A value can't be used, or the model is unknown or not ready.
            BrokerUnavailable: The store can't be reached.
        """
        self._check(model)
        await put_group(self._store, _of_model(model) if model else TRACE, _trace_values(changes))
        return await self.read(model)

    def _check(self, model: str) -> None:
        if model and not self._catalog.ready_versions(model):
            raise InvalidRequest(f"Request for unknown model : {model}")


def _of_model(model: str) -> str:
    return f"{TRACE}:{model}"


def _shown(switches: Switches) -> dict[str, bool | int | str]:
    return {
        "log_file": "",
        "log_info": switches.info,
        "log_warning": switches.warning,
        "log_error": switches.error,
        "log_verbose_level": switches.verbose_level,
        "log_format": "ISO8601" if switches.iso8601 else "default",
    }


def _log_values(changes: Changes) -> dict[str, Value]:
    given = {name: value for name, value in changes.items() if value is not None}
    if "log_file" in given:
        raise UnsupportedFeature("log file location can not be updated through network protocol")
    values: dict[str, Value] = {name: _flag(name, given[name]) for name in _LOG_FLAGS if name in given}
    if "log_verbose_level" in given:
        values["log_verbose_level"] = _verbose_level(given["log_verbose_level"])
    if "log_format" in given:
        values["log_format"] = _log_format(given["log_format"])
    return values


def _flag(name: str, value: object) -> bool:
    if not isinstance(value, bool):
        raise _wrong_type(name, "boolean")
    return value


def _verbose_level(value: object) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or value < 0:
        raise _wrong_type("log_verbose_level", "unsigned-integer")
    if value > _MAX_UINT32:
        raise InvalidRequest(f"'log_verbose_level' must be within 0 and {_MAX_UINT32}, got {value}")
    return value


def _log_format(value: object) -> str:
    if not isinstance(value, str):
        raise _wrong_type("log_format", "string")
    if value not in _LOG_FORMATS:
        raise ValueRefused(f"invalid argument for log_format, got: {value[:100]}; use default or ISO8601")
    return value


def _trace_values(changes: Changes) -> dict[str, Value]:
    if "trace_file" in changes:
        raise UnsupportedFeature("trace file location can not be updated through network protocol")
    values: dict[str, Value] = {}
    if "trace_level" in changes:
        values["trace_level"] = _trace_level(changes["trace_level"])
    for name, (least, most) in _TRACE_RANGES.items():
        if name in changes:
            values[name] = _number(name, changes[name], least, most)
    return values


def _trace_level(levels: object) -> list[str] | None:
    if levels is None:
        return None
    if not isinstance(levels, list):
        raise _wrong_type("trace_level", "array")
    for level in levels:
        if not isinstance(level, str):
            raise _wrong_type("trace_level", "string")
        if level == "OFF" and len(levels) > 1:
            raise InvalidRequest("Expect only one trace level 'OFF' is specified")
        if level != "OFF" and level not in _TRACE_LEVELS:
            raise InvalidRequest(f"there is no trace level '{level[:100]}'; use OFF, or TIMESTAMPS and TENSORS")
    return [level for level in _TRACE_LEVELS if level in levels] or ["OFF"]


def _number(name: str, text: object, least: int, most: int) -> str | None:
    """Checks a number that is written as a string; returns it as Triton shows it."""
    if text is None:
        return None
    if not isinstance(text, str):
        raise _wrong_type(name, "string")
    if not _INTEGER.fullmatch(text.strip()):
        raise InvalidRequest(f"Unable to parse '{name}', got: {text[:100]}")
    number = int(text)
    if name == "trace_count" and number < least:
        raise InvalidRequest(f"Unable to parse 'trace_count'. Expecting value >= {least}, got:{text[:100]}")
    if not least <= number <= most:
        raise InvalidRequest(f"Unable to parse '{name}', value is out of range [ {least}, {most} ], got: {text[:100]}")
    return str(number)


def _wrong_type(name: str, kind: str) -> MalformedJson:
    return MalformedJson(f"'{name}': attempt to access JSON non-{kind} as {kind}")
