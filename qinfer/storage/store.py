"""The interface `Store`: a directory or an object store for models, payloads and parts of jobs.

Methods block and run in threads. Drivers read credentials and endpoints from their variables, such as
AWS_ACCESS_KEY_ID, AWS_ENDPOINT_URL, FSSPEC_S3_..., AZURE_STORAGE_CONNECTION_STRING and GOOGLE_APPLICATION_CREDENTIALS.

Drivers' texts have endpoints, account names and key ids. The message of a `StoreError` has none of them; the driver's
text is the error's `reason`, for operators only.
"""

import errno
import io
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from enum import Enum
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple, NoReturn, TypeVar

from qinfer.core.retry import Backoff
from qinfer.errors import QinferError, StoreChanged, StoreDenied, StoreError, StoreFull, StoreNotFound, StoreUnavailable
from qinfer.tensors import Bytes

BROKEN = "_broken"
"""The folder beside an object for `set_aside`."""


class CommitOutcome(Enum):
    """The outcome of a commit."""

    CREATED = "created"
    EXISTS = "exists"


class Stat(NamedTuple):
    """An object.

    `etag` changes with the content: the store's tag or generation, or a file's `<mtime>-<size>-<ctime>` in ns. The
    ctime is in it, because no call can set it; an inode differs between mounts (FUSE).
    """

    url: str
    size_bytes: int
    etag: str

    def is_still(self, etag: str) -> bool:
        """Compares with an earlier etag, in old plans `<mtime>-<size>`."""
        return self.etag == etag or (etag.count("-") == 1 and self.etag == f"{etag}-{self.etag.rpartition('-')[2]}")


class PlacedFile(io.RawIOBase):
    """A file of known size that `read_at` reads; its position is for one thread."""

    def __init__(self, size: int) -> None:
        self._size, self._at = size, 0

    def read_at(self, size: int, place: int) -> bytes:
        """Reads up to `size` bytes at a place."""
        raise NotImplementedError

    def read(self, size: int | None = -1, /) -> bytes:
        """Reads on."""
        data = self.read_at(max(0, self._size - self._at) if size is None or size < 0 else size, self._at)
        self._at += len(data)
        return data

    def readall(self) -> bytes:
        """Reads the rest."""
        return self.read()

    def readinto(self, buffer: Any, /) -> int:
        """Reads into a buffer."""
        data = self.read(len(buffer))
        buffer[: len(data)] = data
        return len(data)

    def seek(self, offset: int, whence: int = io.SEEK_SET, /) -> int:
        """Moves the position."""
        self._at = max(0, offset + (0, self._at, self._size)[whence])
        return self._at

    def tell(self) -> int:
        """Returns the position."""
        return self._at

    def readable(self) -> bool:
        """Returns True."""
        return True

    def seekable(self) -> bool:
        """Returns True."""
        return True


class Child(NamedTuple):
    """An entry of a folder."""

    name: str
    is_folder: bool


