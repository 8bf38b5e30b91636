"""Settings that clients change while the server runs: one document for each value; `null` = cleared."""

import asyncio
from collections.abc import Mapping

import msgspec

from qinfer.errors import BrokerUnavailable
from qinfer.models.store import ControlStore
from qinfer.observe import logs
from qinfer.observe.logs import Switches
from qinfer.queue.stored_records import SettingValue

LOGGING = "logging"
TRACE = "trace"
"""The trace settings; `trace:<model>` has those of one model."""

FOLLOW_EVERY_S = 2.0
"""The longest delay of a change through another gateway."""

Value = SettingValue


def of_group(stored: Mapping[str, str], group: str) -> dict[str, Value]:
    """Returns the values of a group, without cleared values."""
    values: dict[str, Value] = {}
    prefix = f"{group}/"
    for name, document in stored.items():
        if name.startswith(prefix):
            value: Value = msgspec.json.decode(document, type=Value)
            if value is not None:
                values[name.removeprefix(prefix)] = value
    return values


async def put_group(store: ControlStore, group: str, values: Mapping[str, Value]) -> None:
    """Stores a group's values; `None` clears one."""
    for name, value in values.items():
        await store.put_setting(f"{group}/{name}", msgspec.json.encode(value).decode())


def switches_of(values: Mapping[str, Value], first: Switches) -> Switches:
    """Returns the stored log switches, by default the process's own."""
    verbose = values.get("log_verbose_level", first.verbose_level)
    return Switches(
        info=bool(values.get("log_info", first.info)),
        warning=bool(values.get("log_warning", first.warning)),
        error=bool(values.get("log_error", first.error)),
        verbose_level=verbose if isinstance(verbose, int) else first.verbose_level,
        iso8601=values.get("log_format") == "ISO8601",
    )


async def follow_log_settings(store: ControlStore, first: Switches) -> None:
    """Applies stored log settings until cancelled."""
    applied: Switches | None = None
    while True:
        try:
            values = of_group(await store.settings(), LOGGING)
        except BrokerUnavailable:
            values = {}
        if values:
            wanted = switches_of(values, first)
            if wanted != applied:
                logs.apply(wanted)
                applied = wanted
        await asyncio.sleep(FOLLOW_EVERY_S)
