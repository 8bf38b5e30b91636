"""Settings that clients change while the server runs: what is logged, and what is traced (reference §1.16, §1.17).

They are kept in the control store, so that all gateways show the same and all processes follow. An update is checked
whole before anything of it is stored.
"""

from collections.abc import Mapping

from qinfer.control.base import ControlStore
from qinfer.control.catalog import Catalog
from qinfer.control.shared_settings import LOGGING, Value, of_group, put_group, switches_of
from qinfer.errors import InvalidRequest, UnsupportedFeature, ValueRefused
from qinfer.messages import IdFactory
from qinfer.observability import logs
from qinfer.observability.logs import Switches
from qinfer.settings import LogSettings as LogStart
from qinfer_api import trace_values
from qinfer_api.trace_file import TraceFile
from qinfer_api.trace_values import wrong_type

Changes = Mapping[str, object]

_LOG_FLAGS = ("log_info", "log_warning", "log_error")
_LOG_FORMATS = ("default", "ISO8601")
_MAX_UINT32 = 2**32 - 1


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

    Args:
        store: Where they are kept.
        catalog: Knows the models.
        traces: Follows them, here; `None` = this process writes no traces.
    """

    def __init__(self, store: ControlStore, catalog: Catalog, traces: TraceFile | None = None) -> None:
        self._store = store
        self._catalog = catalog
        self._traces = traces
        self._new_change = IdFactory().ulid

    async def read(self, model: str = "") -> dict[str, list[str] | str]:
        """Returns them: `trace_level` is a list; rate, count, log frequency, file and mode are strings.

        The count is of the traces that this process may still begin; the file is a name without where it is.

        Args:
            model: A model; empty = the server's.

        Raises:
            InvalidRequest: The model is unknown, or not ready.
            BrokerUnavailable: The store can't be reached.
        """
        self._check(model)
        stored = await self._store.settings()
        groups = trace_values.groups_of(stored)
        values = groups.get(model, groups[""])
        shown = {name: values[name] for name in trace_values.START}
        traces = self._traces
        if traces is not None:
            traces.apply(stored)
            shown["trace_count"] = str(traces.left(model))
        said = {name: value if isinstance(value, list) else str(value) for name, value in shown.items()}
        return said | {"trace_file": traces.name if traces is not None else "", "trace_mode": "triton"}

    async def update(self, changes: Changes, model: str = "") -> dict[str, list[str] | str]:
        """Changes some of them; in this process from now on, in the other gateways within about two seconds.

        Args:
            changes: Setting → value, or `None` to have the server's value again (for the server's own: the value at the
                start); what is not known is left out.
            model: A model; empty = the server's.

        Returns:
            All of them, as they are now.

        Raises:
            UnsupportedFeature: `trace_file` is among them, or what is not traced here.
            MalformedJson: A value is of the wrong type.
            InvalidRequest: A value can't be used, or the model is unknown or not ready.
            BrokerUnavailable: The store can't be reached.
        """
        self._check(model)
        values = trace_values.checked(changes, is_written=self._traces is not None)
        if values:
            values[trace_values.CHANGE] = self._new_change()
            await put_group(self._store, trace_values.group_of(model), values)
        return await self.read(model)

    def _check(self, model: str) -> None:
        if model and not self._catalog.ready_versions(model):
            raise InvalidRequest(f"Request for unknown model : {model}")


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
        raise wrong_type(name, "boolean")
    return value


def _verbose_level(value: object) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or value < 0:
        raise wrong_type("log_verbose_level", "unsigned-integer")
    if value > _MAX_UINT32:
        raise InvalidRequest(f"'log_verbose_level' must be within 0 and {_MAX_UINT32}, got {value}")
    return value


def _log_format(value: object) -> str:
    if not isinstance(value, str):
        raise wrong_type("log_format", "string")
    if value not in _LOG_FORMATS:
        raise ValueRefused(f"invalid argument for log_format, got: {value[:100]}; use default or ISO8601")
    return value
