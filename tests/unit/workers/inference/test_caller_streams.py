"""Calls to decoupled models: a thread takes the responses one by one, and the called model keeps to the window."""

import asyncio
import gc
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import numpy as np
import pytest

from qinfer.core.messages import Failure, InferRequest, OutgoingRequest
from qinfer.core.settings import LimitSettings
from qinfer.errors import Cancelled, InferenceFailed, InvalidRequest, StreamBroken
from qinfer.models.catalog import Catalog
from qinfer.models.config.config import normalise, parse, to_json
from qinfer.models.state import DesiredState, State, StoredModel, VersionState, WorkerRecord
from qinfer.queue.entries import Lane
from qinfer.queue.lanes import Queue
from qinfer.tensors import from_numpy, to_numpy
from qinfer.testing import eventually
from qinfer_workers.inference.calls.answers import CallResponses
from qinfer_workers.inference.calls.caller import WorkerCaller
from tests.support.servers.servers import Database
from tests.support.streaming import StreamWorker, stream_worker

CONFIG = """
name: "flow" backend: "stub" max_batch_size: 8 model_transaction_policy { decoupled: true }
input { name: "x" data_type: TYPE_FP32 dims: [ -1 ] } output { name: "y" data_type: TYPE_FP32 dims: [ -1 ] }
"""
WINDOW_BYTES = 1000


class Scene:
    """A caller, and a worker by hand of the model that it calls."""

    def __init__(self, queue: Queue, caller: WorkerCaller, worker: StreamWorker) -> None:
        self.queue, self.caller, self.worker = queue, caller, worker

    async def stream(self) -> tuple[CallResponses, InferRequest]:
        """Calls from a thread, and has the worker take the request."""
        request = OutgoingRequest(model="flow", inputs=(from_numpy("x", np.ones((1, 2), "<f4")),))
        deadline_s = self.queue.clock.now_s() + 30.0
        responses = await asyncio.to_thread(self.caller.stream, request, deadline_s)
        (taken,) = await self.worker.fetched()
        return responses, taken

    async def is_empty(self) -> bool:
        return await self.queue.depth([Lane("flow", 1)]) == [0]


@asynccontextmanager
async def scene() -> AsyncIterator[Scene]:
    async with Database() as database, asyncio.TaskGroup() as tasks:
        queue, store = await database.delivery(), database.store()
        config = to_json(normalise(parse(CONFIG), "flow"))
        await store.put_model(StoredModel("flow", 1, config, (1,)))
        await store.set_desired(DesiredState("flow", 1))
        models = {"flow": {1: VersionState(State.READY, 1)}}
        await store.heartbeat(WorkerRecord(id="w", started_at=0.0, models=models), ttl_s=3600)
        limits = LimitSettings(wait_for_workers_s=0, stream_window_bytes=WINDOW_BYTES)
        caller = WorkerCaller(queue, Catalog(store, limits), "w1", tasks, limits)
        async with stream_worker(queue, "flow") as worker:
            yield Scene(queue, caller, worker)
        running = caller.close()
        for task in running:
            task.cancel()
        await asyncio.wait(running)


async def test_the_responses_come_one_by_one() -> None:
    """With the empty one that ends them."""
    async with scene() as one:
        responses, request = await one.stream()
        for index in range(2):
            await one.worker.send(request, index)
        first = await asyncio.to_thread(lambda: [next(responses), next(responses)])
        await one.worker.end(request, 2)
        rest = await asyncio.to_thread(lambda: list(responses))

        assert [to_numpy(response.outputs[0]).tolist() for response in first] == [[[1.0, 1.0]]] * 2
        assert [(response.final, response.outputs) for response in rest] == [(True, ())]
        await eventually(one.is_empty)


async def test_the_called_model_keeps_to_the_window() -> None:
    """It goes on when the caller asks for more."""
    async with scene() as one:
        responses, request = await one.stream()
        pouring = asyncio.create_task(one.worker.pour(request, 100_000, 400, WINDOW_BYTES))
        await one.worker.is_stuck(request.id)
        sent = one.worker.sent_bytes[request.id]
        count = await asyncio.to_thread(lambda: len(list(responses)))
        await pouring

        assert sent <= WINDOW_BYTES
        assert count == 251


