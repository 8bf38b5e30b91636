"""`Repositories`: the configured model repositories and the overlay."""

import logging
import re
import tempfile
import time
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from urllib.parse import unquote

import msgspec

from qinfer.core.messages import IdFactory
from qinfer.core.settings import RepositorySettings
from qinfer.errors import (
    InvalidRequest,
    ModelFilesUnreachable,
    ModelLoadFailed,
    ModelNotFound,
    SettingsError,
    UnsupportedFeature,
)
from qinfer.models.config.check import is_inside
from qinfer.models.config.config import from_json
from qinfer.models.config.to_spec import FILES_OF
from qinfer.models.repository.cache import FilesCache
from qinfer.models.repository.files import Files, Listing, LocalFiles, RemoteFiles
from qinfer.models.repository.reader import ModelFiles, is_model_name, read_model, unreadable
from qinfer.models.state import ErrorKind, StoredModel

logger = logging.getLogger(__name__)

_LOCATION = re.compile(r"([^/]+)/[0-9A-HJKMNP-TV-Z]{26}")
_NAME = re.compile(r"[\w.-]+")
_LOCAL = ("file", "local")
_NOTHING = Listing({}, ())
_NAME_MAX_BYTES, _PATH_MAX_BYTES = 255, 1024
_THREADS = 8
_SETTLED_NS = 2_000_000_000
_NOT_UNIQUE = "model appears in two or more repositories"


