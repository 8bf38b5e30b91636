"""Blocking reads of streams: lanes (`LaneReader`), tickets of sequences (`TicketReader`), replies (`ReplyReader`).

A lane reader has its own connection, because its reads block. A reply that comes after a cancelled `fetch` is released
to the lane. On idle lanes the reader sleeps (`doorbell`): its blocking read outlives the `fetch`, and the next one
waits for it; an entry that arrives in between is released after a moment.

A ticket reader takes nothing: every ticket left ends the next read at once.

A reply stream outlives its reader by a minute; a reader whose stream is gone creates a new one.
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Iterable, Sequence
from contextlib import suppress
from functools import partial
from typing import Any, NamedTuple

from qinfer.core.retry import OutageLog
from qinfer.errors import BrokerUnavailable, QinferError
from qinfer.queue import keys
from qinfer.queue.connection import CommandRefused, pack
from qinfer.queue.doorbell import Doorbell, place_of
from qinfer.queue.entries import Entry, Lane, Lease, reply_address, share_of
from qinfer.queue.router import BlockingLink, Router, load_script, run_script

logger = logging.getLogger(__name__)
_FETCH = load_script("lanes/fetch", "holder", "shares", "fair")
_KEEP = load_script("lanes/keep")


_DIVIDED = b"d"

MAX_BLOCK_S = 0.5
"""The longest blocking read, and so the longest delay of a release, which ends no read."""


RELEASED_EVERY_S = 0.1
"""Seconds between two checks for released entries, by a busy reader of a single lane."""

AWAKE_S = 5.0
"""The time without entries after which a reader sleeps."""

_LIMBO_S = 0.05
"""Seconds for which the result of a sleeping read waits for a fetch."""


class _Sleep(NamedTuple):
    task: asyncio.Task[list[Lease]]
    lanes: tuple[Lane, ...]
    consumer: str


class LaneReader:
    """The fetching half of `Queue`; without a `bell` it never sleeps."""

    def __init__(
        self,
        router: Router,
        slot: int,
        ensure: Callable[[Sequence[Lane]], Awaitable[None]],
        give_back: Callable[[Sequence[Lease]], None],
        monotonic_s: Callable[[], float],
        bell: Doorbell | None,
    ) -> None:
        self.place = b""
        self._bell = bell
        self._sleep: _Sleep | None = None
        self._is_awaited = False
        self._got_at_s = self._stirred_at_s = monotonic_s()
        self._rings = 0
        self._looked = -1
        """The number of rings before the last read of the lanes, if that read found nothing."""
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

    @property
    def stirred_at_s(self) -> float:
        """The last event that may have left leases without a renewing worker."""
        return max(self._got_at_s, self._stirred_at_s)

    async def fetch(self, lanes: Sequence[Lane], consumer: str, count: int, wait_s: float) -> list[Lease]:
        """Fetches as `Queue.fetch` does."""
        if not self.place and self._bell is not None:
            self.place = place_of(lanes[0])
            self._bell.join(self)
            self._stir()
        try:
            leases = await self._fetch(lanes, consumer, count, wait_s)
        except CommandRefused as error:
            self._distrust()
            if error.kind not in {"NOGROUP", "UNBLOCKED"}:  # a lane was deleted (FLUSHALL); the latter while blocked
                raise
            leases = await self._fetch_again(lanes, consumer, count, wait_s)
        except BaseException:
            self._distrust()
            raise
        if leases:
            self._got_at_s = self._monotonic_s()
        return leases

    def ring(self) -> None:
        """Ends the sleeping read, because there may be entries."""
        self._rings += 1
        self._took_at_s = float("-inf")
        self._stir()
        if self._sleep is not None:
            self._link.rouse(self._sleep.task.done)

    async def wait_for_release(self) -> None:
        """Waits, for a bounded time, for the release of a cancelled fetch's entries."""
        if self._bell is not None:
            self._bell.remove_sleeper(self)
        self._end_sleep()
        if self._was_cancelled:
            with suppress(BrokerUnavailable, TimeoutError):
                async with asyncio.timeout(MAX_BLOCK_S):
                    await self._link.call(b"PING")  # answered after the cancelled read
                    await self._router.call(self._slot, b"PING")  # and after the release

    async def close(self) -> None:
        """Settles, and closes the connection."""
        await self.wait_for_release()
        await self._link.close()

    async def _fetch_again(self, lanes: Sequence[Lane], consumer: str, count: int, wait_s: float) -> list[Lease]:
        await self._ensure(lanes)
        self._look_again()
        try:
            return await self._fetch(lanes, consumer, count, wait_s)
        except BaseException:
            self._distrust()
            raise

    async def _fetch(self, lanes: Sequence[Lane], consumer: str, count: int, wait_s: float) -> list[Lease]:
        now_s = self._monotonic_s()
        until_s = now_s + wait_s
        if self._sleep is not None:
            slept = await self._sleep_on(self._sleep, lanes, consumer, until_s)
            if slept or self._sleep is not None:
                return self._at_most(slept, count)
            now_s = self._monotonic_s()
        while True:
            is_single = len(lanes) == 1 and not self.shares
            if not is_single or wait_s <= 0 or now_s - self._took_at_s >= RELEASED_EVERY_S:
                self._took_at_s = now_s
                leases = await self._fetch_available(lanes, consumer, count)
                if leases or (now_s := self._monotonic_s()) >= until_s:
                    return leases
            if now_s - self._got_at_s >= AWAKE_S and self._may_sleep():
                leases = await self._sleep_on(self._fall_asleep(lanes, consumer, count), lanes, consumer, until_s)
            else:
                block_s = min(max(until_s - now_s, 0.0), MAX_BLOCK_S)
                leases = await self._wait(lanes, consumer, count, block_s)
                self._is_busy = len(leases) > 1
            if leases or (now_s := self._monotonic_s()) >= until_s:
                return leases if len(leases) <= count else self._at_most(leases, count)

    def _at_most(self, leases: list[Lease], count: int) -> list[Lease]:
        """Gives back what exceeds `count`: COUNT is per stream, and several lanes may each have returned an entry."""
        if len(leases) > count:
            self._give_back(leases[count:])
        return leases[:count]

    def _distrust(self) -> None:
        """Runs the script next and has leases reclaimed, because a lost reply may have had entries."""
        self._looked, self._took_at_s = -1, float("-inf")
        self._stir()

    def _stir(self) -> None:
        self._stirred_at_s = self._monotonic_s()

    def _may_sleep(self) -> bool:
        return self._bell is not None and self._bell.is_armed and self._looked == self._rings

    def _fall_asleep(self, lanes: Sequence[Lane], consumer: str, count: int) -> _Sleep:
        assert self._bell is not None
        block_s = self._bell.sleep_s()
        self._link.expect(block_s)
        self._is_busy = False
        task = asyncio.create_task(self._wait(lanes, consumer, count, block_s), name="sleeping read")
        task.add_done_callback(self._slept)
        self._sleep = _Sleep(task, tuple(lanes), consumer)
        return self._sleep

    async def _sleep_on(self, sleep: _Sleep, lanes: Sequence[Lane], consumer: str, until_s: float) -> list[Lease]:
        """Ends the read if this fetch has other lanes or another consumer."""
        is_same, left_s = (sleep.lanes, sleep.consumer) == (tuple(lanes), consumer), until_s - self._monotonic_s()
        is_over = not is_same or left_s <= 0
        if is_over:
            self._link.rouse(sleep.task.done)
        self._is_awaited = True
        try:
            await asyncio.wait([sleep.task], timeout=None if is_over else left_s)
        except asyncio.CancelledError:
            self._end_sleep()
            raise
        finally:
            self._is_awaited = False
        if not sleep.task.done():
            return []
        self._sleep = None
        self._link.expect(MAX_BLOCK_S)
        try:
            leases = sleep.task.result()
        except BrokerUnavailable:  # the next script reports a lasting failure
            self._distrust()
            return []
        if leases and not is_same:
            self._give_back(leases)
            return []
        return leases

    def _slept(self, task: asyncio.Task[list[Lease]]) -> None:
        """Releases, after a moment, the entries that arrived between two fetches."""
        if task.cancelled():
            return
        task.exception()  # a closing loop would print it
        if not self._is_awaited:
            asyncio.get_running_loop().call_later(_LIMBO_S, self._bounce, task)

    def _bounce(self, task: asyncio.Task[list[Lease]]) -> None:
        if self._sleep is not None and self._sleep.task is task and not self._is_awaited:
            self._sleep = None
            self._link.expect(MAX_BLOCK_S)
            if task.exception() is None and task.result():
                self._give_back(task.result())

    def _end_sleep(self) -> None:
        sleep, self._sleep = self._sleep, None
        if sleep is None:
            return
        if sleep.task.done():
            if not sleep.task.cancelled() and sleep.task.exception() is None and sleep.task.result():
                self._give_back(sleep.task.result())
        else:
            sleep.task.cancel()
        self._link.expect(MAX_BLOCK_S)

    def _look_again(self) -> None:
        self.shares, self._took_at_s = [], float("-inf")

    async def _fetch_available(self, lanes: Sequence[Lane], consumer: str, count: int) -> list[Lease]:
        names, rings = [keys.lane(lane) for lane in lanes], self._rings
        call = partial(self._call_for_leases, lambda reply: leases_of(lanes, consumer, reply[0]))
        taken, divided = await run_script(call, _FETCH, names, keys.GROUP, consumer, keys.RELEASED, count)
        self.shares = [share_of(lanes[number - 1], share) for number, share in divided]
        self._looked = -1 if taken else rings
        self._note_division(lanes[0], (fields for _, _, fields, *_ in taken))
        return leases_of(lanes, consumer, taken)

    async def _wait(self, lanes: Sequence[Lane], consumer: str, count: int, block_s: float) -> list[Lease]:
        """Waits for the first new entry, and fetches up to `count`.

        Redis wakes a blocked reader at the first of many entries of one write: a pipelined second read finds them all.
        COUNT is per stream, so that with several the second read is the script.
        """
        streams = [*lanes, *self.shares]
        to_leases = partial(self._leases_of_read, streams, consumer)
        block = (b"BLOCK", max(1, int(block_s * 1000)))  # BLOCK 0 would wait for ever
        if count == 1 or (len(streams) == 1 and not self._is_busy):
            most = count if len(streams) == 1 else 1
            return to_leases(
                await self._call_for_leases(to_leases, *_xreadgroup_command(streams, consumer, most, *block))
            )
        first: list[Lease] = []
        is_late = False

        def answered(reply: Any) -> None:
            if isinstance(reply, Exception):
                return  # the next read meets the error again
            if is_late:
                self._give_back(to_leases(reply))
            else:
                first.extend(to_leases(reply))

        with suppress(BrokerUnavailable):  # `_call` waits for the connection
            self._link.send(pack(_xreadgroup_command(streams, consumer, 1, *block)), answered)
        try:
            if len(streams) > 1:
                return first + await self._fetch_available(lanes, consumer, count - 1)
            return first + to_leases(
                await self._call_for_leases(to_leases, *_xreadgroup_command(lanes, consumer, count - 1))
            )
        except QinferError:
            if not first:
                raise
            return first  # the next read meets the error again
        except asyncio.CancelledError:
            is_late = True
            self._give_back(first)
            raise

    async def _call_for_leases(self, to_leases: Callable[[Any], list[Lease]], *command: Any) -> Any:
        answered = False

        def late(reply: Any) -> None:
            nonlocal answered
            answered = True
            if not isinstance(reply, Exception):
                self._give_back(to_leases(reply))

        try:
            return await self._link.call(*command, late=late)
        except asyncio.CancelledError:
            self._was_cancelled, client_id = True, self._link.client_id
            self._link.rouse(lambda: answered or self._link.client_id != client_id)
            raise

    def _leases_of_read(self, streams: Sequence[Lane], consumer: str, reply: Any) -> list[Lease]:
        if not isinstance(reply, list):
            return []
        by_key = {keys.lane(lane): lane for lane in streams}
        leases: list[Lease] = []
        for key, entries in reply:
            lane = by_key[key]
            for entry_id, fields in entries:
                leases.append(Lease(_entry(lane, entry_id, fields), consumer, fields[1]))
                if len(fields) > 2 and self._note_division(lane, [fields]):
                    self._look_again()
        return leases

    def _note_division(self, lane: Lane, entries: Iterable[Sequence[bytes]]) -> bool:
        is_news = any(len(fields) > 2 and _DIVIDED in fields[2::2] for fields in entries)
        if is_news and self._bell is not None:
            self._bell.ring(lane)
        return is_news


