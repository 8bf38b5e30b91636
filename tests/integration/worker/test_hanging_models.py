"""Worker processes whose models hang: only what passes its limit alone fails, and everything else is answered.

The tests of python models share a worker, which they do not end; each has models of its own.
"""

import asyncio
import re
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio

from qinfer.core.messages import Response
from qinfer.observe.stats import OVERDUE
from qinfer.queue.entries import shadow_lane
from qinfer.tensors import to_numpy
from qinfer.testing import eventually
from qinfer.traffic.endpoints import Endpoint, Role, Target
from qinfer.traffic.store import EndpointStore
from qinfer.wire.frame import encode_request
from tests.support.faulty_backend import HOLD_GIL, SLOW, executed
from tests.support.faulty_backend import write_model as write_faulty
from tests.support.hanging import HANG, outcome, write_hanging, write_stuck
from tests.support.python_models import DECOUPLED, execute
from tests.support.python_models import write_model as write_python
from tests.support.worker_processes import WorkerProcesses, worker_processes

pytestmark = [pytest.mark.slow, pytest.mark.timeout(120)]
with_shared_worker = pytest.mark.asyncio(loop_scope="module")

LIMIT_S = 1.5
TEXT = f"an execution of model '{{}}' lasted longer than its limit of {LIMIT_S:g} s (qinfer.execute_timeout_s)"


def values(response: Response) -> float:
    return float(to_numpy(response.outputs[0]).flat[0])


STREAM = f"""import threading
def send(sender, value):
    for index in range(4):
        time.sleep(10**6 if value == {HANG:g} and index == 2 else {LIMIT_S / 2})
        sender.send(reply(np.full((1, 1), index, np.float32)))
    sender.send(flags=pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL)
for request in requests:
    value = x(request).item()
    threading.Thread(target=send, args=(request.get_response_sender(), value), daemon=True).start()"""
