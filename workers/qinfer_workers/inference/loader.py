"""Loads model versions, and finds out how little has to be loaded when something about one has changed."""

import hashlib
import json
import logging
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, replace
from enum import Enum
from pathlib import Path

from qinfer.backends.base import Backend, BackendFactory
from qinfer.backends.reshape import reshaped
from qinfer.batching.batcher import Executor, LoadedModel
from qinfer.batching.execution import Caller, Observer
from qinfer.batching.policy import LatencyModel
from qinfer.core.clock import ServerClock
from qinfer.errors import ModelLoadFailed, QinferError
from qinfer.models.completion import Completion
from qinfer.models.repository.cache import MANIFEST
from qinfer.models.spec import Device, ModelSpec
from qinfer.models.state import StoredModel
from qinfer_workers.inference.completing import CompleteConfig, complete
from qinfer_workers.inference.devices import devices_of
from qinfer_workers.inference.warmup import warm_up

logger = logging.getLogger(__name__)

VersionDir = Callable[[str, int, str, str], Path]
"""`ModelFiles.version_dir`: model, version, location, content hash → directory; blocking."""

_OF_ALL_VERSIONS = ("instance_group", "version_policy")
"""Parts of a configuration whose change leaves what is loaded of a version as it is."""
_NOT_READ = ("config.pbtxt", "configs", MANIFEST)
"""Names beside the versions whose content no backend reads."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Loaded:
    """A model version that is loaded.

    Attributes:
        spec: Its configuration.
        version: The version.
        generation: The generation.
        identity: Equal for two generations whose files and configuration are the same, but for the instances.
        content_hash: What the control store calls the model's files and configuration.
        devices: The device of each instance.
        instances: What a load has made, one for each device; empty when there was nothing to load.
        latency: What warm-up runs taught about its speed.
    """

    spec: ModelSpec
    version: int
    generation: int
    identity: str
    devices: tuple[Device, ...]
    content_hash: str = ""
    instances: Sequence[Backend] = ()
    latency: LatencyModel | None = None

    def on(self, executor: Executor, caller: Caller, observer: Observer | None) -> LoadedModel:
        """Returns what a batcher runs it as.

        Args:
            executor: Has its instances.
            caller: Takes its calls to other models.
            observer: Told of its executions.
        """
        return LoadedModel(
            spec=self.spec,
            version=self.version,
            generation=self.generation,
            executor=executor,
            caller=caller,
            observer=observer,
        )


class Kind(Enum):
    """How much a load has changed."""

    NEW = "new"
    """Everything: `instances` are to be served in place of any there were."""
    RESIZED = "resized"
    """The number of instances: `instances` come in addition, or `surplus` of them end."""
    SAME = "same"
    """Only the generation."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Change:
    """What a load came to."""

    kind: Kind
    loaded: Loaded
    surplus: int = 0


