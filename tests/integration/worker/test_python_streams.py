"""Decoupled Python models in real worker processes: order, windows, cancellation, and processes that die."""

import os
import signal
from collections.abc import AsyncIterator

import pytest
import pytest_asyncio

from qinfer.core.messages import RESPONSE_OVERHEAD_BYTES, Credit, Response
from qinfer.errors import QinferError
from qinfer.queue.entries import Entry, Lane
from qinfer.tensors import to_numpy
from qinfer.testing import eventually
from qinfer.wire.frame import encode_credits, encode_request
from tests.support.faulty_backend import write_model as write_faulty_model
from tests.support.python_models import DECOUPLED, HEADER, execute, write_model
from tests.support.worker_processes import WorkerProcesses, worker_processes

COUNT = 100
WINDOW_BYTES = 64 * 1024
FULL = WINDOW_BYTES // (RESPONSE_OVERHEAD_BYTES + 4)
"""So many responses of one number use a window up."""

# Sends 0, 1, … from a thread that begins when a second request has come; the final flag comes alone.
COUNTER = (
    execute(
        """
import threading
self.gate = getattr(self, "gate", None) or threading.Barrier(2)
for request in requests:
    threading.Thread(target=count, args=(self.gate, request.get_response_sender()), daemon=True).start()
"""
    )
    + f"""
def count(gate, sender):
    gate.wait(20)
    for number in range({COUNT}):
        sender.send(reply(np.array([[number]], "f4")))
    sender.send(flags=1)
"""
)

# Sends its process's number without an end.
ENDLESS = execute(
    """
import threading
def work(sender, number):
    try:
        while True:
            sender.send(reply(np.array([[os.getpid()]], "f4")))
    except pb_utils.TritonModelException:
        with open(os.path.join(pb_utils.get_model_dir(), f"left-{number}"), "w") as file:
            file.write(str(sender.is_cancelled()))
for request in requests:
    arguments = (request.get_response_sender(), int(x(request).item()))
    threading.Thread(target=work, args=arguments, daemon=True).start()
"""
)

# Calls `counter` twice at once, and sends the sum of each so far; not decoupled, it gives the last sum only.
SUMS = """
import asyncio
async def sums(request):
    call = pb_utils.InferenceRequest(
        model_name="counter", requested_output_names=["y"], inputs=[pb_utils.Tensor("x", x(request))])
    total = 0.0
    async for response in await call.async_exec(decoupled=True):
        if response.has_error():
            raise pb_utils.TritonModelException(response.error().message())
        for tensor in response.output_tensors():
            total += tensor.as_numpy().item()
            yield total
"""
LAST_SUM = (
    HEADER
    + SUMS
    + """
class TritonPythonModel:
    async def execute(self, requests):
        async def last(request):
            return [total async for total in sums(request)][-1]
        return [reply(np.array([[t]], "f4")) for t in await asyncio.gather(*map(last, requests))]
"""
)
EACH_SUM = (
    HEADER
    + SUMS
    + """
class TritonPythonModel:
    async def execute(self, requests):
        async def each(request):
            sender = request.get_response_sender()
            async for total in sums(request):
                await asyncio.to_thread(sender.send, reply(np.array([[total]], "f4")))
            sender.send(flags=1)
        await asyncio.gather(*map(each, requests))
"""
)

# Sends 1, 2, … until it is cancelled; then it ends with CANCELLED, or, asked by an odd number, after two more.
UNTIL = execute(
    """
import threading
def work(sender, ignores):
    number, more = 0, 2
    while more:
        number += 1
        sender.send(reply(np.array([[number]], "f4")))
        if sender.is_cancelled():
            if not ignores:
                error = pb_utils.TritonError("as you like", pb_utils.TritonError.CANCELLED)
                return sender.send(pb_utils.InferenceResponse(error=error), flags=1)
            more -= 1
    sender.send(flags=1)
for request in requests:
    arguments = (request.get_response_sender(), int(x(request).item()) % 2)
    threading.Thread(target=work, args=arguments, daemon=True).start()
"""
)

# Cancels `until` at its second response; says how that ended, and whether more came.
CANCELS = execute(
    """
call = pb_utils.InferenceRequest("", 0, [pb_utils.Tensor("x", x(requests[0]))], ["y"], "until")
responses, count, code = call.exec(decoupled=True), 0, -1
for response in responses:
    count += 1
    if count == 2:
        responses.cancel()
    if response.has_error():
        code = response.error().code()
responses.cancel()
return [reply(np.array([[code]], "f4")) if count > 2 else reply(np.array([[99]], "f4"))]
"""
)

