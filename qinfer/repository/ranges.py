"""Bytes of a file that is large or elsewhere, of which only the parts that are looked at are read."""

from collections.abc import Callable
from typing import overload

PAGE_BYTES = 256 * 1024
MAX_PAGES = 512
"""Pages that may be read: 128 MiB, after which downloading the file would have been the better idea."""


class TooFarSpreadError(Exception):
    """What is wanted of the file is spread over more pages than may be read."""


class Ranges:
    """A part of a file; reads pages, and keeps them while it lives. For one thread.

    Args:
        fetch: Reads the bytes from a begin to an end.
        size: The file's size in bytes.
        page_bytes: What is read at once.
        max_pages: So many pages may be read.
    """

    def __init__(
        self, fetch: Callable[[int, int], bytes], size: int, page_bytes: int = PAGE_BYTES, max_pages: int = MAX_PAGES
    ) -> None:
        self._pages: dict[int, bytes] = {}
        self._fetch = fetch
        self._size = size
        self._page_bytes = page_bytes
        self._max_pages = max_pages
        self._begin = 0
        self._end = size

    def __len__(self) -> int:
        return self._end - self._begin

    @overload
    def __getitem__(self, index: int, /) -> int: ...
    @overload
    def __getitem__(self, index: slice, /) -> "Ranges": ...
    def __getitem__(self, index: int | slice, /) -> "int | Ranges":
        if isinstance(index, slice):
            begin, end, _ = index.indices(len(self))
            part = Ranges.__new__(Ranges)
            part._pages, part._fetch, part._size = self._pages, self._fetch, self._size
            part._page_bytes, part._max_pages = self._page_bytes, self._max_pages
            part._begin, part._end = self._begin + begin, self._begin + max(begin, end)
            return part
        if not 0 <= index < len(self):
            raise IndexError(index)
        number, offset = divmod(self._begin + index, self._page_bytes)
        return self._page(number)[offset]

    def tobytes(self) -> bytes:
        """Reads the bytes."""
        if not len(self):
            return b""
        first, last = self._begin // self._page_bytes, (self._end - 1) // self._page_bytes
        content = b"".join(self._page(number) for number in range(first, last + 1))
        return content[self._begin - first * self._page_bytes :][: len(self)]

    def _page(self, number: int) -> bytes:
        page = self._pages.get(number)
        if page is None:
            if len(self._pages) >= self._max_pages:
                raise TooFarSpreadError(f"more than {self._max_pages} pages")
            begin = number * self._page_bytes
            page = self._fetch(begin, min(begin + self._page_bytes, self._size))
            self._pages[number] = page
        return page
