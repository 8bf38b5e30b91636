"""Object stores behind fsspec: S3, Google, Azure and memory.

`put_file(mode="create")` and `pipe_file(mode="create")` are conditional: gcsfs sends `ifGenerationMatch=0`, adlfs
`If-None-Match: *`. Closing an empty writable file would ignore the condition.
"""

import io
import logging
import math
import threading
import time
from collections import deque
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import suppress
from datetime import datetime
from itertools import groupby
from pathlib import Path
from typing import Any, BinaryIO, cast

from qinfer.core.retry import Backoff
from qinfer.errors import StoreChanged, StoreUnavailable
from qinfer.storage.store import (
    BROKEN,
    Child,
    CommitOutcome,
    PlacedFile,
    Stat,
    Store,
    answer_of,
    fail,
    mapped,
    not_empty,
    store_error,
)
from qinfer.tensors import Bytes

logger = logging.getLogger(__name__)

UPLOADS = 4
"""Concurrent chunks of one upload."""

_AHEAD_BYTES = 8 * 2**20  # of sequential readers
_AT_ONCE_BYTES = 32 * 2**20
_BEYOND_THE_END = 416  # for a range of an empty object
_CONFLICTS = 6  # tries while others write the same name in S3
_CONFLICT_S = 0.1  # doubled after each try
_MOST_CHUNKS = 10_000
_WORTH_A_PAGE = 4  # objects that justify a listing
_PAGE = 1000  # objects of an S3 listing
_OF_PATTERNS = frozenset("*?[")
_MARKS = ("generation", "ETag", "etag", "md5Hash", "LastModified", "last_modified", "updated", "mtime", "created")