class Repositories:
    """The model repositories and the overlay; blocking, for several threads.

    Without an overlay, load requests with files are refused.
    """

    def __init__(self, places: list[Files], overlay: Files | None, how: RepositorySettings, cache: FilesCache) -> None:
        self._places = places
        self._overlay = overlay
        self._how = how
        self._cache = cache
        self._read: dict[tuple[Files, str], tuple[str, StoredModel]] = {}
        """Repository and model → hash of its listing and the model."""

    def names(self) -> list[str]:
        """Returns all models, sorted, or raises `SettingsError`."""
        return sorted({name for place in self._places for name in place.models()})

    def scan(self) -> list[StoredModel]:
        """Reads every model, sorted; an unusable one carries its error."""
        found: dict[str, StoredModel] = {}
        for place in self._places:
            for model in self._scan(place):
                is_known = model.model in found
                found[model.model] = _not_unique(model.model) if is_known else model
        return [found[name] for name in sorted(found)]

    def read(self, name: str, override: str = "", location: str = "") -> StoredModel:
        """Reads one model.

        `override` is JSON in place of `config.pbtxt`; with `qinfer.files_of`, the name may be in no repository.
        `location` is a directory of the overlay.
        """
        with _translated(name):
            if location:
                files = self._place_of_location(name, location)
                listing = files.listing(location)
                if listing is None:
                    raise ModelNotFound(f"the files that model '{name}' was loaded with are gone")
                own = ModelFiles(files, location, listing)
                return msgspec.structs.replace(
                    read_model(own, self._how, self._lend, override, name), location=location
                )
            holders = self._holders(name)
            if not holders and _is_for_others_files(override):
                holders = [(self._places[0], _NOTHING)]
            if not holders:
                raise ModelNotFound(f"no model repository has a model '{name}'")
            if len(holders) > 1:
                return _not_unique(name)
            place, listing = holders[0]
            return read_model(ModelFiles(place, name, listing), self._how, self._lend, override)

    def version_dir(self, stored_name: str, version: int, location: str = "", content_hash: str = "") -> Path:
        """Returns a local directory with a version's files, which it fetches if they are remote.

        An earlier copy for the `content_hash` is used again.
        """
        try:
            with _translated(stored_name):
                place = self._place_of_location(stored_name, location) if location else self._holder(stored_name)
                directory = location or stored_name
                if isinstance(place, LocalFiles):
                    return place.root / directory / str(version)
                return self._cache.version_dir(place, place.url, directory, version, content_hash)
        except ModelNotFound as error:
            raise ModelLoadFailed(error.message) from None

    def put_files(self, model: str, files: Mapping[str, bytes]) -> str:
        """Writes files (`<version>/<file>` → content); returns their location."""
        if not is_model_name(model):
            raise InvalidRequest("model name must not contain path traversal characters")
        if not _is_short(model):
            length = len(model.encode())
            raise InvalidRequest(f"model name is {length} bytes long; at most {_NAME_MAX_BYTES} can be kept")
        for path in files:
            _check_path(path)
        if self._overlay is None:
            raise UnsupportedFeature(
                "this server keeps no files of load requests; its operator can set QINFER_REPOSITORY__OVERLAY"
            )
        location = f"{model}/{IdFactory().ulid()}"
        with _translated(model):
            try:
                for path, content in files.items():
                    self._overlay.write(f"{location}/{path}", bytes(content))
            except SettingsError:
                self.drop_files(location)
                raise
        return location

    def drop_files(self, location: str) -> None:
        """Removes files of `put_files`; logs a failure."""
        if self._overlay is None or not _LOCATION.fullmatch(location):
            return
        try:
            self._overlay.remove(location)
        except SettingsError as error:
            logger.warning("files of a load request can't be removed", extra={"reason": error.message})

    def _scan(self, place: Files) -> list[StoredModel]:
        listings = place.listings()
        for key in [key for key in self._read if key[0] is place and key[1] not in listings]:
            self._read.pop(key, None)
        if isinstance(place, LocalFiles):
            return [self._scanned(place, name, listing) for name, listing in listings.items()]
        with ThreadPoolExecutor(_THREADS, thread_name_prefix="scan") as threads:
            return list(threads.map(partial(self._scanned, place), listings.keys(), listings.values()))

    def _scanned(self, place: Files, name: str, listing: Listing | Exception) -> StoredModel:
        if isinstance(listing, Exception):
            reason = listing.strerror if isinstance(listing, OSError) else str(listing)
            return unreadable(name, reason)
        digest, key = listing.digest(), (place, name)
        known = self._read.get(key)
        if known is not None and known[0] == digest:
            return known[1]
        model = read_model(ModelFiles(place, name, listing), self._how, self._lend)
        if model.files_of:  # its listing does not show changes of the other model's files
            self._read.pop(key, None)
        elif model.error_kind != ErrorKind.UNREADABLE and (isinstance(place, RemoteFiles) or _is_settled(listing)):
            self._read[key] = (digest, model)
        return model

    def _lend(self, owner: str) -> ModelFiles:
        holders = self._holders(owner) if is_model_name(owner) else []
        if len(holders) != 1:
            why = _NOT_UNIQUE if holders else "no model repository has a model of that name"
            raise ModelLoadFailed(f"{FILES_OF} names '{owner}': {why}")
        place, listing = holders[0]
        return ModelFiles(place, owner, listing)

    def _holders(self, name: str) -> list[tuple[Files, Listing]]:
        if not is_model_name(name):
            raise ModelNotFound("model name must not contain path traversal characters")
        listings = [(place, place.listing(name)) for place in self._places]
        return [(place, listing) for place, listing in listings if listing is not None]

    def _holder(self, name: str) -> Files:
        if len(self._places) == 1 and is_model_name(name):
            return self._places[0]
        holders = self._holders(name)
        if len(holders) != 1:
            raise ModelLoadFailed(
                f"model '{name}': {_NOT_UNIQUE}" if holders else f"no model repository has a model '{name}'"
            )
        return holders[0][0]

    def _place_of_location(self, name: str, location: str) -> Files:
        matched = _LOCATION.fullmatch(location)
        if matched is None or matched[1] != name or not is_model_name(name):
            raise ModelNotFound(f"model '{name}' has no such location")
        if self._overlay is None:
            raise ModelNotFound(
                f"model '{name}' was loaded with files of its own; QINFER_REPOSITORY__OVERLAY must say where they are"
            )
        return self._overlay