class Store(ABC):
    """An object store or a directory; one object serves all URLs of a kind.

    Every method raises a `StoreError`: `StoreUnavailable` (try again), `StoreDenied`, `StoreNotFound` (also of a
    bucket), `StoreChanged`.

    Attributes:
        sees_changes: Each read of `open_known` raises `StoreChanged` if the object was replaced.
    """

    sees_changes = False

    # --- creating: atomic, and once per name among concurrent writers ---

    @abstractmethod
    def commit_if_absent(self, local: Path, url: str) -> CommitOutcome:
        """Makes a local file the object at a URL, unless one exists; a killed process leaves nothing there.

        After `EXISTS` look at the object: it may be an own earlier try whose answer was lost. Without conditional
        writes (501) two simultaneous writers may both get `CREATED`; one object remains, whole. `local` must not be
        empty, and not change afterwards; the caller deletes it.
        """

    @abstractmethod
    def put_if_absent(self, data: bytes, url: str) -> CommitOutcome:
        """Does the same with bytes."""

    # --- writing: for names with a single writer ---

    @abstractmethod
    def write(self, data: Bytes, url: str, *, synced: bool = False) -> None:
        """Writes or replaces an object, creating folders but not buckets.

        In a directory a killed process may leave a part. `synced` waits until it is on disk, as object stores always
        do.
        """

    @abstractmethod
    def copy(self, url: str, to: str, *, synced: bool = False) -> None:
        """Copies an object within the store; `synced` as in `write`."""

    # --- reading ---

    def read(self, url: str, limit_bytes: int) -> bytes:
        """Returns an object, or `StoreError` above `limit_bytes`."""
        data = self.read_range(url, 0, limit_bytes + 1)
        if len(data) > limit_bytes:
            raise StoreError(f"'{url}' has {len(data)} bytes or more; at most {limit_bytes} can be read here")
        return data

    @abstractmethod
    def read_range(self, url: str, begin: int, end: int) -> bytes:
        """Returns a range of bytes, shorter at the end."""

    @abstractmethod
    def fetch(self, url: str, target: Path) -> None:
        """Copies an object to a local file."""

    @abstractmethod
    def open(self, url: str, *, sequential: bool = False) -> BinaryIO:
        """Opens an object for reading: seekable, closed by the caller.

        `sequential` reads ahead; else only the ranges read are fetched, as for Parquet and Arrow (`pre_buffer`).
        """

    def open_known(self, file: Stat, *, sequential: bool = False) -> BinaryIO:
        """Opens a result of `scan` or `stat`, if possible without asking for its size."""
        return self.open(file.url, sequential=sequential)

    # --- looking ---

    @abstractmethod
    def stat(self, url: str) -> Stat | None:
        """Returns size and etag; `None` if the object, or in some stores its bucket, is missing."""

    def listed(self, urls: Sequence[str]) -> dict[str, Stat | None]:
        """Returns quick `stat` results, for all, some or none of the objects."""
        del urls
        return {}

    def possible_folders(self, folder: str, names: Collection[str]) -> set[str]:
        """Returns the names that may be folders; all if the store can't tell quickly."""
        del folder
        return set(names)

    @abstractmethod
    def children(self, folder: str) -> list[Child]:
        """Returns a folder's entries, none if it is missing."""

    @abstractmethod
    def scan(self, prefix: str) -> Iterator[Stat]:
        """Yields all objects below a folder in the store's order, from S3 and directories page by page.

        A missing folder has no objects; a missing bucket raises `StoreNotFound`.
        """

    # --- removing ---

    @abstractmethod
    def set_aside(self, url: str, etag: str = "") -> None:
        """Moves a broken object to `<folder>/_broken/<name>-<n>`; with `etag` only if it still has that."""

    @abstractmethod
    def delete(self, url: str) -> None:
        """Deletes an object, if it exists."""

    @abstractmethod
    def delete_folder(self, url: str) -> None:
        """Deletes a folder with its content."""


_NO_CREDENTIALS = {
    "ClientAuthenticationError",
    "CredentialRetrievalError",
    "CredentialUnavailableError",
    "DefaultCredentialsError",
    "InvalidConfigError",
    "NoAuthTokenError",
    "NoCredentialsError",
    "PartialCredentialsError",
    "ProfileNotFound",
    "TokenRetrievalError",
    "UnauthorizedSSOTokenError",
}
_WRONG_NAMES = {"ParamValidationError"}  # botocore's
_WRONG = (ValueError, TypeError, IsADirectoryError, NotADirectoryError)
_DENIED_ERRNO = {errno.EACCES, errno.EPERM, errno.EROFS}
_WRONG_ERRNO = {errno.ENAMETOOLONG, errno.ELOOP, errno.EINVAL}
_FORBIDDEN = "Forbidden"  # gcsfs has no class for it
_LATER = {408, 409, 412, 425, 429}
_LONGEST = 200
_TRIES = 5
_FIRST_PAUSE_S = 0.2

T = TypeVar("T")
_REASON_CHARACTERS = 300

ANSWER_TIMEOUT_S = 60
"""Bounds drivers that look for credentials, or retry, for minutes."""


StoreFor = Callable[[str], Store]
"""Returns the store of a URL."""


class StoreAnswer(NamedTuple):
    """The HTTP status (0 = none), and the store's code, such as `SlowDown`."""

    status: int = 0
    code: str = ""


