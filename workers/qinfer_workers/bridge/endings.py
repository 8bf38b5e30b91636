"""Ends of requests, on the loop: taken from the route's outbox, rendered in a thread, published, and confirmed.

Stored responses of decoupled models are read when their stream has ended, one stream at a time. An end not confirmed in
its pause is delivered again, to any bridge of the route; in hand here, it is published only once.
"""

import asyncio
import logging
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress

from qinfer.bridge.reports import RouteTally
from qinfer.core.retry import REMIND_S, Backoff, OutageLog
from qinfer.errors import QinferError
from qinfer.queue.deliveries import DeliveryKind
from qinfer.queue.entries import Ending, EntryAddress, RequestState
from qinfer.queue.lanes import Queue
from qinfer_workers.bridge.reading import PARTITION
from qinfer_workers.bridge.rendering import RenderedEnd

logger = logging.getLogger(__name__)

MOST_AT_ONCE = 500
MOST_IN_HAND = 4 * MOST_AT_ONCE
MOST_BYTES_IN_HAND = 64 * 2**20
"""This bounds memory while a sink is unreachable."""

REREAD_S = 1.0

PACE_S = 0.01
"""The pause between partial reads, so that each read finds many endings."""

_LONGEST_PAUSE_S = 1.0
_MESSAGE_BYTES = 1000


class Endings:
    """The ends of a route's requests.

    `render` makes an end's messages in a thread (`None` = no recipient); `took` is called when requests have left the
    queue.
    """

    def __init__(  # noqa: PLR0913 - keywords: what an end passes through
        self,
        *,
        delivery: Queue,
        model: str,
        kind: DeliveryKind,
        render: Callable[[Ending, Sequence[bytes]], RenderedEnd | None],
        post: Callable[[Sequence[RenderedEnd]], None],
        took: Callable[[], None],
        tally: RouteTally,
    ) -> None:
        self._delivery = delivery
        self._place = (model, PARTITION, kind)
        self._render_one = render
        self._post = post
        self._took = took
        self._tally = tally
        self._in_hand: dict[str, int] = {}  # ends → bytes of their results
        self._in_hand_bytes = 0
        self._streams: deque[Ending] = deque()  # they wait until there is room for their responses
        self._confirmed: list[str] = []
        self._news = asyncio.Event()
        self._stopping = False
        self._backoff = Backoff(PACE_S * 10, _LONGEST_PAUSE_S)
        self._away = OutageLog(
            logger, "ended requests can't be read", remind_s=REMIND_S, outbox=kind.name.removeprefix("outbox:")
        )

    def wake(self) -> None:
        """Notes that the outbox may have ends."""
        self._news.set()

    def confirm(self, ending_ids: Sequence[str]) -> None:
        """Takes ends with confirmed messages off the outbox."""
        self._confirmed.extend(ending_ids)
        self._news.set()

    def drop(self, ending_id: str) -> None:
        """Drops an end; unless it is confirmed, it is delivered again."""
        self._in_hand_bytes -= self._in_hand.pop(ending_id, 0)
        self._tally.unconfirmed = len(self._in_hand)
        self._news.set()

    def stop(self) -> None:
        """Stops reading; ends `run` once replies in hand are confirmed."""
        self._stopping = True
        self._news.set()

    async def run(self) -> None:
        """Takes and confirms until `stop`."""
        while self._in_hand or not self._stopping:
            self._news.clear()
            try:
                await self._confirm()
                taken = await self._take()
                while self._streams and self._has_room:
                    await self._render_stream(self._streams.popleft())
                    await self._confirm()
                self._backoff.reset()
                self._away.over()
            except QinferError as error:
                self._away.failed(error.message)
                await asyncio.sleep(self._backoff.next_s())
                continue
            if not taken:
                with suppress(TimeoutError):
                    async with asyncio.timeout(REREAD_S):
                        await self._news.wait()
            if taken < MOST_AT_ONCE:
                await asyncio.sleep(PACE_S)

    @property
    def _has_room(self) -> bool:
        return self._in_hand_bytes < MOST_BYTES_IN_HAND and not self._stopping

    async def _take(self) -> int:
        """Publishes the next ends, but those of streams; returns how many there were."""
        count = min(MOST_AT_ONCE, MOST_IN_HAND - len(self._in_hand))
        if count <= 0 or self._streams or not self._has_room:
            return 0
        taken = await self._delivery.requests.endings(*self._place, count)
        if fresh := [ending for ending in taken if ending.id not in self._in_hand]:
            self._took()
            self._streams += filter(_is_stream, fresh)
            await self._render([ending for ending in fresh if not _is_stream(ending)])
        return len(taken)

    async def _render_stream(self, ending: Ending) -> None:
        """Publishes a stream's end; if its responses can't be read, the end is delivered again."""
        place, stored = EntryAddress(*self._place[:2], ending.request_id), list[bytes]()
        while page := await self._delivery.requests.responses.read(place, len(stored)):
            stored += page
        await self._render([ending], stored)

    async def _render(self, endings: Sequence[Ending], stored: Sequence[bytes] = ()) -> None:
        for ending in endings:
            size = len(ending.blob or b"") + sum(len(blob) + _MESSAGE_BYTES for blob in stored)
            self._in_hand[ending.id] = size
            self._in_hand_bytes += size
        self._tally.unconfirmed = len(self._in_hand)
        rendered = await asyncio.to_thread(lambda: [self._render_one(ending, stored) for ending in endings])
        if silent := [ending.id for ending, each in zip(endings, rendered, strict=True) if each is None]:
            self.confirm(silent)
        self._post([each for each in rendered if each is not None])

    async def _confirm(self) -> None:
        if ids := list(self._confirmed):
            await self._delivery.deliveries.done(*self._place, ids)
            del self._confirmed[: len(ids)]
            for ending_id in ids:
                self.drop(ending_id)


def _is_stream(ending: Ending) -> bool:
    record = ending.record
    return record is not None and record.decoupled and record.state is RequestState.SUCCEEDED
