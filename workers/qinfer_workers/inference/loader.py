"""Loads model versions, as little of them as has changed, and warms them up; completes pending configurations.

Warm-up runs the samples of `model_warmup`, and one batch of a single row that every model gets, before it is READY.
Samples of the configuration must succeed, as in Triton; the automatic run may fail, because zeros in made-up shapes are
not every model's idea of an input. Its second repetition also teaches the latency model t(1). A run ends where it calls
another model, which may not be loaded yet; that fails neither.
"""

import logging
import time
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import Enum
from pathlib import Path
from typing import Any

import numpy as np

from qinfer.backends.base import Array, Backend, BackendFactory, Batch, OneResponse
from qinfer.backends.registry import CompleteConfig
from qinfer.backends.reshape import reshaped
from qinfer.batching.policy import LatencyModel
from qinfer.core.clock import ServerClock
from qinfer.core.messages import InferRequest, Response, Scalar
from qinfer.errors import BackendUnavailable, ModelLoadFailed, ModelNotReady, QinferError
from qinfer.models.config.config import from_json, normalise, to_json
from qinfer.models.pins import is_executed
from qinfer.models.spec import Device, ModelSpec, WarmupInput
from qinfer.models.state import StoredModel
from qinfer.models.writing import Completion
from qinfer.tensors import DATATYPES, Tensor, to_numpy
from qinfer_workers.inference.devices import devices_of
from qinfer_workers.inference.model_files import WARMUP_DIRECTORY, VersionFiles

logger = logging.getLogger(__name__)

VersionDir = Callable[[str, int, str, str], Path]
"""`Repositories.version_dir`: model, version, location, content hash → directory; blocking."""

_Inputs = Mapping[str, WarmupInput]


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
        instances: What a load has made, one for each device; empty when there was nothing to load.
        latency: What warm-up runs taught about its speed.
    """

    spec: ModelSpec
    version: int
    generation: int
    identity: str
    devices: tuple[Device, ...]
    content_hash: str = ""
    executed_hash: str = ""
    instances: Sequence[Backend] = ()
    latency: LatencyModel | None = None

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
        self._read: dict[tuple[str, int], dict[Any, str]] = {}
        """What was read of a version's files; see `VersionFiles.executed_hash`."""

    def load(
        self,
        spec: ModelSpec,
        version: int,
        stored: StoredModel,
        serving: Loaded | None = None,
        pinned: Collection[str] = (),
    ) -> Change:
        """Loads the versions that differ from the served ones, and warms them up.

        Args:
            spec: The configuration, read.
            version: The version to load.
            stored: The model as it is stored.
            serving: What is served of the version; `None` = nothing.
            pinned: What the version may execute, where only pins keep it; empty = anything.

        Raises:
            QinferError: An instance could not be loaded, or would not execute what is pinned; none stays loaded but
                what is served.
        """
        directory = self._version_dir(spec.name, version, stored.location, stored.content_hash)
        devices = devices_of(spec, self.gpus)
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
            devices=devices,
            content_hash=stored.content_hash,
            executed_hash=executed_hash,
        )
        if pinned and not loaded.executes(pinned):
            raise ModelLoadFailed("its files or configuration are not those that it was pinned with")
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
        if not files.are_as_before():
            logger.warning("files changed while they were loaded", extra={"model": spec.name, "version": version})
            loaded = replace(loaded, executed_hash="")
        return Change(kind=Kind.NEW, loaded=replace(loaded, instances=instances, latency=latency))

    def complete(self, stored: StoredModel) -> Completion:
        """Completes the configuration of a model that is stored as pending; the model's own mistake is a result too.

        Raises:
            QinferError: This worker has not got the files or the runtime; another may have.
        """
        if self._completers is None:
            raise ModelLoadFailed(f"this worker can't complete configurations of backend '{stored.pending}'")
        directory = self._version_dir(stored.model, stored.versions[-1], stored.location, stored.content_hash)
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


