"""Large tensors in an object store: their names, lifetime and deletion.

    <url>/<expiry>/<hash of the model>-<random>          expiry: seconds on Redis' clock, a multiple of a minute

An object is written before its reference, under a random name, and never changed. References in Redis expire before
their objects; an object is deleted with its reference. `sweep` deletes objects that are left over: only names of this
form in expired folders.

The store runs in threads with timeouts, so that it delays neither callers nor the end of the process. After a failure
all calls fail immediately, until a background probe succeeds. A full disk refuses only writes: reads and deletions free
it. A directory keeps some space free for Redis, whose files may be beside it, and for results, since the end of their
requests frees some. Its files are on disk before they are referred to under `always`, and about a second later under
`everysec`, as Redis' own file is.
"""

import asyncio
import hashlib
import logging
import math
import os
import queue
import re
import secrets
import sys
import threading
from collections import deque
from collections.abc import Callable, Iterable
from concurrent.futures import Future
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any, Self, TypeVar

from qinfer.core.retry import OutageLog
from qinfer.core.settings import LimitSettings, RedisSettings
from qinfer.core.store_urls import normalised
from qinfer.errors import (
    BrokerUnavailable,
    CorruptEntry,
    InvalidRequest,
    QinferError,
    SettingsError,
    StoreError,
    StoreFull,
    StoreNotFound,
    UnsupportedFeature,
)
from qinfer.queue.values import REFERENCE_VERSION, NoSpace, Reference, ValueKind
from qinfer.storage.local import local_path, sync_path
from qinfer.storage.open import open_store, remedy
from qinfer.storage.store import Store, mapped
from qinfer.tensors import Bytes

logger = logging.getLogger(__name__)

T = TypeVar("T")

VARIABLE = "QINFER_LIMITS__PAYLOAD_URL"

UNREACHABLE = "the payload store can't be reached; try again"
"""The error for clients, without the store's text."""

FULL = (
    "the payload store's disk is full; try again when results have been read and deleted, or its operator has freed "
    "some space"
)

SPARE_BYTES = 2**30
"""The free space that payloads leave, at most a twentieth of the file system."""

SWEEP_MARGIN_S = 3600.0
"""The time from expiry to sweep, for slow transfers and different clocks."""

_EXPIRY_STEP_S = 60
_FOLDER = re.compile(r"[0-9]{12}")
_NAME = re.compile(r"[0-9]{12}/[0-9a-f]{16}-[0-9a-f]{32}")
_SLOWEST_BYTES_PER_S = 2 * 2**20  # of a transfer, beyond a command's time
_TRY_AGAIN_S = 1.0
_CLOSE_S = 1.0  # for pending deletions
_SWEPT_FOLDERS, _SWEPT_OBJECTS = 100, 1000  # per round
_MOST_TO_DELETE = 10_000
_AT_ONCE = 64
_THREADS = 16
_REMIND_S = 60.0
_SYNC_S = 1.0


