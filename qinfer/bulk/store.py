"""The port to object stores: what a bulk job reads its inputs from and commits its outputs to (DESIGN.md §6).

Everything blocks and is used in threads. A name is created whole or not at all, and once: `commit_if_absent` and
`put_if_absent` never replace anything, whoever else tries at the same moment, and leave nothing under the name when
the process is killed. Credentials and endpoints come from the variables of the store's own driver, such as
AWS_ACCESS_KEY_ID, AWS_ENDPOINT_URL, FSSPEC_S3_..., AZURE_STORAGE_CONNECTION_STRING, GOOGLE_APPLICATION_CREDENTIALS.
"""

from collections.abc import Iterator
from enum import Enum
from pathlib import Path
from typing import BinaryIO, NamedTuple, Protocol

BROKEN = "_broken"
"""The folder, beside an object, that `set_aside` moves it to."""


class Outcome(Enum):
    """What became of a commit."""

    CREATED = "created"
    EXISTS = "exists"


class Stat(NamedTuple):
    """An object.

    Attributes:
        url: Its URL, spelled as the one that was asked for.
        size_bytes: Its size.
        etag: What changes when the content does: the store's tag or generation; of a file `<mtime in ns>-<size>`.
    """

    url: str
    size_bytes: int
    etag: str


class ObjectStore(Protocol):
    """An object store, or a directory; one for all URLs of a kind.

    Every method raises a `StoreError`: `StoreUnavailable` (try again), `StoreDenied`, `StoreNotFound` (also of a
    bucket), `StoreChanged`.
    """

    def commit_if_absent(self, local: Path, url: str) -> Outcome:
        """Makes a local file the object at a URL, unless there is one.

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
        ...

    def put_if_absent(self, data: bytes, url: str) -> Outcome:
        """Does the same with bytes; raises the same."""
        ...

    def read(self, url: str, limit_bytes: int) -> bytes:
        """Returns an object's bytes.

        Raises:
            StoreNotFound: There is none.
            StoreError: It is larger than `limit_bytes`.
        """
        ...

    def stat(self, url: str) -> Stat | None:
        """Returns what an object is; `None` when there is none, which in some stores includes a missing bucket."""
        ...

    def list(self, prefix: str) -> Iterator[Stat]:
        """Returns everything below a folder, sorted by URL; nothing where there is no such folder.

        Raises:
            StoreNotFound: There is no such bucket.
        """
        ...

    def scan(self, prefix: str) -> Iterator[Stat]:
        """Returns the same in the store's own order, and from S3 and directories as it is asked for: page by page.

        Raises:
            StoreNotFound: From reading: there is no such bucket.
        """
        ...

    def set_aside(self, url: str, etag: str = "") -> None:
        """Moves a broken object to `<folder>/_broken/<name>-<n>`, so that its name is free; one that is gone stays so.

        Args:
            url: The object.
            etag: Only if it is this one still; empty = whatever is there.
        """
        ...

    def delete(self, url: str) -> None:
        """Deletes an object; one that is gone is no error."""
        ...

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
        ...


def store_for(url: str) -> ObjectStore:
    """Returns the store of a URL; cheap when asked again.

    Raises:
        InvalidRequest: It is of no kind that jobs can use, or holds credentials.
        UnsupportedFeature: Its driver is not installed.
        StoreDenied: It can't be opened with what the environment says.
    """
    from qinfer.bulk.store_open import opened

    return opened(url)
