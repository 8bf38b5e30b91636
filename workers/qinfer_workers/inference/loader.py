"""Loads the changed parts of model versions, and warms them up; completes pending configurations.

Loads are compared by files' size and modification time; the *executed hash* is that of their content, on any machine.

The samples of `model_warmup` must succeed before READY, as in Triton. Models of built-in runtimes also run a row of
zeros twice, which may fail; the second run teaches the latency model t(1). Models that are code (Python, MLflow) and
custom backends get no made-up data: they may count or send it. A call of another model ends a run without a failure.
"""

import hashlib
import json
import logging
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import Enum
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from qinfer.backends.base import Backend, BackendFactory, Batch, OneResponse
from qinfer.backends.parameters import say_once
from qinfer.backends.registry import CompleteConfig
from qinfer.backends.samples import WARMUP_DIRECTORY, sample_inputs
from qinfer.backends.shapes import with_shapes
from qinfer.batching.policy import LatencyModel
from qinfer.batching.sequences.execution import control_inputs
from qinfer.batching.sequences.steps import SequenceStep
from qinfer.batching.watched import within
from qinfer.core import messages
from qinfer.core.clock import ServerClock
from qinfer.core.messages import InferRequest, Response, Scalar
from qinfer.errors import BackendUnavailable, LoadOverdue, ModelLoadFailed, ModelNotReady, QinferError
from qinfer.models.config.config import from_json, normalise, to_json
from qinfer.models.config.optimization import without_effect
from qinfer.models.config.to_spec import DEFAULT_TIMEOUT, LANE_CAPACITY, MAX_TIMEOUT, MIN_WORKERS
from qinfer.models.ensemble_graph import EnsemblePlan
from qinfer.models.installation import Completion
from qinfer.models.readiness import EXECUTED, is_executed
from qinfer.models.repository.cache import MANIFEST
from qinfer.models.repository.files import IGNORED
from qinfer.models.sequence_spec import DirectSpec
from qinfer.models.spec import FRAMEWORKS, IN_PROCESS, Device, ModelSpec, WarmupInput
from qinfer.models.state import StepVersion, StoredModel
from qinfer.tensors import Tensor, to_numpy
from qinfer_workers.inference.devices import devices_of
from qinfer_workers.inference.ensembles.plans import PlannedEnsemble
from qinfer_workers.inference.watchdog import ExecutionWatchdog

logger = logging.getLogger(__name__)

_AUTOMATIC = IN_PROCESS | {"stub"} | (FRAMEWORKS - {"mlflow"})

_Inputs = Mapping[str, WarmupInput]


class _Unheard(OneResponse):
    """Discards answers; `called` says that a call was refused, after which an execution proves nothing."""

    def __init__(self) -> None:
        self.called = False

    def respond(
        self,
        item: int,
        outputs: tuple[Tensor, ...] | QinferError,
        *,
        final: bool = True,
        parameters: Mapping[str, Scalar] | None = None,
    ) -> None:
        del item, final, parameters
        if isinstance(outputs, QinferError):
            raise outputs

    def reschedule(self, item: int, states: tuple[Tensor, ...] = ()) -> None:
        del item, states

    def cancelled(self, item: int) -> bool:
        del item
        return False

    def call(self, request: InferRequest, made_for: int = -1) -> Response:
        del made_for
        self.called = True
        raise ModelNotReady(f"model '{request.model}' can't be called during warm-up")


def warm_up(backend: Backend, spec: ModelSpec, model_dir: Path = Path(), states: Sequence[Tensor] = ()) -> None:
    """Runs an instance with its configuration's samples."""
    for sample in spec.warmup:
        batch = _batch(spec, sample.inputs, sample.batch_size, states, model_dir)
        ctx = _Unheard()
        try:
            for _ in range(sample.count):
                backend.execute(batch, ctx)
        except Exception as error:
            if ctx.called:
                continue
            raise ModelLoadFailed(f"failed to run warmup sample '{sample.name}': {error}") from error


def warm_up_with_zeros(
    backend: Backend, spec: ModelSpec, latency: LatencyModel, now_s: float, states: Sequence[Tensor] = ()
) -> None:
    """Runs an instance with zeros, unless its model is code or may answer endlessly; teaches `latency`."""
    if spec.decoupled or spec.backend not in _AUTOMATIC:
        return
    zeros = {i.name: WarmupInput(i.datatype, tuple(max(d, 1) for d in i.dims)) for i in spec.inputs if not i.optional}
    batch = _batch(spec, zeros, 1, states)
    ctx = _Unheard()
    try:
        backend.execute(batch, ctx)
        begin_s = time.perf_counter()
        backend.execute(batch, ctx)
    except Exception as error:  # noqa: BLE001  the boundary to the model's code
        if not ctx.called:
            logger.info("automatic warm-up failed", extra={"model": spec.name, "reason": str(error)})
        return
    if not ctx.called:
        latency.observe(1, time.perf_counter() - begin_s, now_s)


def _batch(spec: ModelSpec, inputs: _Inputs, count: int, states: Sequence[Tensor], model_dir: Path = Path()) -> Batch:
    given = sample_inputs(spec, inputs, count, model_dir)
    if spec.sequences is None:
        return Batch(requests=[InferRequest(model=spec.name, inputs=())] * count, rows=[1] * count, inputs=given)
    steps = [SequenceStep[Any](item=None, start=True, end=True)] * count
    batched = spec.max_batch_size > 0
    kept = {state.name: np.repeat(to_numpy(state), count, axis=0) if batched else to_numpy(state) for state in states}
    controls = control_inputs(steps, spec.sequences.controls, batched=batched)
    flags = messages.SequenceFlags(id=0, start=True, end=True)
    return Batch(
        requests=[InferRequest(model=spec.name, inputs=(), sequence=flags)] * count,
        rows=[1] * count,
        inputs={**kept, **controls, **given},
        states=tuple(state.output for state in spec.sequences.states),
    )


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


