"""Settings that clients change while the server runs, in the control store: one document for each value.

Writing a value reads no other, so that two clients can change different values at once. `null` = cleared.
"""

import asyncio
from collections.abc import Mapping

import msgspec

from qinfer.errors import BrokerUnavailable
from qinfer.models.store import ControlStore, SettingValue
from qinfer.observe import logs
from qinfer.observe.logs import Switches

LOGGING = "logging"
"""The group of the log settings."""
TRACE = "trace"
"""The group of the trace settings; `trace:<model>` has those of one model."""

FOLLOW_EVERY_S = 2.0
"""The time within which a process notices a change through another gateway."""

Value = SettingValue


def of_group(stored: Mapping[str, str], group: str) -> dict[str, Value]:
    """Returns the values of one group, without cleared ones."""
    values: dict[str, Value] = {}
    prefix = f"{group}/"
    for name, document in stored.items():
        if name.startswith(prefix):
            value: Value = msgspec.json.decode(document, type=Value)
            if value is not None:
                values[name.removeprefix(prefix)] = value
    return values


async def put_group(store: ControlStore, group: str, values: Mapping[str, Value]) -> None:
    """Stores values of one group; `None` clears a value."""
    for name, value in values.items():
        await store.put_setting(f"{group}/{name}", msgspec.json.encode(value).decode())


def switches_of(values: Mapping[str, Value], first: Switches) -> Switches:
    """Returns the log switches of the store, with a process's own where the store has none."""
    verbose = values.get("log_verbose_level", first.verbose_level)
    return Switches(
        info=bool(values.get("log_info", first.info)),
        warning=bool(values.get("log_warning", first.warning)),
        error=bool(values.get("log_error", first.error)),
        verbose_level=verbose if isinstance(verbose, int) else first.verbose_level,
        iso8601=values.get("log_format") == "ISO8601",
    )


async def follow_log_settings(store: ControlStore, first: Switches) -> None:
    """Applies the log settings of clients to this process until cancelled; `first` = its own at its start."""
    applied: Switches | None = None
    while True:
        try:
            values = of_group(await store.settings(), LOGGING)
        except BrokerUnavailable:  # others log it; the settings stay
            values = {}
        if values:
            wanted = switches_of(values, first)
            if wanted != applied:
                logs.apply(wanted)
                applied = wanted
        await asyncio.sleep(FOLLOW_EVERY_S)
