"""The interface `Store`: a directory or an object store for models, payloads and parts of jobs.

Methods block and run in threads. Drivers read credentials and endpoints from their variables, such as
AWS_ACCESS_KEY_ID, AWS_ENDPOINT_URL, FSSPEC_S3_..., AZURE_STORAGE_CONNECTION_STRING and GOOGLE_APPLICATION_CREDENTIALS.
"""

from abc import ABC, abstractmethod
from collections.abc import Collection, Iterator, Sequence
from enum import Enum
from pathlib import Path
from typing import BinaryIO, NamedTuple

from qinfer.errors import StoreError
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
