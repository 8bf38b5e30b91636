"""Triton's trace extension: settings (§1.16), sampling and files.

Tensors (level `TENSORS`) are copied while a request is handled, only their first bytes, and formatted in a thread.
https://github.com/triton-inference-server/server/blob/main/docs/user_guide/trace.md
"""

import asyncio
import itertools
import json
import logging
import os
import re
import secrets
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import msgspec
from msgspec import UNSET, Meta, UnsetType

from qinfer.core.messages import CalledTensor
from qinfer.core.settings_sections import TraceSettings
from qinfer.errors import BrokerUnavailable, InvalidRequest, SettingsError, UnsupportedFeature
from qinfer.models.store import FOLLOW_EVERY_S, TRACE, ControlStore, of_group
from qinfer.queue.stored_records import SettingValue
from qinfer.tensors import DATATYPES, Tensor, iter_bytes, to_numpy

START: dict[str, SettingValue] = {
    "trace_level": ["OFF"],
    "trace_rate": "1000",
    "trace_count": "-1",
    "log_frequency": "0",
}
"""The settings of a server whose operator changes nothing."""

CHANGE = "change"
"""Each update changes this stored mark, so that all gateways count anew."""

_MAX_UINT32 = 2**32 - 1
_INTEGER = re.compile(r"[+-]?[0-9]{1,20}")
_LEVELS = ("TIMESTAMPS", "TENSORS")
_RANGES = {
    "trace_rate": (0, _MAX_UINT32),
    "trace_count": (-1, 2**31 - 1),
    "log_frequency": (0, _MAX_UINT32),
}
_MODE = "triton"
_OFF = "traces are not written on this server; set QINFER_TRACE__FILE to the file to which the server is to write them"
_OTHER_MODE = (
    "trace mode can not be updated through network protocol; the server's own environment switches OpenTelemetry on, "
    "with OTEL_EXPORTER_OTLP_ENDPOINT, beside this mode"
)


_Level = Annotated[str, Meta(extra_json_schema={"enum": ["OFF", *_LEVELS]})]
_Number = Annotated[str, Meta(extra_json_schema={"pattern": "^[+-]?[0-9]+$"})] | UnsetType | None


class TraceChanges(msgspec.Struct, frozen=True):
    """Changes of the trace settings.

    Null restores the inherited value: a model inherits the server's, and the server the one that it started with.

    Attributes:
        trace_file: Refused, because the operator chooses the file.
        trace_mode: `triton`; the server refuses any other mode.

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
    """Returns the group of a model, or (empty) the server."""
    return f"{TRACE}:{model}" if model else TRACE


def start_of(trace: TraceSettings) -> dict[str, SettingValue]:
    """Returns the values of the settings when the server starts."""
    return START | {"trace_level": [trace.level], "trace_rate": str(trace.rate), "trace_count": str(trace.count)}


def groups_of(stored: Mapping[str, str], start: Mapping[str, SettingValue]) -> dict[str, dict[str, SettingValue]]:
    """Returns the values of the server (empty name) and of models."""
    server = {**start, **of_group(stored, TRACE)}
    prefix = f"{TRACE}:"
    models = {name.removeprefix(prefix).rpartition("/")[0] for name in stored if name.startswith(prefix)}
    groups = {"": server}
    for model in models:
        own = of_group(stored, group_of(model))
        if own.keys() - {CHANGE}:
            marks = f"{server.get(CHANGE, '')} {own.get(CHANGE, '')}"
            groups[model] = server | own | {CHANGE: marks}
    return groups


def checked(changes: TraceChanges, *, is_written: bool) -> dict[str, SettingValue]:
    """Returns the values of an update; refuses unsupported changes."""
    if changes.trace_file is not UNSET:
        raise UnsupportedFeature("trace file location can not be updated through network protocol")
    if changes.trace_mode not in (None, _MODE):
        raise UnsupportedFeature(_OTHER_MODE)
    values: dict[str, SettingValue] = {}
    if not isinstance(changes.trace_level, UnsetType):
        values["trace_level"] = levels = _level(changes.trace_level)
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
            raise InvalidRequest(f"unknown trace level '{level[:100]}'; use OFF, TIMESTAMPS or TENSORS")
    return [level for level in _LEVELS if level in levels] or ["OFF"]


def _number(name: str, text: str, least: int, most: int) -> str:
    if not _INTEGER.fullmatch(text.strip()):
        raise InvalidRequest(f"Unable to parse '{name}', got: {text[:100]}")
    number = int(text)
    if name == "trace_count" and number < least:
        raise InvalidRequest(f"Unable to parse 'trace_count'. Expecting value >= {least}, got:{text[:100]}")
    if not least <= number <= most:
        raise InvalidRequest(f"Unable to parse '{name}', value is out of range [ {least}, {most} ], got: {text[:100]}")
    return str(number)


INPUT, OUTPUT = "TENSOR_QUEUE_INPUT", "TENSOR_BACKEND_OUTPUT"

MOST_BYTES = 64 * 1024
"""The most bytes of a tensor that a trace keeps."""

Taken = list[tuple[str, Tensor]]


def copy_tensors(activity: str, tensors: Sequence[Tensor]) -> Taken:
    """Copies the beginnings of tensors."""
    return [(activity, Tensor(t.name, t.datatype, t.shape, bytes(memoryview(t.data)[:MOST_BYTES]))) for t in tensors]


def called(tensors: Sequence[CalledTensor]) -> Taken:
    """Returns a call's tensors."""
    return [(OUTPUT if t.is_output else INPUT, Tensor(t.name, t.datatype, t.shape, t.data)) for t in tensors]