def _xreadgroup_command(lanes: Sequence[Lane], consumer: str, count: int, *block: Any) -> tuple[Any, ...]:
    names = [keys.lane(lane) for lane in lanes]
    options = (b"GROUP", keys.GROUP, consumer, b"COUNT", count, *block)
    return (b"XREADGROUP", *options, b"STREAMS", *names, *([b">"] * len(names)))


def leases_of(lanes: Sequence[Lane], consumer: str, found: Any, *, suspect: bool = False) -> list[Lease]:
    """Converts a script's result; per entry (lane's number from 1, id, fields, deliveries, share)."""
    leases: list[Lease] = []
    for number, entry_id, fields, deliveries, share in found:
        lane = share_of(lanes[number - 1], share) if share else lanes[number - 1]
        leases.append(Lease(_entry(lane, entry_id, fields), consumer, fields[1], deliveries, suspect))
    return leases


def _entry(lane: Lane, entry_id: bytes, fields: Sequence[bytes]) -> Entry:
    if len(fields) == 2:
        return Entry(lane, entry_id.decode())
    more = dict(zip(fields[2::2], fields[3::2], strict=True))
    return Entry(lane, entry_id.decode(), more.get(b"o", b"").decode(), more.get(b"p", b"").decode())


class TicketReader:
    """The waiting half of `Sequences`, for one worker and model version.

    The bell rings only when a connection broke: tickets end the read.
    """

    def __init__(self, link: BlockingLink, bell: Doorbell, own: bytes, waiting: Sequence[bytes], place: bytes) -> None:
        self.place = place
        self._link = link
        self._bell = bell
        self._own = own
        self._waiting = waiting
        self._reading: object | None = None
        self.is_asleep = False

    async def wait(self, after: str, wait_s: float, *, has_slots: bool) -> "FoundEntries":
        """Waits up to `wait_s` for steps or, with free slots, for sequences to own."""
        return await self._wait_for_entry(after, min(wait_s, MAX_BLOCK_S), has_slots=has_slots)

    async def sleep(self, after: str, *, has_slots: bool) -> "FoundEntries":
        """Waits as `wait` does, until the bell or for the doorbell's long sleep."""
        self._bell.join(self)
        block_s = self._bell.sleep_s() if self._bell.is_armed else MAX_BLOCK_S
        return await self._wait_for_entry(after, block_s, has_slots=has_slots)

    def read_for(self, own: bytes) -> None:
        """Waits for entries of this lane from now on."""
        self._own = own

    def ring(self) -> None:
        """Ends the sleeping read."""
        if (reading := self._reading) is not None:
            self._link.rouse(lambda: self._reading is not reading)

    async def close(self) -> None:
        """Closes the connection."""
        self._bell.remove_sleeper(self)
        await self._link.close()

    async def _wait_for_entry(self, after: str, block_s: float, *, has_slots: bool) -> "FoundEntries":
        others = self._waiting if has_slots else ()
        ids = [after or "0", *["0"] * len(others)]
        self._link.expect(block_s)
        self._reading = object()
        self.is_asleep = block_s > MAX_BLOCK_S
        try:
            block = (b"BLOCK", max(1, int(block_s * 1000)))
            found = await self._link.call(b"XREAD", b"COUNT", 1, *block, b"STREAMS", self._own, *others, *ids)
        finally:
            self._reading, self.is_asleep = None, False
        names = [name for name, _ in found or ()]
        return FoundEntries(self._own in names, any(name in others for name in names))


