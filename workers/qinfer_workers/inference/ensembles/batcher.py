"""The requests of an ensemble in a worker, with the interface of a `Batcher`; only the steps' models execute.

Number and bytes of held requests are bounded. Answers of one loop turn are published together. Steps of nested
ensembles are steps of the outer one, so that no request waits for another's place.
"""

import asyncio
from collections.abc import Sequence

from qinfer.batching.batcher import LoadedModel, Outlet
from qinfer.batching.execution import WorkItem
from qinfer.batching.policy import NEVER_S
from qinfer.core.messages import Response
from qinfer.errors import TIMED_OUT, DeadlineExceeded, QinferError
from qinfer.models.ensemble_graph import EnsemblePlan
from qinfer.queue.entries import Lane
from qinfer_workers.inference.ensembles.runs import EnsembleRuns, RunParts

MAX_REQUESTS = 256

MAX_BYTES = 256 * 2**20
"""The input bytes of held requests above which no more requests are fetched."""


class EnsembleBatcher(EnsembleRuns):
    """Holds the requests of an ensemble."""

    def __init__(self, model: LoadedModel, plan: EnsemblePlan, parts: RunParts, outlet: Outlet) -> None:
        super().__init__(model, plan, parts)
        self._outlet = outlet
        self._answers: list[tuple[WorkItem, Response]] = []
        self._call_soon = asyncio.get_running_loop().call_soon
        self._held_bytes = 0
        self._fetchable = asyncio.Event()
        self._update_gates()

    @property
    def has_work(self) -> bool:
        """Whether requests are here; any thread."""
        return not self._idle.is_set()

    def classify(self, item: WorkItem) -> None:
        """Does nothing: ensembles don't batch."""

    def add_items(self, items: Sequence[WorkItem]) -> None:
        """Begins items."""
        now_s = self._clock.now_s()
        for item in items:
            if item.deadline_s <= now_s:
                self.fail([item], DeadlineExceeded(TIMED_OUT))
                continue
            self._held_bytes += _nbytes(item)
            self.start_run(item)
        self._update_gates()

    async def fetchable(self) -> None:
        """Waits until more items may be fetched."""
        await self._fetchable.wait()

    def welcome(self, lanes: Sequence[Lane]) -> Sequence[Lane]:
        """Returns all lanes."""
        return lanes

    @property
    def has_room(self) -> bool:
        """Whether more requests may be fetched."""
        return self._fetchable.is_set()

    def plan_fetch(self) -> tuple[int, float]:
        """Returns how many entries to fetch, and no time limit."""
        return max(MAX_REQUESTS - len(self._runs), 1), NEVER_S

    def lost(self, item: WorkItem) -> None:
        """Ends an item whose lease is lost."""
        item.lose()
        if item in self._runs:
            self.stop(item)
            self._release_item(item)

    def fail(self, items: Sequence[WorkItem], error: QinferError) -> None:
        """Answers items with an error."""
        self._outlet.publish_responses(items, self._responder.failures(items, error, self._clock.now_s(), self.tally))

    def hold(self) -> None:
        """Stops fetching."""
        super().hold()
        self._update_gates()

    async def idle(self) -> None:
        """Waits until no request is here."""
        await self._idle.wait()

    def resume_batching(self) -> None:
        """Takes requests again after `pause_batching`."""
        self.paused = False
        self._update_gates()

    def answered(self, item: WorkItem, response: Response | None) -> None:
        """Collects the responses of one loop turn, which leave together, though their requests began apart."""
        if response is not None:
            if not self._answers:
                self._call_soon(self._hand_over)
            self._answers.append((item, response))
            self._held_bytes -= _nbytes(item)
        else:
            self._release_item(item)

    def _hand_over(self) -> None:
        answers, self._answers = self._answers, []
        self._outlet.publish_responses([item for item, _ in answers], [response for _, response in answers])
        self._update_gates()

    def _release_item(self, item: WorkItem) -> None:
        self._held_bytes -= _nbytes(item)
        self._update_gates()

    def _update_gates(self) -> None:
        (self._idle.clear if len(self._runs) or self._answers else self._idle.set)()
        is_open = not self.paused and len(self._runs) < MAX_REQUESTS and self._held_bytes < MAX_BYTES
        (self._fetchable.set if is_open else self._fetchable.clear)()


def _nbytes(item: WorkItem) -> int:
    return sum([tensor.nbytes for tensor in item.request.inputs])
