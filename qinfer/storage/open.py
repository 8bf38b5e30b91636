"""Opens the `Store` of a URL, over fsspec's file system; `Within` only below certain prefixes, even through links."""

import os
import threading
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from qinfer.core.store_urls import UrlGrant, is_below, not_allowed
from qinfer.errors import InvalidRequest, SettingsError, UnsupportedFeature
from qinfer.storage.local import LocalStore, local_path
from qinfer.storage.store import ANSWER_TIMEOUT_S, Store, fail

CONNECT_TIMEOUT_S = 5
READ_TIMEOUT_S = ANSWER_TIMEOUT_S

S3_ADDRESSING = "AWS_S3_ADDRESSING_STYLE"
"""Bucket names in requests to S3: in the path, or in the host's name (`virtual`).

botocore's default is the path for custom endpoints.
"""

_S3_STYLES = ("auto", "path", "virtual")
_S3_TRIES = 3
_KINDS = {
    "file": "file", "local": "file", "memory": "memory", "s3": "s3", "s3a": "s3", "gs": "gcs", "gcs": "gcs",
    "az": "azure", "abfs": "azure", "abfss": "azure",
}  # fmt: skip
_OPTIONS: Mapping[str, Mapping[str, Any]] = {
    "s3": {
        "config_kwargs": {
            "connect_timeout": CONNECT_TIMEOUT_S,
            "read_timeout": READ_TIMEOUT_S,
            "retries": {"max_attempts": 2},
        }
    },
    "gcs": {"requests_timeout": READ_TIMEOUT_S},
    "azure": {"connection_timeout": CONNECT_TIMEOUT_S, "read_timeout": READ_TIMEOUT_S},
}
"""Options that bound waiting times, for the kinds of store that have an extra of qinfer."""

_VARIABLES = ("AWS_", "AZURE_", "BOTO_", "FSSPEC_", "GOOGLE_", "STORAGE_EMULATOR_HOST")

_opened: dict[object, Store] = {}
_opening: dict[object, threading.Lock] = {}
_lock = threading.Lock()


def store_for(url: str) -> Store:
    """Returns the store of a URL in a request, cached until the environment's variables change.

    A forked process gets its own: drivers keep connections and threads.
    """
    scheme, separator, rest = url.partition("://")
    kind = _KINDS.get(scheme.lower())
    authority = rest.partition("/")[0]
    if not separator or kind is None:
        raise InvalidRequest(f"'{scheme[:20]}://' is not a kind of store that jobs use; use s3, gs, az, abfss or file")
    if "@" in authority and (scheme.lower() not in ("abfs", "abfss") or ":" in authority):
        raise InvalidRequest("a store's URL may not hold credentials; they come from the store's own variables")
    account = authority.partition("@")[2]
    key = (kind, account, driver_variables(), os.getpid())
    if found := _opened.get(key):
        return found
    with _lock:
        opening = _opening.setdefault(key, threading.Lock())
    with opening:  # not `_lock`: drivers may look for credentials for long
        if key not in _opened:
            _opened[key] = open_store(f"{scheme}://{authority}/")[0]
        return _opened[key]


def open_store(
    url: str, *, listing_timeout_s: float | None = None, options: Mapping[str, Any] | None = None
) -> tuple[Store, str]:
    """Opens the store of a URL of any kind that fsspec knows; returns it with the base for names in its methods.

    The base of a chain of drivers, such as `zip://models::s3://bucket/x.zip`, is the first driver's path.
    """
    kind = _KINDS.get(url.partition("://")[0].lower(), "")
    if kind == "file":
        return LocalStore(), url.rstrip("/")
    files, path = _file_system(url, options or {})
    from qinfer.storage import fsspec

    if kind == "s3":
        files.retries = _S3_TRIES
    stores = {"s3": fsspec.S3Store, "gcs": fsspec.GcsStore, "azure": fsspec.AzureStore, "memory": fsspec.MemoryStore}
    return stores.get(kind, fsspec.FsspecStore)(files, listing_timeout_s), url.rstrip("/") if kind else path


def url_to_fs(url: str, options: Mapping[str, Any]) -> tuple[Any, str]:
    """Returns a URL's driver and path, as fsspec's function of this name."""
    import fsspec

    if _KINDS.get(url.partition("://")[0].lower()) != "gcs":
        files, path = fsspec.core.url_to_fs(url, **options)
        return files, str(path)
    # fsspec's own choice asks a second API, perhaps for a minute, and makes files of zonal buckets visible while they
    # grow.
    from gcsfs.core import GCSFileSystem  # type: ignore[import-untyped]  # it has no types

    return GCSFileSystem(**options), str(GCSFileSystem._strip_protocol(url))


