"""Open streams on a bench: what leaves is remembered, and the event loop turns when it is told to."""

import asyncio
from collections.abc import Sequence

import numpy as np

from qinfer.backends.base import Batch
from qinfer.batching.execution import Responder, WorkItem
from qinfer.batching.streams import Sent, StreamedExecution, WorkerStreams
from qinfer.core.messages import InferRequest, Response
from qinfer.observe.stats import StatsTally
from qinfer.queue.entries import Entry, Lane, Lease
from qinfer.tensors import Tensor, from_numpy
from qinfer.testing import stub_spec

WINDOW_BYTES = 1000


class StreamBench:
    """The open streams of a worker, made within a running event loop.

    Attributes:
        sent: What has left.
    """

    def __init__(self, window_bytes: int = WINDOW_BYTES, stall_s: float = 60.0) -> None:
        self.sent: list[Sent] = []
        self.tally = StatsTally()
        self.now_s = 1.0
        self.table = WorkerStreams(self, "reply:worker-w", window_bytes, stall_s, lambda: self.now_s)

    def send(self, sent: Sequence[Sent]) -> None:
        """See `StreamOutlet`."""
        self.sent.extend(sent)

    def execution(self, count: int = 1) -> StreamedExecution:
        """Returns a batch whose streams are open and whose `execute` has returned."""
        items = [item(f"r{number}") for number in range(count)]
        batch = Batch(requests=[each.request for each in items], rows=[1] * count, inputs={})
        execution = StreamedExecution(
            items, batch, 0, table=self.table, responder=Responder(stub_spec(), 1), tally=self.tally
        )
        execution.streams = [self.table.open(each, execution) for each in items]
        return execution

    def responses(self, name: str = "r0") -> list[Response]:
        """Returns what has left of a request."""
        return [response for each, response in self.sent if each.request.id == name]

    @property
    def open(self) -> list[str]:
        """The requests whose streams are open."""
        return [request_id for request_id, _ in self.table._open]

    async def turn(self) -> None:
        """Has the event loop hand over what is ready."""
        await asyncio.sleep(0)
        await asyncio.sleep(0)


def item(name: str, deadline_s: float = 1000.0) -> WorkItem:
    """Returns an item whose caller waits."""
    request = InferRequest(model="stub", inputs=(), id=name, reply_to="reply:g")
    lease = Lease(Entry(Lane("stub", 1), f"1000-{name}"), "w", b"")
    return WorkItem(rows=1, key=None, enqueued_s=1.0, deadline_s=deadline_s, lease=lease, request=request)


def outputs(rows: int = 1) -> tuple[Tensor, ...]:
    """Returns outputs of 8 bytes a row."""
    return (from_numpy("y", np.zeros((rows, 2), "<f4")),)