class _Unheard(OneResponse):
    """A context whose answers are discarded.

    Attributes:
        called: Whether a call was asked for, and refused: what the backend does from there on tells nothing.
    """

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
        """Raises the item's own failure, if it is one."""
        del item, final, parameters
        if isinstance(outputs, QinferError):
            raise outputs

    def cancelled(self, item: int) -> bool:
        """Tells that somebody waits."""
        del item
        return False

    def call(self, request: InferRequest) -> Response:
        """Refuses: a model that is being loaded can't wait for another that may be loaded after it."""
        self.called = True
        raise ModelNotReady(f"model '{request.model}' can't be called during warm-up")


def warm_up(backend: Backend, spec: ModelSpec, latency: LatencyModel, now_s: float, model_dir: Path = Path()) -> None:
    """Runs a loaded instance until its lazy initialisation is behind it: with its samples, then with zeros.

    A decoupled model is run with its samples only.

    Args:
        backend: The instance.
        spec: The model's configuration.
        latency: Learns from the last run.
        now_s: The present, in the broker's time.
        model_dir: The model's directory, for samples that are read from files.

    Raises:
        ModelLoadFailed: A sample of the configuration failed, or its file does not fit.
    """
    for sample in spec.warmup:
        batch = _batch(spec, sample.inputs, sample.batch_size, model_dir)
        ctx = _Unheard()
        try:
            for _ in range(sample.count):
                backend.execute(batch, ctx)
        except Exception as error:  # the boundary to the model's code
            if ctx.called:
                continue
            raise ModelLoadFailed(f"warm-up sample '{sample.name}' of model '{spec.name}' failed: {error}") from error
    if spec.decoupled:
        # Nobody knows for how long it sends responses to zeros.
        return
    zeros = {i.name: WarmupInput(i.datatype, tuple(max(d, 1) for d in i.dims)) for i in spec.inputs if not i.optional}
    batch = _batch(spec, zeros, min(spec.max_batch_size, 1))
    ctx = _Unheard()
    try:
        backend.execute(batch, ctx)
        begin_s = time.perf_counter()
        backend.execute(batch, ctx)
    except Exception as error:  # noqa: BLE001  the boundary to the model's code
        if not ctx.called:
            logger.warning("automatic warm-up failed", extra={"model": spec.name, "reason": str(error)})
        return
    if not ctx.called:
        latency.observe(1, time.perf_counter() - begin_s, now_s)


def _batch(spec: ModelSpec, inputs: _Inputs, rows: int, model_dir: Path = Path()) -> Batch:
    """Makes a batch of one request; `rows` is 0 for a model without a batch dimension."""
    arrays = {
        name: _read(name, data, rows, model_dir)
        if data.file
        else _array(data.datatype, (rows, *data.dims) if rows else data.dims, random=data.random)
        for name, data in inputs.items()
    }
    return Batch(requests=[InferRequest(model=spec.name, inputs=())], rows=[max(rows, 1)], inputs=arrays)


def _read(name: str, data: WarmupInput, rows: int, model_dir: Path) -> Array:
    """Reads a file that holds one row as it travels in a binary request, and repeats it for each row."""
    try:
        content = (model_dir / WARMUP_DIRECTORY / data.file).read_bytes()
        row = to_numpy(Tensor(name, data.datatype, data.dims, content))
    except (OSError, QinferError) as error:
        reason = error.message if isinstance(error, QinferError) else error.strerror
        raise ModelLoadFailed(f"warm-up file '{data.file}' can't be used for input '{name}': {reason}") from None
    return np.repeat(row[np.newaxis], rows, axis=0) if rows else row


def _array(datatype: str, shape: tuple[int, ...], *, random: bool) -> Array:
    if datatype == "BYTES":
        array = np.empty(shape, dtype=object)
        array.fill(b"")
        return array
    dtype = np.dtype(DATATYPES[datatype].numpy or "<f4")
    if not random:
        return np.zeros(shape, dtype)
    generator = np.random.default_rng(0)
    return generator.random(shape).astype(dtype) if dtype.kind == "f" else generator.integers(0, 2, shape).astype(dtype)