def driver_options(scheme: str) -> dict[str, Any]:
    """Returns a scheme's options: no caches, bounded waiting times."""
    kind = _KINDS.get(scheme, "")
    options = {"use_listings_cache": False, "skip_instance_cache": True, **_OPTIONS.get(kind, {})}
    if kind == "s3" and (style := addressing_style()):
        options["config_kwargs"] = {**options["config_kwargs"], "s3": {"addressing_style": style}}
    return options


def addressing_style() -> str:
    """Returns the value of `S3_ADDRESSING`, or ''."""
    style = os.environ.get(S3_ADDRESSING, "")
    if style and style not in _S3_STYLES:
        raise SettingsError(f"{S3_ADDRESSING} is '{style}'; it must be auto, path or virtual")
    return style


def driver_variables() -> frozenset[tuple[str, str]]:
    """Returns the variables that drivers read; their values are secret."""
    return frozenset(variable for variable in os.environ.items() if variable[0].startswith(_VARIABLES))


def is_bucket(scheme: str) -> bool:
    """Tells whether a scheme is an object store with an extra of qinfer."""
    return _KINDS.get(scheme) in _OPTIONS


def remedy(scheme: str) -> str:
    """Returns how to install a scheme's driver."""
    return (
        f"pip install 'qinfer-ml[{_KINDS[scheme]}]'"
        if is_bucket(scheme)
        else f"install fsspec's driver for {scheme}://"
    )


def _file_system(url: str, options: Mapping[str, Any]) -> tuple[Any, str]:
    scheme = url.partition("://")[0]
    try:
        import fsspec

        files, path = url_to_fs(url, {**driver_options(scheme), **options})
    except SettingsError:
        raise
    except ImportError:
        raise UnsupportedFeature(
            f"this server has no driver for {scheme}://; its operator installs it with {remedy(scheme)}"
        ) from None
    except Exception as error:  # noqa: BLE001  the boundary to the drivers
        if isinstance(error, ValueError) and scheme not in fsspec.available_protocols():
            raise InvalidRequest(f"'{scheme[:20]}://' is not a kind of store that fsspec knows") from None
        fail(error, url)
    return files, path.rstrip("/")


def readable(grant: UrlGrant, opener: Callable[[str], Store] = store_for) -> "Within":
    """Returns the stores that a tenant may read."""
    return Within(grant.read, "read", grant.tenant, opener, grant.deny)


def writable(grant: UrlGrant, opener: Callable[[str], Store] = store_for) -> "Within":
    """Returns the stores for a tenant's outputs, also to read these back."""
    return Within(grant.write, "write", grant.tenant, opener, grant.deny)


class Within:
    """Opens the store of an object as `store_for` does, if its URL is below one of the prefixes, and of none in `deny`.

    All existing links in `file://` URLs and prefixes are resolved; one made after this check is not noticed. `use` is
    in the text of a refusal.
    """

    def __init__(
        self,
        prefixes: Sequence[str],
        use: str,
        tenant: str = "",
        opener: Callable[[str], Store] = store_for,
        deny: Sequence[str] = (),
    ) -> None:
        self._use = use
        self._tenant = tenant
        self._opener = opener
        self._allow, self._deny = _Places(prefixes), _Places(deny)

    def __call__(self, url: str) -> Store:
        """Checks a URL, and returns its store."""
        self.check(url)
        return self._opener(url)

    def check(self, url: str) -> None:
        """Raises `Forbidden` outside of the prefixes."""
        if not self._allow.hold(url) or self._deny.hold(url):
            raise not_allowed(url, self._use, self._tenant)


class _Places:
    """URL prefixes."""

    def __init__(self, prefixes: Sequence[str]) -> None:
        paths = [path for prefix in prefixes if (path := local_path(prefix)) is not None]
        self._folders = [Path(os.path.realpath(path)) for path in paths]
        self._prefixes = [prefix for prefix in prefixes if local_path(prefix) is None]

    def hold(self, url: str) -> bool:
        path = local_path(url)
        if path is None:
            return any(is_below(url, prefix) for prefix in self._prefixes)
        if "\0" in path.as_posix():  # no file has this name
            return False
        real = Path(os.path.realpath(path))
        return any(real.is_relative_to(folder) for folder in self._folders)