VersionDir = Callable[[str, int, str, str], Path]
"""Model that owns the files, version, location, content hash → directory; blocking."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadedVersion:
    """A loaded model version.

    `identity` ignores instances; `executed_hash` is empty if files changed during the load.
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
    plan: EnsemblePlan | None = None
    steps: tuple[StepVersion, ...] = ()

    def hash_like(self, other: str) -> str:
        """Returns the version's hash of the same kind as another hash."""
        return self.executed_hash if is_executed(other) else self.content_hash

    def executes(self, hashes: Collection[str]) -> bool:
        """Returns whether the version executes one of these hashes; an empty hash matches every version."""
        return any(not one or self.hash_like(one) == one for one in hashes)


class LoadKind(Enum):
    """The extent of a load's changes."""

    NEW = "new"
    RESIZED = "resized"
    SAME = "same"


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadChange:
    """The outcome of a load."""

    kind: LoadKind
    loaded: LoadedVersion
    surplus: int = 0


class Loader:
    """Loads and completes models; blocking, for a thread."""

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

    def load(
        self,
        spec: ModelSpec,
        version: int,
        stored: StoredModel,
        serving: LoadedVersion | None = None,
        pinned: Collection[str] = (),
        planned: PlannedEnsemble | None = None,
    ) -> LoadChange:
        """Loads changed instances and warms them up; an error unloads them.

        `pinned` are the allowed hashes; empty = any.
        """
        directory = self._version_dir(stored.files, version, stored.location, stored.content_hash)
        try:
            files = VersionFiles(stored, directory)
            executed_hash = files.executed_hash(self._read.setdefault((spec.name, version), {}))
        except OSError as error:
            raise ModelLoadFailed(f"the model's files can't be read: {error.strerror}") from None
        loaded = LoadedVersion(
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
            raise ModelLoadFailed("its files or configuration differ from the pinned ones")
        if planned is not None:
            return LoadChange(kind=LoadKind.NEW, loaded=loaded)
        if (kept := self._reuse_served(loaded, directory, serving)) is not None:
            return kept
        for field in without_effect(from_json(stored.config)):
            say_once(spec.name, field, f"it does nothing for these instances of backend '{spec.backend}'")
        latency = LatencyModel()
        instances = self._instances(loaded, directory, loaded.devices, latency)
        if not files.are_as_before():
            logger.warning("files changed while they were loaded", extra={"model": spec.name, "version": version})
            loaded = replace(loaded, executed_hash="")
        return LoadChange(kind=LoadKind.NEW, loaded=replace(loaded, instances=instances, latency=latency))

    def _reuse_served(self, loaded: LoadedVersion, directory: Path, serving: LoadedVersion | None) -> LoadChange | None:
        if serving is None or serving.identity != loaded.identity:
            return None
        if serving.spec.instances != loaded.spec.instances and (serving.spec.is_limited or loaded.spec.is_limited):
            return None
        missing = list((Counter(loaded.devices) - Counter(serving.devices)).elements())
        surplus = list((Counter(serving.devices) - Counter(loaded.devices)).elements())
        if not missing and not surplus:
            return LoadChange(kind=LoadKind.SAME, loaded=loaded)
        is_resizable = not surplus or (not missing and len(set(serving.devices)) == 1)
        if (sequences := loaded.spec.sequences) is not None:
            is_resizable = is_resizable and isinstance(sequences.strategy, DirectSpec) and not sequences.iterative
        if not is_resizable:
            return None
        added = self._instances(loaded, directory, missing, LatencyModel())
        return LoadChange(kind=LoadKind.RESIZED, loaded=replace(loaded, instances=added), surplus=len(surplus))

    def complete(self, stored: StoredModel) -> Completion:
        """Completes a pending configuration, or returns its error."""
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

    def discard(self, change: LoadChange) -> None:
        """Unloads the instances of an unwanted load."""
        _unload(change.loaded.instances)

    def _instances(
        self, loaded: LoadedVersion, directory: Path, devices: Sequence[Device], latency: LatencyModel
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
        self, backend: Backend, loaded: LoadedVersion, directory: Path, device: Device, latency: LatencyModel
    ) -> Backend:
        """Abandons overdue calls, unless they can be interrupted."""
        spec = loaded.spec
        instance = self.watchdog.watched(with_shapes(backend, spec), spec, loaded.version)
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
                clock.set_limit(limit)
                if instance.interrupt is None:
                    within(limit, spec.name, work, instance.unload)
                else:
                    work()
                is_loaded = True
        except BaseException as error:
            clock.release_place()
            if is_loaded and not isinstance(error, LoadOverdue):
                _unload([instance])
            raise
        clock.set_limit(clock.limits.execute)
        return instance


def _unload(instances: Sequence[Backend]) -> None:
    for instance in instances:
        try:
            instance.unload()
        except Exception:  # the boundary to backends
            logger.exception("model instance not unloaded")


def _without_path(text: str, directory: Path) -> str:
    """Clients must not see the path."""
    return text.replace(f"{directory.parent}/", "").replace(str(directory.parent), "the model's directory")


def initial_states(spec: ModelSpec, model_dir: Path) -> tuple[Tensor, ...]:
    """Returns the states that sequences begin with."""
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
