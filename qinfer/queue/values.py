"""Byte strings beside the streams: payloads and results, up to 512 MB in Redis, or of any size in an object store.

Values above `LARGE_BYTES` use a connection of their own, so that small commands never wait. There and to an object
store, tenants take turns: only `MOVED_AT_ONCE_BYTES` travel at a time, so that another tenant's next value waits only
for these, and a larger value travels alone. For values above its threshold Redis holds a reference: a hash with the
fields `v`, `name` and `size`; bytes are always a string.
"""

import asyncio
import re
import secrets
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Sequence
from contextlib import asynccontextmanager, suppress
from enum import Enum, auto
from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec

from qinfer.errors import BrokerUnavailable, CorruptEntry, PayloadTooLarge
from qinfer.queue import keys
from qinfer.queue.connection import pack, packable
from qinfer.queue.router import BlockingLink, Router, Script, load_script
from qinfer.tensors import Bytes

if TYPE_CHECKING:  # the driver is loaded only with a store
    from qinfer.queue.object_store import ObjectStore

LARGE_BYTES = 2**20
"""Larger values are written in pieces of this size."""

MAX_BYTES = 512 * 2**20
"""The longest string of Redis."""

_STAGED_TTL_S = 600.0
_TRANSFER_S = 55.0  # a large value may take longer than a command by this

Room = Callable[[int], Awaitable[None]]
"""Waits for this much memory before a read."""

REFERENCE_VERSION = 1
"""An older qinfer refuses newer references."""

_READ = load_script("values/read")
_REFER = load_script("values/refer", "drop")
_REMOVE = load_script("values/remove", "drop")
_OWNER = re.compile(rb"\{([^}]*)\}")
_NO_STORE = "the tensors are in a payload store, and this process knows none: set QINFER_LIMITS__PAYLOAD_URL"
_TORN = "a large value was lost while it was written: Redis restarted or failed over; send the request again"
_LOST = "the tensors are not in the payload store any more: they were deleted there before their time"

MOVED_AT_ONCE_BYTES = 64 * 2**20

_Waiting = tuple[int, asyncio.Future[None]]


class ValueKind(Enum):
    """The kinds of values; an answer has one reader, which does not outlive a power loss."""

    PAYLOAD = auto()
    RESULT = auto()
    ANSWER = auto()


class NoSpace(BrokerUnavailable):
    """The payload store is full."""


class Reference(msgspec.Struct, frozen=True):
    """The object that holds a value."""

    name: str
    size: int
    version: int = REFERENCE_VERSION

    @property
    def fields(self) -> tuple[bytes | str | int, ...]:
        """The hash in Redis."""
        return (b"v", self.version, b"name", self.name, b"size", self.size)


class StagedValue(NamedTuple):
    """A value for scripts: small values are an argument, large values are staged, to be renamed."""

    place: bytes
    data: Bytes
    staged: str


def given(name: str, data: Bytes) -> StagedValue:
    """Returns a value for a script that stores it under `name`."""
    return StagedValue(b"given" if data else b"none", data, keys.staged(name, ""))


