"""Objects of S3, read with few requests.

If size and etag are known from a listing, each read is one GET, without a HEAD. It has the etag as its condition, and
the answer's etag is compared, for servers that ignore conditions.

Arrow's client reads large objects: it fetches several ranges at once without the interpreter. botocore finds
credentials, endpoint and region. With options for fsspec alone (`FSSPEC_S3_…`), or if Arrow's client fails,
`store.open` reads.
"""

import logging
import threading
from typing import TYPE_CHECKING, Any, NamedTuple
from urllib.parse import urlsplit
from weakref import WeakKeyDictionary

from qinfer.errors import StoreChanged
from qinfer.storage.open import CONNECT_TIMEOUT_S, READ_TIMEOUT_S, addressing_style
from qinfer.storage.store import PlacedFile, Stat, Store, answer_of, fail

if TYPE_CHECKING:
    import pyarrow as pa

_TRIES = 3  # when connections break within an answer
_IS_ANOTHER = 412


class KnownObject(PlacedFile):
    """A listed object; only `read_at` is thread-safe."""

    def __init__(self, files: Any, path: str, file: Stat) -> None:
        super().__init__(file.size_bytes)
        self._files = files
        self._bucket, self._key, self._version = files.split_path(path)
        self._file = file

    def read_at(self, size: int, place: int) -> bytes:
        """Reads up to `size` bytes at a place, from any thread."""
        from fsspec.asyn import sync

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

    async def _get(self, begin: int, end: int) -> bytes:
        from s3fs.core import (  # type: ignore[import-untyped]  # it has no types
            S3_RETRYABLE_ERRORS,
            version_id_kw,
        )

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


logger = logging.getLogger(__name__)

_AWS = (".amazonaws.com", ".amazonaws.com.cn")


class _S3Connection(NamedTuple):
    """Connection parameters; without an `endpoint` AWS' for the region, with virtual-hosted buckets."""

    session: Any
    region: str
    endpoint: str
    is_virtual: bool


_lock = threading.Lock()
_ways: "WeakKeyDictionary[Store, _S3Connection | None]" = WeakKeyDictionary()


def open_native(store: Store, url: str) -> "pa.NativeFile | None":
    """Opens an S3 object, if possible. Parameters are cached per store."""
    try:
        with _lock:
            if store not in _ways:
                _ways[store] = _find_way()
            way = _ways[store]
        return None if way is None else _files(way).open_input_file(url.partition("://")[2])
    except Exception as error:  # noqa: BLE001  the boundary to two drivers; the store's own one says what is wrong
        logger.debug("an object is not read by Arrow's client of S3", extra={"reason": type(error).__name__})
        return None


def _find_way() -> _S3Connection | None:
    import fsspec.config
    from botocore.config import Config  # type: ignore[import-untyped]  # it has no types
    from botocore.session import Session  # type: ignore[import-untyped]  # it has no types

    if fsspec.config.conf.get("s3"):
        return None
    session = Session()
    if session.get_credentials() is None:
        return None  # s3fs then asks without credentials
    given = addressing_style()
    meta = session.create_client("s3", config=Config(s3={"addressing_style": given}) if given else None).meta
    style = (meta.config.s3 or {}).get("addressing_style")  # botocore's default
    is_aws = (urlsplit(meta.endpoint_url).hostname or "").endswith(_AWS)
    endpoint = "" if is_aws and style != "path" else meta.endpoint_url
    return _S3Connection(session, meta.region_name, endpoint, style == "virtual")


def _files(way: _S3Connection) -> Any:
    from pyarrow.fs import S3FileSystem

    credentials = way.session.get_credentials().get_frozen_credentials()  # before they expire
    parts = urlsplit(way.endpoint)
    return S3FileSystem(
        access_key=credentials.access_key,
        secret_key=credentials.secret_key,
        session_token=credentials.token,
        region=way.region,
        scheme=parts.scheme or "https",
        endpoint_override=parts.netloc or None,
        force_virtual_addressing=way.is_virtual,
        connect_timeout=CONNECT_TIMEOUT_S,
        request_timeout=READ_TIMEOUT_S,
    )
