"""Records of model control: desired state, configurations, heartbeats and what autoscalers say."""

from datetime import UTC, datetime
from enum import StrEnum

import msgspec

from qinfer.observe.host import GpuUse, MemoryUse

GATEWAY, BULK, BEAT, BRIDGE = "gateway", "bulk", "beat", "bridge"
"""The programs whose processes report liveness as `<name>@<host>`: gateway, bulk worker, process with Celery's beat,
bridge."""

CALLERS = (GATEWAY, BULK, BRIDGE)
"""The programs that bring requests."""


class Desired(msgspec.Struct, frozen=True):
    """The desired state of one model.

    Attributes:
        model: Its name.
        generation: Grows with each change of its configuration or files.
        load: True = loaded, False = unloaded.
        dependent: It was loaded only because an ensemble uses it.
    """

    model: str
    generation: int
    load: bool = True
    dependent: bool = False


class Use(msgspec.Struct, frozen=True, array_like=True):
    """A model that an ensemble uses.

    Attributes:
        model: Its name.
        version: Which version; 0 = the highest that is ready when the ensemble is loaded.
    """

    model: str
    version: int = 0


class StoredModel(msgspec.Struct, frozen=True):
    """A model's configuration, as the repositories have it and as it is stored.

    Attributes:
        model: Its name: that of its directory.
        generation: The generation it belongs to; 0 = it is not stored.
        config: The normalised ModelConfig in the JSON dialect of `GET …/config` (reference §2.5); empty when there is
            an error. With `pending` it is not complete, nor checked, and of the defaults it has those of the instance
            groups only.
        versions: The versions that its version policy selects, ascending.
        content_hash: Changes with the configuration's text and with path, size or modification time of any file.
        error: Why the model can't be loaded (bad configuration, no version); empty when it can. Clients see it.
        min_workers: 0 = it is READY without a live worker (`qinfer.min_workers`).
        labels: Output → the names of its classes.
        location: Where its files are within the overlay repository; empty = in the repositories.
        pending: The backend whose runtime must complete the configuration before anything can be loaded; a worker does
            it, and stores the result under a new generation. Empty = it is complete.
        uses: The models that it uses, if it is an ensemble.
        override: The configuration in JSON that it was loaded with, in place of its file; empty = none. Later loads
            without one keep it.
        files_of: The model whose files it uses (`qinfer.files_of`); empty = its own.
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
    uses: tuple[Use, ...] = ()
    override: str = ""
    files_of: str = ""

    @property
    def files(self) -> str:
        """The name of the model whose files it uses."""
        return self.files_of or self.model


class State(StrEnum):
    """A model version's state in one worker (reference §1.14)."""

    LOADING = "LOADING"
    READY = "READY"
    UNAVAILABLE = "UNAVAILABLE"
    UNLOADING = "UNLOADING"


class StepVersion(msgspec.Struct, frozen=True, array_like=True):
    """The version that an ensemble runs of a model.

    Attributes:
        model: The model.
        asked: The version that the ensemble asks for; 0 = the highest that is READY.
        version: The version that it runs.
    """

    model: str
    asked: int
    version: int


