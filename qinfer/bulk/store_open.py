"""Which adapter serves a URL, and the file system of fsspec that it stands on."""

import os
import threading
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from qinfer.bulk.store_errors import fail
from qinfer.drivers import options_of, remedy
from qinfer.errors import InvalidRequest, UnsupportedFeature
from qinfer.settings import driver_variables

if TYPE_CHECKING:
    from qinfer.bulk.store import ObjectStore

_S3_TRIES = 3

_KINDS = {
    "file": "file", "local": "file", "memory": "memory", "s3": "s3", "s3a": "s3", "gs": "gcs", "gcs": "gcs",
    "az": "azure", "abfs": "azure", "abfss": "azure",
}  # fmt: skip

_opened: dict[object, "ObjectStore"] = {}
_opening: dict[object, threading.Lock] = {}
_lock = threading.Lock()


def opened(url: str) -> "ObjectStore":
    """Returns the store of a URL, the same as before while the environment says the same.

    A process that was forked off gets its own: drivers keep connections and threads.

    Raises:
        InvalidRequest: It is of no kind that jobs can use, or holds credentials.
        UnsupportedFeature: Its driver is not installed.
        StoreDenied: It can't be opened with what the environment says.
    """
    scheme, separator, rest = url.partition("://")
    kind = _KINDS.get(scheme.lower())
    authority = rest.partition("/")[0]
    if not separator or kind is None:
        raise InvalidRequest(f"'{scheme[:20]}://' is no kind of store that jobs use; use s3, gs, az, abfss or file")
    if "@" in authority and (scheme.lower() not in ("abfs", "abfss") or ":" in authority):
        raise InvalidRequest("a store's URL may not hold credentials; they come from the store's own variables")
    account = authority.partition("@")[2]
    key = (kind, account, driver_variables(), os.getpid())
    if found := _opened.get(key):
        return found
    with _lock:
        opening = _opening.setdefault(key, threading.Lock())
    with opening:  # and not `_lock`: a driver that looks for credentials for long must not delay the other stores
        if key not in _opened:
            _opened[key] = _ADAPTERS[kind](f"{scheme}://{authority}/" if kind != "file" else url)
        return _opened[key]


def _file_system(kind: str, url: str) -> Any:
    """Opens fsspec's file system of a URL."""
    scheme = url.partition(":")[0]
    options = options_of(scheme)
    try:
        import fsspec

        if kind == "gcs":
            # Not fsspec's choice, which asks a second API for the kind of a bucket, and writes to zonal ones in a way
            # that shows a file while it grows.
            from gcsfs.core import GCSFileSystem  # type: ignore[import-untyped]  # it has no types

            return GCSFileSystem(**options)
        files, _ = fsspec.core.url_to_fs(url, **options)
    except ImportError:
        raise UnsupportedFeature(
            f"this server has no driver for {scheme}://; its operator installs it with {remedy(scheme)}"
        ) from None
    except Exception as error:  # noqa: BLE001  the boundary to the drivers
        fail(error, url)
    return files


def _file(_: str) -> "ObjectStore":
    from qinfer.bulk.store_local import LocalStore

    return LocalStore()


def _memory(url: str) -> "ObjectStore":
    from qinfer.bulk.store_fsspec import MemoryStore

    return MemoryStore(_file_system("memory", url))


def _s3(url: str) -> "ObjectStore":
    from qinfer.bulk.store_s3 import S3Store

    files = _file_system("s3", url)
    files.retries = _S3_TRIES
    return S3Store(files)


def _gcs(url: str) -> "ObjectStore":
    from qinfer.bulk.store_fsspec import GcsStore

    return GcsStore(_file_system("gcs", url))


def _azure(url: str) -> "ObjectStore":
    from qinfer.bulk.store_fsspec import AzureStore

    return AzureStore(_file_system("azure", url))


_ADAPTERS: Mapping[str, Callable[[str], "ObjectStore"]] = {
    "file": _file, "memory": _memory, "s3": _s3, "gcs": _gcs, "azure": _azure,
}  # fmt: skip
