"""A model repository in a local directory, in Triton's layout (reference §3.1).

    <repository>/<model>/config.pbtxt
    <repository>/<model>/<version>/model.onnx

`scan` reads it whole; a model that can't be used carries its error and hides no other.
"""

import hashlib
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from qinfer.errors import ModelLoadFailed, ModelNotFound, SettingsError
from qinfer.repository.config import fill_backend, normalise, parse
from qinfer.repository.model_config import ModelConfig
from qinfer.repository.onnx_metadata import FileTensors, read_onnx

_CONFIG = "config.pbtxt"
_FORBIDDEN = frozenset("/\\{}\0")  # braces would break the hash tag of the model's keys


@dataclass(frozen=True, slots=True, kw_only=True)
class RepositoryModel:
    """One model as the repository has it.

    Attributes:
        name: The name of its directory.
        config: Its normalised configuration; `None` when there is an error.
        versions: The versions that its version policy selects, ascending.
        content_hash: Changes with the configuration's text and with path, size or modification time of any file.
        error: Why it can't be loaded; empty when it can.
    """

    name: str
    config: ModelConfig | None = None
    versions: tuple[int, ...] = ()
    content_hash: str = ""
    error: str = ""


class LocalRepository:
    """Reads a directory of models; keeps nothing between calls.

    Args:
        path: The repository's directory.
        autocomplete: Complete a missing or partial `config.pbtxt` from the model file.
    """

    def __init__(self, path: Path, autocomplete: bool = True) -> None:  # noqa: FBT001, FBT002 (mirrors Triton's option)
        self._path = path
        self._autocomplete = autocomplete

    def scan(self) -> list[RepositoryModel]:
        """Reads every model, sorted by name; blocking.

        Raises:
            SettingsError: The repository is not a directory that can be read.
        """
        try:
            directories = sorted(d for d in self._path.iterdir() if d.is_dir() and not d.name.startswith("."))
        except OSError as error:
            raise SettingsError(f"model repository '{self._path}' can't be read: {error.strerror}") from None
        return [self._read(directory) for directory in directories]

    def version_dir(self, model: str, version: int) -> Path:
        """Returns the directory of a model version, which need not exist.

        Raises:
            ModelNotFound: The name can't be a model's.
        """
        if not is_model_name(model):
            raise ModelNotFound("model name must not contain path traversal characters")
        return self._path / model / str(version)

    def _read(self, directory: Path) -> RepositoryModel:
        name, digest = directory.name, ""
        try:
            if not is_model_name(name):
                raise ModelLoadFailed("a model name is printable, and has none of / \\ { }")
            text = _config_text(directory)
            digest = _content_hash(directory, text)
            config, versions = self._load(directory, parse(text))
        except ModelLoadFailed as error:
            return RepositoryModel(name=name, content_hash=digest, error=error.message)
        except OSError as error:  # removed or changed while it was read
            return RepositoryModel(name=name, content_hash=digest, error=f"can't be read: {error.strerror}")
        return RepositoryModel(name=name, config=config, versions=versions, content_hash=digest)

    def _load(self, directory: Path, config: ModelConfig) -> tuple[ModelConfig, tuple[int, ...]]:
        versions = select_versions(config, _versions(directory))
        if not versions:
            raise ModelLoadFailed(
                f"at least one version must be available under the version policy of model '{directory.name}'"
            )
        files = {file.name for version in versions for file in (directory / str(version)).iterdir()}
        tensors = self._tensors(directory, config, versions, files)
        return normalise(config, directory.name, files, tensors), versions

    def _tensors(
        self, directory: Path, config: ModelConfig, versions: tuple[int, ...], files: set[str]
    ) -> FileTensors | None:
        """Reads the tensors of the highest version's model file, where this takes no runtime."""
        if not self._autocomplete:
            return None
        probe = ModelConfig(
            name=config.name or directory.name,
            backend=config.backend,
            platform=config.platform,
            default_model_filename=config.default_model_filename,
        )
        fill_backend(probe, files)
        path = directory / str(versions[-1]) / probe.default_model_filename
        return read_onnx(path) if probe.backend == "onnxruntime" else None


def is_model_name(name: str) -> bool:
    """Tells whether a directory of this name can be a model."""
    return bool(name) and not name.startswith(".") and name.isprintable() and _FORBIDDEN.isdisjoint(name)


def select_versions(config: ModelConfig, present: Iterable[int]) -> tuple[int, ...]:
    """Applies the version policy (default: the latest one) to the versions that are there; ascending."""
    ascending = sorted(present)
    policy = config.version_policy
    choice = policy.WhichOneof("policy_choice")
    if choice == "all":
        return tuple(ascending)
    if choice == "specific":
        return tuple(version for version in ascending if version in policy.specific.versions)
    return tuple(ascending[-(policy.latest.num_versions or 1) :])


def _versions(directory: Path) -> list[int]:
    """Lists version directories: integers that do not begin with 0; all else is ignored, as in Triton."""
    return [
        int(d.name)
        for d in directory.iterdir()
        if d.name.isascii() and d.name.isdecimal() and d.name[0] != "0" and d.is_dir()
    ]


def _config_text(directory: Path) -> str:
    try:
        return (directory / _CONFIG).read_text(encoding="utf-8")
    except FileNotFoundError:
        return ""
    except UnicodeDecodeError:
        raise ModelLoadFailed("config.pbtxt is not UTF-8 text") from None


def _content_hash(directory: Path, config_text: str) -> str:
    digest = hashlib.sha256(config_text.encode())
    for path in sorted(directory.rglob("*")):
        if path.is_file() and path.name != _CONFIG:
            status = path.stat()
            digest.update(f"\n{path.relative_to(directory)}\t{status.st_size}\t{status.st_mtime_ns}".encode())
    return digest.hexdigest()
