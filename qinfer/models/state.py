"""Records of model control: desired state, configurations, heartbeats and autoscalers."""

from collections.abc import Mapping
from datetime import UTC, datetime
from enum import StrEnum

import msgspec

from qinfer.observe.host import GpuUse, MemoryUse

GATEWAY, BULK, BRIDGE = "gateway", "bulk", "bridge"
"""The programs whose processes report liveness, as `<name>@<host>`."""

CALLERS = (GATEWAY, BULK, BRIDGE)


class DesiredState(msgspec.Struct, frozen=True):
    """The desired state of one model; `dependent` = loaded only because an ensemble uses it.

    `generation` grows with each change of its configuration or files.
    """

    model: str
    generation: int
    load: bool = True
    dependent: bool = False


class ModelPause(msgspec.Struct, frozen=True, kw_only=True):
    """A model whose lanes are not read, and whose synchronous requests are refused; version 0 = all versions.

    Attributes:
        since: Seconds since the epoch, on Redis' clock.
        by: The id of the API key that paused it; empty without keys.
    """

    model: str
    version: int = 0
    since: float = 0.0
    by: str = ""
    reason: str = ""


Pauses = Mapping[tuple[str, int], ModelPause]


def pause_of(pauses: Pauses, model: str, version: int) -> ModelPause | None:
    """Returns the pause that holds for a version, if any."""
    return pauses.get((model, version)) or pauses.get((model, 0))


class ModelUse(msgspec.Struct, frozen=True, array_like=True):
    """A model that an ensemble uses; version 0 = the highest that is READY."""

    model: str
    version: int = 0


class ErrorKind(StrEnum):
    """Kinds of a model's error; the next read of an `UNREADABLE` model may succeed."""

    NO_VERSION = "no_version"
    NOT_UNIQUE = "not_unique"
    UNREADABLE = "unreadable"


class StoredModel(msgspec.Struct, frozen=True):
    """A model's configuration, as it is read from the repositories and stored.

    Attributes:
        config: In the JSON dialect of `GET …/config`; empty after an error, unchecked while `pending`.
        content_hash: The hash of the configuration's text, and path, size and modification time of all files.
        error_kind: An `ErrorKind`, if the server treats the error in its own way.
        location: Where the overlay has the model; empty = it is in the repositories.
        pending: The backend that must complete the configuration first, in a worker.
        override: JSON that replaces the configuration, also in later loads.
        files_of: The model whose files this model uses; empty = its own.
    """

    model: str
    generation: int = 0
    config: str = ""
    versions: tuple[int, ...] = ()
    content_hash: str = ""
    error: str = ""
    min_workers: int = 1
    labels: dict[str, tuple[str, ...]] = msgspec.field(default_factory=dict)
    location: str = ""
    pending: str = ""
    uses: tuple[ModelUse, ...] = ()
    override: str = ""
    files_of: str = ""
    error_kind: str = ""

    @property
    def files(self) -> str:
        """The model whose files this model uses."""
        return self.files_of or self.model


class State(StrEnum):
    """A model version's state in one worker (reference §1.14)."""

    LOADING = "LOADING"
    READY = "READY"
    UNAVAILABLE = "UNAVAILABLE"
    UNLOADING = "UNLOADING"


class StepVersion(msgspec.Struct, frozen=True, array_like=True):
    """The version of a step's model that an ensemble runs; `asked` 0 = the highest that is READY."""

    model: str
    asked: int
    version: int


class VersionState(msgspec.Struct, frozen=True):
    """The state of one model version in one worker.

    Attributes:
        generation: The generation that is loaded, or failed to load.
        reason: The reason why the version is not READY at the newest generation.
        tried: The newest generation whose load has ended; above `generation` where a reload failed.
        executed_hash: The hash of a READY version's files, the files beside the versions, and the configuration's
            inputs, outputs, parameters, backend and optimisation. Empty = unknown: files changed during the load, or an
            earlier qinfer loaded them.
        steps: The versions of an ensemble's steps, with the steps of nested ensembles.
        unready: Why the model's own `is_ready` refuses, for readiness checks only.
    """

    state: State
    generation: int
    reason: str = ""
    tried: int = 0
    executed_hash: str = ""
    pinned: bool = False
    steps: tuple[StepVersion, ...] = ()
    unready: str = ""


class Speed(msgspec.Struct, frozen=True):
    """The speed of a version, as a worker measured it; a `best_rps` of 0 means that it is unknown."""

    rps: float
    load_s: float = 0.0
    best_rps: float = 0.0


LONG_S = 300.0
"""An execution without a limit is late after this time."""


