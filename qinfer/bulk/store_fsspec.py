"""Object stores behind fsspec: what is the same for all, and Google's, Azure's and the one in memory.

`put_file(mode="create")` and `pipe_file(mode="create")` of the drivers are conditional, for small and for large files:
gcsfs sends `ifGenerationMatch=0`, adlfs `If-None-Match: *` (with the list of blocks, when there are several). Drivers'
files that are opened to be written are not used: closing an empty one ignores the condition.
"""

import io
import threading
from collections.abc import Callable, Iterator
from contextlib import suppress
from datetime import datetime
from pathlib import Path
from typing import Any, BinaryIO, cast

from qinfer.bulk.store import BROKEN, Outcome, Stat
from qinfer.bulk.store_errors import fail, mapped, not_empty, not_larger

UPLOADS = 4
"""Chunks of one upload that are on their way at a time, where the driver sends several."""

_AHEAD_BYTES = 8 * 2**20  # fetched ahead of who reads sequentially
_MARKS = ("generation", "ETag", "etag", "md5Hash", "LastModified", "last_modified", "updated", "mtime", "created")


class FsspecStore:
    """An object store that fsspec has a driver for.

    Args:
        files: The driver, without a cache of listings.

    Attributes:
        chunk_bytes: Of an upload; a few of them are in memory.
    """

    chunk_bytes = 16 * 2**20

    def __init__(self, files: Any) -> None:
        self._files = files

    def commit_if_absent(self, local: Path, url: str) -> Outcome:
        """As the port says."""
        size_bytes = local.stat().st_size
        not_empty(size_bytes, url)

        def put(mode: str) -> None:
            self._files.put_file(str(local), self._path(url), mode=mode, **self._upload_options(size_bytes))

        with mapped(url):
            if self.stat(url) is not None:  # before all of it is sent in vain
                return Outcome.EXISTS
            return self._create(put, lambda: local.open("rb"), url)

    def put_if_absent(self, data: bytes, url: str) -> Outcome:
        """As the port says."""
        not_empty(len(data), url)

        def put(mode: str) -> None:
            self._files.pipe_file(self._path(url), data, mode=mode)

        with mapped(url):
            return self._create(put, lambda: io.BytesIO(data), url)

    def read(self, url: str, limit_bytes: int) -> bytes:
        """As the port says."""
        with mapped(url):
            found = self._files.info(self._path(url))
            if found.get("type") == "directory":
                raise FileNotFoundError
            not_larger(_size(found), url, limit_bytes)
            data: bytes = self._files.cat_file(self._path(url))
        not_larger(len(data), url, limit_bytes)  # another one meanwhile
        return data

    def stat(self, url: str) -> Stat | None:
        """As the port says."""
        with mapped(url):
            try:
                found = self._files.info(self._path(url))
            except FileNotFoundError:
                return None
        return None if found.get("type") == "directory" else Stat(url, _size(found), _etag(found))

    def list(self, prefix: str) -> Iterator[Stat]:
        """As the port says."""
        return iter(sorted(self.scan(prefix)))

    def scan(self, prefix: str) -> Iterator[Stat]:
        """As the port says; most drivers give everything at once."""
        base = prefix.rstrip("/")
        with mapped(prefix):
            root = self._path(base)
            try:
                found = self._files.find(root, detail=True)
            except FileNotFoundError:
                found = {}
            if not found:
                self._check_bucket(root)
        for name, info in found.items():
            if str(name).startswith(f"{root}/") and not str(name).endswith("/") and info.get("type") != "directory":
                yield Stat(base + str(name)[len(root) :], _size(info), _etag(info))

    def set_aside(self, url: str, etag: str = "") -> None:
        """As the port says."""
        found = self.stat(url)
        if found is None or (etag and found.etag != etag):
            return
        folder, _, name = url.rpartition("/")
        number = 1
        while self.stat(target := f"{folder}/{BROKEN}/{name}-{number}") is not None:
            number += 1
        with mapped(url), suppress(FileNotFoundError):  # another one set it aside
            self._files.cp_file(self._path(url), self._path(target))
            again = self.stat(url)
            if again is not None and again.etag == found.etag:
                self._files.rm_file(self._path(url))

    def delete(self, url: str) -> None:
        """As the port says."""
        with mapped(url), suppress(FileNotFoundError):
            self._files.rm_file(self._path(url))

    def open(self, url: str, *, sequential: bool = False) -> BinaryIO:
        """As the port says."""
        options = {"cache_type": "readahead", "block_size": _AHEAD_BYTES} if sequential else {"cache_type": "none"}
        with mapped(url):
            file = self._files.open(self._path(url), "rb", **options)
            if file.details.get("type") == "directory":
                raise FileNotFoundError
            return cast(BinaryIO, _Reader(file, url))

    def _check_bucket(self, path: str) -> None:
        """Raises a `FileNotFoundError` where there is no bucket; who may list it may not always look at it."""
        with suppress(PermissionError):
            self._files.info(path.partition("/")[0])

    def _upload_options(self, size_bytes: int) -> dict[str, int]:
        """Returns options of the driver's `put_file`, by which little of a file is in memory at a time."""
        del size_bytes
        return {}

    def _path(self, url: str) -> str:
        """Returns the path by which the driver knows a URL."""
        return str(self._files._strip_protocol(url))

    def _create(self, put: Callable[[str], None], source: Callable[[], BinaryIO], url: str) -> Outcome:
        """Makes an object, unless there is one.

        Args:
            put: Sends it, given the driver's mode: `create` or `overwrite`.
            source: Opens what is sent.
            url: Its URL.
        """
        del source, url
        try:
            put("create")
        except FileExistsError:
            return Outcome.EXISTS
        return Outcome.CREATED


