"""The files of one model repository: of a directory (`LocalFiles`), or at a URL that fsspec knows (`RemoteFiles`).

Paths are relative to the root: `<model>/<version>/model.onnx`. Every method blocks. It raises `SettingsError`, with a
text for operators, when the storage can't be reached or denies access, and `OSError` when one file can't be read.
Triton's spellings of URLs work too (docs/how-to/model-repositories.md).
"""

import hashlib
import os
import re
import shutil
import sys
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path, PurePosixPath
from typing import Any, NamedTuple, overload

from qinfer.errors import (
    InvalidRequest,
    ModelLoadFailed,
    SettingsError,
    StoreDenied,
    StoreError,
    StoreNotFound,
    UnsupportedFeature,
)
from qinfer.storage.open import is_bucket, open_store, remedy
from qinfer.storage.store import ANSWER_TIMEOUT_S

IGNORED = "__pycache__"

MAX_FILES = 100_000
"""The most files of a listing, because a repository's path may be a whole disk."""

PAGE_BYTES = 256 * 1024
MAX_PAGES = 512
"""The most pages that are read of a file, 128 MiB; beyond that, a download is cheaper."""

_LOCAL_WHOLE_BYTES = 16 * 2**20  # a smaller file is read at once
_LOCAL_PAGE_BYTES = 4096
_S3_SERVER = re.compile(r"s3://(?:(?P<scheme>https?)://(?P<host>[\w.:-]+)|(?P<server>[\w.-]+:\d+))/(?P<path>.+)")
_SECRET = re.compile(r"(?:https?://)?[^/@]*:[^/@]*@")  # user:password@host; user@host has no password
_REMOTE_WHOLE_BYTES = 4 * 2**20
_MOST_FILES = 10 * MAX_FILES
_LEFT_OUT = frozenset({"", ".", "..", IGNORED})
_NOTHING = "there is no such bucket, or nothing is at this URL"
_MAX_DIGITS = 19  # a version is an int64 on the wire


class Stamp(NamedTuple):
    """A file's size in bytes, and its modification time or entity tag."""

    size: int
    mark: str


@dataclass(frozen=True, slots=True)
class Listing:
    """The content of one model's directory; `files`: path → stamp."""

    files: Mapping[str, Stamp]
    directories: Collection[str]

    def versions(self) -> list[int]:
        """Returns the versions, ascending; a name with a leading 0 is no version."""
        return sorted(
            int(name)
            for name in self.directories
            if name.isascii() and name.isdecimal() and name[0] != "0" and len(name) < _MAX_DIGITS
        )

    def inside(self, directory: str) -> set[str]:
        """Returns the names in a directory."""
        prefix = f"{directory}/"
        paths = (*self.files, *self.directories)
        return {path[len(prefix) :].partition("/")[0] for path in paths if path.startswith(prefix)}

    def digest(self, text: str = "", without: Collection[str] = ()) -> str:
        """Returns a hash of a text and the stamps of all other files."""
        sha = hashlib.sha256(text.encode())
        for path in sorted(self.files):
            if path not in without:
                stamp = self.files[path]
                sha.update(f"\n{path}\t{stamp.size}\t{stamp.mark}".encode("utf-8", "surrogateescape"))
        return sha.hexdigest()


class TooFarSpreadError(Exception):
    """The needed parts of a file are spread over too many pages."""


@dataclass(slots=True)
class Ranges:
    """A part of a file, for one thread; parts share the pages, which are read when they are needed."""

    fetch: Callable[[int, int], bytes]
    end: int
    page_bytes: int = PAGE_BYTES
    max_pages: int = MAX_PAGES
    begin: int = 0
    pages: dict[int, bytes] = field(default_factory=dict)

    def __len__(self) -> int:
        return self.end - self.begin

    @overload
    def __getitem__(self, index: int, /) -> int: ...
    @overload
    def __getitem__(self, index: slice, /) -> "Ranges": ...
    def __getitem__(self, index: int | slice, /) -> "int | Ranges":
        if isinstance(index, slice):
            begin, end, _ = index.indices(len(self))
            return replace(self, begin=self.begin + begin, end=self.begin + max(begin, end))
        if not 0 <= index < len(self):
            raise IndexError(index)
        number, offset = divmod(self.begin + index, self.page_bytes)
        return self._page(number)[offset]

    def tobytes(self) -> bytes:
        """Reads the bytes."""
        if not len(self):
            return b""
        first, last = self.begin // self.page_bytes, (self.end - 1) // self.page_bytes
        content = b"".join(self._page(number) for number in range(first, last + 1))
        return content[self.begin - first * self.page_bytes :][: len(self)]

    def _page(self, number: int) -> bytes:
        page = self.pages.get(number)
        if page is None:
            if len(self.pages) >= self.max_pages:
                raise TooFarSpreadError(f"more than {self.max_pages} pages")
            begin = number * self.page_bytes
            page = self.pages[number] = self.fetch(begin, begin + self.page_bytes)
        return page


