"""The short cut of steps: a step whose model is in this worker joins its next batch, without Redis and a copy.

It is taken only if no others wait in the lane and the next batch has room, and never past priorities or queue policies.
A batcher gives steps back to their lanes.
"""

import asyncio
from collections import Counter
from collections.abc import Callable, Sequence

from qinfer.batching import execution
from qinfer.batching.batcher import Batcher, Outlet
from qinfer.core.clock import ServerClock
from qinfer.core.messages import Failure, OutgoingRequest, Response
from qinfer.errors import QinferError
from qinfer.models.catalog import ServedVersion
from qinfer.queue.entries import Entry, Lane, Lease
from qinfer.submission.pending import PendingCall
from qinfer.submission.submit import Submission


class LocalItem(execution.WorkItem, kw_only=True, eq=False, gc=False):
    """A step in a local batcher; its lease only names the lane."""

    request: OutgoingRequest
    waiting: PendingCall


class LocalSteps:
    """Admits and answers local steps; other items go to `outlet`. `called` gets the lane of each step."""

    def __init__(
        self,
        outlet: Outlet,
        clock: ServerClock,
        batcher_of: Callable[[str, int], Batcher | None],
        called: Callable[[Lane], None] = lambda _: None,
    ) -> None:
        self.submission: Submission
        self._outlet = outlet
        self._clock = clock
        self._batcher_of = batcher_of
        self.called = called
        self._call_soon = asyncio.get_running_loop().call_soon
        self._items: dict[str, LocalItem] = {}
        self._taken: dict[Batcher, list[LocalItem]] = {}
        self._answers: list[Response] = []
        self._leases: dict[Lane, Lease] = {}

    def try_admit(
        self,
        served: ServedVersion,
        request: OutgoingRequest,
        rows: int,
        waiting: PendingCall,
        *,
        next_batch: bool = True,
    ) -> bool:
        """Admits a step if its batcher is here."""
        batcher = self._batcher_of(served.spec.name, served.version)
        if batcher is None or batcher.model.generation != served.generation:
            return False
        taken = self._taken.get(batcher)
        if next_batch and batcher.next_rows - sum([item.rows for item in taken or ()]) < rows:
            return False
        now_s, lane = self._clock.now_s(), served.lane
        lease = self._leases.get(lane)
        if lease is None:
            lease = self._leases[lane] = Lease(Entry(lane, "0-0"), "", b"")
        item = self._items[request.id] = LocalItem(
            rows=rows,
            key=None,
            enqueued_s=now_s,
            deadline_s=now_s + request.timeout_s,
            lease=lease,
            request=request,
            waiting=waiting,
        )
        if taken is None:
            if not self._taken:
                self._call_soon(self._admit)
            taken = self._taken[batcher] = []
        taken.append(item)
        return True

    def serves(self, model: str, version: int) -> bool:
        """Returns whether a local batcher admits past the lane."""
        return self._batcher_of(model, version) is not None

    def has_more(self, model: str, version: int, count: int) -> bool:
        """Returns whether such a batcher has more than `count` instances."""
        batcher = self._batcher_of(model, version)
        return batcher is not None and batcher.model.executor.count > count

    def counts(self) -> dict[tuple[str, int], int]:
        """Returns local steps by model version."""
        lanes = [item.lease.entry.lane for item in self._items.values()]
        return dict(Counter((lane.model, lane.version) for lane in lanes))

    def abandon_step(self, waiting: PendingCall) -> None:
        """Drops a step whose caller has left."""
        item = self._items.pop(waiting.request_id, None)
        if item is None:
            return
        item.lose()
        batcher = self._batcher_of(waiting.model, waiting.version)
        if batcher is not None:
            batcher.lost(item)

    def publish_responses(self, items: Sequence[execution.WorkItem], responses: Sequence[Response]) -> None:
        """Delivers the responses to local steps; the outlet gets all other responses."""
        if not self._items:
            self._outlet.publish_responses(items, responses)
            return
        others = [item for item in items if not isinstance(item, LocalItem)]
        if len(others) == len(items):
            self._outlet.publish_responses(items, responses)
            return
        mine = {item.request.id for item in items if isinstance(item, LocalItem)}
        for response in responses:
            if response.request_id in mine:
                self._note_answer(response)
        if others:
            self._outlet.publish_responses(others, [one for one in responses if one.request_id not in mine])

    def give_back(self, items: Sequence[execution.WorkItem]) -> None:
        """Puts local steps into their lanes; the outlet gets all other items."""
        for item in items:
            if isinstance(item, LocalItem):
                self._enqueue(item)
        if others := [item for item in items if not isinstance(item, LocalItem)]:
            self._outlet.give_back(others)

    def delay(self, items: Sequence[execution.WorkItem]) -> None:
        """Passes items to the outlet."""
        self._outlet.delay(items)

    def _admit(self) -> None:
        taken, self._taken = self._taken, {}
        for batcher, items in taken.items():
            here = [item for item in items if not item.lost]
            if batcher.paused:
                self.give_back(here)
                continue
            for item in here:
                batcher.classify(item)
            if here:
                batcher.add_items(here)

    def _enqueue(self, item: LocalItem) -> None:
        if item.lost or self._items.pop(item.request.id, None) is None:
            return
        item.request.timeout_s = max(item.deadline_s - self._clock.now_s(), 0.001)
        try:
            self.submission.enqueue(item.waiting, item.request, item.lease.entry.lane)
        except QinferError as error:
            self._note_answer(Response(request_id=item.request.id, failure=Failure.from_error(error)))
        else:
            # its batcher is about to pause
            self._call_soon(self.called, item.lease.entry.lane)

    def _note_answer(self, response: Response) -> None:
        """Delivers at the end of this turn, when no batcher is busy."""
        self._items.pop(response.request_id, None)
        if not self._answers:
            self._call_soon(self._deliver)
        self._answers.append(response)

    def _deliver(self) -> None:
        answers, self._answers = self._answers, []
        for response in answers:
            self.submission.pending.deliver(response)
