"""Ends of requests, on the loop: taken from the route's outbox, rendered in a thread, published, and confirmed.

Stored responses of decoupled models are read when their stream has ended, one stream at a time. An end not confirmed in
its pause is delivered again, to any bridge of the route; in hand here, it is published only once.
"""

import asyncio
import logging
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress

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

    def __init__(
        self,
        *,
        delivery: Queue,
        model: str,
        kind: DeliveryKind,
        render: Callable[[Ending, Sequence[bytes]], RenderedEnd | None],
        post: Callable[[Sequence[RenderedEnd]], None],
        took: Callable[[], None],
    ) -> None:
        self._delivery = delivery
        self._place = (model, PARTITION, kind)
        self._render_one = render
        self._post = post
        self._took = took
        self._in_hand: dict[str, int] = {}  # ends → bytes of their results
        self._in_hand_bytes = 0
        self._confirmed: deque[str] = deque()
        self._news = asyncio.Event()
        self._to_confirm = asyncio.Event()
        self._room = asyncio.Event()
        self._stopping = False
        self._is_taking = True
        self._away = OutageLog(
            logger, "ended requests can't be read", remind_s=REMIND_S, outbox=kind.name.removeprefix("outbox:")
        )

    @property
    def in_hand(self) -> int:
        """Ends that are not confirmed."""
        return len(self._in_hand)

    def wake(self) -> None:
        """Notes that the outbox may have ends."""
        self._news.set()

    def confirm(self, ending_ids: Sequence[str]) -> None:
        """Takes ends with confirmed messages off the outbox."""
        self._confirmed.extend(ending_ids)
        self._to_confirm.set()

    def drop(self, ending_id: str) -> None:
        """Drops an end, which is delivered again."""
        self._remove_ending(ending_id)
        self._to_confirm.set()

    def stop(self) -> None:
        """Stops reading; ends `run` once replies in hand are confirmed."""
        self._stopping = True
        self._news.set()
        self._room.set()
        self._to_confirm.set()

    async def run(self) -> None:
        """Takes and confirms until `stop`."""
        async with asyncio.TaskGroup() as group:
            group.create_task(self._take_all())
            group.create_task(self._confirm_all())

    async def _take_all(self) -> None:
        backoff = Backoff(PACE_S * 10, _LONGEST_PAUSE_S)
        while not self._stopping:
            self._news.clear()
            count = min(MOST_AT_ONCE, MOST_IN_HAND - len(self._in_hand))
            if self._in_hand_bytes >= MOST_BYTES_IN_HAND:
                count = 0
            taken: list[Ending] = []
            if count > 0:
                try:
                    taken = await self._delivery.requests.endings(*self._place, count)
                    backoff.reset()
                    self._away.over()
                except QinferError as error:
                    self._away.failed(error.message)
                    await asyncio.sleep(backoff.next_s())
                    continue
            fresh = [ending for ending in taken if ending.id not in self._in_hand]
            if fresh:
                self._took()
                await self._render([ending for ending in fresh if not _is_stream(ending)])
                for stream in filter(_is_stream, fresh):
                    await self._render_stream(stream)
            if count <= 0 or not taken:
                with suppress(TimeoutError):
                    async with asyncio.timeout(REREAD_S):
                        await self._news.wait()
            if len(taken) < MOST_AT_ONCE:
                await asyncio.sleep(PACE_S)
        self._is_taking = False
        self._to_confirm.set()

    async def _render_stream(self, ending: Ending) -> None:
        """Publishes a stream's end once there is room, or leaves it to a later delivery."""
        while self._in_hand_bytes >= MOST_BYTES_IN_HAND and not self._stopping:
            self._room.clear()
            await self._room.wait()
        if self._stopping:
            return
        place, stored = EntryAddress(*self._place[:2], ending.request_id), list[bytes]()
        try:
            while page := await self._delivery.requests.responses.read(place, len(stored)):
                stored += page
        except QinferError as error:
            self._away.failed(error.message)
            return
        await self._render([ending], stored)

    async def _render(self, endings: Sequence[Ending], stored: Sequence[bytes] = ()) -> None:
        for ending in endings:
            size = len(ending.blob or b"") + sum(len(blob) + _MESSAGE_BYTES for blob in stored)
            self._in_hand[ending.id] = size
            self._in_hand_bytes += size
        rendered = await asyncio.to_thread(lambda: [self._render_one(ending, stored) for ending in endings])
        if silent := [ending.id for ending, each in zip(endings, rendered, strict=True) if each is None]:
            self.confirm(silent)
        self._post([each for each in rendered if each is not None])

    def _remove_ending(self, ending_id: str) -> None:
        self._in_hand_bytes -= self._in_hand.pop(ending_id, 0)
        self._room.set()

    async def _confirm_all(self) -> None:
        backoff = Backoff(PACE_S * 10, _LONGEST_PAUSE_S)
        while self._is_taking or self._in_hand:
            if not self._confirmed:
                self._to_confirm.clear()
                if not self._confirmed:
                    await self._to_confirm.wait()
                continue
            ids = list(self._confirmed)
            try:
                await self._delivery.deliveries.done(*self._place, ids)
            except QinferError as error:
                self._away.failed(error.message)
                await asyncio.sleep(backoff.next_s())
                continue
            backoff.reset()
            for _ in ids:
                self._remove_ending(self._confirmed.popleft())
            if len(self._in_hand) < MOST_AT_ONCE:
                self._news.set()


def _is_stream(ending: Ending) -> bool:
    record = ending.record
    return record is not None and record.decoupled and record.state is RequestState.SUCCEEDED