@contextmanager
def mapped(url: str) -> Iterator[None]:
    """Turns drivers' errors into `StoreError`s; qinfer's own pass."""
    try:
        yield
    except QinferError:
        raise
    except Exception as error:  # noqa: BLE001  the boundary to the drivers, each of which has errors of its own
        fail(error, url)


def fail(error: Exception, url: str) -> NoReturn:
    """Raises the `StoreError` of a driver's error."""
    raise store_error(error, url) from None


def store_error(error: Exception, url: str) -> StoreError:
    """Returns the `StoreError` of a driver's error."""
    named = _named(error, url)
    text = " ".join(str(error).split())[:_REASON_CHARACTERS]
    if isinstance(error, TimeoutError):
        text = f"no answer within {ANSWER_TIMEOUT_S} s; are there credentials, and is the store reachable?"
    named.reason = f"{type(error).__name__}: {text}"
    return named


def patiently(work: Callable[[], T]) -> T:
    """Runs `work` on one of many files, retrying while the store is busy or away."""
    backoff = Backoff(_FIRST_PAUSE_S, jitter=0.5)
    for _ in range(_TRIES - 1):
        try:
            return work()
        except StoreUnavailable:
            time.sleep(backoff.next_s())
    return work()


def answer_of(error: BaseException | None) -> StoreAnswer:
    """Finds the store's answer in an error or its causes."""
    while error is not None:
        response = getattr(error, "response", None)
        if isinstance(response, dict):  # botocore's
            status = response.get("ResponseMetadata", {}).get("HTTPStatusCode", 0)
            return StoreAnswer(int(status or 0), str(response.get("Error", {}).get("Code", "")))
        for name in ("status_code", "code", "status"):  # azure's, gcsfs', aiohttp's
            status = getattr(error, name, None)
            if isinstance(status, int) or (isinstance(status, str) and status.isdecimal()):
                code = getattr(error, "error_code", "") or ""
                return StoreAnswer(int(status), str(getattr(code, "value", code)))
        error = error.__cause__
    return StoreAnswer()


def not_empty(size_bytes: int, url: str) -> None:
    """Raises `ValueError`: stores and drivers take empty objects for folder markers."""
    if size_bytes == 0:
        raise ValueError(f"an empty object can't be committed to '{url}'")


def _named(error: Exception, url: str) -> StoreError:
    shown = url if len(url) <= _LONGEST else f"{url[:_LONGEST]}…"
    answer = answer_of(error)
    what = ", ".join(filter(None, [type(error).__name__, answer.code, str(answer.status or "")]))
    if type(error).__name__ == "FileExpired":
        return StoreChanged(f"'{shown}' was replaced while it was read")
    if isinstance(error, FileNotFoundError) or answer.status == 404:
        return StoreNotFound(f"'{shown}' does not exist, or its bucket does not")
    if _is_denied(error, answer):
        remedy = "it needs credentials in the store's own variables that allow reading and writing there"
        if isinstance(error, OSError) and error.errno == errno.EROFS:
            remedy = "its file system is read-only here, name another folder"
        elif shown.startswith("file://"):
            remedy = "change its permissions or its owner"
        return StoreDenied(f"'{shown}' is not open to this server ({what}); {remedy}")
    if _is_wrong(error, answer):
        return StoreError(f"the store refuses '{shown}' ({what}); is the URL right?")
    if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
        return StoreFull(f"there is no space left for '{shown}'")
    return StoreUnavailable(f"the store of '{shown}' can't be reached, or fails, now ({what}); try again")


def _is_denied(error: Exception, answer: StoreAnswer) -> bool:
    return (
        isinstance(error, PermissionError)
        or answer.status in (401, 403)
        or type(error).__name__ in _NO_CREDENTIALS
        or (isinstance(error, OSError) and (error.errno in _DENIED_ERRNO or str(error).startswith(_FORBIDDEN)))
    )


def _is_wrong(error: Exception, answer: StoreAnswer) -> bool:
    if answer.status:
        return 400 <= answer.status < 500 and answer.status not in _LATER
    if type(error).__name__ in _WRONG_NAMES or isinstance(error, _WRONG):
        return True
    return isinstance(error, OSError) and error.errno in _WRONG_ERRNO
