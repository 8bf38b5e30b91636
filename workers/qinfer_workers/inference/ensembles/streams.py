"""The responses of a decoupled ensemble to one request, as a stream of the worker.

A response that does not fit waits in its run until the caller takes others.
"""

import asyncio
import time
from collections.abc import Callable
from contextlib import suppress

from qinfer.batching.execution import Responder, WorkItem
from qinfer.batching.streams import ItemStream, WorkerStreams
from qinfer.core.messages import Failure, Response, Timing
from qinfer.errors import Cancelled, OutputMismatch
from qinfer.tensors import Tensor
from qinfer_workers.inference.ensembles.run import EnsembleRun


class StreamedResponses:
    """A run's responses; `counted` gets each that leaves, `dropped` is called when the caller takes no more."""

    can_ask = False

    def __init__(
        self,
        table: WorkerStreams,
        item: WorkItem,
        responder: Responder,
        counted: Callable[[EnsembleRun, Response], None],
        dropped: Callable[[WorkItem], None],
    ) -> None:
        self.responder = responder
        self._table = table
        self._item = item
        self._counted = counted
        self._dropped = dropped
        self._begin_ns = time.perf_counter_ns()
        self._has_room = asyncio.Event()
        self._run: EnsembleRun
        self._stream = table.open(item, self)

    def follow(self, run: EnsembleRun) -> None:
        """Takes the responses of a run."""
        self._run = run
        self._stream.on_taken(self._took)
        self._table.watch()

    def send(self, outputs: tuple[Tensor, ...], *, final: bool) -> bool:
        """Sends a response if there is room; a misfit ends the stream."""
        with suppress(Cancelled):
            if not self._stream.offer(outputs, final=final, parameters=self._run.parameters):
                return False
            if final or not self._stream.has_ended:
                return True
        self._dropped(self._item)
        return False

    async def room(self) -> None:
        """Waits until the caller has taken responses."""
        await self._has_room.wait()
        self._has_room.clear()

    def send_final(self, failure: Failure | None) -> None:
        """Sends the final response, at most once."""
        with suppress(Cancelled, OutputMismatch):
            self._stream.send(failure or (), final=True, wait=False)

    def timing(self, item: WorkItem, now_s: float) -> Timing:
        """Returns the times of the request so far."""
        lasted_ns = time.perf_counter_ns() - self._begin_ns
        waited_ns = int((now_s - item.enqueued_s) * 1e9) - lasted_ns
        return Timing(max(waited_ns, 0), 0, lasted_ns, 0, item.rows)

    def count(self, stream: ItemStream, response: Response) -> None:
        """Counts a response."""
        del stream
        self._counted(self._run, response)

    def _took(self, nbytes: int) -> None:
        if nbytes:
            self._has_room.set()
        else:
            self._dropped(self._item)
