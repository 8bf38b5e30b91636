"""S3 objects whose size and etag are known from a listing: each read is one GET, without a HEAD.

Each GET has the etag as its condition, and the answer's etag is compared, for servers that ignore conditions.
"""

import io
from typing import Any

from fsspec.asyn import sync
from s3fs.core import S3_RETRYABLE_ERRORS, version_id_kw  # type: ignore[import-untyped]  # it has no types

from qinfer.errors import StoreChanged
from qinfer.storage.store import Stat, answer_of, fail

_TRIES = 3  # when connections break within an answer
_IS_ANOTHER = 412


class KnownObject(io.RawIOBase):
    """A listed object; only `read_at` is thread-safe."""

    def __init__(self, files: Any, path: str, file: Stat) -> None:
        self._files = files
        self._bucket, self._key, self._version = files.split_path(path)
        self._file = file
        self._at = 0

    def read(self, size: int | None = -1, /) -> bytes:
        """Reads on."""
        left = max(0, self._file.size_bytes - self._at)
        data = self.read_at(left if size is None or size < 0 else size, self._at)
        self._at += len(data)
        return data

    def read_at(self, size: int, place: int) -> bytes:
        """Reads up to `size` bytes at a place, from any thread."""
        end = min(place + size, self._file.size_bytes)
        if place >= end:
            return b""
        try:
            return bytes(sync(self._files.loop, self._get, place, end))
        except StoreChanged:
            raise
        except Exception as error:  # noqa: BLE001  the boundary to the driver
            if answer_of(error).status == _IS_ANOTHER:
                raise self._changed() from None
            fail(error, self._file.url)

    def readall(self) -> bytes:
        """Reads the rest of the object."""
        return self.read()

    def readinto(self, buffer: Any, /) -> int:
        """Reads into a buffer."""
        data = self.read(len(buffer))
        buffer[: len(data)] = data
        return len(data)

    def seek(self, offset: int, whence: int = io.SEEK_SET, /) -> int:
        """Moves the position."""
        self._at = max(0, offset + (0, self._at, self._file.size_bytes)[whence])
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

    async def _get(self, begin: int, end: int) -> bytes:
        for last in (*(False,) * (_TRIES - 1), True):
            answer = await self._files._call_s3(
                "get_object",
                self._files.req_kw,
                Bucket=self._bucket,
                Key=self._key,
                Range=f"bytes={begin}-{end - 1}",
                IfMatch=f'"{self._file.etag}"',
                **version_id_kw(self._version),
            )
            async with answer["Body"] as body:
                if answer["ETag"].strip('"') != self._file.etag:
                    raise self._changed()
                try:
                    return bytes(await body.read())
                except S3_RETRYABLE_ERRORS:
                    if last:
                        raise
        raise AssertionError

    def _changed(self) -> StoreChanged:
        return StoreChanged(f"'{self._file.url}' was replaced since it was listed")
