"""Triton's traces: which requests, how many, and into which files."""

import asyncio
import json
import threading
from pathlib import Path
from typing import Any

import msgspec
import pytest

from qinfer.errors import SettingsError
from qinfer_api.observe import trace_file
from qinfer_api.observe.trace_file import CallTrace, TraceFile

ABOUT = {"model_name": "m", "model_version": 1}


def settings(group: str, /, **values: object) -> dict[str, str]:
    return {f"{group}/{name}": msgspec.json.encode(value).decode() for name, value in values.items()}


def on(**values: object) -> dict[str, str]:
    return settings("trace", **{"trace_level": ["TIMESTAMPS"], "trace_rate": "1", **values})


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "trace.json"


@pytest.fixture
def traces(path: Path) -> TraceFile:
    return TraceFile(path)


def ask(traces: TraceFile, model: str = "m") -> bool:
    """Traces a request, if it is to be."""
    sampling = traces.sample(model)
    if sampling is not None:
        sampling.add(ABOUT, [("REQUEST_START", 1), ("REQUEST_END", 2)])
    return sampling is not None


def occupy(*paths: Path) -> None:
    for path in paths:
        path.write_text("[]")


def read(path: Path) -> object:
    return json.loads(path.read_text())


def held(path: Path) -> dict[str, int]:
    """Returns how many traces each file has."""
    return {file.name: len(json.loads(file.read_text())) // 2 for file in sorted(path.parent.iterdir())}


def test_nothing_is_traced_before_the_settings_are_known(traces: TraceFile) -> None:
    """Nor with the settings of the start."""
    assert traces.sample("m") is None
    traces.apply({})
    assert (traces.sample("m"), traces.left("m")) == (None, -1)


class Held:
    """A store whose reads are answered when the test says so, in any order."""

    def __init__(self) -> None:
        self.reads: list[asyncio.Future[dict[str, str]]] = []

    async def settings(self) -> dict[str, str]:
        self.reads.append(asyncio.get_running_loop().create_future())
        return await self.reads[-1]


async def test_a_late_read_undoes_no_newer_one(traces: TraceFile) -> None:
    """Whoever switches traces on has them from then on, whatever this process was reading meanwhile."""
    store: Any = Held()
    early, late = (asyncio.ensure_future(traces.refresh(store)) for _ in range(2))
    await asyncio.sleep(0)

    store.reads[1].set_result(on())
    await late
    store.reads[0].set_result({})
    await early

    assert ask(traces)
    await traces.close()


@pytest.mark.parametrize(
    ("values", "traced"),
    [
        ({}, [True] * 6),
        ({"trace_rate": "3"}, [False, False, True, False, False, True]),
        ({"trace_rate": "0"}, [False] * 6),
        ({"trace_rate": "2", "trace_count": "1"}, [False, True, False, False, False, False]),
        ({"trace_count": "0"}, [False] * 6),
        ({"trace_level": ["TENSORS"]}, [True] * 6),
        ({"trace_rate": "of a newer qinfer"}, [False] * 6),
    ],
)
async def test_rate_and_count(traces: TraceFile, values: dict[str, object], traced: list[bool]) -> None:
    """Every so many requests, so many times."""
    traces.apply(on(**values))

    assert [ask(traces) for _ in traced] == traced
    await traces.close()


async def test_what_is_given_back_is_not_counted(traces: TraceFile, path: Path) -> None:
    """The other traces are still written."""
    traces.apply(on(trace_count="2"))
    first, second = traces.sample("m"), traces.sample("m")
    assert first is not None
    assert first is second
    first.uncount_request()
    assert (traces.left("m"), ask(traces), traces.left("m")) == (1, True, 0)
    third = traces.sample("m")
    assert third is None

    traces.apply(on(trace_count="3"))
    first.uncount_request()

    await traces.close()
    assert held(path) == {"trace.json": 1}


async def test_a_model_of_its_own_counts_for_itself(traces: TraceFile) -> None:
    """It inherits what it does not say."""
    traces.apply(on(trace_count="2") | settings("trace:m", trace_rate="2") | settings("trace:gone", trace_rate=None))

    assert [ask(traces, "m") for _ in range(4)] == [False, True, False, True]
    assert [ask(traces, "other") for _ in range(3)] == [True, True, False]
    assert (traces.left("m"), traces.left("other"), traces.left("gone")) == (0, 0, 0)
    await traces.close()


@pytest.mark.parametrize(
    ("values", "files"),
    [
        ({}, {"trace.json": 5}),
        ({"log_frequency": "2"}, {"trace.json.0": 2, "trace.json.1": 2, "trace.json.2": 1}),
        ({"trace_count": "3"}, {"trace.json.0": 3}),
        ({"trace_count": "3", "log_frequency": "2"}, {"trace.json.0": 2, "trace.json.1": 1}),
    ],
)
async def test_files(traces: TraceFile, path: Path, values: dict[str, object], files: dict[str, int]) -> None:
    """As Triton names them."""
    traces.apply(on(**values))

    for _ in range(5):
        ask(traces)
    await traces.close()

    assert held(path) == files


async def test_memory_is_bounded(monkeypatch: pytest.MonkeyPatch, traces: TraceFile, path: Path) -> None:
    """What nobody asks to be written is, before it is too much."""
    monkeypatch.setattr(trace_file, "MOST_HELD", 2)
    traces.apply(on())

    for _ in range(5):
        ask(traces)
    await traces.close()

    assert held(path) == {"trace.json": 1, "trace.json.0": 2, "trace.json.1": 2}


async def test_a_disk_that_is_too_slow_costs_the_traces_that_come_then(
    monkeypatch: pytest.MonkeyPatch, traces: TraceFile, path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """They are not collected without end; the log says so once."""
    monkeypatch.setattr(trace_file, "MOST_UNWRITTEN", 2)
    traces.apply(on(log_frequency="1"))

    for _ in range(5):
        ask(traces)  # nothing is written meanwhile: the event loop does not run
    assert [record.message for record in caplog.records] == ["traces lost"]
    await traces.close()
    assert held(path) == {"trace.json.0": 1, "trace.json.1": 1}

    traces.apply(on(log_frequency="1"))
    ask(traces)
    await traces.close()
    assert held(path) == {"trace.json.0": 1, "trace.json.1": 1, "trace.json.2": 1}


async def test_nothing_is_overwritten(path: Path) -> None:
    """A second gateway, or the next start, takes the names that are free."""
    occupy(path, Path(f"{path}.1"))
    for _ in range(2):
        traces = TraceFile(path)
        traces.apply(on())
        ask(traces)
        await traces.close()

    assert held(path) == {"trace.json": 0, "trace.json.0": 1, "trace.json.1": 0, "trace.json.2": 1}


async def test_new_settings_begin_anew(traces: TraceFile, path: Path) -> None:
    """With the same values too; what is collected is written, what is not answered yet when it is."""
    traces.apply(on(trace_count="2", change="1"))
    ask(traces)
    late = traces.sample("m")
    assert late is not None
    assert (traces.left("m"), traces.sample("m")) == (0, None)

    traces.apply(on(trace_count="2", change="2"))
    assert traces.left("m") == 2
    late.add(ABOUT, [])
    await traces.close()

    assert held(path) == {"trace.json": 1, "trace.json.0": 1}


async def test_equal_settings_change_nothing(traces: TraceFile) -> None:
    """They are read again and again."""
    traces.apply(on(trace_rate="2"))
    assert not ask(traces)
    traces.apply(on(trace_rate="2"))
    assert ask(traces)
    await traces.close()


async def test_a_trace_as_triton_writes_it(traces: TraceFile, path: Path) -> None:
    """What it is of, then its activities, both with its id."""
    traces.apply(on())
    ask(traces)
    await traces.close()

    stamps = [{"name": "REQUEST_START", "ns": 1}, {"name": "REQUEST_END", "ns": 2}]
    assert read(path) == [
        {"id": 1, "model_name": "m", "model_version": 1},
        {"id": 1, "timestamps": stamps},
    ]


async def test_requests_that_were_made_for_another_follow_it(traces: TraceFile, path: Path) -> None:
    """With the id of that one; they are parts of its trace, and no traces that a file counts."""
    stamps = [("REQUEST_START", 1)]
    inner = CallTrace({"model_name": "inner"}, stamps, [], [])
    calls = [CallTrace({"model_name": "call"}, stamps, [], [inner]), CallTrace({"model_name": "next"}, stamps, [], [])]
    traces.apply(on(log_frequency="2"))
    for _ in range(2):
        sampling = traces.sample("m")
        assert sampling is not None
        sampling.add(ABOUT, stamps, None, calls)
    await traces.close()

    (file,) = path.parent.iterdir()
    about = [part for part in json.loads(file.read_text()) if "model_name" in part]
    assert [(part["id"], part["model_name"], part.get("parent_id")) for part in about[:4]] == [
        (1, "m", None), (2, "call", 1), (3, "inner", 2), (4, "next", 1),
    ]  # fmt: skip
    assert [part["id"] for part in about] == list(range(1, 9))


async def test_a_disk_that_fails_costs_the_traces_only(
    traces: TraceFile, path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The log says so."""
    traces.apply(on())
    ask(traces)
    path.parent.rename(path.parent.with_name("away"))
    await traces.close()

    assert [record.message for record in caplog.records] == ["traces lost"]


@pytest.mark.parametrize("wrong", [".", "missing/trace.json"])
def test_a_place_that_can_not_be_written_is_refused_at_the_start(tmp_path: Path, wrong: str) -> None:
    """With the variable that names it."""
    with pytest.raises(SettingsError, match="QINFER_TRACE__FILE"):
        TraceFile(tmp_path / wrong)


async def test_writing_does_not_hold_up_the_event_loop(
    monkeypatch: pytest.MonkeyPatch, traces: TraceFile, path: Path
) -> None:
    """It happens in a thread."""
    loop = asyncio.get_running_loop()
    began, go = asyncio.Event(), threading.Event()
    save = TraceFile._save_here

    def slow(self: TraceFile, traces: Any, *, numbered: bool) -> None:
        loop.call_soon_threadsafe(began.set)
        assert go.wait(20)
        save(self, traces, numbered=numbered)

    monkeypatch.setattr(TraceFile, "_save_here", slow)
    traces.apply(on(log_frequency="1"))
    ask(traces)
    await began.wait()
    go.set()
    await traces.close()

    assert held(path) == {"trace.json.0": 1}
