"""The input files of a shard: opened one after the other, compared with the plan, the small ones fetched ahead."""

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from itertools import groupby, islice
from typing import Any

import pyarrow as pa

from qinfer.errors import QinferError, StoreChanged, StoreNotFound
from qinfer.jobs.job import InputFormat
from qinfer.jobs.plan import Range
from qinfer.jobs.rows.row_files import RowFile, SourceBroken, open_rows
from qinfer.jobs.rows.source import format_of
from qinfer.storage.errors import store_error
from qinfer.storage.local import local_path
from qinfer.storage.s3_native import open_native
from qinfer.storage.store import Store

_AHEAD = 8
_SMALL_BYTES = 4 * 2**20
_REASON_CHARACTERS = 200
_OF_STORE = "AWS Error"  # in what Arrow's client of S3 says, which is an `OSError` as that of a damaged file is


class SourceChanged(StoreChanged):
    """An input file is not what it was when the job was planned, or is gone; the message names the URL."""


class Source:
    """A file of a shard.

    Args:
        url: Where it is.
        etag: What its content was called when the job was planned.
        store: Where it is kept.

    Attributes:
        url: Where it is.
        is_far: Whether each read takes long.
    """

    def __init__(self, url: str, etag: str, store: Store) -> None:
        self.url = url
        self._etag = etag
        self._store = store
        self.is_far = local_path(url) is None

    def check(self) -> int:
        """Compares the file with the plan; returns its size in bytes.

        Raises:
            SourceChanged: It is another one, or gone.
            StoreError: The store fails.
        """
        found = self._store.stat(self.url)
        if found is None:
            raise SourceChanged(f"'{self.url}' does not exist any more; bring it back, and resume the job")
        if found.etag != self._etag:
            raise SourceChanged(
                f"'{self.url}' has changed since the job was planned; its output would mix two contents. Make a new job"
            )
        return found.size_bytes

    def content(self, *, sequential: bool) -> Any:
        """Checks the file, and opens it for pyarrow; a small one that is far is read whole.

        Raises:
            SourceChanged: It is another one, or gone.
            StoreError: The store fails.
        """
        size_bytes = self.check()
        if not self.is_far:
            return self._store.open(self.url) if sequential else pa.OSFile(str(local_path(self.url)))
        if size_bytes > _SMALL_BYTES:
            native = None
            if self.url.startswith("s3://") and not sequential:
                native = open_native(self._store, self.url)
            return native or self._store.open(self.url, sequential=sequential)
        with self._store.open(self.url, sequential=True) as file:
            return pa.BufferReader(file.read())


class SourceFiles:
    """The files of a shard, in order.

    Args:
        ranges: The shard's rows.
        wanted: The columns to read, and their types.
        input_format: What the job says of the files' format.
        store: Finds the store of a URL.
    """

    def __init__(
        self,
        ranges: Sequence[Range],
        wanted: pa.Schema,
        input_format: InputFormat,
        store: Callable[[str], Store],
    ) -> None:
        self._wanted = wanted
        self._format: InputFormat = input_format
        self._list = [
            (Source(url, etag, store(url)), tuple(own))
            for (url, etag), own in groupby(ranges, lambda r: (r.url, r.etag))
        ]
        self._pool: ThreadPoolExecutor | None = None
        self._ahead: deque[tuple[Source, Future[Any]]] = deque()

    def __iter__(self) -> Iterator[tuple[Source, tuple[Range, ...]]]:
        """Walks the files; each is to be opened before the next."""
        waiting = (source for source, _ in self._list)
        several = len(self._list) > 1 and self._list[0][0].is_far
        for source, ranges in self._list:
            if several:
                self._pool = self._pool or ThreadPoolExecutor(_AHEAD, thread_name_prefix="qinfer-rows")
                for following in islice(waiting, _AHEAD + 1 - len(self._ahead)):
                    self._ahead.append((following, self._pool.submit(self._content, following)))
            yield source, ranges

    def open(self, source: Source) -> RowFile:
        """Opens a file; raises what `Source.content` and `open_rows` do."""
        content = self._ahead.popleft()[1].result() if self._ahead else self._content(source)
        try:
            return open_rows(content, format_of(source.url, self._format), self._wanted, source.url, far=source.is_far)
        except BaseException:
            content.close()
            raise

    def close(self) -> None:
        """Closes what was fetched ahead."""
        if self._pool is not None:
            self._pool.shutdown(wait=False, cancel_futures=True)
        for _, future in self._ahead:
            future.add_done_callback(_close)
        self._ahead.clear()

    def _content(self, source: Source) -> Any:
        return source.content(sequential=format_of(source.url, self._format) in ("csv", "jsonl"))


@contextmanager
def explained(source: Source) -> Iterator[None]:
    """Turns what reading a file raises into a `QinferError` that names it.

    Raises:
        SourceChanged: The file is not the planned one any more.
        SourceBroken: It is damaged.
        StoreError: The store fails.
    """
    try:
        yield
    except (StoreChanged, StoreNotFound):
        source.check()
        raise
    except (QinferError, MemoryError):
        raise
    except (pa.ArrowException, ValueError, OSError) as error:
        source.check()
        if isinstance(error, OSError) and (error.errno is not None or _OF_STORE in str(error)):
            raise store_error(error, source.url) from None
        reason = " ".join(str(error).split())[:_REASON_CHARACTERS]
        raise SourceBroken(f"'{source.url}' can't be read; is it damaged? {reason}") from None


def _close(future: "Future[Any]") -> None:
    if not future.cancelled():
        with suppress(Exception):  # nobody waits for it
            future.result().close()