class ObjectStore:
    """The objects of one deployment.

    Only names made here are ever appended to `folder`.
    """

    def __init__(
        self, store: Store, folder: str, limits: LimitSettings, redis: RedisSettings, now_s: Callable[[], float]
    ) -> None:
        self.min_bytes = limits.payload_url_min_bytes
        self._store = store
        self._folder = folder
        self._directory = local_path(folder)
        self._synced = redis.durability == "always"
        self._small_s = redis.command_timeout_s
        self._now_s = now_s
        self._threads = _Threads()
        self._to_delete: deque[str] = deque(maxlen=_MOST_TO_DELETE)
        self._deleting: asyncio.Task[None] | None = None
        self._recovering: asyncio.Task[None] | None = None
        self._unsynced: set[str] = set()
        self._sync_timer: asyncio.TimerHandle | None = None
        self._syncs: set[Future[None]] = set()
        begins = f"the payload store's disk is full: free some space, or read and delete results; it is at '{folder}'"
        ends = "the payload store's disk has space again"
        self._full = OutageLog(logger, begins, ends, level=logging.ERROR, remind_s=_REMIND_S)

    @classmethod
    async def open(cls, limits: LimitSettings, redis: RedisSettings, now_s: Callable[[], float]) -> Self:
        """Opens the store, and tries it."""
        store, folder = await asyncio.to_thread(_opened, limits.payload_url)
        one = cls(store, folder, limits, redis, now_s)
        try:
            await one._try()
        except QinferError as error:
            one._threads.close()
            cause = error.__cause__ or error
            reason = getattr(cause, "reason", "") or f"{type(cause).__name__}: {cause}"
            raise SettingsError(f"{VARIABLE}: the store does not work: {reason}") from error
        return one

    async def write(self, owner: str, data: Bytes, kept_s: float, kind: ValueKind = ValueKind.PAYLOAD) -> Reference:
        """Writes an object for `kept_s` seconds; the hash of `owner` in its name is for people."""
        reference = Reference(self._new_name(owner, kept_s), len(data))
        synced = self._synced and kind is not ValueKind.ANSWER

        def write() -> None:
            self._check_space(len(data), kind)
            self._write_object(reference.name, data, synced=synced)

        await self._used(write, self._transfer_s(reference))
        self._full.over()
        if kind is not ValueKind.ANSWER:
            self._sync_soon(reference.name)
        return reference

    async def read(self, reference: Reference) -> bytes | None:
        """Returns an object; `None` if it is gone, `CorruptEntry` if its size differs."""
        data = await self._used(
            partial(self._read_object, _checked(reference), reference.size), self._transfer_s(reference)
        )
        if data is not None and len(data) != reference.size:
            raise CorruptEntry(f"the payload store has {len(data)} of {reference.size} bytes")
        return data

    async def copy(self, reference: Reference, owner: str, kept_s: float) -> Reference | None:
        """Copies an object, kept for `kept_s` seconds; `None` if gone."""
        copied = Reference(self._new_name(owner, kept_s), reference.size)
        work = partial(self._copy, _checked(reference), copied.name, copied.size)
        if not await self._used(work, self._transfer_s(reference)):
            return None
        self._sync_soon(copied.name)
        return copied

    def delete(self, names: Iterable[str]) -> None:
        """Schedules deletions; the sweep repeats failed ones."""
        self._to_delete.extend(found := [name for name in names if _NAME.fullmatch(name)])
        self._unsynced.difference_update(found)
        if self._to_delete and self._deleting is None:
            self._deleting = asyncio.create_task(self._delete(), name="delete objects")

    async def wait_for_deletions(self) -> None:
        """Waits until scheduled objects are deleted, or left to the sweep."""
        while self._deleting is not None:
            await asyncio.wait([self._deleting])

    async def sweep(self) -> int:
        """Deletes some expired objects; returns how many."""
        before_s = self._now_s() - SWEEP_MARGIN_S
        found = await self._used(partial(self._names, ""), self._small_s)
        folders = sorted(name for name in found if _FOLDER.fullmatch(name) and int(name) < before_s)
        count = 0
        for folder in folders[:_SWEPT_FOLDERS]:
            names = [f"{folder}/{name}" for name in await self._used(partial(self._names, folder), self._small_s)]
            names = [name for name in names if _NAME.fullmatch(name)][: _SWEPT_OBJECTS - count]
            await self._delete_all(names)
            if self._directory is not None:
                await self._in_thread(partial(_remove_if_empty, self._directory / folder), self._small_s)
            count += len(names)
            if count >= _SWEPT_OBJECTS:
                break
        if count:
            logger.info("expired objects deleted from the payload store", extra={"count": count})
        return count

    async def free_bytes(self) -> int | None:
        """Returns the bytes that a directory has for results; `None` for other stores."""
        if self._directory is None:
            return None
        with suppress(BrokerUnavailable):
            free, spare = await self._used(partial(self._space, self._directory), self._small_s)
            if spare:
                return max(0, free - spare)
        return sys.maxsize

    async def close(self) -> None:
        """Waits briefly for deletions and the disk, and closes the store."""
        if self._recovering is not None:
            self._recovering.cancel()
        if self._sync_timer is not None:
            self._sync_timer.cancel()
            self._sync()
        if syncs := [asyncio.wrap_future(each) for each in list(self._syncs)]:
            await asyncio.wait(syncs, timeout=_CLOSE_S)
        if self._deleting is not None:
            _, late = await asyncio.wait([self._deleting], timeout=_CLOSE_S)
            for task in late:
                task.cancel()
        self._threads.close()

    def _sync_soon(self, name: str) -> None:
        if self._directory is None or self._synced:
            return
        self._unsynced.add(name)
        if self._sync_timer is None:
            self._sync_timer = asyncio.get_running_loop().call_later(_SYNC_S, self._sync)

    def _sync(self) -> None:
        names, self._unsynced, self._sync_timer = self._unsynced, set(), None
        if names and self._directory is not None:
            sync = self._threads.submit(partial(_sync_files, self._directory, names))
            self._syncs.add(sync)
            sync.add_done_callback(self._syncs.discard)

    def _new_name(self, owner: str, kept_s: float) -> str:
        expiry = math.ceil((self._now_s() + kept_s) / _EXPIRY_STEP_S) * _EXPIRY_STEP_S
        return f"{expiry:012d}/{hashlib.sha256(owner.encode()).hexdigest()[:16]}-{secrets.token_hex(16)}"

    async def _delete(self) -> None:
        try:
            while self._to_delete:
                names = [self._to_delete.popleft() for _ in range(min(_AT_ONCE, len(self._to_delete)))]
                try:
                    await self._delete_all(names)
                except BrokerUnavailable as error:
                    logger.warning("objects are left to expire", extra={"count": len(names), "reason": error.message})
        finally:
            self._deleting = None

    async def _delete_all(self, names: list[str]) -> None:
        for begin in range(0, len(names), _THREADS):
            some = names[begin : begin + _THREADS]
            await asyncio.gather(*(self._used(partial(self._remove, name), self._small_s) for name in some))

    async def _used(self, work: Callable[[], T], timeout_s: float) -> T:
        """Runs a call of the store in a thread; fails at once while it counts as unreachable."""
        if self._recovering is not None:
            raise BrokerUnavailable(UNREACHABLE)
        try:
            return await self._in_thread(work, timeout_s)
        except StoreFull as error:
            self._full.failed(error.reason or error.message)
            raise NoSpace(FULL) from error
        except BrokerUnavailable:
            if self._recovering is None:
                self._recovering = asyncio.create_task(self._recover(), name="try the payload store")
            raise

    async def _in_thread(self, work: Callable[[], T], timeout_s: float) -> T:
        try:
            async with asyncio.timeout(timeout_s):
                return await asyncio.wrap_future(self._threads.submit(work))
        except StoreFull:
            raise
        except (StoreError, TimeoutError) as error:
            logger.debug("the payload store failed", extra={"reason": getattr(error, "reason", "") or repr(error)})
            raise BrokerUnavailable(UNREACHABLE) from error

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
        data = secrets.token_bytes(16)
        name = self._new_name("", 0.0)
        await self._in_thread(partial(self._write_object, name, data, synced=self._synced), self._small_s)
        found = await self._in_thread(partial(self._read_object, name, len(data)), self._small_s)
        await self._in_thread(partial(self._remove, name), self._small_s)
        if found != data:
            raise CorruptEntry("it does not give back what was written to it")

    def _check_space(self, size: int, kind: ValueKind = ValueKind.PAYLOAD) -> None:
        if self._directory is None:
            return
        free, spare = self._space(self._directory)
        least = spare if kind is ValueKind.PAYLOAD else spare // 2
        if spare and free < size + least:
            raise StoreFull(f"less than {least >> 20} MiB would stay free")

    def _space(self, directory: Path) -> tuple[int, int]:
        with mapped(self._folder):
            about = os.statvfs(directory)
        spare = min(SPARE_BYTES, about.f_blocks * about.f_frsize // 20)  # 0 of 0 blocks: it does not say how many
        return about.f_bavail * about.f_frsize, spare

    def _write_object(self, name: str, data: Bytes, *, synced: bool) -> None:
        self._store.write(data, f"{self._folder}/{name}", synced=synced)

    def _read_object(self, name: str, size: int) -> bytes | None:
        try:
            return self._store.read_range(f"{self._folder}/{name}", 0, size + 1)  # one that is longer is noticed
        except StoreNotFound:
            return None

    def _copy(self, name: str, to: str, size: int) -> bool:
        try:
            self._check_space(size)
            self._store.copy(f"{self._folder}/{name}", f"{self._folder}/{to}", synced=self._synced)
        except StoreNotFound:
            return False
        return True

    def _remove(self, name: str) -> None:
        self._store.delete(f"{self._folder}/{name}")

    def _names(self, folder: str) -> list[str]:
        return [child.name for child in self._store.children(f"{self._folder}/{folder}" if folder else self._folder)]

    def _transfer_s(self, reference: Reference) -> float:
        return self._small_s + reference.size / _SLOWEST_BYTES_PER_S


def _checked(reference: Reference) -> str:
    if reference.version > REFERENCE_VERSION:
        raise BrokerUnavailable("the tensors were stored by a newer qinfer, which can read them")
    if not _NAME.fullmatch(reference.name):
        raise CorruptEntry("a reference to the payload store is damaged")
    return reference.name


def _opened(url: str) -> tuple[Store, str]:
    scheme = url.partition("://")[0]
    try:
        store, folder = open_store(normalised(url))
    except SettingsError as error:
        raise SettingsError(f"{VARIABLE}: {error.message}") from None
    except UnsupportedFeature:
        text = f"{VARIABLE}={url}: the driver of {scheme}:// is not installed; {remedy(scheme)}"
        raise SettingsError(text) from None
    except InvalidRequest:
        raise SettingsError(f"{VARIABLE}={url}: {scheme}:// is not known; use s3, gs, az or file") from None
    except StoreError as error:
        raise SettingsError(f"{VARIABLE}: the store does not work: {error.reason}") from None
    directory = local_path(folder)
    if directory is not None and not directory.is_dir():
        raise SettingsError(f"{VARIABLE}={url}: there is no such directory; make it, or mount it")
    return store, folder


def _sync_files(directory: Path, names: Iterable[str]) -> None:
    folders = {directory}
    try:
        for path in (directory / name for name in names):
            with suppress(FileNotFoundError):  # its request has ended
                sync_path(path)
                folders.add(path.parent)
        for folder in folders if len(folders) > 1 else ():
            with suppress(FileNotFoundError):
                sync_path(folder)
    except OSError as error:
        logger.error("tensors not synced to disk", extra={"reason": repr(error)})


def _remove_if_empty(folder: Path) -> None:
    with suppress(OSError):  # not empty, or another was first
        folder.rmdir()


class _Threads:
    """Threads that do not delay the end of the process, as an executor's would."""

    def __init__(self) -> None:
        self._work: queue.SimpleQueue[tuple[Callable[[], Any], Future[Any]] | None] = queue.SimpleQueue()
        self._count = 0

    def submit(self, work: Callable[[], T]) -> "Future[T]":
        future: Future[T] = Future()
        self._work.put((work, future))
        if self._count < _THREADS:
            self._count += 1
            threading.Thread(target=self._process_queue, name=f"qinfer-objects-{self._count}", daemon=True).start()
        return future

    def close(self) -> None:
        """Ends the threads after their submitted calls."""
        for _ in range(self._count):
            self._work.put(None)

    def _process_queue(self) -> None:
        while (job := self._work.get()) is not None:
            _fulfil(*job)
            del job  # or it would hold a payload until the next job


def _fulfil(work: Callable[[], Any], future: "Future[Any]") -> None:
    if not future.set_running_or_notify_cancel():
        return
    try:
        future.set_result(work())
    except Exception as error:  # noqa: BLE001 - it is the waiting one's
        future.set_exception(error)
