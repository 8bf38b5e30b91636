"""What is left to do for requests, beside the way that most of them go: in the background, never on the hot path.

- Abandoned requests (cancelled, expired) are taken out of the queue, executing or not.
- Requests that waited too long are taken out of the queue if they still wait.
- Outputs beside the reply stream are fetched.
"""

import asyncio
import logging
from collections import defaultdict
from collections.abc import Callable

import msgspec

from qinfer.codec.frame import decode_responses
from qinfer.delivery.base import Delivery, Entry, Lane
from qinfer.errors import BrokerUnavailable, DeliveryError, InferenceFailed
from qinfer.messages import Response
from qinfer_api.sinks import Pending, SinkTable

logger = logging.getLogger(__name__)

_GONE = "the outputs were stored and are gone; send the request again"
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.05, 1.0


class Aftercare:
    """One per gateway.

    Args:
        delivery: The queue.
        sinks: The requests that wait for answers.
        withdrawn: Called with a late request that was taken out of the queue.
        receive: Called with a response whose outputs were fetched.
        fail: Called with a request, out of the table already, whose outputs can't be had, and why.
    """

    def __init__(
        self,
        delivery: Delivery,
        sinks: SinkTable,
        withdrawn: Callable[[Pending], None],
        receive: Callable[[Response], None],
        fail: Callable[[Pending, Exception], None],
    ) -> None:
        self._delivery = delivery
        self._sinks = sinks
        self._withdrawn = withdrawn
        self._receive = receive
        self._fail = fail
        self._abandoned: list[Entry] = []
        self._late: list[Pending] = []
        self._stored: list[Pending] = []
        self._work = asyncio.Event()

    def abandon(self, entry: Entry) -> None:
        """Has an entry finished: nobody waits for its answer."""
        self._abandoned.append(entry)
        self._work.set()

    def withdraw(self, pending: Pending) -> None:
        """Has a request taken out of the queue, if it still waits there."""
        self._late.append(pending)
        self._work.set()

    def fetch(self, pending: Pending) -> None:
        """Has a request's outputs fetched and delivered; it may be told of them twice, after a reconnect."""
        if not pending.is_fetched:
            pending.is_fetched = True
            self._stored.append(pending)
            self._work.set()

    async def run(self) -> None:
        """Works until cancelled."""
        async with asyncio.TaskGroup() as group:
            while True:
                await self._work.wait()
                self._work.clear()
                stored, self._stored = self._stored, []
                for pending in stored:
                    group.create_task(self._take(pending), name="stored outputs")
                await self.discard()
                await self._withdraw()

    async def discard(self) -> None:
        """Finishes the entries of abandoned requests now; what Redis can't be told, the worker's deadline ends."""
        entries, self._abandoned = self._abandoned, []
        for group in _by_lane(entries).values():
            try:
                await self._delivery.finish(group)
            except DeliveryError as error:
                logger.warning("abandoned requests stay queued", extra={"count": len(group), "error": error.message})

    async def _withdraw(self) -> None:
        """Takes late requests out of the queue; those that stay there are the worker's, and their deadline's."""
        late = {pending.entry: pending for pending in self._late if pending.entry is not None}
        self._late.clear()
        for entries in _by_lane(list(late)).values():
            try:
                removed = await self._delivery.withdraw(entries)
            except DeliveryError as error:
                logger.warning("late requests stay queued", extra={"count": len(entries), "error": error.message})
                continue
            for entry, is_removed in zip(entries, removed, strict=True):
                if is_removed:
                    self._withdrawn(late[entry])

    async def _take(self, pending: Pending) -> None:
        try:
            blob = await self._taken(pending)
            if blob is None:
                raise InferenceFailed(_GONE)
            (response,) = decode_responses(blob)
        except Exception as error:  # the boundary of a request: its caller is told, whatever it is
            if self._sinks.remove(pending):
                logger.exception("outputs can't be fetched", extra={"request_id": pending.request_id})
                self._fail(pending, error)
            return
        # Another attempt may have stored its outputs over those that were announced: they are as good.
        self._receive(msgspec.structs.replace(response, stored=False, attempt=pending.attempt))

    async def _taken(self, pending: Pending) -> bytes | None:
        """Reads stored outputs; while the queue is away it tries again, for as long as somebody waits for them."""
        assert pending.load is not None
        pause_s = _FIRST_PAUSE_S
        while True:
            try:
                return await self._delivery.take_result(pending.load.lane, pending.request_id)
            except BrokerUnavailable as error:
                await asyncio.sleep(pause_s)
                if pending not in self._sinks:
                    raise
                logger.info("outputs are read again", extra={"request_id": pending.request_id, "reason": error.message})
            pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)


def _by_lane(entries: list[Entry]) -> dict[Lane, list[Entry]]:
    """Groups entries as one call takes them."""
    groups: defaultdict[Lane, list[Entry]] = defaultdict(list)
    for entry in entries:
        groups[entry.lane].append(entry)
    return groups
