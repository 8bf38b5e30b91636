"""Reads one model from a repository: configuration, versions, labels, completion from the model file.

The layout is Triton's: `<model>/config.pbtxt` and `<model>/<version>/model.onnx` (reference §3.1).
"""

import ast
import logging
from collections.abc import Callable, Iterable
from typing import NamedTuple

import msgspec

from qinfer.core.settings import RepositorySettings
from qinfer.errors import ModelLoadFailed
from qinfer.models.config.check import is_inside
from qinfer.models.config.config import elements, from_json, identify, normalise, parse, place, reshape_scalars, to_json
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
from qinfer.models.repository.files import Blob, Files, Listing, TooFarSpreadError
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
            place(known, self.how.gpus)
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
        """Returns the backend that completes the configuration, because `model.py` is not executed here."""
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
