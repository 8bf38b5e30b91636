"""Instance threads: what runs on the event loop, and what does not."""

import asyncio
import sys

import numpy as np

from qinfer.backends.base import Backend, Batch, Context
from qinfer.backends.stub import StubBackend
from qinfer.batching.execution import Execution, Pending
from qinfer.delivery.base import Entry, Lane, Lease
from qinfer.errors import InferenceFailed
from qinfer.messages import InferRequest
from qinfer.repository.spec import Device
from qinfer.testing import stub_spec
from qinfer_workers.inference.executor import SHORT_S, ThreadExecutor


class Quick(StubBackend):
    """A stub whose executions never wait."""

    short_on_loop = True


def executor(backend: Backend) -> ThreadExecutor:
    backend.load(stub_spec(), None, Device())  # type: ignore[arg-type]  # the stub reads no file
    return ThreadExecutor([backend], asyncio.get_running_loop(), "stub")


def execution() -> Execution:
    request = InferRequest(model="stub", inputs=())
    lease = Lease(Entry(Lane("stub", 1), "1000-0"), "w", b"")
    item = Pending(rows=1, key=None, enqueued_s=1.0, deadline_s=61.0, lease=lease, request=request)
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


def test_a_model_that_exits_fails_its_batch_only() -> None:
    """`sys.exit` in a model's code must not end the instance's thread."""

    class Exiting(StubBackend):
        def execute(self, batch: Batch, ctx: Context) -> None:
            sys.exit("enough")

    run = execution()
    run.run(Exiting())

    assert isinstance(run.error, InferenceFailed)
    assert run.error.message == "enough"
