"""A folder of an object store, or of a directory, as fsspec gives it: write, read, copy, delete, list.

Stores whose client is asynchronous (S3, Google, Azure) are driven on fsspec's own event loop; others, a directory, in
threads. Either way nobody waits longer than a timeout, not the end of the process either, and what the client raises
becomes one of qinfer's errors.
"""

import asyncio
import logging
import os
import queue
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import fsspec
from fsspec.implementations.local import LocalFileSystem

from qinfer.errors import BrokerUnavailable, SettingsError
from qinfer.storage.open import remedy
from qinfer.storage.urls import normalised

logger = logging.getLogger(__name__)

VARIABLE = "QINFER_LIMITS__PAYLOAD_URL"
"""The setting that the messages name."""

UNREACHABLE = "the payload store can't be reached; try again"
"""What clients are told of a store that fails, whatever it said."""

_THREADS = 8
_CONNECT_S = 5.0
_S3_TRIES = 2
_OPTIONS: dict[str, dict[str, Any]] = {
    # Its own defaults try for minutes, while a client waits for its 503.
    "s3": {"config_kwargs": {"connect_timeout": _CONNECT_S, "retries": {"max_attempts": 1}}},
    "file": {"auto_mkdir": True},
}


class ObjectFiles:
    """The folder at a URL; names are relative to it, and no name but ours is ever given.

    Args:
        url: Where it is, `s3://bucket/folder` or `file:///directory`; the store's own variables have credentials.
        syncs: Whether what is written to a directory must be on the disk.

    Raises:
        SettingsError: The URL is none, its driver is not installed, or its directory does not exist.
    """

    def __init__(self, url: str, *, syncs: bool) -> None:
        self._base = _base_of(url)
        scheme, _, self._folder = self._base.partition("://")
        try:
            self._files = fsspec.filesystem(
                scheme, use_listings_cache=False, skip_instance_cache=True, **_OPTIONS.get(scheme, {})
            )
        except ImportError:
            text = f"{VARIABLE}={url}: the driver of {scheme}:// is not installed; {remedy(scheme)}"
            raise SettingsError(text) from None
        except ValueError:
            raise SettingsError(f"{VARIABLE}={url}: {scheme}:// is not known; use s3, gs, az or file") from None
        if scheme == "s3":
            self._files.retries = _S3_TRIES
        self._is_local = isinstance(self._files, LocalFileSystem)
        if self._is_local and not Path(self._folder).is_dir():
            raise SettingsError(f"{VARIABLE}={url}: there is no such directory; make it, or mount it")
        self._syncs = syncs and self._is_local
        self._threads = _Threads()

    async def write(self, name: str, data: bytes, timeout_s: float) -> None:
        """Writes an object; one that was cut off may be there in part.

        Raises:
            BrokerUnavailable: The store refuses it, or can't be reached in time.
        """
        try:
            if self._syncs:
                await self._in_thread(partial(_write_synced, Path(self._folder, name), data), timeout_s)
            else:
                await self._call("pipe_file", self._path(name), data, timeout_s=timeout_s)
        except FileNotFoundError as error:  # the bucket, or the directory
            raise BrokerUnavailable(UNREACHABLE) from error

    async def read(self, name: str, timeout_s: float) -> bytes | None:
        """Returns an object; `None` when there is none.

        Raises:
            BrokerUnavailable: The store can't be reached in time.
        """
        try:
            data: bytes = await self._call("cat_file", self._path(name), timeout_s=timeout_s)
        except FileNotFoundError:
            return None
        return data

    async def copy(self, name: str, to: str, timeout_s: float) -> bool:
        """Copies an object within the store; False when there is none.

        Raises:
            BrokerUnavailable: The store can't be reached in time.
        """
        try:
            await self._call("cp_file", self._path(name), self._path(to), timeout_s=timeout_s)
        except FileNotFoundError:
            return False
        return True

    async def delete(self, names: Sequence[str], timeout_s: float) -> None:
        """Deletes objects; those that are gone are no error.

        Raises:
            BrokerUnavailable: The store can't be reached in time; some may be deleted.
        """

        async def one(name: str) -> None:
            with suppress(FileNotFoundError):
                await self._call("rm_file", self._path(name), timeout_s=timeout_s)

        for begin in range(0, len(names), _THREADS):
            await asyncio.gather(*(one(name) for name in names[begin : begin + _THREADS]))

    async def delete_folder(self, name: str, timeout_s: float) -> None:
        """Deletes a folder if it is empty, where folders are more than a part of names."""
        if self._is_local:
            await self._in_thread(partial(_remove_if_empty, Path(self._folder, name)), timeout_s)

    async def names(self, folder: str, timeout_s: float) -> list[str]:
        """Returns the names directly in a folder, without its own before them.

        Raises:
            BrokerUnavailable: The store can't be reached in time.
        """
        self._files.invalidate_cache()
        try:
            found: list[str] = await self._call("ls", self._path(folder), False, timeout_s=timeout_s)
        except FileNotFoundError:
            return []
        return [path.rstrip("/").rpartition("/")[2] for path in found]

    def close(self) -> None:
        """Lets go of the threads; one that hangs in a system call ends when that does, or the process."""
        self._threads.close()

    def _path(self, name: str) -> str:
        return f"{self._folder}/{name}" if name else self._folder

    async def _call(self, method: str, *arguments: Any, timeout_s: float) -> Any:
        """Calls a method of the store's client.

        Raises:
            FileNotFoundError: What it is about does not exist.
            BrokerUnavailable: It failed in any other way: clients raise what they like.
        """
        if not self._files.async_impl:
            return await self._in_thread(partial(getattr(self._files, method), *arguments), timeout_s)
        work = getattr(self._files, f"_{method}")(*arguments)
        return await _mapped(asyncio.wrap_future(asyncio.run_coroutine_threadsafe(work, self._files.loop)), timeout_s)

    async def _in_thread(self, work: Callable[[], Any], timeout_s: float) -> Any:
        return await _mapped(asyncio.wrap_future(self._threads.submit(work)), timeout_s)