CALL = """made = pb_utils.InferenceRequest(
    model_name="slow", requested_output_names=["y"], inputs=[pb_utils.Tensor("x", x(requests[0]))])
return [reply(pb_utils.get_output_tensor_by_name(made.exec(), 'y').as_numpy())]"""


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def pool(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[WorkerProcesses]:
    directory = tmp_path_factory.mktemp("hanging")
    repository = directory / "repository"
    for name in ("hang", "counted", "shadow"):
        write_hanging(repository, LIMIT_S, name)
    write_hanging(repository, 600.0, "patient")
    write_hanging(repository, LIMIT_S, "stream", STREAM, more=DECOUPLED)
    write_hanging(repository, LIMIT_S, "caller", CALL, delay_us=0)
    write_python(repository, execute(f"time.sleep({2 * LIMIT_S})\nreturn [reply(x(requests[0]))]"), "slow")
    write_python(repository, execute("return [reply(x(request)) for request in requests]"), "other")
    async with worker_processes(directory) as one:
        await one.worker()
        yield one


@with_shared_worker
async def test_a_python_model_that_hangs_fails_only_the_request_it_hangs_at(pool: WorkerProcesses) -> None:
    """The others of the batch are answered, and the worker serves on, with the model's process started again."""
    ids = [pool.submit(value, "hang") for value in (1.0, 2.0, HANG, 3.0)]
    other = pool.submit(5.0, "other")

    answers = await pool.answered(*ids)

    assert [outcome(answer) for answer in answers] == [1.0, 2.0, TEXT.format("hang"), 3.0]
    assert outcome((await pool.answered(other))[0]) == 5.0
    assert outcome((await pool.answered(pool.submit(7.0, "hang")))[0]) == 7.0
    assert pool.processes[0].poll() is None


@pytest.mark.parametrize("bad", [HOLD_GIL, pytest.param(SLOW, marks=pytest.mark.long)])
async def test_a_runtime_that_hangs_in_the_worker_ends_it(tmp_path: Path, bad: float) -> None:
    """What was with it in a batch is executed by the next worker, each alone; so is the one that hangs."""
    trace = write_stuck(tmp_path / "repository", LIMIT_S)
    async with worker_processes(tmp_path) as pool:
        supervisor = asyncio.create_task(pool.supervise())
        ids = [pool.submit(value) for value in (1.0, bad, 2.0)]
        answers = await pool.answered(*ids)
        supervisor.cancel()

        assert [outcome(answer) for answer in (answers[0], answers[2])] == [1.0, 2.0]
        assert "1.5 s" in str(outcome(answers[1]))
        assert "qinfer.execute_timeout_s" in str(outcome(answers[1]))
    assert [batch for batch in executed(trace) if bad in batch][1:3] in ([[bad]], [[bad], [bad]])


async def has_counted(pool: WorkerProcesses, model: str) -> None:
    """Waits until an execution of a model is counted as one that was ended at its limit."""

    async def is_counted() -> bool:
        return (await pool.store.stats(model, 1)).get(OVERDUE, 0) > 0

    await eventually(is_counted, 20.0, "a count")


@with_shared_worker
async def test_what_a_model_is_ended_for_is_counted(pool: WorkerProcesses) -> None:
    await pool.answered(pool.submit(HANG, "counted"))

    await has_counted(pool, "counted")


@pytest.mark.parametrize("bad", [SLOW, pytest.param(HOLD_GIL, marks=pytest.mark.long)])
async def test_what_a_worker_ends_for_is_counted(tmp_path: Path, bad: float) -> None:
    """Whoever ends it: an alert reads the count, for a short execution is between two looks at what executes."""
    write_stuck(tmp_path / "repository", LIMIT_S)
    async with worker_processes(tmp_path) as pool:
        supervisor = asyncio.create_task(pool.supervise())
        await pool.answered(pool.submit(bad))

        await has_counted(pool, "faulty")
        supervisor.cancel()


@pytest.mark.long
async def test_what_a_killed_worker_held_is_answered(tmp_path: Path) -> None:
    """A model that holds the interpreter's lock lets the worker give nothing back: all that it held executes again."""
    write_stuck(tmp_path / "repository", LIMIT_S)
    write_faulty(tmp_path / "repository", "other", hold_s=0.0, max_batch_size=1)
    async with worker_processes(tmp_path) as pool:
        ids = [pool.submit(HOLD_GIL), *(pool.submit(float(value), "other") for value in range(1, 6))]
        supervisor = asyncio.create_task(pool.supervise())
        bad, *good = await pool.answered(*ids)
        supervisor.cancel()

        assert [outcome(answer) for answer in good] == [1.0, 2.0, 3.0, 4.0, 5.0]
        assert "qinfer.execute_timeout_s" in str(outcome(bad))


async def has_dropped(pool: WorkerProcesses, model: str, bad: float) -> None:
    """Shadows a model with a request at which it hangs; waits until that is dropped, and the model answers."""
    shadow = Target(model=model, version=1, role=Role.SHADOW, weight=1.0)
    targets = Target(model="stable", version=1, role=Role.STABLE), shadow
    await EndpointStore(pool.store).put(Endpoint(name="e", targets=targets), 0)
    lane = shadow_lane(model, 1)
    pool.delivery.submit(lane, encode_request(pool.request(bad, model)), lambda _: None)

    async def is_dropped() -> bool:
        return await pool.delivery.depth([lane]) == [0]

    await eventually(is_dropped, 45.0, "a shadow that is dropped")
    (answer,) = await pool.answered(pool.submit(3.0, model))

    assert outcome(answer) == 3.0


@with_shared_worker
async def test_a_shadow_that_hangs_in_the_models_process_is_dropped(pool: WorkerProcesses) -> None:
    await has_dropped(pool, "shadow", HANG)


async def test_a_shadow_that_hangs_in_the_worker_is_dropped(tmp_path: Path) -> None:
    write_stuck(tmp_path / "repository", LIMIT_S)
    async with worker_processes(tmp_path) as pool:
        supervisor = asyncio.create_task(pool.supervise())

        await has_dropped(pool, "faulty", SLOW)
        supervisor.cancel()


async def test_what_does_not_execute_is_given_back(tmp_path: Path) -> None:
    """A worker that ends because of one request passes the others on without counting an execution."""
    write_stuck(tmp_path / "repository", LIMIT_S)
    write_faulty(tmp_path / "repository", "other", hold_s=600.0, max_batch_size=1)
    async with worker_processes(tmp_path) as pool:
        worker = await pool.worker()
        bad = pool.submit(SLOW)

        (answer,) = await pool.answered(bad)
        await asyncio.to_thread(worker.wait)

        assert outcome(answer) == TEXT.format("faulty")
        assert worker.returncode == 70
        assert await pool.store.workers() == []


@with_shared_worker
async def test_responses_of_a_stream_restart_the_clock(pool: WorkerProcesses) -> None:
    """A stream may last as long as it goes on; one that stalls ends with the limit."""

    def ended(request_id: str) -> bool:
        return any(response.final for response in pool.responses.get(request_id, []))

    good = pool.submit(1.0, "stream")
    await eventually(lambda: ended(good), 30.0, "the end of a stream")
    bad = pool.submit(HANG, "stream")
    await eventually(lambda: ended(bad), 30.0, "the end of a stream that stalls")

    assert [values(one) for one in pool.responses[good] if one.outputs] == [0.0, 1.0, 2.0, 3.0]
    assert [values(one) for one in pool.responses[bad] if one.outputs] == [0.0, 1.0]
    assert outcome(pool.responses[bad][-1]) == TEXT.format("stream")


@with_shared_worker
async def test_the_time_in_a_called_model_does_not_count(pool: WorkerProcesses) -> None:
    """A model may call one that takes longer than its own limit."""
    (answer,) = await pool.answered(pool.submit(4.0, "caller"))

    assert outcome(answer) == 4.0


@with_shared_worker
async def test_the_log_and_the_heartbeat_say_since_when_a_model_executes(pool: WorkerProcesses) -> None:
    pool.submit(HANG, "patient")

    async def is_shown() -> bool:
        (record,) = await pool.store.workers()
        return [(one.model, one.version, one.limit_s, one.what) for one in record.long] == [
            ("patient", 1, 600.0, "execution")
        ]

    await eventually(is_shown, 20.0, "an execution in the heartbeat")


async def test_a_load_that_lasts_too_long_fails(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """The model is not ready, and says why; the worker serves its others."""
    from tests.support.hanging import limit

    write_python(
        tmp_path / "repository",
        execute("return [reply(x(request)) for request in requests]", "def initialize(self, args): time.sleep(10**6)"),
        "lazy",
        more=limit(LIMIT_S, "load"),
    )
    async with worker_processes(tmp_path) as pool:
        pool.start()

        async def failed() -> bool:
            reasons = [
                state.reason
                for record in await pool.store.workers()
                for versions in record.models.values()
                for state in versions.values()
            ]
            return reasons == [
                f"the load of model 'lazy' lasted longer than its limit of {LIMIT_S:g} s (qinfer.load_timeout_s)"
            ]

        await eventually(failed, 30.0, "a load that has failed")
    assert re.search("load failed", capfd.readouterr().err)