Blob = memoryview | Ranges
"""Bytes that need not all be in memory."""


class LocalFiles:
    """The files of a directory."""

    def __init__(self, root: Path) -> None:
        self.root = root

    def models(self) -> list[str]:
        """Returns the directories that are not hidden, sorted."""
        try:
            with os.scandir(self.root) as entries:
                return sorted(e.name for e in entries if not e.name.startswith(".") and e.is_dir())
        except OSError as error:
            raise SettingsError(f"model repository '{self.root}' can't be read: {error.strerror}") from None

    def listings(self) -> dict[str, Listing | Exception]:
        """Returns each directory's listing, or its error."""
        found: dict[str, Listing | Exception] = {}
        for name in self.models():
            try:
                listing = self.listing(name)
            except (OSError, ModelLoadFailed) as error:
                found[name] = error
                continue
            if listing is not None:
                found[name] = listing
        return found

    def listing(self, directory: str) -> Listing | None:
        """Returns a directory's listing, if it exists."""
        root = self.root / directory
        if not root.is_dir():
            return None
        files: dict[str, Stamp] = {}
        directories: set[str] = set()
        todo = [("", str(root))]
        while todo:
            prefix, path = todo.pop()
            with os.scandir(path) as entries:
                for entry in entries:
                    if entry.is_dir():
                        if entry.name != IGNORED and not _leads_back(entry, path):
                            directories.add(prefix + entry.name)
                            todo.append((f"{prefix}{entry.name}/", entry.path))
                    elif entry.is_file():
                        status = entry.stat()
                        files[prefix + entry.name] = Stamp(status.st_size, str(status.st_mtime_ns))
            if len(files) + len(directories) > MAX_FILES:
                raise ModelLoadFailed(f"its directory holds more than {MAX_FILES} files")
        return Listing(files, directories)

    def read(self, path: str, limit_bytes: int) -> bytes:
        """Returns a file's content."""
        with (self.root / path).open("rb") as file:
            content = file.read(limit_bytes + 1)
        if len(content) > limit_bytes:
            raise OSError(0, f"it is larger than {limit_bytes} bytes")
        return content

    @contextmanager
    def blob(self, path: str, size: int) -> Iterator[Blob]:
        """Opens a file without mapping it: access to a mapped file that was truncated would kill the process."""
        with (self.root / path).open("rb") as file:
            if size <= _LOCAL_WHOLE_BYTES:
                yield memoryview(file.read(size))
                return

            def fetch(begin: int, end: int) -> bytes:
                return os.pread(file.fileno(), end - begin, begin)

            yield Ranges(fetch, size, _LOCAL_PAGE_BYTES, sys.maxsize)

    def fetch(self, path: str, target: Path) -> None:
        """Copies a file."""
        shutil.copyfile(self.root / path, target)

    def write(self, path: str, content: bytes) -> None:
        """Writes a file and its directories."""
        target = self.root / path
        try:
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_bytes(content)
        except OSError as error:
            raise SettingsError(f"'{self.root}' can't be written: {error.strerror}") from None

    def remove(self, directory: str) -> None:
        """Removes a directory, if it exists."""
        shutil.rmtree(self.root / directory, ignore_errors=True)