class FsspecStore(Store):
    """A store with a driver of fsspec, which must not cache listings.

    `has_buckets` = paths begin with a bucket, and folders exist only as parts of names.
    """

    chunk_bytes = 16 * 2**20
    has_buckets = False

    def __init__(self, files: Any, listing_timeout_s: float | None = None) -> None:
        self._files = files
        timed = listing_timeout_s is not None and files.async_impl
        self._listing_options = {"timeout": listing_timeout_s} if timed else {}

    def commit_if_absent(self, local: Path, url: str) -> CommitOutcome:
        """Implements `Store.commit_if_absent`."""
        size_bytes = local.stat().st_size
        not_empty(size_bytes, url)

        def put(mode: str) -> None:
            self._files.put_file(str(local), self._path(url), mode=mode, **self._upload_options(size_bytes))

        with mapped(url):
            if size_bytes > self.chunk_bytes and self.stat(url) is not None:  # before it is sent in vain
                return CommitOutcome.EXISTS
            return self._create(put, lambda: local.open("rb"), url)

    def put_if_absent(self, data: bytes, url: str) -> CommitOutcome:
        """Implements `Store.put_if_absent`."""
        not_empty(len(data), url)

        def put(mode: str) -> None:
            self._files.pipe_file(self._path(url), data, mode=mode)

        with mapped(url):
            return self._create(put, lambda: io.BytesIO(data), url)

    def write(self, data: Bytes, url: str, *, synced: bool = False) -> None:
        """Implements `Store.write`."""
        del synced
        with mapped(url):
            path = self._path(url)
            try:
                self._files.pipe_file(path, bytes(data))
            except Exception:
                if self.has_buckets:
                    raise
                self._files.makedirs(path.rpartition("/")[0], exist_ok=True)
                self._files.pipe_file(path, bytes(data))

    def copy(self, url: str, to: str, *, synced: bool = False) -> None:
        """Implements `Store.copy`."""
        del synced
        with mapped(url):
            self._files.cp_file(self._path(url), self._path(to))

    def read_range(self, url: str, begin: int, end: int) -> bytes:
        """Implements `Store.read_range`."""
        with mapped(url):
            path = self._path(url)
            try:
                if begin or end <= _AT_ONCE_BYTES:
                    return bytes(self._files.cat_file(path, start=begin, end=end))
                data: bytes = self._files.cat_file(path, start=0, end=_AT_ONCE_BYTES)
                if len(data) < _AT_ONCE_BYTES:
                    return data
                # Without a range, drivers fetch the parts of a large object at once.
                if _size(self._files.info(path)) > end:
                    return bytes(self._files.cat_file(path, start=0, end=end))
                data = self._files.cat_file(path)
            except Exception as error:
                if answer_of(error).status == _BEYOND_THE_END:
                    return b""
                raise
        return data[:end]

    def fetch(self, url: str, target: Path) -> None:
        """Implements `Store.fetch`."""
        with mapped(url):
            self._files.get_file(self._path(url), str(target))

    def open(self, url: str, *, sequential: bool = False) -> BinaryIO:
        """Implements `Store.open`."""
        options = {"cache_type": "readahead", "block_size": _AHEAD_BYTES} if sequential else {"cache_type": "none"}
        with mapped(url):
            file = self._files.open(self._path(url), "rb", **options)
            if file.details.get("type") == "directory":
                raise FileNotFoundError
            return cast(BinaryIO, _CheckedFile(file, url))

    def stat(self, url: str) -> Stat | None:
        """Implements `Store.stat`."""
        with mapped(url):
            try:
                found = self._files.info(self._path(url))
            except FileNotFoundError:
                return None
        return None if found.get("type") == "directory" else Stat(url, _size(found), _etag(found))

    def children(self, folder: str) -> list[Child]:
        """Implements `Store.children`."""
        with mapped(folder):
            self._files.invalidate_cache()
            try:
                found = self._files.ls(self._path(folder), detail=True, **self._listing_options)
            except FileNotFoundError:
                return []
        return [Child(str(x["name"]).rstrip("/").rpartition("/")[2], x.get("type") == "directory") for x in found]

    def scan(self, prefix: str) -> Iterator[Stat]:
        """Implements `Store.scan`; most drivers return all at once."""
        base = prefix.rstrip("/")
        with mapped(prefix):
            root = self._path(base)
            self._files.invalidate_cache()
            try:
                found = self._files.find(root, detail=True, **self._listing_options)
            except FileNotFoundError:
                found = {}
            if not found and self.has_buckets:
                with suppress(PermissionError):  # listing may be allowed without looking at the bucket
                    self._files.info(root.partition("/")[0])
        for name, info in found.items():
            if str(name).startswith(f"{root}/") and not str(name).endswith("/") and info.get("type") != "directory":
                yield Stat(base + str(name)[len(root) :], _size(info), _etag(info))

    def set_aside(self, url: str, etag: str = "") -> None:
        """Implements `Store.set_aside`."""
        found = self.stat(url)
        if found is None or (etag and found.etag != etag):
            return
        folder, _, name = url.rpartition("/")
        number = 1
        while self.stat(target := f"{folder}/{BROKEN}/{name}-{number}") is not None:
            number += 1
        with mapped(url), suppress(FileNotFoundError):
            self._files.cp_file(self._path(url), self._path(target))
            again = self.stat(url)
            if again is not None and again.etag == found.etag:
                self._files.rm_file(self._path(url))

    def delete(self, url: str) -> None:
        """Implements `Store.delete`."""
        with mapped(url), suppress(FileNotFoundError):
            self._files.rm_file(self._path(url))

    def delete_folder(self, url: str) -> None:
        """Implements `Store.delete_folder`."""
        path = self._path(url)
        if _OF_PATTERNS.intersection(path):  # the driver would delete all matches of a pattern
            for file in self.scan(url):
                self.delete(file.url)
            return
        with mapped(url), suppress(FileNotFoundError):
            self._files.rm(path, recursive=True)

    def _upload_options(self, size_bytes: int) -> dict[str, int]:
        del size_bytes
        return {}

    def _path(self, url: str) -> str:
        return str(self._files._strip_protocol(url))

    def _create(self, put: Callable[[str], None], source: Callable[[], BinaryIO], url: str) -> CommitOutcome:
        """Creates the object unless it exists; `put` takes the driver's mode, `create` or `overwrite`."""
        del source, url
        try:
            put("create")
        except FileExistsError:
            return CommitOutcome.EXISTS
        return CommitOutcome.CREATED