class GcsStore(FsspecStore):
    """Google Cloud Storage."""

    def _upload_options(self, size_bytes: int) -> dict[str, int]:
        del size_bytes
        return {"chunksize": self.chunk_bytes}


class AzureStore(FsspecStore):
    """Azure Blob Storage."""

    def _upload_options(self, size_bytes: int) -> dict[str, int]:
        del size_bytes
        return {"max_concurrency": UPLOADS}


class MemoryStore(FsspecStore):
    """fsspec's `memory://`: of this process only, for tests."""

    _lock = threading.Lock()

    def _check_bucket(self, path: str) -> None:
        """It has none."""

    def _create(self, put: Callable[[str], None], source: Callable[[], BinaryIO], url: str) -> Outcome:
        with self._lock:
            if self._files.exists(self._path(url)):
                return Outcome.EXISTS
            with source() as file:
                self._files.pipe_file(self._path(url), file.read())
        return Outcome.CREATED

    def open(self, url: str, *, sequential: bool = False) -> BinaryIO:
        """As the port says; the driver has one position for all who read a file."""
        del sequential
        with mapped(url):
            return cast(BinaryIO, _Reader(io.BytesIO(self._files.cat_file(self._path(url))), url))


class _Reader(io.RawIOBase):
    """A driver's file whose errors are `StoreError`s."""

    def __init__(self, file: Any, url: str) -> None:
        self._file = file
        self._url = url

    def read(self, size: int | None = -1, /) -> bytes:
        try:
            return bytes(self._file.read(-1 if size is None else size))
        except Exception as error:  # noqa: BLE001  the boundary to the drivers
            fail(error, self._url)

    def readinto(self, buffer: Any, /) -> int:
        data = self.read(len(buffer))
        buffer[: len(data)] = data
        return len(data)

    def seek(self, offset: int, whence: int = io.SEEK_SET, /) -> int:
        return int(self._file.seek(offset, whence))

    def tell(self) -> int:
        return int(self._file.tell())

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def close(self) -> None:
        if not self.closed:
            self._file.close()
        super().close()


def _size(info: dict[str, Any]) -> int:
    return int(info.get("size") or 0)


def _etag(info: dict[str, Any]) -> str:
    """Returns what changes when an object does; drivers name it differently, and quote it or not."""
    mark = next((info[key] for key in _MARKS if info.get(key)), "")
    if isinstance(mark, datetime):
        mark = mark.timestamp()
    if isinstance(mark, float):
        return f"{mark:.6f}-{_size(info)}"
    return str(mark).strip('"')
