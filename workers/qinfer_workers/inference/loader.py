"""Loads model versions, as little of them as has changed; completes pending configurations."""

import logging
from collections import Counter
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace
from enum import Enum
from pathlib import Path
from typing import Any

from qinfer.backends.base import Backend, BackendFactory
from qinfer.backends.ragged import with_ragged_batches
from qinfer.backends.registry import CompleteConfig
from qinfer.backends.reshape import reshaped
from qinfer.batching.policy import LatencyModel
from qinfer.batching.watched import within
from qinfer.core.clock import ServerClock
from qinfer.errors import BackendUnavailable, LoadOverdue, ModelLoadFailed, QinferError
from qinfer.models.config.config import from_json, normalise, to_json
from qinfer.models.ensemble_graph import Plan
from qinfer.models.pins import is_executed
from qinfer.models.sequence_spec import DirectSpec
from qinfer.models.spec import Device, ModelSpec
from qinfer.models.state import StepVersion, StoredModel
from qinfer.models.writing import Completion
from qinfer.tensors import Tensor
from qinfer_workers.inference.devices import devices_of
from qinfer_workers.inference.ensembles.plans import Planned
from qinfer_workers.inference.model_files import INITIAL_STATES, VersionFiles
from qinfer_workers.inference.warmup import warm_up, warm_up_with_zeros
from qinfer_workers.inference.watchdog import ExecutionWatchdog

logger = logging.getLogger(__name__)