def weight_of(taken: Taken) -> int:
    """Returns how many plain traces take the same memory."""
    return sum(len(tensor.data) for _, tensor in taken) // 256


def written(number: int, activity: str, tensor: Tensor) -> dict[str, Any]:
    """Returns a tensor in Triton's format."""
    shown = {
        "name": tensor.name,
        "data": ",".join(_elements(tensor)),
        "shape": ",".join(map(str, tensor.shape)),
        "dtype": tensor.datatype,
    }
    return {"id": number, "activity": activity, "tensor": shown}


def _elements(tensor: Tensor) -> list[str]:
    if tensor.datatype == "BYTES":
        found: list[str] = []
        with suppress(InvalidRequest):
            for element in iter_bytes(tensor.data):
                found.append(json.dumps(bytes(element).decode(errors="replace"), ensure_ascii=False))  # noqa: PERF401
        return found
    size = DATATYPES[tensor.datatype].itemsize
    count = len(tensor.data) // size
    array = to_numpy(Tensor(tensor.name, tensor.datatype, (count,), tensor.data[: count * size]))
    return list(map(str, array.astype("u1") if tensor.datatype == "BOOL" else array))


logger = logging.getLogger(__name__)

MOST_HELD = 10_000
"""A gateway with this many traces in memory writes them."""

MOST_UNWRITTEN = 20_000
"""A gateway with this many unwritten traces drops new ones."""

About = Mapping[str, object]

Stamps = list[tuple[str, int]]


class CallTrace(NamedTuple):
    """The trace of a call by a model that executed a traced request."""

    about: About
    stamps: Stamps
    tensors: Taken
    calls: "Sequence[CallTrace]"


class SamplingRule(NamedTuple):
    """A sampling rule for one model, or for all models without their own.

    One of `rate` requests is traced (0 = none), at most `most` (-1 = unlimited). A file has `frequency` traces (0 =
    all). A new `change` starts the rule anew.
    """

    has_stamps: bool
    has_tensors: bool
    rate: int
    most: int
    frequency: int
    change: str

    @property
    def is_on(self) -> bool:
        """Whether the rule traces anything."""
        return self.has_stamps or self.has_tensors