def open_repositories(settings: RepositorySettings) -> Repositories:
    """Opens repositories without reading them, or raises `SettingsError`."""
    if settings.config_name and not _NAME.fullmatch(settings.config_name):
        raise SettingsError(
            f"QINFER_REPOSITORY__CONFIG_NAME must be a file's name without its ending, got '{settings.config_name}'"
        )
    urls = [url.strip() for url in settings.path.split(",") if url.strip()]
    if not urls:
        raise SettingsError("QINFER_REPOSITORY__PATH must name a directory or URL, got an empty text")
    if len(set(urls)) != len(urls):
        raise SettingsError(f"QINFER_REPOSITORY__PATH names a repository more than once: {settings.path}")
    return Repositories(
        [_open_files(url) for url in urls],
        _open_files(settings.overlay) if settings.overlay else None,
        settings.model_copy(update={"gpus": _gpu_count(settings)}),
        FilesCache(Path(settings.cache_dir) if settings.cache_dir else _cache_dir()),
    )


def _gpu_count(settings: RepositorySettings) -> int:
    """Returns the GPUs for instance groups without them."""
    if settings.gpus >= 0:
        return settings.gpus
    return sum(1 for _ in Path("/dev").glob("nvidia[0-9]*"))


def _cache_dir() -> Path:
    try:
        return Path.home() / ".cache" / "qinfer" / "models"
    except RuntimeError:  # a user without an entry in passwd, as in containers
        return Path(tempfile.gettempdir()) / "qinfer" / "models"


def _open_files(url: str) -> Files:
    protocol, separator, rest = url.partition("://")
    if not separator:
        return LocalFiles(Path(url))
    if protocol in _LOCAL:
        return LocalFiles(Path(unquote(rest)))
    return RemoteFiles(url)


def _not_unique(name: str) -> StoredModel:
    return StoredModel(name, error=_NOT_UNIQUE, error_kind=ErrorKind.NOT_UNIQUE)


def _is_for_others_files(override: str) -> bool:
    try:
        return bool(override) and FILES_OF in from_json(override).parameters
    except ModelLoadFailed:
        return False


def _is_settled(listing: Listing) -> bool:
    """Tells whether times would show a change: file systems' clocks tick every few milliseconds."""
    newest_ns = max((int(stamp.mark) for stamp in listing.files.values()), default=0)
    return newest_ns < time.time_ns() - _SETTLED_NS


def _check_path(path: str) -> None:
    version, separator, _ = path.partition("/")
    is_version = separator and version.isascii() and version.isdecimal() and version[0] != "0"
    shown = path.encode(errors="backslashreplace").decode()
    is_short = len(shown.encode()) <= _PATH_MAX_BYTES and all(_is_short(part) for part in shown.split("/"))
    text = (
        f"Invalid file path: 'file:{shown[:100]}' is not the name of a file of a model; expected "
        f"file:<version>/<file>, without '..', and no part longer than {_NAME_MAX_BYTES} bytes"
    )
    if not is_short:
        raise ModelLoadFailed(text)  # an internal error, like a failure of Triton's file system
    if not is_version or not is_inside(path) or shown != path:
        raise InvalidRequest(text)


def _is_short(name: str) -> bool:
    return len(name.encode()) <= _NAME_MAX_BYTES


@contextmanager
def _translated(model: str) -> Iterator[None]:
    """Clients learn only that there is a reason."""
    try:
        yield
    except SettingsError as error:
        logger.error("model repository can't be used", extra={"model": model, "reason": error.message})
        raise ModelFilesUnreachable(
            f"the files of model '{model}' can't be reached now; the server's log says why"
        ) from None
    except OSError as error:
        raise ModelLoadFailed(f"model '{model}' can't be read: {error.strerror}") from None