class _Threads:
    """Threads that do not keep the process from ending, as those of an executor would: it joins them."""

    def __init__(self) -> None:
        self._work: queue.SimpleQueue[tuple[Callable[[], Any], Future[Any]] | None] = queue.SimpleQueue()
        self._count = 0

    def submit(self, work: Callable[[], Any]) -> "Future[Any]":
        future: Future[Any] = Future()
        self._work.put((work, future))
        if self._count < _THREADS:
            self._count += 1
            threading.Thread(target=self._run, name=f"qinfer-objects-{self._count}", daemon=True).start()
        return future

    def close(self) -> None:
        """Ends the threads, once they have done what was submitted."""
        for _ in range(self._count):
            self._work.put(None)

    def _run(self) -> None:
        while (job := self._work.get()) is not None:
            _fulfil(*job)
            del job  # or it would hold a payload until the next one comes


def _fulfil(work: Callable[[], Any], future: "Future[Any]") -> None:
    if not future.set_running_or_notify_cancel():
        return
    try:
        future.set_result(work())
    except Exception as error:  # noqa: BLE001 - it is the waiting one's
        future.set_exception(error)


async def _mapped(work: "asyncio.Future[Any]", timeout_s: float) -> Any:
    try:
        async with asyncio.timeout(timeout_s):
            return await work
    except FileNotFoundError:
        raise
    except Exception as error:
        logger.debug("the payload store failed", exc_info=True)
        raise BrokerUnavailable(UNREACHABLE) from error


def _base_of(url: str) -> str:
    try:
        base = normalised(url)
    except SettingsError as error:
        raise SettingsError(f"{VARIABLE}: {error.message}") from None
    return base.rstrip("/")


def _remove_if_empty(folder: Path) -> None:
    with suppress(OSError):  # it is not, or another was first
        folder.rmdir()


def _write_synced(path: Path, data: bytes) -> None:
    """Writes a file, and returns when it is on the disk."""
    path.parent.mkdir(exist_ok=True)
    with path.open("wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
    for directory in (path.parent, path.parent.parent):
        descriptor = os.open(directory, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
