"""Real workers in this process for tests, with stub backends and a caller that waits for answers."""

import asyncio
import os
import threading
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from qinfer.backends.base import Backend
from qinfer.backends.stub import StubBackend
from qinfer.core.messages import Failure, IdFactory, InferRequest, Response
from qinfer.core.settings import LimitSettings, Settings, StoreSettings, WorkerSettings
from qinfer.core.settings_sections import RateLimitSettings
from qinfer.errors import QinferError
from qinfer.models.config import config
from qinfer.models.spec import lane_name, lanes_of
from qinfer.models.state import DesiredState, State, StoredModel
from qinfer.models.store import ControlStore
from qinfer.queue.entries import Acceptance, Entry, EntryAddress, Lane, Payload, RequestRecord, reply_address
from qinfer.queue.lanes import Queue
from qinfer.tensors import from_numpy, to_numpy
from qinfer.testing import eventually
from qinfer.wire.frame import decode_responses, encode_request, encode_request_apart, encode_responses
from qinfer_workers.inference.loader import Loader
from qinfer_workers.inference.publisher import LeaseKeeper
from qinfer_workers.inference.renewals import ProcessRenewals
from qinfer_workers.inference.worker import Worker
from qinfer_workers.renewer import Renewer

OWNER = "caller"

CONFIG = """
name: "{name}" backend: "stub" max_batch_size: 8
input {{ name: "x" data_type: TYPE_FP32 dims: [ {dims} ] }}
output {{ name: "y" data_type: TYPE_FP32 dims: [ {dims} ] }}
{scheduler}
instance_group {{ count: {instances} kind: KIND_CPU }}
parameters {{ key: "mode" value {{ string_value: "{mode}" }} }}
{more}
"""


class InlineRenewals(ProcessRenewals):
    """Renews as the renewer does, in a thread of this process: to start another takes longer than most tests."""

    async def _run_one(self, keeper: LeaseKeeper) -> None:
        renewer = Renewer(self._hello)
        while True:
            self._asked.clear()
            renewer.report(self._held(keeper))
            report = await asyncio.to_thread(renewer.renew)
            self._handle_report(report, keeper)
            if report.failed:  # whoever waits for a success asks again at once
                await asyncio.sleep(min(0.5, self._hello.every_s))
                continue
            with suppress(TimeoutError):
                async with asyncio.timeout(self._hello.every_s):
                    await self._asked.wait()


class NoRenewals:
    """Renews nothing.

    Attributes:
        asked: Set when somebody asks for it.
    """

    def __init__(self, *_: object) -> None:
        self.asked = asyncio.Event()

    async def run(self, _: LeaseKeeper) -> None:
        await asyncio.get_running_loop().create_future()

    def ask(self) -> None:
        self.asked.set()