class Values:
    """Stores and reads byte strings; each key expires."""

    def __init__(self, router: Router, *, is_cluster: bool) -> None:
        self._router = router
        self._is_cluster = is_cluster
        self._links: dict[int, BlockingLink] = {}
        self._transfers = Transfers()
        self.objects: ObjectStore | None = None

    def is_apart(self, size: int) -> bool:
        """Tells whether a value is stored with `set` instead of passed to a script."""
        return size > LARGE_BYTES or self.is_object(size)

    def is_object(self, size: int) -> bool:
        """Tells whether a value goes to the object store."""
        return self.objects is not None and size > self.objects.min_bytes

    async def set(  # noqa: PLR0913 - keywords: what is to be known of a value
        self,
        slot: int,
        key: str | bytes,
        value: Bytes,
        ttl_s: float,
        *,
        later_s: float = 0.0,
        tenant: str = "",
        kind: ValueKind = ValueKind.PAYLOAD,
        in_redis: bool = False,
    ) -> None:
        """Stores a value for `ttl_s` seconds, `later_s` more if a script renames it; on an error it may be stored."""
        ttl_ms = max(1, int(ttl_s * 1000))
        if self.objects is not None and self.is_object(len(value)) and not in_redis:
            try:
                async with self._transfers.turn(tenant, len(value)):
                    reference = await self.objects.write(_owner(key), value, ttl_s + later_s, kind)
            except NoSpace:
                if kind is not ValueKind.ANSWER:
                    raise
            else:
                self.delete_objects(await self._run_script(slot, _REFER, key, ttl_ms, *reference.fields))
                return
        if len(value) > MAX_BYTES:
            raise PayloadTooLarge(f"{len(value)} bytes in one piece are more than the {MAX_BYTES} that the queue takes")
        if len(value) <= LARGE_BYTES:
            await self._router.call(slot, b"SET", key, packable(value), b"PX", ttl_ms)
            return
        whole = keys.staged(key if isinstance(key, str) else key.decode(), secrets.token_hex(8))
        await self._write_large(slot, whole, value, _STAGED_TTL_S, tenant)
        await self._router.call(slot, b"RENAME", whole, key)
        await self._router.call(slot, b"PEXPIRE", key, ttl_ms)

    async def stage(
        self, name: str, value: Bytes, kept_s: float, tenant: str = "", kind: ValueKind = ValueKind.RESULT
    ) -> StagedValue:
        """Returns a value for scripts; a large one is staged, and kept for `kept_s` after its renaming."""
        if not self.is_apart(len(value)):
            return given(name, value)
        staged, slot = keys.staged(name, secrets.token_hex(8)), keys.slot(name)
        if self.is_object(len(value)) or len(value) > MAX_BYTES:
            await self.set(slot, staged, value, _STAGED_TTL_S, later_s=kept_s, tenant=tenant, kind=kind)
        else:
            await self._write_large(slot, staged, value, _STAGED_TTL_S, tenant)
        return StagedValue(b"staged", b"", staged)

    async def get(self, slot: int, key: str | bytes, tenant: str = "", room: Room | None = None) -> bytes | None:
        """Returns a value, awaiting `room` before a large one; `CorruptEntry` = only its object is gone."""
        value, _ = await self._read_value(slot, key, tenant, room)
        return value

    async def take(self, slot: int, key: str | bytes, tenant: str = "", room: Room | None = None) -> bytes | None:
        """Returns a value as `get` does, and removes it."""
        value, reference = await self._read_value(slot, key, tenant, room)
        if value is not None:
            with suppress(BrokerUnavailable):  # it expires
                self._router.send(slot, pack((b"UNLINK", key)), lambda _: None)
                if reference is not None and self.objects is not None:
                    self.objects.delete([reference.name])
        return value

    async def remove(self, slot: int, key: str | bytes) -> None:
        """Removes a value; on an error it may exist."""
        self.delete_objects(await self._run_script(slot, _REMOVE, key))

    def delete_objects(self, names: Iterable[bytes]) -> None:
        """Schedules the deletion of objects that scripts no longer reference."""
        if names and self.objects is not None:
            self.objects.delete(name.decode() for name in names)

    async def wait_for_deletions(self) -> None:
        """Waits for the scheduled deletions."""
        if self.objects is not None:
            await self.objects.wait_for_deletions()

    async def reference(self, slot: int, key: str | bytes) -> Reference | None:
        """Returns the reference of a value; `None` for bytes."""
        found = await self._run_script(slot, _READ, key, 0)
        return _reference(found) if isinstance(found, list) else None

    async def copy_object(self, reference: Reference, key: str | bytes, kept_s: float) -> Reference | None:
        """Copies an object for another value, kept for `kept_s` seconds; `None` if gone."""
        return await self._store().copy(reference, _owner(key), kept_s)

    async def read_object(self, reference: Reference) -> bytes | None:
        """Returns an object; `None` = gone, `CorruptEntry` = changed."""
        return await self._store().read(reference)

    async def sweep(self) -> int:
        """Deletes some expired objects; returns how many."""
        return await self.objects.sweep() if self.objects is not None else 0

    async def free_bytes(self) -> int | None:
        """Returns `ObjectStore.free_bytes`; `None` without one."""
        return await self.objects.free_bytes() if self.objects is not None else None

    async def close(self) -> None:
        """Closes the object store."""
        if self.objects is not None:
            await self.objects.close()

    async def _read_value(
        self, slot: int, key: str | bytes, tenant: str, room: Room | None
    ) -> tuple[bytes | None, Reference | None]:
        found = await self._run_script(slot, _READ, key, LARGE_BYTES)
        for _ in range(2):
            if room is not None and not isinstance(found, bytes | None):
                await room(found if isinstance(found, int) else _reference(found).size)
            if isinstance(found, int):
                return await self.call_large(slot, b"GET", key, nbytes=found, tenant=tenant), None
            if not isinstance(found, list):
                return found, None
            reference = _reference(found)
            async with self._transfers.turn(tenant, reference.size):
                data = await self._store().read(reference)
            if data is not None:
                return data, reference
            before = found
            found = await self._run_script(slot, _READ, key, LARGE_BYTES)
            if found == before:
                break  # else it was finished meanwhile, or stored again
        raise CorruptEntry(_LOST)

    def _store(self) -> "ObjectStore":
        if self.objects is None:
            raise BrokerUnavailable(_NO_STORE)
        return self.objects

    async def _run_script(self, slot: int, script: Script, key: str | bytes, *arguments: Any) -> Any:
        name = key if isinstance(key, bytes) else key.encode()
        return await self._router.run(slot, script, [name], *arguments)

    async def _write_large(self, slot: int, key: str, value: Bytes, ttl_s: float, tenant: str) -> None:
        """Readers must not know its key yet; a part may stay for `ttl_s`."""
        view, link = memoryview(value), self._link(slot)
        try:
            async with self._transfers.turn(tenant, len(view)):
                await link.call(b"SET", key, packable(view[:LARGE_BYTES]), b"PX", int(ttl_s * 1000))
                for begin in range(LARGE_BYTES, len(view), LARGE_BYTES):
                    piece = view[begin : begin + LARGE_BYTES]
                    if await link.call(b"APPEND", key, packable(piece)) != begin + len(piece):
                        raise BrokerUnavailable(_TORN)
        except BaseException:
            with suppress(BrokerUnavailable):
                self._router.send(slot, pack((b"UNLINK", key)), lambda _: None)
            raise

    async def call_large(self, slot: int, *command: Any, nbytes: int, tenant: str = "") -> Any:
        """Sends a command of `nbytes` over the connection of large values, in the tenant's turn."""
        async with self._transfers.turn(tenant, nbytes):
            return await self._link(slot).call(*command)

    def _link(self, slot: int) -> BlockingLink:
        place = slot if self._is_cluster else 0
        if place not in self._links:
            self._links[place] = self._router.blocking(slot, "qinfer-values", _TRANSFER_S)
        return self._links[place]


