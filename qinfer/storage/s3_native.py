"""Large S3 objects by Arrow's client, which fetches several ranges at once without the interpreter.

botocore finds credentials, endpoint and region. With options for fsspec alone (`FSSPEC_S3_…`), or if Arrow's client
fails, `store.open` reads.
"""

import logging
import threading
from typing import Any, NamedTuple
from urllib.parse import urlsplit
from weakref import WeakKeyDictionary

import pyarrow as pa

from qinfer.storage.open import CONNECT_TIMEOUT_S, READ_TIMEOUT_S, addressing_style
from qinfer.storage.store import Store

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


def open_native(store: Store, url: str) -> pa.NativeFile | None:
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
