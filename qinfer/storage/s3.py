"""Stores that speak S3's protocol: PutObject and CompleteMultipartUpload with `If-None-Match: *`.

412 says that the name is taken; 409, that somebody else is about to take it: the upload is made anew. A store that
knows no conditional writes says 501. Then the name is looked at, the object is put and read back, and the log says so
once for a bucket; what two writers at the same moment leave is one of the two, whole.
"""

import logging
import math
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import Any, BinaryIO

from qinfer.core.retry import Backoff
from qinfer.errors import StoreChanged, StoreUnavailable
from qinfer.storage.errors import answer_of, mapped, store_error
from qinfer.storage.fsspec import UPLOADS, FsspecStore
from qinfer.storage.store import Outcome, Stat

logger = logging.getLogger(__name__)

_CONFLICTS = 6  # tries, while others write the same name
_CONFLICT_S = 0.1  # before the second; doubled after each
_MOST_CHUNKS = 10_000
_PAGE = 1000  # objects of a listing in one answer


class S3Store(FsspecStore):
    """An object store that speaks S3's protocol."""

    has_buckets = True

    def __init__(self, files: Any, listing_timeout_s: float | None = None) -> None:
        super().__init__(files, listing_timeout_s)
        self._unconditional: set[str] = set()
        self._lock = threading.Lock()

    def scan(self, prefix: str) -> Iterator[Stat]:
        """Implements `Store.scan`."""
        base = prefix.rstrip("/")
        with mapped(prefix):
            bucket, key, _ = self._files.split_path(self._path(base))
            folder = f"{key}/" if key else ""
            asked: dict[str, str | int] = {"Bucket": bucket, "Prefix": folder, "MaxKeys": _PAGE}
            while True:
                page = self._files.call_s3("list_objects_v2", self._files.req_kw, **asked, **self._listing_options)
                for found in page.get("Contents", ()):
                    name = found["Key"][len(folder) :]
                    if name and not name.endswith("/"):
                        yield Stat(f"{base}/{name}", found["Size"], found["ETag"].strip('"'))
                if not page.get("NextContinuationToken"):
                    return
                asked["ContinuationToken"] = page["NextContinuationToken"]

    def _upload_options(self, size_bytes: int) -> dict[str, int]:
        return {"chunksize": max(self.chunk_bytes, -(-size_bytes // _MOST_CHUNKS)), "max_concurrency": UPLOADS}

    def _create(self, put: Callable[[str], None], source: Callable[[], BinaryIO], url: str) -> Outcome:
        bucket = url.split("/", 3)[2]
        backoff = Backoff(1.5 * _CONFLICT_S, math.inf, jitter=0.7)
        for _ in range(_CONFLICTS):
            if bucket in self._unconditional:
                return self._verified(put, source, url)
            try:
                put("create")
            except FileExistsError:
                return Outcome.EXISTS
            except OSError as error:
                outcome = self._after(error, bucket, url)
                if outcome is not None:
                    return outcome
                if bucket not in self._unconditional:
                    time.sleep(backoff.next_s())
            else:
                return Outcome.CREATED
        raise StoreUnavailable(f"others write '{url}' all the time; try again")

    def _after(self, error: OSError, bucket: str, url: str) -> Outcome | None:
        """Decides about an upload that failed; `None` = try again."""
        answer = answer_of(error)
        if answer.status == 412:
            return Outcome.EXISTS
        if answer.status == 409:
            return None
        if answer.status == 501:
            self._says_501(bucket)
            return None
        if answer.code == "NoSuchUpload" and self.stat(url) is not None:  # the answer to the first try was lost
            return Outcome.EXISTS
        raise store_error(error, url) from None

    def _says_501(self, bucket: str) -> None:
        with self._lock:
            if bucket in self._unconditional:
                return
            self._unconditional.add(bucket)
        logger.warning(
            "the store knows no conditional writes (501): objects are looked for, written and read back instead",
            extra={"bucket": bucket},
        )

    def _verified(self, put: Callable[[str], None], source: Callable[[], BinaryIO], url: str) -> Outcome:
        """Creates an object without a condition: looks before, and compares afterwards."""
        if self.stat(url) is not None:
            return Outcome.EXISTS
        put("overwrite")
        with suppress(StoreChanged), source() as mine, self.open(url, sequential=True) as there:
            while (expected := mine.read(self.chunk_bytes)) == there.read(self.chunk_bytes):
                if not expected:
                    return Outcome.CREATED
        return Outcome.EXISTS  # another's, to be looked at as any that was there before