class InlineWorkers:
    """Workers around one delivery and one control store."""

    def __init__(self, delivery: Queue, store: ControlStore, tasks: asyncio.TaskGroup) -> None:
        self.delivery, self.store = delivery, store
        self.backend: Callable[[threading.Event], StubBackend] = StubBackend
        self.limits = LimitSettings()
        self.rate_limit = RateLimitSettings()
        self.backends: dict[str, list[StubBackend]] = {}
        self._gates: list[tuple[StubBackend, threading.Event]] = []
        self.lane = Lane("stub", 1)
        self.responses: dict[str, list[Response]] = {}
        self.entries: list[Entry] = []
        self._tasks = tasks
        self._ids = IdFactory()
        self._waiting: dict[str, asyncio.Future[Response]] = {}
        self._generation = 0
        self._generations: dict[str, int] = {}
        self._stops: dict[str, tuple[asyncio.Event, asyncio.Task[None]]] = {}

    async def model(
        self, name: str = "stub", *, versions: tuple[int, ...] = (1,), error: str = "", **options: object
    ) -> int:
        """Stores a model under a new generation; it batches, unless `scheduler` is another one."""
        delay_us, batching = options.pop("delay_us", 0), options.pop("batching", "")
        fields = {
            "name": name,
            "dims": 2,
            "scheduler": f"dynamic_batching {{ max_queue_delay_microseconds: {delay_us} {batching} }}",
            "instances": 1,
            "mode": "echo",
            "more": "",
            **options,
        }
        text = config.to_json(config.normalise(config.parse(CONFIG.format(**fields)), name, ["model.stub"]))
        self._generation += 1
        self._generations[name] = self._generation
        spec = config.to_spec(config.from_json(text), LimitSettings())
        await self.delivery.ensure([lane for version in versions for lane in lanes_of(spec, version)])
        await self.store.put_model(StoredModel(name, self._generation, text, versions, error=error))
        await self.store.set_desired(DesiredState(name, self._generation))
        await self.store.wake()
        return self._generation

    async def unload(self, name: str = "stub") -> DesiredState:
        """Takes the wish for a model back; returns the one there was."""
        wish = (await self.store.desired())[name]
        await self.store.set_desired(msgspec.structs.replace(wish, load=False))
        await self.store.wake()
        return wish

    async def worker(self, worker_id: str = "w1", *, ready: bool = True, **options: object) -> Worker:
        """Starts a worker; waits until its models are ready."""
        options.setdefault("max_wait_s", 0.05)  # a drain waits for the fetch under way
        settings = Settings(
            redis=self.delivery.router._settings,
            worker=WorkerSettings(**options),
            limits=self.limits,
            rate_limit=self.rate_limit,
            stores=StoreSettings(allow=("file:///",)),
        )
        mine = self.backends.setdefault(worker_id, [])

        def factory(name: str) -> Callable[[], Backend]:
            assert name == "stub"

            def make() -> Backend:
                gate = threading.Event()
                gate.set()
                mine.append(self.backend(gate))
                self._gates.append((mine[-1], gate))
                return mine[-1]

            return make

        loader = Loader(lambda model, version, *_: Path(model) / str(version), factory, self.delivery.clock)
        renewals = InlineRenewals(settings, worker_id, os.environ)
        worker = Worker(settings, self.delivery, self.store, loader, worker_id, renewals)
        stop = asyncio.Event()
        self._stops[worker_id] = (stop, self._tasks.create_task(worker.run(stop)))
        if ready:
            await self.ready(worker_id)
        return worker

    async def ready(self, worker_id: str = "w1", generation: int | None = None) -> None:
        """Waits until a worker serves the newest generation of each of its models."""

        async def is_ready() -> bool:
            records = {r.id: r for r in await self.store.workers()}
            models = records[worker_id].models if worker_id in records else {}
            return bool(models) and all(
                s.state is State.READY and s.generation == (generation or self._generations[name])
                for name, versions in models.items()
                for s in versions.values()
            )

        await eventually(is_ready, description=f"{worker_id} ready")

    async def stop(self, worker_id: str = "w1") -> None:
        """Drains a worker."""
        stop, task = self._stops.pop(worker_id)
        stop.set()
        await task

    async def kill(self, worker_id: str = "w1") -> None:
        """Ends a worker as a crash would: nothing is finished or released."""
        _, task = self._stops.pop(worker_id)
        task.cancel()
        await asyncio.wait([task])

    def request(
        self,
        value: float = 1.0,
        *,
        model: str = "",
        rows: int = 1,
        width: int = 2,
        timeout_s: float = 30.0,
        generation: int = 0,
    ) -> InferRequest:
        """Returns a request of `rows` rows full of `value`, whose answer the caller waits for."""
        model = model or self.lane.model
        return InferRequest(
            model=model,
            version=1,
            id=self._ids.request_id(model),
            inputs=(from_numpy("x", np.full((rows, width), value, "<f4")),),
            timeout_s=timeout_s,
            reply_to=reply_address(OWNER),
            generation=generation or self._generations[model],
        )

    def submit(self, value: float = 1.0, *, tenant: str = "", **options: Any) -> "asyncio.Future[Response]":
        """Sends a request, made as `request` says; returns its final answer to come."""
        request = self.request(value, **options)
        return self.submit_frame(request.id, encode_request(request), Lane(request.model, 1), tenant=tenant)

    def submit_waiting(
        self, value: float, *, priority: int = 0, levels: int = 0, queue_timeout_s: float = 0.0
    ) -> "asyncio.Future[Response]":
        """Sends a request of a priority, or that may wait for so long only."""
        request = self.request(value)
        request.priority, request.queue_timeout_s = priority, queue_timeout_s
        lane = Lane(request.model, 1, lane_name(levels, priority))
        return self.submit_frame(request.id, encode_request(request), lane)

    def submit_apart(self, value: float, **options: Any) -> "asyncio.Future[Response]":
        """Sends a request whose tensors are stored beside the stream."""
        request = self.request(value, **options)
        request.payload = True
        frame, payload = encode_request_apart(request)
        return self.submit_frame(request.id, frame, payload=Payload(request.id, payload, 60.0))

    async def accept(self, value: float = 1.0, *, apart: bool = False, **options: Any) -> EntryAddress:
        """Sends an asynchronous request."""
        request = self.request(value, **options)
        request.reply_to, request.payload = "", apart
        address = EntryAddress(request.model, 0, request.id)
        frame, payload = encode_request_apart(request) if apart else (encode_request(request), b"")
        lane = Lane(request.model, 1)
        acceptance = Acceptance(
            address=address, lane=lane, frame=frame, payload=payload, timeout_s=request.timeout_s, result_ttl_s=60.0
        )
        accepted = await self.delivery.requests.accept(acceptance)
        assert accepted.is_new
        return address

    async def ended(self, address: EntryAddress) -> RequestRecord:
        """Waits until an asynchronous request has ended."""
        found: list[RequestRecord] = []

        async def has_ended() -> bool:
            record = await self.delivery.requests.record(address)
            assert record is not None
            found.append(record)
            return record.state.is_terminal

        await eventually(has_ended, description="the end of a request")
        return found[-1]

    async def result(self, address: EntryAddress) -> Response:
        """Returns the stored answer of an asynchronous request."""
        blob = await self.delivery.requests.result(address)
        assert blob is not None
        (response,) = decode_responses(blob)
        return response

    def submit_frame(
        self,
        request_id: str,
        frame: bytes,
        lane: Lane | None = None,
        payload: Payload | None = None,
        *,
        tenant: str = "",
    ) -> "asyncio.Future[Response]":
        """Sends raw bytes."""
        future = self.expect(request_id)

        def done(result: Entry | QinferError) -> None:
            assert isinstance(result, Entry), result
            self.entries.append(result)

        self.delivery.submit(lane or self.lane, frame, done, payload=payload, tenant=tenant)
        return future

    def expect(self, request_id: str) -> "asyncio.Future[Response]":
        """Returns the final answer to come to a request that is submitted elsewhere."""
        future = self._waiting[request_id] = asyncio.get_running_loop().create_future()
        return future

    async def started(self, worker_id: str = "w1", count: int = 1, *, model: str = "") -> None:
        """Waits until instances, those of one model if it is named, began so many executions since the last time."""
        for _ in range(count):
            await eventually(
                lambda: any(
                    b.started.acquire(blocking=False) for b in self.backends[worker_id] if model in ("", b.model)
                ),
                description=f"an execution in {worker_id}",
            )

    async def busy(self) -> "asyncio.Future[Response]":
        """Occupies the only instance of the only worker until `go`."""
        self.hold()
        first = self.submit(0.0)
        await self.started()
        return first

    def hold(self, model: str = "") -> None:
        """Makes executions wait for `go`, all or one model's, and forgets those so far, the warm-up runs."""
        for backend, gate in self._gates:
            if model in ("", backend.model):
                gate.clear()
        self.forget_started()

    def go(self, model: str = "") -> None:
        """Lets executions end, all or one model's."""
        for backend, gate in self._gates:
            if model in ("", backend.model):
                gate.set()

    def forget_started(self) -> None:
        """Ignores the executions so far."""
        for backends in self.backends.values():
            for backend in backends:
                while backend.started.acquire(blocking=False):
                    pass
                backend.sizes.clear()

    async def queued(self, count: int, *, model: str = "") -> None:
        """Waits until the lane holds so many entries, waiting and in flight."""
        lane = Lane(model, 1) if model else self.lane

        async def is_so() -> bool:
            return await self.delivery.depth([lane]) == [count]

        await eventually(is_so, description=f"{count} entries in the lane")

    def deliver(self, blob: bytes) -> None:
        """Takes answers from the reply stream."""
        for response in decode_responses(blob):
            self.responses.setdefault(response.request_id, []).append(response)
            future = self._waiting.get(response.request_id)
            if response.final and future is not None and not future.done():
                future.set_result(response)

    def deliver_as(self, request_id: str, blob: bytes) -> None:
        """Takes a stored response as the one to another request."""
        (response,) = decode_responses(blob)
        self.deliver(encode_responses([msgspec.structs.replace(response, request_id=request_id)]))

    async def close(self) -> None:
        """Lets everything end."""
        self.go()
        for worker_id in list(self._stops):
            await self.stop(worker_id)


@asynccontextmanager
async def inline_workers(delivery: Queue, store: ControlStore) -> AsyncIterator[InlineWorkers]:
    """Provides workers, and stops them afterwards."""
    async with asyncio.TaskGroup() as tasks:
        scene = InlineWorkers(delivery, store, tasks)
        listener = tasks.create_task(delivery.listen(OWNER, scene.deliver))
        await eventually(
            lambda: delivery.publish(reply_address(OWNER), encode_responses([])), description="the reply stream"
        )
        try:
            yield scene
        finally:
            await scene.close()
            listener.cancel()


def value(response: Response) -> float:
    """Returns the first element of an answer."""
    assert response.failure is None, response.failure
    return float(to_numpy(response.outputs[0]).ravel()[0])


def failure(response: Response) -> Failure:
    """Returns why a request has failed."""
    assert response.failure is not None, response
    return response.failure
