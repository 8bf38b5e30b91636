"""Large tensors in an object store: who names them, how long they stay, and who deletes them.

    <url>/<expiry>/<hash of the model>-<random>          expiry: seconds of the broker's time, a multiple of a minute

An object is written before anything refers to it, under a name that nobody else knows, and never changed. What refers
to it (`values`, dead letters) is in Redis and has a time to live that ends before the object's expiry. It is deleted
when its reference is; what is left, because a process died in between or a reference expired, `sweep` deletes: it looks
at folders whose expiry is over, and there at names that have this form, and at nothing else.

A store that failed is left alone: everything fails at once, so that nobody who needs it not waits behind who does,
until it has been tried in the background and works again.
"""

import asyncio
import hashlib
import logging
import math
import re
import secrets
from collections import deque
from collections.abc import Callable, Coroutine, Iterable
from contextlib import suppress
from typing import Any, Self, TypeVar

from qinfer.delivery.object_files import UNREACHABLE, VARIABLE, ObjectFiles
from qinfer.delivery.values import REFERENCE_VERSION, Reference
from qinfer.errors import BrokerUnavailable, CorruptEntry, QinferError, SettingsError
from qinfer.settings import LimitSettings, RedisSettings
from qinfer.tensors import Bytes

logger = logging.getLogger(__name__)

T = TypeVar("T")

SWEEP_MARGIN_S = 3600.0
"""Objects are swept so long after their expiry: a transfer takes time, and so may clocks differ after a failover."""

_EXPIRY_STEP_S = 60
_FOLDER = re.compile(r"[0-9]{12}")
_NAME = re.compile(r"[0-9]{12}/[0-9a-f]{16}-[0-9a-f]{32}")
_SLOWEST_BYTES_PER_S = 2 * 2**20  # of a transfer, beyond the time of a command
_TRY_AGAIN_S = 1.0
_CLOSE_S = 1.0  # in which what is to be deleted still is
_SWEPT_FOLDERS, _SWEPT_OBJECTS = 100, 1000  # of one round
_MOST_TO_DELETE = 10_000
_AT_ONCE = 64


