"""Blocking reads of streams: `LaneReader` fetches entries of lanes, `ReplyReader` reads one process's reply stream.

A lane reader has the lanes of one partition of a model version, and a connection of its own, for its reads block. A
cancelled `fetch` loses nothing: the reply that comes too late goes back to the lane as a release. A lane that several
tenants use has streams besides itself, of which the script tells; the reader waits for all of them.

A reply reader creates its stream, keeps it alive, delivers, trims, and survives every reconnect. The stream lives a
minute longer than its reader. A reader that finds it gone, because it was away for longer or somebody flushed, makes a
new one.
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from functools import partial
from typing import Any

from qinfer.core.retry import OutageLog
from qinfer.errors import BrokerUnavailable, QinferError
from qinfer.queue import keys
from qinfer.queue.connection import Refused, pack
from qinfer.queue.entries import Entry, Lane, Lease, reply_address, share_of
from qinfer.queue.router import BlockingLink, Router, load_script, run_script

logger = logging.getLogger(__name__)
_FETCH = load_script("lanes/fetch", "ready", "shares", "fair")
_KEEP = load_script("lanes/keep")


_DIVIDED = b"d"
"""The field of an entry whose tenant has just got a stream of its own."""

MAX_BLOCK_S = 0.5
"""The longest blocking read, and so how late a release may be seen: it does not wake a blocked reader."""


RELEASED_EVERY_S = 0.1
"""A busy reader of one lane looks this often for released entries: for new ones alone it needs no script."""


class LaneReader:
    """The fetching half of `Queue`, one for each (model, version, partition), one for its bulk lanes, one for shadows.

    Args:
        router: The way to Redis.
        slot: The partition's cluster slot.
        ensure: Creates lanes and group, where they were deleted.
        give_back: Releases leases without waiting.
        monotonic_s: The clock.

    Attributes:
        shares: The streams of the lanes besides these, as the last look found them.
    """

    def __init__(
        self,
        router: Router,
        slot: int,
        ensure: Callable[[Sequence[Lane]], Awaitable[None]],
        give_back: Callable[[Sequence[Lease]], None],
        monotonic_s: Callable[[], float],
    ) -> None:
        self._router = router
        self._slot = slot
        self._ensure = ensure
        self._give_back = give_back
        self._monotonic_s = monotonic_s
        self._link: BlockingLink = router.blocking(slot, "qinfer-lanes", MAX_BLOCK_S)
        self._was_cancelled = False
        self._took_at_s = float("-inf")
        self._is_busy = False
        self.shares: list[Lane] = []

    async def fetch(self, lanes: Sequence[Lane], consumer: str, count: int, wait_s: float) -> list[Lease]:
        """See `Queue.fetch`."""
        try:
            return await self._fetch(lanes, consumer, count, wait_s)
        except Refused as error:
            if error.kind not in {"NOGROUP", "UNBLOCKED"}:  # a lane was deleted (FLUSHALL); the latter while blocked
                raise
        await self._ensure(lanes)
        self._look_again()
        return await self._fetch(lanes, consumer, count, wait_s)

    async def settle(self) -> None:
        """Waits, for a bounded time, until the entries of a cancelled fetch are released."""
        if self._was_cancelled:
            with suppress(BrokerUnavailable, TimeoutError):
                async with asyncio.timeout(MAX_BLOCK_S):
                    await self._link.call(b"PING")  # answered after the cancelled read
                    await self._router.call(self._slot, b"PING")  # answered after the release that this caused

    async def close(self) -> None:
        """Settles, and closes the connection."""
        await self.settle()
        await self._link.close()

    async def _fetch(self, lanes: Sequence[Lane], consumer: str, count: int, wait_s: float) -> list[Lease]:
        until_s = self._monotonic_s() + wait_s
        while True:
            now_s = self._monotonic_s()
            is_single = len(lanes) == 1 and not self.shares
            if not is_single or wait_s <= 0 or now_s - self._took_at_s >= RELEASED_EVERY_S:
                self._took_at_s = now_s
                leases = await self._take(lanes, consumer, count)
                if leases or self._monotonic_s() >= until_s:
                    return leases
            block_s = min(max(until_s - self._monotonic_s(), 0.0), MAX_BLOCK_S)
            leases = await self._wait(lanes, consumer, count, block_s)
            self._is_busy = len(leases) > 1
            if leases:
                if len(leases) > count:  # COUNT is per stream: several lanes may have got their first entry at once
                    self._give_back(leases[count:])
                return leases[:count]
            if self._monotonic_s() >= until_s:
                return []

    def _look_again(self) -> None:
        """Has the next fetch look for shares before it waits."""
        self.shares, self._took_at_s = [], float("-inf")

    async def _take(self, lanes: Sequence[Lane], consumer: str, count: int) -> list[Lease]:
        """Fetches the available entries without waiting, and looks which shares there are."""
        names = [keys.lane(lane) for lane in lanes]
        call = partial(self._call, lambda reply: leases_of(lanes, consumer, reply[0]))
        taken, divided = await run_script(call, _FETCH, names, keys.GROUP, consumer, keys.RELEASED, count)
        self.shares = [share_of(lanes[number - 1], share) for number, share in divided]
        return leases_of(lanes, consumer, taken)

    async def _wait(self, lanes: Sequence[Lane], consumer: str, count: int, block_s: float) -> list[Lease]:
        """Waits for the first new entry, and fetches up to `count`.

        Redis wakes a blocked reader at the first of many entries that arrive in one write. On a busy lane a second read
        rides along: it is executed when all of them are there, and both replies come together. With several streams it
        always does, and is the script, for COUNT is per stream: one from each could be too many already.
        """
        streams = [*lanes, *self.shares]
        to_leases = partial(self._leases_of_read, streams, consumer)
        block = (b"BLOCK", max(1, int(block_s * 1000)))  # BLOCK 0 would wait for ever
        if count == 1 or (len(streams) == 1 and not self._is_busy):
            most = count if len(streams) == 1 else 1
            return to_leases(await self._call(to_leases, *_read(streams, consumer, most, *block)))
        first: list[Lease] = []
        is_late = False

        def answered(reply: Any) -> None:
            if is_late:
                self._give_back(to_leases(reply))
            elif not isinstance(reply, Exception):  # what is wrong with this read is wrong with the next
                first.extend(to_leases(reply))

        with suppress(BrokerUnavailable):  # `_call` waits for the connection
            self._link.send(pack(_read(streams, consumer, 1, *block)), answered)
        try:
            if len(streams) > 1:
                return first + await self._take(lanes, consumer, count - 1)
            return first + to_leases(await self._call(to_leases, *_read(lanes, consumer, count - 1)))
        except QinferError:
            if not first:
                raise
            return first  # what is wrong shows again at the next read
        except asyncio.CancelledError:
            is_late = True
            self._give_back(first)
            raise

    async def _call(self, to_leases: Callable[[Any], list[Lease]], *command: Any) -> Any:
        def late(reply: Any) -> None:
            if not isinstance(reply, Exception):
                self._give_back(to_leases(reply))

        try:
            return await self._link.call(*command, late=late)
        except asyncio.CancelledError:
            self._was_cancelled = True
            unblock = pack((b"CLIENT", b"UNBLOCK", self._link.client_id))
            with suppress(BrokerUnavailable):
                self._router.send(self._slot, unblock, lambda _: None)
            raise

    def _leases_of_read(self, streams: Sequence[Lane], consumer: str, reply: Any) -> list[Lease]:
        """Makes leases of the reply to XREADGROUP; none of an error, or of nothing."""
        if not isinstance(reply, list):
            return []
        by_key = {keys.lane(lane): lane for lane in streams}
        leases: list[Lease] = []
        for key, entries in reply:
            lane = by_key[key]
            for entry_id, fields in entries:
                leases.append(Lease(_entry(lane, entry_id, fields), consumer, fields[1]))
                if len(fields) > 2 and _DIVIDED in fields[2::2]:
                    self._look_again()
        return leases


def _read(lanes: Sequence[Lane], consumer: str, count: int, *block: Any) -> tuple[Any, ...]:
    names = [keys.lane(lane) for lane in lanes]
    options = (b"GROUP", keys.GROUP, consumer, b"COUNT", count, *block)
    return (b"XREADGROUP", *options, b"STREAMS", *names, *([b">"] * len(names)))


def leases_of(lanes: Sequence[Lane], consumer: str, found: Any, *, suspect: bool = False) -> list[Lease]:
    """Converts the result of a script to leases: (lane's number from 1, id, fields, deliveries, share) per entry."""
    leases: list[Lease] = []
    for number, entry_id, fields, deliveries, share in found:
        lane = share_of(lanes[number - 1], share) if share else lanes[number - 1]
        leases.append(Lease(_entry(lane, entry_id, fields), consumer, fields[1], deliveries, suspect))
    return leases


def _entry(lane: Lane, entry_id: bytes, fields: Sequence[bytes]) -> Entry:
    if len(fields) == 2:  # the frame alone
        return Entry(lane, entry_id.decode())
    more = dict(zip(fields[2::2], fields[3::2], strict=True))
    return Entry(lane, entry_id.decode(), more.get(b"o", b"").decode(), more.get(b"p", b"").decode())


BLOCK_S = 0.5

REPLY_TTL_MS = 60_000
"""How long a reply stream outlives its reader."""

_START = b"0"
_KEEP_EVERY_S = 10.0
_PAUSE_S = 0.1
_READ_COUNT = 100  # blobs are up to 1 MiB each
_TRIM_COUNT = 1000
_TRIM_EVERY_S = 0.1


class ReplyReader:
    """The loop behind `Queue.listen`.

    Args:
        router: The way to Redis.
        owner: Whose replies.
        deliver: Called with each blob.
        monotonic_s: The clock.
        lost: Called when the stream was gone.
    """

    def __init__(
        self,
        router: Router,
        owner: str,
        deliver: Callable[[bytes], None],
        monotonic_s: Callable[[], float],
        lost: Callable[[], None],
    ) -> None:
        self._key = keys.reply(reply_address(owner)).encode()
        self._link: BlockingLink = router.blocking(keys.slot(self._key), "qinfer-replies", BLOCK_S)
        self._deliver = deliver
        self._monotonic_s = monotonic_s
        self._lost = lost
        self._is_made = False
        self._last = _START
        self._untrimmed = 0
        self._trimmed_at = 0.0
        self._kept_at = 0.0
        self._is_idle = True
        self._outage = OutageLog(logger, "reply stream interrupted", "reply stream is read again")

    async def run(self, ready: Callable[[], None] | None) -> None:
        """Reads until cancelled; see `Queue.listen`."""
        while True:
            try:
                await self._keep_alive()
                if ready is not None:
                    ready()
                    ready = None
                await self._read()
                if self._outage.is_out:
                    self._outage.over()
            except QinferError as error:
                self._outage.failed(error.message)
                self._last, self._untrimmed, self._is_idle = _START, 0, True
                await asyncio.sleep(_PAUSE_S)  # `call` waits for a connection, but a refusal comes at once

    async def close(self) -> None:
        """Closes the connection; the stream stays for its time to live."""
        await self._link.close()

    async def _keep_alive(self) -> None:
        """Puts off the stream's end; makes a new one where it is gone, which an idle reader notices at once."""
        now_s = self._monotonic_s()
        if self._is_idle or now_s - self._kept_at >= _KEEP_EVERY_S:
            self._kept_at = now_s
            if await run_script(self._link.call, _KEEP, [self._key], REPLY_TTL_MS):
                self._last, self._untrimmed = _START, 0
                if self._is_made:
                    self._lost()
            self._is_made = True

    async def _read(self) -> None:
        command = (b"XREAD", b"COUNT", _READ_COUNT, b"BLOCK", int(BLOCK_S * 1000), b"STREAMS", self._key, self._last)
        reply = await self._link.call(*command)
        self._is_idle = reply is None
        if reply is not None:
            entries = reply[0][1]
            for _, (field, blob) in entries:
                if field == b"r":
                    self._hand_over(blob)
            self._last = entries[-1][0]
            self._untrimmed += len(entries)
        now_s = self._monotonic_s()
        if self._untrimmed and (self._untrimmed >= _TRIM_COUNT or now_s - self._trimmed_at >= _TRIM_EVERY_S):
            self._trimmed_at = now_s
            self._untrimmed = 0
            self._trim()

    def _hand_over(self, blob: bytes) -> None:
        try:
            self._deliver(blob)
        except Exception:  # the loop boundary: one bad blob must not cost the others' callers their answers
            logger.exception("a reply could not be delivered")

    def _trim(self) -> None:
        """Deletes entries that were read, in one write with the next read."""
        milliseconds, _, sequence = self._last.partition(b"-")
        first_kept = b"%b-%d" % (milliseconds, int(sequence) + 1)
        self._link.send(pack((b"XTRIM", self._key, b"MINID", first_kept)), lambda _: None)