pytestmark = pytest.mark.asyncio(loop_scope="module")


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def pool(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[WorkerProcesses]:
    directory = tmp_path_factory.mktemp("streams")
    repository = directory / "repository"
    write_model(repository, COUNTER, "counter", dims="1", more=DECOUPLED)
    write_model(repository, ENDLESS, "endless", dims="1", more=DECOUPLED)
    write_model(repository, LAST_SUM, "last_sum", dims="1", delay_us=100_000)
    write_model(repository, EACH_SUM, "each_sum", dims="1", more=DECOUPLED)
    write_model(repository, UNTIL, "until", dims="1", more=DECOUPLED)
    write_model(repository, CANCELS, "cancels", dims="1", max_batch_size=1)
    write_faulty_model(repository)
    async with worker_processes(directory) as one:
        await one.worker(QINFER_LIMITS__STREAM_WINDOW_BYTES=str(WINDOW_BYTES))
        yield one


async def ended(pool: WorkerProcesses, request_id: str) -> list[Response]:
    """Waits for all responses to a request."""
    await eventually(
        lambda: request_id in pool.responses and pool.responses[request_id][-1].final, 30.0, "a final response"
    )
    return pool.responses[request_id]


async def came(pool: WorkerProcesses, request_id: str, count: int) -> None:
    """Waits until a request has so many responses."""
    await eventually(lambda: len(pool.responses.get(request_id, ())) >= count, 30.0, f"{count} responses")


def numbers(responses: list[Response]) -> list[float]:
    return [float(to_numpy(response.outputs[0]).item()) for response in responses if response.outputs]


async def test_two_requests_of_one_instance_stream_at_once(pool: WorkerProcesses) -> None:
    """From threads, after `execute` has returned; each in its own order, and each response once."""
    ids = [pool.submit(1.0, "counter"), pool.submit(2.0, "counter")]

    for request_id in ids:
        responses = await ended(pool, request_id)

        assert numbers(responses) == [float(n) for n in range(COUNT)]
        assert [response.index for response in responses] == list(range(COUNT + 1))
        assert [response.final for response in responses] == [False] * COUNT + [True]
        assert responses[-1].failure is None
    await pool.empty("counter")


async def test_a_model_is_no_faster_than_its_caller(pool: WorkerProcesses) -> None:
    """It waits while the window is used up, and goes on when the caller takes."""
    slow, other = pool.submit(1.0, "endless"), pool.submit(2.0, "endless")
    for request_id in (slow, other):
        await came(pool, request_id, FULL)
    responses = pool.responses[slow]
    assert len(responses) == FULL

    credit = Credit(slow, responses[0].attempt, taken_bytes=4 * FULL)
    await pool.delivery.publish(responses[0].credit_to, encode_credits([credit]))
    await came(pool, slow, 2 * FULL)

    assert [response.index for response in responses] == list(range(2 * FULL))
    assert len(pool.responses[other]) == FULL


async def test_the_death_of_a_model_ends_its_streams(pool: WorkerProcesses) -> None:
    """With an error each, and the next request has a new process."""
    ids = [pool.submit(1.0, "endless"), pool.submit(2.0, "endless")]
    for request_id in ids:
        await came(pool, request_id, FULL)
    (pid,) = {int(numbers(pool.responses[request_id])[0]) for request_id in ids}

    os.kill(pid, signal.SIGKILL)

    for request_id in ids:
        failure = (await ended(pool, request_id))[-1].failure
        assert failure is not None
        assert failure.message == "the process of model 'endless' died (signal 9: SIGKILL: out of memory?)"
    await pool.empty("endless")
    later = pool.submit(3.0, "endless")
    await eventually(lambda: later in pool.responses, 30.0, "the first response of a new process")
    assert int(numbers(pool.responses[later])[0]) != pid


async def test_a_cancelled_request_reaches_the_model(pool: WorkerProcesses) -> None:
    """Also one whose model waits for room."""
    request = pool.request(9.0, "endless")
    entries: list[Entry] = []

    def enqueued(outcome: Entry | QinferError) -> None:
        assert isinstance(outcome, Entry)
        entries.append(outcome)

    pool.delivery.submit(Lane("endless", 1), encode_request(request), enqueued)
    await came(pool, request.id, FULL)

    await pool.delivery.cancel(entries)

    left = pool.directory / "repository" / "endless" / "1" / "left-9"
    await eventually(lambda: left.exists() and left.read_text() == "True", 30.0, "the end of the model's thread")


async def test_models_call_decoupled_models(pool: WorkerProcesses) -> None:
    """By the queue: one that is not decoupled, with two requests in a batch, and one that sends on what it gets."""
    last = [pool.submit(1.0, "last_sum"), pool.submit(2.0, "last_sum")]
    assert [numbers(await ended(pool, request_id)) for request_id in last] == [[float(sum(range(COUNT)))]] * 2

    each = [pool.submit(1.0, "each_sum"), pool.submit(2.0, "each_sum")]
    sums = [float(n * (n + 1) // 2) for n in range(COUNT)]
    assert [numbers(await ended(pool, request_id)) for request_id in each] == [sums] * 2
    await pool.empty("counter")


async def test_a_cancelled_model_says_how_it_ends(pool: WorkerProcesses) -> None:
    """By the error CANCELLED (7), or as if nothing had happened."""
    for asked, code in ((2.0, 7.0), (1.0, -1.0)):
        assert numbers(await ended(pool, pool.submit(asked, "cancels"))) == [code]
    await pool.empty("until")