def _owner(key: str | bytes) -> str:
    found = _OWNER.search(key if isinstance(key, bytes) else key.encode())
    return found[1].decode() if found else ""


def _reference(fields: Sequence[bytes]) -> Reference:
    version, name, size = fields
    try:
        return Reference(name.decode(), int(size), int(version))
    except (AttributeError, TypeError, ValueError):
        raise CorruptEntry("a reference to the payload store is damaged") from None


class Transfers:
    """The transfers of one event loop."""

    def __init__(self, most_bytes: int = MOVED_AT_ONCE_BYTES) -> None:
        self._most_bytes = most_bytes
        self._bytes = 0
        self._waiting: dict[str, deque[_Waiting]] = {}
        """Waiting transfers by tenant, next turn first."""

    @asynccontextmanager
    async def turn(self, tenant: str, nbytes: int) -> AsyncIterator[None]:
        """Waits until a tenant may move this many bytes within the block."""
        if self._waiting or not self._fits(nbytes):
            await self._wait(tenant, nbytes)
        else:
            self._bytes += nbytes
        try:
            yield
        finally:
            self._bytes -= nbytes
            self._grant()

    def _fits(self, nbytes: int) -> bool:
        return not self._bytes or self._bytes + nbytes <= self._most_bytes

    async def _wait(self, tenant: str, nbytes: int) -> None:
        future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.setdefault(tenant, deque()).append((nbytes, future))
        try:
            await future
        except asyncio.CancelledError:
            if future.done() and not future.cancelled():  # it was granted meanwhile
                self._bytes -= nbytes
            self._grant()
            raise

    def _grant(self) -> None:
        while self._waiting:
            tenant, theirs = next(iter(self._waiting.items()))
            nbytes, future = theirs[0]
            if not future.cancelled() and not self._fits(nbytes):
                return
            del self._waiting[tenant]
            theirs.popleft()
            if theirs:
                self._waiting[tenant] = theirs
            if not future.cancelled():
                self._bytes += nbytes
                future.set_result(None)
