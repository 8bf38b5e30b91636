"""`Repositories`: the configured model repositories and the overlay, and how one model of them is read.

The layout is Triton's: `<model>/config.pbtxt` and `<model>/<version>/model.onnx` (reference §3.1).
"""

import ast
import logging
import re
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import NamedTuple
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
from qinfer.models.config.config import elements, from_json, identify, normalise, parse, reshape_scalars, to_json
from qinfer.models.config.config import place as place_instances
from qinfer.models.config.file_tensors import (
    OPENVINO_MAX_BYTES,
    FileTensors,
    UncertainError,
    read_onnx,
    read_openvino,
    read_torch,
)
from qinfer.models.config.message import ModelConfig
from qinfer.models.config.sequences import own_inputs
from qinfer.models.config.to_spec import FILES_OF, executed_samples
from qinfer.models.dependents import uses_of
from qinfer.models.repository.cache import FilesCache
from qinfer.models.repository.files import Blob, Files, Listing, LocalFiles, RemoteFiles, TooFarSpreadError
from qinfer.models.spec import FRAMEWORKS
from qinfer.models.state import ErrorKind, StoredModel

logger = logging.getLogger(__name__)

CONFIG = "config.pbtxt"
NAMED_CONFIGS = "configs"
CONFIG_BYTES = 4 * 2**20
LABEL_BYTES = 10 * 2**20
MODEL_PY_BYTES = 16 * 2**20
_MODEL_FILES = (".onnx", ".pt", ".pt2", ".xml", ".plan", ".py")

COMPLETION_HOOK = "auto_complete_config"
_FORBIDDEN = frozenset("/\\{}\0")  # braces would break the hash tag of the model's keys


def is_model_name(name: str) -> bool:
    """Tells whether a directory can be a model."""
    return bool(name) and not name.startswith(".") and name.isprintable() and _FORBIDDEN.isdisjoint(name)


class ModelFiles(NamedTuple):
    """The files of a model, in a repository."""

    files: Files
    directory: str
    listing: Listing

    def digest(self, config: str) -> str:
        """Returns a hash of a text and all files but configurations."""
        return self.listing.digest(config, without=[path for path in self.listing.files if _is_config(path)])


Lend = Callable[[str], ModelFiles]
"""Finds the files of another model, or raises `ModelLoadFailed`."""


def read_model(own: ModelFiles, how: RepositorySettings, lend: Lend, override: str = "", name: str = "") -> StoredModel:
    """Reads a model; an unusable one carries its error.

    `lend` finds the files of `qinfer.files_of`; `override` is JSON in place of the configuration.
    """
    name, digest, owner = name or own.directory, "", ""
    try:
        if not is_model_name(name):
            raise ModelLoadFailed("a model name is printable, and has none of / \\ { }")
        source, text = ("", override) if override else _ModelReader(*own, how, name).config_text()
        digest = own.digest(text)
        config = from_json(text) if override else parse(text, source)
        used = own
        if FILES_OF in config.parameters:
            owner = config.parameters[FILES_OF].string_value
            used = _borrowed(name, owner, own.listing, lend)
            digest = used.digest(text)
        model = _ModelReader(*used, how, name).model(config, digest)
        return msgspec.structs.replace(model, files_of=owner)
    except ModelLoadFailed as error:
        kind = ErrorKind.NO_VERSION if isinstance(error, _NoVersion) else ""
        return StoredModel(name, content_hash=digest, error=error.message, error_kind=kind, files_of=owner)
    except OSError as error:  # removed or changed while it was read
        return unreadable(name, error.strerror, content_hash=digest, files_of=owner)


def unreadable(name: str, reason: str | None, content_hash: str = "", files_of: str = "") -> StoredModel:
    """Returns a model that can't be read now."""
    error = f"can't be read: {reason or 'a file is gone'}"
    return StoredModel(name, content_hash=content_hash, error=error, error_kind=ErrorKind.UNREADABLE, files_of=files_of)


class _NoVersion(ModelLoadFailed):
    """The version policy selects no version."""


def _borrowed(name: str, owner: str, own: Listing, lend: Lend) -> ModelFiles:
    if versions := own.versions():
        raise ModelLoadFailed(
            f"model '{name}' has a version {versions[-1]} of its own, and {FILES_OF} '{owner}'; remove one of both"
        )
    lent = lend(owner)
    if not lent.listing.versions():
        raise ModelLoadFailed(f"{FILES_OF} of model '{name}' names '{owner}', which has no versions of its own")
    return lent


def _is_config(path: str) -> bool:
    return path == CONFIG or path.startswith(f"{NAMED_CONFIGS}/")


