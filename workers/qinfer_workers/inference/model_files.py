"""The files of a model version: the identity of a load, and the hash of what is executed.

Loads are compared by files' size and modification time; the *executed hash* is that of their content, on any machine.
"""

import hashlib
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from qinfer.models.config.to_spec import DEFAULT_TIMEOUT, LANE_CAPACITY, MAX_TIMEOUT, MIN_WORKERS
from qinfer.models.pins import EXECUTED
from qinfer.models.repository.cache import MANIFEST
from qinfer.models.repository.files import IGNORED
from qinfer.models.state import StoredModel

WARMUP_DIRECTORY = "warmup"
INITIAL_STATES = "initial_state"

_OF_ALL_VERSIONS = ("instance_group", "version_policy")
_NOT_READ = ("config.pbtxt", "configs", MANIFEST)
"""No backend reads these."""

_EXECUTED = (
    *("platform", "backend", "runtime", "default_model_filename", "cc_model_filenames", "model_operations"),
    *("input", "output", "batch_input", "batch_output", "optimization", "ensemble_scheduling"),
)
_OF_SEQUENCES = ("control_input", "state", "iterative_sequence")
_SCHEDULING = (DEFAULT_TIMEOUT, MAX_TIMEOUT, LANE_CAPACITY, MIN_WORKERS)


class _Stamp(NamedTuple):
    """The inode reveals replacement within a clock tick."""

    size: int
    mtime_ns: int
    inode: int


class VersionFiles:
    """The present files of a version; blocking."""

    def __init__(self, stored: StoredModel, directory: Path) -> None:
        self._stored = stored
        self._directory = directory
        self._config: dict[str, Any] = json.loads(stored.config)
        self._stamps = self._stamped()

    def identity(self) -> str:
        """Returns a text that identifies files and configuration."""
        config = {part: value for part, value in self._config.items() if part not in _OF_ALL_VERSIONS}
        digest = hashlib.sha256(json.dumps([config, self._stored.labels], sort_keys=True).encode())
        if not self._directory.is_dir():
            digest.update(self._stored.content_hash.encode())
        for path, stamp in self._stamps.items():
            digest.update(f"\n{path}\t{stamp.size}\t{stamp.mtime_ns}".encode())
        return digest.hexdigest()

    def executed_hash(self, known: dict[tuple[str, _Stamp], str]) -> str:
        """Returns the executed hash; `known` caches files' hashes."""
        config = {part: self._config.get(part) for part in _EXECUTED}
        parameters = self._config.get("parameters", {})
        config["parameters"] = {name: value for name, value in parameters.items() if name not in _SCHEDULING}
        # Only the batch dimension may change answers.
        config["has_batch_dimension"] = bool(self._config.get("max_batch_size"))
        if sequences := self._config.get("sequence_batching"):
            config["sequence_batching"] = {part: sequences.get(part) for part in _OF_SEQUENCES}
        digest = hashlib.sha256(json.dumps(config, sort_keys=True).encode())
        read: dict[tuple[str, _Stamp], str] = {}
        for path, stamp in self._stamps.items():
            if path.startswith(f"{WARMUP_DIRECTORY}/"):
                continue
            content = read[path, stamp] = known.get((path, stamp)) or self._content(path)
            digest.update(f"\n{path}\t{content}".encode("utf-8", "surrogateescape"))
        known.clear()
        known.update(read)
        return f"{EXECUTED}{digest.hexdigest()}"

    def are_as_before(self) -> bool:
        """Returns whether no file has changed; new files don't count."""
        try:
            now = self._stamped()
        except OSError:
            return False
        return self._stamps.items() <= now.items()

    def _content(self, path: str) -> str:
        with (self._directory.parent / path).open("rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()

    def _stamped(self) -> Mapping[str, _Stamp]:
        found = {}
        for path in _files(self._directory):
            status = path.stat()
            name = path.relative_to(self._directory.parent).as_posix()
            found[name] = _Stamp(status.st_size, status.st_mtime_ns, status.st_ino)
        return found


def _files(directory: Path) -> Iterator[Path]:
    beside = directory.parent.iterdir() if directory.is_dir() else ()
    shared = [path for path in beside if not path.name.isdecimal() and path.name not in _NOT_READ]
    for root in sorted([directory, *shared]):
        if root.is_file():
            yield root
        elif root.is_dir():
            within = [path for path in sorted(root.rglob("*")) if IGNORED not in path.relative_to(root.parent).parts]
            yield from (path for path in within if path.is_file())
