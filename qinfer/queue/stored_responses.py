"""Responses of asynchronous requests to decoupled models: stored as they come, and readable from any index.

The worker that holds the entry appends; the final response settles the request (`qinfer.queue.requests`). The
guarantees, each with a test in `tests/contract/requests/`:

1. Response *i* is stored only after exactly *i* others, so that none is doubled or missing.
2. Only the holder of the entry appends, and only until the request ends.
3. An execution continues the responses of an earlier one only if its model repeats them exactly.
4. The responses of a request have a byte limit.
"""

from collections.abc import Callable, Sequence
from functools import partial

from qinfer.errors import PayloadTooLarge, StreamBroken
from qinfer.queue import keys
from qinfer.queue.connection import Argument, packable
from qinfer.queue.entries import EntryAddress, Lease
from qinfer.queue.router import Call, Router, load_script, run_script
from qinfer.queue.values import LARGE_BYTES, Values
from qinfer.tensors import Bytes

TOO_MUCH_STORED = (
    "the results that the tenant has stored take as much of the queue's memory or disk as is free; read them and "
    "DELETE their requests, or wait until they expire"
)

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