class Loader:
    """See the module docstring; blocking, for a thread.

    Args:
        version_dir: Tells where the files of a version are, and fetches them.
        factory: Backend name → factory.
        clock: The broker's time.
        gpus: The GPUs that this worker may use.
        completers: Backend name → what completes its configurations.

    Attributes:
        gpus: The same.
    """

    def __init__(
        self,
        version_dir: VersionDir,
        factory: Callable[[str], BackendFactory],
        clock: ServerClock,
        gpus: Collection[int] = (),
        completers: Callable[[str], CompleteConfig] | None = None,
    ) -> None:
        self._version_dir = version_dir
        self._factory = factory
        self._clock = clock
        self.gpus = gpus
        self._completers = completers

    def load(self, spec: ModelSpec, version: int, stored: StoredModel, serving: Loaded | None = None) -> Change:
        """Loads what differs from what is served, and warms it up.

        Args:
            spec: The configuration, read.
            version: The version to load.
            stored: The model as it is stored.
            serving: What is served of the version; `None` = nothing.

        Raises:
            QinferError: An instance could not be loaded; none stays loaded but what is served.
        """
        directory = self._version_dir(spec.name, version, stored.location, stored.content_hash)
        devices = devices_of(spec, self.gpus)
        try:
            identity = _identity(stored, directory)
        except OSError as error:  # they are being changed
            raise ModelLoadFailed(f"the model's files can't be read: {error.strerror}") from None
        loaded = Loaded(
            spec=spec,
            version=version,
            generation=stored.generation,
            identity=identity,
            devices=devices,
            content_hash=stored.content_hash,
        )
        if serving is not None and serving.identity == loaded.identity:
            missing = list((Counter(devices) - Counter(serving.devices)).elements())
            surplus = list((Counter(serving.devices) - Counter(devices)).elements())
            if not missing and not surplus:
                return Change(kind=Kind.SAME, loaded=loaded)
            # Any idle instance may end, so that those on one device can't be told from those on another.
            if not surplus or (not missing and len(set(serving.devices)) == 1):
                added = self._instances(spec, directory, missing, LatencyModel())
                return Change(kind=Kind.RESIZED, loaded=replace(loaded, instances=added), surplus=len(surplus))
        latency = LatencyModel()
        instances = self._instances(spec, directory, devices, latency)
        return Change(kind=Kind.NEW, loaded=replace(loaded, instances=instances, latency=latency))

    def complete(self, stored: StoredModel) -> Completion:
        """Completes the configuration of a model that is stored as pending.

        Raises:
            QinferError: This worker has not got the files or the runtime; another may have.
        """
        if self._completers is None:
            raise ModelLoadFailed(f"this worker can't complete configurations of backend '{stored.pending}'")
        directory = self._version_dir(stored.model, stored.versions[-1], stored.location, stored.content_hash)
        return complete(stored, directory, self._completers(stored.pending))

    def discard(self, change: Change) -> None:
        """Unloads what a load has made, and nobody wants any more."""
        _unload(change.loaded.instances)

    def _instances(
        self, spec: ModelSpec, directory: Path, devices: Sequence[Device], latency: LatencyModel
    ) -> list[Backend]:
        make = self._factory(spec.backend)
        instances: list[Backend] = []
        try:
            for device in devices:
                instance = reshaped(make(), spec)
                instance.load(spec, directory, device)
                instances.append(instance)
                warm_up(instance, spec, latency, self._clock.now_s(), directory.parent)
        except BaseException as error:
            _unload(instances)
            if isinstance(error, QinferError) or not isinstance(error, Exception):
                raise
            raise ModelLoadFailed(_without_path(f"{type(error).__name__}: {error}", directory)) from error
        return instances


def _unload(instances: Sequence[Backend]) -> None:
    for instance in instances:
        try:
            instance.unload()
        except Exception:  # the boundary to backends: the others are unloaded all the same
            logger.exception("model instance not unloaded")


def _without_path(text: str, directory: Path) -> str:
    """Returns a foreign error's text without the place of the model's files: clients read it."""
    return text.replace(f"{directory.parent}/", "").replace(str(directory.parent), "the model's directory")


def _identity(stored: StoredModel, directory: Path) -> str:
    config = json.loads(stored.config)
    for part in _OF_ALL_VERSIONS:
        config.pop(part, None)
    digest = hashlib.sha256(json.dumps([config, stored.labels], sort_keys=True).encode())
    if not directory.is_dir():  # a backend without files
        digest.update(stored.content_hash.encode())
    for path in _files(directory):
        status = path.stat()
        digest.update(f"\n{path.relative_to(directory.parent)}\t{status.st_size}\t{status.st_mtime_ns}".encode())
    return digest.hexdigest()


def _files(directory: Path) -> Iterator[Path]:
    """Yields the files of a version, and those beside the versions that they all may read."""
    beside = directory.parent.iterdir() if directory.is_dir() else ()
    shared = [path for path in beside if not path.name.isdecimal() and path.name not in _NOT_READ]
    for root in sorted([directory, *shared]):
        if root.is_file():
            yield root
        elif root.is_dir():
            yield from sorted(path for path in root.rglob("*") if path.is_file())