class VersionState(msgspec.Struct, frozen=True):
    """The state of one model version in one worker.

    Attributes:
        state: The state.
        generation: The generation that is loaded, or that could not be.
        reason: Why it is not READY at the newest generation.
        tried: The newest generation whose load has ended, well or not; above `generation` where a reload failed and the
            earlier generation serves on.
        executed_hash: The hash of what is executed, of a version that is READY: of its files and those beside the
            versions, and of inputs, outputs, parameters, backend and optimisation of the configuration. Empty = not
            known: the files changed while they were loaded, or an earlier qinfer has loaded them. What the steps of an
            ensemble execute is no part of it.
        pinned: The version policy has dropped it, and only pins keep it loaded: no caller gets it who does not name it.
        steps: What an ensemble runs, and the ensembles within it, in order.
        unready: Why the model's own `is_ready` says that it is not ready. It executes requests all the same, as in
            Triton: only checks of its readiness tell it.
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
    """The measurements of a model version by a worker; kept for the time when no worker lives.

    Attributes:
        rps: Requests a second that one worker can execute.
        load_s: Seconds that it took to load.
        best_rps: The highest speed that its observations allow; 0 = not known: they are too few.
    """

    rps: float
    load_s: float = 0.0
    best_rps: float = 0.0


LONG_S = 300.0
"""An execution without a limit counts as late after so many seconds."""


class Executing(msgspec.Struct, frozen=True, array_like=True):
    """Something that an instance has been executing for a while.

    Attributes:
        model: The model.
        version: The version.
        since: When it began, in the broker's time; without the time in called models, and of streams since the last
            response.
        seconds: How long that has been at the heartbeat.
        limit_s: How long it may take; 0 = there is no limit.
        what: `execution`, `warm-up` or `load`.
    """

    model: str
    version: int
    since: float
    seconds: float
    limit_s: float = 0.0
    what: str = "execution"

    @property
    def is_late(self) -> bool:
        """Whether half of its limit is over, or `LONG_S` where it has none."""
        return self.seconds >= (self.limit_s / 2 or LONG_S)

    @property
    def text(self) -> str:
        """What lasts, since when, and what its limit is, for people."""
        since = datetime.fromtimestamp(self.since, UTC).strftime("%H:%M:%S")
        limit = f"limit {self.limit_s:g} s" if self.limit_s else "no limit"
        return f"{self.model} {self.version}: {self.what} since {since} UTC, for {self.seconds:.0f} s ({limit})"


class WorkerRecord(msgspec.Struct, frozen=True, kw_only=True):
    """One worker's heartbeat.

    Attributes:
        id: Unique for each start of a worker.
        started_at: Seconds since the epoch, in the broker's time.
        device: Its device, such as `cpu`.
        models: Model → version → state.
        executing: Requests in its batches now.
        throughput_rps: Requests a second over the last heartbeats.
        clock_offset_s: Broker time minus its wall clock.
        frame_versions: Frame versions it can read.
        speeds: Model → version → requests a second that it can execute; left out where nothing was measured.
        best_speeds: Model → version → the highest speed that its observations allow; left out where they are too few.
        places: Globs of the models that it loads.
        busy: Model → version → requests that its instances execute now; left out where there are none.
        direct: Model → version → requests in its batchers that are in no lane, from ensembles and models here, and
            steps of sequences; left out where there are none.
        load_s: Model → version → seconds that its last load took.
        host: The name of its machine or container.
        draining: It was asked to stop, and finishes the requests that it has taken.
        renewals: Leases that it has renewed, each time.
        leases_lost: Leases that it has lost.
        cpu_s: CPU time of it and what it started; 0 = not known, as the next one.
        memory_bytes: Resident memory of it and what it started.
        gpus: What its GPUs use, where they can be asked.
        memory: Model → version → memory that its instances hold; left out where it was not measured.
        long: What has been executing for more than a second, by instance.
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

    def lacks(self, *, strict: bool) -> str:
        """Returns the reason why this worker is not ready; empty = it is. `strict` counts failed models too."""
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

    def state_of(self, model: str, version: int) -> VersionState | None:
        """Returns the state of a version in this worker; `None` when it reports none."""
        return self.models.get(model, {}).get(version)

    def is_ready(self, model: str, version: int) -> bool:
        """Tells whether this worker has a version READY, of whatever generation."""
        state = self.state_of(model, version)
        return state is not None and state.state is State.READY

    @property
    def late(self) -> list[Executing]:
        """The executions that are late."""
        return [one for one in self.long if one.is_late]

    def serves(self, model: str) -> bool:
        """Tells whether this worker has any version of a model READY."""
        return any(state.state is State.READY for state in self.models.get(model, {}).values())


class ScalerRecord(msgspec.Struct, frozen=True, kw_only=True):
    """The last observation and decision of an autoscaler of workers.

    Attributes:
        id: Unique for each start of an autoscaler.
        host: The name of its machine or container.
        places: Globs of the models that its workers load.
        min_workers: The fewest workers that it may have.
        max_workers: The most.
        target: How many it is to have: of those that all of these models are to have, its share.
        reason: Why it is that many in all, for people.
        live: Workers of its own that serve.
        starting: Those that were started and do not serve yet.
        draining: Those that end what they have in hand.
        work_s: Seconds that one worker would need for all that waits and executes.
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
"""Counters of autoscalers: decisions for more workers and for fewer, restarts after a crash, kills after a drain."""
