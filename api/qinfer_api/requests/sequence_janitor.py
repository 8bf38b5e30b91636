"""The janitor's work on sequences: it hands over those of dead workers, ends expired ones, and answers their steps.

a worker's lease has ended ──▶ its sequences wait for another owner; `explicit` ones end
a sequence has no owner    ──▶ it ends at the deadline of its steps, or when nothing of it has waited for a while
a life has ended           ──▶ each remaining step gets its stored response, or the failure
"""

import asyncio
import logging

from qinfer.errors import Cancelled, DeadlineExceeded
from qinfer.models.catalog import Catalog
from qinfer.observe.stats import GatewayTally
from qinfer.queue.lanes import Queue
from qinfer.queue.sequences.answers import answer_rest
from qinfer.queue.sequences.ownership import AT_ONCE

logger = logging.getLogger(__name__)

# The only partition, until models are spread over several.
_PARTITION = 0
# Models that are swept at once.
_TOGETHER = 16
_COUNTED = {Cancelled.code, DeadlineExceeded.code}  # counted by the gateway of the request


class SequenceJanitor:
    """Hands over sequences of dead workers, ends sequences without an owner, and answers the remaining steps."""

    def __init__(self, queue: Queue, catalog: Catalog, tally: GatewayTally) -> None:
        self._queue = queue
        self._catalog = catalog
        self._tally = tally
        self._models: dict[str, None] = {}  # a removed model may have sequences left
        self._together = asyncio.Semaphore(_TOGETHER)

    async def round(self) -> None:
        """Runs `look_after` for all models; raises if the sequences of one are unreachable."""
        self._models |= dict.fromkeys(self._catalog.stateful())
        outcomes = await asyncio.gather(*map(self.look_after, self._models), return_exceptions=True)
        for outcome in outcomes:
            if outcome is not None:
                raise outcome

    async def look_after(self, model: str) -> None:
        """Hands over and ends sequences of a model, and answers the steps of the ended ones."""
        sequences = self._queue.sequences(model, _PARTITION)
        async with self._together:
            while await sequences.reap() == AT_ONCE:
                pass
            while await sequences.sweep() == AT_ONCE:
                pass
            for request, failure in await answer_rest(self._queue, sequences):
                if failure.code not in _COUNTED:
                    self._tally.count_ended(model, request.version, failure.code)
                logger.info("step not executed", extra={"model": model, "request_id": request.id, "code": failure.code})