class Executing(msgspec.Struct, frozen=True, array_like=True):
    """An execution, warm-up or load (`what`) that has lasted for a while.

    Attributes:
        since: On Redis' clock, without calls of other models; restarts with each response of a stream.
    """

    model: str
    version: int
    since: float
    seconds: float
    limit_s: float = 0.0
    what: str = "execution"

    @property
    def is_late(self) -> bool:
        """Tells whether half of the limit has passed, or `LONG_S` without a limit."""
        return self.seconds >= (self.limit_s / 2 or LONG_S)

    @property
    def text(self) -> str:
        """A text for people."""
        since = datetime.fromtimestamp(self.since, UTC).strftime("%H:%M:%S")
        limit = f"limit {self.limit_s:g} s" if self.limit_s else "no limit"
        return f"{self.model} {self.version}: {self.what} since {since} UTC, for {self.seconds:.0f} s ({limit})"


class WorkerRecord(msgspec.Struct, frozen=True, kw_only=True):
    """One worker's heartbeat; its mappings (model → version → …) leave out versions without a value.

    Attributes:
        started_at: Seconds since the epoch, on Redis' clock.
        clock_offset_s: Redis' clock minus the worker's wall clock.
        direct: Requests in its batchers that are in no lane: from ensembles and models of this worker, and steps of
            sequences.
        cpu_s: CPU time with child processes; 0 = unknown.
        tensor_bytes: Bytes of tensors in its memory, beside the queue.
        tensor_ways: Counts of the requests with large tensors that it submitted, by way (`TensorMemory`).
    """

    id: str
    started_at: float
    models: dict[str, dict[int, VersionState]]
    device: str = "cpu"
    executing: int = 0
    throughput_rps: float = 0.0
    clock_offset_s: float = 0.0
    frame_versions: tuple[int, ...] = (1,)
    speeds: dict[str, dict[int, float]] = msgspec.field(default_factory=dict)
    best_speeds: dict[str, dict[int, float]] = msgspec.field(default_factory=dict)
    places: tuple[str, ...] = ("*",)
    busy: dict[str, dict[int, int]] = msgspec.field(default_factory=dict)
    direct: dict[str, dict[int, int]] = msgspec.field(default_factory=dict)
    load_s: dict[str, dict[int, float]] = msgspec.field(default_factory=dict)
    host: str = ""
    draining: bool = False
    renewals: int = 0
    leases_lost: int = 0
    cpu_s: float = 0.0
    memory_bytes: int = 0
    gpus: tuple[GpuUse, ...] = ()
    memory: dict[str, dict[int, tuple[MemoryUse, ...]]] = msgspec.field(default_factory=dict)
    long: tuple[Executing, ...] = ()
    tensor_bytes: int = 0
    tensor_ways: dict[str, int] = msgspec.field(default_factory=dict)

    def lacks(self, *, strict: bool) -> str:
        """Returns why the worker is not ready; `strict` counts failed models."""
        if self.draining:
            return "it is draining"
        unready = {State.LOADING, State.UNAVAILABLE} if strict else {State.LOADING}
        waiting = [
            f"{model}:{version} is {state.state}"
            for model, versions in sorted(self.models.items())
            for version, state in sorted(versions.items())
            if state.state in unready
        ]
        return ", ".join(waiting + [one.text for one in self.late])

    @property
    def condition(self) -> str:
        """`draining`, `loading`, `trouble` if a model could not be loaded, else `ready`."""
        states = {state.state for versions in self.models.values() for state in versions.values()}
        if self.draining:
            return "draining"
        if State.LOADING in states:
            return "loading"
        return "trouble" if State.UNAVAILABLE in states else "ready"

    def state_of(self, model: str, version: int) -> VersionState | None:
        """Returns the state of a version in this worker, if known."""
        return self.models.get(model, {}).get(version)

    def is_ready(self, model: str, version: int) -> bool:
        """Tells whether a version is READY at any generation."""
        state = self.state_of(model, version)
        return state is not None and state.state is State.READY

    @property
    def late(self) -> list[Executing]:
        """The executions that are late."""
        return [one for one in self.long if one.is_late]

    def serves(self, model: str) -> bool:
        """Tells whether any version of a model is READY."""
        return any(state.state is State.READY for state in self.models.get(model, {}).values())


class ScalerRecord(msgspec.Struct, frozen=True, kw_only=True):
    """The last observation and decision of an autoscaler.

    Attributes:
        target: Its share of the workers that these models should have.
        reason: The reason for the target, in words for people.
        work_s: Seconds that one worker would need for all waiting and executing requests.
        entries: Requests and rows of bulk jobs that wait or execute.
    """

    id: str
    host: str = ""
    places: tuple[str, ...] = ("*",)
    min_workers: int = 0
    max_workers: int = 1
    target: int = 0
    reason: str = ""
    live: int = 0
    starting: int = 0
    draining: int = 0
    work_s: float = 0.0
    entries: int = 0


SCALED_UP, SCALED_DOWN, RESTARTED, KILLED = "up", "down", "restarts", "kills"
"""Counters of autoscalers; workers are restarted after crashes, and killed after drains."""


class OpenRows(msgspec.Struct, frozen=True, kw_only=True):
    """The remaining rows of an open job.

    Attributes:
        rows: 1 before the job is planned, 0 while it is cancelled or finalised.
    """

    model: str
    version: int
    partition: int = 0
    rows: int = 0
    rows_per_s: float = 0.0