class _Trace(NamedTuple):
    number: int
    about: About
    stamps: Stamps | None
    tensors: Taken
    calls: "list[_Trace]"

    @property
    def weight(self) -> int:
        return 1 + weight_of(self.tensors) + sum([call.weight for call in self.calls])

    def parts(self) -> list[dict[str, object]]:
        number = self.number
        parts: list[dict[str, object]] = [{"id": number, **self.about}]
        if self.stamps is not None:
            parts.append({"id": number, "timestamps": [{"name": name, "ns": ns} for name, ns in self.stamps]})
        parts += [written(number, activity, tensor) for activity, tensor in self.tensors]
        return [*parts, *(part for call in self.calls for part in call.parts())]


class Sampling:
    """Chooses the requests to trace by one rule, and holds their traces; `left` -1 = unlimited."""

    def __init__(self, rule: SamplingRule, output: "TraceFile") -> None:
        self.rule = rule
        self._output = output
        self._seen = 0
        self.left = rule.most
        self._open = 0
        self._held: list[_Trace] = []
        self._weight = 0
        self._is_over = False

    def count_request(self) -> bool:
        """Counts a request, and returns whether it is traced: then call `add` or `uncount_request`."""
        rule = self.rule
        if not rule.is_on or not rule.rate or not self.left:
            return False
        self._seen += 1
        if self._seen % rule.rate:
            return False
        self.left -= self.left > 0
        self._open += 1
        return True

    def add(self, about: About, stamps: Stamps, tensors: Taken | None = None, calls: Sequence[CallTrace] = ()) -> None:
        """Adds a trace, with its calls."""
        self._open -= 1
        trace = self._trace(about, stamps, tensors or [], calls)
        self._held.append(trace)
        self._weight += trace.weight
        frequency = self.rule.frequency
        is_last = not self._open and (self._is_over or not self.left)
        if is_last or self._weight >= MOST_HELD or (frequency and len(self._held) >= frequency):
            self._write_held(numbered=not self._is_over or bool(frequency))

    def uncount_request(self) -> None:
        """Undoes the counting of a request that has no trace."""
        self._open -= 1
        self.left += self.left >= 0
        if self._is_over and not self._open:
            self._write_held(numbered=bool(self.rule.frequency))

    def _trace(self, about: About, stamps: Stamps, tensors: Taken, calls: Sequence[CallTrace]) -> _Trace:
        number = self._output.number()
        inner = [self._trace({**call.about, "parent_id": number}, *call[1:]) for call in calls]
        return _Trace(number, about, stamps if self.rule.has_stamps else None, tensors, inner)

    def flush_traces(self) -> None:
        """Ends the rule: writes finished traces now, open ones at their end."""
        self._is_over = True
        self._write_held(numbered=bool(self.rule.frequency))

    def _write_held(self, *, numbered: bool) -> None:
        if self._held:
            held, self._held, self._weight = self._held, [], 0
            self._output.write(held, numbered=numbered)