async def test_a_failure_ends_the_responses() -> None:
    """The errors among them do not."""
    async with scene() as one:
        responses, request = await one.stream()
        failure = Failure("inference_failed", "a bad frame")
        await one.worker.send(request, 0, outputs=(), failure=failure)
        await one.worker.send(request, 1, final=True, outputs=(), failure=failure)

        assert (await asyncio.to_thread(lambda: next(responses))).failure == failure
        with pytest.raises(InferenceFailed, match="model 'flow' failed: a bad frame"):
            await asyncio.to_thread(next, responses)
        assert list(responses) == []


async def test_the_end_of_the_other_worker_is_told() -> None:
    """The request may be sent again."""
    async with scene() as one:
        responses, request = await one.stream()
        await one.worker.send(request, 0)
        await asyncio.to_thread(next, responses)
        await one.worker.send(request, 0, attempt=2)

        with pytest.raises(StreamBroken, match="after 1 responses"):
            await asyncio.to_thread(next, responses)


@pytest.mark.usefixtures("collected")
@pytest.mark.parametrize("is_forgotten", [True, False])
async def test_who_stops_reading_cancels(*, is_forgotten: bool) -> None:
    async with scene() as one:
        responses, request = await one.stream()
        await one.worker.send(request, 0)
        await asyncio.to_thread(next, responses)

        if not is_forgotten:
            responses.close()
        del responses
        gc.collect()

        await eventually(one.is_empty, description="the entry is taken out")


async def test_a_cancelled_model_is_told_and_still_heard() -> None:
    """What it sends until it ends comes; its entry is its own to finish."""
    async with scene() as one:
        responses, request = await one.stream()
        await one.worker.send(request, 0)
        await asyncio.to_thread(next, responses)

        responses.cancel()
        await eventually(lambda: any(credit.cancelled for credit in one.worker.credits), description="the word")
        await one.worker.send(request, 1)
        await one.worker.send(request, 2, final=True, outputs=(), failure=Failure("cancelled", "as you like"))

        assert (await asyncio.to_thread(next, responses)).index == 1
        with pytest.raises(Cancelled, match="as you like"):
            await asyncio.to_thread(next, responses)
        responses.cancel()
        assert list(responses) == []
        await eventually(one.is_empty)


async def test_a_call_that_is_cancelled_before_its_first_response_is_taken_out() -> None:
    async with scene() as one:
        responses, _ = await one.stream()

        responses.cancel()

        with pytest.raises(Cancelled, match="the call was cancelled"):
            await asyncio.to_thread(next, responses)
        await eventually(one.is_empty, description="the entry is taken out")


async def test_a_request_that_is_refused_late_is_the_models_failure() -> None:
    """The client of the calling model has sent nothing wrong."""
    async with scene() as one:
        responses, request = await one.stream()
        refusal = Failure("invalid_request", "too large")
        await one.worker.send(request, 0, final=True, outputs=(), failure=refusal)

        with pytest.raises(InferenceFailed, match="a call failed: too large") as raised:
            await asyncio.to_thread(next, responses)

        assert isinstance(raised.value.__cause__, InvalidRequest)


async def test_a_worker_that_ends_ends_its_calls() -> None:
    async with scene() as one:
        responses, _ = await one.stream()

        one.caller.close()

        with pytest.raises(Cancelled, match="the worker ends"):
            await asyncio.to_thread(next, responses)


async def test_a_call_for_one_answer_refuses_a_decoupled_model() -> None:
    """With Triton's text, and without executing it."""
    request = OutgoingRequest(model="flow", inputs=(from_numpy("x", np.ones((1, 2), "<f4")),))
    async with scene() as one:
        with pytest.raises(InferenceFailed, match="Please use 'decoupled=True' argument to the 'exec'"):
            await asyncio.to_thread(one.caller.call, request, one.queue.clock.now_s() + 30.0)

        assert await one.is_empty()
