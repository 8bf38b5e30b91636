"""Responses while a request executes: those of stored requests to decoupled models, and marks of entries.

    <lane>~executing        of lanes with a limit
    …:sent:<lane>:<entry>   a response of the entry's stream has left: whichever worker reclaims it does not execute it
    …:cancels               the entries that `Queue.cancel` removed while a worker held them

Responses are stored as they come, and readable from any index. The worker that holds the entry appends; the final
response settles the request (`qinfer.queue.requests`). The guarantees, each with a test in `tests/contract/requests/`:

1. Response *i* is stored only after exactly *i* others, so that none is doubled or missing.
2. Only the holder of the entry appends, and only until the request ends.
3. An execution continues the responses of an earlier one only if its model repeats them exactly.
4. The responses of a request have a byte limit.
"""

from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from typing import Any

from qinfer.errors import BrokerUnavailable, PayloadTooLarge, StreamBroken
from qinfer.queue import keys
from qinfer.queue.connection import Argument, CommandRefused, pack, packable
from qinfer.queue.entries import Entry, EntryAddress, Lane, Lease, by_lane, grouped, owner_of
from qinfer.queue.router import Call, Router, load_script, run_script, ttl_ms
from qinfer.queue.values import LARGE_BYTES, Values
from qinfer.tensors import Bytes

TOO_MUCH_STORED = (
    "the results that the tenant has stored take as much of the queue's memory or disk as is free; read them and "
    "DELETE their requests, or wait until they expire"
)

_MOST_AT_ONCE = 1000

_BEGIN = load_script("lanes/begin", "holder")
_APPEND = load_script("requests/append", "holder", "now_ms", "requests/stored")
_RESPONSES = load_script("requests/responses")


class StoredResponses:
    """The stored responses; `tell` notifies reply addresses of new responses."""

    def __init__(self, router: Router, values: Values, tell: Callable[[str, Sequence[EntryAddress]], None]) -> None:
        self._router = router
        self._values = values
        self._tell = tell

    async def append(
        self, lease: Lease, request_id: str, index: int, blobs: Sequence[Bytes], *, resumes: bool, max_bytes: int
    ) -> bool:
        """Stores responses, except those that are stored already; returns whether the caller may go on.

        It may not once the request has ended, or another worker has its lease. Raises `StreamBroken` if an earlier
        execution's responses can't be continued, or some are lost, and `PayloadTooLarge` above `max_bytes` for all
        responses of the request; neither stores any response.
        """
        entry = lease.entry
        address = EntryAddress(entry.lane.model, entry.lane.partition, request_id)
        arguments: list[Argument] = [
            *(keys.prefix(address.model, address.partition), keys.GROUP, lease.consumer, lease.deliveries),
            *(keys.lane(entry.lane), entry.entry_id, int(resumes), max_bytes, index),
            *map(packable, blobs),
        ]
        call = self._call_for(address, sum(map(len, blobs)))
        what, count, watchers = await run_script(call, _APPEND, [_record(address), _responses(address)], *arguments)
        if what == b"broken":
            raise StreamBroken(
                f"the worker that executed the request ended after {count} responses; send the request again"
            )
        if what == b"full":
            raise PayloadTooLarge(
                f"the responses of the request take more than {max_bytes} bytes, after {count} of them; ask for fewer, "
                "read them from an inference that is not stored, or raise QINFER_LIMITS__STREAM_RESULT_BYTES"
            )
        if what == b"over":
            raise PayloadTooLarge(TOO_MUCH_STORED)
        for reply_to in watchers.decode().split():
            self._tell(reply_to, [address])
        return bool(what == b"stored")

    async def read(self, address: EntryAddress, index: int) -> list[bytes]:
        """Returns responses from `index` on, at least one if there is any, and about 1 MiB."""
        name = _responses(address)
        found = await run_script(self._call_for(address, 0), _RESPONSES, [name], index, LARGE_BYTES)
        if isinstance(found, int):
            (response,) = await self._call_for(address, found)(b"LRANGE", name, index, index)
            return [response]
        return list(found)

    def _call_for(self, address: EntryAddress, nbytes: int) -> Call:
        slot = keys.slot(_responses(address))
        if nbytes <= LARGE_BYTES:
            return partial(self._router.call, slot)
        return partial(self._values.call_large, slot, nbytes=nbytes)


def _record(address: EntryAddress) -> bytes:
    return keys.request(address.model, address.partition, address.id).encode()


def _responses(address: EntryAddress) -> bytes:
    return keys.stored_responses(address.model, address.partition, address.id).encode()


class StreamMarks:
    """The marks of entries."""

    def __init__(self, router: Router) -> None:
        self._router = router

    def mark_begun(self, leases: Sequence[Lease]) -> None:
        """Marks entries as executing, for their lane's limit; never blocks."""
        for (lane, consumer, _), group in grouped(leases, owner_of):
            ids = [lease.entry.entry_id for lease in group]
            for start in range(0, len(ids), _MOST_AT_ONCE):
                self._mark_in_lane(lane, consumer, ids[start : start + _MOST_AT_ONCE])

    def _mark_in_lane(self, lane: Lane, consumer: str, ids: Sequence[str]) -> None:
        slot = keys.lane_slot(lane)
        words: tuple[Argument, ...] = (1, keys.lane(lane), keys.GROUP, consumer, *ids)

        def answered(reply: Any) -> None:
            if type(reply) is CommandRefused and reply.kind == "NOSCRIPT":
                self._send_command(slot, (b"EVAL", _BEGIN.text, *words), lambda _: None)

        self._send_command(slot, (b"EVALSHA", _BEGIN.sha, *words), answered)

    def _send_command(self, slot: int, words: tuple[Argument, ...], answered: Callable[[Any], None]) -> None:
        with suppress(BrokerUnavailable):
            self._router.send(slot, pack(words), answered)

    async def mark_sent(self, entry: Entry, ttl_s: float) -> None:
        """Marks an entry before a response is sent, for `ttl_s` seconds."""
        key = keys.sent(entry.lane, entry.entry_id)
        await self._router.call(keys.lane_slot(entry.lane), b"SET", key, b"", b"PX", ttl_ms(ttl_s))

    async def was_sent(self, entry: Entry) -> bool:
        """Tells whether a response may have been sent."""
        slot, key = keys.lane_slot(entry.lane), keys.sent(entry.lane, entry.entry_id)
        return bool(await self._router.call(slot, b"EXISTS", key))

    async def remove_marks(self, entries: Sequence[Entry]) -> None:
        """Removes the marks of ended entries."""
        for lane, group in by_lane(entries):
            await self._router.call(keys.lane_slot(lane), b"UNLINK", *[keys.sent(lane, one.entry_id) for one in group])

    async def list_cancelled(self, model: str, partition: int, after: str) -> list[tuple[str, Lane, str]]:
        """Returns mark, lane and id of the last thousand cancelled entries of workers.

        `after` is the last known mark, or an instant in ms of Redis' time.
        """
        key = keys.cancels(model, partition)
        found = await self._router.call(keys.slot(key), b"XRANGE", key, f"({after}", b"+")
        return [_cancelled(model, partition, mark, fields) for mark, fields in found]


def _cancelled(model: str, partition: int, mark: bytes, fields: Sequence[bytes]) -> tuple[str, Lane, str]:
    version, name, entry_id = fields[1].decode().split(":")
    return mark.decode(), Lane(model, int(version), name, partition), entry_id
