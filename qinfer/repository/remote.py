"""A model repository at a URL that fsspec knows: `s3://bucket/models`, `gs://…`, `az://container/models`, ….

Triton's own spellings are understood too: `as://account/container/path` for Azure, `s3://host:port/bucket/path` and
`s3://https://host:port/bucket/path` for another server that speaks S3's protocol. Credentials come from the store's own
variables, such as AWS_ACCESS_KEY_ID.
"""

import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from pathlib import Path, PurePosixPath
from typing import Any, NamedTuple

from qinfer.errors import InvalidRequest, SettingsError, StoreError, StoreNotFound, UnsupportedFeature
from qinfer.repository.files import IGNORED, MAX_FILES, Blob, Listing, Ranges, Stamp
from qinfer.storage.errors import ANSWER_TIMEOUT_S
from qinfer.storage.open import is_bucket, open_store, remedy

_S3_SERVER = re.compile(r"s3://(?:(?P<scheme>https?)://(?P<host>[\w.:-]+)|(?P<server>[\w.-]+:\d+))/(?P<path>.+)")
_SECRET = re.compile(r"(?:https?://)?[^/@]*:[^/@]*@")  # user:password@host; user@host holds none
_WHOLE_BYTES = 4 * 2**20  # a smaller file is read at once
_MOST_FILES = 10 * MAX_FILES
_LEFT_OUT = frozenset({"", ".", "..", IGNORED})
_NOTHING = "there is no such bucket, or nothing is at this URL"


class Place(NamedTuple):
    """Where a repository is: a URL as fsspec wants it, what it is opened with, and what operators see of it."""

    url: str
    options: Mapping[str, Any]
    shown: str


def place_of(url: str) -> Place:
    """Reads the URL of a repository.

    Raises:
        SettingsError: It holds a password, or Triton's spelling for Azure lacks a part.
    """
    protocol, _, rest = url.partition("://")
    shown = f"{protocol}://{rest.rpartition('@')[2].partition('?')[0]}"
    if is_bucket(protocol) and _SECRET.match(rest):
        raise SettingsError(
            f"model repository '{shown}' may have no password in its URL; it comes from the store's own variables, "
            "such as AWS_SECRET_ACCESS_KEY"
        )
    server = _S3_SERVER.fullmatch(url)
    if server is not None:
        host = server["host"] or server["server"]
        return Place(f"s3://{server['path']}", {"endpoint_url": f"{server['scheme'] or 'http'}://{host}"}, shown)
    if protocol == "as":
        account, _, path = rest.partition("/")
        if not account or not path.strip("/"):
            raise SettingsError(f"model repository '{shown}' must be as://<account>/<container>/<path>")
        return Place(f"az://{path}", {"account_name": account}, shown)
    return Place(url, {}, shown)


class RemoteFiles:
    """The files below a URL.

    Args:
        url: The repository's URL.

    Raises:
        SettingsError: The URL is of no kind that is known, or its driver is not installed.
    """

    is_remote = True

    def __init__(self, url: str) -> None:
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
            raise self._unreadable(error.reason) from None

    def models(self) -> list[str]:
        """Returns the names of the directories, sorted; hidden ones are left out."""
        with self._named_errors():
            found = self._store.children(self._root)
        if not found:
            raise self._unreadable(_NOTHING)
        return sorted({child.name for child in found if child.is_folder and not child.name.startswith(".")})

    def listings(self) -> dict[str, Listing | Exception]:
        """Returns what each directory holds, by name, of one listing of everything."""
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
        """Returns what a directory holds; `None` when there is none of that name."""
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
        """Opens a file of which only parts are wanted; a small one is read at once."""
        if size <= _WHOLE_BYTES:
            yield memoryview(self.read(path, _WHOLE_BYTES))
        else:
            yield Ranges(partial(self._range, path), size)

    def directory(self, path: str) -> Path | None:
        """Returns `None`: the files are elsewhere."""
        del path
        return None

    def fetch(self, path: str, target: Path) -> None:
        """Copies a file to this machine."""
        with self._named_errors():
            self._store.fetch(self._at(path), target)

    def write(self, path: str, content: bytes) -> None:
        """Writes a file, and the directories that it needs."""
        with self._named_errors():
            self._store.write(content, self._at(path))

    def remove(self, directory: str) -> None:
        """Removes a directory with all that it holds; one that is not there is no error."""
        with self._named_errors():
            self._store.delete_folder(self._at(directory))

    def _at(self, path: str) -> str:
        return f"{self._root}/{path}"

    def _range(self, path: str, begin: int, end: int) -> bytes:
        with self._named_errors():
            return self._store.read_range(self._at(path), begin, end)

    def _find(self, root: str) -> dict[str, Stamp]:
        """Lists the files below a URL, relative to it; paths that would lead out of a copy are left out."""
        found: dict[str, Stamp] = {}
        try:
            with self._named_errors():
                for url, size_bytes, etag in self._store.scan(root):
                    path = url.removeprefix(f"{root}/")
                    if not _LEFT_OUT.intersection(path.split("/")):
                        found[path] = Stamp(size_bytes, etag)
                    if len(found) > _MOST_FILES:
                        raise SettingsError(
                            f"model repository '{self._shown}' holds more than {_MOST_FILES} files; is it one?"
                        )
        except FileNotFoundError:
            return {}
        return found

    @contextmanager
    def _named_errors(self) -> Iterator[None]:
        """Turns a store's error into a `SettingsError` that names the repository, if it is not about one file."""
        try:
            yield
        except StoreNotFound:
            raise FileNotFoundError from None
        except StoreError as error:
            raise self._unreadable(error.reason) from None

    def _unreadable(self, reason: str) -> SettingsError:
        return SettingsError(f"model repository '{self._shown}' can't be read: {reason}")


def _listing(files: Mapping[str, Stamp]) -> Listing:
    directories = {str(parent) for path in files for parent in PurePosixPath(path).parents} - {"."}
    return Listing(files, directories)
