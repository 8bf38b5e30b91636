"""The one `Store`: a directory, or an object store behind fsspec, in which models, payloads and parts of jobs are kept.

Everything blocks and is used in threads. Credentials and endpoints come from the variables of the store's own driver,
such as AWS_ACCESS_KEY_ID, AWS_ENDPOINT_URL, FSSPEC_S3_..., AZURE_STORAGE_CONNECTION_STRING and
GOOGLE_APPLICATION_CREDENTIALS. `qinfer.storage.open` opens the store of a URL.
"""

from abc import ABC, abstractmethod
from collections.abc import Collection, Iterator, Sequence
from enum import Enum
from pathlib import Path
from typing import BinaryIO, NamedTuple

from qinfer.errors import StoreError

BROKEN = "_broken"
"""The folder, beside an object, that `set_aside` moves it to."""


class Outcome(Enum):
    """The outcome of a commit."""

    CREATED = "created"
    EXISTS = "exists"


class Stat(NamedTuple):
    """An object.

    Attributes:
        url: Its URL, spelled as the one that was asked for.
        size_bytes: Its size.
        etag: What changes when the content does: the store's tag or generation; of a file `<mtime>-<size>-<ctime>`, the
            times in ns. No call sets a ctime, so that another file of the same size and mtime has another one. Inodes
            are not part of it, since a file has one for each mount in file systems of users (FUSE).
    """

    url: str
    size_bytes: int
    etag: str

    def is_still(self, etag: str) -> bool:
        """Tells whether the content is that of an earlier etag; earlier plans have `<mtime>-<size>` only."""
        return self.etag == etag or (etag.count("-") == 1 and self.etag == f"{etag}-{self.etag.rpartition('-')[2]}")


class Child(NamedTuple):
    """One entry of a folder: its name there, and whether it is a folder itself."""

    name: str
    is_folder: bool


class Store(ABC):
    """An object store, or a directory; one for all URLs of a kind.

    Every method raises a `StoreError`: `StoreUnavailable` (try again), `StoreDenied`, `StoreNotFound` (also of a
    bucket), `StoreChanged`.

    Attributes:
        sees_changes: Whether each read of `open_known` raises `StoreChanged` where the object is another one by then.
    """

    sees_changes = False

    # --- creating: a name is created whole or not at all, and once, whoever else tries at the same moment ---

    @abstractmethod
    def commit_if_absent(self, local: Path, url: str) -> Outcome:
        """Makes a local file the object at a URL, unless there is one; a killed process leaves nothing under the name.

        `EXISTS` may be an earlier try of the same process whose answer was lost: look at what is there. A store that
        knows no conditional writes (501) is asked before and after, and then two who commit at the same moment may
        both be told `CREATED`; what is there is one of the two, whole.

        Args:
            local: The file, not empty; it stays the caller's to delete, and must not be changed afterwards.
            url: Where it goes.

        Raises:
            ValueError: The file is empty.
            StoreError: It could not be committed; what was sent may be garbage that the store keeps apart.
        """

    @abstractmethod
    def put_if_absent(self, data: bytes, url: str) -> Outcome:
        """Does the same with bytes; raises the same."""

    # --- writing: for names that only one writer knows ---

    @abstractmethod
    def write(self, data: bytes, url: str, *, synced: bool = False) -> None:
        """Writes an object in place of what is there; of a directory, a killed process may leave a part of it.

        Args:
            data: The bytes.
            url: Where they go; a missing folder is made, a missing bucket is not.
            synced: Return only when they are on the disk; object stores always do.
        """

    @abstractmethod
    def copy(self, url: str, to: str) -> None:
        """Copies an object within the store.

        Raises:
            StoreNotFound: There is none.
        """

    # --- reading ---

    def read(self, url: str, limit_bytes: int) -> bytes:
        """Returns an object's bytes.

        Raises:
            StoreNotFound: There is none.
            StoreError: It is larger than `limit_bytes`; no more than one beyond these is read.
        """
        data = self.read_range(url, 0, limit_bytes + 1)
        if len(data) > limit_bytes:
            raise StoreError(f"'{url}' has {len(data)} bytes or more; at most {limit_bytes} can be read here")
        return data

    @abstractmethod
    def read_range(self, url: str, begin: int, end: int) -> bytes:
        """Returns the bytes from a begin to an end; fewer where the object ends before.

        Raises:
            StoreNotFound: There is none.
        """

    @abstractmethod
    def fetch(self, url: str, target: Path) -> None:
        """Copies an object to a local file, a piece at a time.

        Raises:
            StoreNotFound: There is none.
        """

    @abstractmethod
    def open(self, url: str, *, sequential: bool = False) -> BinaryIO:
        """Opens an object to read: seekable, and to be closed.

        Args:
            url: The object.
            sequential: It is read from the first to the last byte, so that what comes next is fetched ahead; else
                exactly what is read is fetched, as readers of Parquet and Arrow want it (their `pre_buffer`).

        Raises:
            StoreNotFound: There is none.
            StoreChanged: From reading: another object took its place meanwhile (where the store tells).
        """

    def open_known(self, file: Stat, *, sequential: bool = False) -> BinaryIO:
        """Opens an object that was listed; asks the store for no size, where the store reads without it.

        Args:
            file: The object, as `scan` or `stat` returned it.
            sequential: As in `open`.

        Raises:
            StoreNotFound, StoreChanged: As `open`; perhaps not before it is read.
        """
        return self.open(file.url, sequential=sequential)

    # --- looking ---

    @abstractmethod
    def stat(self, url: str) -> Stat | None:
        """Returns what an object is; `None` when there is none, which in some stores includes a missing bucket."""

    def listed(self, urls: Sequence[str]) -> dict[str, Stat | None]:
        """Returns what listings say of objects, where the store lists many as fast as it looks at one.

        Args:
            urls: The objects.

        Returns:
            URL → what `stat` would return; of all, of some, or of none: the others are to be looked at.
        """
        del urls
        return {}

    def possible_folders(self, folder: str, names: Collection[str]) -> set[str]:
        """Returns which of some names may be folders within a folder; all of them where the store can't tell fast."""
        del folder
        return set(names)

    @abstractmethod
    def children(self, folder: str) -> list[Child]:
        """Returns what is directly in a folder; nothing where there is no such folder or bucket."""

    @abstractmethod
    def scan(self, prefix: str) -> Iterator[Stat]:
        """Returns everything below a folder, in the store's own order; nothing where there is no such folder.

        From S3 and directories it comes as it is asked for: page by page.

        Raises:
            StoreNotFound: From reading: there is no such bucket.
        """

    # --- removing ---

    @abstractmethod
    def set_aside(self, url: str, etag: str = "") -> None:
        """Moves a broken object to `<folder>/_broken/<name>-<n>`, so that its name is free; one that is gone stays so.

        Args:
            url: The object.
            etag: Only if it is this one still; empty = whatever is there.
        """

    @abstractmethod
    def delete(self, url: str) -> None:
        """Deletes an object; one that is gone is no error."""

    @abstractmethod
    def delete_folder(self, url: str) -> None:
        """Deletes a folder with all that it holds; one that is gone is no error."""
