"""A model repository at a URL that fsspec knows: `s3://bucket/models`, `gs://…`, `az://container/models`, ….

Triton's own spellings are understood too: `as://account/container/path` for Azure, `s3://host:port/bucket/path` and
`s3://https://host:port/bucket/path` for another server that speaks S3's protocol. Credentials come from the store's own
variables, such as AWS_ACCESS_KEY_ID.
"""

import re
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path, PurePosixPath
from typing import Any, NamedTuple, TypeVar

import fsspec

from qinfer.errors import SettingsError
from qinfer.repository.files import IGNORED, MAX_FILES, Blob, Listing, Stamp
from qinfer.repository.ranges import Ranges
from qinfer.storage.open import driver_options, is_bucket, remedy

Result = TypeVar("Result")

LISTING_TIMEOUT_S = 60
"""Some drivers look for credentials, or try again, for minutes."""

_S3_SERVER = re.compile(r"s3://(?:(?P<scheme>https?)://(?P<host>[\w.:-]+)|(?P<server>[\w.-]+:\d+))/(?P<path>.+)")
_SECRET = re.compile(r"(?:https?://)?[^/@]*:[^/@]*@")  # user:password@host; user@host holds none
_MARKS = ("ETag", "etag", "generation", "md5Hash", "LastModified", "last_modified", "updated", "mtime", "created")
_WHOLE_BYTES = 4 * 2**20  # a smaller file is read at once
_REASON_CHARACTERS = 300
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
    options = driver_options(protocol)
    server = _S3_SERVER.fullmatch(url)
    if server is not None:
        host = server["host"] or server["server"]
        options["endpoint_url"] = f"{server['scheme'] or 'http'}://{host}"
        return Place(f"s3://{server['path']}", options, shown)
    if protocol == "as":
        account, _, path = rest.partition("/")
        if not account or not path.strip("/"):
            raise SettingsError(f"model repository '{shown}' must be as://<account>/<container>/<path>")
        return Place(f"az://{path}", {**driver_options("az"), "account_name": account}, shown)
    return Place(url, options, shown)


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
        protocol = place.url.partition("://")[0]
        try:
            self._files, root = fsspec.core.url_to_fs(place.url, **place.options)
        except ImportError:
            raise SettingsError(f"model repository '{self._shown}' needs a driver; {remedy(protocol)}") from None
        except ValueError as error:
            if protocol in fsspec.available_protocols():
                raise self._failure(error) from None
            raise SettingsError(
                f"model repository '{self._shown}' has a URL of an unknown kind; use a directory, s3://, gs:// or az://"
            ) from None
        except Exception as error:  # noqa: BLE001  the boundary to the drivers
            raise self._failure(error) from None
        self._root = str(root).rstrip("/")
        self._timeout = {"timeout": LISTING_TIMEOUT_S} if self._files.async_impl else {}

    def models(self) -> list[str]:
        """Returns the names of the directories, sorted; hidden ones are left out."""
        try:
            infos = self._call(lambda: self._files.ls(self._root, detail=True, **self._timeout))
        except FileNotFoundError:
            infos = []
        names = {str(info["name"]).rstrip("/").rpartition("/")[2] for info in infos if info.get("type") == "directory"}
        if not infos:
            raise SettingsError(f"model repository '{self._shown}' can't be read: {_NOTHING}")
        return sorted(name for name in names if not name.startswith("."))

    def listings(self) -> dict[str, Listing | Exception]:
        """Returns what each directory holds, by name, of one listing of everything."""
        found = self._find(self._root)
        if not found:
            raise SettingsError(f"model repository '{self._shown}' can't be read: {_NOTHING}")
        models: dict[str, dict[str, Stamp]] = {}
        for path, stamp in found.items():
            name, separator, inner = path.partition("/")
            if separator and not name.startswith("."):
                models.setdefault(name, {})[inner] = stamp
        return {name: _listing(models[name]) for name in sorted(models)}

    def listing(self, directory: str) -> Listing | None:
        """Returns what a directory holds; `None` when there is none of that name."""
        found = self._find(f"{self._root}/{directory}")
        return _listing(found) if found else None

    def read(self, path: str, limit_bytes: int) -> bytes:
        """Returns a file's content."""
        content: bytes = self._call(lambda: self._files.cat_file(self._at(path)))
        if len(content) > limit_bytes:
            raise OSError(0, f"it is larger than {limit_bytes} bytes")
        return content

    def blob(self, path: str, size: int) -> Blob:
        """Opens a file of which only parts are wanted; a small one is read at once."""
        if size <= _WHOLE_BYTES:
            return memoryview(self.read(path, _WHOLE_BYTES))

        def fetch(begin: int, end: int) -> bytes:
            content: bytes = self._call(lambda: self._files.cat_file(self._at(path), start=begin, end=end))
            return content

        return Ranges(fetch, size)

    def directory(self, path: str) -> Path | None:
        """Returns `None`: the files are elsewhere."""
        del path
        return None

    def fetch(self, path: str, target: Path) -> None:
        """Copies a file to this machine."""
        self._call(lambda: self._files.get_file(self._at(path), str(target)))

    def write(self, path: str, content: bytes) -> None:
        """Writes a file; object stores make directories as they are needed."""

        def write() -> None:
            with suppress(NotImplementedError):
                self._files.makedirs(self._at(path).rpartition("/")[0], exist_ok=True)
            self._files.pipe_file(self._at(path), content)

        self._call(write)

    def remove(self, directory: str) -> None:
        """Removes a directory with all that it holds; one that is not there is no error."""
        with suppress(FileNotFoundError):
            self._call(lambda: self._files.rm(self._at(directory), recursive=True))

    def _at(self, path: str) -> str:
        return f"{self._root}/{path}"

    def _find(self, root: str) -> dict[str, Stamp]:
        """Lists the files below a path, relative to it; paths that would lead out of a copy are left out."""
        try:
            infos = self._call(lambda: self._files.find(root, detail=True, **self._timeout))
        except FileNotFoundError:
            return {}
        if len(infos) > 10 * MAX_FILES:
            raise SettingsError(f"model repository '{self._shown}' holds {len(infos)} files; is it one?")
        found: dict[str, Stamp] = {}
        for name, info in infos.items():
            path = str(name).removeprefix(f"{root}/")
            if path == name or info.get("type") == "directory":  # not below it: some drivers match the prefix of a name
                continue
            if {"", ".", "..", IGNORED} & set(path.split("/")):
                continue
            mark = next((str(info[key]) for key in _MARKS if info.get(key)), "")
            found[path] = Stamp(int(info.get("size") or 0), mark)
        return found

    def _call(self, call: Callable[[], Result]) -> Result:
        """Calls the driver; what is not about one file becomes a `SettingsError`."""
        try:
            self._files.invalidate_cache()
            return call()
        except (FileNotFoundError, IsADirectoryError, NotADirectoryError):
            raise
        except Exception as error:  # noqa: BLE001  the boundary to the drivers, each of which has errors of its own
            raise self._failure(error) from None

    def _failure(self, error: Exception) -> SettingsError:
        text = " ".join(str(error).split())[:_REASON_CHARACTERS]
        if isinstance(error, TimeoutError) or type(error).__name__ == "FSTimeoutError":
            text = f"no answer within {LISTING_TIMEOUT_S} s; are there credentials, and is the store reached?"
        return SettingsError(f"model repository '{self._shown}' can't be read: {type(error).__name__}: {text}")


def _listing(files: Mapping[str, Stamp]) -> Listing:
    directories = {str(parent) for path in files for parent in PurePosixPath(path).parents} - {"."}
    return Listing(files, directories)