class TraceFile:
    """Writes this gateway's traces to `path`, or to `path` with a number added."""

    def __init__(self, path: Path, start: Mapping[str, SettingValue] = START) -> None:
        if path.is_dir() or not os.access(path.parent, os.W_OK | os.X_OK):
            raise SettingsError(f"QINFER_TRACE__FILE={path} can't be written; name a file in a writable directory")
        self._path = path
        self._start = start
        self.name = path.name
        self._ids = itertools.count(1)
        self._next = 0
        self._samplings: dict[str, Sampling] = {}
        self._writing: set[asyncio.Task[None]] = set()
        self._unwritten = 0
        self._reads = self._applied_read = 0
        self._is_behind = False
        self._one_by_one = asyncio.Lock()

    def sample(self, model: str) -> Sampling | None:
        """Counts a model's request; returns the sampling that gets its trace, if it is traced."""
        samplings = self._samplings
        sampling = samplings.get(model) or samplings.get("")
        return sampling if sampling is not None and sampling.count_request() else None

    def left(self, model: str) -> int | None:
        """Returns the traces left, -1 = unlimited; `None` before `apply`."""
        sampling = self._samplings.get(model) or self._samplings.get("")
        return None if sampling is None else sampling.left

    def apply(self, stored: Mapping[str, str]) -> None:
        """Applies stored settings; a sampling whose rule has changed starts anew."""
        rules = {model: _rule(values) for model, values in groups_of(stored, self._start).items()}
        for model in [*self._samplings]:
            if rules.get(model) != self._samplings[model].rule:
                self._samplings.pop(model).flush_traces()
        for model, rule in rules.items():
            if model not in self._samplings:
                self._samplings[model] = Sampling(rule, self)

    async def refresh(self, store: ControlStore) -> Mapping[str, str]:
        """Applies the stored settings, unless a later read was applied already."""
        self._reads += 1
        read = self._reads
        stored = await store.settings()
        if read > self._applied_read:
            self._applied_read = read
            self.apply(stored)
        return stored

    async def follow(self, store: ControlStore) -> None:
        """Follows the stored settings until cancelled."""
        while True:
            with suppress(BrokerUnavailable):
                await self.refresh(store)
            await asyncio.sleep(FOLLOW_EVERY_S)

    def number(self) -> int:
        """Returns the id of the next trace."""
        return next(self._ids)

    def write(self, traces: "list[_Trace]", *, numbered: bool) -> None:
        """Writes traces to a file, or drops them if too many wait."""
        if self._unwritten >= MOST_UNWRITTEN:
            if not self._is_behind:
                logger.error("traces lost", extra={"reason": "requests are traced faster than the file can be written"})
            self._is_behind = True
            return
        self._is_behind = False
        self._unwritten += sum(trace.weight for trace in traces)
        task = asyncio.get_running_loop().create_task(self._save(traces, numbered=numbered))
        self._writing.add(task)
        task.add_done_callback(self._writing.discard)

    async def close(self) -> None:
        """Writes all finished traces, and waits until they are written."""
        for sampling in self._samplings.values():
            sampling.flush_traces()
        self._samplings = {}
        if self._writing:
            await asyncio.wait(self._writing)

    async def _save(self, traces: "list[_Trace]", *, numbered: bool) -> None:
        async with self._one_by_one:  # orders the numbers
            try:
                await asyncio.to_thread(self._save_here, traces, numbered=numbered)
            except OSError as error:
                logger.error("traces lost", extra={"reason": error.strerror, "traces": len(traces)})
            finally:
                self._unwritten -= sum(trace.weight for trace in traces)

    def _save_here(self, traces: "list[_Trace]", *, numbered: bool) -> None:
        new = self._path.with_name(f".{self._path.name}.{secrets.token_hex(8)}.tmp")
        new.write_bytes(msgspec.json.encode([part for trace in traces for part in trace.parts()]))
        try:
            for path in self._names(numbered=numbered):
                try:
                    os.link(new, path)
                except FileExistsError:
                    continue
                return
        finally:
            new.unlink()

    def _names(self, *, numbered: bool) -> Iterator[Path]:
        if not numbered:
            yield self._path
        while True:
            number, self._next = self._next, self._next + 1
            yield self._path.with_name(f"{self._path.name}.{number}")


def _rule(values: Mapping[str, object]) -> SamplingRule:
    levels, change = values["trace_level"], str(values.get(CHANGE, ""))
    try:
        rate, most, frequency = (int(str(values[name])) for name in ("trace_rate", "trace_count", "log_frequency"))
    except ValueError:
        return SamplingRule(has_stamps=False, has_tensors=False, rate=0, most=0, frequency=0, change=change)
    has_stamps, has_tensors = (isinstance(levels, list) and level in levels for level in _LEVELS)
    return SamplingRule(
        has_stamps=has_stamps, has_tensors=has_tensors, rate=rate, most=most, frequency=frequency, change=change
    )
