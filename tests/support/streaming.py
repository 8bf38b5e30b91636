"""A worker of a decoupled model by hand: it answers as a test says, and keeps to the window by its credits."""

import asyncio
import contextlib
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from typing import Any

from qinfer.core.messages import Credit, InferRequest, Response
from qinfer.queue.entries import Lane, Lease, reply_address
from qinfer.queue.lanes import Queue
from qinfer.tensors import Tensor
from qinfer.testing import eventually
from qinfer.wire.frame import decode_credits, decode_request, encode_responses


@dataclass(kw_only=True)
class StreamWorker:
    """The worker of one model version; see the module docstring.

    Attributes:
        queue: The queue.
        model: The model's name.
        name: Its own name; credits come to `reply:<name>`.
        credits: What it was told, in order.
        sent_bytes: Outputs that it has sent, by request id.
        leases: What it holds, by request id.
    """

    queue: Queue
    model: str
    name: str = "worker-hand"
    credits: list[Credit] = field(default_factory=list)
    sent_bytes: dict[str, int] = field(default_factory=dict)
    leases: dict[str, Lease] = field(default_factory=dict)
    _told: asyncio.Event = field(default_factory=asyncio.Event)

    async def fetched(self, count: int = 1) -> list[InferRequest]:
        """Takes so many requests from the lane."""
        requests: list[InferRequest] = []
        while len(requests) < count:
            for lease in await self.queue.fetch([Lane(self.model, 1)], self.name, 64, 100):
                request = decode_request(lease.frame)
                self.leases[request.id] = lease
                requests.append(request)
        return requests

    async def send(self, request: InferRequest, index: int, *, final: bool = False, **fields: Any) -> None:
        """Sends one response: the request's own input, unless `outputs` are given."""
        outputs = tuple(Tensor("y", one.datatype, one.shape, one.data) for one in request.inputs)
        credit_to = "" if final else reply_address(self.name)
        said: dict[str, Any] = {"outputs": outputs, "credit_to": credit_to, **fields}
        response = Response(
            request_id=request.id, model=request.model, version=request.version, index=index, final=final, **said
        )
        self.sent_bytes[request.id] = self.sent_bytes.get(request.id, 0) + sum(one.nbytes for one in response.outputs)
        await self.queue.publish(request.reply_to, encode_responses([response]))
        if final:
            await self.queue.finish([self.leases.pop(request.id).entry])

    async def end(self, request: InferRequest, index: int) -> None:
        """Ends a stream without another response."""
        await self.send(request, index, final=True, outputs=())

    async def pour(self, request: InferRequest, total_bytes: int, each_bytes: int, window_bytes: int) -> None:
        """Sends responses of one row as fast as the window lets them through, and the end."""
        index = 0
        for index in range(total_bytes // each_bytes):
            while self.on_its_way(request.id) and self.on_its_way(request.id) + each_bytes > window_bytes:
                self._told.clear()
                await self._told.wait()
            shape = (1, each_bytes // 4)
            await self.send(request, index, outputs=(Tensor("y", "FP32", shape, bytes(each_bytes)),))
        await self.end(request, index + 1)

    def on_its_way(self, request_id: str) -> int:
        """Returns the bytes of a stream that were sent and not taken."""
        taken = max((one.taken_bytes for one in self.credits if one.request_id == request_id), default=0)
        return self.sent_bytes.get(request_id, 0) - taken

    def hear(self, blob: bytes) -> None:
        """Takes credits."""
        self.credits += decode_credits(blob)
        self._told.set()

    async def is_stuck(self, request_id: str) -> None:
        """Waits until a stream has stood still for a while, with responses on their way."""
        seen, still = -1, 0
        while still < 20:
            await asyncio.sleep(0.01)  # nothing tells that nothing happens
            sent = self.sent_bytes.get(request_id, 0)
            still = still + 1 if sent == seen and self.on_its_way(request_id) else 0
            seen = sent

    async def taken(self, request_id: str, nbytes: int) -> None:
        """Waits until it was told that so much was taken."""
        await eventually(
            lambda: any(one.request_id == request_id and one.taken_bytes >= nbytes for one in self.credits),
            description=f"credit for {nbytes} bytes",
        )


@contextlib.asynccontextmanager
async def stream_worker(queue: Queue, model: str, name: str = "worker-hand") -> AsyncIterator[StreamWorker]:
    """Runs a worker by hand until the block ends."""
    worker, ready = StreamWorker(queue=queue, model=model, name=name), asyncio.Event()
    listening = asyncio.create_task(queue.listen(name, worker.hear, ready.set))
    await ready.wait()
    try:
        yield worker
    finally:
        listening.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await listening