class _ModelReader(NamedTuple):
    files: Files
    directory: str
    listing: Listing
    how: RepositorySettings
    name: str

    def _misplaced(self) -> str:
        beside = [file for file in sorted(self.listing.files) if "/" not in file and file.endswith(_MODEL_FILES)]
        return f"; put {beside[0]} into {self.directory}/1/" if beside and not self.listing.versions() else ""

    def config_text(self) -> tuple[str, str]:
        named = f"{NAMED_CONFIGS}/{self.how.config_name}.pbtxt"
        source = named if self.how.config_name and named in self.listing.files else CONFIG
        return source, self._read_text(source, CONFIG_BYTES) if source in self.listing.files else ""

    def model(self, config: ModelConfig, digest: str) -> StoredModel:
        versions = select_versions(config, self.listing.versions())
        if not versions:
            raise _NoVersion(
                f"at least one version must be available under the version policy of model '{self.name}'"
                f"{self._misplaced()}"
            )
        there = {file for version in versions for file in self.listing.inside(str(version))}
        known = identify(config, self.name, there)
        pending = self._pending(known, versions[-1])
        tensors = self._tensors(known, versions[-1])
        if tensors is not None and not self.how.autocomplete:
            reshape_scalars(known, tensors)
            tensors = None
        if pending:  # the completing worker may not know the installation's GPUs
            place_instances(known, self.how.gpus)
        normal = known if pending else normalise(known, self.name, there, tensors, self.how.gpus)
        self._check_warmup(normal)
        return StoredModel(
            self.name,
            config=to_json(normal),
            versions=versions,
            content_hash=digest,
            labels=self._labels(normal),
            pending=pending,
            uses=uses_of(normal),
        )

    def _tensors(self, known: ModelConfig, version: int) -> FileTensors | None:
        if known.backend not in ("onnxruntime", "openvino", "pytorch"):
            return None
        if not self.how.autocomplete and (known.backend == "pytorch" or not elements(known)):
            return None
        if known.backend == "pytorch" and known.input and known.output:
            return None  # the worker knows the conventions for their names
        name = known.default_model_filename
        path = f"{version}/{name}"
        if path in self.listing.directories:  # an ONNX model of several files is a directory (reference §3.1)
            path = f"{path}/model.onnx"
        stamp = self.listing.files.get(path)
        if stamp is None:
            raise ModelLoadFailed(f"version {version} of model '{self.name}' has no file '{name}'")
        path = f"{self.directory}/{path}"
        if known.backend == "openvino" and not name.endswith(".onnx"):  # OpenVINO reads ONNX files too
            if stamp.size > OPENVINO_MAX_BYTES:
                raise ModelLoadFailed(f"'{name}' of model '{self.name}' is larger than {OPENVINO_MAX_BYTES} bytes")
            return read_openvino(self.files.read(path, OPENVINO_MAX_BYTES), name)
        try:
            with self.files.blob(path, stamp.size) as blob:
                return read_onnx(blob, name) if known.backend != "pytorch" else self._of_torch(known, blob)
        except TooFarSpreadError:
            logger.warning("model file too large to read remotely", extra={"model": self.name})
            return None

    def _of_torch(self, known: ModelConfig, blob: Blob) -> FileTensors:
        name = known.default_model_filename
        try:
            tensors = read_torch(blob, name)
            unknown = {i.name for i in known.input} - {i.name for i in tensors.inputs} - {*own_inputs(known)}
            if known.output or unknown:
                raise UncertainError(f"'{name}' completes it only without both, or with inputs named by argument")
        except UncertainError as reason:
            lacking = " and ".join(kind for kind in ("input", "output") if not getattr(known, kind))
            raise ModelLoadFailed(
                f"model '{self.name}': the configuration has no {lacking}, and {reason}; write name, data_type and "
                f"dims of each {lacking.replace(' and ', ' and each ')} into config.pbtxt"
            ) from None
        return tensors

    def _pending(self, known: ModelConfig, version: int) -> str:
        """Returns the backend that completes the configuration, because no model is executed here."""
        if self.how.autocomplete and known.backend in FRAMEWORKS and not (known.input and known.output):
            return str(known.backend)
        path = f"{version}/{known.default_model_filename}"
        if not self.how.autocomplete or known.backend != "python" or path not in self.listing.files:
            return ""
        if self.listing.files[path].size > MODEL_PY_BYTES:
            raise ModelLoadFailed(f"model.py of model '{self.name}' is larger than {MODEL_PY_BYTES} bytes")
        source = self.files.read(f"{self.directory}/{path}", MODEL_PY_BYTES)
        if COMPLETION_HOOK.encode() not in source:
            return ""
        try:
            functions = (node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.FunctionDef))
            return "python" if any(function.name == COMPLETION_HOOK for function in functions) else ""
        except (SyntaxError, ValueError, RecursionError):
            return ""

    def _labels(self, config: ModelConfig) -> dict[str, tuple[str, ...]]:
        labels: dict[str, tuple[str, ...]] = {}
        for output in config.output:
            path = output.label_filename
            if not path:
                continue
            if not is_inside(path) or path not in self.listing.files:
                raise ModelLoadFailed(f"model '{self.name}' has no label file '{path}' for output '{output.name}'")
            text = self._read_text(path, LABEL_BYTES)
            labels[output.name] = tuple(line.strip() for line in text.removesuffix("\n").split("\n"))
        return labels

    def _check_warmup(self, config: ModelConfig) -> None:
        wanted = {data.input_data_file for sample in executed_samples(config) for data in sample.inputs.values()} - {""}
        for file in sorted(file for file in wanted if f"warmup/{file}" not in self.listing.files):
            raise ModelLoadFailed(f"model '{self.name}' has no file '{file}' in its directory 'warmup'")

    def _read_text(self, path: str, limit_bytes: int) -> str:
        if self.listing.files[path].size > limit_bytes:
            raise ModelLoadFailed(f"{path} is larger than {limit_bytes} bytes")
        try:
            return self.files.read(f"{self.directory}/{path}", limit_bytes).decode("utf-8-sig")
        except UnicodeDecodeError:
            raise ModelLoadFailed(f"{path} is not UTF-8 text") from None


def select_versions(config: ModelConfig, present: Iterable[int]) -> tuple[int, ...]:
    """Returns the selected versions, ascending."""
    ascending = sorted(present)
    policy = config.version_policy
    choice = policy.WhichOneof("policy_choice")
    if choice == "all":
        return tuple(ascending)
    if choice == "specific":
        return tuple(version for version in ascending if version in policy.specific.versions)
    return tuple(ascending[-(policy.latest.num_versions or 1) :])


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
