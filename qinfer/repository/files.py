"""The files of one model repository: the port of which `LocalFiles` and `RemoteFiles` are the adapters.

Paths are relative to the repository's root, with `/`: `<model>/<version>/model.onnx`.
"""

import hashlib
from collections.abc import Callable, Collection, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple, Protocol, Self, overload

IGNORED = "__pycache__"
"""A directory that running a model makes, and that is not part of it."""

MAX_FILES = 100_000
"""Files that one model may have: a repository path that is a whole disk is noticed instead of walked for ever."""

PAGE_BYTES = 256 * 1024
MAX_PAGES = 512
"""Pages that may be read: 128 MiB, after which downloading the file would have been the better idea."""


class Stamp(NamedTuple):
    """What tells that a file has changed: its size in bytes, and its modification time or entity tag."""

    size: int
    mark: str


@dataclass(frozen=True, slots=True)
class Listing:
    """What one model's directory holds.

    Attributes:
        files: Path within the model's directory → stamp.
        directories: Paths of directories within it, those without a file included where the storage knows them.
    """

    files: Mapping[str, Stamp]
    directories: Collection[str]

    def versions(self) -> list[int]:
        """Returns the version directories, ascending: integers that do not begin with 0; all else is ignored."""
        return sorted(
            int(name)
            for name in self.directories
            if name.isascii() and name.isdecimal() and name[0] != "0" and len(name) < _MAX_DIGITS
        )

    def inside(self, directory: str) -> set[str]:
        """Returns the names of the files and directories that a directory holds."""
        prefix = f"{directory}/"
        paths = (*self.files, *self.directories)
        return {path[len(prefix) :].partition("/")[0] for path in paths if path.startswith(prefix)}

    def digest(self, text: str = "", without: Collection[str] = ()) -> str:
        """Returns a hash of a text, and of the paths and stamps of all files that are not left out."""
        sha = hashlib.sha256(text.encode())
        for path in sorted(self.files):
            if path not in without:
                stamp = self.files[path]
                sha.update(f"\n{path}\t{stamp.size}\t{stamp.mark}".encode("utf-8", "surrogateescape"))
        return sha.hexdigest()


_MAX_DIGITS = 19  # a version is an int64 on the wire


class Blob(Protocol):
    """Bytes that need not all be in memory: a `memoryview`, or a part of a remote file."""

    def __len__(self) -> int:
        """Returns how many bytes there are."""
        ...

    @overload
    def __getitem__(self, index: int, /) -> int: ...
    @overload
    def __getitem__(self, index: slice, /) -> Self: ...

    def tobytes(self) -> bytes:
        """Reads the bytes."""
        ...


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


class Files(Protocol):
    """One repository's files; blocking, and safe to use from several threads.

    Every method raises `SettingsError` when the storage can't be reached or refuses, with a text for operators that
    names it, and `OSError` when one file can't be read.

    Attributes:
        is_remote: Reading a file takes a request over the network, so that what is known is worth keeping.
    """

    is_remote: bool

    def models(self) -> list[str]:
        """Returns the names of the directories, sorted; hidden ones are left out."""
        ...

    def listings(self) -> dict[str, "Listing | Exception"]:
        """Returns what each directory holds, or why that can't be told, by name; hidden ones are left out."""
        ...

    def listing(self, directory: str) -> Listing | None:
        """Returns what a directory holds; `None` when there is none of that name."""
        ...

    def read(self, path: str, limit_bytes: int) -> bytes:
        """Returns a file's content.

        Raises:
            OSError: It is not there, can't be read, or is larger than the limit.
        """
        ...

    def blob(self, path: str, size: int) -> AbstractContextManager[Blob]:
        """Opens a file of a known size, of which only parts are wanted, while the context lasts."""
        ...

    def directory(self, path: str) -> Path | None:
        """Returns a directory of this machine; `None` when the files are elsewhere, so that they must be fetched."""
        ...

    def fetch(self, path: str, target: Path) -> None:
        """Copies a file to this machine.

        Raises:
            OSError: It can't be read or written.
        """
        ...

    def write(self, path: str, content: bytes) -> None:
        """Writes a file, and the directories that it needs."""
        ...

    def remove(self, directory: str) -> None:
        """Removes a directory with all that it holds; one that is not there is no error."""
        ...