class RemoteFiles:
    """The files below a URL."""

    def __init__(self, url: str) -> None:
        self.url = url
        place = place_of(url)
        self._shown = place.shown
        try:
            self._store, self._root = open_store(place.url, listing_timeout_s=ANSWER_TIMEOUT_S, options=place.options)
        except UnsupportedFeature:
            driver = remedy(place.url.partition("://")[0])
            raise SettingsError(f"model repository '{self._shown}' needs a driver; {driver}") from None
        except InvalidRequest:
            raise SettingsError(
                f"model repository '{self._shown}' has a URL of an unknown kind; use a directory, s3://, gs:// or az://"
            ) from None
        except StoreError as error:
            raise self._access_error(error) from None

    def models(self) -> list[str]:
        """Returns the directories that are not hidden, sorted."""
        with self._named_errors():
            found = self._store.children(self._root)
        if not found:
            raise self._unreadable(_NOTHING)
        return sorted({child.name for child in found if child.is_folder and not child.name.startswith(".")})

    def listings(self) -> dict[str, Listing | Exception]:
        """Lists the repository once; returns the listing of each directory."""
        found = self._find(self._root)
        if not found:
            raise self._unreadable(_NOTHING)
        models: dict[str, dict[str, Stamp]] = {}
        for path, stamp in found.items():
            name, separator, inner = path.partition("/")
            if separator and not name.startswith("."):
                models.setdefault(name, {})[inner] = stamp
        return {name: _listing(models[name]) for name in sorted(models)}

    def listing(self, directory: str) -> Listing | None:
        """Returns a directory's listing, if it exists."""
        found = self._find(self._at(directory))
        return _listing(found) if found else None

    def read(self, path: str, limit_bytes: int) -> bytes:
        """Returns a file's content."""
        content = self._range(path, 0, limit_bytes + 1)
        if len(content) > limit_bytes:
            raise OSError(0, f"it is larger than {limit_bytes} bytes")
        return content

    @contextmanager
    def blob(self, path: str, size: int) -> Iterator[Blob]:
        """Opens a file; of a large one, only needed pages are read."""
        if size <= _REMOTE_WHOLE_BYTES:
            yield memoryview(self.read(path, _REMOTE_WHOLE_BYTES))
        else:
            yield Ranges(partial(self._range, path), size)

    def fetch(self, path: str, target: Path) -> None:
        """Copies a file to this machine."""
        with self._named_errors():
            self._store.fetch(self._at(path), target)

    def write(self, path: str, content: bytes) -> None:
        """Writes a file and its directories."""
        with self._named_errors():
            self._store.write(content, self._at(path))

    def remove(self, directory: str) -> None:
        """Removes a directory, if it exists."""
        with self._named_errors():
            self._store.delete_folder(self._at(directory))

    def _at(self, path: str) -> str:
        return f"{self._root}/{path}"

    def _range(self, path: str, begin: int, end: int) -> bytes:
        with self._named_errors():
            return self._store.read_range(self._at(path), begin, end)

    def _find(self, root: str) -> dict[str, Stamp]:
        """Returns the files below a URL, without paths that would lead out of a copy."""
        found: dict[str, Stamp] = {}
        try:
            with self._named_errors():
                for url, size_bytes, etag in self._store.scan(root):
                    path = url.removeprefix(f"{root}/")
                    if not _LEFT_OUT.intersection(path.split("/")):
                        found[path] = Stamp(size_bytes, etag)
                    if len(found) > _MOST_FILES:
                        raise SettingsError(
                            f"model repository '{self._shown}' holds more than {_MOST_FILES} files; "
                            "check that it is a model repository"
                        )
        except FileNotFoundError:
            return {}
        return found

    @contextmanager
    def _named_errors(self) -> Iterator[None]:
        try:
            yield
        except StoreNotFound:
            raise FileNotFoundError from None
        except StoreError as error:
            raise self._access_error(error) from None

    def _access_error(self, error: StoreError) -> SettingsError:
        return self._unreadable(f"{error.reason}{_REMEDY if isinstance(error, StoreDenied) else ''}")

    def _unreadable(self, reason: str) -> SettingsError:
        return SettingsError(f"model repository '{self._shown}' can't be read: {reason}")


_REMEDY = (
    "; each gateway and each worker needs credentials of its own, in the store's own variables such as "
    "AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY"
)

Files = LocalFiles | RemoteFiles


class RepositoryAddress(NamedTuple):
    """The address of a repository for fsspec, and for operators."""

    url: str
    options: Mapping[str, Any]
    shown: str


def place_of(url: str) -> RepositoryAddress:
    """Parses a repository's URL, or raises `SettingsError`; refuses passwords."""
    protocol, _, rest = url.partition("://")
    shown = f"{protocol}://{rest.rpartition('@')[2].partition('?')[0]}"
    if is_bucket(protocol) and _SECRET.match(rest):
        raise SettingsError(
            f"model repository '{shown}' may have no password in its URL; set the password by the store's own "
            "variables, such as AWS_SECRET_ACCESS_KEY"
        )
    server = _S3_SERVER.fullmatch(url)
    if server is not None:
        host = server["host"] or server["server"]
        return RepositoryAddress(
            f"s3://{server['path']}", {"endpoint_url": f"{server['scheme'] or 'http'}://{host}"}, shown
        )
    if protocol == "as":
        account, _, path = rest.partition("/")
        if not account or not path.strip("/"):
            raise SettingsError(f"model repository '{shown}' must be as://<account>/<container>/<path>")
        return RepositoryAddress(f"az://{path}", {"account_name": account}, shown)
    return RepositoryAddress(url, {}, shown)


def _leads_back(entry: os.DirEntry[str], parent: str) -> bool:
    if not entry.is_symlink():
        return False
    target = os.path.realpath(entry.path)
    return f"{os.path.realpath(parent)}/".startswith(f"{target}/")


def _listing(files: Mapping[str, Stamp]) -> Listing:
    directories = {str(parent) for path in files for parent in PurePosixPath(path).parents} - {"."}
    return Listing(files, directories)