class FoundEntries(NamedTuple):
    """Whether a worker's lane has `steps`, and whether `sequences` wait for an owner."""

    steps: bool
    sequences: bool


REPLY_TTL_MS = 60_000
"""How long a reply stream outlives its reader, in milliseconds."""

_START = b"0"
_KEEP_EVERY_S = 10.0
_PAUSE_S = 0.1
_READ_COUNT = 100  # blobs are up to 1 MiB each
_TRIM_COUNT = 1000
_TRIM_EVERY_S = 0.1


class ReplyReader:
    """The loop behind `Queue.listen`."""

    def __init__(
        self,
        router: Router,
        owner: str,
        deliver: Callable[[bytes], None],
        monotonic_s: Callable[[], float],
        lost: Callable[[], None],
    ) -> None:
        self._key = keys.reply(reply_address(owner)).encode()
        self._link: BlockingLink = router.blocking(keys.slot(self._key), "qinfer-replies", MAX_BLOCK_S)
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
        """Reads until cancelled, as `Queue.listen` says."""
        while True:
            try:
                await self._keep_alive()
                if ready is not None:
                    ready()
                    ready = None
                await self._read_replies()
                if self._outage.is_out:
                    self._outage.over()
            except QinferError as error:
                self._outage.failed(error.message)
                self._last, self._untrimmed, self._is_idle = _START, 0, True
                await asyncio.sleep(_PAUSE_S)  # a refusal comes at once, unlike a lost connection

    async def close(self) -> None:
        """Closes the connection; the stream expires."""
        await self._link.close()

    async def _keep_alive(self) -> None:
        """Extends or recreates the stream; an idle reader does so before each read."""
        now_s = self._monotonic_s()
        if self._is_idle or now_s - self._kept_at >= _KEEP_EVERY_S:
            self._kept_at = now_s
            if await run_script(self._link.call, _KEEP, [self._key], REPLY_TTL_MS):
                self._last, self._untrimmed = _START, 0
                if self._is_made:
                    self._lost()
            self._is_made = True

    async def _read_replies(self) -> None:
        block = (b"BLOCK", int(MAX_BLOCK_S * 1000))
        reply = await self._link.call(b"XREAD", b"COUNT", _READ_COUNT, *block, b"STREAMS", self._key, self._last)
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
        except Exception:  # one bad blob must not cost others their answers
            logger.exception("a reply could not be delivered")

    def _trim(self) -> None:
        milliseconds, _, sequence = self._last.partition(b"-")
        first_kept = b"%b-%d" % (milliseconds, int(sequence) + 1)
        self._link.send(pack((b"XTRIM", self._key, b"MINID", first_kept)), lambda _: None)