VersionDir = Callable[[str, int, str, str], Path]
"""`Repositories.version_dir`: model whose files they are, version, location, content hash → directory; blocking."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Loaded:
    """A model version that is loaded.

    Attributes:
        spec: Its configuration.
        version: The version.
        generation: The generation.
        identity: Equal for two generations whose files and configuration are the same, but for the instances.
        content_hash: What the control store calls the model's files and configuration.
        executed_hash: The hash of what it executes; empty = its files changed while they were loaded.
        devices: The device of each instance.
        initial_states: The state of a sequence's first step, of each of `SequenceSpec.states` in order.
        instances: What a load has made, one for each device; empty when there was nothing to load.
        latency: What warm-up runs taught about its speed.
        plan: What it runs, if it is an ensemble.
        steps: The versions that it runs.
    """

    spec: ModelSpec
    version: int
    generation: int
    identity: str
    devices: tuple[Device, ...]
    content_hash: str = ""
    executed_hash: str = ""
    initial_states: tuple[Tensor, ...] = ()
    instances: Sequence[Backend] = ()
    latency: LatencyModel | None = None
    plan: Plan | None = None
    steps: tuple[StepVersion, ...] = ()

    def hash_like(self, other: str) -> str:
        """Returns its hash of the kind that another one is, to be compared with that."""
        return self.executed_hash if is_executed(other) else self.content_hash

    def executes(self, hashes: Collection[str]) -> bool:
        """Tells whether it executes what it was pinned with: one of these, or anything (empty)."""
        return any(not one or self.hash_like(one) == one for one in hashes)


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
    """The outcome of a load."""

    kind: Kind
    loaded: Loaded
    surplus: int = 0


class Loader:
    """Loads and completes models; blocking, for a thread.

    Args:
        version_dir: Tells where the files of a version are, and fetches them.
        factory: Backend name → factory.
        clock: The broker's time.
        gpus: The GPUs that this worker may use.
        completers: Backend name → what completes its configurations.
        with_zeros: Models that only compute are also run with zeros.

    Attributes:
        gpus: The same.
        limiter: Refuses models whose resources can't be had, where rates are limited.
        watchdog: Watches what their instances execute.
    """

    limiter: Callable[[ModelSpec], None] | None = None

    def __init__(
        self,
        version_dir: VersionDir,
        factory: Callable[[str], BackendFactory],
        clock: ServerClock,
        gpus: Collection[int] = (),
        completers: Callable[[str], CompleteConfig] | None = None,
        *,
        with_zeros: bool = True,
    ) -> None:
        self._version_dir = version_dir
        self._factory = factory
        self._clock = clock
        self.gpus = gpus
        self._completers = completers
        self._with_zeros = with_zeros
        self.watchdog = ExecutionWatchdog()
        self._read: dict[tuple[str, int], dict[Any, str]] = {}
        """What was read of a version's files; see `VersionFiles.executed_hash`."""

    def load(
        self,
        spec: ModelSpec,
        version: int,
        stored: StoredModel,
        serving: Loaded | None = None,
        pinned: Collection[str] = (),
        planned: Planned | None = None,
    ) -> Change:
        """Loads the versions that differ from the served ones, and warms them up.

        Args:
            spec: The configuration, read.
            version: The version to load.
            stored: The model as it is stored.
            serving: What is served of the version; `None` = nothing.
            pinned: What the version may execute, where only pins keep it; empty = anything.
            planned: What it runs, if it is an ensemble.

        Raises:
            QinferError: An instance could not be loaded, or would not execute what is pinned; none stays loaded but
                what is served.
        """
        directory = self._version_dir(stored.files, version, stored.location, stored.content_hash)
        try:
            files = VersionFiles(stored, directory)
            executed_hash = files.executed_hash(self._read.setdefault((spec.name, version), {}))
        except OSError as error:  # they are being changed
            raise ModelLoadFailed(f"the model's files can't be read: {error.strerror}") from None
        loaded = Loaded(
            spec=spec,
            version=version,
            generation=stored.generation,
            identity=files.identity(),
            devices=devices_of(spec, self.gpus) if planned is None else (),
            content_hash=stored.content_hash,
            executed_hash=executed_hash,
            initial_states=initial_states(spec, directory.parent),
            plan=None if planned is None else planned.plan,
            steps=() if planned is None else planned.steps,
        )
        if self.limiter is not None:
            self.limiter(spec)
        if pinned and not loaded.executes(pinned):
            raise ModelLoadFailed("its files or configuration are not those that it was pinned with")
        if planned is not None:
            return Change(kind=Kind.NEW, loaded=loaded)
        if (kept := self._kept(loaded, directory, serving)) is not None:
            return kept
        latency = LatencyModel()
        instances = self._instances(loaded, directory, loaded.devices, latency)
        if not files.are_as_before():
            logger.warning("files changed while they were loaded", extra={"model": spec.name, "version": version})
            loaded = replace(loaded, executed_hash="")
        return Change(kind=Kind.NEW, loaded=replace(loaded, instances=instances, latency=latency))

    def _kept(self, loaded: Loaded, directory: Path, serving: Loaded | None) -> Change | None:
        """Goes on with what is served, with more or fewer instances; `None` where all are to be loaded anew."""
        if serving is None or serving.identity != loaded.identity:
            return None
        if serving.spec.instances != loaded.spec.instances and (serving.spec.is_limited or loaded.spec.is_limited):
            return None  # the limiter knows each instance
        missing = list((Counter(loaded.devices) - Counter(serving.devices)).elements())
        surplus = list((Counter(serving.devices) - Counter(loaded.devices)).elements())
        if not missing and not surplus:
            return Change(kind=Kind.SAME, loaded=loaded)
        # Any idle instance may end, so that those on one device can't be told from those on another.
        is_resizable = not surplus or (not missing and len(set(serving.devices)) == 1)
        if (sequences := loaded.spec.sequences) is not None:
            is_resizable = is_resizable and isinstance(sequences.strategy, DirectSpec) and not sequences.iterative
        if not is_resizable:
            return None
        added = self._instances(loaded, directory, missing, LatencyModel())
        return Change(kind=Kind.RESIZED, loaded=replace(loaded, instances=added), surplus=len(surplus))

    def complete(self, stored: StoredModel) -> Completion:
        """Completes the configuration of a model that is stored as pending; the model's own mistake is a result too.

        Raises:
            QinferError: This worker has not got the files or the runtime; another may have.
        """
        if self._completers is None:
            raise ModelLoadFailed(f"this worker can't complete configurations of backend '{stored.pending}'")
        directory = self._version_dir(stored.files, stored.versions[-1], stored.location, stored.content_hash)
        try:
            config = self._completers(stored.pending)(from_json(stored.config), directory)
            names = [path.name for path in directory.iterdir()]
            return Completion(config=to_json(normalise(config, stored.model, names)))
        except BackendUnavailable:
            raise
        except QinferError as error:
            return Completion(error=error.message)

    def discard(self, change: Change) -> None:
        """Unloads the instances of a load that is no longer wanted."""
        _unload(change.loaded.instances)

    def _instances(
        self, loaded: Loaded, directory: Path, devices: Sequence[Device], latency: LatencyModel
    ) -> list[Backend]:
        spec = loaded.spec
        make = self._factory(spec.backend)
        instances: list[Backend] = []
        try:
            for device in devices:
                instance = self._instance(make(), loaded, directory, device, latency)
                instances.append(instance)
        except BaseException as error:
            _unload(instances)
            if isinstance(error, QinferError) or not isinstance(error, Exception):
                raise
            raise ModelLoadFailed(_without_path(f"{type(error).__name__}: {error}", directory)) from error
        return instances

    def _instance(
        self, backend: Backend, loaded: Loaded, directory: Path, device: Device, latency: LatencyModel
    ) -> Backend:
        """Loads an instance, and warms it up; what lasts too long is left to itself, unless it can be ended."""
        spec = loaded.spec
        instance = self.watchdog.watched(reshaped(with_ragged_batches(backend, spec), spec), spec, loaded.version)
        clock = instance.clock

        def load() -> None:
            instance.load(spec, directory, device)

        def warm() -> None:
            warm_up(instance, spec, directory.parent, loaded.initial_states)
            if self._with_zeros:
                warm_up_with_zeros(instance, spec, latency, self._clock.now_s(), loaded.initial_states)

        is_loaded = False
        try:
            for limit, work in ((clock.limits.load, load), (clock.limits.warm_up, warm)):
                clock.use(limit)
                if instance.interrupt is None:
                    within(limit, spec.name, work, instance.unload)
                else:
                    work()
                is_loaded = True
        except BaseException as error:
            clock.leave()
            if is_loaded and not isinstance(error, LoadOverdue):
                _unload([instance])
            raise
        clock.use(clock.limits.execute)
        return instance


def _unload(instances: Sequence[Backend]) -> None:
    for instance in instances:
        try:
            instance.unload()
        except Exception:  # the boundary to backends: the others are unloaded all the same
            logger.exception("model instance not unloaded")


def _without_path(text: str, directory: Path) -> str:
    """Returns a foreign error's text without the place of the model's files: clients read it."""
    return text.replace(f"{directory.parent}/", "").replace(str(directory.parent), "the model's directory")


def initial_states(spec: ModelSpec, model_dir: Path) -> tuple[Tensor, ...]:
    """Returns the states that a model's sequences begin with.

    Args:
        spec: The model's configuration.
        model_dir: The model's directory, for states that are read from files.

    Raises:
        ModelLoadFailed: A file is not there, or has fewer bytes than its state.
    """
    states = []
    for state in spec.sequences.states if spec.sequences is not None else ():
        try:
            content = (model_dir / INITIAL_STATES / state.file).read_bytes() if state.file else None
        except OSError as error:
            raise ModelLoadFailed(
                f"initial_state file '{state.file}' can't be used for state '{state.input}': {error.strerror}"
            ) from None
        states.append(state.initial(content, batched=spec.max_batch_size > 0))
    return tuple(states)
