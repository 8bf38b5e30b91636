"""Instance threads: what runs on the event loop, and what does not."""

import asyncio
import subprocess
import sys
import threading
from pathlib import Path

import numpy as np
import pytest

from qinfer.backends.base import Backend, Batch, Context
from qinfer.backends.stub import StubBackend
from qinfer.batching.execution import Execution, WorkItem
from qinfer.core.messages import InferRequest
from qinfer.errors import InferenceFailed
from qinfer.models.spec import Device
from qinfer.queue.entries import Entry, Lane, Lease
from qinfer.testing import eventually, stub_spec
from qinfer_workers.inference.executor import SHORT_S, ThreadExecutor
from tests.support import models


class Quick(StubBackend):
    """A stub whose executions never wait."""

    short_on_loop = True


def executor(backend: Backend) -> ThreadExecutor:
    backend.load(stub_spec(), None, Device())  # type: ignore[arg-type]  # the stub reads no file
    return ThreadExecutor([backend], asyncio.get_running_loop(), "stub")


def execution() -> Execution:
    request = InferRequest(model="stub", inputs=())
    lease = Lease(Entry(Lane("stub", 1), "1000-0"), "w", b"")
    item = WorkItem(rows=1, key=None, enqueued_s=1.0, deadline_s=61.0, lease=lease, request=request)
    return Execution([item], Batch(requests=[request], rows=[1], inputs={"x": np.ones((1, 2), "<f4")}), 0)


async def test_only_what_is_known_to_be_short_runs_on_the_loop() -> None:
    """Unknown and long executions go to a thread."""
    instances = executor(Quick())

    ran = [instances.run_now(execution(), expected_s) for expected_s in (0.0, SHORT_S / 2, SHORT_S * 2)]

    assert ran == [False, True, False]
    instances.retire()


async def test_a_backend_that_may_wait_never_runs_on_the_loop() -> None:
    """However short its executions were."""
    instances = executor(StubBackend())

    assert not instances.run_now(execution(), SHORT_S / 2)
    instances.retire()


async def test_nothing_runs_on_the_loop_beside_a_busy_instance() -> None:
    """An instance is used by one thread at a time."""
    instances = executor(Quick())
    ended = asyncio.Event()
    instances.start(execution(), lambda _: ended.set())

    beside = instances.run_now(execution(), SHORT_S / 2)

    assert not beside
    await ended.wait()
    assert instances.run_now(execution(), SHORT_S / 2)
    instances.retire()


class Named(StubBackend):
    """A stub that notes the requests that it executed."""

    def __init__(self, gate: threading.Event | None = None) -> None:
        super().__init__(gate)
        self.executed: list[str] = []
        self.load(stub_spec(), None, Device())  # type: ignore[arg-type]  # the stub reads no file

    def execute(self, batch: Batch, ctx: Context) -> None:
        super().execute(batch, ctx)
        self.executed += [request.id for request in batch.requests]


def named(name: str) -> Execution:
    """Returns an execution of one request with this id."""
    run = execution()
    run.items[0].request.id = name
    return run


async def test_pinned_instances_execute_what_is_theirs() -> None:
    """However idle the others are."""
    backends = [Named(), Named()]
    instances = ThreadExecutor(backends, asyncio.get_running_loop(), "stub", pinned=True)
    ended: list[str] = []

    for name, instance in (("a", 1), ("b", 0), ("c", 1)):
        instances.start(named(name), lambda run: ended.append(run.items[0].request.id), instance)
    await eventually(lambda: len(ended) == 3)

    assert [backend.executed for backend in backends] == [["b"], ["a", "c"]]
    instances.retire()
    await eventually(lambda: not any(backend.loaded for backend in backends))


async def test_a_pinned_instance_ends_and_the_others_keep_their_numbers() -> None:
    backends = [Named(), Named(), Named()]
    instances = ThreadExecutor(backends, asyncio.get_running_loop(), "stub", pinned=True)
    ended: list[str] = []

    instances.end(0)
    await eventually(lambda: not backends[0].loaded)
    instances.grow([added := Named()])
    for name, instance in (("a", 1), ("b", 3), ("c", 2)):
        instances.start(named(name), lambda run: ended.append(run.items[0].request.id), instance)
    await eventually(lambda: len(ended) == 3)

    assert [backend.executed for backend in (*backends, added)] == [[], ["a"], ["c"], ["b"]]
    assert instances.count == 3
    instances.retire()
    await eventually(lambda: not any(backend.loaded for backend in (*backends, added)))


async def test_what_pinned_instances_have_not_begun_is_recalled() -> None:
    """From each of their queues; the instances go on."""
    gate = threading.Event()
    backends = [Named(gate), Named(gate)]
    instances = ThreadExecutor(backends, asyncio.get_running_loop(), "stub", pinned=True)
    ended: list[str] = []
    for name, instance in (("a", 0), ("b", 1), ("c", 1), ("d", 0)):
        instances.start(named(name), lambda run: ended.append(run.items[0].request.id), instance)
    await eventually(lambda: all(backend.sizes for backend in backends))

    recalled = instances.recall()

    gate.set()
    assert {run.items[0].request.id for run in recalled} == {"c", "d"}
    await eventually(lambda: sorted(ended) == ["a", "b"])
    instances.retire()


async def test_a_pinned_instance_executes_short_batches_on_the_loop() -> None:
    class QuickNamed(Named):
        short_on_loop = True

    backends = [QuickNamed(), QuickNamed()]
    instances = ThreadExecutor(backends, asyncio.get_running_loop(), "stub", pinned=True)

    assert instances.run_now(named("a"), SHORT_S / 2, 1)

    assert [backend.executed for backend in backends] == [[], ["a"]]
    instances.retire()


def test_a_model_that_exits_fails_its_batch_only() -> None:
    """`sys.exit` in a model's code must not end the instance's thread."""

    class Exiting(StubBackend):
        def execute(self, batch: Batch, ctx: Context) -> None:
            sys.exit("enough")

    run = execution()
    run.run(Exiting())

    assert isinstance(run.error, InferenceFailed)
    assert run.error.message == "enough"


LOADING = """
import asyncio, atexit, sys, threading
from pathlib import Path
import onnxruntime
from qinfer_workers.inference.__main__ import _exit_at_once
from qinfer_workers.inference.executor import in_thread

file, began = Path(sys.argv[1]).read_bytes(), threading.Event()

def load():
    while True:
        onnxruntime.InferenceSession(file)
        began.set()

async def main():
    loading = asyncio.create_task(in_thread("load", load))
    await asyncio.to_thread(began.wait)
    loading.cancel()

atexit.register(_exit_at_once, [7])
asyncio.run(main())
"""


def test_a_worker_ends_with_its_own_status_while_a_runtime_loads(tmp_path: Path) -> None:
    """An interpreter that ends kills threads, and C++ code in them would abort the process."""
    models.add_sub(tmp_path)
    file = tmp_path / "add_sub" / "1" / "model.onnx"

    ended = subprocess.run([sys.executable, "-c", LOADING, str(file)], capture_output=True, timeout=50, check=False)

    assert (ended.returncode, ended.stderr) == (7, b"")


async def test_an_instance_that_can_not_be_unloaded_takes_nothing_with_it(caplog: pytest.LogCaptureFixture) -> None:
    """The others are unloaded; the process goes on."""

    class Sticky(StubBackend):
        def unload(self) -> None:
            raise OSError("busy")

    executor(Sticky()).retire()

    await eventually(lambda: "model instance not unloaded" in caplog.messages)