class S3Store(FsspecStore):
    """S3's protocol: PutObject and CompleteMultipartUpload with `If-None-Match: *`.

    Status 412: the name is taken; 409: another writer is about to take it, the upload is repeated. After 501 (no
    conditional writes) the name is checked, the object put and read back, and a log line says so once per bucket; of
    two simultaneous writers one object remains, whole.
    """

    has_buckets = True
    sees_changes = True

    def __init__(self, files: Any, listing_timeout_s: float | None = None) -> None:
        super().__init__(files, listing_timeout_s)
        self._unconditional: set[str] = set()
        self._lock = threading.Lock()

    def open_known(self, file: Stat, *, sequential: bool = False) -> BinaryIO:
        """Implements `Store.open_known`: GETs with this etag."""
        from qinfer.storage.s3_objects import KnownObject

        with mapped(file.url):
            opened = KnownObject(self._files, self._path(file.url), file)
        return cast(BinaryIO, io.BufferedReader(opened, _AHEAD_BYTES) if sequential else opened)

    def stat(self, url: str) -> Stat | None:
        """Implements `Store.stat`; `info` would also list below a missing name."""
        with mapped(url):
            bucket, key, _ = self._files.split_path(self._path(url))
            if not key:
                return super().stat(url)
            try:
                found = self._files.call_s3("head_object", self._files.req_kw, Bucket=bucket, Key=key)
            except FileNotFoundError:
                return None
        return Stat(url, found["ContentLength"], found["ETag"].strip('"'))

    def scan(self, prefix: str) -> Iterator[Stat]:
        """Implements `Store.scan`."""
        base, token = prefix.rstrip("/"), dict[str, str]()
        with mapped(prefix):
            _, folder = self._place(base)
            while True:
                page = self._page(base, **token)
                for found in page.get("Contents", ()):
                    name = found["Key"][len(folder) :]
                    if name and not name.endswith("/"):
                        yield Stat(f"{base}/{name}", found["Size"], found["ETag"].strip('"'))
                if not page.get("NextContinuationToken"):
                    return
                token = {"ContinuationToken": page["NextContinuationToken"]}

    def listed(self, urls: Sequence[str]) -> dict[str, Stat | None]:
        """Implements `Store.listed` by pages that have several of the objects."""
        found: dict[str, Stat | None] = {}
        in_folders = sorted(url for url in urls if url.count("/") > 2)  # the other URLs are buckets
        for folder, own in groupby(in_folders, lambda url: url.rpartition("/")[0]):
            left = deque(url.rpartition("/")[2] for url in own)
            # A client that may read may not always list.
            with mapped(folder), suppress(PermissionError, FileNotFoundError):
                while len(left) >= _WORTH_A_PAGE:
                    before = len(left)
                    found |= self._of_page(folder, left)
                    if before - len(left) < _WORTH_A_PAGE:
                        break
        return found

    def _of_page(self, folder: str, names: deque[str]) -> dict[str, Stat | None]:
        """Reads one page of a folder, and removes its objects from `names`."""
        _, prefix = self._place(folder)
        page = self._page(folder, StartAfter=f"{prefix}{names[0][:-1]}")
        there = {one["Key"]: one for one in page.get("Contents", ())}
        last = max(there, default="") if page.get("NextContinuationToken") else None
        found: dict[str, Stat | None] = {}
        while names and (last is None or f"{prefix}{names[0]}" <= last):
            url, one = f"{folder}/{names[0]}", there.get(f"{prefix}{names.popleft()}")
            found[url] = None if one is None else Stat(url, one["Size"], one["ETag"].strip('"'))
        return found

    def possible_folders(self, folder: str, names: Collection[str]) -> set[str]:
        """Implements `Store.possible_folders`, by one page."""
        with mapped(folder):
            page, (_, prefix) = self._page(folder, Delimiter="/"), self._place(folder)
        there = {one["Prefix"][len(prefix) : -1] for one in page.get("CommonPrefixes", ())}
        is_whole = not page.get("NextContinuationToken")
        return {name for name in names if name in there or not (is_whole or name < max(there, default=""))}

    def _place(self, folder: str) -> tuple[str, str]:
        bucket, key, _ = self._files.split_path(self._path(folder))
        return bucket, f"{key}/" if key else ""

    def _page(self, folder: str, **asked: str) -> dict[str, Any]:
        bucket, prefix = self._place(folder)
        options = {"Bucket": bucket, "Prefix": prefix, "MaxKeys": _PAGE, **asked, **self._listing_options}
        found: dict[str, Any] = self._files.call_s3("list_objects_v2", self._files.req_kw, **options)
        return found

    def _upload_options(self, size_bytes: int) -> dict[str, int]:
        return {"chunksize": max(self.chunk_bytes, -(-size_bytes // _MOST_CHUNKS)), "max_concurrency": UPLOADS}

    def _create(self, put: Callable[[str], None], source: Callable[[], BinaryIO], url: str) -> CommitOutcome:
        bucket = url.split("/", 3)[2]
        backoff = Backoff(1.5 * _CONFLICT_S, math.inf, jitter=0.7)
        for _ in range(_CONFLICTS):
            if bucket in self._unconditional:
                return self._verified(put, source, url)
            try:
                put("create")
            except FileExistsError:
                return CommitOutcome.EXISTS
            except OSError as error:
                outcome = self._after(error, bucket, url)
                if outcome is not None:
                    return outcome
                if bucket not in self._unconditional:
                    time.sleep(backoff.next_s())
            else:
                return CommitOutcome.CREATED
        raise StoreUnavailable(f"other processes keep writing '{url}'; try again")

    def _after(self, error: OSError, bucket: str, url: str) -> CommitOutcome | None:
        answer = answer_of(error)
        if answer.status == 412:
            return CommitOutcome.EXISTS
        if answer.status == 409:
            return None
        if answer.status == 501:
            self._says_501(bucket)
            return None
        if answer.code == "NoSuchUpload" and self.stat(url) is not None:  # the first answer was lost
            return CommitOutcome.EXISTS
        raise store_error(error, url) from None

    def _says_501(self, bucket: str) -> None:
        with self._lock:
            if bucket in self._unconditional:
                return
            self._unconditional.add(bucket)
        logger.warning(
            "the store has no conditional writes (501): objects are checked, written and read back instead",
            extra={"bucket": bucket},
        )

    def _verified(self, put: Callable[[str], None], source: Callable[[], BinaryIO], url: str) -> CommitOutcome:
        """Checks before, compares afterwards."""
        if self.stat(url) is not None:
            return CommitOutcome.EXISTS
        put("overwrite")
        with suppress(StoreChanged), source() as mine, self.open(url, sequential=True) as there:
            while (expected := mine.read(self.chunk_bytes)) == there.read(self.chunk_bytes):
                if not expected:
                    return CommitOutcome.CREATED
        return CommitOutcome.EXISTS  # another writer made it


class GcsStore(FsspecStore):
    """Google Cloud Storage."""

    has_buckets = True

    def _upload_options(self, size_bytes: int) -> dict[str, int]:
        del size_bytes
        return {"chunksize": self.chunk_bytes}


class AzureStore(FsspecStore):
    """Azure Blob Storage."""

    has_buckets = True

    def _upload_options(self, size_bytes: int) -> dict[str, int]:
        del size_bytes
        return {"max_concurrency": UPLOADS}


class MemoryStore(FsspecStore):
    """fsspec's `memory://` of this process, for tests."""

    _lock = threading.Lock()

    def _create(self, put: Callable[[str], None], source: Callable[[], BinaryIO], url: str) -> CommitOutcome:
        with self._lock:
            if self._files.exists(self._path(url)):
                return CommitOutcome.EXISTS
            with source() as file:
                self._files.pipe_file(self._path(url), file.read())
        return CommitOutcome.CREATED

    def open(self, url: str, *, sequential: bool = False) -> BinaryIO:
        """Implements `Store.open`; the driver's file has one position for all readers."""
        del sequential
        with mapped(url):
            return cast(BinaryIO, _CheckedFile(io.BytesIO(self._files.cat_file(self._path(url))), url))


class _CheckedFile(PlacedFile):
    """Errors are `StoreError`s."""

    def __init__(self, file: Any, url: str) -> None:
        super().__init__(0)
        self._file = file
        self._url = url

    def read(self, size: int | None = -1, /) -> bytes:
        try:
            return bytes(self._file.read(-1 if size is None else size))
        except Exception as error:  # noqa: BLE001  the boundary to the drivers
            fail(error, self._url)

    def seek(self, offset: int, whence: int = io.SEEK_SET, /) -> int:
        return int(self._file.seek(offset, whence))

    def tell(self) -> int:
        return int(self._file.tell())

    def close(self) -> None:
        if not self.closed:
            self._file.close()
        super().close()


def _size(info: dict[str, Any]) -> int:
    return int(info.get("size") or 0)


def _etag(info: dict[str, Any]) -> str:
    """Returns the etag of an object, which drivers name and quote differently."""
    mark = next((info[key] for key in _MARKS if info.get(key)), "")
    if isinstance(mark, datetime):
        mark = mark.timestamp()
    if isinstance(mark, float):
        return f"{mark:.6f}-{_size(info)}"
    return str(mark).strip('"')