class ObjectStore:
    """The objects of one deployment; gateways and workers have the same.

    Args:
        files: The folder they are in.
        min_bytes: Larger values belong here.
        now_s: The broker's time.
        command_timeout_s: Seconds that a small operation may take.
    """

    def __init__(
        self, files: ObjectFiles, min_bytes: int, now_s: Callable[[], float], command_timeout_s: float
    ) -> None:
        self.min_bytes = min_bytes
        self._files = files
        self._now_s = now_s
        self._small_s = command_timeout_s
        self._to_delete: deque[str] = deque(maxlen=_MOST_TO_DELETE)
        self._deleting: asyncio.Task[None] | None = None
        self._recovering: asyncio.Task[None] | None = None

    @classmethod
    async def open(cls, limits: LimitSettings, redis: RedisSettings, now_s: Callable[[], float]) -> Self:
        """Opens the store of `limits.payload_url`, and tries it: an object is written, read and deleted.

        Raises:
            SettingsError: The URL is wrong, its driver is missing, or the store does not take an object.
        """
        files = await asyncio.to_thread(ObjectFiles, limits.payload_url, syncs=redis.durability == "always")
        store = cls(files, limits.payload_url_min_bytes, now_s, redis.command_timeout_s)
        try:
            await store._try()
        except QinferError as error:
            files.close()
            cause = error.__cause__ or error
            raise SettingsError(f"{VARIABLE}: the store does not work: {type(cause).__name__}: {cause}") from error
        return store

    async def write(self, owner: str, data: Bytes, kept_s: float) -> Reference:
        """Writes an object.

        Args:
            owner: Whose it is; its hash is in the name, for people who look for one.
            data: The bytes.
            kept_s: How long it is referred to, at most.

        Raises:
            BrokerUnavailable: The store can't be reached; what it may have is swept.
        """
        reference = Reference(self._new_name(owner, kept_s), len(data))
        whole = data if isinstance(data, bytes) else bytes(data)
        await self._used(self._files.write(reference.name, whole, self._transfer_s(reference)))
        return reference

    async def read(self, reference: Reference) -> bytes | None:
        """Returns an object's bytes; `None` when it is gone.

        Raises:
            CorruptEntry: It is not what the reference says.
            BrokerUnavailable: The store can't be reached, or the reference is a newer qinfer's.
        """
        data = await self._used(self._files.read(_checked(reference), self._transfer_s(reference)))
        if data is not None and len(data) != reference.size:
            raise CorruptEntry(f"the payload store has {len(data)} bytes of what were {reference.size}")
        return data

    async def copy(self, reference: Reference, owner: str, kept_s: float) -> Reference | None:
        """Copies an object, to be kept longer; `None` when it is gone. Raises as `read`."""
        copied = Reference(self._new_name(owner, kept_s), reference.size)
        is_there = await self._used(self._files.copy(_checked(reference), copied.name, self._transfer_s(reference)))
        return copied if is_there else None

    def delete(self, names: Iterable[str]) -> None:
        """Has objects deleted soon, that nothing refers to; those of which the store can't be told are swept."""
        self._to_delete.extend(name for name in names if _NAME.fullmatch(name))
        if self._to_delete and self._deleting is None:
            self._deleting = asyncio.create_task(self._delete(), name="delete objects")

    async def settle(self) -> None:
        """Waits until what is to be deleted is, or is left to the sweep."""
        while self._deleting is not None:
            await asyncio.wait([self._deleting])

    async def sweep(self) -> int:
        """Deletes what has expired long ago, a bounded number; returns how many objects that were.

        Raises:
            BrokerUnavailable: The store can't be reached.
        """
        before_s = self._now_s() - SWEEP_MARGIN_S
        found = await self._used(self._files.names("", self._small_s))
        folders = sorted(name for name in found if _FOLDER.fullmatch(name) and int(name) < before_s)
        count = 0
        for folder in folders[:_SWEPT_FOLDERS]:
            names = [f"{folder}/{name}" for name in await self._used(self._files.names(folder, self._small_s))]
            names = [name for name in names if _NAME.fullmatch(name)][: _SWEPT_OBJECTS - count]
            await self._used(self._files.delete(names, self._small_s))
            await self._files.delete_folder(folder, self._small_s)
            count += len(names)
            if count >= _SWEPT_OBJECTS:
                break
        if count:
            logger.info("expired objects deleted from the payload store", extra={"count": count})
        return count

    async def close(self) -> None:
        """Deletes what is still to be deleted, for a moment, and lets go of the store."""
        if self._recovering is not None:
            self._recovering.cancel()
        if self._deleting is not None:
            _, late = await asyncio.wait([self._deleting], timeout=_CLOSE_S)
            for task in late:
                task.cancel()
        self._files.close()

    def _new_name(self, owner: str, kept_s: float) -> str:
        expiry = math.ceil((self._now_s() + kept_s) / _EXPIRY_STEP_S) * _EXPIRY_STEP_S
        return f"{expiry:012d}/{hashlib.sha256(owner.encode()).hexdigest()[:16]}-{secrets.token_hex(16)}"

    async def _delete(self) -> None:
        try:
            while self._to_delete:
                names = [self._to_delete.popleft() for _ in range(min(_AT_ONCE, len(self._to_delete)))]
                try:
                    await self._used(self._files.delete(names, self._small_s))
                except BrokerUnavailable as error:
                    logger.warning("objects are left to expire", extra={"count": len(names), "reason": error.message})
        finally:
            self._deleting = None

    async def _used(self, work: Coroutine[Any, Any, T]) -> T:
        """Awaits what uses the store.

        Raises:
            BrokerUnavailable: It failed, or did before and was not found to work since.
        """
        if self._recovering is not None:
            work.close()
            raise BrokerUnavailable(UNREACHABLE)
        try:
            return await work
        except BrokerUnavailable:
            if self._recovering is None:
                self._recovering = asyncio.create_task(self._recover(), name="try the payload store")
            raise

    async def _recover(self) -> None:
        logger.warning("the payload store can't be reached")
        while True:
            await asyncio.sleep(_TRY_AGAIN_S)
            with suppress(QinferError):
                await self._try()
                break
        self._recovering = None
        logger.info("the payload store works again")

    async def _try(self) -> None:
        """Writes, reads and deletes an object.

        Raises:
            BrokerUnavailable: One of these failed.
            CorruptEntry: It gave back something else.
        """
        data = secrets.token_bytes(16)
        reference = Reference(self._new_name("", 0.0), len(data))
        await self._files.write(reference.name, data, self._small_s)
        found = await self._files.read(reference.name, self._small_s)
        await self._files.delete([reference.name], self._small_s)
        if found != data:
            raise CorruptEntry("it does not give back what was written to it")

    def _transfer_s(self, reference: Reference) -> float:
        """Returns how long the transfer of an object may take."""
        return self._small_s + reference.size / _SLOWEST_BYTES_PER_S


def _checked(reference: Reference) -> str:
    """Returns a reference's name, which only this module makes."""
    if reference.version > REFERENCE_VERSION:
        raise BrokerUnavailable("the tensors were stored by a newer qinfer, which can read them")
    if not _NAME.fullmatch(reference.name):
        raise CorruptEntry("a reference to the payload store is damaged")
    return reference.name
