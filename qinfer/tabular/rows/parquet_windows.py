"""Fetches the column chunks of a remote Parquet file in few large reads before they are decoded.

A read of a store takes tens of milliseconds, and may be billed. So neighbouring chunks are fetched together as a
window, and the next window is fetched meanwhile.
"""

import io
from bisect import bisect_right
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from typing import Any, NamedTuple

_PADDING_BYTES = 100  # old parquet-mr omits the dictionary's header from a chunk's size (PARQUET-816)
_MOST_BYTES = 48 * 2**20  # unless one chunk is larger
_SMALL_GAP_BYTES = 256 * 1024  # faster than another read
_MOST_GAP_BYTES = 4 * 2**20
_FETCHES = 16  # fetches of one file at once

ReadAt = Callable[[int, int], bytes]
"""Reads `size` bytes at an offset, fewer at the end."""


class ByteRange(NamedTuple):
    """Bytes of a file."""

    begin: int
    end: int


def spans_of(group: Any, leaves: Iterable[int], file_bytes: int) -> list[ByteRange]:
    """Returns the column chunks of a row group's leaf columns."""
    found = []
    for chunk in map(group.column, leaves):
        first, dictionary = chunk.data_page_offset, chunk.dictionary_page_offset or 0
        begin = min(max(0, dictionary if 0 < dictionary < first else first), file_bytes)
        end = begin + max(0, chunk.total_compressed_size) + _PADDING_BYTES
        found.append(ByteRange(begin, min(end, file_bytes)))
    return found


def windows_of(spans: Iterable[ByteRange]) -> list[ByteRange]:
    """Returns few windows that cover the spans."""
    windows: list[ByteRange] = []
    useful = 0
    for span in sorted(spans):
        begin, end = windows[-1] if windows else span
        gap, allowed = span.begin - end, max(_SMALL_GAP_BYTES, min(useful, _MOST_GAP_BYTES))
        if windows and gap <= allowed and span.end - begin <= _MOST_BYTES:
            windows[-1] = ByteRange(begin, max(end, span.end))
            useful += span.end - span.begin
        else:
            windows.append(span)
            useful = span.end - span.begin
    return windows


class Windows(io.RawIOBase):
    """A file with spans fetched ahead, for one thread; closes `content` with itself."""

    def __init__(self, content: Any, read_at: ReadAt, groups: Mapping[int, Sequence[ByteRange]]) -> None:
        self._content, self._read_at = content, read_at
        self._size = content.seek(0, io.SEEK_END)
        self._windows = windows_of(span for spans in groups.values() for span in spans)
        self._begins = [window.begin for window in self._windows]
        self._of = {group: [self._window_at(span.begin) for span in spans] for group, spans in groups.items()}
        self._held: dict[int, Future[bytes]] = {}
        self._pool = ThreadPoolExecutor(_FETCHES, thread_name_prefix="qinfer-window")
        self._at = 0

    def prepare(self, group: int) -> None:
        """Starts fetching a row group and the next; drops earlier windows."""
        needed = set(self._of[group])
        following = max(needed, default=-1) + 1
        wanted = needed | ({following} if following < len(self._windows) else set())
        for number in self._held.keys() - wanted:
            del self._held[number]
        for number in sorted(wanted - self._held.keys()):
            begin, end = self._windows[number]
            self._held[number] = self._pool.submit(self._read_at, end - begin, begin)

    def read_at(self, size: int, place: int) -> bytes:
        """Reads up to `size` bytes."""
        number = self._window_at(place)
        held = self._held.get(number)
        if held is None or place >= self._windows[number].end:
            return self._read_at(size, place)
        first = place - self._windows[number].begin
        return held.result()[first : first + size]

    def read(self, size: int | None = -1, /) -> bytes:
        """Reads at the current position."""
        size = 0 if size is None or size < 0 else size
        data = self.read_at(size, self._at)
        if len(data) < size:
            data = self._read_at(size, self._at)
        self._at += len(data)
        return data

    def seek(self, offset: int, whence: int = io.SEEK_SET, /) -> int:
        """Moves the position of this object; the position of the file is free for the threads."""
        self._at = self._size + offset if whence == io.SEEK_END else offset + self._at * whence
        return self._at

    def tell(self) -> int:
        """Returns the position."""
        return self._at

    def readable(self) -> bool:
        """Returns true."""
        return True

    def seekable(self) -> bool:
        """Returns true."""
        return True

    def close(self) -> None:
        """Closes the file; does not wait for fetches."""
        if not self.closed:
            self._pool.shutdown(wait=False, cancel_futures=True)
            for fetch in self._held.values():
                fetch.add_done_callback(_heard)
            self._held.clear()
            self._content.close()
        super().close()

    def _window_at(self, place: int) -> int:
        return bisect_right(self._begins, place) - 1


def _heard(fetch: "Future[bytes]") -> None:
    with suppress(Exception):  # its result is not needed
        fetch.result()
